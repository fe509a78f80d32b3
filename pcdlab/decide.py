"""Log-probabilities in, decisions out.

A *plan* says which nodes of the label tries a pass must read; :func:`decide` turns what was read into one decision per
field. Four scorers:

``marginal``
    log-probability of the tokens up to the one that identifies the label; other spellings that part from the tries at a
    node which is read anyway are added (their probabilities summed).
``exact``
    log-probability of the whole rest of the line, JSON spelling only.
``walk``
    greedy: at each node of the trie the most probable token among those that lead to a label, as constrained decoding
    generates it. Shares are products of the locally renormalised probabilities.
``hybrid``
    walk until at most :data:`FEW` labels remain, then ``exact`` among those.

This module knows compiled fields and numbers; it does not know how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pcdlab.compile import CompiledField
from pcdlab.errors import ParameterError
from pcdlab.result import FieldDecision
from pcdlab.tokentree import TokenTree, TreeBuilder

__all__ = [
    "FEW",
    "MARGINAL_UP_TO",
    "FieldPlan",
    "Normalise",
    "Plan",
    "Scorer",
    "Wish",
    "check_normalise",
    "check_options",
    "decide",
    "plan",
    "scores",
]

Scorer = Literal["auto", "marginal", "exact", "walk", "hybrid"]
Normalise = Literal["sum", "length", "unconditional"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MARGINAL_UP_TO = 32  # "auto" is marginal up to this many labels, hybrid above
FEW = 8  # hybrid scores this many labels or fewer exactly


@dataclass(frozen=True)
class Wish:
    """A field to be read.

    Attributes
    ----------
    compiled : CompiledField
    scorer : {"marginal", "exact", "walk", "hybrid"}
    before : tuple of int
        Tokens between the end of the trunk and the field's branch: the lines of fields it may see.
    survivors : frozenset of int or None
        Second look of ``hybrid``: only these labels, exactly.
    first_shares : array or None
        Second look of ``hybrid``: log-shares of all labels from the first look.
    candidate_mass : float
        Second look of ``hybrid``: the mass from the first look.
    """

    compiled: CompiledField
    scorer: str
    before: tuple[int, ...] = ()
    survivors: frozenset[int] | None = None
    first_shares: Floats | None = None
    candidate_mass: float = 1.0


@dataclass(frozen=True, eq=False)
class FieldPlan:
    """Where one field's numbers stand among the candidates of a plan's tree.

    A *path* is a row of indices into the candidates, padded with -1; its score is the sum over the row.

    Attributes
    ----------
    wish : Wish
    identify : int64 array, shape (paths, depth)
        To the token that identifies a label: the JSON spelling of every label in label order, then other spellings.
    identifies : int64 array, shape (paths,)
        The label each of those identifies.
    whole : int64 array, shape (labels, depth)
        To the end of the line, in label order; rows only for the labels that are scored exactly.
    nodes : dict
        Trie path → (token → index among the candidates), for every trie node that is read.
    """

    wish: Wish
    identify: Ints
    identifies: Ints
    whole: Ints
    nodes: dict[tuple[int, ...], dict[int, int]]


@dataclass(frozen=True, eq=False)
class Plan:
    """A tree to read, its root nodes hanging from the end of the trunk, and how to read the answer."""

    tree: TokenTree
    fields: tuple[FieldPlan, ...]


def check_options(scorer: str, normalise: str) -> None:
    """Refuse unknown names.

    Raises
    ------
    ParameterError
    """
    if scorer not in get_args(Scorer):
        raise ParameterError(f"scorer={scorer!r} is unknown; choose one of {', '.join(get_args(Scorer))}")
    if normalise not in get_args(Normalise):
        raise ParameterError(f"normalise={normalise!r} is unknown; choose one of {', '.join(get_args(Normalise))}")


def check_normalise(wishes: Iterable[Wish], normalise: str) -> None:
    """Refuse to normalise scores that are no log-probabilities: the shares of ``walk`` and ``hybrid``.

    Raises
    ------
    ParameterError
    """
    unfit = [wish for wish in wishes if wish.scorer not in ("marginal", "exact")]
    if normalise != "sum" and unfit:
        names = ", ".join(wish.compiled.field.name for wish in unfit)
        raise ParameterError(
            f"normalise: {normalise} needs log-probabilities of whole labels, which the scorer {unfit[0].scorer} does not give "
            f"(fields decided by it: {names}); choose the scorer marginal or exact"
        )


def resolve(scorer: str, labels: int) -> str:
    """The scorer for a field with this many labels."""
    if scorer == "auto":
        scorer = "marginal" if labels <= MARGINAL_UP_TO else "hybrid"
    # With few labels from the start there is nothing to walk.
    return "exact" if scorer == "hybrid" and labels <= FEW else scorer


def plan(wishes: Iterable[Wish]) -> Plan:
    """The tree that holds everything the wishes need, shared where they share."""
    builder = TreeBuilder()
    drafts = [(wish, _read_trie(builder, wish)) for wish in wishes]
    tree = builder.build()
    return Plan(tree, tuple(_field_plan(wish, nodes, tree) for wish, nodes in drafts))


def _read_trie(builder: TreeBuilder, wish: Wish) -> dict[tuple[int, ...], tuple[int, dict[int, int]]]:
    """Add the trie nodes that a wish reads; trie path → (read, token → place in the read)."""
    compiled = wish.compiled
    end = builder.extend(-1, (*wish.before, *compiled.branch))
    # To tell labels apart: every node that more than one label goes through. To score lines: every node of their lines.
    if wish.scorer == "exact":
        labels = range(len(compiled.canonical)) if wish.survivors is None else sorted(wish.survivors)
        paths = {
            compiled.canonical[i].tokens[:depth] for i in labels for depth in range(len(compiled.canonical[i].tokens))
        }
    else:
        paths = {path for path, after in compiled.trie.items() if len(frozenset().union(*after.values())) > 1}
    claims = _claims(compiled, paths) if wish.survivors is None else {}
    found = {}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        tokens = [*compiled.trie[path], *claims.get(path, {})]
        read, places = builder.read(builder.extend(end, path), tokens)
        found[path] = (read, dict(zip(tokens, places, strict=True)))
    return found


def _claims(compiled: CompiledField, paths: set[tuple[int, ...]]) -> dict[tuple[int, ...], dict[int, int]]:
    """Other spellings where they part from the trie: trie path → token → the one label it identifies."""
    claims: dict[tuple[int, ...], dict[int, set[int]]] = {}
    for spelling in compiled.spellings[len(compiled.canonical) :]:
        depth = 0
        while depth < len(spelling.tokens) and spelling.tokens[depth] in compiled.trie.get(spelling.tokens[:depth], {}):
            depth += 1
        path = spelling.tokens[:depth]
        if depth < len(spelling.tokens) and path in paths:
            claims.setdefault(path, {}).setdefault(spelling.tokens[depth], set()).add(spelling.label)
    return {
        path: {token: next(iter(labels)) for token, labels in tokens.items() if len(labels) == 1}
        for path, tokens in claims.items()
    }


def _field_plan(wish: Wish, nodes: dict[tuple[int, ...], tuple[int, dict[int, int]]], tree: TokenTree) -> FieldPlan:
    compiled = wish.compiled
    index = {
        path: {token: int(tree.offsets[read]) + place for token, place in places.items()}
        for path, (read, places) in nodes.items()
    }

    def path_of(tokens: Sequence[int]) -> list[int]:
        return [index[tuple(tokens[:depth])][token] for depth, token in enumerate(tokens)]

    identify: list[list[int]] = []
    identifies: list[int] = []
    if wish.survivors is None:
        for spelling in compiled.canonical:
            identify.append(path_of(spelling.tokens[: compiled.identified_at(spelling.label)]))
            identifies.append(spelling.label)
        for path, tokens in _claims(compiled, set(index)).items():
            # In an exact plan the path may lie below the identifying token, whose mass already holds this spelling.
            if len(frozenset().union(*compiled.trie[path].values())) > 1:
                for token, label in tokens.items():
                    identify.append([*path_of(path), index[path][token]])
                    identifies.append(label)
    labels: Iterable[int] = wish.survivors if wish.survivors is not None else range(len(compiled.canonical))
    whole = [path_of(compiled.canonical[i].tokens) for i in sorted(labels)] if wish.scorer == "exact" else []
    return FieldPlan(wish, _padded(identify), np.array(identifies, dtype=np.int64), _padded(whole), index)


def _padded(rows: list[list[int]]) -> Ints:
    width = max(map(len, rows), default=0)
    return np.array([row + [-1] * (width - len(row)) for row in rows], dtype=np.int64).reshape(len(rows), width)


# --- numbers -----------------------------------------------------------------------------------------------------


def _log_sum(values: Floats) -> float:
    top = float(values.max())
    return top + float(np.log(np.exp(values - top).sum()))


def _sums(log_probs: Floats, paths: Ints) -> Floats:
    """Sum of each path's log-probabilities; index -1 is the zero at the end."""
    return np.append(log_probs, 0.0)[paths].sum(axis=1)


def _identified(item: FieldPlan, log_probs: Floats) -> Floats:
    """Log of the probability that the continuation reaches a token identifying each label, shape (labels,)."""
    out = np.full(len(item.wish.compiled.canonical), -np.inf)
    np.logaddexp.at(out, item.identifies, _sums(log_probs, item.identify))
    return out


def scores(item: FieldPlan, log_probs: Floats, length: bool = False) -> Floats:
    """Label scores of a field read by ``marginal`` or ``exact``, shape (labels,).

    Parameters
    ----------
    item : FieldPlan
    log_probs : float64 array, shape (candidates,)
        What the plan's tree read.
    length : bool
        Divide by the number of tokens scored.
    """
    exact = item.wish.scorer == "exact"
    out = _sums(log_probs, item.whole) if exact else _identified(item, log_probs)
    if length:
        paths = item.whole if exact else item.identify[: len(out)]
        out = out / (paths >= 0).sum(axis=1)
    return out


def _walk(item: FieldPlan, log_probs: Floats, few: int) -> tuple[Floats, frozenset[int]]:
    """Log-shares of all labels by local renormalisation, and the labels left where the greedy walk has at most `few`."""
    compiled = item.wish.compiled
    local = np.zeros_like(log_probs)
    for node, places in item.nodes.items():
        at = np.array([places[token] for token in compiled.trie[node]])
        local[at] = log_probs[at] - _log_sum(log_probs[at])
    shares = _sums(local, item.identify[: len(compiled.canonical)])
    path: tuple[int, ...] = ()
    left = frozenset(range(len(compiled.canonical)))
    while len(left) > few:
        after = compiled.trie[path]
        token = max(after, key=lambda token: (local[item.nodes[path][token]], -min(after[token])))
        left, path = after[token], (*path, token)
    return shares, left


def decide(
    item: FieldPlan, log_probs: Floats, normalise: Normalise = "sum", reference: Floats | None = None
) -> FieldDecision | Wish:
    """Decide one field, or say what a second look must read.

    Parameters
    ----------
    item : FieldPlan
    log_probs : float64 array, shape (candidates,)
        What the plan's tree read, natural logarithms.
    normalise : {"sum", "length", "unconditional"}
    reference : float64 array, shape (labels,)
        With ``"unconditional"``: the field's :func:`scores` under an empty document.

    Returns
    -------
    FieldDecision or Wish
        A wish (to be planned again) only from ``hybrid``.
    """
    wish = item.wish
    if wish.survivors is not None:
        assert wish.first_shares is not None
        return _settle(item, log_probs, wish.first_shares, wish.survivors)
    mass = min(1.0, float(np.exp(_log_sum(_identified(item, log_probs)))))
    if wish.scorer in ("marginal", "exact"):
        values = scores(item, log_probs, length=normalise == "length")
        if reference is not None:
            values = values - reference
        return _decision(wish, values, values - _log_sum(values), int(values.argmax()), mass)
    if wish.scorer == "walk":
        shares, left = _walk(item, log_probs, few=1)
        return _decision(wish, shares, shares, next(iter(left)), mass)
    shares, left = _walk(item, log_probs, few=FEW)
    if len(left) == 1:
        return _decision(wish, shares, shares, next(iter(left)), mass)
    return Wish(wish.compiled, "exact", wish.before, left, shares, mass)


def _settle(item: FieldPlan, log_probs: Floats, first: Floats, survivors: frozenset[int]) -> FieldDecision:
    """Hybrid's second look: the walk's share of the survivors, divided by their exact scores."""
    left = np.array(sorted(survivors))
    exact = _sums(log_probs, item.whole)
    shares = first.copy()
    shares[left] = _log_sum(first[left]) + exact - _log_sum(exact)
    wish = Wish(item.wish.compiled, "hybrid", item.wish.before)
    return _decision(wish, shares, shares, int(left[exact.argmax()]), item.wish.candidate_mass)


def _decision(wish: Wish, values: Floats, log_shares: Floats, chosen: int, mass: float) -> FieldDecision:
    field = wish.compiled.field
    shares = np.exp(log_shares)
    others = [i for i in np.argsort(-shares, kind="stable") if i != chosen]
    return FieldDecision(
        name=field.name,
        value=field.labels[chosen],
        probability=min(1.0, float(shares[chosen])),
        candidate_mass=mass,
        log_probs={label: float(value) for label, value in zip(field.labels, values, strict=True)},
        method=wish.scorer,
        alternatives=tuple((field.labels[i], float(shares[i])) for i in others),
    )
