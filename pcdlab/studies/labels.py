"""Labels as a tokenizer and a model meet them: what every field takes, and which of its labels are traps.

Works from the schema and the tokenizer alone; refuses to know weights. Each finding comes with its fix; the functions named there
are those of :mod:`pcdlab.studies.rewrites`.
"""

from __future__ import annotations

import difflib
import json
import os.path
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import Any, Literal, get_args

from pcdlab import decide as deciding
from pcdlab.compile import CompiledField, compile_schema
from pcdlab.errors import SchemaError, TokenizationError
from pcdlab.prompt import catalogue
from pcdlab.schema import Field, Label, Schema
from pcdlab.tokenizer import Codec, Piece
from pcdlab.tokentree import TokenTree

__all__ = ["Cost", "FieldLint", "Finding", "LabelTokens", "Part", "label_parts", "lint_schema", "scorer_cost"]

# --- Lint: what a field takes -----------------------------------------------------------------------------------------

LATE = 5  # a label that is told apart at this token or later is worth a note
LONG_CATALOGUE = 1000  # tokens of one field's entry that are worth a note
NEAR = 0.85  # similarity (difflib's ratio) of two words that may be one
_SHOWN = 3  # examples in a message

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something about a field's labels.

    Attributes
    ----------
    field : str
    code : str
        Kind of finding, one word or two.
    level : {"error", "warning", "note"}
        "error": this tokenizer cannot ask it. "warning": the model is likely to decide by something else than the meaning.
        "note": takes time or tokens, or is good to know.
    what, fix : str
    """

    field: str
    code: str
    level: Level
    what: str
    fix: str


@dataclass(frozen=True)
class LabelTokens:
    """One label in tokens.

    Attributes
    ----------
    label : label
    tokens : int
        Tokens of the line that reach into the value, the end of the line included; of the whole line where the tokenizer
        does not give its text back.
    depth : int
        Tokens, behind those that all labels share, after which this label is the only one left.
    decided_by : str
        The value's text up to there; empty where the tokenizer does not give the text back.
    """

    label: Label
    tokens: int
    depth: int
    decided_by: str


@dataclass(frozen=True)
class Cost:
    """What a scorer takes for a field, the document apart.

    Attributes
    ----------
    scorer : str
        ``marginal``, ``exact``, ``walk`` or ``hybrid``.
    passes : int
    tokens : int
        Most tree nodes fed, all passes together.
    rows : int
        Paths from the document to a leaf: rows of the batch where a backend cannot run a tree as one.
    """

    scorer: str
    passes: int
    tokens: int
    rows: int


@dataclass(frozen=True)
class FieldLint:
    """What lint knows about a field.

    Attributes
    ----------
    field : str
    default_scorer : str
        What ``scorer="auto"`` takes.
    catalogue_tokens : int
        Of the field's entry, in every prompt.
    shared : str
        Text of the value that all labels begin with, in whole tokens; read once.
    labels : tuple of LabelTokens
        Empty, as are the next two, where the field could not be compiled.
    groups : tuple of (str, tuple of label)
        Labels that share their first token behind `shared`: the text up to there, and the labels, two or more.
    costs : tuple of Cost
    findings : tuple of Finding
    """

    field: str
    default_scorer: str
    catalogue_tokens: int
    shared: str
    labels: tuple[LabelTokens, ...]
    groups: tuple[tuple[str, tuple[Label, ...]], ...]
    costs: tuple[Cost, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def lint_schema(codec: Codec, schema: Schema | Mapping[str, Any] | type) -> list[FieldLint]:
    """Look at every field's labels in a tokenizer.

    Parameters
    ----------
    codec : Codec
        The tokenizer; no weights are needed.
    schema : Schema, dict or pydantic model

    Returns
    -------
    list of FieldLint
        In schema order. A field that the tokenizer cannot ask has a finding of level "error".
    """
    asked = Schema.of(schema)
    compiled, problems = _compiled(codec, asked)
    found = []
    for field in asked:
        item = compiled.get(field.name)
        entry = len(codec.encode([Piece(catalogue(Schema((replace(field, depends_on=()),))), False)]))
        notes: list[Finding] = list(_findings(field, item, entry))
        if field.name in problems:
            fix = "rename the labels it names, or take a model with another tokenizer"
            notes.insert(0, Finding(field.name, "cannot-ask", "error", problems[field.name], fix))
        scorer = "fixed" if field.fixed else deciding.resolve("auto", len(field.labels))
        labels, shared, groups, costs = _in_tokens(codec, item) if item else ((), "", (), ())
        found.append(FieldLint(field.name, scorer, entry, shared, labels, groups, costs, tuple(notes)))
    return found


class _Item:
    """A compiled field that can tell the text of its values' tokens."""

    def __init__(self, codec: Codec, field: CompiledField) -> None:
        self.field = field
        self.decode = codec.decode

    def value_text(self, label: int, depth: int) -> str:
        """Text of a label's value up to `depth` tokens behind the branch."""
        return self._value([*self.field.branch, *self.field.canonical[label].tokens[:depth]])

    def value_tokens(self, label: int) -> int:
        """Tokens of the line that reach into the value."""
        line = self.field.line(label)
        return len(line) - next((i for i in range(len(line)) if self._value(line[: i + 1])), 0)

    def _value(self, ids: Sequence[int]) -> str:
        # Decoders may drop a space in front: so the value is what stands behind the key, not behind so many characters.
        _, _, value = self.decode(list(ids)).partition(f"{_quoted(self.field.field.name)}:")
        return value.lstrip(" ")


def _compiled(codec: Codec, schema: Schema) -> tuple[dict[str, _Item], dict[str, str]]:
    """Compile all fields together, as they are asked; or, where that fails, each alone, to learn which one is to blame."""
    try:
        whole = compile_schema(codec, schema)
        return {item.field.name: _Item(codec, item) for item in whole}, {}
    except (SchemaError, TokenizationError) as error:
        together = str(error)
    found: dict[str, _Item] = {}
    problems: dict[str, str] = {}
    for field in schema:
        try:
            alone = compile_schema(codec, Schema((replace(field, depends_on=()),)))
            found[field.name] = _Item(codec, alone.fields[field.name])
        except (SchemaError, TokenizationError) as error:
            problems[field.name] = str(error)
    return found, problems or dict.fromkeys(schema.names, together)


def _in_tokens(
    codec: Codec, item: _Item
) -> tuple[tuple[LabelTokens, ...], str, tuple[tuple[str, tuple[Label, ...]], ...], tuple[Cost, ...]]:
    compiled = item.field
    names = compiled.field.labels
    if compiled.field.fixed:
        return (LabelTokens(names[0], item.value_tokens(0), 0, ""),), "", (), ()
    depths = [compiled.identified_at(i) for i in range(len(names))]
    labels = tuple(
        LabelTokens(label, item.value_tokens(i), depths[i], item.value_text(i, depths[i]))
        for i, label in enumerate(names)
    )
    groups = tuple(
        (item.value_text(min(members), 1), tuple(names[i] for i in sorted(members)))
        for members in compiled.trie[()].values()
        if len(members) > 1
    )
    scorers = [name for name in get_args(deciding.Scorer) if name != "auto"]
    costs = tuple(scorer_cost(compiled, name) for name in scorers if deciding.resolve(name, len(names)) == name)
    return labels, item.value_text(0, 0), groups, costs


def scorer_cost(compiled: CompiledField, scorer: str) -> Cost:
    """Count what a scorer takes for a field.

    Parameters
    ----------
    compiled : CompiledField
        Of two labels or more.
    scorer : {"marginal", "exact", "walk", "hybrid"}
        "hybrid" only above :data:`pcdlab.decide.FEW` labels; up to there it is "exact".
    """
    first = deciding.plan([deciding.Wish(compiled, scorer)]).tree
    passes, tokens, rows = 1, len(first), _leaves(first)
    if scorer == "hybrid":
        # The second look is at the labels below the node where the walk stops; which one depends on the document.
        looks = [
            deciding.plan([deciding.Wish(compiled, "exact", survivors=left)]).tree for left in _walk_ends(compiled)
        ]
        passes, tokens, rows = 2, tokens + max(map(len, looks)), max(rows, *map(_leaves, looks))
    return Cost(scorer, passes, tokens, rows)


def _walk_ends(compiled: CompiledField) -> list[frozenset[int]]:
    found: list[frozenset[int]] = []
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        path = waiting.pop()
        for token, labels in compiled.trie[path].items():
            if len(labels) > deciding.FEW:
                waiting.append((*path, token))
            else:
                found.append(labels)
    return found


def _leaves(tree: TokenTree) -> int:
    return len(tree) - len(set(tree.parents.tolist()) - {-1})


# --- Lint: what is wrong with it ----------------------------------------------------------------------------------------


# Kind, level, what, fix.
_Found = tuple[str, Level, str, str]


def _findings(field: Field, item: _Item | None, entry: int) -> Iterator[Finding]:
    """Every finding about a field; those about tokens only where it could be compiled."""
    found = (_about_codes(field, item), _about_texts(field), _about_twins(field), _about_size(field, item, entry))
    for code, level, what, fix in chain(*found):
        yield Finding(field.name, code, level, what, fix)


def _about_codes(field: Field, item: _Item | None) -> Iterator[_Found]:
    """Numbers in front of names, and what all labels begin with."""
    parts = label_parts(field)
    coded = {label: part for label, part in parts.items() if part.code}
    names = Counter(_key(part.name) for part in coded.values())
    if len(names) > 1 and (repeated := len(coded) - len(names)):
        first = next(label for label, part in coded.items() if names[_key(part.name)] > 1)
        same = [label for label in coded if _key(coded[label].name) == _key(coded[first].name)]
        yield (
            "same-name",
            "warning",
            f"{repeated} of {len(field.labels)} labels repeat the name of another behind a different number: {len(names)} names "
            f"({_some(same)})",
            "merge those that mean the same, or write into the name how they differ; two_level() asks for the name first",
        )
    if item and len(names) > 1:
        early = [
            label for i, label in enumerate(field.labels) if label in coded and _before_name(item, i, coded[str(label)])
        ]
        if early:
            yield (
                "digits-first",
                "warning",
                f"{len(early)} of {len(field.labels)} labels are decided by digits before their name is read ({_some(early)})",
                "put the name first and the code last: meaning_first()",
            )
    if prefix := _shared_prefix(field):
        yield (
            "shared-prefix",
            "warning",
            f"every label begins with {_quoted(prefix)}, which tells nothing and stands {len(parts)} times in the catalogue",
            "leave it out of the labels and say it once in the description: meaning_first()",
        )


def _before_name(item: _Item, label: int, part: Part) -> bool:
    """Whether a label is the only one left before its name begins."""
    text = str(item.field.field.labels[label])
    decided = item.value_text(label, item.field.identified_at(label))
    # The value's text begins with its quote; one with escapes is not as long as the label.
    return part.leading and _bare(text) == text and 0 < len(decided) <= 1 + len(text) - len(part.name)


def _about_texts(field: Field) -> Iterator[_Found]:
    """Single labels that are written in a way that misleads."""
    texts = [label for label in field.labels if isinstance(label, str)]
    if odd := [label for label in texts if _odd_space(label)]:
        yield (
            "white-space",
            "warning",
            f"white space that does not show, or stands at an end: {_some(odd)}",
            "write single plain spaces, between words only",
        )
    if words := [label for label in texts if label.lower() in ("true", "false", "null") or _collides(field, label)]:
        yield (
            "json-word",
            "warning",
            f"texts that read like JSON values, which a model may write without quotes: {_some(words)}",
            'write "type": "boolean", or null among the choices; or take other words',
        )
    if escaped := [label for label in texts if _bare(label) != label]:
        yield (
            "escapes",
            "note",
            f"labels that need escapes in JSON, and whose other spellings in case are not read: {_some(escaped)}",
            "leave quotes, backslashes and control characters out of labels",
        )


def _about_size(field: Field, item: _Item | None, entry: int) -> Iterator[_Found]:
    """How many labels there are, and how long they take."""
    if field.fixed:
        yield ("one-label", "note", "has one label: nothing is decided", "add the other labels, or remove the field")
    elif item:
        depths = [item.field.identified_at(i) for i in range(len(field.labels))]
        late = [label for label, depth in zip(field.labels, depths, strict=True) if depth >= LATE]
        if late:
            yield (
                "late",
                "note",
                f"{len(late)} of {len(depths)} labels are told apart at token {LATE} or later, the last at {max(depths)} "
                f"({_some(late)})",
                "begin labels with the word that tells them apart",
            )
    if len(field.labels) > deciding.MARGINAL_UP_TO:
        yield (
            "many-labels",
            "note",
            f"{len(field.labels)} labels: above {deciding.MARGINAL_UP_TO} the default scorer is hybrid, a walk and a second pass",
            "ask in two steps, two_level(), or for the labels nearest to the document, rank_labels() and shortlisted()",
        )
    if entry >= LONG_CATALOGUE:
        yield (
            "long-catalogue",
            "note",
            f"its catalogue entry takes {entry:,} tokens of every prompt",
            'shorten the labels, shortlisted(), or leave them out with "listed": false, unlisted()',
        )


def _about_twins(field: Field) -> Iterator[_Found]:
    """Labels that are another's beginning, or differ in case only, in signs and spaces only, or by a letter or two."""
    texts = [label for label in field.labels if isinstance(label, str)]
    if beginnings := [[a, b] for a in texts for b in texts if a != b and b.startswith(a)]:
        yield (
            "prefix-label",
            "note",
            "a label is the beginning of another: " + "; ".join(_some(pair) for pair in beginnings[:_SHOWN]),
            "the closing quote tells them apart; where the shorter one wins too often, give it an ending of its own",
        )
    by_case = _grouped(texts, lambda text: unicodedata.normalize("NFC", text).casefold())
    if cases := [group for group in by_case if len(group) > 1]:
        yield (
            "case-only",
            "warning",
            f"labels differ in case only ({'; '.join(map(_some, cases[:_SHOWN]))}), which models do not keep to",
            "merge them, or give them different words",
        )
    firsts = [group[0] for group in by_case]
    by_letters = _grouped(firsts, lambda text: _plain(text) or text)
    if signs := [group for group in by_letters if len(group) > 1]:
        yield (
            "signs-only",
            "warning",
            f"labels differ in signs, accents' encoding or spaces only ({'; '.join(map(_some, signs[:_SHOWN]))})",
            "merge them, or give them different words",
        )
    parts = label_parts(field)
    names = {_key(parts[group[0]].name): group[0] for group in by_letters}
    words = [(label, re.findall(r"[^\W_]+", parts[label].name.casefold())) for label in names.values()]
    near = [[a, b] for (a, one), (b, other) in combinations(words, 2) if _nearly(one, other)]
    if near:
        yield (
            "near-duplicate",
            "warning",
            f"labels are nearly the same text ({'; '.join(map(_some, near[:_SHOWN]))})",
            "merge those that mean the same, or correct a slip of the pen",
        )


def _nearly(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two names differ by nothing but a letter or two in long words."""
    if len(one) != len(other) or one == other:
        return False
    return all(
        a == b
        # What a prefix is added to means the opposite as often as not; another number is another thing.
        or (a not in b and b not in a and a.isalpha() and b.isalpha() and _ratio(a, b) >= NEAR)
        for a, b in zip(one, other, strict=True)
    )


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


@dataclass(frozen=True)
class Part:
    """A label taken apart.

    Attributes
    ----------
    code : str
        Its number, or letters and number; empty if it has none, or nothing but one.
    name : str
        The rest.
    leading : bool
        Whether the code stands in front.
    """

    code: str
    name: str
    leading: bool


_LEADING = re.compile(
    r"(?P<code>[^\W\d_]{0,4}[-_ ]?\d[\d./-]*[^\W\d_]?)[\s_\-:.,)\]]+(?P<name>.*[^\W\d_].*)", re.DOTALL
)
_TRAILING = re.compile(r"(?P<name>.*[^\W\d_].*?)\s*[\[(](?P<code>[^\W\d_]{0,4}[-_ ]?\d[\d./-]*)[\])]", re.DOTALL)


_SIGNS = r"[\s_\-.,;:'\"()\[\]/&!?]+"
_SEPARATORS = re.compile(rf"(?<=[^\d\s]){_SIGNS}|{_SIGNS}(?!\d)")


def label_parts(field: Field) -> dict[str, Part]:
    """Take each text label apart, without what all of them begin with.

    Examples
    --------
    >>> label_parts(Field("kind", ("CAT_1_Fish", "CAT_2_Dry_Fruit", "CAT_Other")))["CAT_2_Dry_Fruit"]
    Part(code='2', name='Dry_Fruit', leading=True)
    """
    prefix = _shared_prefix(field)
    found = {}
    for label in field.labels:
        if isinstance(label, str):
            rest = label[len(prefix) :]
            leading, trailing = _LEADING.fullmatch(rest), _TRAILING.fullmatch(rest)
            match = leading or trailing
            found[label] = Part(match["code"], match["name"], leading is not None) if match else Part("", rest, False)
    return found


def _shared_prefix(field: Field) -> str:
    """What all labels begin with, up to the end of a word; empty unless three or more labels are all texts."""
    texts = [label for label in field.labels if isinstance(label, str)]
    if len(texts) < 3 or len(texts) < len(field.labels):
        return ""
    shared = os.path.commonprefix(texts)  # noqa: RUF071 - of texts, not paths
    end = max((i + 1 for i, character in enumerate(shared) if not character.isalnum()), default=0)
    prefix = shared[:end]
    return prefix if any(c.isalpha() for c in prefix) and all(len(text) > end for text in texts) else ""


def _plain(text: str) -> str:
    """A text in one case and one encoding, without signs that only separate: those in 1.5, -1, C++ and C# do more."""
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", text).casefold())


def _key(name: str) -> str:
    """What names are compared by: a plural is the same name."""
    return _plain(name).removesuffix("s")


def _grouped(texts: Iterable[str], key: Callable[[str], str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(key(text), []).append(text)
    return list(groups.values())


def _odd_space(text: str) -> bool:
    return text != " ".join(text.split()) or any(
        unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") or (unicodedata.category(c) == "Zs" and c != " ")
        for c in text
    )


def _collides(field: Field, text: str) -> bool:
    """Whether a text is spelled like another label that is no text."""
    return any(not isinstance(label, str) and Field.json(label) == text for label in field.labels)


def _bare(text: str) -> str:
    """The text as in JSON, without its quotes."""
    return _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _some(labels: Sequence[Label]) -> str:
    shown = ", ".join(Field.json(label) for label in labels[:_SHOWN])
    return f"{shown}, …" if len(labels) > _SHOWN else shown
