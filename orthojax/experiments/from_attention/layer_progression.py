"""Figures 7 to 26: dominance of the first token, kurtosis, norm ratio and largest activation, layer by layer."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

from orthojax.config import Config
from orthojax.experiments.from_attention.layer_claims import (
    dominance_claims,
    kurtosis_claims,
    max_abs_claims,
    norm_ratio_claims,
)
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid
from orthojax.experiments.from_attention.spiked_vector import mean_norm_ratio_of_direction
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import chance_of_first
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range, number


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What a set of five figures shows: four of our models, two sizes of them in the third, and given models.

    Attributes:
      figure: Number of the first.
      metric: Its key.
      label: For people.
      y_scale: Of the y axis.
      claims: What the paper says of it.
      reference: A line in a picture of models that have it in common: its value for a model, and what it means.
    """

    figure: int
    metric: str
    label: str
    y_scale: Literal["linear", "log"]
    claims: Callable[[Study], list[Claim]]
    reference: Callable[[Config], tuple[float, str]] | None = None


def _chance(config: Config) -> tuple[float, str]:
    return chance_of_first(config.data.sequence_length), "by chance"


def _gaussian_kurtosis(_: Config) -> tuple[float, str]:
    return 3.0, "Gaussian"


def _gaussian_norm_ratio(config: Config) -> tuple[float, str]:
    return mean_norm_ratio_of_direction(config.model.d_model), "Gaussian"


QUANTITIES = (
    Quantity(7, "first_attention_fraction", "first-token dominance, fraction", "linear", dominance_claims, _chance),
    Quantity(12, "kurtosis_first", "kurtosis, first token", "log", kurtosis_claims, _gaussian_kurtosis),
    Quantity(
        17, "norm_ratio_first", "max|x| / l2 norm, first token", "linear", norm_ratio_claims, _gaussian_norm_ratio
    ),
    Quantity(22, "max_abs_first", "max |activation|, first token", "log", max_abs_claims),
)
_OFFSETS = {"gpt2_60m": 0, "gpt2_130m": 1, "gpt2_350m": 2, "gpt2_1_4b": 2, "llama2_130m": 3}  # of the figure's number
_GIVEN = 4
_COLUMNS = (0.0, 1 / 3, 2 / 3, 1.0)


def _given(study: Study) -> list[Variant]:
    return [v for v in study.variants if v.checkpoint]


def _pictures(study: Study, quantity: Quantity) -> list[Picture]:
    groups = {
        (f"figure{quantity.figure + offset}_{model}", MODELS[model]): [
            v for v in study.variants if v.name.startswith(f"{model}_") and not v.checkpoint
        ]
        for model, offset in _OFFSETS.items()
    }
    groups[f"figure{quantity.figure + _GIVEN}_given_models", "Given models"] = _given(study)
    pictures = []
    for (name, words), variants in groups.items():
        curves = summaries.layer_curves(study, variants, quantity.metric, normalized=True)
        if not curves:
            continue
        references = {quantity.reference(v.config) for v in variants} if quantity.reference else set()
        figure = drawing.lines(
            {label.removeprefix(f"{words}, "): curve for label, curve in curves.items()},
            x_label="layer, from 0 (first) to 1 (last)", y_label=quantity.label, y_scale=quantity.y_scale,
            y_limits=(0.0, None) if quantity.y_scale == "linear" else None,
            reference=references.pop() if len(references) == 1 else None,
        )  # fmt: skip
        pictures.append(Picture(name, f"{words}: {quantity.label}, layer by layer.", figure))
    return pictures


def _row(study: Study, variant: Variant, metric: str) -> list[str]:
    values = study.by_layer(variant.name, metric)
    if not values.size:
        return [variant.label, *["failed"] * (len(_COLUMNS) + 1)]
    layers, mean = values.shape[1], values.mean(0)
    cells = [mean_and_range(values[:, round(x * (layers - 1))].tolist()) for x in _COLUMNS]
    return [variant.label, *cells, f"{number(float(mean.max()))}, layer {mean.argmax() + 1} of {layers}"]


def _table(study: Study, quantity: Quantity) -> Table:
    columns = [f"x = {x:.2g}" for x in _COLUMNS]
    return Table(
        f"{quantity.label[0].upper()}{quantity.label[1:]}, after the layers nearest to x",
        ["", *columns, "largest"],
        [_row(study, v, quantity.metric) for v in study.variants],
    )


def report(study: Study, quantity: Quantity) -> Report:
    """One picture for each model, its four methods as curves; the trends that appendix I names."""
    numbers = f"{quantity.figure} to {quantity.figure + _GIVEN}"
    given = "" if _given(study) else f" Figure {quantity.figure + _GIVEN} is of models given with --model; none was."
    return summaries.study_report(
        study,
        f"Figures {numbers}: {quantity.label}, layer by layer",
        [
            f"Five models by four methods, the runs of Table 2.{given} Layer m of L, counted from 0, stands at "
            f"m / (L - 1). Curves are means over seeds, bands go from the smallest to the largest seed.",
        ],
        claims=[] if study.failures() else quantity.claims(study),
        tables=[_table(study, quantity)],
        pictures=_pictures(study, quantity),
    )


def _experiment(quantity: Quantity) -> Experiment:
    first = quantity.figure
    return Experiment(
        name=f"figure{first}",
        title=f"{quantity.label}, layer by layer",
        scales={scale: partial(grid, scale) for scale in SCALES},
        report=partial(report, quantity=quantity),
        also=tuple(f"figure{n}" for n in range(first + 1, first + _GIVEN + 1)),
        takes_models=True,
    )


EXPERIMENTS = tuple(map(_experiment, QUANTITIES))
