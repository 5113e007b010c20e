"""The cure of SmolLM2: its model, and the verdicts on made-up results."""

import pytest
from planted_results import made_up

from orthojax.experiments.claims import judge
from orthojax.experiments.pretrained.curing import CLAIMS, EXPERIMENT, MODEL
from orthojax.train.loading import find_model

SOFTMAX = {
    "perplexity": 10.0,
    "perplexity_int8_coarse": 80.0,
    "first_attention_fraction": 0.5,
    "max_abs_first": 10_000.0,
    "kurtosis_first": 400.0,
    "kurtosis_rest": 90.0,
}
CURED = {
    "perplexity": 10.05,
    "perplexity_int8_coarse": 15.0,
    "first_attention_fraction": 0.2,
    "max_abs_first": 4_000.0,
    "kurtosis_first": 150.0,
    "kurtosis_rest": 40.0,
}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"first_attention_fraction": 0.3}, 0),
        ({"max_abs_first": 6_000.0}, 1),
        ({"kurtosis_first": 300.0}, 2),
        ({"kurtosis_rest": 60.0}, 3),
        ({"perplexity_int8_coarse": 60.0}, 4),
        ({"perplexity": 10.2, "perplexity_int8_coarse": 15.3}, 5),
    ],
)
def test_verdicts(changes, wrong):
    results = made_up(EXPERIMENT, {"softmax": SOFTMAX, "cured": CURED | changes}.get, scale="tiny")
    found = [judge(claim, results).verdict for claim in CLAIMS]
    assert found == ["does not hold" if i == wrong else "holds" for i in range(len(CLAIMS))]


@pytest.mark.slow
@pytest.mark.pretrained
def test_the_model_is_that_of_the_package():
    assert find_model("smollm2")[1].model == MODEL
