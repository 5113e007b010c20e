import dataclasses
import functools
import json
import math
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from scipy.special import log_softmax
from test_analysis import LANGUAGE_MODEL_KEYS
from thinned import quick_and_slow
from tiny_run import TINY, assert_trees_close, bits, blank_state, by_path, drawn_params, inputs, lines, loaded, rows

from orthojax import quant
from orthojax import train as training
from orthojax.config import OptimConfig, RotationConfig, replace
from orthojax.errors import UserError
from orthojax.model import Transformer, parameter_shapes, stack_layers, unstack_layers
from orthojax.ops import cross_entropy_nats
from orthojax.optim import RotatedAxes, Rotation, muon_orthoadam, rotate, unrotate
from orthojax.train import build, evaluate, init_state, learning_rate_schedule, make_rotation, train
from orthojax.train.estimates import opening
from orthojax.train.optimizer import decay_mask, rotated_axes, shared_basis
from orthojax.train.step import loss_sum_nats

SGD = {"optim.optimizer": "sgd", "optim.learning_rate": 0.1, "train.steps": 10, "train.checkpoint_every_steps": 100}
CONFIG = replace(TINY, SGD)
# A model that has every kind of parameter.
RICH = dataclasses.replace(
    CONFIG.model, norm="layernorm", use_bias=True, normalizer="learned_sink", mlp="swiglu", gated_attention=True,
    tie_embeddings=False, embedding_projection=True,
)  # fmt: skip


def optimizer_of(config, steps):
    return training.make_optimizer(config, schedule=learning_rate_schedule(config, steps))


@functools.cache
def forward(model):
    return jax.jit(lambda params, tokens: Transformer(model).apply({"params": params}, tokens)[0])


@functools.cache
def initial(config):
    return jax.tree.map(np.array, init_state(config))


def fresh(config):
    return jax.tree.map(jnp.array, initial(config))


def drawn(config):
    """A state before the first step of SGD, with `drawn_params`."""
    return blank_state(config)._replace(params=drawn_params(config.model))


train_step = functools.cache(training.make_train_step)


def numpy_losses(logits, targets):
    return -np.take_along_axis(log_softmax(np.float64(logits), -1), targets[..., None], -1)[..., 0]


def test_one_step_is_loss_and_update_by_hand():
    config = replace(CONFIG, {"optim.clip_norm": 0.01})
    tokens, before = rows(0), drawn_params(config.model)

    def independent_loss(params):
        log_probs = jax.nn.log_softmax(forward(config.model)(params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))

    expected_grads = jax.jit(jax.grad(independent_loss))(before)
    given = drawn(config)
    state, metrics = train_step(config)(given, tokens)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))  # donated

    losses = numpy_losses(forward(config.model)(before, tokens[:, :-1]), tokens[:, 1:])
    assert int(metrics.target_tokens) == losses.size
    assert float(metrics.loss_sum_nats) == pytest.approx(losses.sum(), rel=1e-5)
    norm = math.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(expected_grads)))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-4)
    assert norm > 0.1
    expected = jax.tree.map(lambda p, g: p - 0.1 * 0.01 / norm * g, before, expected_grads)
    assert_trees_close(state.params, expected, rtol=1e-5, atol=1e-7)
    assert int(state.step) == 1


PENALIZED = replace(CONFIG, {"train.activation_penalty": 0.3, "optim.clip_norm": None, "model.num_layers": 2})


def test_no_penalty_costs_nothing():
    tokens, params, model = rows(0), drawn_params(CONFIG.model), Transformer(CONFIG.model)

    def plain(params):
        logits, _ = model.apply({"params": params}, tokens[:, :-1])
        return jnp.sum(cross_entropy_nats(logits, tokens[:, 1:])), 32

    def flops(loss):
        return jax.jit(loss).lower(params).compile().cost_analysis()["flops"]

    without, penalized = (flops(lambda p, by=by: loss_sum_nats(model, p, tokens, penalty=by)) for by in (0.0, 1.0))
    assert abs(without - flops(plain)) < 100  # which targets count, as before
    assert penalized - without > 3 * 4 * 8 * 16  # of [4, 8, 16] in one layer


@pytest.mark.parametrize(
    "changes", [{}, {"train.accumulation_steps": 2}, {"model.scan_layers": True}, {"model.remat": True}], ids=str
)
def test_a_step_descends_the_loss_and_the_penalty_together(changes):
    config = replace(PENALIZED, changes)
    tokens, before = rows(0), drawn_params(PENALIZED.model, std=0.5)

    def objective(params):
        logits, stream = Transformer(PENALIZED.model).apply(
            {"params": params}, tokens[:, :-1], observe=lambda taps: taps.residual
        )
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        penalty = 0.3 * jnp.mean(jnp.abs(stream / 3.000001) ** 4)
        return loss + penalty, (loss, penalty)

    (_, (loss, penalty)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(before)
    if not changes:
        chunks = jax.jit(lambda p: loss_sum_nats(Transformer(PENALIZED.model), p, tokens, 3, penalty=0.3))(before)
        np.testing.assert_allclose(np.divide(chunks, 32), [loss, 1.0, penalty], rtol=1e-5)  # of 32 targets
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)
    given = stack_layers(before) if config.model.scan_layers else before
    state, metrics = training.make_train_step(config)(
        blank_state(config)._replace(params=jax.tree.map(jnp.array, given)), tokens
    )
    after = unstack_layers(state.params) if config.model.scan_layers else state.params
    assert_trees_close(after, expected, rtol=1e-4, atol=1e-5)
    assert float(metrics.loss_sum_nats / metrics.target_tokens) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics.activation_penalty) == pytest.approx(float(penalty), rel=1e-5)
    assert float(penalty) > 1e-3


PREVENTIONS = {
    "gates": {"model.gated_attention": "elementwise", "model.normalizer": "softpick",
              "model.embedding_projection": True},
    "soft_caps": {"model.attention_soft_cap": 5.0, "model.final_soft_cap": 5.0, "model.block": "sandwich_norm"},
    "gpt_oss": {"model.mlp": "experts", "model.experts.mlp": "swiglu_clamped", "model.experts.use_bias": True,
                "model.experts.normalize": True, "model.use_bias": "attention", "model.normalizer": "learned_sink"},
}  # fmt: skip


@pytest.mark.parametrize("name", PREVENTIONS)
def test_a_few_steps_with_a_prevention_lower_the_loss(name):
    config = replace(TINY, PREVENTIONS[name])
    state, losses = init_state(config), []
    for _ in range(12):
        state, metrics = train_step(config)(state, rows(0))
        losses.append(float(metrics.loss_sum_nats / metrics.target_tokens))
    assert losses[0] == pytest.approx(math.log(32), abs=0.1)
    assert losses[-1] < losses[0] - 0.3


def test_seeds_share_programs_and_decide_initial_parameters():
    first = initial(CONFIG).params
    same = initial(replace(CONFIG, {"optim.momentum": 0.5, "data.seed": 3, "data.sequence_length": 4})).params
    other = initial(replace(CONFIG, {"train.seed": 1})).params
    assert bits(first) == bits(same)
    assert not np.array_equal(by_path(first)["token_embedding/embedding"], by_path(other)["token_embedding/embedding"])
    # Nor does what they log, read, validate and keep make another program.
    changes = {"train.seed": 1, "data.seed": 1, "data.bos": True}
    changes |= {"train.eval_every_steps": 5, "train.keep_checkpoints": 1}
    changes |= {"train.log_every_steps": 3, "train.probe_every_steps": 7, "train.checkpoint_every_steps": 50}
    assert build(replace(CONFIG, changes)) is build(CONFIG)
    others = {"model.norm_eps": 1e-3, "optim.b1": 0.5, "train.steps": 11, "train.accumulation_steps": 2}
    assert all(build(replace(CONFIG, {path: value})) is not build(CONFIG) for path, value in others.items())


def test_options_of_the_compiler_are_those_of_the_step():
    config = replace(
        TINY, {"train.compiler_options": ("xla_backend_optimization_level=0", "xla_cpu_enable_fast_math=true")}
    )
    built, plain = build(config), build(TINY)
    assert built.step is not plain.step
    state, tokens = init_state(config), jnp.asarray(rows(0, config.train.batch_size))
    _, metrics = built.step(state, tokens)
    _, expected = plain.step(init_state(TINY), tokens)
    np.testing.assert_allclose(metrics.loss_sum_nats, expected.loss_sum_nats, rtol=1e-5)
    for option, why in {
        "xla_no_such_option=1": "No such compile option",
        "xla_cpu_enable_fast_math": "not a valid bool",
    }.items():
        with pytest.raises(UserError, match=rf"train.compiler_options: '{option}.*{why}"):
            build(replace(TINY, {"train.compiler_options": (option,)}))


def test_every_seed_has_bases_of_its_own():
    def update(changes):
        config = replace(CONFIG, {"optim.optimizer": "orthoadam", "optim.warmup_steps": 0} | changes)
        optimizer, params = build(config).optimizer, initial(CONFIG).params
        gradient = jax.tree.map(lambda x: 1.0 + x, params)
        first = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])
        updates = first(gradient, params)
        return np.asarray(updates["layers_0"]["mlp"]["output"]["kernel"])

    first = update({})
    assert np.abs(update({"train.seed": 1}) - first).max() > 1e-3
    np.testing.assert_array_equal(update({"train.seed": 1, "optim.rotation.seed": 0}), first)
    np.testing.assert_array_equal(update({"optim.rotation.seed": 1}), update({"train.seed": 1}))


@pytest.mark.parametrize("k", [0, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_targets_that_a_relaxed_mask_shows_are_uncounted(k):
    config = replace(CONFIG, {"model.relaxed_causal_tokens": k})
    model, tokens, params = Transformer(config.model), rows(0), initial(CONFIG).params
    logits = forward(config.model)(params, tokens[:, :-1])
    # The target of position t is token t + 1; tokens 0 .. k - 1 are visible to each other.
    counted = [t for t in range(8) if not t + 1 <= k - 1]
    total, count = jax.jit(lambda p: loss_sum_nats(model, p, tokens))(params)
    assert int(count) == 4 * len(counted)
    assert float(total) == pytest.approx(numpy_losses(logits, tokens[:, 1:])[:, counted].sum(), rel=1e-5)


def test_learning_rate_warms_up_then_falls():
    config = OptimConfig(learning_rate=2e-3, warmup_steps=4, final_learning_rate_fraction=0.1)
    rates = [float(learning_rate_schedule(config, steps=12)(t)) for t in (0, 1, 4, 8, 12, 50)]
    np.testing.assert_allclose(rates, 2e-3 * np.array([0.0, 0.25, 1.0, 0.1 + 0.9 * 0.5, 0.1, 0.1]), rtol=1e-5)


def test_weight_decay_acts_on_kernels_and_embeddings_only():
    mask = by_path(decay_mask(parameter_shapes(RICH)))
    assert {path.rpartition("/")[2] for path, decays in mask.items() if decays} == {"kernel", "embedding"}
    assert {path.rpartition("/")[2] for path, decays in mask.items() if not decays} == {"scale", "bias", "sink"}


TREE = {
    "layers_0": {"mlp": {"input": {"kernel": (4, 8), "bias": (8,)}}, "mlp_norm": {"scale": (4,)}},
    "token_embedding": {"embedding": (6, 4)},
}
MASK = jax.tree.map(lambda shape: len(shape) == 2, TREE, is_leaf=lambda x: isinstance(x, tuple))  # what decays
ADAM, ROTATION = optax.scale_by_adam(0.8, 0.95, 1e-6), make_rotation(RotationConfig(seed=0))


def lamb(config):
    """An optimizer that a config names."""
    return optax.chain(optax.scale_by_adam(config.b1, config.b2, config.eps), optax.scale_by_trust_ratio())


# Fields of the config, the same chain by hand, and the path of a moment in the state.
OPTIMIZERS = {
    "adam": ({}, [ADAM], "mu"),
    "adamw": ({"optimizer": "adam", "weight_decay": 0.1}, [ADAM, optax.add_decayed_weights(0.1, MASK)], "mu"),
    "orthoadam": ({}, [rotate(ROTATION), ADAM, unrotate(ROTATION)], "inner/mu"),
    "sgd": ({}, [], None),
    "momentum": ({"optimizer": "sgd", "momentum": 0.7}, [optax.trace(0.7)], "trace"),
    "lion": ({}, [optax.scale_by_lion(0.8, 0.95)], None),
    "rmsprop": ({}, [optax.scale_by_rms(0.95, 1e-6, eps_in_sqrt=False, bias_correction=True)], None),
    "imported": ({"optimizer": "test_train:lamb"}, [ADAM, optax.scale_by_trust_ratio()], None),
    "rotated_lion": ({"optimizer": "lion", "rotated": True},
                     [rotate(ROTATION), optax.scale_by_lion(0.8, 0.95), unrotate(ROTATION)], "inner/mu"),
}  # fmt: skip


def random_tree(seed, shapes=TREE):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


@functools.partial(jax.jit, static_argnums=0)
def three_steps(optimizer, params):
    state = optimizer.init(params)
    for seed in range(3):
        updates, state = optimizer.update(random_tree(seed + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


# Of optimizers that others contain.
CONTAINED = ("adam", "momentum", "lion")


@pytest.mark.parametrize("name", quick_and_slow(OPTIMIZERS, CONTAINED))
def test_three_steps_equal_a_chain_built_by_hand(name):
    changes, scalings, moment = OPTIMIZERS[name]
    common = {"optimizer": name, "learning_rate": 0.01, "warmup_steps": 2, "b1": 0.8, "b2": 0.95, "eps": 1e-6}
    config = OptimConfig(**(common | changes), clip_norm=1.0, rotation=RotationConfig(seed=0))
    rate = optax.scale_by_schedule(lambda t: -learning_rate_schedule(config, 10)(t))
    by_hand = optax.chain(optax.clip_by_global_norm(1.0), *scalings, rate)
    params, optimizer = random_tree(0), optimizer_of(config, 10)
    got = three_steps(optimizer, params)
    assert_trees_close(got, three_steps(by_hand, params), rtol=1e-6, atol=1e-7)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True))
    # The state has plain names.
    state = optimizer.init(params)
    decay = ["weight_decay"] if config.weight_decay else []
    assert list(state) == ["clip", config.optimizer.rpartition(":")[2], *decay, "learning_rate"]
    assert moment is None or f"{config.optimizer}/{moment}/layers_0/mlp/input/kernel" in by_path(state)


def test_momentum_is_the_optimizers_own_unless_it_is_set():
    found = {name: OptimConfig(optimizer=name).momentum_or_default for name in ("muon", "sgd", "adam")}
    assert found == {"muon": 0.95, "sgd": 0.0, "adam": None}
    assert OptimConfig(optimizer="muon", momentum=0.0).momentum_or_default == 0.0
    assert OptimConfig(optimizer="adam", momentum=0.0) == OptimConfig(optimizer="adam")  # as configs of 0.1.0 say
    said = opening(replace(CONFIG, {"optim.optimizer": "muon", "optim.weight_decay": 0.25}))
    assert any("muon, momentum 0.95, learning rate" in line and "weight decay 0.25" in line for line in said)


@pytest.mark.parametrize("of_tables", [None, "muon", "adam", "orthoadam"])
def test_muon_of_a_run_is_the_library_s(of_tables):
    """By our own names: each layer of stacked kernels is one for itself; stacked biases are vectors."""
    shapes = {"layers": {"mlp": {"input": {"kernel": (3, 4, 8), "bias": (3, 8)}}}, "head": {"kernel": (4, 6)}}
    shapes |= {"position_embedding": {"embedding": (3, 4)}} | TREE
    options = {"momentum": 0.7, "b1": 0.8, "b2": 0.95, "eps": 1e-6}
    config = OptimConfig(
        optimizer="muon", learning_rate=0.01, clip_norm=None, warmup_steps=0, muon_embeddings=of_tables,
        rotation=RotationConfig(seed=0), **options,
    )  # fmt: skip

    @functools.partial(jax.jit, static_argnums=0)
    def updates(optimizer, seen):
        state = optimizer.init(seen[0])
        for gradient in seen:
            found, state = optimizer.update(gradient, state, seen[0])
        return found

    rule = learning_rate_schedule(config, 10)
    library = muon_orthoadam(rule, **options, embeddings=of_tables, rotation=Rotation(axes=4))
    seen = [random_tree(seed, shapes) for seed in range(3)]
    assert_trees_close(updates(optimizer_of(config, 10), seen), updates(library, seen), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-20, 0.0])
def test_muon_is_blind_to_a_huge_gradient_beside(size):
    config = OptimConfig(optimizer="muon", momentum=0.7, learning_rate=1.0, warmup_steps=0, clip_norm=1.0)
    kernels = {name: jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32) for name in "ab"}
    gradients = {name: {"kernel": kernels[name] * {"a": 1e8, "b": size}[name]} for name in "ab"}
    optimizer = optimizer_of(config, 10)
    found = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g)[0])(gradients)
    a, b = (np.asarray(found[name]["kernel"]) for name in "ab")
    np.testing.assert_allclose(b, a if size > 1e-20 else 0.0, rtol=0, atol=1e-3)  # 1e-29 after clipping: nothing
    assert np.sqrt(np.mean(a**2)) == pytest.approx(0.2, rel=0.3)


# The rotation of our own parameters. Axes are counted from the end; None: left alone.

READER = {"output": (-1,), "input": (-2,), "both": (-2, -1), "d_model": (-2,), "writers": None, "none": None}
WRITER = {"output": (-1,), "input": (-2,), "both": (-2, -1), "d_model": (-1,), "writers": (-1,), "none": None}
EMBEDDING = dict.fromkeys(READER, (-1,))
HEAD = dict.fromkeys(READER, (-2,)) | {"writers": None}
ALONE = dict.fromkeys(READER)
IN_A_LAYER = {
    **{f"attention/{name}/kernel": READER for name in ("query", "key", "value", "gate")},
    **{f"mlp/{name}/kernel": READER for name in ("input", "gate")},
    **{f"{name}/output/kernel": WRITER for name in ("attention", "mlp")},
    **{f"attention/{name}/bias": ALONE for name in ("query", "key", "value", "gate", "output")},
    **{f"mlp/{name}/bias": ALONE for name in ("input", "gate", "output")},
    **{f"{norm}/{name}": ALONE for norm in ("attention_norm", "mlp_norm") for name in ("scale", "bias")},
    "attention/sink": ALONE,
}
OUTSIDE = {f"{name}_embedding/embedding": EMBEDDING for name in ("token", "position")} | {"head/kernel": HEAD}
OUTSIDE |= {"embedding_output/kernel": WRITER, "head_input/kernel": READER}
OUTSIDE |= {f"final_norm/{name}": ALONE for name in ("scale", "bias")}


@pytest.mark.parametrize("axes", READER)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("embeddings", [True, False])
def test_which_axes_of_which_parameter_are_rotated(scan, axes, embeddings):
    rule = rotated_axes(RotationConfig(axes=axes, embeddings=embeddings))
    shapes = by_path(parameter_shapes(dataclasses.replace(RICH, num_layers=2, scan_layers=scan)))
    layers = ["layers"] if scan else ["layers_0", "layers_1"]
    expected = OUTSIDE | {f"{layer}/{path}": what for layer in layers for path, what in IN_A_LAYER.items()}
    assert shapes.keys() == expected.keys()
    for path, shape in shapes.items():
        chosen = expected[path][axes]
        if not embeddings and (path.endswith("embedding") or path == "head/kernel"):
            chosen = None
        stacked = (0,) if scan and path.startswith("layers/") else ()
        wanted = RotatedAxes(tuple((axis % shape.ndim,) for axis in chosen), stacked) if chosen else None
        assert rule(path, shape) == wanted, path


TWO_LAYERS = replace(CONFIG, {"model.num_layers": 2})


@pytest.mark.slow
def test_one_shared_rotation_is_adam_in_its_basis():
    shared = {"optim.optimizer": "orthoadam", "optim.rotation.axes": "d_model", "optim.rotation.scope": "tree"}
    config = replace(CONFIG, {**shared, "optim.learning_rate": 0.01, "optim.rotation.seed": 3})
    basis = np.asarray(shared_basis(config.optim, 16))
    np.testing.assert_allclose(basis @ basis.T, np.eye(16), atol=1e-6)
    rotation = rotate(make_rotation(config.optim.rotation))
    adam = replace(config, {"optim.optimizer": "adam"})
    assert shared_basis(adam.optim, 16) is None
    assert shared_basis(replace(config, {"optim.rotation.scope": "layer"}).optim, 16) is None

    state, other = fresh(config), fresh(adam)
    other = other._replace(params=jax.tree.map(jnp.copy, rotation.update(state.params, rotation.init(state.params))[0]))
    for step in range(3):
        state, _ = train_step(config)(state, rows(step))
        other, _ = train_step(adam)(other, rows(step))
    metrics, other_metrics = (evaluate(loaded(c, s.params), inputs()) for c, s in ((config, state), (adam, other)))
    # Two runs in float32 whose gradients near zero Adam amplifies.
    for name in ("kurtosis_first", "kurtosis_rest", "max_abs_rest"):
        assert metrics[f"rotated_{name}"] == pytest.approx(other_metrics[name], rel=0.02)
        assert abs(metrics[name] / other_metrics[name] - 1) > 0.04
    assert not [name for name in other_metrics if name.startswith("rotated_")]


@pytest.fixture(scope="module")
def evaluated():
    params = drawn_params(TWO_LAYERS.model)
    parts = []
    metrics = evaluate(loaded(TWO_LAYERS, params), inputs(), on_progress=parts.append)
    assert parts == ["statistics", *quant.SETTINGS]
    return params, metrics


def test_a_setting_that_does_not_fit_is_refused():
    model = loaded(TWO_LAYERS, drawn_params(TWO_LAYERS.model))
    settings = {name: quant.setting_named(name) for name in ("w4a8", "w4a8_group64")}
    assert list(training.settings_that_do_not_fit(model, settings)) == ["w4a8_group64"]
    with pytest.raises(UserError, match="w4a8_group64"):
        evaluate(model, inputs(), settings=settings)


def test_further_settings_are_all_that_they_say():
    model = loaded(CONFIG, drawn_params(CONFIG.model, 0.5))
    settings = {name: quant.setting_named(name) for name in ("w4a4", "w4a4kv4")}  # they differ in keys and values
    found = training.rounded_perplexities(model, inputs(), settings)
    assert list(found) == [f"perplexity_{name}" for name in settings]
    assert len(set(found.values())) == 2
    assert all(map(math.isfinite, found.values()))


def test_fused_attention_of_another_platform_is_refused():
    config = replace(TINY, {"model.attention_implementation": "cudnn", "model.dtype": "bfloat16"})
    with pytest.raises(UserError, match="attention_implementation='cudnn'"):
        opening(config)


def test_perplexity_exp_of_mean_loss_over_all_targets(evaluated):
    params, metrics = evaluated
    held_out = inputs().evaluation
    losses = [numpy_losses(forward(TWO_LAYERS.model)(params, row[None, :-1]), row[None, 1:]) for row in held_out]
    loss = np.mean(losses)
    assert metrics["loss_nats"] == pytest.approx(loss, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(loss * 0.75, rel=1e-6)


def test_text_model_has_every_metric_by_layer(evaluated):
    _, metrics = evaluated
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.keys() >= {f"{name}{of}" for name in LANGUAGE_MODEL_KEYS for of in ("", "/layer_0", "/layer_1")}
    perplexities = [value for key, value in metrics.items() if key.startswith("perplexity")]
    assert len(perplexities) == len(set(perplexities)) == 1 + len(quant.SETTINGS)


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_quantised_head_is_definition_tied_or_not(tied):
    config = replace(CONFIG, {"model.tie_embeddings": tied})
    params = drawn_params(config.model, 0.3)
    setting = quant.QuantizationSetting(4, "absmax", "output_channel", inputs="token")
    metrics = evaluate(loaded(config, params), inputs(), settings={"w4": setting}, quantize_head=True)
    table = params["token_embedding"]["embedding"].T if tied else params["head"]["kernel"]
    tokens, targets = inputs().evaluation[:, :-1], inputs().evaluation[:, 1:]
    model = Transformer(config.model, linear=quant.quantized_linear(setting))
    x = np.asarray(jax.jit(functools.partial(model.apply, head=False))({"params": params}, tokens)[0], np.float64)
    w = np.asarray(table, np.float64)
    for suffix in ("", "_with_head"):
        if suffix:  # one scale for each token of x and each column of w, 7 steps to either side
            x, w = (np.round(a / s) * s for a, s in ((x, abs(x).max(-1, keepdims=True) / 7), (w, abs(w).max(0) / 7)))
        perplexity = math.exp(np.mean(numpy_losses(x @ w, targets)))
        assert metrics[f"perplexity_w4{suffix}"] == pytest.approx(perplexity, rel=1e-5)
    assert abs(metrics["perplexity_w4_with_head"] / metrics["perplexity_w4"] - 1) > 1e-4
    assert metrics["perplexity_w4"] != metrics["perplexity"]


def test_a_task_is_drawn_by_the_step_itself(tmp_path):
    """On a mesh, and resumed; runs that differ in their seeds share the program."""
    (tmp_path / "text").write_text("the cat sat on the mat. " * 20)
    task = {"data.kind": "bigram_backcopy", "data.paths": (str(tmp_path / "text"),), "data.bos_tokens": 2}
    task |= {"data.delimiter": True, "data.other_rule_probability": 0.5, "data.seed": 2**32 - 1}
    config = replace(CONFIG, task | {"train.steps": 4, "train.checkpoint_every_steps": 2})
    data = training.open_inputs(config, tmp_path)
    assert len(data.batch(0)) == 4
    assert not np.array_equal(data.batch(0), data.evaluation[:4])
    expected = train(config, data._replace(task=None), tmp_path / "given")
    drawn = (train(replace(config, {"train.steps_per_dispatch": n}), data, tmp_path / f"{n}") for n in (1, 2))
    assert bits(next(drawn)) == bits(next(drawn))
    assert lines(tmp_path / "1") == lines(tmp_path / "2")
    on_mesh = replace(config, {"mesh.data": 2, "mesh.tensor": 2})
    assert_trees_close(train(on_mesh, data, tmp_path / "drawn").params, expected.params, rtol=1e-5, atol=1e-6)
    tiny_run.assert_lines_close(lines(tmp_path / "drawn"), lines(tmp_path / "given"))
    shutil.rmtree(tmp_path / "drawn" / "checkpoints" / "4")
    seen = []
    train(on_mesh, data, tmp_path / "drawn", on_step=lambda step, loss: seen.append(step))
    assert seen == [3, 4]
    tiny_run.assert_lines_close(lines(tmp_path / "drawn"), lines(tmp_path / "given"))
    other = replace(config, {"data.seed": 1, "train.seed": 1})
    assert build(other, training.open_inputs(other, tmp_path).task) is build(config, data.task)


@pytest.mark.parametrize("poisoned", [2, 0])
def test_a_loss_that_is_not_finite_ends_run(tmp_path, poisoned):
    config = replace(CONFIG, {"train.checkpoint_every_steps": 2})
    with pytest.raises(training.DivergedError, match=f"loss .* at step {poisoned + 1}"):
        train(config, inputs((poisoned,)), tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, poisoned + 1))
    assert (tmp_path / "checkpoints/2").is_dir() == (poisoned == 2)
    # The data being repaired, it resumes from there.
    assert bits(train(config, inputs(), tmp_path)) == bits(train(config, inputs(), tmp_path / "whole"))


def test_metrics_are_those_of_their_own_step(tmp_path):
    config = replace(CONFIG, {"optim.warmup_steps": 4, "train.steps": 6, "train.eval_every_steps": 3})
    seen = []
    state = train(config, inputs(), tmp_path, on_step=lambda step, loss: seen.append((step, loss)))
    steps = lines(tmp_path, "loss_nats")
    assert [line["step"] for line in steps] == [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [line["loss_nats"] for line in steps] == [loss for _, loss in seen]
    np.testing.assert_allclose([line["learning_rate"] for line in steps], [0, 0.025, 0.05, 0.075, 0.1, 0.1], rtol=1e-6)
    assert [line["tokens"] for line in steps] == [32 * step for step in range(1, 7)]
    validation = {line["step"]: line["validation_loss_nats"] for line in lines(tmp_path, "validation_loss_nats")}
    assert validation.keys() == {3, 6}
    held_out = inputs().evaluation
    losses = numpy_losses(forward(config.model)(state.params, held_out[:, :-1]), held_out[:, 1:])
    assert validation[6] == pytest.approx(losses.mean(), rel=1e-6)
    assert int(state.step) == 6


@pytest.mark.parametrize(("changes", "what", "step"), [
    # The first update has learning rate 0, the second is absurd.
    pytest.param({}, "loss|gradient", 3, marks=pytest.mark.slow),
    ({"train.eval_every_steps": 1, "model.norm": "none"}, "validation loss", 2),
    ({"train.checkpoint_every_steps": 1}, "parameters", 2),
])  # fmt: skip
def test_a_diverging_run_keeps_its_last_good_checkpoint(tmp_path, changes, what, step):
    start = {"optim.learning_rate": 1e30, "optim.warmup_steps": 2}
    config = replace(CONFIG, start | {"train.checkpoint_every_steps": 100} | changes)
    saved = "what was saved before is kept"  # maybe nothing
    with pytest.raises(training.DivergedError, match=rf"({what}).* at step {step}.*\n.*{saved}"):
        train(config, inputs(), tmp_path)
    for line in lines(tmp_path):
        assert line["step"] <= step
        if "learning_rate" in line:  # the writer leaves out what is not finite
            assert math.isfinite(line["loss_nats"])
    if config.train.checkpoint_every_steps == 1:
        folder = training.find_checkpoint(tmp_path)
        assert folder.name == "1"
        assert_trees_close(training.read_params(folder), initial(config).params, rtol=0)


def test_a_second_run_kept_off_folder_of_first(tmp_path):
    """It would take the checkpoint that is being written for one that was left unfinished."""
    refused = []

    def second(step, loss):
        with pytest.raises(UserError, match=str(tmp_path)) as error:
            train(replace(CONFIG, {"train.log_every_steps": 3}), inputs(), tmp_path)
        refused.append(str(error.value))

    train(CONFIG, inputs(), tmp_path, on_step=second)
    assert len(refused) == 10
    assert json.loads((tmp_path / "config.json").read_text())["train"]["log_every_steps"] == 1
    train(CONFIG, inputs(), tmp_path)  # afterwards it is free


@pytest.mark.parametrize("last", [7, 10])  # on the way, and before the last checkpoint
def test_a_run_whose_folder_is_moved_ends_with_an_error_and_resumes(tmp_path, last):
    config, home, away = replace(CONFIG, {"train.checkpoint_every_steps": 5}), tmp_path / "run", tmp_path / "away"

    def move(step, loss):
        if step == last:
            while not (home / "checkpoints/5").is_dir():  # it is written in the background
                time.sleep(0.01)
            home.rename(away)

    with pytest.raises(UserError, match=r"run was moved or deleted"):
        train(config, inputs(), home, on_step=move)
    assert not (home / "config.json").exists()
    shutil.rmtree(home, ignore_errors=True)  # the last checkpoint may have made it again
    away.rename(home)
    assert training.find_checkpoint(home).name == "5"
    assert bits(train(config, inputs(), home)) == bits(train(config, inputs(), tmp_path / "whole"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()  # permissions do not stop every user
    with pytest.raises(UserError, match=str(tmp_path)):
        train(CONFIG, inputs(), tmp_path)


def test_a_run_logs_loss_and_penalty_separately(tmp_path):
    config = replace(PENALIZED, {"train.steps": 4, "model.num_layers": 1})
    train(config, inputs(), tmp_path / "with")
    assert all(line["activation_penalty"] > 0 for line in lines(tmp_path / "with", "loss_nats"))
    train(replace(config, {"train.activation_penalty": 0.0}), inputs(), tmp_path / "without")
    assert not lines(tmp_path / "without", "activation_penalty")
    first = [lines(tmp_path / name)[0]["loss_nats"] for name in ("with", "without")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


MUON = optax.contrib.muon(
    1.0,
    beta=0.7,
    consistent_rms=0.2,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params
    ),
)


@pytest.mark.parametrize("of_tables", [None, "muon", "adam", "orthoadam"])
def test_muon_leaves_embeddings_and_the_head_to_the_optimizer_that_is_asked_for(of_tables):
    """Each part of the tree is that of its own optimizer alone: `optax.contrib.muon`, Adam, our own chain.

    Each layer of stacked kernels [layers, in, out] is one for itself; vectors [layers, out] have two axes, too.
    """
    stacked = {"layers/mlp/input/kernel": "muon", "layers/mlp/input/bias": "adam"}
    shape = {"layers": {"mlp": {"input": {"kernel": (3, 4, 8), "bias": (3, 8)}}}}
    shape |= {"token_embedding": {"embedding": (6, 4)}, "position_embedding": {"embedding": (3, 4)}}
    shape |= {"layers_0": TREE["layers_0"], "head": {"kernel": (4, 6)}}
    sizes = {3: np.array([1.0, 1e-3, 30.0])}  # of the layers' gradients
    config = OptimConfig(
        optimizer="muon", momentum=0.7, b1=0.8, b2=0.95, eps=1e-6, learning_rate=0.01, clip_norm=None, warmup_steps=0,
        muon_embeddings=of_tables, rotation=RotationConfig(seed=0),
    )  # fmt: skip

    def gradients(seed):
        def draw(shape):
            size = sizes.get(shape[0], np.ones(1)).reshape(-1, *(1,) * (len(shape) - 1))
            return (size * np.random.default_rng([seed, *shape]).normal(size=shape)).astype(np.float32)

        return jax.tree.map(draw, shape, is_leaf=lambda x: isinstance(x, tuple))

    @functools.partial(jax.jit, static_argnums=0)
    def updates(optimizer, seen):
        state = optimizer.init(seen[0])
        for gradient in seen:
            found, state = optimizer.update(gradient, state, seen[0])
        return found

    seen = [gradients(seed) for seed in range(3)]
    rate = optax.scale_by_schedule(lambda t: -learning_rate_schedule(config, 10)(t))
    own = {"adam": ADAM, "muon": optax.chain(MUON, optax.scale(-1.0))}
    own["orthoadam"] = optax.chain(rotate(ROTATION), ADAM, unrotate(ROTATION))
    labels = {path: of_tables or "adam" for path in by_path(seen[0])}
    labels |= {"layers_0/mlp/input/kernel": "muon", "head/kernel": of_tables or "muon"}
    labels |= {"layers_0/mlp/input/bias": "adam", "layers_0/mlp_norm/scale": "adam"} | stacked
    found = by_path(updates(optimizer_of(config, 10), seen))
    for path, name in labels.items():
        leaves = [by_path(gradient)[path] for gradient in seen]
        layers = zip(*leaves, strict=True) if path in stacked else [leaves]
        alone = optax.chain(own[name], rate)
        # Under their own path, which some rules read.
        trees = ([functools.reduce(lambda t, key: {key: t}, path.split("/")[::-1], x) for x in of] for of in layers)
        wanted = [by_path(updates(alone, seen_alone))[path] for seen_alone in trees]
        wanted = np.stack(wanted) if path in stacked else wanted[0]
        tolerances = {"rtol": 1e-4, "atol": 1e-7} if path in stacked else {"rtol": 1e-6, "atol": 1e-8}
        np.testing.assert_allclose(found[path], wanted, **tolerances, err_msg=f"{path} by {name}")


def test_evaluation_does_not_depend_on_the_batch_size(evaluated):
    params, metrics = evaluated
    # The scales of quantisation are taken over a batch.
    smaller = evaluate(loaded(replace(TWO_LAYERS, {"eval.batch_size": 2}), params), inputs(), settings={})
    assert smaller.keys() == {key for key in metrics if not key.startswith("perplexity_")}
    for key, value in smaller.items():
        assert value == pytest.approx(metrics[key], rel=2e-5), key
