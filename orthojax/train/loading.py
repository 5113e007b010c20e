"""Models from checkpoints: to measure, or as the start of another run."""

import contextlib
import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config, DataConfig, ModelConfig, changed_fields, flatten, replace
from orthojax.data import load_tokenizer, make_tokenizer
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import NonFiniteError, UserError
from orthojax.files import is_remote, say_once
from orthojax.model import LoadedModel, Transformer, mesh_of, stack_layers, unstack_layers
from orthojax.places import find_place, is_pretrained
from orthojax.pretrained import (
    begins_with_bos,
    computed_as,
    read_folder,
    read_folder_config,
    read_gguf,
    read_gguf_config,
    with_declared_tokens,
)
from orthojax.stores import fetched
from orthojax.train.checkpoint import read_config, read_json_item, read_params

_Read = TypeVar("_Read")
_PUBLISHED_LENGTH = 256  # tokens of a row on which published models are measured


def load(path: str | Path) -> LoadedModel:
    """Returns a model with its parameters on the first device: from a run, or a published one.

    `auto` replaces the fused attention of one platform, `cudnn` or `splash`.

    Args:
      path: A workdir, its `checkpoints` folder, or one step's folder; or what `orthojax.pretrained.locate` finds: a
        folder of config.json and safetensors, a .gguf file, a name in the local Hugging Face cache, `smollm2`.

    Raises:
      UserError: If there is no model, it is damaged, or of a family that is not supported; for a .gguf file or
        safetensors also without the extra `pretrained`. NonFiniteError for weights that are NaN or infinite.
    """
    loaded = _read_newest(path, _load)
    for name, leaf in jax.tree.leaves_with_path(loaded.params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(np.asarray(leaf)).all():
            tensor = jax.tree_util.keystr(name, simple=True, separator="/")
            raise NonFiniteError(f"{loaded.source}: {tensor} has values that are not finite", allowed="finite weights")
    return loaded


def _read_newest(path: str | Path, read: Callable[[Path], _Read]) -> _Read:
    """Reads the newest step of a run; if its training removes that step meanwhile, the one that is then the newest."""
    while True:
        place = find_place(path)
        try:
            return read(place)
        except Exception:
            if find_place(path) == place:
                raise


def _load(place: Path) -> LoadedModel:
    config = _read_config(place)
    if is_pretrained(place):
        return _load_pretrained(place, config)
    return LoadedModel(Transformer(config.model), read_params(place), config, _tokenizer(place, config), place)


def find_model(path: str | Path) -> tuple[Path, Config]:
    """Finds a model as `load` does, and its config; no parameters are read.

    Returns:
      The folder of a checkpoint's step and the config of its run; or the folder or file of a published model, and a
      config with its model and its tokenizer, on the embedded text.
    """
    return _read_newest(path, lambda place: (place, _read_config(place)))


def _read_config(found: Path) -> Config:
    if not is_pretrained(found):
        config = read_config(found)
        # Kernels that only the training platform has; `auto` picks those of this platform.
        if config.model.attention_implementation in ("cudnn", "splash"):
            config = replace(config, {"model.attention_implementation": "auto"})
        return config
    model = (read_gguf_config if found.suffix == ".gguf" else read_folder_config)(found)
    length, bos = min(model.max_length, _PUBLISHED_LENGTH), False
    try:
        bos = begins_with_bos(found)
    except UserError as error:  # token ids are enough for most, and whoever reads text reports the file
        warnings.warn(f"whether texts begin with BOS is not known: {error}", stacklevel=2)
    data = DataConfig(sequence_length=length, tokenizer=str(found), bos=bos)
    return Config(model=model, data=data)


def _read_published(path: Path) -> Any:
    return (read_gguf if path.suffix == ".gguf" else read_folder)(path)[1]


def _load_pretrained(path: Path, config: Config) -> LoadedModel:
    params, tokenizer = _read_published(path), None
    with contextlib.suppress(UserError):  # token ids are enough for most
        tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        tokenizer = with_declared_tokens(tokenizer, path)
    return LoadedModel(Transformer(config.model), params, config, tokenizer, path)


def require_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Returns the tokenizer of a model that is to read or write text; a UserError says why it is not known."""
    if loaded.tokenizer is not None:
        return loaded.tokenizer
    reason = "the tokenizer of this model is not known, so it cannot read text"
    if is_pretrained(loaded.source):
        try:
            return load_tokenizer(loaded.source)
        except UserError as error:
            reason = str(error).partition("\n")[0]
    raise UserError(reason, allowed="--tokenizer=PATH, or token ids: --prompt_ids=1,2,3 or --token_ids=FILE.npy")


def _tokenizer(folder: Path, config: Config) -> Any | None:
    """Returns the tokenizer that the run kept, or that its config names without a corpus, if it is still the same.

    A file that is another is left out, and a line on stderr says so.
    """
    if config.data.kind == "bigram_backcopy":
        return None
    sha256, spec = read_json_item(folder, "data").get("tokenizer_sha256"), config.data.tokenizer
    kept = [path for parent in list(folder.parents)[:2] if (path := parent / "tokenizer.json").is_file()]
    if any(map(is_remote, kept)):
        with tempfile.TemporaryDirectory() as copies:
            return _tokenizer_of([fetched(path, Path(copies)) for path in kept], spec, sha256)
    return _tokenizer_of(kept, spec, sha256)


def _tokenizer_of(kept: list[Path], spec: str, sha256: str | None) -> Any | None:
    """Returns the first tokenizer with a digest, of files that a run kept or made anew; None if there is none."""
    makes = [functools.partial(load_tokenizer, path, spec) for path in kept]
    if not spec.startswith("bpe:"):
        makes.append(functools.partial(make_tokenizer, spec, ()))
    for path, make in itertools.zip_longest(kept, makes):
        with contextlib.suppress(UserError, ImportError):
            if (tokenizer := make()).sha256 == sha256:
                return tokenizer
        if path:
            say_once(f"{path} is left out: it is not the tokenizer with which the checkpoint was trained")
    return None


def load_params(
    path: str | Path, model: ModelConfig, *, allow_normalizer_change: bool = False, like: Any = None
) -> Any:
    """Returns the parameters of a checkpoint, for a model that is built from another config.

    The right shapes are not enough: a softmax model run with softmax-1, or with another activation, silently computes
    something else. So every field that changes the function must match the checkpoint.

    Args:
      path: As for `load`.
      model: The model that uses the parameters; layers are stacked or unstacked for it.
      allow_normalizer_change: Let the normalizer differ, as for fine-tuning a softmax model with softmax-1. Learned
        sink logits then begin at `model.sink_init`.
      like: Shardings of the parameters over the mesh of a run: every process calls this, and reads only its part of a
        checkpoint (of a published model, everything).

    Returns:
      A nested dict of float32 arrays on the first device, or as `like`.

    Raises:
      UserError: If there is no checkpoint, it is damaged, or its model differs; the error names the fields.
    """

    def read(folder: Path) -> tuple[ModelConfig, Any]:
        saved = _read_config(folder).model
        _require_same_function(folder, saved, model, allow_normalizer_change)
        return saved, _read_published(folder) if is_pretrained(folder) else read_params(folder, mesh)

    def fit(params: Any) -> Any:
        if saved.scan_layers != model.scan_layers:
            params = stack_layers(params) if model.scan_layers else unstack_layers(params)
        if model.normalizer == "learned_sink" != saved.normalizer:
            _add_sinks(params, model)
        return params

    mesh = jax.tree.leaves(like)[0].mesh if like is not None else None
    saved, params = _read_newest(path, read)
    if mesh_of(params) is None:
        return fit(params) if like is None else jax.device_put(jax.tree.map(np.asarray, fit(params)), like)
    return jax.jit(fit, out_shardings=like, donate_argnums=0)(params)


def _add_sinks(params: Any, model: ModelConfig) -> None:
    layers = [params[name] for name in params if name.startswith("layers")]
    for block in layers:
        if "attention" in block:
            shape = (model.num_layers, model.num_heads) if model.scan_layers else (model.num_heads,)
            block["attention"]["sink"] = jnp.full(shape, model.sink_init)


def _require_same_function(folder: Path, saved: ModelConfig, model: ModelConfig, allow_normalizer_change: bool) -> None:
    has_sink = saved.normalizer == "learned_sink"  # which has parameters of its own
    different = sorted(changed_fields(computed_as(saved), computed_as(model)))
    normalizer = [name for name in different if name.startswith("normalizer")]
    may_change = different == normalizer and not has_sink
    if not different or (allow_normalizer_change and may_change):
        return
    named = [name for name in different if has_sink or not allow_normalizer_change or name not in normalizer]
    before, now = flatten(computed_as(saved)), flatten(computed_as(model))
    values = ", ".join(f"model.{name}={before[name]!r}, not {now[name]!r}" for name in named)
    raise UserError(
        f"the checkpoint {folder} was trained with a different model config: {values}",
        allowed="the model that it was trained as",
        hint="allow_normalizer_change=true starts from it all the same, for fine-tuning" if may_change else "",
    )


def initial_params(config: Config, provenance: dict[str, Any], path: str, like: Any = None) -> Any:
    """Returns the initial parameters of a run, from the folder or file behind `train.init_from`, sharded as `like`.

    Raises:
      UserError: As for `load_params`; also if token ids mean something else there than in the data of this provenance.
    """
    may_change = config.train.allow_normalizer_change
    params = load_params(path, config.model, allow_normalizer_change=may_change, like=like)
    if is_pretrained(place := find_place(path)):
        saved = {"tokenizer_sha256": load_tokenizer(place).sha256}
    else:
        saved = read_json_item(place, "data")
    for name in ("tokenizer_sha256", "characters"):  # of text, of Bigram-Backcopy
        now, before = provenance.get(name), saved.get(name)
        if now != before:
            raise UserError(
                f"the checkpoint {path} was created with a different tokenizer: {name} is {now!r}, not {before!r}",
                allowed="the tokenizer that it was trained with",
                hint="--config.data.tokenizer=PATH names a tokenizer.json, such as that in its folder",
            )
    return params
