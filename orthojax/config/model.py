"""The config of the transformer."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from orthojax.config.fields import NOT_NEGATIVE, POSITIVE, Check, Range, check_fields, setting

Norm = Literal["layernorm", "layernorm_nonparametric", "rmsnorm", "rmsnorm_single", "none"]
NormalizerName = Literal["softmax", "softmax1", "softmax_n", "learned_sink", "relu", "gelu", "sigmoid", "softpick"]
GatedMlp = Literal["swiglu", "geglu", "swiglu_clamped"]
Mlp = Literal["gelu", "gelu_exact", "relu", GatedMlp, "experts", "linear", "none"]
Implementation = Literal["auto", "xla", "xla_chunked", "cudnn", "splash"]
Remat = bool | Literal["dots", "full"]

_SIZE = Range(lambda size: 0 < size <= 2**20, "1 to 2**20")  # more is a typo, and would take minutes to trace
_LAYERS = Range(lambda count: 0 < count <= 2**12, "1 to 2**12")


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

    fraction: float = setting(1.0, Range(lambda x: 0.0 < x <= 1.0, "above 0, 1 at most"))
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = "none"
    factor: float = setting(1.0, Range(lambda x: x >= 1.0, "a finite number >= 1"))
    original_length: int = setting(8192, POSITIVE)
    low_frequency_factor: float = setting(1.0, POSITIVE)
    high_frequency_factor: float = setting(4.0, POSITIVE)
    mscale: float = setting(1.0, NOT_NEGATIVE)
    mscale_all: float = setting(0.0, NOT_NEGATIVE)
    truncate: bool = True
    short_factors: tuple[float, ...] = setting((), POSITIVE)
    long_factors: tuple[float, ...] = setting((), POSITIVE)

    def __post_init__(self):
        check_fields(self, "model.rope", self._checks)

    def _checks(self) -> list[Check]:
        both = bool(self.short_factors and self.long_factors and self.original_length > 1)
        fits = both if self.scaling == "longrope" else not (self.short_factors or self.long_factors)
        low = self.low_frequency_factor
        return [
            (fits, f"scaling={self.scaling!r} and short_factors, long_factors",
             "both with 'longrope' and an original_length above 1, or none"),
            (self.high_frequency_factor > low, f"high_frequency_factor={self.high_frequency_factor}",
             f"a finite number above low_frequency_factor={low:g}"),
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are computed from one normed latent.

    Attributes:
      d_latent: Width of the latent.
      d_query_latent: Width of the latent that queries are computed from; None computes them from the residual stream.
      d_rotary: Number of key channels, the first ones, that all heads share and that are rotated.
      d_value: Width of the values of one head; None means the width of queries and keys.
    """

    d_latent: int = setting(512, POSITIVE)
    d_query_latent: int | None = setting(None, POSITIVE)
    d_rotary: int = setting(64, POSITIVE)
    d_value: int | None = setting(None, POSITIVE)

    def __post_init__(self):
        check_fields(self, "model.latent")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts in layers whose MLP is `experts`; by default DeepSeek-V2's (arXiv 2405.04434).

    Attributes:
      num_experts: Routed experts.
      per_token: Experts chosen for each token: those with the largest router probabilities.
      num_shared: Experts applied to every token.
      scores: Makes probabilities of router logits. With `sigmoid`, experts are chosen by the sum of theirs and a bias,
        which no gradient reaches, and groups by that of their best two experts (DeepSeek-V3, arXiv 2412.19437).
      d_shared: Hidden width of one shared expert; None means that of the others.
      gate_shared: Multiply what these write by sigmoid(w . x) of their input x (Qwen2-MoE, arXiv 2407.10671).
      d_expert: Hidden width of one expert; None means d_mlp.
      groups: Groups of routed experts; a token chooses from those with the likeliest experts.
      groups_per_token: How many groups a token chooses from.
      normalize: Divide the router probabilities of the chosen experts by their sum: a softmax over only their logits.
      scale: Factor on the router probabilities that weight the routed experts.
      mlp: Kind of MLP of each expert.
      use_bias: Biases in the router and in every linear layer of each routed expert, regardless of `model.use_bias`.
    """

    num_experts: int = setting(8, POSITIVE)
    per_token: int = setting(2, POSITIVE)
    num_shared: int = setting(0, NOT_NEGATIVE)
    d_shared: int | None = setting(None, POSITIVE)
    gate_shared: bool = False
    d_expert: int | None = setting(None, POSITIVE)
    groups: int = setting(1, POSITIVE)
    groups_per_token: int = setting(1, POSITIVE)
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = setting(1.0, NOT_NEGATIVE)
    mlp: GatedMlp = "swiglu"
    use_bias: bool = False

    def __post_init__(self):
        check_fields(self, "model.experts", self._checks)

    def _checks(self) -> list[Check]:
        experts, groups, chosen = self.num_experts, self.groups, self.groups_per_token
        choice = experts // groups * chosen
        return [
            (experts % groups == 0 and chosen <= groups, f"groups={groups}, with {chosen} of them for a token",
             f"a divisor of model.experts.num_experts={experts}, of which a token has all or fewer"),
            (self.per_token <= choice, f"per_token={self.per_token}",
             f"up to the {choice} experts that a token chooses from"),
            (self.num_shared > 0 or not self.gate_shared, "gate_shared without model.experts.num_shared", "false"),
        ]  # fmt: skip


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
      block: Placement of norms, besides a final one, and order of the parts. `pre_norm`: x = x + f(norm(x)).
        `output_norm`: x = x + norm(f(x)) (OLMo 2, arXiv 2501.00656). `parallel`: x = x + attention(norm(x)) +
        mlp(norm(x)), each with its own norm (GPT-NeoX, arXiv 2204.06745). `parallel_one_norm` has one norm, which is
        called that of attention, for both (GPT-J, Cohere). `sandwich_norm`: x = x + norm(f(norm(x)))
        (Gemma 2, arXiv 2408.00118).
      residual_multiplier: Factor of what attention and MLP add to the residual stream, after their norms (Granite).
      norm: `rmsnorm_single` has one scalar scale for all channels, `layernorm_nonparametric` neither scale nor bias.
      norm_eps: Added to the variance inside every norm.
      qk_norm: A norm on queries and keys before positions: per head over its channels, with one scale shared by all
        heads, or over all heads at once.
      use_bias: Biases in every linear layer and `layernorm`; `qkv` has only those of queries, keys and values,
        `attention` also that of the attention's output, `norm` only those of `layernorm`.
      attention: Whether blocks have attention, for all layers or one value per layer.
      normalizer: What turns attention logits into weights.
      normalizer_n: The n of `softmax_n`: exp(x_i) / (n + sum_j exp(x_j)).
      logits_width: Attention logits are products of queries and keys divided by the root of this; None means d_head.
      attention_soft_cap: Attention logits x become c tanh(x / c) with this c; None caps nothing.
      attention_window: Each query sees at most this many keys, the last being its own, in all layers or one value per
        layer; None means no limit.
      relaxed_causal_tokens: The first k tokens see each other (0: plain causal mask).
      gated_attention: Multiply each head's output at each position by sigmoid(w . x + b), where x is the block's normed
        input (all channels) and b, initially 0, exists only with `use_bias`. This is the gate from all features to all
        heads of Quantizable Transformers, arXiv 2306.12929; the paper's main form gives each head its own slice of x
        and always a bias, initialised to the logit of the gate's initial value. `elementwise` has one such gate for
        each channel of a head (Gated Attention, arXiv 2505.06708).
      latent: Multi-head latent attention; None makes queries, keys and values linear in the residual stream.
      mlp: Kind of MLP, for all layers or one per layer; `gelu` is the tanh approximation, `gelu_exact` is not, `linear`
        is one d_model x d_model map, `experts` a mixture. With u linear in x, gated ones are silu(gate) u (`swiglu`),
        gelu(gate) u (`geglu`, by tanh), and g sigmoid(1.702 g) (min(max(u, -7), 7) + 1) with g = min(gate, 7)
        (`swiglu_clamped`: gpt-oss, arXiv 2508.10925).
      experts: The mixture of the layers whose MLP is `experts`.
      tie_embeddings: Use the token embedding as the output head.
      scale_embeddings: Multiply token embeddings by the root of d_model before the first layer, not in the head.
      embedding_multiplier: Factor of token embeddings before the first layer, not in the head (Granite).
      embedding_projection: Learned d_model x d_model matrices, initially orthogonal, after the token embedding and
        before the head (OSP, arXiv 2506.19697); `orthojax.model.fold_embedding_projection` folds them in.
      logits_multiplier: Factor of the logits of the next token, before their soft cap (Granite, Cohere).
      final_soft_cap: Soft cap on the logits of the next token (Gemma 2, arXiv 2408.00118).
      kernel_init: `normal` with `init_std`, or `uniform_fan_in`: uniform on +-1/sqrt(fan_in), regardless of depth.
      init_std: Standard deviation of initial kernels; residual-writing ones are scaled by 1/sqrt(2 num_layers).
      embedding_init_std: Standard deviation of the initial embeddings.
      sink_init: Initial sink logits of `learned_sink`: 0 is softmax-1, a value far below all logits is softmax.
      attention_implementation: The kernel of the attention; `auto` picks by platform, dtype and shape.
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

    # Sizes.
    vocab_size: int = setting(2048, POSITIVE)
    max_length: int = setting(1024, POSITIVE)
    d_model: int = setting(128, _SIZE)
    num_layers: int = setting(4, _LAYERS)
    num_heads: int = setting(4, _SIZE)
    num_kv_heads: int | None = setting(None, POSITIVE)
    d_head: int | None = setting(None, _SIZE)
    d_mlp: int = setting(512, _SIZE)
    # Positions.
    position: Literal["learned", "rotary", "none"] = "learned"
    rope_theta: float = setting(10_000.0, POSITIVE)
    rope_local_theta: float | None = setting(None, POSITIVE)
    rotary_layers: bool | tuple[bool, ...] = True
    rope: RopeConfig | None = None
    # Norms and biases.
    block: Literal["pre_norm", "output_norm", "parallel", "parallel_one_norm", "sandwich_norm"] = "pre_norm"
    residual_multiplier: float = setting(1.0, POSITIVE)
    norm: Norm = "rmsnorm_single"
    norm_eps: float = setting(1e-5, POSITIVE)
    qk_norm: Literal["none", "head", "all"] = "none"
    use_bias: bool | Literal["qkv", "attention", "norm"] = False
    # Attention.
    attention: bool | tuple[bool, ...] = True
    normalizer: NormalizerName = "softmax1"
    normalizer_n: float = setting(1.0, NOT_NEGATIVE)
    logits_width: int | None = setting(None, POSITIVE)
    attention_soft_cap: float | None = setting(None, POSITIVE)
    attention_window: int | tuple[int | None, ...] | None = setting(None, POSITIVE)
    relaxed_causal_tokens: int = setting(0, NOT_NEGATIVE)
    gated_attention: bool | Literal["elementwise"] = False
    latent: LatentConfig | None = None
    # MLP.
    mlp: Mlp | tuple[Mlp, ...] = "gelu"
    experts: ExpertsConfig | None = None
    # Embeddings, head and the stream between them.
    tie_embeddings: bool = True
    scale_embeddings: bool = False
    embedding_multiplier: float = setting(1.0, POSITIVE)
    embedding_projection: bool = False
    logits_multiplier: float = setting(1.0, POSITIVE)
    final_soft_cap: float | None = setting(None, POSITIVE)
    # Initial values.
    kernel_init: Literal["normal", "uniform_fan_in"] = setting("normal", affects="start")
    init_std: float = setting(0.02, POSITIVE, affects="start")
    embedding_init_std: float = setting(0.02, POSITIVE, affects="start")
    sink_init: float = setting(0.0, affects="start")
    # How it is computed.
    attention_implementation: Implementation = setting("auto", affects="computation")
    scan_layers: bool = setting(True, affects="start")
    unroll_layers: bool | Literal["auto"] = setting("auto", affects="computation")
    remat: Remat = setting(False, affects="computation")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    residual_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        check_fields(self, "model", lambda: (*self._checks(), *self._checks_of_layers(), *self._checks_of_heads()))

    def _checks(self) -> list[Check]:
        relaxed, most = self.relaxed_causal_tokens, self.max_length
        return [
            (relaxed <= most, f"relaxed_causal_tokens={relaxed}", f"0 to model.max_length={most}"),
            (not self.has_experts or self.experts is not None, "mlp='experts' without model.experts",
             "fields of model.experts, such as model.experts.num_experts"),
        ]  # fmt: skip

    def _checks_of_layers(self) -> Iterator[Check]:
        for name in ("mlp", "attention", "attention_window", "rotary_layers"):
            value, most = getattr(self, name), self.num_layers
            count = len(value) if isinstance(value, tuple) else most
            miscounted = f"{name} names {count} layers, but model.num_layers={most}"
            yield count == most, miscounted, "one value, or one for each layer"
            differs = f"{name}={value} differs between layers, which a scan over layers cannot express"
            one = not self.scan_layers or len(set(_each(value))) == 1
            yield one, differs, "model.scan_layers=false, or equal layers"

    def _checks_of_heads(self) -> Iterator[Check]:
        heads, kv, width, turned = self.num_heads, self.kv_heads, self.head_dim, self.rotary_channels
        rotary, latent, rope = self.position == "rotary", self.latent, self.rope or RopeConfig()
        local, pairs, factors = self.rope_local_theta, turned // 2, (len(rope.short_factors), len(rope.long_factors))
        yield from [
            (self.d_head is not None or self.d_model % heads == 0,
             f"d_model={self.d_model} is not divisible by model.num_heads={heads}",
             f"a multiple of {heads}, or model.d_head"),
            (heads % kv == 0, f"num_kv_heads={kv} does not divide model.num_heads={heads}", f"a divisor of {heads}"),
            (not rotary or (turned > 0 and turned % 2 == 0),
             f"position='rotary' rotates {turned} of the {width} channels of a head",
             "an even number, or position 'learned' or 'none'"),
            (rotary or self.rotary_layers is True,
             f"rotary_layers={self.rotary_layers} with model.position={self.position!r}", "true, or position 'rotary'"),
            (local is None or (rotary and any(_each(self.attention_window))),
             f"rope_local_theta={local} without rotary positions and a window", "none"),
            (factors in ((0, 0), (pairs, pairs)),
             f"rope.short_factors and long_factors for {pairs} pairs of channels", f"{pairs} of each"),
            (rope.scaling != "dynamic" or pairs > 1, "rope.scaling='dynamic' with one pair of channels", "more"),
            (rope.scaling != "yarn" or self.rope_theta > 1.0,
             f"rope_theta={self.rope_theta} with model.rope.scaling='yarn'", "above 1"),
        ]  # fmt: skip
        if latent is not None:
            yield kv == heads, f"latent with model.num_kv_heads={kv}", f"{heads}, or none"
            yield self.qk_norm == "none", f"latent with model.qk_norm={self.qk_norm!r}", "none"
            yield rope.fraction == 1.0, "rope.fraction with model.latent", "d_rotary"
            yield turned < width, f"latent.d_rotary={turned} of {width} channels", f"1 to {width - 1}"

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
        return "experts" in _each(self.mlp)

    def layer_mlp(self, layer: int) -> Mlp:
        """Kind of MLP of one layer."""
        return _at(self.mlp, layer)

    def layer_attention(self, layer: int) -> bool:
        """Returns whether a layer attends."""
        return _at(self.attention, layer)

    def layer_window(self, layer: int) -> int | None:
        """The most keys that a query of one layer sees; None for no limit."""
        return _at(self.attention_window, layer)

    def layer_rotates(self, layer: int) -> bool:
        """Returns whether a layer has rotary positions."""
        return self.position == "rotary" and _at(self.rotary_layers, layer)

    def layer_rope(self, layer: int) -> tuple[float, RopeConfig | None]:
        """Base wavelength of rotary positions of one layer, and how they are stretched."""
        if self.rope_local_theta is None or self.layer_window(layer) is None:
            return self.rope_theta, self.rope
        return self.rope_local_theta, None


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _at(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, tuple) else value
