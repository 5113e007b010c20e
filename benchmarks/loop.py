"""Times training loops of small steps against one step per dispatch: python benchmarks/loop.py.

The same run with `train.steps_per_dispatch=1` and with what the loop chooses (16 on an accelerator), and beside it the
loop that one would write without orthojax: flax's own layers and optax, each batch put on the device, the loss fetched
every 20 steps. Starting, compiling and checkpoints are left out.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from comparing import compare, parsed_arguments, show
from training import plain_training

from orthojax.commands.cli import keep_freed_memory
from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.model import gpt2, parameter_count
from orthojax.train import Inputs, open_inputs, train

LENGTH = 64
Kind = Literal["embedded", "bigram_backcopy"]


def cases(tiny: bool) -> list[tuple[str, ModelConfig, Kind, int, int]]:
    """Returns (name, model, kind of data, sequences of a batch, steps) of each measurement."""
    options = {"max_length": LENGTH, "scan_layers": False}

    def model(layers: int, width: int, vocab_size: int) -> ModelConfig:
        sizes = {"num_layers": layers, "d_model": width, "d_mlp": 4 * width, "vocab_size": vocab_size}
        return gpt2("tiny", **sizes, num_heads=max(1, width // 32), **options)

    if tiny:
        return [("1 layer of 16", model(1, 16, 64), "embedded", 4, 40)]
    return [
        ("1 layer of 16", model(1, 16, 64), "embedded", 4, 2000),
        ("1 layer of 32", model(1, 32, 256), "embedded", 4, 1200),
        ("2 layers of 64", model(2, 64, 512), "embedded", 4, 400),
        ("Backcopy, 1 layer of 64", model(1, 64, 128), "bigram_backcopy", 4, 600),
        ("tiny, 4 layers of 128", gpt2("tiny", **options), "embedded", 4, 80),
        ("tiny, 4 layers of 128", gpt2("tiny", **options), "embedded", 16, 24),
    ]


def inputs_of(config: Config) -> Inputs:
    """Returns the data of a run: of the task, or random ids in the place of text."""
    if config.data.kind == "bigram_backcopy":
        return open_inputs(config, Path())
    shape, ids = (config.train.batch_size, LENGTH + 1), config.model.vocab_size

    def batch(number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, ids, shape, dtype=np.int32)

    return Inputs(batch, batch(0), None, {"source": "random"}, None)


def our_loop(config: Config, inputs: Inputs, took: Callable[[float], None]) -> Callable[[], None]:
    """Returns a function that trains; it tells the seconds of a step, by the log after the first quarter."""

    def call() -> None:
        found: list[float] = []

        def note(line: dict[str, float]) -> None:
            if line["step"] > config.train.log_every_steps:
                found.append(config.train.batch_size * LENGTH / line["tokens_per_second"])

        with tempfile.TemporaryDirectory() as folder:
            train(config, inputs, Path(folder) / "run", on_line=note)
        took(float(np.mean(found)))

    return call


def plain_loop(config: Config, inputs: Inputs, took: Callable[[float], None]) -> Callable[[], None]:
    """Returns a function that trains the plain model, and tells the seconds of a step after the first quarter."""
    state, step = plain_training(config.model)

    def call() -> None:
        nonlocal state
        first, last = config.train.log_every_steps, config.train.steps
        began = time.perf_counter()
        for number in range(last):
            state, loss = step(state, jnp.asarray(inputs.batch(number)))
            if number % 20 == 0 or number in (first - 1, last - 1):
                loss.item()
            if number == first - 1:
                began = time.perf_counter()
        took((time.perf_counter() - began) / (last - first))

    return call


def main() -> None:
    arguments, table = parsed_arguments(__doc__ or ""), []
    keep_freed_memory()  # as every command does; otherwise several steps in one call also save the system's pages
    for name, model, kind, rows, steps in cases(arguments.tiny):
        config = Config(
            model=model,
            optim=OptimConfig(optimizer="adam", weight_decay=0.1, warmup_steps=0),
            data=DataConfig(kind=kind, sequence_length=LENGTH),
            train=TrainConfig(
                steps=steps, batch_size=rows, log_every_steps=steps // 4, checkpoint_every_steps=steps,
                eval_every_steps=0, probe_every_steps=0,
            ),
            eval=EvalConfig(sequences=4, batch_size=4),
        )  # fmt: skip
        inputs, taken = inputs_of(config), [0.0]
        several = None if jax.default_backend() == "cpu" else 16
        runs = {"one step per dispatch": 1, "several steps per dispatch": several}
        loops = {
            loop: our_loop(replace(config, {"train.steps_per_dispatch": most}), inputs, taken.append)
            for loop, most in runs.items()
        }
        loops["plain flax + optax"] = plain_loop(config, inputs, taken.append)
        for loop, measured in compare(loops, arguments.repeats, clock=lambda taken=taken: sum(taken)).items():
            millions = round(parameter_count(model) / 1e6, 3)
            of = {"model": name, "million_parameters": millions, "batch": f"{rows} x {LENGTH}", "loop": loop}
            table.append(of | measured | {"steps_per_second": 1 / measured["seconds"]})
    show("Loops of small steps against one step per dispatch: median ratio of times, quartiles", table, arguments.json)


if __name__ == "__main__":
    main()
