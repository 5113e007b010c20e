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
from orthojax.train.data import Inputs
from orthojax.train.evaluation import observing, place_batch
from orthojax.train.step import split_tokens

# Of all that `analysis.observe_language_model` defines; what is not named here is not computed by the probe.
PROBED = ("kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest")
PROBED += ("first_attention_fraction", "first_attention_mass")

_DETAILED = 16  # rows of a probe whose gradients are taken
_NODES = 8  # gradients between two probes


class Probed(NamedTuple):
    """The statistics of one step, on the device: of the layers, and if the data are a task of the output."""

    statistics: analysis.Statistics
    risks: analysis.Statistics | None = None


def _observe_text(taps: analysis.Taps) -> analysis.Statistics:
    every = analysis.observe_language_model(taps)
    total, count = ({name: part[name] for name in PROBED} for part in (every.total, every.count))
    return every._replace(total=total, count=count, maximum={})


class Probe:
    """A measurement at the steps that `train.probe_every_steps` and `train.probe_steps` name.

    The metrics stay on the device, so that it does not wait for the host; the details are fetched and written.
    """

    def __init__(self, config: Config, inputs: Inputs, mesh: Mesh | None, folder: Path | None = None):
        """Puts rows that are spread evenly over the evaluation set on the mesh that the parameters will be on.

        Args:
          config: The run.
          inputs: Its data.
          mesh: Of the parameters.
          folder: For the arrays of `train.probe_details`.

        Raises:
          UserError: If details are asked for and sequences start with different tokens.
        """
        train = config.train
        self._every, self._steps = train.probe_every_steps, frozenset(train.probe_steps)
        self._loaded = LoadedModel(Transformer(config.model), None, config, None, Path())
        self._last: tuple[int, Any] | None = None
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

    def __call__(self, step: int, params: Any) -> Probed | None:
        """Returns what is seen after a step, 0 for the start; None between the probes."""
        if step not in self._steps and not (step > 0 and self._every > 0 and step % self._every == 0):
            return None
        if self._folder is not None:
            self._write_details(self._folder, step, params)
        loaded = self._loaded._replace(params=params)
        if self._output is None:
            return Probed(analysis.measure(loaded, [self._batch], self._observe))
        return Probed(*analysis.measure(loaded, [self._batch], self._observe, output=self._output))

    def _write_details(self, folder: Path, step: int, params: Any) -> None:
        since, last = self._last or (step, params)  # a run that was resumed has forgotten the last ones
        arrays = jax.device_get(_details(self._loaded.model, params, last, self._rows))
        kept = functools.partial(np.savez_compressed, step=step, since=since, **cast(Any, arrays))
        write_atomically(probe_file(folder, step), kept)
        self._last = step, jax.tree.map(jnp.copy, params)  # the next step donates them


def probe_file(folder: Path, step: int) -> Path:
    """Returns the file of a step's details in the `probes` folder of a run."""
    return folder / f"step_{step:08d}.npz"


@functools.partial(jax.jit, static_argnums=0)
def _details(model: Transformer, params: Any, last: Any, rows: jax.Array) -> dict[str, jax.Array]:
    """Computes the arrays of one file, given the parameters after a step and at the last probe, the step `since`.

    They are those of `analysis.first_token_mechanism`; `growth` [L], by how much ||x|| of the first token grew after
    each block since the last probe; and `growth/NAME` [L], what the change of the parameter NAME added to that.
    """
    norms = functools.partial(analysis.first_residual_norms, model, token=rows[0, 0])
    by_name = analysis.change_attribution(norms, last, params, nodes=_NODES)
    arrays = analysis.first_token_mechanism(model, params, rows) | {"growth": norms(params) - norms(last)}
    return arrays | {f"growth/{name}": x for name, x in by_name.items()}


def probe_metrics(probed: Probed) -> dict[str, float]:
    """Returns finite values by the names that `evaluate` gives them, over all layers and by layer."""
    metrics = analysis.finalize(probed.statistics)
    metrics |= {} if probed.risks is None else analysis.finalize(probed.risks)
    metrics["probe_sequences"] = metrics.pop("sequences")
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
