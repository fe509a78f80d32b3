"""How the engine's cost grows: one size at a time, everything else fixed, and batches against one document at a time.

Each point is a whole extraction with the head run too (``tree-cold``) or cached (``tree-warm``), beside the roofline; at a few
points also the object written token by token, tokens without a choice fed together (``grammar-ff``), so that one can see where
that is cheaper. Knows what is varied. How a piece of work is timed is :mod:`pcdlab.bench_measure`, what the texts are
:mod:`pcdlab.bench_texts`; what follows from the points is :mod:`pcdlab.bench_report`.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcdlab import bench_texts
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import Rule, Step, generate
from pcdlab.bench_measure import Clock, measure, peak_bytes
from pcdlab.engine import Engine
from pcdlab.errors import ContextLengthError, TokenizationError
from pcdlab.presets import Preset
from pcdlab.schema import Schema

__all__ = ["SMALL", "Sizes", "race", "run_sweeps"]

SLOW = 5.0  # seconds spent on timing one point: a point that takes long is run less often than asked
PRODUCTS = 3  # timings of each matrix product for the roofline of a point
STREAM_TOKENS = 1024  # per pass, where memory is measured: so that a hundred documents already fill several passes
Report = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How far to go.

    Attributes
    ----------
    fields, labels, document, batch : tuple of int
        The points of each sweep: fields of a schema, labels of its one field, tokens of the document, documents per call.
    written : mapping of str to tuple of int
        Sweep → points at which the object is also written token by token.
    queries, letters : int
        Short and long documents that are decided together and one by one.
    stream : tuple of int
        Two numbers of documents whose memory is compared.
    """

    fields: tuple[int, ...] = (1, 4, 16, 50, 100, 200, 400)
    labels: tuple[int, ...] = (2, 8, 32, 77, 200, 500, 1000)
    document: tuple[int, ...] = (50, 150, 400, 1000, 2500, 6000)
    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    written: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "fields": (1, 4, 16, 50),
            "labels": (2, 77, 1000),
            "document": (50, 400, 2500),
            "batch": (1, 4, 16),
        }
    )
    queries: int = 60
    letters: int = 40
    stream: tuple[int, int] = (100, 1000)


SMALL = Sizes(
    (1, 4, 16), (2, 16, 77), (50, 150, 400), (1, 4, 16),
    {"fields": (1, 4, 16), "labels": (2, 77), "document": (50, 400), "batch": (1, 4)}, 16, 6, (100, 200),
)  # fmt: skip
"""What a notebook can afford."""


def run_sweeps(
    engine: Engine, runs: int, sizes: Sizes | None = None, report: Report = lambda line: None
) -> dict[str, Any]:
    """Measure how cost grows.

    Parameters
    ----------
    engine : Engine
        One that keeps heads in memory only, so that cold is cold; those it has are dropped.
    runs : int
        Timed repetitions of each point after a warm-up; slow ones less often.
    sizes : Sizes, optional
        All of them by default.
    report : callable
        Told in a few words what is being measured.

    Returns
    -------
    dict
        ``dtype``; ``points``, each with ``sweep`` ("fields", "labels", "document", "batch"), ``x`` (its size; of a document the
        tokens), ``engine``, ``prompt_tokens``, ``cached_tokens`` and the figures of :func:`pcdlab.bench_measure.measure`, with
        ``prefill_s`` (the whole prompt run plainly) on cold points of "labels"; ``left_out``: points that do not fit the model,
        and why; ``batching``: "short" and "long" documents together and one by one; ``stream``: memory of a generator, None off
        torch.
    """
    sizes = sizes or Sizes()
    sweeps = _Sweeps(engine, runs, sizes, report)
    sweeps.run()
    report("documents together and one by one")
    texts = {"short": bench_texts.queries(sizes.queries), "long": bench_texts.letters(sizes.letters)}
    schemas = {"short": bench_texts.topics(), "long": bench_texts.fields(7)}
    batching = {}
    for kind in texts:
        try:
            batching[kind] = _batching(engine, texts[kind], schemas[kind], runs)
        except ContextLengthError as error:
            sweeps.left_out.append(f"{kind} documents together: {error}")
    report("memory of a stream of documents")
    stream = _stream(engine, sizes.stream) if engine.backend.name == "torch" else None
    return {
        "dtype": engine.backend.dtype,
        "points": sweeps.points,
        "left_out": sweeps.left_out,
        "batching": batching,
        "stream": stream,
    }


class _Sweeps:
    def __init__(self, engine: Engine, runs: int, sizes: Sizes, report: Report) -> None:
        self.engine, self.runs, self.sizes, self.report = engine, runs, sizes, report
        self.backend: Any = engine.backend
        self.points: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.tokenizer: Any = None
        try:
            self.tokenizer = grammar_tokenizer(engine.codec, engine.backend.vocabulary)
        except TokenizationError as error:
            self.left_out.append(f"grammar-ff: {error}")

    def run(self) -> None:
        """Measure all points; a sweep ends at the first that does not fit."""
        letter = " ".join(itertools.islice(bench_texts.sentences(), 6))
        few = bench_texts.fields(8)
        cases: dict[str, Callable[[int], tuple[list[str], Schema]]] = {
            "fields": lambda x: ([letter], bench_texts.fields(x)),
            "labels": lambda x: ([letter], bench_texts.labels(x)),
            "document": lambda x: ([self._document(x, few)], few),
            "batch": lambda x: (bench_texts.queries(x), bench_texts.fields(4)),
        }
        for sweep, case in cases.items():
            for x in getattr(self.sizes, sweep):
                self.report(f"{sweep}: {x:,}")
                texts, schema = case(x)
                try:
                    self._point(sweep, x, texts, schema)
                except ContextLengthError as error:
                    self.left_out.append(f"{sweep} from {x:,} on: {error}")
                    break

    def _document(self, tokens: int, schema: Schema) -> str:
        """A document of so many tokens, give or take a word."""
        prompt = self.engine.prompt(schema)
        empty = len(prompt.ids(""))
        words: list[str] = []
        for sentence in bench_texts.sentences():
            words += sentence.split()
            if len(words) >= tokens:  # a word is a token or more
                break
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(prompt.ids(" ".join(words[:middle]))) - empty <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return " ".join(words[:low])

    def _point(self, sweep: str, x: int, texts: list[str], schema: Schema) -> None:
        engine = self.engine
        prompt = engine.prompt(schema)
        ids = [prompt.ids(text) for text in texts]
        if (longest := max(map(len, ids))) > self.backend.max_tokens:
            raise ContextLengthError(f"{longest} prompt tokens do not fit the model's {self.backend.max_tokens}")
        at = len(ids[0]) - len(prompt.ids("")) if sweep == "document" else x

        def tree(warm: bool) -> Callable[[], dict[str, float]]:
            def work() -> dict[str, float]:
                if not warm:
                    engine.heads.clear()
                results = engine.extract_many(texts, schema, progress=False)
                return dict(results[-1].stats.seconds)

            return work

        def note(name: str, work: Callable[[], dict[str, float]], cached: int, **more: Any) -> None:
            roofline = PRODUCTS if name != "grammar-ff" and _packed(self.backend) else 0
            peak = name != "grammar-ff"
            _, figures = measure(
                self.backend, work, lambda seconds: seconds, self.runs, SLOW, roofline=roofline, peak=peak
            )
            about = {
                "sweep": sweep,
                "x": at,
                "engine": name,
                "prompt_tokens": sum(map(len, ids)),
                "cached_tokens": cached,
            }
            self.points.append({**about, **figures, **more})

        more = {}
        if sweep == "labels":
            work = lambda: {"prefill": _seconds(lambda: self.backend.prefill(ids[0]))}  # noqa: E731
            more["prefill_s"] = measure(self.backend, work, lambda s: s, self.runs, SLOW, peak=False)[1]["median_s"]
        engine.heads.clear()  # or the memory of an earlier point's head, given back meanwhile, would count against the peak
        note("tree-cold", tree(False), 0, **more)
        note("tree-warm", tree(True), len(prompt.head))
        if x in self.sizes.written.get(sweep, ()) and self.tokenizer is not None:
            compiled = engine.compile(schema)
            try:
                matcher = grammar_matcher(compiled, self.tokenizer)
            except TokenizationError as error:
                self.left_out.append(f"grammar-ff for {sweep} {x:,}: {error}")
                return
            rule = lambda: own_tokens(grammar_lines(matcher, fast_forward=False), compiled)  # noqa: E731
            note("grammar-ff", lambda: _write(engine, schema, texts, rule), 0)


def _packed(backend: Any) -> bool:
    return backend.name == "torch" and backend.layout == "packed"


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(engine: Engine, schema: Schema, texts: Sequence[str], rule: Callable[[], Rule]) -> dict[str, float]:
    """Write the object of each text, forced tokens together with the next choice, all behind one head; seconds by phase."""
    clock = Clock()
    prompt = engine.prompt(schema)
    head = engine.backend.prefill(prompt.head)
    clock.lap("head")
    for text in texts:
        rest = prompt.ids(text)[len(prompt.head) :]
        for _ in generate(engine.backend, head, rest, rule(), together=True):
            pass
    clock.lap("write")
    return clock.laps


# --- batches ----------------------------------------------------------------------------------------------------------


def _batching(engine: Engine, texts: Sequence[str], schema: Schema, runs: int) -> dict[str, Any]:
    """Seconds for the texts in one call and one by one, behind a cached head; in turns, medians."""
    together: list[float] = []
    apart: list[float] = []
    engine.extract_many(texts[:2], schema, progress=False)
    while len(together) < runs and (not together or sum(together) + sum(apart) < 4 * SLOW):
        together.append(_seconds(lambda: engine.extract_many(texts, schema, progress=False)))
        apart.append(_seconds(lambda: [engine.extract(text, schema) for text in texts]))
    prompt = engine.prompt(schema)
    tokens = [len(prompt.ids(text)) - len(prompt.ids("")) for text in texts]
    middle = sorted(range(len(together)), key=lambda i: apart[i] / together[i])[(len(together) - 1) // 2]
    return {
        "documents": len(texts),
        "fields": len(schema),
        "labels": max(len(item.labels) for item in schema),
        "shortest_tokens": min(tokens),
        "longest_tokens": max(tokens),
        "together_s": together[middle],
        "one_by_one_s": apart[middle],
        "runs": len(together),
    }


# --- memory of a stream -----------------------------------------------------------------------------------------------


def _stream(engine: Engine, counts: tuple[int, int]) -> dict[str, Any]:
    """Most memory held while a generator decides so many short documents and each result is dropped.

    Tensors by the allocator's record, Python's objects by tracemalloc. The two peaks need not fall together, so that their sum
    is an upper bound. The process's own size would hide growth behind what the allocators keep for reuse.
    """
    schema = bench_texts.fields(1)
    words = ("late", "lost", "fine", "wrong", "new")
    list(engine.extract_many(["late"], schema, progress=False))
    found = []
    for count in counts:
        python: list[int] = []

        def work(count: int = count, python: list[int] = python) -> None:
            tracemalloc.start()
            texts = (f"{words[i % len(words)]} {i}" for i in range(count))
            for _ in engine.extract_many(texts, schema, tokens_per_pass=STREAM_TOKENS, progress=False):
                pass
            python.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

        tensors = peak_bytes(work)
        found.append({"documents": count, "tensor_bytes": tensors, "python_bytes": python[0]})
    return {"tokens_per_pass": STREAM_TOKENS, "peaks": found}


# --- one document, token by token -------------------------------------------------------------------------------------


def race(engine: Engine, scenario: Preset) -> dict[str, Any]:
    """When each token of a preset's object is there, and what the tree does in the same time.

    Parameters
    ----------
    engine : Engine
        As for :func:`run_sweeps`.
    scenario : Preset

    Returns
    -------
    dict
        ``preset``, ``fields`` and ``lanes``: engine → ``phases`` (name, seconds from the start to its beginning and to its end)
        and ``tokens`` (seconds from the start, whether there was a choice), empty for the tree. One run each after a warm-up.
        Grammars are absent where llguidance cannot follow the tokenizer.
    """
    compiled = engine.compile(scenario.schema)
    lanes: dict[str, dict[str, Any]] = {}
    try:
        matcher = grammar_matcher(compiled, grammar_tokenizer(engine.codec, engine.backend.vocabulary))
    except TokenizationError:
        matcher = None
    if matcher is not None:
        for name, together in (("grammar", False), ("grammar-ff", True)):
            _written(engine, scenario, own_tokens(grammar_lines(matcher, fast_forward=False), compiled), True, 4)
            rule = own_tokens(grammar_lines(matcher, fast_forward=False), compiled)
            lanes[name] = _written(engine, scenario, rule, together)
    for name in ("tree-cold", "tree-warm"):
        for _ in range(2):
            if name == "tree-cold":
                engine.heads.clear()
            out = engine.extract(scenario.context, scenario.schema)
        ends = list(itertools.accumulate(out.stats.seconds.values()))
        phases = [list(phase) for phase in zip(out.stats.seconds, [0.0, *ends], ends, strict=False)]
        lanes[name] = {"phases": phases, "tokens": []}
    return {"preset": scenario.id, "fields": len(scenario.schema), "lanes": lanes}


def _written(engine: Engine, scenario: Preset, rule: Rule, together: bool, most: int | None = None) -> dict[str, Any]:
    """One object written from nothing, at most so many tokens of it."""
    prompt = engine.prompt(scenario.schema)
    start = time.perf_counter()
    ids = prompt.ids(scenario.context)
    ends = [("tokenise", time.perf_counter() - start)]
    head = engine.backend.prefill(prompt.head)
    ends.append(("head", time.perf_counter() - start))
    whole = engine.backend.prefill(ids[len(prompt.head) : -1], head)
    ends.append(("document", time.perf_counter() - start))
    steps: Iterator[Step] = generate(engine.backend, whole, ids[-1:], rule, together)
    tokens = [[time.perf_counter() - start, step.allowed != 1] for step in itertools.islice(steps, most)]
    ends.append(("write", time.perf_counter() - start))
    begins = [0.0, *(end for _, end in ends)]
    phases = [[name, begin, end] for begin, (name, end) in zip(begins, ends, strict=False)]
    return {"phases": phases, "tokens": tokens}
