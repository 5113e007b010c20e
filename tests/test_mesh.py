"""Training on a mesh of eight fake devices: the numbers of one device, less memory on each, and what travels."""

import dataclasses
import functools
import math
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from refusals import refused
from tiny_run import Stop, assert_trees_close, bits, blank_state, by_path, drawn_params, lines, loaded, stop_at

from orthojax import config as c
from orthojax import train as training
from orthojax.config import Config, DataConfig, MeshConfig, replace
from orthojax.errors import UserError
from orthojax.model import Transformer, gpt2, llama2, parameter_shapes, stack_layers
from orthojax.train import Checkpoints, Inputs, evaluate, init_state, make_mesh, opening, place_rows, train
from orthojax.train import checkpoint as orbax_steps
from orthojax.train.data import batches
from orthojax.train.mesh import parameter_shardings
from orthojax.train.step import jit_train_step

ROWS, LENGTH, VOCAB = 16, 16, 64
SIZE = {"d_model": 32, "num_heads": 4, "num_layers": 2, "d_mlp": 64, "vocab_size": VOCAB, "max_length": LENGTH}
CONFIG = Config(
    model=gpt2("tiny", **SIZE, normalizer="softmax1"),
    optim=c.OptimConfig(optimizer="orthoadam", learning_rate=3e-3, warmup_steps=2, weight_decay=0.1),
    data=DataConfig(sequence_length=LENGTH),
    train=c.TrainConfig(steps=20, batch_size=ROWS, log_every_steps=1, eval_every_steps=0, checkpoint_every_steps=10),
    eval=c.EvalConfig(sequences=ROWS, batch_size=ROWS),
)
LLAMA = dataclasses.replace(CONFIG, model=llama2("tiny", **SIZE, num_kv_heads=2, normalizer="softmax1"))


def on(config, data=1, fsdp=1, tensor=1, **changes):
    return replace(config, {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor} | changes)


def tokens(step):
    """Rows that count up or down by steps of their own: something to learn."""
    rng = np.random.default_rng(step)
    first, by = rng.integers(0, VOCAB, (ROWS, 1)), rng.integers(-2, 3, (ROWS, 1))
    return ((first + by * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)


INPUTS = Inputs(tokens, tokens(999), 0.75, {"source": "test"}, None)


def run(config, steps=20, start=None):
    """(losses, gradient norms, final state) of the first steps."""
    mesh, step, seen = make_mesh(config), training.make_train_step(config), []
    state = init_state(config) if start is None else jax.device_put(start, training.build(config).shardings)
    for i in range(steps):
        state, metrics = step(state, place_rows(mesh, ROWS, lambda a, b, i=i: tokens(i)[a:b]))
        seen.append(metrics)
    assert step._cache_size() == 1
    seen = jax.device_get(seen)
    return np.array([m.loss_sum_nats / m.target_tokens for m in seen]), np.array([m.grad_norm for m in seen]), state


@functools.cache
def on_one_device(config, steps=20):
    losses, norms, state = run(config, steps)
    return losses, norms, jax.device_get(state)


def test_sizes_of_a_mesh():
    assert MeshConfig(2, -1, 2).sizes(8) == (2, 2, 2)
    assert MeshConfig(2, 1, -1).sizes(6) == (2, 1, 3)
    assert MeshConfig(2).sizes(8) == (2, 1, 1)  # the others are left out, which `opening` tells


test_impossible_meshes_are_refused = refused((
    lambda _, make: make(), [
        (lambda: MeshConfig(0), "mesh.data=0"),
        (lambda: MeshConfig(fsdp=-1, tensor=-1), "mesh"),
        (lambda: MeshConfig(4, 4).sizes(8), "16"),
        (lambda: MeshConfig(-1, 1, 3).sizes(8), "3"),
        (lambda: on(CONFIG, 5), "train.batch_size=16"),
        (lambda: on(CONFIG, 4, 2, **{"train.accumulation_steps": 4}), "train.accumulation_steps"),
        (lambda: on(CONFIG, 8, **{"eval.batch_size": 4}), "eval.batch_size=4"),
        (lambda: replace(CONFIG, {"train.accumulation_steps": 0}), "train.accumulation_steps=0"),
        (lambda: make_mesh(on(CONFIG, 16)), "16"),
        (lambda: make_mesh(on(CONFIG, -1, **{"train.batch_size": 12})), "train.batch_size=12"),
        (lambda: init_state(on(CONFIG, 1, 1, 9)), "9"),
    ],
))  # fmt: skip


def test_wasted_devices_are_reported():
    assert make_mesh(CONFIG) is None
    table = init_state(SMALL).params["token_embedding"]["embedding"]
    assert isinstance(table.sharding, jax.sharding.SingleDeviceSharding)
    assert dict(make_mesh(on(CONFIG, 2, -1)).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert "1 of 8" in opening(CONFIG)[-1]
    for config in (on(CONFIG, -1), on(CONFIG, 2, 2, 2), on(LLAMA, 4, 1, 2)):
        assert "devices" in opening(config)[-1]
        assert "8 x cpu" in opening(config)[-1]
    assert "key-value heads 2" in opening(on(LLAMA, 2, 1, 4))[-1]


BOTH = ("tensor", "fsdp")
KERNELS = {
    "attention/query/kernel": P(None, None, BOTH), "attention/key/kernel": P(None, None, BOTH),
    "attention/value/kernel": P(None, None, BOTH), "attention/output/kernel": P(None, BOTH),
    "mlp/input/kernel": P(None, None, BOTH), "mlp/output/kernel": P(None, BOTH),
}  # fmt: skip
WHOLE = {"final_norm/scale": P(), "layers/attention_norm/scale": P(), "layers/mlp_norm/scale": P()}


def specs(tree):
    return {path: leaf.sharding.spec for path, leaf in by_path(tree).items()}


def parameter_specs(config):
    shardings = parameter_shardings(config.model, parameter_shapes(config.model), make_mesh(config))
    return {path: sharding.spec for path, sharding in by_path(shardings).items()}


def test_where_the_parameters_are():
    params = parameter_specs(on(LLAMA, 2, 2, 2))
    kernels = {f"layers/{path}": spec for path, spec in KERNELS.items()}
    assert params == WHOLE | kernels | {
        "layers/mlp/gate/kernel": P(None, None, BOTH),
        "token_embedding/embedding": P(BOTH),
        "head/kernel": P(None, BOTH),
    }
    params = parameter_specs(on(CONFIG, 2, 2, 2, **{"model.scan_layers": False}))  # GPT-2, unrolled
    expected = {f"layers_1/{path}": P(*spec[1:]) for path, spec in KERNELS.items()}
    expected |= {f"layers_1/attention/{name}/bias": P("tensor") for name in ("query", "key", "value")}
    expected |= {"layers_1/mlp/input/bias": P("tensor"), "layers_1/attention/output/bias": P()}
    expected |= {"layers_1/mlp/output/bias": P(), "token_embedding/embedding": P(BOTH)}
    expected |= {"position_embedding/embedding": P("fsdp")}
    assert {path: params[path] for path in expected} == expected
    parts = {"latent": c.LatentConfig(8, d_rotary=4), "experts": c.ExpertsConfig(num_shared=1), "mlp": "experts"}
    latent = llama2("tiny", **SIZE, **parts)
    params = parameter_specs(on(dataclasses.replace(CONFIG, model=latent), 2, 2, 2))
    expected = {f"layers/mlp/{part}/{name}/kernel": KERNELS[f"mlp/{name}/kernel"]
                for part in ("experts", "shared") for name in ("input", "output")}  # fmt: skip
    expected |= {f"layers/attention/{name}/kernel": P(None, None, "fsdp") for name in ("latent", "rotary_key")}
    expected |= {"layers/attention/key/kernel": P(None, None, BOTH), "layers/mlp/router/kernel": P()}
    assert {path: params[path] for path in expected} == expected


def test_undivisible_axes_stay_whole_or_take_another():
    odd = {"model.vocab_size": 65, "model.num_heads": 2, "model.d_model": 36, "model.max_length": 17, "model.d_mlp": 66}
    params = parameter_specs(on(CONFIG, 1, 2, 4, **odd))
    assert params["token_embedding/embedding"] == P(None, "fsdp")  # GPT-2's own vocabulary is odd
    assert params["position_embedding/embedding"] == P(None, "fsdp")
    assert params["layers/attention/query/kernel"] == P(None, None, "fsdp")  # 36 divides by 4, its two heads do not
    assert params["layers/mlp/input/kernel"] == P(None, None, "fsdp")
    params = parameter_specs(on(LLAMA, 1, 2, 4))  # four heads in two groups
    assert params["layers/attention/query/kernel"] == P(None, None, "fsdp")
    params = parameter_specs(on(CONFIG, 1, 5, 1, **{"train.batch_size": 5, "eval.sequences": 5, "eval.batch_size": 5}))
    assert set(params.values()) == {P()}


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.slow), "orthoadam"])
def test_moments_split_over_data_too_and_bases_by_layers(optimizer):
    config = on(LLAMA, 2, 2, 2, **{"optim.optimizer": optimizer, "optim.rotation.kind": "haar"})
    state = init_state(config)
    inner = state.opt_state[optimizer]
    if optimizer == "orthoadam":
        assert specs(inner.basis)["layers/mlp/input/kernel/basis_0"] == P("data")
        assert specs(inner.basis)["token_embedding/embedding/basis_0"] == P()  # one, of a table
        inner = inner.inner
    moments = specs(inner.mu)
    assert moments == specs(inner.nu)
    assert all("data" in str(spec) for spec in moments.values())  # every length here is even
    # One that is whole and, of OrthoAdam, not rotated comes first: here the layers.
    inner = moments["layers/mlp/input/kernel"]
    assert inner == (P(None, "data", BOTH) if optimizer == "adam" else P("data", None, BOTH))
    assert moments["head/kernel"] == (P("data", BOTH) if optimizer == "adam" else P(None, (*BOTH, "data")))
    planned, real = (
        jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), s) for s in (training.state_shapes(config), state)
    )
    assert planned == real


MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2)]
FAMILIES = {"gpt2": CONFIG, "llama2": LLAMA}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", ["adam", "orthoadam"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_device(family, optimizer, mesh):
    config = replace(FAMILIES[family], {"optim.optimizer": optimizer})
    want, norms, _ = on_one_device(config)
    assert want[-1] < want[0] - 0.3  # it learns
    got, got_norms, _ = run(on(config, *mesh))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_norms, norms, rtol=1e-4)


SMALL = replace(CONFIG, {"model.num_layers": 1, "model.scan_layers": False})


def adam(config):
    """An optimizer of one's own."""
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def test_losses_and_parameters_on_three_axes_briefly():
    want, _, final = on_one_device(SMALL, 4)
    got, _, state = run(on(SMALL, 2, 2, 2), 4, start=jax.device_get(init_state(SMALL)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert_trees_close(state.params, final.params, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_gathered_once(tied):
    config = replace(SMALL, {"model.tie_embeddings": tied})
    want, _, _ = on_one_device(config, 4)
    got, _, _ = run(on(config, 1, 4, 2, **{"mesh.gather_table": True}), 4)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"optim.rotation.axes": "both"},
    {"optim.rotation.kind": "haar"},
    {"optim.optimizer": "lion", "optim.rotated": True},
    {"optim.optimizer": "muon"},
    {"optim.optimizer": "muon", "optim.muon_embeddings": "orthoadam", "model.tie_embeddings": False},
    {"optim.optimizer": "test_mesh:adam"},
    {"model.remat": True, "model.normalizer": "learned_sink", "model.gated_attention": True},
    {"model.attention_implementation": "xla_chunked", "model.tie_embeddings": False},
    {"model.normalizer": "softpick", "model.gated_attention": "elementwise", "model.embedding_projection": True},
    {"train.activation_penalty": 0.3, "train.accumulation_steps": 2},
    {"model.dtype": "bfloat16"},
], ids=str)  # fmt: skip
def test_other_optimizers_and_models_on_all_three_axes(changes):
    config = replace(CONFIG, changes)
    want, _, _ = on_one_device(replace(config, {"model.dtype": "float32"}), 6)
    got, _, _ = run(on(config, 2, 2, 2), 6)
    tolerances = {"lion": 5e-5, "bfloat16": 0.03}
    tolerance = next((tolerances[of] for of in changes.values() if of in tolerances), 1e-5)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
def test_accumulated_parts_are_the_whole_batch(mesh):
    """Only even targets count, of which every part has another number."""
    model = Transformer(SMALL.model)

    def even_loss(params, rows):
        log_probs, targets = jax.nn.log_softmax(model.apply({"params": params}, rows[:, :-1])[0]), rows[:, 1:]
        counted = targets % 2 == 0
        return -jnp.sum(jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0] * counted), jnp.sum(counted)

    counts = [np.sum(tokens(0)[i::4, 1:] % 2 == 0) for i in range(4)]
    assert len(set(counts)) > 1
    results = []
    for config, parts in ((SMALL, 1), (on(SMALL, *mesh), 4)):
        run, schedule = training.build(config), training.learning_rate_schedule(config.optim, config.train.steps)
        step = jit_train_step(
            even_loss, run.optimizer, schedule, accumulation_steps=parts, mesh=run.mesh, shardings=run.shardings
        )
        rows = place_rows(run.mesh, ROWS, lambda a, b: tokens(0)[a:b])
        results.append(jax.device_get(step(init_state(config), rows)))
    (state, metrics), (other, others) = results
    assert metrics.target_tokens == others.target_tokens == sum(counts)
    np.testing.assert_allclose(others.loss_sum_nats, metrics.loss_sum_nats, rtol=1e-6)
    np.testing.assert_allclose(others.grad_norm, metrics.grad_norm, rtol=1e-5)
    assert_trees_close(other.opt_state["orthoadam"].inner.mu, state.opt_state["orthoadam"].inner.mu, atol=1e-7)


def compiled(config):
    rows = jax.ShapeDtypeStruct((config.train.batch_size, config.data.sequence_length + 1), np.int32)
    return training.make_train_step(config).lower(training.state_shapes(config), rows).compile()


@pytest.mark.slow
def test_memory_of_each_device_falls():
    """Bytes of arguments, exactly: what is divided by eight and what is not."""
    config = replace(SMALL, {"optim.optimizer": "adam"})
    leaves = jax.tree.leaves(parameter_shapes(config.model))
    tables, vectors = (sum(leaf.size * 4 for leaf in leaves if (leaf.ndim > 1) == many) for many in (True, False))
    fixed = 4 * 3 + 4 * (LENGTH + 1) * ROWS // 8  # three counters and the rows
    fsdp, data = (compiled(on(config, *mesh)).memory_analysis() for mesh in ((1, 8), (8, 1)))
    assert fsdp.argument_size_in_bytes == 3 * tables // 8 + 3 * vectors + fixed
    assert data.argument_size_in_bytes == (tables + vectors) + 2 * (tables + vectors) // 8 + fixed
    for mesh in (fsdp, data):
        assert mesh.alias_size_in_bytes == mesh.argument_size_in_bytes - 4 * (LENGTH + 1) * ROWS // 8  # donated


COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


def travels(program):
    """{kind: the shapes of what its results are on one device}"""
    found = {}
    for result, kind in COLLECTIVE.findall(program.as_text()):
        shapes = {tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", result)}
        found[kind] = found.get(kind, set()) | shapes
    return found


@pytest.mark.slow
def test_kernels_travel_and_activations_stay():
    """A batch of many tokens: whatever has its rows is an activation."""
    config = replace(CONFIG, {"train.batch_size": 64, "model.num_layers": 3, "model.vocab_size": 96, "model.d_mlp": 80})
    shapes = {tuple(leaf.shape[-2:]) for leaf in jax.tree.leaves(parameter_shapes(config.model)) if leaf.ndim > 1}
    program = compiled(on(config, 1, 8))
    found = travels(program)
    assert set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert found["all-gather"] <= shapes  # one layer at a time, never the stack
    assert all(sum(n > 1 for n in shape) < 3 for shape in found["all-reduce"])  # [1, T, d]: learned positions
    # Over tensor, too, the default rotation is along axes that are not split: OrthoAdam communicates what Adam does.
    split = functools.partial(on, config, 1, 4, 2)
    both = [travels(compiled(split(**{"optim.optimizer": name}))) for name in ("adam", "orthoadam")]
    assert both[0] == both[1]
    assert "all-to-all" not in both[0]
    # Of kernels that are rotated along a split axis gradient and update travel, and never a whole axis.
    found = travels(compiled(split(**{"optim.optimizer": "orthoadam", "optim.rotation.axes": "output"})))
    assert found["all-to-all"] == {(3, 32 // 8, 32 // 8), (3, 32 // 8, 80 // 8)}


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_every_device_has_its_rows(mesh):
    reads = []

    def read(start, stop):
        reads.append((start, stop))
        return tokens(0)[start:stop]

    placed = place_rows(make_mesh(on(CONFIG, *mesh)), ROWS, read)
    assert reads == [(0, ROWS)]
    np.testing.assert_array_equal(placed, tokens(0))
    each = ROWS // (mesh[0] * mesh[1])
    for shard in placed.addressable_shards:
        assert shard.data.shape == (each, LENGTH + 1)
        np.testing.assert_array_equal(shard.data, tokens(0)[shard.index])


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_batches_come_in_order_two_ahead(mesh):
    started = []

    def batch(number):
        started.append(number)
        if number == 9:
            raise UserError("the file is gone")
        return tokens(number)

    config = on(CONFIG, *mesh, **{"train.steps_per_dispatch": 1})
    stream = batches(config, INPUTS._replace(batch=batch), make_mesh(config), 3)
    for number in range(3, 9):
        dispatch = next(stream)
        assert (dispatch.steps, int(dispatch.count)) == (range(number + 1, number + 2), 1)
        np.testing.assert_array_equal(dispatch.batches[:, 0], tokens(number))
        time.sleep(0.02)
        assert max(started) <= number + 2 + 1  # two wait, and one may be asked for already
    assert started[:6] == [3, 4, 5, 6, 7, 8]
    with pytest.raises(UserError, match="gone"):
        next(stream)
    assert list(batches(config, INPUTS, make_mesh(config), config.train.steps)) == []
    three = replace(config, {"train.steps_per_dispatch": 3})
    left = batches(three, INPUTS, make_mesh(three), config.train.steps - 5)
    np.testing.assert_array_equal(next(left).batches, np.stack([tokens(config.train.steps - n) for n in (5, 4, 3)], 1))
    last = next(left)
    assert int(last.count) == len(last.steps) == 2
    np.testing.assert_array_equal(last.batches[:, :2], np.stack([tokens(config.train.steps - n) for n in (2, 1)], 1))
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_run_on_a_mesh_begins_with_given_parameters(tmp_path, monkeypatch):
    """Of which no device ever holds all; layers are stacked for it."""
    config = replace(SMALL, {"train.steps": 1, "optim.warmup_steps": 0, "optim.optimizer": "sgd"})
    params = drawn_params(config.model)
    read, largest = orbax_steps._restore_item, []

    def restore(folder, item, like):
        leaves = jax.tree.leaves(read(folder, item, like))
        largest.append(max(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards))
        return read(folder, item, like)

    with Checkpoints(tmp_path / "source/checkpoints", keep=1) as checkpoints:
        checkpoints.save(blank_state(config)._replace(params=params), config, INPUTS.provenance)
    given = {"train.init_from": str(tmp_path / "source"), "optim.learning_rate": 1e-9}
    given |= {"model.scan_layers": True}
    monkeypatch.setattr(orbax_steps, "_restore_item", restore)
    state = train(on(config, 2, 2, 2, **given), INPUTS, tmp_path / "run")
    assert_trees_close(state.params, stack_layers(params), atol=1e-7)
    assert largest == [max(leaf.nbytes for leaf in jax.tree.leaves(params)) // 4]


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(tmp_path):
    config = replace(CONFIG, {"train.eval_every_steps": 10})
    train(config, INPUTS, tmp_path / "one")

    with pytest.raises(Stop):
        train(on(config, 2, 2, 2), INPUTS, tmp_path / "run", on_step=stop_at(12))
    state = train(on(config, 4, 1, 2, **{"train.accumulation_steps": 2}), INPUTS, tmp_path / "run")
    losses, expected = ([line["loss_nats"] for line in lines(tmp_path / name, "loss_nats")] for name in ("run", "one"))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    split = evaluate(loaded(config, state.params), INPUTS)
    whole = evaluate(loaded(config, jax.device_get(state.params)), INPUTS)
    assert split.keys() == whole.keys()
    for name, value in whole.items():
        # A value that lies between two integers may be rounded to either.
        tolerance = 0.02 if "int" in name else 1e-4
        assert math.isclose(split[name], value, rel_tol=tolerance, abs_tol=tolerance), name


@pytest.mark.slow
def test_a_ragged_evaluation_batch_counts_as_the_others():
    inputs = INPUTS._replace(evaluation=tokens(999)[:13])
    config = replace(CONFIG, {"eval.sequences": 13, "eval.batch_size": 13})
    state = init_state(on(CONFIG, 4))
    whole = evaluate(loaded(config, jax.device_get(state.params)), inputs, settings={})
    assert whole["sequences"] == 13
    ragged = replace(config, {"eval.batch_size": 8})  # 8 rows, two on a device; then 5 on each
    for params in (state.params, jax.device_get(state.params)):
        found = evaluate(loaded(ragged, params), inputs, settings={})
        assert found == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in whole.items()}


@pytest.mark.slow
def test_initial_state_does_not_depend_on_the_mesh():
    assert bits(init_state(on(CONFIG, 2, 2, 2))) == bits(init_state(CONFIG))


@pytest.mark.slow
def test_temporaries_fall_with_the_rows():
    big = replace(SMALL, {"train.batch_size": 64, "model.vocab_size": 512})
    one, fsdp = (compiled(config).memory_analysis().temp_size_in_bytes for config in (big, on(big, 1, 8)))
    assert fsdp < one / 4
