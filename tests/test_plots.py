"""Figures come out whole: nothing raises, no text lies on other text or outside, whatever the labels are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from tokenizers_zoo import codec

from pcdlab import plots
from pcdlab.backends.conformance import Check
from pcdlab.compile import CompiledSchema, compile_schema
from pcdlab.decide import FieldPlan, Wish, decide, plan
from pcdlab.result import FieldDecision
from pcdlab.schema import Field, Label, Schema
from pcdlab.studies.accuracy import Comparison, accuracy_by_confidence

LABELS: dict[str, tuple[Label, ...]] = {
    "one": ("1.0",),
    "boolean": (True, False),
    "alike": ("DELIVER", "DELIVER_WITH_WARNING", "DELIVER_AND_LOG", "BLOCK", None),
    "numbers": (1, 2, 10, 100, 1.5),
    "odd": ("$5 and $6", "two\nlines", 'quo"te', "back\\slash", "{brace}", "café", " lead"),
    "long": tuple(f"a label of {n} words that goes on for a long while, and then some more" for n in (7, 8, 9)),
    "many": tuple(f"label number {n}" for n in range(40)),
}


@cache
def compiled() -> CompiledSchema:
    return compile_schema(codec("qwen"), Schema(tuple(Field(name, labels) for name, labels in LABELS.items())))


def text_of(token: int) -> str:
    return codec("qwen").decode([token])


def planned(names: Sequence[str], scorer: str) -> tuple[tuple[FieldPlan, ...], np.ndarray]:
    found = plan([Wish(compiled().fields[name], scorer) for name in names])
    return found.fields, np.log(np.random.default_rng(0).uniform(1e-6, 0.2, len(found.tree.candidates)))


def decided(names: Sequence[str]) -> list[FieldDecision]:
    decisions = []
    for name in names:
        if len(LABELS[name]) == 1:
            decisions.append(FieldDecision(name, LABELS[name][0], 1.0, None, {LABELS[name][0]: 0.0}, "fixed"))
            continue
        fields, log_probs = planned([name], "marginal")
        decision = decide(fields[0], log_probs)
        assert isinstance(decision, FieldDecision)
        decisions.append(decision)
    return decisions


def outside(axis: Axis) -> list[Text]:
    """Labels of ticks beyond the ends of an axis, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]


def shown(figure: Figure) -> list[str]:
    """Check that texts lie apart and inside; return them."""
    assert not plt.get_fignums(), "an open figure is drawn twice by a notebook"
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in outside(axis)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in hidden]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts]
    # The box around a slanted text is larger than the text.
    level = [box for t, box in zip(texts, boxes, strict=True) if t.get_rotation() % 90 == 0]
    for (one, a), (other, b) in itertools.combinations(level, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) < 2.5, f"{one!r} lies on {other!r}"
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert -1 < box.x0 < box.x1 < width + 1, f"{text!r} leaves the figure"
        assert -1 < box.y0 < box.y1 < height + 1, f"{text!r} leaves the figure"
    return [text for text, _ in boxes]


# --- text -------------------------------------------------------------------------------------------------------------


def test_blanks_become_visible() -> None:
    assert plots.visible(' "a b"\n\t\0') == '␣"a␣b"↵⇥\\x00'


@given(st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1), st.booleans()), max_size=6))
def test_a_strip_holds_the_text_and_escapes_it(tokens: list[tuple[str, float, bool]]) -> None:
    texts, probabilities, chosen = (list(column) for column in zip(*tokens, strict=True)) if tokens else ([], [], [])
    strip = plots.token_strip(texts, probabilities, chosen)
    assert strip.count("<span") == strip.count("</span>") == len(texts) + 6
    assert "<script" not in plots.token_strip(["<script>", "&"], [0.5, 0.5])
    # Every ground has its own ink, or a dark page's ink would be used.
    assert all(
        "color:" in style and "background:" in style for style in re.findall(r'<span [^>]*style="([^"]*)"', strip)
    )


def test_a_strip_grows_darker_with_doubt_and_the_ink_stays_readable() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    grounds = []
    for p in np.linspace(1, 0, 101):
        span = plots.token_strip(["a"], [p]).split("</span>")[0]
        ground, ink = re.findall(r"(?:background|;color):(#[0-9a-f]{6})", span.split("<span")[1])
        light, dark = sorted((luminance(ground), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA
        grounds.append(luminance(ground))
    assert grounds == sorted(grounds, reverse=True)


def test_a_strip_without_a_probability_is_plain() -> None:
    assert "p =" not in plots.token_strip(["a"], [float("nan")]).split("</span>")[0]


# --- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["boolean", "numbers", "alike"], ["odd", "long"], ["many"], ["boolean"]])
@pytest.mark.parametrize("trunk", [list(range(60, 66)), [60], list(range(60, 400))])
def test_the_tree(names: list[str], trunk: list[int]) -> None:
    found = plan([Wish(compiled().fields[name], "marginal") for name in names])
    texts = shown(plots.token_tree(found, text_of, trunk, head=1234))
    assert "head: 1,234 tokens" in texts
    if "alike" in names:
        assert {"DELIVER", "DELIVER_WITH_WARNING", "BLOCK", "null"} <= set(texts)


@pytest.mark.parametrize("name", [name for name in LABELS if name != "one"])
def test_the_trie(name: str) -> None:
    fields, log_probs = planned([name], "exact")
    texts = shown(plots.label_trie(fields[0], log_probs, text_of))
    if name == "many":
        assert "… and 24 labels less probable" in texts
    if name == "alike":
        item = fields[0]
        assert f"{np.exp(log_probs[item.whole[0][item.whole[0] >= 0]].sum()):.2g}" in texts


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [list(LABELS), ["boolean"], ["many"], ["one"]])
def test_shares(names: list[str]) -> None:
    texts = shown(plots.label_shares(decided(names)))
    assert set(names) <= set(texts)
    assert ("29 others together" in texts) == ("many" in names)


def test_costs() -> None:
    rows = {
        "token by token": {"forward passes": 1234, "seconds": 12.3456},
        "in $runs$": {"forward passes": 10, "seconds": 3.0},
        "one pass": {"forward passes": 1, "seconds": 0.5},
    }
    texts = shown(plots.costs(rows))
    assert {"1,234  (×1234)", "1", "12.35  (×25)", "3  (×6.0)", "0.50"} <= set(texts)
    shown(plots.costs({"only": {"seconds": 0.0}}))


@pytest.mark.parametrize("count", [1, 8, 28])
def test_masses(count: int) -> None:
    names = [f"field_{i}" if i else "$a_field_with_a_name_that_goes_on_and_on$" for i in range(count)]
    titles = ["a document", "another document that has a rather long title: it goes on for more than a line, and on"]
    texts = shown(plots.candidate_masses({title: dict.fromkeys(names, 0.4) for title in titles}))
    assert f"candidate mass (probability; n = {count} field{'s' if count > 1 else ''})" in texts


# --- agreement --------------------------------------------------------------------------------------------------------

CHECKS = [
    Check("tree as rows", "", 3e-6, 2e-3, True),
    Check("tree as plain forward", "", 0.0, 2e-3, True),
    Check("repeatability", "", 0.0, 0.0, True),
    Check("sliding window", "", 0.0, 2e-3, None, "no window"),
]
BAD = [replace(CHECKS[0], largest=0.7, passed=False), replace(CHECKS[1], largest=np.inf, passed=False), *CHECKS[2:]]


def test_a_table_of_checks() -> None:
    table = plots.check_table({"torch": CHECKS, "mlx": BAD})
    assert list(table.index) == [check.name for check in CHECKS]
    assert list(table["tolerance"]) == ["2.0e-03", "2.0e-03", "0", "2.0e-03"]
    assert list(table["torch"]) == ["3.0e-06", "0", "0", "not run"]
    assert list(table["mlx"]) == ["7.0e-01 FAILS", "no number FAILS", "0", "not run"]


@pytest.mark.parametrize(
    "panels",
    [
        {"one": {"torch": CHECKS}},
        {
            "tiny": {"torch": CHECKS, "mlx": BAD, "llamacpp": CHECKS},
            "a model with a name that is $long$": {"mlx": CHECKS},
        },
        {"equal": {"torch": [CHECKS[2]]}},
    ],
)
def test_differences_have_a_place_each(panels: dict[str, dict[str, list[Check]]]) -> None:
    figure = plots.differences(panels)
    texts = shown(figure)
    backends = {name for panel in panels.values() for name in panel}
    assert backends | {"0", "largest that passes"} <= set(texts)
    assert ("no number" in texts) == ("tiny" in panels)
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        dots = [tuple(map(float, d.get_offsets()[0])) for d in axes.collections if len(d.get_offsets())]
        assert len(set(dots)) == len(dots) == sum(c.passed is not None for run in panel.values() for c in run)
        low, high = axes.get_xlim()
        assert all(low < x < high for x, _ in dots)


def test_the_fault_matrix() -> None:
    found = {"sound": CHECKS, "caught": BAD, "missed": CHECKS}
    texts = shown(plots.fault_matrix(found, {"caught": "tree as rows", "missed": "tree as rows"}))
    assert {*found, *(check.name for check in CHECKS), "must fail, does not"} <= set(texts)
    assert texts.count("×") == 2 + 2  # in the matrix and in the legend
    assert texts.count("?") == 1 + 1
    assert texts.count("–") == 3 + 1


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shifts(count: int) -> None:
    panels = {f"variant ${i}$": ([0.02, 0.0, 0.3], [False, False, i > 0]) for i in range(count)}
    figure = plots.shifts(panels)
    texts = shown(figure)
    assert "variant $0$\n0 of 3 changed" in texts
    assert (f"variant ${count - 1}$\n1 of 3 changed" in texts) == (count > 1)
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert len(drawn) == count
    kept, flipped = drawn[-1].collections
    assert len(kept.get_offsets()) == 3 - (count > 1)
    assert len(flipped.get_offsets()) == (count > 1)
    assert kept.get_offsets()[0, 1] == plots.LEAST  # a zero has its place on the logarithmic scale too
    shown(plots.shifts({"nothing moved": ([0.0, 0.0], [False, False])}))


def test_margins() -> None:
    texts = shown(plots.margins([0.1, 0.4, 0.01], [0.02, 0.03, 0.05], [False, False, True]))
    assert "half the lead of the best label (share; n = 3 decisions)" in texts
    assert {"value kept", "value changed", "moved by half the lead or more: could change"} <= set(texts)
    shown(plots.margins([0.1], [0.0], [False]))


# --- rates and their intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [1, 3, 5])
@pytest.mark.parametrize("count", [1, 6])
def test_rates(ways: int, count: int) -> None:
    rows = {f"field ${i}$ (n = 40)": {f"way {w}": (0.1 * w + 0.3, 0.0, 1.0) for w in range(ways)} for i in range(count)}
    marks = {row: {"always the most frequent": 0.5, "blindly": 0.0} for row in rows}
    figure = plots.rates(rows, "accuracy", marks)
    texts = shown(figure)
    assert {*rows, *(f"way {w}" for w in range(ways)), "accuracy", "blindly", "0 %", "100 %"} <= set(texts)
    dots = {tuple(line.get_xydata()[0]) for line in figure.axes[0].lines if line.get_markersize() == 5.5}
    assert len(dots) == ways * count
    shown(plots.rates({"row (n = 1)": {"way": (1.0, 0.2, 1.0)}}, "accuracy"))


def test_rates_leave_a_gap_where_a_way_was_not_measured() -> None:
    rows = {"one (n = 9)": {"a": (0.5, 0.2, 0.8), "b": (0.6, 0.3, 0.9)}, "two (n = 9)": {"b": (0.1, 0.0, 0.4)}}
    lines = plots.rates(rows, "accuracy").axes[0].lines
    assert sorted(line.get_xdata()[0] for line in lines if line.get_markersize() == 5.5) == [0.1, 0.5, 0.6]


def test_paired_differences() -> None:
    better = Comparison(176, 0.2, 0.5, 0.3, 0.22, 0.38, 3, 56, 1e-9)
    rows = {
        "$track$": better,
        "a_field_with_a_long_name": better,
        "level": replace(better, n=40, difference=-0.01, low=-0.2, high=0.18),
    }
    figure = plots.paired(rows, "raw", "corrected")
    texts = shown(figure)
    assert {"$track$", "level", "176", "40", "0", "percentage points of accuracy: corrected minus raw"} <= set(texts)
    low, high = figure.axes[0].get_xlim()
    assert low == -high
    assert high > 0.38
    shown(plots.paired({"equal": Comparison(1, 1.0, 1.0, 0.0, 0.0, 0.0, 0, 0, 1.0)}, "a", "b"))


@pytest.mark.parametrize("labels", [["yes", "no"], [f"a label with a long name, ${i}$" for i in range(8)]])
@pytest.mark.parametrize("panels", [1, 2])
def test_confusions(labels: list[str], panels: int) -> None:
    counts = pd.DataFrame(np.eye(len(labels), dtype=int) * 11, index=labels, columns=labels)
    counts.iloc[0, 1] = 7
    texts = shown(plots.confusions({f"way {i}": counts for i in range(panels)}))
    assert texts.count("7") == panels
    assert texts.count("11") == panels * len(labels)
    assert f"way 0 (n = {counts.to_numpy().sum()})" in texts
    shown(plots.confusions({"nothing": counts * 0}))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_curves(log: bool, count: int) -> None:
    x = np.array([8.0, 16, 32, 64, 128])
    table = pd.DataFrame({"x": x, "value": x / 200, "low": x / 300, "high": x / 150})
    series = {f"way ${i}$": table for i in range(count)}
    texts = shown(plots.curves(series, "labels", "accuracy (n = 176)", {"raw": 0.2, "most frequent": 0.3}, log=log))
    assert {*series, "raw", "most frequent", "labels", "accuracy (n = 176)", "100 %"} <= set(texts)
    assert ("128" in texts) == log
    shown(plots.curves({"no interval": table[["x", "value"]]}, "labels", "Brier score", percent=False))


def test_long_curves_have_bands() -> None:
    x = np.arange(1, 101)
    table = pd.DataFrame({"x": x / 100, "value": x / 100, "low": x / 200, "high": np.ones(100)})
    figure = plots.curves({"all": table}, "share", "found")
    shown(figure)
    (band,) = figure.axes[0].collections
    assert band.get_alpha() is not None


@pytest.mark.parametrize("count", [1, 3])
def test_reliability(count: int) -> None:
    shares = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]])
    table = accuracy_by_confidence(shares, np.array([0, 1, 1, 0]), bins=2)
    panels = {f"way ${i}$": (table, f"ECE 0.{i}, n = 4") for i in range(count)}
    figure = plots.reliability(panels)
    texts = shown(figure)
    assert "way $0$\nECE 0.0, n = 4" in texts
    points = figure.axes[-1].lines[-1].get_xydata()
    assert np.allclose(points, table[["confidence", "accuracy"]])


def test_the_style_stays_inside() -> None:
    before = dict(mpl.rcParams)
    plots.costs({"only": {"seconds": 1.0}})
    assert dict(mpl.rcParams) == before


def test_the_slope_of_scores_on_lengths() -> None:
    panels = {"sum": ([2, 3, 4], [-4.0, -6.0, -8.0]), "length": ([2, 2], [1.0, 2.0]), "many": (range(20), np.zeros(20))}
    texts = shown(plots.length_bias(panels))
    assert {"sum\n-2.00 nats a token", "length\nall of one length"} <= set(texts)


def test_the_agreement_matrix() -> None:
    names = ["isolated", "a way with a name that is $rather$ long"]
    texts = shown(plots.agreement_matrix(pd.DataFrame([[1.0, 0.25], [0.25, 1.0]], names, names)))
    assert texts.count("25%") == 2
    assert texts.count("100%") == 2


def test_histograms() -> None:
    texts = shown(plots.histograms({"tickets": [2, 2, 3, 9], "one": [4]}, "passes"))
    assert {"tickets\nmedian 2.5, n = 4", "one\nmedian 4, n = 1"} <= set(texts)
