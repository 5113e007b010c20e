"""Figures 41 to 44: training curves of the four methods."""

import math
from collections.abc import Sequence

import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim, V
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention import models
from orthojax.experiments.from_attention.models import GRID, METHOD_LABELS, MODELS
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Quantity, Result, Results, pairs
from orthojax.experiments.tables import MetricTable, PairedTable, difference_text
from orthojax.train import read_metrics

_FIGURES = {"gpt2_60m": 41, "gpt2_130m": 42, "gpt2_350m": 43, "gpt2_1_4b": 43, "llama2_130m": 44}
SPIKE_NATS = 1.0
SIMILAR_NATS = 0.02  # the largest difference that Table 2 of the paper has is 0.016, of 32.4 and 31.9
_DRAWN = 300  # points of a curve
_LOSS = Quantity("held-out loss (nats)", lambda numbers: math.log(numbers.perplexity), "{:.3f}".format)


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


def spikes_by_seed(result: Result) -> list[int]:
    """The `spikes` of the training loss of every seed."""
    counts = []
    for folder in result.folders.values():
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss_nats" in line]
        losses = np.array([line["loss_nats"] for line in lines])
        counts.append(spikes([line["step"] for line in lines], losses, result.config.optim.warmup_steps))
    return counts


def _spike_table(results: Results) -> Table:
    counts = {result.label: spikes_by_seed(result) for result in results}
    rows = [[label, str(sum(of)), str(len(of))] for label, of in counts.items()]
    return Table("Spikes of the training loss after warm-up", ["", "spikes", "finished runs"], rows)


def _pictures(results: Results) -> list[Picture]:
    pictures = []
    for model, figure in _FIGURES.items():
        of_model = [result for result in results.finished if GRID[result.name][0] == model]
        if not of_model:
            continue
        curves, dots, low, high = {}, {}, [], []
        for result in of_model:
            steps, losses = result.logged("loss_nats")
            label, smooth = METHOD_LABELS[GRID[result.name][1]], running_mean(losses, window_of(len(steps)))
            every = max(1, len(steps) // _DRAWN)
            curves[label] = (steps[::every], smooth[:, ::every])
            dots[label] = result.logged("validation_loss_nats")
            low.append(min(smooth.min(), dots[label][1].min()))
            high.append(smooth[:, len(steps) // 5 :].max())  # what comes before would flatten the rest
        margin = 0.05 * (max(high) - min(low))
        limits = (min(low) - margin, max(high) + margin)
        drawn = drawing.lines(curves, x_label="step", y_label="loss (nats per token)", dots=dots, y_limits=limits)
        caption = f"{MODELS[model]}: training loss, smoothed (lines), and held-out loss (markers)."
        pictures.append(Picture(f"figure{figure}_{model}", caption, drawn))
    return pictures


def _spikes_text(*of: Result) -> str:
    counts = {result.label: sum(spikes_by_seed(result)) for result in of}
    return f"spikes: {', '.join(f'{label} {count}' for label, count in counts.items() if count) or 'none'}"


CLAIMS = (
    Claim("Training is stable with every method.", lambda results: {"": [result.name for result in results]}, (),
          lambda *of: not any(sum(spikes_by_seed(result)) for result in of),
          f"no logged loss after warm-up more than {SPIKE_NATS:g} nat above the running mean of those before it, in "
          "any run", detail=_spikes_text),
    *(
        Claim(f"{words} converges to a loss similar to that of softmax + Adam.", (V, method), (_LOSS,),
              lambda v, o: float(np.mean([a - b for a, b in pairs(o, v, "loss_nats").values()])) <= SIMILAR_NATS,
              f"on average over seeds at most {SIMILAR_NATS:g} nats above, in every model",
              detail=lambda v, o: f"paired by seed {difference_text(pairs(o, v, 'loss_nats'), '{:+.3f}'.format)}")
        for method, words in METHOD_LABELS.items()
        if method != "vanilla"
    ),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="figure41",
    title="Figures 41 to 44: training curves of the four methods",
    variants=models.grid,
    scales=models.SCALES,
    also=("figure42", "figure43", "figure44"),
    about=lambda results: [
        "Five models by four methods, the runs of Table 2. Lines are the running mean of the training loss over a "
        "twentieth of the logged steps, three at least; markers are the loss on held-out text. Both are means over "
        "seeds, with bands from the smallest to the largest."
    ],
    groups=models.by_model,
    paper=models.paper_of_grid(TABLE_2),
    tables=(
        MetricTable("Final loss, the paper's from its perplexity", (_LOSS,)),
        PairedTable("Final loss less that of softmax + Adam", "vanilla", differences=(_LOSS,)),
        _spike_table,
    ),
    claims=CLAIMS,
    pictures=(_pictures,),
)
