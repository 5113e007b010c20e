"""What Tables 3 and 6 share: perplexities under quantisation, their differences, and which of two models loses less."""

from collections.abc import Callable, Mapping, Sequence

from orthojax.experiments.from_attention.beside_the_paper import Case, Column, arrow, beside, means
from orthojax.experiments.reporting.page import Table
from orthojax.experiments.reporting.summaries import QUANTIZATION
from orthojax.experiments.study.comparisons import difference_text
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import percent, signed

INT8 = ("perplexity_int8_coarse", "perplexity_int8_moderate", "perplexity_int8_fine")
INT4 = "perplexity_int4_zeropoint"
PER_TOKEN = "perplexity_int8_fine_per_token"
# Where neither of two models loses this under a setting, it shows nothing of them.
VISIBLE_LOSS = 0.005
LOST = f"visible where either loses {VISIBLE_LOSS:.1%} or more"

Rows = Sequence[tuple[Variant, Mapping[str, float]]]  # variant, what the paper prints for it
Paper = Mapping[str, float]


def name_of(setting: str) -> str:
    """Of a setting, for a heading."""
    return "int8 fine, per token" if setting == PER_TOKEN else QUANTIZATION[setting]


def by_seed(study: Study, variant: str, setting: str) -> dict[int, float]:
    """The fraction by which a setting raises perplexity, of each seed."""
    plain, quantized = study.by_seed(variant, "perplexity"), study.by_seed(variant, setting)
    return {seed: quantized[seed] / plain[seed] - 1 for seed in quantized if seed in plain}


def loss(study: Study, variant: str, setting: str) -> float:
    """The mean of `by_seed`."""
    values = by_seed(study, variant, setting).values()
    return sum(values) / len(values) if values else float("nan")


def paper_loss(paper: Paper, setting: str) -> float | None:
    """The same of the paper; None where it prints nothing."""
    return paper[setting] / paper["perplexity"] - 1 if setting in paper else None


def tables(study: Study, rows: Rows, settings: Sequence[str]) -> list[Table]:
    """Perplexities, and their differences in points and in percent, beside the paper's.

    Args:
      study: Where ours are.
      rows: Variants, and what the paper prints for them.
      settings: Metrics of quantised perplexity, in the order of the columns.
    """

    def columns(metrics: Sequence[str], show: Callable[[float], str]) -> list[Column]:
        with_paper = [m for m in metrics if any(m in paper for _, paper in rows)]
        made = []
        for metric in metrics:
            made.append(Column("full" if metric == "perplexity" else name_of(metric), metric, show=show))
            made += [Column("paper", metric, True, show)] if metric in with_paper else []
        return made

    def differences(caption: str, show: Callable[[float], str], of: Callable[[float, float], float]) -> Table:
        derived = [(variant, _differences(paper, settings, of)) for variant, paper in rows]
        return beside(_derived(study, settings, of), caption, derived, columns(settings, show))

    return [
        beside(study, "Perplexity", rows, columns(("perplexity", *settings), "{:,.2f}".format)),
        differences("Difference from full precision, in points", signed, lambda quantized, full: quantized - full),
        differences("The same in percent", percent, lambda quantized, full: quantized / full - 1),
    ]


def _differences(metrics: Paper, settings: Sequence[str], of: Callable[[float, float], float]) -> dict[str, float]:
    return {key: of(metrics[key], metrics["perplexity"]) for key in settings if key in metrics}


def _derived(study: Study, settings: Sequence[str], of: Callable[[float, float], float]) -> Study:
    """The study with differences in the place of quantised perplexities."""
    rows = [row | {"metrics": _differences(row["metrics"], settings, of)} for row in study.results["rows"]]
    return Study(study.experiment, study.scale, study.variants, study.seeds, study.workdir, {"rows": rows})


def paired_table(study: Study, pairs: Mapping[str, tuple[str, str]], settings: Sequence[str]) -> Table:
    """By how many percentage points the second of each pair loses more than the first.

    Args:
      study: Where the numbers are.
      pairs: Label -> (vanilla, cured).
      settings: Metrics of quantised perplexity.
    """

    def cell(vanilla: str, cured: str, setting: str) -> str:
        a, b = by_seed(study, cured, setting), by_seed(study, vanilla, setting)
        return difference_text({seed: (100 * a[seed], 100 * b[seed]) for seed in a if seed in b})

    body = [[label, *(cell(*names, setting) for setting in settings)] for label, names in pairs.items()]
    caption = "Percentage points of perplexity that cured loses more than vanilla, paired by seed"
    return Table(caption, ["", *map(name_of, settings)], body)


def either_loses(study: Study, setting: str, vanilla: str, cured: str) -> bool:
    """Whether a setting costs one of the two `VISIBLE_LOSS`: what cured alone loses is to be seen, too."""
    return max(loss(study, name, setting) for name in (vanilla, cured)) >= VISIBLE_LOSS


def loses_less(
    study: Study, setting: str, paper_of: Callable[[str], tuple[Paper, Paper]]
) -> Callable[[str, str, str], Case]:
    """A case for `judge`: whether cured loses less than vanilla under a setting.

    Args:
      study: Where the numbers are.
      setting: Metric of a quantised perplexity.
      paper_of: Label -> what the paper prints for vanilla and cured.
    """

    def case(label: str, vanilla: str, cured: str) -> Case:
        ours = [loss(study, name, setting) for name in (vanilla, cured)]
        paper = [paper_loss(metrics, setting) for metrics in paper_of(label)]
        return Case(arrow(ours, paper, percent), ours[1] < ours[0], either_loses(study, setting, vanilla, cured))

    return case


def advantage(study: Study, pair: Sequence[str], setting: str) -> float:
    """By how many points the perplexity of the second of (vanilla, cured) is below the first's under a setting."""
    before, after = means(study, setting, *pair)
    return before - after
