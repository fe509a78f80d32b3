"""The torch backend: any causal language model of transformers, on CPU, CUDA or Apple's mps.

A tree runs as one packed row through the model's own code, with attention taken over by
:mod:`pcdlab.backends.torch_attention`. Models whose state cannot skip siblings (linear attention, convolutions) or whose
attention does not go through transformers' interface run each root-to-leaf path as a row of a padded batch on a copied
cache instead. Which of the two a model gets is decided when it is loaded, by comparing both with plain forward passes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

import pcdlab
from pcdlab.backends.base import Meter, Reading, check_finite
from pcdlab.backends.torch_attention import IMPLEMENTATION, NothingLeftError, Pass, Segment, running
from pcdlab.errors import BackendError, ModelError, ParameterError
from pcdlab.tokentree import Chain, Layout, TokenTree, below, lay_out

__all__ = ["KeptTrunks", "PackedPrefix", "RowsPrefix", "TorchBackend"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_BYTES = 48 << 20  # most bytes of logits held at once: longer reads go through the vocabulary in pieces
# Total variation a layout may differ from plain passes. In bfloat16 two sound ways on random tokens differ by up to 0.07, a wrong
# mask or position on a real model by 0.29 or more.
PROBE_LIMIT, PROBE_LIMIT_LOW = 1e-4, 0.15  # float32; anything below
SHORT = 512  # tokens up to which segments are joined by a copy: each costs every later pass a kernel call and a merge per layer
ROWS_PER_PASS = 32  # rows layout: most copies of the cache at once
REPEATED = 256  # rows layout: most tokens run again because rows share them; from then on they get a pass of their own

# Which attention function runs is a setting of the whole model: of two passes at once each would run the other's.
_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class PackedPrefix:
    """KV state of a run of tokens, as segments that longer prefixes share without copying."""

    segments: tuple[Segment, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(segment.length for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        pairs = [pair for segment in self.segments for pair in segment.layers.values()]
        return sum(k.nbytes + v.nbytes for k, v in pairs)


@dataclass(frozen=True, eq=False)
class KeptTrunks:
    """KV state of several documents' trunks on one prefix, for trees that begin with the same nodes.

    Attributes
    ----------
    prefix : PackedPrefix
    tokens, parents : int64 arrays, shape (nodes,)
        The trunks, as the tree had them.
    segment : Segment
        Their keys and values in the order of the nodes.
    """

    prefix: PackedPrefix
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    segment: Segment

    @property
    def length(self) -> int:
        """Number of tokens before the trunks."""
        return self.prefix.length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return PackedPrefix((*self.prefix.segments, self.segment)).nbytes


@dataclass(frozen=True, eq=False)
class RowsPrefix:
    """State of a run of tokens in a transformers cache, copied by every call that uses it."""

    cache: Any
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the cache, all layers."""
        tensors = [t for layer in self.cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in tensors)


class TorchBackend:
    """A transformers model as a backend.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode.
    name : str
        The model's name, for results and messages.
    layout : {"auto", "packed", "rows"}
        How trees run. "auto" takes packed where it reproduces plain forward passes, else rows.
    fingerprint : str or None
        Identity of the weights, for prefixes kept on disk.

    Attributes
    ----------
    window : int or None
        Length of the sliding window that some layers have, in tokens.
    """

    name = "torch"

    def __init__(
        self,
        model: Any,
        name: str = "model",
        layout: Literal["auto", "packed", "rows"] = "auto",
        fingerprint: str | None = None,
    ) -> None:
        self.module = model.eval()
        self.model = name
        self.device = next(model.parameters()).device
        self.torch_dtype = next(model.parameters()).dtype
        self.dtype = str(self.torch_dtype).removeprefix("torch.")
        self.meter = Meter()
        self._lock = _LOCKS.setdefault(model, threading.RLock())
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self.max_tokens = _longest(config)
        self.window = _window(config)
        self._plain_attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        self._use(self._plain_attention)
        self._finish = _find_finish(model, config)
        self._last_layer: int | None = None  # until a probe has seen it
        self.layout: str = layout
        self.layout_reason = f"asked for: {layout}"
        if layout == "auto":
            self.layout = "packed"
            problem = self._probe()
            self.layout_reason = problem or "reproduces plain forward passes"
            if problem:
                self.layout = "rows"
                if problem := self._probe():
                    raise BackendError(f"{name!r} runs neither packed ({self.layout_reason}) nor in rows ({problem})")
        self.keeps_trunks = self.layout == "packed"
        self.fingerprint = fingerprint if self.layout == "packed" else None
        self.meter = Meter()

    @classmethod
    def load(cls, folder: Path, dtype: str = "auto", device: str | None = None) -> TorchBackend:
        """Load a model folder.

        Parameters
        ----------
        folder : Path
            A folder with ``config.json`` and safetensors weights.
        dtype : {"auto", "float32", "bfloat16", "float16"}
            "auto": float32 on a CPU, bfloat16 elsewhere.
        device : str or None
            None: CUDA if there is one, then mps, then CPU.

        Raises
        ------
        ParameterError
            If `dtype` is none of the above.
        ModelError
            If transformers cannot load the folder.
        """
        device = device or best_device()
        if dtype == "auto":
            dtype = best_dtype(device)
        if dtype not in DTYPES:
            raise ParameterError(f"dtype {dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")
        # Transformers prints a progress bar per load, which would end up in every notebook.
        transformers.utils.logging.disable_progress_bar()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
            )
            model, found = loaded
            model.to(device)
        except Exception as error:  # transformers, safetensors and the config classes raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{folder}: transformers cannot load this model: {reason}") from error
        # What a checkpoint lacks, transformers fills with random numbers.
        wrong = {
            kind: sorted(map(str, found[kind]))
            for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")
            if found[kind]
        }
        if wrong:
            told = "; ".join(
                f"{kind.replace('_', ' ')}: {', '.join(keys[:3])} ({len(keys)} in all)" for kind, keys in wrong.items()
            )
            raise ModelError(
                f"{folder}: the weights do not fit config.json, {told}; get the model again or correct the config"
            )
        return cls(model, name=Path(folder).name, fingerprint=_fingerprint(Path(folder), dtype, device))

    # --- the contract -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], parent: Any = None) -> Any:
        """Run `tokens` on top of `parent`; see :class:`pcdlab.backends.base.Backend`."""
        if not len(tokens):
            raise ParameterError("prefill needs at least one token; give the parent itself where nothing is added")
        _refuse_trunks(parent, "prefill")
        if self.layout == "rows":
            return self._extend_rows(parent, list(tokens))[0]
        n = len(tokens)
        chain = Layout(np.arange(n), np.arange(n), (Chain(0, n, n),), ())
        now = self._pass(parent, chain, np.arange(n), keep=n)
        now.last_layer = self._last_layer  # the rest of that layer would be for readers, and a prefill has none
        self._run(np.asarray(tokens), now)
        return self._grown(parent, now)

    def read(self, prefix: Any, tree: TokenTree, keep: int = 0) -> Reading:
        """Run a tree and answer its reads; see :class:`pcdlab.backends.base.Backend`."""
        known = len(prefix.tokens) if isinstance(prefix, KeptTrunks) else 0
        if len(tree) <= known:
            raise ParameterError(f"the tree has no node that this pass would run ({known} of its {len(tree)} have run)")
        if not ((self.keeps_trunks and keep == tree.shared) or 0 <= keep <= (0 if known else tree.trunk)):
            raise ParameterError(f"keep={keep} is not within the tree's trunk of {tree.trunk} nodes")
        if (tree.read_nodes < known).any():
            raise ParameterError(
                f"a read sits at node {tree.read_nodes.min()}; reads belong to nodes that this pass runs"
            )
        kept: Any
        if self.layout == "rows":
            hidden, kept = self._read_rows(prefix, tree, keep)
        else:
            hidden, kept = self._read_packed(prefix, tree, keep)
        return Reading(check_finite(self._log_probs(hidden, tree), self.model), kept)

    def stream(self, prefix: Any) -> TorchStream:
        """Begin token-by-token work; see :class:`pcdlab.backends.base.Backend`."""
        _refuse_trunks(prefix, "stream")
        return TorchStream(self, prefix)

    def save(self, prefix: PackedPrefix, path: Path) -> None:
        """Write a packed prefix as safetensors."""
        _refuse_trunks(prefix, "save")
        tensors: dict[str, Tensor] = {}
        for i, segment in enumerate(prefix.segments):
            for layer, (k, v) in segment.layers.items():
                tensors[f"{i}.{layer}.k"], tensors[f"{i}.{layer}.v"] = k, v
        spans = json.dumps([[segment.start, segment.length] for segment in prefix.segments])
        save_file(tensors, path, metadata={"spans": spans, "digest": _digest(tensors)})

    def load_prefix(self, path: Path) -> PackedPrefix:
        """Read back a packed prefix.

        Raises
        ------
        BackendError
            If the file's contents are not what was written.
        """
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        if metadata.get("digest") != _digest(tensors):
            raise BackendError(f"{path}: its keys and values are not those that were written; delete the file")
        spans = json.loads(metadata["spans"])
        layers: list[dict[int, list[Tensor]]] = [{} for _ in spans]
        for key in sorted(tensors):  # "k" sorts before "v"
            i, layer, _ = key.split(".")
            layers[int(i)].setdefault(int(layer), []).append(tensors[key])
        pairs = [{layer: (kv[0], kv[1]) for layer, kv in segment.items()} for segment in layers]
        return PackedPrefix(tuple(Segment(start, n, pair) for (start, n), pair in zip(spans, pairs, strict=True)))

    # --- packed rows --------------------------------------------------------------------------------------------

    def _pass(
        self, prefix: PackedPrefix | None, layout: Layout, depths: NDArray[np.int64], keep: int, **trunks: Any
    ) -> Pass:
        prefix = prefix or PackedPrefix()
        positions = torch.from_numpy(depths + prefix.length).to(self.device)
        return Pass(layout, prefix.segments, positions, keep, **trunks)

    def _read_packed(self, prefix: Any, tree: TokenTree, keep: int) -> tuple[Tensor, Any]:
        """Hidden states at the reads, [reads, hidden], and what was to be kept."""
        if isinstance(prefix, KeptTrunks):
            return self._read_below(prefix, tree), prefix if keep else None
        layout = lay_out(tree)
        rows = torch.from_numpy(layout.rows[:keep]).to(self.device) if keep > tree.trunk else None
        now = self._pass(prefix, layout, tree.depths[layout.order], keep, keep_rows=rows)
        hidden = self._hidden(tree, layout, now)
        if rows is None:
            return hidden, self._grown(prefix, now) if keep else None
        base = prefix or PackedPrefix()
        segment = Segment(base.length, keep, now.kept)
        return hidden, KeptTrunks(base, tree.tokens[:keep], tree.parents[:keep], segment)

    def _read_below(self, kept: KeptTrunks, tree: TokenTree) -> Tensor:
        """Hidden states at the reads of a tree that begins with trunks that were kept, [reads, hidden]."""
        n = len(kept.tokens)
        if not (np.array_equal(tree.tokens[:n], kept.tokens) and np.array_equal(tree.parents[:n], kept.parents)):
            raise ParameterError(f"the tree does not begin with the {n} nodes of the trunks that were kept")
        rest, hangs = below(tree, n)
        layout = lay_out(rest)
        above = _above(kept, hangs[layout.order])
        now = self._pass(kept.prefix, layout, tree.depths[n:][layout.order], 0, trunks=kept.segment, above=above)
        return self._hidden(rest, layout, now)

    def _hidden(self, tree: TokenTree, layout: Layout, now: Pass) -> Tensor:
        """Run a tree; hidden states at its reads, [reads, hidden]."""
        states = self._run(tree.tokens[layout.order], now)  # [n, hidden]
        return states[torch.from_numpy(layout.rows[tree.read_nodes]).to(self.device)]

    def _run(self, tokens: NDArray[np.int64], now: Pass) -> Tensor:
        """One packed forward pass; hidden states after the last norm, [n, hidden], or none if it ends at its `last_layer`."""
        self._check_length(int(now.positions.max()) + 1)
        ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64)).to(self.device)
        with self._attention(IMPLEMENTATION), running(now):
            try:
                output = self._forward(input_ids=ids[None], position_ids=now.positions[None], use_cache=False)
                states: Tensor = output.last_hidden_state[0]
            except NothingLeftError:
                states = torch.empty(0)
        self.meter.count(len(tokens))
        return states

    def _forward(self, **inputs: Any) -> Any:
        """The model without its vocabulary projection; what the framework raises becomes a BackendError."""
        try:
            with torch.inference_mode():
                return self.module.base_model(**inputs)
        except (RuntimeError, IndexError, MemoryError) as error:
            size = " × ".join(map(str, inputs["input_ids"].shape))
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BackendError(
                f"{self.model!r} failed on a pass of {size} tokens: {reason}. If it ran out of memory, give extract_many a "
                "smaller tokens_per_pass."
            ) from error

    @staticmethod
    def _grown(parent: PackedPrefix | None, now: Pass) -> PackedPrefix:
        parent = parent or PackedPrefix()
        *before, last = (*parent.segments, Segment(parent.length, now.keep, now.kept))
        if before and before[-1].length + last.length <= SHORT:
            short = before.pop()
            layers = {
                layer: tuple(torch.cat([old, new], 1) for old, new in zip(pair, last.layers[layer], strict=True))
                for layer, pair in short.layers.items()
            }
            last = Segment(short.start, short.length + last.length, layers)  # type: ignore[arg-type]
        return PackedPrefix((*before, last))

    # --- rows on a copied cache ---------------------------------------------------------------------------------

    def _extend_rows(self, prefix: RowsPrefix | None, tokens: list[int]) -> tuple[RowsPrefix, Tensor]:
        """Run one row of tokens on a copy of the prefix; the longer prefix and the states [n, hidden]."""
        cache = copy.deepcopy(prefix.cache) if prefix else self._new_cache()
        length = (prefix.length if prefix else 0) + len(tokens)
        states = self._run_rows([tokens], cache, length - len(tokens))
        return RowsPrefix(cache, length), states[0]

    def _run_rows(self, rows: list[list[int]], cache: Any, past: int) -> Tensor:
        """One forward pass over right-padded rows on `cache`, which is changed; states [rows, longest, hidden]."""
        longest = max(len(row) for row in rows)
        self._check_length(past + longest)
        ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in rows], device=self.device)
        positions = torch.arange(past, past + longest, device=self.device)[None].expand(len(rows), -1)
        # Padding stands to the right, so causal attention already hides it from every real token.
        with self._attention(self._plain_attention):
            output = self._forward(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
        self.meter.count(sum(len(row) for row in rows))
        return output.last_hidden_state

    def _read_rows(self, prefix: RowsPrefix | None, tree: TokenTree, keep: int) -> tuple[Tensor, RowsPrefix | None]:
        """Each leading chain as one row, everything below it as one row per leaf.

        Where the rows would repeat a long beginning (documents of a batch that share their first words), it too is a chain.
        """
        kept: RowsPrefix | None = None
        children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
        for node, parent in enumerate(tree.parents.tolist()):
            children[parent].append(node)
        leaves = [int(not below) for below in children]
        repeats = [0] * len(children)  # tokens run again if all leaves below a node, itself included, are rows
        for node in range(len(tree) - 1, -1, -1):
            parent = tree.parents[node]
            repeats[node] += leaves[node] - 1
            leaves[parent] += leaves[node]
            repeats[parent] += repeats[node]
        states: dict[int, Tensor] = {}  # node -> [hidden]
        wanted = set(tree.read_nodes.tolist())

        def chain_from(node: int) -> list[int]:
            chain = [node]
            while len(children[chain[-1]]) == 1:
                chain.append(children[chain[-1]][0])
            return chain

        def note(nodes: Sequence[int], hidden: Tensor) -> None:
            states.update((node, hidden[i]) for i, node in enumerate(nodes) if node in wanted)

        work = [(prefix, chain_from(root)) for root in reversed(children[-1])]
        while work:
            base, chain = work.pop()
            done = 0
            for stop in sorted({keep, len(chain)} - {0}) if chain[0] == 0 else [len(chain)]:
                nodes = chain[done:stop]
                base, hidden = self._extend_rows(base, tree.tokens[nodes].tolist())
                note(nodes, hidden)
                kept = base if chain[0] == 0 and stop == keep else kept
                done = stop
            assert base is not None
            paths: list[list[int]] = []
            for child in children[chain[-1]]:
                if repeats[child] > REPEATED:
                    work.append((base, chain_from(child)))
                else:
                    paths.extend(_leaf_paths(children, child))
            for first in range(0, len(paths), ROWS_PER_PASS):
                rows = paths[first : first + ROWS_PER_PASS]
                cache = copy.deepcopy(base.cache)
                cache.reorder_cache(torch.zeros(len(rows), dtype=torch.int64, device=self.device))  # row 0, n times
                hidden = self._run_rows([tree.tokens[row].tolist() for row in rows], cache, base.length)
                for row, row_hidden in zip(rows, hidden, strict=True):
                    note(row, row_hidden)
        order = tree.read_nodes.tolist()
        empty = torch.empty(0, 1, device=self.device)
        return (torch.stack([states[node] for node in order]) if order else empty), kept

    def _new_cache(self) -> Any:
        # Without the config every attention layer gets a plain cache that can be rolled back; sliding windows are then
        # a matter of masks. Models with recurrent state need the layers their config names.
        types = set(getattr(self.module.config.get_text_config(decoder=True), "layer_types", None) or [])
        if types <= {"full_attention", "sliding_attention"}:
            return DynamicCache()
        return DynamicCache(config=self.module.config)

    # --- vocabulary ---------------------------------------------------------------------------------------------

    def _log_probs(self, hidden: Tensor, tree: TokenTree) -> NDArray[np.float64]:
        """Log-softmax over the full vocabulary at the candidates of every read; hidden [reads, hidden]."""
        counts = np.diff(tree.offsets)
        found = np.empty(len(tree.candidates))
        step = max(1, HEAD_BYTES // (4 * self.vocabulary))
        for first in range(0, len(hidden), step):
            part = hidden[first : first + step]
            lo, hi = tree.offsets[first], tree.offsets[min(first + step, len(hidden))]
            rows = torch.from_numpy(np.repeat(np.arange(len(part)), counts[first : first + step])).to(self.device)
            tokens = torch.from_numpy(tree.candidates[lo:hi]).to(self.device)
            with torch.inference_mode():
                log_probs = torch.log_softmax(self._logits(part), -1)
                found[lo:hi] = log_probs[rows, tokens].cpu().double().numpy()
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32, [n, vocabulary], of hidden states [n, hidden]."""
        with torch.inference_mode():
            return self._finish(self.module.get_output_embeddings()(hidden)).float()

    # --- plumbing -----------------------------------------------------------------------------------------------

    def plain_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits of one unpadded row by the model's own forward pass, no cache, float32, shape (n, vocabulary).

        The reference every other way of computing the same numbers is compared with.
        """
        self._check_length(len(tokens))
        self.meter.count(len(tokens))
        with torch.inference_mode(), self._attention(self._plain_attention):
            output = self.module(torch.tensor([list(tokens)], device=self.device), use_cache=False)
        return output.logits[0].float().cpu().numpy()

    def _check_length(self, length: int) -> None:
        if length > self.max_tokens:
            raise BackendError(f"{length} tokens do not fit {self.model!r}, whose positions end at {self.max_tokens}")

    def _use(self, implementation: str) -> None:
        self.module.config._attn_implementation = implementation

    @contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        with self._lock:
            before = self.module.config._attn_implementation
            self._use(implementation)
            try:
                yield
            finally:
                self._use(before)

    def _probe(self) -> str:
        """Why the current layout cannot be used for this model; empty if it reproduces plain forward passes."""
        config = self.module.config.get_text_config(decoder=True)
        layer_types = getattr(config, "layer_types", None) or []
        odd = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if odd and self.layout == "packed":
            return f"layers of kind {', '.join(odd)} cannot skip siblings"
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.vocabulary, 12)
        parents = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 2, 8, 9, 8])
        reads = np.array([1, 4, 5, 7, 10, 11])
        everything = np.tile(np.arange(self.vocabulary), len(reads))
        tree = TokenTree(tokens, parents, reads, everything, np.arange(len(reads) + 1) * self.vocabulary)
        head = rng.integers(0, self.vocabulary, 9).tolist()
        try:
            prefix = self.prefill(head[4:], self.prefill(head[:4]))
            if self.layout == "packed":
                layout = lay_out(tree, group_size=4)  # so that chains and groups both occur
                now = self._pass(prefix, layout, tree.depths[layout.order], 0)
                states = self._run(tokens[layout.order], now)
                if problem := self._unseen(config, now):
                    return problem
                self._last_layer = list(now.windows)[-1]  # in the order they ran
                hidden = states[torch.from_numpy(layout.rows[reads]).to(self.device)]
            else:
                hidden, _ = self._read_rows(prefix, tree, 2)
            ours = self._log_probs(hidden, tree).reshape(len(reads), -1)
        except Exception as error:  # a model's own code may fail in any way when it is run in one it was not made for
            return f"its code does not run this way ({type(error).__name__}: {error})"
        worst = 0.0
        for read, log_probs in zip(reads, ours, strict=True):
            logits = self.plain_logits([*head, *tokens[tree.path(int(read))].tolist()])[-1]
            plain = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
            worst = max(worst, 0.5 * float(np.abs(np.exp(plain) - np.exp(log_probs)).sum()))
        limit = PROBE_LIMIT if self.torch_dtype == torch.float32 else PROBE_LIMIT_LOW
        if not worst <= limit:
            return f"its next-token distributions differ from plain ones by {worst:.2g} in total variation (limit {limit:g})"
        return ""

    @staticmethod
    def _unseen(config: Any, now: Pass) -> str:
        """What a packed pass shows of layers that do not tell the attention function what it must know."""
        if len(now.windows) != config.num_hidden_layers:
            return f"{config.num_hidden_layers - len(now.windows)} of its layers do not use the attention interface"
        layer_types = getattr(config, "layer_types", None) or []
        for layer, window in now.windows.items():
            sliding = layer_types[layer] == "sliding_attention" if layer_types else window is not None
            if sliding != (window is not None):
                return f"layer {layer} does not tell the attention interface its window"
        return ""


class TorchStream:
    """Token-by-token work on a torch backend; keys and values grow in place."""

    def __init__(self, backend: TorchBackend, prefix: Any) -> None:
        self._backend = backend
        self._prefix = prefix
        self._fed: list[int] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # packed: room for [g, capacity, d]
        self._cache: Any = None  # rows: a copy of the prefix's cache
        if backend.layout == "rows":
            self._cache = copy.deepcopy(prefix.cache) if prefix else backend._new_cache()

    @property
    def length(self) -> int:
        """Number of tokens so far, the prefix included."""
        return (self._prefix.length if self._prefix else 0) + len(self._fed)

    def feed(self, tokens: Sequence[int], last: bool = False) -> NDArray[np.float32]:
        """Append tokens; logits after each or the last, float32, shape (k, vocabulary) or (1, vocabulary)."""
        backend, n = self._backend, len(tokens)
        if not n:
            return np.empty((0, backend.vocabulary), dtype=np.float32)
        if backend.layout == "rows":
            states = backend._run_rows([list(tokens)], self._cache, self.length)[0]
        else:
            prefix = self._prefix or PackedPrefix()
            fed = len(self._fed)
            grown = {layer: (k[:, :fed], v[:, :fed]) for layer, (k, v) in self._layers.items()}
            so_far = PackedPrefix((*prefix.segments, Segment(prefix.length, fed, grown)) if fed else prefix.segments)
            chain = Layout(np.arange(n), np.arange(n), (Chain(0, n, n),), ())
            now = backend._pass(so_far, chain, np.arange(n), keep=n)
            states = backend._run(np.asarray(tokens), now)
            for layer, new in now.kept.items():
                self._layers[layer] = tuple(_write(self._room(layer, i, t), fed, t) for i, t in enumerate(new))  # type: ignore[assignment]
        self._fed.extend(tokens)
        return backend._logits(states[-1:] if last else states).cpu().numpy()

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
        if self._cache is None:
            return
        if all(type(layer) is DynamicLayer for layer in self._cache.layers):
            self._cache.crop(-count)
            return
        # Recurrent state has no way back: start again from the prefix.
        again, self._fed = self._fed, []
        self._cache = copy.deepcopy(self._prefix.cache) if self._prefix else self._backend._new_cache()
        if again:
            self.feed(again)

    def _room(self, layer: int, which: int, new: Tensor) -> Tensor | None:
        """The buffer for one layer's keys (0) or values (1), None where it is missing or full."""
        if layer not in self._layers:
            return None
        buffer = self._layers[layer][which]
        return buffer if len(self._fed) + new.shape[1] <= buffer.shape[1] else _doubled(buffer, new.shape[1])


def _doubled(buffer: Tensor, more: int) -> Tensor:
    g, capacity, d = buffer.shape
    bigger = buffer.new_empty(g, 2 * capacity + more, d)
    bigger[:, :capacity] = buffer
    return bigger


def _write(buffer: Tensor | None, at: int, new: Tensor) -> Tensor:
    """Put [g, k, d] into the buffer's places ``at…``; a fresh buffer where there is none."""
    if buffer is None:
        buffer = new.new_empty(new.shape[0], max(64, 2 * new.shape[1]), new.shape[2])
    buffer[:, at : at + new.shape[1]] = new
    return buffer


def _refuse_trunks(prefix: Any, verb: str) -> None:
    if isinstance(prefix, KeptTrunks):
        raise ParameterError(f"{verb} takes one run of tokens, and this prefix holds the trunks of several documents")


def _above(known: KeptTrunks, hangs: NDArray[np.int64]) -> tuple[tuple[slice, NDArray[np.int64]], ...]:
    """Runs of rows that hang from the same kept node, and that node's path; `hangs` is by row."""
    runs = np.split(np.arange(len(hangs)), np.flatnonzero(np.diff(hangs)) + 1)
    found = []
    for run in runs:
        node, path = int(hangs[run[0]]), []
        while node >= 0:
            path.append(node)
            node = int(known.parents[node])
        if path:
            found.append((slice(int(run[0]), int(run[-1]) + 1), np.array(path[::-1])))
    return tuple(found)


def _leaf_paths(children: list[list[int]], root: int) -> Iterator[list[int]]:
    """Every path from `root` to a leaf below it, `root` included, in depth-first order."""
    stack = [[root]]
    while stack:
        path = stack.pop()
        below = children[path[-1]]
        if not below:
            yield path
        stack.extend([*path, child] for child in reversed(below))


def _find_finish(model: Any, config: Any) -> Any:
    """What the model does to its logits after the vocabulary projection, found by trying.

    Running the projection only where something is read needs the steps after it (Gemma 2 caps logits, Granite and Cohere
    scale them). The candidates are compared with the model's own forward pass.
    """
    cap = getattr(config, "final_logit_softcapping", None)
    divide = getattr(config, "logits_scaling", None)
    times = getattr(config, "logit_scale", None)
    candidates: list[Any] = [lambda logits: logits]
    if cap:
        candidates.append(lambda logits: cap * torch.tanh(logits / cap))
    if divide:
        candidates.append(lambda logits: logits / divide)
    if times:
        candidates.append(lambda logits: logits * times)
    ids = torch.arange(5, device=next(model.parameters()).device)[None] % int(config.vocab_size)
    with torch.inference_mode():
        truth = model(ids, use_cache=False).logits.float()
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for finish in candidates:
            ours = finish(model.get_output_embeddings()(states)).float()
            if ours.shape == truth.shape and torch.allclose(ours, truth, rtol=1e-3, atol=1e-3):
                return finish
    raise BackendError(
        f"{type(model).__name__} changes its logits after the vocabulary projection in a way this backend does not know; "
        "adding it to _find_finish in pcdlab/backends/torch.py takes one line"
    )


def _window(config: Any) -> int | None:
    """Length of the sliding window that some layers have."""
    kinds = getattr(config, "layer_types", None)  # configs without it slide in every layer, or in none
    return getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None


def _longest(config: Any) -> int:
    """Longest sequence the positions allow."""
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this length the model turns all positions, also those of a prefix that was run before: not ours to mix.
        longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _digest(tensors: dict[str, Tensor]) -> str:
    """Hash of names, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fingerprint(folder: Path, dtype: str, device: str) -> str:
    """Identity of weights, number format and versions, for prefixes kept on disk."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    versions = f"{pcdlab.__version__} {torch.__version__} {transformers.__version__}"
    digest.update(f"{dtype} {device} {versions}".encode())
    return digest.hexdigest()


def best_device() -> str:
    """CUDA if there is one, then Apple's mps, then the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: str) -> str:
    """The number format of ``dtype="auto"``; the measurements are in docs/lab-notes.md."""
    # On the CPU bfloat16 changes more than one decision in a hundred on the presets, and is slower without matrix tiles.
    return "float32" if device == "cpu" else "bfloat16"
