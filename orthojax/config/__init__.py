"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

from orthojax.config.fields import changed_fields as changed_fields
from orthojax.config.fields import check_types as check_types
from orthojax.config.fields import describe_fields as describe_fields
from orthojax.config.fields import describe_type as describe_type
from orthojax.config.fields import field_paths as field_paths
from orthojax.config.fields import fields_affecting as fields_affecting
from orthojax.config.fields import flatten as flatten
from orthojax.config.fields import from_dict as from_dict
from orthojax.config.fields import from_flat as from_flat
from orthojax.config.fields import from_json as from_json
from orthojax.config.fields import nearest_field as nearest_field
from orthojax.config.fields import replace as replace
from orthojax.config.fields import require as require
from orthojax.config.fields import to_json as to_json
from orthojax.config.fields import unknown_field as unknown_field
from orthojax.config.model import ExpertsConfig as ExpertsConfig
from orthojax.config.model import GatedMlp as GatedMlp
from orthojax.config.model import LatentConfig as LatentConfig
from orthojax.config.model import Mlp as Mlp
from orthojax.config.model import ModelConfig as ModelConfig
from orthojax.config.model import Remat as Remat
from orthojax.config.model import RopeConfig as RopeConfig
from orthojax.config.run import Config as Config
from orthojax.config.run import DataConfig as DataConfig
from orthojax.config.run import EvalConfig as EvalConfig
from orthojax.config.run import MeshConfig as MeshConfig
from orthojax.config.run import OptimConfig as OptimConfig
from orthojax.config.run import RotationConfig as RotationConfig
from orthojax.config.run import TrainConfig as TrainConfig
from orthojax.config.run import TriggerRule as TriggerRule
