"""The contract that every optax optimizer is held to, for OrthoAdam and for compositions of our own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from orthojax.optim import Rotation, in_rotated_basis, orthoadam, scale_by_orthoadam

QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests wait for
KINDS = ("hadamard", "haar")


def inside(make_inner):
    return lambda lr, r: in_rotated_basis(make_inner(lr), r)


MAKERS = {
    "orthoadam": lambda lr, r: orthoadam(lr, rotation=r),
    "orthoadam, decay": lambda lr, r: orthoadam(lr, weight_decay=1e-3, rotation=r),
    "lion": inside(lambda lr: optax.lion(lr, weight_decay=0.0)),
    "rms": inside(
        lambda lr: optax.chain(optax.rmsprop(lr, bias_correction=True), optax.trace(0.5))  # with momentum
    ),
    "adafactor": inside(lambda lr: optax.adafactor(lr, min_dim_size_to_factor=2, multiply_by_parameter_scale=False)),
}
every_optimizer = pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(make, kind, id=f"{name}-{kind}", marks=() if name == "orthoadam" else pytest.mark.slow)
        for name, make in MAKERS.items()
        for kind in KINDS
    ],
)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def mixed(seed=0, dtype=jnp.float32):
    """Matrices, a stack, a vector, a scalar, an empty leaf and none."""
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


# Convergence.


@every_optimizer
def test_converges_on_parabolas(make, kind):
    target = mixed(10)

    def loss(params):
        return sum(jnp.sum((p - t) ** 2) for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

    optimizer = make(optax.cosine_decay_schedule(0.1, 300), Rotation(kind, "both"))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params):
        step = lambda carry, _: (one_step(optimizer, carry[0], jax.grad(loss)(carry[0]), carry[1]), None)  # noqa: E731
        return jax.lax.scan(step, (params, optimizer.init(params)), length=300)[0][0]

    found = run(mixed())
    assert loss(mixed()) > 10
    assert loss(found) < 1e-3
    assert_same(found, target, atol=0.05)


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_float64_and_half_precision(kind):
    for dtype, moments in ((jnp.float64, None), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32)):
        with jax.enable_x64(dtype == jnp.float64):
            params, grads = ({"w": normal(i, 4, 6, dtype=dtype), "b": normal(i + 1, dtype=dtype)} for i in (0, 5))
            optimizer = orthoadam(0.1, eps=1e-4, mu_dtype=moments, rotation=Rotation(kind))
            new, state = jax.jit(one_step, static_argnums=0)(optimizer, params, grads)
            assert kinds_of(new) == kinds_of(params)
            assert kinds_of(state) == kinds_of(jax.eval_shape(optimizer.init, params))
            inner = state[0].inner
            assert inner.mu["w"].dtype == (moments or dtype)
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, grads))
                plain = orthoadam(0.1, eps=1e-4, rotation=Rotation(kind))
                want, _ = jax.jit(one_step, static_argnums=0)(plain, *wide)
            # The first step is of size 0.1; a gradient that is rounded after its rotation may lose 2**-8 of it.
            tolerance = {jnp.float64: 1e-12, jnp.bfloat16: 0.04, jnp.float16: 0.01}[dtype]
            as_numpy = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
            assert_same(as_numpy(new), as_numpy(want), atol=tolerance)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(as_numpy(new)))


# What others pass, inject and trace.


@every_optimizer
def test_extra_arguments_are_tolerated(make, kind):
    optimizer = make(0.1, Rotation(kind))
    _, state = one_step(optimizer, mixed(), mixed(5))
    given = {"value": jnp.ones(()), "grad": mixed(5), "value_fn": lambda p: 0.0, "batch": [np.ones(3), "x"]}
    plain, _ = one_step(optimizer, mixed(), mixed(6), state)
    extra, _ = one_step(optimizer, mixed(), mixed(6), state, **given)
    assert_same(extra, plain)
    assert np.any(np.asarray(plain["mlp"]["kernel"] != mixed()["mlp"]["kernel"]))


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, loss, **unused_extra_args):
        return jax.tree.map(lambda u: loss * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    optimizer = optax.chain(in_rotated_basis(inner, Rotation("haar")), optax.scale(-1.0))
    grads = {"w": normal(1, 4, 4)}
    updates, _ = optimizer.update(grads, optimizer.init(grads), loss=3.0, other=1)
    np.testing.assert_allclose(updates["w"], -3 * grads["w"], atol=1e-5)


@every_optimizer
def test_one_compilation_serves_all_steps_and_types_are_stable(make, kind):
    optimizer = make(optax.linear_schedule(0.1, 0.0, 10), Rotation(kind))
    traces = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state, grads, take):
        traces.append(1)
        # Both branches must agree in every type; so must the carry of the scan below.
        return jax.lax.cond(take, lambda: one_step(optimizer, params, grads, state), lambda: (params, state))

    params, state = mixed(), optimizer.init(mixed())
    start = kinds_of((params, state))
    kept, _ = step(params, state, mixed(1), False)
    assert_same(kept, params)
    by_steps = params, state
    for i in range(3):
        by_steps = step(*by_steps, mixed(i), True)
    assert len(traces) == 1
    assert kinds_of(by_steps) == start
    grads = jax.tree.map(lambda *x: jnp.stack(x), *(mixed(i) for i in range(3)))
    scanned, _ = jax.lax.scan(
        lambda carry, g: (one_step(optimizer, carry[0], g, carry[1]), None), (params, state), grads
    )
    assert_same(scanned[0], by_steps[0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_injected_hyperparameters(kind):
    """New values need no compilation, and every number may be a schedule."""
    made = optax.inject_hyperparams(orthoadam)(
        0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, rotation=Rotation(kind)
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
        want, _ = one_step(orthoadam(**hyperparams, rotation=Rotation(kind)), params, mixed(5))
        assert_same(got, want, atol=1e-5)
        state = made.init(params)
    assert len(traces) == 1


# Wrappers: each against the plain optimizer.


def labels(params):
    return jax.tree.map_with_path(lambda keys, _: "mlp" if keys[0].key == "mlp" else "rest", params)


def wrapped(kind):
    make = functools.partial(orthoadam, 0.1, rotation=Rotation(kind))
    both = {"mlp": make(), "rest": make()}
    kept = {"mlp": True, "layers": False, "gain": False, "empty": False, "none": None}
    return {
        "chain": optax.chain(optax.clip(1e9), make()),
        "named_chain": optax.named_chain(("orthoadam", make())),
        "partition": optax.partition(both, labels),
        "multi_transform": optax.multi_transform(both, labels),
        "masked": optax.masked(make(), kept),
        "apply_if_finite": optax.apply_if_finite(make(), 3),
        "MultiSteps": optax.MultiSteps(make(), 2).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(orthoadam)(0.1, rotation=Rotation(kind)),
        "schedule": orthoadam(optax.constant_schedule(0.1), rotation=Rotation(kind)),
    }


@pytest.mark.parametrize("kind", ["haar", pytest.param("hadamard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", wrapped("hadamard"))
def test_wrappers(name, kind):
    optimizer, plain = wrapped(kind)[name], orthoadam(0.1, rotation=Rotation(kind))
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


def test_a_step_that_is_not_finite_is_skipped():
    optimizer = optax.apply_if_finite(orthoadam(0.1, rotation=Rotation("haar")), 3)
    bad = mixed(1) | {"gain": jnp.asarray(jnp.nan)}
    kept, state = one_step(optimizer, mixed(), bad)
    assert_same(kept, mixed())
    assert int(state.total_notfinite) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", wrapped("hadamard"))
def test_map_params_finds_the_moments_and_nothing_else(name, kind):
    optimizer = wrapped(kind)[name]
    state = optimizer.init(mixed())
    marked = optax.tree.map_params(
        optimizer,
        lambda x: f"{x.shape}",
        state,
        transform_non_params=lambda x: jax.tree.map(lambda _: "other", x),  # a haar basis comes as one dict
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    moments = []
    for (keys, leaf), mark in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(marked), strict=True):
        path = jax.tree_util.keystr(keys)
        is_moment = ".mu" in path or ".nu" in path or ".acc_grads" in path
        assert mark == (f"{leaf.shape}" if is_moment else "other"), path
        moments += [path] if is_moment else []
    assert len(moments) == {"masked": 4, "MultiSteps": 15}.get(name, 10)  # mu and nu of five arrays; gradients beside


# Odd trees.


@pytest.mark.parametrize("kind", KINDS)
def test_single_arrays_scalars_and_empty_trees(kind):
    optimizer = orthoadam(0.1, weight_decay=0.1, rotation=Rotation(kind))
    for params in (normal(0, 4, 6), normal(0, 4), normal(0), jnp.zeros((0, 3)), {}, {"a": None}, [()]):
        grads = jax.tree.map(lambda x: x + 1.0, params)
        new, state = one_step(optimizer, params, grads)
        assert kinds_of((new, state)) == kinds_of((params, optimizer.init(params)))


@every_optimizer
def test_init_has_a_shape_and_vmaps(make, kind):
    optimizer = make(0.1, Rotation(kind))
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


# Checkpoints.


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_restores_the_state_bit_for_bit_under_plain_names(kind, tmp_path):
    optimizer = optax.named_chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("orthoadam", scale_by_orthoadam(rotation=Rotation(kind))),
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


def test_what_has_no_matrices_keeps_no_more_than_adam(tmp_path):
    """Names, types and bytes of the leaves, and bytes on disk, where names and metadata may take 4 kB more."""
    params = {"mlp": {"kernel": normal(0, 256, 384), "bias": normal(1, 384)}}
    adam = optax.scale_by_adam()
    states = {"adam": adam.update(params, adam.init(params))[1]}  # moments that do not compress
    for kind in ("hadamard", "dct", "identity", "signed_permutation"):
        scaling = scale_by_orthoadam(rotation=Rotation(kind))
        states[kind] = scaling.update(params, scaling.init(params))[1]
        assert kinds_of(states[kind].inner) == kinds_of(states["adam"])
        assert states[kind].basis == ()
    sizes = {}
    for kind in ("adam", "hadamard"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / kind, states[kind])
        sizes[kind] = sum(path.stat().st_size for path in (tmp_path / kind).rglob("*") if path.is_file())
    assert sizes["adam"] > 1.5 * 4 * 256 * 384
    assert abs(sizes["hadamard"] - sizes["adam"]) < 0.01 * sizes["adam"] + 4096
