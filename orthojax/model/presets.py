"""Families and sizes: what `gpt2`, `llama2` and `bigram_backcopy` mean as values of `ModelConfig`.

All are stock. What the paper changes (RMSNormSingle, no biases, softmax-1) is a change of these values:
`gpt2("130m", norm="rmsnorm_single", use_bias=False, normalizer="softmax1")`.
"""

import dataclasses
import functools
from typing import Any, get_args

from orthojax.config import Mlp, ModelConfig, unknown_field
from orthojax.errors import UserError, nearest

_GPT2 = ModelConfig(
    vocab_size=50_257,
    position="learned",
    norm="layernorm",
    use_bias=True,
    mlp="gelu",
    normalizer="softmax",
    tie_embeddings=True,
)
_LLAMA2 = ModelConfig(
    vocab_size=32_000,
    position="rotary",
    norm="rmsnorm",
    use_bias=False,
    mlp="swiglu",
    normalizer="softmax",
    tie_embeddings=False,
)
_BIGRAM_BACKCOPY = ModelConfig(
    vocab_size=67,
    max_length=256,
    d_model=256,
    num_heads=1,
    d_mlp=1024,
    position="learned",
    norm="layernorm",
    norm_bias=True,
    use_bias=False,
    mlp="relu",
    normalizer="softmax",
    tie_embeddings=False,
    embedding_init_std=1.0,
    kernel_init="uniform_fan_in",
    scan_layers=False,  # so that layers may differ, as in several of its experiments
)

# Sizes of From Attention to Activation (arXiv 2410.17174); it names widths and parameter counts, the rest is usual.
_GPT2_SIZES = {
    "tiny": {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_mlp": 512, "vocab_size": 2048},
    "60m": {"num_layers": 12, "d_model": 512, "num_heads": 8, "d_mlp": 2048},
    "130m": {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_mlp": 3072},
    "350m": {"num_layers": 24, "d_model": 1024, "num_heads": 16, "d_mlp": 4096},
    "1.4b": {"num_layers": 24, "d_model": 2048, "num_heads": 16, "d_mlp": 8192},
}
_LLAMA2_SIZES = {
    "tiny": {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_mlp": 344, "vocab_size": 2048},
    "130m": {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_mlp": 2048},
}


def _preset(family: str, base: ModelConfig, sizes: dict[str, dict[str, int]], size: str, changes: dict[str, Any]):
    if size not in sizes:
        raise UserError(f"unknown {family} size {size!r}", allowed=" | ".join(sizes), hint=nearest(size, sizes))
    return _changed(base, sizes[size] | changes)


def _changed(base: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    for name in changes:
        if name not in names:
            raise unknown_field(f"model.{name}", [f"model.{known}" for known in names])
    return dataclasses.replace(base, **changes)


def gpt2(size: str, **changes: Any) -> ModelConfig:
    """GPT-2: learned positions, LayerNorm, biases, GELU, tied embeddings.

    Args:
      size: "tiny" | "60m" | "130m" | "350m" | "1.4b".
      **changes: Fields of `ModelConfig` to set otherwise.

    Raises:
      UserError: For an unknown size or field, or an impossible combination.

    >>> gpt2("130m").d_model, gpt2("130m", normalizer="softmax1").normalizer
    (768, 'softmax1')
    """
    return _preset("gpt2", _GPT2, _GPT2_SIZES, size, changes)


def llama2(size: str, **changes: Any) -> ModelConfig:
    """Llama 2: rotary positions, RMSNorm, no biases, SwiGLU, untied head; as `gpt2`, with size "tiny" | "130m"."""
    return _preset("llama2", _LLAMA2, _LLAMA2_SIZES, size, changes)


def bigram_backcopy(num_layers: int = 1, **changes: Any) -> ModelConfig:
    """The transformer of Active-Dormant Attention Heads on the Bigram-Backcopy task, at its published size.

    67 token ids, 256 positions, width 256, one head, ReLU MLPs of 1,024, LayerNorm with gain and bias, no other biases,
    an output head of its own; kernels uniform on +-1/sqrt(fan_in), embeddings N(0, 1).

    Args:
      num_layers: 1 and 3 in the paper.
      **changes: Fields of `ModelConfig` to set otherwise; `mlp`, `attention` and their norms by layer.

    Raises:
      UserError: For an unknown field, or an impossible combination.

    Reference:
      Active-Dormant Attention Heads, `arXiv 2410.13835 <https://arxiv.org/abs/2410.13835>`_, 2024, and its code.

    >>> [parameter_count(bigram_backcopy(layers)) for layers in (1, 2, 3)]
    [887808, 1675264, 2462720]
    """
    return _changed(_BIGRAM_BACKCOPY, {"num_layers": num_layers} | changes)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, from the formula; a test compares it with the arrays.

    >>> parameter_count(gpt2("130m"))
    124439808
    """
    c, dense = config, functools.partial(_dense_count, config)

    def norm_of(width: int) -> int:
        scale = {"layernorm": width, "rmsnorm": width, "rmsnorm_single": 1, "none": 0}[c.norm] * c.norm_scale
        return scale + (width if c.has_norm_bias else 0)

    norm, mlp = norm_of(c.d_model), {kind: _mlp_count(c, kind) for kind in get_args(Mlp)}
    q, k, v = c.num_heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.value_dim
    if c.d_latent is None:
        attention = (c.d_model + c.has_qkv_bias) * (q + k + v)
        attention += {"none": 0, "head": 2 * norm_of(c.head_dim), "all": norm_of(q) + norm_of(k)}[c.qk_norm]
    else:
        read, R = c.d_query_latent or c.d_model, c.rotary_channels
        latents = [width for width in (c.d_latent, c.d_query_latent) if width is not None]
        attention = sum((c.d_model + c.has_qkv_bias) * width + norm_of(width) for width in latents)
        attention += (c.d_model + c.has_qkv_bias) * R + (read + c.has_qkv_bias) * q
        attention += (c.d_latent + c.has_qkv_bias) * (c.num_heads * (c.head_dim - R) + v)
    attention += dense(c.num_heads * c.value_dim, c.d_model)
    attention += dense(c.d_model, c.num_heads) if c.gated_attention else 0
    attention += c.num_heads if c.normalizer == "learned_sink" else 0
    total = c.vocab_size * c.d_model * (1 if c.tie_embeddings else 2) + (0 if c.post_norm else norm)
    total += c.max_length * c.d_model if c.position == "learned" else 0
    for layer in range(c.num_layers):
        total += (attention if c.layer_attention(layer) else 0) + mlp[c.layer_mlp(layer)]
        total += norm * (c.layer_norm("attention", layer) + c.layer_norm("mlp", layer))
    return total


def _dense_count(config: ModelConfig, features: int, outputs: int) -> int:
    return (features + config.use_bias) * outputs


def _mlp_count(config: ModelConfig, kind: Mlp) -> int:
    c, dense = config, functools.partial(_dense_count, config)

    def swiglu(width: int) -> int:
        return 2 * dense(c.d_model, width) + dense(width, c.d_model)

    if kind == "experts":
        shared = swiglu(c.num_shared_experts * c.expert_dim) if c.num_shared_experts else 0
        return c.d_model * c.num_experts + swiglu(c.num_experts * c.expert_dim) + shared
    two = dense(c.d_model, c.d_mlp) + dense(c.d_mlp, c.d_model)
    return {"linear": dense(c.d_model, c.d_model), "none": 0, "swiglu": swiglu(c.d_mlp)}.get(kind, two)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of one training step for each token, forward and backward.

    6 for each parameter that takes part in a matrix product (the token table once, as the head; the position table,
    norm scales and biases never), and 6 T times the widths of keys and of values of all heads in every layer that
    attends for the products with them, causality not counted as a saving. All experts count, as all are computed.

    Args:
      config: The model.
      sequence_length: T.
    """
    c = config
    normalizer = "softmax" if c.normalizer == "learned_sink" else c.normalizer
    matrices = parameter_count(
        dataclasses.replace(c, norm="none", use_bias=False, qkv_bias=None, normalizer=normalizer)
    )
    matrices -= c.max_length * c.d_model if c.position == "learned" else 0
    matrices -= 0 if c.tie_embeddings else c.vocab_size * c.d_model
    attending = sum(c.layer_attention(layer) for layer in range(c.num_layers))
    return 6 * matrices + 6 * attending * sequence_length * c.num_heads * (c.head_dim + c.value_dim)
