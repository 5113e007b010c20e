"""Training and evaluation of one model.

In reading order: `loop` (a run from start to end), `workdir` (its inputs and its folder), `step` (from a config to
objects, the pure step), `optimizer`, `mesh` (where things are on the devices), `metrics` (what is logged, bad steps),
`evaluation`, `distributed` (several processes, signals), `checkpoint`, `loading` (models from checkpoints), `estimates`.
"""

from orthojax.files import make_folder, write_text
from orthojax.machine import environment
from orthojax.model import LoadedModel
from orthojax.train.checkpoint import (
    Checkpoints,
    DamagedError,
    array_items,
    find_checkpoint,
    is_quantized,
    list_arrays,
    quantize_checkpoint,
    read_config,
    read_json_item,
    read_optimizer_state,
    read_params,
    read_quantized,
    require_same_data,
    verify_checkpoint,
)
from orthojax.train.distributed import keep_compiled_programs
from orthojax.train.estimates import (
    Estimate,
    dry_run,
    estimate,
    model_flops_per_token,
    model_flops_utilization,
    peak_flops_per_second,
)
from orthojax.train.evaluation import Metrics, evaluate, evaluation_stages
from orthojax.train.loading import load, load_params
from orthojax.train.loop import train
from orthojax.train.mesh import about_mesh, make_mesh, place_rows
from orthojax.train.metrics import DivergedError, describe_line, read_metrics
from orthojax.train.optimizer import learning_rate_schedule, leave_out_bad_steps, make_optimizer, make_rotation
from orthojax.train.step import (
    StepMetrics,
    TrainState,
    build,
    init_state,
    make_train_step,
    optimizer_state_bytes,
    parameter_shapes,
    state_shapes,
)
from orthojax.train.timing import Spread, interleaved_seconds, median_ratio, spread
from orthojax.train.workdir import Inputs, check_workdir, open_inputs

__all__ = [
    "Checkpoints",
    "DamagedError",
    "DivergedError",
    "Estimate",
    "Inputs",
    "LoadedModel",
    "Metrics",
    "Spread",
    "StepMetrics",
    "TrainState",
    "about_mesh",
    "array_items",
    "build",
    "check_workdir",
    "describe_line",
    "dry_run",
    "environment",
    "estimate",
    "evaluate",
    "evaluation_stages",
    "find_checkpoint",
    "init_state",
    "interleaved_seconds",
    "is_quantized",
    "keep_compiled_programs",
    "learning_rate_schedule",
    "leave_out_bad_steps",
    "list_arrays",
    "load",
    "load_params",
    "make_folder",
    "make_mesh",
    "make_optimizer",
    "make_rotation",
    "make_train_step",
    "median_ratio",
    "model_flops_per_token",
    "model_flops_utilization",
    "open_inputs",
    "optimizer_state_bytes",
    "parameter_shapes",
    "peak_flops_per_second",
    "place_rows",
    "quantize_checkpoint",
    "read_config",
    "read_json_item",
    "read_metrics",
    "read_optimizer_state",
    "read_params",
    "read_quantized",
    "require_same_data",
    "spread",
    "state_shapes",
    "train",
    "verify_checkpoint",
    "write_text",
]
