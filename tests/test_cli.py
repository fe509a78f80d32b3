"""`pcdlab.cli`, with the modules behind it replaced where they would need a model or a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pcdlab
from pcdlab import models, reports
from pcdlab.calibrators import BatchCorrection, Calibration
from pcdlab.cli import app
from pcdlab.errors import ModelError, ReportError
from pcdlab.notebooks import Failure
from pcdlab.result import Extraction, FieldDecision, Stats
from pcdlab.schema import Schema

ROOT = Path(__file__).parents[1]
SCHEMA = {"spam": {"type": "boolean"}, "kind": {"type": "enum", "choices": ["[red]A[/red]", "b", "ü"]}}
PRESET = {"id": "p", "title": "P", "description": "", "context": "You have won!", "schema": SCHEMA}


class FakeEngine:
    """Stands in for `pcdlab.engine.Engine`: remembers what it was asked, answers the first label of every field."""

    asked: dict[str, Any]

    @classmethod
    def load(cls, name: str, backend: str, dtype: str) -> FakeEngine:
        print("a library talks on stdout while it loads")
        if name == "missing":
            raise ModelError("model 'missing' is unknown;\n  see pcdlab models")
        if name == "interrupted":
            raise KeyboardInterrupt
        cls.asked = {"model": name, "backend": backend, "dtype": dtype}
        return cls()

    def extract(
        self, text: str, schema: Schema, mode: str, scorer: str, normalise: str, calibrator: Calibration | None = None
    ) -> Extraction:
        self.asked.update(text=text, names=list(schema.names), scorer=scorer, mode=mode, normalise=normalise)
        fields = {
            field.name: FieldDecision(
                name=field.name,
                value=field.labels[0],
                probability=0.4,
                candidate_mass=None if field.fixed else 0.25,
                log_probs={label: -1.0 for label in field.labels},
                method="marginal",
                alternatives=tuple((label, 0.3) for label in field.labels[1:]),
                calibrated=calibrator is not None and field.name in calibrator.labels,
            )
            for field in schema
        }
        stats = Stats(1, 1234, 56, {"score": 0.5})
        return Extraction(fields, stats, ("the model would rather write prose",), "tiny", "torch", "float32")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("pcdlab.engine")
    module.Engine = FakeEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pcdlab.engine", module)
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *arguments, **more: CliRunner().invoke(app, list(map(str, arguments)), **more)


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PRESET), encoding="utf-8")
    return path


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_prints_a_table_and_what_it_cost(run: Any, preset: Path) -> None:
    result = run("run", preset, "--model", "tiny", "--backend", "mlx", "--dtype", "float32", "--scorer", "exact")
    assert result.exit_code == 0
    assert FakeEngine.asked == {
        "model": "tiny", "backend": "mlx", "dtype": "float32", "scorer": "exact",
        "text": "You have won!", "names": ["spam", "kind"], "mode": "isolated", "normalise": "sum",
    }  # fmt: skip
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["spam", "true", "0.400", "0.250", "false", "0.300"] in rows
    assert ["kind", '"[red]A[/red]"', "0.400", "0.250", '"b"', "0.300"] in rows
    assert "tiny, torch, float32: 1 forward pass, 1,234 tokens fed, 56 cached; score 0.50 s" in result.stdout
    assert "warning: the model would rather write prose" in result.stderr
    assert "library talks" not in result.stdout


def test_run_marks_the_fields_that_a_calibrator_decided(run: Any, preset: Path, tmp_path: Path) -> None:
    fitted = BatchCorrection().fit([[-1.0, -2.0], [-2.0, -1.0]])
    Calibration({"spam": (True, False)}, {"spam": fitted}).save(tmp_path / "c.json")
    result = run("run", preset, "--calibrator", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    ends = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines()[:3]}
    assert ends == {"field": "calibrated", "spam": "yes", "kind": "no"}
    assert "calibrated" not in run("run", preset).stdout


def test_run_json_is_one_object(run: Any, preset: Path) -> None:
    result = run("run", preset, "--json")
    out = json.loads(result.stdout)
    assert out["values"] == {"spam": True, "kind": "[red]A[/red]"}
    assert set(out) >= {"values", "fields", "stats", "warnings", "model", "backend", "dtype"}
    assert "ü" in result.stdout


def test_run_reads_text_and_schema(run: Any, preset: Path, tmp_path: Path) -> None:
    document = tmp_path / "mail.txt"
    document.write_bytes("\ufeffGrüße".encode())  # a byte-order mark is no text
    assert run("run", preset, "--text", document).exit_code == 0
    assert FakeEngine.asked["text"] == "Grüße"
    assert run("run", preset, "--text", "-", input="from stdin").exit_code == 0
    assert FakeEngine.asked["text"] == "from stdin"

    schema = tmp_path / "schema.json"
    for content, names in [
        ({"context": {"type": "boolean"}}, ["context"]),  # a preset's schema, even with such a field
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}}, ["a", "b"]),
        (PRESET, ["spam", "kind"]),
    ]:
        schema.write_text(json.dumps(content))
        result = run("run", "--text", document, "--schema", schema)
        assert result.exit_code == 0, result.output
        assert FakeEngine.asked["names"] == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "--text and --schema missing; name a preset"),
        (["run", "--text", "-"], "--schema missing"),
        (["run", "no_such_preset"], "no_such_preset"),
        (["run", "PRESET", "--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["run", "PRESET", "--text", "LATIN1"], "is not UTF-8 text (byte 1)"),
        (["run", "PRESET", "--schema", "BROKEN"], "line 1, column 2: not valid JSON"),
        (["run", "PRESET", "--schema", "LIST"], "list.json: "),
        (["run", "PRESET", "--model", "missing"], "model 'missing' is unknown; see pcdlab models"),
        (["report", "-p", "model"], "parameter 'model' is not key=value"),
        (["bench", "--json", "nowhere/out.json"], "--json nowhere/out.json: there is no such folder"),
    ],
)
def test_bad_input_is_one_line(
    run: Any, preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    files = {"LATIN1": b"a\xfc", "BROKEN": b"{]", "LIST": b"[1]"}
    for name, content in files.items():
        (tmp_path / f"{name.lower()}.json").write_bytes(content)
    bench_module(monkeypatch, [])
    places = {"PRESET": preset, **{name: tmp_path / f"{name.lower()}.json" for name in files}}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stderr


def test_ctrl_c_is_quiet(run: Any, preset: Path) -> None:
    result = run("run", preset, "--model", "interrupted")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        models.ModelSpec("tiny", "org/tiny", "Apache-2.0", 134_515_008, verified=("torch",)),
        models.ModelSpec("big", "org/big", "MIT", 1_500_000_000, "org/mlx", "org/gguf:Q8_0"),
    ]
    monkeypatch.setattr(models, "catalogue", lambda: specs)
    ready = {("tiny", "torch")}
    monkeypatch.setattr(models, "status", lambda spec, backend: "ready" if (spec.alias, backend) in ready else "later")


@pytest.mark.usefixtures("two_models")
def test_models(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run("models")
    assert listed.exit_code == 0
    lines = listed.stdout.splitlines()
    assert lines[1].split() == ["tiny", "135", "M", "Apache-2.0", "verified,", "ready", "listed", "-"]
    assert lines[2].split() == ["big", "1.5", "B", "MIT", "listed", "listed", "listed"]
    rows = json.loads(run("models", "--json").stdout)
    assert [row["alias"] for row in rows] == ["tiny", "big"]
    assert rows[0] == {
        "alias": "tiny", "licence": "Apache-2.0", "parameters": 134515008, "note": "",
        "backends": {
            "torch": {"source": "org/tiny", "verified": True, "status": "ready"},
            "mlx": {"source": "org/tiny", "verified": False, "status": "later"},
            "llamacpp": {"source": "", "verified": False, "status": "later"},
        },
    }  # fmt: skip
    assert rows[1]["backends"]["llamacpp"]["source"] == "org/gguf:Q8_0"
    monkeypatch.setattr(models, "fetch", lambda name, backend: Path("cache") / backend / name)
    assert run("models", "fetch", "big").stdout == f"{Path('cache') / 'torch' / 'big'}\n"
    assert run("models", "fetch", "big", "--backend", "mlx").stdout == f"{Path('cache') / 'mlx' / 'big'}\n"


def test_real_catalogue(run: Any) -> None:
    assert "smollm2-135m" in run("models").stdout
    assert len(json.loads(run("models", "--json").stdout)) == len(models.catalogue())


# --- report -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Replace `run_reports`; return what it is asked."""
    seen: dict[str, Any] = {}

    def fake(names: Any, parameters: Any, *, progress: Any, **options: Any) -> list[reports.Result]:
        seen.update(names=names, parameters=parameters, **options)
        if names == ["error"]:
            raise ReportError("nothing there")
        progress(reports.Progress("01_a", "unchanged"))
        for cell in range(3):
            progress(reports.Progress("02_b", "running", cell, 2))
        failure = Failure(2, 2, 1, "ValueError", "[bold]x" * 100, tmp_path / "02_b.failed.ipynb")
        progress(reports.Progress("02_b", "failed" if names else "done"))
        return [
            reports.Result("01_a", "unchanged", tmp_path / "01_a.ipynb"),
            reports.Result("02_b", "failed", tmp_path / "02_b.ipynb", 1.25, failure)
            if names
            else reports.Result("02_b", "done", tmp_path / "02_b.ipynb", 1.25),
        ]

    monkeypatch.setattr(reports, "run_reports", fake)
    monkeypatch.chdir(tmp_path)
    return seen


def test_report(run: Any, asked: dict[str, Any]) -> None:
    result = run("report")
    assert result.exit_code == 0
    assert asked == {"names": [], "parameters": {}, "jobs": 1, "fresh": False, "out": None}
    assert [line.split() for line in result.stdout.splitlines()[1:3]] == [
        ["01_a", "unchanged,", "kept"],
        ["02_b", "done", "1.2", "s"],
    ]
    assert "Read on in index.html" in result.stdout
    assert result.stderr.splitlines() == ["01_a: unchanged, kept", "02_b: running", "02_b: done"]


def test_report_failure(run: Any, asked: dict[str, Any]) -> None:
    result = run("report", "b", "1", "-p", "n=3", "-p", "model=x", "-j", "2", "--fresh", "--out", "there")
    assert result.exit_code == 1
    assert asked == {
        "names": ["b", "1"], "parameters": {"n": 3, "model": "x"}, "jobs": 2, "fresh": True, "out": Path("there")
    }  # fmt: skip
    assert "2 of 2, In [1]" in result.stdout
    assert "ValueError" in result.stdout
    assert "[bold]x" in result.stdout
    assert "02_b.failed.ipynb" in result.stdout


@pytest.mark.usefixtures("asked")
def test_report_error(run: Any) -> None:
    result = run("report", "error")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: nothing there\n")


@pytest.mark.usefixtures("asked")
def test_report_draws_bars_on_a_terminal(run: Any) -> None:
    result = run("report", "b", env={"FORCE_COLOR": "1"})
    assert "01_a \x1b[" in result.stderr
    assert "unchanged, kept" in result.stderr
    assert "02_b: failed" not in result.stderr


# --- bench ------------------------------------------------------------------------------------------------------------


def bench_module(monkeypatch: pytest.MonkeyPatch, reasons: list[str]) -> dict[str, Any]:
    """Put stand-ins in place of the modules that measure; returns what they were asked."""
    module: Any = types.ModuleType("pcdlab.bench")
    told: Any = types.ModuleType("pcdlab.bench_report")
    sweeps: Any = types.ModuleType("pcdlab.bench_sweeps")
    asked: dict[str, Any] = {}

    def run_bench(
        presets: Any, model: str, backend: str, runs: int, baselines: Any, report: Any, sweeps: Any
    ) -> dict[str, Any]:
        asked.update(presets=presets, model=model, backend=backend, runs=runs, baselines=list(baselines), sweeps=sweeps)
        report(f"{presets[0]} on {model}")
        return {"machine": {}, "rows": [{"engine": "tree-cold", "median_s": 0.5}] * runs}

    module.BASELINES = ("rows", "grammar")
    module.run_bench = run_bench
    told.print_bench = lambda measured, console: console.print(len(measured["rows"]))
    told.read_bench = lambda path: json.loads(path.read_text())
    told.compare = lambda old, new: {"reasons": reasons, "rows": [old, new]}
    told.print_comparison = lambda changes, console: console.print(f"{len(changes['rows'])} compared")
    sweeps.Sizes = lambda: "all sizes"
    for stand_in in (module, told, sweeps):
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return asked


def test_bench(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = bench_module(monkeypatch, [])
    result = run("bench", "p", "q", "--model", "m", "--runs", "3", "--json", tmp_path / "b.json")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "3\n", "p on m\n")
    assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == 3
    assert asked == {
        "presets": ["p", "q"], "model": "m", "backend": "torch", "runs": 3, "baselines": ["rows", "grammar"],
        "sweeps": None,
    }  # fmt: skip
    run("bench", "--sweeps")
    assert asked["sweeps"] == "all sizes"
    run("bench", "--backend", "mlx", "--baselines", "grammar")
    assert (asked["presets"], asked["backend"], asked["baselines"]) == (["fintech_fraud"], "mlx", ["grammar"])
    run("bench", "--baselines", "none")
    assert asked["baselines"] == []


@pytest.mark.parametrize(("reasons", "code"), [([], 0), (["cpu was 'a' and is 'b'"], 1)])
def test_bench_compares_with_an_earlier_file(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reasons: list[str], code: int
) -> None:
    bench_module(monkeypatch, reasons)
    old = tmp_path / "old.json"
    old.write_text('{"rows": []}')
    result = run("bench", "p", "--compare", old)
    assert (result.exit_code, result.stdout) == (code, "3\n2 compared\n")


# --- The program itself -----------------------------------------------------------------------------------------------


def program(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **{**pipes, **options})


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pandas', 'nbformat', 'papermill', 'nbconvert', 'matplotlib'}"
    process = program("-c", f"import pcdlab.cli, sys; print(sorted({heavy} & set(sys.modules)))")
    assert process.communicate() == ("[]\n", "")


def test_help_and_version() -> None:
    out, _ = program("-m", "pcdlab", "--help").communicate()
    assert all(command in out for command in ("run", "models", "report", "bench"))
    assert program("-m", "pcdlab", "--version").communicate()[0] == f"pcdlab {pcdlab.__version__}\n"


def test_reader_that_goes_away() -> None:
    process = program("-m", "pcdlab", "models")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert complaint == ""


@pytest.mark.skipif(os.name == "nt", reason="sends itself SIGINT")
def test_ctrl_c_ends_the_program() -> None:
    script = """
        import os, signal, sys, time
        from pcdlab import cli, presets
        presets.load_preset = lambda name: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9)
        sys.argv = ["pcdlab", "run", "x"]
        cli.main()
    """
    process = program("-c", textwrap.dedent(script))
    assert process.communicate() == ("", "")
    assert process.returncode == 130
