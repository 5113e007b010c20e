"""Checkpoints: Orbax, plain names, readable without orthojax, restorable onto any mesh.

`checkpoints/STEP/` holds `params` and `opt_state` (arrays), and as JSON `config` (the whole config, so that a softmax-1
model cannot be evaluated as softmax), `data` (the position in the data and the hashes of what was read) and `checksums`
(SHA-256 of every file). They commit together, by one renaming, in the background.
"""

from orthojax.train.checkpoint.reading import ARRAYS as ARRAYS
from orthojax.train.checkpoint.reading import DamagedError as DamagedError
from orthojax.train.checkpoint.reading import find_checkpoint as find_checkpoint
from orthojax.train.checkpoint.reading import list_arrays as list_arrays
from orthojax.train.checkpoint.reading import read_config as read_config
from orthojax.train.checkpoint.reading import read_json_item as read_json_item
from orthojax.train.checkpoint.reading import read_optimizer_state as read_optimizer_state
from orthojax.train.checkpoint.reading import read_params as read_params
from orthojax.train.checkpoint.reading import require_same_data as require_same_data
from orthojax.train.checkpoint.reading import steps_in as steps_in
from orthojax.train.checkpoint.reading import verify_checkpoint as verify_checkpoint
from orthojax.train.checkpoint.writing import Checkpoints as Checkpoints
