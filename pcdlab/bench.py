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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from pcdlab import decide, models
from pcdlab.baselines.first_token import first_token
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import Rule, anything, generate, judge, schema_lines
from pcdlab.baselines.same_answers import decide_after
from pcdlab.bench_measure import Clock, bfloat16_is_faster, measure, median, peak_bytes
from pcdlab.bench_sweeps import Sizes, race, run_sweeps
from pcdlab.engine import Engine
from pcdlab.errors import ParameterError, TokenizationError
from pcdlab.presets import Preset, load_preset
from pcdlab.reports import machine
from pcdlab.schema import Field, Label

if TYPE_CHECKING:
    from pcdlab.baselines.gbnf import GBNFGenerator

__all__ = ["BASELINES", "run_bench"]

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
    peak: bool = True
    dtype: str = ""


def run_bench(
    presets: Sequence[str],
    model: str,
    backend: str = "torch",
    runs: int = 3,
    baselines: Sequence[str] = BASELINES,
    report: Report = lambda line: None,
    sweeps: Sizes | None = None,
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
    sweeps : Sizes, optional
        Also measure how cost grows, that far, and one race on the first preset; in the backend's own choice of number format.

    Returns
    -------
    dict
        ``machine``, ``model``, ``backend``, ``left_out`` (baseline → why) and ``rows``; with `sweeps` also ``sweeps`` and
        ``race``, as :func:`pcdlab.bench_sweeps.run_sweeps` and :func:`pcdlab.bench_sweeps.race` give them. A row's
        ``median_s`` are seconds, ``seconds`` those of the median run by phase, ``runs`` how many there were;
        ``roofline_ratio`` divides by the roofline's seconds (None off the packed torch backend and where tokens are written
        one by one); ``peak_bytes`` is what torch allocates beyond what was there before (None elsewhere, and where tokens
        are written one by one); ``schema_valid`` is 1.0 for an object of the schema, else 0.0 with ``problems`` saying why;
        ``agreement`` is the share of fields with the value that greedy writing in the tokenizer's own tokens gives,
        ``agreement_same_answers`` that of the engine's walk with this row, given the row's own answers before each field;
        ``scoring_s``, ``scoring_peak_bytes`` belong to the pass that reads the fields below an already cached prompt of
        ``prompt_kv_bytes``.

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
    result = {"machine": about, "model": model, "backend": backend, "left_out": left_out, "rows": rows}
    if sweeps is not None:
        report(f"{scenarios[0].id}: token by token")
        result["race"] = race(engine, scenarios[0])
        result["sweeps"] = run_sweeps(engine, runs, sweeps, report)
    return result


def _dtypes(backend: str) -> list[str]:
    if backend != "torch":
        return ["auto"]
    from pcdlab.backends.torch import best_device, best_dtype

    device = best_device()
    own = best_dtype(device)
    measured = ["float32", *(["bfloat16"] if bfloat16_is_faster(device) else [])]
    return [*(dtype for dtype in measured if dtype != own), own]  # the backend's own choice last: sweeps are in it


class _Bench:
    """One preset on one engine."""

    def __init__(self, engine: Engine, scenario: Preset, baselines: set[str], left_out: dict[str, str]) -> None:
        self.engine, self.scenario, self.baselines, self.left_out = engine, scenario, baselines, left_out
        self.backend: Any = engine.backend
        self.compiled = engine.compile(scenario.schema)
        self.ids, cached = engine.tokenise(self.compiled, scenario.context)
        self.cut = cached or 1  # what is written needs a prompt in two parts
        own = generate(self.backend, None, self.ids, schema_lines(self.compiled), together=True)
        self.reference = self._judged([step.token for step in own]).values

    def contenders(self) -> Iterator[_Contender]:
        """The rows in order; made one by one, as some hold memory."""
        yield self._engine("tree-cold", self.engine, warm=False)
        yield self._engine("tree-warm", self.engine, warm=True)
        self.engine.heads.clear()  # or the head that is given back meanwhile would count against the peak
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
            clock = Clock()
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

        return _Contender(name, self.backend, run, _metered(self.backend), peak=False)

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
        clock = Clock()
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
        clock = Clock()
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
        products = 7 if contender.roofline else 0
        outcome, figures = measure(
            backend, contender.run, lambda out: out.seconds, runs, SLOW, contender.meter, products, contender.peak
        )
        roofline = figures["roofline_s"]
        valid = all(f.name in outcome.values for f in self.scenario.schema) and outcome.problems is None
        return {
            "preset": self.scenario.id,
            "fields": len(self.scenario.schema),
            "engine": contender.name,
            "dtype": contender.dtype or backend.dtype,
            **figures,
            "roofline_ratio": figures["median_s"] / roofline if roofline else None,
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
            "scoring_s": median(lambda: backend.read(prompt, tree), runs),
            "scoring_peak_bytes": peak_bytes(lambda: backend.read(prompt, tree)) if backend.name == "torch" else None,
            "scoring_tokens": len(tree),
            "prompt_kv_bytes": prompt.nbytes,
        }


def _metered(backend: Any) -> Callable[[], tuple[int, int]]:
    return lambda: (backend.meter.forward_passes, backend.meter.tokens_fed)


def _share(wanted: Mapping[str, Label], values: Mapping[str, Label]) -> float:
    """Share of the wanted values that are there; ``true`` and 1 are not the same."""
    same = [name in values and Field.json(values[name]) == Field.json(value) for name, value in wanted.items()]
    return sum(same) / len(same) if same else 1.0


def _versions(backend: Any) -> dict[str, str]:
    packages = {"torch": ["torch", "transformers"], "mlx": ["mlx", "mlx-lm"], "llamacpp": ["llama-cpp-python"]}
    found = {name: importlib.metadata.version(name) for name in [*packages[backend.name], "llguidance"]}
    threads = getattr(backend, "threads", None)
    if backend.name == "torch":
        import torch

        threads = torch.get_num_threads()
    return {**found, "threads": str(threads or "automatic")}
