"""The optimizer as values."""

import dataclasses
import math
from typing import Literal

from orthojax.config.checks import require
from orthojax.config.fields import added, check_types

RotationKind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
RotationScope = Literal["layer", "parameter", "tree"]
RotationAxes = Literal["output", "input", "both", "residual", "writers", "none"]
OptimizerName = Literal[
    "adam", "orthoadam", "rmsprop", "sgd", "adagrad", "adamax", "amsgrad", "adabelief", "adafactor", "lion", "signum",
    "lamb", "novograd", "ademamix", "muon",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """The basis of OrthoAdam; the meanings stand in `orthojax.Rotation`.

    Attributes:
      kind: Which orthogonal matrix.
      axes: Which axes of every kernel: its last (`output`), the one before (`input`), `both`, the d_model axis of
        every kernel (`residual`) or of those that write to the residual stream only (`writers`), or `none`.
      embeddings: Whether embedding tables are rotated too, along d_model.
      scope: One matrix for every layer of every parameter, or the wider controls.
      seed: Seed of the matrices; independent of the run's seed.
    """

    kind: RotationKind = "hadamard"
    axes: RotationAxes = "output"
    embeddings: bool = True
    scope: RotationScope = "layer"
    seed: int = 0

    def __post_init__(self):
        check_types(self, "optim.rotation")
        require(0 <= self.seed < 2**32, f"optim.rotation.seed={self.seed}", "0 to 2**32 - 1")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule (linear warm-up, then cosine decay).

    Attributes:
      optimizer: `adam` is AdamW where `weight_decay` > 0; `rmsprop` is Adam with b1 = 0 (the paper does not say);
        `signum` is the sign of momentum; `muon` treats embeddings and vectors with Adam.
      rotated: Run the optimizer in the basis of `rotation`; `orthoadam` is `adam` with this.
      learning_rate: Peak learning rate.
      warmup_steps: Steps of linear warm-up from 0.
      final_learning_rate_fraction: Learning rate at the last step as a fraction of the peak; 1 keeps it constant.
      b1: Decay of the first moment, where there is one (of Lion: the first of its two).
      b2: Decay of the second moment, where there is one (of Lion: of its momentum).
      eps: Added to the root of the second moment.
      momentum: Of `sgd`, `signum` and `muon`; 0 for plain SGD.
      weight_decay: Decoupled, scaled by the learning rate; on kernels and embeddings only.
      clip_norm: Largest global gradient norm; None never clips.
      rotation: The basis of `orthoadam`, and of any other that is `rotated`.
      layer_by_layer: `orthoadam` goes through scanned layers one by one, for less temporary memory.
    """

    optimizer: OptimizerName = "orthoadam"
    rotated: bool = False
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    rotation: RotationConfig = RotationConfig()
    layer_by_layer: bool = added(False)

    def __post_init__(self):
        check_types(self, "optim")
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            require(value > 0.0 and math.isfinite(value), f"optim.{name}={value}", "a finite positive number")
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            require(0.0 <= value < 1.0, f"optim.{name}={value}", "0 <= value < 1")
        finite = math.isfinite(self.weight_decay)
        require(self.weight_decay >= 0.0 and finite, f"optim.weight_decay={self.weight_decay}", "a finite number >= 0")
        require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps}", "a number >= 0")
        value = self.final_learning_rate_fraction
        require(0.0 <= value <= 1.0, f"optim.final_learning_rate_fraction={value}", "0 to 1")
        require(
            self.momentum == 0.0 or self.optimizer in ("sgd", "signum", "muon"),
            f"optim.momentum={self.momentum} is not read by optim.optimizer={self.optimizer!r}",
            "0, or optimizer 'sgd', 'signum' or 'muon'; the others have b1 or no momentum",
        )
        require(
            not (self.rotated and self.optimizer == "orthoadam"),
            "optim.rotated=true with optim.optimizer='orthoadam', which is rotated anyway",
            "optimizer 'orthoadam' alone, or 'adam' with rotated",
        )
        require(
            not self.layer_by_layer or self.optimizer == "orthoadam",
            f"optim.layer_by_layer=true is not read by optim.optimizer={self.optimizer!r}",
            "false, or optimizer 'orthoadam'",
        )
        require(self.clip_norm is None or self.clip_norm > 0.0, f"optim.clip_norm={self.clip_norm}", "none or > 0")

    @property
    def is_rotated(self) -> bool:
        """Whether the optimizer runs in the basis of `rotation`."""
        return self.rotated or self.optimizer == "orthoadam"
