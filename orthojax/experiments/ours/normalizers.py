"""Which attention normalizer removes the first token's dominance, the outliers, or both, with which optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from orthojax import analysis
from orthojax.config import Config
from orthojax.experiments.from_attention.models import RUNS, SGD_STEPS
from orthojax.experiments.ours.normalizers_report import NORMALIZERS, OPTIMIZERS, report, variant_name
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant
from orthojax.fields import replace
from orthojax.model import Taps, Transformer
from orthojax.train import Inputs, read_params

MODEL = "gpt2_60m"  # the smallest; with softmax and softmax-1 under Adam and OrthoAdam its runs are those of Table 2
_NORMALIZERS: dict[str, dict[str, object]] = {
    name: {"model.gated_attention": True} if name == "gated" else {"model.normalizer": name} for name in NORMALIZERS
}
_SGD = {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.learning_rate": 0.2}  # the paper's learning rate


def _variants(scale: str) -> tuple[Variant, ...]:
    base = RUNS[scale](MODEL)
    optimizers: dict[str, dict[str, object]] = {
        "adam": {},
        "orthoadam": {"optim.optimizer": "orthoadam"},
        "sgd": {**_SGD, "train.steps": SGD_STEPS[scale] * base.train.steps},
    }
    return tuple(
        Variant(
            variant_name(normalizer, optimizer),
            f"{NORMALIZERS[normalizer]}, {OPTIMIZERS[optimizer]}",
            replace(base, {**_NORMALIZERS[normalizer], **optimizers[optimizer]}),
        )
        for optimizer in OPTIMIZERS
        for normalizer in NORMALIZERS
    )


def _measure_share(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """`analysis.first_attention_share` over the evaluation set, mean over layers."""
    model, params, size = Transformer(config.model), read_params(checkpoint), config.eval.batch_size

    def observe(taps: Taps) -> jax.Array:
        return analysis.first_attention_share(taps.attention_weights)

    @jax.jit
    def share(params: Any, tokens: jax.Array) -> jax.Array:
        observed: Any = model.apply({"params": params}, tokens, observe=observe)
        return jnp.mean(observed[1])

    batches = [inputs.evaluation[i : i + size, :-1] for i in range(0, len(inputs.evaluation), size)]
    total = sum(float(share(params, tokens)) * len(tokens) for tokens in batches)
    on_progress("share")
    return Measured({"first_attention_share": total / len(inputs.evaluation)}, {})


EXPERIMENT = Experiment(
    name="normalizers",
    title="which attention normalizers and optimizers remove first-token dominance, outliers, or both",
    scales={scale: lambda scale=scale: _variants(scale) for scale in ("tiny", "small")},
    report=report,
    measures=(Measure("first_attention_share", _measure_share),),
)
