"""Pictures of results: numbers by layer and by step, bars, points and maps.

A picture is called with `Results` and returns any number of `Picture`s; it raises `Missing` if a run that it reads is
gone, as for committed results, and is then skipped. Colour shows the optimizer and line style the normalizer. `metrics`
are `Quantities`, `rows` patterns of variants (all if empty), and `references` lines by label. Variants
that lack a metric are skipped.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orthojax.analysis.catalogue import chance, conditions
from orthojax.formatting import percent
from orthojax.report.figures import COLORS, DASHES, Curve, Look, Scale, bars, by_key, dots, lines, numbers, scatter
from orthojax.report.page import Picture
from orthojax.report.results import Missing, Quantity, Result, Results, as_quantity, case_in
from orthojax.report.tables import Quantities, quantities

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_OPTIMIZERS = ("adam", "orthoadam", "sgd", "muon", "rmsprop", "lion")
_NORMALIZERS = ("softmax", "softmax1", "relu", "sigmoid", "softmax_n", "learned_sink")


def look(result: Result) -> Look:
    """Returns the colour of a variant's optimizer and the dash of its normalizer."""
    optimizer, normalizer = result.config.optim.optimizer, result.config.model.normalizer
    color = COLORS[_OPTIMIZERS.index(optimizer)] if optimizer in _OPTIMIZERS else COLORS[-1]
    return color, DASHES[_NORMALIZERS.index(normalizer) if normalizer in _NORMALIZERS else -1]


def _looks(shown: Sequence[Result]) -> Mapping[str, Look] | None:
    """Returns the looks of variants; None if two are alike, or for a computation."""
    if any(result.config is None for result in shown):
        return None
    looks = {result.name: look(result) for result in shown}
    return looks if len(set(looks.values())) == len(looks) else None


def _shown(results: Results, rows: str) -> list[Result]:
    return [result for result in results.matching(rows) if result.seeds]


@dataclasses.dataclass(frozen=True)
class ByLayer:
    """Metrics after each layer, a panel for each metric and a curve for each variant.

    With `normalized` layer m of L is drawn at m / (L - 1). The file is named after the first metric.
    """

    metrics: Quantities
    rows: str = ""
    y_scale: Scale = "linear"
    references: Mapping[str, float] = dataclasses.field(default_factory=dict)
    normalized: bool = False
    name: str = ""

    def __call__(self, results: Results) -> list[Picture]:
        """Draws the picture."""

        def curve(result: Result, metric: str) -> Curve:
            y = result.layers(metric)
            L = y.shape[1]
            return [m / max(L - 1, 1) for m in range(L)] if self.normalized else list(range(L)), y

        x_label = "layer, from 0 (first) to 1 (last)" if self.normalized else "layer"
        return _curves(self, "by layer", results, curve, x_label, "linear")


@dataclasses.dataclass(frozen=True)
class ByStep:
    """Metrics over training steps, as metrics.jsonl or `NAME/step_N` of a row has them; step 0 is drawn at 1.

    The file is named after the first metric if `name` is empty.
    """

    metrics: Quantities
    rows: str = ""
    y_scale: Scale = "linear"
    x_scale: Scale = "linear"
    references: Mapping[str, float] = dataclasses.field(default_factory=dict)
    name: str = ""

    def __call__(self, results: Results) -> list[Picture]:
        """Draws the picture."""

        def curve(result: Result, metric: str) -> Curve:
            recorded = [int(key.rpartition("_")[2]) for key in _steps_of(result, metric)]
            if recorded:
                steps = sorted(recorded)
                y = np.array([result.values(f"{metric}/step_{step}") for step in steps]).T
            else:
                steps, y = result.logged(metric)
            return [max(step, 1) for step in steps] if self.x_scale == "log" else steps, y

        return _curves(self, "over training", results, curve, "step", self.x_scale)


def _steps_of(result: Result, metric: str) -> list[str]:
    """Returns the keys of a metric at the steps at which every seed has it."""
    first, *others = result.seeds.values()
    return [key for key in first if key.startswith(f"{metric}/step_") and all(key in of for of in others)]


def _in_percent(axis: "Axis", *metrics: Quantity) -> None:
    """Writes the ticks of an axis in percent if all that it shows are shares, as tables write them."""
    from matplotlib.ticker import PercentFormatter

    if all(quantity.is_share or quantity.show is percent for quantity in metrics):
        axis.set_major_formatter(PercentFormatter(1.0))


def _complete(result: Result, *metrics: Quantity) -> bool:
    return all(len(result.values(quantity)) == len(result.seeds) for quantity in metrics)


def _curves(
    spec: ByLayer | ByStep,
    what: str,
    results: Results,
    curve: Callable[[Result, str], Curve],
    x_label: str,
    x_scale: Scale,
) -> list[Picture]:
    shown, panels, gone = _shown(results, spec.rows), {}, None
    metrics = quantities(spec.metrics)
    for metric in metrics:
        for result in shown:
            try:
                panels.setdefault(metric.label, {})[result.name] = curve(result, metric.name)
            except Missing as error:
                gone = error
    if not panels:
        raise gone or Missing(metrics[0].name)
    y_label, panels = (metrics[0].label, {"": panels.popitem()[1]}) if len(panels) == 1 else ("", panels)
    figure = lines(panels, x_label=x_label, y_label=y_label, x_scale=x_scale, y_scale=spec.y_scale,
                   references=spec.references, looks=_looks(shown),
                   ends=metrics[0].text if isinstance(spec, ByStep) else None)  # fmt: skip
    for axes in figure.axes:
        _in_percent(axes.yaxis, *metrics)
    words = "; ".join(metric.label for metric in metrics)
    name = spec.name or f"{metrics[0].name}_by_{'step' if isinstance(spec, ByStep) else 'layer'}"
    return [Picture(name, f"{words[:1].upper()}{words[1:]}, {what}.", figure)]


def headlines(results: Results, shown: Sequence[tuple[str | Quantity, str, str]]) -> list[Picture]:
    """Draws the numbers on top of the page, (metric, variant before, variant after): means over seeds."""
    panels: dict[str, dict[str, tuple[list[float], str]]] = {}
    levels: dict[str, float] = {}
    for metric, *names in shown:
        quantity = as_quantity(metric)
        with contextlib.suppress(Missing):
            bars_of = {name: (results[name].values(quantity), quantity.text(results[name][quantity])) for name in names}
            panels.setdefault(quantity.label, {}).update(bars_of)
            config = results[names[-1]].config
            level = chance(quantity.name, conditions(config)) if config and quantity.name != "perplexity" else None
            levels |= {} if level is None else {quantity.label: level}
    if not panels:
        return []
    words = "; ".join(panels)
    lines_are = " Dashed: chance, or the 3 of a Gaussian." if levels else ""
    caption = f"{words[:1].upper()}{words[1:]}. Bars are means; each point is a seed.{lines_are}"
    return [Picture("headlines", caption, numbers(panels, levels))]


LOSS = ByStep("validation_loss_nats", name="training_curves")
KURTOSIS = ByLayer("kurtosis_first kurtosis_rest", y_scale="log", references={"Gaussian": 3.0})
MAX_ABS = ByLayer("max_abs_first max_abs_rest", y_scale="log")


@dataclasses.dataclass(frozen=True)
class Bars:
    """Metrics as groups of bars, a bar for each variant; `scale` multiplies all numbers, such as 100 for percent."""

    name: str
    caption: str
    metrics: Quantities
    rows: str = ""
    y_label: str = ""
    y_scale: Scale = "linear"
    scale: float = 1.0

    def __call__(self, results: Results) -> list[Picture]:
        """Draws the picture."""
        metrics = quantities(self.metrics)
        shown = [result for result in _shown(results, self.rows) if _complete(result, *metrics)]
        complete = {r.name: self.scale * np.array([r.values(metric) for metric in metrics]).T for r in shown}
        if not complete:
            raise Missing(self.name)
        figure = bars([metric.label for metric in metrics], complete, y_label=self.y_label, y_scale=self.y_scale)
        if self.scale == 1:
            _in_percent(figure.axes[0].yaxis, *metrics)
        return [Picture(self.name, self.caption, figure)]


@dataclasses.dataclass(frozen=True)
class Dots:
    """Metrics side by side, words -> metric: a row for each variant with a dot for each seed and the mean."""

    name: str
    caption: str
    metrics: Mapping[str, Quantity]

    def __call__(self, results: Results) -> list[Picture]:
        """Draws the picture."""
        shown = [result for result in _shown(results, "") if _complete(result, *self.metrics.values())]
        if not shown:
            raise Missing(self.name)
        panels = {
            words: {result.name: (result.values(metric), metric.text(result[metric])) for result in shown}
            for words, metric in self.metrics.items()
        }
        return [Picture(self.name, self.caption, dots(panels))]


@dataclasses.dataclass(frozen=True)
class Points:
    """Every variant as a point, named by what `*` stands for in the pattern of its group.

    `groups` are words -> pattern of variants, each with a colour; one group of all if empty.
    """

    name: str
    caption: str
    x: str | Quantity
    y: str | Quantity
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    y_scale: Scale = "linear"
    references: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __call__(self, results: Results) -> list[Picture]:
        """Draws the picture."""
        x, y = as_quantity(self.x), as_quantity(self.y)
        points = {}
        for words, rows in (self.groups or {"variants": ""}).items():
            complete = [result for result in _shown(results, rows) if _complete(result, x, y)]
            points[words] = [(result[x], result[y], case_in(rows, result.name) or result.name) for result in complete]
        if not any(points.values()):
            raise Missing(self.name)
        figure = scatter(points, x_label=x.label, y_label=y.label, y_scale=self.y_scale, references=self.references)
        _in_percent(figure.axes[0].xaxis, x)
        _in_percent(figure.axes[0].yaxis, y)
        return [Picture(self.name, self.caption, figure)]


@dataclasses.dataclass(frozen=True)
class Maps:
    """Attention by key and hidden states of one held-out sequence, of the first finished seed of each variant."""

    rows: str = ""

    def __call__(self, results: Results) -> list[Picture]:
        """Draws both pictures."""
        arrays = {result.name: result.arrays("maps") for result in _shown(results, self.rows)}
        if not arrays:
            raise Missing("maps")
        attention = by_key({name: maps["attention"][0] for name, maps in arrays.items()})
        panels: dict[str, dict[str, Curve]] = {"first token": {}, "other tokens, mean": {}}
        for name, maps in arrays.items():
            channels = np.abs(maps["hidden"][0])  # [positions, channels]
            for panel, profile in zip(panels.values(), (channels[0], channels[1:].mean(0)), strict=True):
                panel[name] = list(range(1, len(profile) + 1)), np.sort(profile)[None, ::-1]
        hidden = lines(panels, x_label="channel, sorted", y_label="|hidden state|", x_scale="log", y_scale="log")
        seen = "on one held-out sequence, mean over layers"
        return [
            Picture("attention_by_key", f"Attention to each key {seen}, heads and the queries that see it.", attention),
            Picture("hidden_states", f"|Hidden state| of each channel {seen}, largest first.", hidden),
        ]
