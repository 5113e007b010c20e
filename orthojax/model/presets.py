"""Families and sizes: `gpt2`, `llama2` and `bigram_backcopy` as values of `ModelConfig`.

All are stock. The paper's changes (RMSNormSingle, no biases, softmax-1) are changes to these values: `gpt2("130m",
norm="rmsnorm_single", use_bias=False, normalizer="softmax1")`.
"""

import dataclasses
from typing import Any

from orthojax.config import ModelConfig, unknown_field
from orthojax.errors import UserError, nearest

_GPT2 = ModelConfig(
    vocab_size=50_257, position="learned", norm="layernorm", use_bias=True, mlp="gelu", normalizer="softmax"
)
_LLAMA2 = ModelConfig(
    vocab_size=32_000, position="rotary", norm="rmsnorm", mlp="swiglu", normalizer="softmax", tie_embeddings=False
)
_BIGRAM_BACKCOPY = ModelConfig(
    vocab_size=67,
    max_length=256,
    d_model=256,
    num_heads=1,
    d_mlp=1024,
    position="learned",
    norm="layernorm",
    use_bias="norm",
    mlp="relu",
    normalizer="softmax",
    tie_embeddings=False,
    embedding_init_std=1.0,
    kernel_init="uniform_fan_in",
    scan_layers=False,  # so that layers may differ, as in several of its experiments
)

# Sizes of From Attention to Activation (arXiv 2410.17174); the paper gives widths and parameter counts, the rest is
# usual.
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
    if not isinstance(size, str) or size not in sizes:
        raise UserError(f"unknown {family} size {size!r}", allowed=" | ".join(sizes), hint=nearest(str(size), sizes))
    return _changed(base, sizes[size] | changes)


def _changed(base: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    for name in changes:
        if name not in names:
            raise unknown_field(f"model.{name}", [f"model.{known}" for known in names])
    return dataclasses.replace(base, **changes)


def gpt2(size: str, **changes: Any) -> ModelConfig:
    """Makes a GPT-2: learned positions, LayerNorm, biases, GELU, tied embeddings.

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
    """Makes a Llama 2: rotary positions, RMSNorm, no biases, SwiGLU, untied head.

    Args:
      size: "tiny" | "130m".
      **changes: As for `gpt2`.
    """
    return _preset("llama2", _LLAMA2, _LLAMA2_SIZES, size, changes)


def bigram_backcopy(num_layers: int = 1, **changes: Any) -> ModelConfig:
    """Makes the transformer of Active-Dormant Attention Heads on Bigram-Backcopy, at its published size.

    67 token ids, 256 positions, width 256, one head, ReLU MLPs of 1,024, LayerNorm with gain and bias, no other biases,
    an untied output head; kernels uniform on +-1/sqrt(fan_in), embeddings N(0, 1). The paper has 1 and 3 layers.
    Changes, as for `gpt2`, may differ by layer.

    Reference:
      Active-Dormant Attention Heads, `arXiv 2410.13835 <https://arxiv.org/abs/2410.13835>`_, 2024, and its code.
    """
    return _changed(_BIGRAM_BACKCOPY, {"num_layers": num_layers} | changes)
