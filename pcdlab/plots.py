"""Every figure the notebooks draw: numbers and compiled schemas in, a matplotlib figure, a table or a piece of HTML out.

Knows how things look: legible in print, in grey and to colour-blind readers, on light and dark pages. Refuses to know a
framework, a model or where the numbers come from.
"""

from __future__ import annotations

import functools
import html
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pcdlab.backends.conformance import Check
    from pcdlab.decide import FieldPlan, Plan
    from pcdlab.result import FieldDecision
    from pcdlab.studies.accuracy import Comparison

__all__ = [
    "agreement_matrix",
    "candidate_masses",
    "check_table",
    "confusions",
    "costs",
    "curves",
    "differences",
    "fault_matrix",
    "histograms",
    "label_shares",
    "label_trie",
    "length_bias",
    "margins",
    "paired",
    "rates",
    "reliability",
    "shifts",
    "token_strip",
    "token_tree",
    "visible",
]

# Okabe and Ito's colours, told apart with any colour vision; blue and orange also differ in grey.
BLUE, ORANGE, SKY = "#0072B2", "#E69F00", "#56B4E9"
INK, SOFT, PALE, PAPER = "#1b1f24", "#59636e", "#d8dee4", "#ffffff"
STYLE: Any = {
    "figure.facecolor": PAPER,
    "figure.dpi": 144,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a label is a dollar
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.linewidth": 0.6,
}
P = ParamSpec("P")
R = TypeVar("R")


def _styled(draw: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(draw)
    def styled(*args: P.args, **options: P.kwargs) -> R:
        with plt.rc_context(STYLE):
            return draw(*args, **options)

    return styled


LONGEST = 34  # characters of a label or token that are drawn
Text = Callable[[int], str]


def visible(text: str) -> str:
    """Show what is blank in a token: ``␣`` for a space, ``↵`` for a line end, ``⇥`` for a tab.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
        Other control characters are escaped.

    Examples
    --------
    >>> visible(' "a')
    '␣"a'
    """
    shown = text.translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _probability(value: float) -> str:
    return "<0.01" if 0 < value < 0.01 else f"{value:.2f}"


def _edge(value: float) -> str:
    """Six characters at most, and digits however small: products along a path can be checked."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" if value >= 0.001 else f"{value:.1g}"


# --- text -------------------------------------------------------------------------------------------------------------


def token_strip(texts: Sequence[str], probabilities: Sequence[float], decisions: Sequence[bool] | None = None) -> str:
    """Write tokens out as text, each shaded by how uncertain it was.

    Parameters
    ----------
    texts : sequence of str
        The tokens' texts, in order.
    probabilities : sequence of float
        Probability of each token under the model, in [0, 1]; NaN where it is not known.
    decisions : sequence of bool, optional
        Which tokens there was a choice for; these are underlined.

    Returns
    -------
    str
        HTML with colours of its own, so that it reads the same on light and dark pages. White: certain, dark: improbable.
    """
    chosen = decisions if decisions is not None else [False] * len(texts)
    spans = [_span(*token) for token in zip(texts, probabilities, chosen, strict=True)]
    scale = "".join(_span(f" {p:.2f} ", p, False) for p in (1.0, 0.75, 0.5, 0.25, 0.0))
    legend = f"probability of the token: {scale}"
    if decisions is not None:
        legend += f" &nbsp; {_span(' token ', 1.0, True)} = a decision: more than one token was allowed"
    outer = f"background:{PAPER};color:{INK};padding:.8em 1em;border:1px solid {PALE};border-radius:4px"
    body = "font:13px/2.1 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere"
    note = f"font:12px/2.2 system-ui,'DejaVu Sans',sans-serif;color:{INK}"
    return f'<div style="{outer}"><div style="{body}">{"".join(spans)}</div><div style="{note}">{legend}</div></div>'


def _span(text: str, probability: float, chosen: bool) -> str:
    known = not np.isnan(probability)
    doubt = 1 - min(max(probability, 0.0), 1.0) if known else 0.0
    # From white to a dark blue: lightness alone carries the number, so grey print keeps it.
    colour = "#" + "".join(f"{round(255 + (end - 255) * doubt):02x}" for end in (0x0B, 0x3C, 0x6E))
    ink = "#000000" if doubt < 0.685 else PAPER  # the one that stands out more
    shown = html.escape(visible(text)).replace("␣", "&nbsp;").replace("↵", "↵<br>")
    line = f"3px solid {ORANGE}" if chosen else "3px solid transparent"
    weight = "font-weight:700;" if chosen else ""
    title = f"{visible(text)}  p = {probability:.3f}" if known else visible(text)
    return (
        f'<span title="{html.escape(title)}" style="{weight}background:{colour};color:{ink};border-bottom:{line};'
        f'padding:.15em 0;border-left:1px solid {PALE}">{shown}</span>'
    )


# --- trees ------------------------------------------------------------------------------------------------------------

POINTS = 8.0  # font size of tokens
CHARACTER = POINTS * 0.602 / 72  # inches; DejaVu Sans Mono
ROW = 0.235  # inches
PAD = 0.8  # characters of room in a box, left and right together


@dataclass
class _Box:
    """A token in a drawn tree; ``x`` and ``y`` are its left edge in characters and its row, both set by `_place`."""

    text: str
    parent: int
    kind: str = "fed"  # "fed" | "read" | "asked" | "rest" | "gap" | "prefix"
    edge: str = ""
    weight: float = 0.0
    label: str = ""
    order: int = 0
    x: float = 0.0
    y: float = 0.0
    children: list[int] = field(default_factory=list)

    @property
    def width(self) -> float:
        """Characters, padding included."""
        wide = sum(unicodedata.east_asian_width(c) in "WF" for c in self.text)
        return max(len(self.text) + wide + PAD, 1.8)


LOOKS: dict[str, dict[str, Any]] = {
    "prefix": {"facecolor": PALE, "edgecolor": SOFT, "linewidth": 0.8},
    "fed": {"facecolor": PAPER, "edgecolor": SOFT, "linewidth": 0.8},
    "read": {"facecolor": "#fbe3b0", "edgecolor": INK, "linewidth": 1.6},
    "asked": {"facecolor": PAPER, "edgecolor": BLUE, "linewidth": 1.0, "linestyle": (0, (2.5, 1.5))},
    "found": {"facecolor": "#d6eaf5", "edgecolor": BLUE, "linewidth": 1.6},
    "rest": {"facecolor": PAPER, "edgecolor": PALE, "linewidth": 0.8},
    "gap": {"facecolor": PAPER, "edgecolor": PAPER, "linewidth": 0.0},
}


def _place(boxes: list[_Box], gap: float) -> int:
    """Set every box's place; returns the number of rows.

    Columns follow the widths, leaves get a row each, a parent stands half-way between its first and last child.
    """
    for i, box in enumerate(boxes):
        if box.parent >= 0:
            boxes[box.parent].children.append(i)
            above = boxes[box.parent]
            box.x = above.x + above.width + gap
    # Leaves from top to bottom in the order of a walk through the tree; a parent comes before its children in the list.
    rows = 0
    stack = [i for i, box in enumerate(boxes) if box.parent < 0][::-1]
    while stack:
        box = boxes[stack.pop()]
        box.children.sort(key=lambda child: boxes[child].order)
        stack.extend(reversed(box.children))
        if not box.children:
            box.y = rows
            rows += 1
    for box in reversed(boxes):
        if box.children:
            box.y = (boxes[box.children[0]].y + boxes[box.children[-1]].y) / 2
    return rows


def _draw(
    boxes: list[_Box], rows: float, right: float, gap: float, legend: Sequence[tuple[str, str]]
) -> tuple[Figure, Axes]:
    """Draw placed boxes in `rows` rows; `right` characters are left free behind the last column."""
    spans = [0.9 * len(text) + 5 for _, text in legend]
    width = max(max(box.x + box.width for box in boxes) + right, sum(spans))
    foot = 1.6 if legend else 0.2
    figure, axes = _canvas(width * CHARACTER, (rows + foot) * ROW)
    axes.set_xlim(-0.3, width)
    axes.set_ylim(rows - 0.5 + foot, -0.5)
    for box in boxes:
        if box.parent >= 0:
            above = boxes[box.parent]
            start = above.x + above.width
            turn = start + min(gap, 1.6) / 2
            line: dict[str, Any] = {"color": SOFT, "linewidth": 0.8 + 2.2 * box.weight, "solid_capstyle": "butt"}
            axes.plot([start, turn, turn, box.x], [above.y, above.y, box.y, box.y], zorder=1, **line)
        if box.edge:
            axes.text(box.x - 0.2, box.y - 0.1, box.edge, ha="right", va="bottom", size=6.3)
        _draw_box(axes, box)
        if box.label:
            axes.text(box.x + box.width + 0.7, box.y, box.label, va="center", size=POINTS)
    at = 0.0
    for (kind, text), span in zip(legend, spans, strict=True):
        key = _Box("", -1, kind, x=at, y=rows - 0.5 + foot * 0.6)
        _draw_box(axes, key)
        axes.text(at + key.width + 0.7, key.y, text, va="center", size=POINTS)
        at += span
    return figure, axes


def _draw_box(axes: Axes, box: _Box) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((box.x, box.y - 0.37), box.width, 0.74, zorder=2, **LOOKS[box.kind]))
    axes.text(
        box.x + box.width / 2,
        box.y - 0.04,
        box.text,
        ha="center",
        va="center_baseline",
        size=POINTS,
        family="DejaVu Sans Mono",
        color=SOFT if box.kind in ("rest", "gap") else INK,
        zorder=3,
    )


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches with one bare axes all over it."""
    figure = plt.figure(figsize=(width, height))
    plt.close(figure)  # or a notebook shows it twice
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    return figure, axes


@_styled
def token_tree(plan: Plan, text_of: Text, trunk: Sequence[int], head: int) -> Figure:
    """Draw the tree of one pass: head, trunk, branches and twigs, and what is read where.

    Parameters
    ----------
    plan : Plan
        What hangs below the trunk; at best three fields or so.
    text_of : callable
        Text of a token id.
    trunk : sequence of int
        The document and the end of the prompt.
    head : int
        Number of cached tokens in front of the trunk.

    Returns
    -------
    matplotlib.figure.Figure
    """
    tree = plan.tree
    boxes = [_Box(f"head: {head:,} tokens", -1, "prefix")]

    def add(text: str, parent: int, kind: str, label: str = "", order: int = 0) -> int:
        boxes.append(_Box(_cut(text, 24), parent, kind, label=label, order=order))
        return len(boxes) - 1

    end = 0
    shown = trunk if len(trunk) <= 5 else trunk[:1]
    for token in shown:
        end = add(visible(text_of(token)), end, "fed")
    if len(trunk) > 5:
        end = add(f"… {len(trunk) - 4:,} more tokens …", end, "gap")
        for token in trunk[-3:]:
            end = add(visible(text_of(token)), end, "fed")
    names = _names(plan)
    reads = {int(node): i for i, node in enumerate(tree.read_nodes)}
    place = {-1: end}
    fed = set()
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        place[node] = add(visible(text_of(token)), place[parent], "read" if node in reads else "fed")
        fed.add((parent, token))
        if parent in reads:  # in the place it has among what is read there
            boxes[-1].order = tree.read(reads[parent]).tolist().index(token)
    for node, read in reads.items():
        asked = list(enumerate(tree.read(read).tolist()))
        first = int(tree.offsets[read])
        for order, token in asked:
            if first + order in names and (node, token) not in fed:
                add(visible(text_of(token)), place[node], "asked", _cut(names[first + order]), order)
        others = sum(first + order not in names for order, _ in asked)
        if others:
            add(f"+{others} other spelling{'s' if others > 1 else ''}", place[node], "rest", order=len(asked))
    rows = _place(boxes, gap=1.1)
    right = max((len(box.label) + 1.5 for box in boxes), default=0) * 1.05
    legend = [("prefix", "cached"), ("fed", "fed in the pass"), ("read", "fed, and the next token is read here")]
    return _draw(boxes, rows, right, 1.1, [*legend, ("asked", "not fed, only read: tells labels apart")])[0]


def _names(plan: Plan) -> dict[int, str]:
    """Index of a candidate that is a token of a JSON spelling → the label it identifies, empty while several are left."""
    names: dict[int, str] = {}
    for item in plan.fields:
        compiled = item.wish.compiled
        for path, places in item.nodes.items():
            for token, labels in compiled.trie[path].items():
                alone = len(labels) == 1
                names[places[token]] = _name(compiled.field.labels[next(iter(labels))]) if alone else ""
    return names


def _name(label: Any) -> str:
    from pcdlab.schema import Field

    return visible(label).replace("␣", " ") if isinstance(label, str) else Field.json(label)


@_styled
def label_trie(item: FieldPlan, log_probs: NDArray[np.float64], text_of: Text, most: int = 16) -> Figure:
    """Draw the labels of one field as a trie of tokens, the model's probability on every edge.

    Parameters
    ----------
    item : FieldPlan
        The field, planned with scorer ``exact``, so that whole lines were read.
    log_probs : float64 array, shape (candidates,)
        What the plan's tree read.
    text_of : callable
        Text of a token id.
    most : int
        Labels drawn, the most probable ones; the rest is counted.

    Returns
    -------
    matplotlib.figure.Figure
        Behind each label the product of the edges up to the token that identifies it, and to the end of the line.
        Other spellings are not in it.
    """
    compiled = item.wish.compiled
    padded = np.append(log_probs, 0.0)
    identified = padded[item.identify[: len(compiled.canonical)]].sum(axis=1)
    whole = padded[item.whole].sum(axis=1)
    ranked = np.argsort(-identified, kind="stable").tolist()
    best, shown = ranked[0], frozenset(ranked[:most])
    names = {label: _cut(_name(compiled.field.labels[label])) for label in sorted(shown)}
    boxes = [_Box(visible(text_of(compiled.branch[-1])), -1, "read")]
    place: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(compiled.trie, key=len):
        for token, labels in sorted(compiled.trie[path].items(), key=lambda pair: min(pair[1])):
            if path not in place or not labels & shown:
                continue
            alone = len(labels) == 1
            before = len(frozenset().union(*compiled.trie[path].values())) > 1
            p = float(np.exp(log_probs[item.nodes[path][token]]))
            kind = ("found" if before else "rest") if alone else "fed"
            boxes.append(_Box(_cut(visible(text_of(token)), 24), place[path], kind, _edge(p), min(1.0, p)))
            place[*path, token] = len(boxes) - 1
    rows = _place(boxes, gap=5.2)
    column = max(box.x + box.width for box in boxes) + 1.5
    longest = max(len(name) for name in names.values()) + 1
    hidden = len(compiled.canonical) - len(shown)
    head = 1.2  # rows for the columns' headings
    for box in boxes:
        box.y += head
    legend = [("found", "telling token: one label is left"), ("rest", "not needed to tell the labels apart")]
    figure, axes = _draw(boxes, rows + head + bool(hidden), 1.5 + longest + 25, 5.2, legend)
    columns = [column + longest + 12, column + longest + 24]
    for x, heading in zip(columns, ("to the telling token", "whole line"), strict=True):
        axes.text(x, 0.1, heading, ha="right", va="center", size=POINTS, color=SOFT)
    for label, name in names.items():
        box = boxes[place[compiled.canonical[label].tokens]]
        axes.plot([box.x + box.width + 0.4, column - 0.6], [box.y] * 2, color=PALE, linewidth=0.8, linestyle=":")
        axes.text(column, box.y, name, va="center", size=POINTS, weight="bold" if label == best else "normal")
        for x, value in zip(columns, (identified[label], whole[label]), strict=True):
            axes.text(x, box.y, f"{np.exp(value):.2g}", ha="right", va="center", size=POINTS)
    if hidden:
        axes.text(column, rows + head, f"… and {hidden} labels less probable", va="center", size=POINTS, color=SOFT)
    return figure


# --- numbers ----------------------------------------------------------------------------------------------------------

BAR = 0.19  # inches from one bar to the next


@_styled
def label_shares(decisions: Sequence[FieldDecision], columns: int = 2, most: int = 12) -> Figure:
    """Draw for every field how the allowed labels share the probability.

    Parameters
    ----------
    decisions : sequence of FieldDecision
    columns : int
        Panels side by side.
    most : int
        Bars in a panel; where there are more labels, the most probable ones and one bar for the rest.

    Returns
    -------
    matplotlib.figure.Figure
    """
    panels = [(decision, _bars(decision, most)) for decision in decisions]
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(len(bars) for _, bars in line) * BAR + 0.45 for line in lines]
    names = max(len(name) for _, bars in panels for name, _, _ in bars) * 0.073 + 0.15  # inches
    bar, total = 1.7, sum(heights)
    width = columns * (names + bar + 0.5)
    figure = plt.figure(figsize=(width, total))
    plt.close(figure)
    top = total
    for line, height in zip(lines, heights, strict=True):
        for column, (decision, bars) in enumerate(line):
            left = (column * width / columns + names) / width
            tall = len(bars) * BAR
            axes = figure.add_axes((left, (top - 0.3 - tall) / total, bar / width, tall / total))
            _draw_bars(axes, decision, bars, names / bar)
        top -= height
    return figure


def _bars(decision: FieldDecision, most: int) -> list[tuple[str, float, bool]]:
    """Name, share and whether it was chosen, in label order; the rest in one bar at the end."""
    shares = {decision.value: decision.probability, **dict(decision.alternatives)}
    kept = set(sorted(shares, key=lambda label: -shares[label])[: most - 1]) if len(shares) > most else set(shares)
    kept.add(decision.value)
    bars = [(_cut(_name(v)), shares[v], v == decision.value) for v in decision.log_probs if v in kept]
    if len(kept) < len(shares):
        rest = [shares[label] for label in shares if label not in kept]
        bars.append((f"{len(rest)} others together", sum(rest), False))
    return bars


def _draw_bars(axes: Axes, decision: FieldDecision, bars: Sequence[tuple[str, float, bool]], left: float) -> None:
    for y, (name, share, chosen) in enumerate(bars):
        style = {"color": BLUE} if chosen else {"facecolor": PALE, "edgecolor": SOFT, "linewidth": 0.6}
        axes.barh(y, share, height=0.72, **style)
        axes.text(share + 0.02, y, _probability(share), va="center", size=7.5)
        weight = "bold" if chosen else "normal"
        axes.text(-0.03, y, name, ha="right", va="center", size=8, weight=weight)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.axis("off")
    mass = "" if decision.candidate_mass is None else f"candidate mass {_probability(decision.candidate_mass)}"
    axes.text(-left, -0.75, _cut(decision.name), weight="bold", va="bottom", size=8.5)
    axes.text(1.05, -0.75, mass, ha="right", va="bottom", size=7.5, color=SOFT)


@_styled
def costs(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw what several ways to the same result cost, one panel per measure.

    Parameters
    ----------
    rows : mapping of str to mapping of str to float
        Way → measure (its name with the unit) → cost. The last way is what the others are compared with.

    Returns
    -------
    matplotlib.figure.Figure
    """
    ways = list(rows)
    measures = list(rows[ways[0]])
    figure, panels = plt.subplots(1, len(measures), figsize=(8, 0.42 * len(ways) + 0.7), sharey=True, squeeze=False)
    plt.close(figure)
    for axes, measure in zip(panels[0], measures, strict=True):
        values = [rows[way][measure] for way in ways]
        for y, value in enumerate(values):
            last = y == len(ways) - 1
            style = {"color": BLUE} if last else {"facecolor": PALE, "edgecolor": SOFT, "hatch": "////"}
            axes.barh(y, value, height=0.62, **style)
            ratio = "" if last or not values[-1] else f"  (×{_ratio(value / values[-1])})"
            axes.text(value + 0.02 * max(values), y, f"{_amount(value)}{ratio}", va="center", size=8)
        axes.set_xlim(0, max(values) * 1.55 or 1)
        axes.set_title(measure, size=9, loc="left")
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
    _name_rows(panels[0][0], ways)
    figure.tight_layout(w_pad=1.5)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a chart from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.2f}"


@_styled
def candidate_masses(documents: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the candidate mass of every field for a few documents, one line per field.

    Parameters
    ----------
    documents : mapping of str to mapping of str to float
        Document → field → candidate mass in [0, 1]; at most four documents, the same fields in each.

    Returns
    -------
    matplotlib.figure.Figure
    """
    names = list(next(iter(documents.values())))
    legend = 0.2 * len(documents) + 0.1  # inches
    height = 0.26 * len(names) + 0.8 + legend
    figure, axes = plt.subplots(figsize=(7.2, height))
    plt.close(figure)
    looks = ((BLUE, "o", BLUE), (PAPER, "s", INK), (ORANGE, "^", INK), (PAPER, "D", BLUE))
    for y, name in enumerate(names):
        values = [masses[name] for masses in documents.values()]
        axes.plot([min(values), max(values)], [y, y], color=PALE, linewidth=3, zorder=1, solid_capstyle="round")
    for (title, masses), (face, marker, edge) in zip(documents.items(), looks, strict=False):
        style: dict[str, Any] = {"marker": marker, "facecolor": face, "edgecolor": edge, "s": 42, "zorder": 2}
        axes.scatter([masses[name] for name in names], range(len(names)), label=_cut(title, 72), **style)
    _name_rows(axes, [_cut(name) for name in names])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"candidate mass (probability; n = {len(names)} {'field' if len(names) == 1 else 'fields'})")
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="upper left", frameon=False, borderaxespad=0.2, handletextpad=0.4, labelspacing=0.3)
    figure.tight_layout(rect=(0, 0, 1, 1 - legend / height))
    return figure


# --- agreement --------------------------------------------------------------------------------------------------------

SERIES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "facecolor": BLUE, "edgecolor": BLUE},
    {"marker": "^", "facecolor": ORANGE, "edgecolor": INK},
    {"marker": "s", "facecolor": PAPER, "edgecolor": INK},
    {"marker": "D", "facecolor": SKY, "edgecolor": INK},
)
LEAST = 1e-7  # total variation drawn: below it there is nothing but float32
CHANGED: dict[str, Any] = {"marker": "^", "facecolor": ORANGE, "edgecolor": INK, "s": 40, "linewidth": 0.8, "zorder": 3}


def check_table(runs: Mapping[str, Sequence[Check]]) -> pd.DataFrame:
    """Write conformance checks as a table.

    Parameters
    ----------
    runs : mapping of str to sequence of Check
        Backend → its checks; the same checks, with the same tolerances, for each.

    Returns
    -------
    pandas.DataFrame
        Check × (tolerance, backends), all as text: the largest difference, ``FAILS`` behind one that is too large.
    """
    import pandas as pd

    def outcome(check: Check) -> str:
        return "not run" if check.passed is None else f"{_size(check.largest)}{'' if check.passed else ' FAILS'}"

    first = next(iter(runs.values()))
    columns = {name: [outcome(check) for check in run] for name, run in runs.items()}
    limits = {"tolerance": [_size(check.tolerance) for check in first]}
    return pd.DataFrame(limits | columns, index=[check.name for check in first])


def _size(value: float) -> str:
    return f"{value:.1e}" if value and np.isfinite(value) else "0" if not value else "no number"


@_styled
def differences(panels: Mapping[str, Mapping[str, Sequence[Check]]]) -> Figure:
    """Draw how far each conformance check was from its limit, on a logarithmic scale.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of Check
        Title → backend → its checks; at most four backends. All panels hold the same checks. Checks that were not run are
        left out; a difference that is no number stands at the right edge, marked "no number".

    Returns
    -------
    matplotlib.figure.Figure
        Exact zeros have a place of their own at the left edge.
    """
    runs = [checks for panel in panels.values() for checks in panel.values()]
    names = [check.name for check in runs[0]]
    backends = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    seen = [v for checks in runs for c in checks for v in (c.largest, c.tolerance) if c.passed is not None]
    sizes = [v for v in seen if np.isfinite(v) and v > 0] or [1.0]
    low, high = 10 ** np.floor(np.log10(min(sizes))), 10 ** np.ceil(np.log10(max(sizes)) + 0.2)
    zero, none = low / 20, high * 5
    height, foot = 0.33 * len(names) + 1.25, 0.35
    figure, columns = plt.subplots(
        1, len(panels), figsize=(2.1 + 3.3 * len(panels), height), sharey=True, squeeze=False
    )
    plt.close(figure)
    for axes, (title, panel) in zip(columns[0], panels.items(), strict=True):
        for y, name in enumerate(names):
            checks = [(b, c) for b, run in panel.items() for c in run if c.name == name and c.passed is not None]
            for limit in {check.tolerance for _, check in checks}:
                axes.plot([limit or zero] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=2, zorder=1)
            for backend, check in checks:
                place = y + 0.3 * (backends.index(backend) - (len(backends) - 1) / 2)
                at = none if not np.isfinite(check.largest) else check.largest or zero
                axes.scatter([at], [place], s=22, linewidth=0.8, zorder=3, **SERIES[backends.index(backend)])
        axes.set_xscale("log")
        axes.set_xlim(zero / 3, none * 3 if not np.isfinite(seen).all() else high)
        marks = [10.0**e for e in range(int(np.log10(low)), int(np.log10(high)) + 1, 2)]
        labels = ["0", *(f"1e{round(np.log10(mark))}" for mark in marks)]
        extra = [] if np.isfinite(seen).all() else [none]
        axes.set_xticks([zero, *marks, *extra], [*labels, *("no number" for _ in extra)])
        axes.minorticks_off()
        axes.axvline(low / 4, color=PALE, linewidth=0.8)
        axes.set_title(_cut(title, 40), size=9, loc="left")
        axes.set_xlabel("largest difference of log-probabilities")
        axes.grid(axis="y", color=PALE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
    _name_rows(columns[0][0], names)
    handles: list[Any] = [
        plt.Line2D([], [], linestyle="", marker=s["marker"], color=s["facecolor"], markeredgecolor=s["edgecolor"])
        for s in SERIES[: len(backends)]
    ]
    handles.append(plt.Line2D([], [], linestyle="", marker="|", color=INK, markersize=10, markeredgewidth=2))
    figure.legend(handles, [*backends, "largest that passes"], loc="lower left", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, foot / height, 1, 1), w_pad=1.5)
    return figure


@_styled
def fault_matrix(found: Mapping[str, Sequence[Check]], expected: Mapping[str, str]) -> Figure:
    """Draw which check failed on which backend.

    Parameters
    ----------
    found : mapping of str to sequence of Check
        Row → its checks; the same checks in every row.
    expected : mapping of str to str
        Row → the check that has to fail there. Rows without one should fail none.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.patches import Rectangle

    rows = list(found)
    names = [check.name for check in found[rows[0]]]
    cell, left, foot = 0.27, 0.075 * max(map(len, rows)) + 0.15, 0.45
    top = 0.055 * max(map(len, names)) + 0.15  # slanted names
    wide, tall = len(names) * cell, len(rows) * cell
    legend = {"due": "fails, as it must", "missed": "must fail, does not", "fails": "fails too", "passes": "passes",
              "not run": "not run"}  # fmt: skip
    spans = [2.0 + 0.25 * len(text) for text in legend.values()]  # cells
    width, height = max(left + wide + 0.75, (sum(spans) + 0.4) * cell), top + tall + foot
    figure, axes = _canvas(width, height)
    axes.set_xlim(-left / cell, (width - left) / cell)
    axes.set_ylim(len(rows) + foot / cell, -top / cell)

    def draw(x: float, y: float, look: str) -> None:
        shade = {"fails": BLUE, "due": BLUE, "missed": PAPER, "passes": PAPER, "not run": PALE}[look]
        due = look in ("due", "missed")
        axes.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, facecolor=shade, edgecolor=PALE, linewidth=0.6))
        if due:
            frame: dict[str, Any] = {"fill": False, "edgecolor": ORANGE, "linewidth": 2.4}
            axes.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, zorder=4, **frame))
        sign = {"fails": "×", "due": "×", "missed": "?", "passes": "", "not run": "–"}[look]
        ink = INK if look in ("missed", "not run") else PAPER
        axes.text(x + 0.5, y + 0.48, sign, ha="center", va="center", size=10, color=ink, weight="bold")

    for x, name in enumerate(names):
        axes.text(x + 0.3, -0.25, name, rotation=45, ha="left", va="bottom", size=POINTS, rotation_mode="anchor")
    for y, row in enumerate(rows):
        axes.text(-0.3, y + 0.5, row, ha="right", va="center", size=POINTS)
        for x, check in enumerate(found[row]):
            due = expected.get(row) == check.name
            look = {None: "not run", True: "passes", False: "fails"}[check.passed]
            draw(x, y, ("due" if check.passed is False else "missed") if due else look)
    at = 0.4 - left / cell
    for (look, text), span in zip(legend.items(), spans, strict=True):
        draw(at, len(rows) + 0.4, look)
        axes.text(at + 1.3, len(rows) + 0.9, text, va="center", size=POINTS)
        at += span
    return figure


@_styled
def shifts(panels: Mapping[str, tuple[Sequence[float], Sequence[bool]]], columns: int = 3) -> Figure:
    """Draw how far decisions moved, smallest first, one panel per comparison, on a logarithmic scale.

    Parameters
    ----------
    panels : mapping of str to (sequence of float, sequence of bool)
        Title → total variation distance of each decision in [0, 1], and whether its value changed. What is below 1e-7 is
        drawn there.
    columns : int
        Panels side by side.

    Returns
    -------
    matplotlib.figure.Figure
    """
    lines = -(-len(panels) // columns)
    width = min(columns, len(panels))
    size = (max(2.75 * width + 0.4, 4.4), 1.9 * lines + 0.45)
    figure, grid = plt.subplots(lines, width, figsize=size, sharey=True, squeeze=False)
    plt.close(figure)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for place, (axes, (title, (moved, changed))) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        order = np.argsort(moved, kind="stable")
        values, flipped = np.maximum(np.array(moved)[order], LEAST), np.array(changed, dtype=bool)[order]
        ranks = np.arange(1, len(values) + 1)
        axes.scatter(ranks[~flipped], values[~flipped], s=9, color=BLUE, zorder=2)
        axes.scatter(ranks[flipped], values[flipped], **CHANGED)
        axes.set_yscale("log")
        axes.set_ylim(LEAST / 2, 1)
        axes.set_yticks([1e-6, 1e-4, 1e-2, 1], ["1e-6", "1e-4", "1e-2", "1"])
        axes.minorticks_off()
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(f"{title}\n{flipped.sum()} of {len(values)} changed", size=8.5, loc="left")
        axes.set_xticks([])
        if place % columns == 0:
            axes.set_ylabel("total variation")
    handles = [
        plt.Line2D([], [], linestyle="", marker="o", color=BLUE, markersize=4),
        plt.Line2D([], [], linestyle="", marker="^", color=ORANGE, markeredgecolor=INK),
    ]
    labels = ["decision, value kept", "value changed"]
    figure.legend(handles, labels, loc="lower left", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1), h_pad=1.2)
    return figure


@_styled
def margins(half: Sequence[float], moved: Sequence[float], changed: Sequence[bool]) -> Figure:
    """Draw how far decisions moved against how far they had to move for another value to win.

    Parameters
    ----------
    half : sequence of float
        Half the lead of the best label over the second, in [0, 0.5]: the least total variation that can change the value.
    moved : sequence of float
        Total variation distance, in [0, 1].
    changed : sequence of bool
        Whether the value changed.

    Returns
    -------
    matplotlib.figure.Figure
    """
    x, y, flipped = np.array(half), np.array(moved), np.array(changed, dtype=bool)
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    plt.close(figure)
    top = 1.12 * max(float(y.max(initial=0.0)), 0.01)
    area: dict[str, Any] = {"color": PALE, "alpha": 0.55, "label": "moved by half the lead or more: could change"}
    axes.fill_between([0, 0.5], [0, 0.5], [top, max(top, 0.5)], zorder=0, linewidth=0, **area)
    axes.plot([0, 0.5], [0, 0.5], color=SOFT, linewidth=1)
    axes.scatter(x[~flipped], y[~flipped], s=11, color=BLUE, label="value kept", zorder=2)
    axes.scatter(x[flipped], y[flipped], label="value changed", **CHANGED)
    axes.set_xlim(0, 0.5)
    axes.set_ylim(0, top)
    axes.set_xlabel(f"half the lead of the best label (share; n = {len(x):,} decisions)")
    axes.set_ylabel("total variation")
    figure.legend(loc="lower left", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


# --- rates and their intervals ----------------------------------------------------------------------------------------

LINES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o", "markerfacecolor": BLUE, "markeredgecolor": BLUE},
    {"color": ORANGE, "linestyle": "--", "marker": "^", "markerfacecolor": ORANGE, "markeredgecolor": INK},
    {"color": INK, "linestyle": ":", "marker": "s", "markerfacecolor": PAPER, "markeredgecolor": INK},
    {"color": SKY, "linestyle": "-.", "marker": "D", "markerfacecolor": SKY, "markeredgecolor": INK},
    {
        "color": SOFT,
        "linestyle": (0, (5, 1, 1, 1, 1, 1)),
        "marker": "v",
        "markerfacecolor": PALE,
        "markeredgecolor": INK,
    },
)
MARKS = ("|", "x", "+")
Rate = tuple[float, float, float]


@_styled
def rates(
    rows: Mapping[str, Mapping[str, Rate]],
    label: str,
    marks: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Draw rates with their intervals, one row per thing measured and one look per way to measure it.

    Parameters
    ----------
    rows : mapping of str to mapping of str to (float, float, float)
        Row (with its sample size in the name) → way → rate and the ends of its interval, in [0, 1]; at most five ways.
    label : str
        What the rates are.
    marks : mapping of str to mapping of str to float, optional
        Row → name → a rate to compare with; at most three names.

    Returns
    -------
    matplotlib.figure.Figure
    """
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    named = list(dict.fromkeys(name for row in (marks or {}).values() for name in row))
    step = min(0.2, 0.8 / len(ways))
    foot = 0.25 * (1 + (len(ways) + len(named) > 3))
    height = max(0.42, 0.16 * len(ways) + 0.12) * len(rows) + 0.65 + foot
    figure, axes = plt.subplots(figsize=(7.2, height))
    plt.close(figure)
    for y, (row, found) in enumerate(rows.items()):
        for way, (value, low, high) in found.items():
            at = y + step * (ways.index(way) - (len(ways) - 1) / 2)
            look = LINES[ways.index(way)]
            axes.plot([low, high], [at, at], color=look["color"], linewidth=1.6, zorder=2, solid_capstyle="butt")
            axes.plot([value], [at], markersize=5.5, zorder=3, **look | {"linestyle": ""})
        for name, value in (marks or {}).get(row, {}).items():
            style: dict[str, Any] = {"marker": MARKS[named.index(name)], "color": INK, "linestyle": "", "zorder": 1}
            axes.plot([value], [y], markersize=16 if named.index(name) == 0 else 7, markeredgewidth=1.2, **style)
        if y:
            axes.axhline(y - 0.5, color=PALE, linewidth=0.6)
    _name_rows(axes, [_cut(name, 48) for name in rows])
    axes.tick_params(axis="y", length=0)
    _percent(axes, "x")
    axes.set_xlabel(label)
    handles = [plt.Line2D([], [], markersize=5.5, **LINES[i] | {"linestyle": "-"}) for i in range(len(ways))]
    handles += [plt.Line2D([], [], color=INK, linestyle="", marker=MARKS[i], markersize=8) for i in range(len(named))]
    columns = -(-len(handles) // (2 if len(handles) > 3 else 1))
    figure.legend(handles, [*ways, *named], loc="lower left", ncols=columns, frameon=False, borderaxespad=0.2)
    figure.tight_layout(rect=(0, foot / height, 1, 1))
    return figure


def _percent(axes: Axes, which: str) -> None:
    """Show the whole of an axis of shares, in percent."""
    ticks = np.linspace(0, 1, 6)
    names = [f"{100 * tick:.0f} %" for tick in ticks]
    if which == "x":
        axes.set_xlim(-0.01, 1.01)
        axes.set_xticks(ticks, names)
    else:
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks(ticks, names)
    axes.grid(axis="x" if which == "x" else "y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)


@_styled
def paired(rows: Mapping[str, Comparison], first: str, second: str) -> Figure:
    """Draw how much better the second of two ways is on the same documents, with intervals.

    Parameters
    ----------
    rows : mapping of str to Comparison
        Row → comparison of way a with way b.
    first, second : str
        Names of a and b.

    Returns
    -------
    matplotlib.figure.Figure
        Right of zero the second way is better. In the columns: documents, and those only one of the two has right.
    """
    names = [_cut(name) for name in rows]
    left, wide, column, tall = 0.075 * max(map(len, names)) + 0.2, 3.6, 0.8, 0.34 * len(rows)  # inches
    width, height, foot = left + wide + 3.1 * column, tall + 1.0, 0.55
    figure = plt.figure(figsize=(width, height))
    plt.close(figure)
    axes = figure.add_axes((left / width, foot / height, wide / width, tall / height))
    places = [1 + (i + 0.6) * column / wide for i in range(3)]
    widest = max(0.1, *(max(abs(row.low), abs(row.high)) for row in rows.values())) * 1.05
    for y, row in enumerate(rows.values()):
        axes.plot([row.low, row.high], [y, y], color=BLUE, linewidth=1.8, solid_capstyle="butt")
        axes.plot([row.difference], [y], markersize=6, **LINES[0] | {"linestyle": ""})
        for place, count in zip(places, (row.n, row.only_a, row.only_b), strict=True):
            axes.text(place, y, f"{count:,}", ha="center", va="center", transform=axes.get_yaxis_transform())
    for place, heading in zip(places, ("n", "only first\nright", "only second\nright"), strict=True):
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "size": 8, "color": SOFT}
        axes.text(place, -0.5, heading, transform=axes.get_yaxis_transform(), **style)
    axes.axvline(0, color=INK, linewidth=1)
    _name_rows(axes, names)
    axes.set_xlim(-widest, widest)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f}" if abs(value) > 1e-9 else "0")
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"percentage points of accuracy: {second} minus {first}")
    return figure


@_styled
def confusions(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw right against chosen labels, one panel per way to answer.

    Parameters
    ----------
    panels : mapping of str to DataFrame
        Title → counts, as :func:`pcdlab.studies.accuracy.confusion` gives them; the same labels in each.

    Returns
    -------
    matplotlib.figure.Figure
        A row is one right label, and its shades are shares of that row; what is right lies in the frames.
    """
    from matplotlib.patches import Rectangle

    names = [_cut(str(name), 26) for name in next(iter(panels.values())).index]
    cell = 0.3  # inches
    side = cell * len(names)
    left, foot, gap = 0.075 * max(map(len, names)) + 0.35, 0.055 * max(map(len, names)) + 0.5, 0.35
    width, height = left + len(panels) * (side + gap) + 0.5, side + foot + 0.35
    figure = plt.figure(figsize=(width, height))
    plt.close(figure)
    for place, (title, counts) in enumerate(panels.items()):
        x = left + place * (side + gap)
        axes = figure.add_axes((x / width, foot / height, side / width, side / height))
        matrix = counts.to_numpy()
        shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for i, j in np.argwhere(matrix > 0):
            ink = PAPER if shares[i, j] > 0.55 else INK
            axes.text(j, i, f"{matrix[i, j]:,}", ha="center", va="center", size=7.5, color=ink)
        for i in range(len(names)):
            axes.add_patch(Rectangle((i - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor=ORANGE, linewidth=1.3))
        axes.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        for tick in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
            tick.set_parse_math(False)
        axes.tick_params(length=0, labelsize=7.5)
        axes.set_title(f"{title} (n = {matrix.sum():,})", size=9, loc="left")
        axes.set_xlabel("chosen")
        if place == 0:
            axes.set_ylabel("right")
    return figure


@_styled
def curves(
    series: Mapping[str, pd.DataFrame],
    x_label: str,
    y_label: str,
    references: Mapping[str, float] | None = None,
    log: bool = False,
    percent: bool = True,
) -> Figure:
    """Draw how a number depends on another, with intervals.

    Parameters
    ----------
    series : mapping of str to DataFrame
        Name → columns ``x``, ``value``, and ``low`` and ``high`` where there is an interval; at most five.
    x_label, y_label : str
        With units and sample sizes.
    references : mapping of str to float, optional
        Name → a value that does not depend on x; at most two.
    log : bool
        A logarithmic x axis with a tick at every x.
    percent : bool
        Values are shares, and the whole range is shown.

    Returns
    -------
    matplotlib.figure.Figure
    """
    entries = len(series) + len(references or {})
    foot = 0.22 * -(-entries // 2) + 0.05
    height = 3.3 + foot
    figure, axes = plt.subplots(figsize=(7.2, height))
    plt.close(figure)
    places = sorted({float(x) for table in series.values() for x in table["x"]})
    for number, (name, table) in enumerate(series.items()):
        look = LINES[number]
        # Side by side, so that intervals at one x do not hide one another.
        shift = (number - (len(series) - 1) / 2) * 0.018
        x = table["x"].to_numpy(dtype=float)
        x = x * (1 + 1.6 * shift) if log else x + shift * (places[-1] - places[0]) / 4
        many = len(x) > 20
        axes.plot(x, table["value"], markersize=5, label=name, zorder=3, **look | ({"marker": ""} if many else {}))
        if "low" in table and many:
            axes.fill_between(x, table["low"], table["high"], color=look["color"], alpha=0.18, linewidth=0)
        elif "low" in table:
            axes.vlines(x, table["low"], table["high"], color=look["color"], linewidth=1.2, zorder=2)
    for (name, value), style in zip((references or {}).items(), ((0, (1, 1)), (0, (6, 3))), strict=False):
        axes.axhline(value, color=SOFT, linewidth=1.2, linestyle=style, label=name, zorder=1)
    if log:
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:,.0f}" for place in places])
        axes.minorticks_off()
    if percent:
        _percent(axes, "y")
    else:
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    figure.legend(loc="lower left", ncols=2, frameon=False, borderaxespad=0.2, handlelength=3.2)
    figure.tight_layout(rect=(0, foot / height, 1, 1))
    return figure


@_styled
def reliability(panels: Mapping[str, tuple[pd.DataFrame, str]]) -> Figure:
    """Draw how often answers were right against how sure they were.

    Parameters
    ----------
    panels : mapping of str to (DataFrame, str)
        Title → groups of documents, as :func:`pcdlab.studies.accuracy.accuracy_by_confidence` gives them, and a note that is
        written below the title.

    Returns
    -------
    matplotlib.figure.Figure
        On the diagonal probabilities mean what they say; below it they promise too much.
    """
    width = 2.6 * len(panels) + 0.5
    figure, grid = plt.subplots(1, len(panels), figsize=(width, 3.25), sharey=True, squeeze=False)
    plt.close(figure)
    for place, (axes, (title, (table, note))) in enumerate(zip(grid[0], panels.items(), strict=True)):
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle="--", zorder=1)
        axes.vlines(table["confidence"], table["low"], table["high"], color=BLUE, linewidth=1.6, zorder=2)
        axes.plot(table["confidence"], table["accuracy"], markersize=5.5, zorder=3, **LINES[0] | {"linestyle": ""})
        _percent(axes, "x")
        _percent(axes, "y")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
        axes.set_title(f"{_cut(title, 36)}\n{note}", size=8.5, loc="left")
        axes.set_xlabel("mean probability of the answer")
        if place == 0:
            axes.set_ylabel("answers that are right")
    figure.tight_layout(w_pad=1.2)
    return figure


# --- ways to ask ------------------------------------------------------------------------------------------------------


@_styled
def length_bias(panels: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw how a label's score hangs on its length, one panel per way to score, with the least-squares line.

    Parameters
    ----------
    panels : mapping of str to (sequence of float, sequence of float)
        Title → tokens of each label, and its mean score over documents, natural logarithm.

    Returns
    -------
    matplotlib.figure.Figure
    """
    size = (2.75 * len(panels) + 0.3, 2.5)
    figure, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    plt.close(figure)
    for axes, (title, (tokens, values)) in zip(grid[0], panels.items(), strict=True):
        x, y = np.asarray(tokens, dtype=float), np.asarray(values, dtype=float)
        axes.scatter(x, y, s=14, facecolor=SKY, edgecolor=BLUE, linewidth=0.6, zorder=2)
        slope = "all of one length"
        if np.ptp(x):
            fit = np.polyfit(x, y, 1)
            ends = np.array([x.min(), x.max()])
            axes.plot(ends, np.polyval(fit, ends), color=INK, linewidth=1.4, zorder=3)
            slope = f"{fit[0]:+.2f} nats a token"
        axes.set_title(f"{title}\n{slope}", size=8.5, loc="left")
        axes.set_xlabel("tokens of the line")
        axes.set_xticks(np.unique(x) if len(np.unique(x)) <= 6 else np.linspace(x.min(), x.max(), 4).round())
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0][0].set_ylabel("mean score of a label (nats)")
    figure.tight_layout(w_pad=1.2)
    return figure


@_styled
def agreement_matrix(shares: pd.DataFrame) -> Figure:
    """Draw how often ways to answer give the same answer.

    Parameters
    ----------
    shares : pandas.DataFrame, shape (ways, ways)
        Share of fields with the same answer, in [0, 1]; index and columns name the ways.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.patches import Rectangle

    names = [_cut(str(name), 28) for name in shares.index]
    cell, left = 0.52, 0.075 * max(map(len, names)) + 0.2
    top = 0.056 * max(map(len, names)) + 0.2
    side = len(names) * cell
    width, height = left + side + 0.075 * max(map(len, names)), top + side + 0.1
    figure, axes = _canvas(width, height)
    axes.set_xlim(-left / cell, (width - left) / cell)
    axes.set_ylim(len(names) + 0.1 / cell, -top / cell)
    for y, name in enumerate(names):
        axes.text(-0.15, y + 0.5, name, ha="right", va="center", size=POINTS)
        axes.text(y + 0.45, -0.2, name, rotation=45, ha="left", va="bottom", size=POINTS, rotation_mode="anchor")
        for x, value in enumerate(shares.iloc[y].tolist()):
            # White at full agreement, dark where nothing agrees: differences are what is looked for.
            colour = "#" + "".join(f"{round(255 + (end - 255) * (1 - value)):02x}" for end in (0x0B, 0x3C, 0x6E))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=PALE, linewidth=0.6))
            ink = INK if 1 - value < 0.5 else PAPER
            axes.text(x + 0.5, y + 0.5, f"{value:.0%}", ha="center", va="center", size=POINTS, color=ink)
    return figure


@_styled
def histograms(panels: Mapping[str, Sequence[int]], label: str) -> Figure:
    """Draw how often each whole number occurs, one panel per group, on one scale.

    Parameters
    ----------
    panels : mapping of str to sequence of int
        Title → numbers.
    label : str
        What they are.

    Returns
    -------
    matplotlib.figure.Figure
    """
    numbers = [n for values in panels.values() for n in values]
    figure, grid = plt.subplots(1, len(panels), figsize=(2.9 * len(panels) + 0.4, 2.1), sharex=True, squeeze=False)
    plt.close(figure)
    for axes, (title, values) in zip(grid[0], panels.items(), strict=True):
        found, times = np.unique(np.asarray(values, dtype=int), return_counts=True)
        axes.bar(found, times, width=0.72, color=BLUE)
        for at, count in zip(found.tolist(), times.tolist(), strict=True):
            axes.text(at, count, f"{count}", ha="center", va="bottom", size=7.5)
        axes.set_title(f"{title}\nmedian {np.median(values):g}, n = {len(values)}", size=8.5, loc="left")
        axes.set_xlim(min(numbers) - 0.8, max(numbers) + 0.8)
        axes.set_xticks(range(min(numbers), max(numbers) + 1, max(1, (max(numbers) - min(numbers)) // 6)))
        axes.set_ylim(0, 1.18 * max(times))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(label)
    figure.tight_layout(w_pad=1.2)
    return figure
