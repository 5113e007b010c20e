"""Figure 6: the kurtosis of what each layer adds to the hidden states, in four orthonormal bases.

If OrthoAdam only moved outliers into its own basis, activations would show them there. X [T, D] is taken in two ways:
`added`, what a whole block adds to the hidden states (attention output plus MLP output, x_m - x_{m-1}), which is how
appendix F words it; and `mlp`, the MLP's part alone, which is what the kernel writes whose basis Q is.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.analysis import in_singular_basis
from orthojax.config import Config
from orthojax.experiments.from_attention.figure6_report import SEQUENCES, report
from orthojax.experiments.from_attention.models import SCALES, grid
from orthojax.experiments.from_attention.output_bases import output_bases
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.experiments.study.study import Experiment
from orthojax.model import Taps, Transformer
from orthojax.ops.statistics import at_least_float32, kurtosis
from orthojax.train import Inputs, read_params

# Sequences, since the activations of all layers of so many are held.
_AT_ONCE = 8


def _observe(taps: Taps) -> dict[str, jax.Array]:
    attention, mlp = at_least_float32(taps.attention_output), at_least_float32(taps.mlp_output)
    return {"added": attention + mlp, "mlp": mlp}


@jax.jit
def _mean_kurtosis(x: jax.Array, bases: jax.Array | None) -> jax.Array:
    """Over channels of X Q, mean over positions: [L, B, T, D], [L, D, E] -> [L, B]."""
    turned = x if bases is None else jnp.einsum("LBTD,LDE->LBTE", x, bases, precision="highest")
    return jnp.mean(kurtosis(turned), axis=-1)


def kurtosis_in_bases(x: jax.Array, bases: np.ndarray | None) -> dict[str, np.ndarray]:
    """Kurtosis over channels of X, X Q, X Q^T and X V, mean over positions.

    Args:
      x: Activations of every layer, [L, B, T, D] float32.
      bases: Q of every layer, [L, D, D]; None leaves out X Q and X Q^T.

    Returns:
      `x`, `xq`, `xqt` and `xv` -> [L, B]. V are the right singular vectors of each sequence's X.
    """
    found = {"x": _mean_kurtosis(x, None)}
    if bases is not None:
        found |= {"xq": _mean_kurtosis(x, bases), "xqt": _mean_kurtosis(x, bases.swapaxes(1, 2))}
    found["xv"] = _mean_kurtosis(in_singular_basis(x).astype(np.float32), None)
    return jax.device_get(found)


@functools.partial(jax.jit, static_argnums=0)
def _activations(model: Transformer, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    observed: Any = model.apply({"params": params}, tokens[:, :-1], observe=_observe, head=False)
    return observed[1]


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    model, params = Transformer(config.model), read_params(checkpoint)
    bases = output_bases(config, "mlp_output") if config.optim.is_rotated else None
    rows, looks = inputs.evaluation[:SEQUENCES], []
    for i in range(0, len(rows), _AT_ONCE):
        activations = _activations(model, params, rows[i : i + _AT_ONCE])
        looks.append(
            {
                f"{what}_kurtosis_{basis}": values
                for what, x in activations.items()
                for basis, values in kurtosis_in_bases(x, bases).items()
            }
        )
    on_progress("bases")
    metrics = {}
    for name in looks[0]:
        layers = np.concatenate([look[name] for look in looks], axis=1).astype(np.float64).mean(1)
        metrics[name] = float(layers.mean())
        metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(layers)}
    return Measured(metrics, {})


EXPERIMENT = Experiment(
    name="figure6",
    title="kurtosis of each layer's output in the basis of OrthoAdam and in that of its singular vectors",
    scales={scale: functools.partial(grid, scale, ("gpt2_350m",), ("cured", "vanilla")) for scale in SCALES},
    report=report,
    measures=(Measure("bases", _measure),),
)
