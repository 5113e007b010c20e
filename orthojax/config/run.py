"""The config of a run: optimizer, data, mesh, training and evaluation, and all of them together with the model."""

import dataclasses
import math
import re
from typing import Literal, get_args

from orthojax.config.fields import check_types, require, require_each, require_seed, setting
from orthojax.config.model import ModelConfig
from orthojax.errors import UserError, nearest

OptimizerName = Literal["adam", "orthoadam", "rmsprop", "sgd", "lion", "muon"]
TriggerRule = Literal["backcopy", "in_context_bigram", "bigram_backward", "markov", "skip_bigram"]
"""The rule for the token after a trigger of Bigram-Backcopy; see `orthojax.data.BigramBackcopy`."""


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """The basis of OrthoAdam; see `orthojax.Rotation` for what the fields mean.

    Attributes:
      kind: Kind of orthogonal matrix.
      axes: Rotated axes of every kernel: its last (`output`), the one before it (`input`), `both`, the d_model axis of
        every kernel (`d_model`; if it reads latents or values, that axis) or of only those that write to the residual
        stream (`writers`), or `none`. With `output` the first token had outliers after 10,000 steps.
      embeddings: Rotate embedding tables as well, along d_model.
      scope: One matrix for every layer of every parameter, or one of the wider controls.
      seed: Seed of the matrices; None takes the run's, `train.seed`.
    """

    kind: Literal["haar", "hadamard", "dct", "identity", "signed_permutation"] = "hadamard"
    axes: Literal["output", "input", "both", "d_model", "writers", "none"] = "d_model"
    embeddings: bool = True
    scope: Literal["layer", "parameter", "tree"] = "layer"
    seed: int | None = None

    def __post_init__(self):
        check_types(self, "optim.rotation")
        require_seed(self, "optim.rotation")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule (linear warm-up, then cosine decay).

    Attributes:
      optimizer: `adam` is AdamW if `weight_decay` > 0; `rmsprop` is Adam with b1 = 0 (the paper does not specify it);
        `muon` updates vectors with Adam, and embeddings by `muon_embeddings`. Any other optimizer is given as
        `module:function`: a function of this config that returns an optax transformation without learning rate and
        weight decay, such as `orthojax.experiments.ours.soap:soap`.
      rotated: Run the optimizer in the basis of `rotation`; `orthoadam`, which is `adam` with this, always does.
      learning_rate: Peak learning rate.
      warmup_steps: Steps of linear warm-up from 0.
      final_learning_rate_fraction: Learning rate after the last step as a fraction of the peak; 1 keeps it constant.
      b1: Decay of the first moment, if there is one (for Lion, the first of its two).
      b2: Decay of the second moment, if there is one (for Lion, of its momentum).
      eps: Added to the root of the second moment.
      momentum: Momentum of `sgd` and `muon`; None is 0.95 for `muon` and 0, plain SGD, for `sgd`.
      muon_embeddings: With `muon`, the optimizer of the embeddings and the head. OSP, arXiv 2506.19697, compares
        `muon`, there for all matrices, with `adam`; `orthoadam` is Adam in the basis of `rotation`, along d_model. None
        is Adam for embeddings and Muon for an untied head.
      weight_decay: Decoupled weight decay, scaled by the learning rate; only on kernels and embeddings.
      clip_norm: Largest global gradient norm; None never clips.
      rotation: The basis of `orthoadam`, and of any other optimizer that is `rotated`.
      sink_anneal_steps: Instead of learning sink logits, move them linearly from their initial value to 0 in this many
        steps: from softmax to softmax-1. 0 learns them.
    """

    optimizer: OptimizerName | str = "orthoadam"
    rotated: bool = False
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float | None = None
    muon_embeddings: Literal["muon", "adam", "orthoadam"] | None = None
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    rotation: RotationConfig = RotationConfig()
    sink_anneal_steps: int = 0

    def __post_init__(self):
        check_types(self, "optim")
        if self.momentum == 0.0 and self.optimizer != "muon":  # as configs of 0.1.0 say
            object.__setattr__(self, "momentum", None)
        known = get_args(OptimizerName)
        if self.optimizer not in known and not re.fullmatch(r"[\w.]+:\w+", self.optimizer):
            problem = f"optim.optimizer={self.optimizer!r} is not valid"
            allowed = f"{' | '.join(known)}, or module:function"
            raise UserError(problem, allowed=allowed, hint=nearest(self.optimizer, known))
        require_each(self, "optim", "learning_rate eps", lambda x: x > 0.0, "a finite positive number")
        require_each(self, "optim", "b1 b2 momentum", lambda x: 0.0 <= x < 1.0, "0 <= value < 1")
        require_each(self, "optim", "weight_decay", lambda x: x >= 0.0, "a finite number >= 0")
        require_each(self, "optim", "warmup_steps sink_anneal_steps", lambda steps: steps >= 0, "a number >= 0")
        require_each(self, "optim", "final_learning_rate_fraction", lambda x: 0.0 <= x <= 1.0, "0 to 1")
        require_each(self, "optim", "clip_norm", lambda norm: norm > 0.0, "none, or a finite number > 0")
        require(
            self.momentum is None or self.optimizer in ("sgd", "muon") or ":" in self.optimizer,
            f"optim.momentum={self.momentum} is not read by optim.optimizer={self.optimizer!r}",
            "none, or optimizer 'sgd' or 'muon'; the others have b1 or no momentum",
        )
        chosen = f"optim.muon_embeddings={self.muon_embeddings!r}"
        require(
            self.muon_embeddings is None or self.optimizer == "muon",
            f"{chosen} is not read by optim.optimizer={self.optimizer!r}",
            "none, or optimizer 'muon'",
        )
        require(
            self.muon_embeddings != "orthoadam" or (self.rotation.embeddings and not self.rotated),
            f"{chosen} with optim.rotated={self.rotated}, optim.rotation.embeddings={self.rotation.embeddings}",
            "optim.rotated=false, which rotates all parameters, and optim.rotation.embeddings=true",
        )

    @property
    def momentum_or_default(self) -> float | None:
        """The momentum with which `sgd` or `muon` runs; None for other optimizers, unless it is set."""
        return {"muon": 0.95, "sgd": 0.0}.get(self.optimizer) if self.momentum is None else self.momentum

    @property
    def is_rotated(self) -> bool:
        """True if the optimizer runs in the basis of `rotation`."""
        return self.rotated or self.optimizer == "orthoadam"

    @property
    def has_rotation(self) -> bool:
        """True if the optimizer, or only that of the embeddings, runs in the basis of `rotation`."""
        return self.is_rotated or self.muon_embeddings == "orthoadam"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The source of the tokens.

    Attributes:
      kind: `embedded` is Python's own standard library, `text` reads the text or jsonl files in `paths`, `tokens` a
        train and a validation token file made by orthojax prepare, `bigram_backcopy` is the synthetic task.
      paths: For `text`, files, folders and patterns (any number); for `tokens`, the train and the validation file; for
        `bigram_backcopy`, the text whose characters are counted, by default the standard library's documentation.
      tokenizer: `bytes`, `bpe:N` (trained on the corpus, N ids) or the path of a tokenizer: a tokenizer.json, GPT-2's
        vocab.json beside its merges.txt, or a sentencepiece .model. `tokens` needs none: the files name theirs.
      sequence_length: Input positions of one row.
      bos: Start every row of text with the beginning-of-sequence token.
      objective: What is predicted: the next token; 15% of the tokens, most of them masked (`masked`, for
        `model.attention_mask='full'`); or 15% of the tokens, which are cut out in spans (`span_corruption`, for
        `prefix`). See `orthojax.data.objectives`. Ids for masks and spans are the last ones of the model's vocabulary.
      seed: Seed of the order of the rows.
      repeated_share: For `embedded` and `text`: the fraction, 0 to 1, of passages (40 to 110 characters) that the text
        repeats at once, as quotations, logs and boilerplate do; see `orthojax.data.repeat_passages`.
      trigger_count: Bigram-Backcopy: the k most frequent characters are triggers.
      rule: Bigram-Backcopy: what follows a trigger: a copy of the token before it (`backcopy`), a token that the
        sequence has drawn for this trigger (`in_context_bigram`), what could follow the token before it
        (`bigram_backward`), or what follows it in the text (`markov`). With `skip_bigram`, every token, not only a
        trigger, is followed by what could follow the token before it.
      other_rule: Bigram-Backcopy: what follows a trigger instead, with `other_rule_probability`, drawn at each trigger.
      other_rule_probability: Probability of `other_rule`, 0 to 1.
      bos_tokens: Bigram-Backcopy: BOS tokens at the start of every row, each with its own id: 0, 1 or 2.
      delimiter: Bigram-Backcopy: whether every row has a delimiter in the middle; after it, triggers are ordinary
        tokens.
      verify: Compare the sha256 of token files when they are opened, which reads them whole; otherwise only their
        sizes are compared, except for files of up to 256 MB.
    """

    kind: Literal["embedded", "text", "tokens", "bigram_backcopy"] = "embedded"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bpe:2048"
    sequence_length: int = 64
    bos: bool = False
    objective: Literal["next_token", "masked", "span_corruption"] = "next_token"
    seed: int = 0
    repeated_share: float = 0.0
    trigger_count: int = 3
    rule: TriggerRule = "backcopy"
    other_rule: TriggerRule = "markov"
    other_rule_probability: float = 0.0
    bos_tokens: Literal[0, 1, 2] = 1
    delimiter: bool = False
    verify: bool = setting(False, affects="nothing")

    def __post_init__(self):
        check_types(self, "data")
        require_each(self, "data", "sequence_length", lambda length: 2 <= length <= 2**24, "2 to 2**24")
        require_each(self, "data", "trigger_count", lambda count: count >= 1, "at least 1")
        require_each(self, "data", "repeated_share other_rule_probability", lambda share: 0.0 <= share <= 1.0, "0 to 1")
        require_seed(self, "data")
        corrupted = f"data.objective={self.objective!r} with data."
        plain = self.objective == "next_token"
        require(plain or self.kind != "bigram_backcopy", f"{corrupted}kind={self.kind!r}", "kinds with text")
        short = f"{corrupted}sequence_length={self.sequence_length}"
        require(plain or self.sequence_length >= 8, short, "a sequence_length of at least 8")
        files = len(self.paths)
        require(self.kind != "text" or files > 0, "data.kind='text' without files", "data.paths=FILE[,FILE...]")
        two = "data.paths=TRAIN.bin,VALIDATION.bin"
        require(self.kind != "tokens" or files == 2, f"data.kind='tokens' with {files} files", two)
        ignored = f"data.paths={self.paths} is not read by data.kind={self.kind!r}"
        require(self.kind != "embedded" or not files, ignored, "data.kind=text | tokens | bigram_backcopy")
        ignored = f"data.repeated_share={self.repeated_share} is not read by data.kind={self.kind!r}"
        require(not self.repeated_share or self.kind in ("embedded", "text"), ignored, "kind 'embedded' or 'text'")
        short = f"data.delimiter with data.sequence_length={self.sequence_length}"
        least = f"a sequence_length of at least {2 * self.bos_tokens + 1}"
        require(not self.delimiter or self.middle > self.bos_tokens, short, least)

    @property
    def row_length(self) -> int:
        """Returns the ids in a row: inputs and the last target, or for another objective inputs and targets."""
        return self.sequence_length + 1 if self.objective == "next_token" else 2 * self.sequence_length

    @property
    def middle(self) -> int:
        """Returns the position of a delimiter."""
        return (self.sequence_length + 1) // 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The arrangement of a run's devices; -1 for one of the sizes takes all devices that the others leave.

    A run's numbers do not depend on the mesh, beyond rounding, and a checkpoint can be resumed on another mesh.

    Attributes:
      data: Replicas of the parameters, each with its own rows of the batch; the optimizer's moments are sharded over
        them (ZeRO stage 1).
      fsdp: Shards of parameters, gradients and moments, each with its own rows (ZeRO stage 3).
      tensor: Shards of heads, MLP width and vocabulary, which work on the same rows (tensor parallelism).
    """

    data: int = setting(1, affects="computation")
    fsdp: int = setting(1, affects="computation")
    tensor: int = setting(1, affects="computation")

    def __post_init__(self):
        check_types(self, "mesh")
        allowed = "at least 1, or -1 for all devices left"
        require_each(self, "mesh", "data fsdp tensor", lambda size: size == -1 or size >= 1, allowed)
        free = (self.data, self.fsdp, self.tensor).count(-1)
        require(free <= 1, f"mesh {dataclasses.asdict(self)} has more than one -1", "-1 in at most one of the sizes")

    def sizes(self, device_count: int) -> tuple[int, int, int]:
        """Returns (data, fsdp, tensor) on this many devices.

        Raises:
          UserError: If there are too few devices, or the rest does not divide.

        >>> MeshConfig(data=-1, tensor=2).sizes(8)
        (4, 1, 2)
        """
        sizes = (self.data, self.fsdp, self.tensor)
        given = math.prod(size for size in sizes if size != -1)
        problem = (
            f"mesh data={self.data}, fsdp={self.fsdp}, tensor={self.tensor} needs {given} of {device_count} devices"
        )
        most = f"sizes whose product is at most {device_count}; -1 takes all devices that the others leave"
        require(given <= device_count, problem, most)
        divides = f"other sizes whose product divides {device_count}"
        require(-1 not in sizes or device_count % given == 0, problem, divides)
        data, fsdp, tensor = (device_count // given if size == -1 else size for size in sizes)
        return data, fsdp, tensor


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Attributes:
      steps: Optimizer steps.
      batch_size: Sequences per step.
      accumulation_steps: Microbatches that a batch is split into, for less memory; their gradients are accumulated
        before the optimizer's one step.
      logits_dtype: Dtype to which the logits of the training loss are rounded; all that is computed from them is
        float32. `auto` is bfloat16 for a bfloat16 model on an accelerator, else float32.
      steps_per_dispatch: Maximum number of optimizer steps in one compiled call, so that small steps do not wait for
        Python; None takes as many as pay off, which is 1 on accelerators. A call ends whenever something is probed,
        validated or saved, and signals wait for its end. On a CPU it does not change a bit of the results.
      activation_penalty: Factor of a training-loss term that penalises large activations: TWEO's lambda, 0.01 in the
        paper, see `orthojax.train.step.activation_penalty`. Metrics report the loss without it. 0: no term.
      seed: Seed of the initial parameters, and of OrthoAdam's bases unless `optim.rotation.seed` is given.
      init_from: A checkpoint or workdir to take the initial parameters from, as for fine-tuning; the optimizer starts
        from scratch.
      allow_normalizer_change: Let the model's normalizer differ from that of `init_from`.
      log_every_steps: Steps between lines of metrics.jsonl.
      probe_every_steps: Steps between probes of outliers and attention on a few validation rows; 0: none.
      probe_steps: Further steps to probe, each once; 0 is the start.
      probe: Further work at every probe: `module:function`, called with the config, the rows of the probe int32
        [probe_sequences, T + 1] and the folder `probes` of the run; returns a function of (step, parameters).
      probe_sequences: Rows of a probe, taken from the `eval.sequences`; all of them if there are fewer.
      tensorboard: Also write metrics.jsonl as TensorBoard events, under tensorboard/.
      wandb: Also log metrics.jsonl to Weights & Biases, one run for each workdir; WANDB_MODE=offline keeps it on disk.
      eval_every_steps: Steps between validation losses; 0 leaves them out.
      checkpoint_every_steps: Steps between checkpoints; one is also written at the end and on SIGTERM or Ctrl-C.
      keep_checkpoints: Newest checkpoints to keep; with 2, a run can resume if the newest is corrupt.
      keep_every_steps: Checkpoints at multiples of this are never deleted; 0: none.
    """

    steps: int = 1000
    batch_size: int = 16
    accumulation_steps: int = setting(1, affects="computation")
    logits_dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", affects="computation")
    steps_per_dispatch: int | None = setting(None, affects="computation")
    activation_penalty: float = 0.0
    seed: int = 0
    init_from: str = setting("", affects="start")
    allow_normalizer_change: bool = setting(False, affects="start")
    log_every_steps: int = setting(20, affects="nothing")
    probe_every_steps: int = setting(100, affects="nothing")
    probe_steps: tuple[int, ...] = setting((), affects="nothing")
    probe: str = setting("", affects="nothing")
    probe_sequences: int = setting(8, affects="nothing")
    tensorboard: bool = setting(False, affects="nothing")
    wandb: bool = setting(False, affects="nothing")
    eval_every_steps: int = setting(100, affects="nothing")
    checkpoint_every_steps: int = setting(100, affects="nothing")
    keep_checkpoints: int = setting(2, affects="nothing")
    keep_every_steps: int = setting(0, affects="nothing")

    def __post_init__(self):
        check_types(self, "train")
        positive = "steps batch_size accumulation_steps log_every_steps checkpoint_every_steps keep_checkpoints"
        require_each(self, "train", f"{positive} probe_sequences", lambda n: n >= 1, "at least 1")
        require_each(self, "train", "activation_penalty", lambda x: x >= 0.0, "a finite number >= 0")
        require_each(self, "train", "steps_per_dispatch", lambda n: n >= 1, "none, or at least 1")
        require_each(self, "train", "eval_every_steps probe_every_steps", lambda n: n >= 0, "at least 0")
        require_each(self, "train", "probe_steps", lambda steps: all(s >= 0 for s in steps), "steps of at least 0")
        every = self.checkpoint_every_steps
        kept = f"0, or a multiple of train.checkpoint_every_steps={every}"
        require_each(self, "train", "keep_every_steps", lambda n: n >= 0 and n % every == 0, kept)
        starts = bool(self.init_from) or not self.allow_normalizer_change
        require(starts, "train.allow_normalizer_change without another start", "with train.init_from=DIR")
        require_seed(self, "train")

    def probes_at(self, step: int) -> bool:
        """Returns whether parameters are probed after this many steps."""
        every = self.probe_every_steps
        return step in self.probe_steps or (step > 0 and every > 0 and step % every == 0)

    def validates_at(self, step: int) -> bool:
        """Returns whether the validation loss is measured after this many steps."""
        every = self.eval_every_steps
        return step > 0 and every > 0 and (step % every == 0 or step == self.steps)

    def saves_at(self, step: int) -> bool:
        """Returns whether a checkpoint is written after this many steps."""
        return step % self.checkpoint_every_steps == 0 or step == self.steps


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """The fixed evaluation set: rows of the validation split.

    Attributes:
      sequences: Number of sequences, spread evenly over the split.
      batch_size: Sequences per batch, and the set over which dynamic quantisation scales are taken; the last batch may
        have fewer. If the mesh does not divide that batch, every device takes all of it.
    """

    sequences: int = 256
    batch_size: int = 32

    def __post_init__(self):
        check_types(self, "eval")
        require_each(self, "eval", "batch_size sequences", lambda n: n >= 1, "at least 1")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        check_types(self, "config")
        length = self.data.sequence_length
        require(
            self.model.position != "learned" or length <= self.model.max_length,
            f"data.sequence_length={length} is longer than model.max_length={self.model.max_length}",
            f"at most {self.model.max_length} if positions are learned",
        )
        require(
            self.model.relaxed_causal_tokens < length,
            f"model.relaxed_causal_tokens={self.model.relaxed_causal_tokens} leaves no loss position",
            f"less than data.sequence_length={length}",
        )
        mask, objective = self.model.attention_mask, self.data.objective
        fitting = {"causal": "next_token", "full": "masked", "prefix": "span_corruption"}[mask]
        pair = f"model.attention_mask={mask!r} with data.objective={objective!r}"
        require(objective == fitting, pair, f"objective {fitting!r}")
        require(
            self.optim.warmup_steps < self.train.steps,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of train.steps={self.train.steps}",
            f"optim.warmup_steps of 0 to {self.train.steps - 1}",
        )
        require(
            not self.optim.sink_anneal_steps or self.model.normalizer == "learned_sink",
            f"optim.sink_anneal_steps={self.optim.sink_anneal_steps} with model.normalizer={self.model.normalizer!r}",
            "0, or normalizer 'learned_sink'",
        )
        small = "model.dtype='float16', in which small gradients are lost: training has no loss scaling"
        require(self.model.dtype != "float16", small, "'float32' or 'bfloat16'")
        if -1 not in (self.mesh.data, self.mesh.fsdp):
            self._require_rows(self.mesh.data * self.mesh.fsdp)

    def _require_rows(self, shares: int) -> None:
        rows = shares * self.train.accumulation_steps
        require(
            self.train.batch_size % rows == 0,
            f"train.batch_size={self.train.batch_size} is not divisible by mesh.data * mesh.fsdp * "
            f"train.accumulation_steps = {rows}",
            f"a multiple of {rows}",
        )
        require(
            self.eval.batch_size % shares == 0,
            f"eval.batch_size={self.eval.batch_size} is not divisible by mesh.data * mesh.fsdp = {shares}",
            f"a multiple of {shares}",
        )

    @property
    def seeded_optim(self) -> OptimConfig:
        """Returns `optim`, with the run's seed for a rotation that has no seed of its own."""
        if not self.optim.has_rotation or self.optim.rotation.seed is not None:
            return self.optim
        return dataclasses.replace(self.optim, rotation=dataclasses.replace(self.optim.rotation, seed=self.train.seed))

    def mesh_sizes(self, device_count: int) -> tuple[int, int, int]:
        """Returns `MeshConfig.sizes`, after checking that batches divide over them.

        Raises:
          UserError: If the devices are too few, or a batch does not divide.
        """
        data, fsdp, tensor = self.mesh.sizes(device_count)
        self._require_rows(data * fsdp)
        return data, fsdp, tensor
