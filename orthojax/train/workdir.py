"""What a run reads, batches by step and a fixed evaluation set, and the folder that it writes."""

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from orthojax.config import Config, changed_fields, fields_affecting, flatten, from_dict, to_json
from orthojax.data import BigramBackcopy, TokenBatches, open_dataset, open_task
from orthojax.data.bigram_backcopy import EVALUATION
from orthojax.data.token_files import Tokens
from orthojax.errors import UserError
from orthojax.files import make_folder, read_json, try_lock, write_atomically, write_text
from orthojax.train.checkpoint import read_config
from orthojax.train.checkpoint.checksums import steps_in

T = TypeVar("T")


class Inputs(NamedTuple):
    """The data of a run."""

    # step -> int32 [batch_size, T + 1], a pure function; of a task, what the training step draws by itself.
    batch: Callable[[int], np.ndarray]
    evaluation: np.ndarray  # int32 [eval.sequences, T + 1]
    bits_per_nat_of_loss: float | None  # bits per byte of text for each nat per token; None without text
    provenance: dict[str, Any]  # JSON values: hashes and counts of everything read
    task: BigramBackcopy | None  # the synthetic task, where it is one
    read_rows: Callable[[int, int, int], np.ndarray] | None = None  # reads a part of a batch, where that saves reading
    held_out: Tokens | None = None  # the validation split, of which `evaluation` is a part; None for a task
    tokenizer_path: Path | None = None  # the tokenizer's file, where there is one

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
        task, provenance = require_task(config)

        def batch(step: int) -> np.ndarray:
            return np.asarray(task.batch(step, train.batch_size, data.sequence_length, data.seed))

        rows = np.asarray(task.batch(0, evaluation.sequences, data.sequence_length, 0, EVALUATION))
        return Inputs(batch, rows, None, provenance, task)
    dataset = open_dataset(data, cache_dir, progress=progress)
    _require_vocabulary(config, dataset.vocab_size)
    bos_id = dataset.bos_id if data.bos else None
    batches = TokenBatches(dataset.train, data.sequence_length, train.batch_size, data.seed, bos_id)
    validation = TokenBatches(dataset.validation, data.sequence_length, 1, 0, bos_id)
    _require_rows(config, validation.n_rows)
    bits_per_nat = len(dataset.validation) / dataset.validation_bytes / math.log(2)
    rows = validation.spread_rows(evaluation.sequences)
    read_rows, held_out, tokenizer = batches.rows, dataset.validation, dataset.tokenizer_path
    return Inputs(batches, rows, bits_per_nat, dataset.provenance, None, read_rows, held_out, tokenizer)


def require_task(config: Config) -> tuple[BigramBackcopy, dict[str, Any]]:
    """The task of a run with its provenance, as `orthojax.data.open_task`; no device is used.

    Raises:
      UserError: As `open_task`, and for a vocabulary that the model does not have.
    """
    task, provenance = open_task(config.data)
    _require_vocabulary(config, task.vocab_size)
    return task, provenance


def _require_vocabulary(config: Config, needed: int) -> None:
    if config.model.vocab_size < needed:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is less than the {needed} ids of the data",
            allowed=f"at least {needed}",
            hint=f"--config.model.vocab_size={needed}",
        )


def _require_rows(config: Config, held_out: int) -> None:
    if config.eval.sequences > held_out:
        raise UserError(
            f"eval.sequences={config.eval.sequences} is more than the {held_out} rows of "
            f"{config.data.sequence_length} tokens that are held out",
            allowed=f"at most {held_out}, or more text",
            hint=f"--config.eval.sequences={held_out}",
        )


def prefetched(prepare: Callable[[int], T], start: int, stop: int, *, depth: int = 2) -> Generator[T, None, None]:
    """prepare(start), ..., prepare(stop - 1), in order, `depth` of them ahead in a background thread.

    What `prepare` raises surfaces at its step. Close the generator (`contextlib.closing`) where it may not be used up:
    what is being prepared is then awaited, the rest dropped.

    >>> list(prefetched(lambda step: step**2, 2, 5))
    [4, 9, 16]
    """
    with ThreadPoolExecutor(1, "prefetch") as pool:
        ahead = deque(pool.submit(prepare, step) for step in range(start, min(start + depth, stop)))
        try:
            for step in range(start, stop):
                ready = ahead.popleft().result()
                if step + depth < stop:
                    ahead.append(pool.submit(prepare, step + depth))
                yield ready
        finally:
            for waiting in ahead:
                waiting.cancel()


def check_workdir(workdir: Path, config: Config) -> None:
    """Checks that a run of this config may use the folder; writes nothing.

    Raises:
      UserError: Where the path, or a part of it, is a file, or it already holds a run of another config.
    """
    for path in (workdir / "checkpoints", workdir, *workdir.parents):
        if os.path.isfile(path):  # pathlib raises for names that are too long
            raise UserError(f"workdir {workdir}: {path} is a file", allowed="a folder, new or of an earlier call")
    steps = steps_in(workdir / "checkpoints")
    before, where = _read_config(workdir), workdir
    if before is None and steps:
        where = workdir / "checkpoints" / str(steps[-1])
        with contextlib.suppress(UserError):  # where it is damaged, an older one may not be
            before = read_config(where)
    # Of a run that never began only the config is there, as where what it was to begin with is not.
    if before is not None and (steps or os.path.lexists(workdir / "metrics.jsonl")):
        require_same_config(config, before, str(where))


@contextlib.contextmanager
def claimed(workdir: Path, config: Config) -> Iterator[None]:
    """Creates and locks the folder of a run, and writes its config.json.

    A second call would take the first one's unfinished checkpoint away. Where the run resumes with other values of
    fields that do not affect its numbers, config.json becomes the newest config; every checkpoint holds its own.

    Raises:
      UserError: Where another process has it, it cannot be written, or as `check_workdir`.
    """
    make_folder(workdir, "workdir")
    try:
        file = open(workdir / ".lock", "a")
    except OSError as error:
        raise UserError(f"cannot write to workdir {workdir}: {error.strerror}", allowed="a writable folder") from error
    with file:
        if not try_lock(file):
            allowed = "another --workdir, or to wait until it ends"
            raise UserError(f"another process is training in {workdir}", allowed=allowed)
        check_workdir(workdir, config)
        if _read_config(workdir) != config:
            write_text(workdir / "config.json", to_json(config) + "\n")
        yield


def start_of(workdir: Path, init_from: str, find: Callable[[str], Path]) -> str:
    """What a run begins with: found once, since the newest checkpoint of another run may be a later one tomorrow.

    Args:
      workdir: Of the run, whose `init_from.json` keeps it.
      init_from: Of its config.
      find: From `init_from` to the folder or file.

    Raises:
      UserError: As `find` and `read_json`.
    """
    note = workdir / "init_from.json"
    kept = read_json(note, "note on the start of a run") if os.path.lexists(note) else {}
    if kept.get("init_from") == init_from and not os.path.exists(str(kept.get("found"))):
        problem = f"the run in {workdir} was to begin with {kept.get('found')}, which is gone"
        raise UserError(problem, hint=f"delete {note} to begin with what {init_from} is now")
    if kept.get("init_from") != init_from:
        kept = {"init_from": init_from, "found": str(find(init_from))}
        write_text(note, json.dumps(kept) + "\n")
    return kept["found"]


def keep_tokenizer(workdir: Path, path: Path | None) -> None:
    """Copies the tokenizer into the folder of a run, whose model then reads and writes text wherever it is moved."""
    copy = workdir / "tokenizer.json"
    if path is not None and not (copy.is_file() and copy.read_bytes() == path.read_bytes()):
        content = path.read_bytes()
        write_atomically(copy, lambda file: file.write(content))


def _read_config(workdir: Path) -> Config | None:
    path = workdir / "config.json"
    if not os.path.lexists(path):
        return None
    try:
        return from_dict(Config, read_json(path, "config"), f"the config in {path}")
    except UserError as error:
        hint = "another --workdir, or delete that file: every checkpoint holds the config of its run too"
        raise UserError("\n".join(str(error).splitlines()[:2]), hint=hint) from error


def require_same_config(config: Config, before: Config, where: str) -> None:
    """Refuses to resume with another config than the run began with, except for what does not affect its numbers.

    The number of steps does, because the learning rate depends on it.

    Raises:
      UserError: Naming the fields that differ.
    """
    decides = fields_affecting(Config, "numbers", "start")
    if config.train.on_bad_step == "roll_back":
        decides += ("train.checkpoint_every_steps",)  # where it rolls back to
    changed = {path: value for path, value in sorted(changed_fields(before, config).items()) if path in decides}
    if not (before.optim.is_rotated or config.optim.is_rotated):
        changed = {path: value for path, value in changed.items() if not path.startswith("optim.rotation.")}  # not read
    if not changed:
        return
    had, some = flatten(before), list(changed)[:3]
    differ = ", ".join(f"{path}={changed[path]} (was {had[path]})" for path in some)
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    hint = "logging, when it validates and checkpoints, retention, the mesh and how a step is computed may differ"
    if "train.checkpoint_every_steps" in changed:
        hint = "a run that rolls back does so to the checkpoints of its schedule, which stays as it is"
    if config.train.steps > before.train.steps:
        hint = f"the learning rate follows train.steps; to train on: --workdir=NEW --config.train.init_from={where}"
    raise UserError(
        f"{where} holds a run with another config: {differ}{more}",
        allowed="the config of that run (its config.json after --config=), or another --workdir",
        hint=hint,
    )
