"""What a bench says: files read back, two of them compared, tables, and the figures that follow from the measurements.

Works on what :func:`pcdlab.bench.run_bench` returned, or on the file made of it. Refuses to measure anything.

``python -m pcdlab.bench_report README.md`` writes the tables between the marks in that file, from ``reports/bench.json``
beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pcdlab.errors import ParameterError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "Figure",
    "added_field",
    "against_writing",
    "compare",
    "figures",
    "find_bench",
    "place",
    "points",
    "print_bench",
    "print_comparison",
    "read_bench",
    "readme_block",
    "same_machine",
    "update_readme",
]

MACHINE = ("cpu", "cores", "memory_gib", "system")
BEGIN, END = "<!-- bench: `python -m pcdlab.bench_report README.md` writes this -->", "<!-- /bench -->"

# --- what has changed -------------------------------------------------------------------------------------------------


def read_bench(path: Path) -> dict[str, Any]:
    """Read a file that ``pcdlab bench --json`` wrote.

    Raises
    ------
    ParameterError
        If it cannot be read or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            row["preset"], row["engine"], row["dtype"], row["median_s"] + 0.0
        found["machine"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no result of a bench ({error!r})"
        raise ParameterError(f"{path}: {reason}; give a file that `pcdlab bench --json` wrote") from error
    return found


def find_bench(path: str, model: str) -> dict[str, Any] | None:
    """Read a bench for a notebook, which runs in the folder above the notebooks' or in that folder.

    Parameters
    ----------
    path : str
        Seen from the folder above the notebooks'.
    model : str

    Returns
    -------
    dict or None
        None where there is no such file, or it is of another model.

    Raises
    ------
    ParameterError
        If the file holds something else.
    """
    found = next((place for place in (Path(path), Path("..", path)) if place.is_file()), None)
    bench = read_bench(found) if found else None
    return bench if bench and bench["model"] == model else None


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two benches were measured on machines that look the same; the number of threads may differ."""
    return all(one["machine"][key] == other["machine"][key] for key in MACHINE)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What has changed from one bench to another.

    Parameters
    ----------
    old, new : mapping
        From :func:`run_bench`.

    Returns
    -------
    dict
        ``reasons``: why the two cannot be compared (another machine, model or backend), empty where they can; ``versions``: what
        else differs (packages), which may be what is to be compared; ``rows``: one per row found in both, with ``preset``,
        ``engine``, ``dtype`` and, for every number that both have, new divided by old (``time``, ``peak``) or the two values
        (``forward_passes``, ``tokens_fed``, ``schema_valid``, ``agreement``); ``only_old``, ``only_new``: names of the others.
    """
    hardware = (*MACHINE, "threads")
    reasons = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in ("model", "backend")
        if old.get(key) != new.get(key)
    ]
    versions: list[str] = []
    for key in dict.fromkeys([*old["machine"], *new["machine"]]):
        before, after = old["machine"].get(key), new["machine"].get(key)
        if before != after:
            (reasons if key in hardware else versions).append(f"{key} was {before!r} and is {after!r}")
    before_by = {(row["preset"], row["engine"], row["dtype"]): row for row in old["rows"]}
    after_by = {(row["preset"], row["engine"], row["dtype"]): row for row in new["rows"]}
    rows = []
    for key, row in after_by.items():
        if key not in before_by:
            continue
        earlier = before_by[key]
        changed: dict[str, Any] = {"preset": key[0], "engine": key[1], "dtype": key[2]}
        for name, figure in (("time", "median_s"), ("peak", "peak_bytes")):
            if earlier.get(figure) and row.get(figure):
                changed[name] = row[figure] / earlier[figure]
        for name in ("forward_passes", "tokens_fed", "schema_valid", "agreement"):
            if name in earlier and name in row:
                changed[name] = [earlier[name], row[name]]
        rows.append(changed)
    return {
        "reasons": reasons,
        "versions": versions,
        "rows": rows,
        "only_old": [" ".join(key) for key in before_by if key not in after_by],
        "only_new": [" ".join(key) for key in after_by if key not in before_by],
    }


# --- what follows from it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One number that the measurements of a bench's sweeps come down to.

    Attributes
    ----------
    name : str
        What was divided by what.
    value : float
    limit : float
        What is aimed at.
    least : bool
        Whether the aim is at least `limit`; else at most.
    """

    name: str
    value: float
    limit: float
    least: bool = False

    @property
    def aim(self) -> str:
        """The aim in words."""
        return f"{'at least' if self.least else 'at most'} {self.limit:g}"

    @property
    def met(self) -> bool:
        """Whether the value is where it should be."""
        return self.value >= self.limit if self.least else self.value <= self.limit


def points(bench: Mapping[str, Any], sweep: str, engine: str) -> list[Mapping[str, Any]]:
    """The points of one sweep and engine, smallest first.

    Parameters
    ----------
    bench : mapping
        With ``sweeps``.
    sweep : {"fields", "labels", "document", "batch"}
    engine : {"tree-cold", "tree-warm", "grammar-ff"}
    """
    found = [p for p in bench["sweeps"]["points"] if p["sweep"] == sweep and p["engine"] == engine]
    return sorted(found, key=lambda point: point["x"])


def added_field(bench: Mapping[str, Any], engine: str) -> tuple[float, list[tuple[int, int, float]]]:
    """What one more field costs, divided by what the matrix products of its tokens cost.

    Parameters
    ----------
    bench : mapping
        With ``sweeps`` that have at least two points of "fields".
    engine : {"tree-cold", "tree-warm"}

    Returns
    -------
    float
        Least-squares slope of the seconds over the fields, divided by that of the roofline's.
    list of (int, int, float)
        The same between each two neighbouring points: fields of the one, of the other, ratio.
    """
    found = points(bench, "fields", engine)
    x, seconds, roofline = (np.array([p[key] for p in found]) for key in ("x", "median_s", "roofline_s"))
    steps = np.diff(seconds) / np.diff(roofline)
    slope = np.polyfit(x, seconds, 1)[0] / np.polyfit(x, roofline, 1)[0]
    return float(slope), [(int(a), int(b), float(r)) for a, b, r in zip(x, x[1:], steps, strict=False)]


def figures(bench: Mapping[str, Any]) -> list[Figure]:
    """What the sweeps come down to, each beside what is aimed at.

    Parameters
    ----------
    bench : mapping
        From :func:`pcdlab.bench.run_bench`. Without sweeps there are no figures; those that need the roofline or the
        allocator's record are missing where there is none.
    """
    if "sweeps" not in bench:
        return []
    found = []
    for engine, head in (("tree-cold", "head run too"), ("tree-warm", "head cached")):
        with_roofline = [p for p in points(bench, "fields", engine) if p["roofline_s"]]
        if len(with_roofline) > 1:
            value = added_field(bench, engine)[0]
            found.append(Figure(f"seconds of one more field ÷ roofline seconds of its tokens, {head}", value, 1.3))
    for longest in points(bench, "labels", "tree-cold")[-1:]:
        name = f"one field of {longest['x']:,} labels, head run too ÷ its prompt run plainly"
        found.append(Figure(name, longest["median_s"] / longest["prefill_s"], 1.6))
    for kind, limit in (("short", 2.5), ("long", 1.0)):
        batch = bench["sweeps"]["batching"].get(kind)
        if batch is None:
            continue
        many = f"{batch['labels']} labels" if batch["fields"] == 1 else f"{batch['fields']} fields"
        tokens = f"{batch['shortest_tokens']} to {batch['longest_tokens']} tokens"
        name = f"documents a second, {batch['documents']} of {tokens} in one call ÷ one by one ({many})"
        found.append(Figure(name, batch["one_by_one_s"] / batch["together_s"], limit, least=True))
    if stream := bench["sweeps"]["stream"]:
        few, many_documents = stream["peaks"]
        value = _held(many_documents) / _held(few)
        name = f"peak memory of a stream of {many_documents['documents']:,} documents ÷ of {few['documents']:,}"
        found.append(Figure(name, value, 1.1))
    return found


def _held(peak: Mapping[str, int]) -> int:
    return peak["tensor_bytes"] + peak["python_bytes"]


def against_writing(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many times the tree's seconds it takes to write the object token by token, known tokens fed together.

    Parameters
    ----------
    bench : mapping

    Returns
    -------
    list of dict
        ``where``, ``passes`` (of the writing), ``cold`` and ``warm``: ``grammar-ff`` ÷ tree with the head run by both, and
        behind a cached head, where the writing's seconds are those without its head. Below 1 the tree is the slower one.
    """
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in bench["rows"]:
        cases.setdefault(f"{row['preset']} ({row['fields']} fields, {row['dtype']})", {})[row["engine"]] = row
    units = {
        "fields": "fields",
        "labels": "labels",
        "document": "tokens of the document",
        "batch": "documents in a call",
    }
    for point in bench.get("sweeps", {}).get("points", []):
        cases.setdefault(f"{units[point['sweep']]}: {point['x']:,}", {})[point["engine"]] = point
    found = []
    for where, ways in cases.items():
        if not {"tree-cold", "tree-warm", "grammar-ff"} <= ways.keys():
            continue
        written = ways["grammar-ff"]
        behind = written["median_s"] - written["seconds"]["head"]
        cold, warm = written["median_s"] / ways["tree-cold"]["median_s"], behind / ways["tree-warm"]["median_s"]
        found.append({"where": where, "passes": written["forward_passes"], "cold": cold, "warm": warm})
    return found


# --- in the README ----------------------------------------------------------------------------------------------------


def place(bench: Mapping[str, Any]) -> str:
    """Model, backend and machine of a bench in a line."""
    about = bench["machine"]
    package = {"torch": "torch", "mlx": "mlx", "llamacpp": "llama-cpp-python"}[bench["backend"]]
    threads = "1 thread" if about["threads"] == "1" else f"{about['threads']} threads"
    return (
        f"{bench['model']} under {package} {about[package]} on {about['cpu']}, {about['cores']} cores, {threads}, "
        f"{about['memory_gib']} GiB, {about['system']}"
    )


def readme_block(bench: Mapping[str, Any]) -> str:
    """The bench as Markdown: seconds by preset and engine, and what the sweeps come down to.

    Parameters
    ----------
    bench : mapping

    Returns
    -------
    str
        The same for the same bench.
    """
    rows = bench["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    counts = sorted({row["runs"] for row in rows})
    several = len({row["dtype"] for row in rows}) > 1
    lines = [
        f"Measured with {place(bench)}; {', '.join(dict.fromkeys(row['dtype'] for row in rows))}. "
        f"Seconds, medians of {_span(counts)} after a warm-up; in brackets how many times those of `tree-cold`.",
        "",
        f"| preset | fields | prompt tokens | {' | '.join(f'`{engine}`' for engine in engines)} |",
        f"|---|{'---:|' * (2 + len(engines))}",
    ]
    cases: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    whole = {(row["preset"], row["dtype"]) for row in rows if row["engine"] == "tree-cold"}
    for row in rows:
        # llama.cpp's own sampler runs the file as it is, the engine perhaps unpacked: they stand in one line.
        case = (row["preset"], row["dtype"])
        case = case if case in whole else next(other for other in sorted(whole) if other[0] == row["preset"])
        cases.setdefault(case, {})[row["engine"]] = row
    for (preset, dtype), ways in cases.items():
        cold = ways["tree-cold"]
        cells = [f"{preset}, {dtype}" if several else preset, str(cold["fields"]), f"{cold['prompt_tokens']:,}"]
        for engine in engines:
            seconds = ways[engine]["median_s"] if engine in ways else None
            ratio = "" if engine == "tree-cold" or seconds is None else f" ({seconds / cold['median_s']:.2f})"
            cells.append("–" if seconds is None else f"{seconds:.2f}{ratio}")
        lines.append(f"| {' | '.join(cells)} |")
    found = figures(bench)
    if found:
        lines += ["", f"| how cost grows, {bench['sweeps']['dtype']} | measured | aim | |", "|---|---:|---|---|"]
        lines += [f"| {f.name} | {f.value:.2f} | {f.aim} | {'met' if f.met else 'not met'} |" for f in found]
    return "\n".join(lines)


def _span(counts: Sequence[int]) -> str:
    if counts == [1]:
        return "1 run"
    return f"{counts[0]} runs" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"


def update_readme(path: Path, bench: Mapping[str, Any]) -> bool:
    """Put the bench between the marks of a Markdown file.

    Parameters
    ----------
    path : pathlib.Path
    bench : mapping

    Returns
    -------
    bool
        Whether that changed the file.

    Raises
    ------
    ParameterError
        If the marks are not there once each, in order.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ParameterError(f"{path}: the bench goes between the lines {BEGIN} and {END}; put each there once")
    new = f"{before}{BEGIN}\n{readme_block(bench)}\n{END}{after}"
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text


# --- for people -------------------------------------------------------------------------------------------------------


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    """Print a bench as tables, one block per preset."""
    about = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in about.items() if k not in (*MACHINE, "threads"))
    console.print(f"{result['model']} on {about['cpu']}, {about['threads']} threads, {versions}", markup=False)
    for preset in dict.fromkeys(row["preset"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["preset"] == preset]
        _print_whole(preset, rows, console)
        _print_scoring([row for row in rows if "scoring_s" in row], console)
    for name, reason in result["left_out"].items():
        console.print(f"{name} left out: {reason}", style="dim", markup=False)
    if "sweeps" in result:
        table = _table("How cost grows", ["what"], ["measured", "aim", ""])
        for figure in figures(result):
            table.add_row(figure.name, f"{figure.value:.2f}", figure.aim, "met" if figure.met else "not met")
        console.print(table)
        for line in result["sweeps"]["left_out"]:
            console.print(f"left out: {line}", style="dim", markup=False)


def _print_whole(preset: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    title = f"{preset}: {rows[0]['fields']} fields, prompt of {rows[0]['prompt_tokens']:,} tokens"
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]))
    cold = {row["dtype"]: row["median_s"] for row in rows if row["engine"] == "tree-cold"}
    fallback = next(iter(cold.values()))
    table = _table(
        title,
        ["engine", "dtype"],
        [
            "median s",
            "÷ tree-cold",
            "runs",
            *phases,
            "passes",
            "tokens fed",
            "peak MiB",
            "× roofline",
            "valid",
            "agreement",
            "same answers",
        ],
    )
    for row in rows:
        table.add_row(
            row["engine"],
            row["dtype"],
            f"{row['median_s']:.3f}",
            f"{row['median_s'] / cold.get(row['dtype'], fallback):.2f}",
            str(row["runs"]),
            *(f"{row['seconds'][phase]:.3f}" if phase in row["seconds"] else "" for phase in phases),
            str(row["forward_passes"]),
            f"{row['tokens_fed']:,}",
            _mib(row["peak_bytes"]),
            f"{row['roofline_ratio']:.2f}" if row["roofline_ratio"] else "–",
            "yes" if row["schema_valid"] else _problems(row["problems"]),
            f"{row['agreement']:.0%}",
            "" if row["agreement_same_answers"] is None else f"{row['agreement_same_answers']:.0%}",
        )
    console.print(table)


def _print_scoring(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = _table(
        "Scoring pass alone, below a cached prompt",
        ["engine", "dtype"],
        ["prompt tokens", "tree tokens", "median s", "rows ÷ this", "peak MiB", "peak ÷ prompt KV"],
    )
    padded = {row["dtype"]: row["scoring_s"] for row in rows if row["engine"] == "rows"}
    for row in rows:
        peak = row["scoring_peak_bytes"]
        table.add_row(
            "tree" if row["engine"] == "tree-warm" else row["engine"],
            row["dtype"],
            f"{row['prompt_tokens']:,}",
            str(row["scoring_tokens"]),
            f"{row['scoring_s']:.3f}",
            f"{padded[row['dtype']] / row['scoring_s']:.1f}" if row["dtype"] in padded else "–",
            _mib(peak),
            "–" if peak is None else f"{peak / row['prompt_kv_bytes']:.2f}",
        )
    console.print(table)


def print_comparison(changes: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`compare` found; what forbids the comparison comes first."""
    for reason in changes["reasons"]:
        console.print(f"NOT COMPARABLE: {reason}", style="bold red", markup=False)
    for line in changes["versions"]:
        console.print(f"note: {line}", style="dim", markup=False)
    table = _table(
        "New ÷ old", ["preset", "engine", "dtype"], ["time", "peak", "passes", "tokens fed", "valid", "agreement"]
    )
    for row in changes["rows"]:
        table.add_row(
            row["preset"],
            row["engine"],
            row["dtype"],
            *(f"{row[name]:.2f}" if name in row else "–" for name in ("time", "peak")),
            *(_change(row.get(name), "{:,}") for name in ("forward_passes", "tokens_fed")),
            *(_change(row.get(name), "{:.0%}") for name in ("schema_valid", "agreement")),
        )
    console.print(table)
    for name, which in (("only in the old file", "only_old"), ("only in the new one", "only_new")):
        if changes[which]:
            console.print(f"{name}: {', '.join(changes[which])}", style="dim", markup=False)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _change(pair: Sequence[Any] | None, form: str) -> str:
    if pair is None:
        return "–"
    old, new = map(form.format, pair)
    return "=" if old == new else f"{old} → {new}"


def _problems(problems: Mapping[str, Any] | None) -> str:
    if problems is None:
        return "no"
    if not problems["parsed"]:
        return "no object"
    return ", ".join(f"{problems[kind]} {kind}" for kind in ("missing", "invented", "extra") if problems[kind])


def _mib(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.0f}"


if __name__ == "__main__":
    readme = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    update_readme(readme, read_bench(readme.parent / "reports" / "bench.json"))
