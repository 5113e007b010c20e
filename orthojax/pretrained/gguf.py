"""GGUF files, as llama.cpp writes them: a config from the metadata, tensors dequantised one at a time.

The architecture `llama` (Llama, SmolLM2, Mistral) stores queries and keys for rotary positions of neighbouring
channels; reading brings them to the half-split order of `orthojax.ops.rotary`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig, RopeConfig, require
from orthojax.data.published import Gguf, open_gguf
from orthojax.errors import UserError
from orthojax.ops import llama3_frequencies, rotary_frequencies
from orthojax.pretrained.families import FAMILIES
from orthojax.pretrained.family import Family, Transform, foreign_names, unpair
from orthojax.pretrained.folders import Rows, read_params

_FAMILIES = {name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "olmo2")}
_PAIRED = ("layers/attention/query", "layers/attention/key")  # in files of llama
# llama.cpp takes a window of one of these for one of all layers, and that of olmo2 for three layers of four.
_WITH_WINDOWS = ("llama", "qwen2", "qwen3")
_FIELDS = {
    "context_length": "max_length",
    "embedding_length": "d_model",
    "block_count": "num_layers",
    "feed_forward_length": "d_mlp",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "d_head",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.sliding_window": "attention_window",
    "rope.freq_base": "rope_theta",
}
# Fields that say nothing else than those above.
_KNOWN = {"attention.value_length", "rope.dimension_count", "vocab_size", "rope.scaling.type"}
_REQUIRED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_rms_epsilon")  # fmt: skip
_LLAMA3_LENGTH = 8192
_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2


def read_gguf(path: Path) -> tuple[ModelConfig, Any]:
    """Reads the model of a .gguf file.

    Args:
      path: The file.

    Returns:
      The config, and parameters as `Transformer(config).init` returns them under "params", float32.

    Raises:
      UserError: For another architecture, metadata or a tensor that is not understood, or a damaged file.
    """
    file = open_gguf(path)
    config, family = _config_and_family(file, path)
    tensors = {name: functools.partial(_dequantized, tensor, str(path)) for name, tensor in file.tensors.items()}
    return config, read_params(config, _rows(family), tensors, str(path), ("rope_freqs.weight",))


def read_gguf_config(path: Path) -> ModelConfig:
    """Reads the config of `read_gguf` alone; no tensor is dequantised."""
    return _config_and_family(open_gguf(path), path)[0]


def _rows(family: Family) -> Rows:
    """Gives the rows of a family the names that llama.cpp has for their tensors."""
    import gguf

    names, rows = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.name.upper()], 1), []
    for row in family.weights:
        foreign = foreign_names(family, row.there)[0].format(0)
        if name := names.get_name(foreign, (".weight", ".bias")):
            here = row.here[0].rpartition("/")[0]
            how = _unpaired(here) if family.name == "llama" and here in _PAIRED else row.how
            there = name.replace("blk.0.", "blk.{}.")
            rows.append(([there], row._replace(there=there, how=how)))
    return rows


def _unpaired(here: str) -> Transform:
    """Makes the transform of kernels [out, in] and biases [out] to our order; nothing writes them."""
    is_query = here.endswith("query")
    return Transform(lambda x, c: (unpair(x, c.num_heads if is_query else c.kv_heads).T,))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape.tolist()[::-1])


def _dequantized(tensor: Any, where: str) -> np.ndarray:
    """Reads one tensor of `gguf.GGUFReader`, float32.

    Raises:
      UserError: For a type that `gguf` does not dequantise.
    """
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{where}: tensor {tensor.name} of type {tensor.tensor_type.name}: {error}") from None
    # A copy: JAX would go on reading a float32 tensor from the file itself, which may be written again.
    return np.array(values, np.float32).reshape(_shape(tensor))


def _config_and_family(file: Gguf, path: Path) -> tuple[ModelConfig, Family]:
    name = file.metadata.get("general.architecture")
    require(name in _FAMILIES, f"{path} has the architecture {name!r}", " | ".join(_FAMILIES))
    return _config(file, str(path), _FAMILIES[str(name)]), _FAMILIES[str(name)]


def _config(file: Gguf, where: str, family: Family) -> ModelConfig:
    name = family.name
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key in _REQUIRED:
        require(key in own, f"{where} has no {name}.{key}", "the metadata of llama.cpp")
    window = own.get("attention.sliding_window")
    require(name in _WITH_WINDOWS or not window, f"{where}: {name}.attention.sliding_window={window}", "none")
    unknown = sorted(key for key in own if key not in _FIELDS and key not in _KNOWN and own[key])
    require(not unknown, f"{where}: {name}.{', '.join(unknown[:1])} is not understood", ", ".join(_FIELDS))
    scaling = own.get("rope.scaling.type", "none")
    require(scaling == "none", f"{where}: rope.scaling.type={scaling!r} is not supported", "none")
    fields = dict(family.base) | {
        ours: own[there] for there, ours in _FIELDS.items() if own.get(there) or there in _REQUIRED
    }
    for part in ("norm_eps", "rope_theta"):
        if isinstance(fields.get(part), int | float):
            fields[part] = float(str(np.float32(fields[part])))  # stored as float32: 1e-05, not 9.999999747378752e-06
    for part in ("num_heads", "num_kv_heads", "d_mlp"):
        if isinstance(sizes := fields.get(part), list):
            require(len(set(sizes)) == 1, f"{where}: {part} differs between layers", "one size")
            fields[part] = sizes[0]
    if (width := own.get("attention.value_length")) is not None:
        key_width = own.get("attention.key_length", width)
        require(width == key_width, f"{where}: keys and values of different widths", "equal ones")
    if fields.get("d_head", 0) * fields["num_heads"] == fields["d_model"]:
        del fields["d_head"]
    require("token_embd.weight" in file.tensors, f"{where} has no tensor token_embd.weight")
    fields["vocab_size"] = _shape(file.tensors["token_embd.weight"])[0]
    fields["tie_embeddings"] = "output.weight" not in file.tensors
    config = ModelConfig(**fields)
    turned = own.get("rope.dimension_count", config.head_dim)
    require(turned == config.head_dim, f"{where}: rope.dimension_count={turned}", f"{config.head_dim}")
    if (divisors := file.tensors.get("rope_freqs.weight")) is None:
        return config
    return dataclasses.replace(config, rope=_scaling(_dequantized(divisors, where), config, where))


def _scaling(divisors: np.ndarray, config: ModelConfig, where: str) -> RopeConfig:
    """Recognises the scaling of Llama 3.1, of which the file has only the divisor of every frequency."""
    plain = rotary_frequencies(config.head_dim, config.rope_theta)
    for factor in _LLAMA3_FACTORS:
        scaled = plain / llama3_frequencies(plain, factor, _LLAMA3_LENGTH)
        if scaled.shape == divisors.shape and bool(jnp.allclose(scaled, divisors, rtol=1e-3)):
            return RopeConfig(scaling="llama3", factor=factor, original_length=_LLAMA3_LENGTH)
    raise UserError(f"{where}: rope_freqs.weight is not that of Llama 3.1 or 3.2")
