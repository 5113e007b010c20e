"""Ten cells of `break_conditions_map` with five fresh seeds: does what one seed showed hold?"""

from collections.abc import Callable, Mapping

from orthojax.experiments.active_dormant.break_conditions_map import cell
from orthojax.experiments.active_dormant.models import DRAIN, PEAK, RISKS
from orthojax.experiments.claims import Claim, all_within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.results import Quantity, Results
from orthojax.experiments.tables import MetricTable

# What `break_conditions_map.chosen` names, in its order.
CELLS = (
    "gelu_orthoadam_5", "relu_orthoadam_2", "gelu_orthoadam_6",
    "sigmoid_sgd_1", "softmax1_adamw_1", "gated_adamw_1",
    "softmax1_adamw_4", "softmax1_adamw_5",
    "gelu_adam_1", "gelu_sgd_2",
)  # fmt: skip
_SINK = "sink_attention_rest"
_CHOSEN: Mapping[str, tuple[tuple[str, ...], str | Quantity, tuple[float, float], str]] = {
    "the largest residual peaks have one": (CELLS[:3], PEAK, (2, float("inf")), "residual ratio above 2"),
    "the smallest have none": (CELLS[3:6], PEAK, (0, 2), "residual ratio below 2 after every layer"),
    "most attention on <s> have a sink": (CELLS[6:8], _SINK, (0.7, 1.1), "weight above 0.7 in some layer"),
    "least have none": (CELLS[8:], _SINK, (-1, 0.2), "weight below 0.2 in every layer"),
}


def _variants(scale: str) -> tuple[Variant, ...]:
    def variant(name: str) -> Variant:
        attention, optimizer, depth = name.split("_")
        return cell(attention, optimizer, int(depth))

    return tuple(map(variant, CELLS))


def _each(names: tuple[str, ...]) -> Callable[[Results], dict[str, tuple[str]]]:
    return lambda results: {results[name].label: (name,) for name in names if name in results}


CLAIMS = tuple(
    Claim(f"The cells with {words}, in five other seeds.", _each(names), (quantity,),
          lambda of, quantity=quantity, band=band: all_within(of, (quantity, band[0], band[1])),
          f"{criterion}, in every seed")
    for words, (names, quantity, band, criterion) in _CHOSEN.items()
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        "The three cells with the largest residual peak of those that copied, the three with the smallest, the two "
        "with most attention on <s> and the two with least, on the map with one seed; here with five others. The "
        "limits are those of the question whether a method removes a sink or a peak."
    ]


EXPERIMENT = Experiment(
    name="break_conditions_cells",
    title="Bigram-Backcopy: ten cells of the map of break conditions, five seeds",
    seeds=(2, 3, 4, 5, 6),
    variants=_variants,
    about=_about,
    tables=(MetricTable("After 1,000 steps", [PEAK, _SINK, DRAIN, *RISKS]),),
    claims=CLAIMS,
)
