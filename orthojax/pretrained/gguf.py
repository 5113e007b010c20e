"""GGUF files, as llama.cpp writes them: their metadata as the config.json of a family, tensors dequantised one by one.

The architectures `llama` (Llama, SmolLM2, Mistral, Mixtral) and `smollm3` store queries and keys for rotary positions
of neighbouring channels; reading brings them to the half-split order of `orthojax.ops.rotary`.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig, require
from orthojax.data.published import Gguf, open_gguf
from orthojax.errors import UserError, nearest
from orthojax.ops import llama3_frequencies, rotary_frequencies
from orthojax.pretrained.configs import read_foreign_config
from orthojax.pretrained.families import FAMILIES, SAME, Family, Only, Transform, Weight, foreign_names, integer, unpair
from orthojax.pretrained.folders import Rows, assemble_params


class _Architecture(NamedTuple):
    """An architecture of llama.cpp: the family that reads it, and what llama.cpp knows without the file."""

    family: str
    given: Mapping[str, Any] = {}  # fields of the family's config
    paired: bool = False  # queries and keys are stored for rotary positions of neighbouring channels
    windows: bool = True  # `attention.sliding_window` means what it means in the family, or in all layers
    wide_layers: int = 0  # a model with this many layers scales logits by d_model / heads, not by the width of a head


_ARCHITECTURES = {
    "llama": _Architecture("llama", paired=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "olmo2": _Architecture("olmo2", windows=False),  # where three of four layers have the window
    "olmoe": _Architecture("olmoe"),
    "phi3": _Architecture("phi3"),
    "smollm3": _Architecture("smollm3", paired=True),
    "gemma": _Architecture("gemma"),
    "gemma2": _Architecture("gemma2", wide_layers=46),
    "gemma3": _Architecture("gemma3_text", wide_layers=62),
    "gpt-oss": _Architecture("gpt_oss"),
}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Fields that `_rope` and `_config` read, and those that repeat others.
_KNOWN = {
    "attention.sliding_window_pattern", "attention.value_length", "expert_count", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "vocab_size",
}  # fmt: skip
_REQUIRED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_rms_epsilon")  # fmt: skip
_LLAMA3_LENGTH = 8192
_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2
_OF_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_gguf(path: Path) -> tuple[ModelConfig, Any]:
    """Reads the model of a .gguf file.

    Returns the config, and parameters as `Transformer(config).init` returns them under "params", float32. Raises
    UserError for an unknown architecture, metadata or a tensor that is not understood, or a damaged file.
    """
    file = open_gguf(path)
    config, family = _config_and_family(file, path)
    tensors = {name: functools.partial(_dequantized, tensor, str(path)) for name, tensor in file.tensors.items()}
    rows = _rows(family, file.metadata["general.architecture"])
    return config, assemble_params(config, rows, tensors, str(path), _OF_ROPE)


def read_gguf_config(path: Path) -> ModelConfig:
    """Reads only the config of `read_gguf`; no tensor is dequantised."""
    return _config_and_family(open_gguf(path), path)[0]


# Tensors.


def _joined(axis: int) -> Transform:
    """Makes the transform of kernels [experts, out, in] to ours, which have the experts side by side in an axis."""
    return Transform(lambda x, c: (np.concatenate(np.swapaxes(x, 1, 2), axis),))


_EXPERTS = [
    row
    for there, here in {"gate": "gate", "up": "input", "down": "output"}.items()
    for row in (
        Weight(f"blk.{{}}.ffn_{there}_exps.weight", (f"layers/mlp/experts/{here}/kernel",),
               _joined(0 if here == "output" else 1)),
        Weight(f"blk.{{}}.ffn_{there}_exps.bias",
               ("layers/mlp/bias" if here == "output" else f"layers/mlp/experts/{here}/bias",),
               SAME if here == "output" else Transform(lambda x, c: (x.reshape(-1),))),
    )
]  # fmt: skip


def _rows(family: Family, architecture: str) -> Rows:
    import gguf

    by_name = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names, rows = gguf.get_tensor_name_map(by_name[architecture], 1), []
    for row in family.weights:
        here, _, leaf = row.here[0].rpartition("/")
        name = names.get_name(foreign_names(family, row.there)[0].format(0, expert=0), (".weight", ".bias"))
        if name is None or "experts" in here or row.here == ("layers/mlp/bias",):
            continue
        how = row.how
        if leaf == "scale":  # a Gemma's scales are stored as they multiply
            how = SAME
        elif _ARCHITECTURES[architecture].paired and here in ("layers/attention/query", "layers/attention/key"):
            how = _unpaired(here)
        there = name.replace("blk.0.", "blk.{}.") + ("" if name.endswith((".weight", ".bias")) else ".weight")
        rows.append(([there], row._replace(there=there, how=how)))
    return rows + [([row.there], row) for row in _EXPERTS]


def _unpaired(here: str) -> Transform:
    """Makes the transform of kernels [out, in] and biases [out] to our order; they are never written."""
    is_query = here.endswith("query")
    return Transform(lambda x, c: (unpair(x, c.num_heads if is_query else c.kv_heads).T,))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape.tolist()[::-1])


def _dequantized(tensor: Any, where: str) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{where}: tensor {tensor.name} of type {tensor.tensor_type.name}: {error}") from None
    # A copy: JAX would keep reading a float32 tensor from the file itself, which may be rewritten.
    return np.array(values, np.float32).reshape(_shape(tensor))


# Metadata.


def _config_and_family(file: Gguf, path: Path) -> tuple[ModelConfig, Family]:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        hint = f"{nearest(str(name), _ARCHITECTURES)} orthojax.analysis.summarize takes arrays of any model".strip()
        raise UserError(f"{path} has the architecture {name!r}", allowed=" | ".join(_ARCHITECTURES), hint=hint)
    architecture, where = _ARCHITECTURES[str(name)], str(path)
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key in _REQUIRED:
        require(key in own, f"{where} has no {name}.{key}", "the metadata of llama.cpp")
    unknown = sorted(key for key in own if key not in _FIELDS and key not in _KNOWN and own[key])
    require(not unknown, f"{where}: {name}.{', '.join(unknown[:1])} is not understood", ", ".join(_FIELDS))
    window = own.get("attention.sliding_window")
    require(architecture.windows or not window, f"{where}: {name}.attention.sliding_window={window}", "none")
    family = FAMILIES[architecture.family]
    if name == "llama":
        family = FAMILIES["mixtral" if own.get("expert_count") else "mistral" if window else "llama"]
    try:
        foreign = _given(own, file, family) | dict(architecture.given)
        if "query_pre_attn_scalar" in family.fields:
            is_wide = foreign["num_hidden_layers"] == architecture.wide_layers
            width = foreign["hidden_size"] // foreign["num_attention_heads"] if is_wide else foreign["head_dim"]
            foreign["query_pre_attn_scalar"] = width
        return read_foreign_config(family, foreign), family
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where} has metadata that are not understood: {error}") from None


def _given(own: Mapping[str, Any], file: Gguf, family: Family) -> dict[str, Any]:
    """Returns the config.json of a family that is equivalent to the metadata `own` of an architecture."""
    foreign = {there: _plain(own[here]) for here, there in _FIELDS.items() if own.get(here) or here in _REQUIRED}
    for part in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(sizes := foreign.get(part), list):
            require(len(set(sizes)) == 1, f"{part} differs between layers", "one size")
            foreign[part] = sizes[0]
    sizes = {name: integer(foreign, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    require(0 < sizes["num_hidden_layers"] <= 2**12, f"a model of {sizes['num_hidden_layers']} layers", "1 to 4096")
    heads = max(sizes["num_attention_heads"], 1)
    foreign = {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads} | foreign | sizes
    width = own.get("attention.value_length", foreign["head_dim"])
    require(width == foreign["head_dim"], "keys and values of different widths", "equal ones")
    require(own.get("context_length", 1) >= 1, f"context_length={own.get('context_length')}", "at least 1")
    require("token_embd.weight" in file.tensors, "there is no tensor token_embd.weight")
    foreign["vocab_size"] = _shape(file.tensors["token_embd.weight"])[0]
    foreign["tie_word_embeddings"] = "output.weight" not in file.tensors
    names = {*family.fields, *(family.more.names if family.more else ())}
    if experts := own.get("expert_count"):
        foreign["num_experts" if "num_experts" in names else "num_local_experts"] = experts
        if "moe_intermediate_size" not in names:  # all of its hidden layers have experts
            foreign["intermediate_size"] = foreign.pop("moe_intermediate_size", foreign["intermediate_size"])
    if "attention_bias" in names and not isinstance(family.fields.get("attention_bias"), Only):
        foreign["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return foreign | _windows(own, foreign, family) | _rope(own, file, foreign, family)


def _windows(own: Mapping[str, Any], foreign: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns which layers have windows: as the file or the family says; for Qwen and `llama` all."""
    layers, pattern = range(foreign["num_hidden_layers"]), own.get("attention.sliding_window_pattern")
    if "sliding_window" not in foreign:
        return {}
    kinds = ["sliding_attention"] * len(layers) if family.window_switch else None
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    elif pattern:
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    return ({"use_sliding_window": True} if family.window_switch else {}) | ({"layer_types": kinds} if kinds else {})


def _plain(value: Any) -> Any:
    """Returns a value; floats, stored as float32, by their shortest digits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(own: Mapping[str, Any], file: Gguf, foreign: Mapping[str, Any], family: Family) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": own.get("rope.scaling.type", "none"),
                            "rope_theta": float(_plain(own.get("rope.freq_base", 10_000.0)))}  # fmt: skip
    width, turned = foreign["head_dim"], own.get("rope.dimension_count", foreign["head_dim"])
    fits = turned == width or family.rotary_fraction is not None
    require(fits, f"rope.dimension_count={turned}", f"{width}")
    if turned != width:
        rope["partial_rotary_factor"] = turned / width
    divisors = {
        name: _dequantized(file.tensors[there], "rotary positions")
        for name, there in zip(("llama3", "long", "short"), _OF_ROPE, strict=True)
        if there in file.tensors
    }
    length = own.get("rope.scaling.original_context_length")
    if "llama3" in divisors:
        rope |= _llama3(divisors["llama3"], width, rope["rope_theta"])
    elif {"long", "short"} <= divisors.keys():
        factors = {f"{name}_factor": [_plain(float(x)) for x in divisors[name].ravel()] for name in ("long", "short")}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": length} | factors
        rope["attention_factor"] = _plain(own.get("rope.scaling.attn_factor", 1.0))
    elif rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    else:
        rope["factor"] = _plain(own.get("rope.scaling.factor"))
    if rope["rope_type"] == "yarn":
        betas = {f"beta_{name}": own.get(f"rope.scaling.yarn_beta_{name}") for name in ("fast", "slow")}
        rope |= {name: _plain(beta) for name, beta in betas.items() if beta}
        # gpt-oss does not round the bounds of the ramp; llama.cpp rounds them for every model.
        rope |= {"original_max_position_embeddings": length, "truncate": family.name != "gpt_oss"}
    return {"rope_parameters": rope} | ({"original_max_position_embeddings": length} if length else {})


def _llama3(divisors: np.ndarray, width: int, theta: float) -> dict[str, Any]:
    """Recognises the scaling of Llama 3.1, for which the file has only the divisor of every frequency."""
    plain = rotary_frequencies(width, theta)
    for factor in _LLAMA3_FACTORS:
        scaled = plain / llama3_frequencies(plain, factor, _LLAMA3_LENGTH)
        if scaled.shape == divisors.shape and bool(jnp.allclose(scaled, divisors, rtol=1e-3)):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": _LLAMA3_LENGTH}  # fmt: skip
    raise UserError("rope_freqs.weight is not that of Llama 3.1 or 3.2")
