"""The token tree: everything the engine asks of a model in one forward pass.

A tree hangs off a cached prefix. A node is a token with a parent; it may attend to the prefix and to its own
ancestors, to nothing else, and its position is the prefix length plus its depth. A *read* asks, at a node, for the
log-probabilities of some candidate next tokens. This module builds trees and lays them out in memory order for
attention. It knows integers only: no tokenizer, no framework, no label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "Group", "Layout", "TokenTree", "TreeBuilder", "below", "join", "lay_out"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree of tokens with reads, as flat arrays.

    Attributes
    ----------
    tokens : int64 array, shape (n,)
        Token id of each node.
    parents : int64 array, shape (n,)
        Index of each node's parent, always smaller than the node's own; -1 where the parent is the end of the prefix.
    read_nodes : int64 array, shape (r,)
        The node each read is taken at: the distribution of the token that follows it.
    candidates : int64 array, shape (c,)
        Token ids asked for, the reads' lists one after another.
    offsets : int64 array, shape (r + 1,)
        Read i asks for ``candidates[offsets[i]:offsets[i + 1]]``.
    shared : int
        Leading nodes that are the trunks :func:`join` was given: the same in every join of the same trunks.
    """

    tokens: IntArray
    parents: IntArray
    read_nodes: IntArray
    candidates: IntArray
    offsets: IntArray
    shared: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> IntArray:
        """Number of ancestors of each node inside the tree, int64, shape (n,)."""
        depths = np.zeros(len(self), dtype=np.int64)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    @cached_property
    def trunk(self) -> int:
        """Length of the leading chain: nodes 0, 1, 2, … each the only child of the one before."""
        parents = self.parents
        n = len(parents)
        length = int(np.argmin(np.append(parents == np.arange(-1, n - 1), False)))
        # A chain node that something else hangs from is the chain's last.
        elsewhere = parents[length:]
        if (elsewhere < 0).any():
            return 0
        return min(length, int(elsewhere.min()) + 1) if len(elsewhere) else length

    def path(self, node: int) -> list[int]:
        """Node indices from the root down to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def read(self, index: int) -> IntArray:
        """Candidate token ids of read `index`."""
        return self.candidates[self.offsets[index] : self.offsets[index + 1]]


@dataclass
class TreeBuilder:
    """Grows a :class:`TokenTree` path by path; a path that is already there is shared, never repeated."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _read_at: dict[int, int] = field(default_factory=dict)
    _reads: list[list[int]] = field(default_factory=list)

    def extend(self, parent: int, tokens: Sequence[int]) -> int:
        """Walk `tokens` down from node `parent` (-1: the prefix), adding what is missing; return the last node."""
        for token in tokens:
            node = self._children.get((parent, token))
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self._children[parent, token] = node
            parent = node
        return parent

    def read(self, node: int, candidates: Sequence[int]) -> tuple[int, list[int]]:
        """Ask for `candidates` at `node`; return the read's index and the candidates' places in it."""
        index = self._read_at.setdefault(node, len(self._reads))
        if index == len(self._reads):
            self._reads.append([])
        wanted = self._reads[index]
        place = {token: i for i, token in enumerate(wanted)}
        for token in candidates:
            if token not in place:
                place[token] = len(wanted)
                wanted.append(token)
        return index, [place[token] for token in candidates]

    def build(self) -> TokenTree:
        """The tree grown so far."""
        nodes = sorted(self._read_at, key=self._read_at.__getitem__)
        sizes = [len(read) for read in self._reads]
        return TokenTree(
            tokens=np.array(self.tokens, dtype=np.int64),
            parents=np.array(self.parents, dtype=np.int64),
            read_nodes=np.array(nodes, dtype=np.int64),
            candidates=np.array([token for read in self._reads for token in read], dtype=np.int64),
            offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
        )


def join(trunks: Sequence[Sequence[int]], branches: Sequence[TokenTree]) -> TokenTree:
    """One tree for several documents: each trunk with its branches below its end.

    Trunks share their common beginnings. Reads and candidates come out document by document, each document's in the
    order of its branches. Equal trunks with the same branches (the same object) share one set of nodes.

    Parameters
    ----------
    trunks : sequence of token id sequences
        What follows the prefix for each document; nothing, where its branches hang from the prefix itself.
    branches : sequence of TokenTree
        What hangs below the end of each trunk.
    """
    shared = TreeBuilder()
    ends = [shared.extend(-1, trunk) for trunk in trunks]
    tokens = [np.array(shared.tokens, dtype=np.int64)]
    parents = [np.array(shared.parents, dtype=np.int64)]
    size = len(shared.tokens)
    starts: dict[tuple[int, int], int] = {}
    read_nodes, offsets, asked = [], [], 0
    for end, tree in zip(ends, branches, strict=True):
        if (end, id(tree)) not in starts:
            starts[end, id(tree)] = size
            tokens.append(tree.tokens)
            parents.append(np.where(tree.parents < 0, end, tree.parents + size))
            size += len(tree)
        read_nodes.append(np.where(tree.read_nodes < 0, end, tree.read_nodes + starts[end, id(tree)]))
        offsets.append(tree.offsets[:-1] + asked)
        asked += len(tree.candidates)
    return TokenTree(
        tokens=np.concatenate(tokens),
        parents=np.concatenate(parents),
        read_nodes=np.concatenate(read_nodes),
        candidates=np.concatenate([tree.candidates for tree in branches]),
        offsets=np.concatenate([*offsets, [asked]]).astype(np.int64),
        shared=len(shared.tokens),
    )


def below(tree: TokenTree, known: int) -> tuple[TokenTree, IntArray]:
    """A tree without its first `known` nodes, none of which is read, and where what is left hangs.

    Returns
    -------
    tree : TokenTree
        The other nodes, counted from 0; -1 is the parent of those that hang from a known node or from the prefix.
    hangs : int64 array, shape (nodes left,)
        For every node left, the known node above it; -1 where there is none.
    """
    parents = tree.parents[known:].tolist()
    hangs: list[int] = []
    for parent in parents:
        hangs.append(parent if parent < known else hangs[parent - known])
    rest = np.array([parent - known if parent >= known else -1 for parent in parents], dtype=np.int64)
    left = TokenTree(tree.tokens[known:], rest, tree.read_nodes - known, tree.candidates, tree.offsets)
    return left, np.array(hangs, dtype=np.int64)


# --- memory layout ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Rows ``start:stop``, each the parent of the next; every row of ``stop:reach`` descends from all of them."""

    start: int
    stop: int
    reach: int


@dataclass(frozen=True, eq=False)
class Group:
    """Rows ``start:stop`` of whole sibling subtrees; ``mask[i, j]`` says whether row i may attend to row j."""

    start: int
    stop: int
    mask: NDArray[np.bool_]  # [stop - start, stop - start]


@dataclass(frozen=True, eq=False)
class Layout:
    """A tree in depth-first order, cut into chains and groups.

    In depth-first order the descendants of a chain are one contiguous run of rows, and all of them attend to the whole
    chain: that part of attention needs no mask. What is left is causal attention inside each chain and a small mask
    inside each group. Together with the prefix this covers every allowed pair of rows exactly once.

    Attributes
    ----------
    order : int64 array, shape (n,)
        ``order[row]`` is the node in that row.
    rows : int64 array, shape (n,)
        The inverse: the row of each node.
    chains, groups : tuple
        The pieces; each row belongs to exactly one of them.
    """

    order: IntArray
    rows: IntArray
    chains: tuple[Chain, ...]
    groups: tuple[Group, ...]


def lay_out(tree: TokenTree, group_size: int = 64) -> Layout:
    """Lay a tree out for attention.

    A subtree of at most `group_size` nodes goes into a group whole, together with its neighbours while they fit; a
    larger one gives up its leading chain and is cut below it.

    Parameters
    ----------
    tree : TokenTree
    group_size : int
        Most rows in a group. Groups cost their size squared, chains a kernel call each.
    """
    n = len(tree)
    children: list[list[int]] = [[] for _ in range(n + 1)]  # the last list: children of the prefix
    sizes = np.ones(n, dtype=np.int64)
    parents = tree.parents.tolist()
    for node in range(n - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    for node, parent in enumerate(parents):
        children[parent].append(node)

    order: list[int] = []
    chains: list[Chain] = []
    groups: list[Group] = []

    def emit(roots: list[int]) -> None:
        """Put whole subtrees into the next rows as one group."""
        start = len(order)
        stack = roots[::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(children[node]))
        row_of = {node: i for i, node in enumerate(order[start:])}
        mask = np.eye(len(row_of), dtype=bool)
        for node, i in row_of.items():
            above = row_of.get(parents[node])
            if above is not None:
                mask[i] |= mask[above]
        groups.append(Group(start, len(order), mask))

    # An explicit stack: a path may be thousands of nodes deep.
    work: list[list[int] | tuple[int, int]] = [children[n]]
    while work:
        item = work.pop()
        if isinstance(item, tuple):
            start, stop = item
            chains.append(Chain(start, stop, len(order)))
            continue
        waiting: list[int] = []
        room = group_size
        for position, node in enumerate(item):
            if sizes[node] <= group_size:
                if sizes[node] > room:
                    emit(waiting)
                    waiting, room = [], group_size
                waiting.append(node)
                room -= int(sizes[node])
                continue
            if waiting:
                emit(waiting)
                waiting = []
            start = len(order)
            order.append(node)
            while len(children[node]) == 1:
                node = children[node][0]
                order.append(node)
            # Below the chain first, then close it, then the siblings that are still to come.
            work.append(item[position + 1 :])
            work.append((start, len(order)))
            work.append(children[node])
            break
        else:
            if waiting:
                emit(waiting)

    rows = np.empty(n, dtype=np.int64)
    as_array = np.array(order, dtype=np.int64)
    rows[as_array] = np.arange(n)
    return Layout(as_array, rows, tuple(sorted(chains, key=lambda c: c.start)), tuple(groups))
