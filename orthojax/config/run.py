"""Training and evaluation as values."""

import dataclasses

from orthojax.config.checks import require
from orthojax.fields import added, check_types


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Attributes:
      steps: Optimizer steps.
      batch_size: Sequences per step.
      accumulation_steps: Parts of a batch that go through the model one after the other, for less memory; their
        gradients are added before the optimizer's one step.
      seed: Seed of the initial parameters.
      init_from: A checkpoint or workdir whose parameters are the initial ones instead, as for fine-tuning; the
        optimizer starts anew.
      allow_normalizer_change: Let the model's normalizer differ from that of `init_from`.
      log_every_steps: Steps between lines of metrics.jsonl.
      eval_every_steps: Steps between validation losses; 0 leaves them out.
      checkpoint_every_steps: Steps between checkpoints; one is also written at the end and on SIGTERM or Ctrl-C.
      keep_checkpoints: How many of the newest checkpoints stay.
    """

    steps: int = 1000
    batch_size: int = 16
    accumulation_steps: int = added(1)
    seed: int = 0
    init_from: str = added("")
    allow_normalizer_change: bool = added(False)
    log_every_steps: int = 20
    eval_every_steps: int = 100
    checkpoint_every_steps: int = 100
    keep_checkpoints: int = 2

    def __post_init__(self):
        check_types(self, "train")
        for name in (
            "steps",
            "batch_size",
            "accumulation_steps",
            "log_every_steps",
            "checkpoint_every_steps",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}={value}", "at least 1")
        require(self.eval_every_steps >= 0, f"train.eval_every_steps={self.eval_every_steps}", "at least 0")
        require(0 <= self.seed < 2**32, f"train.seed={self.seed}", "0 to 2**32 - 1")
        require(
            bool(self.init_from) or not self.allow_normalizer_change,
            "train.allow_normalizer_change without a checkpoint to start from",
            "with train.init_from=DIR",
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The fixed evaluation set: rows of the validation split.

    Attributes:
      sequences: Number of sequences, spread evenly over the split; a multiple of `batch_size`.
      batch_size: Sequences per batch, and the set over which dynamic quantisation scales are taken.
    """

    sequences: int = 256
    batch_size: int = 32

    def __post_init__(self):
        check_types(self, "eval")
        require(self.batch_size >= 1, f"eval.batch_size={self.batch_size}", "at least 1")
        require(
            self.sequences >= 1 and self.sequences % self.batch_size == 0,
            f"eval.sequences={self.sequences} is not a positive multiple of eval.batch_size={self.batch_size}",
            f"a multiple of {self.batch_size}",
        )
