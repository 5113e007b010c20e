"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

from orthojax.config.aliases import meant, not_a_field
from orthojax.config.fields import (
    Affects,
    added,
    changed_fields,
    check_types,
    describe_fields,
    describe_type,
    field_paths,
    fields_affecting,
    flatten,
    from_dict,
    from_json,
    read_value,
    replace,
    require,
    setting,
    to_json,
    unknown_field,
)
from orthojax.config.model import (
    AttentionImplementation,
    KernelInit,
    Mlp,
    ModelConfig,
    Norm,
    NormalizerName,
    Position,
    Remat,
)
from orthojax.config.optim import OptimConfig, OptimizerName, RotationAxes, RotationConfig, RotationKind, RotationScope
from orthojax.config.run import Config, DataConfig, EvalConfig, MeshConfig, TrainConfig, TriggerRule

__all__ = [
    "Affects",
    "AttentionImplementation",
    "Config",
    "DataConfig",
    "EvalConfig",
    "KernelInit",
    "MeshConfig",
    "Mlp",
    "ModelConfig",
    "Norm",
    "NormalizerName",
    "OptimConfig",
    "OptimizerName",
    "Position",
    "Remat",
    "RotationAxes",
    "RotationConfig",
    "RotationKind",
    "RotationScope",
    "TrainConfig",
    "TriggerRule",
    "added",
    "changed_fields",
    "check_types",
    "describe_fields",
    "describe_type",
    "field_paths",
    "fields_affecting",
    "flatten",
    "from_dict",
    "from_json",
    "meant",
    "not_a_field",
    "read_value",
    "replace",
    "require",
    "setting",
    "to_json",
    "unknown_field",
]
