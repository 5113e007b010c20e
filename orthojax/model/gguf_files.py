"""Models in GGUF files, as llama.cpp writes them: config from the metadata, tensors dequantised one at a time.

The architecture `llama` (Llama, SmolLM2, Mistral) stores queries and keys for rotary positions of neighbouring
channels; reading brings them to the half-split order of `orthojax.ops.rotary`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig
from orthojax.config.fields import require
from orthojax.errors import UserError
from orthojax.gguf_reader import open_gguf
from orthojax.model.family import SAME, TRANSPOSED, Transform, Weight, unpair
from orthojax.model.pretrained import read_params
from orthojax.ops import llama3_frequencies, rotary_frequencies


def _one_way(read: Any) -> Transform:
    def write(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
        raise NotImplementedError("GGUF files are only read")

    return Transform(read, write)


_PAIRED = {
    "query": _one_way(lambda x, c: (unpair(x, c.num_heads).T,)),
    "key": _one_way(lambda x, c: (unpair(x, c.kv_heads).T,)),
}


def _weights(paired: bool) -> list[Weight]:
    parts = {
        "attn_q": "attention/query", "attn_k": "attention/key", "attn_v": "attention/value",
        "attn_output": "attention/output", "ffn_gate": "mlp/gate", "ffn_up": "mlp/input", "ffn_down": "mlp/output",
    }  # fmt: skip
    norms = {
        "attn_norm": "attention_norm", "ffn_norm": "mlp_norm", "attn_q_norm": "attention/query_norm",
        "attn_k_norm": "attention/key_norm", "post_attention_norm": "attention_norm", "post_ffw_norm": "mlp_norm",
    }  # fmt: skip
    rows = [
        Weight("token_embd.weight", ("token_embedding/embedding",), SAME),
        Weight("output_norm.weight", ("final_norm/scale",), SAME),
        Weight("output_norm.bias", ("final_norm/bias",), SAME),
        Weight("output.weight", ("head/kernel",), TRANSPOSED),
    ]
    for there, here in parts.items():
        how = _PAIRED.get(here.split("/")[1], TRANSPOSED) if paired else TRANSPOSED
        rows.append(Weight(f"blk.{{}}.{there}.weight", (f"layers/{here}/kernel",), how))
        rows.append(Weight(f"blk.{{}}.{there}.bias", (f"layers/{here}/bias",), _bias_of(how)))
    for there, here in norms.items():
        rows.append(Weight(f"blk.{{}}.{there}.weight", (f"layers/{here}/scale",), SAME))
        rows.append(Weight(f"blk.{{}}.{there}.bias", (f"layers/{here}/bias",), SAME))
    return rows


def _bias_of(how: Transform) -> Transform:
    return SAME if how is TRANSPOSED else _one_way(how.read)  # of one axis, so that .T changes nothing


class _Architecture(NamedTuple):
    """What a `general.architecture` has in common.

    Attributes:
      base: Fields of `ModelConfig`.
      left_out: Rows of the table that its files do not have.
      paired: Whether queries and keys are in the order of neighbouring pairs.
      windows: Whether a window is one of all layers; llama.cpp takes that of others for three layers of four.
    """

    base: Mapping[str, Any]
    left_out: tuple[str, ...] = ("post_attention_norm", "post_ffw_norm")
    paired: bool = False
    windows: bool = True


_BASE = {"position": "rotary", "norm": "rmsnorm", "use_bias": False, "mlp": "swiglu", "normalizer": "softmax"}
_ARCHITECTURES = {
    "llama": _Architecture(_BASE, paired=True),
    "qwen2": _Architecture(_BASE | {"qkv_bias": True}),
    "qwen3": _Architecture(_BASE | {"qk_norm": "head"}),
    "olmo2": _Architecture(_BASE | {"output_norm": True, "qk_norm": "all"}, ("attn_norm", "ffn_norm"), windows=False),
}
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
# Which say nothing else than the above.
_KNOWN = {"attention.value_length", "rope.dimension_count", "vocab_size", "rope.scaling.type"}
_REQUIRED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_rms_epsilon")  # fmt: skip
_LLAMA3_LENGTH = 8192
_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2


class GgufFile:
    """The tensors of a .gguf file as float32, dequantised when they are read."""

    def __init__(self, path: Path):
        """Reads the metadata.

        Raises:
          UserError: As `orthojax.gguf_reader.open_gguf`.
        """
        self.where = str(path)
        self.metadata, self._tensors = open_gguf(path)

    def names(self) -> Sequence[str]:
        """All names."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._tensors[name].shape.tolist()[::-1])

    def read(self, name: str) -> np.ndarray:
        """One tensor, float32.

        Raises:
          UserError: For a type that `gguf` does not dequantise.
        """
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"{self.where}: tensor {name} of type {tensor.tensor_type.name}: {error}") from None
        # A copy: JAX would go on reading a float32 tensor from the file itself, which may be written again.
        return np.array(values, np.float32).reshape(self.shape(name))


def read_gguf(path: Path, *, dtype: str = "float32") -> tuple[ModelConfig, Any]:
    """The model of a .gguf file.

    Args:
      path: The file.
      dtype: Of the parameters, "float32" | "bfloat16".

    Returns:
      The config, and parameters as `Transformer(config).init` returns them under "params".

    Raises:
      UserError: For another architecture, metadata or a tensor that is not understood, or a damaged file.
    """
    file = GgufFile(path)
    config, architecture = _config_and_architecture(file)
    rows = [((row.there,), row) for row in _weights(architecture.paired)
            if not row.there.startswith(tuple(f"blk.{{}}.{part}." for part in architecture.left_out))]  # fmt: skip
    return config, read_params(config, rows, file, ("rope_freqs.weight",), dtype=dtype)


def read_gguf_config(path: Path) -> ModelConfig:
    """The config of `read_gguf` alone; no tensor is dequantised."""
    return _config_and_architecture(GgufFile(path))[0]


def _config_and_architecture(file: GgufFile) -> tuple[ModelConfig, _Architecture]:
    name = file.metadata.get("general.architecture")
    require(name in _ARCHITECTURES, f"{file.where} has the architecture {name!r}", " | ".join(_ARCHITECTURES))
    architecture = _ARCHITECTURES[str(name)]
    return _config(file, str(name), architecture), architecture


def _config(file: GgufFile, name: str, architecture: _Architecture) -> ModelConfig:
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key in _REQUIRED:
        require(key in own, f"{file.where} has no {name}.{key}", "the metadata of llama.cpp")
    window = own.get("attention.sliding_window")
    require(architecture.windows or not window, f"{file.where}: {name}.attention.sliding_window={window}", "none")
    unknown = sorted(key for key in own if key not in _FIELDS and key not in _KNOWN and own[key])
    require(not unknown, f"{file.where}: {name}.{', '.join(unknown[:1])} is not understood", ", ".join(_FIELDS))
    scaling = own.get("rope.scaling.type", "none")
    require(scaling == "none", f"{file.where}: rope.scaling.type={scaling!r} is not supported", "none")
    fields = dict(architecture.base) | {
        ours: own[there] for there, ours in _FIELDS.items() if own.get(there) or there in _REQUIRED
    }
    for name in ("norm_eps", "rope_theta"):
        if isinstance(fields.get(name), int | float):
            fields[name] = float(str(np.float32(fields[name])))  # stored as float32: 1e-05, not 9.999999747378752e-06
    for part in ("num_heads", "num_kv_heads", "d_mlp"):
        if isinstance(sizes := fields.get(part), list):
            require(len(set(sizes)) == 1, f"{file.where}: {part} differs between layers", "one size")
            fields[part] = sizes[0]
    if (width := own.get("attention.value_length")) is not None:
        key_width = own.get("attention.key_length", width)
        require(width == key_width, f"{file.where}: keys and values of different widths", "equal ones")
    if fields.get("d_head", 0) * fields["num_heads"] == fields["d_model"]:
        del fields["d_head"]
    require("token_embd.weight" in file.names(), f"{file.where} has no tensor token_embd.weight")
    fields["vocab_size"] = file.shape("token_embd.weight")[0]
    fields["tie_embeddings"] = "output.weight" not in file.names()
    config = ModelConfig(**fields)
    turned = own.get("rope.dimension_count", config.head_dim)
    require(turned == config.head_dim, f"{file.where}: rope.dimension_count={turned}", f"{config.head_dim}")
    return config if "rope_freqs.weight" not in file.names() else _with_factors(file, fields, config)


def _with_factors(file: GgufFile, fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Llama 3.1's scaling, of which the file has only the divisor of every frequency."""
    divisors, plain = file.read("rope_freqs.weight"), rotary_frequencies(config.head_dim, config.rope_theta)
    for factor in _LLAMA3_FACTORS:
        scaled = plain / llama3_frequencies(plain, factor, _LLAMA3_LENGTH)
        if scaled.shape == divisors.shape and bool(jnp.allclose(scaled, divisors, rtol=1e-3)):
            return ModelConfig(**fields, rope_scaling="llama3", rope_factor=factor, rope_original_length=_LLAMA3_LENGTH)
    raise UserError(f"{file.where}: rope_freqs.weight is not that of Llama 3.1 or 3.2")
