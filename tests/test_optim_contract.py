"""The contract that every optax optimizer is held to, for OrthoAdam."""

import functools
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from orthojax import optim
from orthojax.optim import Rotation, describe, in_rotated_basis, orthoadam, rotate, scale_by_orthoadam, unrotate

QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests wait for
KINDS = ("hadamard", "haar")


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def mixed(seed=0, dtype=jnp.float32):
    """Draws matrices, a stack, a vector, a scalar, an empty leaf and none."""
    return {
        "mlp": {"kernel": normal(seed, 4, 6, dtype=dtype), "bias": normal(seed + 1, 6, dtype=dtype)},
        "layers": [normal(seed + 2, 2, 3, 4, dtype=dtype)],
        "gain": normal(seed + 3, dtype=dtype),
        "empty": jnp.zeros((0, 4), dtype),
        "none": None,
    }


def one_step(optimizer, params, grads, state=None, **extra_args):
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def assert_same(got, want, atol=0.0):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), got, want)


def kinds_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_float64_and_half_precision(kind):
    for dtype, moments in ((jnp.float64, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32)):
        with jax.enable_x64(dtype == jnp.float64):
            params, grads = ({"w": normal(i, 4, 6, dtype=dtype), "b": normal(i + 1, dtype=dtype)} for i in (0, 5))
            optimizer = orthoadam(0.1, eps=1e-4, mu_dtype=moments, rotation=Rotation(kind, axes="output"))
            new, state = jax.jit(one_step, static_argnums=0)(optimizer, params, grads)
            assert kinds_of(new) == kinds_of(params)
            assert kinds_of(state) == kinds_of(jax.eval_shape(optimizer.init, params))
            inner = state[0].inner
            assert inner.mu["w"].dtype == (moments or dtype)
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, grads))
                plain = orthoadam(0.1, eps=1e-4, rotation=Rotation(kind, axes="output"))
                want, _ = jax.jit(one_step, static_argnums=0)(plain, *wide)
            # The first step is of size 0.1; a gradient that is rounded after its rotation may lose 2**-8 of it.
            tolerance = {jnp.float64: 1e-12, jnp.bfloat16: 0.04, jnp.float16: 0.01}[dtype]
            as_numpy = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
            assert_same(as_numpy(new), as_numpy(want), atol=tolerance)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(as_numpy(new)))


@pytest.mark.parametrize("kind", KINDS)
def test_injected_hyperparameters(kind):
    """New values need no compilation, and every number may be a schedule."""
    made = optax.inject_hyperparams(orthoadam)(
        0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, rotation=Rotation(kind, axes="output")
    )
    params, state = mixed(), made.init(mixed())
    assert set(state.hyperparams) >= {"learning_rate", "b1", "b2", "eps", "weight_decay"}
    traces = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state, grads):
        traces.append(1)
        return one_step(made, params, grads, state)

    for changed in ({}, {"learning_rate": 0.3}, {"b1": 0.5, "b2": 0.5}, {"eps": 0.1}, {"weight_decay": 0.0}):
        hyperparams = {"learning_rate": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1} | changed
        for name, value in changed.items():
            state.hyperparams[name] = jnp.asarray(value, jnp.float32)
        got, _ = step(params, state, mixed(5))
        want, _ = one_step(orthoadam(**hyperparams, rotation=Rotation(kind, axes="output")), params, mixed(5))
        assert_same(got, want, atol=1e-5)
        state = made.init(params)
    assert len(traces) == 1


def test_an_injected_schedule_starts_at_step_0():
    rates = (0.5, 0.25, 0.125)
    make = functools.partial(orthoadam, rotation=Rotation("hadamard", axes="output"))
    injected = optax.inject_hyperparams(make)(lambda count: jnp.asarray(rates)[count])
    optimizers, params = (injected, make(1.0)), mixed()
    states = [optimizer.init(params) for optimizer in optimizers]
    for rate in rates:
        (got, states[0]), (want, states[1]) = (
            jax.jit(optimizer.update, compiler_options=QUICK)(mixed(5), state, params)
            for optimizer, state in zip(optimizers, states, strict=True)
        )
        assert_same(got, jax.tree.map(lambda u, rate=rate: rate * u, want), atol=1e-5)


def labels(params):
    return jax.tree.map_with_path(lambda keys, _: "mlp" if keys[0].key == "mlp" else "rest", params)


def wrapped(kind):
    make = functools.partial(orthoadam, 0.1, rotation=Rotation(kind, axes="output"))
    kept = {"mlp": True, "layers": False, "gain": False, "empty": False, "none": None}
    return {
        "chain": optax.chain(optax.clip(1e9), make()),
        "partition": optax.partition({"mlp": make(), "rest": make()}, labels),
        "masked": optax.masked(make(), kept),
        "apply_if_finite": optax.apply_if_finite(make(), 3),
        "MultiSteps": optax.MultiSteps(make(), 2).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(orthoadam)(0.1, rotation=Rotation(kind, axes="output")),
    }


@pytest.mark.parametrize("kind", ["haar", pytest.param("hadamard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", wrapped("hadamard"))
def test_wrapped_optimizers_step_as_the_plain_one(name, kind):
    optimizer, plain = wrapped(kind)[name], orthoadam(0.1, rotation=Rotation(kind, axes="output"))
    params = want = mixed()
    state, want_state = optimizer.init(params), plain.init(params)
    start = kinds_of(state)
    step = jax.jit(functools.partial(one_step, optimizer), compiler_options=QUICK)
    for i in (1, 2):
        for _ in range(2 if name == "MultiSteps" else 1):
            params, state = step(params, mixed(i), state)
        want, want_state = one_step(plain, want, mixed(i), want_state)
    if name == "masked":
        params, want = params["mlp"], want["mlp"]
    assert_same(params, want, atol=1e-5)
    assert kinds_of(state) == start


def parts(kind):
    r = Rotation(kind, axes="output")
    adam = optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r))
    return wrapped(kind) | {
        "orthoadam": orthoadam(0.1, rotation=r, mu_dtype=jnp.bfloat16, nu_dtype=jnp.float32),
        "scale_by_orthoadam": scale_by_orthoadam(rotation=r),
        "rotate": rotate(r),
        "unrotate": unrotate(r),
        "parts": adam,
        "in_rotated_basis": in_rotated_basis(optax.lion(0.1), r),
        "ema": optax.chain(adam, optax.ema(0.9)),
    }


@pytest.mark.parametrize("kind", typing.get_args(optim.rotation.Kind))
def test_no_two_leaves_of_a_fresh_state_share_a_buffer(kind):
    """Such a buffer could not be donated; on several devices XLA ends the process."""
    for name, optimizer in parts(kind).items():
        leaves = [leaf for leaf in jax.tree.leaves(optimizer.init(mixed())) if leaf.size]
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves), name


@pytest.mark.parametrize("kind", KINDS)
def test_single_arrays_scalars_and_empty_trees(kind):
    optimizer = orthoadam(0.1, weight_decay=0.1, rotation=Rotation(kind, axes="output"))
    for params in (normal(0, 4, 6), normal(0, 4), normal(0), jnp.zeros((0, 3)), {}, {"a": None}, [()]):
        grads = jax.tree.map(lambda x: x + 1.0, params)
        new, state = one_step(optimizer, params, grads)
        assert kinds_of((new, state)) == kinds_of((params, optimizer.init(params)))


@pytest.mark.parametrize("kind", KINDS)
def test_init_has_a_shape_and_vmaps(kind):
    optimizer = orthoadam(0.1, rotation=Rotation(kind, axes="output"))
    shapes = jax.eval_shape(optimizer.init, mixed())
    assert kinds_of(shapes) == kinds_of(optimizer.init(mixed()))

    def two_steps(params, *grads):
        params, state = one_step(optimizer, params, grads[0])
        return one_step(optimizer, params, grads[1], state)[0]

    def stack(*seeds):
        return jax.tree.map(lambda *x: jnp.stack(x), *(mixed(i) for i in seeds))

    together = jax.jit(jax.vmap(two_steps), compiler_options=QUICK)(stack(0, 1), stack(5, 6), stack(7, 8))
    for i in range(2):
        alone = two_steps(mixed(i), mixed(5 + i), mixed(7 + i))
        assert_same(jax.tree.map(lambda x, i=i: x[i], together), alone, atol=1e-4)


X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 4)), jnp.float32)


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


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_boxes_of_scanned_layers_are_rotated_and_train(kind):
    model, rotation = LinenModel(), Rotation(kind, "output")
    params = jax.jit(model.init)(jax.random.key(0), X)
    assert isinstance(params["params"]["layers"]["Dense_0"]["kernel"], nn.Partitioned)
    rotated = {path: what for path, what in describe(rotation, params).items() if not what.startswith("left alone")}
    widths = {"Dense_0": 8, "Dense_1": 4}
    assert rotated == {f"layers/{name}/kernel": f"axes (2,): {kind} {n}, 3 layers" for name, n in widths.items()}
    optimizer, target = orthoadam(0.03, weight_decay=1e-3, rotation=rotation), jnp.sin(X[:, :1] + 2 * X[:, 1:2])

    @jax.jit
    def step(params, state):
        loss = lambda p: jnp.mean((model.apply(nn.unbox(p), X) - target) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry, losses = (params, optimizer.init(params)), []
    for _ in range(8):
        new, loss = step(*carry)
        assert jax.tree.structure(new) == jax.tree.structure(carry)
        carry, losses = new, [*losses, float(loss)]
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_of_eager_init_is_donated(devices):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for optimizer in (parts("hadamard")["parts"], orthoadam(0.1, rotation=Rotation("haar", axes="output"))):
        params = mixed()
        params, state = jax.device_put((params, optimizer.init(params)), everywhere)
        step = jax.jit(functools.partial(one_step, optimizer), donate_argnums=2, compiler_options=QUICK)
        for _ in range(2):
            held = jax.tree.leaves(state)
            params, state = step(params, mixed(5), state)
        assert all(leaf.is_deleted() for leaf in held if leaf.ndim)


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_restores_the_state_under_plain_names(kind, tmp_path):
    optimizer = optax.named_chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("orthoadam", scale_by_orthoadam(rotation=Rotation(kind, axes="output"))),
        ("learning_rate", optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 10))),
    )
    without = lambda tree: {k: v for k, v in tree.items() if k not in ("empty", "none")}  # noqa: E731
    params = without(mixed())  # Orbax stores no empty array
    state = optimizer.init(params)
    for i in range(3):
        params, state = one_step(optimizer, params, without(mixed(i)), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "at", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "at", (params, jax.eval_shape(optimizer.init, params)))
        plain = checkpointer.restore(tmp_path / "at")[1]["orthoadam"]  # as a foreign reader finds it
    assert_same(restored, (params, state))
    assert set(plain["inner"]) == {"count", "mu", "nu"}
    np.testing.assert_array_equal(plain["inner"]["mu"]["mlp"]["kernel"], state["orthoadam"].inner.mu["mlp"]["kernel"])
    assert bool(plain.get("basis")) == (kind == "haar")
