"""Paired comparisons against scipy's paired t-test and a case worked by hand."""

import math

import numpy as np
import pytest
from orthojax.experiments.study.comparisons import change_text, difference, difference_text, ratio
from scipy import stats


def test_three_pairs_worked_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, t of 2 degrees of freedom 4.302653 (any table of Student's t).
    found = difference({0: (2.0, 1.0), 3: (4.0, 2.0), 7: (6.0, 3.0)})
    assert found.by_seed == {0: 1.0, 3: 2.0, 7: 3.0}
    assert found.mean == 2.0
    half = 4.302653 / math.sqrt(3)
    assert found.interval == pytest.approx((2 - half, 2 + half), abs=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
def test_intervals_are_those_of_the_paired_t_test(seeds):
    rng = np.random.default_rng(seeds)
    a, b = np.exp(rng.normal(size=(2, seeds)))
    pairs = dict(enumerate(zip(a.tolist(), b.tolist(), strict=True)))
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert difference(pairs).interval == pytest.approx((expected.low, expected.high), rel=1e-10)
    logs = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    found = ratio(pairs)
    assert found.interval == pytest.approx((math.exp(logs.low), math.exp(logs.high)), rel=1e-10)
    assert found.mean == pytest.approx(stats.gmean(a / b), rel=1e-12)
    assert list(found.by_seed.values()) == pytest.approx(a / b, rel=1e-12)


def test_a_ratio_turns_around_with_its_pair():
    pairs = {0: (2.0, 3.0), 1: (5.0, 4.0), 2: (1.0, 1.5)}
    there, back = ratio(pairs), ratio({seed: (b, a) for seed, (a, b) in pairs.items()})
    assert there.mean * back.mean == pytest.approx(1.0)
    assert there.interval[0] * back.interval[1] == pytest.approx(1.0)


def test_what_all_seeds_share_leaves_no_width():
    assert difference({0: (3.0, 1.0), 1: (5.0, 3.0)}).interval == (2.0, 2.0)


def test_one_seed_has_no_interval():
    assert difference({4: (3.0, 1.0)}).interval is None
    assert difference_text({4: (3.0, 1.0)}) == "+2"
    assert change_text({4: (99.0, 100.0)}) == "-1.0%"


def test_texts():
    assert difference_text({0: (2.0, 1.0), 1: (4.0, 2.0), 2: (6.0, 3.0)}) == "+2 (95% CI -0.484 to +4.48, 3 seeds)"
    # Logarithms of 0.98, 0.99, 0.994: mean -0.01209, standard deviation 0.00726, half width 0.01804.
    text = change_text({0: (98.0, 100.0), 1: (99.0, 100.0), 2: (99.4, 100.0)})
    assert text == "-1.2% (95% CI -3.0 to +0.6, 3 seeds)"


def test_without_pairs_a_run_failed():
    assert difference_text({}) == change_text({}) == "failed"
    with pytest.raises(ValueError, match="no seed"):
        difference({})


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_ratio_wants_values_above_zero(pair):
    with pytest.raises(ValueError, match="above 0"):
        ratio({0: (1.0, 1.0), 1: pair})
