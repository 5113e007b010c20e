"""Timing with a clock that the timed functions move themselves, so that every expected second is known."""

import pytest

from orthojax.experiments.costs import interleaved_seconds, ratio_quartiles


class FakeMachine:
    """Its functions take the given seconds, one after the other."""

    def __init__(self):
        self.now, self.calls = 100.0, []

    def clock(self):
        return self.now

    def function(self, name, seconds):
        left = list(seconds)

        def call():
            self.calls.append(name)
            self.now += left.pop(0)

        return call


def test_seconds_are_of_each_function_and_order_alternates():
    machine = FakeMachine()
    functions = {"a": machine.function("a", [500, 1, 2, 3]), "b": machine.function("b", [700, 10, 20, 30])}
    assert interleaved_seconds(functions, 3, clock=machine.clock) == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert machine.calls[-6:] == ["a", "b", "b", "a", "a", "b"]


def test_call_is_over_when_its_result_is_ready():
    machine = FakeMachine()

    class Result:
        def block_until_ready(self):
            machine.now += 5.0
            return self

    seconds = interleaved_seconds({"a": lambda: [Result(), Result()]}, 2, clock=machine.clock)
    assert seconds == {"a": [10.0, 10.0]}


def test_ratios_are_taken_within_a_repetition():
    """A machine that is ten times slower for a while changes no ratio, but both medians."""
    assert ratio_quartiles([3, 30, 30, 3], [2, 20, 20, 2]) == pytest.approx([1.5, 1.5, 1.5])
    assert ratio_quartiles([1, 3, 9], [1, 1, 9]) == pytest.approx([1.0, 1.0, 2.0])  # that of the medians is 3
