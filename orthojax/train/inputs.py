"""What a run reads: batches by step, and a fixed evaluation set."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orthojax.config import Config
from orthojax.data import BigramBackcopy, TokenBatches, default_text, open_dataset
from orthojax.errors import UserError


class Inputs(NamedTuple):
    """The data of a run."""

    batch: Callable[[int], np.ndarray]  # step -> int32 [batch_size, T + 1], a pure function
    evaluation: np.ndarray  # int32 [eval.sequences, T + 1]
    bits_per_nat_of_loss: float | None  # bits per byte of text for each nat per token; None without text
    provenance: dict[str, Any]  # JSON values: hashes and counts of everything read
    task: BigramBackcopy | None  # the synthetic task, where it is one
    read_rows: Callable[[int, int, int], np.ndarray] | None = None  # reads a part of a batch, where that saves reading

    def batch_rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the batch of a step, int32 [stop - start, T + 1], for a process that holds them."""
        return self.read_rows(step, start, stop) if self.read_rows else self.batch(step)[start:stop]


def open_inputs(config: Config, cache_dir: Path, *, progress: Callable[[str, int, int], None] | None = None) -> Inputs:
    """Opens the data that a config names, tokenising text the first time.

    Args:
      config: The run.
      cache_dir: Folder of tokenised corpora.
      progress: Called with (what, bytes done, bytes in all) while tokenising.

    Raises:
      UserError: For anything wrong with the files, or a vocabulary that the model does not have.
    """
    data, train, evaluation = config.data, config.train, config.eval
    if data.kind == "bigram_backcopy":
        task = BigramBackcopy.from_text(default_text(), data.trigger_count)
        _require_vocabulary(config, task.vocab_size)

        def batch(step: int) -> np.ndarray:
            return task.batch(step, train.batch_size, data.sequence_length, data.seed)

        # Training seeds are below 2**32, so this one is never trained on.
        rows = task.batch(0, evaluation.sequences, data.sequence_length, 2**32)
        provenance = {"source": "bigram_backcopy of pydoc_data.topics", "characters": "".join(task.characters)}
        return Inputs(batch, rows, None, provenance, task)
    dataset = open_dataset(data, cache_dir, progress=progress)
    _require_vocabulary(config, dataset.vocab_size)
    bos_id = dataset.bos_id if data.bos else None
    batches = TokenBatches(dataset.train, data.sequence_length, train.batch_size, data.seed, bos_id)
    validation = TokenBatches(dataset.validation, data.sequence_length, 1, 0, bos_id)
    return Inputs(
        batches,
        validation.spread_rows(evaluation.sequences),
        len(dataset.validation) / dataset.validation_bytes / math.log(2),
        dataset.provenance,
        None,
        batches.rows,
    )


def _require_vocabulary(config: Config, needed: int) -> None:
    if config.model.vocab_size < needed:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is less than the {needed} ids of the data",
            allowed=f"at least {needed}",
            hint=f"--config.model.vocab_size={needed}",
        )
