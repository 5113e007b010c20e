"""What a study is made of: its models, and each of them with a seed."""

import dataclasses
import hashlib
import json
from pathlib import Path

from orthojax.config import Config
from orthojax.fields import changed_fields, replace


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of an experiment.

    Attributes:
      name: Of the row.
      label: For people, in tables and legends.
      config: Its run; a seed replaces `train.seed` and `data.seed`.
      learning_rates: Where given, the one that does best in short trials replaces the config's.
      checkpoint: Of a model that exists: the folder of a step, which is measured and not trained.
    """

    name: str
    label: str
    config: Config
    learning_rates: tuple[float, ...] = ()
    checkpoint: Path | None = None

    def with_seed(self, seed: int) -> Config:
        """The config of one seed."""
        return replace(self.config, {"train.seed": seed, "data.seed": seed})


@dataclasses.dataclass(frozen=True)
class Run:
    """A variant with a seed.

    Attributes:
      variant: Which model.
      seed: Of its parameters and of the order of its data.
      folder: Where it is trained, and where what was measured of it is kept.
    """

    variant: Variant
    seed: int
    folder: Path

    @property
    def config(self) -> Config:
        """What is trained, or what the checkpoint was trained with."""
        return self.variant.config if self.variant.checkpoint else self.variant.with_seed(self.seed)

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.variant.label}, seed {self.seed}"


def run_name(variant: Variant, seed: int) -> str:
    """The folder name of a run, which its config alone decides: experiments that want the same run share it.

    Fields at their defaults do not enter, so that a new field changes no name.

    >>> run_name(Variant("a", "a", Config()), 0) == run_name(Variant("b", "b", Config()), 0)
    True
    """
    config = variant.config if variant.checkpoint else variant.with_seed(seed)
    model = config.model
    told: object = changed_fields(Config(), config)
    if variant.learning_rates or variant.checkpoint:
        told = [told, variant.learning_rates, str(variant.checkpoint and variant.checkpoint.absolute())]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return f"{model.normalizer}-{config.optim.optimizer}-{model.num_layers}x{model.d_model}-{digest}-seed{seed}"
