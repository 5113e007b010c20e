r"""A prediction for OrthoAdam and residual-norm peaks, written down before it was measured, and the measurement.

Active-Dormant Attention Heads (arXiv 2410.13835) has peaks under Adam and none under SGD, and asks why. The prediction:
**OrthoAdam keeps the peak of the norm, since its updates are as constant as Adam's, and removes only its channel**, the
outlier coordinate. It is tested on the residual-norm toy in d dimensions, :math:`g_t = -\frac{\ln t}{\|x\|^3 t} (u +
\sigma \odot \epsilon_t)`, for three kinds of gradient. What theory says of each, from `norm_growth.adam_direction`:

- channel: u is one coordinate, no noise. Adam moves it by eta. In a rotated basis u is dense, all its d entries move by
  eta: sqrt(d) times as far, along :math:`Q^T \mathrm{sign}(Q u)`. For Haar matrices that has 2 / pi of its squared norm
  in the old channel, for Hadamard ones all of it. So the second half of the prediction should fail here.
- dense: Adam and OrthoAdam move by :math:`\eta \sqrt d`; neither has a channel.
- quiet: u has equal entries, and noise ten times as large in all coordinates but one. Adam divides each by its own
  size, so the quiet coordinate moves ten times as fast as the others and becomes the channel; a rotation mixes the
  noise, so that all move alike. Here both halves should hold.
"""

import jax.numpy as jnp
import numpy as np
import optax

from orthojax.experiments import drawing
from orthojax.experiments.active_dormant.norm_growth import adam_direction, residual_norm_gradient, train
from orthojax.experiments.claims import Claim, Revision, every
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.ops.statistics import kurtosis
from orthojax.optim import Rotation, orthoadam, rotate

WIDTH, STEPS, START, RATE, B1, B2, EPS = 64, 10_000, 1.0, 1e-3, 0.9, 0.99, 1e-30
ROWS = 8  # of Haar matrices OrthoAdam has none for fewer
SGD_RATE = 0.3  # that of the published toy
NOISE = 10.0
SHOWN = (1, 500, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10_000)
GRADIENTS = {"channel": "one coordinate", "dense": "all coordinates", "quiet": "all, one without noise"}
OPTIMIZERS = {"adam": "Adam", "sgd": "SGD", "haar": "OrthoAdam, Haar", "hadamard": "OrthoAdam, Hadamard"}
CHANNEL, NO_CHANNEL = 0.4, 0.2  # of the squared norm in one of 64 coordinates; the largest of a Gaussian has about 0.1


def gradient_of(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(u [d] of norm 1, sigma [d])."""
    rng = np.random.default_rng([seed, 0])
    signs = rng.choice([-1.0, 1.0], WIDTH) / np.sqrt(WIDTH)
    if kind == "channel":
        return np.eye(WIDTH)[0], np.zeros(WIDTH)
    if kind == "dense":
        return signs, np.zeros(WIDTH)
    return signs, np.where(np.arange(WIDTH) == 0, 0.0, NOISE / np.sqrt(WIDTH))


def rotation(kind: str, seed: int) -> Rotation:
    """OrthoAdam's: one Q for all rows."""
    return Rotation(kind, axes="output", seed=seed)  # pyright: ignore[reportArgumentType]


def basis(kind: str, seed: int) -> np.ndarray:
    """The Q with which OrthoAdam trains x, [d, d]; the identity for Adam."""
    if kind == "adam":
        return np.eye(WIDTH)
    transformation = rotate(rotation(kind, seed))
    state = transformation.init({"x": jnp.zeros((ROWS, WIDTH))})
    rows = jnp.eye(WIDTH).reshape(-1, ROWS, WIDTH)
    rotated = [np.asarray(transformation.update({"x": unit}, state)[0]["x"]) for unit in rows]  # pyright: ignore
    return np.concatenate(rotated).T


def grow(optimizer: str, kind: str, seed: int) -> np.ndarray:
    """Vectors after each step, float64 [STEPS + 1, ROWS, d]; they start in random directions with norm `START`."""
    x = np.random.default_rng([seed, 1]).standard_normal((ROWS, WIDTH))
    start = START * x / np.linalg.norm(x, axis=1, keepdims=True)
    if optimizer == "sgd":
        made = optax.sgd(SGD_RATE)
    elif optimizer == "adam":
        made = optax.adam(RATE, B1, B2, EPS)
    else:
        made = orthoadam(RATE, B1, B2, EPS, rotation=rotation(optimizer, seed))
    gradient = residual_norm_gradient(*gradient_of(kind, seed), seed)
    path = train(made, {"x": jnp.asarray(start)}, lambda x, t, key: {"x": gradient(x["x"], t, key)}, STEPS)
    return np.concatenate([start[None], np.asarray(path["x"])])


def largest_share(x: np.ndarray) -> float:
    """The share of the squared norm in the largest coordinate, mean over rows."""
    return float(np.mean(np.max(x**2, axis=1) / np.sum(x**2, axis=1)))


def growth_metrics(path: np.ndarray) -> dict[str, float]:
    """Of vectors after each step, [steps + 1, n, d]: how their mean norm grows, and their shape at the end."""
    norms, steps = np.linalg.norm(path, axis=2).mean(1), np.arange(len(path))
    tenth, quarter = len(path) // 10, len(path) // 4
    moved = [np.linalg.norm(path[a + quarter] - path[a]) for a in (quarter, 3 * quarter)]
    return {
        "growth": float(norms[-1] / norms[0]),
        "slope": float((norms[-1] - norms[2 * quarter]) / (len(path) - 1 - 2 * quarter)),
        "linear_r": float(np.corrcoef(steps[tenth:], norms[tenth:])[0, 1]),
        "constancy": float(moved[1] / moved[0]),
        "largest_share": largest_share(path[-1]),
        "kurtosis": float(jnp.mean(kurtosis(jnp.asarray(path[-1])))),
    }


def compute(seed: int) -> list[Case]:
    """Every optimizer with every kind of gradient."""
    cases = []
    for kind, words in GRADIENTS.items():
        for optimizer, label in OPTIMIZERS.items():
            path = grow(optimizer, kind, seed)
            metrics = growth_metrics(path)
            if optimizer != "sgd":
                update = RATE * adam_direction(*gradient_of(kind, seed), basis(optimizer, seed))
                half, end = (path[0] + steps * update for steps in (STEPS // 2, STEPS))
                norms = [np.mean(np.linalg.norm(x, axis=1)) for x in (half, end)]
                metrics["predicted_slope"] = float(norms[1] - norms[0]) / (STEPS - STEPS // 2)
                metrics["predicted_share"] = largest_share(end)
            metrics |= {f"norm/step_{step}": float(np.linalg.norm(path[step], axis=1).mean()) for step in SHOWN}
            cases.append(Case(f"{optimizer}_{kind}", {"label": f"{label}; {words}"}, metrics))
    return cases


def _each(*optimizers: str) -> dict[str, list[str]]:
    """One case for each kind of gradient, or with `adam` first for each kind and rotation."""
    if optimizers[0] == "adam" and len(optimizers) > 1:
        return {f"{GRADIENTS[k]}, {o}": [f"adam_{k}", f"{o}_{k}"] for k in GRADIENTS for o in optimizers[1:]}
    return {f"{GRADIENTS[k]}, {o}": [f"{o}_{k}"] for k in GRADIENTS for o in optimizers}


CLAIMS = (
    Claim(
        "Prediction, first half: OrthoAdam keeps the growth of the norm.",
        _each("adam", "haar", "hadamard"), ("slope",),
        lambda adam, ortho: ortho.slope >= 0.5 * adam.slope and every(ortho, "linear_r", lambda r: r > 0.99),
        "at least half of Adam's slope, linear in t with r > 0.99 in every seed, from a tenth of the steps on"),
    Claim(
        "Its reason: OrthoAdam's updates are as constant as Adam's.", _each("adam", "haar", "hadamard"), ("constancy",),
        lambda *both: all(every(of, "constancy", lambda ratio: 0.8 < ratio < 1.25) for of in both),
        "what the last quarter of the steps moves x by is 0.8 to 1.25 times what the second moves it by, in both"),
    Claim(
        "SGD does not.", _each("adam", "sgd"), ("slope",),
        lambda adam, sgd: sgd.slope < 0.1 * adam.slope, "less than a tenth of Adam's slope",
        revised=Revision("it had been written for a start of norm 10; from 1 the closed form grows to 2.7", {
            "of": _each("sgd"), "show": ("growth",), "criterion": "the norm rises by less than 1%, in every seed",
            "holds": lambda of: every(of, "growth", lambda ratio: ratio < 1.01)})),
    Claim(
        "Prediction, second half: OrthoAdam removes the channel.", _each("adam", "haar", "hadamard"),
        ("largest_share",),
        lambda adam, ortho: every(ortho, "largest_share", lambda share: share < NO_CHANNEL),
        f"less than {NO_CHANNEL:g} of the squared norm in the largest coordinate in every seed; testable where Adam "
        f"has more than {CHANNEL:g}",
        testable=lambda adam, ortho: every(adam, "largest_share", lambda share: share > CHANNEL)),
    Claim(
        "Theory: a channel that is the gradient's own stays. Haar matrices leave about 2/pi of its squared norm, "
        "Hadamard matrices all of it.", {"Haar": ("haar_channel",), "Hadamard": ("hadamard_channel",)},
        ("largest_share",),
        lambda of: every(of, "largest_share", lambda s: s > 0.9 if of.name == "hadamard_channel" else 0.5 < s < 0.8),
        "share of the largest coordinate 0.5 to 0.8 (Haar), above 0.9 (Hadamard), in every seed"),
    Claim(
        "Theory: the slope is that of Q^T (Q u) / sqrt((Q u)^2 + noise^2).", _each("adam"), ("slope",),
        lambda of: abs(of.slope / of.predicted_slope - 1) < 0.1, "within 10%",
        detail=lambda of: f"predicted {of.predicted_slope:.3g}"),
    Claim(
        "The same of OrthoAdam.", _each("haar", "hadamard"), ("slope",),
        lambda of: abs(of.slope / of.predicted_slope - 1) < 0.1, "within 10%",
        detail=lambda of: f"predicted {of.predicted_slope:.3g}"),
)  # fmt: skip


def _pictures(results: Results) -> list[Picture]:
    pictures = []
    for kind, words in GRADIENTS.items():
        curves = {}
        for optimizer, label in OPTIMIZERS.items():
            of = results[f"{optimizer}_{kind}"]
            curves[label] = (SHOWN, np.array([of.values(f"norm/step_{step}") for step in SHOWN]).T)
        figure = drawing.lines(curves, x_label="step", y_label="norm of x")
        pictures.append(Picture(f"norm_{kind}", f"Norm of x; gradient: {words}.", figure))
    shares = {
        label: np.array([results[f"{optimizer}_{kind}"].values("largest_share") for kind in GRADIENTS]).T
        for optimizer, label in OPTIMIZERS.items()
    }
    figure = drawing.bars(list(GRADIENTS.values()), shares, y_label="share of the squared norm")
    caption = "The largest coordinate of x after all steps: its share of the squared norm, by gradient."
    return [*pictures, Picture("largest_share", caption, figure)]


def _about(results: Results) -> list[str]:
    return [
        "The prediction, written down before the measurement: OrthoAdam keeps the peak of the residual norm, since its "
        "updates are as constant as Adam's, and removes only its channel.",
        f"{ROWS} vectors x of d = {WIDTH} start with norm {START:g}; the gradient is -ln t / (|x|^3 t) (u + "
        "noise). Three kinds of u and noise: one coordinate; all coordinates alike; all alike with noise "
        f"of {NOISE:g} times their size in all but one.",
        f"{STEPS:,} steps; Adam and OrthoAdam with rate {RATE:g}, betas {B1:g} and {B2:g}, eps {EPS:g} (so that it "
        f"plays no part); SGD with rate {SGD_RATE:g}. OrthoAdam has another Q in every seed.",
    ]


_COLUMNS = (
    metric("growth", "norm, end over start"),
    metric("slope", "slope of the norm"),
    metric("predicted_slope", "by theory"),
    metric("linear_r", "r of a line"),
    metric("constancy", "update, last over second quarter"),
    metric("largest_share", "largest coordinate's share"),
    metric("predicted_share", "by theory"),
    metric("kurtosis", "kurtosis"),
)

EXPERIMENT = Experiment(
    name="orthoadam_peak",
    title="Active-dormant: does OrthoAdam keep the norm peak and remove its channel? A toy and a prediction",
    compute=compute,
    settings=[WIDTH, STEPS, START, RATE, B1, B2, EPS, ROWS, SGD_RATE, NOISE, SHOWN],
    seconds_per_seed=60.0,
    about=_about,
    tables=(MetricTable("Norm and shape of x, by optimizer and gradient", _COLUMNS),),
    claims=CLAIMS,
    pictures=(_pictures,),
)
