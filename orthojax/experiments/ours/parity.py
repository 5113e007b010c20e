"""Does the cure cost perplexity? Each method at its tuned rate and warm-up, beside Muon, SOAP and Lion."""

import dataclasses
from collections.abc import Mapping

from orthojax.config import replace
from orthojax.experiments.claims import (
    FRACTION,
    KURTOSIS,
    MASS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    WORST_KURTOSIS,
    C,
    Claim,
    Revision,
    V,
    has_outliers,
)
from orthojax.experiments.cure_claims import no_outliers_left, no_perplexity_lost
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.ours.tuning import METHODS, tuned
from orthojax.experiments.ours.tuning import STEPS as TUNED_AT
from orthojax.experiments.pictures import DOMINANCE_BY_STEP, KURTOSIS_BY_STEP, TrainingCurves
from orthojax.experiments.results import Quantity, Result, Results, penalty
from orthojax.experiments.tables import MetricTable, PairedTable

# The cure with the d_model axis of every kernel rotated, at the rate that was tuned for the output axis.
RESIDUAL, RESIDUAL_LABEL = "residual", "d_model axes"
# Steps -> who is compared.
STEPS: Mapping[int, tuple[str, ...]] = {
    500: (V, C, RESIDUAL, "muon", "soap", "lion"), 2000: (V, C, RESIDUAL), 10_000: (V, C, RESIDUAL),
}  # fmt: skip
# Method -> rate and warm-up, a fraction of the steps: what the experiment tuning chose.
TUNED: Mapping[str, tuple[float, float]] = {
    V: (0.004, 0.25), C: (0.004, 0.25), "muon": (0.01, 0.05), "soap": (0.008, 0.25), "lion": (0.001, 0.25),
    "sgd": (0.4, 0.25),
}  # fmt: skip


_TIME = Quantity("time of a step over that of softmax + Adam", lambda of: of.cost_step_ratio, "{:.2f}".format)


def _name(method: str, steps: int) -> str:
    return f"{method}_{steps}"


def variant(method: str, steps: int) -> Variant:
    """The run of a method for so many steps; its name is the method's."""
    if method == RESIDUAL:
        config = replace(tuned(C, *TUNED[C], steps), {"optim.rotation.axes": "residual"})
        return Variant(method, f"{METHODS[C].label}, {RESIDUAL_LABEL}", config)
    return Variant(method, METHODS[method].label, tuned(method, *TUNED[method], steps))


def _variants(scale: str) -> tuple[Variant, ...]:
    def named(method: str, steps: int) -> Variant:
        of = variant(method, steps)
        return dataclasses.replace(of, name=_name(method, steps), label=f"{of.label}, {steps:,} steps")

    return tuple(named(method, steps) for steps, compared in STEPS.items() for method in compared)


def _groups(results: Results) -> dict[str, dict[str, str]]:
    return {
        f"{steps:,} steps": {method: _name(method, steps) for method in compared} for steps, compared in STEPS.items()
    }


def _longest(of: Result) -> bool:
    return of.config.train.steps == max(STEPS)


_KNOWN = Revision("stated when two of three seeds of the longest runs were there, from the experiment "
                  "remaining_outliers, where it had been set before them")  # fmt: skip
CLAIMS = (
    no_perplexity_lost("The cure costs no perplexity, each method tuned."),
    no_outliers_left("The cure leaves no outliers, at tuned rates."),
    no_perplexity_lost("The cure with the d_model axes rotated costs no perplexity, at the rate tuned for the output "
                       "axis.", (V, RESIDUAL), revised=_KNOWN),
    no_outliers_left("The cure with the d_model axes rotated leaves no outliers.", (V, RESIDUAL), revised=_KNOWN),
    *(Claim(f"{METHODS[name].label} has outliers.", (name,), (WORST_KURTOSIS,),
            lambda of: WORST_KURTOSIS(of) > OUTLIERS, f"above {OUTLIERS:g}")
      for name in ("muon", "lion")),
    Claim(f"{METHODS['soap'].label} has no outliers.", (V, "soap"), (WORST_KURTOSIS,),
          lambda v, of: WORST_KURTOSIS(of) < NO_OUTLIERS,
          f"below {NO_OUTLIERS:g}; testable where Adam's is above {OUTLIERS:g}", has_outliers,
          revised=Revision("Adam has none after so few steps either",
                           {"of": ("soap",), "holds": lambda of: WORST_KURTOSIS(of) < NO_OUTLIERS,
                            "criterion": f"below {NO_OUTLIERS:g}", "testable": None})),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config = results.first.config
    tried = ((METHODS[name].label, *TUNED[name]) for name in next(iter(STEPS.values())) if name in TUNED)
    rates = "; ".join(f"{label} {rate:g}, {warmup:.0%}" for label, rate, warmup in tried)
    return [
        f"{config.model.num_layers} layers of width {config.model.d_model} on ordinary text, "
        f"{config.train.batch_size} x {config.data.sequence_length} tokens a step. Rate and warm-up of each method are "
        f"those that the experiment tuning chose with {TUNED_AT} steps and the same budget for each: {rates}. Longer "
        "runs have them, too, the warm-up as a fraction of their steps.",
        "The d_model axes joined after the experiment remaining_outliers, whose runs are those of "
        f"{max(STEPS):,} steps here, two seeds of them known; shorter runs with these axes were not.",
    ]


EXPERIMENT = Experiment(
    name="parity",
    title="Methods at tuned rates: perplexity, outliers, dominance and the cost of a step",
    variants=_variants,
    seeds=(0, 1, 2),
    about=_about,
    groups=_groups,
    tables=(
        MetricTable("Models", (PPL, *KURTOSIS, "max_abs_first", "max_abs_rest", FRACTION, MASS, _TIME)),
        PairedTable("Change from softmax + Adam, paired by seed", V, (PPL, *KURTOSIS), (FRACTION, MASS)),
        MetricTable("Perplexity lost to quantisation",
                    [penalty(f"perplexity_{name}") for name in ("int8_moderate", "int8_coarse", "int4_zeropoint")]),
    ),
    claims=CLAIMS,
    pictures=(
        *(dataclasses.replace(curves, keep=_longest)
          for curves in (TrainingCurves(), DOMINANCE_BY_STEP, KURTOSIS_BY_STEP)),
    ),
    cost_reference=lambda name: _name(V, int(name.rpartition("_")[2])),
)  # fmt: skip
