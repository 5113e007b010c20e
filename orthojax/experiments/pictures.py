"""The pictures of reports as data: curves over layers and steps, points, bars, and maps of single models."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from orthojax.config import Config
from orthojax.experiments import drawing
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import GAUSSIAN, worst_kurtosis
from orthojax.experiments.page import Picture
from orthojax.experiments.results import NotMeasured, Numbers, Result, Results

Keep = Callable[[Result], bool]


@dataclasses.dataclass(frozen=True)
class LayerCurves:
    """Metrics after each layer, one curve for each variant and metric.

    Attributes:
      name: Of the file.
      caption: Of the picture, or a function that makes it.
      y_label: Of the y axis.
      metrics: Metric -> words that are added to the variant's label; of two metrics each has a panel.
      y_scale: Of the y axis.
      reference: A horizontal line and what it means, which may depend on the config.
      keep: Which variants.
      label: Of a variant.
      normalized: The x of layer m of L, counted from 0, is m / (L - 1); otherwise m + 1.
    """

    name: str
    caption: str | Callable[[Results], str]
    y_label: str
    metrics: Mapping[str, str]
    y_scale: Literal["linear", "log"] = "linear"
    reference: tuple[float, str] | Callable[[Config], tuple[float, str]] | None = None
    keep: Keep = lambda result: True
    label: Callable[[Result], str] = lambda result: result.label
    normalized: bool = False

    def __call__(self, results: Results) -> list[Picture]:
        """The picture; none where no variant has the metrics."""

        def curve(result: Result, metric: str) -> drawing.Curve:
            y = result.layers(metric)
            L = y.shape[1]
            return [m / max(L - 1, 1) for m in range(L)] if self.normalized else list(range(1, L + 1)), y

        shown = list(filter(self.keep, results.finished))
        reference = self.reference
        given = {reference(result.config) if callable(reference) else reference for result in shown}
        return _curves(
            self,
            self.caption(results) if callable(self.caption) else self.caption,
            shown,
            curve,
            self.label,
            {words: value for value, words in filter(None, given)} if len(given) == 1 else {},
            x_label="layer, from 0 (first) to 1 (last)" if self.normalized else "layer",
            y_limits=(0.0, None) if self.normalized and self.y_scale == "linear" else None,
            integer_x=not self.normalized,
        )


def _curves(
    picture: "LayerCurves | StepCurves",
    caption: str,
    shown: Sequence[Result],
    curve: Callable[[Result, str], drawing.Curve],
    label: Callable[[Result], str],
    references: Mapping[str, float],
    **axes: Any,
) -> list[Picture]:
    """Curves of all metrics with the lines of chance.

    Each of two metrics has a panel, as optimizer and normalizer already decide on colour and line.
    """
    panels: dict[str, tuple[dict[str, drawing.Curve], dict[str, float]]] = {}
    apart = len(picture.metrics) == 2
    for metric, words in picture.metrics.items():
        curves, lines = panels.setdefault(words if apart else "", ({}, dict(references)))
        for result in shown:
            with contextlib.suppress(NotMeasured):
                curves[", ".join(filter(None, (label(result), "" if apart else words)))] = curve(result, metric)
                lines |= chance_lines(metric, result.config)
    panels = {words: panel for words, panel in panels.items() if panel[0]}
    if not panels:
        return []
    of_axes: dict[str, Any] = {"y_label": picture.y_label, "y_scale": picture.y_scale, **axes}
    if apart:
        figure = drawing.panels(panels, **of_axes)
    else:
        figure = drawing.lines(panels[""][0], references=panels[""][1], **of_axes)
    return [Picture(picture.name, caption, figure)]


KURTOSIS_BY_LAYER = LayerCurves(
    "kurtosis_by_layer",
    "Kurtosis of hidden states after each layer, first token and others.",
    "kurtosis of hidden states",
    {"kurtosis_first": "first token", "kurtosis_rest": "other tokens"},
    "log",
    (GAUSSIAN, "Gaussian"),
)
MAX_ABS_BY_LAYER = LayerCurves(
    "max_abs_by_layer",
    "Max |activation| after each layer, first token and others.",
    "max |activation|",
    {"max_abs_first": "first token", "max_abs_rest": "other tokens"},
    "log",
)


@dataclasses.dataclass(frozen=True)
class TrainingCurves:
    """Held-out loss during training, one curve for each variant.

    Attributes:
      keep: Which variants.
      label: Of a variant.
      panel: Title of the panel of a variant, where there is more than one.
    """

    keep: Keep = lambda result: True
    label: Callable[[Result], str] = lambda result: result.label
    panel: Callable[[Result], str] = lambda result: ""

    def __call__(self, results: Results) -> list[Picture]:
        """The picture; none where no loss was logged."""
        panels: dict[str, tuple[dict[str, drawing.Curve], dict[str, float]]] = {}
        for of in filter(self.keep, results.finished):
            if (logged := of.logged("validation_loss_nats"))[0]:
                curves, _ = panels.setdefault(self.panel(of), ({}, {}))
                curves[self.label(of)] = logged
        if not panels:
            return []
        axes: dict[str, Any] = {"x_label": "step", "y_label": "held-out loss (nats per token)"}
        figure = drawing.panels(panels, **axes) if len(panels) > 1 else drawing.lines(panels.popitem()[1][0], **axes)
        return [Picture("training_curves", "Held-out loss during training.", figure)]


@dataclasses.dataclass(frozen=True)
class StepCurves:
    """Probed metrics over training steps, one curve for each variant and metric; step 0 is drawn at 1.

    Attributes:
      name: Of the file.
      caption: Of the picture.
      y_label: Of the y axis.
      metrics: Metric, as in metrics.jsonl -> words that are added to the variant's label; of two each has a panel.
      y_scale: Of the y axis.
      x_scale: Of the steps.
      keep: Which variants.
    """

    name: str
    caption: str
    y_label: str
    metrics: Mapping[str, str]
    y_scale: Literal["linear", "log"] = "linear"
    x_scale: Literal["linear", "log"] = "log"
    keep: Keep = lambda result: True

    def __call__(self, results: Results) -> list[Picture]:
        """The picture; none where no variant has the metrics."""

        def curve(result: Result, metric: str) -> drawing.Curve:
            steps, values = result.logged(metric)
            if not steps:
                raise NotMeasured(metric)
            return [max(step, 1) for step in steps] if self.x_scale == "log" else steps, values

        shown = list(filter(self.keep, results.finished))
        return _curves(self, self.caption, shown, curve, lambda of: of.label, {}, x_label="step", x_scale=self.x_scale)


DOMINANCE_BY_STEP = StepCurves(
    "dominance",
    "Queries that attend most to the first token, of a few held-out rows, over training.",
    "fraction of queries",
    {"first_attention_fraction": ""},
    x_scale="linear",
)
KURTOSIS_BY_STEP = StepCurves(
    "kurtosis",
    "Kurtosis of hidden states over training, mean over layers.",
    "kurtosis",
    {"kurtosis_first": "first token", "kurtosis_rest": "other tokens"},
    "log",
    "linear",
)


@dataclasses.dataclass(frozen=True)
class ComputedCurves:
    """Numbers of a computation by step, a picture for each with one curve for each variant.

    Attributes:
      curves: Name, of which `NAME/step_N` are the metrics -> words, for the y axis and the caption.
      steps: The steps.
      chance: Name -> horizontal lines in its picture, what they mean -> where they are.
    """

    curves: Mapping[str, str]
    steps: Sequence[int]
    chance: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __call__(self, results: Results) -> list[Picture]:
        """The pictures; risks are on a logarithmic axis."""
        pictures = []
        for name, words in self.curves.items():
            values = {of.label: np.array([of.values(f"{name}/step_{step}") for step in self.steps]).T for of in results}
            figure = drawing.lines(
                {label: (self.steps, by_seed) for label, by_seed in values.items()},
                x_label="step",
                y_label=words,
                y_scale="log" if name.endswith("risk_nats") else "linear",
                references=self.chance.get(name),
            )
            pictures.append(Picture(name, f"{words[:1].upper()}{words[1:]} by step; range over seeds.", figure))
        return pictures


@dataclasses.dataclass(frozen=True)
class Points:
    """Every variant as a point, in groups of one colour.

    Attributes:
      name: Of the file.
      caption: Of the picture.
      x: Value on the x axis, of a variant's means.
      y: Value on the y axis.
      x_label: Of the x axis.
      y_label: Of the y axis.
      group: Label of a variant's group.
      label: Of a point.
      y_scale: Of the y axis.
      reference: A horizontal line and what it means.
    """

    name: str
    caption: str
    x: Callable[[Result], float]
    y: Callable[[Result], float]
    x_label: str
    y_label: str
    group: Callable[[Result], str] = lambda result: "all variants"
    label: Callable[[Result], str] = lambda result: result.label
    y_scale: Literal["linear", "log", "symlog"] = "linear"
    reference: tuple[float, str] | None = None

    def __call__(self, results: Results) -> list[Picture]:
        """The picture; none where nothing is measured."""
        points: dict[str, list[tuple[float, float, str]]] = {}
        for result in results.finished:
            with contextlib.suppress(NotMeasured):
                point = (self.x(result), self.y(result), self.label(result))
                points.setdefault(self.group(result), []).append(point)
        if not points:
            return []
        figure = drawing.scatter(
            points,
            x_label=self.x_label,
            y_label=self.y_label,
            y_scale=self.y_scale,
            references={words: value for value, words in filter(None, [self.reference])},
        )
        return [Picture(self.name, self.caption, figure)]


def perplexity_and_kurtosis(
    group: Callable[[Result], str] = lambda result: "all variants",
    label: Callable[[Result], str] = lambda result: result.label,
    kurtosis: Callable[[Numbers], float] = worst_kurtosis,
    y_label: str = "kurtosis, larger of first token and others",
) -> Points:
    """Perplexity against kurtosis."""
    return Points(
        "perplexity_and_kurtosis",
        "Perplexity and kurtosis.",
        lambda result: result.perplexity,
        kurtosis,
        "perplexity",
        y_label,
        group,
        label,
        "log",
        (GAUSSIAN, "Gaussian"),
    )


@dataclasses.dataclass(frozen=True)
class ModelMaps:
    """Attention and hidden states of one held-out sequence, a panel for every variant, of its first finished seed.

    Attributes:
      keep: Which variants.
      label: Of a panel.
    """

    keep: Keep = lambda result: True
    label: Callable[[Result], str] = lambda result: result.label

    def __call__(self, results: Results) -> list[Picture]:
        """Two pictures; none without a finished variant."""
        if not (shown := list(filter(self.keep, results.finished))):
            return []
        seeds = sorted({next(iter(result.seeds)) for result in shown})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else "the first seed of each"
        maps = {self.label(result): result.arrays("maps") for result in shown}
        attention = draw_attention({label: arrays["attention"][0] for label, arrays in maps.items()})
        hidden = draw_hidden({label: arrays["hidden"][0] for label, arrays in maps.items()})
        seen = f"Attention on one held-out sequence, mean over heads and layers ({which})."
        words = f"|Hidden state| on the same sequence, mean over layers: bright columns are outlier channels ({which})."
        return [Picture("attention_map", seen, attention, "png"), Picture("hidden_states", words, hidden, "png")]


def draw_attention(panels: Mapping[str, np.ndarray]) -> drawing.Figure:
    """Attention maps; title -> mean weight over heads [T, T]."""
    return drawing.maps(
        panels, x_label="key position", y_label="query position", value_label="attention weight", log=True
    )


def draw_hidden(panels: Mapping[str, np.ndarray], channels: Sequence[int] | None = None) -> drawing.Figure:
    """Maps of hidden states; title -> |hidden state| [T, D], or of some channels only."""
    ticks = None if channels is None else [str(channel) for channel in channels]
    tops = [float(panel.max()) for panel in panels.values()]
    # One panel would leave the others black.
    top = 3 * min(tops) if max(tops) > 20 * min(tops) else None
    return drawing.maps(
        panels, x_label="channel", y_label="position", value_label="|hidden state|", x_ticks=ticks, top=top
    )
