"""Quantised checkpoints: one step of a run with its kernels as integers, for evaluation.

`params` has the names of the run; in place of a kernel it has `kernel/integers`, `kernel/step` and, for zeropoint,
`kernel/shift`: `qvalue`, `scale` and `zero_point` of `orthojax.ops.quantize.Quantized`. The JSON item `quantization`
says what was rounded.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from orthojax import quant
from orthojax.config import Config, from_dict, to_json
from orthojax.errors import UserError
from orthojax.model import LoadedModel
from orthojax.ops.quantize import Quantized
from orthojax.quant import QuantizationSetting
from orthojax.train.checkpoint.checksums import read_json_item, steps_in
from orthojax.train.checkpoint.manager import open_manager, save_step, write_errors
from orthojax.train.checkpoint.reading import (
    by_path,
    is_quantized,
    read_config,
    read_params,
    read_verified,
    require_model,
)

_VERSION = 1


def quantize_checkpoint(
    step_folder: Path, setting: QuantizationSetting, directory: Path, *, include: str = quant.KERNELS_BUT_HEAD
) -> Path:
    """Writes the parameters of a checkpoint, quantised.

    Args:
      step_folder: The checkpoint of a run.
      setting: Which runs on integers, or leaves activations float.
      directory: Where the folder of the step goes; one of an earlier call is replaced.
      include: As of `quant.integer_params`.

    Returns:
      The folder of the step.

    Raises:
      UserError: As `read_params` and `quant.integer_params`; where `directory` holds checkpoints of a run, or the disk
        refuses.
    """
    directory = _free(directory)
    quant.require_integers(setting)  # before anything is read
    quantized = quant.integer_params(read_params(step_folder), setting, include)
    data = read_json_item(step_folder, "data")
    return _write(directory, read_config(step_folder), data, setting, include, quantized)


def quantize_model(
    loaded: LoadedModel, setting: QuantizationSetting, directory: Path, *, include: str = quant.KERNELS_BUT_HEAD
) -> Path:
    """`quantize_checkpoint` of a model in memory, such as one that others trained; `orthojax.load` reads the result.

    Args:
      loaded: From `orthojax.load`, with float parameters.
      setting: As of `quantize_checkpoint`, like the rest.
      directory: Gets the folder 0.
      include: As of `quant.integer_params`.

    Raises:
      UserError: As `quant.integer_params`; where `directory` holds checkpoints of a run, or the disk refuses.
    """
    directory = _free(directory)
    quantized = quant.integer_params(loaded.params, setting, include)
    data = {"next_step": 0, "source": str(loaded.source), "tokenizer_sha256": getattr(loaded.tokenizer, "sha256", None)}
    return _write(directory, loaded.config, data, setting, include, quantized)


def _free(directory: Path) -> Path:
    """The absolute path, where no checkpoints of a run are."""
    directory = directory.absolute()
    if any(not is_quantized(directory / str(step)) for step in steps_in(directory)):
        raise UserError(
            f"{directory} holds the checkpoints of a run", allowed="a folder of its own, such as --workdir=DIR"
        )
    return directory


def _write(
    directory: Path, config: Config, data: dict[str, Any], setting: QuantizationSetting, include: str, quantized: Any
) -> Path:
    step = int(data["next_step"])
    params = jax.tree.map(_as_dict, quantized, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    values = {
        "config": json.loads(to_json(config)),
        "data": data,
        "quantization": {"version": _VERSION, "setting": dataclasses.asdict(setting), "include": include},
    }
    manager = open_manager(directory)
    with write_errors(directory), manager:
        if step in manager.all_steps():
            manager.delete(step)
        save_step(manager, step, {"params": params}, values)
    return directory / str(step)


def read_quantized(step_folder: Path) -> tuple[QuantizationSetting, Any]:
    """What `quantize_checkpoint` wrote, on the first device of this process.

    Returns:
      The setting, and parameters as `quant.integer_params` gives them, for `quant.integer_linear(setting)`.

    Raises:
      UserError: Where the checkpoint is not quantised, is damaged, or not of the model in its config.
    """
    if not is_quantized(step_folder):
        raise UserError(f"the checkpoint {step_folder} is not quantised")
    header = read_json_item(step_folder, "quantization")
    if header.get("version") != _VERSION:
        raise UserError(f"{step_folder} is quantised in version {header.get('version')!r}", allowed=str(_VERSION))
    setting = from_dict(QuantizationSetting, header.get("setting", {}), f"the setting in {step_folder}")
    arrays = read_verified(step_folder, "params")
    params = jax.tree.map(_from_dict, arrays, is_leaf=lambda node: isinstance(node, dict) and "integers" in node)
    require_model(step_folder, by_path(params, is_leaf=lambda leaf: isinstance(leaf, Quantized)))
    return setting, params


# Names on disk -> fields.
_FIELDS = {"integers": "qvalue", "step": "scale", "shift": "zero_point"}


def _as_dict(leaf: Any) -> Any:
    if not isinstance(leaf, Quantized):
        return leaf
    return {name: value for name, field in _FIELDS.items() if (value := getattr(leaf, field)) is not None}


def _from_dict(node: Any) -> Any:
    return Quantized(**{_FIELDS[name]: value for name, value in node.items()}) if isinstance(node, dict) else node
