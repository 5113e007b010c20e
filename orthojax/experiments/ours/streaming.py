"""Texts longer than training through a rolling window: softmax needs its first token; does softmax-1?

StreamingLLM (arXiv 2309.17453) keeps four first tokens as sinks; a model without a sink should not need them.
"""

import math

import numpy as np

from orthojax.config import Config, replace
from orthojax.data import TokenBatches
from orthojax.experiments.base import SHALLOW_MODEL, cured
from orthojax.experiments.claims import (
    Claim,
    Expr,
    Metric,
    all_of,
    cured_outliers,
    dominated,
    function,
    halved,
    smallest,
)
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.experiments.study import Study
from orthojax.model import LoadedModel
from orthojax.model.generation import stream_loss_nats
from orthojax.report.figures import lines
from orthojax.report.page import Picture
from orthojax.report.results import Results
from orthojax.train import Inputs

_ROWS, _SINKS = 128, 4
_TIMES = (4, 8)  # in units of the training length


def _stream(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Measures perplexities of the T / 2 tokens before 4 T and 8 T relative to the same tokens in a new text.

    A new text has the BOS token and at least the T / 2 - 1 tokens before them, as in training. The model sees the
    latest T tokens (`window`), the first four and the latest (`sinks`), or all (`whole`).
    """
    T, bos = loaded.config.data.sequence_length, int(inputs.evaluation[0, 0])
    assert inputs.held_out is not None
    rows = TokenBatches(inputs.held_out, _TIMES[-1] * T, 1, 0, bos).spread_rows(_ROWS)
    first = np.full((_ROWS, 1), bos, np.int32)
    anew = {}
    for times in _TIMES:
        row = np.concatenate([first, rows[:, (times - 1) * T + 1 : times * T + 1]], axis=1)
        anew[times] = stream_loss_nats(loaded, row)[:, T // 2 :].mean()
    found = {f"perplexity_anew_{times}": math.exp(loss) for times, loss in anew.items()}
    losses = {}
    for mode, window, sinks in (("window", T, 0), ("sinks", T - _SINKS, _SINKS), ("whole", None, 0)):
        losses[mode] = stream_loss_nats(loaded, rows, window, sinks)
        for times in _TIMES:
            loss = losses[mode][:, times * T - T // 2 : times * T].mean()
            found[f"perplexity_ratio_{mode}_{times}"] = math.exp(loss - anew[times])
    say("streams")
    # By quarter of the length of training, for the curves.
    return Measured(found, {name: of.mean(0).reshape(-1, T // 4).mean(1) for name, of in losses.items()})


STREAMED = Measure("streamed", _stream)


def _runs(scale: str) -> dict[str, Config]:
    changes = {
        "model.position": "rotary",
        "data.repeated_share": 1.0,
        "optim.learning_rate": 3e-3,
        "train.steps": 3000,
        "train.checkpoint_every_steps": 250,
        "train.keep_every_steps": 250,
    }
    base = replace(SHALLOW_MODEL, changes)
    return {
        "softmax": base,
        "softmax1": replace(base, {"model.normalizer": "softmax1"}),
        "cured": cured(base),
        "d_model": replace(cured(base), {"optim.rotation.axes": "d_model"}),
    }


_RATIO = {
    (mode, times): Metric(f"perplexity_ratio_{mode}_{times}")
    for mode in ("window", "sinks", "whole")
    for times in _TIMES
}


def _needs_no_first_token(variant: str) -> Expr:
    return all_of(_RATIO["window", times][variant] < 1.02 for times in _TIMES)


def _log(mode: str, times: int, variant: str) -> Expr:
    return function("ln", math.log, _RATIO[mode, times][variant])


def _curves(results: Results) -> list[Picture]:
    panels: dict = {"window": {}, "sinks": {}, "whole": {}}
    for of in results.finished:
        arrays = [of.arrays("streamed", seed) for seed in of.seeds]
        for mode, curves in panels.items():
            losses = np.array([found[mode] for found in arrays])
            curves[of.name] = ([(i + 0.5) / 4 for i in range(losses.shape[1])], losses)
    figure = lines(panels, x_label="position, in lengths of training", y_label="loss (nats)")
    return [Picture("loss_by_position", "Loss by position, by what is in view.", figure)]


STREAMING = Study(
    name="streaming",
    title="Texts longer than training through a rolling window: softmax needs its first token, softmax-1 does not?",
    runs=_runs,
    measures=(STREAMED,),
    note="Rotary positions, 3,000 steps of text with repeated passages. 128 held-out texts of eight times the length T "
    "of training are read token by token through a rolling cache of T tokens, whose positions are those in the cache, "
    "and through one of all tokens. Ratios are to the perplexity of the same tokens in a text that starts anew.",
    columns=["perplexity first_attention_fraction first_attention_mass kurtosis_first kurtosis_rest", *_RATIO.values()],
    claims=[
        Claim("Softmax loses its predictions once the first token has left the window.",
              all_of(_RATIO["window", times]["softmax"] > 1.05 for times in _TIMES), dominated("softmax")),
        Claim("With the first 4 tokens kept it does not.",
              all_of(_log("sinks", times, "softmax") < _log("window", times, "softmax") / 3 for times in _TIMES),
              dominated("softmax")),
        Claim("Softmax-1 needs no first token.", _needs_no_first_token("softmax1") & _needs_no_first_token("cured"),
              dominated("softmax")),
        Claim("With the whole text in view softmax-1 loses less past the length of training than softmax.",
              all_of(_log("whole", times, of) < _log("whole", times, "softmax") / 2
                     for times in _TIMES for of in ("softmax1", "cured")),
              dominated("softmax") & (smallest(*(_log("whole", times, "softmax") for times in _TIMES)) > 0)),
        # The output axes left outliers here; no run of these three had been seen.
        Claim("(Ours) With the d_model axes rotated OrthoAdam and softmax-1 need none.",
              _needs_no_first_token("d_model"), dominated("softmax")),
        cured_outliers("(Ours) With these axes they leave no outliers.", "d_model", "softmax"),
        halved("(Ours) With these axes half of the dominance, or more, is gone.", "d_model", "softmax"),
    ],
    pictures=[_curves],
)  # fmt: skip
