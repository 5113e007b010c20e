"""Moments of 8 and 4 bits: the levels and Adam's step in float64 NumPy, bytes, meshes, and what stays float."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax import Rotation, orthoadam, scale_by_orthoadam
from orthojax.ops.packing import Packed, pack, packing_of, unpack
from orthojax.optim import layout_of, scale_by_adam, state_shardings

B1, B2, EPS = 0.8, 0.95, 1e-6
SHAPES = {"wte": (256, 64), "kernel": (64, 256), "norm/scale": (64,), "odd": (64, 127)}
BITS = {"int8": 8, "int4": 4}
NEAREST = {bits: packing_of(dtype)._replace(at_random=False) for dtype, bits in BITS.items()}


def drawn(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def numpy_levels(x, bits, signed):
    """The levels of each block, as the docstring of `pack` has them, and what they stand for."""
    block = NEAREST[bits].block_of(x.shape)
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1, keepdims=True)
    steps = 2 ** (bits - 1) - 1 if signed else 2**bits
    with np.errstate(invalid="ignore"):
        levels = np.where(scales > 0, blocks / scales * steps, 0.0)
    return levels, scales / steps, (-steps if signed else 1), steps


def rounded(x, bits, signed):
    levels, unit, low, high = numpy_levels(x, bits, signed)
    return (np.clip(np.round(levels), low, high) * unit).reshape(x.shape)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([4, 8]), st.booleans(), st.sampled_from([(64, 64), (16, 256), (2, 40, 96)]),
    st.floats(-20, 20), st.integers(0, 9),
)  # fmt: skip
def test_values_are_rounded_to_the_nearest_level(bits, signed, shape, exponent, seed):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(10.0**exponent)
    x[0] = 0.0
    x = x if signed else np.abs(x)
    packed = pack(jnp.asarray(x), NEAREST[bits], signed=signed)
    assert packed.codes.size == x.size * bits // 8
    got, unit = np.asarray(unpack(packed, bits, signed=signed), np.float64), numpy_levels(x, bits, signed)[1]
    np.testing.assert_array_equal(got[0], 0.0)
    error = np.abs(got - rounded(x, bits, signed)).reshape(*x.shape[:-1], unit.shape[-2], -1)
    half = np.abs(np.abs(numpy_levels(x, bits, signed)[0]) % 1 - 0.5) < 1e-4  # either neighbour is as near
    assert np.all(error <= unit * np.where(half, 1.001, 1e-4))


def test_a_nan_is_seen_and_not_the_block_beside():
    x = jnp.ones((64, 128)).at[3, 70].set(jnp.nan)
    for bits in (4, 8):
        back = np.asarray(unpack(pack(x, NEAREST[bits], signed=True), bits, signed=True))
        assert not np.isfinite(back[3, 70])
        np.testing.assert_array_equal(back[:3], 1.0)


def numpy_adam(gradients, bits):
    """Adam whose moments are rounded to the nearest level after each step, in float64."""
    mu, nu, steps = 0.0, 0.0, []
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g**2
        steps.append(mu / (1 - B1**t) / (np.sqrt(nu / (1 - B2**t)) + EPS))
        mu, nu = rounded(mu, bits, True), rounded(np.sqrt(nu), bits, False) ** 2
    return steps


@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_adam_with_rounded_moments(bits):
    """Values within rounding of half a level may go either way: a step differs by a level in few places."""
    gradients = [drawn(seed)["kernel"] for seed in range(3)]
    optimizer = scale_by_adam(B1, B2, EPS, mu_dtype=NEAREST[bits], nu_dtype=NEAREST[bits])
    state = optimizer.init({"kernel": gradients[0]})
    for g, wanted in zip(gradients, numpy_adam(gradients, bits), strict=True):
        step, state = optimizer.update({"kernel": g}, state)
        differ = np.abs(np.asarray(step["kernel"]) - wanted) > 1e-4 * np.maximum(1.0, np.abs(wanted))
        assert differ.mean() < 1e-3


def test_four_bits_are_rounded_at_random_without_bias():
    g = {"kernel": jnp.full((64, 64), 0.3).at[:, 0].set(1.0)}
    optimizer = scale_by_adam(0.0, 0.0, EPS, mu_dtype="int4")
    state, found = optimizer.init(g), []
    for _ in range(20):
        _, state = optimizer.update(g, state)
        found.append(np.asarray(unpack(state.mu["kernel"], 4, signed=True)))
    assert set(np.round(np.unique(found) * 7)) == {2, 3, 7}  # 0.3 is 2.1 sevenths
    np.testing.assert_allclose(np.mean(np.array(found)[..., 1:]), 0.3, atol=2e-3)
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.27), ("int4", 0.15)])
def test_bytes_of_the_state(dtype, most):
    shapes = {"wte": (512, 64), "layers/kernel": (4, 64, 256), "layers/scale": (4, 64)}
    bytes_of = {}
    for name in (None, dtype):
        state = orthoadam(1e-3, mu_dtype=name, nu_dtype=name, rotation=Rotation(axes=64)).init(drawn(0, shapes))
        bytes_of[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(state[0].inner))
    assert bytes_of[dtype] < most * bytes_of[None]


def test_what_has_no_blocks_stays_float_and_dtypes_mix():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn(0))
    optimizer = scale_by_adam(mu_dtype="int4", nu_dtype=jnp.float32)
    state = optimizer.init(params)
    kinds = {name: type(mu) is Packed or mu.dtype for name, mu in state.mu.items()}
    assert kinds == {"wte": True, "kernel": True, "norm/scale": jnp.bfloat16, "odd": jnp.bfloat16}
    updates, new = optimizer.update(params, state)
    assert {nu.dtype for nu in new.nu.values()} == {jnp.dtype("float32")}
    assert {u.dtype for u in updates.values()} == {jnp.dtype("bfloat16")}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    odd, _ = optax.scale_by_adam().update({"odd": params["odd"]}, optax.scale_by_adam().init({"odd": params["odd"]}))
    np.testing.assert_allclose(np.float32(updates["odd"]), np.float32(odd["odd"]), atol=0.02)


@pytest.mark.parametrize("given", [{"mu_dtype": "int3"}, {"nu_dtype": "uint8"}, {"mu_dtype": bool}])
def test_other_dtypes_are_refused(given):
    with pytest.raises(ValueError, match="allowed: None, int8, int4 or a floating dtype"):
        scale_by_orthoadam(**given)


def test_injected_hyperparameters_and_donation():
    params = drawn(0)
    make = optax.inject_hyperparams(functools.partial(orthoadam, rotation=Rotation(axes=64)))
    optimizer = make(1e-2, mu_dtype="int4", nu_dtype="int4")
    state = optimizer.init(params)
    step = jax.jit(optimizer.update, donate_argnums=1)
    updates, new = step(params, state, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, new)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_mesh_has_the_same_bits(kind, dtype):
    """Also where an axis of blocks is split, and where their scales do not divide and stay whole."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
    shapes = {"wte": (256, 64), "up/kernel": (64, 512), "down/kernel": (512, 64)}
    specs = {"wte": P("fsdp"), "up/kernel": P("data", "fsdp"), "down/kernel": P("fsdp", None)}
    params, shardings = drawn(0, shapes), {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    layout = layout_of(shardings) if kind == AxisType.Auto else None

    def made(layout):
        rotation = Rotation("identity", layout=layout)
        return scale_by_orthoadam(B1, B2, EPS, mu_dtype=dtype, nu_dtype=dtype, rotation=rotation)

    one, split = made(None), made(layout)
    placed, at = jax.device_put(params, shardings), state_shardings(split, params, shardings)
    state, other = jax.jit(one.init)(params), jax.jit(split.init, out_shardings=at)(placed)
    for seed in range(2):
        g = drawn(seed, shapes)
        _, state = jax.jit(one.update)(g, state)
        _, other = jax.jit(split.update, out_shardings=(shardings, at))(jax.device_put(g, shardings), other)
    for got, wanted in zip(jax.tree.leaves(other), jax.tree.leaves(state), strict=True):
        differ = np.asarray(got) != np.asarray(wanted)
        assert differ.mean() < 1e-3  # fused differently, a value may fall on the other side of half a level
    assert other.inner.mu["wte"].codes.sharding.spec[0] == "fsdp"


# What others do, written from their equations.


def dynamic_map(bits, signed):
    """Dynamic tree quantisation (arXiv 2110.02861): decades whose number of levels doubles up to the largest."""
    decades, levels = bits - 1, [0.0, 1.0]
    for i in range(decades):
        edges = np.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1)
        levels += list((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - decades + 1))
    return np.sort(np.unique(np.array(levels + [-x for x in levels[2:]] * signed)))


def to_levels(x, levels):
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return np.where(x - low <= high - x, low, high)


def by_block(x, block, levels):
    blocks = x.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True)
    return (to_levels(blocks / scale, levels) * scale).reshape(x.shape)


def by_rank_1(x, levels):
    """Scales of rows and columns, the smaller of which counts (arXiv 2309.01507)."""
    scale = np.minimum(x.max(1, keepdims=True), x.max(0, keepdims=True))
    return to_levels(x / scale, levels) * scale


def test_one_step_errs_less_than_published_schemes_unless_channels_stand_out():
    rng = np.random.default_rng(0)

    def errors(channels):
        g = rng.standard_t(4, size=(40, 256, 512)) * channels
        mu, nu = np.zeros((2, 256, 512))
        for t in range(40):
            mu, nu = 0.9 * mu + 0.1 * g[t], 0.999 * nu + 0.001 * g[t] ** 2
        step = mu / np.sqrt(nu)

        def error(mu, nu):
            return np.linalg.norm(mu / (np.sqrt(nu) + 1e-12) - step) / np.linalg.norm(step)

        ours = {bits: error(rounded(mu, bits, True), rounded(np.sqrt(nu), bits, False) ** 2) for bits in (4, 8)}
        four = error(by_block(mu, 128, dynamic_map(4, True)), by_rank_1(nu, np.arange(1, 17) / 16))  # without 0
        eight = error(by_block(mu, 256, dynamic_map(8, True)), by_block(nu, 256, dynamic_map(8, False)))
        return ours, {4: four, 8: eight}

    ours, theirs = errors(1.0)  # as after a rotation
    assert ours[8] < 0.8 * theirs[8] < 0.015
    assert ours[4] < 0.8 * theirs[4] < 0.2
    ours, theirs = errors(np.exp(1.5 * rng.normal(size=(1, 512))))
    assert ours[8] < 0.5 < 100 < theirs[8]  # a second moment of 0 divides
    assert theirs[4] < 0.6 * ours[4]  # scales of columns are what a rotation does without
