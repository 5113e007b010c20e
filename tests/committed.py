"""The committed results of an experiment."""

from pathlib import Path

from orthojax.experiments.experiment import Experiment
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.experiments.results import Results

RESULTS = Path(__file__).parents[1] / "results"


def committed(experiment: Experiment) -> Results:
    """Its own results, or those of table2 that it reads."""
    name = "quick-tiny" if experiment.name == "quick" else experiment.name
    paths = [RESULTS / folder / "results.json" for folder in (name, name.replace("_", "-"), "table2")]
    return results_of(experiment, read_raw(next(path for path in paths if path.exists())), RESULTS / "x")
