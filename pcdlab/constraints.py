"""Constraints between fields: *if* some fields have these values, *then* others have those.

Knows how a constraint is written, which objects keep it, and how to find the most probable object that keeps all of them.
Refuses to know where objects and scores come from.

Written in a preset, a value or an array of values (any of them) per field::

    {"if": {"format": "BOF", "level": ["BEGINNER", "INTERMEDIATE"]}, "then": {"needs_laptop": false}}
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pcdlab.errors import ParameterError, SchemaError
from pcdlab.schema import Field, Label, Schema, did_you_mean, json_type, located

__all__ = ["Condition", "Consistent", "Constraint", "broken", "constraints_from_json", "most_probable"]


class Condition(NamedTuple):
    """A field has one of some labels.

    Attributes
    ----------
    field : str
    labels : tuple of label
    """

    field: str
    labels: tuple[Label, ...]

    def holds(self, values: Mapping[str, Label]) -> bool:
        """Whether an object's field has one of the labels; ``true`` and ``1`` are different ones."""
        text = Field.json(values[self.field])
        return any(Field.json(label) == text for label in self.labels)


@dataclass(frozen=True)
class Constraint:
    """If every condition of `when` holds, every condition of `then` must.

    Attributes
    ----------
    when, then : tuple of Condition
        No field in both.

    Examples
    --------
    >>> rule = Constraint((Condition("format", ("BOF",)),), (Condition("needs_laptop", (False,)),))
    >>> rule.kept({"format": "BOF", "needs_laptop": True})
    False
    >>> str(rule)
    'if format is "BOF" then needs_laptop is false'
    """

    when: tuple[Condition, ...]
    then: tuple[Condition, ...]

    def kept(self, values: Mapping[str, Label]) -> bool:
        """Whether an object keeps the constraint."""
        return not all(item.holds(values) for item in self.when) or all(item.holds(values) for item in self.then)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Write it as in a preset."""
        return {
            key: {name: labels[0] if len(labels) == 1 else list(labels) for name, labels in conditions}
            for key, conditions in (("if", self.when), ("then", self.then))
        }

    def __str__(self) -> str:
        words = (
            " and ".join(f"{name} is {' or '.join(map(Field.json, labels))}" for name, labels in conditions)
            for conditions in (self.when, self.then)
        )
        return "if {} then {}".format(*words)


def constraints_from_json(data: Any, schema: Schema) -> tuple[Constraint, ...]:
    """Read constraints as they stand in a preset.

    Parameters
    ----------
    data : list of mapping
        ``{"if": {field: value or [value, …], …}, "then": {…}}`` each.
    schema : Schema
        The fields they are about.

    Returns
    -------
    tuple of Constraint

    Raises
    ------
    SchemaError
        If `data` has another shape, or names a field or a value that is not in the schema.
    """
    if not isinstance(data, list | tuple):
        raise SchemaError(f'is {json_type(data)}; must be an array of {{"if": {{…}}, "then": {{…}}}}')
    return tuple(_constraint(number, item, schema) for number, item in enumerate(data, start=1))


def _constraint(number: int, data: Any, schema: Schema) -> Constraint:
    with located(f"number {number}"):
        if not isinstance(data, Mapping) or set(data) != {"if", "then"}:
            seen = (
                f"has the keys {', '.join(map(repr, data))}" if isinstance(data, Mapping) else f"is {json_type(data)}"
            )
            raise SchemaError(f'{seen}; a constraint has exactly "if" and "then"')
        sides = []
        for key in ("if", "then"):
            with located(f'"{key}"'):
                if not isinstance(data[key], Mapping) or not data[key]:
                    raise SchemaError("must be an object with at least one field: {field: value or [value, …]}")
                sides.append(tuple(_condition(name, labels, schema) for name, labels in data[key].items()))
        if both := {item.field for item in sides[0]} & {item.field for item in sides[1]}:
            raise SchemaError(f'field {min(both)!r} stands in "if" and in "then"; name it in one of them')
    return Constraint(*sides)


def _condition(name: Any, labels: Any, schema: Schema) -> Condition:
    if name not in schema.names:
        raise SchemaError(
            f"{name!r} is no field of the schema{did_you_mean(name, schema.names)}; name one of its fields"
        )
    known = {Field.json(label): label for label in schema[name].labels}
    found = []
    for label in labels if isinstance(labels, list | tuple) else [labels]:
        text = Field.json(label)
        if text not in known:
            listed = ", ".join(list(known)[:12]) + (", …" if len(known) > 12 else "")
            raise SchemaError(
                f"{text} is no label of field {name!r}{did_you_mean(text, known)}; its labels are {listed}"
            )
        found.append(known[text])
    if not found:
        raise SchemaError(f"field {name!r} has an empty array; list the values of which one must hold")
    return Condition(name, tuple(found))


def broken(constraints: Sequence[Constraint], values: Mapping[str, Label]) -> list[Constraint]:
    """List the constraints that an object does not keep.

    Parameters
    ----------
    constraints : sequence of Constraint
    values : mapping of str to label
        The object; has every field the constraints name.
    """
    return [item for item in constraints if not item.kept(values)]


# --- Repair ---------------------------------------------------------------------------------------------------------


class Consistent(NamedTuple):
    """The most probable object that keeps all constraints.

    Attributes
    ----------
    values : dict of str to label
        In schema order.
    score : float
        Sum of the chosen labels' scores.
    loss : float
        By how much the object that ignores the constraints scores higher, >= 0; 0 where that one keeps them.
    """

    values: dict[str, Label]
    score: float
    loss: float


_Domains = dict[str, frozenset[int]]


def most_probable(schema: Schema, constraints: Sequence[Constraint], scores: Mapping[str, ArrayLike]) -> Consistent:
    """Find the object with the highest sum of label scores among those that keep every constraint.

    Exact. The space of objects is split on the first constraint that the best object of a part breaks, into parts in which the
    constraint holds whatever is chosen (a condition of its "if" fails, or all of its "then" hold); the part with the best
    bound goes first. The work grows with the constraints that are broken on the way, not with the number of labels or
    objects. With fields decided apart from one another the sum is the logarithm of the object's probability.

    Parameters
    ----------
    schema : Schema
    constraints : sequence of Constraint
    scores : mapping of str to array, shape (labels,)
        Natural-log scores of every field, in label order; a constant added to a field's changes nothing. -inf excludes a label
        as long as anything else keeps the constraints.

    Returns
    -------
    Consistent
        Of several equally good objects one, always the same.

    Raises
    ------
    SchemaError
        If no object keeps all constraints.
    ParameterError
        If scores are missing, NaN, or not one per label.

    References
    ----------
    Williams and Ragno, Conflict-directed A* and its role in model-based embedded systems, Discrete Applied Mathematics 155,
    2007; the partition is that of Lawler, Management Science 18, 1972.
    """
    tables = {item.name: _table(item, scores) for item in schema}
    ranked = {name: np.argsort(-table, kind="stable").tolist() for name, table in tables.items()}

    def best(domains: _Domains) -> dict[str, int]:
        return {
            name: next(i for i in order if name not in domains or i in domains[name]) for name, order in ranked.items()
        }

    def total(picks: Mapping[str, int]) -> float:
        return sum(float(tables[name][i]) for name, i in picks.items())

    rules = [_in_numbers(item, schema) for item in constraints]
    top = best({})
    number = count()  # so that parts of equal bound are never compared themselves
    parts: list[tuple[float, int, _Domains]] = [(-total(top), next(number), {})]
    while parts:
        _, _, domains = heapq.heappop(parts)
        picks = best(domains)
        rule = next((rule for rule in rules if _breaks(rule, picks)), None)
        if rule is None:
            pairs = [(tables[name][top[name]], tables[name][i]) for name, i in picks.items()]
            lost = [float(most - got) for most, got in pairs if most > got]  # not -inf from -inf
            return Consistent({name: schema[name].labels[i] for name, i in picks.items()}, total(picks), sum(lost))
        for part in _split(rule, domains, schema):
            heapq.heappush(parts, (-total(best(part)), next(number), part))
    raise SchemaError(
        f"no object keeps all constraints ({'; '.join(map(str, constraints))}); remove or widen one of them"
    )


# A constraint as label indices: (field, allowed) of "if", and of "then".
_Rule = tuple[list[tuple[str, frozenset[int]]], list[tuple[str, frozenset[int]]]]


def _in_numbers(constraint: Constraint, schema: Schema) -> _Rule:
    def places(conditions: Sequence[Condition]) -> list[tuple[str, frozenset[int]]]:
        found = []
        for name, labels in conditions:
            texts = [Field.json(label) for label in schema[name].labels]
            found.append((name, frozenset(texts.index(Field.json(label)) for label in labels)))
        return found

    return places(constraint.when), places(constraint.then)


def _breaks(rule: _Rule, picks: Mapping[str, int]) -> bool:
    when, then = rule
    return all(picks[name] in allowed for name, allowed in when) and any(
        picks[name] not in allowed for name, allowed in then
    )


def _split(rule: _Rule, domains: _Domains, schema: Schema) -> Iterator[_Domains]:
    """Cut off, part by part and without overlap, the objects of `domains` that keep the rule."""
    when, then = rule
    left = dict(domains)
    for name, allowed in when:
        all_labels = left.get(name, frozenset(range(len(schema[name].labels))))
        if outside := all_labels - allowed:
            yield {**left, name: outside}
        left[name] = all_labels & allowed
        if not left[name]:
            return
    for name, allowed in then:
        left[name] = left.get(name, frozenset(range(len(schema[name].labels)))) & allowed
        if not left[name]:
            return
    yield left


def _table(field: Field, scores: Mapping[str, ArrayLike]) -> np.ndarray:
    if field.name not in scores:
        raise ParameterError(f"scores: field {field.name!r} is missing; give an array for every field")
    table = np.asarray(scores[field.name], dtype=np.float64)
    if table.shape != (len(field.labels),) or np.isnan(table).any():
        raise ParameterError(
            f"scores of field {field.name!r}: shape {table.shape}{', with NaN' if np.isnan(table).any() else ''}; give one "
            f"number for each of its {len(field.labels)} labels"
        )
    return table
