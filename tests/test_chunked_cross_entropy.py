"""The chunked loss: a float64 oracle, memory, what travels over a mesh, its place in training and evaluation."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy.special import log_softmax
from tiny_run import drawn_params

from orthojax import quant
from orthojax.config import ModelConfig
from orthojax.model import Transformer
from orthojax.ops import chunked_cross_entropy_sum_nats, cross_entropy_nats, positions_at_once
from orthojax.train.step import loss_sum_nats

AXES = ("data", "fsdp", "tensor")


def numpy_loss(hidden, kernel, targets, weights):
    """Computes the weighted sum and its gradients by hidden states and kernel [D, V], in float64."""
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    log_probabilities = log_softmax(hidden @ kernel, -1)
    weights = np.broadcast_to(np.asarray(weights, np.float64), targets.shape)[..., None]
    is_target = np.eye(kernel.shape[1])[targets]
    error = weights * (np.exp(log_probabilities) - is_target)
    loss = -(weights * is_target * log_probabilities).sum()
    return loss, error @ kernel.T, np.einsum("btd,btv->dv", hidden, error)


def problem(B=3, T=7, D=5, V=11, *, dtype=jnp.float32, rows=1):
    rng = np.random.default_rng(B * 1000 + T * 100 + D * 10 + V)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    kernel = jnp.asarray(rng.normal(size=(D, V)), dtype).astype(jnp.float32)  # numbers that the dtype has
    weights = rng.integers(0, 2, (rows, T)) * rng.random((rows, T)).round(2)
    return hidden, kernel, rng.integers(0, V, (B, T)), jnp.asarray(weights, jnp.float32)


def loss_of(targets, weights, positions=2, vocab_axis=1, logits_dtype=None):
    """Returns the loss as a function of hidden states and kernel."""
    options = {"positions": positions, "vocab_axis": vocab_axis, "logits_dtype": logits_dtype}
    return lambda hidden, kernel: chunked_cross_entropy_sum_nats(hidden, kernel, targets, weights, **options)


def chunked(hidden, kernel, targets, weights, positions, vocab_axis=1, logits_dtype=None):
    """Computes the loss and its gradients; the kernel and its gradient are [D, V]."""
    step = jax.jit(jax.value_and_grad(loss_of(targets, weights, positions, vocab_axis, logits_dtype), (0, 1)))
    value, (dx, dW) = step(hidden, kernel if vocab_axis == 1 else kernel.T)
    return value, dx, dW if vocab_axis == 1 else dW.T


def relative_error(found, expected):
    return np.abs(np.asarray(found, np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30)


def assert_near(found, operands, tolerance=1e-5):
    for a, b in zip(found, numpy_loss(*operands), strict=True):
        assert relative_error(a, b) < tolerance


@settings(max_examples=5)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(2, 12), st.integers(1, 10), st.booleans())
@example(2, 9, 3, 7, 4, True)  # the last chunk begins early
@example(2, 8, 3, 7, 4, False)
@example(1, 1, 1, 2, 5, True)
def test_loss_and_gradients_are_those_of_float64(B, T, D, V, positions, tied):
    operands = problem(B, T, D, V, rows=B if T % 2 else 1)
    for found, expected in zip(chunked(*operands, positions, 0 if tied else 1), numpy_loss(*operands), strict=True):
        assert relative_error(found, expected) < 1e-5 or np.abs(expected).max() < 1e-6


def test_bfloat16_gradients_of_the_kernel_are_float32():
    operands = problem(8, 64, 16, 128, dtype=jnp.bfloat16)
    loss, dx, dW = chunked(*operands, 5)
    expected = numpy_loss(*operands)
    assert loss.dtype == dW.dtype == jnp.float32
    assert dx.dtype == jnp.bfloat16
    assert relative_error(loss, expected[0]) < 1e-5
    assert relative_error(dx, expected[1]) < 2**-8
    # 512 positions add up. Rounded after every chunk, the sum would be wrong by more than half a step of bfloat16.
    assert relative_error(dW, expected[2]) < 2**-9
    assert (dW.astype(jnp.bfloat16).astype(jnp.float32) != dW).mean() > 0.9


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_bfloat16_logits_are_wrong_by_their_rounding(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    operands = problem(8, 64, 16, 128, dtype=jnp.bfloat16)
    loss, dx, dW = chunked(*operands, 16, logits_dtype=jnp.bfloat16)
    expected = numpy_loss(*operands)
    assert loss.dtype == dW.dtype == jnp.float32
    # A logit is rounded by up to 2^-9 of it. So much the loss of a token may change, twice, and the logarithm of a
    # probability; over tokens and ids the roundings average out.
    most = np.abs(np.asarray(operands[0], np.float64) @ np.asarray(operands[1], np.float64)).max() * 2**-9
    assert 0 < np.abs(loss - expected[0]) < 0.1 * 2 * most * float(operands[3].sum()) * 8
    assert relative_error(dx, expected[1]) < 2 * most
    assert relative_error(dW, expected[2]) < most
    assert chunked(*operands, 16)[0] != loss


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_one_pass_over_logits_computes_the_same(scale, vocab_axis, monkeypatch):
    hidden, kernel, targets, weights = problem(2, 9, 4, 300)
    operands = (scale * hidden, kernel, targets, weights)
    assert_near(chunked(*operands, 4, vocab_axis), operands)  # in two passes, as on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_near(chunked(*operands, 4, vocab_axis), operands)
    reductions = re.findall(r" reduce\w*\[", str(jax.make_jaxpr(loss_of(targets, weights))(hidden, kernel)))
    assert reductions.count(" reduce[") == 1
    assert " reduce_max[" not in reductions
    wrong = jnp.asarray(targets).at[0, 1].set(-1)
    assert jnp.isnan(loss_of(wrong, jnp.ones((1, 9)))(hidden, kernel))


def dense_sum(hidden, kernel, targets, weights):
    """Is the weighted sum of optax's losses, without targets below 0."""
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, jnp.maximum(targets, 0))
    return jnp.sum(jnp.where(targets < 0, 0.0, weights * losses))


@pytest.mark.parametrize("positions", [2, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_weights_have_the_gradient_of_the_dense_loss(x64, positions, rows):
    hidden, kernel, targets, weights = (jnp.asarray(a) for a in problem(rows=rows))
    hidden, kernel, weights = (a.astype(jnp.float64) for a in (hidden, kernel, weights))
    targets = targets.at[:, 2].set(-100)
    weights = weights.at[:, 2].set(0.0).at[:, 3].set(0.5)
    chunked = lambda *a: 3.0 * loss_of(targets, a[2], positions)(*a[:2])  # noqa: E731
    dense = lambda *a: 3.0 * dense_sum(*a[:2], targets, jnp.broadcast_to(a[2], targets.shape))  # noqa: E731
    got, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(hidden, kernel, weights) for f in (chunked, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("target", [-100, -1, 11, 2**31 - 1])
def test_a_target_that_is_no_id_makes_the_loss_nan(target):
    hidden, kernel, targets, weights = problem(V=11)
    for position in (0, 5):  # the last chunk begins early, at 5
        wrong, one = jnp.asarray(targets).at[1, position].set(target), weights.at[:, position].set(1.0)
        assert jnp.isnan(loss_of(wrong, one)(hidden, kernel))
        losses = cross_entropy_nats(hidden @ kernel, wrong)
        np.testing.assert_array_equal(np.argwhere(np.isnan(losses)), [[1, position]])
        none = weights.at[:, position].set(0.0)
        results = (chunked(hidden, kernel, t, none, 2) for t in (wrong, jnp.asarray(targets)))
        jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_the_largest_number_of_a_dtype_is_no_id(dtype):
    logits, targets = jnp.zeros((2, 100)), jnp.array([3, -1 if dtype == jnp.int8 else jnp.iinfo(dtype).max], dtype)
    np.testing.assert_allclose(cross_entropy_nats(logits, targets), [np.log(100), np.nan], rtol=1e-6)


def _products(function, *operands):
    """Counts matrix products in the traced function, those of a loop once."""
    return str(jax.make_jaxpr(function)(*operands)).count("dot_general")


def test_the_head_is_multiplied_once():
    hidden, kernel, targets, weights = problem(V=300)  # more ids than uint8 has, and targets of that dtype
    loss = loss_of(jnp.asarray(targets % 200, "uint8"), weights)
    assert _products(loss, hidden, kernel) == 1
    assert relative_error(loss(hidden, kernel), numpy_loss(hidden, kernel, targets % 200, weights)[0]) < 1e-5
    assert _products(jax.grad(loss, (0, 1)), hidden, kernel) == 3
    assert loss_of(targets[:, :0], weights[:, :0], 1)(hidden[:, :0], kernel) == 0


def test_memory_grows_with_the_chunk_only():
    def used(T, positions):
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, T, 8), (8, 2048))]
        targets = jnp.zeros((2, T), jnp.int32)
        plain = lambda hidden, kernel: jnp.sum(cross_entropy_nats(hidden @ kernel, targets))  # noqa: E731
        loss = plain if positions is None else loss_of(targets, jnp.ones((1, T)), positions)
        return jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile().memory_analysis().temp_size_in_bytes

    few, many = used(64, 4), used(256, 4)
    # What may grow is as small as hidden states: 8 numbers a position, where logits are 2,048.
    assert many - few < 4 * 2 * 192 * 8 * 4
    assert few < 4.5 * (4 * 2 * 4 * 2048)  # the logits of one chunk of 4 positions
    assert used(256, 32) / used(256, 16) > 1.8
    assert used(256, None) > 10 * many


def _mesh(*sizes):
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)


def _collectives(text):
    """(kind, bytes of its largest array, whether it stands inside a loop) of every collective of a compiled program."""
    found, computation = [], ""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = match[1]
        if match := re.search(r" = (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", line):
            shapes = re.findall(r"f32\[([\d,]*)\]", match[1])
            largest = max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
            found.append((match[2], 4 * largest, computation in bodies))
    return found


@pytest.mark.parametrize(("sizes", "vocab_axis", "backend"), [
    ((1, 8, 1), 1, "cpu"),
    ((2, 2, 2), 1, "gpu"),
    *(pytest.param(sizes, axis, "cpu", marks=pytest.mark.slow) for sizes, axis in (((2, 2, 2), 1), ((4, 1, 2), 0))),
])  # fmt: skip
def test_on_a_mesh_logits_and_hidden_states_stay(sizes, vocab_axis, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    B, T, D, V = 8, 12, 16, 96
    hidden, kernel, targets, weights = problem(B, T, D, V)
    kernel_spec = ("tensor", "fsdp") if vocab_axis == 0 else ("fsdp", "tensor")
    mesh = _mesh(*sizes)
    rows, table, one = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((("data", "fsdp"),), kernel_spec, ()))

    step = jax.jit(
        jax.value_and_grad(lambda x, W, targets: loss_of(targets, weights, 5, vocab_axis)(x, W), (0, 1)),
        in_shardings=(rows, table, rows),
        out_shardings=(one, (rows, table)),
    )
    given = (hidden, kernel if vocab_axis == 1 else kernel.T, jnp.asarray(targets))
    placed = jax.device_put(given, (rows, table, rows))
    with jax.set_mesh(mesh):
        compiled = step.lower(*placed).compile()
    value, (dx, dW) = compiled(*placed)
    assert_near((value, dx, dW if vocab_axis == 1 else dW.T), (hidden, kernel, targets, weights))
    data, fsdp, tensor = sizes
    for kind, size, in_loop in (collectives := _collectives(compiled.as_text())):
        if in_loop:  # the statistics and the gradient of a chunk's own hidden states, if the vocabulary is split
            assert kind == "all-reduce" or (backend, kind) == ("gpu", "all-gather"), collectives
            assert tensor > 1
            assert size <= 4 * B // (data * fsdp) * 5 * D
        else:  # the kernel comes, and its gradient goes, once
            assert kind in ("all-gather", "all-reduce", "reduce-scatter"), collectives
            assert size <= 4 * D * V // tensor
    assert sum(size == 4 * D * V // tensor and not in_loop for _, size, in_loop in collectives) <= 3


@pytest.mark.parametrize(("mesh_is_set", "backend"), [(False, "cpu"), (True, "cpu"), (True, "gpu")])
def test_a_mesh_changes_no_numbers(mesh_is_set, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    operands = problem(3 if mesh_is_set else 8)
    mesh = _mesh(2, 2, 2)
    if not mesh_is_set:  # then it is the partitioner who splits
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        operands = (jax.device_put(operands[0], rows), *operands[1:])
    with jax.set_mesh(mesh if mesh_is_set else jax.sharding.get_mesh()):
        found = chunked(*operands, 2)
    assert_near(found, operands)


def test_a_chunk_is_what_one_device_holds():
    V = 2 * (2**28 // (4 * 4 * 6 * 2))  # float32 logits of 6 positions of 4 sequences are just below 256 MiB
    assert positions_at_once(4, 6, V) == 6
    assert positions_at_once(4, 7, V) == 4  # two chunks of nearly one size
    assert positions_at_once(400, 7, V) == 1
    assert positions_at_once(400, 7, V, asked=3) == 3
    assert positions_at_once(4, 7, V, asked=100) == 7
    assert positions_at_once(4, 9, V) == 3  # three chunks rather than two, of which one would not be full
    assert positions_at_once(4, 12, V, dtype=jnp.bfloat16) == 12
    assert positions_at_once(2, 4, 10, asked=0) == positions_at_once(2, 0, 10) == 1
    with jax.set_mesh(_mesh(2, 2, 2)):
        assert positions_at_once(16, 7, 2 * V) == 4
        assert positions_at_once(16, 6, 2 * V) == 6
        assert positions_at_once(16, 6, 2 * V + 1) < 6  # an odd vocabulary is not split
        assert positions_at_once(6, 6, 2 * V) < 6  # sequences that do not divide are not split


MODEL = ModelConfig(
    vocab_size=24, max_length=64, d_model=16, num_layers=1, num_heads=2, d_mlp=24, scan_layers=False, use_bias=True
)
MODELS = {
    "tied": MODEL,
    "untied": dataclasses.replace(MODEL, tie_embeddings=False),
    "relaxed": dataclasses.replace(MODEL, relaxed_causal_tokens=4),
}
TOKENS = np.random.default_rng(3).integers(0, 24, (4, 12))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "relaxed" else pytest.mark.slow) for n in MODELS])
def test_chunks_change_no_gradient_of_a_model(name):
    config, params = MODELS[name], drawn_params(MODELS[name], 0.3)
    loss = lambda params, positions: loss_sum_nats(Transformer(config), params, TOKENS, positions)  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (plain, count), expected = step(params, None)
    (value, other_count), gradients = step(params, 4)
    assert count == other_count == 4 * (8 if name == "relaxed" else 11)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max() + 1e-6, err_msg=str(path))


@pytest.mark.parametrize("include", ["", quant.ALL_BUT_HEAD])
def test_quantised_models_may_be_chunked(include):
    config, params = MODELS["untied"], drawn_params(MODELS["untied"], 0.3)

    def loss(chunk_positions, include):
        model = Transformer(config, linear=quant.quantized_linear(quant.INT8_COARSE, include=include))
        return jax.jit(partial(loss_sum_nats, model, chunk_positions=chunk_positions))(params, TOKENS)[0]

    plain = loss(None, include)
    np.testing.assert_allclose(loss(2, include), plain, rtol=1e-6)
    if include == "":
        assert loss(None, quant.ALL_BUT_HEAD) != plain  # so that rounding the head shows


def test_in_a_shard_map_of_the_caller():
    """Includes the types of varying arrays, jax.shard_map's default."""
    hidden, kernel, targets, weights = problem(B=4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(hidden, kernel, targets):
        return jax.lax.psum(loss_of(targets, weights, 2)(hidden, kernel), "data")

    split, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, split), out_specs=whole)
    loss, (dx, dW) = jax.jit(jax.value_and_grad(mapped, (0, 1)))(hidden, kernel, jnp.asarray(targets))
    expected = numpy_loss(hidden, kernel, targets, weights)
    for got, wanted in zip((loss, dx, dW), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_large_logits_are_harmless():
    hidden, *rest = problem()
    assert_near(chunked(1e4 * hidden, *rest, 2), (1e4 * hidden, *rest))


def test_targets_may_be_narrow_integers():
    hidden, kernel, targets, weights = problem(V=300)  # more ids than uint8 has
    targets = targets % 200
    value = loss_of(jnp.asarray(targets, "uint8"), weights)(hidden, kernel)
    np.testing.assert_allclose(value, numpy_loss(hidden, kernel, targets, weights)[0], rtol=1e-5)


def test_at_least_one_position_is_computed():
    hidden, kernel, targets, weights = problem()
    assert positions_at_once(2, 4, 10, asked=0) == positions_at_once(2, 0, 10) == 1
    assert loss_of(targets[:, :0], weights[:, :0], 1)(hidden[:, :0], kernel) == 0
