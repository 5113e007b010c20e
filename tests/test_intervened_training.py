"""Training with the value of <s> held or its key hidden, against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_slope
from model_oracle import numpy_forward, random_params

from orthojax.config import replace
from orthojax.data import BigramBackcopy
from orthojax.data.bigram_backcopy import EVALUATION, default_text
from orthojax.experiments.active_dormant.runs import Setting, interventions, row, short
from orthojax.model import Interventions, Transformer, bigram_backcopy
from orthojax.train import init_state, make_train_step

TASK = BigramBackcopy.from_text(default_text())
CONFIG = short(**{"model.d_model": 8, "model.d_mlp": 8, "data.sequence_length": 20, "train.batch_size": 4,
                  "eval.sequences": 8})  # fmt: skip


@pytest.mark.slow
def test_training_without_interventions_is_that_of_the_config():
    found = row("plain", Setting(CONFIG), 0, (0, 2)).metrics
    config = replace(CONFIG, {"train.seed": 0, "data.seed": 0})
    state, step = init_state(config), make_train_step(config)
    for number in range(2):
        state, _ = step(state, TASK.batch(number, 4, 20, 0))
    assert found["value_norm_first"] != found["value_norm_rest"]
    held_out = TASK.batch(0, 8, 20, 0, EVALUATION)[:, :-1]
    norms = [numpy_forward(config.model, state.params, row)[1][0]["value_norms"][0, 0] for row in held_out]
    assert found["value_norm_first"] == pytest.approx(np.mean(norms), rel=1e-5)


def test_value_held_and_hidden_key_is_not_seen():
    with jax.enable_x64(True):
        of = row("held", Setting(CONFIG, value="others", hidden=True), 0, (0, 2)).metrics
    assert of["value_norm_first"] == pytest.approx(of["value_norm_rest"], rel=1e-5)
    assert of["value_ratio/step_2"] == pytest.approx(1.0, rel=1e-5)
    assert of["sink_attention_rest"] == of["first_key"] == 0.0 < of["active_first_key"]
    assert abs(of["sink_logit_gap"]) < 10  # from before the bias


@pytest.mark.slow
def test_the_null_of_softmax1_has_the_remaining_weight():
    config = replace(CONFIG, {"model.normalizer": "softmax1"})
    of = row("softmax1", Setting(config, both_views=True), 0, (0, 2)).metrics
    # Of a row the null has 1 / (1 + exp(first) + exp(others)): less than without the first key, in the mean as well.
    assert 0.0 < of["null_mass_rest"] < of["hidden: null_mass_rest"] < 1.0
    assert of["null_mass_rest"] + of["sink_attention_rest"] < 1.0
    assert of["null_mass_rest"] == of["null_mass_rest/step_2"] != of["null_at_start"] == of["null_mass_rest/step_0"]


def test_gradients_pass_through_the_norm_that_is_held():
    config = bigram_backcopy(1, vocab_size=TASK.vocab_size, max_length=8, d_model=8, d_mlp=8)
    model, params = Transformer(config), random_params(config)
    tokens, weights = TASK.batch(0, 2, 8, 0)[:, :-1], np.random.default_rng(1).normal(size=(2, 8, TASK.vocab_size))
    held = interventions(Setting(value="initial"), model, TASK, jnp.float32(3.0))

    def loss(params):
        logits, _ = model.apply({"params": params}, tokens, interventions=held(params, tokens))
        return jnp.vdot(weights, logits)

    def float64_loss(params):
        losses = []
        for ids, weight in zip(tokens, weights, strict=True):
            norm = numpy_forward(config, params, ids)[1][0]["value_norms"][0, 0]
            logits, _ = numpy_forward(config, params, ids, Interventions(first_value_scale=np.array([[3.0 / norm]])))
            losses.append(np.vdot(weight, logits))
        return sum(losses)

    assert_slope(float64_loss, params, jax.jit(jax.grad(loss))(params), 1e-4)
