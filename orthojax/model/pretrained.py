"""Published models as ours, and ours as others load them: folders of config.json and safetensors.

What a family's files say is in `orthojax.model.families`. Tensors go to the device one at a time; nothing unpickles.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig, from_dict
from orthojax.errors import UserError, needing
from orthojax.files import make_folder, read_json, require_file, write_atomically, write_text
from orthojax.model.families import FAMILIES, family_named
from orthojax.model.family import HEADS, SAME, Family, Weight, foreign_names
from orthojax.model.family_configs import read_config, write_config
from orthojax.model.transformer import parameter_shapes

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
    with needing(str(path), "pretrained"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {error}") from None


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
    config, family = _config_and_family(folder)
    if family is None:
        return config, read_params(config, own_weights(config), SafetensorsFolder(folder), dtype=dtype)
    weights = [(foreign_names(family, weight.there), weight) for weight in family.weights]
    ignored = (*family.ignored, *(HEADS if config.tie_embeddings else ()))
    return config, read_params(config, weights, SafetensorsFolder(folder), ignored, dtype=dtype)


def read_folder_config(folder: Path) -> ModelConfig:
    """The config of `read_folder` alone; no tensor is read."""
    return _config_and_family(folder)[0]


def _config_and_family(folder: Path) -> tuple[ModelConfig, Family | None]:
    given = read_json(folder / "config.json", "config of a model")
    if given.get("model_type") == OWN:
        return from_dict(ModelConfig, given.get("model")), None
    family = family_named(given.get("model_type"))
    return read_config(family, given), family


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
      weights: Names that a tensor may have, with {} for the layer and {expert} for the expert, and what it is.
      tensors: Where to find them.
      ignored: Names that are no parameters, and what the names of others end with, beginning with a dot.
      dtype: Of the parameters.

    Returns:
      A nested dict on the first device; at most one tensor is on the host.

    Raises:
      UserError: For a tensor that is missing, has another shape, or that no row explains.
    """
    shapes = _shapes(config)
    there, used, found = set(tensors.names()), set(), {}
    for names, weight in weights:
        for layer, expert in weight.places(config):
            paths = _paths(weight, layer, config)
            if not all(path in shapes for path in paths):
                continue
            name = next((full for n in names if (full := n.format(layer, expert=expert)) in there), None)
            if name is None:
                raise UserError(f"{tensors.where} has no tensor {names[0].format(layer, expert=expert)}")
            used.add(name)
            parts = _parts(tensors.read(name), weight, config, name)
            for path, part in zip(paths, parts, strict=True):
                starts, sizes = _slot(shapes[path], weight, config, layer, expert)
                wanted = sizes[1:] if layer is not None and config.scan_layers else sizes
                if part.shape != wanted:
                    allowed = f"one that gives {path} {list(wanted)}"
                    raise UserError(f"tensor {name} gives {path} the shape {list(part.shape)}", allowed=allowed)
                if part.shape == shapes[path]:
                    found[path] = jnp.asarray(part, dtype)
                    continue
                if path not in found:
                    found[path] = jnp.zeros(shapes[path], dtype)
                found[path] = _put(found[path], part.reshape(sizes), starts)
    if missing := sorted(shapes.keys() - found.keys()):
        raise UserError(f"{tensors.where} has nothing for {missing[0]}")
    ends = tuple(end for end in ignored if end.startswith("."))
    if unknown := sorted(name for name in there - used if name not in ignored and not name.endswith(ends)):
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{tensors.where} has a tensor that such a model does not: {unknown[0]}{more}")
    return _nested(found)


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, starts: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), starts)


def _slot(
    shape: tuple[int, ...], weight: Weight, config: ModelConfig, layer: int | None, expert: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a tensor of a layer and an expert begins in a parameter of ours, and its size there, along every axis."""
    starts, sizes = [0] * len(shape), list(shape)
    if layer is not None and config.scan_layers:
        starts[0], sizes[0] = layer, 1
    if expert is not None and weight.share is not None:
        sizes[weight.share] //= config.num_experts
        starts[weight.share] = expert * sizes[weight.share]
    return tuple(starts), tuple(sizes)


def _parts(tensor: np.ndarray, weight: Weight, config: ModelConfig, name: str) -> Sequence[np.ndarray]:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):  # quantised, with scales that nothing here multiplies by
        raise UserError(f"tensor {name} is of {tensor.dtype}", allowed="float32, float16 or bfloat16")
    try:
        return weight.how.read(tensor, config)
    except ValueError:
        raise UserError(f"tensor {name} has the shape {list(tensor.shape)}, which does not fit the config") from None


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path."""
    return {path: leaf.shape for path, leaf in _flat(parameter_shapes(config)).items()}


def _paths(weight: Weight, layer: int | None, config: ModelConfig) -> list[str]:
    """The paths of a row, `layers/...`, as this model has them."""
    if not weight.where(config):
        return [""]  # of no parameter
    if layer is None or config.scan_layers:
        return list(weight.here)
    return [here.replace("layers/", f"layers_{layer}/", 1) for here in weight.here]


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if any(not isinstance(key, jax.tree_util.DictKey) for path, _ in leaves for key in path):  # `Quantized` has fields
        raise UserError("the parameters are integers with their steps", allowed="those of a checkpoint in float")
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


def write_folder(folder: str | Path, config: ModelConfig, params: Any, tokenizer: Any = None) -> str:
    """Writes a model as config.json and safetensors, which `read_folder` reads back bit for bit.

    A model that a family expresses becomes one, which transformers loads with equal logits. Any other, one with
    softmax-1 among them, gets a model_type of its own, so that nothing loads it as something else.

    Args:
      folder: New or empty.
      config: Of the model.
      params: Its parameters, float32 or bfloat16.
      tokenizer: `LoadedModel.tokenizer`, which comes along as tokenizer.json.

    Returns:
      The model_type.

    Raises:
      UserError: Where the folder has files, or cannot be written; for parameters on integers; without the extra
        `pretrained`.
    """
    folder, leaves = Path(folder), _flat(params)
    with needing("a safetensors file", "pretrained"):
        import safetensors.numpy  # noqa: F401
    make_folder(folder, "folder of the exported model")
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", allowed="a new folder")
    given, rows = None, own_weights(config)
    for family in FAMILIES.values():
        if given := write_config(family, config):
            rows = [(foreign_names(family, weight.there), weight) for weight in family.weights]
            given |= {"architectures": [family.architecture]}
            break
    given = given or {"model_type": OWN, "model": dataclasses.asdict(config)}
    shard, shards, size = {}, [], 0
    weight_map: dict[str, int] = {}
    for names, weight in rows:
        for layer, expert in weight.places(config):
            paths = _paths(weight, layer, config)
            if not all(path in leaves for path in paths):
                continue
            slots = (_slot(leaves[path].shape, weight, config, layer, expert) for path in paths)
            parts = [_part(leaves[path], *slot) for path, slot in zip(paths, slots, strict=True)]
            if layer is not None and config.scan_layers:
                parts = [part[0] for part in parts]
            tensor = np.asarray(weight.how.write(parts, config), order="C")  # safetensors writes the buffer
            if shard and size + tensor.nbytes > _SHARD_BYTES:
                shards.append(_write_shard(folder, shard, len(shards)))
                shard, size = {}, 0
            name = names[0].format(layer, expert=expert)
            shard[name], weight_map[name] = tensor, len(shards)
            size += tensor.nbytes
    shards.append(_write_shard(folder, shard, len(shards)))
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
    else:
        files = {name: shards[i].name for name, i in weight_map.items()}
        write_text(folder / _INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=1) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    write_text(folder / "config.json", json.dumps(given, indent=2) + "\n")  # last: without it there is no model
    return given["model_type"]


def _part(leaf: Any, starts: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    if isinstance(leaf, jax.Array):  # one program for all layers and experts
        return np.asarray(jax.lax.dynamic_slice(leaf, starts, sizes))
    return np.asarray(leaf[tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))])


def _write_shard(folder: Path, tensors: dict[str, np.ndarray], number: int) -> Path:
    from safetensors.numpy import save

    path = folder / f"model-{number + 1:05d}.safetensors"
    content = save(tensors, {"format": "pt"})  # which transformers asks for
    write_atomically(path, lambda file: file.write(content))
    return path
