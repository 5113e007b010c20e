"""The theory of Active-Dormant Attention Heads in numbers: gradient flow of sinks and drains, and the two norm toys."""

import functools
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax

from orthojax.experiments.active_dormant import norm_growth, sink_flow
from orthojax.experiments.active_dormant.runs import letters
from orthojax.experiments.claims import Claim, Metric, all_of
from orthojax.experiments.figures import lines
from orthojax.experiments.pictures import ByStep, Points
from orthojax.experiments.report import Picture
from orthojax.experiments.results import Results
from orthojax.experiments.study import Row, Study
from orthojax.experiments.tables import Columns

# Sinks and drains.

_POSITION, _CONTEXTS = 32, 8
_HELD_TIMES, _JOINT_TIMES = range(17), range(11)  # powers of ten
_LATE = 1e12
_DECAYS = (5, 10, 15, 20, 25)  # times, in 1 / the slowest rate


def chains(seed: int) -> tuple[sink_flow.Chain, sink_flow.Chain]:
    """Returns a query with the mean context, as in the theory, and one with contexts of real sequences."""
    task = letters()
    size = task.vocab_size - 1
    values = np.random.default_rng([seed, 0]).standard_normal(size)
    seen = np.asarray(task.batch(0, _CONTEXTS, _POSITION, seed))[:, 1:]
    counts = np.stack([np.bincount(row, minlength=size) for row in seen]).astype(float)
    mean = _POSITION * task.marginal[None, :size]
    return sink_flow.Chain.of_task(task, values, mean), sink_flow.Chain.of_task(task, values, counts)


def _slopes(times: np.ndarray, alpha: np.ndarray, decades: float) -> np.ndarray:
    """Returns the slopes of alpha [times, K] in ln t over the last decades, [K]."""
    late = times >= times[-1] / 10**decades * (1 - 1e-9)
    return np.polyfit(np.log(times[late]), alpha[late], 1)[0]


def _times(powers: range) -> np.ndarray:
    return np.geomspace(1, 10.0 ** powers[-1], 4 * powers[-1] + 1)


def _held_value(chain: sink_flow.Chain, rng: np.random.Generator) -> Row:
    """Lets the logits move, with the value of <s> held at 0."""
    start, times = rng.standard_normal(len(chain.weights)), _times(_HELD_TIMES)
    alpha, _ = sink_flow.flow(chain, start, np.zeros(chain.rows.shape[1]), times, hold="beta")
    rates = chain.weights * chain.curvatures()
    forms = [sink_flow.half_log(times, a, rate, chain.others) for a, rate in zip(start, rates, strict=True)]
    closed, slopes = np.stack(forms, axis=1), _slopes(times, alpha, 2)
    metrics = {
        "slope_min": float(slopes.min()),
        "slope_max": float(slopes.max()),
        "closed_form_error": float(np.abs(alpha - closed)[times >= 0.99 * _LATE].max()),
        "asymptote_error": float(np.abs(alpha[-1] - sink_flow.half_log_asymptote(times[-1], rates)).max()),
        "spread_early": float(alpha[times <= 1.01 * _LATE][-1].std()),
        "spread": float(alpha[-1].std()),
    }
    for log in _HELD_TIMES:
        metrics[f"alpha/log_{log}"] = float(chain.weights @ alpha[4 * log])
        metrics[f"closed/log_{log}"] = float(chain.weights @ closed[4 * log])
    return Row("value_held", metrics)


def _held_logits(chain: sink_flow.Chain, alpha: float, rng: np.random.Generator) -> Row:
    """Lets the value of <s> move, with all logits held."""
    start = rng.standard_normal(chain.rows.shape[1])
    rate = sink_flow.bos_rates(chain, alpha)[1]
    times = np.array(_DECAYS) / rate
    _, beta = sink_flow.flow(chain, np.full(len(chain.weights), alpha), start, times, hold="alpha")
    fixed = sink_flow.bos_fixed_point(alpha, chain.contexts[0], start)
    distance = np.linalg.norm(beta - fixed, axis=1)
    measured = -np.log(distance[2] / distance[1]) / (times[2] - times[1])
    metrics = {
        "rate_ratio": float(measured / rate),
        "fixed_point_error": float(distance[-1] / np.linalg.norm(start - fixed)),
        "mean_drift": float(np.abs(beta.mean(1) - start.mean()).max()),
        "value_norm": float(np.std(fixed)),
        "value_norm_others": float(np.std(chain.contexts[0])),
    }
    return Row(f"logits_held_{alpha:g}", metrics)


def _joint(chain: sink_flow.Chain, name: str, rng: np.random.Generator) -> Row:
    """Lets both move."""
    start = rng.standard_normal(len(chain.weights)), rng.standard_normal(chain.rows.shape[1])
    times = _times(_JOINT_TIMES)
    alpha, beta = sink_flow.flow(chain, *start, times)
    spread, drained = sink_flow.distance_to_stationary(alpha[-1], beta[-1], chain)
    weight = np.exp(alpha[-1]) / (np.exp(alpha[-1]) + chain.others) @ chain.weights
    constants, value_sum = (rng.standard_normal(), rng.standard_normal()), chain.contexts.mean(0)
    point = sink_flow.stationary_point(*constants, value_sum, len(alpha[0]))
    metrics = {
        "loss_ratio": chain.loss(alpha[-1], beta[-1]) / chain.loss(*start),
        "gradient_on_set": float(max(np.abs(g).max() for g in chain.gradients(*point))),
        "slope": float(_slopes(times, alpha, 1) @ chain.weights),
        "spread": spread,
        "not_drained": drained,
        "bos_weight": float(weight),
        "alpha": float(chain.weights @ alpha[-1]),
    }
    return Row(name, metrics)


def _flows(seed: int) -> Iterator[Row]:
    one, several = chains(seed)
    rng = np.random.default_rng([seed, 1])
    yield _held_value(one, rng)
    for alpha in (0.0, 2.0, 4.0):
        yield _held_logits(one, alpha, rng)
    yield _joint(one, "joint", rng)
    yield _joint(several, "joint_contexts", rng)


def _half_log_growth(results: Results) -> list[Picture]:
    of, at = results["value_held"], [log * np.log(10) for log in _HELD_TIMES]
    curves = {words: (at, np.array([of.values(f"{key}/log_{log}") for log in _HELD_TIMES]).T)
              for words, key in {"gradient flow": "alpha", "closed form": "closed"}.items()}  # fmt: skip
    drawn = lines({"": curves}, x_label="ln t", y_label="logit on <s>, mean over tokens")
    return [Picture("half_log_growth", "Logits on <s> under gradient flow, the value of <s> held at 0.", drawn)]


_SLOPE_MIN, _SLOPE_MAX, _SPREAD, _SPREAD_EARLY, _CLOSED, _ASYMPTOTE = (Metric(name) for name in (
    "slope_min", "slope_max", "spread", "spread_early", "closed_form_error", "asymptote_error"))  # fmt: skip
_RATE, _FIXED, _DRIFT = Metric("rate_ratio"), Metric("fixed_point_error"), Metric("mean_drift")
_ON_SET, _NOT_DRAINED, _WEIGHT = Metric("gradient_on_set"), Metric("not_drained"), Metric("bos_weight")
_LATE_ALPHA, _LAST_ALPHA = Metric("alpha/log_12"), Metric("alpha/log_16")

SINK_THEORY = Study(
    name="sink_theory",
    title="Theory of sinks: half-log growth of their logits, the value of <s>, the stationary set",
    rows=_flows,
    note="The bigram half of the simplified model, whose MLP knows the bigram law, so that its head can only do harm. "
    f"Gradient flow in float64 from random logits and values, beside closed forms, of a query at position {_POSITION} "
    "that sees the mean context, or contexts of real sequences. Of seeds 0 to 4, up to t = 1e12 and 1e8, the three "
    "claims of (a) and one of (c) failed on rare tokens, which are slow and had not arrived; times are longer since, "
    "criteria the same, and seeds others.",
    tables=[
        Columns("(a) The value held", "slope_min slope_max closed_form_error spread", rows="value_held"),
        Columns("(b) The logits held", "rate_ratio fixed_point_error value_norm value_norm_others",
                rows="logits_held_*"),
        Columns("(c) Both move", "alpha spread not_drained bos_weight slope loss_ratio", rows="joint joint_contexts"),
    ],
    claims=[
        Claim("(a) With the value of <s> held, every logit on <s> grows as ln t / 2.",
              all_of((of["value_held"] > 0.48) & (of["value_held"] < 0.52) for of in (_SLOPE_MIN, _SLOPE_MAX))
              .in_every_seed()),
        Claim("It follows the closed form, and ends at ln(2 pi_v Var_v t) / 2: from t = 1e12 on, and at 1e16.",
              ((_CLOSED["value_held"] < 0.01) & (_ASYMPTOTE["value_held"] < 0.02)).in_every_seed()),
        Claim("The logits of different tokens concentrate: their differences stop while they grow.",
              (abs(_SPREAD["value_held"] / _SPREAD_EARLY["value_held"] - 1) < 0.1)
              & (_LAST_ALPHA["value_held"] > _LATE_ALPHA["value_held"] + 4)),
        Claim("(b) With the logits held, the value of <s> converges exponentially, at the predicted rate.",
              ((_RATE["logits_held_*"] > 0.99) & (_RATE["logits_held_*"] < 1.01)).in_every_seed()),
        Claim("It goes to mean(beta_0) 1 + exp(-alpha) (mean(xi) 1 - xi), and its mean is conserved.",
              ((_FIXED["logits_held_*"] < 1e-6) & (_DRIFT["logits_held_*"] < 1e-6)).in_every_seed()),
        Claim("(c) If all logits are alpha and beta = c - exp(-alpha) xi, nothing moves (at a random point).",
              (_ON_SET["joint"] < 1e-12).in_every_seed()),
        Claim("Gradient flow ends there: the logits become equal, and the value cancels the others'.",
              ((_SPREAD["joint"] < 1e-3) & (_NOT_DRAINED["joint"] < 1e-3)).in_every_seed()),
        Claim("Mutual reinforcement makes these equal logits large.", _WEIGHT["joint"] > 0.5),
        Claim("With contexts that differ no value of <s> cancels all of them: the logits go on growing as ln t / 2, "
              "while the value cancels their mean.",
              (Metric("slope")["joint_contexts"] > 0.45) & (Metric("slope")["joint_contexts"] < 0.6)
              & (_WEIGHT["joint_contexts"] > 0.9)),
    ],
    pictures=[_half_log_growth],
)  # fmt: skip

# The norm toys.

_RATE_OF_PAPER, _NORM, _LONG = 0.3, 10.0, 40_000
_NORMS_OF_PAPER = {1000: 27.9, 2500: 33.6, 5000: 41.7, 7500: 51.2, 10_000: 64.0}
_STEPS_SHOWN = (1, *_NORMS_OF_PAPER, 20_000, 30_000, 40_000)
_COSINE, _START = 0.5, (1.0, 1.0)
_LOG_TIMES = range(11)
_LAYER_NORM_STEPS, _STEPS, _B1, _B2 = 30_000, 10_000, 0.9, 0.99
# The residual-norm toy in d dimensions: rate, width, eps, decay.
_SETTINGS = {f"rate{a:g}_d{d}_eps{e:g}_decay{w:g}": (a, d, e, w) for a, d, e, w in (
    *itertools.product((3e-4, 1e-3, 3e-3), (64, 256), (1e-30,), (0.0,)),
    *itertools.product((1e-3,), (64, 256), (1e-30, 1e-8), (0.0, 0.1)),
)}  # fmt: skip


@functools.cache  # nothing here is drawn
def _published() -> list[Row]:
    gradient, rows = norm_growth.residual_norm_gradient(np.ones(1)), []
    for name, optimizer in {"adam": optax.adam(_RATE_OF_PAPER), "sgd": optax.sgd(_RATE_OF_PAPER)}.items():
        norms = np.asarray(norm_growth.train(optimizer, jnp.full((1, 1), _NORM), gradient, _LONG))[:, 0, 0]
        flow = norm_growth.residual_norm_flow(np.arange(1, _LONG + 1), _NORM, _RATE_OF_PAPER)
        moved = np.diff(norms)
        metrics = {f"norm/step_{step}": float(norms[step - 1]) for step in _STEPS_SHOWN}
        metrics |= {
            "flow_error": float(np.max(np.abs(norms / flow - 1))),
            "linear_r": float(np.corrcoef(np.arange(1000, 10_000), norms[1000:10_000])[0, 1]),
            "update_5k": float(moved[5000] / _RATE_OF_PAPER),
            "update_10k": float(moved[9999] / _RATE_OF_PAPER),
            "late_over_early": float((norms[19_999] - norms[9999]) / (norms[9999] - norms[0])),
        }
        rows.append(Row(f"published_{name}", metrics))
    return rows


@functools.cache
def _layer_norm() -> list[Row]:
    path = norm_growth.layer_norm_flow([10.0**log for log in _LOG_TIMES], _START, _COSINE)
    norms = np.sqrt(path[:, 0] ** 2 + 2 * _COSINE * path[:, 0] + 1)
    exact = norm_growth.norm_along_flow(path[:, 1], _START, _COSINE)
    metrics = {"invariant_error": float(np.max(np.abs(norms / exact - 1)))}
    metrics["logit_slope"] = float((path[-1, 1] - path[-3, 1]) / (2 * np.log(10)))
    rows = [Row("layer_norm_flow", metrics)]
    for b2, rate in itertools.product((0.99, 0.999), (9e-5, 3e-4, 9e-4)):
        m, y = norm_growth.train(
            optax.adam(rate, _B1, b2, 1e-60),
            (jnp.array(_START[0]), jnp.array(_START[1])),
            lambda my, t: norm_growth.layer_norm_gradient(my[0], my[1], _COSINE),
            _LAYER_NORM_STEPS,
        )
        half = _LAYER_NORM_STEPS // 2
        norm_slope, logit_slope = (float((of[-1] - of[half]) / (_LAYER_NORM_STEPS - 1 - half)) for of in (m, y))
        metrics = {
            "norm_slope": norm_slope,
            "logit_slope": logit_slope,
            "predicted_logit_slope": norm_growth.adam_logit_slope(rate, _B1, b2),
            "linear_r": float(np.corrcoef(np.arange(half, _LAYER_NORM_STEPS), np.asarray(m)[half:])[0, 1]),
        }
        rows.append(Row(f"layer_norm_{rate:g}_{b2:g}", metrics))
    return rows


def _toys(seed: int) -> Iterator[Row]:
    """Yields both toys; the seed is that of start and direction in d dimensions."""
    yield from (*_published(), *_layer_norm())
    for name, (rate, width, eps, decay) in _SETTINGS.items():
        rng = np.random.default_rng([seed, width])
        direction = rng.choice([-1.0, 1.0], width) / np.sqrt(width)
        start = rng.standard_normal(width)
        start -= direction * (direction @ start)
        start *= _NORM / np.linalg.norm(start)
        gradient = norm_growth.residual_norm_gradient(direction)
        adam = optax.adamw(rate, _B1, _B2, eps, weight_decay=decay)
        norms = np.linalg.norm(np.asarray(norm_growth.train(adam, jnp.asarray(start), gradient, _STEPS)), axis=1)
        predicted = norm_growth.adam_norm_growth(width**0.5, _STEPS, rate, _NORM, b1=_B1, b2=_B2, eps=eps, decay=decay)
        half = _STEPS // 2
        slope, by_theory = (float((of[-1] - of[half]) / (_STEPS - 1 - half)) for of in (norms, predicted))
        metrics = {"norm": float(norms[-1]), "predicted_norm": float(predicted[-1]), "slope": slope}
        yield Row(name, metrics | {"predicted_slope": by_theory, "slope_in_rates": slope / (rate * width**0.5)})


_SLOPE, _PREDICTED, _IN_RATES = Metric("slope"), Metric("predicted_slope"), Metric("slope_in_rates")
_LOGIT_SLOPE, _PREDICTED_LOGIT = Metric("logit_slope"), Metric("predicted_logit_slope")
_LINEAR, _LONGER = Metric("linear_r"), Metric("late_over_early")
_LAYER_NORM = [f"layer_norm_{rate:g}_{b2:g}" for b2 in (0.99, 0.999) for rate in (9e-5, 3e-4, 9e-4)]
_FREE = [name for name, (_, _, eps, decay) in _SETTINGS.items() if eps < 1e-20 and not decay]
_EPS, _NO_EPS = "rate0.001_d64_eps1e-08_decay0", "rate0.001_d64_eps1e-30_decay0"
# Nothing is drawn in the scalar toys, so that there are no fresh seeds.
_PROTOTYPE = "a prototype of the same computation, which has no seed, had been run before"

NORM_TOYS = Study(
    name="norm_toys",
    title="Theory of the residual norm: the residual-norm and the layer-norm toy under SGD and Adam",
    rows=_toys,
    note="The paper says that LayerNorm makes the gradient of the residual norm of <s> decay, and that Adam makes "
    "constant updates of it, hence linear growth. If a gradient decays by gamma a step, Adam's updates have a "
    "constant size r(gamma), provided that gamma is below -ln(b2) / 2; otherwise the second moment remembers what is "
    "gone, and updates decay as well. Below eps Adam is SGD of the rate eta / eps.",
    paper={
        "published_adam": {f"norm/step_{step}": norm for step, norm in _NORMS_OF_PAPER.items()},
        "published_sgd": {"norm/step_1000": 10.007, "norm/step_10000": 10.013},
    },
    tables=[
        Columns("The published residual-norm toy: m by step", [f"norm/step_{step}" for step in _STEPS_SHOWN],
                rows="published_*"),
        Columns("The layer-norm toy: slopes per step (flow: of the logit in ln t)",
                [_LOGIT_SLOPE, _PREDICTED_LOGIT, "norm_slope", _LINEAR], rows="layer_norm_*"),
        Columns("The residual-norm toy in d dimensions under Adam, over the second half",
                ["norm predicted_norm", _SLOPE, _PREDICTED, _IN_RATES], rows="rate*"),
    ],
    claims=[
        Claim("The published residual-norm toy gives its published norms under Adam.",
              all_of(abs(Metric(f"norm/step_{step}")["published_adam"] / norm - 1) < 0.01
                     for step, norm in _NORMS_OF_PAPER.items()), added=_PROTOTYPE),
        Claim("Under SGD its norm follows (m0^4 + 2 eta ln^2 t)^(1/4), which is no growth.",
              (Metric("flow_error")["published_sgd"] < 1e-3)
              & (Metric("norm/step_10000")["published_sgd"] < 1.01 * _NORM), added=_PROTOTYPE),
        Claim("Adam's growth of the published toy is linear, up to 10,000 steps and over the next 10,000.",
              (_LINEAR["published_adam"] > 0.98) & (_LONGER["published_adam"] > 0.5) & (_LONGER["published_adam"] < 2),
              added=_PROTOTYPE),
        Claim("It is since Adam turns decaying gradients into constant updates, of about its rate.",
              (Metric("update_5k")["published_adam"] > 0.5) & (Metric("update_10k")["published_adam"] > 0.5),
              added=_PROTOTYPE),
        Claim("In the layer-norm toy gradient flow moves on |r|^4 - 2 (1 - c^2) y^2 = const.",
              Metric("invariant_error")["layer_norm_flow"] < 1e-6, added=_PROTOTYPE),
        Claim("There the logit grows as ln t.",
              (_LOGIT_SLOPE["layer_norm_flow"] > 0.8) & (_LOGIT_SLOPE["layer_norm_flow"] < 1.2), added=_PROTOTYPE),
        Claim("Under Adam its logit grows linearly, by the eta r that solves r = r(eta r).",
              abs(_LOGIT_SLOPE["*"] / _PREDICTED_LOGIT["*"] - 1) < 0.02, cases=_LAYER_NORM, added=_PROTOTYPE),
        Claim("m grows linearly with the logit.",
              (_LINEAR["*"] > 0.99) & (Metric("norm_slope")["*"] > 0.5 * _PREDICTED_LOGIT["*"]), cases=_LAYER_NORM,
              added=_PROTOTYPE),
        Claim("In d dimensions the norm grows by eta sqrt(d) a step.",
              (_IN_RATES["*"] > 0.8) & (_IN_RATES["*"] < 1.05), cases=_FREE),
        Claim("The slope follows theory, with its rate, width, eps and decay.",
              abs(_SLOPE["*"] - _PREDICTED["*"]) < 0.1 * abs(_PREDICTED["*"]) + 1e-5, cases=list(_SETTINGS)),
        Claim("Gradients below eps end the growth.", _SLOPE[_EPS] < 0.5 * _SLOPE[_NO_EPS]),
    ],
    pictures=[
        ByStep("norm", "published_*", y_scale="log", name="published_toy"),
        Points("adam_slopes", "Slope of the norm under Adam in d dimensions: theory and measured.", _PREDICTED, _SLOPE,
               {"variants": "rate*"}),
    ],
)  # fmt: skip
