"""Claims that many studies make of the cure; names of variants may have a `*`, as in `claims`."""

from typing import Any

from orthojax.experiments.claims import (
    FIRST,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    REST,
    Claim,
    Expr,
    Metric,
    dominated,
    either_loses,
    excess_left,
    lost,
    worst,
)

OUTCOME = (
    "perplexity kurtosis_first kurtosis_rest max_abs_first max_abs_rest first_attention_fraction first_attention_mass"
)
DRAIN = Metric("value norm, first token over others", lambda of: of["value_norm_first"] / of["value_norm_rest"])
PEAK = Metric("residual norm, first token over others", lambda of: of["residual_norm_first"] / of["residual_norm_rest"])
WORST = Metric("larger kurtosis of first token and others", lambda of: max(FIRST(of), REST(of)))


def outliers(variant: str) -> Expr:
    """Returns whether a variant has outliers, at the first token or at others."""
    return worst(variant) > OUTLIERS


def cured_outliers(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that a variant has no outliers, testable if another one has."""
    return Claim(says, worst(after) < NO_OUTLIERS, outliers(before), **more)


def halved(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that at most half of the first token's dominance is left."""
    return Claim(says, excess_left(after, before) <= 0.5, dominated(before), **more)


def no_perplexity_lost(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that perplexity is at most 1% higher."""
    return Claim(says, PPL[after] / PPL[before] - 1 <= 0.01, **more)


def loses_less(setting: str, says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that a variant loses less to quantisation, testable if it costs either 0.5%."""
    return Claim(says, lost(setting)[after] < lost(setting)[before], either_loses(setting, before, after), **more)
