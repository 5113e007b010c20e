"""What a training step of the variants costs: time, measured interleaved, and bytes of memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax.config import Config, to_json
from orthojax.files import write_text
from orthojax.machine import environment
from orthojax.timing import interleaved_seconds, median_ratio
from orthojax.train import init_state, make_mesh, make_train_step, optimizer_state_bytes, place_rows

REPEATS = 15


def measure_costs(
    configs: dict[str, Config], reference: Callable[[str], str], path: Path, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Step time relative to a reference variant, and bytes; kept in a file, since it takes minutes.

    Variants of one reference are timed interleaved, group after group, so that only the states of one group are in
    memory at once.

    Args:
      configs: Variant -> its run.
      reference: Variant -> the variant that its ratio refers to, which refers to itself.
      path: JSON file of an earlier measurement of the same runs on the same device, which is then returned; else it is
        written.
      say: Takes a line of progress.

    Returns:
      Variant -> `step_ratio` (median and quartiles of the time of a training step over that of the reference in the
      same repetition), `step_seconds` (median), `optimizer_state_bytes` and `program_bytes` (all that the compiled step
      needs on a device; None where the compiler does not report it); or `failed` with the reason.
    """
    made_for = {
        "device": environment()["device"],
        "configs": {name: json.loads(to_json(config)) for name, config in configs.items()},
    }
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored == made_for | {"costs": stored["costs"]}:
            return stored["costs"]
    costs = {}
    for base in dict.fromkeys(map(reference, configs)):
        group = {name: config for name, config in configs.items() if reference(name) == base}
        say(f"timing the training step of {', '.join(group)}, interleaved")
        try:
            costs |= _costs_of_group(group, base)
        except jax.errors.JaxRuntimeError as error:
            costs |= {name: {"failed": str(error).splitlines()[0]} for name in group}
    write_text(path, json.dumps({"costs": costs} | made_for, indent=2) + "\n")
    return costs


def _costs_of_group(configs: dict[str, Config], reference: str) -> dict[str, dict[str, Any]]:
    steps = {name: Stepper(config) for name, config in configs.items()}  # freed on return
    seconds = interleaved_seconds(steps, REPEATS)
    return {
        name: {
            "step_ratio": median_ratio(seconds[name], seconds[reference]),
            "step_seconds": float(np.median(seconds[name])),
            "optimizer_state_bytes": optimizer_state_bytes(config),
            "program_bytes": steps[name].program_bytes(),
        }
        for name, config in configs.items()
    }


class Stepper:
    """Takes one more training step on random tokens whenever it is called."""

    def __init__(self, config: Config):
        shape = (config.train.batch_size, config.data.sequence_length + 1)
        rows = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
        self._tokens = place_rows(make_mesh(config), len(rows), lambda start, stop: rows[start:stop])
        self._state = init_state(config)
        step: Any = make_train_step(config)
        self._program = step.lower(self._state, self._tokens).compile()

    def __call__(self) -> Any:
        """The metrics of the step."""
        self._state, metrics = self._program(self._state, self._tokens)
        return metrics

    def program_bytes(self) -> int | None:
        """Arguments, results and temporaries of one step; donated buffers counted once."""
        memory = self._program.memory_analysis()
        sizes = [getattr(memory, f"{of}_size_in_bytes", None) for of in ("argument", "output", "temp", "alias")]
        if None in sizes:
            return None
        *needed, donated = (int(size or 0) for size in sizes)
        return sum(needed) - donated
