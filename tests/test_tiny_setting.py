"""The search for a setting: what a layer is worth, and which setting is chosen."""

from pathlib import Path

import jax
import numpy as np
import pytest
from planted_results import made_up
from tiny_run import drawn_params

from orthojax.config import changed_fields, replace
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.ours.tiny_setting import ABLATED, BASE, CANDIDATES, EXPERIMENT, _cost, chosen
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.model import LoadedModel, Transformer
from orthojax.train import Inputs

T, VOCABULARY = 8, 32
SMALL = {
    "model.num_layers": 2, "model.d_model": 16, "model.num_heads": 2, "model.d_mlp": 32, "model.max_length": T,
    "model.vocab_size": VOCABULARY, "data.sequence_length": T,
}  # fmt: skip


def test_a_layer_is_worth_what_the_model_without_it_loses():
    config = replace(BASE, SMALL)
    model = Transformer(config.model)
    params = drawn_params(config.model, 0.4)
    idle = params["layers_1"]
    for part, name in (("attention", "output"), ("mlp", "output")):
        idle[part][name]["kernel"] *= 0.0
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (16, T + 1), dtype=np.int32)
    inputs = Inputs(lambda step: rows, rows, None, {}, None)
    found = ABLATED.measure(LoadedModel(model, params, config, None, Path()), inputs, lambda what: None).metrics

    @jax.jit
    def log_probabilities(params):
        return jax.nn.log_softmax(model.apply({"params": params}, rows[:, :-1])[0])

    def loss(params):
        return -np.take_along_axis(np.asarray(log_probabilities(params)), rows[:, 1:, None], -1).mean()

    whole = loss(params)
    params["layers_0"] = jax.tree.map(lambda x: x, idle)  # adds nothing either
    assert found["loss_without/layer_1"] == pytest.approx(0.0, abs=1e-6)
    assert found["loss_without/layer_0"] == pytest.approx(loss(params) / whole - 1, rel=1e-4)
    assert abs(found["loss_without/layer_0"]) > 0.01


GOOD = {
    "perplexity": 20.0,
    "first_attention_fraction": 0.3,  # by chance 0.042
    **{f"loss_without/layer_{i}": 0.02 for i in range(4)},
    **{f"residual_norm_rest/layer_{i}": 1.0 + 0.2 * i for i in range(4)},
    **{f"kurtosis_first/layer_{i}": 10.0 * (i > 1) for i in range(4)},
    **{f"kurtosis_rest/layer_{i}": 3.0 for i in range(4)},
}


def the_chosen(changes):
    """The name of the setting that is chosen where all others are good."""
    results = made_up(EXPERIMENT, lambda name: GOOD | changes.get(name, {}), scale="tiny")
    found = chosen(results)
    return found and found.name


@pytest.mark.parametrize(
    "worse",
    [
        {"loss_without/layer_3": 0.009},
        {"residual_norm_rest/layer_3": 1.29},
        {"kurtosis_first/layer_3": 3.9},
        {"first_attention_fraction": 0.08},
    ],
)
def test_the_cheapest_that_meets_every_criterion_is_chosen(worse):
    assert the_chosen({}) == "short"
    shorter = [v.name for v in EXPERIMENT.variants_at("tiny") if _cost(v.config) < _cost(BASE)]
    assert "short" in shorter
    assert the_chosen(dict.fromkeys(shorter, worse) | {"rotary": {"first_attention_fraction": 0.4}}) == "rotary"
    assert the_chosen(dict.fromkeys(CANDIDATES, worse)) is None
    assert the_chosen(dict.fromkeys(CANDIDATES, worse) | {"layers_6": {}}) == "layers_6"


def test_the_setting_in_use_is_the_one_that_the_committed_search_chose():
    folder = Path(__file__).parents[1] / "results/tiny-setting"
    found = chosen(results_of(EXPERIMENT, read_raw(folder / "results.json"), folder))
    differs = changed_fields(LANGUAGE_MODEL, replace(found.config, {"train.seed": 0, "data.seed": 0}))
    assert {name for name in differs if not name.startswith(("eval.", "train.probe"))} == set()
