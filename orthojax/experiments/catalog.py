"""Every experiment by name."""

from orthojax.experiments import optimizer_outliers, quick, rotation_ablation

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (quick.EXPERIMENT, rotation_ablation.EXPERIMENT, optimizer_outliers.EXPERIMENT)
}
