"""The schema in one tokenizer's tokens: lines, branches, label tries.

Every allowed value is tokenized as the complete JSON line in place. The line format is chosen so that lines begin and
end on token boundaries: then the tokens of a line do not depend on the lines around it, and putting lines one after
another gives exactly the tokens the tokenizer gives for the whole text. This module knows text and token ids; it does
not know models or scores.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pcdlab.errors import SchemaError, TokenizationError
from pcdlab.prompt import Prompt
from pcdlab.schema import Field, Schema
from pcdlab.tokenizer import Codec, Piece

__all__ = ["FORMATS", "CompiledField", "CompiledSchema", "LineFormat", "Spelling", "compile_schema"]


@dataclass(frozen=True)
class LineFormat:
    """How a JSON object is written as an opening and one line per field.

    Attributes
    ----------
    name : str
        For messages.
    opening : str
        Text in front of the first line.
    before, after : str
        Text in front of the key and behind the value.
    """

    name: str
    opening: str
    before: str
    after: str

    def line(self, name: str, value: str) -> str:
        """The line of field `name` with the JSON text `value`."""
        return f"{self.before}{json.dumps(name, ensure_ascii=False)}: {value}{self.after}"


# In the order they are tried. Where the newline merges differs by tokenizer: with the punctuation in front of it (GPT-4's
# kind), with the indentation behind it (GPT-2's kind), with nothing (SentencePiece's kind).
FORMATS = (
    LineFormat("one line per field, newline last", "{\n", "  ", ",\n"),
    LineFormat("one line per field, newline first", "{", "\n  ", ","),
    LineFormat("one line per field without indentation, newline last", "{\n", "", ",\n"),
    LineFormat("one line per field without indentation, newline first", "{", "\n", ","),
    LineFormat("all in one line, space first", "{", " ", ","),
    LineFormat("all in one line, no spaces", "{", "", ","),
)


@dataclass(frozen=True)
class Spelling:
    """One way to write one label, from the end of the field's branch on.

    Attributes
    ----------
    label : int
        Index into the field's labels.
    tokens : tuple of int
        Token ids up to the end of the line.
    canonical : bool
        Whether this is the JSON spelling; other spellings (``High`` for ``HIGH``) are only ever read, never written.
    """

    label: int
    tokens: tuple[int, ...]
    canonical: bool


@dataclass(frozen=True, eq=False)
class CompiledField:
    """A field in tokens.

    Attributes
    ----------
    field : Field
        What it was compiled from.
    branch : tuple of int
        The tokens all its lines begin with: indentation, key, colon and what the values share.
    spellings : tuple of Spelling
        The canonical spelling of every label in label order, then the others.
    """

    field: Field
    branch: tuple[int, ...]
    spellings: tuple[Spelling, ...]

    @property
    def canonical(self) -> tuple[Spelling, ...]:
        """The JSON spellings, one per label, in label order."""
        return self.spellings[: len(self.field.labels)]

    def line(self, label: int) -> tuple[int, ...]:
        """Token ids of the whole line that says `label` (an index)."""
        return (*self.branch, *self.canonical[label].tokens)

    @property
    def longest_line(self) -> int:
        """Tokens of the longest line."""
        return len(self.branch) + max(len(spelling.tokens) for spelling in self.canonical)

    @cached_property
    def trie(self) -> dict[tuple[int, ...], dict[int, frozenset[int]]]:
        """The canonical spellings as a trie: path below the branch → next token → labels that go through it."""
        nodes: dict[tuple[int, ...], dict[int, set[int]]] = {}
        for spelling in self.canonical:
            for depth, token in enumerate(spelling.tokens):
                nodes.setdefault(spelling.tokens[:depth], {}).setdefault(token, set()).add(spelling.label)
        return {path: {token: frozenset(labels) for token, labels in after.items()} for path, after in nodes.items()}

    def identified_at(self, label: int) -> int:
        """Number of tokens below the branch after which `label` is the only one left."""
        tokens = self.canonical[label].tokens
        for depth, token in enumerate(tokens):
            if len(self.trie[tokens[:depth]][token]) == 1:
                return depth + 1
        raise AssertionError("compile_schema refuses labels whose lines are not told apart")


@dataclass(frozen=True, eq=False)
class CompiledSchema:
    """A schema in one tokenizer's tokens.

    Attributes
    ----------
    schema : Schema
    prompt : Prompt
        The prompt, its opening set to the line format's.
    format : LineFormat
    fields : dict of str to CompiledField
        In schema order.
    """

    schema: Schema
    prompt: Prompt
    format: LineFormat
    fields: dict[str, CompiledField]

    def __iter__(self) -> Iterator[CompiledField]:
        return iter(self.fields.values())


def compile_schema(codec: Codec, schema: Schema, instructions: str | None = None) -> CompiledSchema:
    """Find a line format with clean token boundaries and compile every field in it.

    Parameters
    ----------
    codec : Codec
        The tokenizer.
    schema : Schema
        The fields.
    instructions : str, optional
        Text in front of the catalogue, see :class:`pcdlab.prompt.Prompt`.

    Raises
    ------
    TokenizationError
        If no line format has clean boundaries, naming the boundary that failed in each, or if two labels of a field get
        the same tokens.
    SchemaError
        If two labels of a field are equal in Python (``true`` and ``1``).
    """
    for field in schema:
        if len(set(field.labels)) < len(field.labels):
            raise SchemaError(
                f"field {field.name!r}: two of its labels are equal in Python ({', '.join(map(field.json, field.labels))}), so "
                "results could not be told apart by label; write one of them as a string"
            )
    prompt = Prompt(codec, schema, instructions)
    problems = []
    for line_format in FORMATS:
        placed = prompt.with_opening(line_format.opening)
        lines = _Lines(placed, line_format)
        try:
            fields = {field.name: _compile_field(lines, field, schema) for field in schema}
            _check_in_place(placed, lines, fields)
        except _Unclean as boundary:
            problems.append(f"{line_format.name}: {boundary}")
            continue
        return CompiledSchema(schema, placed, line_format, fields)
    raise TokenizationError(
        "this tokenizer has no clean token boundary between the lines of a JSON object. " + "; ".join(problems)
    )


class _Unclean(Exception):
    """A line that does not begin or end on a token boundary."""


class _Lines:
    """Tokens of lines in place, behind the last stretch of the prompt."""

    def __init__(self, prompt: Prompt, line_format: LineFormat) -> None:
        # The end of the prompt stands for the whole of it: what lies before a control token cannot change the tokens behind
        # it, and _check_in_place compares with whole prompts at the end.
        self.codec = prompt.codec
        self.format = line_format
        self.before = prompt.pieces("text")[-3:]
        self.base = self.codec.encode(self.before)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` after the opening.

        Raises
        ------
        _Unclean
            If the opening's last token changes.
        """
        ids = self.codec.encode([*self.before, Piece(text, False)])
        if ids[: len(self.base)] != self.base:
            raise _Unclean(f"{self.before[-1].text[-4:]!r} merges with {text[:8]!r}")
        return tuple(ids[len(self.base) :])

    def unit(self, text: str, follower: str, follower_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens of a line, checked not to change when the line `follower` comes behind it."""
        tokens = self.tokens(text)
        if self.tokens(text + follower) != tokens + follower_tokens:
            raise _Unclean(f"the end of {text!r} merges with {follower[:8]!r}")
        return tokens


def _compile_field(lines: _Lines, field: Field, schema: Schema) -> CompiledField:
    fields = list(schema)
    following = fields[(fields.index(field) + 1) % len(fields)]
    follower = lines.format.line(following.name, following.json(following.labels[0]))
    behind = lines.tokens(follower)
    canonical = [lines.unit(lines.format.line(field.name, field.json(v)), follower, behind) for v in field.labels]
    _check_told_apart(field, canonical)
    # What all labels share is the branch. A lone label leaves its last token outside, so that no line is empty.
    shared = os.path.commonprefix(canonical)  # noqa: RUF071 - of sequences, item by item
    branch = tuple(shared if len(canonical) > 1 else shared[:-1])
    spellings = [Spelling(i, tokens[len(branch) :], True) for i, tokens in enumerate(canonical)]
    for label, text in _other_spellings(field):
        tokens = lines.tokens(lines.format.line(field.name, text))
        if tokens[: len(branch)] == branch and len(tokens) > len(branch):
            spellings.append(Spelling(label, tokens[len(branch) :], False))
    return CompiledField(field, branch, tuple(spellings))


def _other_spellings(field: Field) -> Iterator[tuple[int, str]]:
    """The same values in other case, where that is no other label's spelling."""
    claims: dict[str, set[int]] = {}
    for i, label in enumerate(field.labels):
        text = field.json(label)
        for variant in {text, text.lower(), text.upper(), _capitalised(text)}:
            claims.setdefault(variant, set()).add(i)
    canonical = {field.json(label) for label in field.labels}
    for variant in sorted(claims):
        if variant not in canonical and len(claims[variant]) == 1 and _is_json_case_variant(variant):
            yield next(iter(claims[variant])), variant


def _capitalised(text: str) -> str:
    quote, body = (text[0], text[1:]) if text.startswith('"') else ("", text)
    return quote + body.capitalize()


def _is_json_case_variant(text: str) -> bool:
    # Escapes are case-sensitive (\n is not \N), so a label with one has no other spelling.
    return "\\" not in text


def _check_told_apart(field: Field, canonical: Sequence[tuple[int, ...]]) -> None:
    """No label's line may be the beginning of another's: at its end nothing would be left to decide."""
    places = {tokens: i for i, tokens in enumerate(canonical)}
    for i, tokens in enumerate(canonical):
        for end in range(1, len(tokens) + 1):
            other = places.get(tokens[:end], i)
            if other != i:
                raise TokenizationError(
                    f"field {field.name!r}: this tokenizer gives labels {field.json(field.labels[i])} and "
                    f"{field.json(field.labels[other])} the same tokens, so no model behind it can tell them apart; rename one"
                )


def _check_in_place(prompt: Prompt, lines: _Lines, fields: dict[str, CompiledField]) -> None:
    """Compare with the tokenizer's own encoding of whole prompts, one line of every field behind the other."""
    text, expected = "", prompt.ids("A text.")
    for compiled in fields.values():
        text += lines.format.line(compiled.field.name, compiled.field.json(compiled.field.labels[-1]))
        expected = [*expected, *compiled.line(len(compiled.field.labels) - 1)]
    if prompt.codec.encode([*prompt.pieces("A text."), Piece(text, False)]) != expected:
        raise _Unclean("the lines' tokens differ behind a whole prompt")
