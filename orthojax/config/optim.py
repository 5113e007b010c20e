"""The optimizer, its schedule and its basis as values."""

import dataclasses
import math
import re
from typing import Literal, get_args

from orthojax.config.fields import check_types, require, require_each, require_seed
from orthojax.errors import UserError, nearest

RotationKind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
RotationScope = Literal["layer", "parameter", "tree"]
RotationAxes = Literal["output", "input", "both", "residual", "writers", "none"]
OptimizerName = Literal["adam", "orthoadam", "rmsprop", "sgd", "lion", "muon"]


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """The basis of OrthoAdam; see `orthojax.Rotation` for what they mean.

    Attributes:
      kind: Kind of orthogonal matrix.
      axes: Axes of every kernel: its last (`output`), the one before (`input`), `both`, the d_model axis of
        every kernel (`residual`; of one that reads the latent of latent attention, that axis) or of those that write to
        the residual stream only (`writers`), or `none`. With
        `output` the first token had outliers after 10,000 steps.
      embeddings: Rotate embedding tables as well, along d_model.
      scope: One matrix for every layer of every parameter, or the wider controls.
      seed: Seed of the matrices; None is the run's, `train.seed`.
    """

    kind: RotationKind = "hadamard"
    axes: RotationAxes = "residual"
    embeddings: bool = True
    scope: RotationScope = "layer"
    seed: int | None = None

    def __post_init__(self):
        check_types(self, "optim.rotation")
        require_seed(self, "optim.rotation")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule (linear warm-up, then cosine decay).

    Attributes:
      optimizer: `adam` is AdamW if `weight_decay` > 0; `rmsprop` is Adam with b1 = 0 (the paper does not say); `muon`
        treats embeddings and vectors with Adam. Any other one is named as `module:function`: a function of this config
        that returns an optax transformation without learning rate and weight decay, such as
        `orthojax.experiments.ours.soap:soap`.
      rotated: Run the optimizer in the basis of `rotation`; `orthoadam`, which is `adam` with this, always does.
      learning_rate: Peak learning rate.
      warmup_steps: Steps of linear warm-up from 0.
      final_learning_rate_fraction: Learning rate after the last step as a fraction of the peak; 1 keeps it constant.
      b1: Decay of the first moment, where there is one (of Lion: the first of its two).
      b2: Decay of the second moment, where there is one (of Lion: of its momentum).
      eps: Added to the root of the second moment.
      momentum: Of `sgd` and `muon`; 0 for plain SGD.
      weight_decay: Decoupled, scaled by the learning rate; on kernels and embeddings only.
      clip_norm: Largest global gradient norm; None never clips.
      rotation: The basis of `orthoadam`, and of any other that is `rotated`.
      sink_anneal_steps: Learned sink logits are not learned but go to 0 on a line, from their start, in so many
        steps: from softmax to softmax-1. 0 learns them.
    """

    optimizer: OptimizerName | str = "orthoadam"
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
    sink_anneal_steps: int = 0

    def __post_init__(self):
        check_types(self, "optim")
        known = get_args(OptimizerName)
        if self.optimizer not in known and not re.fullmatch(r"[\w.]+:\w+", self.optimizer):
            problem = f"optim.optimizer={self.optimizer!r} is not valid"
            allowed = f"{' | '.join(known)}, or module:function"
            raise UserError(problem, allowed=allowed, hint=nearest(self.optimizer, known))
        require_each(self, "optim", "learning_rate eps", lambda x: 0.0 < x < math.inf, "a finite positive number")
        require_each(self, "optim", "b1 b2 momentum", lambda x: 0.0 <= x < 1.0, "0 <= value < 1")
        require_each(self, "optim", "weight_decay", lambda x: 0.0 <= x < math.inf, "a finite number >= 0")
        require_each(self, "optim", "warmup_steps sink_anneal_steps", lambda steps: steps >= 0, "a number >= 0")
        require_each(self, "optim", "final_learning_rate_fraction", lambda x: 0.0 <= x <= 1.0, "0 to 1")
        require_each(self, "optim", "clip_norm", lambda norm: 0.0 < norm < math.inf, "none, or a finite number > 0")
        require(
            self.momentum == 0.0 or self.optimizer in ("sgd", "muon") or ":" in self.optimizer,
            f"optim.momentum={self.momentum} is not read by optim.optimizer={self.optimizer!r}",
            "0, or optimizer 'sgd' or 'muon'; the others have b1 or no momentum",
        )

    @property
    def is_rotated(self) -> bool:
        """True if the optimizer runs in the basis of `rotation`."""
        return self.rotated or self.optimizer == "orthoadam"
