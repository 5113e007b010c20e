"""The numbers on top of a page: what a few quantities are before and after."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orthojax.experiments.chance import all_chance_lines
from orthojax.experiments.claims import Claim, cases_of
from orthojax.experiments.layout import decimals_for
from orthojax.experiments.results import NotMeasured, Quantity, Result, Results, as_quantity, on_shared_seeds
from orthojax.formatting import number

_MOST = 3


class Headline(NamedTuple):
    """A number on top of the page: one text of a variant, or one before and one after.

    Attributes:
      label: Of the quantity.
      texts: The numbers.
      of: The variants.
      beside: What they compare with: the paper's numbers, or what chance gives.
    """

    label: str
    texts: Sequence[str]
    of: str
    beside: str


def line(headline: Headline) -> str:
    """As the console shows it."""
    beside = f"; {headline.beside}" if headline.beside else ""
    return f"{headline.label}: {' → '.join(headline.texts)} ({headline.of}{beside})"


def headlines(results: Results) -> list[Headline]:
    """Those that the experiment declares, otherwise the first that its claims compare; none without numbers."""
    experiment = results.experiment
    if experiment.headlines:
        asked = [(q, names) for q, names in experiment.headlines if all(n in results for n in names)]
    else:
        asked = [found for claim in experiment.claims for found in _of_claim(claim, results)]
    found: list[Headline] = []
    for quantity, names in asked:
        with contextlib.suppress(NotMeasured):
            headline = _headline(quantity, on_shared_seeds([results[name] for name in names])[0])
            if experiment.headlines or headline.label not in {other.label for other in found}:
                found.append(headline)
    return found[:_MOST]


def _of_claim(claim: Claim, results: Results) -> Iterator[tuple[str | Quantity, Sequence[str]]]:
    """The first quantity of a claim, in its first testable case, of the first and the last variant of it."""
    cases = {label: names for label, names in cases_of(claim, results).items() if all(n in results for n in names)}
    first = None
    for names in filter(None, cases.values()):
        with contextlib.suppress(NotMeasured):
            testable = claim.testable is None or claim.testable(*(results[name] for name in names))
            if testable or first is None:
                shown = list(names[: claim.shown])
                first = [shown[0], *shown[1:][-1:]]
            if testable:
                break
    if first and claim.show:
        yield claim.show[0], first


def _headline(shown: str | Quantity, of: Sequence[Result]) -> Headline:
    """Of one variant, or of two, of which what their labels have in common is said once."""
    quantity = as_quantity(shown)
    values = [result.mean(quantity) for result in of]
    decimals = decimals_for([abs(value) for value in values]) if quantity.show is number else None
    texts = [quantity.show(value) if decimals is None else f"{value:,.{decimals}f}" for value in values]
    paper = [result.paper_cell(quantity) for result in of]
    parts = [result.label.split(", ") for result in of]
    alike = [len(set(column)) == 1 for column in zip(*parts, strict=False)]
    same = [*alike, False].index(False) if len(of) > 1 else 0
    names = " → ".join(filter(None, (", ".join(part[same:]) for part in parts)))
    what = ": ".join(filter(None, [", ".join(parts[0][:same]), names]))
    chance = all_chance_lines(shown, of) if isinstance(shown, str) else {}
    beside = [] if "-" in paper else [f"paper {' → '.join(paper)}"]
    beside += [f"{words}: {value:.3f}" for words, value in chance.items()]
    return Headline(quantity.label, texts, what, "; ".join(beside))
