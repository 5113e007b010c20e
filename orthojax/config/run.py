"""The config of a run: optimizer, data, mesh, training and evaluation, and all of them together with the model."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Literal, get_args

from orthojax.config.fields import NOT_NEGATIVE, POSITIVE, SEED, SHARE, Check, Range, check_fields, require, setting
from orthojax.config.model import ModelConfig
from orthojax.errors import UserError, nearest

_DECAY = Range(lambda x: 0.0 <= x < 1.0, "0 <= value < 1")
_DEVICES = Range(lambda size: size == -1 or size >= 1, "at least 1, or -1 for all devices left")

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
    seed: int | None = setting(None, SEED)

    def __post_init__(self):
        check_fields(self, "optim.rotation")


_MOMENTS = ("float32", "bfloat16", "int8", "int4")  # dtypes


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule (linear warm-up, then cosine decay).

    Attributes:
      optimizer: `adam` is AdamW if `weight_decay` > 0; `rmsprop` is Adam with b1 = 0 (the paper does not specify it);
        `muon` updates vectors with Adam, and embeddings by `muon_embeddings`. Any other optimizer is given as
        `module:function`: a function of this config that returns an optax transformation without learning rate and
        weight decay, such as `mine:soap`.
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
      mu_dtype: Dtype of first moments and of Muon's momentum; `int8` and `int4` (not of Muon) keep blocks with a scale.
      nu_dtype: Dtype of second moments; those of bfloat16 hardly move with b2 = 0.999, `int8` and `int4` keep the root.
      ns_dtype: Dtype of Muon's Newton-Schulz steps, and of what devices exchange for them.
      weight_decay: Decoupled weight decay, scaled by the learning rate; only on kernels and embeddings.
      clip_norm: Largest global gradient norm; None never clips.
      rotation: The basis of `orthoadam`, and of any other optimizer that is `rotated`.
    """

    optimizer: OptimizerName | str = "orthoadam"
    rotated: bool = False
    learning_rate: float = setting(1e-3, POSITIVE)
    warmup_steps: int = setting(100, NOT_NEGATIVE)
    final_learning_rate_fraction: float = setting(0.1, SHARE)
    b1: float = setting(0.9, _DECAY)
    b2: float = setting(0.999, _DECAY)
    eps: float = setting(1e-8, POSITIVE)
    momentum: float | None = setting(None, _DECAY)
    muon_embeddings: Literal["muon", "adam", "orthoadam"] | None = None
    mu_dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    nu_dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    clip_norm: float | None = setting(1.0, POSITIVE)
    rotation: RotationConfig = RotationConfig()

    def __post_init__(self):
        check_fields(self, "optim", self._checks)
        if self.momentum == 0.0 and self.optimizer != "muon":  # as configs of 0.1.0 say
            object.__setattr__(self, "momentum", None)

    def _checks(self) -> list[Check]:
        known, name, embeddings = get_args(OptimizerName), self.optimizer, self.muon_embeddings
        if name not in known and not re.fullmatch(r"[\w.]+:\w+", name):
            allowed = f"{' | '.join(known)}, or module:function"
            raise UserError(f"optim.optimizer={name!r} is not valid", allowed=allowed, hint=nearest(name, known))
        by_name, chosen = f"is not read by optim.optimizer={name!r}", f"muon_embeddings={embeddings!r}"
        allowed = {"muon": ("float32", "bfloat16"), "adam": _MOMENTS, "orthoadam": _MOMENTS}.get(name, ("float32",))
        return [
            (all(dtype in allowed for dtype in (self.mu_dtype, self.nu_dtype)),
             f"mu_dtype={self.mu_dtype!r}, nu_dtype={self.nu_dtype!r} {by_name}", " | ".join(allowed)),
            (self.ns_dtype == "float32" or name == "muon" or ":" in name, f"ns_dtype={self.ns_dtype!r} {by_name}",
             "float32"),
            (not self.momentum or name in ("sgd", "muon") or ":" in name, f"momentum={self.momentum} {by_name}",
             "none, or optimizer 'sgd' or 'muon'; the others have b1 or no momentum"),
            (embeddings is None or name == "muon", f"{chosen} {by_name}", "none, or optimizer 'muon'"),
            (embeddings != "orthoadam" or (self.rotation.embeddings and not self.rotated),
             f"{chosen} with optim.rotated={self.rotated}, optim.rotation.embeddings={self.rotation.embeddings}",
             "optim.rotated=false, which rotates all parameters, and optim.rotation.embeddings=true"),
        ]  # fmt: skip

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
      kind: `embedded` is Python's own standard library, `text` reads the text or jsonl files in `paths`, `tokens`
        token files made by orthojax prepare or datatrove, `bigram_backcopy` is the synthetic task.
      paths: For `text`, files, folders and patterns (any number); for `tokens`, the train and the validation file, or a
        pattern of several for each; for `bigram_backcopy`, the text whose characters are counted, by default the
        standard library's documentation.
      tokenizer: `bytes`, `bpe:N` (trained on the corpus, N ids) or the path of a tokenizer: a tokenizer.json, GPT-2's
        vocab.json beside its merges.txt, or a sentencepiece .model. `tokens` needs none: the files name theirs, except
        those of datatrove.
      sequence_length: Input positions of one row.
      bos: Start every row of text with the beginning-of-sequence token.
      pack: Fill the rows of training with whole documents, which do not see each other: see
        `orthojax.data.PackedBatches`. Rows of evaluation stay plain.
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
    sequence_length: int = setting(64, Range(lambda length: 2 <= length <= 2**24, "2 to 2**24"))
    bos: bool = False
    pack: bool = False
    seed: int = setting(0, SEED)
    repeated_share: float = setting(0.0, SHARE)
    trigger_count: int = setting(3, POSITIVE)
    rule: TriggerRule = "backcopy"
    other_rule: TriggerRule = "markov"
    other_rule_probability: float = setting(0.0, SHARE)
    bos_tokens: Literal[0, 1, 2] = 1
    delimiter: bool = False
    verify: bool = setting(False, affects="nothing")

    def __post_init__(self):
        check_fields(self, "data", self._checks)

    def _checks(self) -> list[Check]:
        kind, files, length = self.kind, len(self.paths), self.sequence_length
        of_kind = f"is not read by data.kind={kind!r}"
        return [
            (not self.pack or kind != "bigram_backcopy", f"pack with data.kind={kind!r}", "kinds with text"),
            (kind != "text" or files > 0, "kind='text' without files", "data.paths=FILE[,FILE...]"),
            (kind != "tokens" or files == 2, f"kind='tokens' with {files} files",
             "data.paths=TRAIN.bin,VALIDATION.bin, or a pattern of files for each"),
            (kind != "embedded" or not files, f"paths={self.paths} {of_kind}",
             "data.kind=text | tokens | bigram_backcopy"),
            (not self.repeated_share or kind in ("embedded", "text"), f"repeated_share={self.repeated_share} {of_kind}",
             "kind 'embedded' or 'text'"),
            (not self.delimiter or self.middle > self.bos_tokens, f"delimiter with data.sequence_length={length}",
             f"a sequence_length of at least {2 * self.bos_tokens + 1}"),
        ]  # fmt: skip

    @property
    def row_length(self) -> int:
        """Returns the ids in a row: inputs and the last target; if packed, twice as many."""
        return (1 + self.pack) * (self.sequence_length + 1)

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
      gather_table: Gather an `fsdp` part of the token embedding once a step, in the model's dtype, for look-ups and a
        tied head; otherwise each gathers its own. Less is sent, and each device holds the table for longer.
    """

    data: int = setting(1, _DEVICES, affects="computation")
    fsdp: int = setting(1, _DEVICES, affects="computation")
    tensor: int = setting(1, _DEVICES, affects="computation")
    gather_table: bool = setting(False, affects="computation")

    def __post_init__(self):
        check_fields(self, "mesh")
        free = (self.data, self.fsdp, self.tensor).count(-1)
        require(free <= 1, f"mesh {dataclasses.asdict(self)} has more than one -1", "-1 in at most one of the sizes")

    def sizes(self, device_count: int) -> tuple[int, int, int]:
        """Returns (data, fsdp, tensor) on this many devices.

        Raises UserError if there are too few devices, or the rest does not divide.

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
      matmul_format: Rounds all products with kernels of the blocks, forward and backward, to this format, simulated in
        floats (see `orthojax.train.low_precision.Recipe`); head, embeddings and their projections, routers, attention
        and optimizer are not. Empty: floats.
      matmul_stochastic: Round gradients to either neighbour, the nearer the likelier; of formats of 4 bits.
      matmul_hadamard: Mix every 16 tokens at random before the product that gives a kernel's gradient; likewise.
      matmul_square: Give kernels square blocks, so that they round alike forward and backward; likewise.
      steps_per_dispatch: Maximum number of optimizer steps in one compiled call, so that small steps do not wait for
        Python; None takes as many as pay off, which is 1 on accelerators. A call ends whenever something is probed,
        validated or saved, and signals wait for its end. On a CPU it does not change a bit of the results.
      compiler_options: Options of XLA for the training step, NAME=VALUE: "xla_gpu_enable_triton_gemm=false", say.
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
      probe_sequences: Rows of a probe, taken from the `eval.sequences`; all of them if there are fewer. On a mesh up to
        the next number of rows that divides over the devices.
      tensorboard: Also write metrics.jsonl as TensorBoard events, under tensorboard/.
      wandb: Also log metrics.jsonl to Weights & Biases, one run for each workdir; WANDB_MODE=offline keeps it on disk.
      eval_every_steps: Steps between validation losses; 0 leaves them out.
      checkpoint_every_steps: Steps between checkpoints; one is also written at the end and on SIGTERM or Ctrl-C.
      keep_checkpoints: Newest checkpoints to keep; with 2, a run can resume if the newest is corrupt.
      keep_every_steps: Checkpoints at multiples of this are never deleted; 0: none.
    """

    steps: int = setting(1000, POSITIVE)
    batch_size: int = setting(16, POSITIVE)
    accumulation_steps: int = setting(1, POSITIVE, affects="computation")
    logits_dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", affects="computation")
    matmul_format: Literal["", "nvfp4", "mxfp4", "fp8"] = setting("")
    matmul_stochastic: bool = setting(True)
    matmul_hadamard: bool = setting(True)
    matmul_square: bool = setting(True)
    steps_per_dispatch: int | None = setting(None, POSITIVE, affects="computation")
    compiler_options: tuple[str, ...] = setting((), affects="computation")
    activation_penalty: float = setting(0.0, NOT_NEGATIVE)
    seed: int = setting(0, SEED)
    init_from: str = setting("", affects="start")
    allow_normalizer_change: bool = setting(False, affects="start")
    log_every_steps: int = setting(20, POSITIVE, affects="nothing")
    probe_every_steps: int = setting(100, NOT_NEGATIVE, affects="nothing")
    probe_steps: tuple[int, ...] = setting((), NOT_NEGATIVE, affects="nothing")
    probe: str = setting("", affects="nothing")
    probe_sequences: int = setting(8, POSITIVE, affects="nothing")
    tensorboard: bool = setting(False, affects="nothing")
    wandb: bool = setting(False, affects="nothing")
    eval_every_steps: int = setting(100, NOT_NEGATIVE, affects="nothing")
    checkpoint_every_steps: int = setting(100, POSITIVE, affects="nothing")
    keep_checkpoints: int = setting(2, POSITIVE, affects="nothing")
    keep_every_steps: int = setting(0, NOT_NEGATIVE, affects="nothing")

    def __post_init__(self):
        check_fields(self, "train", self._checks)

    def _checks(self) -> list[Check]:
        every, kept = self.checkpoint_every_steps, self.keep_every_steps
        return [
            (kept % every == 0, f"keep_every_steps={kept}", f"0, or a multiple of checkpoint_every_steps={every}"),
            (bool(self.init_from) or not self.allow_normalizer_change,
             "allow_normalizer_change without another start", "with train.init_from=DIR"),
            (self.matmul_format.endswith("fp4")
             or (self.matmul_stochastic and self.matmul_hadamard and self.matmul_square),
             f"parts of a recipe of 4 bits switched off with matmul_format={self.matmul_format!r}", "nvfp4 | mxfp4"),
        ]  # fmt: skip

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

    sequences: int = setting(256, POSITIVE)
    batch_size: int = setting(32, POSITIVE)

    def __post_init__(self):
        check_fields(self, "eval")


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
        check_fields(self, "config", self._checks)

    def _checks(self) -> Iterator[Check]:
        model, length, steps, warmup = self.model, self.data.sequence_length, self.train.steps, self.optim.warmup_steps
        yield from [
            (model.position != "learned" or length <= model.max_length,
             f"data.sequence_length={length} is longer than model.max_length={model.max_length}",
             f"at most {model.max_length} if positions are learned"),
            (model.relaxed_causal_tokens < length,
             f"model.relaxed_causal_tokens={model.relaxed_causal_tokens} leaves no loss position",
             f"less than data.sequence_length={length}"),
            (warmup < steps, f"optim.warmup_steps={warmup} leaves nothing of train.steps={steps}",
             f"optim.warmup_steps of 0 to {steps - 1}"),
            (model.dtype != "float16",
             "model.dtype='float16', in which small gradients are lost: training has no loss scaling",
             "'float32' or 'bfloat16'"),
        ]  # fmt: skip
        if -1 not in (self.mesh.data, self.mesh.fsdp):
            yield from self._checks_of_rows(self.mesh.data * self.mesh.fsdp)

    def _checks_of_rows(self, shares: int) -> list[Check]:
        train, evaluation, rows = self.train.batch_size, self.eval.batch_size, shares * self.train.accumulation_steps
        by = "is not divisible by mesh.data * mesh.fsdp"
        return [
            (train % rows == 0, f"train.batch_size={train} {by} * train.accumulation_steps = {rows}",
             f"a multiple of {rows}"),
            (evaluation % shares == 0, f"eval.batch_size={evaluation} {by} = {shares}", f"a multiple of {shares}"),
        ]  # fmt: skip

    @property
    def seeded_optim(self) -> OptimConfig:
        """Returns `optim`, with the run's seed for a rotation that has no seed of its own."""
        if not self.optim.has_rotation or self.optim.rotation.seed is not None:
            return self.optim
        return dataclasses.replace(self.optim, rotation=dataclasses.replace(self.optim.rotation, seed=self.train.seed))

    def mesh_sizes(self, device_count: int) -> tuple[int, int, int]:
        """Returns `MeshConfig.sizes`, after checking that batches divide over them.

        Raises UserError if the devices are too few, or a batch does not divide.
        """
        data, fsdp, tensor = self.mesh.sizes(device_count)
        for check in self._checks_of_rows(data * fsdp):
            require(*check)
        return data, fsdp, tensor
