"""The transformer as values."""

import dataclasses
import math
from typing import Literal

from orthojax.config.fields import added, check_types, require, require_each, setting

Position = Literal["learned", "rotary", "none"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm_single", "none"]
NormalizerName = Literal[
    "softmax", "softmax1", "softmax_n", "learned_sink", "relu", "gelu", "sigmoid", "clipped_softmax"
]
AttentionImplementation = Literal["auto", "xla", "xla_chunked", "cudnn", "splash"]
Mlp = Literal["gelu", "relu", "swiglu", "linear", "none"]
KernelInit = Literal["normal", "uniform_fan_in"]
Remat = bool | Literal["dots", "full"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer; a family such as GPT-2 is a set of these values (`orthojax.model.presets`).

    Attributes:
      vocab_size: Rows of the token embedding.
      max_length: Rows of the learned position embedding; the longest sequence where positions are learned.
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None means `num_heads` (no grouping).
      d_mlp: Hidden width of the MLP (of each half for swiglu).
      position: Position information: a learned table, rotary on queries and keys, or none.
      rope_theta: Base wavelength of rotary positions.
      norm: `rmsnorm_single` has one scalar scale for all channels.
      norm_bias: Whether `layernorm` has a bias; None means where linear layers have one.
      attention_norm: Whether attention has a norm, for all layers or one for each.
      mlp_norm: The same for the MLP.
      post_norm: x = norm(x + f(x)) in every block, and no final norm, instead of x = x + f(norm(x)) with one
        (arXiv 2002.04745).
      norm_eps: Added to the variance inside every norm.
      use_bias: Biases in every linear layer.
      normalizer: What turns attention logits into weights.
      normalizer_n: The n of `softmax_n`: exp(x_i) / (n + sum_j exp(x_j)).
      normalizer_gamma: The gamma <= 0 of `clipped_softmax`: clip((zeta - gamma) softmax(x) + gamma, 0, 1).
      normalizer_zeta: Its zeta >= 1.
      attention_implementation: The kernel of the attention; `auto` picks by platform, dtype and shape.
      mlp: Kind of MLP, for all layers or one for each; `linear` is one d_model x d_model map.
      attention: Whether blocks attend, for all layers or one for each.
      gated_attention: Multiply each head's output at each position by sigmoid(w . x + b), x the block's normed input
        with all its channels; b, starting at 0, where `use_bias`. It is the gate from all features to all heads of
        Quantizable Transformers, arXiv 2306.12929, whose main form gives a head its own slice of x, and always a bias,
        which starts at the logit of the gate's first value.
      tie_embeddings: Use the token embedding as the output head.
      fixed_rotation: Rotate what each part writes to the residual stream by a fixed orthogonal matrix of its own.
      relaxed_causal_tokens: The first k tokens see each other (0: plain causal mask).
      embedding_init_std: Standard deviation of the initial embeddings.
      init_std: Standard deviation of initial kernels; residual-writing ones are scaled by 1/sqrt(2 num_layers).
      kernel_init: `normal` with `init_std`, or `uniform_fan_in`: uniform on +-1/sqrt(fan_in), whatever the depth.
      scan_layers: One compiled block scanned over stacked parameters instead of num_layers unrolled ones.
      remat: Recompute each block in the backward pass instead of keeping its intermediates: true keeps the results of a
        fused attention kernel, `dots` also those of linear layers, which costs little time, `full` keeps nothing.
      dtype: Dtype of the matrix products; parameters, norms, attention statistics and logits stay float32.
    """

    vocab_size: int = 2048
    max_length: int = 1024
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    d_mlp: int = 512
    position: Position = "learned"
    rope_theta: float = 10_000.0
    norm: Norm = "rmsnorm_single"
    norm_bias: bool | None = added(None)
    attention_norm: bool | tuple[bool, ...] = added(True)
    mlp_norm: bool | tuple[bool, ...] = added(True)
    post_norm: bool = added(False)
    norm_eps: float = 1e-5
    use_bias: bool = False
    normalizer: NormalizerName = "softmax1"
    normalizer_n: float = 1.0
    normalizer_gamma: float = added(-0.025)
    normalizer_zeta: float = added(1.0)
    attention_implementation: AttentionImplementation = added("auto", affects="computation")
    mlp: Mlp | tuple[Mlp, ...] = "gelu"
    attention: bool | tuple[bool, ...] = True
    gated_attention: bool = False
    tie_embeddings: bool = True
    fixed_rotation: bool = False
    relaxed_causal_tokens: int = 0
    embedding_init_std: float = setting(0.02, affects="start")
    init_std: float = setting(0.02, affects="start")
    kernel_init: KernelInit = added("normal", affects="start")
    scan_layers: bool = setting(True, affects="start")
    remat: Remat = setting(False, affects="computation")
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        check_types(self, "model")
        sizes = "vocab_size max_length d_model num_layers num_heads d_mlp"
        require_each(self, "model", sizes, lambda size: size > 0, "a positive number")
        positive = "norm_eps rope_theta init_std embedding_init_std"
        require_each(self, "model", positive, lambda x: 0.0 < x < math.inf, "a finite positive number")
        require_each(self, "model", "normalizer_n", lambda n: 0.0 <= n < math.inf, "a finite number >= 0")
        require_each(self, "model", "normalizer_gamma", lambda gamma: -math.inf < gamma <= 0.0, "a finite number <= 0")
        require_each(self, "model", "normalizer_zeta", lambda zeta: 1.0 <= zeta < math.inf, "a finite number >= 1")
        relaxed = f"0 to model.max_length={self.max_length}"
        require_each(self, "model", "relaxed_causal_tokens", lambda k: 0 <= k <= self.max_length, relaxed)
        require(
            self.d_model % self.num_heads == 0,
            f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}",
            f"a multiple of {self.num_heads}",
        )
        kv = self.kv_heads
        require(
            kv > 0 and self.num_heads % kv == 0,
            f"model.num_kv_heads={kv} does not divide model.num_heads={self.num_heads}",
            f"a divisor of {self.num_heads}",
        )
        require(
            self.position != "rotary" or self.head_dim % 2 == 0,
            f"model.position='rotary' needs an even head width, but d_model / num_heads = {self.head_dim}",
            "an even d_model / num_heads, or position 'learned' or 'none'",
        )
        require(
            not (self.fixed_rotation and self.scan_layers),
            "model.fixed_rotation differs between layers, which a scan over layers cannot express",
            "model.scan_layers=false",
        )
        for name in ("mlp", "attention", "mlp_norm", "attention_norm"):
            value = getattr(self, name)
            layers = value if isinstance(value, tuple) else (value,) * self.num_layers
            problem = f"model.{name} names {len(layers)} layers, but model.num_layers={self.num_layers}"
            require(len(layers) == self.num_layers, problem, "one value, or one for each layer")
            require(
                not self.scan_layers or len(set(layers)) == 1,
                f"model.{name}={value} differs between layers, which a scan over layers cannot express",
                "model.scan_layers=false, or equal layers",
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.norm == "layernorm" and (self.use_bias if self.norm_bias is None else self.norm_bias)

    def layer_mlp(self, layer: int) -> Mlp:
        """Kind of MLP of one layer."""
        return self.mlp[layer] if isinstance(self.mlp, tuple) else self.mlp

    def layer_attention(self, layer: int) -> bool:
        """Whether one layer attends."""
        return self.attention[layer] if isinstance(self.attention, tuple) else self.attention

    def layer_norm(self, part: Literal["attention", "mlp"], layer: int) -> bool:
        """Whether one layer has attention or an MLP, with a norm."""
        attends = part == "attention"
        value = self.attention_norm if attends else self.mlp_norm
        is_there = self.layer_attention(layer) if attends else self.layer_mlp(layer) != "none"
        return is_there and (value[layer] if isinstance(value, tuple) else value)
