"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

import dataclasses

from orthojax.config.checks import require
from orthojax.config.data import DataConfig
from orthojax.config.fields import (
    Affects,
    added,
    changed_fields,
    check_types,
    describe_type,
    field_paths,
    fields_affecting,
    flatten,
    from_dict,
    from_json,
    read_value,
    replace,
    setting,
    to_json,
)
from orthojax.config.mesh import MeshConfig
from orthojax.config.model import AttentionImplementation, Mlp, ModelConfig, Norm, NormalizerName, Position, Remat
from orthojax.config.optim import (
    OptimConfig,
    OptimizerName,
    RotationAxes,
    RotationConfig,
    RotationKind,
    RotationScope,
)
from orthojax.config.run import EvalConfig, TrainConfig

__all__ = [
    "Affects",
    "AttentionImplementation",
    "Config",
    "DataConfig",
    "EvalConfig",
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
    "added",
    "changed_fields",
    "check_types",
    "describe_type",
    "field_paths",
    "fields_affecting",
    "flatten",
    "from_dict",
    "from_json",
    "read_value",
    "replace",
    "setting",
    "to_json",
]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    mesh: MeshConfig = added(MeshConfig())

    def __post_init__(self):
        check_types(self, "config")
        length = self.data.sequence_length
        require(
            self.model.position != "learned" or length <= self.model.max_length,
            f"data.sequence_length={length} is longer than model.max_length={self.model.max_length}",
            f"at most {self.model.max_length} where positions are learned",
        )
        require(
            self.model.relaxed_causal_tokens < length,
            f"model.relaxed_causal_tokens={self.model.relaxed_causal_tokens} leaves no loss position",
            f"less than data.sequence_length={length}",
        )
        require(
            self.optim.warmup_steps < self.train.steps,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of train.steps={self.train.steps}",
            f"less than {self.train.steps}",
        )
        if -1 not in (self.mesh.data, self.mesh.fsdp):
            self._require_rows(self.mesh.data * self.mesh.fsdp)

    def _require_rows(self, shares: int) -> None:
        rows = shares * self.train.accumulation_steps
        require(
            self.train.batch_size % rows == 0,
            f"train.batch_size={self.train.batch_size} is not divisible by mesh.data * mesh.fsdp * "
            f"train.accumulation_steps = {rows}",
            f"a multiple of {rows}",
        )
        require(
            self.eval.batch_size % shares == 0,
            f"eval.batch_size={self.eval.batch_size} is not divisible by mesh.data * mesh.fsdp = {shares}",
            f"a multiple of {shares}",
        )

    def mesh_sizes(self, device_count: int) -> tuple[int, int, int]:
        """`MeshConfig.sizes`, where the batches divide over them.

        Raises:
          UserError: Where the devices are too few, or a batch does not divide.
        """
        data, fsdp, tensor = self.mesh.sizes(device_count)
        self._require_rows(data * fsdp)
        return data, fsdp, tensor
