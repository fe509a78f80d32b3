"""The grammar opponent against the engine: what is equal to what, and where a grammar over text parts from both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from brute_force import engine
from hypothesis import given, settings
from hypothesis import strategies as st

from pcdlab import Engine, load_preset
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import Step, generate, judge, schema_lines
from pcdlab.baselines.same_answers import decide_after
from pcdlab.errors import TokenizationError
from pcdlab.schema import Field, Schema

DOCUMENT = "Dear customer, your order 4711 has been declined.\nPlease call 555-0199!"
SCHEMA = Schema(
    (
        Field("risk_tier", ("LOW", "HIGH", "MEDIUM"), "Calculated risk tier"),
        Field("version", ("1.0",)),
        Field("urgent", (True, False)),
        Field("track", ("DELIVER", "DELIVER_WITH_WARNING", "BLOCK", None, 'say "no"\\', "größer 🙂 {}", "\t\x01")),
    )
)
# Newline last and first, whole words, SentencePiece with and without a space in front, Unigram, one token per byte.
TOKENIZERS = ["qwen", "gpt2", "smollm", "llama3", "llama2", "mistral", "gemma", "unigram", "bytes"]
REFUSED = ["wordpiece", "characters", "flags"]  # no bytes behind their tokens, or text is changed before it is cut


def matcher(name: str, schema: Schema = SCHEMA) -> Any:
    this = engine(name)
    return grammar_matcher(this.compile(schema), grammar_tokenizer(this.codec, this.backend.vocabulary))


def write(this: Engine, schema: Schema, document: str, rule: Any, together: bool) -> tuple[str, list[Step]]:
    compiled = this.compile(schema)
    ids = compiled.prompt.ids(document)
    steps = list(generate(this.backend, None, ids, rule, together))
    # Behind the prompt, as some tokenizers drop the space in front of the first token they decode.
    written = this.codec.decode([*ids, *(step.token for step in steps)])[len(this.codec.decode(ids)) :]
    return compiled.prompt.opening + written, steps


def as_lines(this: Engine, schema: Schema, values: dict[str, Any]) -> str:
    compiled = this.compile(schema)
    lines = (compiled.format.line(field.name, field.json(values[field.name])) for field in schema)
    return compiled.prompt.opening + "".join(lines)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_joint_mode_with_walk_writes_the_grammars_object_byte_for_byte(name: str, together: bool) -> None:
    this = engine(name)
    rule = own_tokens(grammar_lines(matcher(name), False), this.compile(SCHEMA))
    text, steps = write(this, SCHEMA, DOCUMENT, rule, together)
    values = this.extract(DOCUMENT, SCHEMA, mode="joint", scorer="walk").values
    assert text == as_lines(this, SCHEMA, values)
    choices = sum(step.allowed > 1 for step in steps if step.allowed)
    assert sum(step.logits is not None for step in steps) == (choices if together else len(steps))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_given_the_same_answers_every_field_is_the_walks(name: str) -> None:
    this, compiled = engine(name), engine(name).compile(SCHEMA)
    for rule in (own_tokens(grammar_lines(matcher(name), False), compiled), schema_lines(compiled)):
        values = judge(write(this, SCHEMA, DOCUMENT, rule, True)[0], SCHEMA).values
        walked = decide_after(this.backend, compiled, compiled.prompt.ids(DOCUMENT), values)
        assert {name: decision.value for name, decision in walked.items()} == {n: values[n] for n in walked}
        assert walked.keys() == set(SCHEMA.names) - {"version"}


def test_the_comparison_sees_other_answers_in_front() -> None:
    """If decisions did not depend on the answers before them, the tests above would prove little."""
    this, compiled = engine("qwen"), engine("qwen").compile(SCHEMA)
    ids = compiled.prompt.ids(DOCUMENT)
    shares = [
        decide_after(this.backend, compiled, ids, {"risk_tier": tier, "version": "1.0", "urgent": True, "track": None})
        for tier in ("LOW", "HIGH")
    ]
    assert shares[0]["risk_tier"].probability == pytest.approx(shares[1]["risk_tier"].probability, abs=1e-6)
    assert abs(shares[0]["track"].probability - shares[1]["track"].probability) > 1e-4


@pytest.mark.parametrize("name", TOKENIZERS)
def test_own_tokens_of_the_grammar_are_the_tries(name: str) -> None:
    """At every step on random ways through the object, the grammar allows the tokenizer's own tokens, all of them."""
    compiled, parser = engine(name).compile(SCHEMA), matcher(name)

    @settings(max_examples=10, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        restricted, tries = own_tokens(grammar_lines(parser, False), compiled), schema_lines(compiled)
        allowed, expected = next(restricted), next(tries)
        while True:
            assert set(map(int, allowed)) == set(expected)
            token = data.draw(st.sampled_from(sorted(expected)))
            try:
                expected = tries.send(token)
            except StopIteration:
                with pytest.raises(StopIteration):
                    restricted.send(token)
                return
            allowed = restricted.send(token)

    check()


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_grammar_writes_objects_of_the_schema(name: str, fast_forward: bool) -> None:
    this = engine(name)
    text, steps = write(this, SCHEMA, DOCUMENT, grammar_lines(matcher(name), fast_forward), fast_forward)
    found = judge(text, SCHEMA)
    assert found.valid
    assert text == as_lines(this, SCHEMA, found.values)
    if fast_forward:
        assert sum(step.logits is not None for step in steps) < len(steps) / 2
    else:
        assert all(step.logits is not None for step in steps)


def test_a_grammar_over_text_lets_words_be_cut_otherwise() -> None:
    """What `own_tokens` is for: a piece of a label's token is allowed too, and a model may like it better."""
    compiled = engine("qwen").compile(SCHEMA)
    parser = matcher("qwen")
    codec = engine("qwen").codec
    rule, tries = grammar_lines(parser, False), schema_lines(compiled)
    text, own = next(rule), next(tries)
    while len(own) == 1:
        assert set(own) <= set(map(int, text))
        text, own = rule.send(*own), tries.send(*own)
    more = {codec.decode([int(token)]) for token in text} - {codec.decode([token]) for token in own}
    assert more
    assert all(any(label.startswith(piece.strip('" ')) for label in ("LOW", "HIGH", "MEDIUM")) for piece in more)


def test_matchers_are_not_used_up() -> None:
    parser = matcher("gpt2")
    this, compiled = engine("gpt2"), engine("gpt2").compile(SCHEMA)
    texts = {
        write(this, SCHEMA, DOCUMENT, own_tokens(grammar_lines(parser, False), compiled), True)[0] for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_a_grammar_cannot_follow_are_refused(name: str) -> None:
    with pytest.raises(TokenizationError, match="leave the grammar baselines out"):
        matcher(name)


def test_on_a_preset_with_the_embedded_model() -> None:
    this = Engine.load("smollm2-135m", dtype="float32")
    preset = load_preset("talk_routing")
    compiled = this.compile(preset.schema)
    parser = grammar_matcher(compiled, grammar_tokenizer(this.codec, this.backend.vocabulary))
    rule = own_tokens(grammar_lines(parser, False), compiled)
    text, _ = write(this, preset.schema, preset.context, rule, True)
    out = this.extract(preset.context, preset.schema, mode="joint", scorer="walk")
    assert text == as_lines(this, preset.schema, out.values)
    ids = compiled.prompt.ids(preset.context)
    walked = decide_after(this.backend, compiled, ids, out.values)
    assert {name: decision.value for name, decision in walked.items()} == out.values


# --- judging ----------------------------------------------------------------------------------------------------------


def judged(given: Any) -> Any:
    return judge(given if isinstance(given, str) else json.dumps(given), SCHEMA)


def test_judging_is_strict() -> None:
    good = {"risk_tier": "LOW", "version": "1.0", "urgent": True, "track": None}
    assert judged(good).valid
    assert judged(good).values == good
    wrong = judged({"risk_tier": "Low", "version": 1.0, "urgent": 1, "track": ["BLOCK"], "note": "x"})
    assert (wrong.values, wrong.missing, wrong.extra) == ({}, (), ("note",))
    assert wrong.invented == {"risk_tier": "Low", "version": 1.0, "urgent": 1, "track": ["BLOCK"]}
    assert not judged({**good, "note": 1}).valid
    assert judged({"urgent": "true"}).invented == {"urgent": "true"}
    assert judged({"urgent": False}).missing == ("risk_tier", "version", "track")
    assert not judged({"urgent": False}).valid


@pytest.mark.parametrize("text", ["", "I cannot help with that.", "[1]", '{"urgent": tr'])
def test_what_is_no_object_is_no_answer(text: str) -> None:
    found = judged(text)
    assert not found.parsed
    assert not found.valid
    assert found.missing == tuple(SCHEMA.names)
