"""Claims as values, the one judge that decides them, and the terms in which their criteria are stated.

Criteria are fixed before the seeds that decide them are run. One that was set or revised afterwards has a `Revision`,
and the report then says so, with the verdict under the first criterion.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from orthojax.analysis import chance_of_first
from orthojax.experiments.results import (
    NotMeasured,
    Numbers,
    Quantity,
    Result,
    Results,
    as_quantity,
    on_shared_seeds,
    pairs,
)

Verdict = Literal["holds", "does not hold", "not testable at this scale", "not measured"]

GAUSSIAN = 3.0  # its kurtosis
# A mean kurtosis over layers above the first is called outliers, below the second none.
OUTLIERS, NO_OUTLIERS = 4.0, 3.5
DOMINANCE = 2.0  # the first token dominates from this multiple of `chance_of_first` on
DOMINANCE_TESTABLE = f"testable where vanilla has {DOMINANCE:g} times what equal logits give"
EQUAL_PERPLEXITY = 0.01  # a perplexity at most this fraction above another is called equal
# Roles of the two methods and short names of metrics, as claims write them.
V, S, O, C = "vanilla", "softmax1", "orthoadam", "cured"
PPL, FRACTION, MASS = "perplexity", "first_attention_fraction", "first_attention_mass"
KURTOSIS = ("kurtosis_first", "kurtosis_rest")
MAX_ABS = ("max_abs_first", "max_abs_rest")

Names = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Revision:
    """That a criterion was changed, or set, after numbers which it judges were there.

    Attributes:
      why: What was changed and why, in words.
      first: The fields of the `Claim` that were different, `criterion` among them, so that the verdict under the first
        criterion is computed; empty for a claim that was first stated after the data.
    """

    why: str
    first: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence of a paper, or of ours, with the criterion that decides it.

    Attributes:
      says: The claim.
      of: Which variants the predicates take, in this order: roles of `Experiment.groups`, which makes one case for each
        group; or label -> variant names, one case for each label; or a function of the results that gives that.
      show: What is printed of each of these variants, with the paper's number where there is one.
      holds: Of their `Result`s, the criterion.
      criterion: The same in words.
      testable: Of their `Result`s, whether there is anything to see; without it there always is.
      where: Of the label of a group, whether the claim is about it.
      largest: For claims of the form 'by up to': only the testable case with the largest value is judged.
      most: Holds where more than half of the testable cases do, instead of all.
      detail: Further numbers of a case as text.
      shown: How many of a case's variants are printed, all where None; the others only enter the predicates, as a
        reference that decides what is testable.
      revised: Where the criterion is younger than the data.
      unmeasured: Why nothing here measures it; see `not_measured`.
    """

    says: str
    of: Names | Mapping[str, Names] | Callable[[Results], Mapping[str, Names]]
    show: Sequence[str | Quantity]
    holds: Callable[..., bool]
    criterion: str
    testable: Callable[..., bool] | None = None
    _: dataclasses.KW_ONLY
    where: Callable[[str], bool] = lambda label: True
    largest: Callable[..., float] | None = None
    most: bool = False
    detail: Callable[..., str] | None = None
    shown: int | None = None
    revised: Revision | None = None
    unmeasured: str = ""


def not_measured(says: str, because: str) -> Claim:
    """A claim that is listed so that it is not forgotten; `because` completes 'Not measured: ...'."""
    return Claim(says, {}, (), lambda: False, "", unmeasured=because)


class Judged(NamedTuple):
    """A claim with its verdict.

    Attributes:
      verdict: What the criterion says.
      says: The claim.
      cases: One line of numbers for each case.
      closing: The count, what was left out, the criterion, and what it was before the data.
    """

    verdict: Verdict
    says: str
    cases: Sequence[str]
    closing: str

    @property
    def paragraph(self) -> str:
        """The whole as one paragraph."""
        return " ".join([self.says, *([f"{'; '.join(self.cases)}."] if self.cases else []), self.closing])


class _Case(NamedTuple):
    testable: bool
    holds: bool
    text: str
    size: float  # `Claim.largest`


def judge(claim: Claim, results: Results) -> Judged:
    """Decides a claim on the means over seeds.

    A case of which a variant failed, or lacks a metric that the criterion reads, is left out and named; without any
    testable case the claim is not testable. Where some seeds failed, variants that are trained here are compared on
    those that all of them have.
    """
    if claim.unmeasured:
        return Judged("not measured", claim.says, (), f"Not measured: {claim.unmeasured}.")
    cases: dict[str, _Case] = {}
    missing, fewer = [], []
    for label, names in cases_of(claim, results).items():
        if not all(name in results for name in names):
            missing.append(label or ", ".join(name for name in names if name not in results))
            continue
        of, shared = on_shared_seeds([results[name] for name in names])
        if shared == []:
            missing.append(label or "no seed that every variant finished")
            continue
        if shared:
            fewer.append(f"{label} {shared}".strip())
        try:
            testable = claim.testable is None or bool(claim.testable(*of))
            size = claim.largest(*of) if claim.largest else 0.0
            cases[label] = _Case(testable, bool(claim.holds(*of)), _case_text(claim, label, of), size)
        except NotMeasured as error:
            missing.append(label or str(error))
    if claim.largest and cases:
        best = max(cases, key=lambda label: (cases[label].testable, cases[label].size))
        cases = {best: cases[best]}
    tested = [case.holds for case in cases.values() if case.testable]
    held = sum(tested)
    verdict: Verdict = "holds" if (2 * held > len(tested) if claim.most else all(tested)) else "does not hold"
    quantity = as_quantity(claim.show[0]) if len(claim.show) == 1 and list(cases) != [""] else None
    says = f"{claim.says} {quantity.label[0].upper()}{quantity.label[1:]}:" if quantity else claim.says
    lines = []
    for label, case in cases.items():
        mark = " (not testable)" if not case.testable else "" if case.holds else " (does not hold)"
        if label or case.text:
            colon = ": " if label and case.text else ""
            lines.append(f"{label}{colon}{case.text}{mark if len(cases) > 1 else ''}")
    closing = [f"Holds in {held} of {len(tested)} testable cases."] if tested and len(cases) > 1 else []
    for words, labels in (
        ("Not measured, since a run failed or a metric is missing", missing),
        ("Compared on the seeds that every variant finished", fewer),
    ):
        if labels:
            closing.append(f"{words}: {', '.join(labels) if len(labels) <= 6 else f'{len(labels)} cases'}.")
    closing.append(f"Criterion: {_criterion(claim)}.")
    if claim.revised:
        closing.append(_revision_text(claim, claim.revised, results))
    return Judged(verdict if tested else "not testable at this scale", says, lines, " ".join(closing))


def _criterion(claim: Claim) -> str:
    return f"{claim.criterion}{', in most of the testable cases' if claim.most else ''}"


def _revision_text(claim: Claim, revision: Revision, results: Results) -> str:
    if not revision.first:
        return f"Criterion set after the data: {revision.why}."
    first = dataclasses.replace(claim, revised=None, **revision.first)
    verdict = judge(first, results).verdict
    return f"Criterion revised after the data: {revision.why}. First: {_criterion(first)}; under it: {verdict}."


def cases_of(claim: Claim, results: Results) -> Mapping[str, Names]:
    """Label -> names of the variants that a claim compares, of each case that it is about."""
    if callable(claim.of):
        found = claim.of(results)
    elif isinstance(claim.of, Mapping):
        found = claim.of
    else:
        roles, groups = claim.of, results.groups().items()
        found = {label: [of[role] for role in roles] for label, of in groups if all(role in of for role in roles)}
    return {label: names for label, names in found.items() if claim.where(label)}


def tally(claims: Sequence[Judged]) -> dict[Verdict, int]:
    """How many claims have each verdict, of those that are there."""
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    return {verdict: n for verdict in verdicts if (n := sum(claim.verdict == verdict for claim in claims))}


def tally_text(claims: Sequence[Judged]) -> str:
    """The same in words.

    >>> tally_text([Judged("holds", "", (), ""), Judged("does not hold", "", (), ""), Judged("holds", "", (), "")])
    '2 of 3 claims hold, 1 does not.'
    """
    counts = tally(claims)
    held = counts.get("holds", 0)
    parts = [f"{held} of {len(claims)} claim{'s' * (len(claims) > 1)} hold{'s' * (held == 1)}"]
    words = {"does not hold": ("does not", "do not"), "not testable at this scale": ("is not testable at this scale",
             "are not testable at this scale"), "not measured": ("is not measured", "are not measured")}  # fmt: skip
    parts += [f"{counts[verdict]} {of[counts[verdict] > 1]}" for verdict, of in words.items() if verdict in counts]
    return f"{', '.join(parts)}."


def _case_text(claim: Claim, label: str, of: Sequence[Result]) -> str:
    """The numbers of a case: 'a → b (paper c → d)' in a group, which says what it compares, else by variant."""
    parts, compared = [], of[: claim.shown]
    for quantity in map(as_quantity, claim.show):
        ours, paper = [r.mean_cell(quantity) for r in compared], [r.paper_cell(quantity) for r in compared]
        if label:
            printed = f" (paper {' → '.join(paper)})" if any(cell != "-" for cell in paper) else ""
            name = "" if len(claim.show) == 1 else f"{quantity.label} "
            parts.append(f"{name}{' → '.join(ours)}{printed}")
        else:
            printed = [f" (paper {cell})" if cell != "-" else "" for cell in paper]
            cells = [f"{r.label} {a}{b}" for r, a, b in zip(compared, ours, printed, strict=True)]
            parts.append(f"{quantity.label}: {', '.join(cells)}")
    if claim.detail:
        parts.append(claim.detail(*of))
    return (", " if label else "; ").join(filter(None, parts))


# Terms of criteria. Each takes `Result`s, or the numbers of one seed or of the paper.


def gaussian_kurtosis_limit(d_model: float) -> float:
    """Kurtosis that D independent Gaussian values hardly exceed: 3 + 3 sqrt(24 / D), three standard deviations.

    The variance of the sample kurtosis of n Gaussian values is 24 / n for large n. At position 0, where every sequence
    may have the same token, a layer has one such vector, so its kurtosis is not 3 even where nothing sticks out.

    >>> gaussian_kurtosis_limit(96)
    4.5
    """
    return GAUSSIAN + 3 * math.sqrt(24 / d_model)


def worst_kurtosis(of: Numbers) -> float:
    """The larger kurtosis of the two, first token and others; of a `Result` of their means."""
    return max(of.kurtosis_first, of.kurtosis_rest)


WORST_KURTOSIS = Quantity("kurtosis, larger of first token and others", worst_kurtosis)  # of a `Result` its mean


def chance(of: Numbers) -> float:
    """`chance_of_first` at the length of a model's sequences."""
    return chance_of_first(of.sequence_length)


def excess_left(before: float, after: float, floor: float, floor_after: float | None = None) -> float:
    """The fraction of what exceeds a floor that is left; inf where nothing does.

    >>> excess_left(5.0, 4.0, 3.0)
    0.5
    """
    if before <= floor:
        return math.inf
    return (after - (floor if floor_after is None else floor_after)) / (before - floor)


def excess_of_first_left(before: Numbers, after: Numbers) -> float:
    """`excess_left` of the queries that attend most to the first token, over what chance gives."""
    return excess_left(before.first_attention_fraction, after.first_attention_fraction, chance(before))


def value_drain(of: Numbers) -> float:
    """Norm of the first token's values over that of the others', mean over layers and heads."""
    return of.value_norm_first / of.value_norm_rest


def kurtosis_left(key: str, before: Numbers, after: Numbers) -> float:
    """`excess_left` of a kurtosis over a Gaussian's."""
    return excess_left(before[key], after[key], GAUSSIAN)


def reduction(key: str, before: Numbers, after: Numbers) -> float:
    """The fraction by which a metric falls."""
    return 1 - after[key] / before[key]


def above_by_seed(result: Result, reference: Result) -> list[float]:
    """By which fraction perplexity is above that of a reference, of every seed that both have."""
    return [a / b - 1 for a, b in pairs(result, reference, PPL).values()]


# Predicates on the first variant, as `Claim.testable`, or on two.


def dominated(result: Numbers, *_: Numbers) -> bool:
    """Whether the first token is most attended `DOMINANCE` times as often as by chance, or more."""
    return result.first_attention_fraction >= DOMINANCE * chance(result)


def has_outliers(result: Numbers, *_: Numbers) -> bool:
    """Whether the kurtosis of the first token or of others is above `OUTLIERS`."""
    return worst_kurtosis(result) > OUTLIERS


def rest_has_outliers(result: Numbers, *_: Numbers) -> bool:
    """Whether the kurtosis of tokens after the first is above `OUTLIERS`."""
    return result.kurtosis_rest > OUTLIERS


def in_every_seed(predicate: Callable[[Numbers], bool]) -> Callable[..., bool]:
    """For `Claim.testable`: whether every seed of the first variant satisfies a predicate, not the mean alone."""
    return lambda result, *_: bool(result.seeds) and all(map(predicate, result.seeds.values()))


def every(result: Result, quantity: str | Quantity, predicate: Callable[[float], bool]) -> bool:
    """Whether a quantity of every seed satisfies a predicate.

    Raises:
      NotMeasured: Where not every seed has it.
    """
    result.mean(quantity)
    return all(map(predicate, result.values(quantity)))


def within(result: Result, quantity: str | Quantity, low: float, high: float) -> bool:
    """Whether a quantity of every seed lies between the two; `every` says what it raises."""
    return every(result, quantity, lambda value: low < value < high)


def all_within(result: Result, *bounds: tuple[str | Quantity, float, float]) -> bool:
    """Whether each of several quantities is `within` its two numbers; all have to be measured."""
    return all([within(result, *bound) for bound in bounds])


def shrinks_by_a_third(before: Numbers, after: Numbers) -> bool:
    """Whether the largest activations of the first token and of others do."""
    return all(after[key] < 0.67 * before[key] for key in MAX_ABS)
