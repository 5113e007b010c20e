"""Checkpoints: Orbax, plain names, readable without orthojax, restorable onto any mesh.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), and as JSON `config` (the whole config, so that a softmax-1
model can not be evaluated as softmax), `data` (the position in the data and the hashes of what was read), `validation`
(the newest validation loss, once there is one) and `checksums` (SHA-256 of every file). They commit together, by one
renaming, in the background. A quantised checkpoint has no `opt_state`, and the JSON item `quantization`.

In reading order: `checksums`, `reading` (one checkpoint, verified), `manager` (the checkpoints of a run), `quantized`.
"""

from orthojax.train.checkpoint.checksums import DamagedError, read_json_item
from orthojax.train.checkpoint.manager import FORMAT_VERSION, Checkpoints, Retention, Validation
from orthojax.train.checkpoint.quantized import is_quantized, quantize_checkpoint, read_quantized
from orthojax.train.checkpoint.reading import (
    array_items,
    find_checkpoint,
    list_arrays,
    read_config,
    read_optimizer_state,
    read_params,
    require_same_data,
    verify_checkpoint,
)

__all__ = [
    "FORMAT_VERSION",
    "Checkpoints",
    "DamagedError",
    "Retention",
    "Validation",
    "array_items",
    "find_checkpoint",
    "is_quantized",
    "list_arrays",
    "quantize_checkpoint",
    "read_config",
    "read_json_item",
    "read_optimizer_state",
    "read_params",
    "read_quantized",
    "require_same_data",
    "verify_checkpoint",
]
