"""The llama.cpp backend: any GGUF file of a causal language model whose layers are all attention.

llama.cpp knows no trees; it knows sequences, and a cell of its KV cache may belong to many. So each leaf of a tree is a
sequence, a node belongs to the sequences of the leaves below it, and the cells of the prefix are tagged with all of them, which
copies nothing. That makes a tree one ``llama_decode``. A tree with more leaves than the library has sequences is run in parts.

Attention goes over every used cell of the cache, also those a sequence may not see. Prefixes that a call has nothing to do
with are therefore moved to host memory until they are needed again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pcdlab import models
from pcdlab.backends.base import Meter, Reading, check_finite
from pcdlab.backends.llamacpp_codec import GGUFCodec
from pcdlab.backends.llamacpp_library import Model, last_errors, llama_cpp, unpack
from pcdlab.errors import BackendError, ModelError, ParameterError
from pcdlab.gguf_files import find_gguf
from pcdlab.tokentree import TokenTree

__all__ = ["LlamaCppBackend", "LlamaPrefix", "LlamaStream", "load"]

KV_TYPES = {"float16": gguf.GGMLQuantizationType.F16, "float32": gguf.GGMLQuantizationType.F32}
UNPACKED = 1 << 30  # most bytes of float32 weights that "auto" unpacks on a CPU
CELLS = 4096  # of the KV cache to begin with; it grows when a call needs more
BATCH = 4096  # most tokens in one llama_decode
LOGIT_BYTES = 256 << 20  # most bytes of logits in one llama_decode
ROWS = 64  # reads whose logits are worked on at once

IntArray = NDArray[np.int64]
_INT32 = ctypes.POINTER(ctypes.c_int32)


def load(name: str | os.PathLike[str], dtype: str = "auto") -> tuple[LlamaCppBackend, GGUFCodec]:
    """Load a GGUF file with its tokenizer.

    Parameters
    ----------
    name
        As for :func:`pcdlab.gguf_files.find_gguf`.
    dtype : {"auto", "float16", "float32"}
        As for :meth:`LlamaCppBackend.load`.

    Returns
    -------
    (LlamaCppBackend, GGUFCodec)

    Raises
    ------
    ModelError
        If there is no such file, or llama.cpp cannot load or run it, with its reason.
    ParameterError
        If `dtype` is none of the above.
    """
    path = find_gguf(name)
    spec = models.find(os.fspath(name))
    # Reasoning belongs in front of an answer that begins at once; templates without that switch do not look at it.
    options = {"enable_thinking": False} | (spec.template_options if spec else {})
    title = path.stem if Path(name).expanduser().exists() else os.fspath(name).removesuffix(".gguf")
    codec = GGUFCodec(path, options)  # first: it sees what llama.cpp would end the process over
    return LlamaCppBackend.load(path, dtype, name=title), codec


@dataclass(eq=False)
class _State:
    """KV state of a run of tokens: cells of the cache under a sequence id, or bytes in host memory, or both."""

    length: int
    family: object  # states with common cells
    sequence: int | None = None
    saved: NDArray[np.uint8] | None = None  # stays when the state comes back: a prefix never changes


class LlamaPrefix:
    """Tokens that have been run; their cells are freed with the last reference.

    Attributes
    ----------
    length : int
        Number of tokens.
    """

    def __init__(self, backend: LlamaCppBackend, state: _State) -> None:
        self._backend = backend
        self._state = state
        self.length = state.length
        # No more than a note: this may run in the middle of anything.
        weakref.finalize(self, backend._dropped.append, state).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers, as llama.cpp writes them out."""
        return self._backend._nbytes(self._state)


class LlamaCppBackend:
    """A GGUF model as a backend.

    Parameters
    ----------
    model : Model
        The opened file.
    name : str
        The model's name, for results and messages.
    dtype : {"auto", "float16", "float32"}
        Number format of the KV state.
    threads : int or None
        None: one for each physical core this process may use.
    cells : int
        Tokens the KV cache holds to begin with.

    Attributes
    ----------
    window : int or None
        Length of the sliding window some layers have, in tokens.
    path : Path
        The file.
    threads : int
        How many llama.cpp uses.

    Raises
    ------
    ModelError
        If the model is not one whose trees llama.cpp can run.
    """

    name = "llamacpp"
    keeps_trunks = False
    layout = "packed"

    def __init__(
        self, model: Model, name: str = "model", dtype: str = "auto", threads: int | None = None, cells: int = CELLS
    ) -> None:
        self._kv = _kv_type(dtype)
        if reason := _unfit(model):
            raise ModelError(f"{model.path}: {reason}; use this model with the torch backend")
        self.model = name
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(model.vocab))
        self.max_tokens = int(llama_cpp.llama_model_n_ctx_train(model.pointer))
        self.meter = Meter()
        self._model = model
        self.path = model.path
        self.dtype = _number_format(model, self._kv)
        self.threads = threads or _cores()
        self.fingerprint: str | None = _fingerprint(model, self.dtype)
        self._lock = threading.RLock()  # ctypes lets other threads run while llama.cpp works
        self._sequences = int(llama_cpp.llama_max_parallel_sequences())
        self.window = int(llama_cpp.llama_model_n_swa(model.pointer)) or None
        self._resident: OrderedDict[int, _State] = OrderedDict()  # sequence → state, least recently used first
        self._pinned: list[_State] = []  # what the call in progress needs in the cache
        self._dropped: deque[_State] = deque()
        self._open(cells)

    @classmethod
    def load(cls, path: Path, dtype: str = "auto", name: str | None = None) -> LlamaCppBackend:
        """Load a GGUF file.

        Parameters
        ----------
        path : Path
            The file; of a split model the first.
        dtype : {"auto", "float16", "float32"}
            "float16": weights as in the file, KV state in float16, as llama.cpp does. "float32": weights (unpacked once more
            into a temporary file), state and arithmetic in float32; packed weights make llama.cpp round activations to 8 bits,
            so that the last digit of one number may change the second of another. "auto": as "float16", but on a CPU the weights
            of small models are unpacked too: for some formats batches then run twice as fast.
        name : str, optional
            The model's name; by default the file's.

        Raises
        ------
        ModelError
            If llama.cpp cannot load or run the file, with its reason.
        ParameterError
            If `dtype` is none of the above.
        """
        _kv_type(dtype)  # before minutes of loading
        path = Path(path)
        model = Model(path)
        if model.weights != "F32":
            small = 4 * int(llama_cpp.llama_model_n_params(model.pointer)) <= UNPACKED
            if dtype == "float32":
                model = unpack(model, _cores())
            elif dtype == "auto" and small and not llama_cpp.llama_supports_gpu_offload():
                with suppress(ModelError):  # no room for it
                    model = unpack(model, _cores())
        return cls(model, name or path.stem, dtype)

    # --- the contract -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], parent: LlamaPrefix | None = None) -> LlamaPrefix:
        """Run `tokens` on top of `parent`; see :class:`pcdlab.backends.base.Backend`."""
        if not len(tokens):
            raise ParameterError("prefill needs at least one token; give the parent itself where nothing is added")
        with self._using(parent, len(tokens)) as base:
            state = self._branch(base)
            try:
                self._extend(state, np.asarray(tokens, dtype=np.int64))
            except BaseException:
                self._release(state)
                raise
            return LlamaPrefix(self, state)

    def read(self, prefix: LlamaPrefix | None, tree: TokenTree, keep: int = 0) -> Reading:
        """Run a tree and answer its reads; see :class:`pcdlab.backends.base.Backend`."""
        if not 0 <= keep <= tree.trunk:
            raise ParameterError(f"keep={keep} is not within the tree's trunk of {tree.trunk} nodes")
        if (tree.read_nodes < 0).any():
            raise ParameterError("a read sits at node -1; reads belong to nodes of the tree")
        depth = int(tree.depths.max(initial=-1)) + 1
        with self._using(prefix, min(len(tree), depth + BATCH), depth) as base:
            walk = _Walk(self, tree, base, keep)
            try:
                walk.run()
            except BaseException:
                walk.release(kept=True)
                raise
            walk.release()
            kept = LlamaPrefix(self, walk.kept) if walk.kept else None
        return Reading(check_finite(walk.log_probs, self.model), kept)

    def stream(self, prefix: LlamaPrefix | None) -> LlamaStream:
        """Begin token-by-token work; see :class:`pcdlab.backends.base.Backend`."""
        return LlamaStream(self, prefix)

    def plain_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits of one sequence in an empty cache, no prefix and no tree, float32, shape (n, vocabulary)."""
        return self.stream(None).feed(tokens)

    def save(self, prefix: LlamaPrefix, path: Path) -> None:
        """Write a prefix's state as safetensors."""
        with self._using(prefix, 0) as base:
            assert base is not None
            save_file({"state": self._written(base)}, path, metadata={"length": str(base.length)})

    def load_prefix(self, path: Path) -> LlamaPrefix:
        """Read back a prefix.

        Raises
        ------
        BackendError
            If the file is damaged or of another model.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                state = _State(int(file.metadata()["length"]), object(), saved=file.get_tensor("state"))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise BackendError(f"{path} holds no prefix of this backend ({error}); delete it") from error
        prefix = LlamaPrefix(self, state)
        with self._using(prefix, 0):  # now, so that a damaged file shows here
            return prefix

    # --- the cache ----------------------------------------------------------------------------------------------

    def _open(self, cells: int) -> None:
        """A fresh context with an empty cache of at least that many cells."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = BATCH
        params.n_seq_max = self._sequences
        params.kv_unified = True
        params.swa_full = True
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = int(self._kv)
        # Flash attention, which llama.cpp takes where it can, computes in float16 whatever the state is in.
        if self._kv == KV_TYPES["float32"]:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        last_errors()
        context = llama_cpp.llama_init_from_model(self._model.pointer, params)
        if not context:
            raise BackendError(f"{self.model!r}: llama.cpp has no room for {cells} tokens of context: {last_errors()}")
        self._context: Any = context
        self._close = weakref.finalize(self, llama_cpp.llama_free, context)
        self._memory: Any = llama_cpp.llama_get_memory(context)
        self._cells = int(llama_cpp.llama_n_ctx(context))
        self._batch = int(llama_cpp.llama_n_batch(context))
        self._free = list(range(self._sequences))[::-1]

    @contextmanager
    def _using(self, prefix: LlamaPrefix | None, more: int, depth: int | None = None) -> Iterator[_State | None]:
        """Hold the context, with the prefix's state in it and room for `more` cells, `depth` positions deep."""
        if prefix is not None and prefix._backend is not self:
            raise ParameterError(f"this prefix belongs to another backend than the one of {self.model!r}")
        length = prefix.length if prefix else 0
        longest = length + (more if depth is None else depth)
        if longest > self.max_tokens:
            raise BackendError(f"{longest} tokens do not fit {self.model!r}, whose positions end at {self.max_tokens}")
        with self._lock:
            while self._dropped:
                self._release(self._dropped.popleft())
            state = prefix._state if prefix else None
            for other in list(self._resident.values()):
                if state is None or other.family is not state.family:
                    self._swap_out(other)
            if length + more > self._cells:
                self._grow(length + more)
            if state is not None:
                self._swap_in(state)
                self._resident.move_to_end(state.sequence)  # type: ignore[arg-type]
                self._pinned.append(state)
            try:
                yield state
            finally:
                self._pinned.clear()

    def _grow(self, cells: int) -> None:
        """Move everything into a larger cache."""
        for state in list(self._resident.values()):
            self._swap_out(state)
        before = self._cells
        self._close()
        try:
            self._open(max(2 * before, cells))
        except BackendError:
            self._open(before)
            raise

    def _claim(self) -> int:
        """A free sequence id, if need be that of the state that was not used for longest."""
        if not self._free:
            self._evict()
        return self._free.pop()

    def _idle(self) -> list[_State]:
        """States in the cache that the call in progress does not need, least recently used first."""
        return [state for state in self._resident.values() if state not in self._pinned]

    def _evict(self) -> None:
        """Move the least recently used state to host memory."""
        idle = self._idle()
        if not idle:
            raise BackendError(
                f"{self.model!r}: llama.cpp's {self._cells} cells and {self._sequences} sequences do not suffice for this "
                "call; ask for fewer fields or documents at once"
            )
        self._swap_out(idle[0])

    def _branch(self, base: _State | None) -> _State:
        """A state of its own with the same tokens, on the same cells."""
        sequence = self._claim()
        if base is not None:
            llama_cpp.llama_memory_seq_cp(self._memory, base.sequence, sequence, -1, -1)
        state = _State(base.length if base else 0, base.family if base else object(), sequence)
        self._resident[sequence] = state
        self._pinned.append(state)
        return state

    def _release(self, state: _State) -> None:
        if state.sequence is not None:
            llama_cpp.llama_memory_seq_rm(self._memory, state.sequence, -1, -1)
            del self._resident[state.sequence]
            self._free.append(state.sequence)
            state.sequence = None

    def _swap_out(self, state: _State) -> None:
        state.saved = self._written(state)
        self._release(state)

    def _written(self, state: _State) -> NDArray[np.uint8]:
        """The state as llama.cpp writes it out."""
        if state.saved is not None:
            return state.saved
        size = llama_cpp.llama_state_seq_get_size(self._context, state.sequence)
        buffer = np.empty(size, dtype=np.uint8)
        if llama_cpp.llama_state_seq_get_data(self._context, _bytes(buffer), size, state.sequence) != size:
            raise BackendError(f"{self.model!r}: llama.cpp cannot write out {state.length} tokens: {last_errors()}")
        return buffer

    def _swap_in(self, state: _State) -> None:
        if state.sequence is not None:
            return
        assert state.saved is not None
        sequence = self._claim()
        last_errors()
        while not llama_cpp.llama_state_seq_set_data(self._context, _bytes(state.saved), len(state.saved), sequence):
            reason = last_errors()
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            if not self._idle():
                self._free.append(sequence)
                raise BackendError(
                    f"{self.model!r}: llama.cpp cannot take back a prefix of {state.length} tokens: {reason}"
                )
            self._evict()
        state.sequence = sequence
        self._resident[sequence] = state
        if int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1 != state.length:
            self._release(state)
            raise BackendError(
                f"{self.model!r}: this prefix does not hold the {state.length} tokens it says; delete it"
            )

    def _nbytes(self, state: _State) -> int:
        with self._lock:
            if state.sequence is None:
                return 0 if state.saved is None else state.saved.nbytes
            return int(llama_cpp.llama_state_seq_get_size(self._context, state.sequence))

    # --- passes -------------------------------------------------------------------------------------------------

    def _extend(self, state: _State, tokens: IntArray, logits: NDArray[np.float32] | None = None) -> None:
        """Run tokens on top of a state; with `logits`, [k, vocabulary], also write down those after the last k tokens."""
        assert state.sequence is not None
        rows = 0 if logits is None else len(logits)
        limit = min(self._batch, self._rows()) if rows > 1 else self._batch
        for first in range(0, len(tokens), limit):
            part = tokens[first : first + limit]
            n = len(part)
            positions = state.length + np.arange(n)
            places = first + np.arange(n) - (len(tokens) - rows)  # among the rows of logits; negative: not asked
            asked = places >= 0
            got = self._decode(part, positions, np.ones(n, dtype=np.int64), np.full(n, state.sequence), asked)
            if logits is not None:
                logits[places[asked]] = got
            state.length += n

    def _rows(self) -> int:
        """Most tokens of one pass whose logits are asked for."""
        return max(1, LOGIT_BYTES // (4 * self.vocabulary))

    def _decode(
        self, tokens: IntArray, positions: IntArray, counts: IntArray, sequences: IntArray, asked: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """One llama_decode.

        Parameters
        ----------
        tokens, positions : int array, shape (n,)
        counts : int array, shape (n,)
            How many sequences each token belongs to.
        sequences : int array, shape (sum of counts,)
            Which, one token's after the other's.
        asked : bool array, shape (n,)
            Whether the logits after a token are wanted.

        Returns
        -------
        float32 array, shape (number asked, vocabulary)
            llama.cpp's own memory, valid until the next call.
        """
        n = len(tokens)
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        places = np.ascontiguousarray(positions, dtype=np.int32)
        sizes = np.ascontiguousarray(counts, dtype=np.int32)
        members = np.ascontiguousarray(sequences, dtype=np.int32)
        starts = members.ctypes.data + members.itemsize * (np.cumsum(counts) - counts)
        pointers = np.ascontiguousarray(starts, dtype=np.uintp)
        flags = np.ascontiguousarray(asked, dtype=np.int8)
        batch: Any = llama_cpp.llama_batch()
        batch.n_tokens = n
        batch.token = ids.ctypes.data_as(_INT32)
        batch.pos = places.ctypes.data_as(_INT32)
        batch.n_seq_id = sizes.ctypes.data_as(_INT32)
        batch.seq_id = pointers.ctypes.data_as(ctypes.POINTER(_INT32))
        batch.logits = flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        last_errors()
        while (code := llama_cpp.llama_decode(self._context, batch)) == 1:  # no cells left
            self._evict()
        if code:
            raise BackendError(f"{self.model!r}: llama.cpp could not run {n} tokens (code {code}): {last_errors()}")
        self.meter.count(n)
        rows = int(flags.sum())
        if not rows:
            return np.empty((0, self.vocabulary), dtype=np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self.vocabulary))


class LlamaStream:
    """Token-by-token work on a llama.cpp backend."""

    def __init__(self, backend: LlamaCppBackend, prefix: LlamaPrefix | None) -> None:
        self._backend = backend
        self._prefix = prefix
        self._fed: list[int] = []
        self._own: LlamaPrefix | None = None  # cells of prefix and fed tokens; the one prefix that does change

    @property
    def length(self) -> int:
        """Number of tokens so far, the prefix included."""
        return (self._prefix.length if self._prefix else 0) + len(self._fed)

    def feed(self, tokens: Sequence[int], last: bool = False) -> NDArray[np.float32]:
        """Append tokens; logits after each or the last, float32, shape (k, vocabulary) or (1, vocabulary)."""
        backend = self._backend
        logits = np.empty((min(len(tokens), 1) if last else len(tokens), backend.vocabulary), dtype=np.float32)
        if not len(tokens):
            return logits
        with backend._using(self._own or self._prefix, len(tokens)) as base:
            if self._own is None:
                self._own = LlamaPrefix(backend, backend._branch(base))
            state = self._own._state
            before = state.length
            state.saved = None
            try:
                backend._extend(state, np.asarray(tokens, dtype=np.int64), logits)
            except BaseException:
                self._cut(before)
                raise
            self._own.length = state.length
        self._fed.extend(tokens)
        return logits

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
        backend = self._backend
        length = self.length - count
        self._fed = self._fed[: len(self._fed) - count]
        with backend._using(self._own, 0) as state:
            assert state is not None
            oldest = int(llama_cpp.llama_memory_seq_pos_min(backend._memory, state.sequence))
            self._cut(length)
        # llama.cpp gives cells to others once a sliding window has passed them by; here it comes back.
        if backend.window and oldest > max(0, length - backend.window + 1):
            again, self._fed, self._own = self._fed, [], None
            self.feed(again)

    def _cut(self, length: int) -> None:
        """Shorten the stream's own state; the context is held, the state in it."""
        assert self._own is not None
        state = self._own._state
        if state.sequence is not None:
            llama_cpp.llama_memory_seq_rm(self._backend._memory, state.sequence, length, -1)
        state.length = self._own.length = length
        state.saved = None


class _Walk:
    """One tree on its way through as few passes as llama.cpp's limits allow.

    Leaves are numbered in depth-first order; then the leaves below any node are a range of numbers, and the nodes of any
    subtree a range of the order.
    """

    def __init__(self, backend: LlamaCppBackend, tree: TokenTree, base: _State | None, keep: int) -> None:
        self._backend = backend
        self._tree = tree
        self._base = base
        self._keep = keep
        self._depths = tree.depths
        self.kept = backend._branch(base) if keep else None
        self.log_probs = np.empty(len(tree.candidates))
        n = len(tree)
        self._children: list[list[int]] = [[] for _ in range(n + 1)]  # the last list: children of the prefix
        for node, parent in enumerate(tree.parents.tolist()):
            self._children[parent].append(node)
        order: list[int] = []
        stack = self._children[n][::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self._children[node]))
        self._order = np.array(order, dtype=np.int64)
        self._place = np.empty(n, dtype=np.int64)
        self._place[self._order] = np.arange(n)
        self._asked = np.zeros(n, dtype=bool)
        self._asked[tree.read_nodes] = True
        leaf = np.array([not below for below in self._children[:n]], dtype=bool)
        self._first = np.zeros(n, dtype=np.int64)  # number of the first leaf below
        self._first[self._order] = np.cumsum(leaf[self._order]) - leaf[self._order]
        # nodes, leaves and reads of each subtree, itself included
        totals = np.stack([np.ones(n, dtype=np.int64), leaf.astype(np.int64), self._asked.astype(np.int64)], axis=1)
        parents = tree.parents.tolist()
        for node in range(n - 1, -1, -1):
            if parents[node] >= 0:
                totals[parents[node]] += totals[node]
        self._totals = totals
        self._sequence = np.zeros(int(leaf.sum()), dtype=np.int64)  # of each leaf, while it has one
        self._claimed: list[int] = []
        self._reads_at: dict[int, list[int]] = {}
        for index, node in enumerate(tree.read_nodes.tolist()):
            self._reads_at.setdefault(node, []).append(index)

    def run(self) -> None:
        """Answer every read."""
        leaves = len(self._sequence)
        while len(self._backend._free) < leaves and self._backend._idle():
            self._backend._evict()
        self._below(self._base.sequence if self._base else None, self._children[-1])

    def release(self, kept: bool = False) -> None:
        """Take the tree out of the cache, on request also what was to be kept."""
        self._give_back(len(self._claimed))
        if kept and self.kept is not None:
            self._backend._release(self.kept)

    def _below(self, base: int | None, roots: Sequence[int]) -> None:
        """Run the subtrees of `roots`, whose ancestors are in the cache under sequence `base`."""
        before = len(self._claimed)
        while roots:
            large = self._groups(base, roots)
            # The largest last, on a sequence that grows: a comb would else take a sequence for every tooth.
            large.sort(key=lambda root: int(self._totals[root, 0]))
            roots = []
            for root in large:
                chain = self._chain(root)
                below = base
                if root != large[-1] or len(self._claimed) == before:
                    (below,) = self._take(base, 1)
                self._decode(chain, np.ones(len(chain), dtype=np.int64), np.full(len(chain), below))
                if root != large[-1]:
                    self._below(below, self._children[chain[-1]])
                    self._give_back(1)
                else:
                    base, roots = below, self._children[chain[-1]]
        self._give_back(len(self._claimed) - before)

    def _groups(self, base: int | None, roots: Sequence[int]) -> list[int]:
        """Run those subtrees that fit a pass, together while they fit; return the others."""
        limits = np.array([self._backend._batch, len(self._backend._free), self._backend._rows()])
        group: list[int] = []
        room = limits.copy()
        large = []
        for root in roots:
            if (self._totals[root] > limits).any():
                large.append(root)
                continue
            if (self._totals[root] > room).any():
                self._pass(base, group)
                group, room = [], limits.copy()
            group.append(root)
            room -= self._totals[root]
        if group:
            self._pass(base, group)
        return large

    def _chain(self, root: int) -> list[int]:
        """The only children below `root`, itself included, as far as one pass takes them."""
        chain = [root]
        reads = int(self._asked[root])
        while len(self._children[chain[-1]]) == 1 and len(chain) < self._backend._batch:
            node = self._children[chain[-1]][0]
            reads += int(self._asked[node])
            if reads > self._backend._rows():
                break
            chain.append(node)
        return chain

    def _pass(self, base: int | None, roots: Sequence[int]) -> None:
        """Run whole subtrees in one pass."""
        leaves = self._totals[roots, 1]
        sequences = self._take(base, int(leaves.sum()))
        done = 0
        nodes = []
        for root, count in zip(roots, leaves.tolist(), strict=True):
            first, place = int(self._first[root]), int(self._place[root])
            self._sequence[first : first + count] = sequences[done : done + count]
            done += count
            nodes.append(self._order[place : place + int(self._totals[root, 0])])
        together = np.concatenate(nodes)
        counts = self._totals[together, 1]
        # first leaf, first leaf + 1, … of each node, all nodes in one array
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        self._decode(together, counts, self._sequence[np.repeat(self._first[together], counts) + within])
        self._give_back(len(sequences))

    def _decode(self, nodes: Sequence[int] | IntArray, counts: IntArray, sequences: IntArray) -> None:
        """One pass over nodes, and the answers to their reads."""
        chosen = np.asarray(nodes)
        if self.kept is not None and (kept := chosen < self._keep).any():
            # The kept beginning is one more sequence, named last: llama.cpp masks by the first.
            assert self.kept.sequence is not None
            sequences = np.insert(sequences, np.cumsum(counts)[kept], self.kept.sequence)
            counts = counts + kept
            self.kept.length += int(kept.sum())
        start = self._base.length if self._base else 0
        asked = self._asked[chosen]
        tree = self._tree
        logits = self._backend._decode(tree.tokens[chosen], start + self._depths[chosen], counts, sequences, asked)
        readers = chosen[asked].tolist()
        for first in range(0, len(readers), ROWS):
            rows = logits[first : first + ROWS]
            top = rows.max(axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):  # infinities are reported as what they are
                total = np.exp(rows - top).sum(axis=1, dtype=np.float64)
            constants = top[:, 0].astype(np.float64) + np.log(total)
            for node, row, constant in zip(readers[first : first + ROWS], rows, constants, strict=True):
                for read in self._reads_at[node]:
                    wanted = tree.read(read)
                    at = int(tree.offsets[read])
                    self.log_probs[at : at + len(wanted)] = row[wanted].astype(np.float64) - constant

    def _take(self, base: int | None, count: int) -> list[int]:
        """Sequences that see what `base` sees."""
        for _ in range(count):
            self._claimed.append(self._backend._claim())
            if base is not None:
                llama_cpp.llama_memory_seq_cp(self._backend._memory, base, self._claimed[-1], -1, -1)
        return self._claimed[len(self._claimed) - count :]

    def _give_back(self, count: int) -> None:
        """Free the sequences claimed last, and the cells that only they had."""
        for _ in range(count):
            sequence = self._claimed.pop()
            llama_cpp.llama_memory_seq_rm(self._backend._memory, sequence, -1, -1)
            self._backend._free.append(sequence)


# --- plumbing ---------------------------------------------------------------------------------------------------


def _bytes(buffer: NDArray[np.uint8]) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _unfit(model: Model) -> str:
    """Why llama.cpp cannot run trees of this model; empty if it can."""
    if llama_cpp.llama_vocab_type(model.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return "the file holds no vocabulary"
    if llama_cpp.llama_model_is_recurrent(model.pointer) or llama_cpp.llama_model_is_hybrid(model.pointer):
        return "layers with recurrent state cannot skip siblings, so llama.cpp cannot run it as a tree"
    if llama_cpp.llama_model_has_encoder(model.pointer) or not llama_cpp.llama_model_has_decoder(model.pointer):
        return "this is no decoder-only language model"
    if llama_cpp.llama_model_is_diffusion(model.pointer):
        return "this is a diffusion model, not a causal language model"
    return ""


def _kv_type(dtype: str) -> gguf.GGMLQuantizationType:
    if dtype not in ("auto", *KV_TYPES):
        raise ParameterError(f"dtype {dtype!r} is unknown; choose one of auto, {', '.join(KV_TYPES)}")
    return KV_TYPES["float16" if dtype == "auto" else dtype]


def _number_format(model: Model, kv: gguf.GGMLQuantizationType) -> str:
    """Name of the number formats for results: what is usual with a format is left out."""
    if kv == KV_TYPES["float32"]:
        return "float32" if model.weights == "F32" else f"{model.weights}, float32 KV state"
    return f"{model.unpacked_from}, unpacked" if model.unpacked_from else model.weights


def _fingerprint(model: Model, dtype: str) -> str:
    """Identity of weights, number format and code, for prefixes kept on disk."""
    stat = model.path.stat()
    text = f"{model.path.name} {stat.st_size} {stat.st_mtime_ns} {dtype} {llama_cpp.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def _cores() -> int:
    """Physical cores this process may use; fewer where OMP_NUM_THREADS says so."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1
    told = os.environ.get("OMP_NUM_THREADS", "")
    limits = [allowed, psutil.cpu_count(logical=False) or allowed, *([int(told)] if told.isdigit() else [])]
    return max(1, min(limits))
