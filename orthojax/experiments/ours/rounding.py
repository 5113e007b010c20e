"""What rounding costs vanilla and cured models of two widths: every setting, the head, static scales, float16."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax

from orthojax import quant
from orthojax.config import Config, ModelConfig, replace
from orthojax.experiments.base import OUTPUT_AXIS, REPEATED_MODEL, cured
from orthojax.experiments.claims import COARSE, Claim, Metric, all_of, check, either_loses, lost
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.experiments.study import Study
from orthojax.model import LoadedModel, Transformer, unstack_layers
from orthojax.ops.cross_entropy import perplexity
from orthojax.report.pictures import Bars
from orthojax.report.results import Result
from orthojax.report.tables import Columns
from orthojax.train import Inputs
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.step import split_tokens

FOUR_BIT = ("w4a8", "w4a4")  # kernels of 4 bits, with activations of 8 and 4
_STATIC = {"int8_moderate": quant.INT8_MODERATE, "int8_coarse": quant.INT8_COARSE}
_HALVES = ("bfloat16", "float16")
ROUNDED = (*quant.SETTINGS, *(f"{name}_static" for name in _STATIC), *FOUR_BIT,
           *(f"{name}_with_head" for name in quant.SETTINGS), *_HALVES)  # fmt: skip

# Name of a setting, model and parameters of something that is evaluated.
_Rounded = Iterable[tuple[str, Transformer, Any]]


def _four_bits(config: ModelConfig, params: Any) -> _Rounded:
    for name in FOUR_BIT:
        yield name, quant.rounded_model(config, quant.setting_named(name)), params


def _others(config: ModelConfig, params: Any, calibration: quant.Calibration) -> _Rounded:
    """Yields what neither `evaluate` nor `_four_bits` covers."""
    for name, setting in quant.SETTINGS.items():
        yield f"{name}_with_head", quant.rounded_model(config, setting, "", linear_head=True), params
    for name, setting in _STATIC.items():
        yield f"{name}_static", Transformer(config, linear=quant.static_linear(setting, calibration)), params
    for name in _HALVES:
        half = jax.tree.map(lambda x, name=name: x.astype(name), params)
        yield name, Transformer(dataclasses.replace(config, dtype=name)), half


def _perplexities(loaded: LoadedModel, inputs: Inputs, models: _Rounded, say: Say) -> dict[str, float]:
    found = {}
    for name, model, params in models:
        loss = validation_loss_nats(loaded.config, params, inputs, model=model)
        # Overflow gives nan: a model that predicts nothing, with a loss beyond the range of a float.
        found[f"perplexity_{name}"] = perplexity(math.inf if math.isnan(loss) else loss)
        say(name)
    return found


def _unrolled(loaded: LoadedModel) -> tuple[ModelConfig, Any]:
    """Returns config and parameters with separate linear layers in each layer."""
    params = loaded.params if not loaded.config.model.scan_layers else unstack_layers(loaded.params)
    return dataclasses.replace(loaded.config.model, scan_layers=False), params


def _round_to_four_bits(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    return Measured(_perplexities(loaded, inputs, _four_bits(*_unrolled(loaded)), say))


def _round(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Measures perplexities, and `largest_value` of all inputs and outputs of linear layers in a training batch."""
    config, params = _unrolled(loaded)
    calibration = quant.calibrate(Transformer(config), params, split_tokens(inputs.batch(0), config)[0])
    models = itertools.chain(_four_bits(config, params), _others(config, params, calibration))
    found = _perplexities(loaded, inputs, models, say)
    return Measured({"largest_value": max(float(x) for of in calibration for x in of.values())} | found)


FOUR_BITS = Measure("four_bits", _round_to_four_bits)
DAMAGED = Measure("damage", _round)


def _runs(scale: str) -> dict[str, Config]:
    runs = {}
    for width in (128, 256):
        changes = {"model.d_model": width, "model.d_mlp": 4 * width, "optim.rotation.axes": OUTPUT_AXIS.axes}
        runs[f"vanilla_{width}"] = replace(REPEATED_MODEL, changes)
        runs[f"cured_{width}"] = cured(runs[f"vanilla_{width}"])
    # Kurtosis and losses grow with the tokens.
    runs["vanilla_longer"] = replace(REPEATED_MODEL, {"train.steps": 6_000})
    return runs | {"cured_longer": cured(runs["vanilla_longer"])}


def _costly(*of: Result) -> list[str]:
    return [name for name in ROUNDED if max(result[lost(name)] for result in of) >= 0.01]


def _less(vanilla: Result, cured: Result, settings: list[str]) -> bool:
    return all(cured[lost(name)] < vanilla[lost(name)] for name in settings)


def _less_if_costly(vanilla: Result, cured: Result) -> bool:
    """Cured loses less in every setting that costs one of the two 1% or more."""
    return _less(vanilla, cured, _costly(vanilla, cured))


def _any_costs(vanilla: Result, cured: Result) -> bool:
    """A setting costs one of the two 1% or more."""
    return bool(_costly(vanilla, cured))


def _less_if_costly_to_vanilla(vanilla: Result, cured: Result) -> bool:
    """Cured loses less in every setting that costs vanilla 1% or more."""
    return _less(vanilla, cured, _costly(vanilla))


def _any_costs_vanilla(vanilla: Result, cured: Result) -> bool:
    """A setting costs vanilla 1% or more."""
    return bool(_costly(vanilla))


_PAIR, _WIDTHS = ("vanilla_*", "cured_*"), ("vanilla_128", "vanilla_256")
_COARSE, _STATIC_COARSE = lost(COARSE), Metric("perplexity_int8_coarse_static")
_WIDER = _COARSE["vanilla_256"] > _COARSE["vanilla_128"]
_DEARER = all_of(_STATIC_COARSE[of] > Metric("perplexity_int8_coarse")[of] for of in _WIDTHS)
_NOISE = "losses of a tenth of a percent are noise"
DAMAGE = Study(
    name="damage",
    title="What rounding costs vanilla and cured models of two widths: settings, the head, static scales, float16",
    runs=_runs,
    seeds=(0, 1, 2),
    models=lambda given: given,
    measures=(DAMAGED,),
    note="Text with repeated passages, 2,000 steps at 128 and 256 channels and 6,000 at 128. OrthoAdam rotates the "
    "output axes, in the pair of 6,000 steps the d_model axes. 4 bits, static scales and the head are what stays hard.",
    columns=[*map(lost, ROUNDED), "largest_value"],
    tables=[Columns("Models", "perplexity kurtosis_first kurtosis_rest first_attention_fraction")],
    claims=[
        Claim("Cured models lose less if rounding costs something.",
              check(_less_if_costly, *_PAIR), check(_any_costs, *_PAIR),
              revised=("settings that cost the cured model alone were not read",
                       Claim("", check(_less_if_costly_to_vanilla, *_PAIR), check(_any_costs_vanilla, *_PAIR)))),
        Claim("The wider model loses more to coarse int8, as its bound allows.", _WIDER, either_loses(COARSE, *_WIDTHS),
              revised=(_NOISE, Claim("", _WIDER))),
        Claim("Scales that are fixed beforehand cost more than those of each batch.", _DEARER,
              either_loses("int8_coarse_static", *_WIDTHS), revised=(_NOISE, Claim("", _DEARER))),
        Claim("float16 holds these activations.", all_of(abs(lost("float16")[of]) < 0.001 for of in _WIDTHS)),
    ],
    pictures=[Bars("damage", "Perplexity lost to rounding, in percent; linear up to 2%.",
                   [lost(name) for name in (COARSE, "int8_coarse_static", "int4_zeropoint", *FOUR_BIT)],
                   y_label="%", scale=100, y_scale="symlog")],
)  # fmt: skip
