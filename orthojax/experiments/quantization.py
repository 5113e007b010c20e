"""What quantisation costs a model, and whether it costs cured less than vanilla: what tables and experiments share."""

import math

from orthojax.experiments.claims import C, Claim, Revision, V
from orthojax.experiments.labels import LABELS
from orthojax.experiments.results import Quantity, Result, Results, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import percent, signed

COARSE, MODERATE, FINE = INT8 = ("perplexity_int8_coarse", "perplexity_int8_moderate", "perplexity_int8_fine")
INT4 = "perplexity_int4_zeropoint"
PER_TOKEN = "perplexity_int8_fine_per_token"
# Where neither of two models loses this under a setting, it says nothing about them.
TESTABLE_LOSS = 0.005
LOST = f"testable where either loses {TESTABLE_LOSS:.1%} or more"


def points(setting: str, label: str = "") -> Quantity:
    """What a setting adds to perplexity, in points."""
    label = label or f"points of perplexity lost at {LABELS[setting]}"
    return Quantity(label, lambda of: of[setting] - of.perplexity, signed)


def int8_error_bound(d_model: float) -> float:
    r"""The largest rounding error of int8 absmax on a vector of D values, as a fraction of their root mean square.

    A step is :math:`\max_i |x_i| / 127`, an error at most half of it, and :math:`\max_i |x_i| \le \sqrt{D}\,
    \mathrm{rms}(x)`, so the error is at most :math:`\sqrt{D} / 254`. One scale for all tokens changes nothing where a
    norm gives all of them the same root mean square, as RMSNorm with one scale does.

    >>> round(int8_error_bound(192), 3)
    0.055
    """
    return math.sqrt(d_model) / 254


def about_int8(results: Results) -> str:
    """How little int8 can do to normed inputs of such widths, and the largest loss of any run."""
    widths = sorted({result.d_model for result in results})
    errors = f"{int8_error_bound(widths[0]):.1%}"
    if len(widths) > 1:
        errors += f" (D = {widths[0]:g}) to {int8_error_bound(widths[-1]):.1%} (D = {widths[-1]:g})"
    losses = [
        (numbers[setting] / numbers.perplexity - 1, f"{LABELS[setting]}, {result.label}, seed {seed}")
        for result in results
        for seed, numbers in result.seeds.items()
        for setting in (*INT8, INT4)
        if setting in numbers
    ]
    largest = f" The largest loss of any run here is {percent(max(losses)[0])}: {max(losses)[1]}." if losses else ""
    return (
        "How much int8 can cost depends on the width first. After RMSNorm with one scale no value exceeds sqrt(D) "
        "times the root mean square, whatever the outliers, so the rounding error of such inputs is at most sqrt(D) / "
        f"254 of it: {errors} here, {int8_error_bound(2048):.1%} at the paper's 2,048. That int8 costs little at a "
        "small width is therefore nearly arithmetic, and no evidence about outliers; the inputs of the output "
        f"projections are not normed.{largest}"
    )


def either_loses(setting: str, vanilla: Result, cured: Result) -> bool:
    """Whether a setting costs one of the two `TESTABLE_LOSS`: what cured alone loses counts, too."""
    return max(result.mean(penalty(setting)) for result in (vanilla, cured)) >= TESTABLE_LOSS


def vanilla_loses(setting: str, vanilla: Result, cured: Result) -> bool:
    """Whether a setting costs vanilla `TESTABLE_LOSS`."""
    return vanilla.mean(penalty(setting)) >= TESTABLE_LOSS


def seen_in_either(setting: str, criterion: str) -> Revision:
    """For criteria that at first only looked at what vanilla loses."""
    return Revision(
        "what cured alone loses did not count",
        {
            "testable": lambda v, c: vanilla_loses(setting, v, c),
            "criterion": f"{criterion}; testable where vanilla loses {TESTABLE_LOSS:.1%} or more",
        },
    )


def loses_less(setting: str, says: str, criterion: str, revised: Revision | None = None) -> Claim:
    """A claim that cured loses less than vanilla under a setting.

    Args:
      setting: Metric of the quantised perplexity.
      says: The claim.
      criterion: In which groups it must.
      revised: Of the claim.
    """
    lost = penalty(setting)
    return Claim(says, (V, C), (lost,),
                 lambda v, c: c.mean(lost) < v.mean(lost), f"{criterion}; {LOST}",
                 lambda v, c: either_loses(setting, v, c), revised=revised)  # fmt: skip


def tables(settings: tuple[str, ...]) -> tuple[MetricTable | PairedTable, ...]:
    """Perplexities, their differences in points and in percent beside the paper's, and vanilla and cured paired.

    Args:
      settings: Metrics of quantised perplexity, in the order of the columns.
    """
    names = {setting: LABELS[setting] for setting in settings}
    perplexities = {"perplexity": "full"} | names
    return (
        MetricTable(
            "Perplexity",
            [Quantity(name, lambda of, key=key: of[key], "{:,.2f}".format) for key, name in perplexities.items()],
        ),
        MetricTable("Difference from full precision, in points", [points(*named) for named in names.items()]),
        MetricTable("The same in percent", [penalty(*named) for named in names.items()]),
        PairedTable(
            "Percentage points of perplexity that cured loses more than vanilla, paired by seed",
            "vanilla",
            differences=[
                Quantity(name, lambda of, key=key: 100 * (of[key] / of.perplexity - 1)) for key, name in names.items()
            ],
        ),
    )
