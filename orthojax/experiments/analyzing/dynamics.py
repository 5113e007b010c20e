"""Checkpoints of one training run in the order of their steps: when sinks, drains and peaks come, and four verdicts.

The verdicts are those that Active-Dormant Attention Heads (arXiv 2410.13835) has of OLMo-7B's checkpoints: the first
token takes attention, its values shrink, its residual norm grows with the steps, and logits on it rise above others.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from orthojax.analysis import chance_of_first
from orthojax.errors import UserError
from orthojax.experiments import drawing
from orthojax.experiments.analyzing.measuring import Measured
from orthojax.experiments.analyzing.report import SHORT_LABELS, label
from orthojax.experiments.chance import all_chance_lines
from orthojax.experiments.claims import DOMINANCE, Claim, judge
from orthojax.experiments.overview import equal_logits_mass_of_first
from orthojax.experiments.page import Picture, Report, Table
from orthojax.experiments.results import Result, Results
from orthojax.formatting import number
from orthojax.train.checkpoint import steps_in

_DRAINED, _PEAKED, _ON_A_LINE, _ROSE = 0.5, 2.0, 0.9, 1.0
_COLUMNS = (
    *("perplexity", "first_attention_fraction", "first_attention_mass", "sink_rate", "sink_logit_gap"),
    *("kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest"),
    *("value_norm_first", "value_norm_rest", "residual_norm_first", "residual_norm_rest"),
)
_ON_LOG_SCALE = ("perplexity", "kurtosis")  # of the pictures
_OF_BOTH = {"_first": "first token", "_rest": "others"}


def checkpoint_series(given: Sequence[str]) -> dict[str, str]:
    """Step -> path, by step, of the checkpoints of one run.

    Args:
      given: STEP=PATH, several with commas between; or one workdir of train.py, or its `checkpoints` folder, for all
        that are kept there.

    Raises:
      UserError: For other names than steps, a step twice, or fewer than two checkpoints.
    """
    found: dict[int, str] = {}
    for part in (part for text in given for part in text.split(",")):
        name, equals, path = part.partition("=")
        if not equals:
            series = _kept_in(Path(part))
        elif name.isdecimal() and path:
            series = {int(name): path}
        else:
            raise UserError(f"--dynamics with --model={part!r}", allowed="STEP=PATH, or the workdir of a run")
        if twice := found.keys() & series.keys():
            raise UserError(f"--dynamics with step {min(twice)} twice", allowed="the checkpoints of one run")
        found |= series
    if len(found) < 2:
        raise UserError(f"--dynamics with {len(found)} checkpoint{'s' * (len(found) != 1)}", allowed="at least two")
    return {str(step): found[step] for step in sorted(found)}


def _kept_in(path: Path) -> dict[int, str]:
    for folder in (path / "checkpoints", path):
        if steps := steps_in(folder):
            return {step: str(folder / str(step)) for step in steps}
    raise UserError(f"--dynamics: no checkpoints of a run in {path}", allowed="a workdir of train.py, or STEP=PATH")


def _sink_layer(of: Sequence[Result]) -> int:
    """The layer with most weight on the first token at the end."""
    return int(np.argmax(of[-1].by_layer("first_attention_mass")))


def _ratios(of: Sequence[Result], name: str) -> np.ndarray:
    """First token over others, [steps, layers]; nan where a layer has neither."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.array([r.by_layer(f"{name}_first") / r.by_layer(f"{name}_rest") for r in of])


def _masses(*of: Result) -> np.ndarray:
    layer = _sink_layer(of)
    return np.array([r[f"first_attention_mass/layer_{layer}"] for r in of])


def _chance(of: Result) -> float:
    """What equal logits give the first token; of normalizers that have no such level, that of softmax."""
    mass = equal_logits_mass_of_first(of.config)
    return chance_of_first(of.sequence_length, window=of.config.model.attention_window) if mass is None else mass


def _sinks(*of: Result) -> bool:
    masses = _masses(*of)
    return bool(masses[-1] >= DOMINANCE * _chance(of[-1]) and masses[-1] > masses[0])


def _drains(*of: Result) -> np.ndarray:
    return _ratios(of, "value_norm")[:, _sink_layer(of)]


def _peak_layer(of: Sequence[Result]) -> int:
    return int(np.nanargmax(_ratios(of, "residual_norm")[-1]))


def _peaks(*of: Result) -> np.ndarray:
    return _ratios(of, "residual_norm")[:, _peak_layer(of)]


def _growth(*of: Result) -> np.ndarray:
    layer = _peak_layer(of)
    return np.array([r[f"residual_norm_first/layer_{layer}"] for r in of])


def _correlation(*of: Result) -> float:
    """Of the residual norm of the first token with the steps, in the layer of the peak."""
    norms = _growth(*of)
    return float(np.corrcoef(_steps(of), norms)[0, 1]) if np.ptp(norms) else 0.0


def _gaps(*of: Result) -> np.ndarray:
    layer = _sink_layer(of)
    return np.array([r[f"sink_logit_gap/layer_{layer}"] for r in of])


def _steps(of: Sequence[Result]) -> list[int]:
    return [int(r.name) for r in of]


def _from_to(values: np.ndarray, layer: int, words: str) -> str:
    return f"{words}, layer {layer}: {number(float(values[0]))} → {number(float(values[-1]))}"


def _all(results: Results) -> Mapping[str, Sequence[str]]:
    return {"": [result.name for result in results]}


CLAIMS = (
    Claim("The first token becomes a sink. The paper, OLMo-7B: 0.38 → 0.60.", _all, (), _sinks,
          f"its mean weight, in the layer with most of it, ends at {DOMINANCE:g} times what equal logits give or more, "
          "and above where it started",
          detail=lambda *of: f"{_from_to(_masses(*of), _sink_layer(of), 'mean weight')} (equal logits "
                             f"{_chance(of[-1]):.3f})"),
    Claim("Its values are drained. The paper, OLMo-7B: 1.4 → 0.25, others 1.9 to 2.1.", _all, (),
          lambda *of: bool(_drains(*of)[-1] < min(_DRAINED, _drains(*of)[0])),
          f"the norm of its value ends below {_DRAINED:g} times the others', and this ratio below where it started, in "
          "the layer of the sink; testable where there is one", _sinks,
          detail=lambda *of: _from_to(_drains(*of), _sink_layer(of), "value norm over the others'")),
    Claim("Its residual norm peaks, and grows on a line with the steps. The paper, OLMo-7B: about 110 at 25,000 steps, "
          "1,880 at 449,000.", _all, (),
          lambda *of: bool(_peaks(*of)[-1] > _PEAKED and _correlation(*of) > _ON_A_LINE),
          f"it ends above {_PEAKED:g} times the others', in the layer where that is most, and its correlation with the "
          f"steps is above {_ON_A_LINE:g}; testable where there is a sink", _sinks,
          detail=lambda *of: f"{_from_to(_growth(*of), _peak_layer(of), 'norm')}, correlation {_correlation(*of):.2f}; "
                             f"at the end {number(float(_peaks(*of)[-1]))} times the others'"),
    Claim("Logits on it rise above those on other keys. The paper, OLMo-7B: about 0 → 1.7 to 2.4.", _all, (),
          lambda *of: bool(_gaps(*of)[-1] - _gaps(*of)[0] > _ROSE),
          f"by more than {_ROSE:g}, mean over queries and heads, in the layer of the sink; testable where there is one",
          _sinks, detail=lambda *of: _from_to(_gaps(*of), _sink_layer(of), "logit gap")),
)  # fmt: skip


def dynamics_report(measured: Mapping[str, Measured], results: Results, notes: Sequence[str]) -> Report:
    """The page of a run; `measured` and `results` hold its checkpoints, called by their steps."""
    metrics = {step: of.metrics for step, of in measured.items()}
    steps = [int(step) for step in metrics]
    columns = [name for name in _COLUMNS if all(name in of for of in metrics.values())]
    rows = [[step, *(number(of[name]) for name in columns)] for step, of in metrics.items()]
    tables = [Table("By step, means over layers", ["step", *map(_short, columns)], rows)]
    settings = [name for name in next(iter(metrics.values())) if name.startswith("perplexity_")]
    settings = [name for name in settings if all(name in of for of in metrics.values())]
    of = list(results)
    sink, peak = _sink_layer(of), _peak_layer(of)

    def curves(*names: str, layer: int | None = None) -> dict[str, tuple[list[int], np.ndarray]]:
        place = "" if layer is None else f"/layer_{layer}"
        words = {name: _OF_BOTH.get(name[name.rfind("_") :], _short(name)) for name in names}
        return {words[name]: (steps, np.array([[m[name + place] for m in metrics.values()]])) for name in names}

    shown = {
        "perplexity": ("Perplexity.", "perplexity", curves("perplexity")),
        "attention": (f"Attention to the first token in layer {sink}, that of the sink.", "fraction",
                      curves("first_attention_fraction", "first_attention_mass", layer=sink)),
        "logit_gap": (f"Logits on the first token less the mean on other keys, layer {sink}.", "logits",
                      curves("sink_logit_gap", layer=sink)),
        "value_norms": (f"Norms of values, layer {sink}.", "norm",
                        curves("value_norm_first", "value_norm_rest", layer=sink)),
        "residual_norms": (f"Norms of the residual stream after layer {peak}, that of the peak.", "norm",
                           curves("residual_norm_first", "residual_norm_rest", layer=peak)),
        "kurtosis": ("Kurtosis of the residual stream, mean over layers.", "kurtosis",
                     curves("kurtosis_first", "kurtosis_rest")),
    }  # fmt: skip
    if settings:
        damage = {
            label(name): (steps, np.array([[100 * (m[name] / m["perplexity"] - 1) for m in metrics.values()]]))
            for name in settings
        }
        shown["quantisation"] = ("What quantisation does to perplexity.", "change of perplexity, %", damage)
    chance = all_chance_lines("first_attention_mass", of)
    pictures = [
        Picture(name, caption, drawing.lines(of, x_label="step", y_label=y,
                                             y_scale="log" if name in _ON_LOG_SCALE else "linear",
                                             references=chance if name == "attention" else {}))
        for name, (caption, y, of) in shown.items()
    ]  # fmt: skip
    summary = [
        f"{len(steps)} checkpoints of one run, from step {steps[0]:,} to {steps[-1]:,}. One run is an anecdote. The "
        "layers of the sink and of the peak are those where they are largest at the end; layers count from 0."
    ]
    links = [("all results", "results.json"), *((f"step {step}", f"{step}/report.html") for step in measured)]
    return Report("Sinks, drains and peaks over training", summary, [judge(claim, results) for claim in CLAIMS],
                  tables, pictures, notes, links)  # fmt: skip


def _short(name: str) -> str:
    return SHORT_LABELS.get(name, label(name))
