"""Drawing: each function makes one matplotlib figure from plain values and knows nothing of files."""

import textwrap
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
from matplotlib.transforms import Bbox

from orthojax.experiments.looks import Look, looks

_MARKERS = "os^Dv<>PX*"
_MOST_TICKS = 12
# Where a name may stand: (points from its point, angle), the nearest first.
_PLACES = [(distance, angle) for distance in (7, 12, 20, 30, 42, 56, 72, 90) for angle in np.arange(12) * np.pi / 6]
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
    "hatch.linewidth": 0.8,
}


Curve = tuple[Sequence[float], np.ndarray]  # x [n], y [seeds, n]
Curves = Mapping[str, Curve]  # by label


def lines(
    curves: Curves,
    *,
    x_label: str,
    y_label: str,
    x_scale: Literal["linear", "log"] = "linear",
    y_scale: Literal["linear", "log"] = "linear",
    y_limits: tuple[float | None, float | None] | None = None,
    references: Mapping[str, float] | None = None,
    dots: Curves | None = None,
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
      references: What horizontal lines mean -> where they are.
      dots: Label of a curve -> (x [n], y [seeds, n]): what belongs to it, as the mean over seeds, without a line.
      integer_x: Put ticks at the x values only.
      pairs: Curves 2i and 2i + 1 belong together: one colour, solid and dashed.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.6))
        _draw_curves(axes, curves, _looks_of([curves], pairs), dots)
        _refer(axes, references or {})
        _finish(figure, [axes], xlabel=x_label, xscale=x_scale, ylabel=y_label, yscale=y_scale, ylim=y_limits)
        if integer_x:
            _ticks_at(axes, [curves])
    return figure


def panels(
    panels: Mapping[str, tuple[Curves, Mapping[str, float]]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Literal["linear", "log"] = "linear",
    y_scale: Literal["linear", "log"] = "linear",
    y_limits: tuple[float | None, float | None] | None = None,
    integer_x: bool = False,
) -> Figure:
    """Curves as those of `lines`, in panels beside each other on one scale; a label has one look in all of them.

    Args:
      panels: Title -> (curves, references).
      x_label: Of the x axes.
      y_label: Of the y axis.
      x_scale: Of the x axes.
      y_scale: Of the y axis.
      y_limits: Of the y axis.
      integer_x: Put ticks at the x values only.
    """
    with plt.rc_context(_STYLE):
        across = min(len(panels), 3)
        down = -(-len(panels) // across)
        size = (3.7 * across + 0.6, 3.1 * down + 0.5)
        figure, grid = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        looked = _looks_of([curves for curves, _ in panels.values()])
        for axes, (title, (curves, references)) in zip(grid.flat, panels.items(), strict=False):
            _draw_curves(axes, curves, looked)
            _refer(axes, references)
            axes.set_title(title)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        shown = list(grid.flat)[: len(panels)]
        _finish(figure, shown, xlabel=x_label, xscale=x_scale, ylabel=y_label, yscale=y_scale, ylim=y_limits)
        for axes in shown:
            axes.label_outer(remove_inner_ticks=False)
            if integer_x:
                _ticks_at(axes, [curves for curves, _ in panels.values()])
    return figure


def _looks_of(drawn: Sequence[Mapping[str, object]], pairs: bool = False) -> dict[str, tuple[Look, str]]:
    """Label -> its look and marker."""
    labels = list(dict.fromkeys(label for curves in drawn for label in curves))
    return dict(zip(labels, zip(looks(labels, pairs=pairs), cycle(_MARKERS), strict=False), strict=True))


def _draw_curves(
    axes: Axes, curves: Curves, looked: Mapping[str, tuple[Look, str]], dots: Curves | None = None
) -> None:
    for label, (x, y) in curves.items():
        look, marker = looked[label]
        y, few = np.atleast_2d(y), marker if len(x) <= 12 else None
        axes.plot(x, y.mean(0), color=look.color, linestyle=look.dash, label=label, marker=few, markersize=4)
        if len(y) > 1:
            axes.fill_between(x, y.min(0), y.max(0), color=look.color, alpha=0.15, linewidth=0)
        if dots and label in dots:
            at, values = dots[label]
            axes.plot(at, np.atleast_2d(values).mean(0), marker, color=look.color, markersize=6, fillstyle="none")


def _ticks_at(axes: Axes, drawn: Sequence[Curves]) -> None:
    """Ticks at the x values only, where there is room at all of them."""
    ticks = sorted({float(value) for curves in drawn for x, _ in curves.values() for value in x})
    axes.set_xticks(ticks[:: -(-len(ticks) // _MOST_TICKS)])


def _refer(axes: Axes, references: Mapping[str, float]) -> None:
    """Grey lines, thinner than any curve."""
    for (words, value), style in zip(references.items(), cycle(((0, (1, 2)), (0, (5, 2, 1, 2)))), strict=False):
        axes.axhline(value, color="#777777", linestyle=style, linewidth=1.1, label=words)


def _finish(figure: Figure, drawn: Sequence[Axes], **settings: Any) -> None:
    """Plain numbers on a logarithmic axis; the legend below, where it hides nothing, in as many lines as it needs."""
    found: dict[str, Any] = {}
    for axes in drawn:
        axes.set(**settings)
        if settings.get("yscale") == "log":
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if not found:
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(4, len(found), int(14 * width / (max(map(len, found)) + 7))))
    figure.set_size_inches(width, height + 0.18 * max(0, -(-len(found) // columns) - 2))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)


def bars(
    groups: Sequence[str],
    values: Mapping[str, np.ndarray],
    *,
    y_label: str,
    texts: Mapping[str, Sequence[str]] | None = None,
    references: Mapping[str, Sequence[float]] | None = None,
    y_scale: Literal["linear", "symlog"] = "linear",
) -> Figure:
    """Grouped bars with whiskers from the smallest to the largest seed.

    Args:
      groups: Names along the x axis.
      values: Label -> [seeds, groups].
      y_label: Of the y axis.
      texts: Label -> what to write above its bars [groups].
      references: What lines across the bars of a group mean -> where they are [groups]; nan where there is none.
      y_scale: Of the y axis; "symlog" is linear up to 2 and logarithmic above.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(min(12.0, max(5.2, 1.1 * len(groups) + 1.0)), 3.6))
        width, inches = 0.8 / len(values), (figure.get_size_inches()[0] - 1) / len(groups)
        for i, ((label, y), look) in enumerate(zip(values.items(), looks(list(values)), strict=True)):
            y = np.atleast_2d(y)
            x = np.arange(len(groups)) + (i - (len(values) - 1) / 2) * width
            mean = y.mean(0)
            axes.bar(x, mean, width, color=look.color, hatch=look.hatch, edgecolor="white", label=label)
            for at, text, top, low in zip(x, texts[label] if texts else (), y.max(0), y.min(0), strict=False):
                up, turned = (top > 0), 90 if width * inches < 0.06 * len(text) else 0
                axes.annotate(text, (at, max(top, 0) if up else low), (0, 2 if up else -2), ha="center", fontsize=7,
                              textcoords="offset points", va="bottom" if up else "top", rotation=turned)  # fmt: skip
            if len(y) > 1:
                whiskers = np.abs([mean - y.min(0), y.max(0) - mean])
                axes.errorbar(x, mean, whiskers, fmt="none", ecolor="#333333", capsize=2)
        for words, levels in (references or {}).items():
            at = np.arange(len(groups))
            axes.hlines(levels, at - 0.45, at + 0.45, colors="#333333", linestyles=":", linewidth=1.4, label=words)
        names = [textwrap.fill(name, max(6, int(10 * inches)), break_long_words=False) for name in groups]
        axes.set_xticks(np.arange(len(groups)), names, fontsize=9 if len(groups) < 10 else 8)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.15 if texts else 0.1)
        _finish(figure, [axes], ylabel=y_label, yscale=y_scale)
    return figure


def scatter(
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Literal["linear", "log"] = "linear",
    y_scale: Literal["linear", "log", "symlog"] = "linear",
    references: Mapping[str, float] | None = None,
) -> Figure:
    """Named points in groups of one colour and marker; no two names overlap.

    Args:
      points: Group -> (x, y, name) of each.
      x_label: Of the x axis.
      y_label: Of the y axis.
      x_scale: Of the x axis; "log" has ticks at powers of two.
      y_scale: Of the y axis.
      references: What horizontal lines mean -> where they are.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.8))
        for label, (look, marker) in _looks_of([points]).items():
            at = [(x, y) for x, y, _ in points[label]]
            axes.plot(*zip(*at, strict=True), marker, color=look.color, markersize=5, label=label, zorder=3)
        _refer(axes, references or {})
        axes.margins(0.08)
        _finish(figure, [axes], xlabel=x_label, ylabel=y_label, yscale=y_scale)
        if x_scale == "log":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        label_points(figure, axes, [point for group in points.values() for point in group])
    return figure


def label_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names points where there is room, with a thin line to a point that is not beside its name.

    Args:
      figure: Of the axes.
      axes: Where the points are drawn; limits and scales must not change afterwards.
      points: (x, y, name) of each.
    """
    figure.draw_without_rendering()  # decides where the axes are
    frame, scale = axes.get_window_extent(), figure.dpi / 72
    at = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [_box(point, 6 * scale, 6 * scale) for point in at]
    for (x, y, name), point in zip(points, at, strict=True):
        if not name:
            continue
        text = axes.text(x, y, name, fontsize=7, va="center", ha="center")
        text.set_in_layout(False)  # the axes stay where they are
        size = text.get_window_extent()
        found = []
        for distance, angle in _PLACES:
            step = distance * scale * np.array([np.cos(angle), np.sin(angle)])
            center = point + step + np.sign(np.round(step, 6)) * np.array([size.width / 2, 0])
            spot = _box(center, size.width + 4 * scale, size.height + scale)  # other renderers draw wider
            outside = not (frame.x0 < spot.x0 and spot.x1 < frame.x1 and frame.y0 < spot.y0 and spot.y1 < frame.y1)
            cost = 4 * sum(spot.overlaps(other) for other in taken) + 2 * outside + distance / 100
            found.append((cost, distance, tuple(center), spot))
        _, distance, center, spot = min(found, key=lambda place: place[0])
        taken.append(spot)
        left, up = axes.transData.inverted().transform(center)
        text.set_position((left, up))
        if distance > 14:
            axes.plot([x, left], [y, up], color="#999999", linewidth=0.5, zorder=1, scalex=False, scaley=False)


def _box(center: Sequence[float] | np.ndarray, width: float, height: float) -> Bbox:
    return Bbox([[center[0] - width / 2, center[1] - height / 2], [center[0] + width / 2, center[1] + height / 2]])


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
    top: float | None = None,
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
      top: The value of the brightest colour, which all above have, too; the largest of all where None.
      x_ticks: Names of the columns, where these are not counted from 0.
      y_ticks: Those of the rows.
    """
    across = min(len(panels), 2 if len(panels) <= 4 else 4)
    down = -(-len(panels) // across)
    width, height = (3.5, 3.3) if across <= 2 else (2.5, 2.5)
    values = np.concatenate([panel.ravel() for panel in panels.values()])
    clipped = top is not None
    top = float(np.nanmax(values)) if top is None else top
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
            extend = "max" if clipped else "neither"
            figure.colorbar(image, ax=grid, label=value_label, shrink=min(0.9, 4 / down), extend=extend)
    return figure
