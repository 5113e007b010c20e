"""Training and evaluation of one model: inputs, step, optimizer, checkpoints, loop."""

from orthojax.files import make_folder, write_text
from orthojax.machine import environment
from orthojax.timing import Spread, interleaved_seconds, median_ratio, spread
from orthojax.train.bad_steps import DivergedError, leave_out_bad_steps
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
from orthojax.train.compile_cache import keep_compiled_programs
from orthojax.train.dry_run import dry_run
from orthojax.train.evaluation import Metrics, evaluate, evaluation_stages
from orthojax.train.inputs import Inputs, open_inputs
from orthojax.train.loop import train
from orthojax.train.mesh import about_mesh, make_mesh, place_rows
from orthojax.train.metric_writer import describe_line, read_metrics
from orthojax.train.optimizer import make_optimizer, make_rotation, run_optimizer
from orthojax.train.plan import Estimate, estimate
from orthojax.train.pretrained import load_params
from orthojax.train.seeds_together import can_train_seeds, train_seeds
from orthojax.train.step import (
    StepMetrics,
    TrainState,
    init_state,
    make_train_step,
    optimizer_state_bytes,
    parameter_shapes,
    state_shapes,
)
from orthojax.train.utilization import model_flops_per_token, model_flops_utilization, peak_flops_per_second
from orthojax.train.workdir import check_workdir, prepare_workdir

__all__ = [
    "Checkpoints",
    "DamagedError",
    "DivergedError",
    "Estimate",
    "Inputs",
    "Metrics",
    "Spread",
    "StepMetrics",
    "TrainState",
    "about_mesh",
    "array_items",
    "can_train_seeds",
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
    "leave_out_bad_steps",
    "list_arrays",
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
    "prepare_workdir",
    "quantize_checkpoint",
    "read_config",
    "read_json_item",
    "read_metrics",
    "read_optimizer_state",
    "read_params",
    "read_quantized",
    "require_same_data",
    "run_optimizer",
    "spread",
    "state_shapes",
    "train",
    "train_seeds",
    "verify_checkpoint",
    "write_text",
]
