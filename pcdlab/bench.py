"""Speed of the engine on this machine, next to what it is compared with, in one run.

Times whole extractions and the scoring pass alone, packed against padded rows on a copied cache, on the same weights, and
puts each beside the roofline: the seconds the pass's matrix products alone would take at the rate torch reaches on the
model's own layer shapes in the same run. Figures are medians after a warm-up; peak memory comes from a separate run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcdlab import decide
from pcdlab.engine import Engine
from pcdlab.models import find, locate
from pcdlab.presets import Preset, load_preset
from pcdlab.reports import machine
from pcdlab.tokenizer import HFCodec

if TYPE_CHECKING:
    from rich.console import Console

    from pcdlab.backends.torch import TorchBackend

__all__ = ["print_bench", "run_bench"]

Report = Callable[[str], None]


def run_bench(preset: str, model: str, runs: int, report: Report) -> dict[str, Any]:
    """Measure one preset on one model under the torch backend.

    Parameters
    ----------
    preset : str
        Name or path of the preset whose document and schema are used.
    model : str
        Alias, folder or Hugging Face id.
    runs : int
        Timed repetitions of each figure; the median counts.
    report : callable
        Told in a few words what is being measured.

    Returns
    -------
    dict
        ``machine`` and ``rows``. A row's seconds are medians; ``roofline_ratio`` divides them by the roofline's seconds;
        ``peak_bytes`` is what the extraction allocates beyond what was there before it; ``scoring_s`` and
        ``scoring_peak_bytes`` belong to the pass that reads the fields below an already cached prompt of
        ``prompt_kv_bytes``; ``agreement`` is the share of fields with the same value as the first row's.
    """
    from pcdlab.backends.torch import TorchBackend, best_device, best_dtype

    scenario = load_preset(preset)
    folder, spec = locate(model), find(model)
    codec = HFCodec.load(folder, spec.template_options if spec else {})
    rows: list[dict[str, Any]] = []
    for dtype in dict.fromkeys(["float32", best_dtype(best_device())]):
        report(f"loading {model} in {dtype}")
        packed = TorchBackend.load(folder, dtype=dtype)
        padded = TorchBackend(packed.module, packed.model, layout="rows")
        for name, backend, warm in (("tree-cold", packed, False), ("tree-warm", packed, True), ("rows", padded, False)):
            report(f"{name}, {dtype}")
            rows.append(_measure(name, Engine(backend, codec), scenario, runs, warm))
    first = rows[0].pop("values")
    rows[0]["agreement"] = 1.0
    for row in rows[1:]:
        values = row.pop("values")
        row["agreement"] = sum(values[key] == first[key] for key in first) / len(first)
    return {"machine": {**machine(), **_versions()}, "model": model, "rows": rows}


def _measure(name: str, engine: Engine, scenario: Preset, runs: int, warm: bool) -> dict[str, Any]:
    backend: Any = engine.backend
    passes: list[_PassShape] = []

    def extract() -> Any:
        if not warm:
            engine.heads.clear()
        return engine.extract(scenario.context, scenario.schema)

    engine.compile(scenario.schema)
    with _recorded(backend, passes):
        extract()
        passes.clear()
        result = extract()
    seconds = _median(extract, runs)
    phases = extract().stats.seconds
    compiled = engine.compile(scenario.schema)
    prompt = backend.prefill(compiled.prompt.ids(scenario.context))
    wishes = [
        decide.Wish(item, decide.resolve("auto", len(item.field.labels))) for item in compiled if not item.field.fixed
    ]
    tree = decide.plan(wishes).tree
    roofline = _roofline(backend, passes) if backend.layout == "packed" else None
    allowed = all(result.values[field.name] in field.labels for field in scenario.schema)
    return {
        "preset": scenario.id,
        "fields": len(scenario.schema),
        "engine": name,
        "dtype": backend.dtype,
        "median_s": seconds,
        "runs": runs,
        "seconds": phases,
        "forward_passes": result.stats.forward_passes,
        "tokens_fed": result.stats.tokens_fed,
        "peak_bytes": _peak_bytes(extract),
        "roofline_s": roofline,
        "roofline_ratio": seconds / roofline if roofline else None,
        "scoring_s": _median(lambda: backend.read(prompt, tree), runs),
        "scoring_peak_bytes": _peak_bytes(lambda: backend.read(prompt, tree)),
        "scoring_tokens": len(tree),
        "prompt_tokens": prompt.length,
        "prompt_kv_bytes": prompt.nbytes,
        "schema_valid": 1.0 if allowed else 0.0,
        "values": result.values,
    }


def _median(run: Callable[[], Any], runs: int) -> float:
    """Median wall-clock seconds of `runs` calls after one that does not count."""
    run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# --- roofline ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PassShape:
    """Tokens that went through the layers, and positions that went through the vocabulary projection."""

    tokens: int
    reads: int


class _recorded:
    """Note the shape of every pass a backend makes inside the ``with`` block."""

    def __init__(self, backend: Any, passes: list[_PassShape]) -> None:
        self.backend, self.passes = backend, passes

    def __enter__(self) -> None:
        prefill, read = self.backend.prefill, self.backend.read

        def noted_prefill(tokens: Any, parent: Any = None) -> Any:
            self.passes.append(_PassShape(len(tokens), 0))
            return prefill(tokens, parent)

        def noted_read(prefix: Any, tree: Any, keep: int = 0) -> Any:
            self.passes.append(_PassShape(len(tree), len(tree.read_nodes)))
            return read(prefix, tree, keep)

        self.backend.prefill, self.backend.read = noted_prefill, noted_read

    def __exit__(self, *_: object) -> None:
        del self.backend.prefill, self.backend.read  # the instance's; the class's show again


def _roofline(backend: TorchBackend, passes: list[_PassShape], runs: int = 7) -> float:
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
    embeddings = {id(p) for m in (model.get_input_embeddings(), head) for p in m.parameters()}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)

    def rate(rows: int, sizes: Counter[Any]) -> float:
        """Floating-point operations per second over one product of each shape, weighted by how often it occurs."""
        seconds = operations = 0.0
        for (out, inside), count in sizes.items():
            x = torch.randn(rows, inside, dtype=backend.torch_dtype, device=backend.device)
            weight = torch.randn(out, inside, dtype=backend.torch_dtype, device=backend.device)
            with torch.inference_mode():
                seconds += count * _median(lambda x=x, weight=weight: linear(x, weight), runs)  # type: ignore[misc]
            operations += count * 2.0 * rows * out * inside
        return operations / seconds

    total = 0.0
    for shape in passes:
        total += 2.0 * weights * shape.tokens / rate(shape.tokens, shapes)
        if shape.reads:
            vocabulary: Counter[Any] = Counter([tuple(head.weight.shape)])
            total += 2.0 * head.weight.numel() * shape.reads / rate(shape.reads, vocabulary)
    return total


# --- memory ------------------------------------------------------------------------------------------------------


def _peak_bytes(run: Callable[[], Any]) -> int:
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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()),
    }


# --- for people --------------------------------------------------------------------------------------------------


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print a bench as tables."""
    from rich.table import Table

    about = result["machine"]
    console.print(f"{result['model']} on {about['cpu']}, {about['threads']} threads, torch {about['torch']}")
    whole = Table(title="Whole extraction", title_justify="left")
    for column in (
        "preset",
        "engine",
        "dtype",
        "median s",
        "passes",
        "tokens fed",
        "peak MiB",
        "× roofline",
        "agreement",
    ):
        whole.add_column(column, justify="left" if column in ("preset", "engine", "dtype") else "right")
    scoring = Table(title="Scoring pass alone, below a cached prompt", title_justify="left")
    for column in (
        "engine",
        "dtype",
        "prompt tokens",
        "tree tokens",
        "median s",
        "rows ÷ this",
        "peak MiB",
        "peak ÷ prompt KV",
    ):
        scoring.add_column(column, justify="left" if column in ("engine", "dtype") else "right")
    padded = {row["dtype"]: row["scoring_s"] for row in result["rows"] if row["engine"] == "rows"}
    for row in result["rows"]:
        ratio = f"{row['roofline_ratio']:.2f}" if row["roofline_ratio"] else "–"
        numbers = (
            f"{row['median_s']:.3f}",
            str(row["forward_passes"]),
            str(row["tokens_fed"]),
            _mib(row["peak_bytes"]),
        )
        whole.add_row(row["preset"], row["engine"], row["dtype"], *numbers, ratio, f"{row['agreement']:.0%}")
        if row["engine"] != "tree-cold":
            scoring.add_row(
                "tree" if row["engine"] == "tree-warm" else row["engine"],
                row["dtype"],
                str(row["prompt_tokens"]),
                str(row["scoring_tokens"]),
                f"{row['scoring_s']:.3f}",
                f"{padded[row['dtype']] / row['scoring_s']:.1f}",
                _mib(row["scoring_peak_bytes"]),
                f"{row['scoring_peak_bytes'] / row['prompt_kv_bytes']:.2f}",
            )
    console.print(whole)
    console.print(scoring)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"
