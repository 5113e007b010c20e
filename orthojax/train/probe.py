"""The probe of a few evaluation rows while a model trains: into metrics.jsonl, and in detail into arrays by step."""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from orthojax import analysis
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.files import make_folder, write_atomically
from orthojax.model import LoadedModel, Transformer
from orthojax.train.evaluation import observing, place_batch
from orthojax.train.step import loss_sum_nats, split_tokens
from orthojax.train.workdir import Inputs

# Of all that `analysis.observe_language_model` defines; what is not named here is not computed by the probe.
PROBED = ("kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest")
PROBED += ("first_attention_fraction", "first_attention_mass")

_DETAILED = 16  # rows of a probe whose gradients are taken


class Probed(NamedTuple):
    """What was seen at one step, on the device.

    Attributes:
      statistics: Of the layers.
      risks: Of the output, where the data are a task.
      by_layer: Further metrics, [num_layers] each.
    """

    statistics: analysis.Statistics
    risks: analysis.Statistics | None = None
    by_layer: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)


def _observe_text(taps: analysis.Taps) -> analysis.Statistics:
    every = analysis.observe_language_model(taps)
    total, count = ({name: part[name] for name in PROBED} for part in (every.total, every.count))
    return every._replace(total=total, count=count, maximum={})


class Probe:
    """Measures a model at the steps that `train.probe_every_steps` and `train.probe_steps` name.

    The metrics stay on the device, so that it does not wait for the host; the details are fetched and written.
    """

    def __init__(self, config: Config, inputs: Inputs, mesh: Mesh | None, folder: Path | None = None):
        """Puts rows that are spread evenly over the evaluation set on the mesh where the parameters will be.

        Args:
          config: The run.
          inputs: Its data.
          mesh: Where the parameters will be.
          folder: For the arrays of `train.probe_details`.

        Raises:
          UserError: Where details are asked for and sequences start with different tokens.
        """
        train = config.train
        self._every, self._steps = train.probe_every_steps, frozenset(train.probe_steps)
        self._loaded = LoadedModel(Transformer(config.model), None, config, None, Path())
        self._before, self._last = None, None
        self._folder = folder if train.probe_details else None
        if not self._every and not self._steps:
            return
        n, wanted = len(inputs.evaluation), min(len(inputs.evaluation), train.probe_sequences)
        rows = inputs.evaluation[[i * n // wanted for i in range(wanted)]]
        (placed,) = place_batch(mesh, split_tokens(rows)[0])
        if inputs.task is None:
            self._batch, self._observe, self._output = (placed,), _observe_text, None
        else:
            self._batch, (self._observe, self._output) = (placed, placed), observing(inputs.task)
        if self._folder is not None:
            if len(set(rows[:, 0])) > 1:
                problem = "train.probe_details follows the first token, and sequences start with different ones"
                raise UserError(problem, allowed="data with one BOS or more, or no details")
            make_folder(self._folder, "folder of probes")
            self._rows = jnp.asarray(rows[:_DETAILED])

    def forget(self) -> None:
        """Drops the parameters of the last probe, from which a run that rolled back did not come."""
        self._last = None

    def wants(self, step: int) -> bool:
        """Whether the step is probed; 0 is the start."""
        return step in self._steps or (step > 0 and self._every > 0 and step % self._every == 0)

    def before(self, step: int, params: Any) -> None:
        """Keeps a copy of the parameters before a step where its update is probed; the step will donate them."""
        if self._folder is not None and self.wants(step):
            self._before = jax.tree.map(jnp.copy, params)

    def __call__(self, step: int, params: Any) -> Probed | None:
        """What is seen after a step; None between the probes."""
        if not self.wants(step):
            return None
        loaded = self._loaded._replace(params=params)
        if self._output is None:
            probed = Probed(analysis.measure(loaded, [self._batch], self._observe))
        else:
            probed = Probed(*analysis.measure(loaded, [self._batch], self._observe, output=self._output))
        if self._folder is None:
            return probed
        before, self._before = self._before or params, None  # at the start nothing has changed
        # In a run that was resumed, or rolled back, since the last probe its parameters are gone.
        since, last = self._last or (max(0, step - 1), before)
        self._last = step, jax.tree.map(jnp.copy, params)
        arrays = jax.device_get(_details(self._loaded.model, params, before, last, self._rows)) | {"since": since}
        by_layer = {name: x for name, x in arrays.items() if name.startswith("first_") and np.ndim(x) == 1}
        kept = functools.partial(np.savez_compressed, step=step, **cast(Any, arrays))
        write_atomically(probe_file(self._folder, step), kept)
        return probed._replace(by_layer=by_layer)


def probe_file(folder: Path, step: int) -> Path:
    """Where the details of a step are, in the `probes` folder of a run."""
    return folder / f"step_{step:08d}.npz"


_NODES = 8  # gradients between two probes


@functools.partial(jax.jit, static_argnums=0)
def _details(model: Transformer, params: Any, before: Any, last: Any, rows: jax.Array) -> dict[str, jax.Array]:
    """The arrays of one file, given the parameters after a step, before it, and at the last probe.

    Names of parameters follow a `/`. Of the first row `tokens` [T], `attention` [L, N, T, S], `value_norms` [L, N, S]
    and `residual_norms` [L, T]; `gradient/NAME` and `update/NAME` [2], Frobenius and spectral norm; `growth` [L], by
    how much ||x|| of the first token grew after each block since the last probe (the step `since`), and `growth/NAME`
    [L], what the parameter's change added to that; what `analysis.first_token_mechanism` gives.
    """
    inputs, _ = split_tokens(rows)

    def observe(taps: analysis.Taps) -> Any:
        return taps.attention_weights[0], taps.value_norms[0], jnp.linalg.norm(taps.residual[0], axis=-1)

    seen: Any = model.apply({"params": params}, inputs[:1], observe=observe, head=False)[1]
    arrays: dict[str, jax.Array] = dict(zip(("attention", "value_norms", "residual_norms"), seen, strict=True))
    arrays["tokens"] = inputs[0]
    arrays |= analysis.first_token_mechanism(model, params, rows)

    def loss(params: Any) -> jax.Array:
        total, count = loss_sum_nats(model, params, rows)
        return total / count

    norms = functools.partial(analysis.first_residual_norms, model, token=inputs[0, 0])
    arrays["growth"] = norms(params) - norms(last)
    of = {
        "gradient": analysis.parameter_norms(jax.grad(loss)(params)),
        "update": analysis.parameter_norms(jax.tree.map(jnp.subtract, params, before)),
        "growth": analysis.change_attribution(norms, last, params, nodes=_NODES),
    }
    return arrays | {f"{what}/{name}": x for what, by_name in of.items() for name, x in by_name.items()}


def probe_metrics(probed: Probed) -> dict[str, float]:
    """Finite values by the names that `evaluate` gives them, over all layers and by layer."""
    metrics = analysis.finalize(probed.statistics)
    metrics |= {} if probed.risks is None else analysis.finalize(probed.risks)
    for name, layers in probed.by_layer.items():
        metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(layers)}
    metrics["probe_sequences"] = metrics.pop("sequences")
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
