"""Time and memory of a training step, relative to a reference."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax.config import Config
from orthojax.experiments.stored import NUMBER, check
from orthojax.files import read_with_digest, write_with_digest
from orthojax.train import init_state, make_mesh, make_train_step, place_rows, state_shapes

REPEATS = 9


def step_costs(
    configs: Mapping[str, Config], reference: Callable[[str], str], path: Path, *, repeats: int = REPEATS
) -> dict[str, dict[str, float]]:
    """Measures the cost of a training step of every variant, interleaved for variants with the same reference.

    Each step is timed `repeats` times, ten at once if it is short; the JSON file `path` keeps the numbers. A variant
    has `cost_step_ratio` with its quartiles, `cost_steps_per_second`, and bytes and ratios of optimizer state and
    compiled program; one that does not fit into memory has none.
    """
    if path.exists():
        costs = read_with_digest(path, "costs")
        check(costs, {...: {...: NUMBER}}, str(path))
        return costs
    costs: dict[str, dict[str, float]] = {}
    for base in dict.fromkeys(map(reference, configs)):
        group = {name: config for name, config in configs.items() if reference(name) == base}
        print(f"timing the training step of {', '.join(group)}, interleaved", file=sys.stderr, flush=True)
        try:
            costs |= _costs_of(group, base, repeats)
        except jax.errors.JaxRuntimeError as error:
            print(f"failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    write_with_digest(path, costs)
    return costs


def _costs_of(configs: Mapping[str, Config], base: str, repeats: int) -> dict[str, dict[str, float]]:
    steps = {name: Stepper(config) for name, config in configs.items()}
    timed = interleaved_seconds(steps, repeats)
    seconds = {name: [of / steps[name].steps_per_call for of in timed[name]] for name in configs}
    sizes, costs = {}, {}
    for name, config in configs.items():
        state = jax.tree.leaves(state_shapes(config).opt_state)
        sizes[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in state), steps[name].program_bytes()
    for name in configs:
        keys = ("step_ratio_lower", "step_ratio", "step_ratio_upper")
        ratio: dict[str, float] = dict(zip(keys, ratio_quartiles(seconds[name], seconds[base]), strict=True))
        ratio["steps_per_second"] = 1 / float(np.median(seconds[name]))
        for what, size, of_base in zip(("optimizer_state", "program"), sizes[name], sizes[base], strict=True):
            if size is not None and of_base is not None:  # the compiler may not report it
                ratio |= {f"{what}_bytes": size, f"{what}_ratio": size / of_base}
        costs[name] = {f"cost_{key}": value for key, value in ratio.items()}
    return costs


class Stepper:
    """Takes one or several training steps on random tokens per call."""

    def __init__(self, config: Config):
        shape = (config.train.batch_size, config.data.row_length)
        rows = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
        self._tokens = place_rows(make_mesh(config), len(rows), lambda start, stop: rows[start:stop])
        self._state = init_state(config)
        step: Any = make_train_step(config)
        self._program = step.lower(self._state, self._tokens).compile()
        self.steps_per_call = 1
        started = time.perf_counter()
        jax.block_until_ready(self())
        # A single short step is noise, and an optimizer of an experiment may cost more in some steps, as SOAP does in
        # every tenth.
        if time.perf_counter() - started < 0.5 or ":" in config.optim.optimizer:
            self.steps_per_call = 10

    def __call__(self) -> Any:
        """Takes `steps_per_call` steps and returns the metrics of the last."""
        metrics = None
        for _ in range(self.steps_per_call):
            self._state, metrics = self._program(self._state, self._tokens)
        return metrics

    def program_bytes(self) -> int | None:
        """Returns the bytes of arguments, results and temporaries of one step, donated buffers counted once."""
        memory = self._program.memory_analysis()
        sizes: list[Any] = [
            getattr(memory, f"{of}_size_in_bytes", None) for of in ("argument", "output", "temp", "alias")
        ]
        return None if None in sizes else int(sum(sizes[:3]) - sizes[3])


def interleaved_seconds(
    functions: Mapping[str, Callable[[], Any]], repeats: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times functions interleaved, A B C, C B A, A B C, ..., and returns the seconds of each repetition by name.

    Other work on the machine affects all of them alike, so that ratios of times of one repetition are steady. The order
    alternates, because a function finds the caches as the previous one left them. A call is over when the arrays that
    it returns are ready; a first one, which compiles, is not timed.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-1, repeats):
        for name in names if repetition % 2 == 0 else reversed(names):
            started = clock()
            jax.block_until_ready(functions[name]())
            if repetition >= 0:
                seconds[name].append(clock() - started)
    return seconds


def ratio_quartiles(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Returns the first quartile, the median and the third quartile of a[i] / b[i], times of one repetition.

    >>> ratio_quartiles([2.0, 9.0, 30.0], [1.0, 3.0, 10.0])
    [2.5, 3.0, 3.0]
    """
    return np.quantile(np.divide(a, b), [0.25, 0.5, 0.75]).tolist()
