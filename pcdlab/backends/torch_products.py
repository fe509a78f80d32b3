"""Attention over a token tree from matrix products, for CPUs that multiply bfloat16 in hardware.

There a plain product of two bfloat16 matrices is several times faster than the arithmetic inside torch's fused attention
kernel, which converts to float32 first. So the rows of a tree are cut into blocks, all keys that a block sees are put side by
side, and each block takes two products and one softmax: nothing is split by its log-sum-exp and nothing joined. Scores are
rounded to bfloat16, as in the eager attention of transformers. Sliding windows, capped scores and sinks are not known here:
:mod:`pcdlab.backends.torch_attention` keeps the layers that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcdlab.tokentree import Chain, Group, Layout

__all__ = ["FEWEST", "RowBlock", "attend_blocks", "cut", "fast_products"]

ROWS = 192  # most rows of a block
FEWEST = 32  # rows of a pass below which gathering the keys costs more than the products save
ALIGN = 8  # blocks are padded to a multiple: the hardware multiplies pairs, and odd widths fall to a slow kernel

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Neighbouring rows and the keys they see besides the prefix.

    Attributes
    ----------
    start, stop : int
        The rows.
    keys : int64 Tensor [m]
        Which keys, counted through those that were run before and then the rows of the pass.
    shared : int
        How many of the first keys are those of the block before.
    bias : bfloat16 Tensor [rows, w]
        0 or −∞, for the last w − p of the keys and p places of padding behind them; all rows see all other keys.
    padding : int
    """

    start: int
    stop: int
    keys: Tensor
    shared: int
    bias: Tensor
    padding: int


def fast_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether plain matrix products beat the fused kernel: bfloat16 on a CPU with instructions for it."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def cut(layout: Layout, above: Sequence[tuple[slice, Ints]], known: int, prefix: int) -> list[RowBlock]:
    """Cut a laid-out tree into blocks.

    Parameters
    ----------
    layout : Layout
    above : sequence of (slice, int64 array)
        The nodes run before that a run of rows hangs from, from the root down; other rows hang from none.
    known : int
        Number of nodes run before: their keys come before those of the rows.
    prefix : int
        Tokens of the prefix, which all rows see.

    Returns
    -------
    list of RowBlock
        In the order of the rows, of which each is in one block.
    """
    hangs = np.full(len(layout.order), -1)
    for i, (rows, _) in enumerate(above):
        hangs[rows] = i
    blocks: list[RowBlock] = []
    before = np.empty(0, dtype=np.int64)

    def emit(start: int, stop: int, open_keys: Ints, keys: Ints, mask: NDArray[np.bool_]) -> None:
        """One block that sees all of `open_keys`, and of `keys` what the mask [rows, keys] says."""
        nonlocal before
        seen = np.concatenate([open_keys, keys])
        padding = -(prefix + len(seen)) % ALIGN
        bias = torch.zeros(stop - start, len(keys) + padding, dtype=torch.bfloat16)
        bias[:, : len(keys)].masked_fill_(torch.from_numpy(~mask), float("-inf"))
        bias[:, len(keys) :] = float("-inf")
        same = seen[: len(before)] == before[: len(seen)]
        shared = len(same) if same.all() else int(same.argmin())
        blocks.append(RowBlock(start, stop, torch.from_numpy(seen), shared, bias, padding))
        before = seen

    def path(row: int) -> Ints:
        return above[hangs[row]][1] if hangs[row] >= 0 else before[:0]

    def paths_of(start: int, stop: int) -> int:
        """Nodes of the paths that rows hang from."""
        return sum(len(above[run][1]) for run in {*hangs[start:stop].tolist()} if run >= 0)

    def emit_groups(start: int, stop: int, open_rows: Ints, mask: NDArray[np.bool_]) -> None:
        """Groups side by side; where they hang from several nodes, each row sees its own path only."""
        own = np.arange(start, stop) + known
        runs = sorted(set(hangs[start:stop].tolist()))
        if len(runs) == 1:
            emit(start, stop, np.concatenate([path(start), open_rows]), own, mask)
            return
        paths = np.unique(np.concatenate([above[run][1] for run in runs if run >= 0]))
        sees = np.array([np.isin(paths, path(row)) for row in range(start, stop)])
        emit(start, stop, before[:0], np.concatenate([paths, own]), np.concatenate([sees, mask], 1))

    pieces: list[Chain | Group] = sorted([*layout.chains, *layout.groups], key=lambda piece: piece.start)
    around: list[Chain] = []  # chains that the next piece descends from
    waiting: list[tuple[int, int, NDArray[np.bool_]]] = []  # groups that may share a block
    waiting_below = before

    def flush() -> None:
        if waiting:
            start, stop = waiting[0][0], waiting[-1][1]
            mask = np.zeros((stop - start, stop - start), dtype=bool)
            for a, b, inside in waiting:
                mask[a - start : b - start, a - start : b - start] = inside
            emit_groups(start, stop, waiting_below, mask)
            waiting.clear()

    for piece in pieces:
        around = [chain for chain in around if chain.reach > piece.start]
        below = np.concatenate([before[:0], *(np.arange(c.start, c.stop) + known for c in around)])
        if isinstance(piece, Chain):
            flush()
            for a in range(piece.start, piece.stop, ROWS):
                b = min(a + ROWS, piece.stop)
                earlier = np.arange(piece.start, a) + known
                own = np.arange(a, b) + known
                emit(a, b, np.concatenate([path(a), below, earlier]), own, np.tri(b - a, dtype=bool))
            around.append(piece)
            continue
        if waiting:
            start = waiting[0][0]
            # Every row of a block is scored against all paths that its rows hang from.
            wide = paths_of(start, piece.stop) > max(ROWS, paths_of(start, waiting[-1][1]))
            if wide or piece.stop - start > ROWS or not np.array_equal(below, waiting_below):
                flush()
        waiting.append((piece.start, piece.stop, piece.mask))
        waiting_below = below
    flush()
    return blocks


def attend_blocks(
    blocks: Sequence[RowBlock], q: Tensor, k: Tensor, v: Tensor, prefix: Sequence[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    """Softmax attention of grouped query heads, block by block.

    Parameters
    ----------
    blocks : sequence of RowBlock
    q : Tensor [g, r, n, d]
        r query heads for each key-value head.
    k, v : Tensor [g, known + n, d]
        Keys and values of what was run before, then of the rows.
    prefix : sequence of (Tensor [g, m, d], Tensor [g, m, d])
        Keys and values that all rows see.
    scale : float
        Factor on the scores.

    Returns
    -------
    Tensor [g, r, n, d]
        Memory as [n, g, r, d].
    """
    g, r, n, d = q.shape
    fixed = sum(part.shape[1] for part, _ in prefix)
    room = fixed + max(len(block.keys) for block in blocks) + ALIGN
    # Zeros, not what memory holds: padding has no weight, but no weight times NaN is NaN.
    keys, values = k.new_zeros(g, room, d), v.new_zeros(g, room, v.shape[-1])
    if prefix:
        torch.cat([part for part, _ in prefix], 1, out=keys[:, :fixed])
        torch.cat([part for _, part in prefix], 1, out=values[:, :fixed])
    out = v.new_empty(n, g, r, v.shape[-1])
    # The heads of a group lie side by side, row by row: a block's are then one matrix.
    queries = torch.mul(q.permute(0, 2, 1, 3), scale, out=q.new_empty(g, n, r, d)).flatten(1, 2)  # [g, n * r, d]
    for block in blocks:
        count = block.stop - block.start
        end = fixed + len(block.keys)
        fresh = block.keys[block.shared :]
        keys[:, fixed + block.shared : end], values[:, fixed + block.shared : end] = k[:, fresh], v[:, fresh]
        end += block.padding
        for i in range(g):  # a batched product would copy its operands, and its scores would leave the cores' caches
            scores = torch.mm(queries[i, r * block.start : r * block.stop], keys[i, :end].t())  # [count * r, end]
            scores.view(count, r, end)[..., end - block.bias.shape[1] :].add_(block.bias[:, None])
            found = torch.mm(torch.softmax(scores, -1), values[i, :end])
            out[block.start : block.stop, i] = found.view(count, r, -1)
    return out.permute(1, 2, 0, 3)
