"""What rounding costs vanilla and cured models, of several widths: every setting, the head, static scales, float16.

At a small width int8 is harmless whatever the activations are, see `int8_error_bound`; so this looks where it is not.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from orthojax import quant
from orthojax.config import Config, ModelConfig, replace
from orthojax.experiments import drawing
from orthojax.experiments.base_configs import OUTPUT_AXIS, REPEATED_MODEL, cured
from orthojax.experiments.claims import FRACTION, KURTOSIS, Claim, Revision
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.labels import LABELS
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.pretrained import smollm2
from orthojax.experiments.quantization import LOST, TESTABLE_LOSS, int8_error_bound
from orthojax.experiments.results import Quantity, Result, Results, metric, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import percent
from orthojax.model import LoadedModel, Transformer, unstack_layers
from orthojax.ops.cross_entropy import perplexity
from orthojax.train import Inputs
from orthojax.train.evaluation import validation_loss_nats

Say = Callable[[str], None]

WIDTHS = (128, 256)
_LONGER_STEPS = 6_000  # of a pair at 128 channels, whose kurtosis and losses grow with the tokens (repeated_longer)
_LONGER = f"{WIDTHS[0]} wide, {_LONGER_STEPS:,} steps"
_REAL_ROWS = 8  # of 256 tokens of a real model, where one is installed
FOUR_BIT = ("w4a8", "w4a4")  # kernels of 4 bits, with activations of 8 and 4
STATIC = {"int8_moderate": quant.INT8_MODERATE, "int8_coarse": quant.INT8_COARSE}
HALVES = ("bfloat16", "float16")
LARGEST_FLOAT16 = 65504.0
# Metric -> words, in the order of the table.
ROUNDED = {
    **{f"perplexity_{name}": LABELS[f"perplexity_{name}"] for name in quant.SETTINGS},
    **{f"perplexity_{name}_static": f"{LABELS[f'perplexity_{name}']}, static scales" for name in STATIC},
    **{f"perplexity_{name}": LABELS[f"perplexity_{name}"] for name in FOUR_BIT},
    **{f"perplexity_{name}_with_head": f"{LABELS[f'perplexity_{name}']}, and the head" for name in quant.SETTINGS},
    **{f"perplexity_{name}": f"{name}, all activations and parameters" for name in HALVES},
}  # fmt: skip

# Metric, model and parameters of something that is evaluated.
Rounded = Iterable[tuple[str, Transformer, Any]]


def _four_bits(config: ModelConfig, params: Any) -> Rounded:
    for name in FOUR_BIT:
        linear = quant.quantized_linear(quant.setting_named(name))
        yield f"perplexity_{name}", Transformer(config, linear=linear), params


def _others(config: ModelConfig, params: Any, calibration: quant.Calibration) -> Rounded:
    """What neither `evaluate` nor `_four_bits` has."""
    for name, setting in quant.SETTINGS.items():
        linear = quant.quantized_linear(setting, "")
        yield f"perplexity_{name}_with_head", Transformer(config, linear=linear, linear_head=True), params
    for name, setting in STATIC.items():
        linear = quant.static_linear(setting, calibration)
        yield f"perplexity_{name}_static", Transformer(config, linear=linear), params
    for name in HALVES:
        half = jax.tree.map(lambda x, name=name: x.astype(name), params)
        yield f"perplexity_{name}", Transformer(dataclasses.replace(config, dtype=name)), half


def _perplexities(loaded: LoadedModel, inputs: Inputs, models: Rounded, on_progress: Say) -> dict[str, float]:
    found = {}
    for name, model, params in models:
        loss = validation_loss_nats(loaded.config, params, inputs, model=model)
        # What overflows gives no number: a model that predicts nothing, beyond the range of a float.
        found[name] = perplexity(math.inf if math.isnan(loss) else loss)
        on_progress(name)
    return found


def _unrolled(loaded: LoadedModel) -> tuple[ModelConfig, Any]:
    """Config and parameters with a linear layer of its own in each layer."""
    params = loaded.params if not loaded.config.model.scan_layers else unstack_layers(loaded.params)
    return dataclasses.replace(loaded.config.model, scan_layers=False), params


def _round_to_four_bits(loaded: LoadedModel, inputs: Inputs, on_progress: Say) -> Measured:
    return Measured(_perplexities(loaded, inputs, _four_bits(*_unrolled(loaded)), on_progress), {})


def _round(loaded: LoadedModel, inputs: Inputs, on_progress: Say) -> Measured:
    """Perplexities, and `largest_value`: of all inputs and outputs of linear layers in a batch of training."""
    config, params = _unrolled(loaded)
    calibration = quant.calibrate(Transformer(config), params, inputs.batch(0)[:, :-1])
    models = itertools.chain(_four_bits(config, params), _others(config, params, calibration))
    found = _perplexities(loaded, inputs, models, on_progress)
    return Measured({"largest_value": max(float(x) for of in calibration for x in of.values())} | found, {})


def _stages_of_four_bits(config: Config) -> int:
    return len(FOUR_BIT)


def _stages(config: Config) -> int:
    return len(FOUR_BIT) + len(quant.SETTINGS) + len(STATIC) + len(HALVES)


FOUR_BITS = Measure("four_bits", _round_to_four_bits, _stages_of_four_bits)
DAMAGED = Measure("damage", _round, _stages)


def _variants(scale: str) -> tuple[Variant, ...]:
    found = []
    for width in WIDTHS:
        changes = {"model.d_model": width, "model.d_mlp": 4 * width, "optim.rotation.axes": OUTPUT_AXIS.axes}
        config = replace(REPEATED_MODEL, changes)
        found.append(Variant(f"vanilla_{width}", f"{width} wide, softmax, Adam", config))
        found.append(Variant(f"cured_{width}", f"{width} wide, softmax-1, OrthoAdam", cured(config)))
    longer = replace(REPEATED_MODEL, {"train.steps": _LONGER_STEPS})
    found.append(Variant("vanilla_longer", f"{_LONGER}, softmax, Adam", longer))
    found.append(Variant("cured_longer", f"{_LONGER}, softmax-1, OrthoAdam", cured(longer)))
    return tuple(found)


def _lost(name: str) -> Quantity:
    return penalty(name, f"perplexity lost at {ROUNDED[name]}")


_COSTS = 0.01  # a rise of perplexity from which on a setting costs something


def _costly(*of: Result) -> list[str]:
    """What costs one of these models 1% or more in the mean."""
    return [name for name in ROUNDED if max(x.mean(_lost(name)) for x in of) >= _COSTS]


def _less_where_costly(*of: Result) -> str:
    """The settings that decide, each with both losses."""
    return "; ".join(f"{ROUNDED[name]} {' → '.join(percent(x.mean(_lost(name))) for x in of)}" for name in _costly(*of))


_PAIRS = {f"{width} wide": (f"vanilla_{width}", f"cured_{width}") for width in WIDTHS}
_PAIRS[_LONGER] = ("vanilla_longer", "cured_longer")
_COARSE = _lost("perplexity_int8_coarse")
_WORST = (_lost("perplexity_w4a4"), _lost("perplexity_int4_zeropoint"))
_STATIC_COARSE = _lost("perplexity_int8_coarse_static")
_IN_THE_MEAN, _BOTH_WIDTHS = "in the mean over seeds", "int8 coarse, both widths, in the mean over seeds"


def _where_lost(criterion: str) -> Revision:
    return Revision("losses of a tenth of a percent are noise", {"testable": None, "criterion": criterion})


CLAIMS = (
    Claim("Cured models lose less where rounding costs something.", _PAIRS, (),
          lambda v, c: all(c.mean(_lost(name)) < v.mean(_lost(name)) for name in _costly(v, c)),
          f"in every setting that costs one of them {_COSTS:.0%} or more; testable where one does",
          lambda v, c: bool(_costly(v, c)), detail=_less_where_costly,
          revised=Revision("settings that cost the cured model alone were not read",
                           {"criterion": f"in every setting that costs vanilla {_COSTS:.0%} or more; testable where "
                            "one does", "testable": lambda v, c: bool(_costly(v)), "show": _WORST,
                            "holds": lambda v, c: all(c.mean(_lost(name)) < v.mean(_lost(name))
                                                      for name in _costly(v))})),
    Claim("The wider model loses more to coarse int8, as its bound allows.", ("vanilla_128", "vanilla_256"),
          (_COARSE,),
          lambda narrow, wide: wide.mean(_COARSE) > narrow.mean(_COARSE), f"{_IN_THE_MEAN}; {LOST}",
          lambda *of: max(x.mean(_COARSE) for x in of) >= TESTABLE_LOSS, revised=_where_lost(_IN_THE_MEAN)),
    Claim("Scales that are fixed beforehand cost more than those of each batch.", ("vanilla_128", "vanilla_256"),
          (_STATIC_COARSE,),
          lambda *of: all(x.perplexity_int8_coarse_static > x.perplexity_int8_coarse for x in of),
          f"{_BOTH_WIDTHS}; {LOST}", lambda *of: max(x.mean(_STATIC_COARSE) for x in of) >= TESTABLE_LOSS,
          revised=_where_lost(_BOTH_WIDTHS)),
    Claim("float16 holds these activations.", ("vanilla_128", "vanilla_256"), ("largest_value", "perplexity_float16"),
          lambda *of: all(abs(x.mean(_lost("perplexity_float16"))) < 0.001 for x in of),
          f"perplexity within 0.1% of float32's; its largest number is {LARGEST_FLOAT16:,.0f}"),
)  # fmt: skip


def _table(results: Results) -> Table:
    rows = [[words, *(of.cell(_lost(name)) for of in results)] for name, words in ROUNDED.items()]
    rows.append(["largest value of linear layers", *(of.cell(metric("largest_value")) for of in results)])
    return Table("Perplexity lost", ["rounded", *(of.label for of in results)], rows)


_DRAWN = ("perplexity_int8_coarse", "perplexity_int8_coarse_static", "perplexity_int4_zeropoint", "perplexity_w4a8",
          "perplexity_w4a4")  # fmt: skip


def _picture(results: Results) -> list[Picture]:
    figure = drawing.bars(
        [ROUNDED[name] for name in _DRAWN],
        {of.label: 100 * np.array([of.values(_lost(name)) for name in _DRAWN]).T for of in results.finished},
        y_label="change of perplexity, %",
        texts={of.label: [percent(of.mean(_lost(name))) for name in _DRAWN] for of in results.finished},
        y_scale="symlog",
    )
    return [Picture("damage", "What rounding does to perplexity; linear up to 2%, logarithmic above.", figure)]


def _about(results: Results) -> list[str]:
    bounds = ", ".join(f"{int8_error_bound(width):.1%} at {width} channels" for width in (*WIDTHS, 2048))
    first = results.first.config
    text = [
        f"{first.model.num_layers} layers on text with repeated passages, {first.train.steps:,} steps. OrthoAdam "
        f"rotates the output axis of each kernel, in the pair of {_LONGER_STEPS:,} steps the d_model axes. After "
        "RMSNorm with one scale no value exceeds sqrt(D) times the root mean square, whatever the outliers, so int8 "
        f"changes such inputs by at most sqrt(D) / 254 of it: {bounds}. Narrow models hide what outliers do. "
        "4 bits, static scales and the head are where damage can show. In float16 parameters and activations are "
        "float16, statistics of norms and attention float32. Static scales are those of one batch of training."
    ]
    if smollm2.LABEL in results:
        real = results[smollm2.LABEL].config
        text.append(
            f"{smollm2.LABEL} is a real model of width {real.model.d_model}, trained by others, whose kernels lie on a "
            f"grid of 4 bits already; {real.eval.sequences} rows of {real.data.sequence_length} tokens of Python's "
            "library without repetition."
        )
    return text


EXPERIMENT = Experiment(
    name="damage",
    title="What rounding costs vanilla and cured models: settings, head, static scales, float16, two widths",
    variants=_variants,
    seeds=(0, 1, 2),
    about=_about,
    measures=(DAMAGED,),
    tables=(_table, MetricTable("Models", ("perplexity", *KURTOSIS, "max_abs_first", FRACTION))),
    claims=CLAIMS,
    pictures=(_picture,),
    takes_models=True,
    installed=functools.partial(smollm2.installed, _REAL_ROWS),
)  # fmt: skip
