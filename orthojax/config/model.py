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
Mlp = Literal["gelu", "gelu_exact", "relu", "swiglu", "experts", "linear", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
QkNorm = Literal["none", "head", "all"]
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
      d_head: Width of one head; None means d_model / num_heads.
      d_value: Width of the values of one head; None means that of queries and keys.
      d_latent: Keys and values are made from a normed latent of this width, and the rotated channels of keys, the first
        rotary_fraction of them, are the same for all heads (multi-head latent attention, arXiv 2405.04434); None means
        that queries, keys and values are linear in the residual stream.
      d_query_latent: With `d_latent`, queries are made from a latent of this width, too; None means that they are not.
      d_mlp: Hidden width of the MLP (of each half for swiglu).
      num_experts: Routed experts of an MLP `experts`.
      experts_per_token: How many of them count for a token: those of largest router probability.
      num_shared_experts: Experts that count for every token.
      d_expert: Hidden width of one expert; None means d_mlp.
      expert_groups: Groups of routed experts, of which only those with the likeliest experts are chosen from.
      expert_groups_per_token: How many of them.
      expert_scale: Factor of the router probabilities, with which routed experts are added.
      position: Position information: a learned table, rotary on queries and keys, or none.
      rope_theta: Base wavelength of rotary positions.
      rotary_fraction: Share of a head's channels that are rotated, the first ones.
      rope_scaling: How frequencies of rotary positions are lowered for longer sequences, see
        `orthojax.ops.rotary`.
      rope_factor: By how much.
      rope_original_length: Length before that, for `llama3` and `yarn`.
      rope_low_frequency_factor: Frequencies of wavelengths above rope_original_length over this are lowered in full by
        `llama3` and `yarn`.
      rope_high_frequency_factor: Frequencies of wavelengths below rope_original_length over this are not lowered by
        `llama3` and `yarn`.
      rope_mscale: `yarn` multiplies rotated channels by m(rope_mscale) / m(rope_mscale_all), with
        m(k) = 0.1 k ln(rope_factor) + 1.
      rope_mscale_all: And all logits by m(rope_mscale_all)^2.
      norm: `rmsnorm_single` has one scalar scale for all channels.
      norm_scale: Whether norms have a learned scale.
      norm_bias: Whether `layernorm` has a bias; None means where linear layers have one.
      attention_norm: Whether attention has a norm, for all layers or one for each.
      mlp_norm: The same for the MLP.
      post_norm: x = norm(x + f(x)) in every block, and no final norm, instead of x = x + f(norm(x)) with one
        (arXiv 2002.04745).
      output_norm: x = x + norm(f(x)) in every block, with a final norm (OLMo 2, arXiv 2501.00656).
      parallel_blocks: x = x + attention(norm(x)) + mlp(norm(x)), each with its own norm (GPT-NeoX, arXiv 2204.06745).
      qk_norm: A norm on queries and keys before positions: for each head over its channels, with one scale for all
        heads, or over all heads at once.
      norm_eps: Added to the variance inside every norm.
      use_bias: Biases in every linear layer.
      qkv_bias: The same for queries, keys and values; None means `use_bias`.
      normalizer: What turns attention logits into weights.
      normalizer_n: The n of `softmax_n`: exp(x_i) / (n + sum_j exp(x_j)).
      normalizer_gamma: The gamma <= 0 of `clipped_softmax`: clip((zeta - gamma) softmax(x) + gamma, 0, 1).
      normalizer_zeta: Its zeta >= 1.
      attention_implementation: The kernel of the attention; `auto` picks by platform, dtype and shape.
      attention_window: Each query sees this many keys at most, its own the last; None means all before it.
      mlp: Kind of MLP, for all layers or one for each; `gelu` is the approximation by tanh, `gelu_exact` is not,
        `linear` one d_model x d_model map, `experts` a mixture of swiglu ones (see `num_experts`).
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
      sink_init: Where the learned sink logits of `learned_sink` start: 0 is softmax-1, far below all logits softmax.
      kernel_init: `normal` with `init_std`, or `uniform_fan_in`: uniform on +-1/sqrt(fan_in), whatever the depth.
      scan_layers: One compiled block scanned over stacked parameters instead of num_layers unrolled ones.
      remat: Recompute each block in the backward pass instead of keeping its intermediates: true keeps the results of a
        fused attention kernel, `dots` also those of linear layers, which costs little time, `full` keeps nothing.
      dtype: Dtype of the matrix products; parameters, norms, attention statistics and logits stay float32. `float16` is
        for evaluation: training has no loss scaling.
    """

    vocab_size: int = 2048
    max_length: int = 1024
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    d_head: int | None = added(None)
    d_value: int | None = added(None)
    d_latent: int | None = added(None)
    d_query_latent: int | None = added(None)
    d_mlp: int = 512
    num_experts: int = added(8)
    experts_per_token: int = added(2)
    num_shared_experts: int = added(0)
    d_expert: int | None = added(None)
    expert_groups: int = added(1)
    expert_groups_per_token: int = added(1)
    expert_scale: float = added(1.0)
    position: Position = "learned"
    rope_theta: float = 10_000.0
    rotary_fraction: float = added(1.0)
    rope_scaling: RopeScaling = added("none")
    rope_factor: float = added(1.0)
    rope_original_length: int = added(8192)
    rope_low_frequency_factor: float = added(1.0)
    rope_high_frequency_factor: float = added(4.0)
    rope_mscale: float = added(1.0)
    rope_mscale_all: float = added(0.0)
    norm: Norm = "rmsnorm_single"
    norm_scale: bool = added(True)
    norm_bias: bool | None = added(None)
    attention_norm: bool | tuple[bool, ...] = added(True)
    mlp_norm: bool | tuple[bool, ...] = added(True)
    post_norm: bool = added(False)
    output_norm: bool = added(False)
    parallel_blocks: bool = added(False)
    qk_norm: QkNorm = added("none")
    norm_eps: float = 1e-5
    use_bias: bool = False
    qkv_bias: bool | None = added(None)
    normalizer: NormalizerName = "softmax1"
    normalizer_n: float = 1.0
    normalizer_gamma: float = added(-0.025)
    normalizer_zeta: float = added(1.0)
    attention_implementation: AttentionImplementation = added("auto", affects="computation")
    attention_window: int | None = added(None)
    mlp: Mlp | tuple[Mlp, ...] = "gelu"
    attention: bool | tuple[bool, ...] = True
    gated_attention: bool = False
    tie_embeddings: bool = True
    fixed_rotation: bool = False
    relaxed_causal_tokens: int = 0
    embedding_init_std: float = setting(0.02, affects="start")
    init_std: float = setting(0.02, affects="start")
    sink_init: float = added(0.0, affects="start")
    kernel_init: KernelInit = added("normal", affects="start")
    scan_layers: bool = setting(True, affects="start")
    remat: Remat = setting(False, affects="computation")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        check_types(self, "model")
        sizes = "vocab_size max_length d_model num_layers num_heads d_mlp"
        require_each(self, "model", sizes, lambda size: size > 0, "a positive number")
        optional = "d_head d_value d_latent d_query_latent d_expert attention_window"
        require_each(self, "model", optional, lambda size: size is None or size > 0, "a positive number, or none")
        require_each(self, "model", "rope_original_length", lambda size: size > 0, "a positive number")
        positive = "norm_eps rope_theta init_std embedding_init_std rope_low_frequency_factor"
        require_each(self, "model", positive, lambda x: 0.0 < x < math.inf, "a finite positive number")
        require_each(self, "model", "sink_init", lambda sink: abs(sink) < math.inf, "a finite number")
        require_each(self, "model", "normalizer_n", lambda n: 0.0 <= n < math.inf, "a finite number >= 0")
        require_each(self, "model", "normalizer_gamma", lambda gamma: -math.inf < gamma <= 0.0, "a finite number <= 0")
        require_each(self, "model", "normalizer_zeta", lambda zeta: 1.0 <= zeta < math.inf, "a finite number >= 1")
        require_each(self, "model", "rotary_fraction", lambda x: 0.0 < x <= 1.0, "above 0, 1 at most")
        require_each(self, "model", "rope_factor", lambda x: 1.0 <= x < math.inf, "a finite number >= 1")
        low = self.rope_low_frequency_factor
        above = f"a finite number above rope_low_frequency_factor={low:g}"
        require_each(self, "model", "rope_high_frequency_factor", lambda x: low < x < math.inf, above)
        relaxed = f"0 to model.max_length={self.max_length}"
        require_each(self, "model", "relaxed_causal_tokens", lambda k: 0 <= k <= self.max_length, relaxed)
        require(
            self.d_head is not None or self.d_model % self.num_heads == 0,
            f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}",
            f"a multiple of {self.num_heads}, or model.d_head",
        )
        kv = self.kv_heads
        require(
            kv > 0 and self.num_heads % kv == 0,
            f"model.num_kv_heads={kv} does not divide model.num_heads={self.num_heads}",
            f"a divisor of {self.num_heads}",
        )
        require(
            self.position != "rotary" or (self.rotary_channels > 0 and self.rotary_channels % 2 == 0),
            f"model.position='rotary' needs an even head width, but d_model / num_heads (or d_head) times "
            f"rotary_fraction = {self.rotary_channels}",
            "an even number, or position 'learned' or 'none'",
        )
        self._check_latents_and_experts()
        places = [name for name in ("post_norm", "output_norm", "parallel_blocks") if getattr(self, name)]
        problem = "model." + " and model.".join(f"{name}=true" for name in places)
        require(len(places) < 2, f"{problem} are different places of the norm", "one of them")
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

    def _check_latents_and_experts(self) -> None:
        sizes = "num_experts experts_per_token expert_groups expert_groups_per_token"
        require_each(self, "model", sizes, lambda size: size > 0, "a positive number")
        require_each(self, "model", "num_shared_experts", lambda size: size >= 0, "0 or more")
        factors = "expert_scale rope_mscale rope_mscale_all"
        require_each(self, "model", factors, lambda x: 0.0 <= x < math.inf, "a finite number >= 0")
        require(
            self.num_experts % self.expert_groups == 0 and self.expert_groups_per_token <= self.expert_groups,
            f"model.expert_groups={self.expert_groups}, with {self.expert_groups_per_token} of them for a token",
            f"a divisor of model.num_experts={self.num_experts}, of which a token has all or fewer",
        )
        chosen_from = self.num_experts // self.expert_groups * self.expert_groups_per_token
        few = f"up to the {chosen_from} experts that a token chooses from"
        require_each(self, "model", "experts_per_token", lambda count: count <= chosen_from, few)
        require(
            self.rope_scaling != "yarn" or self.rope_theta > 1.0,
            f"model.rope_theta={self.rope_theta} with model.rope_scaling='yarn'",
            "above 1",
        )
        if self.d_latent is None:
            allowed = "model.d_latent beside it, for multi-head latent attention"
            require(self.d_query_latent is None, f"model.d_query_latent={self.d_query_latent} alone", allowed)
            return
        problem = f"model.d_latent={self.d_latent} with model."
        require(self.kv_heads == self.num_heads, f"{problem}num_kv_heads={self.kv_heads}", f"{self.num_heads}, or none")
        require(self.qk_norm == "none", f"{problem}qk_norm={self.qk_norm!r}", "none")
        allowed = f"a share that gives 1 to {self.head_dim - 1} channels of {self.head_dim}"
        inside = 0 < self.rotary_channels < self.head_dim
        require(inside, f"{problem}rotary_fraction={self.rotary_fraction}", allowed)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of queries and keys of one head."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def value_dim(self) -> int:
        """Width of the values of one head."""
        return self.head_dim if self.d_value is None else self.d_value

    @property
    def expert_dim(self) -> int:
        """Hidden width of one expert."""
        return self.d_mlp if self.d_expert is None else self.d_expert

    @property
    def rotary_channels(self) -> int:
        """How many channels of each head rotary positions rotate."""
        return int(self.head_dim * self.rotary_fraction + 1e-6)  # 49 * (1 / 49) is less than 1

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.use_bias if self.qkv_bias is None else self.qkv_bias

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
