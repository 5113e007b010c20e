"""The committed results of an experiment."""

from pathlib import Path

from orthojax.experiments.experiment import Experiment
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.experiments.results import Results

RESULTS = Path(__file__).parents[1] / "results"


def committed(experiment: Experiment, scale: str = "tiny") -> Results:
    """Its own results; of an experiment whose folder has a report alone those of table2, whose runs it shares."""
    results = RESULTS if scale == "tiny" else RESULTS / scale
    names = ("quick-tiny" if experiment.name == "quick" else experiment.name, experiment.name.replace("_", "-"))
    folder = next(results / name for name in names if (results / name).is_dir())
    own = folder / "results.json"
    path = own if own.exists() else results / "table2/results.json"
    return results_of(experiment, read_raw(path), RESULTS / "x")
