"""What the experiments on the cause of sinks measure and hold, against NumPy float64."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import numpy_forward, random_params

from orthojax.config import replace
from orthojax.data.bigram_backcopy import BigramBackcopy, default_text
from orthojax.errors import UserError
from orthojax.experiments.active_dormant import pixel_sinks, sink_reinforcement, softmax1_sinks
from orthojax.experiments.active_dormant.intervened_training import train, untouched
from orthojax.experiments.active_dormant.key_mass import key_mass
from orthojax.experiments.active_dormant.models import short
from orthojax.model import Interventions, Transformer, bigram_backcopy
from orthojax.train import init_state, make_train_step

TASK = BigramBackcopy.from_text(default_text())
SMALL = {
    "model__d_model": 8, "model__d_mlp": 8, "data__sequence_length": 20, "train__batch_size": 4, "eval__sequences": 8,
}  # fmt: skip
CONFIG = short(1, **SMALL)


def test_key_mass_is_counted_by_hand():
    rng = np.random.default_rng(0)
    B, N, T, V = 3, 2, 20, 5
    trigger = np.array([False, True, False, False, True])
    tokens = rng.integers(0, V, (B, T))
    weights = np.tril(rng.random((B, N, T, T)))
    weights += 2.0 * np.tril(tokens[:, None, None, :] == 2)
    weights /= weights.sum(-1, keepdims=True)
    norms = rng.random((B, N, T))
    queries = {
        kind: [(b, t) for b in range(B) for t in range(10, T) if trigger[tokens[b, t]] == kind] for kind in (0, 1)
    }
    n = len(queries[0])
    position, token, equal = np.zeros(10), np.zeros(V), np.zeros(V)
    for b, t in queries[0]:
        row = weights[b, :, t].mean(0)
        position += row[:10] / n
        for s in range(t + 1):
            token[tokens[b, s]] += row[s] / n
            equal[tokens[b, s]] += 1 / (t + 1) / n
    expected = {
        "first_key": position[0], "first_ten": position.sum(), "largest_position": position.max(),
        "at_position": position.argmax(), "largest_token": token[2], "largest_token_equal": equal[2], "at_token": 2,
        "token_value_ratio": norms.mean(1)[tokens == 2].mean() / norms.mean(), "trigger_keys": token[trigger].sum(),
        "trigger_keys_equal": equal[trigger].sum(),
        "active_trigger_keys": np.mean([
            weights[b, :, t].mean(0)[trigger[tokens[b]]].sum() for b, t in queries[1]
        ]),
        "active_first_key": np.mean([weights[b, :, t, 0].mean() for b, t in queries[1]]),
    }  # fmt: skip
    late = [(b, t) for b in range(B) for t in range(10, T) if trigger[tokens[b, t]]]
    at_triggers = np.mean([weights[b, :, t].mean(0)[tokens[b] == 3].sum() for b, t in late])
    expected |= {"delimiter_key": token[3], "delimiter_key_triggers": at_triggers}
    arrays = (jnp.asarray(a) for a in (weights, norms, tokens, trigger, trigger[tokens]))
    found = key_mass(*arrays, delimiter=3)
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_training_without_interventions_is_that_of_the_config():
    found = train(CONFIG, untouched, lambda params, _: {"sum": total(params)}, (0, 2))
    state, step = init_state(CONFIG), make_train_step(CONFIG)
    for number in range(3):
        assert number not in found or found[number]["sum"] == pytest.approx(float(total(state.params)), rel=1e-6)
        state, _ = step(state, TASK.batch(number, 4, 20, CONFIG.data.seed))
    assert found[0] != found[2]


def total(params):
    return sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(params))


def test_a_value_is_held_at_the_mean_of_the_others_and_a_masked_key_is_not_seen():
    with jax.enable_x64(True):
        (case,) = sink_reinforcement.compute("others_masked", 0, CONFIG, (0, 2))
    of = case.metrics
    assert of["value_norm_first/step_2"] == pytest.approx(of["value_norm_rest"], rel=1e-5)
    assert of["value_norm_first/step_2"] != of["value_norm_first/step_0"]
    assert of["sink_attention_rest"] == of["first_key"] == 0.0 < of["active_first_key"]
    assert abs(of["sink_logit_gap"]) < 10  # from before the bias


@pytest.mark.slow
def test_the_null_of_softmax1_has_what_the_logits_of_the_other_keys_leave_to_it():
    config = replace(CONFIG, {"model.normalizer": "softmax1"})
    with jax.enable_x64(True):
        (case,) = softmax1_sinks.compute("softmax1", 0, config, (0, 2))
    of = case.metrics
    # Of a row the null has 1 / (1 + exp(first) + exp(others)): less than without the first key, in the mean, too.
    assert 0.0 < of["null_mass_rest"] < of["hidden: null_mass_rest"] < 1.0
    assert of["null_mass_rest"] + of["sink_attention_rest"] < 1.0
    assert of["null_mass_rest"] == of["null_mass_rest/step_2"] != of["null_at_start"] == of["null_mass_rest/step_0"]
    assert of["others_logit"] < np.log(20)  # 20 keys at most, whose logits are near 0 at the start


@pytest.mark.slow
def test_a_pixel_model_is_measured_on_the_images_that_are_held_out(monkeypatch):
    rows = np.random.default_rng(0).integers(0, pixel_sinks.LEVELS, (40, pixel_sinks.PIXELS)).astype(np.int32)
    monkeypatch.setattr(pixel_sinks, "images", lambda: rows)
    config = replace(
        pixel_sinks.VANILLA,
        {"model.d_model": 16, "model.d_mlp": 16, "model.num_layers": 1, "train.batch_size": 4, "optim.warmup_steps": 0},
    )
    (case,) = pixel_sinks.compute("vanilla", 0, config, (0, 2))
    of = case.metrics
    assert case.overrides == {"label": "softmax + Adam"}
    assert of["loss_nats"] == of["loss_nats/step_2"] != of["loss_nats/step_0"]
    assert of["loss_nats/step_0"] == pytest.approx(np.log(pixel_sinks.LEVELS + 1), abs=0.2)  # nothing is learned yet
    assert of["first_attention_mass"] <= of["largest_first_mass"] <= 1.0
    assert of["sink_layer"] == 0.0
    assert of["sequences"] == round(pixel_sinks.VALIDATION * len(rows))


def test_gradients_pass_through_the_norm_that_is_held():
    config = bigram_backcopy(1, vocab_size=TASK.vocab_size, max_length=8, d_model=8, d_mlp=8)
    model, params = Transformer(config), random_params(config)
    tokens, weights = TASK.batch(0, 2, 8, 0)[:, :-1], np.random.default_rng(1).normal(size=(2, 8, TASK.vocab_size))
    held = sink_reinforcement.interventions(sink_reinforcement.CELLS["initial_visible"], model, TASK, jnp.float32(3.0))

    def loss(params):
        logits, _ = model.apply({"params": params}, tokens, interventions=held(params, tokens))
        return jnp.vdot(weights, logits)

    def float64_loss(params):
        losses = []
        for row, weight in zip(tokens, weights, strict=True):
            norm = numpy_forward(config, params, row)[1][0]["value_norms"][0, 0]
            logits, _ = numpy_forward(config, params, row, Interventions(first_value_scale=np.array([[3.0 / norm]])))
            losses.append(np.vdot(weight, logits))
        return sum(losses)

    slopes = jax.jit(jax.grad(loss))(params)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), params)
    moved = [
        float64_loss(jax.tree.map(lambda a, d, h=h: np.asarray(a, np.float64) + h * d, params, direction))
        for h in (1e-5, -1e-5)
    ]
    expected = (moved[0] - moved[1]) / 2e-5
    found = sum(jax.tree.leaves(jax.tree.map(lambda s, d: np.vdot(np.asarray(s, np.float64), d), slopes, direction)))
    assert found == pytest.approx(expected, rel=1e-4)


def test_pixels_are_split_by_image_and_need_scikit_learn(monkeypatch):
    rows = np.arange(100)[:, None] * np.ones((1, 64), int)
    training, validation = pixel_sinks.split(rows)
    assert (len(training), len(validation)) == (80, 20)
    assert set(training[:, 0]) | set(validation[:, 0]) == set(range(100))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"not installed\n.*pip install 'orthojax\[digits\]'"):
        pixel_sinks.images()
