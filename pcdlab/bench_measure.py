"""The bench's instruments: a stopwatch, the allocator's record and the roofline.

Knows how one piece of work is timed and what a backend's passes consist of. Refuses to know what is compared with what.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pcdlab.backends.torch import TorchBackend

__all__ = ["Clock", "bfloat16_is_faster", "measure", "median", "peak_bytes"]

Outcome = TypeVar("Outcome")


class Clock:
    """Seconds by phase, in the order of the laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Note the time since the last lap as the phase's."""
        now = time.perf_counter()
        self.laps[phase] = now - self._last
        self._last = now


def measure(
    backend: Any,
    work: Callable[[], Outcome],
    seconds: Callable[[Outcome], dict[str, float]],
    runs: int,
    limit: float,
    meter: Callable[[], tuple[int, int]] | None = None,
    roofline: int = 0,
    peak: bool = True,
) -> tuple[Outcome, dict[str, Any]]:
    """Do a piece of work once to warm up, counting, and then some times more, timing.

    Parameters
    ----------
    backend : Backend
        What it runs on.
    work : callable
        The same work at every call.
    seconds : callable
        Seconds by phase of what `work` returned.
    runs : int
        Timed repetitions; fewer where one more would take the timing beyond `limit` seconds, but at least one.
    limit : float
        Seconds.
    meter : callable, optional
        Forward passes and tokens fed so far; by default the backend's.
    roofline : int
        How often to time each matrix product; 0 for no roofline.
    peak : bool
        Record memory. The record of hundreds of passes, as writing takes, needs gigabytes itself.

    Returns
    -------
    outcome
        What the first call returned.
    dict
        ``median_s``, ``runs``, ``seconds`` (of the median run, by phase), ``forward_passes``, ``tokens_fed``,
        ``peak_bytes`` (None off torch and without `peak`), ``roofline_s`` (None without), ``attention_share`` (likewise):
        attention's share of the arithmetic, which the roofline leaves out.
    """
    count = meter or (lambda: (backend.meter.forward_passes, backend.meter.tokens_fed))
    outcomes: list[Outcome] = []
    before = count()
    with _recorded_passes(backend) as passes:
        allocated = None
        if peak and backend.name == "torch":
            allocated = peak_bytes(lambda: outcomes.append(work()))
        else:
            outcomes.append(work())
    cost = [after - start for after, start in zip(count(), before, strict=True)]
    timed: list[tuple[float, dict[str, float]]] = []
    while len(timed) < runs and (not timed or sum(t for t, _ in timed) + timed[-1][0] <= limit):
        start = time.perf_counter()
        outcome = work()
        timed.append((time.perf_counter() - start, seconds(outcome)))
    return outcomes[0], {
        "median_s": statistics.median(t for t, _ in timed),
        "runs": len(timed),
        "seconds": sorted(timed, key=lambda one: one[0])[(len(timed) - 1) // 2][1],
        "forward_passes": cost[0],
        "tokens_fed": cost[1],
        "peak_bytes": allocated,
        "roofline_s": _roofline(backend, passes, roofline) if roofline else None,
        "attention_share": _attention_share(backend, passes) if roofline else None,
    }


def median(run: Callable[[], Any], runs: int) -> float:
    """Median wall-clock seconds of `runs` calls after one that does not count."""
    run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bfloat16_is_faster(device: str) -> bool:
    """Whether a device multiplies bfloat16 matrices faster than float32 ones, by a product of 512 rows."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        x, weight = (torch.ones(rows, 1024, dtype=dtype, device=device) for rows in (512, 2048))

        def multiply() -> None:
            for _ in range(4):
                product = torch.nn.functional.linear(x, weight)
            product[0, 0].item()  # waits for an accelerator

        return median(multiply, 5)

    return seconds(torch.bfloat16) < seconds(torch.float32)


# --- roofline ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PassShape:
    """Tokens that went through the layers, positions that went through the vocabulary projection, and attention's pairs."""

    tokens: int
    reads: int
    pairs: int  # of a token and one it attends to


@contextmanager
def _recorded_passes(backend: Any) -> Iterator[list[_PassShape]]:
    """Note the shape of every pass a backend makes over prompts and trees inside the ``with`` block."""
    passes: list[_PassShape] = []
    prefill, read = backend.prefill, backend.read

    def noted_prefill(tokens: Any, parent: Any = None) -> Any:
        n = len(tokens)
        passes.append(_PassShape(n, 0, n * _length(parent) + n * (n + 1) // 2))
        return prefill(tokens, parent)

    def noted_read(prefix: Any, tree: Any, keep: int = 0) -> Any:
        depths = tree.depths[len(getattr(prefix, "tokens", ())) :]  # trunks that were kept are not run again
        pairs = len(depths) * (_length(prefix) + 1) + int(depths.sum())
        passes.append(_PassShape(len(depths), len(tree.read_nodes), pairs))
        return read(prefix, tree, keep)

    backend.prefill, backend.read = noted_prefill, noted_read
    try:
        yield passes
    finally:
        del backend.prefill, backend.read  # the instance's; the class's show again


def _length(prefix: Any) -> int:
    return 0 if prefix is None else int(prefix.length)


def _roofline(backend: TorchBackend, passes: list[_PassShape], runs: int) -> float:
    """Seconds for the passes' matrix products alone: 2 × non-embedding weights × tokens, and the vocabulary projection.

    The rate is measured here, on products of the model's own layer shapes with as many rows as the pass has tokens.
    """
    import torch
    from torch.nn.functional import linear

    model = backend.module
    head = model.get_output_embeddings()
    shapes = Counter(
        tuple(module.weight.shape)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    weights = _weights(model)

    def rate(rows: int, sizes: Counter[Any]) -> float:
        """Floating-point operations per second over one product of each shape, weighted by how often it occurs."""
        seconds = operations = 0.0
        for (out, inside), count in sizes.items():
            x = torch.randn(rows, inside, dtype=backend.torch_dtype, device=backend.device)
            weight = torch.randn(out, inside, dtype=backend.torch_dtype, device=backend.device)
            with torch.inference_mode():
                seconds += count * median(lambda x=x, weight=weight: linear(x, weight), runs)  # type: ignore[misc]
            operations += count * 2.0 * rows * out * inside
        return operations / seconds

    total = 0.0
    for shape in passes:
        total += 2.0 * weights * shape.tokens / rate(shape.tokens, shapes)
        if shape.reads:
            vocabulary: Counter[Any] = Counter([tuple(head.weight.shape)])
            total += 2.0 * head.weight.numel() * shape.reads / rate(shape.reads, vocabulary)
    return total


def _weights(model: Any) -> int:
    """Parameters outside the embeddings."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(p) for module in ends for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings)


def _attention_share(backend: TorchBackend, passes: list[_PassShape]) -> float:
    """Attention's share of the passes' floating-point operations, as if no layer had a window.

    Scores and weighted sums are two products over the head's width for each query head and pair of tokens.
    """
    model = backend.module
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 4.0 * width * config.num_hidden_layers * sum(shape.pairs for shape in passes)
    products = 2.0 * _weights(model) * sum(shape.tokens for shape in passes)
    products += 2.0 * model.get_output_embeddings().weight.numel() * sum(shape.reads for shape in passes)
    return attention / (attention + products)


# --- memory ------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes of tensors allocated at once during `run`, beyond what was there before.

    Counted from the allocator's own records, so neither the interpreter nor memory kept for reuse is in it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its own start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
