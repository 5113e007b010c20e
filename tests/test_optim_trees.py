"""OrthoAdam on the parameter trees of each library: rotated axes, and falling losses."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from orthojax.optim import RotatedAxes, Rotation, describe, generic_axes, orthoadam

QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests wait for
X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 4)), jnp.float32)
Y = jnp.sin(X[:, :1] + 2 * X[:, 1:2])
SEQUENCES = jnp.asarray(np.random.default_rng(1).standard_normal((3, 5, 8)), jnp.float32)


def squared_error(prediction):
    return jnp.mean((prediction - Y) ** 2)


def next_error(prediction):
    return jnp.mean((prediction - jnp.roll(SEQUENCES, 1, axis=1)) ** 2)


def losses(loss, params, rotation, steps=8):
    """Trains as anyone would; returns the losses before each step. Trees and dtypes stay what they were."""
    optimizer = orthoadam(0.03, weight_decay=1e-3, rotation=rotation)

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


def arrays(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(s) / max(1, s[-2:][0]) ** 0.5) for name, s in shapes.items()}


class Problem(NamedTuple):
    loss: Any
    params: Any
    expected: dict[str, str]  # what is rotated, by path, with KIND for the kind
    axes: Any = "output"
    kernel_layout: Any = "in_out"


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


def plain():
    def loss(p):
        return squared_error(p.gain * (jnp.tanh(X @ p.first.kernel + p.first.bias[None]) @ p.last["kernel"]))

    first, last = arrays(0, kernel=(4, 8), bias=(8,)), arrays(1, kernel=(8, 1))
    params = Network(Layer(**first), jnp.asarray(1.0), {**last, "none": None, "empty": jnp.zeros((0, 4))})
    expected = {"first/kernel": "axes (1,): KIND 8"}
    # A path is the same for every container, and so are the bases.
    assert (
        describe(Rotation(axes="output"), {"first": {"kernel": first["kernel"]}}).items()
        <= describe(Rotation(axes="output"), params).items()
    )
    return Problem(loss, params, expected)


# flax linen: scanned layers, with boxes.


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(8, kernel_init=boxed)(nn.LayerNorm()(x))
        return x + nn.Dense(4, use_bias=False)(nn.gelu(y)), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"split_rngs": {"params": True}, "metadata_params": {nn.PARTITION_NAME: None}}
        layers = nn.scan(LinenBlock, variable_axes={"params": 0}, length=3, **options)
        return nn.Dense(1, name="head")(layers(name="layers")(x, None)[0])


def linen():
    model = LinenModel()
    params = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), X)
    assert isinstance(params["params"]["layers"]["Dense_0"]["kernel"], nn.Partitioned)
    expected = {
        "layers/Dense_0/kernel": "axes (2,): KIND 8, 3 layers",
        "layers/Dense_1/kernel": "axes (2,): KIND 4, 3 layers",
    }
    return Problem(lambda p: squared_error(model.apply(nn.unbox(p), X)), params, expected)


# flax nnx: variables in a state, and kernels with several feature axes, which an adopter names.


def attention_axes(path, leaf):
    """d_model of the attention kernels [d, heads, head_dim] and [heads, head_dim, d]."""
    if not path.endswith("kernel") or leaf.ndim < 3:
        return generic_axes(path, leaf)
    # What the output projection writes is d_model; what the others write counts as one axis.
    return RotatedAxes((-1,) if path.endswith("out/kernel") else ((1, 2),))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return x + self.attention(self.norm(x))


def nnx_model():
    graph, params, rest = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param, ...)
    expected = {f"attention/{name}/kernel": "axes (1, 2): KIND 8" for name in ("key", "query", "value")}
    expected |= {"attention/out/kernel": "axes (2,): KIND 8", "embed/kernel": "axes (1,): KIND 8"}
    return Problem(lambda p: next_error(nnx.merge(graph, p, rest)(SEQUENCES)), params, expected, attention_axes)


# equinox: a module holds its activation, kernels are [out, in], and everything is called weight.


class EquinoxModel(eqx.Module):
    emb: eqx.nn.Embedding
    norms: eqx.nn.LayerNorm  # of two layers, stacked
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.emb = eqx.nn.Embedding(5, 4, key=key)
        self.norms = jax.vmap(lambda _: eqx.nn.LayerNorm(4))(jnp.arange(2))
        self.mlp = eqx.nn.MLP(4, 1, 8, 2, activation=jax.nn.tanh, key=key)

    def __call__(self, x):
        for layer in range(2):
            x = x + jax.tree.map(lambda leaf, layer=layer: leaf[layer], self.norms)(x)
        return self.mlp(x + self.emb(0))


def equinox():
    params, static = eqx.partition(EquinoxModel(jax.random.key(0)), eqx.is_inexact_array)
    expected = {"emb/weight": "axes (1,): KIND 4"}
    expected |= {f"mlp/layers/{i}/weight": "axes (0,): KIND 8" for i in range(2)}
    loss = lambda p: squared_error(jax.vmap(eqx.combine(p, static))(X))  # noqa: E731
    return Problem(loss, params, expected, kernel_layout="out_in")


PROBLEMS = {"plain": plain, "linen": linen, "nnx": nnx_model, "equinox": equinox}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_parameters_are_rotated_and_train(name, kind):
    problem = PROBLEMS[name]()
    rotation = Rotation(kind, problem.axes, kernel_layout=problem.kernel_layout)
    found = describe(rotation, problem.params)
    rotated = {path: what for path, what in found.items() if not what.startswith("left alone")}
    assert rotated == {path: what.replace("KIND", kind) for path, what in problem.expected.items()}
    values = losses(problem.loss, problem.params, rotation)
    assert values[-1] < 0.8 * values[0], values


def test_an_nnx_optimizer_trains_as_the_functional_way():
    plain, rotation, model = nnx_model(), Rotation(axes=attention_axes), NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, orthoadam(0.03, weight_decay=1e-3, rotation=rotation), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda model: next_error(model(SEQUENCES)))(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(3)]
    np.testing.assert_allclose(values, losses(plain.loss, plain.params, rotation, 3), rtol=1e-4)
