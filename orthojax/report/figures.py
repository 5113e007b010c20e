"""Figures: functions that draw plain values with matplotlib, which is imported at the first drawing."""

from __future__ import annotations

import functools
import importlib.util
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

if importlib.util.find_spec("matplotlib") is None:  # now, not after a run of hours
    raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

# The colours of Okabe and Ito without yellow, which is too light for a line.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)))
_MARKERS = "os^Dv<>PX*"
_STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.max_open_warning": 0,  # a report closes them when it has written them
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
}
Scale = Literal["linear", "log", "symlog"]
Curve = tuple[Sequence[float], np.ndarray]  # x [n], y [seeds, n]
Look = tuple[Any, Any]  # colour, dash


@functools.cache
def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot


def _literal(text: str) -> str:
    """Escapes what matplotlib would read as a formula."""
    return text.replace("$", r"\$")


def lines(
    panels: Mapping[str, Mapping[str, Curve]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
    references: Mapping[str, float] | None = None,
    looks: Mapping[str, Look] | None = None,
    ends: Callable[[float], str] | None = None,
) -> Figure:
    """Draws curves with a band from the smallest to the largest seed, in panels on one scale, up to three in a column.

    `panels` is title -> label -> (x [n], y [seeds, n]), `references` words -> y of horizontal lines, and `looks` label
    -> (colour, dash); by order if None. `ends` writes the last mean of a curve beside it, in panels of up to four.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    pairs = ((color, dash) for dash in cycle(DASHES) for color in COLORS)
    looks = looks or dict(zip(labels, pairs, strict=False))
    whole = x_scale == "linear" and all(isinstance(of, int) for c in panels.values() for x, _ in c.values() for of in x)
    across = 1 if len(panels) <= 3 else 3  # a column can be read on a phone
    down = -(-len(panels) // across)
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        size = (3.7 * across + 1.4, (3.1 if across > 1 or down == 1 else 2.0) * down + 0.5)
        figure, grid = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
            for name, (x, y) in curves.items():
                color, dash = looks[name]
                y, few = np.atleast_2d(y), "o" if len(x) <= 12 else None
                axes.plot(x, y.mean(0), color=color, linestyle=dash, label=_literal(name), marker=few, markersize=4)
                if ends and len(curves) <= 4:
                    last = (x[-1], y.mean(0)[-1])
                    axes.annotate(ends(last[1]), last, (4, -3), textcoords="offset points", color=color, fontsize=8.5)
                if len(y) > 1:
                    axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, linewidth=0)
            _refer(axes, references)
            axes.set(title=_literal(title), xscale=x_scale, yscale=y_scale)
            axes.set_xlabel(x_label if across > 1 or axes is grid[-1, 0] else "")
            if whole:
                axes.xaxis.set_major_locator(plt.MaxNLocator("auto", integer=True))
        grid[0, 0].set_ylabel(textwrap.fill(y_label, 34))
        _finish(figure, list(grid.flat), len(panels), x_scale, y_scale)
    return figure


def _refer(axes: Axes, references: Mapping[str, float] | None) -> None:
    for (words, value), style in zip((references or {}).items(), cycle((":", (0, (5, 2, 1, 2)))), strict=False):
        axes.axhline(value, color="#777777", linestyle=style, linewidth=1.1, label=words)


def _finish(figure: Figure, grid: Sequence[Axes], shown: int, x_scale: str, y_scale: str) -> None:
    """Hides empty panels, writes plain numbers on logarithmic axes, and puts one legend below."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    legend: dict[str, Any] = {}
    for axes in grid[:shown]:
        for axis, scale in ((axes.xaxis, x_scale), (axes.yaxis, y_scale)):
            if scale == "log":
                low, high = sorted(axis.get_view_interval())
                decades = math.log10(high / low)
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 5 else (1.0,)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(NullFormatter())
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    for axes in grid[shown:]:
        axes.set_visible(False)
    if len(legend) > 0:
        width, height = figure.get_size_inches()
        columns = max(1, min(4, len(legend), int(14 * width / (max(map(len, legend)) + 7))))
        figure.set_size_inches(width, height + 0.18 * max(0, -(-len(legend) // columns) - 2))
        figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=columns)


def bars(groups: Sequence[str], values: Mapping[str, np.ndarray], *, y_label: str, y_scale: Scale = "linear") -> Figure:
    """Draws grouped bars, label -> [seeds, groups], with whiskers from the smallest to the largest seed.

    The scale "symlog" is linear up to 2.
    """
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(min(12.0, max(5.2, 1.1 * len(groups) + 1.0)), 3.6))
        width, at = 0.8 / len(values), np.arange(len(groups))
        for i, ((name, y), color) in enumerate(zip(values.items(), cycle(COLORS), strict=False)):
            y, x = np.atleast_2d(y), at + (i - (len(values) - 1) / 2) * width
            axes.bar(x, y.mean(0), width, color=color, edgecolor="white", label=_literal(name))
            if len(y) > 1:
                whiskers = np.abs([y.mean(0) - y.min(0), y.max(0) - y.mean(0)])
                axes.errorbar(x, y.mean(0), whiskers, fmt="none", ecolor="#333333", capsize=2)
        characters = max(6, int(10 * (figure.get_size_inches()[0] - 1) / len(groups)))
        words = [textwrap.fill(_literal(name.replace("_", " ")), characters) for name in groups]
        axes.set_xticks(at, words, fontsize=8)
        axes.grid(visible=False, axis="x")
        axes.set(ylabel=textwrap.fill(y_label, 40), yscale=y_scale)
        _finish(figure, [axes], 1, "linear", y_scale)
    return figure


def numbers(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], str]]], references: Mapping[str, float] | None = None
) -> Figure:
    """Draws a bar for the mean of each number beside its text, and its seeds: title -> name -> (values, text).

    `references` are title -> the level of chance, a dashed line.
    """
    plt = _pyplot()
    counts = [len(rows) for rows in panels.values()]
    with plt.rc_context({**_STYLE, "axes.spines.bottom": False, "axes.grid": False}):
        size = (5.1, 0.36 * sum(counts) + 0.4 * len(panels))
        figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, height_ratios=counts)
        for axes, (title, rows) in zip(grid.flat, panels.items(), strict=True):
            for at, ((values, _), color) in enumerate(zip(rows.values(), cycle(COLORS), strict=False)):
                axes.barh(at, np.mean(values), 0.7, color=color)
                axes.plot(values, [at] * len(values), ".", color="#333333", markersize=4)
            if (level := (references or {}).get(title)) is not None:
                axes.axvline(level, color="#777777", linestyle="--", linewidth=1.1)
            words = [_literal(f"{name.replace('_', ' ')}  {text}") for name, (_, text) in rows.items()]
            axes.set_yticks(range(len(rows)), words, weight="bold")
            axes.set(xticks=[])
            axes.set_title(_literal(title), loc="left")
            axes.invert_yaxis()
            axes.tick_params(length=0)
    return figure


def dots(panels: Mapping[str, Mapping[str, tuple[Sequence[float], str]]]) -> Figure:
    """Draws a row for each name with a dot for each seed, and the text of their mean: title -> name -> (values, text).

    The rows with the lowest mean of a panel, to 1%, are bold.
    """
    plt = _pyplot()
    with plt.rc_context({**_STYLE, "axes.spines.left": False, "ytick.left": False}):
        names = list(next(iter(panels.values())))
        size = (1.75 * len(panels) + 1.9, 0.3 * len(names) + 0.9)
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        for axes, (title, rows) in zip(grid.flat, panels.items(), strict=True):
            means = {name: float(np.mean(values)) for name, (values, _) in rows.items()}
            for at, name in enumerate(names):
                values, text = rows[name]
                best = means[name] <= 1.01 * min(means.values())
                color, weight = (COLORS[2], "bold") if best else (COLORS[1], "normal")
                axes.plot(values, [at] * len(values), "o", color=color, markersize=4, alpha=0.7)
                place: Any = {"xytext": (6, -3), "textcoords": "offset points"}
                axes.annotate(text, (max(values), at), **place, fontsize=8, weight=weight)
            axes.set_title(_literal(title), loc="left")
            axes.margins(x=0.35)
            axes.grid(visible=False, axis="x")
        grid[0, 0].set_yticks(range(len(names)), [_literal(name.replace("_", " ")) for name in names])
        grid[0, 0].invert_yaxis()
    return figure


def scatter(
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    x_label: str,
    y_label: str,
    y_scale: Scale = "linear",
    references: Mapping[str, float] | None = None,
) -> Figure:
    """Draws named points in groups of one colour and marker: group -> (x, y, name) of each."""
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(6.2, 4.4))
        for (name, group), color, marker in zip(points.items(), cycle(COLORS), cycle(_MARKERS), strict=False):
            xs, ys = ([point[axis] for point in group] for axis in (0, 1))
            axes.plot(xs, ys, marker, color=color, markersize=5, label=_literal(name))
            for x, y, text in group:
                axes.annotate(text, (x, y), (4, 3), textcoords="offset points", fontsize=7)
        _refer(axes, references)
        axes.margins(0.1)
        axes.set(xlabel=x_label, ylabel=textwrap.fill(y_label, 50), yscale=y_scale)
        _finish(figure, [axes], 1, "linear", y_scale)
    return figure


def by_key(panels: Mapping[str, np.ndarray]) -> Figure:
    """Draws a bar for each key: the mean of its weights over the queries that see it; title -> causal weights [T, T].

    The dashed line is what equal weights give.
    """
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        figure, grid = plt.subplots(len(panels), 1, figsize=(6.2, 1.7 * len(panels) + 0.6), sharex=True, sharey=True,
                                    squeeze=False)  # fmt: skip
        for axes, (title, weights), color in zip(grid.flat, panels.items(), cycle(COLORS), strict=False):
            T = len(weights)
            visible = np.tril(np.ones((T, T)))
            queries = visible.sum(0)  # number that see each key
            axes.bar(range(T), (visible * weights).sum(0) / queries, 0.8, color=color)
            equal = (visible / visible.sum(1, keepdims=True)).sum(0) / queries
            axes.plot(range(T), equal, color="#777777", linestyle="--", linewidth=1.1, label="equal weights")
            axes.set(title=_literal(title), ylabel="weight")
            axes.grid(visible=False, axis="x")
        grid[-1, 0].set_xlabel("key position")
        _finish(figure, list(grid.flat), len(panels), "linear", "linear")
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
    """Draws heat maps with one colour scale: title -> [rows, columns]; nan stays dark.

    Colours are logarithmic with `log`, otherwise they scale with the square root; `x_ticks` and `y_ticks` are the names
    of columns and rows.
    """
    from matplotlib.colors import LogNorm, PowerNorm

    across = min(len(panels), 2 if len(panels) <= 4 else 4)
    down, (width, height) = -(-len(panels) // across), (3.5, 3.3) if across <= 2 else (2.5, 2.5)
    values = np.concatenate([panel.ravel() for panel in panels.values()])
    highest = float(np.nanmax(values))
    norm: Any = PowerNorm(0.5, 0.0, highest)
    if log:
        norm = LogNorm(max(float(np.quantile(values[values > 0], 0.02)), highest * 1e-6), highest)
    plt = _pyplot()
    with plt.rc_context({**_STYLE, "axes.grid": False}):
        figure, grid = plt.subplots(down, across, figsize=(width * across + 0.9, height * down), squeeze=False)
        image = None
        for i, ((title, panel), axes) in enumerate(zip(panels.items(), grid.flat, strict=False)):
            shown = np.where(panel > 0, panel, np.nan) if log else panel
            image = axes.imshow(shown, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
            axes.set_facecolor("#000004")
            axes.set_title(_literal(title))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(plt.MaxNLocator("auto", integer=True))
            if x_ticks:
                axes.set_xticks(range(len(x_ticks)), map(_literal, x_ticks), rotation=90)
            if y_ticks:
                axes.set_yticks(range(len(y_ticks)), map(_literal, y_ticks))
            axes.set_ylabel(y_label if i % across == 0 else "")
            axes.set_xlabel(x_label if i + across >= len(panels) else "")
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        assert image is not None
        image.set_rasterized(True)
        figure.colorbar(image, ax=grid, label=value_label, shrink=min(0.9, 4 / down))
    return figure
