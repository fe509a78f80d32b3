"""The figures about speed: measurements in, a matplotlib figure out, in the looks of :mod:`pcdlab.plots`.

Refuses to know how anything was measured; takes what :mod:`pcdlab.bench` and :mod:`pcdlab.bench_sweeps` return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from pcdlab.plots import BLUE, INK, ORANGE, PALE, PAPER, SKY, SOFT, _name_rows, _styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["floored", "growth", "phases", "race"]

# Each phase differs from its neighbours in lightness or hatch, so that grey print keeps them apart.
PHASES: dict[str, dict[str, Any]] = {
    "head": {"facecolor": PALE, "edgecolor": SOFT, "hatch": "////"},
    "document": {"facecolor": SKY, "edgecolor": SOFT},
    "score": {"facecolor": BLUE, "edgecolor": BLUE},
    "write": {"facecolor": ORANGE, "edgecolor": SOFT, "hatch": "...."},
    "rest": {"facecolor": INK, "edgecolor": INK},
}
NAMES = {
    "head": "head: instructions and catalogue",
    "document": "document",
    "score": "score: document and all fields (tree), fields (first-token)",
    "write": "write, token by token",
    "rest": "tokenise, assemble",
}
ENGINES: dict[str, dict[str, Any]] = {
    "tree-cold": {"color": BLUE, "marker": "o", "markerfacecolor": BLUE},
    "tree-warm": {"color": BLUE, "marker": "s", "markerfacecolor": PAPER},
    "grammar-ff": {"color": ORANGE, "marker": "^", "markeredgecolor": INK},
}


@_styled
def race(lanes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw who is where when, filling the same form: all ways on one time axis.

    Parameters
    ----------
    lanes : mapping of str to mapping
        Way → ``phases`` and ``tokens``, as :func:`pcdlab.bench_sweeps.race` gives them.

    Returns
    -------
    matplotlib.figure.Figure
        A bar per phase; above the writing a stroke for each token, long and dark where there was a choice.
    """
    names = list(lanes)
    height = 0.62 * len(names) + 1.35
    figure, axes = plt.subplots(figsize=(8, height))
    plt.close(figure)
    end = max(lane["phases"][-1][2] for lane in lanes.values())
    for y, lane in enumerate(lanes.values()):
        for name, start, stop in lane["phases"]:
            if name != "write":
                axes.barh(y, stop - start, left=start, height=0.5, linewidth=0.4, **_phase(name))
        for chosen, colour, half in ((False, SOFT, 0.12), (True, INK, 0.3)):
            times = [time for time, choice in lane["tokens"] if choice == chosen]
            axes.vlines(times, y - half, y + half, color=colour, linewidth=0.6 + 0.5 * chosen)
        last = lane["phases"][-1][2]
        axes.text(last + 0.012 * end, y, f"{last:.2f} s", va="center", size=8, weight="bold")
    _name_rows(axes, names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end * 1.1)
    axes.set_xlabel("seconds from the start (one run each, after a warm-up)")
    drawn = [
        name
        for name in ("head", "document", "score")
        if any(p[0] == name for lane in lanes.values() for p in lane["phases"])
    ]
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, linewidth=0.4, **PHASES[name]) for name in drawn]
    texts = [NAMES[name].split(" (")[0].split(":")[0] for name in drawn]
    if any(lane["tokens"] for lane in lanes.values()):
        handles += [
            plt.Line2D([], [], linestyle="", marker="|", color=c, markersize=s) for c, s in ((SOFT, 5), (INK, 11))
        ]
        texts += ["token, known before", "token, a choice"]
    figure.legend(handles, texts, loc="lower left", ncols=len(texts), frameon=False, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    return figure


def _phase(name: str) -> dict[str, Any]:
    return PHASES.get(name, PHASES["rest"])


@_styled
def phases(panels: Mapping[str, Mapping[str, Mapping[str, float]]], columns: int = 2) -> Figure:
    """Draw what the seconds were spent on, one panel per form, each with its own scale.

    Parameters
    ----------
    panels : mapping of str to mapping of str to mapping of str to float
        Title → way → phase → seconds; the same ways in each panel.
    columns : int
        Panels side by side.

    Returns
    -------
    matplotlib.figure.Figure
    """
    ways = list(next(iter(panels.values())))
    lines, width = -(-len(panels) // columns), min(columns, len(panels))
    size = (max(3.1 * width + 1.2, 7.4), (0.24 * len(ways) + 0.62) * lines + 0.85)
    figure, grid = plt.subplots(lines, width, figsize=size, sharey=True, squeeze=False)
    plt.close(figure)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    seen: set[str] = set()
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        total = {way: sum(panel[way].values()) for way in ways}
        for y, way in enumerate(ways):
            left = 0.0
            for name, seconds in panel[way].items():
                kind = name if name in PHASES else "rest"
                seen.add(kind)
                axes.barh(y, seconds, left=left, height=0.66, linewidth=0.4, **PHASES[kind])
                left += seconds
            axes.text(left + 0.02 * max(total.values()), y, f"{left:.2f}", va="center", size=7.5)
        axes.set_xlim(0, 1.22 * max(total.values()))
        axes.set_title(title, size=9, loc="left")
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0)
    for axes in grid[-1]:
        axes.set_xlabel("seconds (median run)")
    for line in grid:
        _name_rows(line[0], ways)
    kinds = [name for name in PHASES if name in seen]
    handles = [plt.Rectangle((0, 0), 1, 1, linewidth=0.4, **PHASES[name]) for name in kinds]
    figure.legend(handles, [NAMES[name] for name in kinds], loc="lower left", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.65 / size[1], 1, 1), h_pad=1.0)
    return figure


@_styled
def growth(lines: Mapping[str, Sequence[Mapping[str, Any]]], size: str) -> Figure:
    """Draw how time and memory grow with a size, on logarithmic scales, and the roofline below the time.

    Parameters
    ----------
    lines : mapping of str to sequence of mapping
        Engine (of "tree-cold", "tree-warm", "grammar-ff") → points with ``x``, ``median_s``, ``runs``, ``roofline_s`` and
        ``peak_bytes``, the latter two None where there is none.
    size : str
        What x is, with its unit.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5))
    plt.close(figure)
    for engine, found in lines.items():
        x = [point["x"] for point in found]
        style = {"linewidth": 1.4, "markersize": 5.5, **ENGINES[engine]}
        left.plot(x, [point["median_s"] for point in found], label=engine, zorder=3, **style)
        if all(point["roofline_s"] for point in found):
            shape = ":" if engine == "tree-warm" else "--"
            label = f"{engine}, roofline"
            left.plot(x, [p["roofline_s"] for p in found], color=SOFT, linestyle=shape, linewidth=1.4, label=label)
        if all(point["peak_bytes"] for point in found):
            right.plot(x, [point["peak_bytes"] / 2**20 for point in found], zorder=3, **style)
    runs = sorted({point["runs"] for found in lines.values() for point in found})
    several = "1 run" if runs == [1] else f"{runs[0]} runs" if len(runs) == 1 else f"{runs[0]} to {runs[-1]} runs"
    for axes, title in ((left, f"seconds, medians of {several}"), (right, "peak memory of tensors, MiB")):
        _logarithmic(axes)
        axes.set_xlabel(size)
        axes.set_title(title, size=9, loc="left")
    figure.legend(loc="lower left", ncols=5, frameon=False, columnspacing=1.2, handlelength=2.2)
    figure.tight_layout(rect=(0, 0.09, 1, 1), w_pad=2)
    return figure


def _logarithmic(axes: Axes) -> None:
    """Logarithmic axes with a few plain numbers on each."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, limits, room in ((axes.xaxis, axes.get_xlim(), 0.11), (axes.yaxis, axes.get_ylim(), 0.08)):
        low, high = np.log10(limits)
        decades = range(int(np.floor(low)), int(np.ceil(high)) + 1)
        ticks: list[float] = []
        for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
            inside = [d * 10.0**e for e in decades for d in digits if low <= np.log10(d * 10.0**e) <= high]
            if not ticks or np.diff(np.log10(inside)).min(initial=np.inf) >= room * (high - low):
                ticks = inside
        axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)


@_styled
def floored(shares: Sequence[float], reported: Sequence[float], collided: Sequence[bool], floor: float) -> Figure:
    """Draw the confidence that a first-token engine reports against the share it found.

    Parameters
    ----------
    shares, reported : sequence of float
        In [0, 1], one per field.
    collided : sequence of bool
        Whether the winning first token began several labels.
    floor : float
        The least confidence reported then.

    Returns
    -------
    matplotlib.figure.Figure
    """
    x, y, shared = np.array(shares), np.array(reported), np.array(collided, dtype=bool)
    figure, axes = plt.subplots(figsize=(7.2, 3.7))
    plt.close(figure)
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, label="reported = found")
    axes.plot([0, 1], [floor, floor], color=SOFT, linewidth=1, linestyle=":", label=f"the floor, {floor:g}")
    axes.scatter(x[~shared], y[~shared], s=22, color=BLUE, label="first token of one label", zorder=3)
    looks: dict[str, Any] = {
        "marker": "^",
        "facecolor": ORANGE,
        "edgecolor": INK,
        "s": 46,
        "linewidth": 0.8,
        "zorder": 4,
    }
    axes.scatter(x[shared], y[shared], label="first token of several labels", **looks)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.04)
    axes.set_xlabel(f"share of the first token (n = {len(x)} fields)")
    axes.set_ylabel("confidence reported")
    figure.legend(loc="lower left", ncols=4, frameon=False, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure
