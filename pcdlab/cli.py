"""The command line: ``pcdlab run | models | check | report | bench | data | study | lint``.

Knows options, tables and exit codes; every command is a thin face of a module of the same concern. Refuses to know how
anything is done, and imports nothing heavy before a command needs it.

Exit codes: 0, 1 (a notebook or a check failed, lint warns), 2 (bad input: one ``error: …`` line on stderr), 130 (Ctrl-C). What a
command answers goes to stdout; progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pcdlab
from pcdlab.cli_lint import lint
from pcdlab.cli_study import data_app, study
from pcdlab.errors import ParameterError, PcdlabError, SchemaError

if TYPE_CHECKING:
    from pcdlab.backends.conformance import Check
    from pcdlab.reports import Progress, Result
    from pcdlab.result import Extraction
    from pcdlab.schema import Schema

__all__ = ["app", "main"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PRESET = "fintech_fraud"


class _Group(typer.core.TyperGroup):
    """Commands whose pcdlab errors are one line and whose Ctrl-C is quiet."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PcdlabError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    name="pcdlab",
    help="Parallel constrained decoding: fill a closed schema from one forward pass, and look into how.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
models_app = typer.Typer(
    name="models", help="List the known models, or fetch one.", invoke_without_command=True, no_args_is_help=False
)
app.add_typer(models_app)
app.add_typer(data_app)
app.command()(study)
app.command()(lint)


def main() -> None:
    """Run the command line; the entry point of the ``pcdlab`` script."""
    try:
        app(prog_name="pcdlab")
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has gone, as `head` does; nothing is left to say at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(wanted: bool) -> None:
    if wanted:
        print("pcdlab", pcdlab.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# --- run --------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    preset: Annotated[str | None, typer.Argument(help="A preset's name or file.", show_default=False)] = None,
    model: Annotated[str, typer.Option(help="Alias, local folder or Hugging Face id.")] = DEFAULT_MODEL,
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    scorer: Annotated[str, typer.Option(help="auto, marginal, exact, walk or hybrid.")] = "auto",
    normalise: Annotated[str, typer.Option(help="sum, length or unconditional.")] = "sum",
    mode: Annotated[str, typer.Option(help="isolated or joint.")] = "isolated",
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read this document, not the preset's; - is stdin.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fill this schema, not the preset's: fields as in a preset, a JSON Schema, or a preset.",
        ),
    ] = None,
    calibrator: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Decide by calibrated probabilities: a file of Calibration.save."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the extraction as one JSON object.")] = False,
) -> None:
    """Fill a schema from a document."""
    from pcdlab.presets import load_preset

    if preset is None and (text is None or schema is None):
        missing = " and ".join(name for name, value in (("--text", text), ("--schema", schema)) if value is None)
        raise ParameterError(f"{missing} missing; name a preset (such as spam_phishing) or give what is missing")
    if preset is not None:
        chosen = load_preset(preset)
        document, fields = chosen.context, chosen.schema
    if text is not None:
        document = _read_text(text)
    if schema is not None:
        fields = _read_schema(schema)
    with _only_answers_on_stdout(), _status(f"loading {model}") as say:
        from pcdlab.engine import Engine

        engine = Engine.load(model, backend=backend, dtype=dtype)
        say(f"reading {len(document):,} characters")
        # The engine checks the options.
        options: dict[str, Any] = {"mode": mode, "scorer": scorer, "normalise": normalise}
        if calibrator is not None:
            from pcdlab.calibrators import Calibration

            options["calibrator"] = Calibration.load(calibrator)
        out = engine.extract(document, fields, **options)
    if as_json:
        _print_json(out.to_dict())
    else:
        _print_extraction(out)
    for warning in out.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _read_text(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ParameterError(f"{name}: cannot be read ({error.strerror}); give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{name}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _read_schema(path: Path) -> Schema:
    """Read a schema from a file of its own, in any of its shapes, or from a preset."""
    from pcdlab.presets import load_preset
    from pcdlab.schema import Schema

    try:
        data = json.loads(_read_text(str(path)))
    except json.JSONDecodeError as error:
        where = f"{path}: line {error.lineno}, column {error.colno}"
        raise SchemaError(f"{where}: not valid JSON ({error.msg}); correct the file there") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number too long
        raise SchemaError(f"{path}: cannot be read as JSON ({error}); simplify the file") from error
    if isinstance(data, Mapping) and isinstance(data.get("context"), str):  # in a schema, every value is a mapping
        return load_preset(path).schema
    return Schema.of(data, source=str(path))


def _print_extraction(out: Extraction) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("field", "value"):
        table.add_column(heading, overflow="fold")
    for heading in ("probability", "candidate mass"):
        table.add_column(heading, justify="right")
    table.add_column("next best", overflow="fold")
    calibrated = any(field.calibrated for field in out.fields.values())
    if calibrated:
        table.add_column("calibrated")
    for field in out.fields.values():
        others = [(label, share) for label, share in field.alternatives if _json(label) != _json(field.value)]
        table.add_row(
            Text(field.name),  # Text: brackets in names and labels are no markup
            Text(_json(field.value), style="bold"),
            Text(f"{field.probability:.3f}", style="yellow" if field.probability < 0.5 else ""),
            "" if field.candidate_mass is None else f"{field.candidate_mass:.3f}",
            Text(f"{_json(others[0][0])}  {others[0][1]:.3f}" if others else "", style="dim"),
            *(["yes" if field.calibrated else "no"] if calibrated else []),
        )
    stats = out.stats
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in stats.seconds.items())
    console = _console()
    console.print(table)
    console.print(
        f"\n{out.model}, {out.backend}, {out.dtype}: {_count(stats.forward_passes, 'forward pass', 'forward passes')}, "
        f"{stats.tokens_fed:,} tokens fed, {stats.cached_tokens:,} cached; {phases}",
        style="dim",
        markup=False,
    )


# --- models -----------------------------------------------------------------------------------------------------------


@models_app.callback()
def _list_models(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the known models, or fetch one."""
    if ctx.invoked_subcommand is not None:
        return
    from pcdlab import models

    rows: list[dict[str, Any]] = [
        {
            "alias": spec.alias,
            "licence": spec.licence,
            "parameters": spec.parameters,
            "note": spec.note,
            "backends": {
                backend: {
                    "source": models.checkpoint(spec, backend),
                    "verified": backend in spec.verified,
                    "status": models.status(spec, backend),
                }
                for backend in models.BACKENDS
            },
        }
        for spec in models.catalogue()
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("alias", "parameters", "licence", *models.BACKENDS):
        table.add_column(heading, overflow="fold", justify="right" if heading == "parameters" else "left")
    for row in rows:
        cells = [_model_cell(entry) for entry in row["backends"].values()]
        table.add_row(Text(row["alias"], style="bold"), _size(row["parameters"]), row["licence"], *cells)
    _console().print(table)
    print(
        "\nverified: `pcdlab check` was run on this very model under that backend, and passed. listed: its id is written down;\n"
        "nobody ran it here. `pcdlab models fetch ALIAS` gets one ahead of time, `--json` also shows sources and notes."
    )


def _model_cell(entry: Mapping[str, Any]) -> Text:
    if not entry["source"]:
        return Text("-", style="dim")
    words = ["verified" if entry["verified"] else "listed", *(["ready"] if entry["status"] == "ready" else [])]
    return Text(", ".join(words), style="green" if entry["verified"] else "")


@models_app.command("fetch")
def fetch_model(
    alias: Annotated[str, typer.Argument(help="Alias or Hugging Face id.")],
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
) -> None:
    """Get a model's files, so that it works offline from then on."""
    from pcdlab import models

    with _only_answers_on_stdout(), _status(f"getting {alias}"):
        path = models.fetch(alias, backend)
    print(path)


# --- check ------------------------------------------------------------------------------------------------------------


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Alias, local folder or Hugging Face id.")] = DEFAULT_MODEL,
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Prove a model: compute the same numbers in two ways, and fill a schema with colliding labels.

    Runs about 3,000 tokens in some 140 short passes, which takes longer than reading as many at once: about 20 seconds with the
    embedded model on two CPU cores. Ends with exit code 1 if a check fails.
    """

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with _only_answers_on_stdout():
        say(f"loading {model}")
        from pcdlab import models
        from pcdlab.check import check_model

        loaded, codec = models.load(model, backend, dtype)
        start = time.perf_counter()
        found = check_model(loaded, codec, say)
        seconds = time.perf_counter() - start
    about = {"model": loaded.model, "backend": loaded.name, "dtype": loaded.dtype, "layout": loaded.layout}
    passed = all(item.passed is not False for item in found)
    if as_json:
        checks = [item.to_dict() for item in found]
        _print_json({**about, "passed": passed, "seconds": round(seconds, 1), "checks": checks})
    else:
        _print_checks(found)
        why = getattr(loaded, "layout_reason", "")
        ran = [item.passed for item in found if item.passed is not None]
        _console().print(
            f"\n{loaded.model}, {loaded.name}, {loaded.dtype}, {loaded.layout} layout{f' ({why})' if why else ''}: "
            f"{sum(ran)} of {_count(len(ran), 'check', 'checks')} passed in {seconds:.0f} s",
            style="dim",
            markup=False,
        )
    if not passed:
        raise typer.Exit(1)


def _print_checks(found: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("largest difference", "tolerance"):
        table.add_column(heading, justify="right")
    for heading in ("compared", "note"):
        table.add_column(heading, overflow="fold")
    words = {
        True: Text("PASS", style="green"),
        False: Text("FAIL", style="bold red"),
        None: Text("not run", style="dim"),
    }
    for item in found:
        ran = item.passed is not None
        table.add_row(
            item.name,
            words[item.passed],
            f"{item.largest:.1e}" if ran and item.largest else "0" if ran else "",
            f"{item.tolerance:g}" if ran else "",
            item.compared,
            Text(item.note, style="dim"),
        )
    _console().print(table)


# --- report -----------------------------------------------------------------------------------------------------------


@app.command()
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Number, name or part of a name; none means all.", show_default=False),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="Change a notebook parameter; repeatable."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="How many notebooks to run at once.")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run also what has not changed.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the reports here.", show_default=False)] = None,
) -> None:
    """Run notebooks into reports.

    Notebooks that have not changed since their last report are not run again. With -p, the reports go to a folder of
    their own below reports/custom/ and those with the notebooks' own parameters stay.
    """
    from pcdlab.notebooks import parse_parameters
    from pcdlab.reports import run_reports

    parameters = parse_parameters(parameter or [])
    with _report_progress() as progress:
        results = run_reports(names or [], parameters, jobs=jobs, fresh=fresh, out=out, progress=progress)
    _print_results(results)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)


@contextlib.contextmanager
def _report_progress() -> Iterator[Callable[[Progress], None]]:
    """Draw a bar per running notebook on a terminal; elsewhere print a line per start and end."""
    console = Console(stderr=True, highlight=False)
    words = {"running": "running", "done": "done", "unchanged": "unchanged, kept", "failed": "failed"}
    if not console.is_terminal:

        def print_line(event: Progress) -> None:
            if event.state != "running" or event.cell == 0:
                print(f"{event.name}: {words[event.state]}", file=sys.stderr, flush=True)

        yield print_line
        return

    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(event: Progress) -> None:
            state = f"cell {event.cell} of {event.cells}" if event.state == "running" else words[event.state]
            if event.name not in tasks:
                tasks[event.name] = bars.add_task(event.name, total=event.cells or 1, state=state)
            task = tasks[event.name]
            if event.state == "running":
                bars.update(task, completed=max(event.cell - 1, 0), state=state)
            elif event.state == "failed":
                bars.update(task, state=state)  # the bar stays where it stopped
                bars.stop_task(task)
            else:
                bars.update(task, total=1, completed=1, state=state)
                bars.stop_task(task)

        yield draw


def _print_results(results: list[Result]) -> None:
    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("notebook", "result", "time"):
        table.add_column(heading, justify="right" if heading == "time" else "left", overflow="fold")
    styles = {"done": "green", "unchanged": "dim", "failed": "red"}
    for result in results:
        kept = result.status == "unchanged"
        word = "unchanged, kept" if kept else result.status
        table.add_row(result.name, Text(word, style=styles[result.status]), "" if kept else f"{result.seconds:.1f} s")
    console.print(table)
    failed = [(result.name, result.failure) for result in results if result.failure is not None]
    if failed:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("failed", "in cell", "error", "message", "saved as"):
            table.add_column(heading, overflow="fold")
        for name, failure in failed:
            cell = f"{failure.cell} of {failure.cells}" + (f", In [{failure.prompt}]" if failure.prompt else "")
            message = failure.message if len(failure.message) <= 300 else failure.message[:299] + "…"
            saved = _shown(failure.saved) if failure.saved else ""
            table.add_row(*map(Text, (name, cell, failure.error, message, saved)))
        console.print()
        console.print(table)
    if results:
        print(f"\nRead on in {_shown(results[0].report.parent / 'index.html')}")


def _shown(path: Path) -> str:
    """Shorten a path below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


# --- bench ------------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    presets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET]...", help=f"Presets' names or files. [default: {DEFAULT_PRESET}]"),
    ] = None,
    model: Annotated[str, typer.Option(help="Alias, local folder or Hugging Face id; GGUF file.")] = DEFAULT_MODEL,
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
    runs: Annotated[int, typer.Option(min=1, help="How often to time each row; slow ones less often.")] = 3,
    baselines: Annotated[
        str, typer.Option(metavar="NAMES", help="What to run beside the engine, with commas between; all or none.")
    ] = "all",
    sweeps: Annotated[
        bool, typer.Option("--sweeps", help="Also measure how cost grows with fields, labels, documents; minutes more.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the measurements to this file.")
    ] = None,
    compare_file: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Show what changed since this earlier --json file.")
    ] = None,
) -> None:
    """Time the engine and what people would run instead on this machine.

    With `--compare`, exits with 1 where the earlier file is of another machine, model or backend.
    """
    from pcdlab.bench import BASELINES, run_bench
    from pcdlab.bench_report import compare, print_bench, print_comparison, read_bench
    from pcdlab.bench_sweeps import Sizes

    if json_file is not None and json_file.is_dir():
        raise ParameterError(f"--json {json_file}: is a folder; name a file")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ParameterError(f"--json {json_file}: there is no such folder; name a file in one that exists")
    earlier = read_bench(compare_file) if compare_file is not None else None  # before minutes of measuring
    wanted = {"all": BASELINES, "none": ()}.get(baselines) or [name for name in baselines.split(",") if name != "none"]
    with _only_answers_on_stdout(), _steps() as say:
        far = Sizes() if sweeps else None
        measured = run_bench(presets or [DEFAULT_PRESET], model, backend, runs, wanted, say, far)
    if json_file is not None:
        json_file.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    print_bench(measured, _console())
    if earlier is not None:
        changes = compare(earlier, measured)
        print_comparison(changes, _console())
        if changes["reasons"]:
            raise typer.Exit(1)


# --- Shared -----------------------------------------------------------------------------------------------------------


def _console() -> Console:
    """Give a console on stdout; into a file or pipe it does not fold lines at a terminal's width."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if narrow else 200)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _print_json(value: Any) -> None:
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, indent=2))


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(parameters: Any) -> str:
    """Write a number of parameters as people do; leave anything else as it is."""
    if not isinstance(parameters, int):
        return str(parameters)
    return f"{parameters / 1e9:.1f} B" if parameters >= 999_500_000 else f"{parameters / 1e6:.0f} M"


@contextlib.contextmanager
def _only_answers_on_stdout() -> Iterator[None]:
    """Send to stderr whatever a library prints meanwhile, so that stdout stays one answer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr, if that is a terminal, what is going on."""
    with Console(stderr=True, highlight=False).status(text) as status:
        yield status.update


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Say on stderr which step of something long is being done and for how long: a bar there, plain lines in a file."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda line: progress.update(task, description=line)
