"""Figure 3 of From Attention to Activation: a rotation spreads a vector over its channels, drawn and in numbers."""

import math
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.from_attention.spiked_vector import (
    LABELS,
    RotationName,
    mean_norm_ratio_of_direction,
    rotate,
)
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Result, Results, metric
from orthojax.ops.statistics import norm_ratio

SIZES = (2, 3, 64, 768)
SAMPLES = 256
DRAWS = 16  # of a small Haar matrix
REST = 0.1  # length of everything but the dominant component, which is 1
_COLORS = ("#c0392b", "#1f6fb2")  # before, after


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
                found.append(
                    np.asarray(ratio(rotate(both, np.tile(channels[part], 2), rotation, one_seed))).reshape(2, -1)
                )
            mean, alone = np.mean(np.concatenate(found, axis=1), axis=1)
            metrics = {"norm_ratio": float(mean), "norm_ratio_alone": float(alone)}
            cases.append(Case(f"{rotation}_D{size}", {"rotation": rotation, "size": size}, metrics))
    return cases


def _exact(rotation: RotationName, size: int) -> float | None:
    """Mean of max|Q e_i|."""
    if rotation == "hadamard" and size == 3:
        return None  # a cosine transform: it depends on i
    return {
        "none": 1.0,
        "aligned": 1 / math.sqrt(size),
        "hadamard": 1 / math.sqrt(size),
        "haar": mean_norm_ratio_of_direction(size),
    }[rotation]


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


def _lowered(before: Result, *after: Result) -> bool:
    return all(result.norm_ratio < before.norm_ratio for result in after)


_MANY = SIZES[-1]
CLAIMS = (
    Claim("Rotating a vector with a dominant component lowers its largest entry. Before, with the best Q (all entries "
          "of Q e_i equal), a Hadamard and a Haar matrix:",
          {f"D = {size}": tuple(f"{rotation}_D{size}" for rotation in LABELS) for size in SIZES},
          (metric("norm_ratio", "mean max|y| / ||y||", "{:.3f}".format),),
          _lowered, "lower in the mean for every Q and D"),
    Claim(f"It takes many channels: what a random rotation leaves of e_i alone in two channels and in {_MANY}.",
          ("haar_D2", f"haar_D{_MANY}"), (metric("norm_ratio_alone", "max|y| / ||y||", "{:.3f}".format),),
          lambda few, many: few.norm_ratio_alone > 0.5 and many.norm_ratio_alone < 0.25,
          f"more than a half in two channels, less than a quarter in {_MANY}",
          detail=lambda few, many: f"exact means 2 sqrt(2)/pi = {mean_norm_ratio_of_direction(2):.3f} and "
          f"{mean_norm_ratio_of_direction(_MANY):.3f}, the best Q 1/sqrt(2) = {1 / math.sqrt(2):.3f} and "
          f"{1 / math.sqrt(_MANY):.3f}"),
)  # fmt: skip


def _rotation_matrix(size: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of the picture: a proper rotation in the plane of e_1 and (1, ..., 1) that takes one to the other."""
    x = np.eye(size)[0] + REST * np.linspace(1.0, 0.6, size) * (np.arange(size) > 0)
    u, ones = np.eye(size)[0], np.full(size, 1 / math.sqrt(size))
    v = (ones - (u @ ones) * u) / np.linalg.norm(ones - (u @ ones) * u)
    cos, sin = u @ ones, v @ ones
    a, b = u @ x, v @ x
    return x, x - a * u - b * v + (a * cos - b * sin) * u + (a * sin + b * cos) * v


def _label(name: str, vector: np.ndarray) -> str:
    entries = ", ".join(f"{value:.2f}" for value in vector)
    return f"{name} = ({entries}), max {np.abs(vector).max():.2f}"


def _draw_plane(axes: Any) -> None:
    vectors = _rotation_matrix(2)
    angles = np.linspace(0, 2 * np.pi, 200)
    length = np.linalg.norm(vectors[0])
    axes.plot(length * np.cos(angles), length * np.sin(angles), color="#cccccc", linewidth=1)
    for name, vector, color in zip(("x", "Q x"), vectors, _COLORS, strict=True):
        top = np.abs(vector).max()  # the square of all vectors with this largest entry
        square = top * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1], [1, 1]])
        axes.plot(*square.T, color=color, linewidth=1, linestyle="--")
        axes.annotate("", vector, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2})
        axes.plot([], [], color=color, label=_label(name, vector))
    axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xlabel="channel 1", ylabel="channel 2", title="D = 2")
    axes.set_aspect("equal")
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8.5)


def _draw_space(axes: Any) -> None:
    vectors = _rotation_matrix(3)
    for name, vector, color in zip(("x", "Q x"), vectors, _COLORS, strict=True):
        axes.quiver(0, 0, 0, *vector, color=color, linewidth=2, arrow_length_ratio=0.12)
        # Down to the floor and along both channels: the entries of the vector.
        path = np.array([[vector[0], 0, 0], [vector[0], vector[1], 0], vector, [0, 0, 0]])
        axes.plot(*path[:3].T, color=color, linewidth=1, linestyle="--")
        axes.plot([], [], [], color=color, label=_label(name, vector))
    angles = np.linspace(0, np.pi / 2, 60)
    length, zero = np.linalg.norm(vectors[0]), np.zeros(60)
    cos, sin = length * np.cos(angles), length * np.sin(angles)
    for arc in ((cos, sin, zero), (cos, zero, sin), (zero, cos, sin)):
        axes.plot(*arc, color="#cccccc", linewidth=1)
    axes.set(xlim=(0, 1.1), ylim=(0, 1.1), zlim=(0, 1.1), xlabel="channel 1", ylabel="channel 2", zlabel="channel 3")
    axes.set_title("D = 3")
    axes.view_init(elev=22, azim=-62)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False, fontsize=8.5)


def draw() -> Figure:
    """One vector before and after a rotation, in the plane and in space."""
    figure = plt.figure(figsize=(9.6, 4.9), layout="constrained")
    _draw_plane(figure.add_subplot(1, 2, 1))
    _draw_space(figure.add_subplot(1, 2, 2, projection="3d"))
    return figure


def _pictures(results: Results) -> list[Picture]:
    size = 64
    x, channels = dominated_vectors(size, 1, 0)
    curves = {
        label: (list(range(size)), np.abs(rotate(x, channels, rotation, 0))) for rotation, label in LABELS.items()
    }
    words = "x and Q x in two and three dimensions; dashed squares: largest entry; dashed lines: entries."
    entries = drawing.lines(curves, x_label="channel", y_label="|entry|")
    return [
        Picture("rotation", words, draw(), "png"),
        Picture("channels", "The entries of one vector of 64 channels before and after rotation.", entries),
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
