"""The figures about speed come out whole, and hold what they were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_plots import shown

from pcdlab import plots_speed


def lane(end: float, tokens: int = 0) -> dict[str, Any]:
    phases = [["tokenise", 0.0, 0.01], ["head", 0.01, end / 3], ["write" if tokens else "score", end / 3, end]]
    return {"phases": phases, "tokens": [[t, i % 4 == 0] for i, t in enumerate(np.linspace(end / 3, end, tokens))]}


def test_race() -> None:
    lanes = {"grammar": lane(8.8, 86), "grammar-ff": lane(3.0, 86), "tree-cold": lane(2.9), "tree-warm": lane(0.05)}
    figure = plots_speed.race(lanes)
    texts = shown(figure)
    assert {*lanes, "8.80 s", "0.05 s", "token, a choice", "head"} <= set(texts)
    strokes = sum(len(lines.get_segments()) for lines in figure.axes[0].collections)
    assert strokes == 2 * 86
    assert "token, a choice" not in shown(plots_speed.race({"tree-cold": lane(1.0)}))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_phases(count: int) -> None:
    ways = {
        "tree-cold": {"tokenise": 0.01, "head": 1.0, "score": 1.5, "assemble": 0.01},
        "grammar-ff": {"tokenise": 0.01, "head": 1.0, "document": 0.4, "write": 3.0},
    }
    figure = plots_speed.phases({f"a_form_{i}, 28 fields, float32": ways for i in range(count)})
    texts = shown(figure)
    assert {"2.52", "4.41", "document", "write, token by token", "a_form_0, 28 fields, float32"} <= set(texts)
    assert len([axes for axes in figure.axes if axes.get_visible()]) == count
    drawn = sum(bar.get_width() for bar in figure.axes[0].patches)
    assert drawn == pytest.approx(2.52 + 4.41)


def a_point(x: int, seconds: float, roofline: float | None = None, peak: int | None = 1 << 22) -> dict[str, Any]:
    return {"x": x, "median_s": seconds, "runs": 1 + x % 3, "roofline_s": roofline, "peak_bytes": peak}


@pytest.mark.parametrize(
    "sizes", [(1, 4, 16, 50, 100, 200, 400), (50, 6000), (2, 1000), (1, 2, 4, 8, 16, 32, 64), (5,)]
)
def test_growth(sizes: tuple[int, ...]) -> None:
    lines = {
        "tree-cold": [a_point(x, 0.2 + 0.03 * x, 0.1 + 0.02 * x) for x in sizes],
        "tree-warm": [a_point(x, 0.1 + 0.001 * x, 0.05 + 0.001 * x, x << 20) for x in sizes],
        "grammar-ff": [a_point(x, 0.2 + 0.1 * x) for x in sizes[:3]],
    }
    figure = plots_speed.growth(lines, "fields of the form")
    texts = shown(figure)
    assert {*lines, "tree-cold, roofline", "tree-warm, roofline", "fields of the form"} <= set(texts)
    left, right = figure.axes
    assert (len(left.lines), len(right.lines)) == (5, 3)
    assert left.get_xscale() == left.get_yscale() == right.get_yscale() == "log"
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        low, high = axis.get_view_interval()
        assert sum(low <= tick <= high for tick in axis.get_ticklocs()) >= 2, "no scale can be read off"


def test_growth_without_roofline_and_memory() -> None:
    figure = plots_speed.growth({"tree-cold": [a_point(1, 0.1, peak=None), a_point(9, 0.2, peak=None)]}, "fields")
    assert "tree-cold, roofline" not in shown(figure)
    assert not figure.axes[1].lines


def test_what_the_floor_hides() -> None:
    figure = plots_speed.floored([0.2, 0.9, 0.17], [0.2, 0.9, 0.75], [False, True, True], 0.75)
    texts = shown(figure)
    assert {"the floor, 0.75", "share of the first token (n = 3 fields)", "first token of several labels"} <= set(texts)
    alone, shared = figure.axes[0].collections
    assert (len(alone.get_offsets()), len(shared.get_offsets())) == (1, 2)
    shown(plots_speed.floored([0.2], [0.2], [False], 0.75))
