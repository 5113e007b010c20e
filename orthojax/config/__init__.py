"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

from orthojax.config.fields import (
    changed_fields,
    check_types,
    describe_fields,
    describe_type,
    field_paths,
    fields_affecting,
    flatten,
    from_dict,
    from_flat,
    from_json,
    nearest_field,
    replace,
    require,
    to_json,
    unknown_field,
)
from orthojax.config.model import ExpertsConfig, LatentConfig, Mlp, ModelConfig, Remat, RopeConfig
from orthojax.config.optim import OptimConfig, RotationConfig
from orthojax.config.run import Config, DataConfig, EvalConfig, MeshConfig, TrainConfig, TriggerRule

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "ExpertsConfig",
    "LatentConfig",
    "MeshConfig",
    "Mlp",
    "ModelConfig",
    "OptimConfig",
    "Remat",
    "RopeConfig",
    "RotationConfig",
    "TrainConfig",
    "TriggerRule",
    "changed_fields",
    "check_types",
    "describe_fields",
    "describe_type",
    "field_paths",
    "fields_affecting",
    "flatten",
    "from_dict",
    "from_flat",
    "from_json",
    "nearest_field",
    "replace",
    "require",
    "to_json",
    "unknown_field",
]
