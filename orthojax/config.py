"""What a run is made of: frozen dataclasses that refuse impossible values.

Standard library only, so that a mistyped flag is refused before anything heavy is imported.
"""

import dataclasses
import math
from typing import Literal

from orthojax.errors import UserError
from orthojax.fields import check_types


def _require(holds: bool, problem: str, allowed: str = "") -> None:
    if not holds:
        raise UserError(problem, allowed=allowed)


Position = Literal["learned", "rotary", "none"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm_single", "none"]
NormalizerName = Literal["softmax", "softmax1", "softmax_n", "learned_sink", "relu", "sigmoid", "clipped_softmax"]
AttentionImplementation = Literal["auto", "xla", "xla_chunked", "cudnn", "splash"]
Mlp = Literal["gelu", "relu", "swiglu", "linear", "none"]
RotationKind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
RotationScope = Literal["layer", "parameter", "tree"]
RotationAxes = Literal["output", "input", "both", "residual", "writers", "none"]
OptimizerName = Literal[
    "adam", "orthoadam", "rmsprop", "sgd", "adagrad", "adamax", "amsgrad", "adabelief", "adafactor", "lion", "signum",
    "lamb", "novograd", "ademamix", "muon",
]  # fmt: skip


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
      norm: `rmsnorm_single` has one scalar gain for all channels.
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
      fixed_rotation: Turn what each part writes to the residual stream by a fixed orthogonal matrix of its own.
      relaxed_causal_tokens: The first k tokens see each other (0: plain causal mask).
      embedding_init_std: Standard deviation of the initial embeddings.
      init_std: Standard deviation of initial kernels; residual-writing ones are scaled by 1/sqrt(2 num_layers).
      scan_layers: One compiled block scanned over stacked parameters instead of num_layers unrolled ones.
      remat: Recompute each block in the backward pass instead of keeping its intermediates.
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
    norm_eps: float = 1e-5
    use_bias: bool = False
    normalizer: NormalizerName = "softmax1"
    normalizer_n: float = 1.0
    normalizer_gamma: float = -0.025
    normalizer_zeta: float = 1.0
    attention_implementation: AttentionImplementation = "auto"
    mlp: Mlp | tuple[Mlp, ...] = "gelu"
    attention: bool | tuple[bool, ...] = True
    gated_attention: bool = False
    tie_embeddings: bool = True
    fixed_rotation: bool = False
    relaxed_causal_tokens: int = 0
    embedding_init_std: float = 0.02
    init_std: float = 0.02
    scan_layers: bool = True
    remat: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        check_types(self, "model")
        for name in ("vocab_size", "max_length", "d_model", "num_layers", "num_heads", "d_mlp"):
            value = getattr(self, name)
            _require(value > 0, f"model.{name}={value}", "a positive number")
        _require(
            self.d_model % self.num_heads == 0,
            f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}",
            f"a multiple of {self.num_heads}",
        )
        kv = self.kv_heads
        _require(
            kv > 0 and self.num_heads % kv == 0,
            f"model.num_kv_heads={kv} does not divide model.num_heads={self.num_heads}",
            f"a divisor of {self.num_heads}",
        )
        _require(
            self.position != "rotary" or self.head_dim % 2 == 0,
            f"model.position='rotary' needs an even head width, but d_model / num_heads = {self.head_dim}",
            "an even d_model / num_heads, or position 'learned' or 'none'",
        )
        _require(
            self.normalizer_n >= 0.0 and math.isfinite(self.normalizer_n),
            f"model.normalizer_n={self.normalizer_n}",
            "a finite number >= 0",
        )
        gamma, zeta = self.normalizer_gamma, self.normalizer_zeta
        _require(-math.inf < gamma <= 0.0, f"model.normalizer_gamma={gamma}", "a finite number <= 0")
        _require(1.0 <= zeta < math.inf, f"model.normalizer_zeta={zeta}", "a finite number >= 1")
        _require(
            0 <= self.relaxed_causal_tokens <= self.max_length,
            f"model.relaxed_causal_tokens={self.relaxed_causal_tokens}",
            f"0 to model.max_length={self.max_length}",
        )
        _require(
            not (self.fixed_rotation and self.scan_layers),
            "model.fixed_rotation differs between layers, which a scan over layers cannot express",
            "model.scan_layers=false",
        )
        for name in ("norm_eps", "init_std", "embedding_init_std", "rope_theta"):
            value = getattr(self, name)
            _require(value > 0.0 and math.isfinite(value), f"model.{name}={value}", "a finite positive number")
        for name in ("mlp", "attention"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                _require(
                    len(value) == self.num_layers,
                    f"model.{name} names {len(value)} layers, but model.num_layers={self.num_layers}",
                    "one value, or one for each layer",
                )
                _require(
                    not self.scan_layers or len(set(value)) == 1,
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

    def layer_mlp(self, layer: int) -> Mlp:
        """Kind of MLP of one layer."""
        return self.mlp[layer] if isinstance(self.mlp, tuple) else self.mlp

    def layer_attention(self, layer: int) -> bool:
        """Whether one layer attends."""
        return self.attention[layer] if isinstance(self.attention, tuple) else self.attention


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """The basis of OrthoAdam; the meanings stand in `orthojax.Rotation`.

    Attributes:
      kind: Which orthogonal matrix.
      axes: Which axes of every kernel: its last (`output`), the one before (`input`), `both`, the d_model axis of
        every kernel (`residual`) or of those that write to the residual stream only (`writers`), or `none`.
      embeddings: Whether embedding tables are rotated too, along d_model.
      scope: One matrix for every layer of every parameter, or the wider controls.
      seed: Seed of the matrices; independent of the run's seed.
    """

    kind: RotationKind = "hadamard"
    axes: RotationAxes = "output"
    embeddings: bool = True
    scope: RotationScope = "layer"
    seed: int = 0

    def __post_init__(self):
        check_types(self, "optim.rotation")
        _require(0 <= self.seed < 2**32, f"optim.rotation.seed={self.seed}", "0 to 2**32 - 1")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule (linear warm-up, then cosine decay).

    Attributes:
      optimizer: `adam` is AdamW where `weight_decay` > 0; `rmsprop` is Adam with b1 = 0 (the paper does not say);
        `signum` is the sign of momentum; `muon` treats embeddings and vectors with Adam.
      rotated: Run the optimizer in the basis of `rotation`; `orthoadam` is `adam` with this.
      learning_rate: Peak learning rate.
      warmup_steps: Steps of linear warm-up from 0.
      final_learning_rate_fraction: Learning rate at the last step as a fraction of the peak; 1 keeps it constant.
      b1: Decay of the first moment, where there is one (of Lion: the first of its two).
      b2: Decay of the second moment, where there is one (of Lion: of its momentum).
      eps: Added to the root of the second moment.
      momentum: Of `sgd`, `signum` and `muon`; 0 for plain SGD.
      weight_decay: Decoupled, scaled by the learning rate; on kernels and embeddings only.
      clip_norm: Largest global gradient norm; None never clips.
      rotation: The basis of `orthoadam`, and of any other that is `rotated`.
      layer_by_layer: `orthoadam` goes through scanned layers one by one, for less temporary memory.
    """

    optimizer: OptimizerName = "orthoadam"
    rotated: bool = False
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    rotation: RotationConfig = RotationConfig()
    layer_by_layer: bool = False

    def __post_init__(self):
        check_types(self, "optim")
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            _require(value > 0.0 and math.isfinite(value), f"optim.{name}={value}", "a finite positive number")
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            _require(0.0 <= value < 1.0, f"optim.{name}={value}", "0 <= value < 1")
        finite = math.isfinite(self.weight_decay)
        _require(self.weight_decay >= 0.0 and finite, f"optim.weight_decay={self.weight_decay}", "a finite number >= 0")
        _require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps}", "a number >= 0")
        value = self.final_learning_rate_fraction
        _require(0.0 <= value <= 1.0, f"optim.final_learning_rate_fraction={value}", "0 to 1")
        _require(
            self.momentum == 0.0 or self.optimizer in ("sgd", "signum", "muon"),
            f"optim.momentum={self.momentum} is not read by optim.optimizer={self.optimizer!r}",
            "0, or optimizer 'sgd', 'signum' or 'muon'; the others have b1 or no momentum",
        )
        _require(
            not (self.rotated and self.optimizer == "orthoadam"),
            "optim.rotated=true with optim.optimizer='orthoadam', which is rotated anyway",
            "optimizer 'orthoadam' alone, or 'adam' with rotated",
        )
        _require(
            not self.layer_by_layer or self.optimizer == "orthoadam",
            f"optim.layer_by_layer=true is not read by optim.optimizer={self.optimizer!r}",
            "false, or optimizer 'orthoadam'",
        )
        _require(self.clip_norm is None or self.clip_norm > 0.0, f"optim.clip_norm={self.clip_norm}", "none or > 0")

    @property
    def is_rotated(self) -> bool:
        """Whether the optimizer runs in the basis of `rotation`."""
        return self.rotated or self.optimizer == "orthoadam"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
      kind: `embedded` is Python's own standard library, `text` reads the text or jsonl files in `paths`, `tokens` a
        train and a validation token file made by launch/prepare_data.py, `bigram_backcopy` is the synthetic task.
      paths: Files of `text` (any number) or `tokens` (two: train, validation).
      tokenizer: `bytes`, `bpe:N` (trained on the corpus, N ids) or the path of a tokenizer.json.
      sequence_length: Input positions of one row.
      bos: Start every row with the beginning-of-sequence token.
      seed: Seed of the order of the rows.
      trigger_count: Bigram-Backcopy: the k most frequent characters are triggers.
    """

    kind: Literal["embedded", "text", "tokens", "bigram_backcopy"] = "embedded"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bpe:2048"
    sequence_length: int = 64
    bos: bool = False
    seed: int = 0
    trigger_count: int = 3

    def __post_init__(self):
        check_types(self, "data")
        _require(self.sequence_length >= 2, f"data.sequence_length={self.sequence_length}", "at least 2")
        _require(self.trigger_count >= 1, f"data.trigger_count={self.trigger_count}", "at least 1")
        _require(0 <= self.seed < 2**32, f"data.seed={self.seed}", "0 to 2**32 - 1")
        if self.kind == "text":
            _require(len(self.paths) > 0, "data.kind='text' without files", "data.paths=FILE[,FILE...]")
        elif self.kind == "tokens":
            _require(
                len(self.paths) == 2,
                f"data.kind='tokens' with {len(self.paths)} files",
                "data.paths=TRAIN.bin,VALIDATION.bin",
            )
        else:
            _require(
                not self.paths,
                f"data.paths={self.paths} is not read by data.kind={self.kind!r}",
                "kind 'text' or 'tokens'",
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Attributes:
      steps: Optimizer steps.
      batch_size: Sequences per step.
      seed: Seed of the initial parameters.
      init_from: A checkpoint or workdir whose parameters are the initial ones instead, as for fine-tuning; the
        optimizer starts anew.
      allow_normalizer_change: Let the model's normalizer differ from that of `init_from`.
      log_every_steps: Steps between lines of metrics.jsonl.
      eval_every_steps: Steps between validation losses; 0 leaves them out.
      checkpoint_every_steps: Steps between checkpoints; one is also written at the end and on SIGTERM or Ctrl-C.
      keep_checkpoints: How many of the newest checkpoints stay.
    """

    steps: int = 1000
    batch_size: int = 16
    seed: int = 0
    init_from: str = ""
    allow_normalizer_change: bool = False
    log_every_steps: int = 20
    eval_every_steps: int = 100
    checkpoint_every_steps: int = 100
    keep_checkpoints: int = 2

    def __post_init__(self):
        check_types(self, "train")
        for name in ("steps", "batch_size", "log_every_steps", "checkpoint_every_steps", "keep_checkpoints"):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name}={value}", "at least 1")
        _require(self.eval_every_steps >= 0, f"train.eval_every_steps={self.eval_every_steps}", "at least 0")
        _require(0 <= self.seed < 2**32, f"train.seed={self.seed}", "0 to 2**32 - 1")
        _require(
            bool(self.init_from) or not self.allow_normalizer_change,
            "train.allow_normalizer_change without a checkpoint to start from",
            "with train.init_from=DIR",
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The fixed evaluation set: rows of the validation split.

    Attributes:
      sequences: Number of sequences, spread evenly over the split; a multiple of `batch_size`.
      batch_size: Sequences per batch, and the set over which dynamic quantisation scales are taken.
    """

    sequences: int = 256
    batch_size: int = 32

    def __post_init__(self):
        check_types(self, "eval")
        _require(self.batch_size >= 1, f"eval.batch_size={self.batch_size}", "at least 1")
        _require(
            self.sequences >= 1 and self.sequences % self.batch_size == 0,
            f"eval.sequences={self.sequences} is not a positive multiple of eval.batch_size={self.batch_size}",
            f"a multiple of {self.batch_size}",
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self):
        check_types(self, "config")
        length = self.data.sequence_length
        _require(
            self.model.position != "learned" or length <= self.model.max_length,
            f"data.sequence_length={length} is longer than model.max_length={self.model.max_length}",
            f"at most {self.model.max_length} where positions are learned",
        )
        _require(
            self.model.relaxed_causal_tokens < length,
            f"model.relaxed_causal_tokens={self.model.relaxed_causal_tokens} leaves no loss position",
            f"less than data.sequence_length={length}",
        )
        _require(
            self.optim.warmup_steps < self.train.steps,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of train.steps={self.train.steps}",
            f"less than {self.train.steps}",
        )
