"""Tables and pictures of measured models and of cards, and the page that `orthojax analyze` writes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orthojax import analysis
from orthojax.cards.measures import SINKS, Measured
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.formatting import number, percent, signed
from orthojax.model import LoadedModel
from orthojax.report import figures
from orthojax.report.page import Picture, Report, Table
from orthojax.report.results import Numbers, Quantity, Result, Results
from orthojax.report.tables import Columns

_SHOWN_HEADS, _SHOWN_TOKENS = 12, 64
_QUANTISED = "perplexity_"  # how the names of metrics of quantised models begin


def report(
    measured: Mapping[str, Measured],
    sources: Sequence[str],
    notes: Sequence[str],
    *,
    steps: Sequence[int] = (),
    drawn: Mapping[str, Sequence[Picture]] | None = None,
) -> Report:
    """Returns the report of one or several models.

    Args:
      measured: Name -> measurements.
      sources: The texts.
      notes: The command, the machine and the time.
      steps: If the models are one run at several steps, these steps, in order.
      drawn: Further pictures of a model, by its name.
    """
    title = f"{len(measured)} checkpoints of one run" if steps else ", ".join(measured)
    sentences = [f"All metrics are of {'; '.join(sources)}. Layers and heads count from 0."]
    if len(measured) > 1 and not steps:
        sentences.append("Losses are per token: models with different tokenizers compare by bits per byte.")
    shown = dict(list(measured.items())[-1:]) if steps else measured  # by layer and head, for a series its end
    for name, model in shown.items():
        config = model.config.model
        shape = f"{config.num_layers} layers of width {config.d_model}, {config.num_heads} heads"
        sentences.append(f"{name}: {shape}, {config.normalizer} attention.")
        if math.isclose(model.metrics.get("loss_nats", 0.0), math.log(config.vocab_size), rel_tol=1e-6):
            sentences.append(
                f"{name}: the loss is that of equal logits, as of a head of zeros: ln {config.vocab_size}."
            )
    metrics = {name: model.metrics for name, model in measured.items()}
    series = {"mean over layers": dict(zip(steps, metrics.values(), strict=True))} if steps else {}
    layers = {name: dict(enumerate(_by_layer(model))) for name, model in shown.items()}
    pictures = [*curve_pictures(series, "step"), *curve_pictures(layers, "layer")]
    config = next(iter(measured.values())).config
    tables = [metrics_table(f"Metrics on {'; '.join(sources)}, means over layers and heads", metrics, config)]
    for name, model in shown.items():
        tables += [*_tables(name, model.sections), _layer_table(name, model), _head_table(name, model)]
        metric, weights = next(iter(_by_head(model).items()))
        figure = figures.maps({"": weights}, x_label="head", y_label="layer", value_label="weight")
        pictures.append(Picture(f"{name}_heads", f"{name}: {analysis.label(metric)}, by head.", figure))
        pictures += [*_error_pictures(name, model.sections["sqnr_db"]), *(drawn or {}).get(name, ())]
    names = {metric for model in metrics.values() for metric in model}
    entries = [entry for name, entry in analysis.CATALOGUE.items() if name in names]
    notes = [*notes, *(f"{entry.label}: {entry.definition}" for entry in entries)]
    headlines = _headlines(next(iter(metrics.values())), config) if len(metrics) == 1 else []
    return Report(title=title, headlines=headlines, sentences=sentences, tables=tables, pictures=pictures, notes=notes)


def _headlines(metrics: Mapping[str, float], config: Config) -> list[tuple[str, str, str]]:
    """Returns the numbers on top of the page of one model: outliers, the sink, the cost of the coarsest rounding."""
    known = analysis.conditions(config)
    shown = [(analysis.label(name), analysis.show(name, metrics[name]), analysis.compared_with(name, metrics, known))
             for name in ("kurtosis_first", "first_attention_fraction") if name in metrics]  # fmt: skip
    coarse = metrics.get(f"{_QUANTISED}int8_coarse")
    if coarse is not None and metrics.get("perplexity"):
        shown.append(("perplexity lost to int8, one scale per tensor", percent(coarse / metrics["perplexity"] - 1), ""))
    return shown


def metrics_table(caption: str, metrics: Mapping[str, Mapping[str, float]], config: Config) -> Table:
    """Returns a table of metrics by model name, without those of single layers.

    The levels of chance are for the run `config`.
    """
    known, first = analysis.conditions(config), next(iter(metrics.values()))
    names = dict.fromkeys(name for model in metrics.values() for name in model)
    quantised = [name for name in names if name.startswith(_QUANTISED)]
    rows = []
    for name in [*(name for name in analysis.CATALOGUE if name in names), *quantised]:
        beside = "" if name in quantised else analysis.compared_with(name, first, known)
        rows.append([analysis.label(name), *(_cell(model, name) for model in metrics.values()), beside])
    return Table(caption, ["", *metrics, "compare with"], rows)


def _cell(metrics: Mapping[str, float], name: str) -> str:
    """Returns a value, for quantised models with the change from the float one; '-' if it is missing."""
    if name not in metrics:
        return "-"
    shown = analysis.show(name, metrics[name])
    if not name.startswith(_QUANTISED) or not metrics.get("perplexity"):
        return shown
    return f"{shown} ({percent(metrics[name] / metrics['perplexity'] - 1)})"


# Tables of one model.

Entries = Sequence[tuple[str, Mapping[str, float]]]  # of a table: the name of each row, and its numbers


def _column(key: str, words: str | None = None, show: Callable[[float], str] = number) -> Quantity:
    """Returns the quantity of an entry's number, with the heading of its column."""
    return Quantity(key if words is None else words, lambda numbers: numbers[key], show)


def _table(caption: str, heading: str, entries: Entries, columns: Sequence[str | Quantity]) -> list[Table]:
    """Returns the table of some entries; none without entries. A column that no entry has is left out."""
    results = Results({str(i): Result(name, None, {0: Numbers(entry)}) for i, (name, entry) in enumerate(entries)})
    return [Columns(caption, columns, heading=heading)(results)] if entries else []


def _tables(name: str, sections: Mapping[str, Any]) -> list[Table]:
    """Returns the sections of a card as the report shows them."""
    lost, rotated = _column("lost", show=percent), _column("lost_rotated", "lost", show=percent)

    def named(section: str, key: str, show: Callable[[str], str] = str) -> Entries:
        return [(show(entry[key]), entry) for entry in sections[section]]

    tables = _table(f"{name}, perplexity at each format", "format", named("rounding", "format"),
                    [_column("perplexity"), lost, _column("perplexity_rotated", "rotated"), rotated,
                     _column("last_state_error", "error of the last state")])  # fmt: skip
    tables += _table(f"{name}, keys and values of few bits", "cache", named("kv_cache", "format"),
                     [_column("perplexity"), lost, _column("bytes_per_token", "bytes per token")])  # fmt: skip
    places = ("layer", "channel", "head", "position", "rows", "layers")
    place = [_column(key, show=lambda value: f"{value:.0f}") for key in places]
    tables += _table(f"{name}, largest activations", "token", named("largest_activations", "text", repr),
                     [_column("value", "largest |x|"), _column("over_median", "over the median"), *place,
                      _column("massive", "", lambda massive: "massive" if massive else "")])  # fmt: skip
    tables += _table(f"{name}, sinks besides the first token", "token", named("secondary_sinks", "text", repr),
                     [_column("mass", "weight"), *place])  # fmt: skip
    streaming = sections["streaming"]
    if "window" in streaming:
        caption = f"{name}, read with the latest {streaming['window']} tokens in view, second half of rows"
        kinds = {"whole": "all tokens", "sinks": f"the first {SINKS} as well", "window": "only the latest"}
        entries = [(words, {"perplexity": streaming[f"perplexity_{kind}"]}) for kind, words in kinds.items()]
        tables += _table(caption, "in view", entries, [_column("perplexity")])
    return tables


def _by_layer(measured: Measured) -> list[dict[str, float]]:
    """Returns the metrics of each layer, named without the layer."""
    metrics, L = measured.metrics, measured.config.model.num_layers
    keys = [{name: f"{name}/layer_{i}" for name in analysis.CATALOGUE} for i in range(L)]
    return [{name: metrics[key] for name, key in of_layer.items() if key in metrics} for of_layer in keys]


def _layer_table(name: str, measured: Measured) -> Table:
    arrays, layers = measured.arrays, _by_layer(measured)
    quantities: list[str | Quantity] = list(layers[0])
    at = 1 + len(quantities)
    for part, words in {"attention": "attention", "mlp": "the MLP"}.items():
        if (changes := arrays.get(f"knocked_out_{part}")) is not None:
            quantities.append(_column(part, f"loss change without {words} (nats)", signed))
            layers = [layer | {part: float(change)} for layer, change in zip(layers, changes, strict=True)]
    (table,) = _table(f"{name}, by layer", "layer", [(str(i), layer) for i, layer in enumerate(layers)], quantities)
    if "max_abs_by_channel" not in arrays:
        return table
    texts = ["largest channels"]
    for channels in arrays["max_abs_by_channel"]:
        top = np.argsort(-channels, kind="stable")[:3]
        texts.append(", ".join(f"{channel} ({number(float(channels[channel]))})" for channel in top))
    whole = zip((table.columns, *table.rows), texts, strict=True)
    head, *rows = ([*row[:at], text, *row[at:]] for row, text in whole)
    return table._replace(columns=list(map(str, head)), rows=rows)


def _by_head(measured: Measured) -> dict[str, np.ndarray]:
    """Returns metric -> [L, N], with attention to the first token first."""
    arrays = measured.arrays
    first = "first_attention_mass" if "first_attention_mass" in arrays else "sink_attention"
    return {name: arrays[name] for name in (first, *analysis.CATALOGUE, "knocked_out_head") if name in arrays}


def _head_table(name: str, measured: Measured) -> Table:
    arrays, N = _by_head(measured), measured.config.model.num_heads
    order = np.argsort(-np.nan_to_num(next(iter(arrays.values()))), axis=None, kind="stable")[:_SHOWN_HEADS]
    places = [divmod(int(place), N) for place in order]
    entries = [(f"layer {layer}, head {head}", {metric: float(x[layer, head]) for metric, x in arrays.items()})
               for layer, head in places]  # fmt: skip
    changed = {"knocked_out_head": _column("knocked_out_head", "loss change without it (nats)")}
    columns = [changed.get(metric, metric) for metric in arrays]
    return _table(f"{name}, heads with the most attention on the first token", "", entries, columns)[0]


# Pictures.


def curve_pictures(curves: Mapping[str, Mapping[int, Mapping[str, float]]], x_label: str) -> list[Picture]:
    """Draws metrics over layers or steps in the pictures that the catalogue says, with a panel for each metric.

    `curves` is label -> x -> metrics; a metric is drawn if at least two x have it.
    """
    drawn = [metric for metric in analysis.CATALOGUE.values() if metric.curves]
    pictures = []
    for name, log in {metric.curves: metric.log for metric in drawn}.items():
        panels: dict[str, dict[str, figures.Curve]] = {}
        for metric in (metric for metric in drawn if metric.curves == name):
            for label, curve in curves.items():
                points = {x: metrics[metric.name] for x, metrics in curve.items() if metric.name in metrics}
                if len(points) > 1:
                    panels.setdefault(metric.label, {})[label] = list(points), np.array([list(points.values())])
        if panels:
            figure = figures.lines(panels, x_label=x_label, y_label="", y_scale="log" if log else "linear")
            pictures.append(Picture(f"{name}_by_{x_label}", f"{'; '.join(panels)}, by {x_label}.", figure))
    return pictures


def _error_pictures(name: str, errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Picture]:
    """Draws the means of `quant.rounding_error` by layer, a panel for each format."""
    panels: dict[str, dict[str, figures.Curve]] = {}
    for setting, by_path in errors.items():
        for kind in ("whole", "inherited", "added"):
            by_layer: dict[int, list[float]] = {}
            for error in by_path.values():
                if "layer" in error and kind in error:
                    by_layer.setdefault(int(error["layer"]), []).append(error[kind])
            means = {layer: float(np.mean(values)) for layer, values in sorted(by_layer.items())}
            panels.setdefault(setting, {})[kind] = (list(means), np.array([list(means.values())]))
    if not panels:
        return []
    figure = figures.lines(panels, x_label="layer", y_label="signal to noise (dB)")
    caption = f"{name}: signal to quantisation noise of linear outputs, mean by layer; inherited, and added there."
    return [Picture(f"{name}_sqnr", caption, figure)]


def attention_picture(loaded: LoadedModel, name: str, tokens: np.ndarray, heads: Sequence[tuple[int, int]],
                      words: Sequence[str]) -> Picture:  # fmt: skip
    """Draws the attention weights of some (layer, head) on one text, keys in columns, with its tokens as labels.

    Raises:
      UserError: For a head that the model does not have, or more tokens than a picture shows.
    """
    model = loaded.config.model
    for layer, head in heads:
        if not (0 <= layer < model.num_layers and 0 <= head < model.num_heads):
            allowed = f"layers 0 to {model.num_layers - 1}, heads 0 to {model.num_heads - 1}"
            raise UserError(f"there is no head {head} in layer {layer}", allowed=allowed)
    if not 0 < len(tokens) <= _SHOWN_TOKENS:
        raise UserError(f"a text of {len(tokens)} tokens to draw", allowed=f"1 to {_SHOWN_TOKENS}")
    seen = analysis.measure(loaded, [tokens[None]], lambda taps: (taps.attention_weights, taps.visible))
    weights, visible = (np.asarray(x)[:, 0] for x in seen)
    panels = {
        f"layer {layer}, head {head}": np.where(visible[layer, 0], weights[layer, head], np.nan)
        for layer, head in heads
    }
    figure = figures.maps(panels, x_label="key", y_label="query", value_label="weight", x_ticks=words, y_ticks=words)
    return Picture(f"{name}_attention", f"{name}: attention weights on a given text.", figure)


# Cards beside each other.


def comparison(cards: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of the metrics of several cards, and of the cost of each format."""
    columns: list[dict[str, str]] = []
    for card in cards:
        metrics = [(metric["name"], metric["value"]) for metric in card["metrics"]]
        column = {analysis.label(name): analysis.show(name, value) for name, value in metrics}
        for entry in [*card.get("rounding", []), *card.get("kv_cache", [])]:
            name = entry["format"]
            texts = {"perplexity": (f"perplexity, {name}", number), "lost": (f"lost at {name}", percent),
                     "lost_rotated": (f"lost at {name}, rotated", percent)}  # fmt: skip
            column |= {words: show(entry[key]) for key, (words, show) in texts.items() if key in entry}
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    models = [card["model"]["name"] for card in cards]
    headings = [
        f"{name} ({models[:i].count(name) + 1})" if models.count(name) > 1 else name for i, name in enumerate(models)
    ]
    return Table("Cards beside each other", ["", *headings], rows)
