"""The prompt is the template's own, its head is the same for every document, and the document is untouched."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_zoo import BASE, LOSSLESS, NAMES, codec, documents, tokenizer

from pcdlab.errors import TokenizationError
from pcdlab.prompt import AFTER_DOCUMENT, BEFORE_DOCUMENT, INSTRUCTIONS, Prompt, catalogue
from pcdlab.schema import Schema
from pcdlab.tokenizer import HFCodec, Piece

SCHEMA = Schema.from_dict(
    {
        "risk_tier": {"type": "enum", "choices": ["LOW", "HIGH"], "description": "Calculated risk tier"},
        "urgent": {"type": "boolean", "description": "Is it\n  urgent?"},
        "größe": {"type": "enum", "choices": ['6"', "a\\b", "ß", None, 3]},
        "version": {"type": "enum", "choices": ["1.0"]},
    }
)
TEMPLATED = [name for name in NAMES if name not in BASE]


@functools.cache
def prompt(name: str) -> Prompt:
    return Prompt(codec(name), SCHEMA)


def with_template(name: str, template: str) -> Prompt:
    """A prompt over one of the tokenizers with another chat template."""
    changed = HFCodec(tokenizer(name))

    def render(messages: list[dict[str, str]], generate: bool) -> str:
        copy = type(tokenizer(name))(tokenizer_object=tokenizer(name).backend_tokenizer)
        copy.chat_template = template
        return HFCodec(copy).render(messages, generate)

    changed.render = render
    return Prompt(changed, SCHEMA)


# --- catalogue -------------------------------------------------------------------------------------------------------


def test_catalogue() -> None:
    assert catalogue(SCHEMA) == (
        '- "risk_tier": Calculated risk tier. One of: "LOW", "HIGH".\n'
        '- "urgent": Is it urgent? Either true or false.\n'
        '- "größe": One of: "6\\"", "a\\\\b", "ß", null, 3.\n'
        '- "version": Always "1.0".'
    )


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(st.text(max_size=9), st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True)),
        min_size=1,
        max_size=4,
    )
)
def test_catalogue_has_one_line_per_field_in_order(fields: dict[str, tuple[str, list[str]]]) -> None:
    schema = Schema.from_dict({n: {"type": "enum", "choices": c, "description": d} for n, (d, c) in fields.items()})
    lines = catalogue(schema).split("\n")
    assert len(lines) == len(schema)
    for line, field in zip(lines, schema, strict=True):
        assert line.startswith(f"- {field.json(field.name)}: ")
        for label in field.labels:
            assert field.json(label) in line


# --- shapes of templates ---------------------------------------------------------------------------------------------

SYSTEM = f"{INSTRUCTIONS}\n\n{catalogue(SCHEMA)}"
USER = f"{BEFORE_DOCUMENT}  Hi \n{AFTER_DOCUMENT}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "smollm",
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n{{\n",
        ),
        (
            "llama3",
            f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
            f"<|start_header_id|>user<|end_header_id|>\n\n{USER}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n{\n",
        ),
        (
            "gemma",
            f"<bos><start_of_turn>user\n{SYSTEM}\n\n{USER}<end_of_turn>\n<start_of_turn>model\n{{\n",
        ),
        ("cl100k", f"<|user|>\n{SYSTEM}\n\n{USER}<|end|>\n<|assistant|>\n{{\n"),
        ("llama2", f"<s>[INST] {SYSTEM}\n\n{USER} [/INST] {{\n"),
        ("mistral", f"<s>[INST]{SYSTEM}\n\n{USER}[/INST] {{\n"),
        ("gpt2", f"{SYSTEM}\n\n{USER}\n\nJSON:\n{{\n"),
        ("unigram", f"<s>{SYSTEM}\n\n{USER}\n\nJSON:\n{{\n"),
    ],
)
def test_text(name: str, expected: str) -> None:
    """System role kept, refused, dropped or folded in; contents trimmed; no generation prompt; no template."""
    assert prompt(name).text("  Hi \n") == expected


@pytest.mark.parametrize("name", TEMPLATED)
def test_an_answered_conversation_starts_with_the_prompt(name: str) -> None:
    """The assistant's turn is opened where the template itself puts the assistant's text."""
    system, user, answer = SYSTEM, f"{BEFORE_DOCUMENT}Hi{AFTER_DOCUMENT}", '{\n  "urgent": true'
    turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if name in ("gemma", "cl100k"):
        turns = [{"role": "user", "content": f"{system}\n\n{user}"}]
    full = codec(name).render([*turns, {"role": "assistant", "content": answer}], generate=False)
    # One of them spells its markers in two ways, to be matched in any case.
    assert full.lower().startswith(prompt(name).text("Hi").lower())


@pytest.mark.parametrize("name", NAMES)
def test_only_template_text_is_control_text(name: str) -> None:
    document = " <|im_end|>\n"
    pieces = prompt(name).pieces(document)
    plain = [piece.text for piece in pieces if not piece.control]
    assert plain == [SYSTEM, BEFORE_DOCUMENT, document, AFTER_DOCUMENT, "{\n"]
    assert "".join(piece.text for piece in pieces) == prompt(name).text(document)


def test_opening_and_instructions_are_used_as_given() -> None:
    changed = Prompt(codec("qwen"), SCHEMA, instructions="Fill in:", opening="{")
    assert changed.text("Hi").startswith("<|im_start|>system\nFill in:\n\n- ")
    assert changed.text("Hi").endswith("<|im_start|>assistant\n{")
    assert changed.with_opening('{"a": ').text("Hi") == changed.text("Hi") + '"a": '
    assert Prompt(codec("qwen"), SCHEMA, instructions="").text("Hi").startswith("<|im_start|>system\n- ")


def test_a_refusing_template_is_quoted() -> None:
    refusing = with_template("qwen", "{{ raise_exception('Only tool calls here') }}")
    with pytest.raises(TokenizationError, match=r"\(user\): Only tool calls here"):
        refusing.text("Hi")


@pytest.mark.parametrize(
    ("template", "times"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", 2),
    ],
)
def test_a_template_that_loses_or_repeats_the_user_is_refused(template: str, times: int) -> None:
    with pytest.raises(TokenizationError, match=f"appears {times} times"):
        with_template("qwen", template).text("Hi")


def test_a_template_without_assistant_turns_ends_where_it_ends() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no answers') }}{% endif %}"
        "{{ m.content + ';' }}{% endfor %}"
    )
    assert with_template("qwen", template).text("Hi").endswith(f"Hi{AFTER_DOCUMENT};{{\n")


@pytest.mark.parametrize(
    ("opened", "where"),
    [
        ("<|start|>assistant", "<|channel|>final<|message|>"),  # the model would choose a channel
        ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),  # the model would think first
        ("<|im_start|>assistant\n", ""),
    ],
)
def test_the_answer_begins_where_the_template_writes_one(opened: str, where: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}OPENWHERE{% endif %}{{ m.content + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}OPEN{% endif %}"
    )
    text = with_template("qwen", template.replace("OPEN", opened).replace("WHERE", where)).text("Hi")
    assert text.endswith(f"Hi{AFTER_DOCUMENT};{opened}{where}{{\n")


def test_a_thought_that_the_template_opens_is_kept() -> None:
    template = (
        "{% for m in messages %}{{ m.role + m.content + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant<think>{% endif %}"
    )
    assert with_template("qwen", template).text("Hi").endswith("assistant<think>{\n")


# --- ids and head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_document_starts_with_the_head(name: str) -> None:
    head = prompt(name).head

    @settings(max_examples=60, deadline=None)
    @given(documents(name))
    @example("")
    @example("\n\n\n\n\n")
    @example("\u0338")
    def check(document: str) -> None:
        ids = prompt(name).ids(document)
        assert tuple(ids[: len(head)]) == head

    check()


@pytest.mark.parametrize("name", NAMES)
def test_head_covers_instructions_and_catalogue(name: str) -> None:
    # Two tokens at most are lost to merges with the document.
    rest = Prompt(codec(name), SCHEMA).ids("x")[len(prompt(name).head) :]
    document_on = codec(name).encode(prompt(name).pieces("x")[-4:])
    assert len(rest) <= len(document_on) + 2
    if name in LOSSLESS:
        assert catalogue(SCHEMA) in codec(name).decode(prompt(name).head)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_are_the_same_for_every_document(name: str) -> None:
    unknown = tokenizer(name).unk_token_id

    def frame(document: str) -> list[int]:
        return [i for i in prompt(name).ids(document) if i in codec(name).control_ids and i != unknown]

    expected = frame("x")

    @settings(max_examples=40, deadline=None)
    @given(documents(name))
    @example(prompt(name).text('"""'))
    def check(document: str) -> None:
        assert frame(document) == expected

    check()


def test_control_text_in_the_schema_and_the_opening_is_plain() -> None:
    schema = Schema.from_dict(
        {"<|im_end|>": {"type": "enum", "choices": ["<|im_start|>", "x"], "description": "<think> about it"}}
    )
    ids = Prompt(codec("qwen"), schema, instructions="</think>", opening="<|im_end|>{").ids("Hi")
    plain = Prompt(codec("qwen"), SCHEMA).ids("Hi")
    control = codec("qwen").control_ids
    assert [i for i in ids if i in control] == [i for i in plain if i in control]


def test_any_codec_will_do() -> None:
    """Nothing but the protocol is used: here one id per character, and no template."""

    class Characters:
        control_ids: frozenset[int] = frozenset()
        has_template = False
        fingerprint = "characters"

        def encode(self, pieces: Sequence[Piece]) -> list[int]:
            return [ord(c) for piece in pieces for c in piece.text]

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

        def render(self, messages: list[dict[str, str]], generate: bool) -> str:
            raise AssertionError

        def start(self) -> str:
            return "^"

    plain = Prompt(Characters(), SCHEMA)
    assert "".join(map(chr, plain.head)) == f"^{SYSTEM}\n\n{BEFORE_DOCUMENT}"
    assert Characters().decode(plain.ids("Hi")) == plain.text("Hi")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TokenizationError, match="surrogate"):
        prompt("qwen").ids("\udc00")
