"""A page that steps through training: attention, value norms, residual norms and curves at the recorded steps.

One self-contained file: the numbers are embedded, `templates/training*.js` draw them, and without JavaScript and in
print there is a strip of a few steps. The data is JSON, in the element `data`:

  log_from: an axis is logarithmic where its values' ratio exceeds this;
  palettes: {"light", "dark"}: base64 of 256 RGB triples;
  runs: of each `TrainingView` title, about, tokens, triggers, token_count, steps, layers, heads, curves as [name,
    values] pairs with null for what is not finite, and
    attention: base64 of one byte for each weight w, round(255 sqrt(w / scale)), [frames, L, N, T, T]; of causal
      attention the lower triangle by rows, [frames, L, N, T (T + 1) / 2]. The square root keeps small weights apart;
      none is off by more than scale / 255;
    scale: the largest weight, or 1;
    value_norms, residual_norms: base64 of little-endian float32, [frames, L, N, T] and [frames, L, T].
"""

import base64
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from orthojax.errors import UserError
from orthojax.experiments.rendering import render_page
from orthojax.files import write_text
from orthojax.formatting import number

MOST_TOKENS = 64  # of a sequence on the page
_LOG_FROM = 30.0
_STRIP_STEPS, _STRIP_LAYERS = 5, 4
_PALETTES = {"light": "BuPu", "dark": "magma"}
_DOT, _HEIGHT = 4, 96  # of the strip's charts: width of a position, height


class Frame(NamedTuple):
    """What is shown of one step.

    Attributes:
      step: Optimizer steps done.
      attention: [L, N, T, T] weights of one sequence, queries by keys.
      value_norms: [L, N, T], ||W_o v_j||.
      residual_norms: [L, T], after each block.
    """

    step: int
    attention: np.ndarray
    value_norms: np.ndarray
    residual_norms: np.ndarray


class TrainingView(NamedTuple):
    """A run over its recorded steps.

    Attributes:
      title: The run's name, in the selector where there are several.
      tokens: T, as they are printed; blanks and control characters are shown as ␣ and escapes.
      is_trigger: T, whether the token is a trigger of Bigram-Backcopy.
      frames: In the order of their steps.
      curves: Name -> one value for each frame; one that is not finite is a gap.
      about: One paragraph.
    """

    title: str
    tokens: Sequence[str]
    is_trigger: Sequence[bool]
    frames: Sequence[Frame]
    curves: Mapping[str, Sequence[float]]
    about: str


class _Run(NamedTuple):
    """A view that was checked, cut to `MOST_TOKENS`, with the arrays of its F frames stacked."""

    view: TrainingView
    tokens: list[str]
    is_trigger: np.ndarray  # [T]
    attention: np.ndarray  # [F, L, N, T, T]
    value_norms: np.ndarray  # [F, L, N, T]
    residual_norms: np.ndarray  # [F, L, T]


def render_training_view(views: Sequence[TrainingView], *, title: str = "", report: str = "") -> str:
    """The HTML page of one run, or of several between which the reader switches.

    Sequences longer than `MOST_TOKENS` are cut, and the page says so. The same views give the same page.

    Args:
      views: With different titles; steps, tokens, layers and heads may differ.
      title: Of the page; that of the first view where none is given.
      report: URL of the page that this one belongs to.

    Raises:
      UserError: Where there is no view, titles are not unique, or arrays have other shapes than their class says,
        negative values or values that are not finite.
    """
    titles = [view.title for view in views]
    if not titles or len(set(titles)) < len(titles):
        raise UserError(f"training views {titles}", allowed="one or more, of different titles")
    runs = [_checked(view) for view in views]
    palettes = {name: _base64((_colors(name) * 255).round()) for name in _PALETTES}
    data = {"log_from": _LOG_FROM, "palettes": palettes, "runs": [_embedded(run) for run in runs]}
    strips = [_strip(run) for run in runs]
    return render_page("training.html", title=title or titles[0], report=report, views=views, data=data, strips=strips)


def write_training_view(views: Sequence[TrainingView], path: Path, *, title: str = "", report: str = "") -> None:
    """Writes the page of `render_training_view`."""
    write_text(path, render_training_view(views, title=title, report=report))


def _checked(view: TrainingView) -> _Run:
    of_run, length = f"of run {view.title!r}", len(view.tokens)
    steps = [frame.step for frame in view.frames]
    if not steps or steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise UserError(f"steps {of_run}: {steps}", allowed="one or more, increasing from 0 or later")
    if len(view.is_trigger) != length:
        raise UserError(f"is_trigger {of_run} has {len(view.is_trigger)} entries", allowed=f"one per token, {length}")
    for name, values in view.curves.items():
        if len(values) != len(steps):
            problem = f"curve {name!r} {of_run} has {len(values)} values"
            raise UserError(problem, allowed=f"one per frame, {len(steps)}")
    shape = np.shape(view.frames[0].attention)
    layers, heads = shape[:2] if len(shape) == 4 else (1, 1)
    if 0 in (layers, heads, length):
        raise UserError(f"run {view.title!r} has {layers} layers, {heads} heads, {length} tokens", allowed="1 or more")
    sizes, stacked = {"L": layers, "N": heads, "T": length}, {}
    for name, axes in (("attention", "LNTT"), ("value_norms", "LNT"), ("residual_norms", "LT")):
        expected = tuple(sizes[axis] for axis in axes)
        cut = tuple(slice(MOST_TOKENS if axis == "T" else None) for axis in axes)
        arrays = []
        for frame in view.frames:
            array, where = np.asarray(getattr(frame, name)), f"{name} {of_run} at step {frame.step}"
            if array.shape != expected:
                raise UserError(f"{where} has shape {array.shape}", allowed=f"[{', '.join(axes)}] = {expected}")
            array = array[cut].astype("<f4")
            if not (np.isfinite(array) & (array >= 0)).all():
                raise UserError(f"{where} has values that are negative or not finite", allowed="numbers from 0 on")
            arrays.append(array)
        stacked[name] = np.stack(arrays)
    tokens = [_visible(token) for token in view.tokens[:MOST_TOKENS]]
    return _Run(view, tokens, np.asarray(view.is_trigger[:MOST_TOKENS], bool), **stacked)


def _visible(token: str) -> str:
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in token)


def _embedded(run: _Run) -> dict[str, Any]:
    """One of the runs in the page's data."""
    view, (scale, codes) = run.view, _codes(run.attention)
    causal = not np.triu(run.attention, 1).any()
    rows, columns = np.tril_indices(len(run.tokens))
    return {
        "title": view.title,
        "about": view.about,
        "tokens": run.tokens,
        "triggers": run.is_trigger.tolist(),
        "token_count": len(view.tokens),
        "steps": [int(frame.step) for frame in view.frames],
        "layers": run.attention.shape[1],
        "heads": run.attention.shape[2],
        "causal": causal,
        "scale": scale,
        "attention": _base64(codes[..., rows, columns] if causal else codes),
        "value_norms": base64.b64encode(run.value_norms.tobytes()).decode(),
        "residual_norms": base64.b64encode(run.residual_norms.tobytes()).decode(),
        "curves": [[name, [_rounded(value) for value in values]] for name, values in view.curves.items()],
    }


def _codes(attention: np.ndarray) -> tuple[float, np.ndarray]:
    """(scale, round(255 sqrt(w / scale))) of weights w."""
    scale = max(1.0, float(attention.max()))
    return scale, (255 * np.sqrt(attention / scale)).round().astype(np.uint8)


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _base64(small: np.ndarray) -> str:
    return base64.b64encode(small.astype(np.uint8).tobytes()).decode()


def _colors(palette: str) -> np.ndarray:
    """[256, 3], from 0 to 1."""
    return plt.get_cmap(_PALETTES[palette])(np.arange(256))[:, :3]


# The strip of a few steps.


def _strip(run: _Run) -> dict[str, Any]:
    """What is printed, and shown without JavaScript: some steps in some layers, of the first head."""
    frames, steps = _spread(len(run.view.frames), _STRIP_STEPS), [frame.step for frame in run.view.frames]
    _, layers, heads, *_ = run.attention.shape
    scale, codes = _codes(run.attention[:, :, 0])
    rows = []
    for layer in _spread(layers, _STRIP_LAYERS):
        norms = {"value norms": run.value_norms[:, layer, 0], "residual norms": run.residual_norms[:, layer]}
        charts = {name: _charts(values, run.is_trigger) for name, values in norms.items()}
        cells = [
            {"map": _png(codes[frame, layer]), "charts": [(name, made[0][frame]) for name, made in charts.items()]}
            for frame in frames
        ]
        head = f", head 1 of {heads}" if heads > 1 else ""
        name = f"Layer {layer + 1} of {layers}{head}. " if layers * heads > 1 else ""
        axes = "; ".join(f"{name} {made[1]}" for name, made in charts.items())
        rows.append({"caption": f"{name}Axes: {axes}.", "cells": cells})
    curves = [(name, [_curve_text(values[i]) for i in frames]) for name, values in run.view.curves.items()]
    return {
        "steps": [f"{steps[frame]:,}" for frame in frames],
        "rows": rows,
        "curves": curves,
        "scale": number(scale),
        "cut": f"The first {MOST_TOKENS} of {count} tokens." if (count := len(run.view.tokens)) > MOST_TOKENS else "",
        "width": _DOT * len(run.tokens),
        "height": _HEIGHT,
    }


def _curve_text(value: float) -> str:
    return number(value) if math.isfinite(value) else "-"


def _spread(count: int, most: int) -> list[int]:
    """At most this many of the numbers below `count`, with the first and the last, evenly spread."""
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most))})


def _charts(values: np.ndarray, is_trigger: np.ndarray) -> tuple[list[list[tuple[str, str]]], str]:
    """Charts of dots by position for values [F, T], with one axis, and that axis in words.

    A chart is a list of (class, SVG path), each dot a line of length 0.
    """
    high, positive = float(values.max()), values[values > 0]
    low = float(positive.min()) if len(positive) and high > _LOG_FROM * positive.min() else 0.0
    if low:
        heights = np.log(np.maximum(values, low) / low) / math.log(high / low)
    else:
        heights = values / (high or 1.0)
    kinds = np.where(is_trigger, "trigger", "other")
    kinds[0] = "first"
    at = [
        [f"M{_DOT * i + _DOT // 2} {_HEIGHT - 4 - (_HEIGHT - 8) * height:.0f}h0" for i, height in enumerate(line)]
        for line in heights
    ]
    charts = [
        [(kind, "".join(np.array(line)[kinds == kind])) for kind in ("other", "trigger", "first") if kind in kinds]
        for line in at
    ]
    return charts, f"from {number(low)} to {number(high)}{', logarithmic' if low else ''}"


def _png(codes: np.ndarray) -> str:
    """The data URL of a map [T, T] of codes, in the light palette."""
    buffer = io.BytesIO()
    plt.imsave(buffer, _colors("light")[codes], format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
