"""Stability of training: jumps of the training loss and rises of the held-out loss."""

from collections.abc import Mapping, Sequence

import numpy as np

from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.model import LoadedModel
from orthojax.train import Inputs, read_metrics

SPIKE_NATS = 1.0


def window_of(lines: int) -> int:
    """Returns over how many logged steps the running mean is: a twentieth of them, three at least."""
    return max(3, lines // 20)


def running_mean(losses: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of the last `window` values up to each, of fewer at the start.

    Args:
      losses: [..., n].
      window: At least 1.

    >>> running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    array([1., 2., 4., 6.])
    """
    total = np.cumsum(losses, axis=-1)
    before = np.concatenate([np.zeros_like(total[..., :window]), total[..., :-window]], axis=-1)[..., : total.shape[-1]]
    return (total - before) / np.minimum(np.arange(total.shape[-1]) + 1, window)


def jumps(steps: Sequence[float], losses: np.ndarray, warmup_steps: int) -> np.ndarray:
    """Returns by how many nats each loss after warm-up lies above the running mean of those before it.

    Args:
      steps: Of the losses, [n].
      losses: Nats, [n].
      warmup_steps: The last step of warm-up.
    """
    above = losses[1:] - running_mean(losses, window_of(len(losses)))[:-1]
    return above[np.asarray(steps[1:]) > warmup_steps]


def stability(log: Sequence[Mapping[str, float]], warmup_steps: int) -> dict[str, float]:
    """Measures the stability of a run from its log.

    Args:
      log: The lines of metrics.jsonl.
      warmup_steps: The last step of warm-up.

    Returns:
      `loss_jump_nats`: the largest of `jumps`; `loss_spikes`: how many are above `SPIKE_NATS`; `validation_rise_nats`:
      the most by which the held-out loss rises from one evaluation to the next. The last is left out of a log with
      fewer than two evaluations, the first of one without steps after warm-up.
    """
    losses, held_out = (
        [(line["step"], line[key]) for line in log if key in line] for key in ("loss_nats", "validation_loss_nats")
    )
    above = jumps([step for step, _ in losses], np.array([loss for _, loss in losses]), warmup_steps)
    found = {"loss_spikes": float(np.sum(above > SPIKE_NATS))}
    if len(above):
        found["loss_jump_nats"] = float(above.max())
    if len(held_out) > 1:
        found["validation_rise_nats"] = float(np.diff([loss for _, loss in held_out]).max())
    return found


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    log = read_metrics(loaded.source.parents[1] / "metrics.jsonl")
    return Measured(stability(log, loaded.config.optim.warmup_steps))


STABILITY = Measure("stability", _measure)
