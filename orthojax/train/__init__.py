"""Training and evaluation of one model.

In reading order: `loop` (a run from start to end), `workdir` (its inputs and its folder), `step` (from a config to
objects, the pure step), `optimizer`, `mesh` (where things are on the devices), `step_logger` (what
is logged, bad steps), `metrics`, `evaluation`, `distributed` (several processes, signals), `checkpoint`, `loading`
(models from checkpoints), `estimates`.
"""

from orthojax.train.checkpoint import Checkpoints as Checkpoints
from orthojax.train.checkpoint import DamagedError as DamagedError
from orthojax.train.checkpoint import array_items as array_items
from orthojax.train.checkpoint import find_checkpoint as find_checkpoint
from orthojax.train.checkpoint import is_quantized as is_quantized
from orthojax.train.checkpoint import list_arrays as list_arrays
from orthojax.train.checkpoint import quantize_checkpoint as quantize_checkpoint
from orthojax.train.checkpoint import read_config as read_config
from orthojax.train.checkpoint import read_json_item as read_json_item
from orthojax.train.checkpoint import read_optimizer_state as read_optimizer_state
from orthojax.train.checkpoint import read_params as read_params
from orthojax.train.checkpoint import read_quantized as read_quantized
from orthojax.train.checkpoint import require_same_data as require_same_data
from orthojax.train.checkpoint import verify_checkpoint as verify_checkpoint
from orthojax.train.distributed import keep_compiled_programs as keep_compiled_programs
from orthojax.train.estimates import Estimate as Estimate
from orthojax.train.estimates import dry_run as dry_run
from orthojax.train.estimates import estimate as estimate
from orthojax.train.estimates import model_flops_per_token as model_flops_per_token
from orthojax.train.estimates import model_flops_utilization as model_flops_utilization
from orthojax.train.estimates import peak_flops_per_second as peak_flops_per_second
from orthojax.train.evaluation import Metrics as Metrics
from orthojax.train.evaluation import evaluate as evaluate
from orthojax.train.evaluation import evaluation_stages as evaluation_stages
from orthojax.train.loading import load as load
from orthojax.train.loading import load_params as load_params
from orthojax.train.loop import train as train
from orthojax.train.mesh import about_mesh as about_mesh
from orthojax.train.mesh import make_mesh as make_mesh
from orthojax.train.mesh import place_rows as place_rows
from orthojax.train.metrics import describe_line as describe_line
from orthojax.train.metrics import read_metrics as read_metrics
from orthojax.train.optimizer import learning_rate_schedule as learning_rate_schedule
from orthojax.train.optimizer import leave_out_bad_steps as leave_out_bad_steps
from orthojax.train.optimizer import make_optimizer as make_optimizer
from orthojax.train.optimizer import make_rotation as make_rotation
from orthojax.train.step import StepMetrics as StepMetrics
from orthojax.train.step import TrainState as TrainState
from orthojax.train.step import build as build
from orthojax.train.step import init_state as init_state
from orthojax.train.step import make_train_step as make_train_step
from orthojax.train.step import optimizer_state_bytes as optimizer_state_bytes
from orthojax.train.step import parameter_shapes as parameter_shapes
from orthojax.train.step import state_shapes as state_shapes
from orthojax.train.step_logger import DivergedError as DivergedError
from orthojax.train.workdir import Inputs as Inputs
from orthojax.train.workdir import check_workdir as check_workdir
from orthojax.train.workdir import open_inputs as open_inputs
