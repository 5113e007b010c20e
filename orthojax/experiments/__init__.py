"""The papers' tables and figures as data: which models are trained, what is measured, how it is shown."""

from orthojax.experiments import quick
from orthojax.experiments.report import print_report, write_report
from orthojax.experiments.study import Experiment, Study, Variant, run_study

EXPERIMENTS = {experiment.name: experiment for experiment in (quick.EXPERIMENT,)}

__all__ = ["EXPERIMENTS", "Experiment", "Study", "Variant", "print_report", "run_study", "write_report"]
