"""Table 8: width against the largest activation of the vanilla models; claims of 4.2 and appendices G and H."""

from functools import partial
from itertools import pairwise

from orthojax.experiments import drawing
from orthojax.experiments.claims import OUTLIERS, Claim, V
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention.models import MODELS, SCALES, about, by_model, grid, variant_name
from orthojax.experiments.from_attention.paper_tables import TABLE_2, TABLE_8
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Quantity, Result, Results, metric
from orthojax.experiments.tables import MetricTable

_ALPHA = metric("max_abs_first", "alpha")
_IN_WIDTHS = Quantity("alpha / D", lambda of: of.max_abs_first / of.d_model)


def _label(result: Result) -> str:
    return result.label.rpartition(", ")[0]


def _gpt2(results: Results) -> dict[str, list[str]]:
    """For `Claim.of`: the finished GPT2, from the narrowest to the widest."""
    found = [result for result in results.finished if result.name.startswith("gpt2")]
    return {"": [result.name for result in sorted(found, key=lambda result: result.d_model)]}


def _grows(says: str, quantity: Quantity) -> Claim:
    return Claim(says, _gpt2, ("d_model", quantity),
                 lambda *of: all(quantity.value(a) < quantity.value(b) for a, b in pairwise(of)),
                 f"larger in every wider GPT2; testable where the widest has a kurtosis above {OUTLIERS:g} on the "
                 "first token", lambda *of: len(of) > 1 and of[-1].kurtosis_first > OUTLIERS)  # fmt: skip


CLAIMS = (
    Claim("The largest activation alpha is generally much larger than the width D (G, H).", (V,), (_IN_WIDTHS,),
          lambda v: v.max_abs_first > v.d_model,
          f"above D in every model; testable where the first token's kurtosis is above {OUTLIERS:g}",
          lambda v: v.kurtosis_first > OUTLIERS),
    _grows("It grows with the width.", _ALPHA),
    _grows("Wider models have larger kurtosis (4.2, G).", metric("kurtosis_first")),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        about(results),
        "The paper's 'maximum activation value' is, number for number, Table 2's column of the first token (1856, "
        "7018, ...): the largest |activation| over channels at position 0, its mean over sequences and then over "
        "layers. That is alpha here. The largest over the whole evaluation set (mean over layers) is shown alongside, "
        "and the same of other tokens. The runs are those of table2.",
    ]


def _picture(results: Results) -> list[Picture]:
    ours = [(result.d_model, result.max_abs_first, _label(result)) for result in results.finished]
    paper = [(float(width), alpha, label) for label, (width, alpha) in TABLE_8.items()]
    figure = drawing.scatter(
        {"here": ours, "paper": paper}, x_label="width D", y_label="largest activation alpha",
        x_scale="log", y_scale="log",
    )  # fmt: skip
    axes, widths = figure.axes[0], [x for x, _, _ in ours + paper]
    ends = [min(widths), max(widths)]
    axes.plot(ends, ends, color="#888888", linestyle=":", linewidth=1.2)
    axes.annotate("alpha = D", (ends[1], ends[1]), xytext=(-4, -12), textcoords="offset points", ha="right", fontsize=8)
    return [Picture("alpha_by_width", "Width and largest activation, both logarithmic.", figure)]


EXPERIMENT = Experiment(
    name="table8",
    title="Table 8: width and the largest activation of vanilla models",
    variants=partial(grid, methods=("vanilla",)),
    scales=SCALES,
    about=_about,
    groups=by_model,
    paper={
        variant_name(model, "vanilla"): {
            "d_model": TABLE_8[label][0],
            "max_abs_first": TABLE_8[label][1],
            "kurtosis_first": TABLE_2[label, "vanilla"]["kurtosis_first"],
        }
        for model, label in MODELS.items()
    },
    tables=(
        MetricTable(
            "Width D and largest activation alpha, softmax + Adam",
            (
                metric("d_model", "D"),
                _ALPHA,
                _IN_WIDTHS,
                metric("max_abs_first_maximum", "largest of the whole set, first"),
                metric("max_abs_rest", "mean of others"),
                metric("max_abs_rest_maximum", "largest of the whole set, others"),
            ),
            label=_label,
        ),
    ),
    claims=CLAIMS,
    pictures=(_picture,),
)
