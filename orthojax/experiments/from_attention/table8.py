"""Table 8: width against the largest activation of the vanilla models; claims of 4.2 and appendices G and H."""

import functools
import itertools
from collections.abc import Callable

from orthojax.experiments.from_attention.beside_the_paper import GRID, Case, about, judge, means, models_of
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid
from orthojax.experiments.from_attention.paper_tables import TABLE_2, TABLE_8
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import OUTLIERS
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range, number

_ALPHA = "max_abs_first"
_METRICS = {
    "max_abs_first_maximum": "largest of the whole set, first",
    "max_abs_rest": "mean of others",
    "max_abs_rest_maximum": "largest of the whole set, others",
}


def _label(variant: Variant) -> str:
    return MODELS[GRID[variant.name][0]]


def _width(variant: Variant) -> int:
    return variant.config.model.d_model


def _table(study: Study) -> Table:
    body = []
    for variant in study.variants:
        alpha, (paper_width, paper_alpha) = study.values(variant.name, _ALPHA), TABLE_8[_label(variant)]
        body.append(
            [
                _label(variant),
                str(_width(variant)),
                mean_and_range(alpha),
                mean_and_range([value / _width(variant) for value in alpha]),
                str(paper_width),
                number(paper_alpha),
                number(paper_alpha / paper_width),
                *(mean_and_range(study.values(variant.name, key)) for key in _METRICS),
            ]
        )
    columns = ["", "D", "alpha", "alpha / D", "D, paper", "alpha, paper", "alpha / D, paper", *_METRICS.values()]
    return Table("Width D and largest activation alpha, softmax + Adam", columns, body)


def _claims(study: Study) -> list[Claim]:
    widths = {variant.name: _width(variant) for variant in study.variants}
    gpt2 = sorted((v for v in study.variants if _label(v).startswith("GPT2")), key=_width)

    def larger(label: str, name: str) -> Case:
        alpha, (paper_width, paper_alpha) = study.mean(name, _ALPHA), TABLE_8[label]
        text = f"{alpha / widths[name]:.2f} D (paper {paper_alpha / paper_width:.1f} D)"
        return Case(text, alpha > widths[name], study.mean(name, "kurtosis_first") > OUTLIERS)

    def growing(metric: str, paper: list[float]) -> Callable[..., Case]:
        def case(label: str, *names: str) -> Case:
            values = means(study, metric, *names)
            told = ", ".join(f"{number(value)} at {widths[name]}" for value, name in zip(values, names, strict=True))
            rising = all(a < b for a, b in itertools.pairwise(values))
            text = f"{told} (paper {', '.join(map(number, paper))})"
            return Case(text, rising, len(names) > 1 and study.mean(names[-1], "kurtosis_first") > OUTLIERS)

        return case

    sizes = {"": [variant.name for variant in gpt2]}
    rising = (
        f"larger in every wider GPT2; visible where the widest has a kurtosis above {OUTLIERS:g} on the first token"
    )
    return [
        judge(
            study,
            "The largest activation alpha is generally much larger than the width D (G, H). Alpha:",
            f"above D in every model; visible where the first token's kurtosis is above {OUTLIERS:g}",
            models_of(study, "vanilla"),
            larger,
        ),
        judge(
            study,
            "It grows with the width. Alpha:",
            rising,
            sizes,
            growing(_ALPHA, [TABLE_8[_label(v)][1] for v in gpt2]),
        ),
        judge(
            study,
            "Wider models have larger kurtosis (4.2, G). Kurtosis of the first token:",
            rising,
            sizes,
            growing("kurtosis_first", [TABLE_2[_label(v), "vanilla"]["kurtosis_first"] for v in gpt2]),
        ),
    ]


def _picture(study: Study) -> list[Picture]:
    ours = [
        (float(_width(v)), study.mean(v.name, _ALPHA), _label(v))
        for v in study.variants
        if study.values(v.name, _ALPHA)
    ]
    if not ours:
        return []
    paper = [(float(width), alpha, label) for label, (width, alpha) in TABLE_8.items()]
    figure = drawing.scatter(
        {"here": ours, "paper": paper}, x_label="width D", y_label="largest activation alpha", y_scale="log"
    )
    axes = figure.axes[0]
    ends = [min(x for x, _, _ in ours + paper), max(x for x, _, _ in ours + paper)]
    axes.plot(ends, ends, color="#888888", linestyle=":", linewidth=1.2)
    axes.annotate("alpha = D", (ends[1], ends[1]), xytext=(-4, -12), textcoords="offset points", ha="right", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    return [Picture("alpha_by_width", "Width and largest activation, both logarithmic.", figure)]


def report(study: Study) -> Report:
    """The table beside the paper's, claims, the figure."""
    return summaries.study_report(
        study,
        "Table 8: width and the largest activation",
        [
            about(study),
            "The paper's 'maximum activation value' is, number for number, Table 2's column of the first token (1856, "
            "7018, ...): the largest |activation| over channels at position 0, its mean over sequences and then over "
            "layers. That is alpha here. The largest over the whole evaluation set (mean over layers) stands beside "
            "it, and the same of other tokens. The runs are those of table2.",
        ],
        claims=_claims(study),
        tables=[_table(study)],
        pictures=_picture(study),
    )


EXPERIMENT = Experiment(
    name="table8",
    title="width and the largest activation of vanilla models",
    scales={scale: functools.partial(grid, scale, methods=("vanilla",)) for scale in SCALES},
    report=report,
)
