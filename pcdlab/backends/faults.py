"""Backends that are wrong on purpose, to show that the conformance checks see what they should.

Each function wraps a sound backend and plants one mistake that real code makes. Knows the verbs of the contract only; what
a mistake looks like inside a framework is not its concern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pcdlab.backends.base import Backend, Reading
from pcdlab.tokentree import TokenTree

__all__ = [
    "FAULTS",
    "forgotten_rollback",
    "jitter",
    "leaking_sibling",
    "mutated_prefix",
    "padding_leak",
    "raw_logits",
    "short_trunk",
    "softmax_of_candidates",
    "stale_position",
    "swapped_chunks",
]


class _Wrapped:
    """Another object with some attributes replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def stale_position(backend: Backend) -> Any:
    """Trees start one position too early, as after a prefix that grew without its length being updated.

    Felt by backends that take positions from ``prefix.length``.
    """

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        stale = None if prefix is None else _Wrapped(prefix, length=prefix.length - 1)
        return backend.read(stale, tree, keep)

    return _Wrapped(backend, read=read)


def leaking_sibling(backend: Backend) -> Any:
    """At every fork the second branch sees the first one's first token, as when a cache is not cut back in between."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        parents = tree.parents.copy()
        for fork in set(tree.parents.tolist()):
            children = np.flatnonzero(tree.parents == fork)
            if len(children) > 1:
                parents[children[1]] = children[0]
        return backend.read(prefix, replace(tree, parents=parents), keep)

    return _Wrapped(backend, read=read)


def mutated_prefix(backend: Backend, verb: str = "stream") -> Any:
    """A call leaves its first token behind in the prefix it was given, as when a cache grows in place.

    Parameters
    ----------
    backend : Backend
    verb : {"prefill", "read", "stream"}
        The call that does it.
    """

    class Box:  # what holds a prefix, so that it can change behind its user's back
        def __init__(self, inner: Any, length: int) -> None:
            self.inner = inner
            self.length = length

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    def unboxed(prefix: Any) -> Any:
        return prefix.inner if isinstance(prefix, Box) else prefix

    def grow(prefix: Any, by: str, token: int) -> None:
        if isinstance(prefix, Box) and by == verb:
            prefix.inner = backend.prefill([int(token)], prefix.inner)

    def prefill(tokens: Any, parent: Any = None) -> Box:
        longer = Box(backend.prefill(tokens, unboxed(parent)), len(tokens) + (parent.length if parent else 0))
        grow(parent, "prefill", tokens[0])
        return longer

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(unboxed(prefix), tree, keep)
        kept = Box(reading.prefix, keep + (prefix.length if prefix else 0)) if keep else None
        grow(prefix, "read", tree.tokens[0])
        return replace(reading, prefix=kept)

    def stream(prefix: Any) -> Any:
        sound = backend.stream(unboxed(prefix))

        def feed(tokens: Any, last: bool = False) -> Any:
            grow(prefix, "stream", tokens[0])
            return sound.feed(tokens, last)

        return _Wrapped(sound, feed=feed)

    return _Wrapped(backend, prefill=prefill, read=read, stream=stream)


def padding_leak(backend: Backend) -> Any:
    """A short branch beside a longer one is read behind its padding, as when the last column of padded rows is taken."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        tokens, parents, nodes = tree.tokens.tolist(), tree.parents.tolist(), tree.read_nodes.tolist()
        depths, inner = tree.depths, set(parents)
        for i, node in enumerate(nodes):
            if node in inner:  # only leaves have padding behind them
                continue
            for _ in range(int(depths.max() - depths[node])):
                tokens.append(tokens[node])
                parents.append(nodes[i])
                nodes[i] = len(tokens) - 1
        return backend.read(
            prefix, replace(tree, tokens=np.array(tokens), parents=np.array(parents), read_nodes=np.array(nodes)), keep
        )

    return _Wrapped(backend, read=read)


def softmax_of_candidates(backend: Backend) -> Any:
    """Log-probabilities are normalised over the candidates that were asked for, not over the vocabulary."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(prefix, tree, keep)
        log_probs = reading.log_probs.copy()
        for start, stop in zip(tree.offsets[:-1], tree.offsets[1:], strict=True):
            log_probs[start:stop] -= np.logaddexp.reduce(log_probs[start:stop])
        return replace(reading, log_probs=log_probs)

    return _Wrapped(backend, read=read)


def raw_logits(backend: Backend) -> Any:
    """Logits come back as they are, without the softmax: right up to a constant per read."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(prefix, tree, keep)
        return replace(reading, log_probs=reading.log_probs + 0.5)

    return _Wrapped(backend, read=read)


def swapped_chunks(backend: Backend, size: int = 16) -> Any:
    """A tree with more reads than fit into a chunk answers its first two chunks in the wrong order."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(prefix, tree, keep)
        parts = np.split(reading.log_probs, tree.offsets[size:-1:size])
        return replace(reading, log_probs=np.concatenate([*parts[1:2], parts[0], *parts[2:]]))

    return _Wrapped(backend, read=read)


def short_trunk(backend: Backend) -> Any:
    """A kept trunk lacks its last token, as when an end is taken for exclusive twice."""

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(prefix, tree, keep)
        if not 0 < keep <= tree.trunk:
            return reading
        short = backend.read(prefix, tree, keep - 1).prefix if keep > 1 else prefix
        return replace(reading, prefix=_Wrapped(short, length=reading.prefix.length))

    return _Wrapped(backend, read=read)


def forgotten_rollback(backend: Backend) -> Any:
    """A stream's rollback takes back one token too few, and its length does not show it."""

    def stream(prefix: Any) -> Any:
        sound = backend.stream(prefix)
        faulty: Any = _Wrapped(sound, length=sound.length)

        def feed(tokens: Any, last: bool = False) -> Any:
            faulty.length += len(tokens)
            return sound.feed(tokens, last)

        def rollback(count: int) -> None:
            faulty.length -= count
            sound.rollback(count - 1)

        faulty.feed, faulty.rollback = feed, rollback
        return faulty

    return _Wrapped(backend, stream=stream)


def jitter(backend: Backend) -> Any:
    """Answers carry a little noise, different at every call."""
    rng = np.random.default_rng(0)

    def read(prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        reading = backend.read(prefix, tree, keep)
        return replace(reading, log_probs=reading.log_probs + rng.normal(0, 1e-5, len(reading.log_probs)))

    return _Wrapped(backend, read=read)


FAULTS: dict[str, tuple[Callable[[Backend], Any], str]] = {
    "stale position": (stale_position, "tree as stream"),
    "leaking sibling": (leaking_sibling, "sibling isolation"),
    "mutated prefix": (mutated_prefix, "immutable prefix"),
    "padding leak": (padding_leak, "padding"),
    "softmax of candidates": (softmax_of_candidates, "candidates"),
    "raw logits": (raw_logits, "normalisation"),
    "swapped chunks": (swapped_chunks, "chunking"),
    "short trunk": (short_trunk, "trunk keeping"),
    "forgotten rollback": (forgotten_rollback, "stream rollback"),
    "jitter": (jitter, "repeatability"),
}  # name → how to plant it, and the check that must see it
