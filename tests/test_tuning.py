"""The search for learning rates: equal budgets, and what it chooses."""

from pathlib import Path

import pytest
from planted_results import made_up

from orthojax.config import replace
from orthojax.experiments.claims import judge
from orthojax.experiments.ours import parity
from orthojax.experiments.ours.tuning import EXPERIMENT, METHODS, WARMUPS, chosen, tuned
from orthojax.experiments.rerender import read_raw, results_of

RUNS = {variant.name: variant.config for variant in EXPERIMENT.variants_at("tiny")}


def planted(best):
    """Results in which the run of each method with this rate and warm-up has the lowest perplexity."""

    def metrics(name):
        config = RUNS[name]
        at = (config.optim.learning_rate, config.optim.warmup_steps / config.train.steps)
        return {"perplexity": 20.0 if best[name.partition("_")[0]] == pytest.approx(at) else 30.0}

    return made_up(EXPERIMENT, metrics, scale="tiny")


def test_every_method_has_the_same_budget_and_differs_in_nothing_else():
    by_method = {method: [of for name, of in RUNS.items() if name.startswith(f"{method}_")] for method in METHODS}
    assert {len(of) for of in by_method.values()} == {len(WARMUPS) * 5}
    assert len({(of.train.steps, of.train.batch_size, of.data, of.eval) for of in RUNS.values()}) == 1
    assert {of.model.normalizer for of in by_method["cured"]} == {"softmax1"}
    for of in METHODS.values():
        assert [b / a for a, b in zip(of.rates, of.rates[1:], strict=False)] == pytest.approx([2.0] * 4)


def test_the_lowest_perplexity_chooses_rate_and_warm_up():
    best = {
        "vanilla": (4e-3, 0.25),
        "cured": (2e-3, 0.05),
        "muon": (1e-2, 0.25),
        "soap": (4e-3, 0.25),
        "lion": (5e-4, 0.05),
        "sgd": (0.4, 0.05),
    }
    results = planted(best)
    assert chosen(results) == best
    assert judge(EXPERIMENT.claims[0], results).verdict == "holds"


def test_the_methods_compared_have_what_the_committed_search_chose():
    folder = Path(__file__).parents[1] / "results/tuning"
    assert chosen(results_of(EXPERIMENT, read_raw(folder / "results.json"), folder)) == parity.TUNED
    for variant in parity.EXPERIMENT.variants_at("tiny"):
        method, _, steps = variant.name.rpartition("_")
        rated, axes = ("cured", "residual") if method == parity.RESIDUAL else (method, "output")
        expected = tuned(rated, *parity.TUNED[rated], int(steps))
        assert variant.config == replace(expected, {"optim.rotation.axes": axes})


def test_a_best_rate_at_the_edge_is_said():
    best = {
        "vanilla": (1.6e-2, 0.25),
        "cured": (2e-3, 0.05),
        "muon": (1e-2, 0.25),
        "soap": (4e-3, 0.25),
        "lion": (5e-4, 0.05),
        "sgd": (0.4, 0.05),
    }
    judged = judge(EXPERIMENT.claims[0], planted(best))
    assert judged.verdict == "does not hold"
    assert "5 of 6" in judged.closing


def test_warm_up_is_a_fraction_of_the_steps():
    long = tuned("muon", 1e-2, 0.25, 2000)
    assert (long.optim.optimizer, long.optim.warmup_steps, long.train.steps) == ("muon", 500, 2000)
