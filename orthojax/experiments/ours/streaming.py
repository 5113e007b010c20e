"""Does softmax-1 need the first token when a text streams past the length of training? Softmax does.

StreamingLLM (arXiv 2309.17453) shows that softmax models lose their predictions when the first tokens leave a rolling
window, and keep them with four of them as sinks. A model without a sink should not need them.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from orthojax.config import Config, replace
from orthojax.data import TokenBatches
from orthojax.experiments import drawing
from orthojax.experiments.base_configs import SHALLOW_MODEL, cured, with_normalizer
from orthojax.experiments.claims import DOMINANCE, Claim, Names, dominated
from orthojax.experiments.cure_claims import dominance_halved, no_outliers_left
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.generation import stream_loss_nats
from orthojax.model import LoadedModel
from orthojax.train import Inputs

ROWS, SINKS = 128, 4
TIMES = (4, 8)  # the length of training
# Name -> what the model sees beside the latest tokens.
MODES = {
    "window": "the latest tokens alone",
    "sinks": f"the first {SINKS} and the latest tokens",
    "whole": "all tokens",
}


def _ratio(mode: str, times: int) -> str:
    return f"perplexity_ratio_{mode}_{times}"


def _stream(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """Perplexities of the T / 2 tokens before 4 T and 8 T over those of the same tokens in a text that starts anew.

    A text that starts anew has the BOS token and the T / 2 - 1 tokens or more before them, as in training.
    """
    T, bos = loaded.config.data.sequence_length, int(inputs.evaluation[0, 0])
    assert inputs.held_out is not None
    rows = TokenBatches(inputs.held_out, TIMES[-1] * T, 1, 0, bos).spread_rows(ROWS)
    first = np.full((ROWS, 1), bos, np.int32)
    anew = {}
    for times in TIMES:
        row = np.concatenate([first, rows[:, (times - 1) * T + 1 : times * T + 1]], axis=1)
        anew[times] = stream_loss_nats(loaded, row)[:, T // 2 :].mean()
    found = {f"perplexity_anew_{times}": math.exp(loss) for times, loss in anew.items()}
    losses = {}
    for mode, window, sinks in (("window", T, 0), ("sinks", T - SINKS, SINKS), ("whole", None, 0)):
        losses[mode] = stream_loss_nats(loaded, rows, window, sinks)
        for times in TIMES:
            loss = losses[mode][:, times * T - T // 2 : times * T].mean()
            found[_ratio(mode, times)] = math.exp(loss - anew[times])
    on_progress("streams")
    # By quarter of the length of training, for the curves.
    return Measured(found, {name: of.mean(0).reshape(-1, T // 4).mean(1) for name, of in losses.items()})


STREAMED = Measure("streamed", _stream)


def _config() -> Config:
    changes = {
        "model.position": "rotary",
        "data.repeated_share": 1.0,
        "optim.learning_rate": 3e-3,
        "train.steps": 3000,
        "train.checkpoint_every_steps": 250,
        "train.keep_every_steps": 250,  # for the dynamics of one of these runs
    }
    return replace(SHALLOW_MODEL, changes)


def _variants(scale: str) -> tuple[Variant, ...]:
    base = _config()
    return (
        Variant("softmax", "softmax, Adam", base),
        Variant("softmax1", "softmax-1, Adam", with_normalizer(base, "softmax1")),
        Variant("cured", "softmax-1, OrthoAdam", cured(base)),
        Variant("residual", "softmax-1, OrthoAdam, d_model", replace(cured(base), {"optim.rotation.axes": "residual"})),
    )


def _lost(of: Result, mode: str, times: int) -> float:
    """Nats a token."""
    return math.log(of[_ratio(mode, times)])


_WITHOUT = {"softmax-1, Adam": ("softmax1", "softmax"), "softmax-1, OrthoAdam": ("cured", "softmax")}
_D_MODEL = ("residual", "softmax")
_LOST, _KEPT = 1.05, 1.02
_SHOWN = [metric(_ratio("window", times), f"perplexity ratio at {times} T") for times in TIMES]
_WHOLE = [metric(_ratio("whole", times), f"perplexity ratio at {times} T") for times in TIMES]
_SINKING = f"testable where the first token of softmax is most attended by {DOMINANCE:g} times chance or more"


def _needs_no_first_token(says: str, of: Names | Mapping[str, Names]) -> Claim:
    """That the first of two variants predicts as well without it, where the second attends to it."""
    return Claim(
        says,
        of,
        _SHOWN,
        lambda of, softmax: all(of[_ratio("window", times)] < _KEPT for times in TIMES),
        f"perplexity ratio below {_KEPT:g} at 4 and 8 times the length; {_SINKING}",
        lambda of, softmax: dominated(softmax),
        shown=1,
    )


CLAIMS = (
    Claim("Softmax loses its predictions once the first token has left the window.", ("softmax",), _SHOWN,
          lambda of: all(of[_ratio("window", times)] > _LOST for times in TIMES),
          f"perplexity ratio above {_LOST:g} at 4 and 8 times the length; {_SINKING}", dominated),
    Claim(f"With the first {SINKS} tokens kept it does not.", ("softmax",),
          [metric(_ratio("sinks", times), f"perplexity ratio at {times} T") for times in TIMES],
          lambda of: all(_lost(of, "sinks", times) < _lost(of, "window", times) / 3 for times in TIMES),
          f"less than a third of the loss added without them; {_SINKING}", dominated),
    _needs_no_first_token("Softmax-1 needs no first token.", _WITHOUT),
    Claim("With the whole text in view softmax-1 loses less past the length of training than softmax.", _WITHOUT,
          _WHOLE, lambda of, softmax: all(_lost(of, "whole", t) < _lost(softmax, "whole", t) / 2 for t in TIMES),
          f"less than half of the loss that softmax adds; {_SINKING} and that adds to its perplexity",
          lambda of, softmax: dominated(softmax) and min(_lost(softmax, "whole", t) for t in TIMES) > 0),
    # The output axis left outliers here; of these three no run had been seen.
    _needs_no_first_token("(Ours) With the d_model axes rotated OrthoAdam and softmax-1 need none.", _D_MODEL),
    no_outliers_left("(Ours) With these axes they leave no outliers.", _D_MODEL[::-1]),
    dominance_halved("(Ours) With these axes half of the dominance, or more, is gone.", _D_MODEL[::-1]),
)  # fmt: skip


def _table(results: Results) -> Table:
    rows = []
    for mode, words in MODES.items():
        for times in TIMES:
            rows.append([f"{words}, {times} T", *(of.cell(metric(_ratio(mode, times))) for of in results)])
    columns = ["the model sees", *(of.label for of in results)]
    return Table("Perplexity over that of the same tokens in a text that starts anew", columns, rows)


def _curves(results: Results) -> list[Picture]:
    T, pictures = results.first.config.data.sequence_length, []
    for mode, words in MODES.items():
        curves = {}
        for of in results:
            losses = np.array([of.arrays(STREAMED.name, seed)[mode] for seed in of.seeds])
            curves[of.label] = ([(i + 0.5) / 4 for i in range(losses.shape[1])], losses)
        figure = drawing.lines(curves, x_label=f"position / {T}", y_label="loss (nats)")
        pictures.append(Picture(f"loss_{mode}", f"Loss by position where the model sees {words}.", figure))
    return pictures


def _about(results: Results) -> list[str]:
    config = results.first.config
    T = config.data.sequence_length
    anew = " and ".join(results.first.cell(metric(f"perplexity_anew_{times}")) for times in TIMES)
    return [
        f"Rotary positions, {config.train.steps:,} steps of {config.train.batch_size} x {T} tokens of text whose "
        f"passages are repeated. {ROWS} held-out texts of {TIMES[-1]} T = {TIMES[-1] * T} tokens are read token by "
        f"token through a rolling cache of T = {T} tokens, whose positions are those in the cache, and through one of "
        f"all tokens. The same tokens, with T / 2 to T tokens before them that start with BOS, are predicted with a "
        f"perplexity of {anew} by {results.first.label}."
    ]


EXPERIMENT = Experiment(
    name="streaming",
    title="Texts longer than training through a rolling window: softmax needs its first token, softmax-1 does not?",
    variants=_variants,
    about=_about,
    measures=(STREAMED,),
    tables=(_table, MetricTable("Models", ("perplexity", "first_attention_fraction", "first_attention_mass",
                                           "kurtosis_first", "kurtosis_rest"))),
    claims=CLAIMS,
    pictures=(_curves,),
)  # fmt: skip
