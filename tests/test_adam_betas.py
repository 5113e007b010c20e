"""The grid over Adam's b1 and b2: what is run, and the verdicts on made-up results."""

import pytest
from planted_results import made_up

from orthojax.experiments.claims import judge
from orthojax.experiments.ours.adam_betas import B1, B2, CLAIMS, EXPERIMENT
from orthojax.experiments.page import Table


def results_of(changes):
    def metrics(name):
        b2 = float(name.split("_")[-1])
        of = {"perplexity": 80.0, "kurtosis_first": 5.0 + b2, "kurtosis_rest": 3.0}
        return of | changes.get(name, {})

    return made_up(EXPERIMENT, metrics, scale="tiny")


def test_every_pair_is_run_and_shown():
    variants = EXPERIMENT.variants_at("tiny")
    assert {(v.config.optim.b1, v.config.optim.b2) for v in variants} == {(b1, b2) for b1 in B1 for b2 in B2}
    assert {v.config.optim.optimizer for v in variants} == {"adam"}
    table = EXPERIMENT.tables[0](results_of({"b1_0.5_b2_0.99": {"kurtosis_first": 7.25}}))
    assert isinstance(table, Table)
    assert table.rows[1][3] == "7.25"


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, ["holds"] * 3),
        ({"b1_0_b2_0.9": {"kurtosis_first": 3.0}}, ["does not hold", "holds", "holds"]),
        ({"b1_0_b2_0.9": {"kurtosis_first": 3.0, "perplexity": 90.0}}, ["holds"] * 3),
        ({"b1_0.5_b2_0": {"kurtosis_first": 3.0}}, ["holds", "does not hold", "holds"]),
        ({"b1_0.9_b2_0.9": {"kurtosis_first": 9.0}}, ["holds", "holds", "does not hold"]),
        ({"b1_0.9_b2_0.999": {"kurtosis_first": 3.0}}, ["not testable at this scale"] * 3),
    ],
)
def test_verdicts(changes, verdicts):
    results = results_of(changes)
    assert [judge(claim, results).verdict for claim in CLAIMS] == verdicts
