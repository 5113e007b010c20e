"""Table 2: five models x {softmax, softmax-1} x {Adam, OrthoAdam}."""

import dataclasses
import functools

from orthojax.experiments.from_attention import table2_claims
from orthojax.experiments.from_attention.beside_the_paper import GRID, Column, about, beside, equal_logits, length_of
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid, variant_name
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.reporting import drawing, summaries
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
    """Vanilla and cured: ten curves are what a picture bears."""
    pairs = [
        [v for v in study.variants if v.name == variant_name(model, method)]
        for model in MODELS
        for method in ("vanilla", "cured")
    ]  # the two of a model are neighbours
    if study.failures() or not all(pairs):
        return []
    drawn = [dataclasses.replace(v, label=f"{MODELS[GRID[v.name][0]]}, {GRID[v.name][1]}") for (v,) in pairs]
    curves = summaries.training_curves(study, drawn, "validation_loss_nats")
    figure = drawing.lines(curves, x_label="step", y_label="held-out loss (nats per token)", pairs=True)
    return [Picture("training_curves", "Held-out loss during training, vanilla and cured.", figure)]


def report(study: Study) -> Report:
    """The table beside the paper's, paired changes, claims, training curves."""
    length = length_of(study)
    rows = [(v, TABLE_2.get((MODELS[GRID[v.name][0]], GRID[v.name][1]), {})) for v in study.variants]
    return Report(
        title="Table 2: softmax-1 and OrthoAdam, alone and together",
        summary=[
            *about(study),
            f"If all logits were equal, the first key would have {equal_logits(length):.3f} of all attention with "
            f"softmax ({equal_logits(length, softmax1=True):.3f} with softmax-1) at {length} tokens, and would be the "
            f"most attended in {equal_logits(length):.3f} of (query, head) pairs if no key were preferred; in the "
            f"paper, at 256 tokens, {equal_logits(256):.3f}: its 2% is what chance gives. First-token dominance is "
            f"what exceeds that.",
        ],
        claims=table2_claims.claims(study),
        tables=[beside(study, "Perplexity, outliers, first-token attention", rows, _COLUMNS), _paired(study)],
        pictures=_training_curves(study),
        notes=summaries.notes(study),
        links=summaries.links(study),
    )


EXPERIMENT = Experiment(
    name="table2",
    title="softmax-1 and OrthoAdam, alone and together: perplexity, outliers, first-token attention",
    scales={scale: functools.partial(grid, scale) for scale in SCALES},
    report=report,
)
