"""Training and evaluation of one model.

In reading order: `loop` (a run from start to end), `data` (its batches), `workdir` (its folder), `step` (from a config
to objects, the pure step), `optimizer`, `mesh` (sharding), `metrics` (the log), `evaluation` (and probes),
`distributed` (processes, signals), `checkpoint`, `loading` (models from checkpoints), `estimates` (what a run is and
takes).
"""

from orthojax.train.checkpoint import (
    ARRAYS,
    Checkpoints,
    DamagedError,
    find_checkpoint,
    list_arrays,
    read_config,
    read_json_item,
    read_optimizer_state,
    read_params,
    require_same_data,
    steps_in,
    verify_checkpoint,
)
from orthojax.train.data import Inputs, open_inputs
from orthojax.train.distributed import keep_compiled_programs
from orthojax.train.estimates import (
    describe_data,
    dry_run,
    model_flops_per_token,
    model_flops_utilization,
    opening,
)
from orthojax.train.evaluation import evaluate, evaluate_by_head, evaluation_stages, settings_that_do_not_fit
from orthojax.train.loading import find_model, load, load_params, require_tokenizer
from orthojax.train.loop import train
from orthojax.train.mesh import make_mesh, place_rows
from orthojax.train.metrics import DivergedError, closing, describe_line, read_metrics
from orthojax.train.optimizer import learning_rate_schedule, make_optimizer, make_rotation
from orthojax.train.step import TrainState, build, init_state, make_train_step, state_shapes
from orthojax.train.workdir import check_workdir

__all__ = [
    "ARRAYS",
    "Checkpoints",
    "DamagedError",
    "DivergedError",
    "Inputs",
    "TrainState",
    "build",
    "check_workdir",
    "closing",
    "describe_data",
    "describe_line",
    "dry_run",
    "evaluate",
    "evaluate_by_head",
    "evaluation_stages",
    "find_checkpoint",
    "find_model",
    "init_state",
    "keep_compiled_programs",
    "learning_rate_schedule",
    "list_arrays",
    "load",
    "load_params",
    "make_mesh",
    "make_optimizer",
    "make_rotation",
    "make_train_step",
    "model_flops_per_token",
    "model_flops_utilization",
    "open_inputs",
    "opening",
    "place_rows",
    "read_config",
    "read_json_item",
    "read_metrics",
    "read_optimizer_state",
    "read_params",
    "require_same_data",
    "require_tokenizer",
    "settings_that_do_not_fit",
    "state_shapes",
    "steps_in",
    "train",
    "verify_checkpoint",
]
