"""Under which conditions sinks, drains and peaks form: depth x optimizer x attention, each at 1,000 steps, one seed.

From Attention to Activation's methods and Active-Dormant Attention Heads' alternatives on one map. One seed is an
anecdote: what it shows is where to look, with five seeds, on cells that the rule `chosen` names.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.active_dormant.models import DRAIN, ORTHOADAM, PEAK, RISKS, SGD, config
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Quantity, Result, Results, as_quantity

DEPTHS = (1, 2, 3, 4, 5, 6)
OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"optim__weight_decay": 0.0}),
    "adamw": ("AdamW", {"optim__weight_decay": 0.01}),
    "sgd": ("SGD", SGD | {"optim__learning_rate": 0.1, "optim__weight_decay": 0.0}),
    "orthoadam": ("OrthoAdam", ORTHOADAM | {"optim__weight_decay": 0.0}),
}
ATTENTION: Mapping[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "softmax1": ("softmax-1", {"model__normalizer": "softmax1"}),
    "relu": ("ReLU", {"model__normalizer": "relu"}),
    "gelu": ("GELU", {"model__normalizer": "gelu"}),
    "sigmoid": ("sigmoid", {"model__normalizer": "sigmoid"}),
    "gated": ("gated softmax", {"model__gated_attention": True}),
}
_SHORT = {"train__steps": 1000, "train__probe_steps": (), "train__probe_details": False, "train__batch_size": 16}


def cell(attention: str, optimizer: str, depth: int) -> Variant:
    """One cell of the map."""
    (of_attention, model), (of_optimizer, optim) = ATTENTION[attention], OPTIMIZERS[optimizer]
    name = f"{attention}_{optimizer}_{depth}"
    label = f"{of_attention}, {of_optimizer}, {depth} layer{'s' * (depth > 1)}"
    # Scanned, so that six layers compile as fast as one.
    return Variant(name, label, config(depth, model__scan_layers=True, **_SHORT, **model, **optim))


def _variants(scale: str) -> tuple[Variant, ...]:
    return tuple(cell(*of) for of in itertools.product(ATTENTION, OPTIMIZERS, DEPTHS))


SHOWN: Mapping[str, str | Quantity] = {
    "Attention of non-triggers to <s>, largest of the layers": "sink_attention_rest",
    "Value norm of <s> over the others', smallest of the layers": DRAIN,
    "Residual norm of <s> over the others', largest of the layers": PEAK,
    "Backcopy excess risk (nats)": RISKS[0],
    "Bigram excess risk (nats)": RISKS[1],
}


def _maps(results: Results) -> list[Table]:
    """One table for each quantity: attention and optimizer by depth."""
    tables = []
    for caption, quantity in SHOWN.items():
        rows = []
        for attention, optimizer in itertools.product(ATTENTION, OPTIMIZERS):
            found = [results[f"{attention}_{optimizer}_{depth}"] for depth in DEPTHS]
            cells = [result.mean_cell(as_quantity(quantity)) for result in found]
            rows.append([f"{ATTENTION[attention][0]}, {OPTIMIZERS[optimizer][0]}", *cells])
        tables.append(Table(caption, ["", *(f"{depth} layer{'s' * (depth > 1)}" for depth in DEPTHS)], rows))
    return tables


_DRAWN = {"sink": ("sink_attention_rest", "weight on <s>"), "drain": (DRAIN, "value norm of <s> / others'"),
          "peak": (PEAK, "residual norm of <s> / others'")}  # fmt: skip


def _mean(result: Result, quantity: str | Quantity) -> float:
    values = result.values(quantity)
    return float(np.mean(values)) if values else np.nan


def _pictures(results: Results) -> list[Picture]:
    pictures = []
    for (name, (quantity, words)), caption in zip(_DRAWN.items(), SHOWN, strict=False):
        panels = {
            label: np.array(
                [[_mean(results[f"{attention}_{of}_{depth}"], quantity) for depth in DEPTHS] for of in OPTIMIZERS]
            )
            for attention, (label, _) in ATTENTION.items()
        }
        figure = drawing.maps(
            panels, x_label="layers", y_label="", value_label=words, log=name == "peak",
            x_ticks=[str(depth) for depth in DEPTHS], y_ticks=[words for words, _ in OPTIMIZERS.values()],
        )  # fmt: skip
        pictures.append(Picture(name, f"{caption}.", figure))
    return pictures


def chosen(results: Results) -> list[str]:
    """Ten cells for five seeds, by a rule fixed before any of these runs.

    Of the cells that learned to copy (excess risk below 0.1 nats): the three with the largest peak ratio, the three
    with the smallest, the two with most attention on <s> and the two with least; cells chosen already are passed over,
    and equal values go by name.
    """
    learned = [r for r in results.finished if r.mean(RISKS[0]) < 0.1]
    found: list[str] = []

    def take(count: int, quantity: str | Quantity, largest: bool) -> None:
        def key(result: Result) -> tuple[float, str]:
            return (-1 if largest else 1) * result.mean(quantity), result.name

        found.extend([r.name for r in sorted(learned, key=key) if r.name not in found][:count])

    take(3, PEAK, True)
    take(3, PEAK, False)
    take(2, "sink_attention_rest", True)
    take(2, "sink_attention_rest", False)
    return found


def _about(results: Results) -> list[str]:
    c, cells = results.first.config, [results[name].label for name in chosen(results)]
    return [
        f"Models of width {c.model.d_model} after {c.train.steps} steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens, seed {results.seeds[0]} alone: an anecdote in every cell. AdamW has weight "
        "decay 0.01, the others none.",
        f"The rule, fixed before, names for five seeds: {'; '.join(cells)}."
        if cells
        else "No cell has learned to copy.",
    ]


EXPERIMENT = Experiment(
    name="break_conditions_map",
    title="Bigram-Backcopy: sinks, drains and peaks by depth, optimizer and attention; one seed, 1,000 steps",
    seeds=(1,),
    variants=_variants,
    about=_about,
    tables=(_maps,),
    pictures=(_pictures,),
)
