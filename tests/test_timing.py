"""Timing with a clock that the timed functions move themselves, so that every expected second is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.timing import interleaved_seconds, median_ratio, spread


class FakeMachine:
    """Its functions take the given seconds, one after the other; a slow phase takes a factor longer for all."""

    def __init__(self):
        self.now, self.calls, self.slowness = 100.0, [], 1.0

    def clock(self):
        return self.now

    def function(self, name, seconds):
        left = list(seconds)

        def call():
            self.calls.append(name)
            self.now += self.slowness * left.pop(0)

        return call


def test_each_function_gets_its_own_seconds_and_the_order_alternates():
    machine = FakeMachine()
    functions = {"a": machine.function("a", [1, 2, 3]), "b": machine.function("b", [10, 20, 30])}
    seconds = interleaved_seconds(functions, 3, warmup=0, clock=machine.clock)
    assert seconds == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert machine.calls == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_warm_up_is_called_and_not_counted(warmup):
    machine = FakeMachine()
    functions = {
        "a": machine.function("a", [500] * warmup + [1, 2]),
        "b": machine.function("b", [700] * warmup + [3, 4]),
    }
    assert interleaved_seconds(functions, 2, warmup, clock=machine.clock) == {"a": [1, 2], "b": [3, 4]}
    assert machine.calls[-4:] == ["a", "b", "b", "a"]
    assert len(machine.calls) == 2 * (warmup + 2)


def test_a_call_is_over_when_its_result_is_ready():
    machine = FakeMachine()

    class Result:
        def block_until_ready(self):
            machine.now += 5.0
            return self

    seconds = interleaved_seconds({"a": lambda: [Result(), Result()]}, 2, clock=machine.clock)
    assert seconds == {"a": [10.0, 10.0]}


def test_real_seconds_of_real_arrays_are_positive():
    x = jnp.ones((64, 64))
    seconds = interleaved_seconds({"product": lambda: x @ x, "nothing": lambda: None}, 3)
    assert all(len(values) == 3 and min(values) > 0.0 for values in seconds.values())


def test_ratios_are_taken_within_a_repetition():
    """A machine that is ten times slower for a while changes no ratio, but both medians."""
    machine = FakeMachine()
    slow = [1.0, 10.0, 10.0, 1.0, 1.0]
    functions = {
        name: machine.function(name, [each * factor for factor in slow]) for name, each in (("a", 3), ("b", 2))
    }
    seconds = interleaved_seconds(functions, 5, warmup=0, clock=machine.clock)
    assert median_ratio(seconds["a"], seconds["b"]) == pytest.approx((1.5, 1.5, 1.5))
    # The ratio of the two medians would be 3 here.
    assert median_ratio([1, 3, 9], [1, 1, 9]) == pytest.approx((1.0, 1.0, 2.0))


def test_quartiles_are_those_of_numpy():
    values = np.random.default_rng(0).lognormal(size=23).tolist()
    lower, median, upper = np.percentile(values, [25, 50, 75])
    assert spread(values) == pytest.approx((median, lower, upper))


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 1), (-1, 1), (1, -1)])
def test_impossible_counts_are_refused(repeats, warmup):
    with pytest.raises(ValueError, match=f"repeats={repeats}, warmup={warmup}"):
        interleaved_seconds({}, repeats, warmup)


def test_unpaired_and_missing_repetitions_are_refused():
    with pytest.raises(ValueError, match="2 and 1 repetitions"):
        median_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        median_ratio([], [])
