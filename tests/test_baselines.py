"""Token by token: the same numbers as plain forward passes, the same object as joint mode's walk."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from brute_force import engine
from hypothesis import given, settings
from hypothesis import strategies as st

from pcdlab.baselines.json_stream import Step, anything, generate, next_log_probs, read_object, schema_lines
from pcdlab.schema import Field, Schema

DOCUMENT = "Dear customer, your order 4711 has been declined.\nPlease call 555-0199!"
SCHEMA = Schema(
    (
        Field("risk_tier", ("LOW", "HIGH", "MEDIUM"), "Calculated risk tier"),
        Field("version", ("1.0",)),
        Field("urgent", (True, False)),
        Field("track", ("DELIVER", "DELIVER_WITH_WARNING", "BLOCK", None)),
    )
)
TOKENIZERS = ["qwen", "gpt2", "llama2", "bytes"]  # newline last, newline first, SentencePiece, one token per byte


def prepared(name: str, document: str = DOCUMENT) -> tuple[Any, Any, list[int], list[int]]:
    """Engine, compiled schema, and a prompt as head and rest."""
    compiled = engine(name).compile(SCHEMA)
    ids = compiled.prompt.ids(document)
    cut = len(compiled.prompt.head)
    assert tuple(ids[:cut]) == compiled.prompt.head
    return engine(name), compiled, ids[:cut], ids[cut:]


def write(name: str, document: str = DOCUMENT, together: bool = False) -> list[Step]:
    this, compiled, head, rest = prepared(name, document)
    return list(generate(this.backend, this.backend.prefill(head), rest, schema_lines(compiled), together))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_object_is_that_of_joint_mode(name: str, together: bool) -> None:
    this, compiled, _, _ = prepared(name)
    steps = write(name, together=together)
    text = compiled.prompt.opening + this.codec.decode([step.token for step in steps])
    assert read_object(text) == this.extract(DOCUMENT, SCHEMA, mode="joint", scorer="walk").values


@settings(max_examples=10, deadline=None)
@given(st.text(max_size=30))
def test_on_any_document(tail: str) -> None:
    document = f"Document {tail.encode('utf-8', 'ignore').decode()}"
    this, compiled, _, _ = prepared("gpt2", document)
    text = compiled.prompt.opening + this.codec.decode([step.token for step in write("gpt2", document)])
    assert read_object(text) == this.extract(document, SCHEMA, mode="joint", scorer="walk").values


@pytest.mark.parametrize("name", TOKENIZERS)
def test_steps_say_what_plain_passes_say(name: str) -> None:
    this, _, head, rest = prepared(name)
    steps = write(name)
    tokens = [step.token for step in steps]
    for i in [0, len(steps) // 2, len(steps) - 1]:
        plain = next_log_probs(this.backend, [*head, *rest, *tokens[:i]])
        assert steps[i].probability == pytest.approx(math.exp(plain[tokens[i]]), abs=1e-5)
        assert steps[i].entropy == pytest.approx(-(np.exp(plain) * plain).sum() / math.log(2), abs=1e-4)


def test_what_each_way_costs() -> None:
    this, _, _, _ = prepared("qwen")
    meter = this.backend.meter
    costs = {}
    for together in (False, True):
        passes = meter.forward_passes
        steps = write("qwen", together=together)
        choices = sum(step.allowed > 1 for step in steps if step.allowed)
        costs[together] = (meter.forward_passes - passes - 2, [step.token for step in steps])  # head and prompt
        assert costs[together][0] == (choices if together else len(steps))
        asked = [step.logits is not None for step in steps]
        assert asked == [not together or step.allowed != 1 for step in steps]
        assert all(math.isnan(s.probability) and math.isnan(s.entropy) for s in steps if s.logits is None)
    assert costs[False][1] == costs[True][1]


def test_free_writing_takes_the_most_probable_token_until_it_is_told_to_stop() -> None:
    this, _, head, rest = prepared("qwen")
    prefix = this.backend.prefill(head)
    free = [step.token for step in generate(this.backend, prefix, rest, anything((), limit=6))]
    assert len(free) == 6
    for i, token in enumerate(free):
        assert token == int(next_log_probs(this.backend, [*head, *rest, *free[:i]]).argmax())
    stop = free[3]
    stopped = [step.token for step in generate(this.backend, prefix, rest, anything({stop}, limit=6))]
    assert stopped == free[: free.index(stop) + 1]
    assert not list(generate(this.backend, prefix, rest, anything((), limit=0)))


def test_a_prompt_of_one_token_and_no_prefix() -> None:
    this, _, _, _ = prepared("qwen")
    step = next(generate(this.backend, None, [5, 7], anything((), limit=1)))
    assert step.allowed is None
    prefix = this.backend.prefill([5])
    again = next(generate(this.backend, prefix, [7], anything((), limit=1)))
    assert step.token == again.token
    assert step.probability == pytest.approx(again.probability, abs=1e-6)


def test_a_backend_without_plain_passes_feeds_a_stream() -> None:
    backend = prepared("qwen")[0].backend
    bare: Any = SimpleNamespace(prefill=backend.prefill, stream=backend.stream)
    np.testing.assert_allclose(next_log_probs(bare, [5, 7, 9]), next_log_probs(backend, [5, 7, 9]), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": true}', {"a": True}),
        ('{\n  "a": 1,\n  "b": null,\n', {"a": 1, "b": None}),
        ('{\n  "a": 1,\n', {"a": 1}),
        (' {"a": "}"} and more {', {"a": "}"}),
        ("{", {}),
        ("{}", {}),
        ('{"a": {"b": 1', None),
        ('{"a": tr', None),
        ("[1]", None),
        ("", None),
    ],
)
def test_reading_what_was_written(text: str, found: dict[str, Any] | None) -> None:
    assert read_object(text) == found
