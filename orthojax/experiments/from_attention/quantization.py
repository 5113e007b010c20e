"""What Tables 1, 3 and 6 share: what quantisation costs a model, and whether it costs cured less than vanilla."""

from orthojax.experiments.claims import C, Claim, Revision, V
from orthojax.experiments.results import LABELS, Quantity, Result, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import signed

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


def loses_less(setting: str, says: str, criterion: str) -> Claim:
    """A claim that cured loses less than vanilla under a setting.

    Args:
      setting: Metric of the quantised perplexity.
      says: The claim.
      criterion: In which groups it must.
    """
    lost = penalty(setting)
    return Claim(says, (V, C), (lost,),
                 lambda v, c: c.mean(lost) < v.mean(lost), f"{criterion}; {LOST}",
                 lambda v, c: either_loses(setting, v, c), revised=seen_in_either(setting, criterion))  # fmt: skip


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
