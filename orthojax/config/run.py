"""Training and evaluation as values."""

import dataclasses
import math
from typing import Literal

from orthojax.config.checks import require
from orthojax.config.fields import added, check_types, setting


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
      loss_chunk_positions: Of so many positions of every sequence the logits exist at once, in training and validation;
        None takes as many as make 256 MB of logits on a CPU or 512 MB on another device.
      log_every_steps: Steps between lines of metrics.jsonl.
      probe_every_steps: Steps between looks at the outliers and the attention of a few validation rows; 0: none.
      probe_sequences: How many rows, of the `eval.sequences`; all of those where they are fewer.
      tensorboard: Also write metrics.jsonl as TensorBoard events, under tensorboard/.
      on_bad_step: What follows where a loss or gradient norm is not finite, or a loss spikes: `stop` with an error;
        `skip` the batch; `roll_back` to the last checkpoint of the schedule and leave out the batches since.
      spike_nats: A loss so far above its running mean is a spike; none: no loss is.
      eval_every_steps: Steps between validation losses; 0 leaves them out.
      checkpoint_every_steps: Steps between checkpoints; one is also written at the end and on SIGTERM or Ctrl-C.
      keep_checkpoints: How many of the newest checkpoints stay; with 2, there is one to go on from where the newest is
        damaged.
      keep_every_steps: Checkpoints at multiples of so many steps stay for good; 0 leaves that out.
      keep_best: How many of the checkpoints with the lowest validation loss stay.
    """

    steps: int = 1000
    batch_size: int = 16
    accumulation_steps: int = added(1, affects="computation")
    seed: int = setting(0, affects="start")
    init_from: str = added("", affects="start")
    allow_normalizer_change: bool = added(False, affects="start")
    loss_chunk_positions: int | None = added(None, affects="computation")
    log_every_steps: int = setting(20, affects="nothing")
    probe_every_steps: int = added(100, affects="nothing")
    probe_sequences: int = added(8, affects="nothing")
    tensorboard: bool = added(False, affects="nothing")
    on_bad_step: Literal["stop", "skip", "roll_back"] = added("stop")
    spike_nats: float | None = added(None)
    eval_every_steps: int = setting(100, affects="nothing")
    checkpoint_every_steps: int = setting(100, affects="nothing")
    keep_checkpoints: int = setting(2, affects="nothing")
    keep_every_steps: int = added(0, affects="nothing")
    keep_best: int = added(0, affects="nothing")

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
        positions = self.loss_chunk_positions
        require(positions is None or positions >= 1, f"train.loss_chunk_positions={positions}", "none, or at least 1")
        require(self.probe_sequences >= 1, f"train.probe_sequences={self.probe_sequences}", "at least 1")
        for name in ("eval_every_steps", "probe_every_steps"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value}", "at least 0")
        require(
            self.spike_nats is None or 0.0 < self.spike_nats < math.inf,
            f"train.spike_nats={self.spike_nats}",
            "none, or a finite number > 0",
        )
        require(self.keep_best >= 0, f"train.keep_best={self.keep_best}", "at least 0")
        require(
            not self.keep_best or self.eval_every_steps > 0,
            f"train.keep_best={self.keep_best} without validation losses",
            "with train.eval_every_steps of at least 1",
        )
        require(
            self.keep_every_steps >= 0 and self.keep_every_steps % self.checkpoint_every_steps == 0,
            f"train.keep_every_steps={self.keep_every_steps} with "
            f"train.checkpoint_every_steps={self.checkpoint_every_steps}",
            f"0, or a multiple of {self.checkpoint_every_steps}",
        )
        require(0 <= self.seed < 2**32, f"train.seed={self.seed}", "0 to 2**32 - 1")
        require(
            bool(self.init_from) or not self.allow_normalizer_change,
            "train.allow_normalizer_change without a checkpoint to start from",
            "with train.init_from=DIR",
        )

    @property
    def watches_steps(self) -> bool:
        """Whether the optimizer itself looks out for bad steps and leaves them out."""
        return self.on_bad_step != "stop" or self.spike_nats is not None


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The fixed evaluation set: rows of the validation split.

    Attributes:
      sequences: Number of sequences, spread evenly over the split.
      batch_size: Sequences per batch, and the set over which dynamic quantisation scales are taken; the last batch may
        have fewer. Where a mesh does not divide those, every device takes all of them.
    """

    sequences: int = 256
    batch_size: int = 32

    def __post_init__(self):
        check_types(self, "eval")
        require(self.batch_size >= 1, f"eval.batch_size={self.batch_size}", "at least 1")
        require(self.sequences >= 1, f"eval.sequences={self.sequences}", "at least 1")
