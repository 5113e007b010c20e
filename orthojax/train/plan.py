"""What a run will take, by arithmetic alone: parameters, tokens, FLOPs, hours."""

import dataclasses

from orthojax.config import Config
from orthojax.errors import UserError, nearest
from orthojax.model import parameter_count
from orthojax.train.utilization import device_kinds, model_flops_per_token, peak_flops_per_second


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
      parameters: Of the model.
      tokens_per_step: Target tokens of one optimizer step.
      tokens: Target tokens of the whole run.
      flops_per_token: Forward and backward, from `model_flops_per_token`: causal, without recomputation.
      flops: Of the whole run.
    """

    parameters: int
    tokens_per_step: int
    tokens: int
    flops_per_token: int
    flops: int

    def hours(self, device_kind: str, device_count: int = 1, *, mfu: float) -> float:
        """Hours of training on devices that reach a given share of their peak; evaluation is not counted.

        Args:
          device_kind: As `jax.devices()[0].device_kind` says it; one whose peak is known.
          device_count: How many share the work.
          mfu: Model FLOPs utilization, a fraction.

        Raises:
          UserError: For a device whose peak is not known.
        """
        peak = peak_flops_per_second(device_kind)
        if peak is None:
            kinds = device_kinds()
            raise UserError(
                f"the peak of {device_kind!r} is not known", allowed=" | ".join(kinds), hint=nearest(device_kind, kinds)
            )
        return self.flops / (peak * device_count * mfu) / 3600.0


def estimate(config: Config) -> Estimate:
    """What the run that a config describes will take.

    >>> from orthojax.config import DataConfig, TrainConfig
    >>> from orthojax.model import gpt2
    >>> run = estimate(Config(gpt2("130m"), data=DataConfig(sequence_length=256), train=TrainConfig(1000, 512)))
    >>> run.parameters, run.tokens, round(run.hours("NVIDIA H200", 8, mfu=0.4), 4)
    (124439808, 131072000, 0.0087)
    """
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    tokens = tokens_per_step * config.train.steps
    flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
    return Estimate(
        parameters=parameter_count(config.model),
        tokens_per_step=tokens_per_step,
        tokens=tokens,
        flops_per_token=flops_per_token,
        flops=tokens * flops_per_token,
    )
