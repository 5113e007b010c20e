"""Which memory of Adam makes outliers: a grid over b1 and b2, with b1 = 0 (RMSProp) and b2 = 0 (signs)."""

import functools

import numpy as np

from orthojax.config import replace
from orthojax.experiments.claims import (
    KURTOSIS,
    OUTLIERS,
    PPL,
    WORST_KURTOSIS,
    Claim,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import RUNS, SCALES
from orthojax.experiments.page import Table
from orthojax.experiments.results import Quantity, Result, Results, as_quantity
from orthojax.experiments.tables import MetricTable

B1, B2 = (0.0, 0.5, 0.9), (0.0, 0.9, 0.99, 0.999)
_LEARNT = 0.1  # a perplexity further above that of the usual Adam is of a model that has learned less


def _name(b1: float, b2: float) -> str:
    return f"b1_{b1:g}_b2_{b2:g}"


_USUAL = _name(0.9, 0.999)


def _variants(scale: str) -> tuple[Variant, ...]:
    base = RUNS[scale]("gpt2_130m")
    return tuple(
        Variant(_name(b1, b2), f"b1 = {b1:g}, b2 = {b2:g}", replace(base, {"optim.b1": b1, "optim.b2": b2}))
        for b1 in B1
        for b2 in B2
    )


def _learned(of: Result, usual: Result) -> bool:
    return WORST_KURTOSIS(usual) > OUTLIERS and of.perplexity / usual.perplexity - 1 <= _LEARNT


_TESTABLE = (
    f"testable where the usual Adam is above {OUTLIERS:g} and the perplexity is at most {_LEARNT:.0%} above its own"
)
CLAIMS = (
    Claim("Without the first moment there are outliers, too.", {f"b2 = {b2:g}": (_name(0.0, b2), _USUAL) for b2 in B2},
          (WORST_KURTOSIS,), lambda of, usual: WORST_KURTOSIS(of) > OUTLIERS, f"above {OUTLIERS:g}; {_TESTABLE}",
          _learned, shown=1),
    Claim("Without the second, where updates are signs, there are, too.",
          {f"b1 = {b1:g}": (_name(b1, 0.0), _USUAL) for b1 in B1}, (WORST_KURTOSIS,),
          lambda of, usual: WORST_KURTOSIS(of) > OUTLIERS, f"above {OUTLIERS:g}; {_TESTABLE}", _learned, shown=1),
    Claim("A longer memory of the second moment makes more of them.", {"": tuple(_name(0.9, b2) for b2 in B2)},
          (WORST_KURTOSIS,), lambda *of: bool(np.all(np.diff([WORST_KURTOSIS(r) for r in of]) > 0)),
          f"kurtosis rises with b2 at b1 = 0.9; testable where the usual Adam is above {OUTLIERS:g}",
          lambda *of: WORST_KURTOSIS(of[-1]) > OUTLIERS),
)  # fmt: skip


def _grid(quantity: str | Quantity, results: Results) -> Table:
    shown = as_quantity(quantity)
    rows = [[f"b1 = {b1:g}", *(results[_name(b1, b2)].cell(shown) for b2 in B2)] for b1 in B1]
    return Table(f"{shown.label[0].upper()}{shown.label[1:]}", ["", *(f"b2 = {b2:g}" for b2 in B2)], rows)


def _about(results: Results) -> list[str]:
    config = results.first.config
    return [
        "From Attention to Activation (section 4.1) names the moving average of squared gradients as the cause of "
        f"outliers. {config.model.num_layers} layers of width {config.model.d_model}, softmax, {config.train.steps:,} "
        f"steps at a rate of {config.optim.learning_rate:g}, the same for all, with bias correction. With b2 = 0 the "
        "root of the second moment is the size of the latest gradient."
    ]


EXPERIMENT = Experiment(
    name="adam_betas",
    title="Which memory of Adam makes outliers: a grid over b1 and b2",
    variants=_variants,
    scales=SCALES,
    about=_about,
    tables=(
        *(functools.partial(_grid, quantity) for quantity in (WORST_KURTOSIS, PPL)),
        MetricTable("Models", ("perplexity", *KURTOSIS, "max_abs_first", "max_abs_rest")),
    ),
    claims=CLAIMS,
)
