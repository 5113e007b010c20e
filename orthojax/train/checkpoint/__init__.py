"""Checkpoints: Orbax, plain names, readable without orthojax, restorable onto any mesh.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), and as JSON `config` (the whole config, so that a softmax-1
model can not be evaluated as softmax), `data` (the position in the data and the hashes of what was read), `validation`
(the newest validation loss, once there is one) and `checksums`, because Orbax restores a flipped byte without a word.
They commit together, by one renaming, in the background.

The file `checksums/metadata` says how arrays are summed (see the module `checksums`) and has the sums of the first
process; every further process adds `checksums/process_N`. Format 1, which had a CRC-32 of every array and none of the
JSON items, is still read and checked.

A quantised checkpoint has `params`, `config` and `data` so, no `opt_state`, and the JSON item `quantization`.

In reading order: `items` (JSON items, damage), `checksums` (of arrays), `handler` (writes them), `verification` (checks
them), `reading` (one checkpoint), `keeping` (which stay), `manager` (the checkpoints of a run), `quantized` (made from
one of them).
"""

from orthojax.train.checkpoint.items import DamagedError, read_json_item
from orthojax.train.checkpoint.keeping import Keep, Validation
from orthojax.train.checkpoint.manager import FORMAT_VERSION, Checkpoints
from orthojax.train.checkpoint.quantized import is_quantized, quantize_checkpoint, read_quantized
from orthojax.train.checkpoint.reading import (
    array_items,
    find_checkpoint,
    list_arrays,
    read_config,
    read_optimizer_state,
    read_params,
    read_tree,
    require_same_data,
    verify_checkpoint,
)

__all__ = [
    "FORMAT_VERSION",
    "Checkpoints",
    "DamagedError",
    "Keep",
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
    "read_tree",
    "require_same_data",
    "verify_checkpoint",
]
