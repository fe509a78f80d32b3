"""Speed of the engine on this machine, next to what people would run instead, in one run on the same weights.

Times whole extractions and the scoring pass alone, and what they are compared with: the same tree in padded rows on a copied
cache, token-by-token JSON (prompt only, and under a grammar), the first-token specimen, and llama.cpp's own grammar sampler.
Each is put beside the roofline where there is one: the seconds the passes' matrix products alone would take at the rate torch
reaches on the model's own layer shapes in the same run. Figures are medians after a warm-up; peak memory is the warm-up's.

What a row agrees with is the object that greedy writing gives in the tokenizer's own tokens
(:mod:`pcdlab.baselines.grammar` says why the tokens matter).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pcdlab import decide, models
from pcdlab.baselines.first_token import first_token
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import Rule, anything, generate, judge, schema_lines
from pcdlab.baselines.same_answers import decide_after
from pcdlab.engine import Engine
from pcdlab.errors import ParameterError, TokenizationError
from pcdlab.presets import Preset, load_preset
from pcdlab.reports import machine
from pcdlab.schema import Field, Label

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pcdlab.backends.torch import TorchBackend
    from pcdlab.baselines.gbnf import GBNFGenerator

__all__ = ["BASELINES", "compare", "print_bench", "print_comparison", "read_bench", "run_bench"]

Report = Callable[[str], None]
Baseline = Literal[
    "rows", "grammar", "grammar-ff", "grammar-text", "prompt-only", "first-token", "llamacpp-gbnf", "llamacpp-gbnf-warm"
]
BASELINES: tuple[str, ...] = get_args(Baseline)
SLOW = 10.0  # seconds spent on timing one row: what takes long is run less often than asked, and its row says how often
SLACK = 1.25  # prompt only: how much longer than the longest valid object the text may become


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """What one run of a contender gave.

    `seconds` is by phase; `problems` what :func:`pcdlab.baselines.json_stream.judge` found wrong, None where nothing can be.
    """

    values: Mapping[str, Label]
    seconds: dict[str, float]
    problems: dict[str, Any] | None = None
    written: bool = False  # token by token, each field behind the answers before it


@dataclass
class _Contender:
    """One row: how to run it once, on what, and from when its passes are those of a tree."""

    name: str
    backend: Any
    run: Callable[[], _Outcome]
    meter: Callable[[], tuple[int, int]]  # forward passes and tokens so far
    roofline: bool = False
    scoring: bool = False
    dtype: str = ""


def run_bench(
    presets: Sequence[str],
    model: str,
    backend: str = "torch",
    runs: int = 3,
    baselines: Sequence[str] = BASELINES,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Measure presets on one model.

    Parameters
    ----------
    presets : sequence of str
        Names or paths of presets; their document and schema are used.
    model : str
        Alias, folder or Hugging Face id; a GGUF file under ``llamacpp``.
    backend : {"torch", "mlx", "llamacpp"}
    runs : int
        Timed repetitions of each figure; the median counts. What is slow is repeated less often.
    baselines : sequence of str
        Which of :data:`BASELINES` to run beside the engine; those that the backend or the tokenizer does not have are left out.
    report : callable
        Told in a few words what is being measured.

    Returns
    -------
    dict
        ``machine``, ``model``, ``backend``, ``left_out`` (baseline → why) and ``rows``. A row's ``median_s`` are seconds,
        ``seconds`` those of the median run by phase, ``runs`` how many there were; ``roofline_ratio`` divides by the roofline's
        seconds (None off the packed torch backend and where tokens are written one by one); ``peak_bytes`` is what torch
        allocates beyond what was there before (None elsewhere); ``schema_valid`` is 1.0 for an object of the schema, else 0.0
        with ``problems`` saying why; ``agreement`` is the share of fields with the value that greedy writing in the tokenizer's
        own tokens gives, ``agreement_same_answers`` that of the engine's walk with this row, given the row's own answers before
        each field; ``scoring_s``, ``scoring_peak_bytes`` belong to the pass that reads the fields below an already cached prompt
        of ``prompt_kv_bytes``.

    Raises
    ------
    ParameterError
        If there is no such baseline.
    """
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise ParameterError(f"--baselines {','.join(unknown)}: choose among {', '.join(BASELINES)}, or all or none")
    scenarios = [load_preset(preset) for preset in presets]
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    about: dict[str, Any] = {}
    for dtype in _dtypes(backend):
        report(f"loading {model} in {dtype}")
        engine = Engine(*models.load(model, backend, dtype))  # no heads from disk: cold is cold
        about = {**machine(), **_versions(engine.backend)}
        for scenario in scenarios:
            bench = _Bench(engine, scenario, set(baselines), left_out)
            for contender in bench.contenders():
                report(f"{scenario.id}: {contender.name}, {contender.dtype or engine.backend.dtype}")
                rows.append(bench.row(contender, runs))
    return {"machine": about, "model": model, "backend": backend, "left_out": left_out, "rows": rows}


def _dtypes(backend: str) -> list[str]:
    if backend != "torch":
        return ["auto"]
    from pcdlab.backends.torch import best_device, best_dtype

    return list(dict.fromkeys(["float32", best_dtype(best_device())]))


class _Bench:
    """One preset on one engine."""

    def __init__(self, engine: Engine, scenario: Preset, baselines: set[str], left_out: dict[str, str]) -> None:
        self.engine, self.scenario, self.baselines, self.left_out = engine, scenario, baselines, left_out
        self.backend: Any = engine.backend
        self.compiled = engine.compile(scenario.schema)
        self.ids = self.compiled.prompt.ids(scenario.context)
        head = self.compiled.prompt.head
        self.cut = len(head) if tuple(self.ids[: len(head)]) == head else 1
        own = generate(self.backend, None, self.ids, schema_lines(self.compiled), together=True)
        self.reference = self._judged([step.token for step in own]).values

    def contenders(self) -> Iterator[_Contender]:
        """The rows in order; made one by one, as some hold memory."""
        yield self._engine("tree-cold", self.engine, warm=False)
        yield self._engine("tree-warm", self.engine, warm=True)
        yield self._engine("joint", self.engine, warm=False, mode="joint", scorer="walk")
        rows = self._in_rows()
        if "rows" in self.baselines and rows is not None:
            yield self._engine("rows", Engine(rows, self.engine.codec), warm=False)
        yield from self._grammars()
        if "prompt-only" in self.baselines:
            longest = sum(max(len(item.line(i)) for i in range(len(item.field.labels))) for item in self.compiled)
            stop = self.compiled.prompt.codec.control_ids
            yield self._written("prompt-only", lambda: anything(stop, int(SLACK * longest)), together=False)
        if "first-token" in self.baselines:
            backend = rows or self.backend
            yield _Contender("first-token", backend, partial(self._first_token, backend), _metered(backend))
        yield from self._gbnf()

    def _engine(self, name: str, engine: Engine, warm: bool, **options: Any) -> _Contender:
        def run() -> _Outcome:
            if not warm:
                engine.heads.clear()
            out = engine.extract(self.scenario.context, self.scenario.schema, **options)
            return _Outcome(out.values, dict(out.stats.seconds))

        packed = engine.backend.name == "torch" and engine.backend.layout == "packed"
        scoring = name in ("tree-warm", "rows")
        return _Contender(name, engine.backend, run, _metered(engine.backend), packed, scoring)

    def _in_rows(self) -> Any:
        """The same torch model on padded rows; None where there is no second layout."""
        if self.backend.name != "torch" or self.backend.layout != "packed":
            if "rows" in self.baselines:
                self.left_out["rows"] = "the model has one layout under this backend"
            return None
        from pcdlab.backends.torch import TorchBackend

        return TorchBackend(self.backend.module, self.backend.model, layout="rows")

    def _grammars(self) -> Iterator[_Contender]:
        wanted = {"grammar", "grammar-ff", "grammar-text"} & self.baselines
        if not wanted:
            return
        try:
            matcher = grammar_matcher(self.compiled, grammar_tokenizer(self.engine.codec, self.backend.vocabulary))
        except TokenizationError as error:
            self.left_out.update(dict.fromkeys(sorted(wanted), str(error)))
            return
        if "grammar" in wanted:
            yield self._written("grammar", lambda: self._own(matcher), together=False)
        if "grammar-ff" in wanted:
            yield self._written("grammar-ff", lambda: self._own(matcher), together=True)
        if "grammar-text" in wanted:
            yield self._written("grammar-text", lambda: grammar_lines(matcher, fast_forward=True), together=True)

    def _own(self, matcher: Any) -> Rule:
        return own_tokens(grammar_lines(matcher, fast_forward=False), self.compiled)

    def _written(self, name: str, rule: Callable[[], Rule], together: bool) -> _Contender:
        def run() -> _Outcome:
            clock = _Clock()
            ids = self.compiled.prompt.ids(self.scenario.context)
            clock.lap("tokenise")
            head = self.backend.prefill(ids[: self.cut])
            clock.lap("head")
            prompt = self.backend.prefill(ids[self.cut : -1], head)
            clock.lap("document")
            tokens = [step.token for step in generate(self.backend, prompt, ids[-1:], rule(), together)]
            clock.lap("write")
            outcome = self._judged(tokens)
            clock.lap("assemble")
            outcome.seconds = clock.laps
            return outcome

        return _Contender(name, self.backend, run, _metered(self.backend))

    def _judged(self, tokens: list[int]) -> _Outcome:
        found = judge(self.compiled.prompt.opening + self.compiled.prompt.codec.decode(tokens), self.scenario.schema)
        problems = {
            "parsed": found.parsed,
            "missing": len(found.missing),
            "invented": len(found.invented),
            "extra": len(found.extra),
        }
        return _Outcome(found.values, {}, None if found.valid else problems, written=True)

    def _first_token(self, backend: Any) -> _Outcome:
        clock = _Clock()
        ids = self.compiled.prompt.ids(self.scenario.context)
        clock.lap("tokenise")
        head = backend.prefill(ids[: self.cut])
        clock.lap("head")
        prompt = backend.prefill(ids[self.cut :], head)
        clock.lap("document")
        answers = first_token(backend, self.compiled, prompt)
        clock.lap("score")
        return _Outcome({name: answer.value for name, answer in answers.items()}, clock.laps)

    def _gbnf(self) -> Iterator[_Contender]:
        wanted = {"llamacpp-gbnf", "llamacpp-gbnf-warm"} & self.baselines
        if self.backend.name != "llamacpp" or not wanted:
            return
        from pcdlab.backends.llamacpp_library import Model
        from pcdlab.baselines.gbnf import GBNFGenerator, gbnf

        model = Model(
            self.backend.path
        )  # the file as it is, as one would run it; the tree's backend may have unpacked it
        lines = [
            [self.compiled.format.line(i.field.name, i.field.json(v)) for v in i.field.labels] for i in self.compiled
        ]
        room = sum(max(len(line.encode()) for line in some) for some in lines)  # no token is shorter than a byte
        generator = GBNFGenerator(model, self.backend.threads, len(self.ids) + room + 1)
        grammar = gbnf(self.compiled)
        for name in ("llamacpp-gbnf", "llamacpp-gbnf-warm"):
            if name in wanted:
                run = partial(self._gbnf_run, generator, grammar, name == "llamacpp-gbnf-warm")
                yield _Contender(
                    name, self.backend, run, lambda: (generator.passes, generator.tokens), dtype=model.weights
                )

    def _gbnf_run(self, generator: GBNFGenerator, grammar: str, warm: bool) -> _Outcome:
        clock = _Clock()
        ids = self.compiled.prompt.ids(self.scenario.context)
        clock.lap("tokenise")
        generator.keep(self.cut if warm else 0)
        if generator.length < self.cut:
            generator.feed(ids[: self.cut])
        clock.lap("head")
        generator.feed(ids[self.cut :])
        clock.lap("document")
        tokens = generator.write(grammar)
        clock.lap("write")
        outcome = self._judged(tokens)
        clock.lap("assemble")
        outcome.seconds = clock.laps
        return outcome

    # --- one row ------------------------------------------------------------------------------------------------

    def row(self, contender: _Contender, runs: int) -> dict[str, Any]:
        """Measure one contender; the keys are those of :func:`run_bench`."""
        backend = contender.backend
        outcomes: list[_Outcome] = []
        before = contender.meter()
        with _recorded_passes(backend) as passes:
            peak = _peak_bytes(lambda: outcomes.append(contender.run())) if backend.name == "torch" else None
            if peak is None:
                outcomes.append(contender.run())
        cost = [after - start for after, start in zip(contender.meter(), before, strict=True)]
        timed: list[tuple[float, dict[str, float]]] = []
        while len(timed) < runs and (not timed or sum(t for t, _ in timed) + timed[-1][0] <= SLOW):
            start = time.perf_counter()
            outcome = contender.run()
            timed.append((time.perf_counter() - start, outcome.seconds))
        seconds = statistics.median(t for t, _ in timed)
        outcome = outcomes[0]
        roofline = _roofline(backend, passes) if contender.roofline else None
        valid = all(f.name in outcome.values for f in self.scenario.schema) and outcome.problems is None
        return {
            "preset": self.scenario.id,
            "fields": len(self.scenario.schema),
            "engine": contender.name,
            "dtype": contender.dtype or backend.dtype,
            "median_s": seconds,
            "runs": len(timed),
            "seconds": sorted(timed, key=lambda one: one[0])[(len(timed) - 1) // 2][1],
            "forward_passes": cost[0],
            "tokens_fed": cost[1],
            "peak_bytes": peak,
            "roofline_s": roofline,
            "roofline_ratio": seconds / roofline if roofline else None,
            "schema_valid": 1.0 if valid else 0.0,
            "problems": outcome.problems,
            "agreement": _share(self.reference, outcome.values),
            "agreement_same_answers": self._same_answers(outcome) if outcome.written and valid else None,
            "prompt_tokens": len(self.ids),
            "cached_tokens": self.cut if contender.name.endswith("warm") else 0,
            **(self._scoring(backend, runs) if contender.scoring else {}),
        }

    def _same_answers(self, outcome: _Outcome) -> float:
        walked = decide_after(self.backend, self.compiled, self.ids, outcome.values)
        return _share({name: decision.value for name, decision in walked.items()}, outcome.values)

    def _scoring(self, backend: Any, runs: int) -> dict[str, Any]:
        prompt = backend.prefill(self.ids)
        labels = [(item, len(item.field.labels)) for item in self.compiled if not item.field.fixed]
        tree = decide.plan([decide.Wish(item, decide.resolve("auto", count)) for item, count in labels]).tree
        return {
            "scoring_s": _median(lambda: backend.read(prompt, tree), runs),
            "scoring_peak_bytes": _peak_bytes(lambda: backend.read(prompt, tree)) if backend.name == "torch" else None,
            "scoring_tokens": len(tree),
            "prompt_kv_bytes": prompt.nbytes,
        }


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.laps[phase] = now - self._last
        self._last = now


def _metered(backend: Any) -> Callable[[], tuple[int, int]]:
    return lambda: (backend.meter.forward_passes, backend.meter.tokens_fed)


def _share(wanted: Mapping[str, Label], values: Mapping[str, Label]) -> float:
    """Share of the wanted values that are there; ``true`` and 1 are not the same."""
    same = [name in values and Field.json(values[name]) == Field.json(value) for name, value in wanted.items()]
    return sum(same) / len(same) if same else 1.0


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


@contextmanager
def _recorded_passes(backend: Any) -> Iterator[list[_PassShape]]:
    """Note the shape of every pass a backend makes over prompts and trees inside the ``with`` block."""
    passes: list[_PassShape] = []
    prefill, read = backend.prefill, backend.read

    def noted_prefill(tokens: Any, parent: Any = None) -> Any:
        passes.append(_PassShape(len(tokens), 0))
        return prefill(tokens, parent)

    def noted_read(prefix: Any, tree: Any, keep: int = 0) -> Any:
        passes.append(_PassShape(len(tree), len(tree.read_nodes)))
        return read(prefix, tree, keep)

    backend.prefill, backend.read = noted_prefill, noted_read
    try:
        yield passes
    finally:
        del backend.prefill, backend.read  # the instance's; the class's show again


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


def _versions(backend: Any) -> dict[str, str]:
    packages = {"torch": ["torch", "transformers"], "mlx": ["mlx", "mlx-lm"], "llamacpp": ["llama-cpp-python"]}
    found = {name: importlib.metadata.version(name) for name in [*packages[backend.name], "llguidance"]}
    threads = getattr(backend, "threads", None)
    if backend.name == "torch":
        import torch

        threads = torch.get_num_threads()
    return {**found, "threads": str(threads or "automatic")}


# --- what has changed -------------------------------------------------------------------------------------------------


def read_bench(path: Path) -> dict[str, Any]:
    """Read a file that ``pcdlab bench --json`` wrote.

    Raises
    ------
    ParameterError
        If it cannot be read or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            row["preset"], row["engine"], row["dtype"], row["median_s"] + 0.0
        found["machine"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no result of a bench ({error!r})"
        raise ParameterError(f"--compare {path}: {reason}; give a file that `pcdlab bench --json` wrote") from error
    return found


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What has changed from one bench to another.

    Parameters
    ----------
    old, new : mapping
        From :func:`run_bench`.

    Returns
    -------
    dict
        ``reasons``: why the two cannot be compared (another machine, model or backend), empty where they can; ``versions``: what
        else differs (packages), which may be what is to be compared; ``rows``: one per row found in both, with ``preset``,
        ``engine``, ``dtype`` and, for every number that both have, new divided by old (``time``, ``peak``) or the two values
        (``forward_passes``, ``tokens_fed``, ``schema_valid``, ``agreement``); ``only_old``, ``only_new``: names of the others.
    """
    same_machine = ("cpu", "cores", "memory_gib", "system", "threads")
    reasons = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in ("model", "backend")
        if old.get(key) != new.get(key)
    ]
    versions: list[str] = []
    for key in dict.fromkeys([*old["machine"], *new["machine"]]):
        before, after = old["machine"].get(key), new["machine"].get(key)
        if before != after:
            (reasons if key in same_machine else versions).append(f"{key} was {before!r} and is {after!r}")
    before_by = {(row["preset"], row["engine"], row["dtype"]): row for row in old["rows"]}
    after_by = {(row["preset"], row["engine"], row["dtype"]): row for row in new["rows"]}
    rows = []
    for key, row in after_by.items():
        if key not in before_by:
            continue
        earlier = before_by[key]
        changed: dict[str, Any] = {"preset": key[0], "engine": key[1], "dtype": key[2]}
        for name, figure in (("time", "median_s"), ("peak", "peak_bytes")):
            if earlier.get(figure) and row.get(figure):
                changed[name] = row[figure] / earlier[figure]
        for name in ("forward_passes", "tokens_fed", "schema_valid", "agreement"):
            if name in earlier and name in row:
                changed[name] = [earlier[name], row[name]]
        rows.append(changed)
    return {
        "reasons": reasons,
        "versions": versions,
        "rows": rows,
        "only_old": [" ".join(key) for key in before_by if key not in after_by],
        "only_new": [" ".join(key) for key in after_by if key not in before_by],
    }


# --- for people -------------------------------------------------------------------------------------------------------


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    """Print a bench as tables, one block per preset."""
    about = result["machine"]
    versions = ", ".join(
        f"{k} {v}" for k, v in about.items() if k not in ("cpu", "cores", "memory_gib", "system", "threads")
    )
    console.print(f"{result['model']} on {about['cpu']}, {about['threads']} threads, {versions}", markup=False)
    for preset in dict.fromkeys(row["preset"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["preset"] == preset]
        _print_whole(preset, rows, console)
        _print_scoring([row for row in rows if "scoring_s" in row], console)
    for name, reason in result["left_out"].items():
        console.print(f"{name} left out: {reason}", style="dim", markup=False)


def _print_whole(preset: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    title = f"{preset}: {rows[0]['fields']} fields, prompt of {rows[0]['prompt_tokens']:,} tokens"
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]))
    cold = {row["dtype"]: row["median_s"] for row in rows if row["engine"] == "tree-cold"}
    fallback = next(iter(cold.values()))
    table = _table(
        title,
        ["engine", "dtype"],
        [
            "median s",
            "÷ tree-cold",
            "runs",
            *phases,
            "passes",
            "tokens fed",
            "peak MiB",
            "× roofline",
            "valid",
            "agreement",
            "same answers",
        ],
    )
    for row in rows:
        table.add_row(
            row["engine"],
            row["dtype"],
            f"{row['median_s']:.3f}",
            f"{row['median_s'] / cold.get(row['dtype'], fallback):.2f}",
            str(row["runs"]),
            *(f"{row['seconds'][phase]:.3f}" if phase in row["seconds"] else "" for phase in phases),
            str(row["forward_passes"]),
            f"{row['tokens_fed']:,}",
            _mib(row["peak_bytes"]),
            f"{row['roofline_ratio']:.2f}" if row["roofline_ratio"] else "–",
            "yes" if row["schema_valid"] else _problems(row["problems"]),
            f"{row['agreement']:.0%}",
            "" if row["agreement_same_answers"] is None else f"{row['agreement_same_answers']:.0%}",
        )
    console.print(table)


def _print_scoring(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = _table(
        "Scoring pass alone, below a cached prompt",
        ["engine", "dtype"],
        ["prompt tokens", "tree tokens", "median s", "rows ÷ this", "peak MiB", "peak ÷ prompt KV"],
    )
    padded = {row["dtype"]: row["scoring_s"] for row in rows if row["engine"] == "rows"}
    for row in rows:
        peak = row["scoring_peak_bytes"]
        table.add_row(
            "tree" if row["engine"] == "tree-warm" else row["engine"],
            row["dtype"],
            f"{row['prompt_tokens']:,}",
            str(row["scoring_tokens"]),
            f"{row['scoring_s']:.3f}",
            f"{padded[row['dtype']] / row['scoring_s']:.1f}" if row["dtype"] in padded else "–",
            _mib(peak),
            "–" if peak is None else f"{peak / row['prompt_kv_bytes']:.2f}",
        )
    console.print(table)


def print_comparison(changes: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`compare` found; what forbids the comparison comes first."""
    for reason in changes["reasons"]:
        console.print(f"NOT COMPARABLE: {reason}", style="bold red", markup=False)
    for line in changes["versions"]:
        console.print(f"note: {line}", style="dim", markup=False)
    table = _table(
        "New ÷ old", ["preset", "engine", "dtype"], ["time", "peak", "passes", "tokens fed", "valid", "agreement"]
    )
    for row in changes["rows"]:
        table.add_row(
            row["preset"],
            row["engine"],
            row["dtype"],
            *(f"{row[name]:.2f}" if name in row else "–" for name in ("time", "peak")),
            *(_change(row.get(name), "{:,}") for name in ("forward_passes", "tokens_fed")),
            *(_change(row.get(name), "{:.0%}") for name in ("schema_valid", "agreement")),
        )
    console.print(table)
    for name, which in (("only in the old file", "only_old"), ("only in the new one", "only_new")):
        if changes[which]:
            console.print(f"{name}: {', '.join(changes[which])}", style="dim", markup=False)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _change(pair: Sequence[Any] | None, form: str) -> str:
    if pair is None:
        return "–"
    old, new = map(form.format, pair)
    return "=" if old == new else f"{old} → {new}"


def _problems(problems: Mapping[str, Any] | None) -> str:
    if problems is None:
        return "no"
    if not problems["parsed"]:
        return "no object"
    return ", ".join(f"{problems[kind]} {kind}" for kind in ("missing", "invented", "extra") if problems[kind])


def _mib(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.0f}"
