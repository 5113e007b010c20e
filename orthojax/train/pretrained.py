"""The parameters of one run as the start of another."""

import dataclasses
from pathlib import Path
from typing import Any

from orthojax.config import Config, ModelConfig
from orthojax.errors import UserError
from orthojax.model import stack_layers, unstack_layers
from orthojax.train.checkpoint import find_checkpoint, read_config, read_json_item, read_params

# What may differ without changing the function that the parameters compute, beyond rounding.
_SAME_FUNCTION = {"init_std", "embedding_init_std", "scan_layers", "remat", "dtype", "attention_implementation"}


def load_params(path: Path, model: ModelConfig, *, allow_normalizer_change: bool = False) -> Any:
    """The parameters of a checkpoint, for a model that is built by another config.

    Arrays of the right shapes are not enough: a model trained with softmax and run with softmax-1, or with another
    activation, computes something else without a word. So every field of the model that changes the function must be
    that of the checkpoint.

    Args:
      path: A workdir, its `checkpoints` folder, or one step's folder.
      model: The model that will use the parameters. Stacked and unrolled layers are converted to each other.
      allow_normalizer_change: Let the normalizer of the attention differ, as for fine-tuning a softmax model with
        softmax-1.

    Returns:
      A nested dict of float32 arrays on the first device.

    Raises:
      UserError: Where there is no checkpoint, it is damaged, or its model differs; the fields are named.
    """
    folder = find_checkpoint(path)
    saved = read_config(folder).model
    _require_same_function(folder, saved, model, allow_normalizer_change)
    params = read_params(folder)
    if saved.scan_layers == model.scan_layers:
        return params
    return stack_layers(params) if model.scan_layers else unstack_layers(params)


def _require_same_function(folder: Path, saved: ModelConfig, model: ModelConfig, allow_normalizer_change: bool) -> None:
    if "learned_sink" in {saved.normalizer, model.normalizer}:  # it has parameters of its own
        allow_normalizer_change = False
    free = _SAME_FUNCTION | ({"max_length"} if model.position != "learned" else set())
    before, now = dataclasses.asdict(saved), dataclasses.asdict(model)
    different = sorted(name for name in now if name not in free and before[name] != now[name])
    normalizer = [name for name in different if name.startswith("normalizer")]
    if allow_normalizer_change:
        different = [name for name in different if name not in normalizer]
    if not different:
        return
    told = ", ".join(f"model.{name}={before[name]!r}, not {now[name]!r}" for name in different)
    mendable = different == normalizer and "learned_sink" not in {saved.normalizer, model.normalizer}
    raise UserError(
        f"the checkpoint {folder} is of another model: {told}",
        allowed="the model that it was trained as",
        hint="allow_normalizer_change=true starts from it all the same, for fine-tuning" if mendable else "",
    )


def initial_params(config: Config, provenance: dict[str, Any]) -> Any:
    """The parameters of `train.init_from`, refused where its token ids mean something else.

    Args:
      config: Of the run that begins.
      provenance: Of its data.

    Raises:
      UserError: As `load_params`; for another tokenizer.
    """
    path = Path(config.train.init_from)
    params = load_params(path, config.model, allow_normalizer_change=config.train.allow_normalizer_change)
    saved = read_json_item(find_checkpoint(path), "data")
    for name in ("tokenizer_sha256", "characters"):  # of text, of Bigram-Backcopy
        now, before = provenance.get(name), saved.get(name)
        if now != before:
            raise UserError(
                f"the checkpoint {path} knows other token ids: {name} is {now!r}, not {before!r}",
                allowed="the tokenizer that it was trained with",
                hint="--config.data.tokenizer=PATH names a tokenizer.json, such as that of its --cache_dir",
            )
    return params
