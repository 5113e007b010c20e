"""What an experiment is: models to train and measure, or a computation, and how its results are reported."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orthojax.config import FIRST_DEFAULTS, Config, changed_fields, replace
from orthojax.errors import UserError, nearest
from orthojax.published import model_files

if TYPE_CHECKING:
    from orthojax.experiments.claims import Claim
    from orthojax.experiments.measures import Measure
    from orthojax.experiments.page import Picture, Table
    from orthojax.experiments.results import Quantity, Result, Results
    from orthojax.experiments.training_view import TrainingView


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of an experiment.

    Attributes:
      name: Of its rows in results.json.
      label: In tables and legends.
      config: Its run; a seed replaces `train.seed` and `data.seed`.
      learning_rates: Where given, the best of them in short trials replaces the config's.
      checkpoint: The step folder of an existing model, which is measured and not trained.
      measured_on: The run whose held-out rows an existing model is measured on; its own where None.
    """

    name: str
    label: str
    config: Config
    learning_rates: tuple[float, ...] = ()
    checkpoint: Path | None = None
    measured_on: Config | None = None

    def with_seed(self, seed: int) -> Config:
        """The config of one seed; that of an existing model as it is."""
        return self.config if self.checkpoint else replace(self.config, {"train.seed": seed, "data.seed": seed})


@dataclasses.dataclass(frozen=True)
class Run:
    """A variant with a seed.

    Attributes:
      variant: Which model.
      seed: Of its parameters and of the order of its data.
      folder: Where it is trained, and where its measurements are stored.
    """

    variant: Variant
    seed: int
    folder: Path

    @property
    def config(self) -> Config:
        """What is trained, or what the checkpoint was trained with."""
        return self.variant.with_seed(self.seed)

    @property
    def measured_config(self) -> Config:
        """The config with the data and the evaluation set that the model is measured on."""
        on = self.variant.measured_on
        return dataclasses.replace(self.config, data=on.data, eval=on.eval) if on else self.config

    @property
    def label(self) -> str:
        """In progress messages."""
        return f"{self.variant.label}, seed {self.seed}"


def run_name(variant: Variant, seed: int) -> str:
    """The folder name of a run, a function of its config alone, so that experiments share runs.

    Fields at their first defaults do not enter, so a new field or default renames no existing folder. Of an existing
    model its files enter with sizes and times, since another one may come to lie in their place.

    >>> run_name(Variant("a", "a", Config()), 0) == run_name(Variant("b", "b", Config()), 0)
    True
    """
    config = variant.with_seed(seed)
    key: object = changed_fields(FIRST_DEFAULTS, config)
    if variant.checkpoint:
        source = variant.checkpoint.absolute()
        key = [key, str(source), model_files(source)]
        if variant.measured_on:
            key.append(changed_fields(FIRST_DEFAULTS, variant.measured_on))
    elif variant.learning_rates:
        key = [key, variant.learning_rates, "None"]  # as runs have it that are there
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    model = config.model
    return f"{model.normalizer}-{config.optim.optimizer}-{model.num_layers}x{model.d_model}-{digest}-seed{seed}"


class Case(NamedTuple):
    """One row of a computation, for one seed.

    Attributes:
      variant: Name of the row.
      overrides: Its setting; `label` in it is shown instead of the name.
      metrics: Its numbers.
    """

    variant: str
    overrides: dict[str, Any]
    metrics: dict[str, float]


Compute = Callable[[int], Sequence[Case]]
# Metrics that the paper prints for a variant, by variant name.
Paper = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table, figure or appendix as data: what runs, what is claimed of it, and what the report shows.

    Exactly one of `variants` and `compute` is given.

    Attributes:
      name: As in --experiment.
      title: One line, for --list and the head of the report.
      variants: Scale -> models to train and measure.
      compute: Seed -> rows that follow from formulas, samples or models too small to be runs; with float64 enabled. Or
        several of them by name, whose rows come one after the other.
      settings: A JSON value: what the rows of `compute` depend on beside the seed. With it the rows of each seed and
        name are kept under workdir/computed and not computed again, until it changes; without it every call repeats
        them.
      seconds_per_seed: What `compute` takes on two CPU cores, for --list.
      scales: For which `variants` is defined.
      seeds: Where none are given.
      also: Further names of the same experiment, as of figures that differ only by model.
      about: Paragraphs that open the report.
      groups: Results -> label -> role -> variant name: how `Claim.of` finds its variants, once per label. Without it
        there is one group without label, in which roles are variant names.
      paper: The numbers printed in the paper, for all scales or as a function of the scale.
      tables: Of the report; each makes one table, or several.
      claims: Of the report.
      pictures: Of the report; each makes any number of pictures, and is left out where it needs a run that failed.
      headlines: The numbers on top of the page, three at most: a quantity, or the name of a metric, with the names of
        the variants before and after. Without any they are the first three that the claims compare.
      figure: Name of the picture on top of the page; the first where not given.
      measures: What is measured of every model beyond `measures.ALWAYS`.
      takes_models: Whether --model=NAME=CHECKPOINT adds existing models as variants.
      as_measured: What existing models become before they are measured, as where one takes the text of another.
      installed: Existing models that are measured as well where they are on this machine, without being asked for.
      cost_reference: Where given, the cost of a training step is measured for every variant; maps a variant's name to
        that of the variant its time is relative to.
      trains: Whether variants are trained and measured, or only their cost is.
      notes: Further lines on how the report was made.
      views: Runs over their recorded steps. Where it returns any, training.html is written beside report.html, a page
        with a slider over the steps, and report.html links to it; left out where a run failed.
    """

    name: str
    title: str
    variants: Callable[[str], tuple[Variant, ...]] | None = None
    compute: Compute | Mapping[str, Compute] | None = None
    settings: Any = None
    seconds_per_seed: float = 5.0
    scales: tuple[str, ...] = ("tiny",)
    seeds: tuple[int, ...] = (0,)
    also: tuple[str, ...] = ()
    about: "Callable[[Results], Sequence[str]]" = lambda results: ()
    groups: "Callable[[Results], Mapping[str, Mapping[str, str]]] | None" = None
    paper: Paper | Callable[[str], Paper] = dataclasses.field(default_factory=dict)
    tables: "Sequence[Callable[[Results], Table | Sequence[Table]]]" = ()
    claims: "Sequence[Claim]" = ()
    pictures: "Sequence[Callable[[Results], Sequence[Picture]]]" = ()
    headlines: "Sequence[tuple[str | Quantity, Sequence[str]]]" = ()
    figure: str = ""
    measures: "tuple[Measure, ...]" = ()
    takes_models: bool = False
    as_measured: Callable[[Sequence[Variant]], Sequence[Variant]] = lambda models: models
    installed: Callable[[], Sequence[Variant]] = lambda: ()
    cost_reference: Callable[[str], str] | None = None
    trains: bool = True
    notes: "Callable[[Results], Sequence[str]]" = lambda results: ()
    views: "Callable[[Results], Sequence[TrainingView]] | None" = None

    def variants_at(self, scale: str) -> tuple[Variant, ...]:
        """The variants of one scale; none of a computation.

        Raises:
          UserError: Where the experiment does not have the scale.
        """
        if scale not in self.scales:
            allowed, hint = " | ".join(self.scales), nearest(scale, self.scales)
            raise UserError(f"experiment {self.name!r} has no scale {scale!r}", allowed=allowed, hint=hint)
        return self.variants(scale) if self.variants else ()

    def paper_at(self, scale: str) -> Paper:
        """The paper's numbers by variant name."""
        return self.paper(scale) if callable(self.paper) else self.paper


def each(keep: "Callable[[Result], bool]" = lambda result: True) -> "Callable[[Results], dict[str, tuple[str]]]":
    """For `Claim.of`: one case for every variant that `keep` accepts, under its label."""
    return lambda results: {r.label: (r.name,) for r in results if keep(r)}
