"""Sinks and value drains as Active-Dormant Attention Heads explains them: gradient flow beside closed forms."""

import string

import numpy as np

from orthojax.data.bigram_backcopy import BigramBackcopy, default_text
from orthojax.experiments import drawing
from orthojax.experiments.active_dormant import sink_flow as theory
from orthojax.experiments.claims import Claim, all_within, within
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable

POSITION, CONTEXTS = 32, 8
HELD_TIMES = tuple(range(17))  # powers of ten
JOINT_TIMES = tuple(range(11))
LATE = 1e12
HELD_LOGITS = (0.0, 2.0, 4.0)
DECAYS = tuple(range(0, 26, 5))  # times, in 1 / the slowest rate


def letters() -> BigramBackcopy:
    """The task of the text's letters and spaces, so few that rare ones take part within the times shown."""
    kept = (c if c in string.ascii_lowercase else " " for c in default_text().lower())
    return BigramBackcopy.from_text(" ".join("".join(kept).split()))


def chains(seed: int) -> tuple[theory.Chain, theory.Chain]:
    """A query at `POSITION` with the mean context, as in the theory, and one with contexts of real sequences."""
    task, size = letters(), letters().vocab_size - 1
    values = np.random.default_rng([seed, 0]).standard_normal(size)
    seen = np.asarray(task.batch(0, CONTEXTS, POSITION, seed))[:, 1:]
    counts = np.stack([np.bincount(row, minlength=size) for row in seen]).astype(float)
    mean = POSITION * task.marginal[None, :size]
    return theory.Chain.of_task(task, values, mean), theory.Chain.of_task(task, values, counts)


def _slopes(times: np.ndarray, alpha: np.ndarray, decades: float) -> np.ndarray:
    """Of alpha [times, K] in ln t over the last decades, [K]."""
    late = times >= times[-1] / 10**decades * (1 - 1e-9)
    return np.polyfit(np.log(times[late]), alpha[late], 1)[0]


def _held_value(chain: theory.Chain, rng: np.random.Generator) -> Case:
    """(a): the logits move."""
    count = len(chain.weights)
    start, times = rng.standard_normal(count), np.geomspace(1, 10.0 ** HELD_TIMES[-1], 4 * HELD_TIMES[-1] + 1)
    alpha, _ = theory.flow(chain, start, np.zeros(chain.rows.shape[1]), times, hold="beta")
    rates = chain.weights * chain.curvatures()
    closed = np.stack([theory.half_log(times, a, r, chain.others) for a, r in zip(start, rates, strict=True)], axis=1)
    slopes = _slopes(times, alpha, 2)
    metrics = {
        "slope_min": float(slopes.min()),
        "slope_max": float(slopes.max()),
        "closed_form_error": float(np.abs(alpha - closed)[times >= 0.99 * LATE].max()),
        "asymptote_error": float(np.abs(alpha[-1] - theory.half_log_asymptote(times[-1], rates)).max()),
        "spread_early": float(alpha[times <= 1.01 * LATE][-1].std()),
        "spread": float(alpha[-1].std()),
    }
    for log in HELD_TIMES:
        metrics |= {f"alpha/log_{log}": float(chain.weights @ alpha[4 * log])}
        metrics |= {f"closed/log_{log}": float(chain.weights @ closed[4 * log])}
    return Case("value_held", {"label": "value of <s> held at 0"}, metrics)


def _held_logits(chain: theory.Chain, alpha: float, rng: np.random.Generator) -> Case:
    """(b): the value moves."""
    start = rng.standard_normal(chain.rows.shape[1])
    rates, _ = theory.bos_rates(chain, alpha)
    times = np.array(DECAYS[1:]) / rates[1]
    _, beta = theory.flow(chain, np.full(len(chain.weights), alpha), start, times, hold="alpha")
    fixed = theory.bos_fixed_point(alpha, chain.contexts[0], start)
    distance = np.linalg.norm(np.vstack([start, beta]) - fixed, axis=1)
    measured = -np.log(distance[3] / distance[2]) / (times[2] - times[1])
    metrics = {"rate_ratio": float(measured / rates[1]), "fixed_point_error": float(distance[-1] / distance[0])}
    metrics |= {"mean_drift": float(np.abs(beta.mean(1) - start.mean()).max())}
    metrics |= {"value_norm": float(np.std(fixed)), "value_norm_others": float(np.std(chain.contexts[0]))}
    metrics |= {f"distance/{at}": float(np.log10(d / distance[0])) for at, d in zip(DECAYS, distance, strict=True)}
    return Case(f"logits_held_{alpha:g}", {"label": f"logits on <s> held at {alpha:g}"}, metrics)


def _joint(chain: theory.Chain, name: str, label: str, rng: np.random.Generator) -> Case:
    """(c): both move."""
    start = rng.standard_normal(len(chain.weights)), rng.standard_normal(chain.rows.shape[1])
    times = np.geomspace(1, 10.0 ** JOINT_TIMES[-1], 4 * JOINT_TIMES[-1] + 1)
    alpha, beta = theory.flow(chain, *start, times)
    spread, drained = np.transpose(
        [theory.distance_to_stationary(a, b, chain) for a, b in zip(alpha, beta, strict=True)]
    )
    weight = np.exp(alpha) / (np.exp(alpha) + chain.others) @ chain.weights
    gradients = chain.gradients(alpha[-1], beta[-1])
    point = theory.stationary_point(rng.standard_normal(), rng.standard_normal(), chain.contexts.mean(0), len(alpha[0]))
    metrics = {
        "loss_ratio": chain.loss(alpha[-1], beta[-1]) / chain.loss(*start),
        "gradient": float(max(np.abs(g).max() for g in gradients)),
        "gradient_on_set": float(max(np.abs(g).max() for g in chain.gradients(*point))),
        "slope": float(_slopes(times, alpha, 1) @ chain.weights),
        "spread": float(spread[-1]), "not_drained": float(drained[-1]), "bos_weight": float(weight[-1]),
        "alpha": float(chain.weights @ alpha[-1]),
    }  # fmt: skip
    for log in JOINT_TIMES:
        metrics |= {
            f"alpha/log_{log}": float(chain.weights @ alpha[4 * log]),
            f"spread/log_{log}": float(spread[4 * log]),
        }
        metrics |= {f"not_drained/log_{log}": float(drained[4 * log])}
    return Case(name, {"label": label}, metrics)


def compute(seed: int) -> list[Case]:
    """All flows from random starts, with random values of the characters."""
    one, several = chains(seed)
    rng = np.random.default_rng([seed, 1])
    return [
        _held_value(one, rng),
        *(_held_logits(one, alpha, rng) for alpha in HELD_LOGITS),
        _joint(one, "joint", "both move, the mean context", rng),
        _joint(several, "joint_contexts", f"both move, {CONTEXTS} contexts", rng),
    ]


_HELD = {f"logits at {alpha:g}": (f"logits_held_{alpha:g}",) for alpha in HELD_LOGITS}
CLAIMS = (
    Claim("(a) With the value of <s> held, every logit on <s> grows as ln t / 2.", ("value_held",),
          ("slope_min", "slope_max"),
          lambda of: all_within(of, ("slope_min", 0.48, 0.52), ("slope_max", 0.48, 0.52)),
          "slopes of all tokens 0.48 to 0.52 over the last two decades, in every seed"),
    Claim("It follows the closed form, and ends at ln(2 pi_v Var_v t) / 2.", ("value_held",),
          ("closed_form_error", "asymptote_error"),
          lambda of: all_within(of, ("closed_form_error", -1, 0.01), ("asymptote_error", -1, 0.02)),
          "within 0.01 from t = 1e12 on, within 0.02 of the asymptote at 1e16, for every token and seed"),
    Claim("The logits of different tokens concentrate: their differences stop while they grow.", ("value_held",),
          ("spread_early", "spread", "alpha/log_12", "alpha/log_16"),
          lambda of: abs(of.spread / of.spread_early - 1) < 0.1 and of["alpha/log_16"] > of["alpha/log_12"] + 4,
          "their standard deviation changes by less than 10% from t = 1e12 to 1e16, their mean rises by 4 or more"),
    Claim("(b) With the logits held, the value of <s> converges exponentially, at the predicted rate.", _HELD,
          ("rate_ratio",), lambda of: within(of, "rate_ratio", 0.99, 1.01),
          "rate between 10 and 15 times its inverse within 1% of the smallest eigenvalue, in every seed"),
    Claim("It goes to mean(beta_0) 1 + exp(-alpha) (mean(xi) 1 - xi), and its mean is conserved.", _HELD,
          ("fixed_point_error", "mean_drift"),
          lambda of: all_within(of, ("fixed_point_error", -1, 1e-6), ("mean_drift", -1, 1e-6)),
          "distance below 1e-6 of that at the start, mean within 1e-6, in every seed"),
    Claim("(c) Where all logits are alpha and beta = c - exp(-alpha) xi nothing moves.", ("joint",),
          ("gradient_on_set",), lambda of: within(of, "gradient_on_set", -1, 1e-12),
          "gradients below 1e-12 at a random point of the set, in every seed"),
    Claim("Gradient flow ends there: the logits become equal, and the value cancels the others'.", ("joint",),
          ("spread", "not_drained"), lambda of: all_within(of, ("spread", -1, 1e-3), ("not_drained", -1, 1e-3)),
          "spread of logits and what is left of the values below 1e-3, in every seed"),
    Claim("Mutual reinforcement makes these equal logits large.", ("joint",), ("bos_weight", "alpha"),
          lambda of: of.bos_weight > 0.5, "a mean weight on <s> above one half"),
    Claim("With contexts that differ no value of <s> cancels all of them: the logits go on growing as ln t / 2, while "
          "the value cancels their mean.", ("joint_contexts",), ("slope", "bos_weight", "not_drained"),
          lambda of: 0.45 < of.slope < 0.6 and of.bos_weight > 0.9,
          "mean slope 0.45 to 0.6 over the last decade, weight on <s> above 0.9"),
)  # fmt: skip


def _curves(results: Results, name: str, keys: dict[str, str], logs: tuple[int, ...]) -> dict:
    of, at = results[name], [log * np.log(10) for log in logs]
    return {label: (at, np.array([of.values(f"{key}/log_{log}") for log in logs]).T) for key, label in keys.items()}


def _pictures(results: Results) -> list[Picture]:
    held = _curves(results, "value_held", {"alpha": "gradient flow", "closed": "closed form"}, HELD_TIMES)
    asymptote = np.array(results["value_held"].values("alpha/log_16"))
    at = [log * np.log(10) for log in HELD_TIMES]
    held["slope 1/2"] = (at, asymptote[:, None] + 0.5 * (np.array(at) - at[-1]))
    logits = drawing.lines(held, x_label="ln t", y_label="logit on <s>, mean over tokens", y_limits=(-2, None))
    decays = {
        results[name].label: (DECAYS, np.array([results[name].values(f"distance/{at}") for at in DECAYS]).T)
        for (name,) in _HELD.values()
    }
    decays["at the predicted rate"] = (DECAYS, np.array(DECAYS) * -np.log10(np.e))
    value = drawing.lines(decays, x_label="t times the predicted rate", y_label="log10 of distance to fixed point")
    joint = {}
    for name, label in (("joint", "mean context"), ("joint_contexts", f"{CONTEXTS} contexts")):
        keys = {"alpha": f"logit, {label}", "spread": f"its spread, {label}"}
        joint |= _curves(results, name, keys, JOINT_TIMES)
    both = drawing.lines(joint, x_label="ln t", y_label="logit on <s>", pairs=True)
    return [
        Picture("half_log_growth", "Logits on <s> under gradient flow, the value of <s> held at 0.", logits),
        Picture("bos_value", "Convergence of the value of <s>, logits held.", value),
        Picture("both_move", "Logits on <s> under gradient flow of logits and value; range over seeds.", both),
    ]


def _about(results: Results) -> list[str]:
    return [
        "The bigram half of the simplified model, whose MLP knows the bigram law, so that its head can only do harm: a "
        "query of a token v that is no trigger sees <s> with weight exp(alpha_v) and value beta, and other tokens with "
        "weight 1 each. Gradient flow in float64 from random logits and values, beside the closed forms of "
        "`active_dormant/sink_flow.py`.",
        f"Task: letters and spaces of the default text, three triggers; a query at position {POSITION}; values of the "
        "other tokens N(0, 1). The theory has one context, the mean one.",
        "A first run, of seeds 0 to 4 up to t = 1e12 (logits) and 1e8 (both), had not arrived: tokens which are rare, "
        "and followed by tokens of nearly equal values, are slow, and the three claims of (a) and one of (c) failed on "
        "them. Times are longer since; the criteria are the same, and the seeds others.",
    ]


EXPERIMENT = Experiment(
    name="sink_theory",
    title="Active-dormant theory: half-log growth of sink logits, the value of <s>, the stationary set",
    compute=compute,
    settings=[POSITION, CONTEXTS, HELD_TIMES, JOINT_TIMES, LATE, HELD_LOGITS, DECAYS],
    seconds_per_seed=60.0,
    about=_about,
    tables=(
        MetricTable("(a) The value held", (metric("slope_min", "smallest slope"), metric("slope_max", "largest slope"),
                    metric("closed_form_error", "error of the closed form"), metric("spread", "spread of logits")),
                    keep=lambda of: of.name == "value_held"),
        MetricTable("(b) The logits held", (metric("rate_ratio", "rate, measured / predicted"),
                    metric("fixed_point_error", "distance left"), metric("value_norm", "centred value of <s>, rms"),
                    metric("value_norm_others", "of the others' sum")),
                    keep=lambda of: of.name.startswith("logits_held")),
        MetricTable("(c) Both move", (metric("alpha", "mean logit"), metric("spread", "spread"),
                    metric("not_drained", "left of the values"), metric("bos_weight", "weight on <s>"),
                    metric("slope", "slope in ln t"), metric("loss_ratio", "loss, end / start")),
                    keep=lambda of: of.name.startswith("joint")),
    ),
    claims=CLAIMS,
    pictures=(_pictures,),
)  # fmt: skip
