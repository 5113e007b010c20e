"""The card of a model: what the papers and related work measure, as one JSON file, made in stages that are kept.

docs/card.schema.json describes it.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from orthojax import analysis, quant
from orthojax.commands.any_model import Measured, knock_out, measure_model
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.experiments import figures
from orthojax.experiments.report import Picture, Table
from orthojax.files import finite, parse_json, read_json, require_file, write_text
from orthojax.formatting import number, percent
from orthojax.model import LoadedModel, Transformer, parameter_count
from orthojax.model.generation import stream_loss_nats
from orthojax.ops.cross_entropy import perplexity
from orthojax.train import Inputs, rounded_perplexities
from orthojax.train.evaluation import validation_loss_nats

SCHEMA = "orthojax-card-1"
FORMATS = ("int8_fine", "int8_moderate", "int8_coarse", "int4_zeropoint", "w4a4", "w4a4kv4", *quant.FLOATS)
QUICK = ("int8_coarse", "w4a4")
_ROTATED = (*QUICK, *(name for name in quant.FLOATS if quant.setting_named(name).bits == 4))
_PROPAGATED, _PROPAGATED_ROWS = ("int8_coarse", "w4a4"), 2
_STREAMED_ROWS, _SINKS = 4, 4
_CACHES = {"kv8": (8, 0), "kv4": (4, 0), "kv4_float_first": (4, 1)}  # bits, and first tokens in float


class Stages:
    """The finished parts of a measurement, each in its own file, so that an interrupted measurement resumes."""

    def __init__(self, folder: Path, of: Any, say: Callable[[str], object] = lambda what: None):
        """Keeps parts in an existing folder; parts already there are reused if they have the same JSON value `of`."""
        self._folder, self._of, self._say = folder, of, say

    def __call__(self, name: str, compute: Callable[[], Any], *options: Any) -> Any:
        """Returns the JSON value that `compute` makes, or made earlier with these options.

        For a UserError it is {"left_out": its message}, and is not kept.
        """
        path = self._folder / f"{name}.json"
        of = hashlib.sha256(json.dumps([self._of, options], sort_keys=True).encode()).hexdigest()
        kept: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # a missing or damaged part is computed
            kept = read_json(path, "stage")
        if kept.get("of") == of:
            found = kept.get("found")
        else:
            try:
                found = compute()
                write_text(path, json.dumps({"of": of, "found": found}) + "\n")
            except UserError as error:
                found = {"left_out": str(error).partition("\n")[0]}
        self._say(name)
        return found


def identity(place: Path, workdir: Path) -> list[Any]:
    """Returns the names, sizes and times of a model's files, which change with them, without those in the workdir."""
    own = workdir.resolve()
    files = (
        [place]
        if place.is_file()
        else sorted(path for path in place.rglob("*") if path.is_file() and own not in path.resolve().parents)
    )
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def stage_names(settings: Sequence[str], *, quick: bool = False, knock_out_rows: int = 0) -> list[str]:
    """Returns the stages of `measure`, in order."""
    more = [f"{name}_rotated" for name in _ROTATED if name in settings]
    more += [f"{name}_error" for name in _PROPAGATED if name in settings]
    more = [] if quick else [*more, *_CACHES, "streaming"]
    return ["statistics", *settings, *more, *(["knock_out"] if knock_out_rows else [])]


def measure(
    loaded: LoadedModel,
    inputs: Inputs,
    settings: Mapping[str, quant.QuantizationSetting],
    stages: Stages,
    *,
    quick: bool = False,
    quantize_head: bool = False,
    knock_out_rows: int = 0,
) -> tuple[Measured, dict[str, Any]]:
    """Measures a model in the stages of `stage_names`.

    Args:
      loaded: The model, with length and batch of the evaluation in its config.
      inputs: Rows of text.
      settings: Quantisation by name.
      stages: Keeps the parts.
      quick: Leave out rotation, propagated errors and streaming.
      quantize_head: Also round the output head.
      knock_out_rows: Number of rows on which every part is removed in turn.

    Returns:
      The metrics and arrays, and the other sections of the card.

    Raises:
      UserError: As for `measure_model`.
    """
    found = stages("statistics", lambda: _statistics(loaded, inputs))
    if "left_out" in found:
        raise UserError(found["left_out"])
    metrics, arrays = found["metrics"], found["arrays"]
    sections: dict[str, Any] = {name: found[name] for name in ("largest_activations", "secondary_sinks")}
    wanted = stage_names(list(settings), quick=quick, knock_out_rows=knock_out_rows)

    def part(name: str, compute: Callable[[], dict[str, Any]], *options: Any) -> dict[str, Any]:
        return stages(name, compute, *options) if name in wanted else {}

    rounding, errors = [], {}
    for name, setting in settings.items():
        rounded = part(name, lambda name=name, setting=setting: rounded_perplexities(
            loaded, inputs, {name: setting}, quantize_head=quantize_head), quantize_head)  # fmt: skip
        metrics |= {key: value for key, value in rounded.items() if key != "left_out"}
        rounding.append({"format": name} | rounded)
    for of in rounding:
        name = of["format"]
        of |= part(f"{name}_rotated", lambda name=name: _rotated(loaded, inputs, name))
    for of in rounding:
        name = of["format"]
        found = part(f"{name}_error", lambda name=name: _propagated(loaded, inputs, name))
        of |= {key: found[key] for key in ("last_state_error",) if key in found}
        errors |= {name: found["sqnr_db"]} if "sqnr_db" in found else {}
    sections |= {"rounding": [_format(of, metrics) for of in rounding], "sqnr_db": errors}
    caches = {name: part(name, lambda name=name: _cached(loaded, inputs, name)) for name in _CACHES}
    sections["kv_cache"] = [{"format": name} | of | (
        {"lost": of["perplexity"] / metrics["perplexity"] - 1} if {"perplexity"} <= of.keys() & metrics.keys() else {}
    ) for name, of in caches.items() if of]  # fmt: skip
    sections["streaming"] = part("streaming", lambda: _streamed(loaded, inputs))
    removed = part("knock_out", lambda: _lists(knock_out(loaded, inputs, knock_out_rows)), knock_out_rows)
    arrays |= {name: of for name, of in removed.items() if name != "left_out"}
    return Measured(loaded.config, metrics, {name: np.array(of) for name, of in arrays.items()}), sections


def _lists(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: array.astype(float).tolist() for name, array in arrays.items()}


def _statistics(loaded: LoadedModel, inputs: Inputs) -> dict[str, Any]:
    found = measure_model(loaded, inputs)
    metrics, sections = dict(found.metrics), {"largest_activations": [], "secondary_sinks": []}
    if inputs.task is None:
        tokens, size = inputs.evaluation[:, :-1], loaded.config.eval.batch_size
        batches = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        metrics |= finite(analysis.finalize(analysis.measure(loaded, batches, analysis.observe_predictors)))
        extremes = analysis.measure(loaded, batches, analysis.observe_extremes, join=analysis.concatenate)
        sections = {
            name: [of._asdict() | {"text": token_text(loaded.tokenizer, of.token)} for of in find(extremes, tokens)]
            for name, find in (
                ("largest_activations", analysis.largest_activations),
                ("secondary_sinks", analysis.secondary_sinks),
            )
        }
    return {"metrics": metrics, "arrays": _lists(found.arrays)} | sections


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns a token as text, for a special one its name, or its number."""
    if tokenizer is None:
        return str(token)
    named = getattr(tokenizer.backend, "id_to_token", None)
    return tokenizer.decode([token]) or (named(token) if named else None) or str(token)


def _rotated(loaded: LoadedModel, inputs: Inputs, name: str) -> dict[str, float]:
    params, config, wrap = quant.rotate_after_training(loaded.params, loaded.config.model)
    model = quant.rounded_model(config, quant.setting_named(name))
    loss = validation_loss_nats(loaded.config, params, inputs, model=model.clone(linear=wrap(model.linear)))
    return {"perplexity_rotated": perplexity(loss)}


def _propagated(loaded: LoadedModel, inputs: Inputs, name: str) -> dict[str, Any]:
    tokens = inputs.evaluation[:_PROPAGATED_ROWS, :-1]
    found = quant.rounding_error(Transformer(loaded.config.model), loaded.params, quant.setting_named(name), tokens)
    error = found.pop("last_state_error")
    by_path: dict[str, dict[str, float]] = {}
    for key, value in finite(found).items():  # infinite if nothing is rounded
        kind, _, path = key.partition("/")
        by_path.setdefault(path, {})[kind.removesuffix("sqnr_db").rstrip("_") or "whole"] = value
    return {"last_state_error": error, "sqnr_db": by_path}


def _cached(loaded: LoadedModel, inputs: Inputs, name: str) -> dict[str, float]:
    """Measures the model with a low-bit cache of keys and values, and counts its bytes per token."""
    model, (bits, first) = loaded.config.model, _CACHES[name]
    loss = validation_loss_nats(
        loaded.config, loaded.params, inputs, model=quant.rounded_cache(loaded.model, bits, first)
    )
    # A 16-bit scale and a 16-bit smallest value for the keys of each head, and for its values.
    size = model.num_layers * model.kv_heads * ((model.head_dim + model.value_dim) * bits / 8 + 2 * 4)
    return {"perplexity": perplexity(loss), "bytes_per_token": size}


def _streamed(loaded: LoadedModel, inputs: Inputs) -> dict[str, float]:
    """Measures the second half of each row, read token by token with a quarter of the row in view."""
    rows = inputs.evaluation[:_STREAMED_ROWS]
    window = (rows.shape[1] - 1) // 4
    if window <= _SINKS:
        raise UserError(f"rows of {rows.shape[1] - 1} tokens are too short to stream", allowed=f"{8 * _SINKS} or more")
    found = {"window": window}
    for name, size, sinks in (("window", window, 0), ("sinks", window - _SINKS, _SINKS), ("whole", None, 0)):
        losses = stream_loss_nats(loaded, rows, size, sinks)[:, 2 * window :]
        found[f"perplexity_{name}"] = math.exp(float(losses.mean()))
    return found


def _format(of: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Returns an entry of `rounding` with its perplexity loss relative to float."""
    found = {key: value for key, value in of.items() if not key.startswith("perplexity_") or key.endswith("_rotated")}
    for key in ("", "_rotated", "_with_head"):
        value = of.get(f"perplexity_{of['format']}{key}" if key != "_rotated" else "perplexity_rotated")
        if value is not None and "perplexity" in metrics:
            found |= {f"perplexity{key}": value, f"lost{key}": value / metrics["perplexity"] - 1}
    return found


def make_card(
    name: str, source: str, measured: Measured, sections: Mapping[str, Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the card of a measured model: JSON values, described by docs/card.schema.json."""
    config, metrics = measured.config, []
    model, given = config.model, analysis.conditions(config)
    for key, value in measured.metrics.items():
        definition = analysis.define(key)
        if "/" in key or definition is None or definition.group == "quantisation":
            continue
        layers = [measured.metrics.get(f"{key}/layer_{i}") for i in range(model.num_layers)]
        entry = {"name": key, "value": value, "measured_as": definition.definition, "source": definition.source}
        entry |= {"by_layer": layers} if any(of is not None for of in layers) else {}
        chance = analysis.chance(key, given)
        metrics.append(entry | ({} if chance is None else {"chance": chance}))
    kinds = {"normalizer": model.normalizer, "norm": model.norm, "position": model.position, "block": model.block}
    sizes = {"num_layers": model.num_layers, "d_model": model.d_model, "num_heads": model.num_heads,
             "num_kv_heads": model.kv_heads, "vocab_size": model.vocab_size}  # fmt: skip
    about = {"name": name, "source": source, "parameters": parameter_count(model)} | sizes | kinds
    card = {"schema": SCHEMA, "model": about, "measured": dict(provenance), "metrics": metrics} | dict(sections)
    return _finite(card)


def _finite(value: Any) -> Any:
    """Removes numbers that JSON cannot represent from JSON objects."""
    if isinstance(value, dict):
        kept = {key: _finite(of) for key, of in value.items()}
        return {key: of for key, of in kept.items() if not isinstance(of, float) or math.isfinite(of)}
    return [_finite(of) for of in value] if isinstance(value, list) else value


def read_cards(path: Path) -> list[dict[str, Any]]:
    """Reads a card, or a list of cards; raises UserError for any other file."""
    require_file(path, "card")
    values = parse_json(path.read_bytes(), f"card {path}")
    cards = values if isinstance(values, list) else [values]
    if not all(map(_is_card, cards)):
        raise UserError(
            f"{path} is not a card", allowed=f"a JSON file of the schema {SCHEMA}, as orthojax analyze writes"
        )
    return cards


def _is_card(value: Any) -> bool:
    """Returns whether a JSON value has the parts of the schema that `comparison` reads."""

    def are(entries: Any, **kinds: type | UnionType) -> bool:
        return isinstance(entries, list) and all(
            isinstance(of, dict) and all(isinstance(of.get(name), kind) for name, kind in kinds.items())
            for of in entries
        )

    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not are([value.get("model")], name=str):
        return False
    formats = [value.get(name, []) for name in ("rounding", "kv_cache")]
    if not are(value.get("metrics"), name=str, value=int | float) or not all(are(of, format=str) for of in formats):
        return False
    shown = ("perplexity", "lost", "lost_rotated")
    return all(isinstance(of.get(name, 0.0), int | float) for part in formats for of in part for name in shown)


def comparison(cards: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of the metrics of several cards, and of the cost of each format."""
    columns: list[dict[str, str]] = []
    for card in cards:
        column = {analysis.label(of["name"]): analysis.show(of["name"], of["value"]) for of in card["metrics"]}
        for of in [*card.get("rounding", []), *card.get("kv_cache", [])]:
            column |= {f"perplexity, {of['format']}": number(of["perplexity"])} if "perplexity" in of else {}
            column |= {f"lost at {of['format']}": percent(of["lost"])} if "lost" in of else {}
            column |= {f"lost at {of['format']}, rotated": percent(of["lost_rotated"])} if "lost_rotated" in of else {}
        columns.append(column)
    names = dict.fromkeys(name for of in columns for name in of)
    rows = [[name, *(of.get(name, "-") for of in columns)] for name in names]
    given = [card["model"]["name"] for card in cards]
    headings = [
        f"{name} ({given[:i].count(name) + 1})" if given.count(name) > 1 else name for i, name in enumerate(given)
    ]
    return Table("Cards beside each other", ["", *headings], rows)


def tables_and_pictures(name: str, sections: Mapping[str, Any]) -> tuple[list[Table], list[Picture]]:
    """Returns the sections of a card as the report shows them."""
    tables, pictures = [], []
    shown = ["format", "perplexity", "lost", "rotated", "lost", "error of the last state"]
    rows = [[of["format"], *(_cell(of, key) for key in ("perplexity", "lost", "perplexity_rotated", "lost_rotated")),
             _cell(of, "last_state_error")] for of in sections["rounding"]]  # fmt: skip
    kept = [i for i in range(len(shown)) if any(row[i] != "-" for row in rows)]  # a quick card measures less
    shown, rows = [shown[i] for i in kept], [[row[i] for i in kept] for row in rows]
    tables += [Table(f"{name}, perplexity at each format", shown, rows)] if rows else []
    rows = [[of["format"], _cell(of, "perplexity"), _cell(of, "lost"), _cell(of, "bytes_per_token")]
            for of in sections["kv_cache"]]  # fmt: skip
    tables += (
        [Table(f"{name}, keys and values of few bits", ["cache", "perplexity", "lost", "bytes per token"], rows)]
        if rows
        else []
    )
    place = ["layer", "channel", "position", "rows"]
    rows = [[f"{of['text']!r}", number(of["value"]), number(of["over_median"]), *(str(of[key]) for key in place),
             "massive" if of["massive"] else ""] for of in sections["largest_activations"]]  # fmt: skip
    columns = ["token", "largest |x|", "over the median", *place, ""]
    tables += [Table(f"{name}, largest activations", columns, rows)] if rows else []
    place = ["layer", "head", "position", "rows", "layers"]
    rows = [[f"{of['text']!r}", number(of["mass"]), *(str(of[key]) for key in place)]
            for of in sections["secondary_sinks"]]  # fmt: skip
    tables += [Table(f"{name}, sinks besides the first token", ["token", "weight", *place], rows)] if rows else []
    streaming = sections["streaming"]
    if "window" in streaming:
        caption = f"{name}, read with the latest {streaming['window']} tokens in view, second half of rows"
        kinds = {"perplexity_whole": "all tokens", "perplexity_sinks": f"the first {_SINKS} as well",
                 "perplexity_window": "only the latest"}  # fmt: skip
        rows = [[words, number(streaming[key])] for key, words in kinds.items()]
        tables.append(Table(caption, ["in view", "perplexity"], rows))
    if sections["sqnr_db"]:
        pictures.append(_sqnr_picture(name, sections["sqnr_db"]))
    return tables, pictures


def _cell(of: Mapping[str, Any], key: str) -> str:
    if key not in of:
        return "-"
    return percent(of[key]) if key.startswith("lost") else number(of[key])


def _sqnr_picture(name: str, errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Picture:
    panels: dict[str, dict[str, figures.Curve]] = {}
    for setting, by_path in errors.items():
        for kind in ("whole", "inherited", "added"):
            by_layer: dict[int, list[float]] = {}
            for path, of in by_path.items():
                layer = path.partition("/")[0].removeprefix("layers_")
                if layer.isdecimal() and kind in of:
                    by_layer.setdefault(int(layer), []).append(of[kind])
            means = {layer: float(np.mean(of)) for layer, of in sorted(by_layer.items())}
            panels.setdefault(setting, {})[kind] = (list(means), np.array([list(means.values())]))
    figure = figures.lines(panels, x_label="layer", y_label="signal to noise (dB)")
    caption = f"{name}: signal to quantisation noise of linear outputs, mean by layer; inherited, and added there."
    return Picture(f"{name}_sqnr", caption, figure)
