r"""How fast Adam raises the residual norm of <s> in three layers: predicted from one setting for six others.

Active-Dormant Attention Heads (arXiv 2410.13835) finds the growth linear and says that Adam turns small gradients into
constant updates, but not how large the slope is, or what it depends on. Let n be the norm after the first block. An
update of Adam changes every parameter by its rate eta at most, so that

.. math::
  \frac{dn}{dt} = \eta \left( a \left\| \frac{\partial n}{\partial \theta} \right\|_1 -
  \lambda \left\langle \theta, \frac{\partial n}{\partial \theta} \right\rangle \right), \qquad |a| \lesssim 1

where lambda is the decoupled weight decay and a the alignment: the share of the largest possible speed. It is 1 in the
toys of `norm_toys`, whose gradients have one direction and no noise, and about signal over noise where noise is larger.
The predictions: a does not depend on rate, width or decay, so that the one of the common setting predicts the slopes of
the others; four times the batch doubles it; an eps above the gradients lowers it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from orthojax.analysis import first_residual_norms
from orthojax.config import replace
from orthojax.experiments.active_dormant.models import HISTORY, PEAK, config
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.pictures import StepCurves
from orthojax.experiments.results import Quantity, Result, Results
from orthojax.experiments.tables import MetricTable
from orthojax.model import LoadedModel
from orthojax.train import Inputs, read_metrics
from orthojax.train.optimizer import decay_mask

COMMON = "common"


def _variants(scale: str) -> tuple[Variant, ...]:
    common = config(3, train__probe_details=False)
    rate, steps = common.optim.learning_rate, common.train.steps

    def variant(name: str, label: str, **changes: object) -> Variant:
        of = replace(common, {name.replace("__", "."): value for name, value in changes.items()})
        end = of.train.steps  # with the step at which the slope begins
        probes = sorted({*of.train.probe_steps, end // 2, end} - ({steps} if end > steps else set()))
        return Variant(name, label, replace(of, {"train.probe_steps": tuple(probes)}))

    return (
        variant(COMMON, f"rate {rate:g}, d = {common.model.d_model}, eps {common.optim.eps:g}"),
        # At a low rate the peak begins late: as many steps times rate as the common run.
        variant("slow", "rate x 0.3, three times the steps",
                optim__learning_rate=0.3 * rate, train__steps=3 * steps),
        variant("fast", "rate x 3", optim__learning_rate=3 * rate),
        variant("narrow", "d = 32", model__d_model=32, model__d_mlp=128),
        variant("wide", "d = 128", model__d_model=128, model__d_mlp=512),
        variant("decay", "decay 0.1", optim__weight_decay=0.1),
        variant("large_batch", "batch x 4", train__batch_size=4 * common.train.batch_size),
        variant("small_eps", "eps 1e-5", optim__eps=1e-5),
        variant("large_eps", "eps 1e-3", optim__eps=1e-3),
    )  # fmt: skip


def _slope(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """The slope of the norm over the second half of the steps, and at the end what bounds it."""
    c, key = loaded.config, "residual_norm_first/layer_0"
    lines = read_metrics(loaded.source.parents[1] / "metrics.jsonl")
    norms = {line["step"]: line[key] for line in lines if key in line}
    end = c.train.steps
    token = jnp.asarray(inputs.evaluation[0, 0])
    gradient = jax.grad(lambda params: first_residual_norms(loaded.model, params, token)[0])(loaded.params)
    leaves = map(jax.tree.leaves, (gradient, loaded.params, decay_mask(loaded.params)))
    pulls = [float(jnp.sum(by * of)) for by, of, decays in zip(*leaves, strict=True) if decays]
    found = {
        "slope": (norms[end] - norms[end // 2]) / (end - end // 2),
        "speed_limit": c.optim.learning_rate * float(optax.tree.norm(gradient, 1)),
        "decay_pull": c.optim.learning_rate * c.optim.weight_decay * sum(pulls),
    }
    on_progress("slope")
    return Measured(found, {})


SLOPE = Measure("slope", _slope)

_ALIGNMENT = Quantity("alignment, the share of the largest speed",
                      lambda of: (of.slope + of.decay_pull) / of.speed_limit)  # fmt: skip
_SLOPE = Quantity("growth in 1,000 steps", lambda of: 1000 * of.slope)


def _predicted(of: Result, common: Result) -> float:
    """The slope by the alignment of the common setting, in 1,000 steps."""
    return 1000 * (common.mean(_ALIGNMENT) * of.speed_limit - of.decay_pull)


def _by_seed(of: Result, common: Result) -> str:
    """Measured over predicted, each seed by its own alignment: seeds differ by much more than the means."""
    seeds = of.seeds.keys() & common.seeds.keys()
    ratios = [_SLOPE.value(of.seeds[s]) / 1000 / (_ALIGNMENT.value(common.seeds[s]) * of.seeds[s].speed_limit
                                                 - of.seeds[s].decay_pull) for s in sorted(seeds)]  # fmt: skip
    return f"; measured over predicted by seed {', '.join(f'{ratio:.2g}' for ratio in ratios)}" if ratios else ""


def _as_predicted(of: Result, common: Result) -> bool:
    return 2 / 3 < of.mean(_SLOPE) / _predicted(of, common) < 1.5


def _each(*names: str) -> Callable[[Results], dict[str, tuple[str, ...]]]:
    return lambda results: {results[name].label: (name, COMMON) for name in names if name in results}


_TESTABLE = "; testable where the common setting's is above 0"
CLAIMS = (
    Claim("The norm grows in the common setting, and no faster than Adam can.", (COMMON,), (_SLOPE, _ALIGNMENT),
          lambda of: of.slope > 0 and 0 < of.mean(_ALIGNMENT) < 1, "slope above 0, alignment in (0, 1)"),
    *(Claim(f"The alignment of the common setting, a mean over seeds, predicts the mean slope at another {what}.",
            _each(*names), (_SLOPE, _ALIGNMENT), _as_predicted,
            "measured over predicted slope in (2/3, 3/2)" + _TESTABLE,
            lambda of, common: common.slope > 0, shown=1,
            detail=lambda of, common: f"predicted {_predicted(of, common):.3g}{_by_seed(of, common)}")
      for what, names in {"rate": ("slow", "fast"), "width": ("narrow", "wide"), "decay": ("decay",),
                          "eps far below the gradients": ("small_eps",)}.items()),
    Claim("Noise limits the alignment: four times the batch doubles it.", ("large_batch", COMMON), (_ALIGNMENT, _SLOPE),
          lambda of, common: 1.5 < of.mean(_ALIGNMENT) / common.mean(_ALIGNMENT) < 2.7,
          "ratio of alignments in (1.5, 2.7)" + _TESTABLE, lambda of, common: common.slope > 0),
    Claim("An eps above the gradients ends the growth.", ("large_eps", COMMON), (_SLOPE, _ALIGNMENT),
          lambda of, common: of.slope < 0.5 * common.slope, "slope below half of the common setting's" + _TESTABLE,
          lambda of, common: common.slope > 0),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Three blocks, {c.train.steps} steps of {c.train.batch_size} x {c.data.sequence_length} tokens, Adam with "
        f"decay {c.optim.weight_decay:g} where nothing else is said. The slope is that of the norm of <s> after the "
        "first block over the second half of the steps; the largest possible speed is the rate times the L1 norm of "
        "the derivative of that norm by all parameters, at the end.",
    ]


EXPERIMENT = Experiment(
    name="peak_slope",
    title="Bigram-Backcopy, three layers: the slope of the residual norm of <s> under Adam, predicted and measured",
    variants=_variants,
    seeds=(6, 7, 8),
    about=_about,
    measures=(HISTORY, SLOPE),
    tables=(
        MetricTable("Growth of the residual norm of <s> after the first layer",
                    [_SLOPE, Quantity("largest in 1,000 steps", lambda of: 1000 * of.speed_limit),
                     Quantity("taken by decay", lambda of: 1000 * of.decay_pull), _ALIGNMENT, PEAK,
                     "sink_attention_rest"]),
    ),
    claims=CLAIMS,
    pictures=(
        StepCurves("norm", "Residual norm of <s> after the first layer.", "||x|| at <s>",
                   {"residual_norm_first/layer_0": ""}, "log", "linear"),
    ),
)  # fmt: skip
