"""The command ``pcdlab lint``: what a preset's labels take in a model's tokens, and what is wrong with them.

A thin face of :mod:`pcdlab.studies.labels`; :mod:`pcdlab.cli` hangs it into the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pcdlab.studies.labels import FieldLint
    from pcdlab.tokenizer import Codec

__all__ = ["lint"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def lint(
    preset: Annotated[
        str, typer.Argument(help="A preset's name or file, or a file with fields as in a preset or a JSON Schema.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Alias, local folder or Hugging Face id; its tokenizer is read. What is not here yet is fetched whole."
        ),
    ] = "smollm2-135m",
    backend: Annotated[str, typer.Option(help="torch, mlx or llamacpp.")] = "torch",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything, label by label, as one JSON object.")
    ] = False,
) -> None:
    """Look for labels that cost much or mislead the model, and say what to do.

    Errors are labels this tokenizer cannot ask, warnings labels that are likely to be decided by something else than their
    meaning, notes what takes time or is good to know. Ends with exit code 1 if there is an error or a warning.
    """
    from pcdlab.cli import _console, _count, _only_answers_on_stdout, _print_json, _read_schema, _status
    from pcdlab.presets import load_preset
    from pcdlab.studies.labels import lint_schema

    schema = _read_schema(Path(preset)) if Path(preset).is_file() else load_preset(preset).schema
    with _only_answers_on_stdout(), _status(f"reading the tokenizer of {model}"):
        found = lint_schema(_codec(model, backend), schema)
    findings = [item for field in found for item in field.findings]
    counts = {level: sum(item.level == level for item in findings) for level in _STYLES}
    if as_json:
        _print_json(
            {"model": model, "backend": backend, "counts": counts, "fields": [item.to_dict() for item in found]}
        )
    else:
        console = _console()
        console.print(_table(found))
        for item in findings:
            console.print()
            console.print(
                Text.assemble(
                    (item.level, _STYLES[item.level]), f" {item.field}: {item.what} ", (f"[{item.code}]", "dim")
                )
            )
            console.print(Text(f"  → {item.fix}"))
        words = ", ".join(_count(number, level, f"{level}s") for level, number in counts.items())
        console.print(f"\n{words}; tokens of {model} under {backend}", style="dim", markup=False)
    if counts["error"] or counts["warning"]:
        raise typer.Exit(1)


def _codec(model: str, backend: str) -> Codec:
    """Load a model's tokenizer; a folder with a tokenizer and nothing else will do."""
    from pcdlab import models
    from pcdlab.tokenizer import HFCodec

    if backend == "llamacpp":
        from pcdlab.backends.llamacpp_codec import GGUFCodec

        return GGUFCodec(models.fetch(model, backend))
    folder = Path(model).expanduser()
    if not (folder / "tokenizer.json").is_file():
        folder = models.fetch(model, backend)
    spec = models.find(model)
    return HFCodec.load(folder, spec.template_options if spec else {})


def _table(found: list[FieldLint]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("field", overflow="fold")
    for heading in ("labels", "tokens", "told apart at", "catalogue"):
        table.add_column(heading, justify="right")
    table.add_column("scorer")
    for heading in ("passes", "fed", "rows"):
        table.add_column(heading, justify="right")
    for item in found:
        cost = next((cost for cost in item.costs if cost.scorer == item.default_scorer), None)
        table.add_row(
            Text(item.field),
            str(len(item.labels) or ""),
            _range([label.tokens for label in item.labels]),
            _range([label.depth for label in item.labels]) if cost else "",
            f"{item.catalogue_tokens:,}",
            item.default_scorer,
            *((str(cost.passes), f"{cost.tokens:,}", f"{cost.rows:,}") if cost else ("", "", "")),
        )
    return table


def _range(numbers: list[int]) -> str:
    if not numbers:
        return ""
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"
