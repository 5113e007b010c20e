"""Table 5: the fourteen rows of the ablation; claims of sections 3.1, 4.1 and 5.3."""

import dataclasses
import functools

from orthojax.experiments.from_attention import table5_claims
from orthojax.experiments.from_attention.ablation import BY_NAME, rows
from orthojax.experiments.from_attention.beside_the_paper import Column, about, appendix_b, beside, length_of
from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.from_attention.output_weights import MEASURE
from orthojax.experiments.from_attention.paper_tables import TABLE_5
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import GAUSSIAN, chance_of_first
from orthojax.experiments.reporting.page import Picture, Report, Table
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant

_COLUMNS = (
    Column("PPL", "perplexity"),
    Column("paper", "perplexity", True),
    Column("kurtosis, first", "kurtosis_first"),
    Column("kurtosis, rest", "kurtosis_rest"),
    Column("kurtosis, pooled", "kurtosis_pooled"),
    Column("kurtosis, paper", "kurtosis", True),
    Column("%first (argmax)", "first_attention_fraction"),
    Column("paper", "first_attention_fraction", True),
    Column("mass on first", "first_attention_mass"),
    Column("max |x|, first", "max_abs_first"),
    Column("max |x|, rest", "max_abs_rest"),
    Column("max |x|, paper", "max_abs", True),
)


def _table(study: Study) -> Table:
    """With learning rate and steps where they are not those of the first row."""
    usual = study.variants[0].config
    table = beside(
        study,
        "Ablation: optimizer, normalisation, positions, biases, attention",
        [(variant, TABLE_5[BY_NAME[variant.name]]) for variant in study.variants],
        _COLUMNS,
    )
    body = []
    for i, (variant, row) in enumerate(zip(study.variants, table.rows, strict=True), 1):
        rate, steps = variant.config.optim.learning_rate, variant.config.train.steps
        differs = [f"rate {rate:g}"] if rate != usual.optim.learning_rate else []
        differs += [f"{steps / usual.train.steps:g} x the steps"] if steps != usual.train.steps else []
        body.append([f"{i}. {row[0]}", ", ".join(differs) or "-", *row[1:]])
    return Table(table.caption, ["", "differs in", *table.columns[1:]], body)


def _numbered(study: Study) -> list[Variant]:
    """The rows that finished, each under its number: the label as a whole would not fit on a panel."""
    numbers = {v.name: i for i, v in enumerate(study.variants, 1)}
    shown = summaries.finished(study, study.variants)
    return [dataclasses.replace(v, label=f"{numbers[v.name]}. {v.label.split(',')[0]}") for v in shown]


def _picture(study: Study) -> list[Picture]:
    groups: dict[str, list[tuple[float, float, str]]] = {"Adam, RMSProp": [], "SGD": [], "OrthoAdam": []}
    for v in _numbered(study):
        name = v.config.optim.optimizer
        group = "SGD" if name == "sgd" else "OrthoAdam" if name == "orthoadam" else "Adam, RMSProp"
        point = (study.mean(v.name, "perplexity"), study.mean(v.name, "kurtosis_pooled"), v.label.split(".")[0])
        groups[group].append(point)
    if not any(groups.values()):
        return []
    figure = drawing.scatter(
        groups, x_label="perplexity", y_label="kurtosis, all tokens", y_scale="log", reference=(GAUSSIAN, "Gaussian")
    )
    return [Picture("perplexity_and_kurtosis", "Perplexity and kurtosis; numbers are rows of the table.", figure)]


def report(study: Study) -> Report:
    """The table beside the paper's, claims, perplexity against kurtosis, pictures of the models."""
    usual, length = study.variants[0].config, length_of(study)
    return summaries.study_report(
        study,
        "Table 5: what makes outliers, and what removes them",
        [
            about(study),
            f"{usual.train.steps} steps at a peak learning rate of {usual.optim.learning_rate:g} where a row "
            f"does not say otherwise; the paper has 40,000 and 0.001, for SGD 320,000 and 0.2. It does not say over "
            f"which tokens its kurtosis and largest activation are taken: ours are of the first token, of the others, "
            f"and of all (pooled). With equal logits the first key has {chance_of_first(length):.3f} of all attention, "
            f"and by chance it is the most attended one of as many (query, head) pairs; in the paper, at 256 tokens, "
            f"{chance_of_first(256):.3f}.",
        ],
        claims=table5_claims.claims(study),
        tables=[_table(study)],
        pictures=[*_picture(study), *appendix_b(study, _numbered(study))],
    )


EXPERIMENT = Experiment(
    name="table5",
    title="what makes outliers, and what removes them: biases, positions, norms, optimizers, softmax-1",
    scales={scale: functools.partial(rows, scale) for scale in SCALES},
    report=report,
    measures=(MEASURE,),
)
