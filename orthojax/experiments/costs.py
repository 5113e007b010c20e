"""What a training step of the variants costs: time, measured interleaved, and bytes of memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax.config import Config, to_json
from orthojax.experiments.ours.soap import PRECONDITION_FREQUENCY
from orthojax.files import parse_json, read_again, write_text
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
      path: JSON file of an earlier measurement of the same runs on the same device, of which only what failed is
        measured again; it is written.
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

    def parse(content: bytes) -> dict[str, Any]:
        stored = parse_json(content, "its content")
        if not isinstance(stored, dict) or not isinstance(costs := stored.pop("costs", None), dict):
            raise ValueError("it holds no costs")
        if stored == made_for and not (costs.keys() == configs.keys() and all(map(_is_cost, costs.values()))):
            raise ValueError("its costs are not those of the variants")
        return costs if stored == made_for else {}  # of other runs or another device

    costs = read_again(path, "costs", parse, say) or {}
    for base in dict.fromkeys(map(reference, configs)):
        group = {name: config for name, config in configs.items() if reference(name) == base}
        if all("step_ratio" in costs.get(name, ()) for name in group):
            continue  # what failed, such as for lack of memory, is tried again
        say(f"timing the training step of {', '.join(group)}, interleaved")
        try:
            costs |= _costs_of_group(group, base)
        except jax.errors.JaxRuntimeError as error:
            costs |= {name: {"failed": str(error).splitlines()[0]} for name in group}
    write_text(path, json.dumps({"costs": costs} | made_for, indent=2) + "\n")
    return costs


def _is_cost(cost: Any) -> bool:
    """Whether it has the form of one variant's costs."""
    if not isinstance(cost, dict) or isinstance(cost.get("failed"), str):
        return isinstance(cost, dict)
    ratio, sizes = cost.get("step_ratio"), (cost.get("optimizer_state_bytes"), cost.get("program_bytes") or 0)
    numbers = [*(ratio if isinstance(ratio, list) else []), cost.get("step_seconds"), *sizes]
    return len(numbers) == 6 and all(isinstance(number, int | float) for number in numbers)


def _costs_of_group(configs: dict[str, Config], reference: str) -> dict[str, dict[str, Any]]:
    steps = {name: Stepper(config) for name, config in configs.items()}  # freed on return
    timed = interleaved_seconds(steps, REPEATS)
    seconds = {name: [of / steps[name].steps_per_call for of in timed[name]] for name in configs}
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
    """Takes one more training step on random tokens whenever it is called.

    Attributes:
      steps_per_call: Steps that one call takes; of SOAP several, which differ in cost.
    """

    def __init__(self, config: Config):
        # The step that improves the basis takes several times as long as others.
        self.steps_per_call = PRECONDITION_FREQUENCY if config.optim.optimizer.endswith(":soap") else 1
        shape = (config.train.batch_size, config.data.sequence_length + 1)
        rows = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
        self._tokens = place_rows(make_mesh(config), len(rows), lambda start, stop: rows[start:stop])
        self._state = init_state(config)
        step: Any = make_train_step(config)
        self._program = step.lower(self._state, self._tokens).compile()

    def __call__(self) -> Any:
        """The metrics of the last step."""
        for _ in range(self.steps_per_call - 1):
            self._state, _ = self._program(self._state, self._tokens)
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
