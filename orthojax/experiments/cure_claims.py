"""Claims that several experiments make of the cure; `**more` are further fields of `Claim`."""

from typing import Any

from orthojax.experiments.claims import (
    DOMINANCE_TESTABLE,
    EQUAL_PERPLEXITY,
    FRACTION,
    KURTOSIS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    C,
    Claim,
    Names,
    V,
    dominated,
    excess_of_first_left,
    has_outliers,
    worst_kurtosis,
)
from orthojax.experiments.results import Result
from orthojax.formatting import number


def _largest_of_a_seed(v: Result, c: Result) -> str:
    largest = max(max(c.values(name)) for name in KURTOSIS)
    return f"largest of a seed of the second {number(largest)}" if len(c.seeds) > 1 else ""


def no_outliers_left(says: str, of: Names = (V, C), **more: Any) -> Claim:
    """That the second variant has no outliers, where the first has."""
    return Claim(
        says,
        of,
        KURTOSIS,
        lambda v, c: worst_kurtosis(c) < NO_OUTLIERS,
        f"both below {NO_OUTLIERS:g} in the mean over seeds; testable where vanilla's is above {OUTLIERS:g}, either",
        has_outliers,
        detail=_largest_of_a_seed,
        **more,
    )


def dominance_halved(says: str, of: Names = (V, C), **more: Any) -> Claim:
    """That half of the first token's dominance in the first variant, or more, is gone in the second."""
    return Claim(
        says,
        of,
        (FRACTION,),
        lambda v, c: excess_of_first_left(v, c) <= 0.5,
        f"at most half of what exceeds equal logits is left; {DOMINANCE_TESTABLE}",
        dominated,
        **more,
    )


def no_perplexity_lost(says: str, of: Names = (V, C), **more: Any) -> Claim:
    """That the perplexity of the second variant equals the first's or is lower."""
    return Claim(
        says,
        of,
        (PPL,),
        lambda v, c: c.perplexity / v.perplexity - 1 <= EQUAL_PERPLEXITY,
        f"mean at most {EQUAL_PERPLEXITY:.0%} above vanilla's",
        **more,
    )
