"""`pcdlab.notebooks`, `pcdlab.pages`, `pcdlab.reports`, and what is committed in notebooks/ and reports/."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import nbformat
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from pcdlab import notebooks, pages, reports
from pcdlab.errors import ParameterError, ReportError
from pcdlab.notebooks import find_notebooks, parameter_defaults, parse_parameters, select_notebooks, source_sha256
from pcdlab.reports import Progress, machine, run_reports

ROOT = Path(__file__).parents[1]
STEMS = [Path(f"notebooks/{stem}.ipynb") for stem in ("01_first_look", "02_token_tree", "10_calibration", "11_trees")]


def write(path: Path, *cells: str) -> None:
    """Write a notebook: cells that begin with # and a space are Markdown, the first code cell holds the parameters."""
    made = []
    for number, text in enumerate(cells):
        new = new_markdown_cell if text.startswith("# ") else new_code_cell
        made.append(new(textwrap.dedent(text), id=f"cell-{number}"))
    next(cell for cell in made if cell.cell_type == "code").metadata["tags"] = ["parameters"]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=made), path)


# --- Choosing notebooks and parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), ["01", "02", "10", "11"]),
        (("1",), ["01"]),
        (("01",), ["01"]),
        (("10_calibration.ipynb",), ["10"]),
        (("notebooks/10_calibration.ipynb",), ["10"]),
        (("CALIB",), ["10"]),
        (("trees", "look", "11"), ["01", "11"]),
        (("02_token_tree",), ["02"]),
    ],
)
def test_select(names: tuple[str, ...], expected: list[str]) -> None:
    assert [path.stem[:2] for path in select_notebooks(names, STEMS)] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tree", r"'tree' fits 02_token_tree, 11_trees; write more of it"),
        ("7", r"'7' fits no notebook; there are 01_first_look"),
        ("10_calibrtion", r"fits no notebook \(did you mean '10_calibration'\?\)"),
        ("", "fits no notebook"),
    ],
)
def test_select_refuses(name: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        select_notebooks([name], STEMS)


def test_find_lists_numbered_notebooks_only(tmp_path: Path) -> None:
    for name in ("02_b.ipynb", "01_a.ipynb", "draft.ipynb", "03_c.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert [path.name for path in find_notebooks(tmp_path)] == ["01_a.ipynb", "02_b.ipynb"]
    with pytest.raises(ReportError, match="no such folder"):
        find_notebooks(tmp_path / "none")


def test_parse_parameters() -> None:
    parsed = parse_parameters(["a=1", "b=1.5", "c=true", "d=None", 'e=["x", "y"]', "f=a=b", "g=", "h=NaN", "i=no"])
    assert parsed == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": None,
        "e": ["x", "y"],
        "f": "a=b",
        "g": "",
        "h": "NaN",
        "i": "no",
    }


@pytest.mark.parametrize("bad", [["model"], ["=x"], ["a b=1"], ["a=1", "a=2"]])
def test_parse_parameters_refuses(bad: list[str]) -> None:
    with pytest.raises(ParameterError, match="parameter"):
        parse_parameters(bad)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.integers() | st.booleans() | st.none()))
def test_json_values_parse_as_themselves(values: dict[str, int | bool | None]) -> None:
    assert parse_parameters(f"{key}={json.dumps(value)}" for key, value in values.items()) == values


def test_parameter_defaults() -> None:
    cell = new_code_cell("import os\na = 1  # how many\nb: str = 'x'\nc: int\nd = (1, 2)\ne = len(b)\nf = g = None")
    cell.metadata["tags"] = ["parameters"]
    defaults = parameter_defaults(new_notebook(cells=[new_code_cell("z = 1"), cell]))
    assert defaults == {"a": 1, "b": "x", "d": [1, 2], "e": "len(b)", "f": None, "g": None}
    assert parameter_defaults(new_notebook(cells=[new_code_cell("z = 1")])) == {}


@pytest.mark.parametrize(
    ("text", "title", "question"),
    [
        ("# A title\n\nWhat is\nasked?\n\nMore.", "A title", "What is asked?"),
        ("# A title #\n## Sub\n\n> Why | this?", "A title", "Why | this?"),
        ("No heading.", "01_x", "No heading."),
        ("# Only\n\n![figure](x.png)\n\n| a | b |", "Only", ""),
    ],
)
def test_title_and_question(tmp_path: Path, text: str, title: str, question: str) -> None:
    path = tmp_path / "01_x.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell(text)]), path)
    source = notebooks.read_source(path)
    assert (source.title, source.question) == (title, question)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nbformat": 3}', "{]", '{"nbformat": 4, "cells": [1]}'])
def test_not_a_notebook(tmp_path: Path, text: str) -> None:
    (tmp_path / "01_x.ipynb").write_text(text)
    with pytest.raises(ReportError, match=r"01_x\.ipynb: "):
        run_reports(notebooks_dir=tmp_path)


def test_hash_is_the_same_with_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\ny\n")
    (tmp_path / "b").write_bytes(b"x\r\ny\r\n")
    assert source_sha256(tmp_path / "a") == source_sha256(tmp_path / "b")


# --- What an executed notebook keeps ----------------------------------------------------------------------------------


def cleaned(*outputs: nbformat.NotebookNode, root: Path = Path("/home/me/checkout")) -> list[nbformat.NotebookNode]:
    cell = new_code_cell("1", outputs=list(outputs))
    cell.metadata.update(papermill={"start_time": "…"}, execution={"iopub.status.busy": "…"}, tags=[])
    notebook = new_notebook(cells=[cell], metadata={"papermill": {"input_path": "/home"}, "widgets": {"state": {}}})
    notebooks._clean(notebook, root)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not cell.metadata
    return notebook.cells[0].outputs


def test_paths_of_this_machine_go() -> None:
    text = "\n".join(
        [
            "/home/me/checkout/presets/a.json in /home/me/checkout",
            "/tmp/ipykernel_77/123.py:3: UserWarning: x",
            f"{Path.home()}/.cache/x",
            f"{sys.executable} {Path(nbformat.__file__)}",
            "https://example.org/home/me/checkout/x /home/me/checkouts",
        ]
    )
    (output,) = cleaned(new_output("stream", name="stdout", text=text))
    first, second, third, fourth, fifth = output.text.split("\n")
    assert first == "presets/a.json in ."
    assert second == "cell:3: UserWarning: x"
    assert third == "~/.cache/x"
    assert fourth == "python site-packages/nbformat/__init__.py"
    assert fifth == text.split("\n")[-1]


def test_outputs_of_all_kinds_are_cleaned() -> None:
    data = {"text/plain": "/home/me/checkout/a", "text/html": "<b>/home/me/checkout/a</b>", "image/png": "aGk="}
    shown, error = cleaned(
        new_output("display_data", data=data),
        new_output("error", ename="E", evalue="in /home/me/checkout/a", traceback=["\x1b[32m/home/me/checkout/a"]),
    )
    assert shown.data == {"text/plain": "a", "text/html": "<b>a</b>", "image/png": "aGk="}
    assert (error.evalue, error.traceback) == ("in a", ["\x1b[32ma"])


def test_progress_bars_and_widgets_go() -> None:
    outputs = cleaned(
        new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%"}),
        new_output("stream", name="stderr", text="\r 0%|   |\r 50"),
        new_output("stream", name="stderr", text="%|## |\r100%|###|\n"),
        new_output("stream", name="stdout", text="windows\r\n"),
        new_output("stream", name="stderr", text="more"),
    )
    assert [output.text for output in outputs] == ["100%|###|\n", "windows\n", "more"]


# --- Pages ------------------------------------------------------------------------------------------------------------


def external(html: str) -> list[str]:
    """List what a page would load: scripts of any kind, and addresses in places that load."""
    loads = re.findall(r"""(?:src|srcset|data|poster)\s*=\s*["']?(?!data:)[^"'\s>]+""", html)
    loads += re.findall(r"<link\b[^>]*>|<script\b[^>]*>|<iframe\b[^>]*>|@import[^;]*", html)
    return loads + re.findall(r"""url\(\s*["']?(?!data:)[^)]*\)""", html)


def test_report_page_stands_alone() -> None:
    markdown = (
        "# T\n\n$p(\\ell) = \\log x$ and $a < b$\n\n$$\\sum_k x_k$$\n\n\\begin{aligned} a &= b \\end{aligned}\n\n"
        "$\\nosuchcommand x$ costs \\$5\n\n```mermaid\ngraph\n```\n\n[a link](https://example.org)"
    )
    outputs = [
        new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"}),
        new_output("stream", name="stdout", text="<script>alert(1)</script>"),
    ]
    notebook = new_notebook(cells=[new_markdown_cell(markdown), new_code_cell("print('hi')", outputs=outputs)])
    html = pages.report_page(notebook, "A <title>", "01_x.ipynb")
    assert external(html) == []
    assert html.count("<math") == 4
    assert "<code>\\nosuchcommand x</code>" in html
    assert "<title>A &lt;title&gt;</title>" in html
    assert 'href="index.html"' in html
    assert 'href="01_x.ipynb"' in html
    assert "&lt;script&gt;alert" in html
    assert ">print<" in html  # inputs are shown
    assert "title" not in notebook.metadata  # the notebook itself is left alone


def entry(**changes: object) -> pages.Entry:
    usual = {"name": "01_x", "title": "T", "question": "Q?", "kind": "missing", "state": "not run yet", "files": {}}
    return pages.Entry(**{**usual, **changes})  # type: ignore[arg-type]


def test_index_page_escapes_and_stands_alone() -> None:
    entries = [
        entry(title="<b>1</b>", question="*Is* <script>x</script> it?", files={"page": "01_x.html"}, kind="current"),
        entry(name="02_y", seconds=200.0, model="m<1>"),
    ]
    html = pages.index_page(entries, {"n": "</p>"}, {"cpu": "C&U", "cores": 2, "memory_gib": 8})
    assert external(html) == []
    assert "<b>1</b>" not in html
    assert "<em>Is</em>" in html
    assert "C&amp;U" in html
    assert "m&lt;1&gt;" in html
    assert "3 min" in html
    assert "1 of 2 reports" in re.sub(r"\s+", " ", html)
    assert '<a href="01_x.html">' in html


def test_readme_lists_what_was_run() -> None:
    text = pages.readme([entry(question="a | b", files={"notebook": "01_x.ipynb"}, model="m"), entry(name="02_y")])
    assert "| [T](01_x.ipynb) | a \\| b | m |" in text
    assert "02_y" not in text


def test_machine() -> None:
    assert set(machine()) == {"cpu", "cores", "memory_gib", "system"}
    assert machine()["cores"] >= 1


# --- Running (each real run starts a kernel, about 3 s) ---------------------------------------------------------------

LOOK = (
    "# A look\n\nWhat is there?",
    "model = 'tiny'\nn = 2",
    """\
    import os, sys
    from pathlib import Path
    Path("seen.txt").write_text(f"{sys.executable} {os.environ.get('OMP_NUM_THREADS')} {model} {n}")
    print(Path("presets").absolute(), n)
    """,
)


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stand in for the package sources that reports depend on, so that editing pcdlab meanwhile changes nothing."""
    package = tmp_path_factory.mktemp("package") / "pcdlab"
    package.mkdir()
    (package / "reports.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "__file__", str(package / "reports.py"))
        yield package


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a checkout whose notebooks have all been run, two at once, while another "python3" kernel is installed."""
    root = tmp_path_factory.mktemp("check{out}")  # papermill would fill in the braces
    write(root / "notebooks/01_look.ipynb", *LOOK)
    write(
        root / "notebooks/02_fail.ipynb",
        "# F",
        "k = 1",
        "'fine'",
        "# x",
        "raise ValueError(f'wrong in {__file__}'[:5])",
    )
    write(root / "notebooks/03_dies.ipynb", "# D", "k = 1", "import os; os.kill(os.getpid(), 9)")
    spec = root / "kernels/kernels/python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    (root / "ipython/profile_default/startup").mkdir(parents=True)
    (root / "ipython/profile_default/startup/0.py").write_text("raise SystemExit('a startup file of the user')")
    events: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(root / "kernels"))
        patch.setenv("IPYTHONDIR", str(root / "ipython"))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        results = run_reports(notebooks_dir=root / "notebooks", jobs=2, progress=events.append)
    (root / "results.json").write_text(json.dumps([[r.name, r.status, bool(r.failure)] for r in results]))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def checkout(first: Path, tmp_path: Path) -> Path:
    """Copy the checkout, to be changed by one test."""
    shutil.copytree(first, tmp_path / "copy")
    return tmp_path / "copy"


def snapshot(folder: Path, pattern: str = "01_*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern) if path.is_file()}


def test_every_notebook_ran_in_spite_of_failures(first: Path) -> None:
    outcome = json.loads((first / "results.json").read_text())
    assert outcome == [["01_look", "done", False], ["02_fail", "failed", True], ["03_dies", "failed", True]]
    there = {path.name for path in (first / "reports").iterdir()} - {".running-lock"}
    indexes = {"README.md", "index.html", "manifest.json"}
    assert there == indexes | {"01_look.ipynb", "01_look.html", "02_fail.failed.ipynb", "03_dies.failed.ipynb"}
    failed = nbformat.read(first / "reports/02_fail.failed.ipynb", 4)
    assert [cell.outputs[0].data["text/plain"] for cell in failed.cells if cell.source == "'fine'"] == ["'fine'"]
    remembered = json.loads((first / "reports/manifest.json").read_text())["notebooks"]
    assert remembered["02_fail"]["failure"] == {
        "cell": 5, "cells": 5, "prompt": 3, "error": "NameError", "message": "name '__file__' is not defined"
    }  # fmt: skip
    assert (remembered["03_dies"]["failure"]["cell"], remembered["03_dies"]["failure"]["error"]) == (
        3,
        "DeadKernelError",
    )


def test_notebook_ran_here_with_its_share_of_the_cores(first: Path) -> None:
    seen = (first / "seen.txt").read_text()
    assert seen == f"{sys.executable} {max(1, machine()['cores'] // 2)} tiny 2"


def test_executed_notebook_says_what_it_was_made_from_and_nothing_of_the_machine(first: Path) -> None:
    text = (first / "reports/01_look.ipynb").read_text()
    stamp = json.loads(text)["metadata"]["pcdlab"]
    assert stamp["source_sha256"] == source_sha256(first / "notebooks/01_look.ipynb")
    assert stamp["parameters"] == {"model": "tiny", "n": 2}
    assert "presets 2" in text
    for private in (str(first), str(Path.home()), sys.prefix, "papermill", "start_time", "iopub"):
        assert private not in text
    nbformat.validate(json.loads(text))


def test_page_and_indexes(first: Path) -> None:
    for name in ("01_look.html", "index.html"):
        assert external((first / "reports" / name).read_text()) == []
    html = (first / "reports/index.html").read_text()
    assert "last run failed in cell 5: NameError" in html
    assert (first / "reports/README.md").read_text().count("| [") == 1
    remembered = json.loads((first / "reports/manifest.json").read_text())["notebooks"]["01_look"]
    assert remembered["status"] == "done"
    assert remembered["seconds"] > 0
    assert remembered["machine"] == machine()
    assert remembered["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_unchanged_is_kept(checkout: Path) -> None:
    before = snapshot(checkout / "reports", "*")
    events: list[Progress] = []
    (result,) = run_reports(["look"], notebooks_dir=checkout / "notebooks", progress=events.append)
    assert (result.status, result.seconds) == ("unchanged", 0)
    assert events == [Progress("01_look", "unchanged")]
    assert snapshot(checkout / "reports", "*") == before


def test_page_of_a_new_clone_is_made_without_a_run(checkout: Path) -> None:
    page = checkout / "reports/01_look.html"
    made = page.read_text()
    page.unlink()
    (checkout / "reports/manifest.json").write_text("{")  # damaged is as good as missing
    (result,) = run_reports(["1"], notebooks_dir=checkout / "notebooks")
    assert result.status == "unchanged"
    assert page.read_text() == made


def test_changed_preset_runs_again_and_failure_keeps_the_earlier_report(checkout: Path) -> None:
    folder, source = checkout / "reports", checkout / "notebooks/01_look.ipynb"
    before, text = snapshot(folder, "01_look.*"), source.read_bytes()
    write(source, *LOOK, "1 / 0")
    (result,) = run_reports(["1"], notebooks_dir=checkout / "notebooks")
    assert result.failure is not None
    assert (result.failure.cell, result.failure.error, result.failure.message) == (
        4,
        "ZeroDivisionError",
        "division by zero",
    )
    assert result.failure.saved == folder / "01_look.failed.ipynb"
    assert {name: data for name, data in snapshot(folder).items() if "failed" not in name} == before
    remembered = json.loads((folder / "manifest.json").read_text())["notebooks"]["01_look"]
    assert remembered["status"] == "failed"
    assert remembered["seconds"] > 0  # of the report that is still there

    source.write_bytes(text)  # the kept report is current again, but the last try failed: it is tried again
    (checkout / "presets").mkdir()
    (checkout / "presets/new.json").write_text("{}")
    (result,) = run_reports(["1"], notebooks_dir=checkout / "notebooks")
    assert result.status == "done"
    assert not result.report.with_name("01_look.failed.ipynb").exists()
    old, new = json.loads(before["01_look.ipynb"]), json.loads(result.report.read_text())
    assert old["metadata"]["pcdlab"]["inputs_sha256"] != new["metadata"]["pcdlab"]["inputs_sha256"]
    assert old["cells"] == new["cells"]


def test_fresh_runs_again(checkout: Path) -> None:
    (checkout / "seen.txt").unlink()
    (result,) = run_reports(["1"], notebooks_dir=checkout / "notebooks", fresh=True)
    assert result.status == "done"
    assert (checkout / "seen.txt").exists()


def test_parameters_go_to_a_folder_of_their_own(checkout: Path) -> None:
    before = snapshot(checkout / "reports", "*.*")
    (result,) = run_reports(["1"], {"model": "other/model", "n": 3}, notebooks_dir=checkout / "notebooks")
    assert result.report.parent.parent == checkout / "reports/custom"
    assert re.fullmatch(r"model-other-model_n-3-[0-9a-f]{6}", result.report.parent.name)
    assert snapshot(checkout / "reports", "*.*") == before
    executed = json.loads(result.report.read_text())
    assert executed["metadata"]["pcdlab"]["parameters"] == {"model": "other/model", "n": 3}
    assert executed["cells"][2]["id"] == "injected-parameters"
    assert "other/model 3" in (checkout / "seen.txt").read_text()
    (again,) = run_reports(["1"], {"n": 3, "model": "other/model"}, notebooks_dir=checkout / "notebooks")
    assert (again.status, again.report) == ("unchanged", result.report)


def test_bad_input_is_refused_before_anything_is_written(checkout: Path) -> None:
    home = checkout / "notebooks"
    shutil.rmtree(checkout / "reports")
    with pytest.raises(ParameterError, match=r"'modle' \(did you mean 'model'\?\); their parameters are k, model, n"):
        run_reports(parameters={"modle": 1}, notebooks_dir=home)
    with pytest.raises(ParameterError, match="'model'; their parameters are k"):
        run_reports(["2"], {"model": 1}, notebooks_dir=home)
    with pytest.raises(ParameterError, match="jobs is 0"):
        run_reports(jobs=0, notebooks_dir=home)
    with pytest.raises(ParameterError, match="would replace the sources"):
        run_reports(out=home, notebooks_dir=home)
    with pytest.raises(ReportError, match="no notebook is named"):
        run_reports(notebooks_dir=checkout)
    assert not (checkout / "reports").exists()


def test_report_is_older_than_a_changed_package_or_preset(checkout: Path, package: Path) -> None:
    before = reports._inputs_sha256(checkout)
    (package / "new.py").write_text("1")
    changed = reports._inputs_sha256(checkout)
    (package / "new.py").unlink()
    (checkout / "presets").mkdir()
    (checkout / "presets/new.json").write_text("{}")
    assert len({before, changed, reports._inputs_sha256(checkout)}) == 3


def test_two_runs_do_not_write_one_folder(checkout: Path) -> None:
    with filelock.FileLock(checkout / "reports/.running-lock"), pytest.raises(ReportError, match="another run"):
        run_reports(["1"], notebooks_dir=checkout / "notebooks")


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_run_leaves_earlier_reports_and_the_next_one_clears_up(checkout: Path) -> None:
    slow = "import os, time; from pathlib import Path\nPath('pid.txt').write_text(str(os.getpid()))\ntime.sleep(60)"
    write(checkout / "notebooks/01_look.ipynb", *LOOK, slow)
    folder = checkout / "reports"
    before = snapshot(folder, "*.*")
    script = checkout / "script.py"
    script.write_text(
        "from pcdlab.reports import run_reports\n"
        f"if __name__ == '__main__': run_reports(['1'], notebooks_dir={str(checkout / 'notebooks')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    wait_until(lambda: (checkout / "pid.txt").exists() and (checkout / "pid.txt").read_text() != "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    kernel = int((checkout / "pid.txt").read_text())
    wait_until(lambda: not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE)
    assert [path.name for path in folder.iterdir() if path.is_dir()] != []
    after = snapshot(folder, "*.*")
    assert {name: after[name] for name in before if name != "index.html"} == {
        name: data for name, data in before.items() if name != "index.html"
    }  # the index knew already that the report is older than its notebook

    write(checkout / "notebooks/01_look.ipynb", *LOOK)
    (result,) = run_reports(["1"], notebooks_dir=checkout / "notebooks")
    assert result.status == "unchanged"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    assert snapshot(folder, "*.*") == before


def wait_until(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


# --- What is committed ------------------------------------------------------------------------------------------------

COMMITTED = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXECUTED = [path for path in sorted((ROOT / "reports").glob("*.ipynb")) if ".failed" not in path.name]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebook(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem), "name it NN_name.ipynb"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code, "has no code"
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear its outputs"
    assert code[0].metadata.get("tags") == ["parameters"], "tag its first code cell `parameters`"
    source = notebooks.read_source(path)
    assert source.title != path.stem, "begin it with a heading"
    assert source.question, "say its question in the first paragraph"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_report_is_of_this_notebook(path: Path) -> None:
    report = ROOT / "reports" / path.name
    assert report.exists(), f"run it: pcdlab report {path.stem[:2]}"
    stamp = nbformat.read(report, 4).metadata.pcdlab
    assert stamp.source_sha256 == source_sha256(path), f"the notebook is newer: pcdlab report {path.stem[:2]}"
    assert stamp.parameters == notebooks.read_source(path).defaults, "commit the run with the notebook's own parameters"


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_committed_report(path: Path) -> None:
    assert (ROOT / "notebooks" / path.name).exists(), "its notebook is gone; remove it"
    assert path.stat().st_size < 1_500_000
    text = path.read_text(encoding="utf-8")
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "papermill" not in json.loads(text)["metadata"]
    assert not re.search(r"(?<![\w./-])(/home|/root|/Users|/tmp)/\w", text), "a path of the machine"


def test_committed_index() -> None:
    if not EXECUTED:
        pytest.skip("no report is committed yet")
    linked = re.findall(r"\]\(([^)]+\.ipynb)\)", (ROOT / "reports/README.md").read_text(encoding="utf-8"))
    assert linked == [path.name for path in EXECUTED]
