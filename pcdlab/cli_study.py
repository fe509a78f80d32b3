"""The commands ``pcdlab data`` and ``pcdlab study``: labelled banks, and an engine's decisions on them.

A thin face of :mod:`pcdlab.banks`, :mod:`pcdlab.bank_sources` and :mod:`pcdlab.studies.runs`; :mod:`pcdlab.cli` hangs it into
the command line.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pcdlab.errors import ParameterError

if TYPE_CHECKING:
    from pcdlab.banks import Bank
    from pcdlab.studies.runs import Run

__all__ = ["data_app", "study"]

data_app = typer.Typer(name="data", help="List, fetch, import and show labelled banks.", no_args_is_help=True)

Event = Annotated[str | None, typer.Option(help="devoxx: the conference, as in its CFP address; dvbe26 if not given.")]
Count = Annotated[int | None, typer.Option(min=1, help="devoxx: how many talks; 100 if not given.")]
Split = Annotated[str | None, typer.Option(help="banking77, clinc150: test, train or val; test if not given.")]
Domain = Annotated[str | None, typer.Option(help="nlupp: banking or hotels; banking if not given.")]
Name = Annotated[str | None, typer.Option(help="The bank's name, if not the source's.")]
Replace = Annotated[bool, typer.Option("--replace", help="Write it in the place of a bank of the same name.")]


@data_app.command("list")
def list_data(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the banks that are here, and those that can be fetched."""
    from pcdlab.bank_sources import SOURCES
    from pcdlab.banks import list_banks, load_bank
    from pcdlab.cli import _console, _print_json

    banks = [load_bank(folder) for folder in list_banks()]
    rows = [
        {
            "bank": bank.id,
            "documents": len(bank),
            "fields": len(bank.schema),
            "synthetic": bank.synthetic,
            "licence": bank.licence,
            "title": bank.title,
        }
        for bank in banks
    ]
    missing = [kind for kind in SOURCES if kind not in {bank.id for bank in banks}]
    if as_json:
        _print_json({"banks": rows, "to_fetch": missing})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("bank", "documents", "fields", "", "licence", "title"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("documents", "fields") else "left")
    for row in rows:
        kind = "synthetic" if row["synthetic"] else "collected"
        cells = (row["bank"], f"{row['documents']:,}", str(row["fields"]), kind, row["licence"], row["title"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    _console().print(table)
    for kind in missing:
        print(f"\nto fetch: pcdlab data get {kind}   ({SOURCES[kind].title}; {SOURCES[kind].licence})", end="")
    if missing:
        print()


@data_app.command("get")
def get_data(
    source: Annotated[str, typer.Argument(help="devoxx, banking77, clinc150 or nlupp.")],
    event: Event = None,
    count: Count = None,
    split: Split = None,
    domain: Domain = None,
    name: Name = None,
    replace: Replace = False,
) -> None:
    """Fetch a public data set into a bank."""
    from pcdlab.bank_sources import get_bank
    from pcdlab.cli import _status

    with _status(f"fetching {source}"):
        bank = get_bank(source, name, replace, **_given(event=event, count=count, split=split, domain=domain))
    _print_made(bank)


@data_app.command("import")
def import_data(
    source: Annotated[str, typer.Argument(help="devoxx, banking77, clinc150, nlupp, or table for one of your own.")],
    paths: Annotated[list[Path], typer.Argument(help="The files, or the folder with them.")],
    event: Event = None,
    count: Count = None,
    split: Split = None,
    domain: Domain = None,
    name: Name = None,
    replace: Replace = False,
    text: Annotated[str | None, typer.Option(help="table: the column with the documents.")] = None,
    gold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FIELD=]COLUMN", help="table: a column with labels, and the field it is for; repeatable."
        ),
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="table: the column with ids.")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="table: the schema, as fields of a preset, a JSON Schema, or a preset; by default the labels that occur.",
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="table: the data's licence.")] = None,
    citation: Annotated[str | None, typer.Option(help="table: where the data come from.")] = None,
) -> None:
    """Make a bank of files: a public data set's, or a table of your own (CSV, JSON Lines or Parquet)."""
    from pcdlab.bank_sources import import_bank, import_table
    from pcdlab.cli import _read_schema

    public = _given(event=event, count=count, split=split, domain=domain)
    own = _given(text=text, gold=gold, id=id, schema=schema, licence=licence, citation=citation)
    if source != "table":
        if own:
            raise ParameterError(f"--{next(iter(own))} belongs to `pcdlab data import table`, not to {source}")
        _print_made(import_bank(source, paths, name, replace, **public))
        return
    if public:
        raise ParameterError(f"--{next(iter(public))} belongs to a public data set, not to a table")
    if len(paths) != 1 or name is None or text is None or not gold:
        raise ParameterError("a table needs one file, --name, --text COLUMN and --gold COLUMN at least once")
    columns = {field: column or field for field, _, column in (item.partition("=") for item in gold)}
    given: dict[str, Any] = {**own, "gold": columns}
    if schema is not None:
        given["schema"] = _read_schema(schema)
    made = import_table(paths[0], name, replace=replace, **given)
    _print_made(made)
    if schema is None:
        print(
            "hint: the fields have no descriptions, and the model reads those too. Write them into "
            f"{made.path.parent / 'bank.json'}, or import again with --schema FILE --replace",
            file=sys.stderr,
        )


@data_app.command("show")
def show_data(
    name: Annotated[str, typer.Argument(help="A bank's name or folder.")],
    documents: Annotated[int, typer.Option(min=0, help="How many documents to print.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bank as one JSON object.")] = False,
) -> None:
    """Show a bank: what it is, how often each label occurs, its first documents."""
    from itertools import islice

    from pcdlab.banks import load_bank
    from pcdlab.cli import _console, _json, _print_json
    from pcdlab.schema import Field

    bank = load_bank(name)
    counts: dict[str, Counter[str]] = {field.name: Counter() for field in bank.schema}
    for item in bank:
        for labelled, label in item.gold.items():
            counts[labelled][Field.json(label)] += 1
    about = {
        key: getattr(bank, key) for key in ("id", "title", "description", "synthetic", "licence", "citation", "sha256")
    }
    if as_json:
        first = [item.model_dump() for item in islice(bank, documents)]
        _print_json(
            {**about, "count": len(bank), "schema": bank.schema.to_dict(), "labels": counts, "documents": first}
        )
        return
    console = _console()
    console.print(Text(f"{bank.title} ({bank.id}): {len(bank):,} documents", style="bold"))
    for line in (bank.description, f"licence: {bank.licence}", f"from: {bank.citation}", f"at: {bank.path.parent}"):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("field", "labels", "labelled", "most frequent"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("labels", "labelled") else "left")
    for field in bank.schema:
        found = counts[field.name]
        frequent = ", ".join(f"{label} {count:,}" for label, count in found.most_common(4))
        table.add_row(Text(field.name), str(len(field.labels)), f"{found.total():,}", Text(frequent))
    console.print()
    console.print(table)
    for item in islice(bank, documents):
        console.print()
        console.print(Text(item.id, style="bold"))
        console.print(item.text, markup=False)
        console.print(_json(item.gold) + (f"  ({item.note})" if item.note else ""), style="dim", markup=False)


def study(
    bank: Annotated[str, typer.Argument(help="A bank's name or folder; see pcdlab data list.")],
    model: Annotated[str, typer.Option(help="Alias, local folder or Hugging Face id.")] = "smollm2-135m",
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Fill this schema, not the bank's: fields as in a preset, a JSON Schema, or a preset."
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="isolated, joint or grammar (token by token, values only).")] = "isolated",
    scorer: Annotated[str, typer.Option(help="auto, marginal, exact, walk or hybrid.")] = "auto",
    normalise: Annotated[str, typer.Option(help="sum, length or unconditional.")] = "sum",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N documents.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="grammar: also decode the same documents token by token, as a second run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; by default one below reports/runs/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Decide every document of a bank and keep all decisions in a folder.

    Stopped at any time, the same command goes on where it was. With a baseline, the second run's folder ends in -grammar.
    """
    from pcdlab.banks import load_bank
    from pcdlab.cli import _only_answers_on_stdout, _print_json, _read_schema, _status

    if baseline not in (None, "grammar"):
        raise ParameterError(f"--baseline {baseline}: is unknown; the one there is is grammar")
    if baseline == mode:
        raise ParameterError("--mode grammar is the baseline itself; leave one of the two out")
    chosen = load_bank(bank)
    if schema is not None:
        chosen = chosen.asking(_read_schema(schema))
    if limit is not None:
        chosen = chosen.first(limit)
    options: dict[str, Any] = {"mode": mode, "scorer": scorer, "normalise": normalise}
    if out is None:
        usual = {"torch", "auto", "isolated", "sum"}
        parts = [chosen.id, Path(model).name, backend, dtype, *options.values(), schema and schema.stem, limit]
        out = Path("reports", "runs", "-".join(str(part) for part in parts if part and part not in usual))
    runs: list[Run] = []
    with _only_answers_on_stdout():
        from pcdlab.engine import Engine
        from pcdlab.studies.runs import run_study

        with _status(f"loading {model}"):
            engine = Engine.load(model, backend=backend, dtype=dtype)
        jobs = [(out, options)] + ([(out.with_name(f"{out.name}-grammar"), {"mode": "grammar"})] if baseline else [])
        for folder, job in jobs:
            try:
                runs.append(run_study(chosen, engine, folder, **job))
            except KeyboardInterrupt:
                print(
                    f"\nstopped; {folder} keeps what was decided: run the same command again to go on", file=sys.stderr
                )
                raise
    made = [_summary(run) for run in runs]
    if as_json:
        _print_json(made)
        return
    for run in made:
        failed = f", {run['failed']:,} of them not decided (see error)" if run["failed"] else ""
        print(f"{run['folder']}: {run['documents']:,} documents of {run['fields']:,} fields{failed}")
        _print_accuracy(run["accuracy"])
    if made[0]["accuracy"]:
        place = Path(bank).resolve() if (Path(bank) / "bank.json").is_file() else bank
        choices = {"bank": place, "model": None if model == "smollm2-135m" else model, "documents": limit}
        given = "".join(f" -p {shlex.quote(f'{key}={value}')}" for key, value in choices.items() if value is not None)
        in_python = f"pcdlab.studies.runs.load_run({str(out)!r})"
        # The notebook asks with the default options and the bank's own schema, and writes under the grammar beside it.
        default = (backend, dtype, scorer, normalise) == ("torch", "auto", "auto", "sum")
        its_own = default and schema is None and mode in ("isolated", "grammar")
        report = f"pcdlab report 03{given}\nor " if its_own else ""
        print(f"\nnext: {report}in Python: {in_python}")


def _summary(run: Run) -> dict[str, Any]:
    from pcdlab.studies.accuracy import accuracy_of_run, labelled_fields

    failed = {row["document"] for row in run.rows() if "error" in row}
    return {
        "folder": str(run.folder),
        "documents": run.meta["bank"]["documents"],
        "fields": len(run.schema),
        "failed": len(failed),
        "accuracy": accuracy_of_run(run, labelled_fields(run)).to_dict("records"),
    }


def _print_accuracy(rows: list[dict[str, Any]]) -> None:
    """Show how often each labelled field is right, with 95 % intervals, and what always giving one label would reach."""
    from pcdlab.cli import _console

    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    kinds = list(dict.fromkeys(row["scores"] for row in rows))
    for heading in ("field", *(f"right, {kind}" for kind in kinds), "most frequent label", "labelled"):
        table.add_column(heading, overflow="fold", justify="left" if heading == "field" else "right")
    for name in dict.fromkeys(row["field"] for row in rows):
        own = [row for row in rows if row["field"] == name]
        rates = [f"{100 * r['accuracy']:.0f} % [{100 * r['low']:.0f}, {100 * r['high']:.0f}]" for r in own]
        table.add_row(Text(name), *map(Text, rates), f"{100 * own[0]['majority']:.0f} %", f"{own[0]['n']:,}")
    _console().print(table)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _print_made(bank: Bank) -> None:
    print(
        f"{bank.path.parent}: {len(bank):,} documents, {len(bank.schema)} fields. Licence: {bank.licence or 'none given'}"
    )
