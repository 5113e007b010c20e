"""The card of a model: what the papers and related work measure, as one JSON object.

docs/card.schema.json describes it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from orthojax import analysis, quant
from orthojax.cards.findings import REMEDIES
from orthojax.cards.measures import Measured, Settings, Stages, default_settings, measure, plan, prepared
from orthojax.cards.text import require_unpadded, rows_of_ids
from orthojax.errors import UserError
from orthojax.files import check_digest, parse_json, require_file
from orthojax.machine import environment
from orthojax.model import LoadedModel, linear, parameter_count
from orthojax.train import Inputs, settings_that_do_not_fit

SCHEMA = "orthojax-card-1"


def card(
    loaded: LoadedModel,
    rows: Any,
    *,
    name: str = "",
    source: str = "",
    settings: Settings | None = None,
    quick: bool = False,
    quantize_head: bool = False,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Measures a model as `orthojax analyze` does, and returns the card that it writes.

    Args:
      loaded: A causal model, as `orthojax.load` returns it.
      rows: Token ids, int [rows, length]: the model reads `length - 1` tokens of each row and predicts all but the
        first. Or what `orthojax.cards.read_rows` returns for text, for which bits per byte are measured too.
      name: Name of the model in the card; by default that of its folder or file.
      source: Its path or name; by default where it was loaded from.
      settings: Quantisation by name. By default those of a card, or two of them if `quick`, as far as they fit the
        model; none for a model whose kernels are integers.
      quick: Leave out rotations, layers in float, caches of few bits, streaming and errors of the metrics.
      quantize_head: Also round the output head.
      batch_size: Rows of a batch; dynamic quantisation scales are taken per batch.

    Returns:
      A JSON object, described by docs/card.schema.json.

    Raises:
      UserError: For rows of another shape or dtype, padded ones, ids or a length that the model does not support, a
        model that is not causal, or a setting that does not fit it; NonFiniteError if hidden states or loss are not.
    """
    for argument, value in {"name": name, "source": source}.items():
        if not isinstance(value, str):
            raise UserError(f"{argument}={value!r}", allowed="a string")
    for argument, value in {"quick": quick, "quantize_head": quantize_head}.items():
        if not isinstance(value, bool):
            raise UserError(f"{argument}={value!r}", allowed="True or False")
    if settings is not None and not (
        isinstance(settings, Mapping) and all(isinstance(of, quant.QuantizationSetting) for of in settings.values())
    ):
        raise UserError(f"settings={settings!r}", allowed="name -> orthojax.quant.QuantizationSetting")
    inputs = rows
    if not isinstance(rows, Inputs):
        inputs = rows_of_ids(np.asarray(rows), "token ids", loaded.tokenizer)
        require_unpadded(inputs.evaluation, "token ids")
    loaded = prepared(loaded, inputs.evaluation.shape[1] - 1, batch_size)
    if settings is None:
        settings = default_settings(quick) if loaded.model.linear is linear else {}
        unfit = settings_that_do_not_fit(loaded, settings)
        settings = {key: setting for key, setting in settings.items() if key not in unfit}
    stages = plan(loaded, inputs, settings, quick=quick, quantize_head=quantize_head)
    measured = measure(loaded, settings, stages, Stages(None))
    about = environment() | {"text": inputs.provenance}
    return make_card(name or loaded.source.name, source or str(loaded.source), measured, about)


def make_card(name: str, source: str, measured: Measured, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the card of a measured model: JSON values, described by docs/card.schema.json."""
    config, metrics = measured.config, []
    model, conditions = config.model, analysis.conditions(config)
    for key, value in measured.metrics.items():
        definition = analysis.define(key)
        if "/" in key or definition is None or definition.group == "quantisation":
            continue
        layers = [measured.metrics.get(f"{key}/layer_{i}") for i in range(model.num_layers)]
        entry = {"name": key, "value": value, "measured_as": definition.definition, "source": definition.source}
        entry |= {"by_layer": layers} if any(layer is not None for layer in layers) else {}
        entry |= {"se": measured.sections["errors"][key]} if key in measured.sections["errors"] else {}
        chance = analysis.chance(key, conditions)
        metrics.append(entry | ({} if chance is None else {"chance": chance}))
    kinds = {"normalizer": model.normalizer, "norm": model.norm, "position": model.position, "block": model.block}
    sizes = {"num_layers": model.num_layers, "d_model": model.d_model, "num_heads": model.num_heads,
             "num_kv_heads": model.kv_heads, "vocab_size": model.vocab_size}  # fmt: skip
    about = {"name": name, "source": source, "parameters": parameter_count(model)} | sizes | kinds
    parts = {"schema": SCHEMA, "model": about, "measured": dict(provenance), "metrics": metrics}
    return parts | {name: of for name, of in measured.sections.items() if name != "errors"}


def read_cards(path: Path) -> list[dict[str, Any]]:
    """Reads a card, or a list of cards; raises UserError for any other file, or for a card that was changed."""
    require_file(path, "card")
    values = parse_json(path.read_bytes(), f"card {path}")
    cards = values if isinstance(values, list) else [values]
    if not all(map(_is_card, cards)):
        raise UserError(
            f"{path} is not a card", allowed=f"a JSON file of the schema {SCHEMA}, as orthojax analyze writes"
        )
    return [check_digest(path, card) for card in cards]


def _is_card(value: Any) -> bool:
    """Returns whether a JSON value has the parts of the schema that `comparison` reads."""

    def are(entries: Any, **kinds: type | UnionType) -> bool:
        return isinstance(entries, list) and all(
            isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
            for entry in entries
        )

    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not are([value.get("model")], name=str):
        return False
    formats = [value.get(name, []) for name in ("rounding", "kv_cache")]
    metrics = value.get("metrics")
    if not are(metrics, name=str) or not all(_is_number(metric.get("value")) for metric in metrics or []):
        return False
    if not all(are(part, format=str) for part in formats):
        return False
    numbers = ("perplexity", "lost", "kl_nats", "agreement", "loss_added_nats", "d_sink_nats")
    shown = [f"{name}{kind}" for name in numbers for kind in ("", "_se", *REMEDIES)]
    return all(_is_number(entry.get(name, 0.0)) for part in formats for entry in part for name in shown)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
