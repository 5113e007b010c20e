"""Runs on Bigram-Backcopy over their recorded steps, for the page with the slider."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from orthojax.errors import UserError
from orthojax.experiments.results import Result
from orthojax.experiments.training_view import Frame, TrainingView
from orthojax.train import read_metrics
from orthojax.train.probe import probe_file


def training_view(result: Result, task: Any, curves: Mapping[str, str]) -> TrainingView:
    """The first seed of a variant over its probes, from the folder of its run.

    Args:
      result: Of the variant.
      task: Its Bigram-Backcopy.
      curves: Words -> metric, as in metrics.jsonl.
    """
    seed = min(result.folders)
    return view_of_run(result.folders[seed], task, curves, f"{result.label}, seed {seed}", title=result.label)


def view_of_run(folder: Path, task: Any, curves: Mapping[str, str], about: str, *, title: str = "") -> TrainingView:
    """One run with `train.probe_details` over its probes.

    Args:
      folder: Its workdir.
      task: Its Bigram-Backcopy, as `open_task` gives it.
      curves: Words -> metric, as in metrics.jsonl.
      about: What the run is.
      title: Its name; `about` where none is given.

    Raises:
      UserError: Where the run has no probes.
    """
    lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl") if "sink_attention" in line}
    frames, tokens = [], None
    for step in sorted(lines):
        with np.load(probe_file(folder / "probes", step)) as arrays:
            shown = [np.asarray(arrays[name], np.float32) for name in ("attention", "value_norms", "residual_norms")]
            tokens = arrays["tokens"]
            frames.append(Frame(step, *shown))
    if tokens is None:
        raise UserError(
            f"{folder} has no probes",
            hint="train it with train.probe_steps and train.probe_details, and an experiment without --render",
        )
    names = [*("<s>" if len(task.bos_ids) == 1 else f"<s{i}>" for i in range(len(task.bos_ids)))]
    words = {**dict(enumerate(task.characters)), **dict(zip(task.bos_ids, names, strict=True))}
    return TrainingView(
        title=title or about,
        tokens=[words.get(int(token), "<d>") for token in tokens],
        is_trigger=np.asarray(task.is_trigger(jnp.asarray(tokens[None])))[0].tolist(),
        frames=frames,
        curves={words: [lines[frame.step].get(name, np.nan) for frame in frames] for words, name in curves.items()},
        about=f"{about}: one held-out sequence at the recorded steps of training.",
    )
