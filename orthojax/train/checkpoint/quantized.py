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
import orbax.checkpoint as ocp

from orthojax import quant
from orthojax.errors import UserError
from orthojax.fields import from_dict, to_json
from orthojax.files import make_folder
from orthojax.ops.quantize import Quantized
from orthojax.quant import QuantizationSetting
from orthojax.train.checkpoint.checksums import by_path
from orthojax.train.checkpoint.handler import ChecksumSave, registry
from orthojax.train.checkpoint.items import DamagedError, first_line, read_json_item, steps_in
from orthojax.train.checkpoint.reading import (
    QUANTIZATION,
    array_items,
    read_config,
    read_params,
    read_whole,
)
from orthojax.train.checkpoint.verification import read_checksums, require_intact_values
from orthojax.train.step import parameter_shapes

_VERSION = 1


def is_quantized(step_folder: Path) -> bool:
    """Whether a checkpoint is one of `quantize_checkpoint`."""
    return array_items(step_folder) == ("params",)


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
    directory = directory.absolute()
    if any(not is_quantized(directory / str(step)) for step in steps_in(directory)):
        raise UserError(
            f"{directory} holds the checkpoints of a run", allowed="a folder of its own, such as --workdir=DIR"
        )
    quant.require_integers(setting)  # before anything is read
    quantized = quant.integer_params(read_params(step_folder), setting, include)
    data = read_json_item(step_folder, "data")
    step = int(data["next_step"])
    params = jax.tree.map(_as_dict, quantized, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    values = {
        "config": json.loads(to_json(read_config(step_folder))),
        "data": data,
        QUANTIZATION: {"version": _VERSION, "setting": dataclasses.asdict(setting), "include": include},
    }
    make_folder(directory, "checkpoints folder")
    items: dict[str, Any] = {item: ocp.args.JsonSave(content) for item, content in values.items()}
    items |= {
        "params": ocp.args.StandardSave(params),
        "checksums": ChecksumSave({"params": params, "opt_state": {}}, values),
    }
    try:
        options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, lightweight_initialize=True)
        with ocp.CheckpointManager(directory, options=options, handler_registry=registry()) as manager:
            if step in manager.all_steps():
                manager.delete(step)
            manager.save(step, args=ocp.args.Composite(**items), force=True)
    except Exception as error:
        raise UserError(f"cannot write a checkpoint to {directory}: {first_line(error)}") from error
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
    header = read_json_item(step_folder, QUANTIZATION)
    if header.get("version") != _VERSION:
        raise UserError(f"{step_folder} is quantised in version {header.get('version')!r}", allowed=str(_VERSION))
    setting = from_dict(QuantizationSetting, header.get("setting", {}), f"the setting in {step_folder}")
    arrays = read_whole(step_folder, "params", jax.local_devices()[0])
    require_intact_values(step_folder, read_checksums(step_folder))
    params = jax.tree.map(_from_dict, arrays, is_leaf=_is_quantized_dict)
    _require_model(step_folder, params)
    return setting, params


def _as_dict(leaf: Any) -> Any:
    if not isinstance(leaf, Quantized):
        return leaf
    shift = {} if leaf.zero_point is None else {"shift": leaf.zero_point}
    return {"integers": leaf.qvalue, "step": leaf.scale} | shift


def _is_quantized_dict(node: Any) -> bool:
    return isinstance(node, dict) and "integers" in node


def _from_dict(node: Any) -> Any:
    if not _is_quantized_dict(node):
        return node
    return Quantized(node["integers"], node["step"], node.get("shift"))


def _require_model(step_folder: Path, params: Any) -> None:
    """Refuses other names and shapes than those of the model in the checkpoint's config."""
    shapes = jax.tree.map(_shape, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    found = {path: leaf.shape for path, leaf in by_path(shapes).items()}
    wanted = {path: leaf.shape for path, leaf in by_path(parameter_shapes(read_config(step_folder))).items()}
    for path in sorted(found | wanted):
        if found.get(path) != wanted.get(path):
            found_text, wanted_text = found.get(path, "absent"), wanted.get(path, "absent")
            raise DamagedError(step_folder, f"its config wants {path} {wanted_text}, it is {found_text}")


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
