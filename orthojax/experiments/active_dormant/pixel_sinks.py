"""Are there sinks, drains and peaks beyond language? Handwritten digits as sequences of pixels, vanilla and cured.

The digits of scikit-learn: 1,797 images of 8 x 8 pixels of 17 grey levels, read row by row after <s>; the next pixel is
predicted. The paper leaves open whether its mechanism is one of language.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.analysis import chance_of_first
from orthojax.config import FIRST_DEFAULTS, Config, changed_fields, replace
from orthojax.data import TokenBatches
from orthojax.errors import needing
from orthojax.experiments.active_dormant.intervened_training import Intervene, train, untouched
from orthojax.experiments.active_dormant.models import PEAK
from orthojax.experiments.base_configs import SHALLOW_MODEL, cured
from orthojax.experiments.claims import DOMINANCE, NO_OUTLIERS, Claim, within
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.pictures import ComputedCurves
from orthojax.experiments.results import Numbers, Quantity, Result, Results, metric
from orthojax.experiments.tables import LayerTable, MetricTable
from orthojax.model import LoadedModel, Transformer
from orthojax.train.step import loss_sum_nats, split_tokens

LEVELS, PIXELS = 17, 64
BOS = LEVELS
SHOWN = (0, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000)
VALIDATION = 0.2  # of the images
_LAYERS = 3
VANILLA = replace(
    SHALLOW_MODEL,
    {
        "model.vocab_size": LEVELS + 1,
        "model.normalizer": "softmax",
        "model.d_model": 64,
        "model.d_mlp": 256,
        "model.num_layers": _LAYERS,
        "data.sequence_length": PIXELS,
        "train.batch_size": 32,
        "train.steps": SHOWN[-1],
    },
)
CONFIGS = {"vanilla": VANILLA, "cured": cured(VANILLA)}
LABELS = {"vanilla": "softmax + Adam", "cured": "softmax-1 + OrthoAdam"}


def images() -> np.ndarray:
    """The digits as int32 [1797, 64], 0 to 16.

    Raises:
      UserError: Without scikit-learn.
    """
    with needing("experiment 'pixel_sinks', which reads the digits of scikit-learn,", "digits"):
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    found: Any = load_digits()
    return found.data.astype(np.int32)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) images, the same in every run; no image is in both."""
    order = np.random.default_rng(0).permutation(len(rows))
    held_out = round(VALIDATION * len(rows))
    return rows[order[held_out:]], rows[order[:held_out]]


def compute(name: str, seed: int, config: Config | None = None, shown: tuple[int, ...] = SHOWN) -> list[Case]:
    """One model."""
    config = replace(config or CONFIGS[name], {"train.seed": seed, "data.seed": seed})
    training, validation = split(images())
    batches = TokenBatches(training.ravel(), PIXELS, config.train.batch_size, seed, BOS)
    rows = TokenBatches(validation.ravel(), PIXELS, 1, 0, BOS).spread_rows(len(validation))
    found = train(config, untouched, functools.partial(look, Transformer(config.model), rows), shown, batches)
    metrics = found[shown[-1]] | {f"loss_nats/step_{step}": of["loss_nats"] for step, of in found.items()}
    curve = {f"{key}/step_{step}": of[key] for step, of in found.items() for key in ("largest_first_mass", "sink_rate")}
    return [Case(name, {"label": LABELS[name]}, metrics | curve)]


def look(model: Transformer, rows: np.ndarray, params: Any, intervene: Intervene) -> dict[str, float]:
    """The statistics of a language model on held-out images, the loss, and the largest mean weight on <s> of a head."""
    del intervene
    loaded: Any = LoadedModel(model, params, None, None, None)  # pyright: ignore[reportArgumentType]
    statistics = analysis.measure(loaded, [split_tokens(rows)[0]], analysis.observe_language_model)
    by_head = np.asarray(statistics.total["first_attention_mass"]) / np.asarray(statistics.sequences).reshape(-1, 1)
    total, count = loss_sum_nats(model, params, jnp.asarray(rows))
    return analysis.finalize(statistics) | {
        "loss_nats": float(total / count),
        "largest_first_mass": float(by_head.max()),
        "sink_layer": float(by_head.max(1).argmax()),
    }


def _in_sink_layer(name: str) -> Quantity:
    def value(of: Numbers) -> float:
        layer = int(of.sink_layer)
        return of[f"{name}_first/layer_{layer}"] / of[f"{name}_rest/layer_{layer}"]

    return Quantity(f"{name.replace('_', ' ')} of <s> / others', in the layer of that head", value)


_MASS = metric("largest_first_mass", "largest mean weight of a head on <s>")
_VALUES = _in_sink_layer("value_norm")
SINK, STRONG = DOMINANCE * chance_of_first(PIXELS), 0.3  # the latter is that of `sink_rate`


def _has_sink(result: Result, *_: Result) -> bool:
    return within(result, _MASS, SINK, 2)


CLAIMS = (
    Claim("Softmax with Adam makes a sink on <s> of pixels, too.", ("vanilla",), (_MASS, "sink_rate"), _has_sink,
          f"a head with a mean weight on <s> above {SINK:.3f}, {DOMINANCE:g} times that of equal weights, in every "
          "seed"),
    Claim("It is as strong as what is called a sink in language models.", ("vanilla",), (_MASS, "sink_rate"),
          lambda of: within(of, _MASS, STRONG, 2), f"a head above {STRONG:g}, in every seed"),
    Claim("Its value is drained.", ("vanilla",), (_VALUES,), lambda of: within(of, _VALUES, -1, 0.5),
          "the value norm of <s> below half of the others' in that layer, in every seed; testable with a sink",
          _has_sink),
    Claim("The residual norm of <s> has a peak.", ("vanilla",), (PEAK,), lambda of: within(of, PEAK, 1.5, 1e9),
          "1.5 times that of others after some layer, in every seed"),
    Claim("Softmax-1 with OrthoAdam has no sink.", ("vanilla", "cured"), (_MASS,),
          lambda vanilla, cured: within(cured, _MASS, -1, SINK),
          f"no head above {SINK:.3f}, in any seed; testable where vanilla has one", _has_sink),
    Claim("Softmax-1 with OrthoAdam has no peak.", ("vanilla", "cured"), (PEAK,),
          lambda vanilla, cured: within(cured, PEAK, -1, 1.5),
          "below 1.5 times after every layer, in every seed; testable where vanilla has one",
          lambda vanilla, cured: vanilla.mean(PEAK) > 1.5),
    Claim("Adam's outliers after <s> are gone.", ("vanilla", "cured"), ("kurtosis_rest",),
          lambda vanilla, cured: within(cured, "kurtosis_rest", 0, NO_OUTLIERS),
          f"kurtosis below {NO_OUTLIERS:g} in every seed; testable where vanilla has more",
          lambda vanilla, cured: vanilla.kurtosis_rest > NO_OUTLIERS),
    Claim("It costs nothing.", ("vanilla", "cured"), ("loss_nats",),
          lambda vanilla, cured: cured.loss_nats <= vanilla.loss_nats + 0.02,
          "a held-out loss at most 0.02 nats above vanilla's"),
)  # fmt: skip


_DRAWN = {"loss_nats": "held-out loss (nats per pixel)", "largest_first_mass": _MASS.label}


def _about(results: Results) -> list[str]:
    return [
        "The paper leaves open whether sinks, drains and peaks come in other data than language. Here a small "
        "transformer predicts the next pixel of handwritten digits (scikit-learn's, 8 x 8 pixels of 17 grey levels, "
        "row by row after <s>); a fifth of the images is held out.",
        f"{_LAYERS} layers of width 64 with four heads, RMSNormSingle, no biases, {SHOWN[-1]} steps of 32 images "
        f"(22 epochs), Adam's rate {VANILLA.optim.learning_rate:g} with warm-up and cosine decay, in float32. Equal "
        f"weights would put {chance_of_first(PIXELS):.3f} on <s>.",
    ]


EXPERIMENT = Experiment(
    name="pixel_sinks",
    title="Active-dormant: sinks, drains and peaks beyond language, on pixels of digits; needs scikit-learn",
    compute={name: functools.partial(compute, name) for name in CONFIGS},
    settings=[changed_fields(FIRST_DEFAULTS, config) for config in CONFIGS.values()] + [SHOWN, VALIDATION],
    seconds_per_seed=90.0,
    seeds=(0, 1, 2),
    about=_about,
    tables=(
        MetricTable(f"After {SHOWN[-1]} steps", (
            "loss_nats", _MASS, "first_attention_mass", "first_attention_fraction", _VALUES, PEAK, "kurtosis_first",
            "kurtosis_rest", "max_abs_first", "max_abs_rest")),
        LayerTable("By layer", {"first_attention_mass": "weight on <s>", "value_norm_first": "value norm of <s>",
                                "value_norm_rest": "value norm of others", "residual_norm_first": "residual norm of "
                                "<s>",
                                "residual_norm_rest": "residual norm of others"}),
    ),
    claims=CLAIMS,
    pictures=(ComputedCurves(_DRAWN, SHOWN, {"largest_first_mass": {"equal logits": chance_of_first(PIXELS)}}),),
)  # fmt: skip
