"""Appendix E of From Attention to Activation: what in training depends on the basis, by training in two of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import OptimConfig, RotationConfig
from orthojax.experiments.from_attention.appendix_e_report import report
from orthojax.experiments.from_attention.equivariance import layer_deviations
from orthojax.experiments.ours.optimizer_outliers import OPTIMIZERS
from orthojax.experiments.study.calculation import Calculation, Case
from orthojax.fields import changed_fields
from orthojax.ops import orthogonal
from orthojax.train import learning_rate_schedule, make_optimizer

INPUTS, OUTPUTS, TARGETS, BATCH, STEPS = 16, 12, 8, 32, 100
STEPS_SHOWN = (1, 2, 5, 10, 20, 50, 100)
FRAMES = ("haar", "signed_permutation")


@dataclasses.dataclass(frozen=True)
class Trial:
    """An optimizer that trains a kernel in two bases.

    Attributes:
      name: Of the rows.
      label: For people.
      config: The optimizer.
      basis_follows: Whether OrthoAdam's own Q is changed with the basis, to Q' = Q R^T.
    """

    name: str
    label: str
    config: OptimConfig
    basis_follows: bool = False


def trials() -> tuple[Trial, ...]:
    """SGD, every optimizer of `optimizer_outliers`, and OrthoAdam with either Q."""
    plain = OptimConfig(warmup_steps=0, final_learning_rate_fraction=1.0, clip_norm=None)

    def config(optimizer: str, learning_rate: float, **changes: Any) -> OptimConfig:
        return dataclasses.replace(plain, optimizer=optimizer, learning_rate=learning_rate, **changes)

    ortho = config("orthoadam", 5e-3, rotation=RotationConfig(kind="haar"))
    return (
        Trial("sgd_plain", "SGD", config("sgd", 0.3)),
        *(Trial(name, label, config(name, rate, **changes)) for name, (label, changes, rate) in OPTIMIZERS.items()),
        Trial("orthoadam_follows", "OrthoAdam, its Q changed to Q R^T", ortho, basis_follows=True),
        Trial("orthoadam", "OrthoAdam, the same Q", ortho),
    )


@functools.cache
def _program(trial: Trial):
    """Compiled for each optimizer once: (frames, start, readout, inputs, targets) -> kernels [frames, steps, ...]."""
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
    """The identity, a Haar matrix and a signed permutation, float64 [3, OUTPUTS, OUTPUTS]."""
    rng = np.random.default_rng([seed, 1])
    signs = rng.choice([-1.0, 1.0], OUTPUTS)
    return np.stack([np.eye(OUTPUTS), orthogonal.haar((seed, 2), OUTPUTS), np.diag(signs)[rng.permutation(OUTPUTS)]])


def task(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(start [in, out], readout [out, targets], inputs [steps, batch, in], targets [steps, batch, targets]), float64.

    The loss is the mean square of tanh(inputs W) readout - targets, a different batch in every step.
    """
    rng = np.random.default_rng([seed, 0])
    inputs = rng.standard_normal((STEPS, BATCH, INPUTS))
    readout = rng.standard_normal((OUTPUTS, TARGETS)) * np.geomspace(0.1, 1.0, OUTPUTS)[:, None]
    teacher = 0.5 * rng.standard_normal((INPUTS, OUTPUTS))
    targets = np.tanh(inputs @ teacher) @ readout + 0.1 * rng.standard_normal((STEPS, BATCH, TARGETS))
    start = 0.1 * rng.standard_normal((INPUTS, OUTPUTS))
    return start, readout, inputs, targets


def deviations(trial: Trial, seed: int) -> np.ndarray:
    r"""How far training in another basis leads elsewhere.

    The kernel W [in, out] is trained on L(W), and W' = W R^T, which starts as W_0 R^T, on L'(W') = L(W' R), with equal
    batches. The deviation is :math:`\|W'_t R - W_t\| / \|W_t - W_0\|` in the Frobenius norm.

    Args:
      trial: Which optimizer.
      seed: Of the task, the start and R.

    Returns:
      float64 [len(FRAMES), STEPS], for each R and step.
    """
    start, readout, inputs, targets = task(seed)
    plain, *others = np.asarray(_program(trial)(frames(seed), start, readout, inputs, targets))
    travelled = np.linalg.norm(plain - start, axis=(1, 2))
    return np.stack([np.linalg.norm(other - plain, axis=(1, 2)) / travelled for other in others])


def compute(seed: int) -> list[Case]:
    """Deviations of every optimizer, and of the layers of a network."""
    cases = []
    for trial in trials():
        haar, permuted = deviations(trial, seed)
        metrics = {"deviation": float(haar.max()), "deviation_signed_permutation": float(permuted.max())}
        metrics |= {f"deviation/step_{step}": float(haar[step - 1]) for step in STEPS_SHOWN}
        overrides = {f"optim.{name}": value for name, value in changed_fields(OptimConfig(), trial.config).items()}
        overrides |= {"label": trial.label, "basis_follows": trial.basis_follows}
        cases.append(Case(trial.name, overrides, metrics))
    for name, (fixed, turned) in layer_deviations(seed).items():
        cases.append(Case(f"layer_{name}", {}, {"deviation": fixed, "deviation_turned_parameters": turned}))
    return cases


CALCULATION = Calculation("appendix_e", "which optimizers and layers depend on the basis", compute, report)
