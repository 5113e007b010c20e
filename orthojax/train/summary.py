"""What a run says about itself: when it begins, and when it has ended."""

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

# With softmax-1 and the output axis rotated there were no outliers after 4,000 and 6,000 steps, and there were after
# 10,000.
_LONG_RUN_STEPS = 6_000


def opening(config: Config, workdir: Path) -> list[str]:
    """Lines about a run before it begins.

    Raises:
      UserError: As `make_mesh` and `require_attention`.
    """
    require_attention(config.model)
    model, optim, settings, length = config.model, config.optim, config.train, config.data.sequence_length
    layers = f"{model.num_layers} layers of {model.num_heads} heads, d_model {model.d_model}"
    warmup = "without warm-up"
    if optim.warmup_steps:
        warmup = f"with {optim.warmup_steps:,} step{'s' * (optim.warmup_steps > 1)} of warm-up"
    name = f"{optim.optimizer}{', rotated' if optim.rotated else ''}"
    if optim.is_rotated:
        name += f" ({optim.rotation.kind}, axes {optim.rotation.axes})"
    lines = {
        "model": f"{parameter_count(model):,} parameters: {layers}, {model.normalizer} attention, {model.dtype}",
        "training": f"{settings.steps:,} steps of {settings.batch_size} x {length} tokens",
        "optimizer": f"{name}, learning rate {optim.learning_rate:g} {warmup}",
        "devices": describe_devices(make_mesh(config)),
    }
    if optim.is_rotated and optim.rotation.axes not in ("residual", "both") and settings.steps > _LONG_RUN_STEPS:
        lines["note"] = (
            "with these axes outliers of the first token may return in long runs; with "
            "--config.optim.rotation.axes=residual they did not (docs/optimizer.md)"
        )
    if settings.init_from:
        lines["begins with"] = f"the parameters of {settings.init_from}"
    return [f"workdir {workdir}", *map(_entry, lines, lines.values()), *(f"  {line}" for line in about_mesh(config))]


def describe_data(provenance: dict[str, Any]) -> str:
    """The line about the data of a run, `Inputs.provenance`; every checkpoint keeps what exactly it was."""
    parts = [provenance["source"]]
    if "file_count" in provenance:
        parts.append(f"{provenance['file_count']:,} files, tokenizer {provenance['tokenizer']}")
        parts += [f"{provenance[split]['n_tokens']:,} {split} tokens" for split in ("train", "validation")]
    return _entry("data", ", ".join(parts))


def closing(workdir: Path, evaluate: Sequence[str]) -> list[str]:
    """Lines about a run that has ended: the last losses that were logged, and what to do next.

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
