"""The runs of From Attention to Activation (arXiv 2410.17174): one table of settings. Values only, without jax.

A file of configs/paper/ is one of the functions here. A run is such a file and what is typed after it, and has the
numbers that the paper's tables print for it (`orthojax.experiments.from_attention.paper_tables`).
"""

import dataclasses
from typing import NamedTuple

from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.experiments.from_attention.paper_tables import TABLE_2, TABLE_3, TABLE_5, TABLE_6
from orthojax.model.presets import gpt2, llama2

# Stated, appendix A: optimizer steps and those of warm-up.
STEPS = {"60m": (160_000, 1_000), "130m": (320_000, 2_000), "350m": (960_000, 6_000), "1.4b": (600_000, 10_000)}
ABLATION_STEPS, SGD_FACTOR = 40_000, 8

# Not stated: what it is, what we take, and the fields that say so in every run but where a run's own changes differ.
NOT_STATED: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("depth, heads", "as GPT-2 of that width: 12 x 512 / 8 heads, 12 x 768 / 12, 24 x 1024 / 16, 24 x 2048 / 16", {}),
    ("Llama 2's MLP, steps", "2,048 wide, which makes 130M; those of GPT-2 130M", {}),
    ("vocabulary", "of GPT-2 50,257 ids in 50,304 rows, a multiple of 128; of Llama 2 32,000", {}),
    ("position table", "1,024 rows at every sequence length", {"model.max_length": 1024}),
    ("initialisation", "normal 0.02; kernels that write to the residual stream divided by sqrt(2 layers)",
     {"model.init_std": 0.02, "model.embedding_init_std": 0.02}),
    ("dropout", "none", {}),
    ("precision", "products in bfloat16; parameters, moments, norms, attention statistics and loss in float32",
     {"model.dtype": "bfloat16"}),
    ("packing", "documents one after the other with an end token between, cut into rows; attention crosses them", {}),
    ("BOS", "none for GPT-2, one in every row for Llama 2", {}),
    ("batch at 512 and 1,024 tokens", "512 sequences and the same steps, so 2 and 4 times the tokens",
     {"train.batch_size": 512}),
    ("weight decay, clipping", "0; global gradient norm 1", {"optim.weight_decay": 0.0, "optim.clip_norm": 1.0}),
    ("final learning rate", "0, where the cosine ends that Hugging Face Transformers has, with which the paper trains",
     {"optim.final_learning_rate_fraction": 0.0}),
    ("Adam's b1, b2, eps", "0.9, 0.999, 1e-8, which the paper prints for OrthoAdam",
     {"optim.b1": 0.9, "optim.b2": 0.999, "optim.eps": 1e-8}),
    ("RMSProp", "Adam with b1 = 0, at Adam's learning rate", {}),
    ("SGD's momentum, warm-up", "0.9; 2,000 steps, as of the other ablations", {}),
    ("the relaxed causal mask's model", "that of the ablation with softmax and Adam; 10 tokens see each other", {}),
    ("LayerNorm's bias", "where linear layers have biases", {}),
    ("seeds", "0 everywhere", {"train.seed": 0, "data.seed": 0, "optim.rotation.seed": None}),
)  # fmt: skip

# Stated, and not done so here: the same.
DIFFERS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("OrthoAdam's matrices", "the paper samples a dense orthogonal matrix for each parameter (section 4.2), which is "
     "`optim.rotation.kind=haar`; here Hadamard after random signs, which keeps no matrix in the state; on the d_model "
     "axis of every kernel and of the embeddings, because in our runs of 10,000 steps the output axis left outliers "
     "of the first token",
     {"optim.rotation.kind": "hadamard", "optim.rotation.axes": "residual", "optim.rotation.embeddings": True}),
)  # fmt: skip


def _config(model: ModelConfig, steps: int, warmup_steps: int, data_folder: str, *, bos: bool) -> Config:
    """One run: what the paper states for all of them, and what `NOT_STATED` and `DIFFERS` say."""
    return Config(
        model=dataclasses.replace(model, dtype="bfloat16"),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=1e-3,
            warmup_steps=warmup_steps,
            final_learning_rate_fraction=0.0,
        ),
        data=DataConfig(
            kind="tokens",
            paths=(f"data/{data_folder}/train.bin", f"data/{data_folder}/validation.bin"),
            sequence_length=256,
            bos=bos,
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=512,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=2_000,
        ),
        eval=EvalConfig(sequences=100_000, batch_size=256),
        mesh=MeshConfig(data=-1),
    )


def gpt2_run(size: str) -> Config:
    """GPT-2 with one scale in every norm and no biases, softmax and Adam: the vanilla rows.

    Args:
      size: "60m" | "130m" | "350m" | "1.4b".
    """
    model = gpt2(size, norm="rmsnorm_single", use_bias=False, vocab_size=50_304)
    return _config(model, *STEPS[size], "c4_gpt2", bos=False)


def llama2_run() -> Config:
    """Llama 2 130M with one scale in every norm, softmax and Adam."""
    return _config(llama2("130m", norm="rmsnorm_single"), *STEPS["130m"], "c4_llama2", bos=True)


def ablation_run() -> Config:
    """GPT-2 130M for 40,000 steps; the rows of Table 5 and the relaxed mask of Figure 2 are changes of it."""
    return replace(gpt2_run("130m"), {"train.steps": ABLATION_STEPS})


def ablation_sgd_run() -> Config:
    """SGD with momentum of Table 5: 8 times the steps, softmax-1."""
    changes = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.2}
    return replace(
        ablation_run(),
        {f"optim.{name}": value for name, value in changes.items()}
        | {"train.steps": SGD_FACTOR * ABLATION_STEPS, "model.normalizer": "softmax1"},
    )


FILES = {
    "gpt2_60m": lambda: gpt2_run("60m"),
    "gpt2_130m": lambda: gpt2_run("130m"),
    "gpt2_350m": lambda: gpt2_run("350m"),
    "gpt2_1_4b": lambda: gpt2_run("1.4b"),
    "llama2_130m": llama2_run,
    "ablation_130m": ablation_run,
    "ablation_130m_sgd": ablation_sgd_run,
}


class PaperRun(NamedTuple):
    """One run of the paper.

    Attributes:
      file: Of configs/paper/, without its ending.
      changes: Config fields as they are typed after `--config.`.
      expected: Metric -> what the paper prints; empty for a run of which it prints nothing.
    """

    file: str
    changes: dict[str, str]
    expected: dict[str, float]

    @property
    def config(self) -> Config:
        """The run."""
        return replace(FILES[self.file](), self.changes)

    @property
    def flags(self) -> str:
        """What is typed after --config=FILE."""
        return " ".join(f"--config.{path}={value}" for path, value in self.changes.items())


_SOFTMAX1, _ORTHOADAM = {"model.normalizer": "softmax1"}, {"optim.optimizer": "orthoadam"}
METHODS: dict[str, dict[str, str]] = {
    "vanilla": {},
    "softmax1": _SOFTMAX1,
    "orthoadam": _ORTHOADAM,
    "cured": _SOFTMAX1 | _ORTHOADAM,
}
NORMS = {"LayerNorm": "layernorm", "RMSNorm-M": "rmsnorm", "RMSNorm-S": "rmsnorm_single"}
POSITIONS = {"Absolute": "learned", "None": "none", "Rotary": "rotary"}
OPTIMIZERS = {  # name in the paper -> ours, and its momentum
    "Adam": ("adam", 0.0),
    "RMSProp": ("rmsprop", 0.0),
    "OrthoAdam": ("orthoadam", 0.0),
    "SGD w/mom": ("sgd", 0.9),
    "SGD w/o mom": ("sgd", 0.0),
}


def _main_runs() -> list[PaperRun]:
    runs = []
    for file, model in (
        ("gpt2_60m", "GPT2 60M"),
        ("gpt2_130m", "GPT2 130M"),
        ("gpt2_350m", "GPT2 350M"),
        ("gpt2_1_4b", "GPT2 1.4B"),
        ("llama2_130m", "Llama2 130M"),
    ):
        for variant, changes in METHODS.items():
            expected = TABLE_2.get((model, variant), {}) | TABLE_3.get((model, variant), {})
            runs.append(PaperRun(file, changes, expected))
    for (size, length, variant), expected in TABLE_6.items():
        runs.append(PaperRun(f"gpt2_{size}", {"data.sequence_length": str(length)} | METHODS[variant], expected))
    return runs


def _ablation_runs() -> list[PaperRun]:
    runs = []
    for (biases, position, norm, optimizer, softmax1), expected in TABLE_5.items():
        if optimizer.startswith("SGD"):
            changes = {"optim.momentum": "0"} if optimizer == "SGD w/o mom" else {}
            runs.append(PaperRun("ablation_130m_sgd", changes, expected))
            continue
        wanted = {
            "model.use_bias": str(biases).lower(),
            "model.position": POSITIONS[position],
            "model.norm": NORMS[norm],
            "optim.optimizer": OPTIMIZERS[optimizer][0],
            "model.normalizer": "softmax1" if softmax1 else "softmax",
        }
        base = ablation_run()
        changes = {path: value for path, value in wanted.items() if replace(base, {path: value}) != base}
        runs.append(PaperRun("ablation_130m", changes, expected))
    runs.append(PaperRun("ablation_130m", {"model.relaxed_causal_tokens": "10"}, {}))
    return runs


def paper_runs() -> list[PaperRun]:
    """Every run of the paper, and those that complete {softmax, softmax-1} x {Adam, OrthoAdam}."""
    return _main_runs() + _ablation_runs()
