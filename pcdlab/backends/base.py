"""The contract between the engine and a framework: prefill, read, stream.

A backend runs token ids through one model and answers with log-probabilities. It knows nothing of schemas, labels,
prompts or text. A prefix is never changed by a call that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pcdlab.errors import NumericsError
from pcdlab.tokentree import TokenTree

__all__ = ["Backend", "Meter", "Prefix", "Reading", "Stream", "check_finite"]


@dataclass
class Meter:
    """What a backend has done so far; the engine reports differences.

    Attributes
    ----------
    forward_passes : int
        Times the model ran, whatever the number of rows.
    tokens_fed : int
        Tokens that went through the model's layers, padding not counted.
    """

    forward_passes: int = 0
    tokens_fed: int = 0

    def count(self, tokens: int) -> None:
        """Record one forward pass over `tokens` tokens."""
        self.forward_passes += 1
        self.tokens_fed += tokens


class Prefix(Protocol):
    """Tokens that have been run, with their KV state (or recurrent state)."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the cached state, all layers."""
        ...


@dataclass(frozen=True, eq=False)
class Reading:
    """What a pass over a tree returned.

    Attributes
    ----------
    log_probs : float64 array, shape (c,)
        One per candidate of the tree, in the tree's order: log-softmax over the full vocabulary.
    prefix : Prefix or None
        The kept beginning of the trunk on top of the prefix that was given; None where nothing was kept.
    """

    log_probs: NDArray[np.float64]
    prefix: Any = None


class Stream(Protocol):
    """Token-by-token work on top of a prefix."""

    @property
    def length(self) -> int:
        """Number of tokens so far, the prefix included."""
        ...

    def feed(self, tokens: Sequence[int], last: bool = False) -> NDArray[np.float32]:
        """Append k tokens; return their next-token logits, float32, shape (k, vocabulary).

        With `last` those behind the last token only, shape (1, vocabulary): a generator needs no others, and the vocabulary
        projection is a large part of a small pass.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` fed tokens. The prefix cannot be taken back."""
        ...


class Backend(Protocol):
    """A model under one framework.

    Attributes
    ----------
    name : str
        ``"torch"``, ``"mlx"`` or ``"llamacpp"``.
    model : str
        The model's name, for results.
    dtype : str
        Number format of the weights and the KV state.
    layout : str
        How trees are run: ``"packed"`` (one row) or ``"rows"`` (one row per root-to-leaf path).
    vocabulary : int
        Size of the log-softmax.
    max_tokens : int
        Longest sequence the model's positions allow.
    fingerprint : str or None
        Identifies weights, dtype and framework version for prefixes kept on disk; None: do not keep.
    keeps_trunks : bool
        Whether :meth:`read` can keep the trunks of several documents.
    meter : Meter
        Counts forward passes and tokens.
    """

    name: str
    model: str
    dtype: str
    layout: str
    vocabulary: int
    max_tokens: int
    fingerprint: str | None
    keeps_trunks: bool
    meter: Meter

    def prefill(self, tokens: Sequence[int], parent: Any = None) -> Any:
        """Run `tokens` on top of `parent` and return the longer prefix."""
        ...

    def read(self, prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        """Run a tree on top of `prefix` (None: the empty prefix) and answer its reads.

        ``keep=n`` also returns the first n trunk nodes as a prefix; n is at most ``tree.trunk``. Where the backend
        ``keeps_trunks``, n may also be ``tree.shared``: what comes back then serves in place of `prefix` for trees that begin
        with the same ``n`` nodes, which are not run again.
        """
        ...

    def stream(self, prefix: Any) -> Stream:
        """Begin token-by-token work after `prefix`."""
        ...

    def save(self, prefix: Any, path: Path) -> None:
        """Write a prefix's state to `path` (safetensors)."""
        ...

    def load_prefix(self, path: Path) -> Any:
        """Read back a prefix that :meth:`save` wrote."""
        ...


def check_finite(log_probs: NDArray[np.float64], model: str) -> NDArray[np.float64]:
    """Return `log_probs` unchanged, or raise where a decision would be an argmax over garbage.

    Raises
    ------
    NumericsError
        If any value is NaN or infinite.
    """
    bad = ~np.isfinite(log_probs)
    if bad.any():
        kinds = "NaN" if np.isnan(log_probs).any() else "infinite"
        raise NumericsError(
            f"model {model!r} returned {kinds} log-probabilities for {int(bad.sum())} of {log_probs.size} candidates: no "
            "decision can be made from them. Load it with dtype='float32', and check the weights if that does not help."
        )
    return log_probs
