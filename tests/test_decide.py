"""Every scorer, normalisation and kind of model gives the numbers that plain forward passes give."""

from __future__ import annotations

import json
import math

import pytest
from brute_force import as_json, assert_extraction, brute_force, engine, fresh_engine, log_probs_from, own_ids
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_zoo import NAMES

from pcdlab.decide import FEW, MARGINAL_UP_TO
from pcdlab.errors import ParameterError
from pcdlab.schema import Field, Label, Schema

DOCUMENT = "Dear customer, your order 4711 has been declined.\nPlease call 555-0199!"
SCHEMA = Schema(
    (
        Field("risk_tier", ("LOW", "HIGH", "MEDIUM"), "Calculated risk tier"),
        Field("urgent", (True, False)),
        Field("track", ("DELIVER", "DELIVER_WITH_WARNING", "DELIVER_WITH", "DENY", "BLOCK")),
        Field("größe", ("ß", "a\\b", '6"', "{}", "two\nlines", " x", "🙂", "中文", None, 3, 1.5, True)),
    )
)
ODD_LABELS = (
    "Yes",
    "yes",
    "YES",
    "yes!",
    "ye",
    "y",
    '"',
    '""',
    "\\",
    "\\\\",
    "{",
    "},",
    ",\n",
    "\n",
    "\t",
    " ",
    "  a",
    "a",
)
OPTIONS = [
    *(("marginal", n) for n in ("sum", "length", "unconditional")),
    *(("exact", n) for n in ("sum", "length", "unconditional")),
    *((s, "sum") for s in ("auto", "walk", "hybrid")),
]


def check(
    name: str,
    schema: Schema,
    scorer: str = "auto",
    normalise: str = "sum",
    kind: str = "llama",
    document: str = DOCUMENT,
) -> None:
    out = engine(name, kind).extract(document, schema, scorer=scorer, normalise=normalise)  # type: ignore[arg-type]
    expected = {
        field.name: brute_force(engine(name, kind), name, schema, field.name, document, scorer, normalise)
        for field in schema
        if not field.fixed
    }
    assert_extraction(out, expected, 2e-5 if normalise == "unconditional" else 1e-5)  # a difference of two scores
    assert json.loads(json.dumps(out.values)) == out.values


@pytest.mark.parametrize(("scorer", "normalise"), OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_brute_force_with_every_tokenizer(name: str, scorer: str, normalise: str) -> None:
    if name == "wordpiece":  # it knows no case, no line ends and no emoji
        check(name, Schema(SCHEMA.fields[:3]), scorer, normalise)
    else:
        check(name, SCHEMA, scorer, normalise)


@pytest.mark.parametrize("scorer", ["marginal", "exact", "walk", "hybrid"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", "gemma3", "gpt_oss", "lfm2"])
def test_equals_brute_force_with_every_kind_of_model(kind: str, scorer: str) -> None:
    check("qwen", SCHEMA, scorer, kind=kind)


def many(count: int) -> tuple[str, ...]:
    """Labels with a bushy trie: few first letters, long shared beginnings."""
    return tuple(f"{'AB'[i % 2]}{'xyz'[i % 3]}-code-{i // 6}" for i in range(count))


@pytest.mark.parametrize("name", ["characters", "cl100k"])
@pytest.mark.parametrize("count", [FEW, FEW + 1, MARGINAL_UP_TO, MARGINAL_UP_TO + 1, 60])
def test_many_labels(name: str, count: int) -> None:
    schema = Schema((Field("code", many(count)), Field("urgent", (True, False))))
    for scorer in ("auto", "hybrid", "walk"):
        check(name, schema, scorer)


def test_auto_is_marginal_up_to_32_labels_and_hybrid_above() -> None:
    schema = Schema((Field("some", many(32)), Field("more", many(33))))
    out = engine("characters").extract(DOCUMENT, schema)
    assert (out.fields["some"].method, out.fields["more"].method) == ("marginal", "hybrid")


def test_hybrid_with_few_labels_is_exact() -> None:
    out = engine("characters").extract(DOCUMENT, Schema((Field("a", many(8)),)), scorer="hybrid")
    assert out.fields["a"].method == "exact"
    assert out.stats.forward_passes <= 2


def test_hybrid_looks_twice_only_where_few_labels_are_left() -> None:
    this = engine("characters")
    pairs = tuple(one + other for one in "ab" for other in "abcdef")  # one step of the walk leaves six
    for labels, passes in ((tuple("abcdefghi"), 1), (pairs, 2)):
        schema = Schema((Field("key", labels),))
        this.extract("warm up", schema)
        out = this.extract(DOCUMENT, schema, scorer="hybrid")
        assert (out.fields["key"].method, out.stats.forward_passes) == ("hybrid", passes)


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["marginal", "exact", "walk"])
@pytest.mark.parametrize("name", ["qwen", "gemma", "characters"])
def test_odd_labels(name: str, scorer: str) -> None:
    check(name, Schema((Field("odd", ODD_LABELS), Field("other", ("True", "true", True, None, "null")))), scorer)


def letters(name: str) -> st.SearchStrategy[str]:
    """Characters that meet one another often."""
    plain = 'aAbB "\\{}[],:\n\t'
    # A vocabulary of known characters cannot tell unknown ones apart.
    return st.sampled_from(plain if name == "characters" else plain + "éß🙂👍中ǆİ\u0301\u2028\x7f<|>")


def label_sets(name: str) -> st.SearchStrategy[list[Label]]:
    label = (
        st.text(letters(name), min_size=1, max_size=5)
        | st.sampled_from([True, False, None, 0.5, -3, 12, 120, 1e20, "true", "null", "None", "12", "0.5"])
        | st.sampled_from(["<|im_end|>", "<eos>", "HIGH", "High", "high", "HIGHER", "DELIVER", "DELIVER_WITH_WARNING"])
    )
    return st.lists(label, min_size=2, max_size=7, unique_by=as_json)


@given(st.data(), st.sampled_from(["gemma", "cl100k", "characters", "bytes"]), st.sampled_from(OPTIONS))
@settings(max_examples=40, deadline=None)
def test_any_labels_are_decided_and_survive_json(data: st.DataObject, name: str, options: tuple[str, str]) -> None:
    schema = Schema((Field("key", tuple(data.draw(label_sets(name)))),))
    check(name, schema, *options)
    out = engine(name).extract(DOCUMENT, schema, scorer="exact")
    assert as_json(json.loads(as_json(out.values["key"]))) == as_json(out.values["key"])
    json.dumps(out.to_dict(), allow_nan=False)


@given(st.text(min_size=1, max_size=12).filter(lambda text: text.isascii()), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
@example("", 0)
def test_any_document(document: str, seed: int) -> None:
    check("bytes", Schema((Field("key", many(4 + seed)),)), "auto", document=document)


# --- what the numbers mean --------------------------------------------------------------------------------------------


def test_a_worked_example() -> None:
    """`high` parts from `HIGH` and `LOW` where those part from one another; `High` goes the way of `HIGH`."""
    name, schema = "characters", Schema((Field("tier", ("HIGH", "LOW")),))
    prompt = engine(name).prompt(schema).text(DOCUMENT)
    log_probs = log_probs_from(engine(name).backend, tuple(own_ids(name, prompt + '  "tier": "')), 0)[-1]
    p = {letter: math.exp(log_probs[own_ids(name, letter)[0]]) for letter in "HhLl"}
    decision = engine(name).extract(DOCUMENT, schema, scorer="marginal").fields["tier"]
    high, low = p["H"] + p["h"], p["L"] + p["l"]
    assert decision.log_probs["HIGH"] == pytest.approx(math.log(high), abs=1e-5)
    assert decision.log_probs["LOW"] == pytest.approx(math.log(low), abs=1e-5)
    assert decision.candidate_mass == pytest.approx(high + low, abs=1e-5)
    assert decision.probability == pytest.approx(max(high, low) / (high + low), abs=1e-5)
    walk = engine(name).extract(DOCUMENT, schema, scorer="walk").fields["tier"]
    assert walk.log_probs["HIGH"] == pytest.approx(math.log(p["H"] / (p["H"] + p["L"])), abs=1e-5)


def test_scores_are_log_probabilities() -> None:
    out = engine("qwen").extract(DOCUMENT, SCHEMA, scorer="exact")
    for decision in out.fields.values():
        assert all(value <= 0 for value in decision.log_probs.values())
        assert decision.candidate_mass is not None
        assert 0 <= sum(math.exp(v) for v in decision.log_probs.values()) <= decision.candidate_mass <= 1


# --- bad options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scorer": "greedy"}, "scorer='greedy' is unknown; choose one of auto, marginal, exact, walk, hybrid"),
        ({"normalise": "mean"}, "normalise='mean' is unknown; choose one of sum, length, unconditional"),
        ({"mode": "together"}, "mode='together' is unknown"),
        (
            {"scorer": "walk", "normalise": "length"},
            "normalise: length.*the scorer walk does not give.*choose the scorer marginal or exact",
        ),
    ],
)
def test_unknown_options(options: dict[str, str], message: str) -> None:
    fresh = fresh_engine("qwen")
    with pytest.raises(ParameterError, match=message):
        fresh.extract(DOCUMENT, SCHEMA, **options)  # type: ignore[arg-type]


def test_normalising_is_refused_only_where_a_field_has_no_label_scores() -> None:
    names = ("good", "area", "zone", "code")
    long = [Field(name, many(33)) for name in names]
    few = Field("risk", ("LOW", "MEDIUM", "HIGH"))
    fresh = fresh_engine("qwen")
    for scorer in ("auto", "hybrid"):  # marginal and exact for three labels
        fresh.extract(DOCUMENT, Schema((few,)), normalise="length", scorer=scorer)
        with pytest.raises(ParameterError, match=rf"the scorer hybrid .* \(fields decided by it: {', '.join(names)}\)"):
            fresh.extract(DOCUMENT, Schema((few, *long)), normalise="length", scorer=scorer)
