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
from orthojax.experiments.from_attention.figure6_report import report
from orthojax.experiments.from_attention.models import SCALES, grid
from orthojax.experiments.from_attention.output_bases import output_bases
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.experiments.study.study import Experiment
from orthojax.model import Taps, Transformer
from orthojax.ops.statistics import at_least_float32, kurtosis
from orthojax.train import Inputs, read_params

# Of the evaluation set, at most; and at once, since the activations of all layers of so many are held.
_SEQUENCES, _AT_ONCE = 128, 8


def _observe(taps: Taps) -> dict[str, jax.Array]:
    attention, mlp = at_least_float32(taps.attention_output), at_least_float32(taps.mlp_output)
    return {"added": attention + mlp, "mlp": mlp}


def kurtosis_in_bases(x: jax.Array, bases: jax.Array | None) -> dict[str, jax.Array]:
    """Kurtosis over channels of X, X Q, X Q^T and X V, mean over positions.

    Args:
      x: Activations of every layer, [L, B, T, D] float32.
      bases: Q of every layer, [L, D, D]; None leaves out X Q and X Q^T.

    Returns:
      `x`, `xq`, `xqt` and `xv` -> [L, B]. V are the right singular vectors of each sequence's X.
    """
    turned = {"x": x, "xv": in_singular_basis(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)}
    if bases is not None:
        turned["xq"] = jnp.einsum("LBTD,LDE->LBTE", x, bases, precision="highest")
        turned["xqt"] = jnp.einsum("LBTD,LED->LBTE", x, bases, precision="highest")
    return {name: jnp.mean(kurtosis(y), axis=-1) for name, y in turned.items()}


@functools.partial(jax.jit, static_argnums=0)
def _look(model: Transformer, params: Any, tokens: jax.Array, bases: jax.Array | None) -> dict[str, jax.Array]:
    observed: Any = model.apply({"params": params}, tokens[:, :-1], observe=_observe, head=False)
    return {
        f"{what}_kurtosis_{basis}": values
        for what, x in observed[1].items()
        for basis, values in kurtosis_in_bases(x, bases).items()
    }


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    model, params = Transformer(config.model), read_params(checkpoint)
    bases = jnp.asarray(output_bases(config, "mlp_output")) if config.optim.is_rotated else None
    rows = inputs.evaluation[:_SEQUENCES]
    looks = [jax.device_get(_look(model, params, rows[i : i + _AT_ONCE], bases)) for i in range(0, len(rows), _AT_ONCE)]
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
