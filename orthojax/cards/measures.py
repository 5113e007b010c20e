"""The measurement of a model for its card, in stages that are kept."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orthojax import analysis, quant
from orthojax.cards.stages import Stages
from orthojax.config import Config
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import finite
from orthojax.model import LoadedModel, Transformer
from orthojax.model.generation import stream_loss_nats
from orthojax.train import Inputs, rounded_perplexities
from orthojax.train.evaluation import cached_perplexities, evaluate_in_full, knock_out, rotated_perplexities

FORMATS = ("int8_fine", "int8_moderate", "int8_coarse", "int4_zeropoint", "w4a4", "w4a4kv4", "fp8_e4m3", "mxfp4",
           "nvfp4")  # fmt: skip
QUICK = ("int8_coarse", "w4a4")
ROTATED = ("int8_coarse", "w4a4", "mxfp4", "nvfp4")
CACHES = {"kv8": (8, 0), "kv4": (4, 0), "kv4_float_first": (4, 1)}  # bits, and first tokens in float
SINKS = 4  # tokens that stay in view when a text is streamed
_PROPAGATED, _PROPAGATED_ROWS, _STREAMED_ROWS = ("int8_coarse", "w4a4"), 2, 4

Settings = Mapping[str, quant.QuantizationSetting]
Plan = dict[str, tuple[Callable[[], dict[str, Any]], tuple[Any, ...]]]  # stage -> its function, and options of it


class Measured(NamedTuple):
    """A measured model."""

    config: Config
    metrics: dict[str, float]  # the finite ones
    arrays: dict[str, np.ndarray]  # by head or channel, of `evaluate_in_full` and `knock_out`
    sections: dict[str, Any]  # the other parts of the card, JSON values


def prepared(loaded: LoadedModel, length: int, batch_size: int) -> LoadedModel:
    """Returns a model whose config has the length of the rows, and the rows of a batch."""
    config = loaded.config
    data = dataclasses.replace(config.data, sequence_length=length)
    evaluation = dataclasses.replace(config.eval, batch_size=batch_size)
    return loaded._replace(config=dataclasses.replace(config, data=data, eval=evaluation))


def measure_model(loaded: LoadedModel, inputs: Inputs) -> Measured:
    """Measures a model in float, in one pass over the rows.

    Raises:
      UserError: For token ids or a length that the model does not support, or a model that is not causal.
    """
    model, rows = loaded.config.model, inputs.evaluation
    if model.attention_mask != "causal":
        problem = f"rows of next tokens for a model with attention_mask={model.attention_mask!r}"
        raise UserError(problem, allowed="a causal model; orthojax evaluate measures others on their own data")
    if rows.min() < 0 or rows.max() >= model.vocab_size:
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise UserError(f"token id {wrong} is not the model's", allowed=f"0 to {model.vocab_size - 1}")
    metrics, arrays, extremes = evaluate_in_full(loaded, inputs)
    largest, sinks = [], []
    if extremes is not None:
        tokens = rows[:, :-1]
        largest, sinks = analysis.largest_activations(extremes, tokens), analysis.secondary_sinks(extremes, tokens)
    named = lambda entries: [e._asdict() | {"text": token_text(loaded.tokenizer, e.token)} for e in entries]  # noqa: E731
    sections = {"largest_activations": named(largest), "secondary_sinks": named(sinks)}
    return Measured(loaded.config, finite(metrics), arrays, sections)


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns a token as text, for a special one its name, or its number."""
    if tokenizer is None:
        return str(token)
    named = getattr(tokenizer.backend, "id_to_token", None)
    return tokenizer.decode([token]) or (named(token) if named else None) or str(token)


def plan(
    loaded: LoadedModel,
    inputs: Inputs,
    settings: Settings,
    *,
    quick: bool = False,
    quantize_head: bool = False,
    knock_out_rows: int = 0,
) -> Plan:
    """Returns the stages of `measure`, whose arguments these are, in order."""
    of, stages = functools.partial, Plan()
    stages["statistics"] = of(_statistics, loaded, inputs), ()
    for name, setting in settings.items():
        rounded = of(rounded_perplexities, loaded, inputs, {name: setting}, quantize_head=quantize_head)
        stages[name] = rounded, (quantize_head,)
    if not quick:
        for name in filter(settings.__contains__, ROTATED):
            stages[f"{name}_rotated"] = of(rotated_perplexities, loaded, inputs, {name: settings[name]}), ()
        for name in filter(settings.__contains__, _PROPAGATED):
            stages[f"{name}_error"] = of(_propagated, loaded, inputs, settings[name]), ()
        for name, cache in CACHES.items():
            stages[name] = of(cached_perplexities, loaded, inputs, {name: cache}), ()
        stages["streaming"] = of(_streamed, loaded, inputs), ()
    if knock_out_rows:
        stages["knock_out"] = lambda: _lists(knock_out(loaded, inputs, knock_out_rows)), (knock_out_rows,)
    return stages


def measure(loaded: LoadedModel, inputs: Inputs, settings: Settings, stages: Stages, **options: Any) -> Measured:
    """Measures a model in the stages of `plan`.

    Args:
      loaded: The model, with length and batch of the evaluation in its config: see `prepared`.
      inputs: Rows of text.
      settings: Quantisation by name.
      stages: Keeps the parts.
      **options: `quick` leaves out rotation, propagated errors, caches and streaming, `quantize_head` also rounds the
        output head, and on `knock_out_rows` rows every part is removed in turn.

    Raises:
      UserError: As for `measure_model`.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, (compute, chosen) in plan(loaded, inputs, settings, **options).items():
        parts[name] = stages(name, compute, *chosen)
        if name == "statistics" and "left_out" in parts[name]:
            raise UserError(parts[name]["left_out"])
    statistics = parts["statistics"]
    metrics, arrays, sections = (dict(statistics[key]) for key in ("metrics", "arrays", "sections"))
    cost = functools.partial(_cost, whole=metrics.get("perplexity"))
    metrics |= {key: value for name in settings for key, value in parts[name].items() if key != "left_out"}
    arrays |= {key: value for key, value in parts.get("knock_out", {}).items() if key != "left_out"}
    of = lambda name: parts.get(name, {})  # noqa: E731
    sections["rounding"] = [
        {"format": name} | cost(name, of(name) | of(f"{name}_rotated"), ("", "_rotated", "_with_head"))
        | {key: value for key, value in of(f"{name}_error").items() if key == "last_state_error"}
        for name in settings
    ]  # fmt: skip
    errors = {name: of(f"{name}_error") for name in settings}
    sections["sqnr_db"] = {name: error["sqnr_db"] for name, error in errors.items() if "sqnr_db" in error}
    sections["kv_cache"] = [
        {"format": name, "bytes_per_token": _bytes_per_token(loaded, bits)} | cost(name, of(name))
        for name, (bits, _) in CACHES.items() if name in parts
    ]  # fmt: skip
    sections["streaming"] = of("streaming")
    return Measured(loaded.config, metrics, {name: np.array(of) for name, of in arrays.items()}, sections)


def _cost(name: str, part: Mapping[str, Any], kinds: Sequence[str] = ("",), *, whole: float | None) -> dict[str, Any]:
    """Returns the perplexities of a format by kind and what is lost of the float one, or why one is missing."""
    entry = {key: value for key, value in part.items() if key == "left_out"}
    for kind in kinds:
        value = part.get(f"perplexity_{name}{kind}")
        if value is not None and whole is not None:
            entry |= {f"perplexity{kind}": value, f"lost{kind}": value / whole - 1}
    return entry


def _lists(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: array.astype(float).tolist() for name, array in arrays.items()}


def _statistics(loaded: LoadedModel, inputs: Inputs) -> dict[str, Any]:
    measured = measure_model(loaded, inputs)
    return {"metrics": measured.metrics, "arrays": _lists(measured.arrays), "sections": measured.sections}


def _propagated(loaded: LoadedModel, inputs: Inputs, setting: quant.QuantizationSetting) -> dict[str, Any]:
    tokens = inputs.evaluation[:_PROPAGATED_ROWS, :-1]
    error = quant.rounding_error(Transformer(loaded.config.model), loaded.params, setting, tokens)
    linear = {
        path: finite({key: value for key, value in of._asdict().items() if value is not None})
        for path, of in error.linear.items()
    }  # infinite if nothing is rounded
    return {
        "last_state_error": error.last_state,
        "sqnr_db": {path: of for path, of in linear.items() if of.keys() - {"layer"}},
    }


def _bytes_per_token(loaded: LoadedModel, bits: int) -> float:
    """Counts a cache of keys and values of few bits, with scales and smallest values of 16."""
    model = loaded.config.model
    return model.num_layers * model.kv_heads * ((model.head_dim + model.value_dim) * bits / 8 + 2 * 4)


def _streamed(loaded: LoadedModel, inputs: Inputs) -> dict[str, float]:
    """Measures the second half of each row, read token by token with a quarter of the row in view."""
    rows = inputs.evaluation[:_STREAMED_ROWS]
    window = (rows.shape[1] - 1) // 4
    if window <= SINKS:
        raise UserError(f"rows of {rows.shape[1] - 1} tokens are too short to stream", allowed=f"{8 * SINKS} or more")
    found = {"window": window}
    for name, size, sinks in (("window", window, 0), ("sinks", window - SINKS, SINKS), ("whole", None, 0)):
        losses = stream_loss_nats(loaded, rows, size, sinks)[:, 2 * window :]
        found[f"perplexity_{name}"] = math.exp(float(losses.mean()))
    return found
