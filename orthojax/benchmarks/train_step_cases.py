"""Which training steps are compared, and the table of the paper that they stand beside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.benchmarks.suite import TINY_MODEL
from orthojax.config import Config, DataConfig, ModelConfig, NormalizerName, OptimConfig, OptimizerName, TrainConfig
from orthojax.model import gpt2

# (normalizer, optimizer) by name; the first is what all are compared with, the last is what the paper proposes.
VARIANTS: dict[str, tuple[NormalizerName, OptimizerName]] = {
    "softmax + AdamW": ("softmax", "adam"),
    "softmax1 + AdamW": ("softmax1", "adam"),
    "softmax + OrthoAdam": ("softmax", "orthoadam"),
    "softmax1 + OrthoAdam": ("softmax1", "orthoadam"),
}
REFERENCE, PROPOSED = "softmax + AdamW", "softmax1 + OrthoAdam"
_ENDS = (REFERENCE, PROPOSED)

# From Attention to Activation (arXiv 2410.17174), Table 4: iterations/s of the plain and of the proposed training.
_PAPER_ITERATIONS_PER_SECOND = {"60m": (14.0, 12.0), "130m": (7.5, 6.0), "350m": (3.3, 3.0), "1.4b": (1.0, 1.1)}

# 50,257 tokens padded to a multiple of 128, as is usual: unaligned, the largest matrix product of all is slow.
_VOCAB_SIZE, _TOKENS = 50_304, 50_257


@dataclasses.dataclass(frozen=True)
class Case:
    """Training steps of one model.

    Attributes:
      name: Of the model.
      model: Without its normalizer.
      batch_size: Sequences per step, if memory has room for them; else as many of its halves as there is.
      sequence_length: Tokens of a sequence.
      variants: Names in `VARIANTS`, the reference first.
      paper_step_ratio: Time of the proposed step over that of the plain one in the paper's Table 4, None where it
        has none.
    """

    name: str
    model: ModelConfig
    batch_size: int
    sequence_length: int
    variants: tuple[str, ...] = tuple(VARIANTS)
    paper_step_ratio: float | None = None

    def config(self, variant: str) -> Config:
        """The run whose step is measured."""
        normalizer, optimizer = VARIANTS[variant]
        return Config(
            model=dataclasses.replace(self.model, normalizer=normalizer),
            optim=OptimConfig(optimizer=optimizer, weight_decay=0.1),
            data=DataConfig(sequence_length=self.sequence_length),
            train=TrainConfig(steps=10_000),
        )

    def tokens(self, batch_size: int) -> jax.Array:
        """Random tokens int32 [batch_size, T + 1], the same in every run."""
        largest = min(self.model.vocab_size, _TOKENS)
        shape = (batch_size, self.sequence_length + 1)
        return jnp.asarray(np.random.default_rng(0).integers(0, largest, shape), jnp.int32)


def _gpt2_case(size: str, batch_size: int, sequence_length: int, variants: tuple[str, ...]) -> Case:
    paper_ratio = None
    if sequence_length == 256:  # as in the paper
        plain, proposed = _PAPER_ITERATIONS_PER_SECOND[size]
        paper_ratio = plain / proposed
    model = gpt2(size, vocab_size=_VOCAB_SIZE, dtype="bfloat16")
    return Case(f"gpt2 {size}", model, batch_size, sequence_length, variants, paper_ratio)


def cases(platform: str, tiny: bool) -> list[Case]:
    """What is measured on a platform, the most important first.

    Args:
      platform: As `jax.default_backend()` says it.
      tiny: One model that takes no time.
    """
    if tiny:
        return [Case("gpt2 tiny", TINY_MODEL, 2, 16)]
    if platform == "cpu":
        model = gpt2("tiny", num_layers=6, d_model=256, num_heads=4, d_mlp=1024, vocab_size=16_384)
        return [Case("gpt2 9m on a CPU", model, 4, 256)]
    everything = tuple(VARIANTS)
    return [
        # Batches of 131,072 tokens, the paper's, where one accelerator may have room for them.
        _gpt2_case("60m", 512, 256, everything),
        _gpt2_case("130m", 512, 256, everything),
        _gpt2_case("350m", 128, 256, _ENDS),
        _gpt2_case("1.4b", 64, 256, _ENDS),
        _gpt2_case("130m", 32, 1024, everything),
    ]
