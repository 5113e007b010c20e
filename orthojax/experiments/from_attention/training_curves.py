"""Figures 41 to 44: training curves of the four methods."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from orthojax.experiments.from_attention.models import METHOD_LABELS, MODELS, SCALES, grid, variant_name
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range
from orthojax.train import read_metrics

_FIGURES = {"gpt2_60m": 41, "gpt2_130m": 42, "gpt2_350m": 43, "gpt2_1_4b": 43, "llama2_130m": 44}
SPIKE_NATS = 1.0
SIMILAR_NATS = 0.02  # the largest difference that Table 2 of the paper has is 0.016, of 32.4 and 31.9
_DRAWN = 300  # points of a curve


def window_of(lines: int) -> int:
    """Logged steps that the running mean is over: a twentieth of them, three at least."""
    return max(3, lines // 20)


def running_mean(losses: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each, of fewer at the start.

    Args:
      losses: [..., n].
      window: At least 1.

    >>> running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    array([1., 2., 4., 6.])
    """
    total = np.cumsum(losses, axis=-1)
    before = np.concatenate([np.zeros_like(total[..., :window]), total[..., :-window]], axis=-1)[..., : total.shape[-1]]
    return (total - before) / np.minimum(np.arange(total.shape[-1]) + 1, window)


def spikes(steps: Sequence[float], losses: np.ndarray, warmup_steps: int) -> int:
    """How many losses after warm-up lie more than `SPIKE_NATS` above the running mean of those before them.

    Args:
      steps: Of the losses, [n].
      losses: Nats, [n].
      warmup_steps: The last step of warm-up.
    """
    mean = running_mean(losses, window_of(len(losses)))
    above = losses[1:] > mean[:-1] + SPIKE_NATS
    return int(np.sum(above & (np.asarray(steps[1:]) > warmup_steps)))


def _spikes(study: Study, variant: Variant) -> list[int]:
    """By seed."""
    counts = []
    for seed in summaries.finished_seeds(study, variant):
        lines = read_metrics(study.run_dir(variant.name, seed) / "metrics.jsonl")
        lines = [line for line in lines if "loss_nats" in line]
        losses = np.array([line["loss_nats"] for line in lines])
        counts.append(spikes([line["step"] for line in lines], losses, variant.config.optim.warmup_steps))
    return counts


def _models(study: Study) -> dict[str, str]:
    names = {v.name for v in study.variants}
    return {model: label for model, label in MODELS.items() if variant_name(model, "vanilla") in names}


def _differences(study: Study, model: str, method: str) -> list[float]:
    """Final held-out loss less that of softmax and Adam, nats, seed by seed."""
    pairs = study.pairs(variant_name(model, method), variant_name(model, "vanilla"), "loss_nats")
    return [ours - baseline for ours, baseline in pairs.values()]


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _picture(study: Study, model: str) -> Picture | None:
    variants = [v for v in study.variants if v.name in {variant_name(model, method) for method in METHOD_LABELS}]
    training = summaries.training_curves(study, variants, "loss_nats")
    held_out = summaries.training_curves(study, variants, "validation_loss_nats")
    if not training:
        return None
    curves, dots, low, high = {}, {}, [], []
    for label, (steps, losses) in training.items():
        name, smooth = label.removeprefix(f"{MODELS[model]}, "), running_mean(losses, window_of(len(steps)))
        every = max(1, len(steps) // _DRAWN)
        curves[name] = (steps[::every], smooth[:, ::every])
        dots[name] = held_out[label]
        low.append(min(smooth.min(), held_out[label][1].min()))
        high.append(smooth[:, len(steps) // 5 :].max())  # what comes before would flatten the rest
    margin = 0.05 * (max(high) - min(low))
    figure = drawing.lines(
        curves,
        x_label="step",
        y_label="loss (nats per token)",
        dots=dots,
        y_limits=(min(low) - margin, max(high) + margin),
    )
    caption = f"{MODELS[model]}: training loss, smoothed (lines), and held-out loss (markers)."
    return Picture(f"figure{_FIGURES[model]}_{model}", caption, figure)


def _table(study: Study) -> Table:
    rows = []
    for model, label in _models(study).items():
        for method, words in METHOD_LABELS.items():
            variant = next(v for v in study.variants if v.name == variant_name(model, method))
            printed, baseline = TABLE_2.get((label, method)), TABLE_2[label, "vanilla"]
            theirs = math.log(printed["perplexity"] / baseline["perplexity"]) if printed else None
            difference = mean_and_range(_differences(study, model, method), _signed) if method != "vanilla" else ""
            rows.append(
                [
                    f"{label}, {words}",
                    mean_and_range(study.values(variant.name, "loss_nats"), lambda value: f"{value:.3f}"),
                    difference,
                    _signed(theirs) if theirs is not None and method != "vanilla" else "",
                    str(sum(_spikes(study, variant))),
                ]
            )
    columns = ["held-out loss (nats)", "less softmax + Adam's, by seed", "the paper's difference", "spikes"]
    return Table("Final loss, and spikes of the training loss after warm-up", ["", *columns], rows)


def _claims(study: Study) -> list[Claim]:
    counts = {v.label: sum(_spikes(study, v)) for v in study.variants}
    spiky = ", ".join(f"{label} {count}" for label, count in counts.items() if count) or "none"
    claims = [
        Claim(
            verdict(not any(counts.values())),
            f"Training is stable with every method. Spikes: {spiky}; runs that failed: none (criterion: no logged loss "
            f"after warm-up more than {SPIKE_NATS:g} nat above the running mean of those before it, in any run).",
        )
    ]
    for method, words in METHOD_LABELS.items():
        if method == "vanilla":
            continue
        differences = {label: _differences(study, model, method) for model, label in _models(study).items()}
        claims.append(
            Claim(
                verdict(all(np.mean(values) <= SIMILAR_NATS for values in differences.values())),
                f"{words} converges to a loss similar to that of softmax + Adam. Held-out loss less that of the same "
                f"seed, nats:",
                [f"{label} {mean_and_range(values, _signed)}" for label, values in differences.items()],
                f"(Criterion: on average at most {SIMILAR_NATS:g} nats above, in every model.)",
            )
        )
    return claims


def report(study: Study) -> Report:
    """One picture for each model; stability and final losses."""
    failures = study.failures()
    pictures = [_picture(study, model) for model in _models(study)]
    return summaries.study_report(
        study,
        "Figures 41 to 44: training curves",
        [
            "Five models by four methods, the runs of Table 2. Lines are the running mean of the training loss over "
            "a twentieth of the logged steps, three at least; markers are the loss on held-out text. Both are means "
            "over seeds, with bands from the smallest to the largest.",
        ],
        claims=[] if failures else _claims(study),
        tables=[_table(study)],
        pictures=[picture for picture in pictures if picture],
    )


EXPERIMENT = Experiment(
    name="figure41",
    title="training curves of the four methods",
    scales={scale: partial(grid, scale) for scale in SCALES},
    report=report,
    also=("figure42", "figure43", "figure44"),
)
