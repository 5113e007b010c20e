"""Measures over the recorded steps of a run: its curves, and the gradient of the residual stream of <s>."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike

from orthojax.experiments.active_dormant.mechanism_probe import probe_file
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.model import LoadedModel
from orthojax.train import Inputs, read_metrics

_RISKS = ("backcopy_excess_risk_nats", "bigram_excess_risk_nats")
_BY_LAYER = ("sink_attention_rest", "sink_logit_gap", "value_norm_first", "residual_norm_first")


def half_step(steps: ArrayLike, values: ArrayLike) -> float:
    """Returns the first step at which a curve has made half of its last large change.

    That change is the one to the end from the point that is farthest from it: the start, or the top of a rise.

    >>> half_step([0, 10, 20, 30], [4.0, 3.0, 1.0, 0.0])
    20.0
    >>> half_step([0, 10, 20, 30, 40], [2.0, 6.0, 5.0, 2.0, 1.0])
    30.0
    """
    left = np.abs(np.asarray(values, float) - np.asarray(values, float)[-1])
    farthest = int(np.argmax(left))
    return float(np.asarray(steps)[farthest + np.argmax(left[farthest:] <= 0.5 * left[farthest])])


def _history(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Computes of every curve its start, its largest value, its growth, `half_step`, and fits to late steps.

    The fits are lines over ln t from step 200 on (`log_r`, `log_slope`) and over t from 500 on (`linear_r`,
    `linear_slope`).
    """
    lines = [line for line in read_metrics(loaded.source.parents[1] / "metrics.jsonl") if "sink_attention" in line]
    layers = range(loaded.config.model.num_layers)
    found: dict[str, float] = {}
    for name in (*_RISKS, *(f"{name}/layer_{layer}" for name in _BY_LAYER for layer in layers)):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if len(points) < 2:
            continue
        steps, values = (np.array(column, float) for column in zip(*points, strict=True))
        found[f"{name}/start"], found[f"{name}/half_step"] = float(values[0]), half_step(steps, values)
        found[f"{name}/largest"] = float(values.max())
        if values[0]:
            found[f"{name}/growth"] = float(values[-1] / values[0])
        for kind, x, late in (("log", np.log(np.maximum(steps, 1)), steps >= 200), ("linear", steps, steps >= 500)):
            if late.sum() > 2 and np.ptp(values[late]) > 0:
                found[f"{name}/{kind}_r"] = float(np.corrcoef(x[late], values[late])[0, 1])
                found[f"{name}/{kind}_slope"] = float(np.polyfit(x[late], values[late], 1)[0])
    say("history")
    return Measured(found)


HISTORY = Measure("history", _history)


def mechanism(probes: Sequence[dict[str, np.ndarray]], *, since: int = 200) -> dict[str, float]:
    """Computes what the paper says of the gradient of <s>'s residual stream, by layer.

    The gradient is that of the loss at other positions. `gradient_final_cosine`: its mean cosine with that of the last
    probe. `gradient_decay`: the slope of its logarithm against that of the residual norm; -1 is 1 / norm.
    `gradient_weak_share`, `gradient_key_cosine`: means of `first_token_mechanism`'s. `gradient_own_share`: the mean
    share of the prediction at <s> itself in the squared norms of both gradients. `growth_from/PART`: what the changes
    of a part of the model added to the norm from the first probe to the last, over its growth; left out if a run was
    resumed, which forgets the parameters of the last probe.

    Args:
      probes: The arrays of every probe, in the order of their steps, the first of the start.
      since: The first step that counts, except for the shares of the growth.
    """
    late = [arrays for arrays in probes if arrays["step"] >= since]
    gradients, residuals = (np.stack([of[name] for of in late]).astype(float) for name in
                            ("first_gradient", "first_residual"))  # fmt: skip
    sizes, norms = np.linalg.norm(gradients, axis=-1), np.linalg.norm(residuals, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # after the last block there is no gradient
        cosines = np.einsum("PLD,LD->PL", gradients, gradients[-1]) / (sizes * sizes[-1])
    found: dict[str, float] = {}
    for layer in range(gradients.shape[1]):
        values = {
            "gradient_final_cosine": cosines[:-1, layer].mean(),
            "gradient_decay": _slope(np.log(norms[:, layer]), sizes[:, layer]),
            "gradient_own_share": np.mean([_own_share(of)[layer] for of in late]),
            "gradient_weak_share": np.mean([of["first_gradient_weak_share"][layer] for of in late]),
            "gradient_key_cosine": np.mean([of["first_gradient_key_cosine"][layer] for of in late]),
        }
        found |= {f"{name}/layer_{layer}": float(value) for name, value in values.items() if np.isfinite(value)}
    if any(now["since"] != last["step"] for last, now in itertools.pairwise(probes)):
        return found
    parts: dict[str, np.ndarray] = {}
    for name in probes[-1]:
        if name.startswith("growth/"):
            part = "/".join(name.split("/")[1:3]).removesuffix("_embedding/embedding")
            parts[part] = parts.get(part, 0.0) + np.sum([of[name] for of in probes], axis=0, dtype=float)
    whole = np.sum([of["growth"] for of in probes], axis=0, dtype=float)
    for part, grown in parts.items():
        shares = enumerate(grown / whole)
        found |= {f"growth_from/{part}/layer_{layer}": float(share) for layer, share in shares if share}
    return found


def _slope(x: np.ndarray, sizes: np.ndarray) -> float:
    return float(np.polyfit(x, np.log(sizes), 1)[0]) if np.all(sizes > 0) else np.nan


def _own_share(of: Mapping[str, np.ndarray]) -> np.ndarray:
    own, others = (np.asarray(of[f"first_{name}gradient_norm"], float) ** 2 for name in ("own_", ""))
    return own / (own + others)


def _mechanism(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    folder, probes = loaded.source.parents[1] / "probes", []
    for step in sorted(loaded.config.train.probe_steps):
        with np.load(probe_file(folder, step)) as arrays:
            probes.append({name: arrays[name] for name in arrays})
    say("mechanism")
    return Measured(mechanism(probes))


MECHANISM = Measure("mechanism", _mechanism)  # of runs with `mechanism_probe`
