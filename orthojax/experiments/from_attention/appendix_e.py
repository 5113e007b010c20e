"""Appendix E of From Attention to Activation: what in training depends on the basis, by training in two of them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import OptimConfig, RotationConfig, changed_fields
from orthojax.experiments import drawing, optimizers
from orthojax.experiments.base_configs import OPTIMIZERS
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.from_attention.equivariance import LAYERS, layer_deviations
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Result, Results, metric
from orthojax.ops import orthogonal
from orthojax.train import learning_rate_schedule, make_optimizer

INPUTS, OUTPUTS, TARGETS, BATCH, STEPS = 16, 12, 8, 32, 100
STEPS_SHOWN = (1, 2, 5, 10, 20, 50, 100)


class Trial(NamedTuple):
    """An optimizer that trains a kernel in two bases."""

    name: str
    label: str
    config: OptimConfig
    basis_follows: bool = False  # OrthoAdam's own Q is changed with the basis, to Q' = Q R^T


def trials() -> tuple[Trial, ...]:
    """SGD, every optimizer of `optimizer_outliers`, and OrthoAdam with either Q."""
    plain = OptimConfig(warmup_steps=0, final_learning_rate_fraction=1.0, clip_norm=None)

    def config(optimizer: str, learning_rate: float, **changes: Any) -> OptimConfig:
        return dataclasses.replace(plain, optimizer=optimizers.named(optimizer), learning_rate=learning_rate, **changes)

    ortho = config("orthoadam", 5e-3, rotation=RotationConfig(kind="haar", axes="output", seed=0))
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
      float64 [2, STEPS]: for a Haar R and for a signed permutation.
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
    for name, (fixed, rotated) in layer_deviations(seed).items():
        metrics = {"deviation": fixed, "deviation_turned_parameters": rotated}
        cases.append(Case(f"layer_{name}", {"label": LAYERS[name]}, metrics))
    return cases


EQUAL, DIFFERENT = 1e-9, 1e-2  # rounding after a hundred steps in float64 is below, another trajectory above
_PERMUTED, _ROTATED = "deviation_signed_permutation", "deviation_turned_parameters"
_PAPER = {
    **{"sgd_plain": "independent", "sgd": "independent", "adam": "dependent", "rmsprop": "dependent"},
    **{"layer_linear": "independent", "layer_affine": "dependent"},
    **{"layer_rmsnorm_single": "independent", "layer_rmsnorm": "dependent"},
}


def _size(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _kind(result: Result, key: str = "deviation") -> str:
    result.mean(key)  # raises where there is none
    values = result.values(key)
    return "independent" if max(values) < EQUAL else "dependent" if min(values) > DIFFERENT else "unclear"


def _tables(results: Results) -> list[Table]:
    optimizers, layers = [], []
    for result in results:
        fixed, permuted, rotated = (result.cell(metric(key, show=_size)) for key in ("deviation", _PERMUTED, _ROTATED))
        said = _PAPER.get(result.name, "")
        if not result.name.startswith("layer_"):
            optimizers.append([result.label, fixed, permuted, _kind(result), said])
            continue
        # Rotated along, equal scales are no longer equal.
        along = ["", ""] if result.name.endswith("_equal") else [rotated, _kind(result, _ROTATED)]
        layers.append([result.label, fixed, _kind(result), *along, said])
    return [
        Table("Optimizers: largest deviation over the steps, relative to the distance from the start",
              ["", "R Haar", "R signed permutation", "of the basis", "paper"], optimizers),
        Table("Layers: deviation of f'(R x) from R f(x), R Haar",
              ["", "parameters fixed", "of the basis", "parameters rotated along", "of the basis", "paper"], layers),
    ]  # fmt: skip


def _claim(says: str, expected: Mapping[str, str], key: str = "deviation") -> Claim:
    """That rows are basis-independent, or dependent, by a metric; one case each."""
    bounds = {"independent": f"below {EQUAL:g}", "dependent": f"above {DIFFERENT:g}"}
    asked = dict.fromkeys(expected.values())
    return Claim(says, lambda results: {results[name].label: (name,) for name in expected},
                 (metric(key, "deviation", _size),),
                 lambda result: _kind(result, key) == expected[result.name],
                 f"{', '.join(f'{kind}: {bounds[kind]}' for kind in asked)}, for every seed")  # fmt: skip


CLAIMS = (
    _claim("SGD, with momentum and without, is basis-independent.", {"sgd_plain": "independent", "sgd": "independent"}),
    _claim(
        "Adam and RMSProp are not. (Those of the others that are use norms of whole parameters, singular values, or "
        "their own basis.)",
        {"adam": "dependent", "rmsprop": "dependent"},
    ),
    _claim(
        "OrthoAdam depends on its own basis and on no other. It is Adam in the basis Q; a random Q makes that basis "
        "unlike the model's, it does not make the optimizer basis-independent.",
        {"orthoadam_follows": "independent", "orthoadam": "dependent"},
    ),
    _claim(
        "A signed permutation is no other basis for Adam and RMSProp.",
        {"adam": "independent", "rmsprop": "independent"},
        _PERMUTED,
    ),
    _claim(
        "RMSNormSingle is basis-independent; RMSNorm with a scale for each channel, LayerNorm and a fixed bias are "
        "not. LayerNorm is not even with equal scales, since it removes the mean, a fixed direction.",
        {"layer_rmsnorm_single": "independent"}
        | {f"layer_{name}": "dependent" for name in ("rmsnorm", "layernorm", "layernorm_equal", "bias")},
    ),
    _claim(
        "By the paper's criterion, f(R x) = R f(x), a linear layer without bias is basis-independent. It would have to "
        "commute with every R, as multiples of the identity alone do. What holds is that R W R^T does in the other "
        "basis what W does in this one.",
        {"layer_linear": "independent"},
    ),
    _claim(
        "In that sense, parameters rotated along, biases and scales for each channel are basis-dependent. The scales "
        "are, as no scales in the other basis do the same. A bias is not: R b is a bias. It is the elementwise "
        "optimizer that gives biases a basis.",
        {"layer_affine": "dependent", "layer_rmsnorm": "dependent"},
        _ROTATED,
    ),
)


def _picture(results: Results) -> list[Picture]:
    curves = {}
    for name in ("adam", "orthoadam", "orthoadam_follows", "muon", "sgd", "novograd"):
        values = np.array([results[name].values(f"deviation/step_{step}") for step in STEPS_SHOWN])
        curves[results[name].label] = (STEPS_SHOWN, np.log10(values.T))
    figure = drawing.lines(curves, x_label="step", y_label="log10 of the deviation")
    caption = "Training in two bases: how far apart, relative to the distance from the start; range over seeds."
    return [Picture("deviation_by_step", caption, figure)]


def _about(results: Results) -> list[str]:
    return [
        "A kernel W is trained for a hundred steps, and W R^T, for an orthogonal R, is trained on the loss that knows "
        "it in that basis, with equal batches. A basis-independent optimizer takes the same path; any other goes "
        "elsewhere. The optimizers are those that a run's config names.",
        "The appendix argues for SGD and Adam from their update rules, and names f(R x) = R f(x) as the criterion for "
        "all functions. For an optimizer, whose function is the path from a loss to parameters, that is what is "
        "measured here. Where it cites figures 6 and 5, its figures 4 and 5 are meant.",
        "The task: tanh(x W) times a fixed matrix, mean squared error, noisy targets, fresh batches; W is 16 x 12.",
    ]


EXPERIMENT = Experiment(
    name="appendix_e",
    title="Appendix E: which optimizers and layers depend on the basis",
    compute=compute,
    about=_about,
    tables=(_tables,),
    claims=CLAIMS,
    pictures=(_picture,),
)
