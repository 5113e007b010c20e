"""Table 9: Pearson correlation, over layers, of kurtosis and norm ratio; claim of appendix I.3."""

import math

from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Experiment, each
from orthojax.experiments.from_attention.channels import correlation
from orthojax.experiments.from_attention.models import SCALES, about, grid, paper_of_grid
from orthojax.experiments.from_attention.paper_tables import TABLE_9, TABLE_9_PUBLIC
from orthojax.experiments.results import Numbers, Quantity, Results
from orthojax.experiments.tables import MetricTable, PrintedTable

_STRONG = 0.5


def _correlation(part: str, of: Numbers) -> float:
    """Of kurtosis and norm ratio over the layers of one seed, or as printed; nan where either does not vary."""
    if f"correlation_{part}" in of:
        return of[f"correlation_{part}"]
    kurtosis, ratio = (of.by_layer(f"{name}_{part}") for name in ("kurtosis", "norm_ratio"))
    if len(kurtosis) < 2:
        return math.nan
    return correlation(kurtosis, ratio)


_CORRELATIONS = tuple(
    Quantity(label, lambda of, part=part: _correlation(part, of), "{:.3f}".format)
    for part, label in (("first", "first token"), ("rest", "other tokens"))
)


def _printed(correlations: tuple[float, float]) -> dict[str, float]:
    first, rest = correlations
    return {"correlation_first": first, "correlation_rest": rest}


CLAIMS = (
    Claim("Kurtosis and norm ratio go together in every model (I.3). Correlation:", each(), _CORRELATIONS,
          lambda model: all(model.mean(correlation) > _STRONG for correlation in _CORRELATIONS),
          f"both above {_STRONG:g}, which is called strong, mean over seeds; the paper has 0.560 to 0.998"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    layers = int(min(result.num_layers for result in results))
    few = f" A correlation over {layers} layers is one of {layers} points." if layers < 12 else ""
    if layers == 4:
        few += " That of four unrelated normal pairs is anything from -1 to 1 with equal probability."
    return [
        about(results),
        f"Both are means over the evaluation set at each layer; the coefficient is over layers, of each seed.{few} "
        "Where a model has no outliers, kurtosis hardly differs between layers, and what is left to correlate is "
        "small. The runs are those of table2; --model=NAME=CHECKPOINT adds rows.",
    ]


EXPERIMENT = Experiment(
    name="table9",
    title="Table 9: correlation of kurtosis and norm ratio over layers",
    variants=grid,
    scales=SCALES,
    about=_about,
    paper=paper_of_grid({key: _printed(value) for key, value in TABLE_9.items()}),
    tables=(
        MetricTable(
            "Correlation of kurtosis and norm ratio (max / l2 norm) over layers", ("num_layers", *_CORRELATIONS)
        ),
        PrintedTable(
            "What the paper prints for public models",
            _CORRELATIONS,
            {name: _printed(value) for name, value in TABLE_9_PUBLIC.items()},
        ),
    ),
    claims=CLAIMS,
    takes_models=True,
)
