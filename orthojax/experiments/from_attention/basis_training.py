"""Training a kernel in two bases (Appendix E): which optimizers depend on the basis."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import OptimConfig, RotationConfig
from orthojax.ops import orthogonal
from orthojax.train import learning_rate_schedule, make_optimizer

INPUTS, OUTPUTS, TARGETS, BATCH, STEPS = 16, 12, 8, 32, 100


class Trial(NamedTuple):
    """An optimizer that trains a kernel in two bases."""

    name: str
    config: OptimConfig
    basis_follows: bool = False  # OrthoAdam's own Q is changed with the basis, to Q' = Q R^T


def trials() -> tuple[Trial, ...]:
    """Returns SGD with momentum and without, RMSProp, Adam, Lion, Muon, and OrthoAdam with either Q."""
    plain = OptimConfig(warmup_steps=0, final_learning_rate_fraction=1.0, clip_norm=None)

    def config(optimizer: str, learning_rate: float, **changes: Any) -> OptimConfig:
        return dataclasses.replace(plain, optimizer=optimizer, learning_rate=learning_rate, **changes)

    ortho = config("orthoadam", 5e-3, rotation=RotationConfig(kind="haar", axes="output", seed=0))
    return (
        Trial("sgd_plain", config("sgd", 0.3)),
        Trial("sgd", config("sgd", 0.3, momentum=0.9)),
        Trial("rmsprop", config("rmsprop", 1.5e-3)),
        Trial("adam", config("adam", 5e-3)),
        Trial("lion", config("lion", 5e-4, b2=0.99)),
        Trial("muon", config("muon", 1e-2, momentum=0.95)),
        Trial("orthoadam_follows", ortho, basis_follows=True),
        Trial("orthoadam", ortho),
    )


@functools.cache
def _program(trial: Trial):
    """Compiles for each optimizer once: (frames, start, readout, inputs, targets) -> kernels [frames, steps, ...]."""
    optimizer = make_optimizer(trial.config, schedule=learning_rate_schedule(trial.config, STEPS))

    def in_frame(frame: jax.Array, start: jax.Array, readout: jax.Array, inputs: jax.Array, targets: jax.Array):
        def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
            kernel = params["kernel"] @ frame  # rows of the rotated kernel are R w, so this is the kernel itself
            return jnp.mean(jnp.square(jnp.tanh(x @ kernel) @ readout - y))

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            return (params, state), params["kernel"] @ frame

        params = {"kernel": start @ frame.T}
        state = optimizer.init(params)
        if trial.basis_follows:
            state = jax.tree_util.tree_map_with_path(
                lambda path, leaf: leaf @ frame.T if "basis_0" in jax.tree_util.keystr(path) else leaf, state
            )
        return jax.lax.scan(step, (params, state), (inputs, targets))[1]

    return jax.jit(jax.vmap(in_frame, in_axes=(0, None, None, None, None)))


def frames(seed: int) -> np.ndarray:
    """Returns the identity, a Haar matrix and a signed permutation, float64 [3, OUTPUTS, OUTPUTS]."""
    rng = np.random.default_rng([seed, 1])
    signs = rng.choice([-1.0, 1.0], OUTPUTS)
    return np.stack([np.eye(OUTPUTS), orthogonal.haar((seed, 2), OUTPUTS), np.diag(signs)[rng.permutation(OUTPUTS)]])


def task(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns start [in, out], readout [out, targets], inputs [steps, batch, in] and targets [steps, batch, targets].

    All are float64. The loss is the mean square of tanh(inputs W) readout - targets, a different batch in every step.
    """
    rng = np.random.default_rng([seed, 0])
    inputs = rng.standard_normal((STEPS, BATCH, INPUTS))
    readout = rng.standard_normal((OUTPUTS, TARGETS)) * np.geomspace(0.1, 1.0, OUTPUTS)[:, None]
    teacher = 0.5 * rng.standard_normal((INPUTS, OUTPUTS))
    targets = np.tanh(inputs @ teacher) @ readout + 0.1 * rng.standard_normal((STEPS, BATCH, TARGETS))
    start = 0.1 * rng.standard_normal((INPUTS, OUTPUTS))
    return start, readout, inputs, targets


def deviations(trial: Trial, seed: int) -> np.ndarray:
    r"""Measures how far training in another basis leads elsewhere.

    The kernel W [in, out] is trained on L(W), and W' = W R^T, which starts as W_0 R^T, on L'(W') = L(W' R), with equal
    batches. The deviation is :math:`\|W'_t R - W_t\| / \|W_t - W_0\|` in the Frobenius norm.

    Args:
      trial: The optimizer.
      seed: Of the task, the start and R.

    Returns:
      float64 [2, STEPS]: for a Haar R and for a signed permutation.
    """
    start, readout, inputs, targets = task(seed)
    plain, *others = np.asarray(_program(trial)(frames(seed), start, readout, inputs, targets))
    travelled = np.linalg.norm(plain - start, axis=(1, 2))
    return np.stack([np.linalg.norm(other - plain, axis=(1, 2)) / travelled for other in others])
