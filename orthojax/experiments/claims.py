"""Claims as expressions over metrics: `REST["*_adam"] < 3.5` computes its verdict and prints its own criterion.

A metric is computed for each seed and averaged; arithmetic and comparisons are on these means, unless
`.in_every_seed()` asks for each seed. `*` in the names of variants stands for one case of a claim; the claim has to
hold in all cases. Criteria are fixed before the seeds that decide them are run. A criterion that was set or revised
afterwards says so, with the verdict under the first criterion.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from orthojax.analysis import chance_of_first
from orthojax.formatting import mean_and_range, number, percent, share
from orthojax.report.results import Missing, Numbers, Quantity, Result, Results, case_in, pairs, shared_seeds

Verdict = Literal["holds", "does not hold", "not testable", "not measured"]


class Scope(NamedTuple):
    """The variants that a claim reads in one case, by the names that it uses, on shared seeds; and all variants."""

    results: dict[str, Result]
    study: Sequence[Result] = ()

    def seeds(self) -> list["Scope"]:
        """Returns a scope for each seed; existing models, which have one seed, stay as they are."""
        trained = [result for result in self.results.values() if not result.given]
        seeds = sorted({seed for result in trained for seed in result.seeds})
        one = lambda result, seed: result if result.given else result.only([seed])  # noqa: E731
        return [self._replace(results={k: one(v, seed) for k, v in self.results.items()}) for seed in seeds] or [self]


def _operator(
    symbol: str, operation: Callable[[Any, Any], Any], binding: int, *, swapped: bool = False
) -> Callable[["Expr", Any], "Expr"]:
    return lambda self, other: _binary(symbol, operation, binding, *((other, self) if swapped else (self, other)))


@dataclasses.dataclass(frozen=True, eq=False)
class Expr:
    """A number or a truth value of variants: its text, and the function that computes it.

    `terms` are the metrics of variants that it reads and `names` those variants. `binding` says how tightly its
    outermost operator binds, which decides on parentheses. `show` formats a value, `lacks` says in numbers why a
    truth value is False, and `brief` is a shorter text for use there.
    """

    text: str
    value: Callable[[Scope], Any]
    terms: tuple[tuple[Quantity, str], ...] = ()
    names: frozenset[str] = frozenset()
    binding: int = 9
    show: Callable[[float], str] = number
    lacks: Callable[[Scope], str] | None = None
    brief: str = ""

    def shortfall(self, scope: Scope) -> str:
        """Returns in numbers why it does not hold, such as 'kurtosis, other tokens: vanilla 3.33, needs at least 4'."""
        return self.lacks(scope) if self.lacks else f"needs {self.text}"

    def in_every_seed(self) -> "Expr":
        """Returns whether it holds with the numbers of each seed instead of their means."""
        every = lambda scope: all(self.value(seed) for seed in scope.seeds())  # noqa: E731
        first = lambda scope: next(self.shortfall(seed) for seed in scope.seeds() if not self.value(seed))  # noqa: E731
        lacks = lambda scope: f"{first(scope)} in every seed"  # noqa: E731
        return dataclasses.replace(self, text=f"{_within(self, 2)} in every seed", value=every, binding=2, lacks=lacks)

    __add__ = __radd__ = _operator("+", operator.add, 5)
    __sub__, __rsub__ = _operator("-", operator.sub, 5), _operator("-", operator.sub, 5, swapped=True)
    __mul__ = __rmul__ = _operator("*", operator.mul, 6)
    __truediv__, __rtruediv__ = _operator("/", operator.truediv, 6), _operator("/", operator.truediv, 6, swapped=True)
    __lt__, __le__ = _operator("<", operator.lt, 4), _operator("<=", operator.le, 4)
    __gt__, __ge__ = _operator(">", operator.gt, 4), _operator(">=", operator.ge, 4)

    def __and__(self, other: "Expr") -> "Expr":
        text = f"{_within(self, 1)} and {_within(other, 1)}"
        lacks = lambda scope: (other if self.value(scope) else self).shortfall(scope)  # noqa: E731
        both = _joined(text, lambda scope: self.value(scope) and other.value(scope), (self, other), 1)
        return dataclasses.replace(both, lacks=lacks)

    def __or__(self, other: "Expr") -> "Expr":
        explained = [expr for expr in (self, other) if expr.lacks] or [self]
        lacks = lambda scope: ", or ".join(of.shortfall(scope) for of in explained)  # noqa: E731
        either = _joined(f"{self.text} or {other.text}", lambda s: self.value(s) or other.value(s), (self, other), 0)
        return dataclasses.replace(either, lacks=lacks)

    def __invert__(self) -> "Expr":
        text = f"not {_within(self, 3)}"
        return dataclasses.replace(self, text=text, value=lambda s: not self.value(s), binding=2, lacks=None)

    def __abs__(self) -> "Expr":
        return dataclasses.replace(self, text=f"|{self.text}|", value=lambda s: abs(self.value(s)), binding=9)

    def __bool__(self) -> bool:
        raise TypeError("combine expressions with & and |, not with 'and', 'or' or a < b < c")


def _within(expr: Expr, binding: int) -> str:
    return expr.text if expr.binding >= binding else f"({expr.text})"


def _as_expr(given: Any) -> Expr:
    return given if isinstance(given, Expr) else Expr(f"{given:g}", lambda scope: given)


def _joined(text: str, value: Callable[[Scope], Any], exprs: Sequence[Expr], binding: int = 9) -> Expr:
    terms = tuple(dict.fromkeys(term for expr in exprs for term in expr.terms))
    show = next((expr.show for expr in exprs if expr.show is not number), number)
    return Expr(text, value, terms, frozenset().union(*(expr.names for expr in exprs)), binding, show)


_NEEDS = {"<": "less than", "<=": "at most", ">": "more than", ">=": "at least"}


def _binary(symbol: str, operation: Callable[[Any, Any], Any], binding: int, a: Any, b: Any) -> Expr:
    a, b = _as_expr(a), _as_expr(b)
    compares = binding == 4  # a comparison of comparisons needs parentheses on both sides
    text = f"{_within(a, binding + compares)} {symbol} {_within(b, binding + (compares or symbol in '-/'))}"
    joined = _joined(text, lambda scope: operation(a.value(scope), b.value(scope)), (a, b), binding)
    show = joined.show
    if not compares:
        return dataclasses.replace(joined, show=number if symbol == "/" else show)
    lacks = lambda s: f"{a.brief or a.text} {show(a.value(s))}, needs {_NEEDS[symbol]} {show(b.value(s))}"  # noqa: E731
    return dataclasses.replace(joined, lacks=lacks)


class Metric(Quantity):
    """A number for every seed of a variant; indexed by a variant's name, an expression: the mean over its seeds."""

    def __getitem__(self, variant: str) -> Expr:
        value = lambda scope: scope.results[variant][self]  # noqa: E731
        show = share if self.is_share else self.show or number
        names, brief = frozenset([variant]), f"{self.label}: {variant}"
        return Expr(f"{self.name} of {variant}", value, ((self, variant),), names, show=show, brief=brief)


def shares(*names: str) -> list[Metric]:
    """Returns metrics of a study that are fractions of a whole, to be written in percent; the catalogue lacks them."""
    return [Metric(name, show=share) for name in names]


def function(words: str, compute: Callable[..., Any], *exprs: Any) -> Expr:
    """Returns a function of several expressions, written as `words(a, b)`."""
    parts = [_as_expr(expr) for expr in exprs]
    text = f"{words}({', '.join(part.text for part in parts)})"
    return _joined(text, lambda scope: compute(*(part.value(scope) for part in parts)), parts)


def largest(*exprs: Any) -> Expr:
    """Returns the largest of several expressions."""
    return _extreme("largest", max, exprs)


def smallest(*exprs: Any) -> Expr:
    """Returns the smallest of several expressions."""
    return _extreme("smallest", min, exprs)


def _extreme(word: str, pick: Callable[..., float], exprs: Sequence[Any]) -> Expr:
    extreme = function(pick.__name__, lambda *values: pick(values), *exprs)
    metrics = " and ".join(dict.fromkeys(metric.label for metric, _ in extreme.terms))
    variants = ", ".join(dict.fromkeys(variant for _, variant in extreme.terms))
    return dataclasses.replace(extreme, brief=f"{word} of {metrics}: {variants}" if extreme.terms else "")


def largest_of_all(value_of: Callable[[Result], float], which: Callable[[Result], bool], words: str) -> Expr:
    """Returns the largest value of the variants of the study that `which` selects, 0 without any; text is `words`."""

    def value(scope: Scope) -> float:
        values = []
        for result in filter(which, scope.study):
            with contextlib.suppress(Missing):
                values.append(value_of(result))
        return max(values, default=0.0)

    return Expr(words, value)


def all_of(conditions: Iterable[Expr]) -> Expr:
    """Returns whether every condition holds."""
    return functools.reduce(operator.and_, conditions)


def any_of(conditions: Iterable[Expr]) -> Expr:
    """Returns whether at least one condition holds."""
    return functools.reduce(operator.or_, conditions)


def rising(*exprs: Any) -> Expr:
    """Returns whether each expression is larger than the previous one."""
    return function("rising", lambda *values: all(a < b for a, b in itertools.pairwise(values)), *exprs)


def check(holds: Callable[..., Any], *variants: str, words: str = "", shows: Sequence[Quantity] = ()) -> Expr:
    """Returns a function of whole `Result`s, if no expression will do; its docstring, or `words`, is the criterion.

    It takes the results of `variants`, by default of all that finished, on the seeds that they share. The numbers of
    the metrics in `shows` are printed with it.
    """
    text = words or (holds.__doc__ or "").strip().splitlines()[0].rstrip(".")
    terms = tuple((metric, name) for metric in shows for name in variants)

    def value(scope: Scope) -> Any:
        if variants:
            return holds(*(scope.results[name] for name in variants))
        return holds(*shared_seeds([result for result in scope.study if result.seeds]))

    return Expr(text, value, terms, frozenset(variants), 1)


class ByLayer:
    """A metric of every layer; indexed by a variant's name, an expression: the means over seeds, [layers]."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, variant: str) -> Expr:
        text = f"{self.name} by layer of {variant}"
        return Expr(text, lambda scope: scope.results[variant].layers(self.name).mean(0), (), frozenset([variant]))


def peak(layers: Expr) -> Expr:
    """Returns the largest value over layers."""
    return function("largest", np.max, layers)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of a paper, or of ours, with the expression that decides it."""

    says: str
    holds: Expr | None = None  # decides it, in every case
    given: Expr | None = None  # decides whether it is testable; None if it always is
    _: dataclasses.KW_ONLY
    # What `*` stands for; every match if None; for a function the variants that it selects, and `*` is a whole name.
    cases: Sequence[str] | Callable[[Result], bool] | None = None
    largest: Expr | None = None  # only the testable case with the largest value is judged: claims of 'by up to'
    most: bool = False  # holds if more than half of the testable cases do, instead of all
    # Why the criterion was changed after numbers that it judges were known, and the first criterion; an empty tuple
    # stands for a criterion from before the data.
    revised: "tuple[()] | tuple[str, Claim]" = ()
    added: str = ""  # why it was first stated after the data
    note: Callable[[Scope], str] | None = None  # further numbers of a case, from the variants in `holds`
    unmeasured: str = ""  # why nothing here measures it

    @property
    def criterion(self) -> str:
        """When the claim holds and when it is testable, in words."""
        if self.holds is None:
            return ""
        where = f"; testable if {self.given.text}" if self.given is not None else ""
        most = ", in most of the testable cases" if self.most else ""
        largest = f", in the testable case of the largest {self.largest.text}" if self.largest is not None else ""
        return f"{self.holds.text}{most}{largest}{where}"


def not_measured(says: str, because: str) -> Claim:
    """Returns a claim that is listed so that it is not forgotten."""
    return Claim(says, unmeasured=because)


class Case(NamedTuple):
    """A case of a claim: what `*` stands for, whether it holds, its numbers, and what it lacks unless it is testable.

    `reads` has the (label, variant) of these numbers, and `brief` is the mean of the first metric of each variant.
    """

    name: str
    testable: bool
    holds: bool
    size: float
    numbers: Sequence[str]
    lacks: str
    reads: frozenset[tuple[str, str]]
    brief: str = ""


class Judged(NamedTuple):
    """A claim with its verdict, and the numbers of each case; `missing` cases lack a run or a metric."""

    verdict: Verdict
    claim: Claim
    cases: Sequence[Case] = ()
    missing: Sequence[str] = ()
    first: "Verdict | None" = None  # under the first criterion


def judge(claim: Claim, results: Results) -> Judged:
    """Decides a claim on the means over the seeds that all variants of a case finished."""
    if claim.holds is None:
        return Judged("not measured", claim)
    names = claim.holds.names.union(*(expr.names for expr in (claim.given, claim.largest) if expr is not None))
    cases, missing, all_variants = [], [], list(results.values())
    for case in _cases(claim, names, results):
        try:
            ordered = sorted(names)
            shared = shared_seeds([results[name.replace("*", case)] for name in ordered])
            cases.append(_judge_case(claim, case, Scope(dict(zip(ordered, shared, strict=True)), all_variants)))
        except (Missing, ArithmeticError) as error:
            missing.append(f"{case}: {error}" if case else str(error))
    if claim.largest is not None and cases:
        cases = [max(cases, key=lambda case: (case.testable, case.size))]
    tested = [case.holds for case in cases if case.testable]
    holds = 2 * sum(tested) > len(tested) if claim.most else all(tested)
    verdict: Verdict = "not testable" if not tested else "holds" if holds else "does not hold"
    first = judge(claim.revised[1], results).verdict if claim.revised else None
    return Judged(verdict, claim, cases, missing, first)


def _cases(claim: Claim, names: Iterable[str], results: Results) -> list[str]:
    starred = sorted(name for name in names if "*" in name)
    if not starred:
        return [""]
    if callable(claim.cases):
        return [name for name in results if claim.cases(results[name])]
    if claim.cases is not None:
        return [case for case in claim.cases if all(name.replace("*", case) in results for name in names)]
    cases = [case for name in (*results, *results.aliases) if (case := case_in(starred[0], name))]
    return [case for case in cases if all(name.replace("*", case) in results for name in names)]


def _judge_case(claim: Claim, case: str, scope: Scope) -> Case:
    assert claim.holds is not None
    testable = claim.given is None or bool(claim.given.value(scope))
    size = claim.largest.value(scope) if claim.largest is not None else 0.0
    holds = bool(claim.holds.value(scope))
    parts: dict[Quantity, list[str]] = {}
    brief = ""
    order = {result.name: i for i, result in enumerate(scope.study)}
    terms = [(metric, scope.results[name]) for metric, name in claim.holds.terms]
    for metric, result in sorted(terms, key=lambda term: order[term[1].name]):
        paper = f" ({paper})" if (paper := result.printed(metric)) else ""
        values = mean_and_range(result.values(metric), metric.text)
        parts.setdefault(metric, []).append(f"{result.name} {values}{paper}")
    texts = [f"{metric.label}: {', '.join(values)}" for metric, values in parts.items()]
    for metric in list(parts)[:1]:
        exprs = [expr for expr in (claim.holds, claim.given) if expr is not None]
        read = {name for expr in exprs for term, name in expr.terms if term == metric}
        briefly = sorted((scope.results[name] for name in read), key=lambda result: order[result.name])
        brief = ", ".join(f"{result.name} {metric.text(result[metric])}" for result in briefly)
    if claim.note:
        texts.append(claim.note(scope))
    lacks = "" if testable or claim.given is None else claim.given.shortfall(scope).replace("*", case)
    reads = frozenset((metric.label, result.name) for metric, result in terms)
    return Case(case, testable, holds, size, texts, lacks, reads, brief)


# The metrics and criteria that many claims share.

GAUSSIAN = 3.0  # its kurtosis
OUTLIERS = 4.0  # a mean kurtosis over layers above this is called outliers
NO_OUTLIERS = 3.5  # and below this none
PPL, FRACTION, MASS = Metric("perplexity"), Metric("first_attention_fraction"), Metric("first_attention_mass")
FIRST, REST = Metric("kurtosis_first"), Metric("kurtosis_rest")
MAX_FIRST, MAX_REST = Metric("max_abs_first"), Metric("max_abs_rest")
CHANCE = Metric("chance", lambda of: chance_of_first(int(of["data.sequence_length"])), share)
COARSE, MODERATE, _ = INT8 = ("int8_coarse", "int8_moderate", "int8_fine")
INT4 = "int4_zeropoint"


@functools.cache
def lost(setting: str) -> Metric:
    """Returns the fraction by which a quantisation setting raises perplexity."""
    of = lambda numbers: numbers[f"perplexity_{setting}"] / numbers["perplexity"] - 1  # noqa: E731
    return Metric(f"perplexity lost at {setting}", of, percent)


def worst(variant: str) -> Expr:
    """Returns the larger mean kurtosis of a variant, at the first token or at the others."""
    return largest(FIRST[variant], REST[variant])


def dominated(variant: str, times: float = 1.5) -> Expr:
    """Returns whether the first token is most attended `times` as often as by chance."""
    return FRACTION[variant] >= times * CHANCE[variant]


def fraction_left(before: Any, after: Any, floor: Any, floor_after: Any = None) -> Expr:
    """Returns what is left of an excess over a floor; infinite if nothing exceeds it before."""

    def left(before: float, after: float, floor: float, floor_after: float) -> float:
        return math.inf if before <= floor else (after - floor_after) / (before - floor)

    return function("excess left", left, before, after, floor, floor if floor_after is None else floor_after)


def excess_left(after: str, before: str) -> Expr:
    """Returns what is left of the queries that attend most to the first token in excess of chance."""
    left = fraction_left(FRACTION[before], FRACTION[after], CHANCE[before])
    return dataclasses.replace(left, text=f"excess of {before} left in {after}")


def either_loses(setting: str, *variants: str) -> Expr:
    """Returns whether a quantisation setting costs one of several variants 0.5% of its perplexity."""
    return largest(*(lost(setting)[variant] for variant in variants)) >= 0.005


def kurtosis_limit(numbers: Numbers) -> float:
    """Returns 3 + 3 sqrt(24 / D), which the kurtosis of D independent Gaussian values rarely exceeds."""
    return GAUSSIAN + 3 * math.sqrt(24 / numbers["model.d_model"])


# Claims that many studies make about the cure; names of variants may have a `*`.

OUTCOME = (
    "perplexity kurtosis_first kurtosis_rest max_abs_first max_abs_rest first_attention_fraction first_attention_mass"
)
DRAIN = Metric("value norm, first token over others", lambda of: of["value_norm_first"] / of["value_norm_rest"])
PEAK = Metric("residual norm, first token over others", lambda of: of["residual_norm_first"] / of["residual_norm_rest"])
WORST = Metric("larger kurtosis of first token and others", lambda of: max(FIRST(of), REST(of)))


def outliers(variant: str) -> Expr:
    """Returns whether a variant has outliers, at the first token or at others."""
    return worst(variant) > OUTLIERS


def cured_outliers(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that a variant has no outliers, testable if another one has."""
    return Claim(says, worst(after) < NO_OUTLIERS, outliers(before), **more)


def halved(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that at most half of the first token's dominance is left."""
    return Claim(says, excess_left(after, before) <= 0.5, dominated(before), **more)


def no_perplexity_lost(says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that perplexity is at most 1% higher."""
    return Claim(says, PPL[after] / PPL[before] - 1 <= 0.01, **more)


def _log_ratios(after: Result, before: Result, metric: Quantity) -> dict[int, float]:
    return {seed: math.log(a / b) for seed, (a, b) in pairs(after, before, metric).items()}


def equivalent(
    says: str,
    after: str,
    before: str,
    margin: float = 0.01,
    beside: tuple[str, str] | None = None,
    metric: Quantity = PPL,
    **more: Any,
) -> Claim:
    """Returns the claim that a metric is the same within a margin, by two one-sided t-tests paired by seed.

    Definition: the 90% confidence interval of the mean of ln(after / before), minus that of the pair `beside` if it is
    given, lies within +-ln(1 + margin), so that each of the tests has a level of 5%. Too few or too scattered seeds do
    not show equivalence.
    """

    def within(after: Result, before: Result, *others: Result) -> bool:
        from scipy import stats  # here, because it takes a second to import

        change = _log_ratios(after, before, metric)
        other = _log_ratios(others[0], others[1], metric) if others else {}
        logs = [value - other.get(seed, 0.0) for seed, value in change.items() if not others or seed in other]
        if len(logs) < 2:
            return False
        low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.90) if np.ptp(logs) else (logs[0], logs[0])
        return bool(-math.log1p(margin) < low and high < math.log1p(margin))

    of = f"{metric.name} from {before} to {after}" + (f" over that from {beside[1]} to {beside[0]}" if beside else "")
    words = f"90% interval of the change of {of}, paired by seed, within {100 * margin:g}%"
    return Claim(says, check(within, after, before, *(beside or ()), words=words, shows=(metric,)), **more)


def significantly_lower(
    says: str, after: str, before: str, metric: Quantity = PPL, family: Sequence[Quantity] = (), **more: Any
) -> Claim:
    """Returns the claim that the mean of ln(after / before) is below 0, by a two-sided t-test paired by seed at 5%.

    The p-value is adjusted by Holm's method for the metrics of `family`, of which `metric` is one.
    """
    family = tuple(family) or (metric,)

    def holds(after: Result, before: Result) -> bool:
        from scipy import stats  # here, because it takes a second to import

        logs = {of: list(_log_ratios(after, before, of).values()) for of in family}
        if len(logs[metric]) < 2:
            return False
        tests: dict[Quantity, Any] = {of: stats.ttest_1samp(values, 0.0) for of, values in logs.items()}
        p_values = {of: float(test.pvalue) for of, test in tests.items()}
        # Holm: the k-th smallest of m counts m + 1 - k times, and none is below a smaller one's.
        ordered = sorted(p_values.values())
        adjusted = max((len(ordered) - k) * p for k, p in enumerate(ordered) if p <= p_values[metric])
        return bool(np.mean(logs[metric]) < 0 and adjusted < 0.05)

    words = f"t-test of ln({metric.name} of {after} / {metric.name} of {before}), paired by seed: below 0, p < 0.05"
    words += f", Holm's correction for {len(family)} metrics" if len(family) > 1 else ""
    return Claim(says, check(holds, after, before, words=words, shows=(metric,)), **more)


def loses_less(setting: str, says: str, after: str, before: str, **more: Any) -> Claim:
    """Returns the claim that a variant loses less to quantisation, testable if it costs either 0.5%."""
    return Claim(says, lost(setting)[after] < lost(setting)[before], either_loses(setting, before, after), **more)
