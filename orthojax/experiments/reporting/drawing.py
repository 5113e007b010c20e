"""Drawing: each function makes one matplotlib figure from plain values and knows nothing of files."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # no display

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLORS = ("#c0392b", "#1f6fb2", "#2e8b57", "#b8860b", "#6a51a3", "#444444")
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
    "svg.hashsalt": "orthojax",  # the same picture is the same file
}


def lines(
    curves: Mapping[str, tuple[Sequence[float], np.ndarray]],
    *,
    x_label: str,
    y_label: str,
    y_scale: Literal["linear", "log"] = "linear",
    reference: tuple[float, str] | None = None,
    integer_x: bool = False,
    pairs: bool = False,
) -> Figure:
    """Curves with a band from the smallest to the largest seed.

    Args:
      curves: Label -> (x [n], y [seeds, n]).
      x_label: Of the x axis.
      y_label: Of the y axis.
      y_scale: Of the y axis.
      reference: A horizontal line and what it means.
      integer_x: Put ticks at the x values only.
      pairs: Curves 2i and 2i + 1 belong together: one colour, solid and dashed.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.6))
        for i, (label, (x, y)) in enumerate(curves.items()):
            color, style = (COLORS[i // 2], ("-", "--")[i % 2]) if pairs else (COLORS[i], "-")
            y = np.atleast_2d(y)
            marker = "o" if len(x) <= 12 else None
            axes.plot(x, y.mean(0), color=color, linestyle=style, label=label, marker=marker, markersize=4)
            if len(y) > 1:
                axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, linewidth=0)
        if reference:
            axes.axhline(reference[0], color="#888888", linestyle=":", linewidth=1.2, label=reference[1])
        if integer_x:
            axes.set_xticks(sorted({float(value) for x, _ in curves.values() for value in x}))
        axes.set(xlabel=x_label, ylabel=y_label, yscale=y_scale)
        _finish(figure, axes, y_scale)
    return figure


def _finish(figure: Figure, axes: Axes, y_scale: str) -> None:
    """Plain numbers on a logarithmic axis, and the legend below, where it hides nothing."""
    if y_scale == "log":
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
        for i, ((label, y), color) in enumerate(zip(values.items(), COLORS, strict=False)):
            y = np.atleast_2d(y)
            x = np.arange(len(groups)) + (i - (len(values) - 1) / 2) * width
            mean = y.mean(0)
            drawn = axes.bar(x, mean, width, color=color, label=label)
            if texts:
                axes.bar_label(drawn, texts[label], fontsize=7, padding=2)
            if len(y) > 1:
                axes.errorbar(
                    x, mean, np.abs([mean - y.min(0), y.max(0) - mean]), fmt="none", ecolor="#333333", capsize=2
                )
        axes.set_xticks(np.arange(len(groups)), groups)
        axes.grid(visible=False, axis="x")
        axes.set(ylabel=y_label)
        axes.margins(y=0.1)
        _finish(figure, axes, "linear")
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
        for (label, group), color in zip(points.items(), COLORS, strict=False):
            axes.scatter([x for x, _, _ in group], [y for _, y, _ in group], color=color, s=22, label=label, zorder=3)
            for x, y, name in group:
                axes.annotate(
                    name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7, color=color, alpha=0.9
                )
        if reference:
            axes.axhline(reference[0], color="#888888", linestyle=":", linewidth=1.2, label=reference[1])
        axes.set(xlabel=x_label, ylabel=y_label, yscale=y_scale)
        _finish(figure, axes, y_scale)
    return figure


def profiles(rows: Sequence[Mapping[str, np.ndarray]], *, x_label: str) -> Figure:
    """Panels in rows, each with a curve for every layer, from dark (the first) to light, on a logarithmic axis.

    Args:
      rows: In each, title -> [layers, n].
      x_label: Of the n values.
    """
    with plt.rc_context(_STYLE):
        columns = max(len(row) for row in rows)
        figure, axes = plt.subplots(len(rows), columns, figsize=(4.4 * columns + 0.6, 2.7 * len(rows)), squeeze=False)
        layers = max(len(panel) for row in rows for panel in row.values())
        colors = plt.get_cmap("viridis", layers + 1)  # the last one is too light for a line
        for row, line in zip(rows, axes, strict=True):
            for ax, (title, panel) in zip(line, row.items(), strict=False):
                for layer, values in enumerate(panel):
                    ax.plot(values, color=colors(layer), linewidth=0.8, label=f"layer {layer + 1}")
                ax.set(title=title, xlabel=x_label, yscale="log")
            for ax in line[len(row) :]:
                ax.set_visible(False)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(layers, 8))
    return figure


def maps(
    panels: Mapping[str, np.ndarray], *, x_label: str, y_label: str, value_label: str, log: bool = False
) -> Figure:
    """Heat maps side by side with one colour scale.

    Args:
      panels: Title -> [rows, columns].
      x_label: Of the columns.
      y_label: Of the rows.
      value_label: Of the colours.
      log: Logarithmic colours, for values over many powers of ten; otherwise colours go with the square root.
    """
    values = np.concatenate([panel.ravel() for panel in panels.values()])
    top = float(values.max())
    norm = (
        LogNorm(vmin=max(float(np.quantile(values[values > 0], 0.02)), top * 1e-6), vmax=top)
        if log
        else PowerNorm(0.5, 0.0, top)
    )
    with plt.rc_context({**_STYLE, "axes.grid": False}):
        figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels) + 0.6, 3.8), squeeze=False)
        image = None
        for ax, (title, panel) in zip(axes[0], panels.items(), strict=True):
            shown = np.where(panel > 0, panel, np.nan) if log else panel
            image = ax.imshow(shown, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
            ax.set_facecolor("#000004")  # the colour of nothing, where the logarithm has no value
            ax.set(title=title, xlabel=x_label, ylabel=y_label)
        if image is not None:
            figure.colorbar(image, ax=list(axes[0]), label=value_label, shrink=0.9)
    return figure
