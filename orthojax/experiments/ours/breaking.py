"""What makes the first token's residual norm stand out, which is what int8 breaks: two clocks, on vanilla models.

Over the models of results/ the loss at int8 coarse follows how far the norm of the first token's residual state stands
above the others' (the peak) and how well the model has learned, not kurtosis. Two clocks of the peak are compared:

(a) The sum of learning rates. Adam turns a gradient of constant direction into steps of constant size
    (Active-Dormant Attention Heads, arXiv 2410.13835), so the peak would grow only with the sum of rates.
(b) Tokens. The gradient of the first token's state has a mean g and, from row to row, a covariance S. With B rows its
    signal-to-noise ratio is s = |g| sqrt(B / tr S), and Adam's step has the share s / sqrt(1 + s^2) in a constant
    direction. If everything else walks at random, n steps of rate r and decoupled decay w add up to

        drift = r s / sqrt(1 + s^2) D(n),  walk = r sqrt(W(n)),
        D(n) = (1 - (1 - r w)^n) / (r w),  W(n) = (1 - (1 - r w)^(2 n)) / (1 - (1 - r w)^2)

    (D = W = n without decay), and the ratio drift / walk grows as the root of the tokens, up to s sqrt(2 / (r w)).

A run with `train.probe = "orthojax.experiments.ours.breaking:peak_probe"` writes the arrays of every probe to
probes/step_N.npz. Legend: L layers, K rows, T positions, D d_model.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis, quant
from orthojax.config import Config, ModelConfig, replace
from orthojax.experiments.active_dormant.mechanism_probe import first_residual_gradients, probe_file
from orthojax.experiments.active_dormant.runs import backcopy
from orthojax.experiments.base import BREAKING_MODEL, cured
from orthojax.experiments.claims import (
    COARSE,
    PEAK,
    Claim,
    Expr,
    Metric,
    check,
    cured_outliers,
    equivalent,
    halved,
    lost,
    rising,
    spearman,
)
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.experiments.ours.rounding import FOUR_BIT, FOUR_BITS
from orthojax.experiments.study import Study
from orthojax.files import make_folder, write_atomically
from orthojax.model import LoadedModel, Transformer
from orthojax.model.presets import bigram_backcopy
from orthojax.report.pictures import LOSS, ByStep, Points
from orthojax.report.results import Missing, Result, Results
from orthojax.report.tables import Columns
from orthojax.train import Inputs
from orthojax.train.step import loss_sum_nats, split_tokens


def signal_to_noise(gradients: jax.Array) -> jax.Array:
    """Computes |E g| / sqrt(tr Cov g) of rows of gradients, [K, L, D] -> [L]; K independent rows of one distribution.

    The square of the mean's norm is unbiased: tr Cov / K is subtracted. Negative results count as 0.
    """
    noise = jnp.sum(jnp.var(gradients, axis=0, ddof=1), axis=-1)
    signal = jnp.sum(jnp.square(jnp.mean(gradients, axis=0)), axis=-1) - noise / len(gradients)
    return jnp.sqrt(jnp.maximum(signal, 0.0) / noise)


def _norms(taps: analysis.Taps) -> tuple[jax.Array, jax.Array]:
    norms = jnp.linalg.norm(taps.residual.astype(jnp.float32), axis=-1)  # [K, T]
    return jnp.mean(norms[:, 0]), jnp.mean(norms[:, 1:])


def peaks(config: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Measures the peak, the gradient that makes it and the cost of rounding, on int [K, T + 1] tokens.

    Returns:
      `peak` [L]: the norm of the first token's residual state over the mean norm of the others, after each block;
      `gradient_snr` [L]: for one row, see `signal_to_noise`; nan after the last block, to which nothing attends;
      `loss_nats` and `loss_nats_int8_coarse`.
    """
    model = Transformer(config)
    rounded = Transformer(config, linear=quant.quantized_linear(quant.INT8_COARSE))
    seen: Any = model.apply({"params": params}, split_tokens(tokens, model.config)[0], observe=_norms, head=False)
    first, rest = seen[1]
    of_row = jax.lax.map(lambda row: first_residual_gradients(model, params, row[None]), tokens)
    losses = [total / count for total, count in (loss_sum_nats(of, params, tokens) for of in (model, rounded))]
    snr = signal_to_noise(of_row)
    return {"peak": first / rest, "gradient_snr": snr, "loss_nats": losses[0], "loss_nats_int8_coarse": losses[1]}


def peak_probe(config: Config, rows: np.ndarray, folder: Path) -> Callable[[int, Any], None]:
    """Returns the function of a run that writes `step` and the arrays of `peaks`; rows are int32 [K, T + 1]."""
    make_folder(folder, "folder of probes")
    measure = jax.jit(functools.partial(peaks, config.model))

    def write(step: int, params: Any) -> None:
        arrays = jax.device_get(measure(params, jnp.asarray(rows)))
        write_atomically(probe_file(folder, step), functools.partial(np.savez_compressed, step=step, **arrays))

    return write


def drift_over_walk(snr: float, rate: float, decay: float, steps: float) -> float:
    """Computes clock (b) of the module: how far a constant part has outgrown a random walk.

    Args:
      snr: Signal-to-noise ratio of the gradient of a batch.
      rate: Learning rate, constant.
      decay: Decoupled weight decay, multiplied by the rate.
      steps: Number of steps.

    >>> round(drift_over_walk(snr=0.1, rate=1e-3, decay=0.0, steps=10_000), 2)
    9.95
    >>> round(drift_over_walk(snr=0.1, rate=1e-3, decay=1.0, steps=1_000_000), 2)  # about 0.1 sqrt(2 / 0.001)
    4.45
    """
    kept = 1 - rate * decay
    drift = steps if kept == 1 else (1 - kept**steps) / (1 - kept)
    walk = steps if kept == 1 else (1 - kept ** (2 * steps)) / (1 - kept**2)
    return float(snr / np.hypot(1.0, snr) * drift / np.sqrt(walk))


def _of_text(numbers: Any) -> bool:
    return numbers["data.kind"] == "embedded"


def _by_step(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Reads the probes of a run with `peak_probe`, and computes both clocks at each, with a constant rate.

    Returns:
      `NAME/step_N` of `peak`, the largest over blocks; `gradient_snr` of a batch, the mean so far, after the block with
      the largest peak, except the last block, which nothing attends to;
      `sum_of_rates`, `drift_over_walk`, `probe_perplexity` and `probe_lost_int8_coarse`. `NAME` is the last one.
    """
    config, folder = loaded.config, loaded.source.parents[1] / "probes"
    optim, rows, found, snr = config.optim, config.train.batch_size, {}, []
    for step in sorted(config.train.probe_steps):
        with np.load(probe_file(folder, step)) as arrays:
            of = dict(arrays)
        read = int(np.argmax(of["peak"][:-1]))  # later attention reads it, so that there is a gradient
        snr.append(float(of["gradient_snr"][read]) * rows**0.5)
        lost = float(np.expm1(of["loss_nats_int8_coarse"] - of["loss_nats"]))
        found |= {
            "peak": float(np.max(of["peak"])),
            "gradient_snr": float(np.mean(snr)),
            "sum_of_rates": optim.learning_rate * step,
            "drift_over_walk": drift_over_walk(float(np.mean(snr)), optim.learning_rate, optim.weight_decay, step),
            "probe_perplexity": float(np.exp(of["loss_nats"])),
            "probe_lost_int8_coarse": lost,
        }
        found |= {f"{name}/step_{step}": value for name, value in found.items() if "/" not in name}
    say("probes")
    return Measured(found)


PEAKS = Measure("peaks_of_all_blocks", _by_step)  # of runs with `peak_probe`

_STEPS = (100, 250, 500, 1000, 1500, 2000, 3000)
_CLOCK = replace(
    BREAKING_MODEL,
    {
        "model.d_model": 64,
        "model.d_mlp": 128,
        "optim.final_learning_rate_fraction": 1.0,  # constant
        "train.steps": _STEPS[-1],
        "train.eval_every_steps": 0,
        "train.probe_every_steps": 0,
        "train.probe_steps": _STEPS,
        "train.probe_sequences": 64,
        "train.probe": "orthojax.experiments.ours.breaking:peak_probe",
    },
)
_CHANGES: dict[str, dict[str, Any]] = {
    "text": {},
    "batch_4": {"train.batch_size": 4},
    "batch_64": {"train.batch_size": 64},
    "rate_1e-3": {"optim.learning_rate": 1e-3},
    "rate_1e-2": {"optim.learning_rate": 1e-2},
    "decay_0": {"optim.weight_decay": 0.0},
    "decay_2": {"optim.weight_decay": 2.0},
    "gelu": {"model.mlp": "gelu"},
    "learned": {"model.position": "learned"},
    "ordinary": {"data.repeated_share": 0.0},
    "deeper": {"model.num_layers": 8},
    "relu": {"model.normalizer": "relu"},
}


def _backcopy(**changes: Any) -> Config:
    """Returns the three-layer Bigram-Backcopy run of `three_layers`, with the probe of this module."""
    fields = ("eval_every_steps", "probe_every_steps", "probe_steps", "probe_sequences", "probe", "steps")
    probing = {f"train.{name}": getattr(_CLOCK.train, name) for name in fields}
    model = bigram_backcopy(3, d_model=64, d_mlp=256, max_length=64, vocab_size=backcopy().model.vocab_size)
    return replace(dataclasses.replace(backcopy(), model=model), probing | changes)


def _runs(scale: str) -> dict[str, Config]:
    runs = {name: replace(_CLOCK, changes) for name, changes in _CHANGES.items()}
    runs |= {"backcopy": _backcopy(), "backcopy_batch_64": _backcopy(**{"train.batch_size": 64})}
    return runs | {"backcopy_relu": _backcopy(**{"model.normalizer": "relu"})}


def _spearman(x: str, y: str, words: str, least: float) -> Expr:
    """Returns whether the rank correlation of two metrics is at least `least`, over all text runs, seeds and probes."""

    def holds(*of: Result) -> bool:
        return _rank_correlation(x, y, of) >= least

    return check(holds, words=f"Spearman's rho of {words} at least {least:g}")


def _rank_correlation(x: str, y: str, of: Sequence[Result]) -> float:
    texts = [numbers for result in of for numbers in result.seeds.values() if _of_text(numbers)]
    values = [[numbers[f"{name}/step_{n}"] for numbers in texts for n in _STEPS[2:]] for name in (x, y)]
    return spearman(*values)


def _correlations(results: Results) -> str:
    """Returns the note of the report, with the rank correlations once there are results."""
    finished = [of for of in results.values() if of.seeds]
    shown = ""
    if finished:
        of = {"(a)": ("sum_of_rates", "peak"), "(b)": ("drift_over_walk", "peak"),
              "peak and loss": ("peak", "probe_lost_int8_coarse"),
              "perplexity and loss": ("probe_perplexity", "probe_lost_int8_coarse")}  # fmt: skip
        with contextlib.suppress(Missing):
            rho = {words: _rank_correlation(*names, finished) for words, names in of.items()}
            shown = " Spearman's rho: " + ", ".join(f"{words} {value:.2f}" for words, value in rho.items()) + "."
    return f"Vanilla models of search seeds, at constant rates; one change each from `text` or `backcopy`.{shown}"


_PEAK = Metric("peak")
WHAT_BREAKS = Study(
    name="what_breaks",
    title="What makes the first token's residual norm stand out: the sum of rates, or tokens",
    runs=_runs,
    seeds=(101, 102),  # used in no comparison
    measures=(PEAKS,),
    rounding=False,  # the probes measure int8 coarse
    note=_correlations,
    columns=["perplexity kurtosis_first first_attention_fraction peak gradient_snr sum_of_rates drift_over_walk",
             "probe_lost_int8_coarse"],
    claims=[
        Claim("The sum of learning rates orders the peaks of all runs and steps.",
              _spearman("sum_of_rates", "peak", "sum of rates and peak", 0.8)),
        Claim("Tokens do, through the signal-to-noise ratio of the gradient.",
              _spearman("drift_over_walk", "peak", "drift over walk and peak", 0.8)),
        Claim("At an equal sum of rates the larger batch has the higher peak.",
              (_PEAK["batch_64"] > 1.2 * _PEAK["text"]) & (_PEAK["text"] > 1.2 * _PEAK["batch_4"])),
        Claim("More decay lowers the peak, as a walk that decay bounds would have it.",
              rising(_PEAK["decay_2"], _PEAK["text"], _PEAK["decay_0"])),
        Claim("Swiglu writes a higher peak than GELU.", _PEAK["text"] > 1.2 * _PEAK["gelu"]),
        Claim("A learned row for position 0 leaves no need of a high peak.", _PEAK["learned"] < _PEAK["text"] / 1.2),
        Claim("ReLU attention needs no peak on text.", _PEAK["relu"] < _PEAK["text"] / 1.2),
        Claim("The peak orders the loss at int8 coarse.",
              _spearman("peak", "probe_lost_int8_coarse", "peak and loss at int8 coarse", 0.8)),
    ],
    pictures=[ByStep("peak", x_scale="log", y_scale="log", name="peak",
                     references={"SmolLM2-135M, 2e12 tokens": 54.7}),  # results/atlas/smollm2.json
              ByStep("probe_lost_int8_coarse", x_scale="log", name="lost"),
              Points("clock", "Peak, and the drift over a random walk that predicts it.", "drift_over_walk", "peak"),
              Points("peak_and_loss", "Peak and perplexity lost at int8 coarse.", "peak", "probe_lost_int8_coarse")],
)  # fmt: skip


BREAKS = Study(
    name="breaks",
    title="Vanilla in the setting that int8 damages most, three seeds, and the cure",
    runs=lambda scale: {"vanilla": BREAKING_MODEL, "cured": cured(BREAKING_MODEL)},
    seeds=(0, 1, 2),
    measures=(FOUR_BITS,),
    note="Repeated passages, rotary positions, swiglu, weight decay 0.5, 8,000 steps of 1,024 tokens. The setting was "
    "chosen on vanilla models of seed 100.",
    columns=["perplexity kurtosis_first kurtosis_rest first_attention_fraction first_attention_mass", PEAK],
    tables=[Columns("Perplexity lost to rounding", [lost(name) for name in (*quant.SETTINGS, *FOUR_BIT)])],
    claims=[
        Claim("Vanilla loses 20% or more at int8 coarse, in every seed.",
              (lost(COARSE)["vanilla"] >= 0.2).in_every_seed()),
        Claim("Cured loses less than 3%, in every seed.", (lost(COARSE)["cured"] < 0.03).in_every_seed(),
              lost(COARSE)["vanilla"] >= 0.05),
        Claim("At 4 bits cured loses less than half of what vanilla loses.",
              lost("w4a4")["cured"] < 0.5 * lost("w4a4")["vanilla"]),
        halved("The cure takes half of the dominance away, or more.", "cured", "vanilla"),
        cured_outliers("The cure leaves no outliers.", "cured", "vanilla"),
        equivalent("Perplexity is the same within 1%.", "cured", "vanilla"),
    ],
    headlines=[(metric, "vanilla", "cured") for metric in (lost(COARSE), "kurtosis_first", "perplexity")],
    pictures=[ByStep("first_attention_fraction", name="dominance"), ByStep("kurtosis_first kurtosis_rest",
              y_scale="log", name="kurtosis"), LOSS],
)  # fmt: skip
