"""A folder of reports: which notebooks to run, several at once, and what is kept of them.

Knows the files of a reports folder. Running one notebook is `pcdlab.notebooks`, what a page looks like `pcdlab.pages`.
Refuses to know what a notebook computes, and the command line.

A reports folder holds, for every notebook ``NN_name.ipynb``::

    NN_name.ipynb           the executed notebook, without machine paths and timings; committed
    NN_name.html            the same as one page that needs no other file and no network
    NN_name.failed.ipynb    the last try, if it failed; what an earlier success left stays beside it
    README.md               index of the executed notebooks, for a code host; committed
    bench*.json             what ``pcdlab bench --json`` measured, for notebooks to draw from; kept as it is; committed
    index.html              index with state, duration and model, to start reading from
    manifest.json           per notebook: parameters, versions, machine, duration
    custom/NAME-…/          the same again, for a run with other parameters than the notebooks' own

An executed notebook carries, as ``pcdlab`` in its metadata, the SHA-256 of its source notebook, the SHA-256 of what
else it was made from (the package, the presets, and files its parameters name) and its parameters. When all three still hold,
it is not run again.

Notebooks run in the interpreter that runs this code, with the folder above the notebooks folder as working directory
(so ``presets/…`` works) and without the user's IPython profile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from pcdlab import pages
from pcdlab.errors import ParameterError, ReportError
from pcdlab.notebooks import (
    Failure,
    Source,
    execute,
    find_notebooks,
    read_notebook,
    read_source,
    select_notebooks,
    source_sha256,
    write_notebook,
)
from pcdlab.schema import did_you_mean

__all__ = ["Progress", "Result", "machine", "run_reports"]

_DISTRIBUTIONS = ["pcdlab", "torch", "transformers", "tokenizers", "numpy", "pandas", "scikit-learn", "matplotlib"]
_TEMPORARY = ".running-"  # begins the name of everything a run keeps in a reports folder while it works


# --- What a run says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Where one notebook stands, as told to the `progress` callback of `run_reports`.

    Parameters
    ----------
    name : str
        The notebook's stem, ``NN_name``.
    state : {"running", "done", "unchanged", "failed"}
        What it is doing or how it ended.
    cell, cells : int
        The number of the cell that runs now, from 1 (0 before the first), and of how many.
    """

    name: str
    state: Literal["running", "done", "unchanged", "failed"]
    cell: int = 0
    cells: int = 0


@dataclass(frozen=True)
class Result:
    """How one notebook of a run ended.

    Parameters
    ----------
    name : str
        The notebook's stem, ``NN_name``.
    status : {"done", "unchanged", "failed"}
        "unchanged" was not run: its report was current.
    report : pathlib.Path
        Where its executed notebook is, or would be.
    seconds : float
        Wall time of the execution; 0 for "unchanged".
    failure : Failure or None
        For "failed".
    """

    name: str
    status: Literal["done", "unchanged", "failed"]
    report: Path
    seconds: float = 0.0
    failure: Failure | None = None


# --- Running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What a worker process needs to make one report."""

    source: Source
    parameters: dict[str, Any]  # to inject
    stamp: dict[str, Any]  # the `pcdlab` metadata of the executed notebook
    root: Path  # working directory of the notebook
    folder: Path  # temporary, for what the worker writes
    threads: int | None  # for the kernel's matrix libraries; None leaves them alone


def run_reports(
    names: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    *,
    jobs: int = 1,
    fresh: bool = False,
    out: str | os.PathLike[str] | None = None,
    notebooks_dir: str | os.PathLike[str] | None = None,
    reports_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] = lambda event: None,
) -> list[Result]:
    """Run notebooks and write their reports and the indexes.

    Each report appears whole or not at all: work goes on in a temporary folder beside, whose files then take their
    places. A failing notebook does not stop the others. A current report is kept and its notebook not run.

    Parameters
    ----------
    names : sequence of str
        Which notebooks, as for `select_notebooks`; none means all.
    parameters : mapping of str to object, optional
        Values in place of the notebooks' own. A notebook gets those its parameters cell has.
    jobs : int, default 1
        How many notebooks to run at once, each in processes of its own. The cores are split among them through
        ``OMP_NUM_THREADS``, unless that is set already.
    fresh : bool, default False
        Run also what has not changed.
    out : path-like, optional
        The reports folder to write. Default: `reports_dir`, or with `parameters` a folder below its ``custom/``, so
        that the reports with the notebooks' own parameters stay.
    notebooks_dir : path-like, optional
        As for `find_notebooks`. The notebooks run in the folder above it.
    reports_dir : path-like, optional
        Default: ``reports/`` beside the notebooks folder.
    progress : callable, optional
        Gets a `Progress` at every cell.

    Returns
    -------
    list of Result
        One per selected notebook, in order.

    Raises
    ------
    ParameterError
        If a name fits no notebook, no selected notebook has one of the parameters, or `jobs` is below 1.
    ReportError
        If there is no notebook, one cannot be read, or another run is writing the same folder.
    """
    if jobs < 1:
        raise ParameterError(f"jobs is {jobs}; must be at least 1")
    notebooks = [path.absolute() for path in find_notebooks(notebooks_dir)]
    if not notebooks:
        raise ReportError(f"{notebooks_dir or 'notebooks'}: no notebook is named NN_name.ipynb; add one")
    home = notebooks[0].parent
    sources = [read_source(path) for path in notebooks]
    chosen = {path.stem for path in select_notebooks(names, notebooks)}
    selected = [source for source in sources if source.name in chosen]
    given = dict(parameters or {})
    _check_known(given, selected)
    reports = Path(reports_dir).absolute() if reports_dir is not None else home.parent / "reports"
    usual = reports / "custom" / _slug(given) if given else reports
    folder = Path(out).absolute() if out is not None else usual
    if folder.resolve() == home.resolve():
        raise ParameterError(f"out is {folder}, the notebooks folder; name another, reports would replace the sources")

    inputs = _inputs_sha256(home.parent)
    stamps = {source.name: _stamp(source, given, inputs, home.parent) for source in sources}
    with _reserved(folder) as temporary:
        results: dict[str, Result] = {}
        todo: list[Source] = []
        for source in selected:
            if fresh or not _is_current(folder, source.name, stamps[source.name]):
                todo.append(source)
                continue
            if not (folder / f"{source.name}.html").exists():  # a new clone has the executed notebook only
                notebook = read_notebook(folder / f"{source.name}.ipynb")
                page = pages.report_page(notebook, source.title, f"{source.name}.ipynb")
                _write_whole(folder / f"{source.name}.html", page)
            results[source.name] = Result(source.name, "unchanged", folder / f"{source.name}.ipynb")
            progress(Progress(source.name, "unchanged"))
        limit = min(jobs, max(len(todo), 1))
        threads = max(1, _cores() // limit) if limit > 1 and "OMP_NUM_THREADS" not in os.environ else None
        work = [
            _Job(source, _meant_for(source, given), stamps[source.name], home.parent, temporary, threads)
            for source in todo
        ]
        _write_index(folder, sources, stamps, given)
        # closing(): on Ctrl-C the workers end before their folder goes
        with contextlib.closing(_work_through(work, limit, progress)) as ends:
            for name, failure, seconds in ends:
                results[name] = _settle(folder, temporary, name, failure, seconds)
                _remember(folder, results[name], stamps[name])
                _write_index(folder, sources, stamps, given)
                progress(Progress(name, results[name].status))
    return [results[source.name] for source in selected]


def _check_known(given: Mapping[str, Any], selected: Sequence[Source]) -> None:
    known = sorted({key for source in selected for key in source.defaults})
    for key in given:
        if key not in known:
            raise ParameterError(
                f"no selected notebook has a parameter {key!r}{did_you_mean(key, known)}; "
                f"their parameters are {', '.join(known) or 'none'}"
            )


def _meant_for(source: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in source.defaults}


def _slug(given: Mapping[str, Any]) -> str:
    """Name a folder after parameters: readable, and different for different parameters."""
    text = "_".join(f"{key}-{value}" for key, value in sorted(given.items()))
    digest = hashlib.sha256(json.dumps(given, sort_keys=True, default=repr).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', text)[:60].strip('-.')}-{digest}"


def _inputs_sha256(root: Path) -> str:
    """Hash what every notebook is made from: the sources of this package and the presets beside the notebooks."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for base, pattern in ((package.parent, f"{package.name}/**/*.py"), (root, "presets/**/*.json")):
        for path in sorted(base.glob(pattern)):
            digest.update(path.relative_to(base).as_posix().encode() + b"\0")
            digest.update(source_sha256(path).encode())
    return digest.hexdigest()


def _stamp(source: Source, given: Mapping[str, Any], inputs: str, root: Path) -> dict[str, Any]:
    effective = {**source.defaults, **_meant_for(source, given)}
    named = [root / value for value in effective.values() if isinstance(value, str) and value.endswith(".json")]
    hashes = [source_sha256(path) for path in named if path.is_file()]
    if hashes:
        inputs = hashlib.sha256("".join([inputs, *hashes]).encode()).hexdigest()
    as_json = json.loads(json.dumps(effective, default=repr))  # as it reads back from a notebook's metadata
    return {"inputs_sha256": inputs, "parameters": as_json, "source_sha256": source.sha256}


def _is_current(folder: Path, name: str, stamp: Mapping[str, Any]) -> bool:
    """Tell whether a report is what a run would give; one whose last try failed is tried again."""
    return _stamp_of(folder / f"{name}.ipynb") == stamp and not (folder / f"{name}.failed.ipynb").exists()


def _stamp_of(path: Path) -> Mapping[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"].get("pcdlab")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or damaged: as good as never run


@contextlib.contextmanager
def _reserved(folder: Path) -> Iterator[Path]:
    """Reserve a reports folder for one run, clear what a killed one left, and lend a temporary folder in it."""
    import filelock

    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{_TEMPORARY}lock")  # the system frees it when its process ends in any way
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ReportError(f"{folder}: another run is writing there; wait for its end or name another folder") from None
    try:
        for left in folder.glob(f"{_TEMPORARY}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            elif left != Path(lock.lock_file):
                left.unlink()
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        lock.release()


def _work_through(
    work: Sequence[_Job], limit: int, progress: Callable[[Progress], None]
) -> Generator[tuple[str, Failure | None, float]]:
    """Run jobs, `limit` at a time, each in a process of its own; yield (name, failure or None, seconds) as they end."""
    context = multiprocessing.get_context("spawn")
    waiting = list(work)
    running: dict[Any, tuple[_Job, BaseProcess, float]] = {}  # by the end of the pipe that the worker talks into
    cell_of: dict[str, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                job = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                started: BaseProcess = context.Process(target=_worker, args=(job, theirs))
                running[ours] = (job, started, time.monotonic())
                progress(Progress(job.source.name, "running", 0, job.source.cells))
                started.start()
                theirs.close()  # so that the end of the process is the end of the pipe
            ready: list[Any] = wait(list(running))
            for pipe in ready:
                job, process, since = running[pipe]
                try:
                    message = pipe.recv()
                except EOFError:  # the process was killed, or could not even start
                    process.join()
                    failure = _died(job, cell_of.get(job.source.name, 0), process.exitcode)
                    message = (failure, time.monotonic() - since)
                if isinstance(message, Progress):
                    cell_of[message.name] = message.cell
                    progress(message)
                    continue
                del running[pipe]
                process.join()
                yield job.source.name, *message
    finally:
        for _, process, _ in running.values():
            if process.pid is not None:
                process.terminate()  # its kernel notices and ends within a second
                process.join()


def _died(job: _Job, cell: int, exitcode: int | None) -> Failure:
    log = job.folder / f"{job.source.name}.log"
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    message = f"the process that ran the notebook ended with code {exitcode}" + (f": {said[-1]}" if said else "")
    return Failure(cell, job.source.cells, None, "ReportError", message)


def _settle(folder: Path, temporary: Path, name: str, failure: Failure | None, seconds: float) -> Result:
    """Put what a worker wrote into place. The executed notebook comes last: it is what says the report is current."""
    report, failed = folder / f"{name}.ipynb", folder / f"{name}.failed.ipynb"
    if failure is None:
        for suffix in (".html", ".ipynb"):
            os.replace(temporary / f"{name}{suffix}", folder / f"{name}{suffix}")
        failed.unlink(missing_ok=True)
        return Result(name, "done", report, seconds)
    if (temporary / failed.name).exists():
        os.replace(temporary / failed.name, failed)
        failure = dataclasses.replace(failure, saved=failed)
    return Result(name, "failed", report, seconds, failure)


# --- In a worker process ----------------------------------------------------------------------------------------------


def _worker(job: _Job, connection: Connection) -> None:
    """Make one report in ``job.folder``; send a `Progress` per cell, then (failure or None, seconds)."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(job.folder / f"{job.source.name}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)  # papermill, nbconvert and the kernel may talk; the terminal is the parent's
        os.dup2(log.fileno(), 2)
    # A report depends on nobody's IPython profile and needs no writable home.
    os.environ["IPYTHONDIR"] = str(job.folder / "ipython")
    os.environ["JUPYTER_RUNTIME_DIR"] = str(job.folder / "jupyter")
    if job.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)
    connection.send(_make(job, connection))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)  # at once: nobody is left to read the rest


def _make(job: _Job, connection: Connection) -> tuple[Failure | None, float]:
    """Run the notebook of a job and write what came out to ``job.folder``."""
    name, cells = job.source.name, job.source.cells
    notebook, failure, seconds = execute(
        job.source,
        job.parameters,
        root=job.root,
        scratch=job.folder,
        on_cell=lambda number: connection.send(Progress(name, "running", number, cells)),
    )
    if notebook is not None:
        notebook.metadata["pcdlab"] = job.stamp
        if failure is None:
            page = pages.report_page(notebook, job.source.title, f"{name}.ipynb")
            (job.folder / f"{name}.html").write_text(page, encoding="utf-8")
        write_notebook(notebook, job.folder / f"{name}{'.failed' if failure else ''}.ipynb")
    return failure, seconds


# --- What a reports folder remembers ----------------------------------------------------------------------------------


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return manifest if isinstance(manifest["notebooks"], dict) else {"notebooks": {}}
    except (OSError, ValueError, KeyError, TypeError):
        return {"notebooks": {}}


def _remember(folder: Path, result: Result, stamp: Mapping[str, Any]) -> None:
    """Put a result into the manifest. A failure is added to what is known of the report that stays."""
    manifest = _manifest(folder)
    if result.failure is None:
        entry = {
            **stamp,
            "status": result.status,
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(result.seconds, 1),
            "machine": machine(),
            "versions": _versions(),
        }
    else:
        failure = {key: value for key, value in dataclasses.asdict(result.failure).items() if key != "saved"}
        entry = {**manifest["notebooks"].get(result.name, {}), "status": "failed", "failure": failure}
    manifest["notebooks"] = dict(sorted({**manifest["notebooks"], result.name: entry}.items()))
    _write_whole(folder / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def _write_index(
    folder: Path, sources: Sequence[Source], stamps: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> None:
    """Write index.html over all notebooks, and README.md over those that have been run."""
    known = _manifest(folder)["notebooks"]
    entries = [_entry(folder, source, stamps[source.name], known.get(source.name, {})) for source in sources]
    last: dict[str, Any] = max(known.values(), key=lambda entry: entry.get("finished", ""), default={})
    _write_whole(folder / "index.html", pages.index_page(entries, given, last.get("machine")))
    _write_whole(folder / "README.md", pages.readme(entries))


def _entry(folder: Path, source: Source, stamp: Mapping[str, Any], remembered: Mapping[str, Any]) -> pages.Entry:
    files = {
        "page": f"{source.name}.html",
        "notebook": f"{source.name}.ipynb",
        "failed run": f"{source.name}.failed.ipynb",
    }
    there = {label: file for label, file in files.items() if (folder / file).exists()}
    found = _stamp_of(folder / files["notebook"])
    kind: Literal["current", "older", "failed", "missing"]
    if "failed run" in there:
        failure = remembered.get("failure")
        kind, state = "failed", "last run failed" + (" in cell {cell}: {error}".format(**failure) if failure else "")
    elif found is None:
        kind, state = "missing", "not run yet"
    elif found == stamp:
        kind, state = "current", "up to date"
    else:
        kind, state = "older", "older than its sources"
    return pages.Entry(
        source.name,
        source.title,
        source.question,
        kind,
        state,
        there,
        model=str((found or stamp)["parameters"].get("model", "")),
        seconds=remembered.get("seconds") if found else None,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Describe the machine this runs on, to stand next to a timing.

    Returns
    -------
    dict
        ``cpu`` (the processor's name), ``cores`` (logical ones this process may use), ``memory_gib``, ``system``.
    """
    import psutil

    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cores": _cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
