"""Claims as expressions: verdicts by hand, criteria that say what is computed, cases, seeds, missing runs."""

import dataclasses
import operator
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from orthojax.config import Config
from orthojax.experiments import claims as c
from orthojax.experiments.claims import ByLayer, Claim, Metric, Scope
from orthojax.experiments.study import Study, make_report, results_of
from orthojax.report.page import Cell
from orthojax.report.results import pairs
from orthojax.report.tables import Paired

X = Metric("x")


def made_up(given=(), aliases=None, **variants):
    """Returns results: variant -> seed -> metrics, or one seed's metrics; of None the run failed."""
    study = Study(name="made", title="made up", runs=lambda scale: dict.fromkeys(variants, Config()), aliases=aliases)
    rows = []
    for name, of in variants.items():
        for seed, metrics in enumerate(of if isinstance(of, list) else [of]):
            row = {"variant": name, "seed": seed, "overrides": {}, "metrics": metrics or {}}
            row |= {} if metrics else {"failed": "the loss is not finite"}
            rows.append(row | ({"given": True} if name in given else {}))
    seeds = sorted({row["seed"] for row in rows})
    return results_of(study, {"experiment": "made", "scale": "tiny", "provenance": {"seeds": seeds}, "rows": rows})


def verdict(claim, **variants):
    return c.judge(claim, made_up(**variants)).verdict


def seeds(*values):
    return [{"x": value} if value is not None else None for value in values]


_OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "&": operator.and_, "|": operator.or_,
}  # fmt: skip
_MEANS = {("x", "a"): 3.5, ("x", "b"): 0.75, ("y", "a"): -2.0, ("y", "b"): 8.25}
_ROWS = {of: [{m: _MEANS[m, of] + shift for m in "xy"} for shift in (-0.5, 0.5)] for of in "ab"}
_LEAF = st.sampled_from([(Metric(metric)[of], mean) for (metric, of), mean in _MEANS.items()])
_NUMBER = st.sampled_from([(0.5, 0.5), (3, 3), (-1.25, -1.25)])


@st.composite
def _trees(draw, symbols, leaves, depth=3):
    """Draws an expression with its value by Python's own operators."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(leaves)
    symbol = draw(st.sampled_from(symbols))
    (a, x), (b, y) = (draw(_trees(symbols, leaves, depth - 1)) for _ in range(2))
    if symbol == "/" and abs(y) < 1e-3:
        symbol = "*"
    return (~a, not x) if symbol == "~" else (_OPERATORS[symbol](a, b), _OPERATORS[symbol](x, y))


_MIXED = st.tuples(st.sampled_from("+-*/"), _LEAF, _NUMBER, st.booleans()).map(
    lambda of: tuple(_OPERATORS[of[0]](*((a, b) if of[3] else (b, a))) for a, b in zip(of[1], of[2], strict=True))
)
_COMPARED = st.tuples(st.sampled_from(["<", "<=", ">", ">="]), _LEAF, _LEAF | _NUMBER).map(
    lambda of: tuple(_OPERATORS[of[0]](a, b) for a, b in zip(of[1], of[2], strict=True))
)


def in_python(text):
    """Evaluates a criterion: it is Python, once metrics are their means."""
    return eval(re.sub(r"([xy]) of ([ab])", lambda of: f"({_MEANS[of[1], of[2]]})", text))


@settings(max_examples=100)
@given(_trees("+-*/", _LEAF | _MIXED))
def test_arithmetic_that_of_means_and_written_as_computed(drawn):
    expression, expected = drawn
    found = expression.value(Scope(made_up(**_ROWS)))
    assert found == pytest.approx(expected, rel=1e-9)
    assert in_python(expression.text) == pytest.approx(expected, rel=1e-6, abs=1e-6)  # numbers have six digits


@settings(max_examples=100)
@given(_trees("&|~", _COMPARED))
def test_logic_that_of_python_and_written_as_computed(drawn):
    expression, expected = drawn
    assert verdict(Claim("", expression), **_ROWS) == ("holds" if expected else "does not hold")
    assert in_python(Claim("", expression).criterion) == expected


@pytest.mark.parametrize(("expression", "text"), [
    (((X["a"] < 1) & (X["b"] < 1)).in_every_seed(), "(x of a < 1 and x of b < 1) in every seed"),
    (abs(X["a"] - 1) < 2, "|x of a - 1| < 2"),
    (c.largest(X["a"], X["b"], 3) > c.smallest(X["a"], 0), "max(x of a, x of b, 3) > min(x of a, 0)"),
    (c.peak(ByLayer("x")["a"]) > 3, "largest(x by layer of a) > 3"),
    ((X["a"] < X["b"]) + 0 < 1, "(x of a < x of b) + 0 < 1"),
    ((X["a"] < 1) < (X["b"] < 1), "(x of a < 1) < (x of b < 1)"),
])  # fmt: skip
def test_criterion_is_written_as_it_is_computed(expression, text):
    assert Claim("", expression).criterion == text


def test_python_words_for_and_or_are_refused():
    for combine in (lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a):
        with pytest.raises(TypeError, match="&"):
            combine(X["a"] < 1, X["b"] < 1)
    with pytest.raises(TypeError, match="&"):
        0 < X["a"] < 1  # noqa: B015


TWO_SEEDS = {"a": seeds(1.0, 5.0), "b": seeds(4.0, 4.0)}


@pytest.mark.parametrize(("expression", "holds"), [
    (X["a"] < X["b"], True),  # 3 < 4
    ((X["a"] < X["b"]).in_every_seed(), False),  # 5 > 4 in the second seed
    (~(X["a"] < X["b"]).in_every_seed(), True),
    (Metric("square", lambda of: of["x"] ** 2)["a"] >= 13, True),  # (1 + 25) / 2, not 3^2
    (c.function("gap", lambda a, b: b - a, X["a"], X["b"]) <= 1, True),
    (c.rising(X["a"], X["b"], 5), True),
    (c.rising(X["a"], X["b"], 4), False),
    (c.all_of([X["a"] > 2, X["b"] > 3, X["a"] > 3]), False),
    (c.any_of([X["a"] > 3, X["b"] > 4, X["b"] >= 4]), True),
    (c.check(lambda a, b: len(a.seeds) == 2 and a["x"] < b["x"], "a", "b", words="less"), True),
    (c.check(lambda *all_of_them: len(all_of_them) == 2, words="two variants"), True),
    (c.largest_of_all(lambda of: of["x"], lambda of: of.name != "b", "largest x but b's") < 3.5, True),
    (abs(X["a"] - X["b"]) < 1, False),
])  # fmt: skip
def test_means_decide_unless_every_seed_is_asked(expression, holds):
    assert verdict(Claim("", expression), **TWO_SEEDS) == ("holds" if holds else "does not hold")


def test_means_by_layer_are_those_of_seeds():
    layers = [{"x/layer_0": 1.0, "x/layer_1": 4.0}, {"x/layer_0": 3.0, "x/layer_1": 1.0}]
    expression = c.peak(ByLayer("x")["a"])  # of (2, 2.5), where single seeds have 4 and 3
    assert verdict(Claim("", (expression <= 2.5) & (expression > 2.4)), a=layers) == "holds"
    assert verdict(Claim("", (expression >= 3).in_every_seed()), a=layers) == "holds"


@pytest.mark.parametrize(("testable", "expected"), [(True, "does not hold"), (False, "not testable")])
def test_nothing_to_see_is_not_testable(testable, expected):
    claim = Claim("", X["b"] < X["a"], X["a"] > (0 if testable else 9))
    assert verdict(claim, a={"x": 1.0}, b={"x": 2.0}) == expected
    assert "; testable if x of a" in claim.criterion


CASES = {"p_old": {"x": 4.0}, "p_new": {"x": 1.0}, "q_old": {"x": 8.0}, "q_new": {"x": 5.0}, "r_new": {"x": 0.0}}
HALVED = X["*_new"] <= 0.5 * X["*_old"]


@pytest.mark.parametrize(("changes", "verdict", "cases"), [
    ({}, "does not hold", ["p", "q"]),  # r has no old one
    ({"cases": ("p",)}, "holds", ["p"]),
    ({"cases": ("p", "r")}, "holds", ["p"]),
    ({"given": X["*_old"] < 5}, "holds", ["p", "q"]),
    ({"most": True}, "does not hold", ["p", "q"]),  # one of two is no majority
    ({"most": True, "holds": X["*_new"] < 2}, "holds", ["p", "q", "r"]),
    ({"largest": X["*_old"] - X["*_new"]}, "holds", ["p"]),  # both lose 3: the first
    ({"largest": X["*_old"]}, "does not hold", ["q"]),
    ({"largest": X["*_old"], "given": X["*_old"] < 5}, "holds", ["p"]),
    ({"cases": lambda of: of["x"] > 3, "holds": X["*"] > 4}, "does not hold", ["p_old", "q_old", "q_new"]),
])  # fmt: skip
def test_stars_stand_for_cases_that_all_hold(changes, verdict, cases):
    judged = c.judge(Claim("", **{"holds": HALVED} | changes), made_up(**CASES))
    assert judged.verdict == verdict
    assert [case.name for case in judged.cases] == cases


def test_aliases_are_further_names_of_variants():
    results = made_up(aliases=lambda results: {"longest_new": "q_new", "longest_old": "q_old"}, **CASES)
    assert c.judge(Claim("", X["longest_new"] > 4), results).verdict == "holds"
    assert "longest" in [case.name for case in c.judge(Claim("", HALVED), results).cases]


def test_first_criteria_and_late_claims_are_told():
    revised = Claim("", X["a"] < 2, revised=("it was too wide", Claim("", X["a"] < 0.5)))
    judged = c.judge(revised, made_up(a={"x": 1.0}))
    assert (judged.verdict, judged.first) == ("holds", "does not hold")
    assert c.judge(Claim("", X["a"] < 2, added="seen first"), made_up(a={"x": 1.0})).first is None
    assert verdict(c.not_measured("It is fast.", "no clock"), a={"x": 1.0}) == "not measured"


def test_failed_seeds_count_for_no_variant():
    # The second seed of b failed, so that of a is left out: 1 < 2, though the means are 5 and 2.
    assert verdict(Claim("", X["a"] < X["b"]), a=seeds(1.0, 9.0), b=seeds(2.0, None)) == "holds"
    assert verdict(Claim("", (X["a"] < X["b"]).in_every_seed()), a=seeds(1.0, 9.0), b=seeds(2.0, None)) == "holds"
    judged = c.judge(Claim("", X["a"] < X["b"]), made_up(a=seeds(1.0, None), b=seeds(None, 2.0)))
    assert (judged.verdict, judged.cases) == ("not testable", [])
    assert judged.missing


def test_existing_models_need_not_share_seeds():
    rows = {"a": seeds(1.0, 3.0), "b": seeds(2.5)}
    assert c.judge(Claim("", X["a"] < X["b"]), made_up(given=("b",), **rows)).verdict == "holds"  # 2 < 2.5
    in_every_seed = Claim("", (X["a"] < X["b"]).in_every_seed())
    assert c.judge(in_every_seed, made_up(given=("b",), **rows)).verdict == "does not hold"
    results = made_up(given=("a", "b"), a=[None, {"x": 3.0}], b=seeds(2.0))
    assert pairs(results["a"], results["b"], "x") == {0: (3.0, 2.0)}


@pytest.mark.parametrize("absent", ["metric", "metric of a seed", "variant", "run"])
def test_what_is_missing_is_named_and_not_judged(absent):
    rows = {"metric": {"y": 1.0}, "metric of a seed": [{"x": 1.0}, {"y": 1.0}], "run": None}
    judged = c.judge(Claim("", X["b"] < 3), made_up(a={"x": 1.0}, **({"b": rows[absent]} if absent in rows else {})))
    assert judged.verdict == "not testable"
    assert "b" in judged.missing[0]


def test_a_case_that_is_missing_leaves_the_others():
    judged = c.judge(Claim("", HALVED), made_up(**CASES | {"q_new": None}))
    assert (judged.verdict, [case.name for case in judged.cases]) == ("holds", ["p"])
    assert judged.missing[0].startswith("q")


def test_numbers_of_a_case_are_those_that_decide():
    judged = c.judge(Claim("", X["a"] < X["b"], note=lambda scope: f"of {len(scope.study)}"), made_up(**TWO_SEEDS))
    assert judged.cases[0].numbers == ["x: a 3 (1 to 5), b 4", "of 2"]


def test_shared_criteria_are_those_of_their_formulas():
    of = Config().data.sequence_length
    chance = sum(1 / t for t in range(1, of + 1)) / of
    before = {"first_attention_fraction": 4 * chance, "perplexity": 10.0, "perplexity_int8_coarse": 12.0}
    rows = {"a": before, "b": before | {"first_attention_fraction": 1.4 * chance}}
    assert verdict(Claim("", c.dominated("a") & ~c.dominated("b")), **rows) == "holds"
    left = c.excess_left("b", "a")  # 0.4 of 3 times chance
    assert verdict(Claim("", (left < 0.1334) & (left > 0.1333)), **rows) == "holds"
    assert verdict(Claim("", c.excess_left("a", "b") > 1), a=before, b={"first_attention_fraction": 0.0}) == "holds"
    assert verdict(Claim("", abs(c.lost("int8_coarse")["a"] - 0.2) < 1e-9), **rows) == "holds"


@pytest.mark.parametrize(("spread", "shift", "holds"), [(0.002, 0.0, True), (0.002, 0.009, False), (0.02, 0.0, False)])
def test_equal_perplexity_needs_an_interval_within_the_margin(spread, shift, holds):
    logs = shift + spread * np.array([-1.0, 0.3, 0.7])
    vanilla = [{"perplexity": p} for p in (10.0, 20.0, 30.0)]
    cured = [{"perplexity": of["perplexity"] * float(np.exp(x))} for of, x in zip(vanilla, logs, strict=True)]
    half = 2.919986 * np.std(logs, ddof=1) / np.sqrt(3)  # the quantile 0.95 of t with two degrees of freedom
    assert holds == (np.mean(logs) - half > -np.log(1.01) and np.mean(logs) + half < np.log(1.01))
    claim = c.equivalent("", "cured", "vanilla")
    judged = c.judge(claim, made_up(vanilla=vanilla, cured=cured))
    assert judged.verdict == ("holds" if holds else "does not hold")
    assert c.judge(claim, made_up(vanilla=vanilla[:1], cured=cured[:1])).verdict != "holds"


def test_a_lower_metric_needs_its_t_test_after_holms_correction():
    """The t quantiles and Holm's adjusted p-values are those of scipy's distribution and of the definition."""
    rng = np.random.default_rng(0)
    before = {name: rng.uniform(10, 20, 6) for name in "xyz"}
    noise = np.linspace(-1, 1, 6)
    error = np.std(noise, ddof=1) / np.sqrt(6)
    logs = {name: 0.01 * (noise - shift * error) for name, shift in (("x", 6.0), ("y", 2.8), ("z", 0.1))}
    sides = {"before": before, "after": {name: before[name] * np.exp(logs[name]) for name in "xyz"}}
    rows = made_up(**{side: [{n: v[i] for n, v in of.items()} for i in range(6)] for side, of in sides.items()})
    t = {name: np.mean(of) / (np.std(of, ddof=1) / np.sqrt(6)) for name, of in logs.items()}
    p = {name: 2 * stats.t.sf(abs(of), 5) for name, of in t.items()}
    assert 3 * p["x"] < 0.05 < 2 * p["y"] < 0.1 < p["z"]
    family = [Metric(name) for name in "xyz"]

    def holds(name, among, after="after", before="before", rows=rows):
        return c.judge(c.significantly_lower("", after, before, Metric(name), among), rows).verdict == "holds"

    assert [holds(name, ()) for name in "xyz"] == [True, True, False]
    assert [holds(name, family) for name in "xyz"] == [True, False, False]
    assert [holds(name, family[:2]) for name in "xy"] == [True, True]  # the largest of a family counts once
    assert not holds("x", family, after="before", before="after")
    one = made_up(before=[{"x": 10.0}], after=[{"x": 1.0}])
    assert not holds("x", (), rows=one)


MASS, KURTOSIS = Metric("first_attention_mass"), Metric("kurtosis_rest")


@pytest.mark.parametrize(("given", "lacks"), [
    (MASS["*"] > 2 * Metric("z")["*"], "attention mass on the first token: a 14%, needs more than 14.8%"),
    (KURTOSIS["*"] >= 4, "kurtosis, other tokens: a 3.33, needs at least 4"),
    ((KURTOSIS["*"] > 3).in_every_seed(), "kurtosis, other tokens: a 2.33, needs more than 3 in every seed"),
    ((MASS["*"] > 0) & (KURTOSIS["*"] > 4), "kurtosis, other tokens: a 3.33, needs more than 4"),
    ((MASS["*"] > 1) & (KURTOSIS["*"] > 4), "attention mass on the first token: a 14%, needs more than 100%"),
    ((MASS["*"] < 0) | (KURTOSIS["*"] > 4),
     "attention mass on the first token: a 14%, needs less than 0%, "
     "or kurtosis, other tokens: a 3.33, needs more than 4"),
    (c.largest(KURTOSIS["*"], MASS["*"]) > 4,
     "largest of kurtosis, other tokens and attention mass on the first token: a 333%, needs more than 400%"),
    (~(KURTOSIS["*"] > 3), "needs not kurtosis_rest of a > 3"),
])  # fmt: skip
def test_what_is_not_testable_says_why_in_numbers(given, lacks):
    rows = [{"kurtosis_rest": 3.33 + shift, "first_attention_mass": 0.14, "z": 0.074} for shift in (-1, 1)]
    (case,) = c.judge(Claim("", MASS["*"] < 0.5, given, cases=["a"]), made_up(a=rows)).cases
    assert (case.testable, case.lacks) == (False, lacks)


def paired(vanilla, cured, **fields):
    tables = [Paired("", "vanilla", "cured", changes="kurtosis_rest", differences="first_attention_mass")]
    seeds = [[{"kurtosis_rest": k, "first_attention_mass": m} for k, m in of] for of in (vanilla, cured)]
    found = made_up(vanilla=seeds[0], cured=seeds[1])
    found.study = dataclasses.replace(found.study, tables=tables, **fields)
    ((_, *cells),) = make_report(found).tables[0].rows
    return cells


def test_of_fewer_than_three_seeds_both_values_are_shown():
    cells = paired([(2, 0.3), (1, 0.2)], [(1, 0.1), (30, 0.2)])
    assert cells == [Cell("-50% and +2,900%"), Cell("-20 points and 0 points")]
    assert paired([(2, 0.3)], [(1, 0.1)]) == [Cell("-50%"), Cell("-20 points")]


def test_nothing_is_bold_that_is_not_testable():
    runs = [(8, 0.14), (8.1, 0.15), (8.2, 0.14)], [(3, 0.04), (3.1, 0.06), (3.3, 0.05)]
    assert [cell.bold for cell in paired(*runs)] == [True, True]
    claims = [Claim("", MASS["cured"] < MASS["vanilla"], MASS["vanilla"] > 0.2)]
    assert [cell.bold for cell in paired(*runs, claims=claims)] == [True, False]
