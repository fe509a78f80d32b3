"""One model, end to end: whether its backend keeps the contract, and decisions on it are the numbers they claim to be.

Runs the conformance checks, then takes a schema whose labels collide through the whole engine and computes its scores a
second way. Knows the engine and streams; knows no framework and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from pcdlab.backends.base import Backend
from pcdlab.backends.conformance import Check, check_backend, log_softmax
from pcdlab.decide import Scorer
from pcdlab.engine import Engine
from pcdlab.schema import Schema
from pcdlab.tokenizer import Codec, Piece

__all__ = ["DOCUMENT", "SCHEMA", "check_extraction", "check_model"]

Report = Callable[[str], None]

DOCUMENT = "Parcel 4711 is at the depot. The label is damaged; the driver asks whether to hand it over all the same."

# Labels that are beginnings of one another, that share their first tokens, that differ in case alone.
SCHEMA = Schema.from_dict(
    {
        "action": {"type": "enum", "choices": ["DELIVER", "DELIVER_WITH_WARNING", "DELIVERY_REFUSED", "HOLD"]},
        "state": {"type": "enum", "choices": ["damaged", "Damaged", "DAMAGED", "damage"]},
        "reason": {"type": "enum", "choices": ["label", "label unreadable", "label missing", 'no "label"']},
        "urgent": {"type": "boolean"},
    }
)

EXACT = {"float32": 2e-3}  # largest difference of a line's score, per token
EXACT_LOW_PRECISION = 0.2
SHARES = 1e-9


def check_model(backend: Backend, codec: Codec, report: Report = lambda line: None) -> list[Check]:
    """Run the conformance checks and those of :func:`check_extraction`.

    Parameters
    ----------
    backend : Backend
    codec : Codec
        The model's tokenizer.
    report : callable
        Told about each check before it runs.
    """
    return [*check_backend(backend, report=report), *check_extraction(Engine(backend, codec), report)]


def check_extraction(engine: Engine, report: Report = lambda line: None) -> list[Check]:
    """Put a schema with colliding labels through the engine, every scorer once.

    Parameters
    ----------
    engine : Engine
    report : callable
        Told about each check before it runs.

    Returns
    -------
    list of Check
        ``labels in place``: lines whose tokens are not those the tokenizer gives for the whole text. ``scorers``: distance
        of a field's shares from 1. ``exact scores``: the scores of whole lines against a stream that is fed the prompt and
        each line, per token; where a 16-bit format rounds, unlikely tokens move by tenths, so the limit is wide there.
    """
    exact_limit = EXACT.get(engine.backend.dtype, EXACT_LOW_PRECISION)
    checks: tuple[tuple[str, str, float, Callable[[Engine], Iterator[float]]], ...] = (
        (
            "labels in place",
            "lines of colliding labels against the tokenizer's encoding of the whole text",
            0,
            _in_place,
        ),
        ("scorers", "the shares of a field's labels against 1, by every scorer", SHARES, _shares),
        ("exact scores", "the engine's scores of whole lines against a stream's, per token", exact_limit, _exact),
    )
    found = []
    for name, compared, limit, run in checks:
        report(f"extraction: {name}")
        largest, note = np.inf, ""
        try:
            largest = float(np.max(list(run(engine))))  # unlike max, it does not lose a NaN
        except Exception as error:  # a model that cannot be asked is a finding, not an end
            note = f"{type(error).__name__}: {error}"
        found.append(Check(name, compared, largest, limit, largest <= limit, note))
    return found


def _in_place(engine: Engine) -> Iterator[float]:
    compiled, codec = engine.compile(SCHEMA), engine.codec
    prompt = compiled.prompt.ids(DOCUMENT)
    wrong = 0
    for field in compiled:
        for label, value in enumerate(field.field.labels):
            text = compiled.format.line(field.field.name, field.field.json(value))
            wrong += codec.encode([*compiled.prompt.pieces(DOCUMENT), Piece(text, False)]) != [
                *prompt,
                *field.line(label),
            ]
    yield float(wrong)


def _shares(engine: Engine) -> Iterator[float]:
    for scorer in get_args(Scorer):
        for decision in engine.extract(DOCUMENT, SCHEMA, scorer=scorer).fields.values():
            yield abs(decision.probability + sum(share for _, share in decision.alternatives) - 1.0)


def _exact(engine: Engine) -> Iterator[float]:
    compiled = engine.compile(SCHEMA)
    prefix = engine.backend.prefill(compiled.prompt.ids(DOCUMENT))
    out = engine.extract(DOCUMENT, SCHEMA, scorer="exact")
    for field in compiled:
        scores = out.fields[field.field.name].log_probs
        for label, value in enumerate(field.field.labels):
            line = field.line(label)
            rows = log_softmax(engine.backend.stream(prefix).feed(line))
            # The row of a token says what comes next, so each label token stands in the row before its own.
            decided = range(len(field.branch), len(line))
            yield abs(scores[value] - sum(rows[i - 1, line[i]] for i in decided)) / len(decided)
