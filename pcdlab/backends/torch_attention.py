"""Attention over a token tree in one packed row, as a transformers attention function.

The model's own code computes queries, keys and values (projections, norms, rotary positions); this module only decides
who attends to whom. Following :func:`pcdlab.tokentree.lay_out` it splits the work into parts that need no mask (every
row against the cached prefix, every row against the chains above it), causal parts (inside chains) and small masked
blocks (inside groups), and joins the parts by their log-sum-exp, so that no score is computed twice and no mask of the
size rows × keys exists. Where a CPU multiplies bfloat16 fast, plain layers in bfloat16 go another way
(:mod:`pcdlab.backends.torch_products`). It knows nothing of models, caches of transformers, or reads.

Parts of a softmax computed apart join exactly: with (o₁, s₁) and (o₂, s₂) the outputs and log-sum-exps over two disjoint
key sets, the softmax over their union has s = log(e^s₁ + e^s₂) and o = o₁ e^(s₁ − s) + o₂ e^(s₂ − s) (Dao et al. 2022,
FlashAttention, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from pcdlab.backends.torch_products import FEWEST, RowBlock, attend_blocks, cut, fast_products
from pcdlab.tokentree import Layout

__all__ = ["IMPLEMENTATION", "NothingLeftError", "Pass", "Segment", "running"]

IMPLEMENTATION = "pcdlab_tree"  # the name transformers knows this attention function by

SCORE_BYTES = 32 << 20  # most bytes of scores held at once where the fused kernel cannot be used

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to scores so that only those of allowed pairs count.

    Attributes
    ----------
    scores : float32 Tensor [n, m] or [b, 1, n, m]
        0 or −∞.
    blind : bool Tensor [n] or [b, 1, n], or None
        The rows that see no key, if there are any.
    """

    scores: Tensor
    blind: Tensor | None


@dataclass(frozen=True, eq=False)
class Block:
    """Small attentions side by side, padded to one size.

    Attributes
    ----------
    rows, keys : int64 Tensor [pieces, w] and [pieces, m]
        Padding repeats the first.
    mask : bool Tensor [pieces, w, m]
        Which key a row may see.
    places, real_rows : int64 Tensor
        Where the rows that are no padding stand among pieces × w, and which rows they are.
    """

    rows: Tensor
    keys: Tensor
    mask: Tensor
    places: Tensor
    real_rows: Tensor


Mask = Bias | Literal["causal"] | None


class NothingLeftError(Exception):
    """Raised out of a pass of which only keys and values were wanted, once the last layer's are stored."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values of consecutive prefix tokens, one pair per layer.

    Attributes
    ----------
    start : int
        Position of the first token.
    length : int
        Number of tokens m.
    layers : dict of int to (Tensor, Tensor)
        Layer index → keys and values, each of shape [key-value heads, m, head dimension].
    """

    start: int
    length: int
    layers: dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Pass:
    """One forward pass over a laid-out tree: what the attention function needs to know.

    Attributes
    ----------
    layout : Layout
        Chains and groups of the tree, rows in depth-first order.
    segments : tuple of Segment
        The prefix, in order of position.
    positions : Tensor
        Position of each row, int64, shape [n].
    keep : int
        The first `keep` rows' keys and values are stored in `kept`.
    keep_rows : Tensor or None
        Where they are not the first: the rows, int64, shape [keep].
    trunks : Segment or None
        Keys and values of nodes that were run before, each above some of the rows.
    above : tuple of (slice, int64 array)
        Which: the nodes of `trunks` that a run of rows hangs from, from the root down.
    last_layer : int or None
        Where nobody reads the hidden states: the layer whose keys and values are the last thing wanted.
    kept : dict
        Filled during the pass: layer index → (keys, values), each [key-value heads, keep, head dimension].
    windows : dict
        Filled during the pass: layer index → sliding window the model asked for, or None.
    """

    layout: Layout
    segments: tuple[Segment, ...]
    positions: Tensor
    keep: int = 0
    keep_rows: Tensor | None = None
    trunks: Segment | None = None
    above: tuple[tuple[slice, Ints], ...] = ()
    last_layer: int | None = None
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    _masks: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = int(self.positions.max())
        self.chain_starts = self.positions[[chain.start for chain in self.layout.chains]].tolist()

    @cached_property
    def groups(self) -> Block | None:
        """The layout's groups side by side."""
        inside = [(np.arange(g.start, g.stop), np.arange(g.start, g.stop), g.mask) for g in self.layout.groups]
        return _block(inside, self.positions.device) if inside else None

    @cached_property
    def higher(self) -> list[Block]:
        """Rows and the paths in `trunks` they hang from, those of about one length together: little padding."""
        found: list[Block] = []
        waiting = sorted(self.above, key=lambda one: len(one[1]))
        while waiting:
            longest = 2 * len(waiting[0][1]) + 16
            fit = [one for one in waiting if len(one[1]) <= longest]
            waiting = waiting[len(fit) :]
            pieces = [
                (np.arange(r.start, r.stop), path, np.ones((r.stop - r.start, len(path)), bool)) for r, path in fit
            ]
            found.append(_block(pieces, self.positions.device))
        return found

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """The tree in the blocks of :mod:`pcdlab.backends.torch_products`."""
        known = 0 if self.trunks is None else self.trunks.length
        prefix = sum(segment.length for segment in self.segments)
        return cut(self.layout, self.above, known, prefix)

    def span_mask(self, rows: slice, start: int, length: int, window: int | None) -> tuple[int, Bias | None]:
        """Which of `length` keys at positions ``start…`` the rows may see under a sliding window.

        Returns the number of leading keys no row can see any more, and which of the others each row may see, None where all
        rows may see all of them.
        """
        if window is None or self.last - start < window:
            return 0, None
        key = (rows.start, rows.stop, start, length, window)
        if key not in self._masks:
            positions = self.positions[rows]
            skip = min(length, max(0, int(positions.min()) - window + 1 - start))
            keys = torch.arange(start + skip, start + length, device=positions.device)
            mask = positions[:, None] - keys < window
            self._masks[key] = (skip, None if bool(mask.all()) else _bias(mask))
        return self._masks[key]

    def chain_mask(self, start: int, stop: int, window: int | None) -> Mask:
        """Causal, or causal within the window where the chain is longer than it."""
        if window is None or stop - start <= window:
            return "causal"
        key = (start, stop, window)
        if key not in self._masks:
            distance = self.positions[start:stop, None] - self.positions[None, start:stop]
            self._masks[key] = _bias((distance >= 0) & (distance < window))
        return self._masks[key]

    def block_bias(self, block: Block, key_positions: Tensor, window: int | None, heads: int) -> Bias:
        """Which of its keys, at [pieces, m] or [1, m], each row of a block may see, for `heads` key-value heads."""
        key = (id(block), window, heads)
        if key not in self._masks:
            mask = block.mask
            if window is not None:
                mask = mask & (self.positions[block.rows][:, :, None] - key_positions[:, None, :] < window)
            self._masks[key] = _bias(mask.repeat_interleave(heads, 0)[:, None])
        return self._masks[key]


def _block(pieces: Sequence[tuple[Ints, Ints, NDArray[np.bool_]]], device: torch.device) -> Block:
    """Pad pieces of (rows, keys, mask [rows, keys]) to one size."""
    w, m = (max(len(piece[i]) for piece in pieces) for i in (0, 1))
    rows, keys = np.zeros((len(pieces), w), dtype=np.int64), np.zeros((len(pieces), m), dtype=np.int64)
    mask, real = np.zeros((len(pieces), w, m), dtype=bool), np.zeros((len(pieces), w), dtype=bool)
    for i, (own, seen, allowed) in enumerate(pieces):
        rows[i], keys[i] = own[0], seen[0]
        rows[i, : len(own)], keys[i, : len(seen)] = own, seen
        mask[i, : len(own), : len(seen)] = allowed
        mask[i, len(own) :, 0] = True  # no empty softmax
        real[i, : len(own)] = True
    places = np.flatnonzero(real)
    parts = (rows, keys, mask, places, rows.ravel()[places])
    return Block(*(torch.from_numpy(part).to(device) for part in parts))


def _bias(mask: Tensor) -> Bias:
    blind = ~mask.any(-1)
    scores = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
    return Bias(scores, blind if bool(blind.any()) else None)


_running: ContextVar[Pass | None] = ContextVar("pcdlab_pass", default=None)


@contextmanager
def running(tree_pass: Pass) -> Iterator[Pass]:
    """Make `tree_pass` the pass that the attention function serves inside the ``with`` block."""
    token = _running.set(tree_pass)
    try:
        yield tree_pass
    finally:
        _running.reset(token)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Softmax attention of grouped query heads and its log-sum-exp.

    Parameters
    ----------
    q : Tensor [b, r, n, d]
        r query heads for each key-value head.
    k, v : Tensor [b, m, d]
    scale : float
        Factor on the scores.
    mask : None, "causal" or Bias
        None: every row sees every key. Rows that see no key get output 0 and log-sum-exp −∞.
    softcap : float or None
        Scores s become ``softcap * tanh(s / softcap)`` (Gemma 2).

    Returns
    -------
    output : Tensor [b, r, n, d], dtype of `v`
    log_sum_exp : float32 Tensor [b, r, n]
    """
    b, r, n, d = q.shape
    if mask is None and r > 1:
        # Without a mask the heads of a group are nothing but more rows: keys are neither copied nor read r times.
        out, lse = attend(q.reshape(b, 1, r * n, d), k, v, scale, None, softcap)
        return out[:, 0].unflatten(1, (r, n)), lse[:, 0].unflatten(1, (r, n))
    k, v = (t.unsqueeze(1).expand(b, r, *t.shape[1:]) for t in (k, v))
    if q.device.type == "cpu" and softcap is None and v.shape[-1] == d:
        bias = None
        if isinstance(mask, Bias):
            bias = (mask.scores if mask.scores.ndim == 4 else mask.scores[None, None]).to(q.dtype)
        # The kernel behind scaled_dot_product_attention; called directly because only it returns the log-sum-exp.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask == "causal" if isinstance(mask, str) else False, attn_mask=bias, scale=scale
        )
        if isinstance(mask, Bias) and mask.blind is not None:
            lse = lse.masked_fill(mask.blind, float("-inf"))  # the kernel says 0 for a row without keys
        return out, lse
    return _attend_in_pieces(q, k, v, scale, mask, softcap)


def _attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """:func:`attend` from products and a softmax, as many rows at once as :data:`SCORE_BYTES` allow; k, v [b, r, m, d]."""
    n, m = q.shape[2], k.shape[2]
    step = max(1, SCORE_BYTES // (4 * q.shape[0] * q.shape[1] * m))
    rows = torch.arange(n, device=q.device)
    outs, lses = [], []
    for i in range(0, n, step):
        some = slice(i, i + step)
        last = min(i + step, m) if isinstance(mask, str) else m  # causal: keys up to the last row
        scores = (torch.matmul(q[:, :, some], k[:, :, :last].transpose(-1, -2)) * scale).float()  # [b, r, step, last]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if isinstance(mask, str):
            scores = scores.masked_fill(rows[some, None] < rows[:last], float("-inf"))
        elif mask is not None:
            scores = scores + mask.scores[..., some, :]
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        outs.append(torch.matmul(weights.to(v.dtype), v[:, :, :last]))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def join_(parts: list[tuple[Tensor, Tensor]], sink: Tensor | None = None) -> Tensor:
    """Output over the union of disjoint key sets, in place of the first part's.

    Parameters
    ----------
    parts : list of (Tensor [g, r, n, d], Tensor [g, r, n])
        Outputs and log-sum-exps; the first is of every row's own tokens, so that no row is without keys.
    sink : Tensor [g, r, 1] or None
        A score that takes part in the softmax without a value.
    """
    out = parts[0][0]
    scores = [lse for _, lse in parts]
    if sink is not None:
        scores.append(sink.float().expand_as(scores[0]))
    if len(scores) == 1:
        return out
    weights = torch.softmax(torch.stack(scores), 0).to(out.dtype)[..., None]  # [parts, g, r, n, 1]
    out.mul_(weights[0])
    for (more, _), weight in zip(parts[1:], weights[1:], strict=False):
        out.addcmul_(more, weight)
    return out


def _by_products(now: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The whole of a layer's attention, [g, r, n, d], where matrix products are the fastest way to it."""
    if now.trunks is not None:
        before = now.trunks.layers[layer]
        k, v = torch.cat([before[0], k], 1), torch.cat([before[1], v], 1)
    return attend_blocks(now.blocks, q, k, v, [segment.layers[layer] for segment in now.segments], scale)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in every layer, under :data:`IMPLEMENTATION`.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its ``layer_idx`` says which prefix keys and values are its own.
    query : Tensor [1, h, n, d]
    key, value : Tensor [1, g, n, d]
        g key-value heads; each serves h / g query heads.
    scaling, softcap : float or None
    sliding_window : int or None
        A row at position p sees keys at positions above p − sliding_window.
    s_aux : Tensor [h] or None
        A learned score per head that takes part in the softmax without a value (attention sinks, gpt-oss).

    Returns
    -------
    output : Tensor [1, n, h, d]
    weights : None
    """
    now = _running.get()
    if now is None:
        raise RuntimeError("tree attention was called outside a tree pass")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    n = query.shape[2]
    g = key.shape[1]
    rep = query.shape[1] // g
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window
    now.windows[layer] = window
    if now.keep:
        kept = slice(0, now.keep) if now.keep_rows is None else now.keep_rows
        # A copy in any case: a view would hold the whole pass as long as the prefix lives.
        now.kept[layer] = tuple(t[0, :, kept].clone(memory_format=torch.contiguous_format) for t in (key, value))  # type: ignore[assignment]
    if layer == now.last_layer:
        raise NothingLeftError

    q = query[0].unflatten(0, (g, rep))  # [g, rep, n, d]: query heads of one key-value head side by side
    k, v = key[0], value[0]  # [g, n, d]
    plain = softcap is None and s_aux is None and (window is None or now.last < window)
    if plain and n >= FEWEST and fast_products(query.device, query.dtype):
        out = _by_products(now, layer, q, k, v, scale)
        return out.permute(2, 0, 1, 3).reshape(1, n, g * rep, -1), None

    # Each row inside its own chain or group.
    out = query.new_empty(n, g, rep, v.shape[-1]).permute(1, 2, 0, 3)  # [g, rep, n, d], memory as [n, h, d]
    lse = torch.empty(g, rep, n, dtype=torch.float32, device=query.device)
    for chain in now.layout.chains:
        own = slice(chain.start, chain.stop)
        mask = now.chain_mask(chain.start, chain.stop, window)
        out[:, :, own], lse[:, :, own] = attend(q[:, :, own], k[:, own], v[:, own], scale, mask, softcap)

    def within(block: Block, k: Tensor, v: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a block's rows see of its keys among [g, m, d]; [g, rep, rows, d] and [g, rep, rows]."""
        qb = q[:, :, block.rows].permute(2, 0, 1, 3, 4).flatten(0, 1)  # [b * g, rep, w, d]
        kb, vb = (t[:, block.keys].transpose(0, 1).flatten(0, 1) for t in (k, v))  # [b * g, m, d]
        ob, lb = attend(qb, kb, vb, scale, now.block_bias(block, key_positions, window, g), softcap)
        # [b * g, rep, w, …] → [g, rep, b * w, …], of which the padding is left behind
        ob = ob.unflatten(0, (-1, g)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, block.places]
        return ob, lb.unflatten(0, (-1, g)).permute(1, 2, 0, 3).flatten(2, 3)[:, :, block.places]

    def look(rows: slice, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor] | None:
        """What `rows` see of keys [g, m, d] at positions ``start…``: all of them but for the window."""
        skip, mask = now.span_mask(rows, start, k.shape[1], window)
        if skip == k.shape[1]:
            return None
        return attend(q[:, :, rows], k[:, skip:], v[:, skip:], scale, mask, softcap)

    def add(rows: slice | Tensor, more: tuple[Tensor, Tensor]) -> None:
        """Let `rows` see more keys than they have seen so far."""
        mine = (out[:, :, rows], lse[:, :, rows])  # views of a slice, copies of picked rows
        out[:, :, rows] = join_([mine, more])
        lse[:, :, rows] = torch.logaddexp(mine[1], more[1])

    if now.groups is not None:
        rows = now.groups.real_rows
        out[:, :, rows], lse[:, :, rows] = within(now.groups, k, v, now.positions[now.groups.keys])
    for chain, start in zip(now.layout.chains, now.chain_starts, strict=True):
        if chain.reach > chain.stop:
            own, below = slice(chain.start, chain.stop), slice(chain.stop, chain.reach)
            if more := look(below, k[:, own], v[:, own], start):
                add(below, more)
    for block in now.higher:
        assert now.trunks is not None
        rows, depth = block.real_rows, torch.arange(block.keys.shape[1], device=query.device)
        add(rows, within(block, *now.trunks.layers[layer], now.trunks.start + depth[None]))
    looks = [look(slice(0, n), *segment.layers[layer], segment.start) for segment in now.segments]
    sink = None if s_aux is None else s_aux.view(g, rep, 1)
    out = join_([(out, lse), *(more for more in looks if more)], sink)
    return out.permute(2, 0, 1, 3).reshape(1, n, g * rep, -1), None


AttentionInterface.register(IMPLEMENTATION, tree_attention)
