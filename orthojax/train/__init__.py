"""Training and evaluation of one model.

In reading order: `loop` (a run from start to end, its folder), `data` (its batches), `step` (from a config
to objects, the pure step), `optimizer`, `mesh` (sharding), `metrics` (the log), `evaluation` (and probes),
`distributed` (processes, signals), `checkpoint`, `loading` (models from
checkpoints), `estimates` (what a run is and what it needs).
"""

from orthojax.machine import keep_compiled_programs as keep_compiled_programs
from orthojax.places import find_checkpoint as find_checkpoint
from orthojax.places import steps_in as steps_in
from orthojax.train.checkpoint import ARRAYS as ARRAYS
from orthojax.train.checkpoint import Checkpoints as Checkpoints
from orthojax.train.checkpoint import DamagedError as DamagedError
from orthojax.train.checkpoint import list_arrays as list_arrays
from orthojax.train.checkpoint import read_config as read_config
from orthojax.train.checkpoint import read_json_item as read_json_item
from orthojax.train.checkpoint import read_optimizer_state as read_optimizer_state
from orthojax.train.checkpoint import read_params as read_params
from orthojax.train.checkpoint import require_same_data as require_same_data
from orthojax.train.checkpoint import verify_checkpoint as verify_checkpoint
from orthojax.train.data import Inputs as Inputs
from orthojax.train.data import open_inputs as open_inputs
from orthojax.train.estimates import describe_data as describe_data
from orthojax.train.estimates import dry_run as dry_run
from orthojax.train.estimates import model_flops_per_token as model_flops_per_token
from orthojax.train.estimates import model_flops_utilization as model_flops_utilization
from orthojax.train.estimates import opening as opening
from orthojax.train.evaluation import evaluate as evaluate
from orthojax.train.evaluation import evaluate_by_head as evaluate_by_head
from orthojax.train.evaluation import rounded_perplexities as rounded_perplexities
from orthojax.train.evaluation import settings_that_do_not_fit as settings_that_do_not_fit
from orthojax.train.loading import find_model as find_model
from orthojax.train.loading import load as load
from orthojax.train.loading import load_params as load_params
from orthojax.train.loading import require_tokenizer as require_tokenizer
from orthojax.train.loop import train as train
from orthojax.train.mesh import make_mesh as make_mesh
from orthojax.train.mesh import place_rows as place_rows
from orthojax.train.metrics import DivergedError as DivergedError
from orthojax.train.metrics import closing as closing
from orthojax.train.metrics import describe_line as describe_line
from orthojax.train.metrics import read_metrics as read_metrics
from orthojax.train.optimizer import learning_rate_schedule as learning_rate_schedule
from orthojax.train.optimizer import make_optimizer as make_optimizer
from orthojax.train.optimizer import make_rotation as make_rotation
from orthojax.train.step import TrainState as TrainState
from orthojax.train.step import build as build
from orthojax.train.step import init_state as init_state
from orthojax.train.step import make_train_step as make_train_step
from orthojax.train.step import state_shapes as state_shapes
from orthojax.train.workdir import check_workdir as check_workdir
