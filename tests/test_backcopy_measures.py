"""Measures of Bigram-Backcopy models: steps, the residual stream, interventions, keys; and training with <s> held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_slope
from model_oracle import numpy_forward, random_params
from tiny_run import drawn_params

from orthojax.config import replace
from orthojax.data import BigramBackcopy
from orthojax.data.bigram_backcopy import EVALUATION, default_text
from orthojax.experiments.active_dormant import measures, mechanism_probe
from orthojax.experiments.active_dormant.mechanism_probe import probe_file
from orthojax.experiments.active_dormant.runs import Setting, backcopy, interventions, row, short
from orthojax.model import Interventions, LoadedModel, Transformer, bigram_backcopy
from orthojax.train import evaluate, init_state, load, make_train_step, open_inputs, read_metrics, train

STEPS, PROBED = 6, (0, 1, 4)
CONFIG = replace(backcopy(), {
    "model.num_layers": 2, "optim.warmup_steps": 0, "model.d_model": 16, "model.d_mlp": 32, "model.num_heads": 2,
    "data.sequence_length": 12, "train.steps": STEPS, "train.probe_steps": PROBED, "train.probe_sequences": 4,
    "train.batch_size": 4, "eval.sequences": 8, "eval.batch_size": 8, "train.checkpoint_every_steps": 1,
    "train.keep_checkpoints": STEPS,
})  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(workdir, inputs, parameters after every step) of a run with details."""
    inputs, folder = open_inputs(CONFIG, tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("run")
    train(CONFIG, inputs, folder)
    kept = [load(folder / f"checkpoints/{step + 1}").params for step in range(STEPS)]
    return folder, inputs, [jax.tree.map(np.asarray, params) for params in (init_state(CONFIG).params, *kept)]


def probes(run):
    return {step: dict(np.load(probe_file(run[0] / "probes", step))) for step in PROBED}


def lines_of(folder):
    return {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if "sink_attention" in line}


@jax.jit
def hidden(params, tokens):
    """The residual stream after each block at position 0, by the whole forward pass."""
    observe = lambda taps: taps.residual[:, 0]  # noqa: E731
    return Transformer(CONFIG.model).apply({"params": params}, tokens, observe=observe)[1]


def measured(measure, loaded, inputs):
    return measure.measure(loaded, inputs, lambda part: None)


def test_details_are_written_at_the_listed_steps(run):
    folder, inputs, params = run
    assert len(list((folder / "probes").iterdir())) == len(PROBED)
    assert tuple(lines_of(folder)) == PROBED
    rows = inputs.evaluation[[0, 2, 4, 6]]
    for (step, line), arrays in zip(lines_of(folder).items(), probes(run).values(), strict=True):
        seen = np.asarray(hidden(params[step], rows[:, :-1]))
        np.testing.assert_allclose(arrays["first_residual"], seen[:, 1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(line["residual_norm_first/layer_1"], np.linalg.norm(seen[1, 0]), rtol=1e-4)
        assert line["backcopy_excess_risk_nats"] > 0


def test_first_residual_gradients_are_finite_differences(run):
    _, inputs, params = run
    model, rows = Transformer(CONFIG.model), jnp.asarray(inputs.evaluation[:4])
    gradients = jax.jit(mechanism_probe.first_residual_gradients, static_argnums=0)(model, params[-1], rows)
    states = jnp.asarray(hidden(params[-1], rows[:, :-1]))
    direction = np.random.default_rng(0).normal(size=states.shape[-1])

    @jax.jit
    def by_position(size, layer):
        values = jnp.broadcast_to(states[layer, 0] + size * direction, (2, 1, 12, states.shape[-1]))
        given = Interventions(residual=values, residual_share=jnp.zeros((2, 12)).at[layer, 0].set(1.0))
        logits, _ = model.apply({"params": params[-1]}, rows[:, :-1], interventions=given)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1), axis=0)

    for layer in range(2):
        above, below = (np.asarray(by_position(size, layer)) for size in (0.02, -0.02))
        slopes = (above - below).ravel() / 0.04 / len(above)
        np.testing.assert_allclose(gradients[layer] @ direction, slopes[1:].sum(), rtol=0.02, atol=2e-5)


def test_directions_of_values_and_keys_are_their_definitions(run):
    params, c = run[2][-1], CONFIG.model
    model = Transformer(c)
    weak = np.asarray(jax.jit(mechanism_probe.weak_directions, static_argnums=0)(model, params))
    block, H, norm = params["layers_1"], c.head_dim, params["layers_1"]["attention_norm"]
    value, output = block["attention"]["value"]["kernel"], block["attention"]["output"]["kernel"]
    gain = norm["scale"][:, None]
    both = [gain * value[:, h * H : (h + 1) * H] @ output[h * H : (h + 1) * H] for h in range(c.num_heads)]
    left, _, _ = np.linalg.svd(np.concatenate(both, axis=1))
    np.testing.assert_allclose(weak[0], left[:, -4:] @ left[:, -4:].T, atol=2e-3)
    assert np.all(np.isnan(weak[1]))  # nothing is above
    token = jnp.asarray(run[1].evaluation[0, 0])
    state = np.asarray(hidden(params, jnp.reshape(token, (1, 1))))[0, 0]
    normed = (state - state.mean()) / np.sqrt(state.var() + c.norm_eps) * norm["scale"] + norm["bias"]
    key = block["attention"]["key"]["kernel"]
    directions = np.asarray(jax.jit(mechanism_probe.key_directions, static_argnums=0)(model, params, token))
    np.testing.assert_allclose(directions[0], gain * key @ (normed @ key), rtol=1e-3, atol=1e-5)
    assert np.all(np.isnan(directions[1]))


def test_history_and_mechanism_are_read_from_the_probes(run):
    folder, inputs, _ = run
    arrays, lines = probes(run), lines_of(folder)
    found = measured(measures.HISTORY, load(folder), inputs)
    norms = [lines[step]["residual_norm_first/layer_0"] for step in PROBED]
    assert found["residual_norm_first/layer_0/growth"] == pytest.approx(norms[-1] / norms[0])
    assert found["residual_norm_first/layer_0/largest"] == max(norms)
    risks = [lines[step]["bigram_excess_risk_nats"] for step in PROBED]
    assert found["bigram_excess_risk_nats/half_step"] == measures.half_step(PROBED, risks)
    found = measures.mechanism(list(arrays.values()), since=1)
    gradients = [arrays[step]["first_gradient"][0] for step in (1, 4)]
    cosine = gradients[0] @ gradients[1] / np.prod([np.linalg.norm(g) for g in gradients])
    assert found["gradient_final_cosine/layer_0"] == pytest.approx(cosine, rel=1e-4)
    sizes, norms = ([np.linalg.norm(arrays[step][f"first_{name}"][0]) for step in (1, 4)]
                    for name in ("gradient", "residual"))  # fmt: skip
    slope = np.log(sizes[1] / sizes[0]) / np.log(norms[1] / norms[0])
    assert found["gradient_decay/layer_0"] == pytest.approx(slope, rel=1e-3)
    assert "gradient_decay/layer_1" not in found  # nothing attends to the last block's output


def test_interventions_do_what_their_names_say(run):
    folder, inputs, _ = run
    loaded = load(folder)
    found, plain = measured(measures.INTERVENTIONS, loaded, inputs), evaluate(loaded, inputs)
    for name in ("backcopy_excess_risk_nats", "residual_norm_first/layer_1", "sink_logit_gap/layer_0"):
        assert found[f"none: {name}"] == pytest.approx(plain[name], rel=1e-4)
    first = int(inputs.evaluation[0, 0])
    tables = [loaded.params[f"{name}_embedding"]["embedding"][row] for name, row in (("token", first), ("position", 0))]
    embedded, after = np.linalg.norm(sum(map(np.asarray, tables))), "residual_norm_first/layer"
    assert found[f"no_layer_0: {after}_0"] == pytest.approx(embedded, rel=1e-4)
    assert found[f"no_layer_0: {after}_1"] != pytest.approx(embedded, rel=1e-4)
    assert len({found[f"{name}: {after}_1"] for name in ("none", "no_attention", "no_mlp")}) == 3


def test_planted_triggers_are_told_from_weights(run):
    folder, inputs, _ = run
    task = inputs.task
    config = replace(CONFIG, {"model.num_layers": 1, "model.num_heads": 1, "model.norm": "none",
                              "model.position": "none"})  # fmt: skip
    c = config.model
    params = jax.tree.map(np.zeros_like, drawn_params(c))
    table, attention = np.zeros((c.vocab_size, c.d_model), np.float32), params["layers_0"]["attention"]
    table[:, 0], table[task.bos_ids[0], 1], table[task.triggers, 2] = 1.0, 1.0, 1.0
    params["token_embedding"]["embedding"] = table
    attention["query"]["kernel"][0, 1], attention["query"]["kernel"][2, 1] = 80, -80
    attention["key"]["kernel"][1, 1] = 1
    loaded = LoadedModel(Transformer(c), params, config, None, folder)
    found = measured(measures.WITHOUT_TRIGGERS, loaded, inputs)
    assert found["triggers_found/layer_0"] == 1
    assert found["others_called_triggers/layer_0"] == 0
    assert found["dormant_sink/layer_0"] > 0.99


def test_key_mass_is_counted_by_hand():
    task, rng = BigramBackcopy.from_text("the cat sat on the mat", 2, delimiter_position=15), np.random.default_rng(0)
    B, N, T, V = 3, 2, 20, task.vocab_size
    trigger, delimiter = np.isin(np.arange(V), task.triggers), task.delimiter_id
    tokens = rng.integers(0, V - 2, (B, T))
    tokens[:, 15] = delimiter
    is_trigger = trigger[tokens] & (np.arange(T) < 14)  # from the one before the delimiter on none acts
    weights = np.tril(rng.random((B, N, T, T)))
    weights += 2.0 * np.tril(tokens[:, None, None, :] == 2)
    weights /= weights.sum(-1, keepdims=True)
    norms = rng.random((B, N, T))
    mass = lambda b, t: np.bincount(tokens[b], weights[b, :, t].mean(0), V)  # noqa: E731
    equal = lambda b, t: np.bincount(tokens[b, : t + 1], minlength=V) / (t + 1)  # noqa: E731
    first = lambda b, t: weights[b, :, t, 0].mean()  # noqa: E731

    def mean(of, queries):
        return np.mean([of(b, t) for b in range(B) for t in range(10, T) if queries[b, t]], axis=0)

    token, even, active = mean(mass, ~is_trigger), mean(equal, ~is_trigger), mean(mass, is_trigger)
    most = np.argmax(token - even)
    expected = {
        "first_key": mean(first, ~is_trigger), "largest_token": token[most], "largest_token_equal": even[most],
        "token_value_ratio": norms.mean(1)[tokens == most].mean() / norms.mean(), "trigger_keys": token[trigger].sum(),
        "active_trigger_keys": active[trigger].sum(), "active_first_key": mean(first, is_trigger),
        "delimiter_key": token[delimiter], "delimiter_key_triggers": mean(mass, trigger[tokens])[delimiter],
    }  # fmt: skip
    found = measures.key_mass(jnp.asarray(weights), jnp.asarray(norms), jnp.asarray(tokens), task)
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


TASK = BigramBackcopy.from_text(default_text())
SHORT = short(**{"model.d_model": 8, "model.d_mlp": 8, "data.sequence_length": 20, "train.batch_size": 4,
                  "eval.sequences": 8})  # fmt: skip


@pytest.mark.slow
def test_training_without_interventions_is_that_of_the_config():
    found = row("plain", Setting(SHORT), 0, (0, 2)).metrics
    config = replace(SHORT, {"train.seed": 0, "data.seed": 0})
    state, step = init_state(config), make_train_step(config)
    for number in range(2):
        state, _ = step(state, TASK.batch(number, 4, 20, 0))
    assert found["value_norm_first"] != found["value_norm_rest"]
    held_out = TASK.batch(0, 8, 20, 0, EVALUATION)[:, :-1]
    norms = [numpy_forward(config.model, state.params, row)[1][0]["value_norms"][0, 0] for row in held_out]
    assert found["value_norm_first"] == pytest.approx(np.mean(norms), rel=1e-5)


def test_value_held_and_hidden_key_is_not_seen():
    with jax.enable_x64(True):
        of = row("held", Setting(SHORT, value="others", hidden=True), 0, (0, 2)).metrics
    assert of["value_norm_first"] == pytest.approx(of["value_norm_rest"], rel=1e-5)
    assert of["value_ratio/step_2"] == pytest.approx(1.0, rel=1e-5)
    assert of["sink_attention_rest"] == of["first_key"] == 0.0 < of["active_first_key"]
    assert abs(of["sink_logit_gap"]) < 10  # from before the bias


@pytest.mark.slow
def test_the_null_of_softmax1_has_the_remaining_weight():
    config = replace(SHORT, {"model.normalizer": "softmax1"})
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
