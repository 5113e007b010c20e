"""Drawing: each function makes one matplotlib figure from plain values and knows nothing of files."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # no display

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLORS = (
    "#c0392b", "#1f6fb2", "#2e8b57", "#b8860b", "#6a51a3", "#444444", "#17909c", "#c2558f", "#7f5539", "#7d8f1a",
)  # fmt: skip
# What is compared everywhere has the same colour everywhere.
METHOD_COLORS = {
    "softmax + Adam": COLORS[0],
    "softmax-1 + Adam": COLORS[3],
    "softmax + OrthoAdam": COLORS[4],
    "softmax-1 + OrthoAdam": COLORS[1],
}
_LINE_STYLES = ("-", "--", ":", "-.")
_MARKERS = "os^Dv<>PX*"
_STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.fontsize": 8.5,
    "grid.color": "#e4e4e4",
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.frameon": False,
}


def looks(labels: Sequence[str], *, pairs: bool = False) -> list[tuple[str, str]]:
    """A colour and a line style for each label, no two alike among the first forty.

    A label that names one of `METHOD_COLORS` has its colour, the others take the colours that are left; where a colour
    comes again, the line style changes.

    Args:
      labels: In the order of the legend.
      pairs: Labels 2i and 2i + 1 belong together and have one colour.

    >>> looks(["softmax + Adam, first", "softmax + Adam, others", "ReLU"])
    [('#c0392b', '-'), ('#c0392b', '--'), ('#1f6fb2', '-')]
    """
    methods = [next((color for name, color in METHOD_COLORS.items() if name in label), None) for label in labels]
    free = cycle([color for color in COLORS if color not in methods])
    colors: list[str] = []
    for i, color in enumerate(methods):
        colors.append(color or (colors[-1] if pairs and i % 2 else next(free)))
    return [(color, _LINE_STYLES[colors[:i].count(color) % 4]) for i, color in enumerate(colors)]


def lines(
    curves: Mapping[str, tuple[Sequence[float], np.ndarray]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Literal["linear", "log"] = "linear",
    y_scale: Literal["linear", "log"] = "linear",
    y_limits: tuple[float | None, float | None] | None = None,
    reference: tuple[float, str] | None = None,
    dots: Mapping[str, tuple[Sequence[float], np.ndarray]] | None = None,
    integer_x: bool = False,
    pairs: bool = False,
) -> Figure:
    """Curves with a band from the smallest to the largest seed.

    Args:
      curves: Label -> (x [n], y [seeds, n]).
      x_label: Of the x axis.
      y_label: Of the y axis.
      x_scale: Of the x axis.
      y_scale: Of the y axis.
      y_limits: Of the y axis, where not what the curves take; None on a side for what they take.
      reference: A horizontal line and what it means.
      dots: Label of a curve -> (x [n], y [seeds, n]): what belongs to it, as the mean over seeds, without a line.
      integer_x: Put ticks at the x values only.
      pairs: Curves 2i and 2i + 1 belong together: one colour, solid and dashed.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.6))
        drawn = zip(curves.items(), looks(list(curves), pairs=pairs), cycle(_MARKERS), strict=False)
        for (label, (x, y)), (color, style), marker in drawn:
            y, few = np.atleast_2d(y), marker if len(x) <= 12 else None
            axes.plot(x, y.mean(0), color=color, linestyle=style, label=label, marker=few, markersize=4)
            if len(y) > 1:
                axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, linewidth=0)
            if dots and label in dots:
                at, values = dots[label]
                axes.plot(at, np.atleast_2d(values).mean(0), marker, color=color, markersize=6, fillstyle="none")
        if integer_x:
            axes.set_xticks(sorted({float(value) for x, _ in curves.values() for value in x}))
        _finish(figure, axes, reference, xlabel=x_label, xscale=x_scale, ylabel=y_label, yscale=y_scale, ylim=y_limits)
    return figure


def _finish(figure: Figure, axes: Axes, reference: tuple[float, str] | None, **settings: Any) -> None:
    """The reference, plain numbers on a logarithmic axis, and the legend below, where it hides nothing."""
    if reference:
        axes.axhline(reference[0], color="#888888", linestyle=":", linewidth=1.2, label=reference[1])
    axes.set(**settings)
    if settings.get("yscale") == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def bars(
    groups: Sequence[str],
    values: Mapping[str, np.ndarray],
    *,
    y_label: str,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Grouped bars with whiskers from the smallest to the largest seed.

    Args:
      groups: Names along the x axis.
      values: Label -> [seeds, groups].
      y_label: Of the y axis.
      texts: Label -> what to write above its bars [groups].
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(max(5.2, 1.1 * len(groups) + 1.0), 3.6))
        width = 0.8 / len(values)
        for i, ((label, y), (color, _)) in enumerate(zip(values.items(), looks(list(values)), strict=True)):
            y = np.atleast_2d(y)
            x = np.arange(len(groups)) + (i - (len(values) - 1) / 2) * width
            mean = y.mean(0)
            drawn = axes.bar(x, mean, width, color=color, label=label)
            if texts:
                axes.bar_label(drawn, texts[label], fontsize=7, padding=2)
            if len(y) > 1:
                whiskers = np.abs([mean - y.min(0), y.max(0) - mean])
                axes.errorbar(x, mean, whiskers, fmt="none", ecolor="#333333", capsize=2)
        axes.set_xticks(np.arange(len(groups)), groups)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.1)
        _finish(figure, axes, None, ylabel=y_label)
    return figure


def scatter(
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    x_label: str,
    y_label: str,
    y_scale: Literal["linear", "log"] = "linear",
    reference: tuple[float, str] | None = None,
) -> Figure:
    """Named points in groups of one colour.

    Args:
      points: Group -> (x, y, name) of each.
      x_label: Of the x axis.
      y_label: Of the y axis.
      y_scale: Of the y axis.
      reference: A horizontal line and what it means.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.8))
        for (label, group), (color, _) in zip(points.items(), looks(list(points)), strict=True):
            axes.scatter([x for x, _, _ in group], [y for _, y, _ in group], color=color, s=22, label=label, zorder=3)
            for x, y, name in group:
                at: dict[str, Any] = {"xytext": (4, 3), "textcoords": "offset points"}
                axes.annotate(name, (x, y), fontsize=7, color=color, alpha=0.9, **at)
        _finish(figure, axes, reference, xlabel=x_label, ylabel=y_label, yscale=y_scale)
    return figure


def profiles(rows: Sequence[Mapping[str, np.ndarray]], *, x_label: str, curves: Sequence[str] | None = None) -> Figure:
    """Panels in rows, each with a curve for every layer, from dark (the first) to light, on a logarithmic axis.

    Args:
      rows: In each, title -> [layers, n].
      x_label: Of the n values.
      curves: What the curves are, where not layers.
    """
    with plt.rc_context(_STYLE):
        columns = max(len(row) for row in rows)
        figure, axes = plt.subplots(len(rows), columns, figsize=(4.4 * columns + 0.6, 2.7 * len(rows)), squeeze=False)
        layers = max(len(panel) for row in rows for panel in row.values())
        colors = plt.get_cmap("viridis", layers + 1)  # the last one is too light for a line
        for row, line in zip(rows, axes, strict=True):
            for ax, (title, panel) in zip(line, row.items(), strict=False):
                for layer, values in enumerate(panel):
                    label = curves[layer] if curves else f"layer {layer + 1}"
                    ax.plot(values, color=colors(layer), linewidth=0.8, label=label)
                ax.set(title=title, xlabel=x_label, yscale="log")
            for ax in line[len(row) :]:
                ax.set_visible(False)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(layers, 8))
    return figure


def maps(
    panels: Mapping[str, np.ndarray],
    *,
    x_label: str,
    y_label: str,
    value_label: str,
    log: bool = False,
    x_ticks: Sequence[str] | None = None,
    y_ticks: Sequence[str] | None = None,
) -> Figure:
    """Heat maps with one colour scale: two beside each other, from five on four.

    Args:
      panels: Title -> [rows, columns]; nan is left dark.
      x_label: Of the columns.
      y_label: Of the rows.
      value_label: Of the colours.
      log: Logarithmic colours, for values over many powers of ten; otherwise colours go with the square root.
      x_ticks: Names of the columns, where these are not counted from 0.
      y_ticks: Those of the rows.
    """
    across = min(len(panels), 2 if len(panels) <= 4 else 4)
    down = -(-len(panels) // across)
    width, height = (3.5, 3.3) if across <= 2 else (2.5, 2.5)
    values = np.concatenate([panel.ravel() for panel in panels.values()])
    top = float(np.nanmax(values))
    norm = PowerNorm(0.5, 0.0, top)
    if log:
        norm = LogNorm(max(float(np.quantile(values[values > 0], 0.02)), top * 1e-6), top)
    # Large letters, so that they can be read on a phone, where the picture is half as wide.
    with plt.rc_context({**_STYLE, "axes.grid": False, "font.size": 12, "axes.titlesize": 11}):
        figure, grid = plt.subplots(down, across, figsize=(width * across + 0.9, height * down), squeeze=False)
        image = None
        for i, ((title, panel), ax) in enumerate(zip(panels.items(), grid.flat, strict=False)):
            shown = np.where(panel > 0, panel, np.nan) if log else panel
            image = ax.imshow(shown, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
            ax.set_facecolor("#000004")  # the colour of nothing
            ax.set_title(title.replace(", ", ",\n", 1) if across > 2 else title)
            if x_ticks:
                ax.set_xticks(range(len(x_ticks)), x_ticks, rotation=90, fontsize=10)
            if y_ticks:
                ax.set_yticks(range(len(y_ticks)), y_ticks if i % across == 0 else [""] * len(y_ticks), fontsize=10)
            if i % across == 0:
                ax.set_ylabel(y_label)
            if i + across >= len(panels):
                ax.set_xlabel(x_label)
        for ax in list(grid.flat)[len(panels) :]:
            ax.set_visible(False)
        if image is not None:
            figure.colorbar(image, ax=grid, label=value_label, shrink=min(0.9, 4 / down))
    return figure
