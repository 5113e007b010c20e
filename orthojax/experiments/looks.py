"""How variants look in every figure: the colour says the optimizer, the line and the hatch say the normalizer.

Colours are those of Okabe and Ito without yellow, which is too light for a line. Of any two, CIELAB keeps 15 units or
more apart with full deuteranopia and protanopia, by the matrices of Machado, Oliveira and Fernandes (2009).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = (VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK)
# What a label says of the optimizer -> its colour; the first that is found.
_OPTIMIZERS = {
    r"orthoadam|\bcured\b": BLUE,
    r"\badamw\b": PURPLE,
    r"\badam\b|\bvanilla\b": VERMILLION,
    r"\bsgd w/o mom|\bsgd\b(?! w)": GREEN,
    r"\bsgd w(ith|/)": SKY,
    r"\brmsprop\b": ORANGE,
}
Dash = str | tuple[float, tuple[float, ...]]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.", (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")
# What a label says of the normalizer -> its place among dashes and hatches; the first that is found.
_NORMALIZERS = {
    r"softmax-(n|t)\b": 4,
    r"softmax-1|\bcured\b": 1,
    r"\brelu\b": 2,
    r"\bsigmoid\b": 3,
    r"gated|clipped|learned sinks": 5,
    r"\bsoftmax\b|\bvanilla\b": 0,
}


class Look(NamedTuple):
    """How a curve or a bar is drawn: no two of a figure are alike."""

    color: str
    dash: Dash
    hatch: str


def looks(labels: Sequence[str], *, pairs: bool = False) -> list[Look]:
    """How to draw what has these labels, no two alike among the first forty.

    An optimizer in a label decides on its colour, a normalizer on its line and hatch; other labels take the colours
    that are left, and hatches in their order. Where a look is taken, the line changes.

    Args:
      labels: In the order of the legend.
      pairs: Labels 2i and 2i + 1 belong together and have one colour.

    >>> [look[:2] for look in looks(["softmax + Adam", "softmax-1 + Adam", "softmax-1 + OrthoAdam", "a model"])]
    [('#D55E00', '-'), ('#D55E00', '--'), ('#0072B2', '--'), ('#009E73', '-')]
    """
    optimizers = [_named(label, _OPTIMIZERS) for label in labels]
    free = cycle([color for color in COLORS if color not in optimizers] or COLORS)
    found: list[Look] = []
    taken: set[tuple[str, Dash]] = set()
    for i, label in enumerate(labels):
        color = optimizers[i] or (found[-1].color if pairs and i % 2 else next(free))
        named = _named(label, _NORMALIZERS)
        order = [(k + (named or 0)) % len(DASHES) for k in range(len(DASHES))]
        k = next((k for k in order if (color, DASHES[k]) not in taken), order[0])
        taken.add((color, DASHES[k]))
        found.append(Look(color, DASHES[k], HATCHES[i % len(HATCHES) if named is None else k]))
    return found


def _named(label: str, names: Mapping[str, _T]) -> _T | None:
    return next((value for pattern, value in names.items() if re.search(pattern, label.lower())), None)
