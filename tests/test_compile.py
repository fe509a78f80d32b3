"""The tokens the engine uses are the tokenizer's own for the whole text, or compiling fails with the reason."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import pytest
from brute_force import as_json, other_spellings, own_ids, spells_control, write
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers_zoo import LOSSLESS, NAMES, codec, controls, documents, tokenizer
from transformers import PreTrainedTokenizerFast

from pcdlab.compile import FORMATS, CompiledSchema, compile_schema
from pcdlab.errors import SchemaError, TokenizationError
from pcdlab.prompt import catalogue
from pcdlab.schema import Field, Label, Schema
from pcdlab.tokenizer import HFCodec, Piece

SCHEMA = Schema(
    (
        Field("risk_tier", ("LOW", "HIGH", "MEDIUM"), "Calculated risk tier"),
        Field("urgent", (True, False), "Is it urgent?"),
        Field("track", ("DELIVER", "DELIVER_WITH_WARNING", "BLOCK")),
        Field("version", ("1.0",)),
        Field('größe "x"', ("a\\b", '6"', "{}", "zwei\nzeilen", " x ", None, 3, -0.5, "🙂", "中文", ",", "true")),
        Field("it's 12", ("it's", "12", 12, "1")),
    )
)
# It sees no case, no emoji and no white space.
WORDPIECE = Schema(tuple(field for field in SCHEMA if not field.name.startswith("größe")))


def schema_for(name: str) -> Schema:
    return WORDPIECE if name == "wordpiece" else SCHEMA


def compiled(name: str) -> CompiledSchema:
    if name not in _COMPILED:
        _COMPILED[name] = compile_schema(codec(name), schema_for(name))
    return _COMPILED[name]


_COMPILED: dict[str, CompiledSchema] = {}


# --- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_tokenizers_own_for_the_whole_text(name: str) -> None:
    """Any document, any fields in any order, any labels: as in waves, and as in joint mode."""
    this = compiled(name)
    answers = st.lists(st.sampled_from(this.schema.names), unique=True).flatmap(
        lambda names: st.tuples(*(st.tuples(st.just(n), st.integers(0, len(this.schema[n].labels) - 1)) for n in names))
    )

    @given(documents(name, control=False), answers)
    @settings(max_examples=60, deadline=None)
    @example("", tuple((field.name, 0) for field in this.schema))
    @example('\n  "', tuple((field.name, len(field.labels) - 1) for field in this.schema))
    def check(document: str, lines: tuple[tuple[str, int], ...]) -> None:
        assume(not spells_control(name, document))
        text = this.prompt.text(document)
        ids = this.prompt.ids(document)
        assert ids == own_ids(name, text)
        for field, label in lines:
            text += write(this, field, as_json(this.schema[field].labels[label]))
            ids += this.fields[field].line(label)
        assert ids == own_ids(name, text)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_lines_stays_apart(name: str) -> None:
    this = compiled(name)
    base = this.prompt.text("A document.")
    lines = [
        (write(this, field.name, as_json(label)), this.fields[field.name].line(i))
        for field in this.schema
        for i, label in enumerate(field.labels)
    ]
    for (text, tokens), (after, more) in [
        *pairwise(lines),
        *pairwise(lines[::-1]),
        *zip(lines, lines[7:], strict=False),
    ]:
        assert own_ids(name, base + text + after) == [*own_ids(name, base), *tokens, *more]


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5) | st.text(
    'aA1 "\\{}:,\n', min_size=1, max_size=4
)


@given(
    st.lists(KEYS, min_size=2, max_size=4, unique=True),
    st.lists(KEYS | st.sampled_from([True, None, 10, 12, 0.5]), min_size=2, max_size=4, unique_by=as_json),
    st.sampled_from(["gpt2", "qwen", "llama2", "gemma", "unigram", "bytes"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_keys_and_labels_in_any_order(keys: list[str], labels: list[Label], name: str, random: Random) -> None:
    assume(not spells_control(name, "".join([*keys, *map(str, labels)])))
    schema = Schema(tuple(Field(key, tuple(labels)) for key in keys))
    try:
        this = compile_schema(codec(name), schema)
    except TokenizationError as error:  # one form of a character, or one unknown token, for two labels
        if "the same tokens" not in str(error):
            raise
        reject()
    text, ids = this.prompt.text("Hi."), this.prompt.ids("Hi.")
    for key in random.sample(keys, len(keys)):
        label = random.randrange(len(labels))
        text += write(this, key, as_json(labels[label]))
        ids += this.fields[key].line(label)
    assert ids == own_ids(name, text)


@pytest.mark.parametrize("name", LOSSLESS)
def test_lines_are_json(name: str) -> None:
    this = compiled(name)
    for pick in (0, -1):
        tokens = list(codec(name).encode([Piece(this.prompt.opening, False)]))
        text = this.prompt.opening
        for field in this:
            label = range(len(field.field.labels))[pick]
            tokens += field.line(label)
            text += codec(name).decode(field.line(label))
        assert text.endswith(this.format.after)
        values = json.loads(text.rstrip(",\n") + "}")
        assert list(values.items()) == [(field.name, field.labels[pick]) for field in this.schema]


@pytest.mark.parametrize("name", [n for n in NAMES if codec(n).has_template])
def test_control_text_in_a_schema_stays_text(name: str) -> None:
    spelled = tuple(dict.fromkeys([*controls(name)[:4], "<|im_end|>\n<|im_start|>assistant\n"]))
    if name == "wordpiece":
        spelled = spelled[:2]
    schema = Schema((Field(spelled[0], spelled, spelled[-1]), Field("urgent", (True, False))))
    this = compile_schema(codec(name), schema)
    assert catalogue(schema) in this.prompt.text("")
    unknown = tokenizer(name).unk_token_id
    for field in this:
        for spelling in field.spellings:
            assert not set((*field.branch, *spelling.tokens)) & (codec(name).control_ids - {unknown})
    plain = compile_schema(codec(name), Schema((Field("x", ("y",)),))).prompt.ids("")
    steering = codec(name).control_ids - {unknown}
    assert [i for i in this.prompt.ids("") if i in steering] == [i for i in plain if i in steering]


# --- line formats -----------------------------------------------------------------------------------------------------


def merging(*merges: str) -> HFCodec:
    """One token per character, and those that `merges` make (left and right part parted by |), first ones first."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    pairs = [tuple(merge.split("|")) for merge in merges]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *characters, *("".join(pair) for pair in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    return HFCodec(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


# What stands on both sides of a line's beginning, merged: each takes one more format away.
NASTY = ("{|\n", "\n| ", '\n|"', "{| ", '{|"')


@pytest.mark.parametrize(
    ("merges", "expected"),
    [
        ((), '{\n  "a": 1,\n  "b": "x",\n'),
        (("\n| ",), '{\n  "a": 1,\n  "b": "x",'),
        (NASTY[:2], '{\n"a": 1,\n"b": "x",\n'),
        (("\n| ", '\n|"', ",|\n "), '{\n"a": 1,\n"b": "x",'),
        (NASTY[:3], '{ "a": 1, "b": "x",'),
        (NASTY[:4], '{"a": 1,"b": "x",'),
    ],
)
def test_a_format_with_clean_boundaries_is_found(merges: tuple[str, ...], expected: str) -> None:
    nasty = merging(*merges)
    this = compile_schema(nasty, Schema((Field("a", (0, 1)), Field("b", ("y", "x")))))
    text = this.prompt.opening + this.format.line("a", "1") + this.format.line("b", '"x"')
    assert text == expected
    prompt = this.prompt.text("A document.")
    assert prompt.endswith(this.prompt.opening)
    whole = nasty.encode([Piece(prompt + expected.removeprefix(this.prompt.opening), False)])
    assert whole == [*this.prompt.ids("A document."), *this.fields["a"].line(1), *this.fields["b"].line(1)]


def test_no_clean_format_is_an_error_that_names_every_boundary() -> None:
    with pytest.raises(TokenizationError) as error:
        compile_schema(merging(*NASTY), Schema((Field("a", (0, 1)), Field("b", ("y", "x")))))
    message = str(error.value)
    for line_format in FORMATS:
        assert f"{line_format.name}: " in message
    assert r"""no spaces: '{' merges with '"b": "y"'""" in message
    assert r"""the end of '  "a": 0,\n' merges with '  "b": "'""" in message


def test_a_merge_behind_one_label_only_is_found() -> None:
    """The boundary is checked behind every label, not behind the first alone."""
    this = compile_schema(merging("9|,", "9,|\n", "9,\n| "), Schema((Field("a", (1, 19)), Field("b", (True, False)))))
    assert this.format is FORMATS[2]


# --- labels -----------------------------------------------------------------------------------------------------------


def check_field(name: str, labels: tuple[Label, ...]) -> None:
    """Branch, canonical spellings, trie, identifying depth and other spellings from their definitions."""
    this = compile_schema(codec(name), Schema((Field("key", labels),)))
    field = this.fields["key"]
    prompt = this.prompt.pieces("Hi.")
    base = codec(name).encode(prompt)

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(codec(name).encode([*prompt, Piece(write(this, "key", text), False)])[len(base) :])

    lines = [tokens(as_json(label)) for label in labels]
    assert [field.line(i) for i in range(len(labels))] == lines
    assert [s.label for s in field.canonical] == list(range(len(labels)))
    assert all(s.canonical for s in field.canonical)
    if len(labels) == 1:
        assert len(field.canonical[0].tokens) == 1
        return
    assert len({line[len(field.branch)] for line in lines}) > 1, "the branch is all that the lines share"
    for i, line in enumerate(lines):
        rest = line[len(field.branch) :]
        depth = field.identified_at(i)
        for d in range(len(rest) + 1):
            others = {
                j for j, other in enumerate(lines) if other[: len(field.branch) + d] == (*field.branch, *rest[:d])
            }
            assert (others == {i}) == (d >= depth)
            if d < len(rest):
                through = frozenset(j for j in others if lines[j][len(field.branch) + d] == rest[d])
                assert field.trie[rest[:d]][rest[d]] == through
    found = {(s.label, s.tokens) for s in field.spellings[len(labels) :]}
    expected = {(i, tokens(text)) for i, text in other_spellings(labels)}
    assert found == {
        (i, line[len(field.branch) :]) for i, line in expected if line[: len(field.branch)] == field.branch
    }


CASES: list[tuple[Label, ...]] = [
    ("DELIVER", "DELIVER_WITH_WARNING", "DELIVER_WITH"),
    ("Yes", "yes", "YES", "yES"),
    ("a", " a", "  a", "a ", "\ta", "\na"),
    ('"', '""', '\\"', "\\", "\\\\", "\\n", "\n"),
    ("{", "}", "},", "{}", "[", '",', ":"),
    ("🙂", "👍🏽", "👍", "🏳️‍🌈", "中", "中文", "日本"),
    (True, False, None, "true", "false", "null", 1.5, "1.5"),
    (0, -1, 10, 100, 1e20, 1e-7, "0"),
    ("only",),
    ("straße", "STRASSE"),
    ("high", "HIGH", "low"),
    (True,),
]


@pytest.mark.parametrize("labels", CASES)
@pytest.mark.parametrize("name", ["gpt2", "qwen", "gemma", "unigram"])
def test_labels_of_every_kind(name: str, labels: tuple[Label, ...]) -> None:
    check_field(name, labels)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
        | st.text('aA"\\{}, \n', min_size=1, max_size=4)
        | st.sampled_from([True, False, None, 5, 55, 5.5]),
        min_size=1,
        max_size=6,
        unique_by=as_json,
    ),
    st.sampled_from(["gpt2", "llama3", "gemma", "mistral", "bytes"]),
)
@settings(max_examples=60, deadline=None)
def test_any_labels(labels: list[Label], name: str) -> None:
    check_field(name, tuple(labels))


@pytest.mark.parametrize(
    ("one", "other"), [("HIGH", "high"), ("café", "cafe"), ("two words", "two  words"), ("🦄", "🪐")]
)
def test_labels_this_tokenizer_cannot_tell_apart(one: str, other: str) -> None:
    schema = Schema((Field("fine", (True, False)), Field("tier", ("x", one, "y", other))))
    with pytest.raises(TokenizationError) as error:
        compile_schema(codec("wordpiece"), schema)
    for part in ("'tier'", as_json(one), as_json(other), "same tokens"):
        assert part in str(error.value)


@pytest.mark.parametrize("labels", [(True, 1), (0, False), (1, 1.0)])
def test_labels_that_are_equal_in_python(labels: tuple[Label, ...]) -> None:
    with pytest.raises(SchemaError, match=rf"'key'.*equal in Python \({as_json(labels[0])}, {as_json(labels[1])}\)"):
        compile_schema(codec("qwen"), Schema((Field("key", labels),)))
