"""OrthoAdam on the parameter trees of each library, in that library's own way: what is rotated, and that it trains."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from orthojax.optim import RotatedAxes, Rotation, describe, generic_axes, orthoadam

QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests wait for
KINDS = ("hadamard", pytest.param("haar", marks=pytest.mark.slow))
X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 4)), jnp.float32)
Y = jnp.sin(X[:, :1] + 2 * X[:, 1:2])
SEQUENCES = jnp.asarray(np.random.default_rng(1).standard_normal((3, 5, 8)), jnp.float32)


def squared_error(prediction):
    return jnp.mean((prediction - Y) ** 2)


def losses(loss, params, rotation=None, *, steps=8, learning_rate=0.03):
    """Training as anyone would write it: losses before each step; trees and dtypes stay what they were."""
    optimizer = orthoadam(learning_rate, weight_decay=1e-3, rotation=rotation or Rotation())

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(steps):
        new = step(params, state)
        assert jax.tree.structure(new[:2]) == jax.tree.structure((params, state))
        params, state, value = new
        values.append(float(value))
    return values


def assert_trains(loss, params, rotation=None):
    values = losses(loss, params, rotation)
    assert values[-1] < 0.8 * values[0], values


def rotated(rotation, params):
    """What is turned, by path; what is left alone is left out."""
    return {path: what for path, what in describe(rotation, params).items() if not what.startswith("left alone")}


def arrays(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(s) / max(1, s[-2:][0]) ** 0.5) for name, s in shapes.items()}


# Plain trees.


class Layer(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    first: Layer
    gain: jax.Array
    last: dict[str, jax.Array]
    name: str = dataclasses.field(metadata={"static": True}, default="network")


def network():
    first, last = arrays(0, kernel=(4, 8), bias=(8,)), arrays(1, kernel=(8, 1))
    return Network(Layer(**first), jnp.asarray(1.0), {**last, "none": None, "empty": jnp.zeros((0, 4))})


def network_loss(p):
    return squared_error(p.gain * (jnp.tanh(X @ p.first.kernel + p.first.bias[None]) @ p.last["kernel"]))


@pytest.mark.parametrize("kind", KINDS)
def test_dataclasses_named_tuples_and_dicts(kind):
    assert rotated(Rotation(kind), network()) == {"first/kernel": f"axes (1,): {kind} 8"}
    assert_trains(network_loss, network(), Rotation(kind))


# Kernels with several feature axes: an adopter names the axes.


def attention_axes(path, leaf):
    """d_model of the attention kernels [d, heads, head_dim], [d, 3, heads, head_dim] and [heads, head_dim, d]."""
    module, _, name = path.rpartition("/")
    if name != "kernel" or leaf.ndim < 3:
        return generic_axes(path, leaf)
    if module.endswith("out"):
        return RotatedAxes((-1,))  # writes d_model
    return RotatedAxes((tuple(range(1, leaf.ndim)),))  # all that a projection writes, as one axis


def attention_loss(p):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", SEQUENCES, p["qkv"]["kernel"]), 2, 0)
    q = q + jnp.einsum("btd,dhk->bthk", SEQUENCES, p["query"]["kernel"]) + p["query"]["bias"][None, None]
    y = jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v), p["out"]["kernel"])
    return jnp.mean((y - jnp.roll(SEQUENCES, 1, axis=1)) ** 2)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_general_kernels(kind):
    shapes = {"qkv": (8, 3, 2, 4), "query": (8, 2, 4), "out": (2, 4, 8)}
    params = {name: arrays(i, kernel=shape) for i, (name, shape) in enumerate(shapes.items())}
    params["query"]["bias"] = jnp.zeros((2, 4))
    assert rotated(Rotation(kind, attention_axes), params) == {
        "out/kernel": f"axes (2,): {kind} 8",
        "qkv/kernel": f"axes (1, 2, 3): {kind} 24",
        "query/kernel": f"axes (1, 2): {kind} 8",
    }
    # Without a rule the axes before the last two count as layers, so that a head is turned by itself.
    assert rotated(Rotation(kind), params)["query/kernel"] == f"axes (2,): {kind} 4, 8 layers"
    assert_trains(attention_loss, params, Rotation(kind, attention_axes))


# flax linen.


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(8, kernel_init=boxed)(nn.LayerNorm()(x))
        return x + nn.Dense(4, use_bias=False)(nn.gelu(y)), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(1, name="head")(x)


@pytest.mark.parametrize("kind", ["haar", pytest.param("hadamard", marks=pytest.mark.slow)])
def test_linen_with_scanned_layers_and_boxes(kind):
    model = LinenModel()
    boxed = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), X)
    plain = nn.unbox(boxed)["params"]
    assert isinstance(boxed["params"]["layers"]["Dense_0"]["kernel"], nn.Partitioned)
    rotation = Rotation(kind)
    for params in (boxed, nn.unbox(boxed), plain):
        assert rotated(rotation, params) == {
            "layers/Dense_0/kernel": f"axes (2,): {kind} 8, 3 layers",
            "layers/Dense_1/kernel": f"axes (2,): {kind} 4, 3 layers",
        }
    values = losses(lambda p: squared_error(model.apply(nn.unbox(p), X)), boxed, rotation)
    assert values[-1] < 0.8 * values[0]
    if kind == "haar":  # the same bases with and without boxes
        unboxed = losses(lambda p: squared_error(model.apply({"params": p}, X)), plain, rotation)
        np.testing.assert_allclose(unboxed, values, rtol=1e-4)


# flax nnx.


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return x + self.attention(self.dropout(self.norm(x)))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("hadamard", attention_axes), pytest.param("haar", "output", marks=pytest.mark.slow)],
    ids=["named", "generic"],
)
def test_nnx_optimizer(kind, axes):
    model = NnxModel(nnx.Rngs(0))
    rotation = Rotation(kind, axes)
    projection = f"axes (1, 2): {kind} 8" if callable(axes) else f"axes (2,): {kind} 4, 8 layers"
    assert rotated(rotation, nnx.state(model, nnx.Param)) == {
        **{f"attention/{name}/kernel": projection for name in ("key", "query", "value")},
        "attention/out/kernel": f"axes (2,): {kind} 8" + ("" if callable(axes) else ", 2 layers"),
        "embed/kernel": f"axes (1,): {kind} 8",
    }
    optimizer = nnx.Optimizer(model, orthoadam(0.03, weight_decay=1e-3, rotation=rotation), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(SEQUENCES) - jnp.roll(SEQUENCES, 1, axis=1)) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(8)]
    assert values[-1] < 0.8 * values[0]
    assert int(optimizer.step[...]) == 8


# equinox.


@pytest.mark.parametrize("kind", KINDS)
def test_equinox(kind):
    """A module holds its activation, and kernels are [out, in]: its output axis is the one before the last."""
    model = eqx.nn.MLP(4, 1, 8, 2, activation=jax.nn.tanh, key=jax.random.key(0))
    rotation = Rotation(kind, "input")
    assert rotated(rotation, eqx.filter(model, eqx.is_inexact_array)) == {
        "layers/0/weight": f"axes (0,): {kind} 8",
        "layers/1/weight": f"axes (0,): {kind} 8",
    }
    assert rotated(Rotation(kind), eqx.filter(model, eqx.is_inexact_array))["layers/0/weight"].endswith("4")
    optimizer = orthoadam(0.03, weight_decay=1e-3, rotation=rotation)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(lambda m: squared_error(jax.vmap(m)(X)))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(8):
        model, state, value = step(model, state)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]
    assert model.activation is not None


# haiku.


@pytest.mark.parametrize("kind", KINDS)
def test_haiku(kind):
    """Two-level dicts whose keys hold slashes: ("mlp/~/linear_0", "w")."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 8, 1], activation=jnp.tanh)(x)))
    params = model.init(jax.random.key(0), X)
    found = describe(Rotation(kind), params)
    assert found == {
        "mlp/~/linear_0/b": "left alone: 1 axes, fewer than 2",
        "mlp/~/linear_0/w": f"axes (1,): {kind} 8",
        "mlp/~/linear_1/b": "left alone: 1 axes, fewer than 2",
        "mlp/~/linear_1/w": f"axes (1,): {kind} 8",
        "mlp/~/linear_2/b": "left alone: 1 axes, fewer than 2",
        "mlp/~/linear_2/w": "left alone: no output axis of length 2 to 16384",
    }
    assert_trains(lambda p: squared_error(model.apply(p, X)), params, Rotation(kind))


def test_haiku_layers_that_are_numbered_have_their_own_bases():
    params = {f"linear_{i}": {"w": jnp.eye(8)} for i in range(2)} | {"linear": {"w": jnp.eye(8)}}
    optimizer = orthoadam(0.1, rotation=Rotation("haar"))
    drawn = optimizer.init(params)[0].basis
    q = [np.asarray(drawn[name]["w"]["basis_0"]) for name in ("linear", "linear_0", "linear_1")]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(q[i] - q[j]).max() > 0.1
