"""The committed results of an experiment."""

from pathlib import Path

from orthojax.experiments.experiment import Experiment
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.experiments.results import Results

RESULTS = Path(__file__).parents[1] / "results"


def folders(scale: str) -> tuple[Path, ...]:
    """Where the results of a scale are: those that others replaced, here by scale deep, are in a dated folder."""
    return (RESULTS, RESULTS / "2026-11-22") if scale == "tiny" else (RESULTS / scale,)


def folder_of(experiment: Experiment, scale: str = "tiny") -> Path:
    """The folder of an experiment's report."""
    names = ("quick-tiny" if experiment.name == "quick" else experiment.name, experiment.name.replace("_", "-"))
    return next(at / name for at in folders(scale) for name in names if (at / name).is_dir())


def committed(experiment: Experiment, scale: str = "tiny") -> Results:
    """Its own results; of an experiment whose folder has a report alone those of table2, whose runs it shares."""
    folder = folder_of(experiment, scale)
    own = folder / "results.json"
    path = own if own.exists() else folder.parent / "table2/results.json"
    return results_of(experiment, read_raw(path), RESULTS / "x")
