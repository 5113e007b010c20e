"""Every experiment by name."""

from orthojax.experiments import quick

EXPERIMENTS = {experiment.name: experiment for experiment in (quick.EXPERIMENT,)}
