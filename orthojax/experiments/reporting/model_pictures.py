"""Pictures of trained models, for the report of any study: appendix B of From Attention to Activation."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.page import Picture
from orthojax.experiments.reporting.summaries import finished, finished_seeds
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant


def example_of(study: Study, variant: Variant) -> dict[str, np.ndarray]:
    """What `study.example.example_maps` gives for the first seed of a variant that finished."""
    return study.arrays(variant.name, finished_seeds(study, variant)[0], "maps")


def draw_attention(panels: Mapping[str, np.ndarray]) -> drawing.Figure:
    """Attention maps; title -> mean weight over heads [T, T]."""
    return drawing.maps(
        panels, x_label="key position", y_label="query position", value_label="attention weight", log=True
    )


def draw_hidden(panels: Mapping[str, np.ndarray], channels: Sequence[int] | None = None) -> drawing.Figure:
    """Maps of hidden states; title -> |hidden state| [T, D], or of some channels only."""
    return drawing.maps(
        panels, x_label="channel", y_label="position", value_label="|hidden state|",
        x_ticks=[str(channel) for channel in channels] if channels is not None else None,
    )  # fmt: skip


def _attention(study: Study, variants: Sequence[Variant], seed: str) -> Picture:
    panels = {v.label: example_of(study, v)["attention"][0] for v in variants}
    caption = f"Attention on one held-out sequence, mean over heads and layers ({seed})."
    return Picture("attention_map", caption, draw_attention(panels), "png")


def _hidden(study: Study, variants: Sequence[Variant], seed: str) -> Picture:
    panels = {v.label: example_of(study, v)["hidden"][0] for v in variants}
    caption = f"|Hidden state| on the same sequence, mean over layers: bright columns are outlier channels ({seed})."
    return Picture("hidden_states", caption, draw_hidden(panels), "png")


# One picture each, with a panel for every variant.
KINDS: list[Callable[[Study, Sequence[Variant], str], Picture]] = [_attention, _hidden]


def model_pictures(study: Study, variants: Sequence[Variant]) -> list[Picture]:
    """One picture of each of `KINDS`, with a panel for every variant that finished.

    Args:
      study: Where what was measured is kept.
      variants: Which variants; labels name the panels.
    """
    shown = finished(study, variants)
    if not shown:
        return []
    seeds = sorted({finished_seeds(study, v)[0] for v in shown})
    told = f"seed {seeds[0]}" if len(seeds) == 1 else "the first seed of each"
    return [kind(study, shown, told) for kind in KINDS]
