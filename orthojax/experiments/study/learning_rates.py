"""A fair learning rate for optimizers whose updates differ in size: short trials, then the best one."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from orthojax.config import Config
from orthojax.fields import replace
from orthojax.train import DivergedError, Inputs, check_workdir, read_metrics, train, write_text

TRIAL_STEPS = 200


def trial_config(config: Config, rate: float) -> Config:
    """The trial of one learning rate: the same run, shorter, with a quarter of its steps as warm-up at most."""
    return replace(
        config,
        {
            "optim.learning_rate": rate,
            "optim.warmup_steps": min(config.optim.warmup_steps, TRIAL_STEPS // 4),
            "train.steps": TRIAL_STEPS,
            "train.eval_every_steps": TRIAL_STEPS,
            "train.checkpoint_every_steps": TRIAL_STEPS,
        },
    )


def try_learning_rates(
    config: Config, rates: Sequence[float], folder: Path, inputs: Inputs, on_step: Callable[[str, int, float], None]
) -> dict[str, float | None]:
    """Held-out loss after a short run with each learning rate, of six digits.

    Args:
      config: What the trials are shorter runs of.
      rates: Peak learning rates.
      folder: Each trial has a folder of its own there, and `losses.json` keeps the result.
      inputs: Their data.
      on_step: Called with (rate, step, loss) after each step.

    Raises:
      UserError: Where a trial of another run is there.

    Returns:
      Learning rate, as text, -> loss in nats; None where the run diverged.
    """
    trials = {name: trial_config(config, float(name)) for name in (f"{rate:g}" for rate in rates)}
    for name, trial in trials.items():
        check_workdir(folder / name, trial)
    path = folder / "losses.json"
    if path.exists() and list(losses := json.loads(path.read_text(encoding="utf-8"))) == list(trials):
        return losses
    losses = {}
    for name, trial in trials.items():
        try:
            train(trial, inputs, folder / name, on_step=partial(on_step, name))
        except DivergedError:
            losses[name] = None
        else:
            lines = read_metrics(folder / name / "metrics.jsonl")
            losses[name] = [line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line][-1]
    write_text(path, json.dumps(losses) + "\n")
    return losses


def best_learning_rate(losses: dict[str, float | None]) -> float:
    """The rate of the smallest loss; the smallest rate where every trial diverged.

    >>> best_learning_rate({"0.1": None, "0.03": 4.5, "0.01": 4.7})
    0.03
    """
    finite = {name: loss for name, loss in losses.items() if loss is not None}
    return float(min(finite, key=finite.__getitem__)) if finite else min(map(float, losses))
