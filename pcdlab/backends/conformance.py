"""Does a backend keep the contract? Every check computes the same numbers in two ways and compares them.

Works through the verbs of :mod:`pcdlab.backends.base` alone, on any model, a random one included: it knows token ids and
distributions; it does not know frameworks, layouts, tokenizers or text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

from pcdlab.backends.base import Backend
from pcdlab.errors import BackendError, ParameterError
from pcdlab.tokentree import TokenTree, TreeBuilder, join

__all__ = [
    "LOW_PRECISION",
    "PROBABLE",
    "TOLERANCES",
    "Check",
    "Tolerance",
    "check_backend",
    "log_softmax",
    "tolerance_for",
]

Floats = NDArray[np.float64]
Pairs = Iterator[tuple[Floats, Floats]]  # two ways to the same log-probabilities, each [reads, tokens]

PROBABLE = 1e-6  # log-probabilities are compared where either way gives a token at least this probability


@dataclass(frozen=True)
class Tolerance:
    """How different two distributions may be, and by which measure.

    Attributes
    ----------
    measure : str
        ``"log-probability"``: largest absolute difference over the tokens more probable than :data:`PROBABLE`.
        ``"total variation"``: largest total variation distance of a read, half the sum of absolute differences.
    limit : float
        Largest difference that passes.
    """

    measure: str
    limit: float


TOLERANCES = {"float32": Tolerance("log-probability", 2e-3)}
LOW_PRECISION = Tolerance("total variation", 0.15)  # everything else: 16-bit floats, quantised weights
# One call, made before and after something that must not touch it: nothing is rounded differently, unless the memory it
# works on lies elsewhere the second time.
UNTOUCHED = {"sibling isolation": 0.04, "immutable prefix": 0.08}
# Largest |sum − 1|, whatever the number format: float32 sums over a vocabulary were seen to be off by 1e-4.
NORMALISED = 1e-3


@dataclass(frozen=True)
class Check:
    """One comparison and how it came out.

    Attributes
    ----------
    name : str
    compared : str
        The two ways, in words.
    largest : float
        Largest difference found; infinite where a call failed or numbers were no numbers.
    tolerance : float
        Largest difference that passes.
    passed : bool or None
        None: not run, the note says why.
    note : str
        What `largest` is a difference in, or what went wrong.
    """

    name: str
    compared: str
    largest: float
    tolerance: float
    passed: bool | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a difference that is not finite is null."""
        return vars(self) | {"largest": self.largest if np.isfinite(self.largest) else None}


def tolerance_for(dtype: str) -> Tolerance:
    """The tolerance for a backend's number format; see :func:`check_backend` for the reasons."""
    return TOLERANCES.get(dtype, LOW_PRECISION)


def check_backend(
    backend: Backend, seed: int = 0, tokens: int = 60, report: Callable[[str], None] = lambda line: None
) -> list[Check]:
    """Run every check.

    Parameters
    ----------
    backend : Backend
        Any object that keeps the contract. A method ``plain_logits(tokens) -> float32 [n, vocabulary]`` (the model's own
        forward pass) and an attribute ``window`` (its shortest sliding window, in tokens) are used where they exist.
    seed : int
        Of the random token ids.
    tokens : int
        Prompt and tree of one pass together, at least 40. All checks together feed about 30 times as many, whatever the
        model, and a sliding window is checked if it is shorter than ten times as many.
    report : callable
        Told about each check before it runs.

    Returns
    -------
    list of Check
        In the same order for every backend.

    Raises
    ------
    ParameterError
        If `tokens` is too small.

    Notes
    -----
    In float32, two ways to one log-probability differ by the rounding of sums taken in another order: measured up to 3e-6 on
    tiny random models, and on one of 135 million parameters up to 5e-5 (torch) and 1.5e-4 (MLX on a CPU). The mistakes of
    :mod:`pcdlab.backends.faults` move some probable token by 0.2 or more in the check that is there to see them (but for a
    jitter, which only repeatability is there to see). The limit of 2e-3 stands between the two, with room for deeper models.

    Low precision rounds at every layer, and not in the same way when the shapes of products differ. On the same model the
    log-probability of a probable token then moves by up to 0.8, so the total variation is compared: up to 0.06 between sound
    ways in bfloat16 and 0.07 with 4-bit weights, 0.29 or more with a planted mistake. The limit is 0.15; less where one call is
    made before and after something that must not touch it (0.08 after a prefix was used, 0.03 measured; 0.04 beside another
    branch, 0 measured). Tiny random models are less certain of anything: noise of 0.01, mistakes of 0.05 and more.

    Whole distributions are compared at every read, not the few candidates a schema asks for: a mistake may leave those few
    where they are.
    """
    if tokens < 40:
        raise ParameterError(f"tokens={tokens} is too few to tell a sound backend from a broken one; give at least 40")
    found = []
    for number, (name, compared, run) in enumerate(_CHECKS):
        report(f"check {number + 1} of {len(_CHECKS)}: {name}")
        found.append(_judge(name, compared, run, _Lab(backend, np.random.default_rng([seed, number]), tokens)))
    return found


class _NotRunError(Exception):
    """Why a check does not apply to this backend."""


def _judge(name: str, compared: str, run: Callable[[_Lab], Pairs], lab: _Lab) -> Check:
    tolerance = tolerance_for(lab.backend.dtype)
    limits = {**UNTOUCHED, "repeatability": 0.0, "normalisation": NORMALISED}
    limit = min(tolerance.limit, limits.get(name, tolerance.limit))
    worst = {"log-probability": 0.0, "total variation": 0.0}
    try:
        for one, other in run(lab):
            for measure, value in zip(worst, _differences(one, other), strict=True):
                worst[measure] = max(worst[measure], value)
    except _NotRunError as reason:
        return Check(name, compared, 0.0, limit, None, str(reason))
    except Exception as error:  # frameworks raise what they like, and the other checks still have something to say
        return Check(name, compared, np.inf, limit, False, f"{type(error).__name__}: {error}")
    largest = worst.pop(tolerance.measure)
    ((other_measure, value),) = worst.items()
    return Check(
        name, compared, largest, limit, largest <= limit, f"in {tolerance.measure}; {value:.1e} in {other_measure}"
    )


def _differences(one: Floats, other: Floats) -> tuple[float, float]:
    """Largest difference in log-probability of a probable token, and in total variation of a row."""
    if one.shape != other.shape:
        raise BackendError(f"{one.shape} log-probabilities one way and {other.shape} the other")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise BackendError("log-probabilities that are not finite")
    p, q = np.exp(one), np.exp(other)
    in_log = np.abs(one - other).max(initial=0.0, where=np.maximum(p, q) >= PROBABLE)
    in_mass = 0.5 * np.abs(p - q).sum(-1).max(initial=0.0)
    return float(in_log), float(in_mass)


def log_softmax(logits: NDArray[np.floating]) -> Floats:
    """Log-softmax over the last axis, computed in float64."""
    return np.asarray(scipy.special.log_softmax(logits.astype(np.float64), axis=-1))


# --- what the checks share -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lab:
    """A backend under test and a supply of tokens."""

    backend: Backend
    rng: np.random.Generator
    tokens: int

    def ids(self, count: int) -> list[int]:
        """Random token ids, no two equal while the vocabulary lasts: siblings must differ."""
        size = self.backend.vocabulary
        return [int(i) for i in self.rng.choice(size, count, replace=count > size)]

    def head(self) -> list[int]:
        return self.ids(self.tokens // 3)

    def tree(self) -> TokenTree:
        """A trunk with three branches, two of which fork again: six leaves of different depths, every node read."""
        trunk, left, right = self.ids(self.tokens // 8), self.ids(3), self.ids(4)
        twigs = [[*left, *self.ids(2)], [*left, *self.ids(1)], [*left, *self.ids(3)], self.ids(1)]
        twigs += [[*right, *self.ids(1)], [*right, *self.ids(2)]]
        return self.read_all([[*trunk, *twig] for twig in twigs])

    def probe(self) -> TokenTree:
        """A small tree that reads a prefix: one token, two branches below it."""
        first, left, right = self.ids(3)
        return self.read_all([[first, left], [first, right]])

    def read_all(self, paths: Sequence[Sequence[int]]) -> TokenTree:
        """A tree of paths, the whole distribution read at every node; read i belongs to node i."""
        return self._reading(paths, ends_only=False)

    def read_ends(self, paths: Sequence[Sequence[int]]) -> TokenTree:
        """A tree of paths, the whole distribution read at the end of each."""
        return self._reading(paths, ends_only=True)

    def _reading(self, paths: Sequence[Sequence[int]], ends_only: bool) -> TokenTree:
        builder = TreeBuilder()
        ends = [builder.extend(-1, path) for path in paths]
        nodes = ends if ends_only else list(range(len(builder.tokens)))
        return _with_reads(builder.build(), nodes, [np.arange(self.backend.vocabulary)] * len(nodes))

    def read(self, prefix: Any, tree: TokenTree, keep: int = 0) -> Floats:
        """Distributions, float64, [reads, vocabulary], of a tree that reads whole distributions."""
        return self.rows(self.backend.read(prefix, tree, keep).log_probs)

    def rows(self, log_probs: Floats) -> Floats:
        return log_probs.reshape(-1, self.backend.vocabulary)

    def prefill(self, tokens: Sequence[int], parent: Any = None) -> Any:
        """A longer prefix whose length is what it should be."""
        prefix = self.backend.prefill(tokens, parent)
        _has_length(prefix, len(tokens) + (parent.length if parent is not None else 0))
        return prefix

    def streamed(self, tokens: Sequence[int]) -> Floats:
        """Distributions after each token but the first, [len(tokens) − 1, vocabulary], fed in one go."""
        return log_softmax(self.backend.stream(self.backend.prefill(tokens[:1])).feed(tokens[1:]))


def _with_reads(tree: TokenTree, nodes: Sequence[int], candidates: Sequence[NDArray[np.int64]]) -> TokenTree:
    offsets = np.concatenate([[0], np.cumsum([len(c) for c in candidates])]).astype(np.int64)
    asked = np.concatenate(candidates).astype(np.int64)
    return TokenTree(tree.tokens, tree.parents, np.array(nodes, dtype=np.int64), asked, offsets)


def _has_length(prefix: Any, expected: int) -> None:
    if prefix.length != expected:
        raise BackendError(f"a prefix of {expected} tokens says it has {prefix.length}")


def _leaves(tree: TokenTree) -> list[int]:
    return sorted(set(range(len(tree))) - set(tree.parents.tolist()))


# --- the checks ------------------------------------------------------------------------------------------------------


def _prefix_caching(lab: _Lab) -> Pairs:
    head, probe = lab.head(), lab.probe()
    cut = 2 * len(head) // 3
    expected = lab.read(lab.prefill(head), probe)
    first = lab.prefill(head[:cut])
    yield lab.read(lab.prefill(head[cut:], first), probe), expected
    yield lab.read(lab.prefill(head[cut + 1 :], lab.prefill(head[cut : cut + 1], first)), probe), expected
    whole = lab.read_all([[*head, *probe.tokens[probe.path(leaf)].tolist()] for leaf in _leaves(probe)])
    yield lab.read(None, whole)[len(head) :], expected


def _tree_as_rows(lab: _Lab) -> Pairs:
    prefix, tree = lab.prefill(lab.head()), lab.tree()
    together = lab.read(prefix, tree)
    for leaf in _leaves(tree):
        path = tree.path(leaf)
        yield together[path], lab.read(prefix, lab.read_all([tree.tokens[path].tolist()]))


def _tree_as_stream(lab: _Lab) -> Pairs:
    head, tree = lab.head(), lab.tree()
    together = lab.read(lab.prefill(head), tree)
    for leaf in _leaves(tree):
        path = tree.path(leaf)
        yield together[path], lab.streamed([*head, *tree.tokens[path].tolist()])[-len(path) :]


def _tree_as_plain(lab: _Lab) -> Pairs:
    plain = getattr(lab.backend, "plain_logits", None)
    if plain is None:
        raise _NotRunError("this backend has no plain_logits")
    head, tree = lab.head(), lab.tree()
    together = lab.read(lab.prefill(head), tree)
    for leaf in _leaves(tree):
        path = tree.path(leaf)
        yield together[path], log_softmax(plain([*head, *tree.tokens[path].tolist()])[-len(path) :])


def _sibling_isolation(lab: _Lab) -> Pairs:
    prefix, tree = lab.prefill(lab.head()), lab.tree()
    before = lab.read(prefix, tree)
    leaves = _leaves(tree)
    below = [{leaf for leaf in leaves if node in tree.path(leaf)} for node in range(len(tree))]
    # Twigs here and there, each with a neighbour that stays; then the first branch whole.
    for chosen in (leaves[0::3], leaves[1::3], leaves[2::3], leaves[:3]):
        changed = np.array([leaves_below <= set(chosen) for leaves_below in below])
        tokens = np.where(changed, (tree.tokens + 1) % lab.backend.vocabulary, tree.tokens)
        yield lab.read(prefix, replace(tree, tokens=tokens))[~changed], before[~changed]


def _batching(lab: _Lab) -> Pairs:
    prefix, branches = lab.prefill(lab.head()), lab.read_all([lab.ids(2), lab.ids(3)])
    documents = [lab.ids(length) for length in (lab.tokens // 6, 1, lab.tokens // 10)]
    documents.append(documents[0])
    together = lab.read(prefix, join(documents, [branches] * len(documents)))
    for document, read in zip(documents, np.split(together, len(documents)), strict=True):
        yield read, lab.read(prefix, join([document], [branches]))


def _chunking(lab: _Lab) -> Pairs:
    # More branches than backends like to run at once, and more nodes than one attention block of the packed layout.
    count = min(72, lab.backend.vocabulary)
    prefix, trunk = lab.prefill(lab.head()), lab.ids(1)
    paths = [[*trunk, first, second] for first, second in zip(lab.ids(count), lab.ids(count), strict=True)]
    builder = TreeBuilder()
    ends = [builder.extend(-1, path) for path in paths]
    shown = [count - 1 - i for i in range(0, count, 3)]  # every third branch, the last one first
    asked = [np.arange(lab.backend.vocabulary)] * len(shown)
    together = lab.read(prefix, _with_reads(builder.build(), [ends[i] for i in shown], asked))
    for start in range(0, len(shown), 5):
        few = shown[start : start + 5]
        yield together[start : start + 5], lab.read(prefix, lab.read_ends([paths[i] for i in few]))


def _immutable_prefix(lab: _Lab) -> Pairs:
    probe, tree, more = lab.probe(), lab.tree(), lab.ids(4)
    prefix = lab.prefill(lab.head())
    before = lab.read(prefix, probe)
    longer = lab.prefill(more, prefix)
    longer_before = lab.read(longer, probe)
    yield lab.read(prefix, probe), before
    kept = lab.backend.read(prefix, tree, tree.trunk).prefix
    yield lab.read(prefix, probe), before
    for base in (prefix, kept):
        stream = lab.backend.stream(base)
        stream.feed(more)
        stream.rollback(2)
        stream.feed(more[:1])
        yield lab.read(prefix, probe), before
    yield lab.read(longer, probe), longer_before
    _has_length(prefix, lab.tokens // 3)


def _trunk_keeping(lab: _Lab) -> Pairs:
    head, tree, probe = lab.head(), lab.tree(), lab.probe()
    prefix = lab.prefill(head)
    plain = lab.read(prefix, tree)
    for base, before, keep in ((prefix, head, 1), (prefix, head, tree.trunk), (None, [], tree.trunk - 1)):
        reading = lab.backend.read(base, tree, keep)
        if base is not None:
            yield lab.rows(reading.log_probs), plain
        _has_length(reading.prefix, len(before) + keep)
        yield lab.read(reading.prefix, probe), lab.read(lab.prefill([*before, *tree.tokens[:keep].tolist()]), probe)
    if lab.backend.keeps_trunks:
        # Two documents that begin alike; what is read below them later is read as if they were run again.
        documents = [head[:5], [*head[:3], *head[6:9]]]
        first, then = (join(documents, [branches] * 2) for branches in (probe, tree))
        reading = lab.backend.read(prefix, first, first.shared)
        yield lab.rows(reading.log_probs), lab.read(prefix, first)
        yield lab.read(reading.prefix, then), lab.read(prefix, then)


def _normalisation(lab: _Lab) -> Pairs:
    total = np.exp(lab.read(lab.prefill(lab.head()), lab.tree())).sum(-1, keepdims=True)
    # As log-probabilities of "any token at all"; both measures are then at most |sum − 1|, and so is the tolerance.
    yield np.log(total), np.zeros_like(total)


def _candidates(lab: _Lab) -> Pairs:
    prefix, tree = lab.prefill(lab.head()), lab.tree()
    everything = lab.read(prefix, tree)
    # Lists of different lengths in no order, reads in no order; each with the likeliest tokens, which the measures see.
    nodes = lab.rng.permutation(len(tree))[:8].tolist()
    lists = [np.concatenate([np.argsort(everything[n])[-k:], lab.rng.integers(0, len(everything[n]), 2)])
             for k, n in enumerate(nodes, 1)]  # fmt: skip
    few = lab.backend.read(prefix, _with_reads(tree, nodes, lists)).log_probs
    parts = np.split(few, np.cumsum([len(tokens) for tokens in lists])[:-1])
    for node, tokens, part in zip(nodes, lists, parts, strict=True):
        yield part[None], everything[node, tokens][None]


def _stream_rollback(lab: _Lab) -> Pairs:
    prefix, tokens, junk = lab.prefill(lab.head()), lab.ids(12), lab.ids(5)
    straight = log_softmax(lab.backend.stream(prefix).feed(tokens))
    stream = lab.backend.stream(prefix)
    parts = [stream.feed(tokens[:6])]
    stream.feed(junk)
    stream.rollback(len(junk))
    _has_length(stream, prefix.length + 6)
    parts += [stream.feed([token]) for token in tokens[6:8]]
    stream.feed([*tokens[8:9], *junk])  # taken back in part
    stream.rollback(len(junk))
    parts.append(stream.feed(tokens[9:], last=True))
    _has_length(stream, prefix.length + len(tokens))
    seen = [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        11,
    ]  # the row of token 8 went by among the junk, those of 9 and 10 were not asked for
    yield log_softmax(np.concatenate(parts)), straight[seen]


def _padding(lab: _Lab) -> Pairs:
    prefix, trunk = lab.prefill(lab.head()), lab.ids(1)
    paths = [[*trunk, *lab.ids(length)] for length in (1, lab.tokens // 2, 2)]
    together = lab.read(prefix, lab.read_ends(paths))
    alone = [lab.read(prefix, lab.read_ends([path])) for path in paths]
    yield together, np.concatenate(alone)


def _repeatability(lab: _Lab) -> Pairs:
    head, tree = lab.head(), lab.tree()
    prefix = lab.prefill(head)
    first = lab.read(prefix, tree)
    yield lab.read(prefix, tree), first
    yield lab.read(lab.prefill(head), tree), first


def _sliding_window(lab: _Lab) -> Pairs:
    window = getattr(lab.backend, "window", None)
    if window is None:
        raise _NotRunError("this backend names no sliding window")
    length = window + lab.tokens // 3
    if length > 10 * lab.tokens or length + lab.tokens > lab.backend.max_tokens:
        raise _NotRunError(f"a prompt longer than the window of {window} tokens costs too much here")
    head, tree = lab.ids(length), lab.tree()
    whole = lab.read(lab.prefill(head), tree)
    cut = length - window // 2  # the window of the tree's first nodes reaches back across the cut
    yield lab.read(lab.prefill(head[cut:], lab.prefill(head[:cut])), tree), whole
    path = tree.path(max(_leaves(tree), key=lambda leaf: tree.depths[leaf]))
    tokens = [*head, *tree.tokens[path].tolist()]
    yield lab.streamed(tokens)[-len(path) :], whole[path]
    if hasattr(lab.backend, "plain_logits"):
        yield log_softmax(lab.backend.plain_logits(tokens)[-len(path) :]), whole[path]


def _prefix_on_disk(lab: _Lab) -> Pairs:
    if lab.backend.fingerprint is None:
        raise _NotRunError("this backend keeps no prefixes on disk")
    prefix, probe = lab.prefill(lab.ids(4), lab.prefill(lab.head())), lab.probe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefix.safetensors"
        lab.backend.save(prefix, path)
        loaded = lab.backend.load_prefix(path)
        _has_length(loaded, prefix.length)
        yield lab.read(loaded, probe), lab.read(prefix, probe)


_CHECKS: tuple[tuple[str, str, Callable[[_Lab], Pairs]], ...] = (
    ("prefix caching", "a prompt run in two, three and no prefills against one", _prefix_caching),
    ("tree as rows", "a tree against each of its paths read alone", _tree_as_rows),
    ("tree as stream", "a tree against each of its paths fed to a stream, prompt and all", _tree_as_stream),
    ("tree as plain forward", "a tree against the model's own forward pass over each path", _tree_as_plain),
    ("sibling isolation", "a tree before and after another branch's tokens change", _sibling_isolation),
    ("batching", "documents in one tree against each alone", _batching),
    ("chunking", "a tree of 72 branches against five branches at a time", _chunking),
    ("immutable prefix", "a prefix before and after it was grown, read, kept from and streamed on", _immutable_prefix),
    ("trunk keeping", "a kept trunk against a fresh prefill of the same tokens", _trunk_keeping),
    ("normalisation", "the probabilities of all tokens against 1", _normalisation),
    ("candidates", "a few candidates, in any order, against the whole vocabulary", _candidates),
    ("stream rollback", "feeding, taking back and feeding again against feeding straight on", _stream_rollback),
    ("padding", "short branches beside a long one against each alone", _padding),
    ("repeatability", "the same calls twice, to the last bit", _repeatability),
    ("sliding window", "a prompt longer than the window: tree against stream and plain forward", _sliding_window),
    ("prefix on disk", "a prefix against its saved copy", _prefix_on_disk),
)
