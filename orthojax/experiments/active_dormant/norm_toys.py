"""The two norm toys of Active-Dormant Attention Heads: closed forms beside Adam, SGD and gradient flow."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import optax

from orthojax.experiments import drawing
from orthojax.experiments.active_dormant import norm_growth as theory
from orthojax.experiments.claims import Claim, Revision
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Result, Results, metric
from orthojax.experiments.tables import MetricTable

# The published residual-norm toy, and what it gives.
PUBLISHED_RATE, LONG = 0.3, 40_000
PUBLISHED = {1000: 27.9, 2500: 33.6, 5000: 41.7, 7500: 51.2, 10_000: 64.0}
PUBLISHED_SGD = {1000: 10.007, 10_000: 10.013}
SHOWN = (1, 1000, 2500, 5000, 7500, 10_000, 20_000, 30_000, 40_000)
# The layer-norm toy.
COSINE, START = 0.5, (1.0, 1.0)
LOG_TIMES = tuple(range(11))
LAYER_NORM_STEPS, LAYER_NORM_RATES, SECOND_DECAYS = 30_000, (9e-5, 3e-4, 9e-4), (0.99, 0.999)
# The residual-norm toy in d dimensions: rate, width, eps, decay.
STEPS, NORM, B1, B2 = 10_000, 10.0, 0.9, 0.99
GRID = [
    *itertools.product((3e-4, 1e-3, 3e-3), (64, 256), (1e-30,), (0.0,)),
    *itertools.product((1e-3,), (64, 256), (1e-30, 1e-8), (0.0, 0.1)),
]
SETTINGS = {f"rate{a:g}_d{d}_eps{e:g}_decay{w:g}": (a, d, e, w) for a, d, e, w in GRID}
_LABEL = "rate {:g}, d = {}, eps {:g}, decay {:g}".format


@functools.cache  # nothing here is drawn
def _published() -> list[Case]:
    gradient = theory.residual_norm_gradient(np.ones(1), np.zeros(1), 0)
    cases = []
    for name, optimizer in {"adam": optax.adam(PUBLISHED_RATE), "sgd": optax.sgd(PUBLISHED_RATE)}.items():
        norms = np.asarray(theory.train(optimizer, jnp.full((1, 1), NORM), gradient, LONG))[:, 0, 0]
        flow = theory.residual_norm_flow(np.arange(1, LONG + 1), NORM, PUBLISHED_RATE)
        moved = np.diff(norms)
        metrics = {f"norm/step_{step}": float(norms[step - 1]) for step in SHOWN}
        metrics |= {f"flow/step_{step}": float(flow[step - 1]) for step in SHOWN}
        metrics |= {
            "flow_error": float(np.max(np.abs(norms / flow - 1))),
            "linear_r": float(np.corrcoef(np.arange(1000, 10_000), norms[1000:10_000])[0, 1]),
            "update_5k": float(moved[5000] / PUBLISHED_RATE),
            "update_10k": float(moved[9999] / PUBLISHED_RATE),
            "late_over_early": float((norms[19_999] - norms[9999]) / (norms[9999] - norms[0])),
        }
        label = {"adam": "Adam", "sgd": "SGD"}[name]
        cases.append(Case(f"published_{name}", {"label": f"published toy, {label}"}, metrics))
    return cases


@functools.cache
def _layer_norm() -> list[Case]:
    path = theory.layer_norm_flow([10.0**log for log in LOG_TIMES], START, COSINE)
    norms = np.sqrt(path[:, 0] ** 2 + 2 * COSINE * path[:, 0] + 1)
    exact = theory.norm_along_flow(path[:, 1], START, COSINE)
    metrics = {f"norm/log_{log}": float(norm) for log, norm in zip(LOG_TIMES, norms, strict=True)}
    metrics |= {f"closed/log_{log}": float(norm) for log, norm in zip(LOG_TIMES, exact, strict=True)}
    metrics |= {"invariant_error": float(np.max(np.abs(norms / exact - 1)))}
    metrics["logit_slope"] = float((path[-1, 1] - path[-3, 1]) / (2 * np.log(10)))
    cases = [Case("layer_norm_flow", {"label": "layer-norm toy, gradient flow"}, metrics)]
    for b2, rate in itertools.product(SECOND_DECAYS, LAYER_NORM_RATES):
        m, y = theory.train(
            optax.adam(rate, B1, b2, 1e-60),
            (jnp.array(START[0]), jnp.array(START[1])),
            lambda my, t, key: theory.layer_norm_gradient(my[0], my[1], COSINE),
            LAYER_NORM_STEPS,
        )
        half = LAYER_NORM_STEPS // 2
        slopes = [float((of[-1] - of[half]) / (LAYER_NORM_STEPS - 1 - half)) for of in (m, y)]
        metrics = {"norm_slope": slopes[0], "logit_slope": slopes[1]}
        metrics["predicted_logit_slope"] = theory.adam_logit_slope(rate, B1, b2)
        steps = np.arange(half, LAYER_NORM_STEPS)
        metrics["linear_r"] = float(np.corrcoef(steps, np.asarray(m)[half:])[0, 1])
        label = f"layer-norm toy, Adam, rate {rate:g}, b2 = {b2:g}"
        cases.append(Case(f"layer_norm_{rate:g}_{b2:g}", {"label": label}, metrics))
    return cases


def compute(seed: int) -> list[Case]:
    """Both toys; the seed is that of start and direction in d dimensions."""
    cases = [*_published(), *_layer_norm()]
    for name, (rate, width, eps, decay) in SETTINGS.items():
        rng = np.random.default_rng([seed, width])
        direction = rng.choice([-1.0, 1.0], width) / np.sqrt(width)
        start = rng.standard_normal(width)
        start -= direction * (direction @ start)
        start *= NORM / np.linalg.norm(start)
        gradient = theory.residual_norm_gradient(direction, np.zeros(width), seed)
        path = theory.train(
            optax.adamw(rate, B1, B2, eps, weight_decay=decay), jnp.asarray(start[None]), gradient, STEPS
        )
        norms = np.linalg.norm(np.asarray(path)[:, 0], axis=1)
        predicted = theory.adam_norm_growth(width**0.5, STEPS, rate, NORM, b1=B1, b2=B2, eps=eps, decay=decay)
        half = STEPS // 2
        slope, by_theory = ((of[-1] - of[half]) / (STEPS - 1 - half) for of in (norms, predicted))
        metrics = {"norm": float(norms[-1]), "predicted_norm": float(predicted[-1]), "slope": float(slope)}
        metrics |= {"predicted_slope": float(by_theory), "slope_in_rates": float(slope / (rate * width**0.5))}
        cases.append(Case(name, {"label": _LABEL(rate, width, eps, decay)}, metrics))
    return cases


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a / b - 1) < tolerance


def _steps(of: Result) -> str:
    return ", ".join(f"{of[f'norm/step_{step}']:.4g} at {step:,}" for step in PUBLISHED)


def _named(*names: str) -> dict[str, tuple[str]]:
    return {_LABEL(*SETTINGS[name]): (name,) for name in names}


_FREE = [n for n, (_, _, eps, decay) in SETTINGS.items() if eps < 1e-20 and not decay]
_LAYER_NORM_ADAM = {
    f"rate {rate:g}, b2 = {b2:g}": (f"layer_norm_{rate:g}_{b2:g}",)
    for b2, rate in itertools.product(SECOND_DECAYS, LAYER_NORM_RATES)
}
# Nothing is drawn in the scalar toys, so that there are no fresh seeds.
_SEEN = Revision("a prototype of the same computation, which has no seed, had been run before")
CLAIMS = (
    Claim("The published residual-norm toy gives its published norms under Adam.", ("published_adam",), (),
          lambda of: all(_near(of[f"norm/step_{step}"], norm, 0.01) for step, norm in PUBLISHED.items()),
          "within 1% at five steps", detail=_steps, revised=_SEEN),
    Claim("Under SGD its norm follows (m0^4 + 2 eta ln^2 t)^(1/4), which is no growth.", ("published_sgd",), (),
          lambda of: of.flow_error < 1e-3 and of["norm/step_10000"] < 1.01 * NORM,
          "within 0.1%, and below 1.01 of the start at 10,000 steps", detail=_steps, revised=_SEEN),
    Claim("Adam's growth of the published toy is linear.", ("published_adam",), ("linear_r",),
          lambda of: of.linear_r > 0.98 and 0.5 < of.late_over_early < 2,
          "r > 0.98 from 1,000 to 10,000 steps, and the next 10,000 add half to twice as much",
          detail=lambda of: f"the next 10,000 add {of.late_over_early:.2f} times as much", revised=_SEEN),
    Claim("It is since Adam turns decaying gradients into constant updates, of about its rate.", ("published_adam",),
          ("update_5k", "update_10k"), lambda of: min(of.update_5k, of.update_10k) > 0.5,
          "updates above half of the rate at 5,000 and 10,000 steps",
          revised=_SEEN),
    Claim("In the layer-norm toy gradient flow moves on |r|^4 - 2 (1 - c^2) y^2 = const.", ("layer_norm_flow",),
          ("invariant_error",), lambda of: of.invariant_error < 1e-6, "the norm within 1e-6 for t up to 1e10",
          revised=_SEEN),
    Claim("There the logit grows as ln t.", ("layer_norm_flow",), ("logit_slope",),
          lambda of: 0.8 < of.logit_slope < 1.2, "slope 0.8 to 1.2 in ln t over the last two decades", revised=_SEEN),
    Claim("Under Adam its logit grows linearly, by the eta r that solves r = r(eta r).", _LAYER_NORM_ADAM,
          ("logit_slope",), lambda of: _near(of.logit_slope, of.predicted_logit_slope, 0.02), "within 2%",
          detail=lambda of: f"predicted {of.predicted_logit_slope:.3g}", revised=_SEEN),
    Claim("m grows linearly with the logit.", _LAYER_NORM_ADAM, ("norm_slope",),
          lambda of: of.linear_r > 0.99 and of.norm_slope > 0.5 * of.predicted_logit_slope,
          "r > 0.99 over the second half, at half of the logit's slope or more", revised=_SEEN),
    Claim("In d dimensions the norm grows by eta sqrt(d) a step.", _named(*_FREE), ("slope_in_rates",),
          lambda of: 0.8 < of.slope_in_rates < 1.05, "0.8 to 1.05 of eta sqrt(d) over the second half"),
    Claim("The slope follows theory, with its rate, width, eps and decay.", _named(*SETTINGS), ("slope",),
          lambda of: abs(of.slope - of.predicted_slope) < 0.1 * abs(of.predicted_slope) + 1e-5,
          "within 10% and 1e-5 over the second half", detail=lambda of: f"predicted {of.predicted_slope:.3g}"),
    Claim("Gradients below eps end the growth.",
          {"eps 1e-8": ("rate0.001_d64_eps1e-08_decay0", "rate0.001_d64_eps1e-30_decay0")}, ("slope",),
          lambda small, none: small.slope < 0.5 * none.slope,
          "the slope at eps 1e-8 is less than half of that at none"),
)  # fmt: skip


def _pictures(results: Results) -> list[Picture]:
    curves = {}
    for name, label in (("published_adam", "Adam"), ("published_sgd", "SGD")):
        of = results[name]
        curves[label] = (SHOWN, np.array([of.values(f"norm/step_{step}") for step in SHOWN]).T)
    sgd = results["published_sgd"]
    curves["closed form of SGD"] = (SHOWN, np.array([sgd[f"flow/step_{step}"] for step in SHOWN]))
    published = drawing.lines(curves, x_label="step", y_label="m", y_scale="log")
    flow = results["layer_norm_flow"]
    at = [log * np.log(10) for log in LOG_TIMES]
    curve = {
        label: (at, np.array([flow[f"{key}/log_{log}"] for log in LOG_TIMES]))
        for key, label in (("norm", "gradient flow"), ("closed", "closed form, at its logit"))
    }
    norm = drawing.lines(curve, x_label="ln t", y_label="norm of r", pairs=True)
    kept = {name: results[name] for name in SETTINGS}
    slopes = {
        label: np.array([of.values(key) for of in kept.values()]).T
        for label, key in (("measured", "slope"), ("theory", "predicted_slope"))
    }
    short = [f"{a:g}\nd {d}\neps {e:g}\ndecay {w:g}" for a, d, e, w in SETTINGS.values()]
    bars = drawing.bars(short, slopes, y_label="slope of the norm per step")
    return [
        Picture("published_toy", "The published residual-norm toy, four times as long.", published),
        Picture("layer_norm_flow", "The layer-norm toy under gradient flow: the norm grows as the root of ln t.", norm),
        Picture("adam_slopes", "Slope of the norm under Adam in d dimensions: measured and by theory.", bars),
    ]


def _about(results: Results) -> list[str]:
    return [
        "The paper says that LayerNorm makes the gradient of the residual norm of <s> decay, and that Adam makes "
        "constant updates of it, hence linear growth; why exactly, it leaves open. Here are its two toys, closed forms "
        "of what gradient flow, SGD and Adam do to them, and the conditions under which Adam's updates are constant.",
        "Of a gradient that decays by gamma a step Adam makes updates of constant size r(gamma), provided that gamma "
        "is below -ln(b2) / 2; otherwise the second moment remembers what is gone, and updates decay, too. Below eps "
        "Adam is SGD of the rate eta / eps.",
    ]


EXPERIMENT = Experiment(
    name="norm_toys",
    title="Active-dormant theory: the residual-norm and the layer-norm toy under SGD and Adam",
    compute=compute,
    settings=[SHOWN, LOG_TIMES, PUBLISHED_RATE, LONG, COSINE, START, LAYER_NORM_STEPS, LAYER_NORM_RATES, SECOND_DECAYS,
              STEPS, NORM, B1, B2, GRID],
    seconds_per_seed=60.0,
    about=_about,
    paper={
        "published_adam": {f"norm/step_{step}": norm for step, norm in PUBLISHED.items()},
        "published_sgd": {f"norm/step_{step}": norm for step, norm in PUBLISHED_SGD.items()},
    },
    tables=(
        MetricTable("The published residual-norm toy: m by step", [metric(f"norm/step_{s}", f"{s:,}") for s in SHOWN],
                    keep=lambda of: of.name.startswith("published")),
        MetricTable("The layer-norm toy: slopes per step (flow: of the logit in ln t)",
                    (metric("logit_slope", "logit"), metric("predicted_logit_slope", "by theory"),
                     metric("norm_slope", "m"), metric("linear_r", "r of a line, m")),
                    keep=lambda of: of.name.startswith("layer_norm")),
        MetricTable("The residual-norm toy in d dimensions under Adam",
                    (metric("norm", "norm at the end"), metric("predicted_norm", "by theory"), metric("slope"),
                     metric("predicted_slope", "by theory"), metric("slope_in_rates", "slope / (eta sqrt d)")),
                    keep=lambda of: of.name in SETTINGS),
    ),
    claims=CLAIMS,
    pictures=(_pictures,),
)  # fmt: skip
