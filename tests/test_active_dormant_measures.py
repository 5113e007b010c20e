"""What is measured of Bigram-Backcopy models over training: the first token's residual stream, attribution, probes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import random_params
from orthojax.experiments.active_dormant.models import config, half_step
from orthojax.experiments.experiment import Variant
from orthojax.experiments.training_view import render_training_view
from tiny_run import assert_trees_close, drawn_params

from orthojax import analysis
from orthojax.config import LatentConfig, replace
from orthojax.errors import UserError
from orthojax.experiments.active_dormant import models, views
from orthojax.experiments.pretrained import aligned
from orthojax.experiments.results import Result
from orthojax.model import Interventions, LoadedModel, Transformer, llama2, stack_layers
from orthojax.train import evaluate, load, open_inputs, read_metrics, train
from orthojax.train.mesh import place_whole
from orthojax.train.probe import probe_file
from orthojax.train.step import build

STEPS = 6
SMALL = {"optim__warmup_steps": 0,
         "model__d_model": 16, "model__d_mlp": 32, "model__num_heads": 2, "data__sequence_length": 12,
         "train__steps": STEPS, "train__probe_steps": (0, 1, 4), "train__probe_sequences": 4, "train__batch_size": 4,
         "eval__sequences": 8, "eval__batch_size": 8, "train__checkpoint_every_steps": 3}  # fmt: skip
CONFIG = config(2, **SMALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(workdir, inputs, parameters after every step) of a run with details."""
    inputs, params = open_inputs(CONFIG, tmp_path_factory.mktemp("data")), []
    folder = tmp_path_factory.mktemp("run")
    train(CONFIG, inputs, folder)

    program = build(CONFIG, inputs.task)
    state, step = program.init(jax.random.key(CONFIG.train.seed)), program.step
    params.append(jax.tree.map(np.asarray, state.params))
    for number in range(STEPS):
        # Placed as the loop places it, so that its program serves here, too.
        state, _ = step(state, place_whole(None, np.array([CONFIG.data.seed, number], np.uint32)))
        params.append(jax.tree.map(np.asarray, state.params))
    return folder, inputs, params


def probes(run):
    return {step: dict(np.load(probe_file(run[0] / "probes", step))) for step in CONFIG.train.probe_steps}


def hidden(params, tokens):
    """The residual stream after each block at position 0, by the whole forward pass."""
    return np.asarray(_hidden(params, tokens))


@jax.jit
def _hidden(params, tokens):
    observe = lambda taps: taps.residual[:, 0]  # noqa: E731
    return Transformer(CONFIG.model).apply({"params": params}, tokens, observe=observe)[1]


def test_details_are_written_at_the_listed_steps_and_metrics_of_the_start_are_logged(run):
    folder, inputs, params = run
    assert sorted(path.name for path in (folder / "probes").iterdir()) == [
        f"step_{step:08d}.npz" for step in CONFIG.train.probe_steps
    ]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "sink_attention" in line]
    assert [line["step"] for line in lines] == list(CONFIG.train.probe_steps)
    rows = inputs.evaluation[[0, 2, 4, 6]]
    for line, arrays in zip(lines, probes(run).values(), strict=True):
        step = line["step"]
        np.testing.assert_array_equal(arrays["tokens"], rows[0, :-1])
        seen = hidden(params[step], rows[:, :-1])
        np.testing.assert_allclose(arrays["first_residual"], seen[:, 1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(line["residual_norm_first/layer_1"], np.linalg.norm(seen[1, 0]), rtol=1e-4)
        assert line["backcopy_excess_risk_nats"] > 0
        assert line["first_gradient_norm/layer_0"] == pytest.approx(
            np.linalg.norm(arrays["first_gradient"][0]), rel=1e-4
        )


def test_norms_are_those_of_the_update_and_the_gradient(run):
    _, inputs, params = run
    arrays = probes(run)[4]
    before, after = params[3]["layers_1"], params[4]["layers_1"]
    update = after["mlp"]["input"]["kernel"] - before["mlp"]["input"]["kernel"]
    expected = np.linalg.norm(update), np.linalg.svd(update, compute_uv=False)[0]
    np.testing.assert_allclose(arrays["update/layers_1/mlp/input/kernel"], expected, rtol=1e-4)
    rows = jnp.asarray(inputs.evaluation[[0, 2, 4, 6]])

    def loss(params):
        logits, _ = Transformer(CONFIG.model).apply({"params": params}, rows[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1))

    gradient = np.asarray(jax.jit(jax.grad(loss))(params[4])["head"]["kernel"])
    expected = np.linalg.norm(gradient), np.linalg.svd(gradient, compute_uv=False)[0]
    np.testing.assert_allclose(arrays["gradient/head/kernel"], expected, rtol=1e-4)
    assert not np.any(probes(run)[0]["update/head/kernel"])


def test_the_growth_of_the_norm_is_attributed_to_parameters_and_adds_up(run):
    _, inputs, params = run
    last = 0
    for step, arrays in probes(run).items():
        assert arrays["since"] == last
        parts = {name: x for name, x in arrays.items() if name.startswith("growth/")}
        total = np.sum(list(parts.values()), axis=0)
        if step == 0:
            assert not np.any(total)
            continue
        norms = [np.linalg.norm(hidden(params[s], inputs.evaluation[:1, :-1])[:, 0], axis=-1) for s in (last, step)]
        last = step
        np.testing.assert_allclose(arrays["growth"], norms[1] - norms[0], atol=2e-5)
        assert np.all(np.abs(total - arrays["growth"]) <= 0.01 * np.abs(arrays["growth"]) + 2e-5)
        assert np.all(parts["growth/head/kernel"] == 0)  # which that stream does not read
        assert np.all(parts["growth/layers_1/mlp/output/kernel"][0] == 0)
        assert np.abs(parts["growth/layers_1/mlp/output/kernel"][1]) > 1e-4


def test_gradients_of_the_first_residual_state_are_finite_differences(run):
    _, inputs, params = run
    model, rows = Transformer(CONFIG.model), jnp.asarray(inputs.evaluation[:4])
    gradients = jax.jit(analysis.first_residual_gradients, static_argnums=0)(model, params[-1], rows)
    states = jnp.asarray(hidden(params[-1], rows[:, :-1]))
    direction = np.random.default_rng(0).normal(size=states.shape[-1])

    @jax.jit
    def by_position(size, layer):
        shape = (2, 1, 12, states.shape[-1])
        values = jnp.broadcast_to(states[layer, 0] + size * direction, shape)
        share = jnp.zeros((2, 12)).at[layer, 0].set(1.0)
        given = analysis.first_token.Interventions(residual=values, residual_share=share)
        logits, _ = model.apply({"params": params[-1]}, rows[:, :-1], interventions=given)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1), axis=0)

    for layer in range(2):

        def losses(size, layer=layer):
            found = np.asarray(by_position(size, layer))
            return np.array([found[1:].sum(), found[0].sum()]) / len(found)

        difference = (losses(0.02) - losses(-0.02)) / 0.04
        found = [np.asarray(gradient[layer]) @ direction for gradient in gradients]
        np.testing.assert_allclose(found, difference, rtol=0.02, atol=2e-5)


def test_directions_of_values_and_keys_are_their_definitions(run):
    params, c = run[2][-1], CONFIG.model
    model = Transformer(c)
    weak = np.asarray(jax.jit(analysis.weak_directions, static_argnums=0)(model, params))
    block, H = params["layers_1"], c.head_dim
    value, output = block["attention"]["value"]["kernel"], block["attention"]["output"]["kernel"]
    gain = block["attention_norm"]["scale"][:, None]
    both = [gain * value[:, h * H : (h + 1) * H] @ output[h * H : (h + 1) * H] for h in range(c.num_heads)]
    left, sizes, _ = np.linalg.svd(np.concatenate(both, axis=1))
    assert np.all(np.diff(sizes) <= 0)
    np.testing.assert_allclose(weak[0], left[:, -4:] @ left[:, -4:].T, atol=2e-3)
    np.testing.assert_allclose(np.trace(weak[0]), 4, rtol=1e-4)
    assert np.all(np.isnan(weak[1]))  # nothing is above
    token = jnp.asarray(run[1].evaluation[0, 0])
    state = hidden(params, jnp.reshape(token, (1, 1)))[0, 0]
    norm = block["attention_norm"]
    normed = (state - state.mean()) / np.sqrt(state.var() + c.norm_eps) * norm["scale"] + norm["bias"]
    key = normed @ block["attention"]["key"]["kernel"]
    directions = np.asarray(jax.jit(analysis.key_directions, static_argnums=0)(model, params, token))
    np.testing.assert_allclose(directions[0], gain * block["attention"]["key"]["kernel"] @ key, rtol=1e-3, atol=1e-5)
    assert np.all(np.isnan(directions[1]))


def test_a_norm_after_attention_has_no_gain_on_what_heads_read(run):
    params, c = run[2][-1], CONFIG.model
    token = jnp.asarray(run[1].evaluation[0, 0])
    ones = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.ones_like(x) if "attention_norm']['scale" in jax.tree_util.keystr(path) else x, params
    )
    assert np.ptp(params["layers_1"]["attention_norm"]["scale"]) > 0.01
    after = Transformer(dataclasses.replace(c, block="output_norm"))
    found = analysis.weak_directions(after, params), analysis.weak_directions(after, ones)
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert analysis.key_directions(after, params, token).shape == (2, c.d_model)


@pytest.mark.slow
def test_directions_through_latents_are_the_derivatives_of_keys_and_of_what_heads_write():
    latent = llama2("tiny", vocab_size=11, max_length=16, d_model=8, num_layers=2, num_heads=2, d_mlp=12, norm="none",
                    latent=LatentConfig(7, None, 2, 3), mlp="none", scan_layers=False)  # fmt: skip
    model, params, token = Transformer(latent), random_params(latent), jnp.int32(3)
    share = jnp.array([[1.0], [0.0]])

    def seen(residual, head=(1.0, 1.0)):
        values = jnp.broadcast_to(residual, (2, 1, 1, 8))
        given = Interventions(residual=values, residual_share=share, head_scale=jnp.stack([jnp.asarray(head)] * 2))
        observe = lambda taps: (taps.residual, taps.keys, taps.attention_output)  # noqa: E731
        return model.apply({"params": params}, token.reshape(1, 1), interventions=given, observe=observe)[1]

    @jax.jit
    def derivatives():
        residual = model.apply({"params": params}, token.reshape(1, 1), observe=lambda taps: taps.residual)[1][0, 0, 0]
        key = jax.grad(lambda r: 0.5 * jnp.sum(seen(r)[1][1, 0, 0] ** 2))(residual)
        # One token sees itself alone: weights are 1, and a head writes its value.
        written = [jax.jacobian(lambda r, h=h: seen(r, jnp.eye(2)[h])[2][1, 0, 0])(residual) for h in (0, 1)]
        return key, jnp.stack(written)

    key, written = derivatives()
    np.testing.assert_allclose(analysis.key_directions(model, params, token)[0], key, rtol=1e-4, atol=1e-5)
    above = np.einsum("hDC,hDE->CE", written, written)
    weakest = np.linalg.eigh(above)[1][:, :2]
    np.testing.assert_allclose(analysis.weak_directions(model, params)[0], weakest @ weakest.T, atol=1e-4)


@pytest.mark.slow
def test_scanned_and_unrolled_layers_have_the_same_mechanism_and_names(run):
    _, inputs, params = run
    rows = jnp.asarray(inputs.evaluation[:4])
    scanned = Transformer(dataclasses.replace(CONFIG.model, scan_layers=True))
    stacked = stack_layers(params[-1])
    plain = analysis.first_token_mechanism(Transformer(CONFIG.model), params[-1], rows)
    assert_trees_close(plain, analysis.first_token_mechanism(scanned, stacked, rows), rtol=1e-3, atol=1e-5)
    assert_trees_close(analysis.parameter_norms(params[-1]), analysis.parameter_norms(stacked), rtol=1e-5)


def test_parameter_norms_are_those_of_a_singular_value_decomposition():
    rng = np.random.default_rng(0)
    tree = {"wide": rng.normal(size=(3, 7)), "tall": 1e-15 * rng.normal(size=(9, 2)), "bias": rng.normal(size=5)}
    found = jax.jit(analysis.parameter_norms)(jax.tree.map(np.float32, tree | {"none": np.zeros((2, 3))}))
    for name, x in tree.items():
        largest = np.linalg.svd(np.atleast_2d(x), compute_uv=False)[0]
        np.testing.assert_allclose(found[name], [np.linalg.norm(x), largest], rtol=1e-5)
    np.testing.assert_array_equal(found["none"], [0, 0])


def test_interventions_share_a_program_and_do_what_their_names_say(run):
    folder, inputs, _ = run
    loaded = load(folder)
    found = models.INTERVENTIONS.measure(loaded, inputs, lambda part: None).metrics
    plain = evaluate(loaded, inputs)
    for name in ("backcopy_excess_risk_nats", "residual_norm_first/layer_1", "sink_logit_gap/layer_0"):
        assert found[f"none: {name}"] == pytest.approx(plain[name], rel=1e-4)
    assert found["no_value_of_bos: value_norm_first/layer_1"] == 0
    assert found["no_attention: sink_attention_rest"] != found["none: sink_attention_rest"]
    # What a block does not add is missing from the stream: without layer 0 its output is the embeddings.
    first = int(inputs.evaluation[0, 0])
    rows = (("token_embedding", first), ("position_embedding", 0))
    tables = [loaded.params[name]["embedding"][row] for name, row in rows]
    for name in ("no_layer_0", "no_layer_0_at_bos"):
        expected = np.linalg.norm(sum(map(np.asarray, tables)))
        assert found[f"{name}: residual_norm_first/layer_0"] == pytest.approx(expected, rel=1e-4)
    assert found["no_layer_0_at_bos: residual_norm_rest/layer_0"] == found["none: residual_norm_rest/layer_0"]
    for layer in range(2):
        rest = {name: found[f"{name}: residual_norm_rest/layer_0"] for name in ("none", f"no_mlp_{layer}")}
        assert (rest["none"] == rest[f"no_mlp_{layer}"]) == (layer == 1)


def test_attention_of_one_layer_is_forced(run):
    folder, inputs, _ = run
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, num_layers=1))
    params = drawn_params(config.model)
    loaded = LoadedModel(Transformer(config.model), params, config, None, folder)
    found = models.INTERVENTIONS.measure(loaded, inputs, lambda part: None).metrics
    for name, weight in {"clean_attention": 1, "all_on_bos": 1, "all_on_themselves": 0}.items():
        assert found[f"{name}: sink_attention_rest"] == weight
    assert found["all_on_bos: backcopy_excess_risk_nats"] != found["clean_attention: backcopy_excess_risk_nats"]
    # Of triggers the ideal head reads the token before, where the mask of non-triggers is the same in both.
    same = [found[f"{name}: bigram_excess_risk_nats"] for name in ("clean_attention", "all_on_bos")]
    assert same[0] == pytest.approx(same[1], rel=1e-5)


def test_the_history_and_the_mechanism_are_read_from_the_probes(run):
    folder, inputs, _ = run
    loaded, arrays = load(folder), probes(run)
    lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if "sink_attention" in line}
    found = models.HISTORY.measure(loaded, inputs, lambda part: None).metrics
    norms = [lines[step]["residual_norm_first/layer_0"] for step in (0, 1, 4)]
    assert found["residual_norm_first/layer_0/growth"] == pytest.approx(norms[-1] / norms[0])
    assert found["residual_norm_first/layer_0/largest"] == max(norms)
    risks = [lines[step]["bigram_excess_risk_nats"] for step in (0, 1, 4)]
    assert found["bigram_excess_risk_nats/half_step"] == half_step([0, 1, 4], risks)
    found = models.mechanism([arrays[step] for step in (0, 1, 4)], since=1)
    gradients = [arrays[step]["first_gradient"][0] for step in (1, 4)]
    cosine = gradients[0] @ gradients[1] / np.prod([np.linalg.norm(g) for g in gradients])
    assert found["gradient_final_cosine/layer_0"] == pytest.approx(cosine, rel=1e-4)
    shares = {
        name: share for name, share in found.items() if name.startswith("growth_from/") and "layer_1" in name[-8:]
    }
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    of_tokens = sum(arrays[step]["growth/token_embedding/embedding"][1] for step in (1, 4))
    seen = [lines[step]["residual_norm_first/layer_1"] for step in (0, 4)]
    assert found["growth_from/token/layer_1"] == pytest.approx(of_tokens / (seen[1] - seen[0]), rel=0.01)
    own, others = ([np.sum(arrays[step][f"first_{name}gradient"][0] ** 2) for step in (1, 4)] for name in ("own_", ""))
    expected = np.mean([a / (a + b) for a, b in zip(own, others, strict=True)])
    assert found["gradient_own_share/layer_0"] == pytest.approx(expected, rel=1e-4)
    assert "gradient_decay/layer_1" not in found  # nothing attends to the last block's output
    resumed = [arrays[0], arrays[1], arrays[4] | {"since": np.array(3)}]
    assert not any(name.startswith("growth_from") for name in models.mechanism(resumed, since=1))


def test_static_sequences_show_planted_triggers(run):
    """A head that attends to <s> but at triggers is told from its weights."""
    folder, inputs, params = run
    task, c = inputs.task, dataclasses.replace(CONFIG.model, num_layers=1, num_heads=1, norm="none", position="none")
    table = np.full((c.vocab_size, c.d_model), 0.0, np.float32)
    table[:, 0], table[task.bos_ids[0], 1], table[task.triggers, 2] = 1.0, 1.0, 1.0
    model = Transformer(c)
    params = jax.tree.map(np.zeros_like, drawn_params(c))
    params["token_embedding"]["embedding"] = table
    (
        params["layers_0"]["attention"]["query"]["kernel"][0, 1],
        params["layers_0"]["attention"]["query"]["kernel"][2, 1],
    ) = 80, -80
    params["layers_0"]["attention"]["key"]["kernel"][1, 1] = 1
    config = dataclasses.replace(CONFIG, model=c)
    found = models.STATIC.measure(LoadedModel(model, params, config, None, folder), inputs, lambda part: None).metrics
    assert found["triggers_found/layer_0"] == 1
    assert found["others_called_triggers/layer_0"] == 0
    assert found["dormant_sink_smallest/layer_0"] > 0.99


def test_the_view_has_every_probe(run):
    folder, inputs, _ = run
    rows = [{"seed": 0, "metrics": {"x": 1.0}, "run": folder.name}]
    variant = Variant("plain", "plain", CONFIG)
    result = Result("plain", variant, rows, paper={}, costs={}, folder=folder.parent)
    view = views.training_view(result, inputs.task, models.layer_curves(2, {"sink_attention": "sink"}))
    assert [frame.step for frame in view.frames] == [0, 1, 4]
    assert view.tokens[0] == "<s>"
    assert not view.is_trigger[0]
    assert len(view.tokens) == 12
    np.testing.assert_array_equal(view.frames[1].attention, probes(run)[1]["attention"])
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "sink_attention" in line]
    assert list(view.curves["sink, layer 2"]) == [line["sink_attention/layer_1"] for line in lines]
    assert "plain" in render_training_view([view])


@pytest.mark.slow
def test_a_resumed_run_has_the_same_probes(run, tmp_path):
    folder, inputs, _ = run

    class Stop(Exception):
        pass

    def stop(step, loss):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        train(CONFIG, inputs, tmp_path, on_step=stop)
    (tmp_path / "probes" / "step_00000004.npz").unlink()
    train(CONFIG, inputs, tmp_path)
    again = {path.name: dict(np.load(path)) for path in (tmp_path / "probes").iterdir()}
    for step, arrays in probes(run).items():
        found = again[f"step_{step:08d}.npz"]
        if step == 4:  # the parameters of the probe before are gone, so that its own step is what grew
            assert found["since"] == 3
            part = "growth/layers_1/mlp/output/kernel"
            assert 0 < abs(found[part][1]) < abs(arrays[part][1])
            arrays, found = (
                {k: x for k, x in of.items() if k[:6] not in ("growth", "since")} for of in (arrays, found)
            )
        assert_trees_close(arrays, found, rtol=0, atol=0)
    sink = [
        [
            (line["step"], line["sink_attention"])
            for line in read_metrics(of / "metrics.jsonl")
            if "sink_attention" in line
        ]
        for of in (folder, tmp_path)
    ]
    assert sink[0] == sink[1]


def test_details_that_make_no_sense_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="without probes"):
        replace(CONFIG, {"train.probe_steps": ()})
    with pytest.raises(UserError, match="one device"):
        replace(CONFIG, {"mesh.data": 2})
    with pytest.raises(UserError, match="at least 0"):
        replace(CONFIG, {"train.probe_steps": (3, -1)})
    rows = np.arange(26, dtype=np.int32).reshape(2, 13)
    with pytest.raises(UserError, match="different ones"):
        train(CONFIG, run[1]._replace(evaluation=rows), tmp_path)


def test_the_step_at_half_of_the_change_is_that_of_curves_that_rise_and_fall():
    assert half_step([0, 1, 5, 7], [0.0, 0.4, 0.5, 1.0]) == 5
    assert half_step([0, 1, 5, 7], [4.0, 1.9, 2.0, 0.0]) == 1


# One definition for all models.


def test_the_aligned_table_is_that_of_planted_weights(run):
    """A model whose blocks are known: a sink in block 2, drained there; the MLP of block 1 makes the peak."""
    seen = {
        "first_weight": np.array([[0.1, 0.3], [0.9, 0.7]]),
        "gap": np.array([[0.0, 0.0], [5.0, 7.0]]),
        "values": np.array([[4.0, 4.0], [1.0, 8.0]]),
        "residuals": np.array([[30.0, 10.0], [20.0, 10.0]]),
        "first_norms": np.array([[10.0, 14.0, 30.0], [30.0, 28.0, 20.0]]),
    }
    found = aligned.summarize(seen)
    assert found == pytest.approx({"sink_layer": 1, "first_weight": 0.8, "gap": 6, "drain": 0.125, "peak": 3,
                                   "made_by": 1, "made_by_mlp": 0.8})  # fmt: skip

    workdir, inputs, _ = run
    measured = aligned.ALIGNED.measure(load(workdir), inputs, lambda part: None).metrics
    loaded = load(workdir)
    tokens = inputs.evaluation[: aligned.ROWS, :-1]
    apply = jax.jit(functools.partial(loaded.model.apply, observe=lambda taps: taps._asdict()))
    taps = apply({"params": loaded.params}, tokens)[1]
    weights, logits = (
        np.asarray(taps[f"attention_{name}"], float) for name in ("weights", "logits")
    )  # [L, B, N, T, S]
    on_first = weights[:, :, :, 1:, 0].mean(axis=(1, 2, 3))
    layer = int(measured["sink_layer"])
    assert layer == np.argmax(on_first)
    assert measured["first_weight"] == pytest.approx(on_first[layer], rel=1e-5)
    gaps = [logits[layer, :, :, t, 0] - logits[layer, :, :, t, 1:t].mean(-1) for t in range(2, tokens.shape[1])]
    assert measured["gap"] == pytest.approx(np.mean(gaps), rel=1e-4)
    norms = np.linalg.norm(np.asarray(taps["residual"], float), axis=-1)
    assert measured["peak"] == pytest.approx(
        (norms[:, :, 0].mean(1) / norms[:, :, 1:].mean(axis=(1, 2))).max(), rel=1e-4
    )
    assert 0 < measured["spread_first"] < 10
    assert 0 < measured["spread_rest"] < 10
