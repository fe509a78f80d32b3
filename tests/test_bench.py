"""The bench reports what it should; how fast anything is is not for tests to say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from brute_force import engine
from embedded import embedded_model
from rich.console import Console

from pcdlab import bench
from pcdlab.bench import run_bench
from pcdlab.bench_measure import bfloat16_is_faster, peak_bytes
from pcdlab.bench_report import compare, print_bench, print_comparison, read_bench
from pcdlab.errors import ParameterError

KEYS = {
    "preset", "fields", "engine", "dtype", "median_s", "runs", "seconds", "forward_passes", "tokens_fed", "peak_bytes",
    "roofline_s", "roofline_ratio", "schema_valid", "problems", "agreement", "agreement_same_answers", "prompt_tokens",
    "cached_tokens",
}  # fmt: skip
PRESET: dict[str, Any] = {
    "id": "tiny",
    "title": "Tiny",
    "description": "For tests",
    "context": "Dear customer, your order 4711 has been declined.",
    "schema": {
        "urgent": {"type": "boolean", "description": "Whether it is urgent"},
        "version": {"type": "enum", "description": "Always this", "choices": ["1.0"]},
        "track": {"type": "enum", "description": "Where to", "choices": ["DELIVER", "DELIVER_WITH_WARNING", "BLOCK"]},
        "risk": {"type": "enum", "description": "How risky", "choices": ["LOW", "HIGH"]},
    },
}


def measure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """A bench on a tiny model with the zoo's tokenizer `name`."""
    path = tmp_path / "tiny_preset.json"
    path.write_text(json.dumps(PRESET), encoding="utf-8")
    monkeypatch.setattr(bench.models, "load", lambda *_: (engine(name).backend, engine(name).codec))
    said: list[str] = []
    result = run_bench([str(path)], "tiny", runs=1, report=said.append, **options)
    assert len(said) == len(result["rows"]) + 1
    return json.loads(json.dumps(result))


@pytest.fixture(autouse=True)
def _one_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster on the machine of the tests is not theirs to say."""
    monkeypatch.setattr(bench, "bfloat16_is_faster", lambda device: False)


@pytest.mark.parametrize(("device", "faster", "expected"), [
    ("cpu", False, ["float32"]),
    ("cpu", True, ["bfloat16", "float32"]),
    ("cuda", True, ["float32", "bfloat16"]),
    ("cuda", False, ["float32", "bfloat16"]),
])  # fmt: skip
def test_every_number_format_one_would_run_is_measured_the_default_last(
    device: str, faster: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bfloat16_is_faster", lambda device: faster)
    monkeypatch.setattr("pcdlab.backends.torch.best_device", lambda: device)
    assert bench._dtypes("torch") == expected
    assert bench._dtypes("mlx") == ["auto"]


def test_which_number_format_is_faster_can_be_told() -> None:
    assert bfloat16_is_faster("cpu") in (True, False)


def test_peak_bytes_sees_what_was_alive_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            a = torch.ones(1_000_000)  # 4 MB
            b = a + 1  # 4 MB more, then both go
            del a, b

    assert 8_000_000 <= peak_bytes(work) < 9_000_000


def test_a_bench_has_the_promised_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure("qwen", tmp_path, monkeypatch)
    rows = {row["engine"]: row for row in result["rows"]}
    engines = "tree-cold tree-warm joint rows grammar grammar-ff grammar-text prompt-only first-token"
    assert list(rows) == engines.split()
    assert {"cpu", "cores", "torch", "llguidance", "threads"} <= result["machine"].keys()
    assert (result["model"], result["backend"], result["left_out"]) == ("tiny", "torch", {})
    for row in rows.values():
        assert row.keys() >= KEYS
        assert (row["fields"], row["runs"]) == (4, 1)
        written = row["engine"] in {"grammar", "grammar-ff", "grammar-text", "prompt-only"}
        assert (row["peak_bytes"] is None) if written else (row["peak_bytes"] > 0)
        assert 0 < sum(row["seconds"].values()) <= row["median_s"]
        assert (row["roofline_ratio"] is not None) == (row["engine"] in ("tree-cold", "tree-warm", "joint"))
    assert (rows["tree-cold"]["forward_passes"], rows["tree-warm"]["forward_passes"]) == (2, 1)
    cached = rows["tree-warm"]["cached_tokens"]
    assert rows["tree-cold"]["tokens_fed"] - rows["tree-warm"]["tokens_fed"] == cached > 0
    assert rows["tree-warm"]["scoring_peak_bytes"] > 0
    assert rows["rows"]["scoring_tokens"] == rows["tree-warm"]["scoring_tokens"]
    # Joint mode with walk is the greedy object in the tokenizer's own tokens, and so are both grammars.
    assert [rows[name]["agreement"] for name in ("joint", "grammar", "grammar-ff")] == [1.0] * 3
    assert [rows[name]["agreement_same_answers"] for name in ("grammar", "grammar-ff")] == [1.0] * 2
    assert rows["rows"]["agreement"] == rows["tree-cold"]["agreement"], "the same numbers in another layout"
    assert all(row["schema_valid"] == 1.0 for name, row in rows.items() if name != "prompt-only")
    # A random model writes no object: that is said, and counts as no answer.
    free = rows["prompt-only"]
    assert (free["schema_valid"], free["agreement_same_answers"]) == (0.0, None)
    assert free["problems"].keys() == {"parsed", "missing", "invented", "extra"}
    ff, slow = rows["grammar-ff"], rows["grammar"]
    assert ff["forward_passes"] < slow["forward_passes"]
    assert ff["tokens_fed"] <= slow["tokens_fed"]


def test_only_the_baselines_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = measure("qwen", tmp_path, monkeypatch, baselines=())
    assert [row["engine"] for row in none["rows"]] == ["tree-cold", "tree-warm", "joint"]
    one = measure("qwen", tmp_path, monkeypatch, baselines=["grammar-ff"])
    assert [row["engine"] for row in one["rows"]][3:] == ["grammar-ff"]
    with pytest.raises(ParameterError, match="--baselines fast: choose among rows, grammar"):
        run_bench(["no such preset"], "tiny", baselines=["fast"])


def test_sweeps_and_race_come_along_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_sweeps", lambda engine, runs, sizes, report: {"sizes": sizes})
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PRESET), encoding="utf-8")
    monkeypatch.setattr(bench.models, "load", lambda *_: (engine("qwen").backend, engine("qwen").codec))
    result = run_bench([str(path)], "tiny", runs=1, baselines=(), sweeps="few")  # type: ignore[arg-type]
    assert result["sweeps"] == {"sizes": "few"}
    assert (result["race"]["preset"], result["race"]["fields"]) == ("tiny", 4)


def test_what_a_tokenizer_does_not_have_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure("flags", tmp_path, monkeypatch, baselines=["grammar", "grammar-text"])
    assert [row["engine"] for row in result["rows"]] == ["tree-cold", "tree-warm", "joint"]
    assert result["left_out"].keys() == {"grammar", "grammar-text"}
    assert "changes text before it cuts it" in result["left_out"]["grammar"]
    assert result["rows"][2]["agreement"] == 1.0


def test_slow_rows_run_less_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "SLOW", 0.0)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PRESET), encoding="utf-8")
    monkeypatch.setattr(bench.models, "load", lambda *_: (engine("qwen").backend, engine("qwen").codec))
    assert {row["runs"] for row in run_bench([str(path)], "tiny", runs=5, baselines=())["rows"]} == {1}


def test_llama_cpp_is_measured_against_its_own_grammar(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "p.json"
    small = {**PRESET, "schema": {"urgent": PRESET["schema"]["urgent"]}}
    path.write_text(json.dumps(small), encoding="utf-8")
    embedded_model()
    baselines = ["rows", "grammar-ff", "llamacpp-gbnf", "llamacpp-gbnf-warm"]
    result = run_bench([str(path)], "smollm2-135m", "llamacpp", 1, baselines)
    rows = {row["engine"]: row for row in result["rows"]}
    assert list(rows) == ["tree-cold", "tree-warm", "joint", "grammar-ff", "llamacpp-gbnf", "llamacpp-gbnf-warm"]
    assert result["left_out"].keys() == {"rows"}
    assert all(row["schema_valid"] == 1.0 and row["roofline_ratio"] is None for row in rows.values())
    assert all(row["peak_bytes"] is None for row in rows.values())
    cold, warm = rows["llamacpp-gbnf"], rows["llamacpp-gbnf-warm"]
    assert cold["forward_passes"] - 1 == warm["forward_passes"] > 3  # the head
    assert warm["cached_tokens"] == rows["tree-warm"]["cached_tokens"]
    assert (rows["tree-cold"]["dtype"], cold["dtype"]) == ("Q4_1, unpacked", "Q4_1")


# --- what has changed -------------------------------------------------------------------------------------------------


def a_bench(**changes: Any) -> dict[str, Any]:
    row = {"preset": "p", "fields": 2, "engine": "tree-cold", "dtype": "float32", "median_s": 2.0, "runs": 3,
           "seconds": {"score": 2.0}, "forward_passes": 2, "tokens_fed": 100, "peak_bytes": 1 << 20, "roofline_s": 1.0,
           "roofline_ratio": 2.0, "schema_valid": 1.0, "problems": None, "agreement": 0.5, "agreement_same_answers": None,
           "prompt_tokens": 90, "cached_tokens": 0}  # fmt: skip
    machine = {"cpu": "Z80", "cores": 2, "memory_gib": 8, "system": "CP/M", "threads": "2", "torch": "2.13"}
    return {"machine": machine, "model": "m", "backend": "torch", "left_out": {}, "rows": [row], **changes}


def shown(printer: Any, value: Any) -> str:
    console = Console(width=200, record=True)
    printer(value, console)
    return console.export_text()


def test_comparing_two_benches() -> None:
    old, new = a_bench(), copy.deepcopy(a_bench())
    new["rows"][0] |= {"median_s": 1.0, "forward_passes": 3, "peak_bytes": 3 << 20}
    new["rows"].append({**new["rows"][0], "engine": "joint"})
    new["machine"]["torch"] = "2.14"
    changes = compare(old, new)
    assert changes["reasons"] == []
    assert changes["versions"] == ["torch was '2.13' and is '2.14'"]
    assert changes["only_new"] == ["p joint float32"]
    assert changes["rows"] == [
        {"preset": "p", "engine": "tree-cold", "dtype": "float32", "time": 0.5, "peak": 3.0, "forward_passes": [2, 3],
         "tokens_fed": [100, 100], "schema_valid": [1.0, 1.0], "agreement": [0.5, 0.5]}
    ]  # fmt: skip
    text = shown(print_comparison, changes)
    assert "0.50" in text
    assert "2 → 3" in text
    assert "NOT COMPARABLE" not in text


def test_other_machines_and_models_are_named_and_shown() -> None:
    new = a_bench(model="n", backend="mlx")
    new["machine"] = {**new["machine"], "cpu": "6502", "threads": "1"}
    changes = compare(a_bench(), new)
    assert changes["reasons"] == [
        "model was 'm' and is 'n'",
        "backend was 'torch' and is 'mlx'",
        "cpu was 'Z80' and is '6502'",
        "threads was '2' and is '1'",
    ]
    text = shown(print_comparison, changes)
    assert text.count("NOT COMPARABLE") == 4
    assert "1.00" in text


def test_files_that_are_no_bench_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(a_bench()), encoding="utf-8")
    assert read_bench(path) == a_bench()
    for content in ("{", "[]", '{"rows": [{}], "machine": {}}', '{"rows": []}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ParameterError, match=r"b\.json: no result of a bench"):
            read_bench(path)
    with pytest.raises(ParameterError, match="No such file"):
        read_bench(tmp_path / "missing.json")


def test_the_tables_say_what_is_wrong_with_an_answer() -> None:
    bad = a_bench()
    bad["rows"][0] |= {"schema_valid": 0.0, "problems": {"parsed": True, "missing": 2, "invented": 1, "extra": 0}}
    bad["left_out"] = {"grammar": "no such tokenizer"}
    text = shown(print_bench, bad)
    assert "2 missing, 1 invented" in text
    assert "grammar left out: no such tokenizer" in text
    bad["rows"][0]["problems"]["parsed"] = False
    assert "no object" in shown(print_bench, bad)
