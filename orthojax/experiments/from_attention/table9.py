"""Table 9: Pearson correlation, over layers, of kurtosis and norm ratio; claim of appendix I.3."""

import functools

import numpy as np
from numpy.typing import ArrayLike

from orthojax.experiments.from_attention.beside_the_paper import GRID, Case, about, judge
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid
from orthojax.experiments.from_attention.paper_tables import TABLE_9, TABLE_9_PUBLIC
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.page import Claim, Report, Table
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range

_PARTS = {"first": "first token", "rest": "other tokens"}
_STRONG = 0.5
_show = "{:.3f}".format


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation coefficient: sum (x - mean x)(y - mean y) / sqrt(sum (x - mean x)^2 sum (y - mean y)^2).

    Args:
      x: [n].
      y: [n].

    Returns:
      -1 to 1; nan where either does not vary.

    >>> round(pearson([1, 2, 3], [2, 4, 6]), 9)
    1.0
    """
    a, b = (values - values.mean() for values in (np.asarray(x, np.float64), np.asarray(y, np.float64)))
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.clip(a @ b / norms, -1.0, 1.0)) if norms > 0 else float("nan")


def correlations(study: Study, variant: str, part: str) -> list[float]:
    """Of kurtosis and norm ratio over the layers of a variant, for each seed.

    Args:
      study: Where they are.
      variant: Which model.
      part: "first" | "rest".
    """
    kurtosis, ratio = (study.by_layer(variant, f"{metric}_{part}") for metric in ("kurtosis", "norm_ratio"))
    return [pearson(x, y) for x, y in zip(kurtosis, ratio, strict=True)] if kurtosis.size else []


def _paper(variant: Variant) -> tuple[float, float] | None:
    if variant.name not in GRID:
        return None
    model, method = GRID[variant.name]
    return TABLE_9.get((MODELS[model], method))


def _table(study: Study) -> Table:
    body = []
    for variant in study.variants:
        cells = [variant.label, str(variant.config.model.num_layers)]
        for i, part in enumerate(_PARTS):
            paper = _paper(variant)
            cells += [mean_and_range(correlations(study, variant.name, part), _show), _show(paper[i]) if paper else "-"]
        body.append(cells)
    columns = ["", "layers", *(text for words in _PARTS.values() for text in (words, "paper"))]
    return Table("Correlation of kurtosis and norm ratio (max / l2 norm) over layers", columns, body)


def _public() -> Table:
    rows = [[name, _show(first), _show(rest)] for name, (first, rest) in TABLE_9_PUBLIC.items()]
    return Table("What the paper prints for public models", ["", *_PARTS.values()], rows)


def _claims(study: Study) -> list[Claim]:
    def strong(label: str, name: str) -> Case:
        means = [float(np.mean(correlations(study, name, part))) for part in _PARTS]
        return Case(" / ".join(map(_show, means)), min(means) > _STRONG)

    return [
        judge(
            study,
            "Kurtosis and norm ratio go together in every model (I.3). Correlation, first token / others:",
            f"both above {_STRONG:g}, which is called strong, mean over seeds; the paper has 0.560 to 0.998",
            {variant.label: [variant.name] for variant in study.variants},
            strong,
        )
    ]


def report(study: Study) -> Report:
    """The table beside the paper's, the claim."""
    layers = sorted({variant.config.model.num_layers for variant in study.variants})
    few = (
        f" A correlation over {layers[0]} layers is one of {layers[0]} points"
        + (
            ": of four unrelated normal pairs it is anything from -1 to 1 with equal probability."
            if layers[0] == 4
            else "."
        )
        if layers[0] < 12
        else ""
    )
    return summaries.study_report(
        study,
        "Table 9: kurtosis and norm ratio by layer",
        [
            about(study),
            f"Both are means over the evaluation set at each layer; the coefficient is over layers, of each seed.{few} "
            f"Where a model has no outliers, kurtosis hardly differs between layers, and what is left to correlate is "
            f"small. The runs are those of table2; --model=NAME=CHECKPOINT adds rows.",
        ],
        claims=_claims(study),
        tables=[_table(study), _public()],
    )


EXPERIMENT = Experiment(
    name="table9",
    title="correlation of kurtosis and norm ratio over layers",
    scales={scale: functools.partial(grid, scale) for scale in SCALES},
    report=report,
    takes_models=True,
)
