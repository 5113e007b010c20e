"""Checkpoints: Orbax, plain names, readable without orthojax, restorable onto any mesh.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), and as JSON `config` (the whole config, so that a softmax-1
model can not be evaluated as softmax), `data` (the position in the data and the hashes of what was read), `validation`
(the newest validation loss, once there is one) and `checksums` (SHA-256 of every file). They commit together, by one
renaming, in the background. A quantised checkpoint has no `opt_state`, and the JSON item `quantization`.

In reading order: `checksums`, `reading` (one checkpoint, verified), `manager` (the checkpoints of a run), `quantized`.
"""

from orthojax.train.checkpoint.checksums import DamagedError as DamagedError
from orthojax.train.checkpoint.checksums import read_json_item as read_json_item
from orthojax.train.checkpoint.checksums import steps_in as steps_in
from orthojax.train.checkpoint.manager import Checkpoints as Checkpoints
from orthojax.train.checkpoint.manager import Retention as Retention
from orthojax.train.checkpoint.manager import Validation as Validation
from orthojax.train.checkpoint.quantized import quantize_checkpoint as quantize_checkpoint
from orthojax.train.checkpoint.quantized import quantize_model as quantize_model
from orthojax.train.checkpoint.quantized import read_quantized as read_quantized
from orthojax.train.checkpoint.reading import array_items as array_items
from orthojax.train.checkpoint.reading import find_checkpoint as find_checkpoint
from orthojax.train.checkpoint.reading import is_quantized as is_quantized
from orthojax.train.checkpoint.reading import list_arrays as list_arrays
from orthojax.train.checkpoint.reading import read_config as read_config
from orthojax.train.checkpoint.reading import read_optimizer_state as read_optimizer_state
from orthojax.train.checkpoint.reading import read_params as read_params
from orthojax.train.checkpoint.reading import require_same_data as require_same_data
from orthojax.train.checkpoint.reading import verify_checkpoint as verify_checkpoint
