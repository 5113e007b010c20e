"""The data of a run: what it reads, and its batches on the devices."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from orthojax.config import Config
from orthojax.data import BigramBackcopy, TokenBatches, open_dataset, open_task
from orthojax.data.batches import PackedBatches
from orthojax.data.bigram_backcopy import EVALUATION
from orthojax.errors import UserError
from orthojax.model import parameter_count
from orthojax.train.estimates import model_flops_per_token
from orthojax.train.mesh import place_rows, place_whole

_AHEAD = 2  # dispatches whose batches are prepared while the devices work


class Inputs(NamedTuple):
    """The data of a run."""

    # number -> int32 [batch_size, W], a pure function; for a task, what the training steps draw by themselves. Rows
    # have W = T + 1 ids, or 2 (T + 1) if they are packed (`PackedBatches`).
    batch: Callable[[int], np.ndarray]
    evaluation: np.ndarray  # int32 [eval.sequences, T + 1], never packed
    bits_per_nat_of_loss: float | None  # bits per byte of text for a nat per token; None if it is no text
    provenance: dict[str, Any]  # JSON values: hashes and counts of everything read
    task: BigramBackcopy | None  # the synthetic task, if the data is one
    read_rows: Callable[[int, int, int], np.ndarray] | None = None  # reads a part of a batch, if that saves reading
    held_out: Any = None  # the validation split, which contains `evaluation`; None for a task
    tokenizer_path: Path | None = None  # the tokenizer's file, if there is one
    special_ids: tuple[int, ...] = ()  # whose positions evaluation keeps separate, if asked for

    def batch_rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Returns rows [start, stop) of a step's batch, int32 [stop - start, W], for a process that holds them."""
        return self.read_rows(step, start, stop) if self.read_rows else self.batch(step)[start:stop]


def open_inputs(config: Config, cache_dir: Path, *, progress: Callable[[str, int, int], None] | None = None) -> Inputs:
    """Opens the data that a config names, tokenising text the first time.

    Tokenised corpora are kept in `cache_dir`; `progress` is called with (what, bytes done, total bytes). Raises
    UserError for anything wrong with the files, or a vocabulary that the model does not have.
    """
    data, train, evaluation = config.data, config.train, config.eval
    if data.kind == "bigram_backcopy":
        task, provenance = open_task(data)
        _require_vocabulary(config, task.vocab_size)

        def batch(step: int) -> np.ndarray:
            return np.asarray(task.batch(step, train.batch_size, data.sequence_length, data.seed))

        rows = np.asarray(task.batch(0, evaluation.sequences, data.sequence_length, 0, EVALUATION))
        return Inputs(batch, rows, None, provenance, task)
    dataset = open_dataset(data, cache_dir, progress=progress)
    _require_vocabulary(config, dataset.vocab_size)
    length = data.sequence_length
    bos_id = dataset.bos_id if data.bos else None
    cut = functools.partial(PackedBatches, eos_id=dataset.eos_id) if data.pack else TokenBatches
    batches = cut(dataset.train, length, train.batch_size, data.seed, bos_id)
    validation = TokenBatches(dataset.validation, length, 1, 0, bos_id)
    if evaluation.sequences > validation.n_rows:
        raise UserError(
            f"eval.sequences={evaluation.sequences} is more than the {validation.n_rows} rows of "
            f"{length} tokens that are held out",
            allowed=f"at most {validation.n_rows}, or more text",
            hint=f"--config.eval.sequences={validation.n_rows}",
        )
    n_bytes = dataset.validation_bytes
    bits_per_nat = len(dataset.validation) / n_bytes / math.log(2) if n_bytes else None
    rows = validation.spread_rows(evaluation.sequences)
    held_out, tokenizer = dataset.validation, dataset.tokenizer_path
    return Inputs(batches, rows, bits_per_nat, dataset.provenance, None, batches.rows, held_out, tokenizer)


def _require_vocabulary(config: Config, needed: int) -> None:
    if config.model.vocab_size < needed:
        problem = f"model.vocab_size={config.model.vocab_size} is less than the {needed} ids of the data"
        raise UserError(problem, allowed=f"at least {needed}", hint=f"--config.model.vocab_size={needed}")


class Dispatch(NamedTuple):
    """The input of one compiled call."""

    steps: range  # that the call takes, counted from 1
    batches: jax.Array  # int32 [B, K, W], K at least their number; for a task uint32 [K, 2], (seed, number of each)
    count: jax.Array  # int32 [], their number


def steps_per_dispatch(config: Config) -> int:
    """Returns the maximum number of steps that a compiled call of a run takes.

    It depends only on the config: enough steps that Python's time, about 0.5 ms per call, is small compared to theirs,
    but few enough that a signal need not wait.
    """
    train, length, most = config.train, config.data.sequence_length, config.train.steps_per_dispatch
    if most is None:
        # The model's, and as much for the optimizer as rotations and passes over memory may take.
        flops = train.batch_size * length * model_flops_per_token(config.model, length)
        flops += 1000 * parameter_count(config.model)
        most = max(1, min(64, 64 * 10**9 // flops)) if jax.default_backend() == "cpu" else 1
    every = (train.steps, train.checkpoint_every_steps, train.eval_every_steps, train.probe_every_steps)
    return min(most, *(steps for steps in every if steps))


def spans(config: Config, start: int) -> Iterator[range]:
    """Yields the steps of each dispatch of a run after step `start`, counted from 1."""
    train, most = config.train, steps_per_dispatch(config)
    while start < train.steps:
        following = range(start + 1, min(start + most, train.steps) + 1)
        due = (step for step in following if train.probes_at(step) or train.validates_at(step) or train.saves_at(step))
        last = next(due, following[-1])
        yield range(start + 1, last + 1)
        start = last


def batches(config: Config, inputs: Inputs, mesh: Mesh | None, start: int) -> Generator[Dispatch, None, None]:
    """Yields the inputs of a run's dispatches, on its devices, from the step after `start` on, two prepared ahead.

    A process reads the rows of its own devices. Errors while reading surface at the dispatch of their step. Close the
    generator if it may not be exhausted.
    """
    most = steps_per_dispatch(config)

    def placed(steps: range) -> Dispatch:
        numbers = range(steps.start - 1, steps.start - 1 + most)
        count = place_whole(mesh, np.array(len(steps), np.int32))
        if inputs.task is not None:
            return Dispatch(
                steps, place_whole(mesh, np.array([(config.data.seed, n) for n in numbers], np.uint32)), count
            )

        def read(first: int, last: int) -> np.ndarray:
            rows = np.stack([inputs.batch_rows(number, first, last) for number in numbers[: len(steps)]], axis=1)
            return np.pad(rows, [(0, 0), (0, most - len(steps)), (0, 0)])

        return Dispatch(steps, place_rows(mesh, config.train.batch_size, read), count)

    waiting = spans(config, start)
    with ThreadPoolExecutor(1, "batches") as pool:
        ahead = deque(pool.submit(placed, steps) for steps in itertools.islice(waiting, _AHEAD))
        try:
            while ahead:
                ready = ahead.popleft().result()
                ahead.extend(pool.submit(placed, steps) for steps in itertools.islice(waiting, 1))
                yield ready
        finally:
            for future in ahead:
                future.cancel()
