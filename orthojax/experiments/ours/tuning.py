"""Learning rate and warm-up of six methods, each with the same search budget, before they are compared.

The only search in which a cured model takes part: methods are tuned against each other, the setting is not chosen here.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from orthojax.config import Config, replace
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.claims import PPL, C, Claim, V
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.paper_configs import METHODS as PAPER_METHODS
from orthojax.experiments.page import Table
from orthojax.experiments.results import NotMeasured, Result, Results, metric

SEARCH_SEEDS = (100,)  # of no comparison
STEPS = 500
SOAP = "orthojax.experiments.ours.soap:soap"
WARMUPS = (0.05, 0.25)  # of the steps


class Method(NamedTuple):
    """What is tuned.

    Attributes:
      label: In tables.
      changes: What differs from softmax with Adam.
      rates: Peak learning rates, each twice the one before.
    """

    label: str
    changes: Mapping[str, Any]
    rates: tuple[float, ...]


_ADAM_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
METHODS = {
    V: Method("softmax + Adam", PAPER_METHODS[V], _ADAM_RATES),
    C: Method("softmax-1 + OrthoAdam", PAPER_METHODS[C], _ADAM_RATES),
    "muon": Method("softmax + Muon", {"optim.optimizer": "muon", "optim.momentum": 0.95},
                   (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)),
    "soap": Method("softmax + SOAP", {"optim.optimizer": SOAP, "optim.b1": 0.95, "optim.b2": 0.95}, _ADAM_RATES),
    "lion": Method("softmax + Lion", {"optim.optimizer": "lion", "optim.b2": 0.99},
                   (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)),
    "sgd": Method("softmax + SGD", {"optim.optimizer": "sgd", "optim.momentum": 0.9}, (0.1, 0.2, 0.4, 0.8, 1.6)),
}  # fmt: skip
# Ordinary text: a perplexity on repeated passages would be mostly one of copies.
BASE = replace(LANGUAGE_MODEL, {"data.repeated_share": 0.0, "train.eval_every_steps": STEPS})


def tuned(method: str, rate: float, warmup: float, steps: int) -> Config:
    """The run of one of `METHODS`; `warmup` as a fraction of the steps."""
    changes = {"optim.learning_rate": rate, "optim.warmup_steps": round(warmup * steps), "train.steps": steps}
    return replace(BASE, {**METHODS[method].changes, **changes})


def _grid(method: Method) -> list[tuple[float, float]]:
    """Rates and warm-ups, all pairs."""
    return list(itertools.product(method.rates, WARMUPS))


def _name(method: str, rate: float, warmup: float) -> str:
    return f"{method}_{rate:g}_{warmup:g}"


def _variants(scale: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(_name(method, rate, warmup), f"{of.label}, rate {rate:g}, warm-up {warmup:.0%}",
                tuned(method, rate, warmup, STEPS))
        for method, of in METHODS.items()
        for rate, warmup in _grid(of)
    )  # fmt: skip


def chosen(results: Results) -> dict[str, tuple[float, float]]:
    """Method -> rate and warm-up of the lowest perplexity; a method without any finished run is left out."""
    best = {}
    for method, of in METHODS.items():
        tried = {at: results[_name(method, *at)] for at in _grid(of)}
        found = {at: result.perplexity for at, result in tried.items() if result.seeds}
        if found:
            best[method] = min(found, key=found.__getitem__)
    return best


def _perplexities(results: Results) -> Table:
    best, rows = chosen(results), []
    for method, of in METHODS.items():
        for warmup in WARMUPS:
            cells = []
            for rate in of.rates:
                found = results[_name(method, rate, warmup)].cell(metric(PPL))
                cells.append(f"{rate:g}: {found}{' (chosen)' if best.get(method) == (rate, warmup) else ''}")
            rows.append([of.label, f"{warmup:.0%}", *cells])
    columns = ["", "warm-up", "lowest rate", "", "middle", "", "highest rate"]
    return Table(f"Held-out perplexity after {STEPS} steps, by learning rate", columns, rows)


def _about(results: Results) -> list[str]:
    runs = len(_ADAM_RATES) * len(WARMUPS)
    return [
        f"Each method has {runs} runs of {STEPS} steps on one search seed; the lowest perplexity chooses its rate and "
        "its warm-up, a fraction of the steps, for comparisons on other seeds. Other hyperparameters are the "
        "usual ones. SOAP is Adam in a basis that is learned from the gradients, improved every tenth step.",
    ]


def _best_is_inside(*of: Result) -> bool:
    """Of the results of a method, in the order of `_grid`."""
    finished = [i for i, result in enumerate(of) if result.seeds]
    if not finished:
        raise NotMeasured("no run finished")
    best = min(finished, key=lambda i: of[i].perplexity)
    return 0 < best // len(WARMUPS) < len(of) // len(WARMUPS) - 1


EXPERIMENT = Experiment(
    name="tuning",
    title="Learning rate and warm-up of Adam, the cure, Muon, SOAP, Lion and SGD, with equal search budgets",
    variants=_variants,
    seeds=SEARCH_SEEDS,
    about=_about,
    tables=(_perplexities,),
    claims=(
        Claim("The best rate lies inside the range that was searched.",
              {of.label: tuple(_name(name, *at) for at in _grid(of)) for name, of in METHODS.items()}, (),
              _best_is_inside,
              "not its lowest and not its highest rate"),
    ),
)  # fmt: skip
