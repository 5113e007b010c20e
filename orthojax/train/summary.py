"""The lines that a run says of itself: when it begins, and when it has ended."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthojax.config import Config
from orthojax.formatting import number
from orthojax.model import parameter_count
from orthojax.ops.cross_entropy import perplexity
from orthojax.train.estimates import describe_devices
from orthojax.train.mesh import about_mesh, make_mesh
from orthojax.train.metrics import read_metrics
from orthojax.train.step import require_attention


def opening(config: Config, workdir: Path) -> list[str]:
    """Returns lines about a run before it begins.

    Raises:
      UserError: As `make_mesh` and `require_attention`.
    """
    require_attention(config.model)
    model, optim, train = config.model, config.optim, config.train
    layers = f"{model.num_layers} layers of {model.num_heads} heads, d_model {model.d_model}"
    name = f"{optim.optimizer}{', rotated' if optim.rotated else ''}"
    if optim.is_rotated:
        name += f" ({optim.rotation.kind}, axes {optim.rotation.axes})"
    lines = {
        "model": f"{parameter_count(model):,} parameters: {layers}, {model.normalizer} attention, {model.dtype}",
        "training": f"{train.steps:,} steps of {train.batch_size} x {config.data.sequence_length} tokens",
        "optimizer": f"{name}, learning rate {optim.learning_rate:g}, {optim.warmup_steps:,} steps of warm-up",
        "devices": describe_devices(make_mesh(config)),
    }
    if train.init_from:
        lines["begins with"] = f"the parameters of {train.init_from}"
    return [f"workdir {workdir}", *map(_entry, lines, lines.values()), *(f"  {line}" for line in about_mesh(config))]


def describe_data(provenance: dict[str, Any]) -> str:
    """Returns the line about the data of a run, `Inputs.provenance`; every checkpoint keeps what exactly it was."""
    parts = [provenance["source"]]
    if "file_count" in provenance:
        parts.append(f"{provenance['file_count']:,} files, tokenizer {provenance['tokenizer']}")
        parts += [f"{provenance[split]['n_tokens']:,} {split} tokens" for split in ("train", "validation")]
    return _entry("data", ", ".join(parts))


def closing(workdir: Path, evaluate: Sequence[str]) -> list[str]:
    """Returns lines about a run that has ended: the last losses that were logged, and what to do next.

    Args:
      workdir: The folder of the run.
      evaluate: The command that evaluates it.
    """
    last: dict[str, Any] = {}
    for line in read_metrics(workdir / "metrics.jsonl"):
        last |= line
    parts = [f"step {last['step']:,}"] if last else []
    if "loss_nats" in last:
        parts.append(f"loss {last['loss_nats']:.4f}")
    if (loss := last.get("validation_loss_nats")) is not None:
        parts.append(f"validation loss {loss:.4f}, perplexity {number(perplexity(loss))}")
    following = {"metrics": workdir / "metrics.jsonl", "checkpoints": workdir / "checkpoints"}
    following |= {"evaluate": shlex.join(evaluate)}
    return [f"done: {', '.join(parts)}", *map(_entry, following, map(str, following.values()))]


def _entry(name: str, text: str) -> str:
    return f"  {name:11}  {text}"
