"""Other ways to ask a field: the same question with other labels, with fewer of them, or in two steps.

Every rewrite maps back: whatever is asked, the answer comes in the user's own labels. Knows fields and finished decisions;
refuses to run a model. Asked is ``engine.extract(text, rewritten(schema, ways))``, and ``restore(schema, ways, …)`` says the
extraction in the user's schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pcdlab import decide as deciding
from pcdlab.compile import compile_schema
from pcdlab.errors import ParameterError, SchemaError
from pcdlab.result import Extraction, FieldDecision
from pcdlab.schema import Field, Label, Schema
from pcdlab.studies.labels import label_parts, scorer_cost
from pcdlab.tokenizer import Codec

__all__ = [
    "Rewrite",
    "groups_by_name",
    "meaning_first",
    "rank_labels",
    "restore",
    "rewrite_costs",
    "rewritten",
    "short_aliases",
    "shortlisted",
    "two_level",
    "unlisted",
]

# One step of the way to a label: which of the fields asked, and which of its labels.
_Path = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rewrite:
    """A field asked in another way.

    Attributes
    ----------
    original : Field
        The user's.
    fields : tuple of Field
        Asked in its place; the first has its name.
    paths : tuple
        For each of the user's labels the answers that together say it, as (place in `fields`, index of its label) pairs: the
        label's probability is their product. None for a label that is not asked for.
    """

    original: Field
    fields: tuple[Field, ...]
    paths: tuple[_Path | None, ...]

    def __post_init__(self) -> None:
        if len(set(self.original.labels)) < len(self.original.labels):
            raise SchemaError(
                f"field {self.original.name!r}: two of its labels are equal in Python "
                f"({', '.join(map(Field.json, self.original.labels))}), so answers could not be told apart; write one as a string"
            )

    def gold(self, label: Label) -> dict[str, Label]:
        """What the fields should say where the user's label is right: field → label.

        Raises
        ------
        ParameterError
            If it is no label of the field, or not asked for.
        """
        texts = [Field.json(item) for item in self.original.labels]
        path = self.paths[texts.index(Field.json(label))] if Field.json(label) in texts else None
        if path is None:
            raise ParameterError(
                f"{Field.json(label)} is not among the labels asked for by field {self.original.name!r}"
            )
        return {self.fields[place].name: self.fields[place].labels[i] for place, i in path}

    def restore(self, decisions: Mapping[str, FieldDecision]) -> FieldDecision:
        """Say the decision in the user's labels.

        Parameters
        ----------
        decisions : mapping of str to FieldDecision
            Of (at least) `fields`.

        Returns
        -------
        FieldDecision
            Of one field, its own numbers under the user's labels. Of several, log-shares that are sums along the paths; the value
            is the most probable label, and `candidate_mass` the probability that the model's own continuations reach an allowed
            label in both. Labels that were not asked for have no score.
        """
        first = decisions[self.fields[0].name]
        asked = [
            (label, path) for label, path in zip(self.original.labels, self.paths, strict=True) if path is not None
        ]
        if len(self.fields) == 1:
            own = {Field.json(label): score for label, score in first.log_probs.items()}
            names = {path[0][1]: label for label, path in asked}
            places = {Field.json(label): i for i, label in enumerate(self.fields[0].labels)}
            back = {text: names[i] for text, i in places.items()}
            return replace(
                first,
                name=self.original.name,
                value=back[Field.json(first.value)],
                log_probs={label: own[Field.json(self.fields[0].labels[path[0][1]])] for label, path in asked},
                alternatives=tuple((back[Field.json(label)], share) for label, share in first.alternatives),
            )
        tables = [_log_shares(decisions[field.name]) for field in self.fields]
        scores = {label: float(sum(tables[place][i] for place, i in path)) for label, path in asked}
        order = sorted(scores, key=lambda label: -scores[label])
        return FieldDecision(
            name=self.original.name,
            value=order[0],
            probability=min(1.0, float(np.exp(scores[order[0]]))),
            candidate_mass=self._mass(decisions, tables[0]),
            log_probs=scores,
            method=first.method,
            alternatives=tuple((label, float(np.exp(scores[label]))) for label in order[1:]),
        )

    def _mass(self, decisions: Mapping[str, FieldDecision], groups: NDArray[np.float64]) -> float:
        masses = [decisions[field.name].candidate_mass for field in self.fields]
        member = {path[0][1]: path[1][0] for path in self.paths if path is not None and len(path) > 1}
        behind = [masses[member[g]] if g in member else None for g in range(len(groups))]
        whole = sum(
            float(np.exp(share)) * (1.0 if mass is None else mass) for share, mass in zip(groups, behind, strict=True)
        )
        return min(1.0, (1.0 if masses[0] is None else masses[0]) * whole)


def _log_shares(decision: FieldDecision) -> NDArray[np.float64]:
    values = np.array(list(decision.log_probs.values()), dtype=np.float64)
    return values - np.logaddexp.reduce(values)


def _renamed(field: Field, labels: Sequence[Label], **changes: Any) -> Rewrite:
    """The same field with other labels, one for each."""
    return Rewrite(
        field, (replace(field, labels=tuple(labels), **changes),), tuple(((0, i),) for i in range(len(labels)))
    )


def meaning_first(field: Field) -> Rewrite:
    """Put names first and codes last, and leave out what all labels begin with: ``CAT_007_Fruit`` becomes ``Fruit [007]``.

    Parameters
    ----------
    field : Field

    Returns
    -------
    Rewrite
        Labels without a code, and those whose new text would be another's, keep their own.

    Examples
    --------
    >>> meaning_first(Field("kind", ("CAT_1_Fish", "CAT_2_Fish", "CAT_3_Fruit"))).fields[0].labels
    ('Fish [1]', 'Fish [2]', 'Fruit [3]')
    """
    wanted: list[Label] = list(field.labels)
    parts = label_parts(field)
    for i, label in enumerate(field.labels):
        if isinstance(label, str):
            part = parts[label]
            wanted[i] = f"{part.name} [{part.code}]" if part.code else part.name
    return _renamed(field, _distinct(wanted, field.labels))


def _distinct(wanted: Sequence[Label], own: Sequence[Label]) -> list[Label]:
    """Take back wishes until no two labels are the same; a label's own text stands against any wish."""
    labels = list(wanted)
    while True:
        counts = Counter(map(Field.json, labels))
        clashing = [
            i
            for i, label in enumerate(labels)
            if counts[Field.json(label)] > 1 and Field.json(label) != Field.json(own[i])
        ]
        if not clashing:
            return labels
        for i in clashing:
            labels[i] = own[i]


def short_aliases(field: Field) -> Rewrite:
    """Ask for short codes, A1 to Z9 and on with two letters, which the description explains.

    All codes are equally long, and none holds a zero, so that none is the beginning of another.

    Parameters
    ----------
    field : Field

    Returns
    -------
    Rewrite

    Examples
    --------
    >>> asked, = short_aliases(Field("loud", (True, False), "Is it loud?")).fields
    >>> asked.labels, asked.description
    (('A1', 'A2'), 'Is it loud? One of: "A1" for true, "A2" for false.')
    """
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    width = next(n for n in count(1) if 9 * len(letters) ** n >= len(field.labels))
    codes = ("".join(parts) for parts in product(*[letters] * width, "123456789"))
    aliases = [code for code, _ in zip(codes, field.labels, strict=False)]
    pairs = zip(aliases, field.labels, strict=True)
    legend = f"One of: {', '.join(f'{Field.json(alias)} for {Field.json(label)}' for alias, label in pairs)}."
    return _renamed(field, aliases, description=f"{_sentence(field.description)}{legend}", listed=False)


def _sentence(description: str) -> str:
    """A description that more text can follow."""
    text = description.strip()
    return f"{text}{'' if text.endswith(('.', '!', '?', ':', ';')) else '.'} " if text else ""


def unlisted(field: Field) -> Rewrite:
    """Keep the labels out of the catalogue; they are scored all the same.

    Parameters
    ----------
    field : Field
    """
    return _renamed(field, field.labels, listed=False)


def shortlisted(field: Field, labels: Iterable[Label]) -> Rewrite:
    """Ask for some of the labels only.

    Parameters
    ----------
    field : Field
    labels : iterable of label
        Such as ``[field.labels[i] for i in rank_labels(field, [document])[0][:8]]``.

    Returns
    -------
    Rewrite
        The labels stay in the field's order. Those left out have no score, and cannot be the answer.

    Raises
    ------
    ParameterError
        If there are none, or one is no label of the field.
    """
    labels = list(labels)
    if other := [label for label in labels if not isinstance(label, Label)]:
        raise ParameterError(
            f"labels holds {other[0]!r} ({type(other[0]).__name__}); give labels of field {field.name!r}: the places that "
            "rank_labels gives are those in field.labels"
        )
    kept = {Field.json(label) for label in labels}
    if unknown := kept - {Field.json(label) for label in field.labels}:
        raise ParameterError(f"{min(unknown)} is no label of field {field.name!r}")
    if not kept:
        raise ParameterError(f"labels is empty; name at least one label of field {field.name!r}")
    places = [i for i, label in enumerate(field.labels) if Field.json(label) in kept]
    asked = replace(field, labels=tuple(field.labels[i] for i in places))
    return Rewrite(
        field, (asked,), tuple(((0, places.index(i)),) if i in places else None for i in range(len(field.labels)))
    )


def groups_by_name(field: Field) -> dict[str, list[Label]]:
    """Group labels that have the same name behind different numbers.

    Parameters
    ----------
    field : Field

    Returns
    -------
    dict of str to list of label
        Name → labels, in order; a label without a name of its kind is a group by itself.
    """
    parts = label_parts(field)
    groups: dict[str, list[Label]] = {}
    for label in field.labels:
        groups.setdefault(parts[label].name if isinstance(label, str) else Field.json(label), []).append(label)
    return groups


def two_level(field: Field, groups: Mapping[str, Sequence[Label]] | None = None) -> Rewrite:
    """Ask for a group, and for the member of every group: p(label) = p(group) · p(member | group).

    All of it is one schema, decided in the same pass: a field for the group under the field's own name, and one per group of
    two or more labels. What depends on the field sees the line that says the group.

    Parameters
    ----------
    field : Field
    groups : mapping of str to sequence of label, optional
        Name of each group → its labels; every label in exactly one. By default :func:`groups_by_name`.

    Returns
    -------
    Rewrite

    Raises
    ------
    ParameterError
        If a label is in no group or in two, or a group is empty.

    Examples
    --------
    >>> asked = two_level(Field("kind", ("1_Fish", "2_Fish", "3_Fruit"))).fields
    >>> [(item.name, item.labels) for item in asked]
    [('kind', ('Fish', 'Fruit')), ('kind of Fish', ('1_Fish', '2_Fish'))]
    """
    groups = groups_by_name(field) if groups is None else groups
    texts = [Field.json(label) for label in field.labels]
    sorted_out = Counter(Field.json(label) for members in groups.values() for label in members)
    wrong = [text for text in {*texts, *sorted_out} if sorted_out[text] != 1 or text not in texts]
    if wrong or not all(groups.values()):
        raise ParameterError(
            f"groups of field {field.name!r}: {f'{min(wrong)} must stand in exactly one of them' if wrong else 'one is empty'}; "
            "give each of its labels, and nothing else, one group"
        )
    fields = [replace(field, labels=tuple(groups))]
    paths: list[_Path | None] = [None] * len(texts)
    for g, (name, members) in enumerate(groups.items()):
        for i, label in enumerate(members):
            own: _Path = ((len(fields), i),) if len(members) > 1 else ()
            paths[texts.index(Field.json(label))] = ((0, g), *own)
        if len(members) > 1:
            # The key says all: a description would stand in the catalogue once per group.
            member = replace(field, name=f"{field.name} of {name}", labels=tuple(members), description="")
            fields.append(member)
    return Rewrite(field, tuple(fields), tuple(paths))


# --- Rewritten schemas --------------------------------------------------------------------------------------------------


def rewritten(schema: Schema, rewrites: Sequence[Rewrite]) -> Schema:
    """Return the schema to ask in place of the user's.

    Parameters
    ----------
    schema : Schema
    rewrites : sequence of Rewrite
        Of different fields of it.

    Raises
    ------
    ParameterError
        If one is of no field of the schema, or two are of the same.
    """
    by_name = {item.original.name: item for item in rewrites}
    if len(by_name) < len(rewrites):
        raise ParameterError("two rewrites are of the same field; give one")
    for name, item in by_name.items():
        if name not in schema.names or schema[name] != item.original:
            raise ParameterError(
                f"the rewrite of field {name!r} is not of this schema's field; make it from schema[{name!r}]"
            )
    return Schema(
        tuple(part for item in schema for part in (by_name[item.name].fields if item.name in by_name else (item,)))
    )


def restore(schema: Schema, rewrites: Sequence[Rewrite], out: Extraction) -> Extraction:
    """Say an extraction of :func:`rewritten` in the user's fields and labels.

    Parameters
    ----------
    schema : Schema
        The user's.
    rewrites : sequence of Rewrite
    out : Extraction
        Of the rewritten schema.

    Returns
    -------
    Extraction
        Its statistics and warnings are those of what was asked.

    Raises
    ------
    ParameterError
        If the extraction is not of what these rewrites ask.
    """
    for field in rewritten(schema, rewrites):
        found = {Field.json(label) for label in out.fields[field.name].log_probs} if field.name in out.fields else set()
        if not found or found - {Field.json(label) for label in field.labels}:
            raise ParameterError(
                f"the extraction is not of what these rewrites ask: field {field.name!r} "
                f"{'has other labels there' if found else 'is not in it'}; give the rewrites its schema was made with"
            )
    by_name = {item.original.name: item for item in rewrites}
    fields = {name: by_name[name].restore(out.fields) if name in by_name else out.fields[name] for name in schema.names}
    return replace(out, fields=fields)


def rewrite_costs(codec: Codec, schema: Schema, ways: Mapping[str, Sequence[Rewrite]]) -> pd.DataFrame:
    """Compare what ways to ask take.

    Parameters
    ----------
    codec : Codec
    schema : Schema
        The user's.
    ways : mapping of str to sequence of Rewrite
        Name of each way → its rewrites; an empty sequence is the schema as it is.

    Returns
    -------
    pandas.DataFrame
        One row per way: ``fields``, ``head`` (prompt tokens in front of a document), ``passes`` (of isolated mode with the
        default scorer, dependencies apart), ``tokens`` (most tree nodes fed behind a document), ``depth`` (mean tokens to tell
        a label apart, over the fields that some way rewrites).
    """
    rows = {}
    subject = {item.original.name for rewrites in ways.values() for item in rewrites}
    for name, rewrites in ways.items():
        asked = rewritten(schema, rewrites)
        compiled = compile_schema(codec, asked)
        changed = subject | {field.name for item in rewrites for field in item.fields}
        open_fields = [item for item in compiled if not item.field.fixed]
        costs = [scorer_cost(item, deciding.resolve("auto", len(item.field.labels))) for item in open_fields]
        depths = [
            item.identified_at(i)
            for item in open_fields
            if item.field.name in changed
            for i in range(len(item.canonical))
        ]
        rows[name] = {
            "fields": len(asked),
            "head": len(compiled.prompt.head),
            "passes": max((cost.passes for cost in costs), default=0),
            "tokens": sum(cost.tokens for cost in costs),
            "depth": float(np.mean(depths)) if depths else 0.0,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


# --- Shortlist ----------------------------------------------------------------------------------------------------------


def rank_labels(field: Field, texts: Sequence[str]) -> NDArray[np.int64]:
    """Order labels by likeness to each document: cosine of TF-IDF weights over character n-grams within words.

    A first stage that knows no meaning, only letters. It costs milliseconds; what matters of it is how often the right label
    is among the first k.

    Parameters
    ----------
    field : Field
    texts : sequence of str
        n documents.

    Returns
    -------
    int64 array, shape (n, labels)
        Indices of labels, the most alike first; equally alike ones in the field's order.

    Raises
    ------
    ParameterError
        If `texts` is one string.

    References
    ----------
    Salton and Buckley, Term-weighting approaches in automatic text retrieval, 1988; scikit-learn's TfidfVectorizer.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    if isinstance(texts, str):
        raise ParameterError("texts is one string; give a sequence of documents, [text] for one")
    parts = label_parts(field)
    words = [parts[x].name.replace("_", " ").strip() if isinstance(x, str) else "" for x in field.labels]
    names = [word or Field.json(label) for word, label in zip(words, field.labels, strict=True)]
    if not len(texts):
        return np.empty((0, len(names)), dtype=np.int64)
    weigh = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, lowercase=True)
    labels = weigh.fit_transform(names)
    # Rounded, so that what is equally alike is equal whatever the order of summation.
    likeness = np.asarray((weigh.transform(texts) @ labels.T).todense()).round(12)
    return np.argsort(-likeness, axis=1, kind="stable").astype(np.int64)
