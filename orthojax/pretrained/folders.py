"""Reads published models as ours, and writes ours for other libraries: folders of config.json and safetensors.

The tables of `orthojax.pretrained.families` say what the files of a family mean. Tensors go to the device one at a
time; nothing unpickles.
"""

import contextlib
import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig, from_dict, require
from orthojax.data.tokenizers import HuggingFaceTokenizer, begins_with_bos, bos_first
from orthojax.errors import UserError, nearest, needing
from orthojax.files import make_folder, read_json, require_file, write_atomically, write_text
from orthojax.model import parameter_shapes
from orthojax.pretrained.configs import read_foreign_config, write_config
from orthojax.pretrained.export import CODE, OWN, code_fields, family_of
from orthojax.pretrained.families import FAMILIES, HEADS, SAME, TRANSPOSED, Family, Weight, foreign_names

_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"

Tensors = Mapping[str, Callable[[], np.ndarray]]  # by name, each read when called
Rows = Sequence[tuple[Sequence[str], Weight]]  # with the names that tensors may have; the first is written


def _tensors_of(folder: Path) -> Tensors:
    """Finds the tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names."""
    tensors: dict[str, Callable[[], np.ndarray]] = {}
    float8 = []
    for path in _files(folder):
        with _opened(path) as file:
            tensors |= {name: functools.partial(_read, path, name) for name in file.keys()}
            float8 += [name for name in file.keys() if file.get_slice(name).get_dtype() in _FLOAT8]
    for name in float8:  # as compressed-tensors and DeepSeek name their scales
        for scale in (f"{name}_scale", f"{name}_scale_inv"):
            if scale in tensors:
                tensors[name] = functools.partial(_scaled, name, tensors[name], tensors.pop(scale))
    for name in [name for name in tensors if name.endswith("_blocks")]:
        whole = name.removesuffix("_blocks")
        if scales := tensors.pop(f"{whole}_scales", None):
            tensors[whole] = functools.partial(_read_mxfp4, name, tensors.pop(name), scales)
    return tensors


# The values of FP4 (E2M1), by their bits.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])


def _read_mxfp4(name: str, blocks: Callable[[], np.ndarray], scales: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads a tensor [E, in, out] of gpt-oss from blocks [E, out, in / 32, 16] of MXFP4 and scales [E, out, in / 32].

    A byte has two numbers, the first in its low bits, and 32 numbers share one scale 2^(s - 127) (OCP Microscaling
    Formats, 2023).
    """
    codes, exponents = blocks(), scales()
    fits = codes.dtype == exponents.dtype == np.uint8 and codes.shape == (*exponents.shape, 16)
    require(fits, f"tensor {name} is {codes.dtype} {list(codes.shape)}", "blocks of MXFP4, uint8 [..., 16]")
    values = np.ldexp(_FP4[np.stack([codes & 15, codes >> 4], axis=-1)], exponents[..., None, None].astype(int) - 127)
    return np.swapaxes(values.reshape(*exponents.shape[:-1], -1), -1, -2)


_FLOAT8 = {"F8_E4M3": jnp.dtype("float8_e4m3fn"), "F8_E5M2": jnp.dtype("float8_e5m2")}
_SCALED_BLOCK = 128  # DeepSeek-V3, arXiv 2412.19437, section 3.3.2


def _scaled(name: str, read: Callable[[], np.ndarray], read_scale: Callable[[], np.ndarray]) -> np.ndarray:
    """Reads a tensor of float8 times its scales: one, one for each row, or one for each block of 128 x 128."""
    values, scale = read(), read_scale().astype(np.float32)
    if scale.size > 1 and scale.ndim == 1:
        scale = scale[:, None]
    for axis in range(scale.ndim if scale.size > 1 else 0):
        if scale.ndim == values.ndim and scale.shape[axis] not in (1, values.shape[axis]):
            scale = np.repeat(scale, _SCALED_BLOCK, axis)
            if scale.shape[axis] - values.shape[axis] in range(_SCALED_BLOCK):
                scale = np.take(scale, range(values.shape[axis]), axis)
    try:
        return values * np.broadcast_to(scale if scale.size > 1 else scale.reshape(()), values.shape)
    except ValueError:
        problem = f"the scales {list(scale.shape)} of tensor {name} {list(values.shape)}"
        raise UserError(problem, allowed="one, one for each row, or one for each block of 128 x 128") from None


def _files(folder: Path) -> list[Path]:
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
            hint = f"{pickled.name} is a pickle, which can run code: have it saved as safetensors" if pickled else ""
            raise UserError(f"{folder} has no safetensors", allowed=f"model.safetensors, or {_INDEX}", hint=hint)
    for path in paths:
        require_file(path, "file of tensors")
    return paths


def _read(path: Path, name: str) -> np.ndarray:
    with _opened(path) as file:
        part = file.get_slice(name)
        if (kind := part.get_dtype()) not in _FLOAT8:
            return file.get_tensor(name)
    with path.open("rb") as file:  # safetensors looks for a float8 in NumPy, which has none
        size = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        values = np.frombuffer(file.read(stop - start), _FLOAT8[kind])
    return values.reshape(part.get_shape()).astype(np.float32)


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


def read_folder(folder: Path) -> tuple[ModelConfig, Any]:
    """Reads a folder of config.json and safetensors, as transformers and `write_folder` write it.

    Returns the config, and parameters as `Transformer(config).init` returns them under "params", float32 on the first
    device. Raises UserError for an unknown family, a config field or tensor that is not understood, or damaged files.
    """
    config, family = _config_and_family(folder)
    tensors, beside = _tensors_of(folder), () if family is None else family.beside
    is_old = "token_embedding.embedding" in tensors
    rows, ignored = (own_rows(config, is_old), ()) if family is None else (_rows(family), family.ignored)
    ignored += HEADS if config.tie_embeddings else ()
    tensors = {name: read for name, read in tensors.items() if not name.startswith(beside)}
    return config, assemble_params(config, rows, tensors, str(folder), ignored)


def read_folder_config(folder: Path) -> ModelConfig:
    """Reads only the config of `read_folder`, and no tensor."""
    return _config_and_family(folder)[0]


def _config_and_family(folder: Path) -> tuple[ModelConfig, Family | None]:
    content: Any = read_json(folder / "config.json", "config of a model")
    name: Any = content.get("model_type")
    if name == OWN:
        return from_dict(ModelConfig, content.get("model")), None
    if not isinstance(name, str) or name not in FAMILIES:
        hint = f"{nearest(str(name), FAMILIES)} orthojax.analysis.summarize takes arrays of any model".strip()
        raise UserError(f"model_type {name!r} is not supported", allowed=" | ".join(FAMILIES), hint=hint)
    nested = content.get("text_config") if FAMILIES[name].beside else content
    require(isinstance(nested, dict), f"the config of {folder} has no text_config", "that of the text model")
    config = read_foreign_config(FAMILIES[name], nested)
    if config.tie_embeddings and _has_another_head(folder, FAMILIES[name]):
        warnings.warn(f"{folder} says tied embeddings, and has another head: the head is used", stacklevel=2)
        config = dataclasses.replace(config, tie_embeddings=False)
    return config, FAMILIES[name]


def _has_another_head(folder: Path, family: Family) -> bool:
    """Returns whether files with tied embeddings have a head that differs; transformers 5 then unties them."""
    tensors = _tensors_of(folder)
    head = next((tensors[name]() for name in HEADS if name in tensors), None)
    if head is None:
        return False
    (embedding,) = (row.there for row in family.weights if row.here == ("token_embedding/embedding",))
    table = next((tensors[name]() for name in foreign_names(family, embedding) if name in tensors), head)
    return not np.array_equal(head, table)


def assemble_params(
    config: ModelConfig, rows: Rows, tensors: Tensors, where: str, ignored: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Reads the parameters of a model from foreign tensors: float32 on the first device, one at a time on the host.

    `ignored` has names of tensors that are not parameters; those that begin with a dot are suffixes. Raises UserError
    for a tensor that is missing, has the wrong shape, or is explained by no row.
    """
    shapes = {path: leaf.shape for path, leaf in _flat(parameter_shapes(config)).items()}
    used, found = set(), {}
    for names, weight, slots in _places(config, rows, shapes):
        name = next((name for name in names if name in tensors), None)
        if name is None:
            raise UserError(f"{where} has no tensor {names[0]}")
        used.add(name)
        for slot, part in zip(slots, _parts(tensors[name](), weight, config, name), strict=True):
            if part.shape != slot.part:
                allowed = f"one that gives {slot.path} {list(slot.part)}"
                raise UserError(f"tensor {name} gives {slot.path} the shape {list(part.shape)}", allowed=allowed)
            if slot.sizes == shapes[slot.path]:
                found[slot.path] = jnp.asarray(part.reshape(slot.sizes), jnp.float32)
                continue
            if slot.path not in found:
                found[slot.path] = jnp.zeros(shapes[slot.path], jnp.float32)
            found[slot.path] = _put(found[slot.path], part.reshape(slot.sizes), slot.starts)
    if missing := sorted(shapes.keys() - found.keys()):
        raise UserError(f"{where} has nothing for {missing[0]}")
    ends = tuple(end for end in ignored if end.startswith("."))
    if unknown := sorted(name for name in tensors.keys() - used if name not in ignored and not name.endswith(ends)):
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{where} has a tensor that such a model does not: {unknown[0]}{more}")
    return _nested(found)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = leaf
    return tree


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, starts: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, part.astype(whole.dtype), starts)


def _parts(tensor: np.ndarray, weight: Weight, config: ModelConfig, name: str) -> Sequence[np.ndarray]:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):  # quantised, with scales that nothing here applies
        raise UserError(f"tensor {name} is of {tensor.dtype}", allowed="float32, float16 or bfloat16")
    try:
        return weight.how.read(tensor, config)
    except ValueError:
        raise UserError(f"tensor {name} has the shape {list(tensor.shape)}, which does not fit the config") from None


# Both ways.


class _Slot(NamedTuple):
    """The part of a parameter of ours that belongs to one layer and expert."""

    path: str
    starts: tuple[int, ...]  # along every axis of the parameter
    sizes: tuple[int, ...]
    part: tuple[int, ...]  # the sizes without the axis of layers


def _places(
    config: ModelConfig, rows: Rows, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[list[str], Weight, list[_Slot]]]:
    """Yields, for every tensor of a model, the names that it may have, its row, and the places of its parts."""
    for names, weight in rows:
        for layer, expert in weight.places(config):
            here = weight.here
            if layer is not None and not config.scan_layers:
                here = [path.replace("layers/", f"layers_{layer}/", 1) for path in here]
            if not weight.where(config) or not all(path in shapes for path in here):
                continue
            row = layer if config.scan_layers else None
            slots = [_slot(path, shapes[path], row, expert, weight, config) for path in here]
            yield [name.format(layer, expert=expert) for name in names], weight, slots


def _slot(
    path: str, shape: tuple[int, ...], row: int | None, expert: int | None, weight: Weight, config: ModelConfig
) -> _Slot:
    starts, sizes = [0] * len(shape), list(shape)
    if row is not None:
        starts[0], sizes[0] = row, 1
    if expert is not None and weight.share is not None:
        sizes[weight.share] //= weight.experts(config)
        starts[weight.share] = expert * sizes[weight.share]
    return _Slot(path, tuple(starts), tuple(sizes), tuple(sizes if row is None else sizes[1:]))


def _rows(family: Family) -> Rows:
    return [(foreign_names(family, weight.there), weight) for weight in family.weights]


def own_rows(config: ModelConfig, is_old: bool = False) -> Rows:
    """Makes rows for models that no family expresses: our own paths, with dots, and a number for the layer.

    As in PyTorch, kernels, scales and tables are called `weight`, and kernels are [out, in]; not in old files.
    """
    rows = {}
    for path in _flat(parameter_shapes(config)):
        head, _, rest = path.partition("/")
        layered = head == "layers" or head.startswith("layers_")
        there = f"layers.{{}}.{rest.replace('/', '.')}" if layered else path.replace("/", ".")
        name, _, leaf = there.rpartition(".")
        if leaf in ("kernel", "scale", "embedding") and not is_old:
            there = f"{name}.weight"
        how = TRANSPOSED if leaf == "kernel" and not is_old else SAME
        rows[there] = Weight(there, (f"layers/{rest}" if layered else path,), how)
    return [((there,), weight) for there, weight in rows.items()]


def _flat(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


# Export.


def require_empty(folder: Path) -> None:
    """Refuses a folder for an exported model that has files, or cannot be one; UserError. A new one is not made."""
    if os.path.lexists(folder):  # pathlib raises for names that are too long
        make_folder(folder, "folder of the exported model")
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", allowed="a new folder")


def write_folder(
    folder: str | Path,
    config: ModelConfig,
    params: Any,
    tokenizer: Any = None,
    *,
    bos: bool = False,
    code: bool = False,
    on_tensor: Callable[[str], object] = lambda name: None,
) -> str:
    """Writes a model as config.json and safetensors, which `read_folder` reads back bit for bit.

    Only a Gemma's norm scales below 0.5 are rounded, as float32 near 1 is, since its files store them minus 1.

    A model that a family expresses is written in its format, which transformers loads with equal logits. Any other
    gets a model_type of its own, so that nothing loads it as something else, and `modeling_orthojax.py`, which
    transformers loads with `trust_remote_code`, unless it has parts that `export.field_without_code` names.
    `export.as_family` first finds families that hold a model in other words.

    Args:
      folder: New or empty.
      config: Config of the model.
      params: Its parameters, float32 or bfloat16.
      tokenizer: `LoadedModel.tokenizer`, which is written as tokenizer.json.
      bos: Whether texts begin with the BOS token: transformers then puts it before each.
      code: Write the model with the code even if a family expresses it.
      on_tensor: Called with the name of each tensor before it is written.

    Returns:
      The model_type.

    Raises:
      UserError: If the folder has files or cannot be written, or for quantised parameters.
    """
    folder, leaves = Path(folder), _flat(params)
    with needing("a safetensors file", "pretrained"):
        import safetensors.numpy  # noqa: F401
    require_empty(folder)
    make_folder(folder, "folder of the exported model")
    content: dict[str, Any] = {"model_type": OWN, "model": dataclasses.asdict(config)} | code_fields(config)
    rows = own_rows(config)
    if not code and (name := family_of(config)):
        family = FAMILIES[name]
        foreign = write_config(family, config) or {}
        content, rows = foreign | {"architectures": [family.architecture]}, _rows(family)
    files = _write_tensors(folder, _tensors(config, leaves, rows, on_tensor))
    if len(set(files.values())) == 1:
        (folder / files.popitem()[1]).rename(folder / "model.safetensors")
    else:
        write_text(folder / _INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=1) + "\n")
    # None without a tokenizer: the family's defaults may not be in the vocabulary.
    content |= {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        ends = [tokenizer.eos_id, *sorted(tokenizer.ends - {tokenizer.eos_id})]
        content |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        tokenizer.save(folder / "tokenizer.json")
    if isinstance(tokenizer, HuggingFaceTokenizer):  # no other kind is one of transformers
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        words = {name: tokenizer.backend.id_to_token(token) for name, token in named.items()}
        words |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos}
        if bos and not begins_with_bos(folder):
            bos_first(tokenizer).save(folder / "tokenizer.json")
        write_text(folder / "tokenizer_config.json", json.dumps(words, indent=2) + "\n")
    if "auto_map" in content:
        write_text(folder / CODE.name, CODE.read_text(encoding="utf-8"))
    write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")  # last: without it there is no model
    return content["model_type"]


def _tensors(
    config: ModelConfig, leaves: Mapping[str, Any], rows: Rows, on_tensor: Callable[[str], object]
) -> Iterator[tuple[str, np.ndarray]]:
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    for names, weight, slots in _places(config, rows, shapes):
        on_tensor(names[0])
        parts = [_part(leaves[slot.path], slot) for slot in slots]
        yield names[0], np.asarray(weight.how.write(parts, config), order="C")  # safetensors writes the buffer


def _part(leaf: Any, slot: _Slot) -> np.ndarray:
    if isinstance(leaf, jax.Array):  # one program for all layers and experts
        part = jax.lax.dynamic_slice(leaf, slot.starts, slot.sizes)
    else:
        part = leaf[tuple(slice(a, a + size) for a, size in zip(slot.starts, slot.sizes, strict=True))]
    return np.asarray(part).reshape(slot.part)


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, str]:
    """Writes tensors into files of limited size; returns the file of each."""
    shard, files, number = {}, {}, 1
    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            _write_shard(folder / f"model-{number:05d}.safetensors", shard)
            shard, number = {}, number + 1
        shard[name], files[name] = tensor, f"model-{number:05d}.safetensors"
    _write_shard(folder / f"model-{number:05d}.safetensors", shard)
    return files


def _write_shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save

    content = save(tensors, {"format": "pt"})  # transformers asks for it
    write_atomically(path, lambda file: file.write(content))
