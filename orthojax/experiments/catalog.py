"""Every experiment by name."""

from orthojax.errors import UserError, nearest
from orthojax.experiments.from_attention import (
    appendix_e,
    appendix_g,
    appendix_h,
    figure1,
    figure2,
    figure3,
    figure4,
    figure6,
    hidden_maps,
    layer_progression,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
    table8,
    table9,
    training_curves,
)
from orthojax.experiments.ours import normalizers, optimizer_outliers, quick, rotation_ablation
from orthojax.experiments.study.calculation import Calculation
from orthojax.experiments.study.study import Experiment

# In the order in which they are listed.
ALL: tuple[Experiment | Calculation, ...] = (
    quick.EXPERIMENT,
    table1.EXPERIMENT,
    table2.EXPERIMENT,
    table3.EXPERIMENT,
    table4.EXPERIMENT,
    table5.EXPERIMENT,
    table6.EXPERIMENT,
    table7.EXPERIMENT,
    table8.EXPERIMENT,
    table9.EXPERIMENT,
    figure1.EXPERIMENT,
    figure2.EXPERIMENT,
    figure3.CALCULATION,
    figure4.EXPERIMENT,
    figure6.EXPERIMENT,
    *layer_progression.EXPERIMENTS,
    hidden_maps.HIDDEN_STATES,
    hidden_maps.ATTENTION_MAPS,
    training_curves.EXPERIMENT,
    appendix_e.CALCULATION,
    appendix_g.CALCULATION,
    appendix_h.CALCULATION,
    rotation_ablation.EXPERIMENT,
    optimizer_outliers.EXPERIMENT,
    normalizers.EXPERIMENT,
)


def by_name() -> dict[str, Experiment | Calculation]:
    """Every name, also of those with several, -> its experiment."""
    return {name: found for found in ALL for name in (found.name, *found.also)}


def find(name: str) -> Experiment | Calculation:
    """The experiment of a name.

    Raises:
      UserError: For an unknown one.
    """
    known = by_name()
    if name not in known:
        names = " | ".join(found.name for found in ALL)
        raise UserError(f"unknown experiment {name!r}", allowed=names, hint=nearest(name, known))
    return known[name]
