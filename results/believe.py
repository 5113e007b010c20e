"""What to believe about a recipe, over all committed pairs of runs: python results/believe.py [--write].

A pair is two runs of one seed in results/**/results.json whose configs differ only in the recipe (`RECIPES`); the norm
has one scale, the model predicts the next token of language and is trained in floats. A setting is a config without
seeds, rhythms of evaluation and the recipe; a run that several studies report counts once. `QUANTITIES` are measured on
pairs, y_ij of pair j of setting i (ratios as logarithms), where the model without the recipe has what is to be removed.

1. Variance within a setting: s_i^2 on d_i = n_i - 1 degrees of freedom, drawn towards the common s_0^2 because n_i is
   small (Smyth 2004): v_i = (d_0 s_0^2 + d_i s_i^2) / (d_0 + d_i), with d_0 and s_0^2 from the moments of ln s_i^2. No
   single variance is assumed; a setting of one seed has s_0^2. A setting's mean y_i has the variance v_i / n_i.
2. Between settings: tau^2 solves sum_i (y_i - m)^2 / (v_i / n_i + tau^2) = k - 1 (Paule and Mandel), 0 if none does.
3. Mean m = sum w_i y_i / sum w_i, w_i = 1 / (v_i / n_i + tau^2), with Hartung and Knapp's variance
   q = sum w_i (y_i - m)^2 / ((k - 1) sum w_i): the 95% interval is m +- t(k - 1) sqrt(q), and what a new setting shows
   in the mean (prediction) m +- t(k - 2) sqrt(tau^2 + q). One setting has the t interval over its seeds.

Believed: "yes" if the prediction excludes the value of no effect, "in the mean" if only the interval does, else
"undecided". The 1.4 times, which keep models that have begun to copy apart from those that have not, were chosen after
the data. Settings share code, text and often the model; the four optimizers of the sinks share three seeds.
--write writes believe.md, which a test holds.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special, stats

RESULTS = Path(__file__).parent
DEFAULTS = {"model.normalizer": "softmax1", "optim.optimizer": "orthoadam", "optim.rotation.axes": "d_model",
            "optim.rotation.kind": "hadamard"}  # fmt: skip
NOT_A_SETTING = ("data.seed", "train.seed", "_every_steps", "train.probe", "eval.")
Run = dict[str, float]  # metrics
Pair = tuple[Run, Run]  # without the recipe, with it


class Setting(NamedTuple):
    """Pairs of one config."""

    studies: tuple[str, ...]  # as STUDY/VARIANT of the recipe
    overrides: dict[str, Any]
    pairs: list[Pair]


def runs() -> dict[str, dict[tuple[str, ...], dict[int, tuple[str, Run]]]]:
    """Returns setting -> (normalizer, optimizer, axes, kind) -> seed -> (STUDY/VARIANT, metrics) of language models."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(RESULTS.glob("**/results.json")):
        for row in json.loads(path.read_text())["rows"]:
            of, metrics = row["overrides"], row["metrics"]
            trained = "given" not in row and "run" not in row
            language = of.get("data.kind") != "bigram_backcopy" and "data.objective" not in of
            other = "model.norm" in of or "train.matmul_format" in of  # products of few bits
            if other or not (trained and language and "perplexity" in metrics):
                continue
            setting = {k: v for k, v in of.items() if k not in DEFAULTS and not any(s in k for s in NOT_A_SETTING)}
            recipe = tuple(of.get(name, default) for name, default in DEFAULTS.items())
            recipe = recipe if recipe[1] == "orthoadam" else recipe[:2]  # which alone rotates
            seeds = found[json.dumps(setting, sort_keys=True)][recipe]
            if len(metrics) > len(seeds.get(row["seed"], ("", {}))[1]):  # the same run in several studies: the fullest
                name = f"{path.parent.relative_to(RESULTS)}/{row['variant']}"
                seeds[row["seed"]] = (name, metrics)
    return found


RECIPES: dict[str, Callable[[tuple[str, ...]], tuple[str, ...] | None]] = {  # recipe without -> with; None: no pair
    "softmax-1 and OrthoAdam": lambda without: tuple(DEFAULTS.values()) if without == ("softmax", "adam") else None,
    "learned sinks": lambda without: ("learned_sink", *without[1:]) if without[0] == "softmax" else None,
}


def settings(recipe: str) -> list[Setting]:
    """Returns the settings that have pairs of a recipe."""
    found = []
    for key, by_recipe in runs().items():
        for without, before in by_recipe.items():
            after = by_recipe.get(RECIPES[recipe](without) or (), {})
            both = [seed for seed in before if seed in after]
            studies = tuple(dict.fromkeys(after[seed][0] for seed in both))
            if both:
                found.append(Setting(studies, json.loads(key), [(before[s][1], after[s][1]) for s in both]))
    return found


def _excess_left(setting: Setting) -> list[float]:
    share = "first_attention_fraction"
    chance = (1.0 / np.arange(1, setting.overrides.get("data.sequence_length", 64) + 1)).mean()
    excess = np.array([[of[share] for of in pair] for pair in setting.pairs if share in pair[0]]) - chance
    if not len(excess) or excess[:, 0].mean() < 0.5 * chance:
        return []
    # The ratio of the means, with the scatter that it has (of a ratio estimator): single models have hardly any excess.
    before, after = excess.T
    left = after.mean() / before.mean()
    return list(left + (after - left * before) / before.mean())


def _lost(setting: Setting, name: str) -> list[float]:
    pairs = [pair for pair in setting.pairs if all(f"perplexity_{name}" in of for of in pair)]
    lost = np.array([[of[f"perplexity_{name}"] / of["perplexity"] - 1 for of in pair] for pair in pairs])
    lost = np.maximum(lost, 1e-4)  # where rounding gains
    return list(np.log(lost[:, 1] / lost[:, 0])) if len(lost) and lost[:, 0].mean() >= 0.01 else []


def _perplexity(setting: Setting) -> list[float]:
    return [float(np.log(after["perplexity"] / before["perplexity"])) for before, after in setting.pairs]


def _copied(setting: Setting) -> list[float]:
    shown = [of["perplexity"] for pair in setting.pairs for of in pair]
    return _perplexity(setting) if max(shown) <= 1.4 * min(shown) else []


def _kurtosis(setting: Setting) -> list[float]:
    found = [of for _, of in setting.pairs if "kurtosis_first" in of]
    return [float(np.log(max(of["kurtosis_first"], of["kurtosis_rest"]))) for of in found]


class Quantity(NamedTuple):
    """What is measured on the pairs of a setting."""

    says: str
    values: Callable[[Setting], list[float]]
    none: float  # the value of no effect, on the scale of `values`
    shown: Callable[[float], str]


def _rotary(setting: Setting) -> bool:
    return setting.overrides.get("model.position") == "rotary"


def _ratio(log: float) -> str:
    return f"{np.exp(log):.2f}"


def _percent(log: float) -> str:
    return f"{np.expm1(log):+.2%}"


_LEFT = "excess of the sink left, vanilla 1.5 times chance"
LOSSES = [("int8, one scale per tensor", "int8_coarse"), ("w4a4", "w4a4"), ("NVFP4", "nvfp4")]
QUANTITIES = [
    Quantity(_LEFT, _excess_left, 1.0, "{:.2f}".format),
    Quantity("the same, learned positions", lambda of: [] if _rotary(of) else _excess_left(of), 1.0, "{:.2f}".format),
    Quantity("the same, rotary positions", lambda of: _excess_left(of) if _rotary(of) else [], 1.0, "{:.2f}".format),
    Quantity("larger kurtosis with the recipe, outliers above 3.5", _kurtosis, np.log(3.5), _ratio),
    *(Quantity(f"loss at {says}, with / without, where it is 1% or more", lambda of, name=name: _lost(of, name), 0.0,
               _ratio) for says, name in LOSSES),
    Quantity("perplexity", _perplexity, 0.0, _percent),
    Quantity("the same, all models of a setting within 1.4 times each other", _copied, 0.0, _percent),
]  # fmt: skip


class Effect(NamedTuple):
    """The mean over settings, its interval, and that of a new setting's mean."""

    settings: int
    pairs: int
    mean: float
    interval: tuple[float, float]
    prediction: tuple[float, float] | None


def _root(of: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.brentq(of, low, high))  # pyright: ignore[reportArgumentType]


def _variances(groups: list[np.ndarray]) -> np.ndarray:
    freedom = np.array([len(of) - 1 for of in groups])
    own = np.array([of.var(ddof=1) if len(of) > 1 else 0.0 for of in groups])
    d, s = freedom[freedom > 0], own[freedom > 0]
    logs = np.log(s) - special.digamma(d / 2) + np.log(d / 2)
    spread = logs.var(ddof=1) - special.zeta(2, d / 2).mean() if len(s) > 1 else 0.0  # zeta(2, x): trigamma
    if spread <= 0:  # no more than chance: one variance
        return np.full(len(groups), (d * s).sum() / d.sum())
    prior = 2 * _root(lambda x: special.zeta(2, x) - spread, 1e-3, 1e6)
    common = np.exp(logs.mean() + special.digamma(prior / 2) - np.log(prior / 2))
    return (prior * common + freedom * own) / (prior + freedom)


def effect(groups: list[list[float]]) -> Effect:
    """Returns the random-effects mean of settings of at least one pair each; see the head of this file."""
    arrays = [np.array(of) for of in groups]
    k, n, y = len(arrays), np.array([len(of) for of in arrays]), np.array([of.mean() for of in arrays])
    within = _variances(arrays) / n

    def weighted(tau2: float) -> tuple[np.ndarray, float, float]:
        w = 1 / (within + tau2)
        mean = float((w * y).sum() / w.sum())
        return w, mean, float((w * (y - mean) ** 2).sum())

    if k == 1:
        half = stats.t.ppf(0.975, n[0] - 1) * within[0] ** 0.5
        return Effect(1, int(n[0]), float(y[0]), (y[0] - half, y[0] + half), None)
    heterogeneous = weighted(0.0)[2] > k - 1
    tau2 = _root(lambda of: weighted(of)[2] - (k - 1), 0.0, 100 * y.var() + 1) if heterogeneous else 0.0
    w, mean, q = weighted(tau2)
    variance = q / ((k - 1) * w.sum())
    half = stats.t.ppf(0.975, k - 1) * variance**0.5
    wide = stats.t.ppf(0.975, k - 2) * (tau2 + variance) ** 0.5 if k > 2 else None
    prediction = None if wide is None else (mean - wide, mean + wide)
    return Effect(k, int(n.sum()), mean, (mean - half, mean + half), prediction)


def believed(of: Effect, none: float) -> str:
    """Returns whether an effect is believed: of a new setting, in the mean, or not."""
    excludes = [between is not None and not between[0] <= none <= between[1] for between in of[3:]]
    return "yes" if all(excludes) else "in the mean" if excludes[0] else "undecided"


def table(recipe: str) -> list[tuple[Quantity, Effect]]:
    """Returns the quantities that a recipe's pairs have, with their effects."""
    pairs = settings(recipe)
    found: list[tuple[Quantity, list[list[float]]]] = []
    for quantity in QUANTITIES:
        groups = [values for of in pairs if (values := quantity.values(of))]
        if groups and groups not in [of for _, of in found]:  # no part that is the whole
            found.append((quantity, groups))
    return [(quantity, effect(groups)) for quantity, groups in found]


HEAD = """# What to believe

Written by `python results/believe.py --write`, which has the equations: random effects over settings (Hartung and
Knapp), 95% intervals. The prediction is of the mean that a new setting would show."""


def report() -> str:
    """Returns believe.md."""
    lines = [HEAD]
    for recipe in RECIPES:
        rows = [
            "| quantity | settings, pairs | mean | interval | prediction | believed |",
            "|---" + "|---:" * 4 + "|---|",
        ]
        for what, of in table(recipe):
            spans = [" to ".join(map(what.shown, between)) if between else "-" for between in of[3:]]
            cells = [what.says, f"{of.settings}, {of.pairs}", what.shown(of.mean), *spans, believed(of, what.none)]
            rows.append(f"| {' | '.join(cells)} |")
        studies = ", ".join(f"{of.studies[0]} ({len(of.pairs)})" for of in settings(recipe))
        lines += [f"## {recipe[0].upper()}{recipe[1:]}", "\n".join(rows), f"Settings, with their pairs: {studies}."]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    print(report())
    if "--write" in sys.argv:
        (RESULTS / "believe.md").write_text(report())
