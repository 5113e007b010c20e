"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

from orthojax.config.aliases import meant as meant
from orthojax.config.aliases import not_a_field as not_a_field
from orthojax.config.fields import Affects as Affects
from orthojax.config.fields import added as added
from orthojax.config.fields import changed_fields as changed_fields
from orthojax.config.fields import check_types as check_types
from orthojax.config.fields import describe_fields as describe_fields
from orthojax.config.fields import describe_type as describe_type
from orthojax.config.fields import field_paths as field_paths
from orthojax.config.fields import fields_affecting as fields_affecting
from orthojax.config.fields import flatten as flatten
from orthojax.config.fields import from_dict as from_dict
from orthojax.config.fields import from_json as from_json
from orthojax.config.fields import read_value as read_value
from orthojax.config.fields import replace as replace
from orthojax.config.fields import require as require
from orthojax.config.fields import setting as setting
from orthojax.config.fields import to_json as to_json
from orthojax.config.fields import unknown_field as unknown_field
from orthojax.config.model import AttentionImplementation as AttentionImplementation
from orthojax.config.model import KernelInit as KernelInit
from orthojax.config.model import Mlp as Mlp
from orthojax.config.model import ModelConfig as ModelConfig
from orthojax.config.model import Norm as Norm
from orthojax.config.model import NormalizerName as NormalizerName
from orthojax.config.model import Position as Position
from orthojax.config.model import Remat as Remat
from orthojax.config.optim import OptimConfig as OptimConfig
from orthojax.config.optim import OptimizerName as OptimizerName
from orthojax.config.optim import RotationAxes as RotationAxes
from orthojax.config.optim import RotationConfig as RotationConfig
from orthojax.config.optim import RotationKind as RotationKind
from orthojax.config.optim import RotationScope as RotationScope
from orthojax.config.run import Config as Config
from orthojax.config.run import DataConfig as DataConfig
from orthojax.config.run import EvalConfig as EvalConfig
from orthojax.config.run import MeshConfig as MeshConfig
from orthojax.config.run import TrainConfig as TrainConfig
from orthojax.config.run import TriggerRule as TriggerRule
