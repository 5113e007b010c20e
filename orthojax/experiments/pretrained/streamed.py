"""The published failure on a real model: SmolLM2 through a rolling window, with and without its first tokens."""

import functools
import math

import jax
import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture
from orthojax.experiments.pretrained.smollm2 import ABOUT, model, rows
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.generation import stream_loss_nats

ROWS, WINDOW, WINDOWS, SINKS = 4, 256, 5, 4
# Name -> (label, latest tokens in view or None for all, first tokens in view).
MODES = {
    "window": ("the latest tokens alone", WINDOW, 0),
    "sinks": (f"the first {SINKS} and the latest tokens", WINDOW - SINKS, SINKS),
    "whole": ("all tokens", None, 0),
}


def _mode(name: str, seed: int) -> list[Case]:
    label, window, sinks = MODES[name]
    with jax.enable_x64(False):
        losses = stream_loss_nats(model(), rows(ROWS, WINDOW * WINDOWS), window, sinks)
    return [Case(name, {"label": label}, summary(losses))]


def summary(losses: np.ndarray) -> dict[str, float]:
    """`perplexity` of the tokens after the first window, and `loss_i` of each window; losses [rows, tokens]."""
    by_window = losses.reshape(len(losses), WINDOWS, WINDOW).mean(axis=(0, 2))
    found = {f"loss_{i}": float(loss) for i, loss in enumerate(by_window)}
    return found | {"perplexity": math.exp(float(by_window[1:].mean()))}


_PPL = metric("perplexity", "perplexity after the first window")
CLAIMS = (
    Claim("A real softmax model loses its predictions once the first token has left the window.", ("window", "whole"),
          (_PPL,), lambda window, whole: window.perplexity > 1.5 * whole.perplexity, "half as much perplexity again"),
    Claim(f"With its first {SINKS} tokens kept it does not.", ("sinks", "window", "whole"), (_PPL,),
          lambda sinks, window, whole: math.log(sinks.perplexity / whole.perplexity)
          < math.log(window.perplexity / whole.perplexity) / 3, "less than a third of the loss that is added without"),
)  # fmt: skip


def _curves(results: Results) -> list[Picture]:
    curves = {
        of.label: (list(range(1, WINDOWS + 1)), np.array([[of[f"loss_{i}"] for i in range(WINDOWS)]])) for of in results
    }
    figure = drawing.lines(curves, x_label=f"{WINDOW} tokens each", y_label="loss (nats)")
    return [Picture("loss", "Loss by position, in windows.", figure)]


EXPERIMENT = Experiment(
    name="smollm2_streaming",
    title="SmolLM2 through a rolling window: without its first tokens it loses its predictions",
    compute={name: functools.partial(_mode, name) for name in MODES},
    settings={"rows": ROWS, "window": WINDOW, "windows": WINDOWS, "sinks": SINKS},
    seconds_per_seed=2400.0,
    about=lambda results: [
        ABOUT,
        f"{ROWS} rows of {WINDOW * WINDOWS} tokens, read token by token through a cache of {WINDOW} tokens, whose "
        "positions are those in the cache, or through one of all. One measurement: nothing is drawn.",
    ],
    tables=(
        MetricTable("Perplexity", (_PPL, *(metric(f"loss_{i}", f"loss, window {i + 1}") for i in range(WINDOWS)))),
    ),
    claims=CLAIMS,
    pictures=(_curves,),
)
