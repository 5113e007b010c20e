"""Table 2: five models x {softmax, softmax-1} x {Adam, OrthoAdam}."""

import dataclasses
import functools

from orthojax.experiments.from_attention import table2_claims
from orthojax.experiments.from_attention.beside_the_paper import (
    GRID,
    Column,
    about,
    appendix_b,
    beside,
    length_of,
    models_of,
)
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid, variant_name
from orthojax.experiments.from_attention.output_weights import MEASURE
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import chance_of_first
from orthojax.experiments.reporting.page import Picture, Report, Table
from orthojax.experiments.study.comparisons import change_text, difference_text
from orthojax.experiments.study.study import Experiment, Study

_SHOWN = {
    "perplexity": "PPL",
    "kurtosis_first": "kurtosis, first",
    "kurtosis_rest": "kurtosis, rest",
    "max_abs_first": "max |x|, first",
    "max_abs_rest": "max |x|, rest",
    "first_attention_fraction": "%first (argmax)",
}
_COLUMNS = (
    *(column for key, label in _SHOWN.items() for column in (Column(label, key), Column("paper", key, True))),
    Column("mass on first", "first_attention_mass"),
)


def _paired(study: Study) -> Table:
    """Every method against softmax + Adam of the same model and seeds."""
    rows = []
    for variant in study.variants:
        model, method = GRID[variant.name]
        if method == "vanilla":
            continue
        pairs = functools.partial(study.pairs, variant.name, variant_name(model, "vanilla"))
        changes = [change_text(pairs(key)) for key in _SHOWN if key != "first_attention_fraction"]
        shares = [difference_text(pairs(f"first_attention_{key}"), "{:+.3f}".format) for key in ("fraction", "mass")]
        rows.append([variant.label, *changes, *shares])
    headings = [*list(_SHOWN.values())[:-1], "%first, difference", "mass, difference"]
    return Table("Change from softmax + Adam of the same model, paired by seed", ["", *headings], rows)


def _training_curves(study: Study) -> list[Picture]:
    """Vanilla and cured, of the models of which both finished: ten curves are what a picture bears."""
    finished = {v.name: v for v in summaries.finished(study, study.variants)}
    drawn = [
        dataclasses.replace(finished[name], label=f"{label}, {GRID[name][1]}")
        for label, names in models_of(study, "vanilla", "cured").items()
        for name in names
        if set(names) <= set(finished)
    ]  # the two of a model are neighbours
    if not drawn:
        return []
    curves = summaries.training_curves(study, drawn, "validation_loss_nats")
    figure = drawing.lines(curves, x_label="step", y_label="held-out loss (nats per token)", pairs=True)
    return [Picture("training_curves", "Held-out loss during training, vanilla and cured.", figure)]


def report(study: Study) -> Report:
    """The table beside the paper's, paired changes, claims, training curves, pictures of the models."""
    length = length_of(study)
    chance = chance_of_first(length)
    rows = [(v, TABLE_2.get((MODELS[GRID[v.name][0]], GRID[v.name][1]), {})) for v in study.variants]
    return summaries.study_report(
        study,
        "Table 2: softmax-1 and OrthoAdam, alone and together",
        [
            about(study),
            f"With equal logits the first key has {chance:.3f} of all attention at {length} tokens "
            f"({chance_of_first(length, softmax1=True):.3f} with softmax-1), and by chance it is the most attended one "
            f"of {chance:.3f} of (query, head) pairs. In the paper, at 256 tokens, that is {chance_of_first(256):.3f}: "
            f"its 2% is what chance gives. First-token dominance is what exceeds it.",
        ],
        claims=table2_claims.claims(study),
        tables=[beside(study, "Perplexity, outliers, first-token attention", rows, _COLUMNS), _paired(study)],
        pictures=[*_training_curves(study), *appendix_b(study, study.variants)],
    )


EXPERIMENT = Experiment(
    name="table2",
    title="softmax-1 and OrthoAdam, alone and together: perplexity, outliers, first-token attention",
    scales={scale: functools.partial(grid, scale) for scale in SCALES},
    report=report,
    measures=(MEASURE,),
)
