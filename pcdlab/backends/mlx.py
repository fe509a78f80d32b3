"""The MLX backend: any causal language model of mlx-lm, on Apple Silicon, slowly on a Linux CPU.

A tree runs as right-padded rows, one per root-to-leaf path, over a prefix that is held once. Stand-ins for mlx-lm's
caches put the two together inside the layer that attends to them, one layer after the other, so that the copies of all
layers never exist at once; the models' own code runs unchanged. Long chains that many paths share run first, as one row.
Knows mlx-lm's models and caches; nothing of schemas or text.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcdlab.backends.base import Meter, Reading, check_finite
from pcdlab.errors import BackendError, ModelError, ParameterError
from pcdlab.tokentree import TokenTree, TreeBuilder

try:
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten, tree_map, tree_map_with_path
    from mlx_lm.models import cache as caches
    from mlx_lm.models.base import create_causal_mask
    from mlx_lm.utils import load_model

    _MISSING = ""
    _ArraysCache: Any = caches.ArraysCache
except ImportError as error:  # said when a model is loaded: the module itself can be read without the framework
    _MISSING = str(error)
    _ArraysCache = object

__all__ = ["MlxBackend", "MlxPrefix", "MlxStream"]

DTYPES = ("float32", "bfloat16", "float16")
HEAD_BYTES = 48 << 20  # most bytes of logits held at once: longer reads go through the vocabulary in pieces
ROWS_PER_PASS = 16  # a layer's copies of the prefix, and the attention scores over them, grow with each
PREFILL = 2048  # most tokens of one row in one pass
WORTH_A_PASS = 64  # tokens: a chain runs by itself if running it in every row below it would repeat this many

# What models raise when they are handed something they were not written for.
_FAILURES = (AttributeError, AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_PROBE = (3, 14, 15, 9, 26, 5, 35)

# --- what a layer remembers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Past:
    """Keys and values of one attention layer, as pieces that longer prefixes share without copying.

    Attributes
    ----------
    pieces : tuple of (keys, values)
        Arrays [1, heads, tokens, width], in order; quantized: triples of arrays.
    length : int
        Tokens run so far; with a window the pieces may hold fewer.
    window : int or None
        How many tokens the layer can see, the current one included.
    bits, group_size : int
        Quantization of keys and values; 0 bits: none.
    """

    pieces: tuple[Any, ...] = ()
    length: int = 0
    window: int | None = None
    bits: int = 0
    group_size: int = 0

    def grown(self, new: Any, count: int) -> _Past:
        """The past with one more piece of `count` tokens, without pieces no later token can see."""
        pieces = (*self.pieces, new)
        if (window := self.window) is not None:
            if count > window:
                pieces = (tree_map(lambda a: mx.contiguous(a[..., -window:, :]), new),)
            while sum(map(_tokens, pieces[1:])) >= window:
                pieces = pieces[1:]
        return _Past(pieces, self.length + count, self.window, self.bits, self.group_size)

    def seen(self, most: int | None) -> list[Any]:
        """The pieces, cut to the last `most` tokens."""
        pieces = list(self.pieces)
        surplus = sum(map(_tokens, pieces)) - most if most is not None else 0
        while pieces and surplus >= _tokens(pieces[0]):
            surplus -= _tokens(pieces.pop(0))
        if surplus > 0:
            pieces[0] = tree_map(lambda a: a[..., surplus:, :], pieces[0])
        return pieces


def _tokens(piece: Any) -> int:
    keys = piece[0]
    return int((keys if isinstance(keys, mx.array) else keys[0]).shape[2])


def _join(pieces: Sequence[Any], rows: int) -> Any:
    """Pieces one after another, those of one row broadcast to all rows."""

    def broadcast(array: Any) -> Any:
        return mx.broadcast_to(array, (rows, *array.shape[1:]))

    if len(pieces) == 1:
        return tree_map(broadcast, pieces[0])
    return tree_map(lambda *arrays: mx.concatenate([broadcast(a) for a in arrays], axis=2), *pieces)


class _Attention:
    """Stands in for one layer's KV cache during one pass over rows.

    The prefix stays one row. Only what a layer attends to is put together for all rows, and only while it attends.
    """

    start_position = 0  # what models with chunked attention ask: nothing was cut off the front

    def __init__(self, past: _Past, rows: int, keep: bool) -> None:
        self._past = past
        self._rows = rows
        self._keep = keep
        self._new: Any = None
        self._whole: Any = None
        self.offset = past.length

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """Take the rows' own keys and values; give all a row may see."""
        new = self._encode(keys), self._encode(values)
        if self._keep:  # often views into everything the layer projected: keep them alone
            self._new = new = tree_map(mx.contiguous, new)
        # Runs everything below this layer: the copies made for the layer below are gone before the next are made.
        mx.eval(new)
        self.offset += keys.shape[2]
        return self._after_past(new)

    def keys_and_values(self) -> Any:
        """The same again, for layers that share this one's keys and values."""
        if self._whole is None:
            self._whole = self._after_past(self._new)
        return self._whole

    def _after_past(self, new: Any) -> Any:
        window = self._past.window  # counts the current token too
        return _join([*self._past.seen(None if window is None else window - 1), new], self._rows)

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Mask for `n` new tokens after what is seen of the past; None where everything may be seen."""
        window, limit = window_size, self._past.window
        before = self._past.length
        if limit is not None:
            window, before = window or limit, min(limit - 1, before)
        if return_array or (window is not None and before + n > window):
            return create_causal_mask(n, before, window_size=window)
        return None if n == 1 else "causal"

    def maybe_trim_front(self) -> None:
        """Chunked attention cuts here what its mask hides anyway."""

    def past(self) -> _Past:
        """What the layer remembers after a pass over one row."""
        return self._past.grown(self._new, self.offset - self._past.length) if self._new else self._past

    def _encode(self, array: Any) -> Any:
        return array


class _QuantizedAttention(_Attention):
    """The same for quantized keys and values; models recognise those by the attribute `bits`."""

    def __init__(self, past: _Past, rows: int, keep: bool) -> None:
        super().__init__(past, rows, keep)
        self.bits, self.group_size = past.bits, past.group_size

    def _encode(self, array: Any) -> Any:
        return mx.quantize(array, group_size=self.group_size, bits=self.bits)


class _Arrays(_ArraysCache):
    """Stands in for the state of a recurrent or convolution layer."""

    def __init__(self, arrays: Sequence[Any], rows: int, keep: bool) -> None:
        super().__init__(len(arrays))
        self.cache = [None if a is None else mx.broadcast_to(a, (rows, *a.shape[1:])) for a in arrays]
        self._keep = keep

    def __setitem__(self, index: int, value: Any) -> None:
        # A small state is often a view into everything the layer read: keep the state alone.
        value = mx.contiguous(value) if self._keep else value
        mx.eval(value)
        if self._keep:  # behind the padding of several rows it is nobody's state
            self.cache[index] = value


def _remember(cache: Any) -> Any:
    """What a pass starts from, of one of mlx-lm's empty caches; the cache itself where its kind is not known."""
    kind = type(cache)
    if kind in (caches.KVCache, caches.ConcatenateKVCache, caches.ChunkedKVCache):
        return _Past()
    if kind is caches.QuantizedKVCache:
        return _Past(bits=cache.bits, group_size=cache.group_size)
    if kind is caches.RotatingKVCache and not cache.keep:
        return _Past(window=cache.max_size)
    if kind is caches.ArraysCache:
        return tuple(cache.cache)
    if kind is caches.CacheList:
        return [_remember(c) for c in cache.caches]
    return cache


def _begin(state: Any, rows: int, keep: bool) -> Any:
    """A cache for one pass."""
    if isinstance(state, _Past):
        return (_QuantizedAttention if state.bits else _Attention)(state, rows, keep)
    if isinstance(state, tuple):
        return _Arrays(state, rows, keep)
    if isinstance(state, list):
        return caches.CacheList(*(_begin(s, rows, keep) for s in state))
    return copy.deepcopy(state)  # arrays are shared until they are written to


def _end(cache: Any) -> Any:
    """What is remembered after a pass over one row."""
    if isinstance(cache, _Attention):
        past = cache.past()
        mx.eval(past.pieces)
        return past
    if isinstance(cache, _Arrays):
        return tuple(cache.cache)
    if isinstance(cache, caches.CacheList):
        return [_end(c) for c in cache.caches]
    mx.eval(cache.state)
    return cache


def _fill(cache: Any, state: Any) -> Any:
    """One of mlx-lm's empty caches with what is remembered, for work in place."""
    if isinstance(state, _Past):
        if state.pieces:
            whole = _join(state.seen(state.window), 1)
            # Caches write into their arrays. Those made here are handles of their own: the prefix does not change.
            cache.keys, cache.values = whole
            cache.offset = state.length
            if state.window is not None:
                cache._idx = _tokens(whole)
        return cache
    if isinstance(state, tuple):
        cache.cache = list(state)
        return cache
    if isinstance(state, list):
        cache.caches = tuple(_fill(c, s) for c, s in zip(cache.caches, state, strict=True))
        return cache
    return copy.deepcopy(state)


def _leaves(nested: Any) -> list[Any]:
    """The arrays of nested tuples, lists and dicts."""
    found: Any = tree_flatten(nested)
    return [array for _, array in found]


def _pasts(states: Iterable[Any]) -> Iterator[_Past]:
    """The attention layers among states."""
    for state in states:
        if isinstance(state, list):
            yield from _pasts(state)
        elif isinstance(state, _Past):
            yield state


def _known(state: Any) -> bool:
    """Whether a state can be broadcast and written to disk."""
    return all(map(_known, state)) if isinstance(state, list) else isinstance(state, (_Past, tuple))


def _arrays(state: Any) -> list[Any]:
    """The arrays of a state, in one piece each, None where there is none yet."""
    if isinstance(state, _Past):
        if not state.pieces:  # a layer the model does not use
            return [None] * (6 if state.bits else 2)
        return _leaves(_join(state.seen(state.window), 1))
    if isinstance(state, tuple):
        return list(state)
    return [array for part in state for array in _arrays(part)]


def _restore(state: Any, arrays: Iterator[Any], length: int) -> Any:
    """An empty state filled with the arrays of :func:`_arrays`."""
    if isinstance(state, _Past):
        found = list(islice(arrays, 6 if state.bits else 2))
        if found[0] is None:
            return state
        piece = (tuple(found[:3]), tuple(found[3:])) if state.bits else tuple(found)
        return _Past((piece,), length, state.window, state.bits, state.group_size)
    if isinstance(state, tuple):
        return tuple(next(arrays) for _ in state)
    return [_restore(part, arrays, length) for part in state]


def _nbytes(state: Any) -> int:
    if isinstance(state, _Past):
        return sum(array.nbytes for array in _leaves(state.pieces))
    if isinstance(state, tuple):
        return sum(array.nbytes for array in state if array is not None)
    return sum(map(_nbytes, state)) if isinstance(state, list) else int(state.nbytes)


@dataclass(frozen=True, eq=False)
class MlxPrefix:
    """State of a run of tokens, layer by layer; longer prefixes share it."""

    states: tuple[Any, ...]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the cached state, all layers."""
        return sum(map(_nbytes, self.states))


# --- the backend -----------------------------------------------------------------------------------------------------


class MlxBackend:
    """An mlx-lm model as a backend.

    Parameters
    ----------
    model : mlx.nn.Module
        One of mlx-lm's causal language models.
    name : str
        The model's name, for results and messages.
    max_tokens : int or None
        Longest sequence the model's positions allow; None: the model's own arguments say it.
    fingerprint : str or None
        Identity of the weights, for prefixes kept on disk.
    kv_bits : int or None
        Quantize keys and values to this many bits; layers with a sliding window keep theirs.
    kv_group_size : int
        Values that share a scale; a divisor of the heads' width.

    Attributes
    ----------
    layout_reason : str
        What the comparison with plain forward passes found.
    window : int or None
        Shortest sliding window, in tokens.
    """

    name = "mlx"
    keeps_trunks = False
    layout = "rows"

    def __init__(
        self,
        model: Any,
        name: str = "model",
        max_tokens: int | None = None,
        fingerprint: str | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> None:
        self.module = model
        self.model = name
        self.dtype = _describe(model) + (f", {kv_bits}-bit KV" if kv_bits else "")
        self.meter = Meter()
        self.max_tokens = max_tokens or int(getattr(model.args, "max_position_embeddings", None) or 1 << 30)
        self._kv_quantization = (kv_bits, kv_group_size)
        self._rows_per_pass = ROWS_PER_PASS
        self._empty = tuple(map(_remember, self._fresh()))
        # Layers beyond those that have a cache attend to the keys and values of others.
        self._shares = len(self._empty) < len(model.layers)
        self._body: Callable[..., Any] = model
        self._head: Callable[..., Any] | None = None  # None: the body is the whole model
        try:
            truth = self._call(model, _PROBE)
        except _FAILURES as error:
            kv = f" with keys and values in {kv_bits} bits, groups of {kv_group_size}" if kv_bits else ""
            raise BackendError(f"mlx-lm cannot run {name!r}{kv}: {type(error).__name__}: {error}") from error
        self.vocabulary = int(truth.shape[-1])
        self._split(truth)
        self.layout_reason = self._probe()
        self.window = min((past.window for past in _pasts(self._empty) if past.window), default=None)
        self.fingerprint = fingerprint if all(map(_known, self._empty)) else None
        self.meter = Meter()

    @classmethod
    def load(cls, folder: Path, dtype: str = "auto", kv_bits: int | None = None, kv_group_size: int = 64) -> MlxBackend:
        """Load a model folder.

        Parameters
        ----------
        folder : Path
            A folder with ``config.json`` and safetensors weights, as Hugging Face or ``mlx_lm.convert`` write it.
        dtype : {"auto", "float32", "bfloat16", "float16"}
            "auto": the checkpoint's own. Quantized weights stay as they are; the rest takes this format.
        kv_bits, kv_group_size
            As for the class.

        Raises
        ------
        BackendError
            If mlx or mlx-lm is not installed, or cannot run the model.
        ParameterError
            If `dtype` is none of the above.
        ModelError
            If mlx-lm cannot load the folder.
        """
        if _MISSING:
            raise BackendError(
                f"the mlx backend needs mlx and mlx-lm, which cannot be imported here ({_MISSING}); install them with\n"
                "  pip install 'pcdlab[mlx]'"
            )
        if dtype not in ("auto", *DTYPES):
            raise ParameterError(f"dtype {dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            model, config = load_model(folder, lazy=True, model_config=_older_spellings(config))
            if dtype != "auto":
                _cast(model, getattr(mx, dtype))
            mx.eval(model.parameters())
        except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{folder}: mlx-lm cannot load this model: {type(error).__name__}: {reason}") from error
        text = config.get("text_config") or {}
        positions = config.get("max_position_embeddings") or text.get("max_position_embeddings")
        identity = _fingerprint(folder, f"{dtype} {kv_bits} {kv_group_size}")
        return cls(model, folder.name, positions, identity, kv_bits, kv_group_size)

    # --- the contract -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], parent: MlxPrefix | None = None) -> MlxPrefix:
        """Run `tokens` on top of `parent`; see :class:`pcdlab.backends.base.Backend`."""
        if not len(tokens):
            raise ParameterError("prefill needs at least one token; give the parent itself where nothing is added")
        for part in range(0, len(tokens), PREFILL):
            _, parent = self._run(parent, [list(tokens[part : part + PREFILL])], keep=True)
        assert parent is not None
        return parent

    def read(self, prefix: MlxPrefix | None, tree: TokenTree, keep: int = 0) -> Reading:
        """Run a tree and answer its reads; see :class:`pcdlab.backends.base.Backend`."""
        if not 0 <= keep <= tree.trunk:
            raise ParameterError(f"keep={keep} is not within the tree's trunk of {tree.trunk} nodes")
        if (tree.read_nodes < 0).any():
            raise ParameterError("a read sits at node -1; reads belong to nodes of the tree")
        log_probs, kept = _TreePass(self, tree).run(prefix, keep)
        return Reading(check_finite(log_probs, self.model), kept)

    def stream(self, prefix: MlxPrefix | None) -> MlxStream:
        """Begin token-by-token work; see :class:`pcdlab.backends.base.Backend`."""
        return MlxStream(self, prefix)

    def save(self, prefix: MlxPrefix, path: Path) -> None:
        """Write a prefix as safetensors.

        Raises
        ------
        BackendError
            If the model keeps its state in a cache of its own kind; the backend's fingerprint is None then.
        OSError
            If the file cannot be written.
        """
        if not all(map(_known, prefix.states)):
            raise BackendError(f"{self.model!r} keeps its state in a kind of cache that cannot be written to disk")
        tensors = {
            f"{layer}.{i}": array
            for layer, state in enumerate(prefix.states)
            for i, array in enumerate(_arrays(state))
            if array is not None
        }
        path = Path(path)
        # MLX appends the suffix where it is missing.
        written = path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
        try:
            mx.save_safetensors(str(written), tensors, {"length": str(prefix.length)})
        except RuntimeError as error:  # MLX's word for a disk that is full or read-only
            written.unlink(missing_ok=True)
            raise OSError(f"{path}: {error}") from error
        written.replace(path)

    def load_prefix(self, path: Path) -> MlxPrefix:
        """Read back a prefix."""
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        tensors, metadata = loaded
        mx.eval(tensors)  # MLX reads a file when its arrays are needed, and keeps it open until then
        length = int(metadata["length"])
        states = (
            _restore(state, (tensors.get(f"{layer}.{i}") for i in count()), length)
            for layer, state in enumerate(self._empty)
        )
        return MlxPrefix(tuple(states), length)

    # --- passes -------------------------------------------------------------------------------------------------

    def _run(self, prefix: MlxPrefix | None, rows: list[list[int]], keep: bool = False) -> tuple[Any, MlxPrefix | None]:
        """One forward pass over right-padded rows; what the body gives [rows, longest, …], and the longer prefix of one row."""
        past = prefix.length if prefix else 0
        longest = max(map(len, rows))
        self._check_length(past + longest)
        self.meter.count(sum(map(len, rows)))
        # Padding stands to the right, so causal attention hides it from every real token, and state that ran on over it
        # is not kept.
        ids = [row + [row[-1]] * (longest - len(row)) for row in rows]
        cache = [_begin(s, len(rows), keep or self._shares) for s in (prefix.states if prefix else self._empty)]
        states = self._body(mx.array(ids), cache=cache)
        if not keep:
            return states, None
        return states, MlxPrefix(tuple(map(_end, cache)), past + longest)

    def _logits(self, states: Any) -> Any:
        """Next-token logits, float32, [n, vocabulary], of what the body gives, [n, …]."""
        return (self._head(states) if self._head else states).astype(mx.float32)

    def plain_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits of one unpadded row by the model's own forward pass on its own fresh caches, shape (n, vocabulary).

        The reference every other way of computing the same numbers is compared with.
        """
        self._check_length(len(tokens))
        self.meter.count(len(tokens))
        return np.array(self._call(self.module, tokens).astype(mx.float32))

    def _call(self, module: Callable[..., Any], tokens: Sequence[int]) -> Any:
        """What the model, or its body, gives for one row without a prefix, [n, …]."""
        result = module(mx.array([list(tokens)]), cache=self._fresh())[0]
        mx.eval(result)
        return result

    def _fresh(self) -> list[Any]:
        """The model's own caches, empty."""
        bits, group_size = self._kv_quantization
        cache = caches.make_prompt_cache(self.module)
        if not bits:
            return cache
        return [caches.QuantizedKVCache(group_size, bits) if type(c) is caches.KVCache else c for c in cache]

    def _check_length(self, length: int) -> None:
        if length > self.max_tokens:
            raise BackendError(f"{length} tokens do not fit {self.model!r}, whose positions end at {self.max_tokens}")

    # --- what is found out when a model is loaded ---------------------------------------------------------------

    def _split(self, truth: Any) -> None:
        """Find body and vocabulary projection, so that only what is read reaches the projection.

        A pair counts only if it reproduces the whole model: not where logits are capped or scaled afterwards.
        """
        inner = self.module
        while hasattr(inner, "language_model"):
            inner = inner.language_model
        parts = [part for part in inner.children().values() if isinstance(part, nn.Module)]
        for body in (part for part in parts if part.children()):
            try:
                states = self._call(body, _PROBE)
            except _FAILURES:
                continue  # a part that is no body
            tied = [part.as_linear for part in body.children().values() if hasattr(part, "as_linear")]
            for head in [*(part for part in parts if not part.children()), *tied]:
                try:
                    ours = head(states[None])[0]  # of the shape the model hands it, so to the last bit the same
                except _FAILURES:
                    continue
                if ours.shape == truth.shape and mx.allclose(ours, truth, rtol=1e-5, atol=1e-5).item():
                    self._body, self._head = body, head
                    return

    def _probe(self) -> str:
        """Settle how rows run, by comparing with plain forward passes; says what was settled."""
        found = ""
        for rows_per_pass in (ROWS_PER_PASS, 1):
            self._rows_per_pass = rows_per_pass
            if rows_per_pass == 1:  # every row on caches of mlx-lm's own, copied whole
                self._empty = tuple(self._fresh())
            elif not all(map(_known, self._empty)):
                found = "caches of its own kind cannot be broadcast"
                continue
            try:
                worst = self._difference()
            except _FAILURES as error:
                found = f"its code does not run on a broadcast prefix ({type(error).__name__}: {error})"
                continue
            # Rounding differs between shapes, most where the numbers are short.
            if worst <= (1e-3 if self.dtype == "float32" else 0.05):
                return f"one row at a time: {found}" if found else "reproduces plain forward passes"
            found = f"rows and plain next-token distributions differ by {worst:.2g} in total variation"
        raise BackendError(f"{self.model!r} does not run in rows on mlx-lm's caches: {found}")

    def _difference(self) -> float:
        """Largest total variation between what rows and plain forward passes say comes next."""
        head, trunk, paths = list(_PROBE[:5]), list(_PROBE[5:7]), ([7, 8, 9], [8], [9, 11])
        tree = TreeBuilder()
        end = tree.extend(-1, [t % self.vocabulary for t in trunk])
        everything = range(self.vocabulary)
        for path in paths:
            tree.read(tree.extend(end, [t % self.vocabulary for t in path]), everything)
        ours = self.read(self.prefill(head), tree.build(), keep=1).log_probs.reshape(len(paths), -1)
        worst = 0.0
        for path, log_probs in zip(paths, ours, strict=True):
            logits = mx.array(self.plain_logits([*head, *trunk, *path])[-1])
            plain = np.array(logits - mx.logsumexp(logits))
            worst = max(worst, 0.5 * float(np.abs(np.exp(plain) - np.exp(log_probs)).sum()))
        return worst


class _TreePass:
    """One tree on its way through the model: which rows run on which prefix, and the answers so far."""

    def __init__(self, backend: MlxBackend, tree: TokenTree) -> None:
        self._backend = backend
        self._tree = tree
        self._children: list[list[int]] = [[] for _ in range(len(tree) + 1)]  # the last: children of the prefix
        self._waste = np.zeros(len(tree) + 1, dtype=np.int64)  # tokens run again if each path below a node is a row
        self._waiting: dict[int, list[int]] = {}  # node -> reads not answered yet
        self._found = np.empty(len(tree.candidates))
        for read, node in enumerate(tree.read_nodes.tolist()):
            self._waiting.setdefault(node, []).append(read)
        leaves = np.zeros(len(tree) + 1, dtype=np.int64)
        for node in range(len(tree) - 1, -1, -1):
            parent = tree.parents[node]
            leaves[node] += not leaves[node]
            leaves[parent] += leaves[node]
            self._waste[node] += leaves[node] - 1
            self._waste[parent] += self._waste[node]
        for node, parent in enumerate(tree.parents.tolist()):
            self._children[parent].append(node)

    def run(self, prefix: MlxPrefix | None, keep: int) -> tuple[NDArray[np.float64], MlxPrefix | None]:
        """Log-probabilities of all candidates, and the prefix that ends with the first `keep` nodes."""
        kept = None
        if keep:
            prefix = kept = self._chain(prefix, list(range(keep)))
        work = self._below(prefix, self._children[keep - 1])  # keep = 0: the children of the prefix
        while work:  # not by recursion: a tree may branch at every token
            base, node = work.pop()
            chain = [node]
            while len(self._children[chain[-1]]) == 1:
                chain.append(self._children[chain[-1]][0])
            base = self._chain(base, chain)
            work.extend(self._below(base, self._children[chain[-1]]))
        return self._found, kept

    def _below(self, base: MlxPrefix | None, nodes: list[int]) -> list[tuple[MlxPrefix | None, int]]:
        """Run what hangs at the end of `base` as rows; return what first needs a pass of its own."""
        large = [node for node in nodes if self._waste[node] >= WORTH_A_PASS]
        paths = [path for node in nodes if self._waste[node] < WORTH_A_PASS for path in self._paths(node)]
        paths.sort(key=len)  # rows of one pass are padded to the longest
        for first in range(0, len(paths), self._backend._rows_per_pass):
            rows = paths[first : first + self._backend._rows_per_pass]
            states, _ = self._backend._run(base, [self._tree.tokens[row].tolist() for row in rows])
            self._answer(states, rows)
        return [(base, node) for node in reversed(large)]

    def _chain(self, base: MlxPrefix | None, nodes: list[int]) -> MlxPrefix | None:
        """Run one row of nodes and keep its state."""
        cuts = set(range(0, len(nodes), PREFILL)) | {len(nodes)}
        if not self._backend._head:  # nothing is read before the first read: spare those tokens the vocabulary
            cuts |= {next((i for i, node in enumerate(nodes) if node in self._waiting), 0)}
        for start, stop in pairwise(sorted(cuts)):
            row = nodes[start:stop]
            states, base = self._backend._run(base, [self._tree.tokens[row].tolist()], keep=True)
            self._answer(states, [row])
        return base

    def _paths(self, root: int) -> Iterator[list[int]]:
        """Every path from `root` to a leaf below it, `root` included."""
        stack = [[root]]
        while stack:
            path = stack.pop()
            below = self._children[path[-1]]
            if not below:
                yield path
            stack.extend([*path, child] for child in reversed(below))

    def _answer(self, states: Any, rows: list[list[int]]) -> None:
        """Answer the waiting reads at the nodes of a pass; states [rows, longest, …]."""
        tree = self._tree
        asked = [
            (i, j, read)
            for i, row in enumerate(rows)
            for j, node in enumerate(row)
            for read in self._waiting.pop(node, ())
        ]
        if not asked:
            return
        picked = states[mx.array([i for i, _, _ in asked]), mx.array([j for _, j, _ in asked])]
        step = max(1, HEAD_BYTES // (4 * self._backend.vocabulary))
        for first in range(0, len(asked), step):
            reads = [read for _, _, read in asked[first : first + step]]
            logits = self._backend._logits(picked[first : first + step])
            counts = tree.offsets[1:][reads] - tree.offsets[reads]
            places = np.concatenate([np.arange(tree.offsets[read], tree.offsets[read + 1]) for read in reads])
            at = mx.array(np.repeat(np.arange(len(reads)), counts)), mx.array(tree.candidates[places])
            log_probs = logits[at] - mx.logsumexp(logits, axis=-1)[at[0]]
            self._found[places] = np.array(log_probs)


class MlxStream:
    """Token-by-token work on mlx-lm's own caches, which grow in place."""

    def __init__(self, backend: MlxBackend, prefix: MlxPrefix | None) -> None:
        self._backend = backend
        self._prefix = prefix
        self._fed: list[int] = []
        self._cache = self._begin()

    def _begin(self) -> list[Any]:
        fresh = self._backend._fresh()
        return [_fill(c, s) for c, s in zip(fresh, self._prefix.states, strict=True)] if self._prefix else fresh

    @property
    def length(self) -> int:
        """Number of tokens so far, the prefix included."""
        return (self._prefix.length if self._prefix else 0) + len(self._fed)

    def feed(self, tokens: Sequence[int], last: bool = False) -> NDArray[np.float32]:
        """Append tokens; logits after each or the last, float32, shape (k, vocabulary) or (1, vocabulary)."""
        backend = self._backend
        if not len(tokens):
            return np.empty((0, backend.vocabulary), dtype=np.float32)
        backend._check_length(self.length + len(tokens))
        backend.meter.count(len(tokens))
        states = backend._body(mx.array([list(tokens)]), cache=self._cache)[0]  # [k, hidden]
        logits = backend._logits(states[-1:] if last else states)
        mx.eval(logits, [c.state for c in self._cache])
        self._fed.extend(tokens)
        return np.array(logits)

    def rollback(self, count: int) -> None:
        """Take back the last `count` fed tokens.

        Raises
        ------
        ParameterError
            If fewer than `count` tokens were fed.
        """
        if not 0 <= count <= len(self._fed):
            raise ParameterError(f"rollback({count}): only {len(self._fed)} tokens were fed")
        if not count:
            return
        self._fed = self._fed[:-count]
        if all(type(c) in (caches.KVCache, caches.QuantizedKVCache) for c in self._cache):
            caches.trim_prompt_cache(self._cache, count)
            return
        # A full window has dropped what it would need, and recurrent state has no way back: start again from the prefix.
        again, self._fed = self._fed, []
        self._cache = self._begin()
        if again:
            self.feed(again)


# --- plumbing --------------------------------------------------------------------------------------------------------


def _describe(model: Any) -> str:
    """Number format of a model: its floating-point format, and the bits of quantized weights."""
    formats = [array.dtype for array in _leaves(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)]
    common = str(max(set(formats), key=formats.count)).removeprefix("mlx.core.")
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit {common}" if bits else common


def _cast(model: Any, dtype: Any) -> None:
    """Cast floating-point parameters, but those the model wants left alone; packed weights are integers."""
    wanted = getattr(model, "cast_predicate", lambda name: True)

    def cast(name: str, value: Any) -> Any:
        return value.astype(dtype) if wanted(name) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _older_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a configuration as mlx-lm reads them, where transformers 5 writes them differently.

    Most of mlx-lm's models look for ``rope_theta`` and take a default where it is missing: the model would run, with wrong
    positions.
    """
    found: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    main = rope.get("full_attention", rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in main:
            found[key] = main[key]
    if main.get("rope_type", "default") != "default":
        found["rope_scaling"] = main
    if "rope_theta" in rope.get("sliding_attention", {}):
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    layers = config.get("layer_types") or []
    if "full_attention" in layers:
        period = layers.index("full_attention") + 1
        if all((kind == "full_attention") == ((i + 1) % period == 0) for i, kind in enumerate(layers)):
            found["sliding_window_pattern"] = found["full_attention_interval"] = period
    found = {key: value for key, value in found.items() if config.get(key) is None}
    if isinstance(text := config.get("text_config"), Mapping):
        found["text_config"] = {**text, **_older_spellings(text)}
    return found


def _fingerprint(folder: Path, options: str) -> str:
    """Identity of weights, number format and code, for prefixes kept on disk."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    digest.update(f"{options} {mx.default_device()} {version('mlx')} {version('mlx-lm')}".encode())
    return digest.hexdigest()
