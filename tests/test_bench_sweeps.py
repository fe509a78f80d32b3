"""Sweeps measure what they say they vary; how fast anything is is not for tests to say."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
from brute_force import backend, fresh_engine
from tokenizers_zoo import codec

from pcdlab import bench_sweeps, bench_texts
from pcdlab.bench_measure import _recorded_passes, measure
from pcdlab.bench_sweeps import SMALL, Sizes, race, run_sweeps
from pcdlab.engine import Engine
from pcdlab.errors import TokenizationError
from pcdlab.presets import Preset
from pcdlab.tokentree import TreeBuilder

TINY = Sizes(
    fields=(1, 9), labels=(2, 40), document=(20, 60), batch=(1, 3),
    written={"fields": (9,), "labels": (40,), "document": (20,), "batch": (3,)}, queries=3, letters=2, stream=(20, 60),
)  # fmt: skip
FIGURES = {"median_s", "runs", "seconds", "forward_passes", "tokens_fed", "peak_bytes", "roofline_s", "attention_share"}


@cache
def swept() -> dict[str, Any]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_sweeps, "STREAM_TOKENS", 256)
        found = run_sweeps(fresh_engine("qwen"), 1, TINY, said.append)
    assert len(said) == 8 + 2
    return json.loads(json.dumps(found))


def at(sweep: str, x: int, name: str = "tree-cold") -> dict[str, Any]:
    (point,) = (p for p in swept()["points"] if (p["sweep"], p["x"], p["engine"]) == (sweep, x, name))
    return point


def test_every_point_is_measured_cold_and_warm_and_some_written() -> None:
    points = [(p["sweep"], p["engine"]) for p in swept()["points"]]
    for sweep in ("fields", "labels", "document", "batch"):
        engines = [engine for name, engine in points if name == sweep]
        assert sorted(engines) == ["grammar-ff", *["tree-cold"] * 2, *["tree-warm"] * 2]
    for point in swept()["points"]:
        assert point.keys() >= FIGURES
        assert (point["roofline_s"] is None) == (point["engine"] == "grammar-ff")
    assert swept()["left_out"] == []


def test_cold_runs_the_head_and_warm_does_not() -> None:
    for sweep, x in (("fields", 9), ("labels", 40), ("batch", 3)):
        cold, warm = at(sweep, x), at(sweep, x, "tree-warm")
        assert (cold["cached_tokens"], cold["forward_passes"]) == (0, warm["forward_passes"] + 1)
        assert cold["tokens_fed"] - warm["tokens_fed"] == warm["cached_tokens"] > 0


def test_a_head_given_back_meanwhile_does_not_hide_the_peak() -> None:
    for sweep in ("fields", "labels", "document", "batch"):
        for cold in (p for p in swept()["points"] if p["sweep"] == sweep and p["engine"] == "tree-cold"):
            assert cold["peak_bytes"] > at(sweep, cold["x"], "tree-warm")["peak_bytes"] > 0


def test_more_is_asked_at_each_larger_point() -> None:
    assert at("fields", 1)["forward_passes"] == at("fields", 9)["forward_passes"] == 2
    for sweep, small, large in (("fields", 1, 9), ("labels", 2, 40), ("batch", 1, 3)):
        assert at(sweep, small)["tokens_fed"] < at(sweep, large)["tokens_fed"]
        assert 0 < at(sweep, small)["attention_share"] < at(sweep, large)["attention_share"] < 1
    assert at("labels", 40)["prefill_s"] > 0
    assert at("fields", 9, "grammar-ff")["forward_passes"] >= 9
    # One head for all documents of a call.
    assert at("batch", 3)["forward_passes"] == 2


def test_documents_have_the_tokens_asked_for() -> None:
    found = [p["x"] for p in swept()["points"] if p["sweep"] == "document" and p["engine"] == "tree-cold"]
    assert all(wanted - 8 <= x <= wanted for x, wanted in zip(found, TINY.document, strict=True))


def test_batches_and_memory() -> None:
    short, long = swept()["batching"]["short"], swept()["batching"]["long"]
    assert (short["documents"], short["fields"], short["labels"]) == (3, 1, 77)
    assert (long["documents"], long["fields"], long["labels"]) == (2, 7, 2)
    assert min(short["together_s"], short["one_by_one_s"], long["together_s"], long["one_by_one_s"]) > 0
    few, many = swept()["stream"]["peaks"]
    assert (few["documents"], many["documents"]) == (20, 60)
    assert few["tensor_bytes"] > 0
    assert few["python_bytes"] > 0
    # Three times the documents, the same number of them in a pass.
    assert many["tensor_bytes"] <= 1.1 * few["tensor_bytes"]


def test_a_sweep_ends_where_the_context_does(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Engine(backend("qwen", positions=1200), codec("qwen"))
    sizes = Sizes((1, 100, 200), (2,), (20, 2000), (1,), {}, 1, 1, (1, 2))
    found = run_sweeps(short, 1, sizes)
    assert [p["x"] for p in found["points"] if p["sweep"] == "fields"] == [1, 1]
    assert [line.split(":")[0] for line in found["left_out"]] == [
        "fields from 100 on",
        "document from 2,000 on",
        "short documents together",
    ]
    assert list(found["batching"]) == ["long"]


def test_without_a_grammar_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise TokenizationError("no grammar follows this")

    sizes = Sizes((1,), (2,), (20,), (1,), {"fields": (1,)}, 1, 1, (1, 2))
    scenario = Preset("p", "P", "", "some text", bench_texts.fields(2))
    for refusing, said in (("grammar_matcher", "grammar-ff for fields 1"), ("grammar_tokenizer", "grammar-ff")):
        monkeypatch.setattr(bench_sweeps, refusing, refuse)
        found = run_sweeps(fresh_engine("qwen"), 1, sizes)
        assert {p["engine"] for p in found["points"]} == {"tree-cold", "tree-warm"}
        assert found["left_out"] == [f"{said}: no grammar follows this"]
        assert list(race(fresh_engine("qwen"), scenario)["lanes"]) == ["tree-cold", "tree-warm"]


def test_race() -> None:
    scenario = Preset("p", "P", "", "some text", bench_texts.fields(3))
    found = json.loads(json.dumps(race(fresh_engine("qwen"), scenario)))
    lanes = found["lanes"]
    assert (found["preset"], found["fields"]) == ("p", 3)
    assert list(lanes) == ["grammar", "grammar-ff", "tree-cold", "tree-warm"]
    for lane in lanes.values():
        edges = [edge for _, start, end in lane["phases"] for edge in (start, end)]
        assert edges[0] == 0
        assert edges == sorted(edges)
    slow, fast = lanes["grammar"]["tokens"], lanes["grammar-ff"]["tokens"]
    assert [choice for _, choice in slow] == [choice for _, choice in fast]
    assert sum(choice for _, choice in slow) >= 3
    writing = lanes["grammar"]["phases"][-1]
    assert all(writing[1] <= time <= writing[2] for time, _ in slow)
    assert [time for time, _ in slow] == sorted(time for time, _ in slow)


# --- instruments ------------------------------------------------------------------------------------------------------


def test_the_pairs_that_attention_looks_at() -> None:
    model = backend("qwen")
    builder = TreeBuilder()
    trunk = builder.extend(-1, [5, 6])
    builder.read(builder.extend(trunk, [7]), [1, 2])
    builder.read(builder.extend(trunk, [8, 9]), [1, 2])
    with _recorded_passes(model) as passes:
        prefix = model.prefill([1, 2, 3])
        model.prefill([4], prefix)
        model.read(prefix, builder.build())
    first, second, third = passes
    assert (first.tokens, first.pairs) == (3, 1 + 2 + 3)
    assert (second.tokens, second.pairs) == (1, 4)
    # Behind 3 cached tokens: two of the trunk, then depths 2, 2 and 3.
    assert (third.tokens, third.reads, third.pairs) == (5, 2, 4 + 5 + 6 + 6 + 7)


def test_measuring_counts_the_first_call_and_times_the_others() -> None:
    model = backend("qwen")
    calls: list[int] = []

    def work() -> dict[str, float]:
        calls.append(len(calls))
        model.prefill([1, 2, 3])
        return {"phase": float(len(calls))}

    outcome, figures = measure(model, work, lambda seconds: seconds, runs=3, limit=60.0)
    assert (outcome, len(calls), figures["runs"]) == ({"phase": 1.0}, 4, 3)
    assert (figures["forward_passes"], figures["tokens_fed"], figures["roofline_s"]) == (1, 3, None)
    assert figures["seconds"]["phase"] in (2.0, 3.0, 4.0)
    _, once = measure(model, work, lambda seconds: seconds, runs=3, limit=0.0, roofline=1)
    assert once["runs"] == 1
    assert once["roofline_s"] > 0


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_are_the_same_at_every_call_and_distinct() -> None:
    assert bench_texts.fields(50).names == bench_texts.fields(400).names[:50]
    assert len(bench_texts.fields(400)) == 400
    assert sum(field.kind == "enum" for field in bench_texts.fields(400)) == 50
    names = bench_texts.labels(1000)["goods"].labels
    assert len(set(names)) == 1000
    assert bench_texts.labels(77)["goods"].labels == names[:77]
    assert len(bench_texts.topics()["topic"].labels) == 77
    assert bench_texts.queries(60) == bench_texts.queries(60)
    assert len(set(bench_texts.queries(60))) > 50
    one, other = (list(itertools.islice(bench_texts.sentences(seed), 40)) for seed in (0, 1))
    assert one != other
    assert not any("{" in sentence for sentence in one)
    assert len(set(bench_texts.letters(40))) == 40


def test_the_small_sizes_are_part_of_the_whole() -> None:
    for sweep in ("fields", "labels", "document", "batch"):
        assert set(SMALL.written[sweep]) <= set(getattr(SMALL, sweep))
        assert set(Sizes().written[sweep]) <= set(getattr(Sizes(), sweep))
