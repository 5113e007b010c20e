"""Tables and pictures of measured models and of cards, and the page that `orthojax analyze` writes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orthojax import analysis
from orthojax.cards.findings import REMEDIES, Finding, findings, remedies, with_error
from orthojax.cards.measures import SINKS, Measured
from orthojax.cards.rounding import fails
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.formatting import number, percent, share, signed
from orthojax.model import LoadedModel
from orthojax.report import figures
from orthojax.report.page import Cell, Picture, Report, Table
from orthojax.report.results import Numbers, Quantity, Result, Results
from orthojax.report.tables import Columns

_SHOWN_HEADS, _SHOWN_TOKENS = 12, 64
# Of the metrics and formats in cards, those beside each other.
_COMPARED = ("perplexity", "bits_per_byte", "kurtosis_first", "max_over_median",
             "first_attention_fraction", "sink_rate", "gu_sink_rate", "max_attention_logit")  # fmt: skip
_COMPARED_FORMATS = ("int8_coarse", "int4_zeropoint", "w4a4", "w4a4kv4", "fp8_e4m3", "mxfp4", "nvfp4")
_QUANTISED = "perplexity_"  # how the names of metrics of quantised models begin


def report(
    measured: Mapping[str, Measured],
    cards: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    *,
    steps: Sequence[int] = (),
    drawn: Mapping[str, Sequence[Picture]] | None = None,
    others: Sequence[Mapping[str, Any]] = (),
) -> Report:
    """Returns the report of one or several models.

    Args:
      measured: Name -> measurements.
      cards: Their cards.
      notes: The command, the machine and the time.
      steps: If the models are one run at several steps, these steps, in order.
      drawn: Further pictures of a model, by its name.
      others: Cards of other models to compare with.
    """
    title = f"{len(measured)} checkpoints of one run" if steps else ", ".join(measured)
    texts = [card["measured"].get("text", {}) for card in cards]
    rows = [f"{text['rows']} rows of {text['length']} tokens: " if "length" in text else "" for text in texts]
    read = dict.fromkeys(row + str(text.get("source", "")) for row, text in zip(rows, texts, strict=True))
    sentences = [f"Measured on {'; '.join(read)}. ± is one standard error over rows. Layers and heads count from 0."]
    if len(measured) > 1 and not steps:
        sentences.append("Losses are per token: models with different tokenizers compare by bits per byte.")
    shown = dict(list(measured.items())[-1:]) if steps else measured  # by layer and head, for a series its end
    metrics = {name: model.metrics for name, model in measured.items()}
    series = {"mean over layers": dict(zip(steps, metrics.values(), strict=True))} if steps else {}
    pictures, tables, found = [*curve_pictures(series, "step")], [], []
    if len(measured) > 1 or others:
        tables.append(comparison([*cards, *others]))
    for (name, model), card in zip(shown.items(), list(cards)[-len(shown) :], strict=True):
        sentences += _about(name, model)
        of_card = findings(card)
        metric, weights = next(iter(_by_head(model).items()))
        figure = figures.maps({"": weights}, x_label="head", y_label="layer", value_label="weight")
        pictures.append(Picture(f"{name}_heads", f"{name}: {analysis.label(metric)}, by head.", figure))
        of_model = [*_tables(card), *_metric_tables(card, model.config), *_layer_tables(model), _head_table(model)]
        if len(shown) > 1:
            of_model = [_named(name, table) for table in of_model]
            of_card = [Finding(f"{name}: {says}", [(words, f"{name}-{key}", row) for words, key, row in rows])
                       for says, rows in of_card]  # fmt: skip
        tables, found = tables + of_model, found + of_card
        pictures += (drawn or {}).get(name, ())
    pictures += curve_pictures({name: dict(enumerate(_by_layer(model))) for name, model in shown.items()}, "layer")
    return Report(title=title, findings=found, sentences=sentences, tables=tables, pictures=pictures, notes=notes)


def _about(name: str, model: Measured) -> list[str]:
    config = model.config.model
    shape = f"{config.num_layers} layers of width {config.d_model}, {config.num_heads} heads"
    sentences = [f"{name}: {shape}, {config.normalizer} attention."]
    if math.isclose(model.metrics.get("loss_nats", 0.0), math.log(config.vocab_size), rel_tol=1e-6):
        sentences.append(f"{name}: the loss is that of equal logits, as of a head of zeros: ln {config.vocab_size}.")
    return sentences


def _named(name: str, table: Table) -> Table:
    """Returns a table as one of several models."""
    caption = f"{name}: {table.caption[:1].lower()}{table.caption[1:]}"
    return table._replace(caption=caption, key=f"{name}-{table.key}" if table.key else "")


def _metric_tables(card: Mapping[str, Any], config: Config) -> list[Table]:
    """Returns the metrics of a card in groups, each with its definition, its error and its level of chance."""
    known, groups = analysis.conditions(config), {}
    for metric in card["metrics"]:
        definition = analysis.define(metric["name"])
        if definition is not None and metric["name"] != "sequences":
            first = Cell(definition.label, definition.definition, name=metric["name"])
            value = _with_error_below({"of": metric["value"], "of_se": metric.get("se")}, "of",
                                      lambda value, name=metric["name"]: analysis.show(name, value))  # fmt: skip
            level, _, words = analysis.compared_with(metric["name"], {}, known).partition(" ")
            groups.setdefault(definition.group, []).append([first, value, Cell(level, words)])
    columns = ("", "value", "chance")
    order = [group for group in dict.fromkeys(entry.group for entry in analysis.CATALOGUE.values()) if group in groups]
    return [Table(group.capitalize(), columns, groups[group], group.replace(" ", "_")) for group in order]


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


def _table(
    caption: str, heading: str, entries: Entries, columns: Sequence[str | Quantity], key: str = ""
) -> list[Table]:
    """Returns the table of some entries; none without entries. A column that no entry has is left out."""
    results = Results({str(i): Result(name, None, {0: Numbers(entry)}) for i, (name, entry) in enumerate(entries)})
    return [Columns(caption, columns, heading=heading)(results)._replace(key=key)] if entries else []


def _with_error_below(entry: Mapping[str, Any], key: str, show: Callable[[float], str]) -> Cell:
    value, _, error = with_error(entry, key, show=show).partition(" ± ")
    return Cell(value, f"±\N{NO-BREAK SPACE}{error}" if error else "")


def _rounding_tables(entries: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns what formats cost, and what was measured to help those that fail."""
    shown = {"kl_nats": ("KL to float (nats)", number), "agreement": ("same likeliest token", share),
             "loss_added_nats": ("added to the loss (nats)", signed), "lost": ("to perplexity", percent)}  # fmt: skip
    rows = [[Cell(of["format"], of.get("left_out", "")),
             *(_with_error_below(of, key, show) for key, (_, show) in shown.items())] for of in entries]  # fmt: skip
    columns = ["format", *(words for words, _ in shown.values())]
    tables = [Table("What rounding costs", columns, rows, "rounding")] if rows else []
    failed = [(entry, of) for entry in entries if (of := remedies(entry)) and fails(entry)]
    kinds = [kind for kind in REMEDIES if any(kind in of for _, of in failed)]
    known = lambda of, kind: kind in of and not math.isnan(of[kind][0])  # noqa: E731
    helps = [[entry["format"], *(share(of[kind][0]) if known(of, kind) else "-" for kind in kinds),
              _with_error_below(entry, "d_sink_nats", signed)] for entry, of in failed]  # fmt: skip
    caption = "What helps: share of the KL divergence; D_sink, the loss that goes with the first token in float"
    columns = ["format", *(REMEDIES[kind] for kind in kinds), "D_sink (nats)"]
    tables += [Table(caption, columns, helps, "helps")] if helps else []
    layers = [[f"{entry['format']}, {len(of['layers'])}", Cell("", ", ".join(of["layers"])),
               *(_with_error_below(of, key, shown[key][1]) for key in ("kl_nats", "loss_added_nats"))]
              for entry, _ in failed for of in entry.get("float_layers", ())]  # fmt: skip
    columns = ["format", "layers in float", shown["kl_nats"][0], shown["loss_added_nats"][0]]
    return tables + ([Table("With one, two and three linear layers in float", columns, layers)] if layers else [])


def _tables(sections: Mapping[str, Any]) -> list[Table]:
    """Returns the sections of a card as the report shows them."""
    lost = _column("lost", show=percent)

    def named(section: str, key: str, show: Callable[[str], str] = str) -> Entries:
        return [(show(entry[key]), entry) for entry in sections[section]]

    tables = _rounding_tables(sections["rounding"])
    tables += _table("Keys and values of few bits", "cache", named("kv_cache", "format"),
                     [_column("kl_nats", "KL to float (nats)"), _column("perplexity"), lost,
                      _column("bytes_per_token", "bytes per token")])  # fmt: skip
    places = ("layer", "channel", "head", "position", "rows", "layers")
    place = [_column(key, show=lambda value: f"{value:.0f}") for key in places]
    tables += _table("Largest activations", "token", named("largest_activations", "text", repr),
                     [_column("value", "largest |x|"), _column("over_median", "over the median"), *place,
                      _column("massive", "", lambda massive: "massive" if massive else "")], "largest")  # fmt: skip
    tables += _table("Sinks besides the first token", "token", named("secondary_sinks", "text", repr),
                     [_column("mass", "weight"), *place])  # fmt: skip
    streaming = sections["streaming"]
    if "window" in streaming:
        caption = f"Read with the latest {streaming['window']} tokens in view, second half of rows"
        kinds = {"whole": "all tokens", "sinks": f"the first {SINKS} as well", "window": "only the latest"}
        entries = [(words, {"perplexity": streaming[f"perplexity_{kind}"]}) for kind, words in kinds.items()]
        tables += _table(caption, "in view", entries, [_column("perplexity")])
        grid: dict[str, dict[str, float]] = {}
        for of in streaming.get("grid", ()):
            grid.setdefault(f"{of['window']}", {})[f"{of['sinks']} first"] = of["perplexity"]
        columns = [_column(name) for name in dict.fromkeys(name for of in grid.values() for name in of)]
        tables += _table("The same by tokens in view, and by how many of them are the first", "in view",
                         list(grid.items()), columns) if grid else []  # fmt: skip
    return tables


def _by_layer(measured: Measured) -> list[dict[str, float]]:
    """Returns the metrics of each layer, named without the layer."""
    metrics, L = measured.metrics, measured.config.model.num_layers
    keys = [{name: f"{name}/layer_{i}" for name in analysis.CATALOGUE} for i in range(L)]
    return [{name: metrics[key] for name, key in of_layer.items() if key in metrics} for of_layer in keys]


def _layer_tables(measured: Measured) -> list[Table]:
    """Returns the metrics of each layer, a table for each group and for the changes of the loss without a part."""
    arrays, layers = measured.arrays, _by_layer(measured)
    groups: dict[str, list[str | Quantity]] = {}
    for metric in layers[0]:
        groups.setdefault(analysis.CATALOGUE[metric].group, []).append(metric)
    for part, words in {"attention": "attention", "mlp": "the MLP"}.items():
        if (changes := arrays.get(f"knocked_out_{part}")) is not None:
            groups.setdefault("loss", []).append(_column(part, f"loss change without {words} (nats)", signed))
            layers = [layer | {part: float(change)} for layer, change in zip(layers, changes, strict=True)]
    entries = [(str(i), layer) for i, layer in enumerate(layers)]
    tables = [table for group, columns in groups.items()
              for table in _table(f"{group.capitalize()} by layer", "layer", entries, columns)]  # fmt: skip
    if "max_abs_by_channel" in arrays:
        top = [np.argsort(-channels, kind="stable")[:3] for channels in arrays["max_abs_by_channel"]]
        rows = [[str(i), *(f"{c} ({number(float(arrays['max_abs_by_channel'][i, c]))})" for c in of)]
                for i, of in enumerate(top)]  # fmt: skip
        columns = ("layer", "first", "second", "third")[: 1 + len(top[0])]
        tables.append(Table("Largest channels by layer, and their largest |x|", columns, rows))
    return tables


def _by_head(measured: Measured) -> dict[str, np.ndarray]:
    """Returns metric -> [L, N], with attention to the first token first."""
    arrays = measured.arrays
    first = "first_attention_mass" if "first_attention_mass" in arrays else "sink_attention"
    return {name: arrays[name] for name in (first, *analysis.CATALOGUE, "knocked_out_head") if name in arrays}


def _head_table(measured: Measured) -> Table:
    arrays, N = _by_head(measured), measured.config.model.num_heads
    order = np.argsort(-np.nan_to_num(next(iter(arrays.values()))), axis=None, kind="stable")[:_SHOWN_HEADS]
    places = [divmod(int(place), N) for place in order]
    entries = [(f"layer {layer}, head {head}", {metric: float(x[layer, head]) for metric, x in arrays.items()})
               for layer, head in places]  # fmt: skip
    changed = {"knocked_out_head": _column("knocked_out_head", "loss change without it (nats)")}
    columns = [changed.get(metric, metric) for metric in arrays]
    return _table("Heads with the most attention on the first token", "", entries, columns)[0]


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


def _cost(entry: Mapping[str, Any], with_kl: bool) -> str:
    """Returns the KL divergence of a format; where others have one, the lost perplexity is said to be that."""
    if "kl_nats" in entry:
        return number(entry["kl_nats"])
    return ("perplexity " * with_kl + percent(entry["lost"])) if "lost" in entry else "-"


def comparison(cards: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a sortable table of cards: their main metrics, and the KL divergence or loss of the main formats."""
    metrics = [{metric["name"]: metric["value"] for metric in card["metrics"]} for card in cards]
    formats = [{entry["format"]: entry for part in ("rounding", "kv_cache") for entry in card.get(part, ())
                if "lost" in entry} for card in cards]  # fmt: skip
    with_kl = any("kl_nats" in entry for of in formats for entry in of.values())  # cards of 0.1.0 have none
    words = "KL at {} (nats)" if with_kl else "lost at {}"
    names = [name for name in _COMPARED if any(name in of for of in metrics)]
    rounded = [name for name in _COMPARED_FORMATS if any(name in of for of in formats)]
    rows = [[card["model"]["name"], *(analysis.show(name, of[name]) if name in of else "-" for name in names),
             *(_cost(lost.get(name, {}), with_kl) for name in rounded)]
            for card, of, lost in zip(cards, metrics, formats, strict=True)]  # fmt: skip
    headings = ["model", *map(analysis.label, names), *map(words.format, rounded)]
    return Table("Models beside each other; a click on a column sorts", headings, rows, sortable=True)
