"""One reading gives what an extraction with each scorer and normalisation gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from brute_force import engine

from pcdlab.errors import ParameterError
from pcdlab.schema import Field, Schema
from pcdlab.studies.readings import read_lines

TEXTS = ["The quick brown fox.", "", "Please call 555-0199!", "12:30"]
LABELS = {
    "few": ("DELIVER", "DELIVER_WITH_WARNING", "BLOCK", None),
    "many": tuple(f"{a}{b}{c}" for a in "abc" for b in ("x", "xy", "1", "z9") for c in ("", "-", " end")),
}
SCHEMA = Schema((Field("few", LABELS["few"], "How"), Field("risk", (True, False)), Field("many", LABELS["many"])))
WAYS = [("marginal", "sum"), ("exact", "sum"), ("walk", "sum"), ("hybrid", "sum"), ("auto", "sum")]
WAYS += [(scorer, way) for scorer in ("marginal", "exact") for way in ("length", "unconditional")]


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize(("scorer", "normalise"), WAYS)
def test_every_way_is_the_engines(name: str, scorer: Any, normalise: Any) -> None:
    this = engine("characters")
    alone = Schema((SCHEMA[name],))
    reading = read_lines(this, alone, name, TEXTS)
    found = reading.decisions(scorer, normalise)
    assert len(found) == len(TEXTS)
    for text, decision in zip(TEXTS, found, strict=True):
        expected = this.extract(text, alone, scorer=scorer, normalise=normalise).fields[name]
        assert (decision.value, decision.method) == (expected.value, expected.method)
        assert list(decision.log_probs) == list(expected.log_probs)
        ours, theirs = ([d.probability, *d.log_probs.values()] for d in (decision, expected))
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    if scorer in ("marginal", "exact"):
        rows = [list(decision.log_probs.values()) for decision in found]
        np.testing.assert_allclose(reading.scores(scorer, normalise), rows, atol=1e-9)


def test_no_documents() -> None:
    assert read_lines(engine("characters"), SCHEMA, "few", []).decisions("exact") == []


def test_the_other_fields_stay_in_the_catalogue() -> None:
    this = engine("characters")
    reading = read_lines(this, SCHEMA, "few", TEXTS[:1])
    (found,) = reading.decisions("exact")
    expected = this.extract(TEXTS[0], SCHEMA, scorer="exact").fields["few"]
    np.testing.assert_allclose(list(found.log_probs.values()), list(expected.log_probs.values()), atol=2e-4)
    item = this.compile(SCHEMA).fields["few"]
    assert reading.tokens.tolist() == [len(spelling.tokens) for spelling in item.canonical]


def test_what_does_not_go_together_is_refused() -> None:
    this = engine("characters")
    reading = read_lines(this, Schema((SCHEMA["few"],)), "few", TEXTS[:1])
    with pytest.raises(ParameterError, match="needs log-probabilities"):
        reading.decisions("walk", "length")
    with pytest.raises(ParameterError, match="choose 'marginal' or 'exact'"):
        reading.scores("walk")
    with pytest.raises(ParameterError, match="not in the schema, or has one label"):
        read_lines(this, SCHEMA, "other", TEXTS)
