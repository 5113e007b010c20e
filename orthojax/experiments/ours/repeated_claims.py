"""What the experiments on repeated passages measure and claim: dominance, drains, outliers, perplexity and damage."""

from orthojax.experiments.claims import (
    DOMINANCE,
    DOMINANCE_TESTABLE,
    FRACTION,
    KURTOSIS,
    MASS,
    PPL,
    Claim,
    O,
    S,
    V,
    dominated,
    excess_of_first_left,
    value_drain,
)
from orthojax.experiments.cure_claims import dominance_halved, no_outliers_left, no_perplexity_lost
from orthojax.experiments.labels import LABELS
from orthojax.experiments.quantization import COARSE, INT4, MODERATE, loses_less
from orthojax.experiments.results import Numbers, Quantity

DRAINED = 0.5  # values of the first token are drained below this fraction of the others' norm


def _peak(of: Numbers) -> float:
    return of.residual_norm_first / of.residual_norm_rest


DRAIN = Quantity("value norm, first token over others", value_drain, "{:.2f}".format)
PEAK = Quantity("residual norm, first token over others", _peak, "{:.2f}".format)

MEASURED = (PPL, *KURTOSIS, "max_abs_first", FRACTION, MASS, "sink_rate", DRAIN, PEAK)


def is_drained(of: Numbers) -> bool:
    """Whether softmax has drained the values of the first token."""
    return DRAIN(of) < DRAINED


def they_lose_less(setting: str) -> Claim:
    """That the cured model loses less perplexity than vanilla when it is rounded so, a metric."""
    return loses_less(setting, f"They lose less at {LABELS[setting]}.", "less than vanilla")


DOMINATES = Claim(
    "The first token dominates where text repeats itself.", (V,), (FRACTION,), dominated,
    f"{DOMINANCE:g} times what equal logits give, or more, in every case",
)  # fmt: skip
# What each method does to dominance, drains, outliers, perplexity and damage, in every group.
BY_METHOD = (
    dominance_halved("Softmax-1 alone takes away half of the dominance, or more.", (V, S)),
    Claim("OrthoAdam alone leaves it.", (V, O), (FRACTION,), lambda v, o: excess_of_first_left(v, o) >= 0.5,
          f"at least half is left; {DOMINANCE_TESTABLE}", dominated),
    dominance_halved("Both together take away half of it, or more."),
    Claim("The values of the first token are drained under softmax.", (V,), (DRAIN,), is_drained,
          f"norm below {DRAINED:g} of the others', mean over layers; {DOMINANCE_TESTABLE}", dominated),
    Claim("Softmax-1 keeps them.", (V, S), (DRAIN,), lambda v, s: not is_drained(s),
          f"norm of {DRAINED:g} of the others' or more; testable where vanilla's are drained",
          lambda v, s: is_drained(v)),
    no_outliers_left("Both together leave no outliers."),
    no_perplexity_lost("They cost no perplexity."),
    *map(they_lose_less, (COARSE, MODERATE, INT4)),
)  # fmt: skip
