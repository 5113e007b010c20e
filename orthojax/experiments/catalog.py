"""Every experiment by name."""

from orthojax.experiments.from_attention import appendix_e, appendix_g, appendix_h, figure3
from orthojax.experiments.ours import optimizer_outliers, quick, rotation_ablation

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (quick.EXPERIMENT, rotation_ablation.EXPERIMENT, optimizer_outliers.EXPERIMENT)
}

# What needs no training.
CALCULATIONS = {
    calculation.name: calculation
    for calculation in (
        figure3.CALCULATION,
        appendix_e.CALCULATION,
        appendix_g.CALCULATION,
        appendix_h.CALCULATION,
    )
}
