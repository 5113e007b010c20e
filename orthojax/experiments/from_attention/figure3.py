"""Figure 3 of From Attention to Activation: a rotation spreads a vector over its channels, drawn and in numbers."""

import math
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from orthojax.experiments.from_attention.spiked_vector import LABELS, RotationName, mean_norm_ratio_of_direction, turn
from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.calculation import Calculated, Calculation, Case
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
                    np.asarray(ratio(turn(both, np.tile(channels[part], 2), rotation, one_seed))).reshape(2, -1)
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


def _table(result: Calculated) -> Table:
    rows = []
    for size in SIZES:
        for rotation, label in LABELS.items():
            name, exact = f"{rotation}_D{size}", _exact(rotation, size)
            words = "cosine transform, since there is no Hadamard" if rotation == "hadamard" and size == 3 else label
            cells = [result.show(name, key, lambda value: f"{value:.4f}") for key in ("norm_ratio", "norm_ratio_alone")]
            rows.append([f"D = {size}: {words}", *cells, "" if exact is None else f"{exact:.4f}"])
    columns = ["", "e_i + r, |r| = 0.1", "e_i alone", "e_i alone, exact mean"]
    return Table("Largest entry over length, max|y| / ||y||", columns, rows)


def _claims(result: Calculated) -> list[Claim]:
    def mean(rotation: str, size: int) -> float:
        return result.mean(f"{rotation}_D{size}", "norm_ratio")

    lowered = all(
        mean(rotation, size) < mean("none", size) for rotation in LABELS if rotation != "none" for size in SIZES
    )
    pairs = {size: (mean("none", size), mean("haar", size), mean("aligned", size)) for size in SIZES}
    last = SIZES[-1]
    few, many = (result.mean(f"haar_D{size}", "norm_ratio_alone") for size in (SIZES[0], last))
    return [
        Claim(
            verdict(lowered),
            "Rotating a vector with a dominant component lowers its largest entry. Before, with a Haar matrix, with "
            "the best one (all entries of Q e_i equal): "
            + "; ".join(f"D = {size}: {a:.3f}, {b:.3f}, {c:.3f}" for size, (a, b, c) in pairs.items())
            + " (criterion: lower in the mean for every Q and D).",
        ),
        Claim(
            verdict(few > 0.5 and many < 0.25),
            f"It takes many channels. Of e_i alone a random rotation leaves {few:.3f} in two channels and {many:.3f} "
            f"in {last} (exact means: 2 sqrt(2)/pi = {mean_norm_ratio_of_direction(2):.3f} and "
            f"{mean_norm_ratio_of_direction(last):.3f}), the best one 1/sqrt(2) = {1 / math.sqrt(2):.3f} and "
            f"{1 / math.sqrt(last):.3f} (criterion: a random one leaves more than a half in two channels, less than a "
            f"quarter in {last}).",
        ),
    ]


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


def _channels() -> Figure:
    size = 64
    x, channels = dominated_vectors(size, 1, 0)
    curves = {}
    for rotation, label in LABELS.items():
        curves[label] = (np.arange(size).tolist(), np.abs(turn(x, channels, rotation, 0)))
    return drawing.lines(curves, x_label="channel", y_label="|entry|")


def report(result: Calculated) -> Report:
    """The picture in two and three dimensions, and what it comes to in many."""
    return Report(
        title="Figure 3: a rotation spreads a vector",
        summary=[
            "A vector with one dominant component, before and after an orthogonal matrix: its length stays, its "
            f"largest entry falls. Below, vectors e_i + r with a random r of length {REST} and random i, "
            f"{SAMPLES} for each D and seed.",
        ],
        claims=_claims(result),
        tables=[_table(result)],
        pictures=[
            Picture(
                "rotation",
                "x and Q x in two and three dimensions; dashed squares: largest entry; dashed lines: entries.",
                draw(),
                "png",
            ),
            Picture("channels", "The entries of one vector of 64 channels before and after rotation.", _channels()),
        ],
        notes=result.notes(),
        links=result.links(),
    )


CALCULATION = Calculation("figure3", "a rotation spreads a vector over its channels", compute, report)
