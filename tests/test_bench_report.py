"""What is made of a bench: figures worked out by hand from made-up measurements, and the README's tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pcdlab.bench_report import (
    BEGIN,
    END,
    Figure,
    added_field,
    against_writing,
    figures,
    find_bench,
    place,
    points,
    print_bench,
    read_bench,
    readme_block,
    same_machine,
    update_readme,
)
from pcdlab.errors import ParameterError

ROOT = Path(__file__).parents[1]
MACHINE = {"cpu": "Z80", "cores": 2, "memory_gib": 8, "system": "CP/M z80", "threads": "2", "torch": "2.13"}


def a_row(engine: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"preset": "p", "fields": 3, "engine": engine, "dtype": "float32", "median_s": seconds, "runs": 3,
            "seconds": {"head": 1.0, "score": seconds - 1}, "forward_passes": 2, "prompt_tokens": 1234, **more}  # fmt: skip


def a_point(sweep: str, x: int, engine: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"sweep": sweep, "x": x, "engine": engine, "median_s": seconds, "runs": 2, "seconds": {"head": 0.5},
            "roofline_s": None, "forward_passes": 4, "prefill_s": 2.0, **more}  # fmt: skip


def a_bench() -> dict[str, Any]:
    rows = [a_row("tree-cold", 4.0), a_row("tree-warm", 2.0), a_row("grammar-ff", 6.0, forward_passes=5)]
    found = [
        # Cold: 0.3 s a field where the roofline says 0.1; warm: 0.2 and 0.25, where it says 0.1 and 0.2.
        *(a_point("fields", x, "tree-cold", 1 + 0.3 * x, roofline_s=0.5 + 0.1 * x) for x in (10, 1, 4)),
        a_point("fields", 1, "tree-warm", 1.0, roofline_s=0.5),
        a_point("fields", 2, "tree-warm", 1.2, roofline_s=0.6),
        a_point("fields", 4, "tree-warm", 1.7, roofline_s=1.0),
        a_point("labels", 2, "tree-cold", 9.0),
        a_point("labels", 1000, "tree-cold", 3.0),
        a_point("labels", 1000, "tree-warm", 1.0),
        a_point("labels", 1000, "grammar-ff", 2.0, forward_passes=3),
    ]
    batch = {"documents": 60, "fields": 1, "labels": 77, "shortest_tokens": 9, "longest_tokens": 20, "runs": 1}
    sweeps = {
        "dtype": "float16",
        "points": found,
        "batching": {
            "short": {**batch, "together_s": 2.0, "one_by_one_s": 6.0},
            "long": {**batch, "fields": 7, "together_s": 5.0, "one_by_one_s": 4.0},
        },
        "stream": {"peaks": [
            {"documents": 100, "tensor_bytes": 90, "python_bytes": 10},
            {"documents": 1000, "tensor_bytes": 90, "python_bytes": 15},
        ]},
    }  # fmt: skip
    return {"machine": MACHINE, "model": "m", "backend": "torch", "left_out": {}, "rows": rows, "sweeps": sweeps}


def test_one_more_field() -> None:
    assert [p["x"] for p in points(a_bench(), "fields", "tree-cold")] == [1, 4, 10]
    slope, steps = added_field(a_bench(), "tree-cold")
    assert slope == pytest.approx(3.0)
    assert steps == [(1, 4, pytest.approx(3.0)), (4, 10, pytest.approx(3.0))]
    slope, steps = added_field(a_bench(), "tree-warm")
    assert [ratio for *_, ratio in steps] == pytest.approx([2.0, 1.25])
    # By hand: the slope is sum((x - mean) * y) / sum((x - mean)²); the divisors cancel.
    middle = 7 / 3
    above = sum((x - middle) * y for x, y in ((1, 1.0), (2, 1.2), (4, 1.7)))
    below = sum((x - middle) * y for x, y in ((1, 0.5), (2, 0.6), (4, 1.0)))
    assert slope == pytest.approx(above / below)


def test_the_figures_and_their_aims() -> None:
    found = figures(a_bench())
    assert [f.value for f in found] == pytest.approx([3.0, found[1].value, 1.5, 3.0, 0.8, 1.05])
    assert [f.limit for f in found] == [1.3, 1.3, 1.6, 2.5, 1.0, 1.1]
    assert [f.met for f in found] == [False, False, True, True, False, True]
    assert [f.aim for f in found[2:4]] == ["at most 1.6", "at least 2.5"]
    assert "1,000 labels" in found[2].name
    assert "60 of 9 to 20 tokens in one call ÷ one by one (77 labels)" in found[3].name
    assert "(7 fields)" in found[4].name
    assert "1,000 documents ÷ of 100" in found[5].name
    assert Figure("", 1.6, 1.6).met
    assert Figure("", 1.6, 1.6, least=True).met


def test_figures_need_what_they_are_made_of() -> None:
    bench = a_bench()
    bench["sweeps"]["points"] = [p for p in bench["sweeps"]["points"] if p["sweep"] == "labels"]
    bench["sweeps"] |= {"stream": None, "batching": {}}
    assert [f.value for f in figures(bench)] == [1.5]
    del bench["sweeps"]
    assert figures(bench) == []
    off_torch = a_bench()
    for point in off_torch["sweeps"]["points"]:
        point["roofline_s"] = None
    assert len(figures(off_torch)) == 4


def test_the_figures_are_printed_with_what_was_left_out() -> None:
    bench = a_bench()
    bench["sweeps"]["left_out"] = ["fields from 400 on: too long"]
    bench["rows"] = []
    console = Console(width=200, record=True)
    print_bench(bench, console)
    text = console.export_text()
    assert "1,000 labels, head run too ÷ its prompt run plainly" in text
    assert "left out: fields from 400 on: too long" in text


def test_the_tree_against_writing() -> None:
    form, labels = against_writing(a_bench())
    assert form == {"where": "p (3 fields, float32)", "passes": 5, "cold": 1.5, "warm": (6.0 - 1.0) / 2.0}
    assert labels == {"where": "labels: 1,000", "passes": 3, "cold": 2 / 3, "warm": 1.5}
    alone = {**a_bench(), "rows": [a_row("tree-cold", 1.0)]}
    assert len(against_writing(alone)) == 1


# --- finding and naming -----------------------------------------------------------------------------------------------


def test_a_notebook_finds_the_file_from_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "notebooks").mkdir()
    path = "reports/bench.json"
    monkeypatch.chdir(tmp_path)
    assert find_bench(path, "m") is None
    Path(path).write_text(json.dumps(a_bench()))
    assert find_bench(path, "m") == a_bench()
    assert find_bench(path, "another") is None
    monkeypatch.chdir("notebooks")
    assert find_bench(path, "m") == a_bench()
    (tmp_path / path).write_text("{}")
    with pytest.raises(ParameterError, match="no result of a bench"):
        find_bench(path, "m")


def test_machines() -> None:
    other = copy.deepcopy(a_bench())
    other["machine"]["threads"] = "1"
    assert same_machine(a_bench(), other)
    assert place(a_bench()) == "m under torch 2.13 on Z80, 2 cores, 2 threads, 8 GiB, CP/M z80"
    assert "1 thread," in place(other)
    other["machine"]["cpu"] = "6502"
    assert not same_machine(a_bench(), other)


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    bench = a_bench()
    bench["rows"][2]["runs"] = 1
    lines = readme_block(bench).splitlines()
    assert lines[0].startswith(f"Measured with {place(bench)}; float32. Seconds, medians of 1 to 3 runs")
    assert lines[2] == "| preset | fields | prompt tokens | `tree-cold` | `tree-warm` | `grammar-ff` |"
    assert lines[4] == "| p | 3 | 1,234 | 4.00 | 2.00 (0.50) | 6.00 (1.50) |"
    assert lines[6].startswith("| how cost grows, float16 |")
    assert "| at most 1.6 | met |" in lines[10]
    assert lines[-1].endswith("| 1.05 | at most 1.1 | met |")
    bench["rows"].append(a_row("tree-cold", 8.0, dtype="bfloat16"))
    del bench["sweeps"]
    lines = readme_block(bench).splitlines()
    assert lines[-2].startswith("| p, float32 | 3 ")
    assert lines[-1] == "| p, bfloat16 | 3 | 1,234 | 8.00 | – | – |"


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    assert update_readme(readme, a_bench())
    text = readme.read_text(encoding="utf-8")
    assert text == f"before\n\n{BEGIN}\n{readme_block(a_bench())}\n{END}\n\nafter\n"
    assert not update_readme(readme, a_bench())
    for broken in ("none", f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"{BEGIN}\n{END}\n{END}"):
        readme.write_text(broken, encoding="utf-8")
        with pytest.raises(ParameterError, match="put each there once"):
            update_readme(readme, a_bench())
        assert readme.read_text(encoding="utf-8") == broken


def test_the_readme_says_what_was_measured() -> None:
    results = ROOT / "reports/bench.json"
    if not results.exists():
        pytest.skip("reports/bench.json is not there; `make bench` makes it")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    between = text.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert between == readme_block(read_bench(results)), "python -m pcdlab.bench_report README.md"


def test_a_report_is_made_again_when_the_measurements_change(tmp_path: Path) -> None:
    from pcdlab import notebooks, reports

    source = notebooks.Source("07_speed", "", "0", 1, "t", "q", {"results": "reports/bench.json", "n": 1})
    missing = reports._stamp(source, {}, "inputs", tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/bench.json").write_text("{}")
    first = reports._stamp(source, {}, "inputs", tmp_path)
    (tmp_path / "reports/bench.json").write_text("[]")
    second = reports._stamp(source, {}, "inputs", tmp_path)
    assert len({stamp["inputs_sha256"] for stamp in (missing, first, second)}) == 3
    other = reports._stamp(source, {"results": "elsewhere.json"}, "inputs", tmp_path)
    assert other["inputs_sha256"] == missing["inputs_sha256"] == "inputs"
