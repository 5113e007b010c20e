"""Figure 3 of From Attention to Activation: a rotation spreads a vector over its channels, drawn and in numbers."""

import math

import jax
import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim, Revision
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.from_attention.spiked_vector import LABELS, mean_norm_ratio_of_direction, rotate
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Result, Results, metric
from orthojax.ops.statistics import norm_ratio

SIZES = (2, 3, 64, 768)
SAMPLES = 256
DRAWS = 16  # of a small Haar matrix
REST = 0.1  # length of everything but the dominant component, which is 1


def dominated_vectors(size: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors e_i + r with a random i and a random r of length 0.1.

    Returns:
      (float64 [count, D], i [count]).
    """
    rng = np.random.default_rng([seed, size])
    rest, channels = rng.standard_normal((count, size)), rng.integers(0, size, count)
    vectors = REST * rest / np.linalg.norm(rest, axis=-1, keepdims=True)
    vectors[np.arange(count), channels] += 1.0
    return vectors, channels


def compute(seed: int) -> list[Case]:
    """Mean of max|y| / ||y|| before and after each rotation, with the rest and of the dominant component alone."""
    ratio = jax.jit(norm_ratio)
    cases = []
    for size in SIZES:
        x, channels = dominated_vectors(size, SAMPLES, seed)
        for rotation in LABELS:
            # A small Haar matrix is one draw of few angles; every column of a large one is as good as a draw.
            draws = DRAWS if rotation == "haar" and size < 8 else 1
            found = []
            for draw in range(draws):
                part = slice(draw * SAMPLES // draws, (draw + 1) * SAMPLES // draws)
                one_seed = (seed * DRAWS + draw) % 2**32
                both = np.concatenate([x[part], np.eye(size)[channels[part]]])
                rotated = rotate(both, np.tile(channels[part], 2), rotation, one_seed)
                found.append(np.asarray(ratio(rotated)).reshape(2, -1))
            mean, alone = np.mean(np.concatenate(found, axis=1), axis=1)
            metrics = {"norm_ratio": float(mean), "norm_ratio_alone": float(alone)}
            cases.append(Case(f"{rotation}_D{size}", {"rotation": rotation, "size": size}, metrics))
    return cases


def _exact(rotation: str, size: int) -> float | None:
    """Mean of max|Q e_i|."""
    if rotation == "hadamard" and size == 3:
        return None  # a cosine transform: it depends on i
    return {"none": 1.0, "haar": mean_norm_ratio_of_direction(size)}.get(rotation, 1 / math.sqrt(size))


_RATIO = metric("norm_ratio", "e_i + r, |r| = 0.1", "{:.4f}".format)
_ALONE = metric("norm_ratio_alone", "e_i alone", "{:.4f}".format)


def _table(results: Results) -> Table:
    rows = []
    for size in SIZES:
        for rotation, label in LABELS.items():
            result, exact = results[f"{rotation}_D{size}"], _exact(rotation, size)
            words = label if exact else "cosine transform, since there is no Hadamard"
            shown = "" if exact is None else f"{exact:.4f}"
            rows.append([f"D = {size}: {words}", result.cell(_RATIO), result.cell(_ALONE), shown])
    columns = ["", _RATIO.label, _ALONE.label, "e_i alone, exact mean"]
    return Table("Largest entry over length, max|y| / ||y||", columns, rows)


_MANY = SIZES[-1]


def _near_exact_mean(few: Result, many: Result) -> bool:
    return abs(many.norm_ratio_alone / mean_norm_ratio_of_direction(_MANY) - 1) < 0.05


CLAIMS = (
    Claim("Rotating a vector with a dominant component lowers its largest entry. Before, with the best Q (all entries "
          "of Q e_i equal), a Hadamard and a Haar matrix:",
          {f"D = {size}": tuple(f"{rotation}_D{size}" for rotation in LABELS) for size in SIZES},
          (metric("norm_ratio", "mean max|y| / ||y||", "{:.3f}".format),),
          lambda before, *after: all(result.norm_ratio < before.norm_ratio for result in after),
          "lower in the mean for every Q and D"),
    Claim(f"It takes many channels: what a random rotation leaves of e_i alone in two channels and in {_MANY}.",
          ("haar_D2", f"haar_D{_MANY}"), (metric("norm_ratio_alone", "max|y| / ||y||", "{:.3f}".format),),
          lambda few, many: few.norm_ratio_alone > 0.5 and many.norm_ratio_alone < 0.25,
          f"more than a half in two channels, less than a quarter in {_MANY}",
          detail=lambda few, many: f"exact means 2 sqrt(2)/pi = {mean_norm_ratio_of_direction(2):.3f} and "
          f"{mean_norm_ratio_of_direction(_MANY):.3f}, the best Q 1/sqrt(2) = {1 / math.sqrt(2):.3f} and "
          f"{1 / math.sqrt(_MANY):.3f}",
          revised=Revision("the first compared samples with their own exact mean, which they cannot miss",
                           {"holds": _near_exact_mean,
                            "criterion": f"samples within 5% of the exact mean at D = {_MANY}"})),
)  # fmt: skip


def _pictures(results: Results) -> list[Picture]:
    few, many = (
        {label: np.abs(rotate(x, channels, name, 0)) for name, label in LABELS.items()}
        for x, channels in (dominated_vectors(size, 1, 0) for size in (4, 64))
    )
    texts = {label: [f"{value:.2f}" for value in entries[0]] for label, entries in few.items()}
    bars = drawing.bars([f"channel {i + 1}" for i in range(4)], few, y_label="|entry|", texts=texts)
    curves = {label: (list(range(64)), entries) for label, entries in many.items()}
    lines = drawing.lines(curves, x_label="channel", y_label="|entry|")
    return [
        Picture("rotation", "The entries of one vector of 4 channels before and after rotation.", bars),
        Picture("channels", "The same of one vector of 64 channels.", lines),
    ]


EXPERIMENT = Experiment(
    name="figure3",
    title="Figure 3: a rotation spreads a vector over its channels",
    compute=compute,
    about=lambda results: [
        "A vector with one dominant component, before and after an orthogonal matrix: its length stays, its largest "
        f"entry falls. Below, vectors e_i + r with a random r of length {REST} and random i, {SAMPLES} for each D and "
        "seed."
    ],
    tables=(_table,),
    claims=CLAIMS,
    pictures=(_pictures,),
)
