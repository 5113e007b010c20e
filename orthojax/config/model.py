"""The config of the transformer."""

import dataclasses
from typing import Literal

from orthojax.config.fields import check_types, require, require_each, setting

Norm = Literal["layernorm", "layernorm_nonparametric", "rmsnorm", "rmsnorm_single", "none"]
NormalizerName = Literal[
    "softmax", "softmax1", "softmax_n", "learned_sink", "relu", "gelu", "sigmoid", "clipped_softmax", "softpick"
]
GatedMlp = Literal["swiglu", "geglu", "swiglu_clamped"]
Mlp = Literal["gelu", "gelu_exact", "relu", GatedMlp, "experts", "linear", "none"]
Remat = bool | Literal["dots", "full"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions on only some channels, or stretched for longer sequences; see `orthojax.ops.rotary`.

    Attributes:
      fraction: Fraction of a head's channels that are rotated, starting from the first.
      scaling: How frequencies are lowered.
      factor: By how much.
      original_length: Length before stretching, for all but `linear`. In longer texts, `dynamic` and `longrope` use
        other frequencies.
      low_frequency_factor: `llama3` and `yarn` fully lower frequencies of wavelengths above original_length / this.
      high_frequency_factor: They keep frequencies of wavelengths below original_length / this.
      mscale: `yarn` multiplies rotated channels by m(mscale) / m(mscale_all), with m(k) = 0.1 k ln(factor) + 1.
        `longrope` by sqrt(1 + mscale ln(factor) / ln(original_length)).
      mscale_all: `yarn` multiplies all logits by m(mscale_all)^2.
      truncate: `yarn` rounds outwards the two channel pairs between which it interpolates.
      short_factors: Divisors of the frequency of each channel pair in `longrope` (arXiv 2402.13753), for texts up to
        original_length.
      long_factors: The divisors for longer texts.
    """

    fraction: float = 1.0
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = "none"
    factor: float = 1.0
    original_length: int = 8192
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    mscale: float = 1.0
    mscale_all: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        group = "model.rope"
        check_types(self, group)
        require_each(self, group, "fraction", lambda x: 0.0 < x <= 1.0, "above 0, 1 at most")
        require_each(self, group, "factor", lambda x: x >= 1.0, "a finite number >= 1")
        require_each(self, group, "original_length", lambda size: size > 0, "a positive number")
        positive = lambda factors: all(x > 0.0 for x in factors)  # noqa: E731
        require_each(self, group, "short_factors long_factors", positive, "positive numbers")
        both = bool(self.short_factors and self.long_factors and self.original_length > 1)
        fits = both if self.scaling == "longrope" else not (self.short_factors or self.long_factors)
        problem = f"{group}.scaling={self.scaling!r} and short_factors, long_factors"
        require(fits, problem, "both with 'longrope' and an original_length above 1, or none")
        require_each(self, group, "mscale mscale_all", lambda x: x >= 0.0, "a finite number >= 0")
        low = self.low_frequency_factor
        require_each(self, group, "low_frequency_factor", lambda x: x > 0.0, "a finite positive number")
        above = f"a finite number above low_frequency_factor={low:g}"
        require_each(self, group, "high_frequency_factor", lambda x: x > low, above)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are computed from one normed latent.

    Attributes:
      d_latent: Width of the latent.
      d_query_latent: Width of the latent that queries are computed from; None computes them from the residual stream.
      d_rotary: Number of key channels, the first ones, that all heads share and that are rotated.
      d_value: Width of the values of one head; None means the width of queries and keys.
    """

    d_latent: int = 512
    d_query_latent: int | None = None
    d_rotary: int = 64
    d_value: int | None = None

    def __post_init__(self):
        check_types(self, "model.latent")
        sizes = "d_latent d_query_latent d_rotary d_value"
        require_each(self, "model.latent", sizes, lambda size: size > 0, "a positive number")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts in layers whose MLP is `experts`; by default DeepSeek-V2's (arXiv 2405.04434).

    Attributes:
      num_experts: Routed experts.
      per_token: Experts chosen for each token: those with the largest router probabilities.
      num_shared: Experts applied to every token.
      d_expert: Hidden width of one expert; None means d_mlp.
      groups: Groups of routed experts; a token chooses from those with the likeliest experts.
      groups_per_token: How many groups a token chooses from.
      normalize: Divide the router probabilities of the chosen experts by their sum: a softmax over only their logits.
      scale: Factor on the router probabilities that weight the routed experts.
      mlp: Kind of MLP of each expert.
      use_bias: Biases in the router and in every linear layer of each routed expert, regardless of `model.use_bias`.
    """

    num_experts: int = 8
    per_token: int = 2
    num_shared: int = 0
    d_expert: int | None = None
    groups: int = 1
    groups_per_token: int = 1
    normalize: bool = False
    scale: float = 1.0
    mlp: GatedMlp = "swiglu"
    use_bias: bool = False

    def __post_init__(self):
        group = "model.experts"
        check_types(self, group)
        sizes = "num_experts per_token d_expert groups groups_per_token"
        require_each(self, group, sizes, lambda size: size > 0, "a positive number")
        require_each(self, group, "num_shared", lambda size: size >= 0, "0 or more")
        require_each(self, group, "scale", lambda x: x >= 0.0, "a finite number >= 0")
        require(
            self.num_experts % self.groups == 0 and self.groups_per_token <= self.groups,
            f"{group}.groups={self.groups}, with {self.groups_per_token} of them for a token",
            f"a divisor of {group}.num_experts={self.num_experts}, of which a token has all or fewer",
        )
        chosen_from = self.num_experts // self.groups * self.groups_per_token
        few = f"up to the {chosen_from} experts that a token chooses from"
        require_each(self, group, "per_token", lambda count: count <= chosen_from, few)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer; a family such as GPT-2 is a set of these values (`orthojax.model.presets`).

    Attributes:
      vocab_size: Rows of the token embedding.
      max_length: Rows of the learned position embedding; the longest sequence if positions are learned.
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None means `num_heads` (no grouping).
      d_head: Width of one head; None means d_model / num_heads.
      d_mlp: Hidden width of the MLP (of each half for gated ones, such as swiglu).
      position: Position information: a learned table, rotary on queries and keys, or none.
      rope_theta: Base wavelength of rotary positions.
      rope_local_theta: Base wavelength of layers with a window, whose positions are then not stretched (Gemma 3, arXiv
        2503.19786); None treats them like the others.
      rotary_layers: Whether layers have rotary positions, for all layers or one value per layer (NoPE in the others, as
        in SmolLM3).
      rope: Which channels rotary positions rotate, and how they are stretched; None means all channels without
        stretching.
      norm: `rmsnorm_single` has one scalar scale for all channels, `layernorm_nonparametric` neither scale nor bias.
      attention_norm: Whether attention has a norm, for all layers or one value per layer.
      mlp_norm: Whether the MLP has a norm, for all layers or one value per layer.
      block: Placement of norms and order of the parts. `pre_norm`: x = x + f(norm(x)), and a final norm. `post_norm`:
        x = norm(x + f(x)), and no final norm (arXiv 2002.04745). `output_norm`: x = x + norm(f(x)), and a final norm
        (OLMo 2, arXiv 2501.00656). `parallel`: x = x + attention(norm(x)) + mlp(norm(x)), each with its own norm
        (GPT-NeoX, arXiv 2204.06745). `sandwich_norm`: x = x + norm(f(norm(x))), and a final norm (Gemma 2, arXiv
        2408.00118).
      qk_norm: A norm on queries and keys before positions: per head over its channels, with one scale shared by all
        heads, or over all heads at once.
      norm_eps: Added to the variance inside every norm.
      gated_norm_rank: Rank of a gate on the output of each norm of the residual stream, see
        `orthojax.model.layers.NormGate`; its paper uses 16. 0 means no gate.
      use_bias: Biases in every linear layer and `layernorm`; `qkv` has only those of queries, keys and values,
        `attention` also that of the attention's output, `norm` only those of `layernorm`.
      normalizer: What turns attention logits into weights; `clipped_softmax` uses the gamma and zeta of
        `orthojax.ops.ClippedSoftmax`.
      normalizer_n: The n of `softmax_n`: exp(x_i) / (n + sum_j exp(x_j)).
      logits_width: Attention logits are products of queries and keys divided by the root of this; None means d_head.
      attention_soft_cap: Attention logits x become c tanh(x / c) with this c; None caps nothing.
      final_soft_cap: Soft cap on the logits of the next token (Gemma 2, arXiv 2408.00118).
      attention_implementation: The kernel of the attention; `auto` picks by platform, dtype and shape.
      attention_window: Each query sees at most this many keys, the last being its own, in all layers or one value per
        layer; None means no limit.
      latent: Multi-head latent attention; None makes queries, keys and values linear in the residual stream.
      mlp: Kind of MLP, for all layers or one per layer; `gelu` is the tanh approximation, `gelu_exact` is not, `linear`
        is one d_model x d_model map, `experts` a mixture. With u linear in x, gated ones are silu(gate) u (`swiglu`),
        gelu(gate) u (`geglu`, by tanh), and g sigmoid(1.702 g) (min(max(u, -7), 7) + 1) with g = min(gate, 7)
        (`swiglu_clamped`: gpt-oss, arXiv 2508.10925).
      experts: The mixture of the layers whose MLP is `experts`.
      attention: Whether blocks have attention, for all layers or one value per layer.
      gated_attention: Multiply each head's output at each position by sigmoid(w . x + b), where x is the block's normed
        input (all channels) and b, initially 0, exists only with `use_bias`. This is the gate from all features to all
        heads of Quantizable Transformers, arXiv 2306.12929; the paper's main form gives each head its own slice of x
        and always a bias, initialised to the logit of the gate's initial value. `elementwise` has one such gate for
        each channel of a head (Gated Attention, arXiv 2505.06708), `value` gates the value vectors v by themselves, see
        `orthojax.model.attention.value_gated`.
      tie_embeddings: Use the token embedding as the output head.
      scale_embeddings: Multiply token embeddings by the root of d_model before the first layer, not in the head.
      embedding_projection: Learned d_model x d_model matrices, initially orthogonal, after the token embedding and
        before the head (OSP, arXiv 2506.19697); `orthojax.model.fold_embedding_projection` folds them in.
      fixed_rotation: Rotate what each part writes to the residual stream by its own fixed orthogonal matrix.
      attention_mask: Keys that a query sees: those up to its own (`causal`), all (`full`, for masked tokens), or those
        up to its own and the row's whole prefix, which ends at the first token with the last id, vocab_size - 1
        (`prefix`, the prefix LM of T5, arXiv 1910.10683, section 3.2; a row without that id is causal).
      relaxed_causal_tokens: The first k tokens see each other (0: plain causal mask).
      embedding_init_std: Standard deviation of the initial embeddings.
      init_std: Standard deviation of initial kernels; residual-writing ones are scaled by 1/sqrt(2 num_layers).
      sink_init: Initial sink logits of `learned_sink`: 0 is softmax-1, a value far below all logits is softmax.
      kernel_init: `normal` with `init_std`, or `uniform_fan_in`: uniform on +-1/sqrt(fan_in), regardless of depth.
      scan_layers: One compiled block scanned over stacked parameters instead of num_layers unrolled ones.
      unroll_layers: Compile scanned layers one after the other, not as a loop: the backward pass then reads saved
        activations where layers wrote them, not from stacks over all layers, but compilation takes longer. `auto` does
        so for training on a GPU with at most 48 layers.
      remat: Recompute each block in the backward pass instead of keeping its intermediates: true keeps the results of a
        fused attention kernel, `dots` also those of linear layers, which costs little time, `full` keeps nothing.
      dtype: Dtype of the matrix products; parameters, norms, attention statistics and logits stay float32. `float16` is
        for evaluation: training has no loss scaling.
      residual_dtype: Dtype of the residual stream. bfloat16 halves what norms and sums read and write, but has 8 bits:
        if a channel is at 1000, anything below 2 that a block adds to it is lost.
    """

    vocab_size: int = 2048
    max_length: int = 1024
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    d_head: int | None = None
    d_mlp: int = 512
    position: Literal["learned", "rotary", "none"] = "learned"
    rope_theta: float = 10_000.0
    rope_local_theta: float | None = None
    rotary_layers: bool | tuple[bool, ...] = True
    rope: RopeConfig | None = None
    norm: Norm = "rmsnorm_single"
    attention_norm: bool | tuple[bool, ...] = True
    mlp_norm: bool | tuple[bool, ...] = True
    block: Literal["pre_norm", "post_norm", "output_norm", "parallel", "sandwich_norm"] = "pre_norm"
    qk_norm: Literal["none", "head", "all"] = "none"
    norm_eps: float = 1e-5
    gated_norm_rank: int = 0
    use_bias: bool | Literal["qkv", "attention", "norm"] = False
    normalizer: NormalizerName = "softmax1"
    normalizer_n: float = 1.0
    logits_width: int | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    attention_implementation: Literal["auto", "xla", "xla_chunked", "cudnn", "splash"] = setting(
        "auto", affects="computation"
    )
    attention_window: int | tuple[int | None, ...] | None = None
    latent: LatentConfig | None = None
    mlp: Mlp | tuple[Mlp, ...] = "gelu"
    experts: ExpertsConfig | None = None
    attention: bool | tuple[bool, ...] = True
    gated_attention: bool | Literal["elementwise", "value"] = False
    tie_embeddings: bool = True
    scale_embeddings: bool = False
    embedding_projection: bool = False
    fixed_rotation: bool = False
    attention_mask: Literal["causal", "full", "prefix"] = "causal"
    relaxed_causal_tokens: int = 0
    embedding_init_std: float = setting(0.02, affects="start")
    init_std: float = setting(0.02, affects="start")
    sink_init: float = setting(0.0, affects="start")
    kernel_init: Literal["normal", "uniform_fan_in"] = setting("normal", affects="start")
    scan_layers: bool = setting(True, affects="start")
    unroll_layers: bool | Literal["auto"] = setting("auto", affects="computation")
    remat: Remat = setting(False, affects="computation")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    residual_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        check_types(self, "model")
        require_each(self, "model", "vocab_size max_length logits_width", lambda count: count > 0, "a positive number")
        windows = self.attention_window if isinstance(self.attention_window, tuple) else (self.attention_window,)
        positive = all(window is None or window > 0 for window in windows)
        require(positive, f"model.attention_window={self.attention_window}", "a positive number, or none")
        # More is a typo, and would take minutes to trace.
        require_each(self, "model", "d_model num_heads d_mlp d_head", lambda size: 0 < size <= 2**20, "1 to 2**20")
        require_each(self, "model", "num_layers", lambda count: 0 < count <= 2**12, "1 to 2**12")
        positive = "norm_eps rope_theta rope_local_theta attention_soft_cap final_soft_cap init_std embedding_init_std"
        require_each(self, "model", positive, lambda x: x > 0.0, "a finite positive number")
        require_each(self, "model", "normalizer_n", lambda n: n >= 0.0, "a finite number >= 0")
        relaxed = f"0 to model.max_length={self.max_length}"
        require_each(self, "model", "relaxed_causal_tokens", lambda k: 0 <= k <= self.max_length, relaxed)
        beside = f"model.attention_window or relaxed_causal_tokens with model.attention_mask={self.attention_mask!r}"
        plain = all(window is None for window in windows) and not self.relaxed_causal_tokens
        require(self.attention_mask == "causal" or plain, beside, "neither, or attention_mask 'causal'")
        kernel = "model.attention_implementation='splash' with model.attention_mask='prefix', which differs by row"
        is_splash = self.attention_implementation == "splash"
        require(self.attention_mask != "prefix" or not is_splash, kernel, "auto | xla | xla_chunked | cudnn")
        require_each(self, "model", "gated_norm_rank", lambda rank: 0 <= rank <= 2**20, "0 to 2**20")
        without = f"model.gated_norm_rank={self.gated_norm_rank} with model.norm='none'"
        require(not self.gated_norm_rank or self.norm != "none", without, "0, or a norm")
        capped = "model.attention_soft_cap with model.attention_implementation='cudnn', which has none"
        by_cudnn = self.attention_implementation == "cudnn"
        require(self.attention_soft_cap is None or not by_cudnn, capped, "auto | xla | xla_chunked | splash")
        both = "model.fixed_rotation with model.embedding_projection"
        require(not (self.fixed_rotation and self.embedding_projection), both, "one of them")
        require(
            not (self.fixed_rotation and self.scan_layers),
            "model.fixed_rotation differs between layers, which a scan over layers cannot express",
            "model.scan_layers=false",
        )
        for name in ("mlp", "attention", "attention_window", "rotary_layers", "mlp_norm", "attention_norm"):
            value = getattr(self, name)
            layers = value if isinstance(value, tuple) else (value,) * self.num_layers
            problem = f"model.{name} names {len(layers)} layers, but model.num_layers={self.num_layers}"
            require(len(layers) == self.num_layers, problem, "one value, or one for each layer")
            require(
                not self.scan_layers or len(set(layers)) == 1,
                f"model.{name}={value} differs between layers, which a scan over layers cannot express",
                "model.scan_layers=false, or equal layers",
            )
        self._check_heads()
        require(
            self.experts is not None or not self.has_experts,
            "model.mlp='experts' without model.experts",
            "fields of model.experts, such as model.experts.num_experts",
        )

    def _check_heads(self) -> None:
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
            f"model.position='rotary' rotates {self.rotary_channels} of the {self.head_dim} channels of a head",
            "an even number, or position 'learned' or 'none'",
        )
        none = f"model.rotary_layers={self.rotary_layers} with model.position={self.position!r}"
        require(self.rotary_layers is True or self.position == "rotary", none, "true, or position 'rotary'")
        windowed = any(self.layer_window(layer) for layer in range(self.num_layers))
        local = f"model.rope_local_theta={self.rope_local_theta} without rotary positions and a window"
        require(self.rope_local_theta is None or (self.position == "rotary" and windowed), local, "none")
        pairs, factors = self.rotary_channels // 2, () if self.rope is None else self.rope.short_factors
        same = self.rope is None or len(factors) == len(self.rope.long_factors)
        problem = f"model.rope.short_factors and long_factors for {pairs} pairs of channels"
        require(same and len(factors) in (0, pairs), problem, f"{pairs} of each")
        dynamic = self.rope is not None and self.rope.scaling == "dynamic"
        require(not dynamic or pairs > 1, "model.rope.scaling='dynamic' with one pair of channels", "more")
        require(
            self.rope is None or self.rope.scaling != "yarn" or self.rope_theta > 1.0,
            f"model.rope_theta={self.rope_theta} with model.rope.scaling='yarn'",
            "above 1",
        )
        if self.latent is None:
            return
        require(kv == self.num_heads, f"model.latent with model.num_kv_heads={kv}", f"{self.num_heads}, or none")
        require(self.qk_norm == "none", f"model.latent with model.qk_norm={self.qk_norm!r}", "none")
        require(self.rope is None or self.rope.fraction == 1.0, "model.rope.fraction with model.latent", "d_rotary")
        d_rotary, widest = self.latent.d_rotary, self.head_dim - 1
        require(d_rotary <= widest, f"model.latent.d_rotary={d_rotary} of {self.head_dim} channels", f"1 to {widest}")

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
        return self.head_dim if self.latent is None or self.latent.d_value is None else self.latent.d_value

    @property
    def rotary_channels(self) -> int:
        """The number of channels of each head that rotary positions rotate."""
        if self.latent is not None:
            return self.latent.d_rotary
        fraction = 1.0 if self.rope is None else self.rope.fraction
        return int(self.head_dim * fraction + 1e-6)  # 49 * (1 / 49) is less than 1

    @property
    def has_bias(self) -> bool:
        """Whether linear layers other than those of attention have biases."""
        return self.use_bias is True

    @property
    def has_output_bias(self) -> bool:
        """Whether the output of attention has a bias."""
        return self.use_bias in (True, "attention")

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.use_bias in (True, "qkv", "attention")

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have biases."""
        return self.norm == "layernorm" and self.use_bias in (True, "norm")

    @property
    def has_experts(self) -> bool:
        """Returns whether a layer has a mixture of experts."""
        return "experts" in (self.mlp if isinstance(self.mlp, tuple) else (self.mlp,))

    def layer_mlp(self, layer: int) -> Mlp:
        """Kind of MLP of one layer."""
        return self.mlp[layer] if isinstance(self.mlp, tuple) else self.mlp

    def layer_attention(self, layer: int) -> bool:
        """Returns whether a layer attends."""
        return self.attention[layer] if isinstance(self.attention, tuple) else self.attention

    def layer_window(self, layer: int) -> int | None:
        """The most keys that a query of one layer sees; None for no limit."""
        return self.attention_window[layer] if isinstance(self.attention_window, tuple) else self.attention_window

    def layer_rotates(self, layer: int) -> bool:
        """Returns whether a layer has rotary positions."""
        there = self.rotary_layers[layer] if isinstance(self.rotary_layers, tuple) else self.rotary_layers
        return self.position == "rotary" and there

    def layer_rope(self, layer: int) -> tuple[float, RopeConfig | None]:
        """Base wavelength of rotary positions of one layer, and how they are stretched."""
        if self.rope_local_theta is None or self.layer_window(layer) is None:
            return self.rope_theta, self.rope
        return self.rope_local_theta, None

    def layer_norm(self, part: Literal["attention", "mlp"], layer: int) -> bool:
        """Returns whether a layer has this part, with a norm."""
        attends = part == "attention"
        value = self.attention_norm if attends else self.mlp_norm
        is_there = self.layer_attention(layer) if attends else self.layer_mlp(layer) != "none"
        return is_there and (value[layer] if isinstance(value, tuple) else value)
