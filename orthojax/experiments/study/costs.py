"""What the variants of a study cost: time of a training step, measured in turn, and bytes of optimizer state."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax.config import Config
from orthojax.fields import to_json
from orthojax.train import (
    init_state,
    interleaved_seconds,
    make_train_step,
    median_ratio,
    optimizer_state_bytes,
    write_text,
)

REPEATS = 15


def measure_costs(
    configs: dict[str, Config], reference: str, path: Path, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Step time relative to a reference variant, and state bytes; kept in a file, since it takes minutes.

    Args:
      configs: Variant -> its run.
      reference: The variant that ratios refer to.
      path: JSON file of an earlier measurement of the same runs, which is then returned; else it is written.
      say: Takes a line of progress.

    Returns:
      Variant -> `step_ratio` (median and quartiles of the time of a training step over that of the reference in the
      same repetition), `step_seconds` (median) and `optimizer_state_bytes`.
    """
    made_for = {name: json.loads(to_json(config)) for name, config in configs.items()}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["configs"] == made_for:
            return kept["costs"]
    say(f"timing the training step of {len(configs)} variants in turn")
    steps = {name: _stepper(config) for name, config in configs.items()}
    seconds = interleaved_seconds(steps, REPEATS)
    costs = {
        name: {
            "step_ratio": median_ratio(seconds[name], seconds[reference]),
            "step_seconds": float(np.median(seconds[name])),
            "optimizer_state_bytes": optimizer_state_bytes(config),
        }
        for name, config in configs.items()
    }
    write_text(path, json.dumps({"costs": costs, "configs": made_for}, indent=2) + "\n")
    return costs


def _stepper(config: Config) -> Callable[[], Any]:
    """A function that takes one more training step on random tokens."""
    shape = (config.train.batch_size, config.data.sequence_length + 1)
    tokens = jax.device_put(np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32))
    train_step, states = make_train_step(config), [init_state(config)]

    def step() -> Any:
        states[0], metrics = train_step(states[0], tokens)
        return metrics

    return step
