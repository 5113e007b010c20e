"""The committed results of an experiment."""

from pathlib import Path

from orthojax.experiments.experiment import Experiment
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.experiments.results import Results

RESULTS = Path(__file__).parents[1] / "results"


def committed(experiment: Experiment) -> Results:
    """Its own results; of an experiment whose folder has a report alone those of table2, whose runs it shares."""
    names = ("quick-tiny" if experiment.name == "quick" else experiment.name, experiment.name.replace("_", "-"))
    folder = next(RESULTS / name for name in names if (RESULTS / name).is_dir())
    own = folder / "results.json"
    path = own if own.exists() else RESULTS / "table2/results.json"
    return results_of(experiment, read_raw(path), RESULTS / "x")
