"""`in_rotated_basis` around the optimizers of optax, against the same ones on a problem that is rotated by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from test_orthoadam import distance
from thinned import quick_and_slow

from orthojax.optim import Rotation, in_rotated_basis, rotate

OUTPUT = Rotation(axes="output", embeddings="")
QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests wait for


def basis(rotation):
    """Returns Q [8, 8] of the kernel, by rotating the identity."""
    transform, eye = rotate(rotation), {"kernel": jnp.eye(8)}
    return transform.update(eye, transform.init(eye))[0]["kernel"].T


def by_hand(params, q):
    """Applies Q to each row of the kernel; nothing of orthojax is used here."""
    return {**params, "kernel": params["kernel"] @ q.T}


def loss(params):
    """Returns a smooth loss, not quadratic, and with axes of very different curvature."""
    x = np.random.default_rng(0).standard_normal((16, 6)) * np.array([1, 3, 0.3, 1, 2, 1])
    y = jnp.tanh(jnp.asarray(x, params["kernel"].dtype) @ params["kernel"] + params["bias"][None])
    return jnp.mean((y - 0.5 * jnp.arange(8.0, dtype=y.dtype)[None]) ** 2)


def run(optimizer, params, q, *, reads_loss):
    """Returns parameters after some steps of an optimizer on loss(Q^T params)."""

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(lambda p: loss(by_hand(p, q.T)))(params)
        updates, state = optimizer.update(grads, state, params, **({"value": value} if reads_loss else {}))
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), length=6)[0][0]


def trajectories(inner, rotation, *, reads_loss=False):
    """(start, in_rotated_basis(inner) on the loss, inner on the rotated loss, rotated back, inner on the loss)."""
    generator, q, eye = np.random.default_rng(1), basis(rotation), jnp.eye(8)
    start = {
        "kernel": jnp.asarray(generator.standard_normal((6, 8))),
        "bias": jnp.asarray(generator.standard_normal(8)),
    }
    ours, theirs = (
        jax.jit(functools.partial(run, o, reads_loss=reads_loss), compiler_options=QUICK)
        for o in (in_rotated_basis(inner, rotation), inner)
    )
    return start, ours(start, eye), by_hand(theirs(by_hand(start, q), q), q.T), theirs(start, eye)


ELEMENTWISE = {
    "rms": lambda: optax.chain(optax.scale_by_rms(), optax.scale(-0.02)),
    "lion": lambda: optax.lion(0.02, weight_decay=0.1),
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1, mask={"kernel": True, "bias": False}),
    "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=3),
    "factored rms and trust ratio": lambda: optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=3), optax.scale_by_trust_ratio(), optax.scale(-0.05)
    ),
    "prodigy": lambda: contrib.prodigy(1.0, estim_lr0=0.01),
    "momo_adam": lambda: contrib.momo_adam(0.02),  # reads the loss
    "schedule_free adam": lambda: contrib.schedule_free(optax.adam(0.02, b1=0.0), 0.02),
    "sharpness-aware": lambda: contrib.sam(optax.adam(0.02), optax.sgd(0.01), sync_period=2),
    "injected, by parts": lambda: optax.partition(
        {"w": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.02, 0.0, 20)), "b": optax.sgd(0.1)},
        lambda p: jax.tree.map_with_path(lambda keys, _: "b" if keys[-1].key == "bias" else "w", p),
    ),
    "every second step": lambda: optax.MultiSteps(optax.adam(0.02), 2).gradient_transformation(),
}
# What does not prefer a basis: there the rotation is a change of names.
EQUIVARIANT = {
    "sgd": lambda: optax.sgd(0.3),
    "nesterov, clipped and decayed": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "lbfgs directions": lambda: optax.chain(optax.scale_by_lbfgs(), optax.scale(-0.1)),
    # Newton-Schulz of a matrix that is rotated from the right is the same polynomial; its Adam sees biases only.
    "muon": lambda: contrib.muon(0.02, adam_learning_rate=0.02),
}


SLOW = ("factored rms and trust ratio", "prodigy", "schedule_free adam", "every second step")


@pytest.mark.parametrize("name", quick_and_slow([*ELEMENTWISE, *EQUIVARIANT], SLOW))
def test_equals_the_inner_optimizer_on_the_rotated_problem(name, x64):
    make = (ELEMENTWISE | EQUIVARIANT)[name]
    kind = "haar" if name in ("rms", "lion", "adafactor", *EQUIVARIANT) else "hadamard"
    start, got, want, plain = trajectories(make(), Rotation(kind, axes="output"), reads_loss=name == "momo_adam")
    assert distance(got, want) < 1e-10
    assert distance(got, start) > 1e-3
    # Equivariant ones do not notice; biases are vectors, and left alone.
    assert distance(got, plain) < 1e-10 if name in EQUIVARIANT else distance(got, plain) > 1e-3


# What cannot work: functions of the parameters, and trees like them, belong to another basis.

PARAMS = {"kernel": jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)}


def bowl(params):
    return jnp.sum((params["kernel"] - 1.0) ** 2 * jnp.arange(1.0, 9.0)[None])


def update(optimizer, **extra_args):
    step = jax.jit(lambda p, s: optimizer.update(jax.grad(bowl)(p), s, p, **extra_args), compiler_options=QUICK)
    return optax.apply_updates(PARAMS, step(PARAMS, optimizer.init(PARAMS))[0])


SEARCH = {"value": bowl(PARAMS), "grad": jax.grad(bowl)(PARAMS), "value_fn": bowl}
REFUSED = {
    "lbfgs": (lambda: optax.lbfgs(), SEARCH, "value_fn"),
    "zoom": (lambda: optax.scale_by_zoom_linesearch(9), SEARCH, "value_fn"),
    "sophia": (lambda: contrib.sophia(0.1), {"obj_fn": bowl}, "obj_fn"),
    "sam": (
        lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        {"grad_fn": lambda p, _: jax.grad(bowl)(p)},
        "grad_fn",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_of_the_parameters_are_refused_if_used(name):
    make, extra_args, used = REFUSED[name]
    with pytest.raises(ValueError, match=f"'{used}'"):
        update(in_rotated_basis(make(), OUTPUT), **extra_args)
    # The identity rotates nothing, so there is nothing to refuse.
    plain, same = (update(o, **extra_args) for o in (make(), in_rotated_basis(make(), Rotation("identity"))))
    np.testing.assert_array_equal(plain["kernel"], same["kernel"])


@pytest.mark.slow
def test_a_line_search_works_around_it():
    """A line search hands its arguments to every part of a chain, and the inner transformation uses none of them."""
    search = optax.scale_by_zoom_linesearch(20)
    optimizer = optax.chain(in_rotated_basis(optax.scale_by_lbfgs(), OUTPUT), optax.scale(-1.0), search)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state):
        value, grad = jax.value_and_grad(bowl)(params)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=bowl)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(4):
        params, state = step(params, state)
    assert bowl(params) < 0.9 * bowl(PARAMS)


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_what_is_equivariant_does_not_notice(name, x64):
    # Biases are vectors: what is left alone is the same by construction.
    start, got, want, plain = trajectories(EQUIVARIANT[name](), Rotation("haar", axes="output"))
    assert distance(got, want) < 1e-10
    assert distance(got, plain) < 1e-10
    assert distance(got, start) > 1e-3
