"""The plots of the reports, drawn with matplotlib and returned as SVG text to stand inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report import tau

COLOURS = ("#2563c9", "#d9742b", "#3f8f5b", "#8a56b5", "#b0445f", "#5f6b7a")
LONGEST, LONGEST_OF_TWO = 44, 20  # characters of a name, alone in its line and with another one
DRAFT, VERIFY, PLAIN = "#f0a35e", "#2563c9", "#9aa4b2"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text and takes the page's font
    "svg.hashsalt": "draftwright",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#98a2b3",
    "axes.labelcolor": "#475467",
    "xtick.color": "#475467",
    "ytick.color": "#475467",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eaecf0",
    "legend.frameon": False,
    "text.parse_math": False,  # names are text, dollar signs included
}


def acceptance_plot(measured: dict[str, dict[str, Any]]) -> str:
    """How often the k-th draft token of a round is accepted when all earlier ones were: a line for each benchmark, or
    for each draft."""
    columns = 1 if max(map(len, measured)) > LONGEST_OF_TWO else 2
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(height=max(2.5, 2.1 + 0.2 * len(measured) / columns))
        for colour, (name, numbers) in zip(_cycle(measured), measured.items(), strict=True):
            shares = numbers["acceptance_by_position"]
            label = f" {_shortened(name)}"  # matplotlib leaves labels that start with an underscore out of the legend
            axes.plot(range(1, len(shares) + 1), shares, marker="o", color=colour, label=label, linewidth=2)
            if len(measured) == 1:
                _label_points(axes, shares)
        axes.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1.05))
        _whole_ticks(axes, 1, max(len(n["acceptance_by_position"]) for n in measured.values()))
        return _svg(figure, axes, len(measured) > 1, columns)


def comparison_plot(drafts: dict[str, dict[str, Any]]) -> str:
    """τ and speedup of several drafts on one benchmark, the speedup with its interval."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(height=0.9 + 0.55 * len(drafts))
        for i, (name, numbers) in enumerate(drafts.items()):
            first = "_" if i else ""
            low, high = numbers["speedup_ci"] or (numbers["speedup"], numbers["speedup"])
            axes.annotate(_shortened(name), (0, 3 * i), va="center", color="#1d2433", size=8)
            axes.barh(3 * i + 1, numbers["tau"] or 0, 0.9, color=COLOURS[1], label=f"{first}τ")
            axes.barh(3 * i + 2, numbers["speedup"], 0.9, color=COLOURS[0], label=f"{first}speedup")
            axes.plot((low, high), (3 * i + 2, 3 * i + 2), color="#1d2433", linewidth=1)
            _label_bar(axes, numbers["tau"] or 0, 3 * i + 1, tau(numbers))
            _label_bar(axes, max(high, numbers["speedup"]), 3 * i + 2, f"{numbers['speedup']:.2f}×")
        axes.axvline(1, color=PLAIN, linestyle=":", linewidth=1, label="plain decoding")
        axes.set(yticks=[], ylim=(3 * len(drafts) - 0.4, -0.6))
        axes.set_xlim(0, axes.get_xlim()[1] * 1.2)  # room for the labels
        return _svg(figure, axes, True, columns=3)


def histogram_plot(benchmarks: dict[str, dict[str, Any]]) -> str:
    """Which share of the rounds had 0, 1, 2, … draft tokens accepted."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        width = 0.8 / len(benchmarks)
        for i, (colour, (name, numbers)) in enumerate(zip(_cycle(benchmarks), benchmarks.items(), strict=True)):
            counts = numbers["accept_length_histogram"]
            offset = (i - (len(benchmarks) - 1) / 2) * width
            shares = [count / max(1, sum(counts)) for count in counts]
            bars = axes.bar([k + offset for k in range(len(counts))], shares, width, color=colour, label=name)
            if len(benchmarks) == 1:
                axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, color="#475467", fontsize=8)
        axes.set(xlabel="draft tokens accepted in a round", ylabel="share of rounds")
        _whole_ticks(axes, 0, max(len(n["accept_length_histogram"]) for n in benchmarks.values()) - 1)
        axes.grid(visible=False, axis="x")
        return _svg(figure, axes, len(benchmarks) > 1)


def time_plot(benchmarks: dict[str, dict[str, Any]], baseline_s: dict[str, float]) -> str:
    """Milliseconds of one round (draft + verify) beside one plain decoding step (baseline_s, per benchmark)."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(height=max(2.5, 1.2 + 0.7 * len(benchmarks)))
        ticks = []
        for i, (name, numbers) in enumerate(benchmarks.items()):
            plain, draft, verify = (
                1000 * s for s in (baseline_s[name], numbers["draft_s_per_round"], numbers["verify_s_per_round"])
            )
            first = "_" if i else ""  # matplotlib leaves labels with an underscore out of the legend
            axes.barh(2.6 * i, plain, color=PLAIN, label=f"{first}plain step")
            axes.barh(2.6 * i + 1, draft, color=DRAFT, label=f"{first}draft")
            axes.barh(2.6 * i + 1, verify, left=draft, color=VERIFY, label=f"{first}verify")
            _label_bar(axes, plain, 2.6 * i, f"{plain:.0f} ms, 1 token")
            _label_bar(axes, draft + verify, 2.6 * i + 1, f"{draft + verify:.0f} ms, {tau(numbers)} tokens")
            ticks.append((2.6 * i + 0.5, name))
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
        axes.set(xlabel="milliseconds", ylim=(2.6 * len(benchmarks) - 1, -0.6))
        axes.set_xlim(0, axes.get_xlim()[1] * 1.5)  # room for the labels
        axes.grid(visible=False, axis="y")
        return _svg(figure, axes, True, columns=3)


def tuning_plot(nodes: Sequence[int], taus: Sequence[float], speedups: Sequence[float]) -> str:
    """Expected acceptance length and speedup of the fastest tree for each number of nodes."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure()
        axes.plot(nodes, taus, color=COLOURS[1], label="τ", linewidth=2)
        axes.plot(nodes, speedups, color=COLOURS[0], label="speedup", linewidth=2)
        best = max(range(len(nodes)), key=lambda i: speedups[i])
        axes.plot(nodes[best], speedups[best], marker="o", color=COLOURS[0])
        axes.annotate(f"{nodes[best]} nodes", (nodes[best], speedups[best]), (4, 6), textcoords="offset points", size=8)
        axes.set(xlabel="nodes at most, root included")
        return _svg(figure, axes, True)


def _cycle(measured: dict[str, Any]) -> list[Any]:
    """A colour for each, from a scale where there are more than COLOURS."""
    count = len(measured)
    scale = matplotlib.colormaps["viridis"]
    return list(COLOURS[:count] if count <= len(COLOURS) else scale(np.linspace(0, 0.9, count)))


def _shortened(name: str) -> str:
    """A name that fits a figure; what tells names apart tends to stand at their end."""
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _figure(height: float = 2.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(3.5, height), layout="constrained")
    return figure, figure.subplots()


def _whole_ticks(axes: Axes, first: int, last: int) -> None:
    last = max(last, first + 1)  # a single position would be drawn as wide as the plot
    axes.set(xticks=range(first, last + 1), xlim=(first - 0.5, last + 0.5))


def _label_bar(axes: Axes, end: float, y: float, text: str) -> None:
    axes.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", color="#475467", size=8)


def _label_points(axes: Axes, shares: list[float]) -> None:
    for position, share in enumerate(shares, start=1):
        axes.annotate(
            f"{share:.0%}", (position, share), (0, 6), textcoords="offset points", ha="center", color="#475467", size=8
        )


def _svg(figure: Figure, axes: Axes, legend: bool, columns: int = 2) -> str:
    if legend:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=columns, fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
