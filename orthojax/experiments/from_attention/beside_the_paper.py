"""What the reports of the trained tables share: the paper's numbers beside ours, and claims over several models."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orthojax.experiments.from_attention.models import METHOD_LABELS, MODELS, variant_name
from orthojax.experiments.from_attention.output_weights import MEASURE, WORDS
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.model_pictures import model_pictures
from orthojax.experiments.reporting.page import Claim, Picture, Table, verdict
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range, number

GRID = {variant_name(model, method): (model, method) for model in MODELS for method in METHOD_LABELS}


class Column(NamedTuple):
    """A column of a table that has the paper's numbers beside ours.

    Attributes:
      heading: Of the column.
      metric: Ours, or of the paper's row.
      from_paper: Whether it is the paper's.
      show: A number as text.
    """

    heading: str
    metric: str
    from_paper: bool = False
    show: Callable[[float], str] = number


def beside(
    study: Study, caption: str, rows: Sequence[tuple[Variant, Mapping[str, float]]], columns: Sequence[Column]
) -> Table:
    """A row for every variant: means with the range over seeds, and the paper's numbers.

    Args:
      study: Where ours are.
      caption: Of the table.
      rows: Variant, and what the paper prints for it: metric -> number; "-" stands where it prints nothing.
      columns: In their order.
    """

    def cell(variant: Variant, paper: Mapping[str, float], column: Column) -> str:
        if not column.from_paper:
            return mean_and_range(study.values(variant.name, column.metric), column.show)
        return column.show(paper[column.metric]) if column.metric in paper else "-"

    body = [[variant.label, *(cell(variant, paper, column) for column in columns)] for variant, paper in rows]
    return Table(caption, ["", *(column.heading for column in columns)], body)


class Case(NamedTuple):
    """A claim for one model, or for one pair of rows.

    Attributes:
      numbers: Ours and the paper's.
      holds: What the criterion says.
      visible: Whether there is something to see.
    """

    numbers: str
    holds: bool
    visible: bool = True


def judge(
    study: Study, sentence: str, criterion: str, groups: Mapping[str, Sequence[str]], case: Callable[..., Case]
) -> Claim:
    """A claim that must hold in every group of variants where it can be seen.

    Args:
      study: Where the numbers are.
      sentence: What is claimed.
      criterion: Decided beforehand.
      groups: Label -> the variants that one case needs; a group of which one failed in all seeds is left out and named.
      case: (label, *variants) -> `Case`.
    """
    finished = {
        label: names for label, names in groups.items() if all(study.values(name, "perplexity") for name in names)
    }
    cases = {label: case(label, *names) for label, names in finished.items()}
    visible = [case for case in cases.values() if case.visible]
    told = [f"{label} {case.numbers}{_mark(case, len(cases))}".strip() for label, case in cases.items()]
    left_out = [label for label in groups if label not in finished]
    failed = (
        f"Not measured, since a run failed or is missing{': ' if any(left_out) else ''}{', '.join(left_out)}. "
        if left_out
        else ""
    )
    holding = sum(case.holds for case in visible)
    counted = f"So in {holding} of {len(visible)} where it can be seen. " if visible and len(cases) > 1 else ""
    return Claim(
        verdict(all(case.holds for case in visible), visible=bool(visible)),
        f"{sentence} {told[0]}." if len(told) == 1 else sentence,
        told if len(told) > 1 else (),
        f"{counted}{failed}Criterion: {criterion}.",
    )


def _mark(case: Case, count: int) -> str:
    if count == 1:
        return ""
    return " (nothing to see)" if not case.visible else "" if case.holds else " (NOT so)"


def models_of(study: Study, *methods: str) -> dict[str, list[str]]:
    """Groups for `judge`: the label of every model of `GRID` in the study -> its variants with these methods."""
    present = {GRID[variant.name][0] for variant in study.variants if variant.name in GRID}
    return {MODELS[model]: [variant_name(model, m) for m in methods] for model in MODELS if model in present}


def arrow(values: Sequence[float], paper: Sequence[float | None] = (), show: Callable[[float], str] = number) -> str:
    """What becomes of a number, and in the paper.

    >>> arrow([0.2, 0.1], [0.5, 0.02])
    '0.2 → 0.1 (paper 0.5 → 0.02)'
    """

    def told(numbers: Sequence[float | None]) -> str:
        return " → ".join("-" if value is None else show(value) for value in numbers)

    return told(values) + (f" (paper {told(paper)})" if paper else "")


def means(study: Study, metric: str, *names: str) -> list[float]:
    """The mean over seeds of each variant."""
    return [study.mean(name, metric) for name in names]


def length_of(study: Study) -> int:
    """Tokens of a sequence of the first variant."""
    return study.variants[0].config.data.sequence_length


def appendix_b(study: Study, variants: Sequence[Variant]) -> list[Picture]:
    """Attention maps, hidden states and norms of output weights of every trained model, of its first seed.

    The paper has them in its supplementary material (appendix B): there the norm of each output channel of the last
    linear layer of every attention and MLP block.

    Args:
      study: An experiment that has `output_weights.MEASURE` among its measures.
      variants: Which of its variants; labels name the panels.
    """
    shown = summaries.finished(study, variants)
    kept = {v.label: study.arrays(v.name, summaries.finished_seeds(study, v)[0], MEASURE.name) for v in shown}
    pictures = model_pictures(study, shown)
    for part, words in WORDS.items() if kept else ():
        norms = {label: arrays[f"{part}_norms"] for label, arrays in kept.items()}
        panels = {label: values / np.median(values, axis=1, keepdims=True) for label, values in norms.items()}
        caption = f"Euclidean norm of the weights of each output channel of the {words}, over the median of the layer."
        figure = drawing.maps(panels, x_label="channel", y_label="layer, from 0", value_label="norm / median")
        pictures.append(Picture(f"{part}_norms", caption, figure, "png"))
    return pictures


def about(study: Study) -> str:
    """What was trained on what, for the summary of a table of the paper."""
    train = study.variants[0].config.train
    stand_ins = " Models stand in for the paper's by order of width; they are far smaller and trained far shorter."
    return (
        f"Scale {study.scale}: {train.batch_size} sequences of {length_of(study)} tokens a step."
        f"{'' if study.scale == 'paper' else stand_ins} Every number is a mean over seeds, with the range; the "
        f"paper's, of one run each on C4, stands beside it."
    )
