"""The pages of `analyze`: one for each model, one that compares models; tables and pictures of the usual report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.analyzing.measuring import Asked, Measured
from orthojax.experiments.analyzing.texts import Text
from orthojax.experiments.headlines import Headline
from orthojax.experiments.labels import LABELS
from orthojax.experiments.measures import MAPS
from orthojax.experiments.overview import compared_with
from orthojax.experiments.page import Picture, Report, Table
from orthojax.experiments.pictures import LayerCurves, draw_attention, draw_hidden
from orthojax.experiments.results import Results
from orthojax.formatting import number, percent, signed
from orthojax.model import LoadedModel

_SHOWN_HEADS = 12
_METRICS = (
    *("perplexity", "loss_nats", "bits_per_byte", "first_attention_fraction", "first_attention_mass", "sink_rate"),
    *("attention_entropy_nats", "null_mass", "sink_logit_gap", "kurtosis_first", "kurtosis_rest", "kurtosis_pooled"),
    *("max_abs_first", "max_abs_rest", "max_abs_first_maximum", "max_abs_rest_maximum"),
    *("norm_ratio_first", "norm_ratio_rest", "correlation_first", "correlation_rest"),
    *("value_norm_first", "value_norm_rest", "residual_norm_first", "residual_norm_rest"),
)
_LOSSES = ("perplexity", "loss_nats", "bits_per_byte")  # of which three digits are too few
SHORT_LABELS = {
    "first_attention_fraction": "argmax on first",
    "first_attention_mass": "mass on first",
    "sink_rate": "sink heads",
    "attention_entropy_nats": "entropy (nats)",
    "null_mass": "mass on none",
    "sink_logit_gap": "sink logit gap",
    "kurtosis_first": "kurtosis, first",
    "kurtosis_rest": "kurtosis, others",
    "norm_ratio_first": "max/l2, first",
    "norm_ratio_rest": "max/l2, others",
    "residual_norm_first": "residual norm, first",
    "residual_norm_rest": "residual norm, others",
    "value_norm_first": "value norm, first",
    "value_norm_rest": "value norm, others",
}
CURVES = (
    LayerCurves(
        "first_token_attention", "Attention to the first token: argmax fraction and mean weight.", "fraction",
        {"first_attention_fraction": "argmax", "first_attention_mass": "mass"},
    ),
    LayerCurves(
        "kurtosis", "Kurtosis of the residual stream.", "kurtosis",
        {"kurtosis_first": "first token", "kurtosis_rest": "others"}, "log", (3.0, "Gaussian"),
    ),
    LayerCurves(
        "max_abs", "Largest |x| of the residual stream, mean over sequences.", "max |x|",
        {"max_abs_first": "first token", "max_abs_rest": "others"}, "log",
    ),
    LayerCurves(
        "residual_norms", "Residual-state peaks: norms of the residual stream.", "norm",
        {"residual_norm_first": "first token", "residual_norm_rest": "others"}, "log",
    ),
    LayerCurves(
        "value_norms", "Value-state drains: norms of values as written to the stream, mean over heads.", "norm",
        {"value_norm_first": "first token", "value_norm_rest": "others"}, "log",
    ),
    LayerCurves(
        "attention_entropy", "Entropy of attention, mean over heads.", "nats", {"attention_entropy_nats": ""},
    ),
)  # fmt: skip


def label(name: str) -> str:
    """Of a metric."""
    more = {f"correlation_{part}": f"correlation of kurtosis and max/l2 over layers, {words}"
            for part, words in (("first", "first token"), ("rest", "other tokens"))}  # fmt: skip
    base = name.removesuffix("_with_head")
    return more.get(name) or LABELS.get(base, base) + (", with the head" if base != name else "")


def model_report(
    name: str, loaded: LoadedModel, measured: Measured, results: Results, texts: Sequence[Text], asked: Asked,
    notes: Sequence[str], links: Sequence[tuple[str, str]],
) -> Report:  # fmt: skip
    """The page of one model; `results` holds it alone."""
    model, text, metrics = loaded.model.config, texts[0], measured.metrics
    source = f"step {loaded.source.name}" if loaded.source.name.isdigit() else loaded.source.name
    summary = [
        f"{model.num_layers} layers of width {model.d_model}, {model.num_heads} heads, {model.normalizer} attention; "
        f"{source}. All metrics are of {len(text.rows)} rows of {text.rows.shape[1] - 1} tokens of {text.source}. "
        "Layers and heads count from 0 in tables, layers from 1 in curves.",
        *measured.notes,
    ]
    tables = [_metrics_table(metrics, loaded), _layer_table(measured)]
    tables += [table for table in (_quantisation_table(metrics), _changed_table(measured)) if table.rows]
    domains = [of.name for of in texts[1:]]
    if domains:
        tables += [_domain_table(metrics, domains), _domain_heads(measured, domains)]
    if asked.sweep_rows:
        tables.append(_costly_heads(measured, text.name))
    pictures = [picture for curve in CURVES for picture in curve(results)]
    pictures += [*_maps(measured), *_heads(measured, domains)]
    pictures += _quantisation_bars({name: metrics}) + _windows(measured, domains)
    title = f"{name}: attention, outliers and rounding"
    return Report(title, summary, (), tables, pictures, notes, links, headlines=headlines(name, loaded, metrics))


def headlines(name: str, loaded: LoadedModel, metrics: Mapping[str, float]) -> list[Headline]:
    """The numbers on top of the page of one model."""
    compared = compared_with(metrics, loaded.config)
    shown = [metric for metric in ("kurtosis_first", "first_attention_fraction", "perplexity") if metric in metrics]
    return [Headline(label(metric), [_cell(metrics, metric)], name, compared.get(metric, "")) for metric in shown]


def comparing_report(measured: Mapping[str, Measured], results: Results, notes: Sequence[str]) -> Report:
    """The page of several models; `results` holds them all."""
    names, metrics = list(measured), {name: of.metrics for name, of in measured.items()}
    found = [metric for metric in _METRICS if any(metric in of for of in metrics.values())]
    rows = [[label(metric), *(_cell(metrics[name], metric) for name in names)] for metric in found]
    tables = [Table("Metrics, means over layers", ["", *names], rows)]
    settings = list(dict.fromkeys(s for of in metrics.values() for s in _settings(of)))
    if settings:
        cells = [[label(s), *(_damage(metrics[name], s) for name in names)] for s in settings]
        tables.append(Table("Perplexity with quantised linear layers, and its change", ["", *names], cells))
    domains = [name for name in dict.fromkeys(k for of in metrics.values() for k in of)
               if name.startswith("domain/") and name.endswith("/active_score")]  # fmt: skip
    if domains:
        cells = [[d.split("/")[1], *(_interval(metrics[name], d) for name in names)] for d in domains]
        tables.append(Table("Active score of heads by domain, mean over heads (95% interval)", ["", *names], cells))
    summary = [
        "Losses and perplexities are per token: models whose tokenizers differ compare by bits per byte. "
        "The pages of single models have layers and heads."
    ]
    pictures = [picture for curve in CURVES for picture in curve(results)] + _quantisation_bars(metrics)
    maps = {name: of.arrays["attention"][0] for name, of in measured.items()}
    hidden = {name: of.arrays["hidden"][0] for name, of in measured.items()}
    pictures += [
        Picture("attention_map", "Attention on one window, mean over heads and layers.", draw_attention(maps), "png"),
        Picture("hidden_states", "|x| on the same window, mean over layers.", draw_hidden(hidden), "png"),
    ]
    links = [("all results", "results.json"), *((f"{name}: its page", f"{name}/report.html") for name in names)]
    return Report(f"{len(names)} models compared", summary, (), tables, pictures, notes, links)


def _cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    return f"{metrics[name]:.4g}" if name in _LOSSES else number(metrics[name])


def _settings(metrics: Mapping[str, float]) -> list[str]:
    return [name for name in metrics if name.startswith("perplexity_")]


def _damage(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    return f"{number(metrics[name])} ({percent(metrics[name] / metrics['perplexity'] - 1)})"


def _interval(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    return f"{metrics[name]:.3f} ({metrics[name + '_low']:.3f} to {metrics[name + '_high']:.3f})"


def _metrics_table(metrics: Mapping[str, float], loaded: LoadedModel) -> Table:
    compared = compared_with(metrics, loaded.config)
    rows = [[label(name), _cell(metrics, name), compared.get(name, "")] for name in _METRICS if name in metrics]
    return Table("Metrics, means over layers and heads", ["", "value", "to compare with"], rows)


def _layer_table(measured: Measured) -> Table:
    metrics, arrays, rows = measured.metrics, measured.arrays, []
    channels, positions = arrays["max_abs_by_channel"], arrays["max_abs_by_position"]
    for layer, (channel, position) in enumerate(zip(channels, positions, strict=True)):
        top = np.argsort(-channel, kind="stable")[:3]
        where = ", ".join(f"{c} ({number(float(channel[c]))})" for c in top)
        values = [_cell(metrics, f"{name}/layer_{layer}") for name in SHORT_LABELS]
        rows.append([str(layer), *values, number(float(channel.max())), where, str(int(np.argmax(position)))])
    columns = ["layer", *SHORT_LABELS.values(), "max |x|", "largest channels", "at position"]
    return Table("By layer", columns, rows)


def _quantisation_table(metrics: Mapping[str, float]) -> Table:
    rows = [
        [label(name), number(metrics[name]), percent(metrics[name] / metrics["perplexity"] - 1)]
        for name in _settings(metrics)
    ]
    return Table("Perplexity with quantised linear layers", ["setting", "perplexity", "change"], rows)


def _changed_table(measured: Measured) -> Table:
    shown = ("loss_nats", "perplexity", "first_attention_fraction", "first_attention_mass", "kurtosis_first",
             "max_abs_first", "residual_norm_first", "value_norm_first")  # fmt: skip
    rows, before = [], measured.metrics
    for name, after in measured.changed.items():
        rows.append([name, signed(after["loss_nats"] - before["loss_nats"]), *(_cell(after, key) for key in shown)])
    if rows:
        rows.insert(0, ["the model as it is", "", *(_cell(before, key) for key in shown)])
    return Table("Interventions: loss and metrics before and after", ["", "loss change", *map(label, shown)], rows)


def _domain_table(metrics: Mapping[str, float], domains: Sequence[str]) -> Table:
    rows = []
    for name in domains:
        prefix = f"domain/{name}"
        rows.append([name, _cell(metrics, f"{prefix}/loss_nats"), _interval(metrics, f"{prefix}/active_score"),
                     _cell(metrics, f"{prefix}/active_share")])  # fmt: skip
    columns = [
        "domain",
        "loss (nats)",
        "active score, mean over heads (95% interval)",
        "queries at which a head is active",
    ]
    return Table("Domains: how active heads are", columns, rows)


def _of_domain(measured: Measured, domain: str, what: str) -> np.ndarray:
    return measured.arrays[f"domain/{domain}/{what}"]


def _places(values: np.ndarray, count: int = _SHOWN_HEADS) -> list[tuple[int, int]]:
    """(layer, head) of the largest values."""
    order = np.argsort(-values, axis=None, kind="stable")[:count]
    return [(int(i) // values.shape[1], int(i) % values.shape[1]) for i in order]


def _domain_heads(measured: Measured, domains: Sequence[str]) -> Table:
    """The heads whose active score differs most between domains."""
    scores = np.stack([_of_domain(measured, name, "active_score") for name in domains])
    swept = f"domain/{domains[0]}/zeroing_cost" in measured.arrays

    def cell(domain: str, what: str, place: tuple[int, int], form: str) -> str:
        mean, low, high = (float(_of_domain(measured, domain, what + end)[place]) for end in ("", "_low", "_high"))
        return f"{mean:{form}} ({low:{form}} to {high:{form}})"

    rows = []
    for place in _places(np.ptp(scores, axis=0)):
        cells = [cell(domain, "active_score", place, ".3f") for domain in domains]
        cells += [cell(domain, "zeroing_cost", place, "+.4f") for domain in domains] if swept else []
        rows.append([f"layer {place[0]}, head {place[1]}", *cells])
    columns = ["", *(f"active on {domain}" for domain in domains)]
    columns += [f"loss change on {domain} when zeroed" for domain in domains] if swept else []
    return Table("Heads that differ most between domains (95% intervals over windows)", columns, rows)


def _costly_heads(measured: Measured, text: str) -> Table:
    cost, mass = measured.arrays[f"sweep/{text}"].mean(-1), measured.arrays["first_attention_mass"]
    rows = [[f"layer {l}, head {h}", f"{cost[l, h]:+.4f}", f"{mass[l, h]:.3f}"] for l, h in _places(cost)]
    rows.append(["median head", f"{np.median(cost):+.4f}", f"{np.median(mass):.3f}"])
    return Table("Heads that cost most when zeroed", ["", "loss change (nats)", "mass on the first token"], rows)


def _maps(measured: Measured) -> list[Picture]:
    attention: dict[str, np.ndarray] = dict(zip(MAPS, measured.arrays["attention"], strict=True))
    hidden: dict[str, np.ndarray] = dict(zip(MAPS, measured.arrays["hidden"], strict=True))
    seen = "Attention on the first window, mean over heads."
    return [
        Picture("attention_map", seen, draw_attention(attention), "png"),
        Picture("hidden_states", "|x| on the same window: bright columns are outlier channels.", _log(hidden), "png"),
    ]


def _log(panels: Mapping[str, np.ndarray]) -> Any:
    return drawing.maps(panels, x_label="channel", y_label="position", value_label="|hidden state|", log=True)


def _heads(measured: Measured, domains: Sequence[str]) -> list[Picture]:
    panels = {"mass on the first token": measured.arrays["first_attention_mass"]}
    words = "Mean weight on the first token by head."
    pictures = [Picture("heads", words, _head_maps(panels, "weight"), "png")]
    if domains:
        panels = {name: _of_domain(measured, name, "active_score") for name in domains}
        words = "Active score by head and domain: dark heads attend to the first token, or to none."
        pictures.append(Picture("heads_by_domain", words, _head_maps(panels, "active score"), "png"))
    costs = {name.removeprefix("sweep/"): np.abs(array.mean(-1)) for name, array in measured.arrays.items()
             if name.startswith("sweep/")}  # fmt: skip
    if costs:
        words = "By how much the loss changes when a head is zeroed, absolute value."
        pictures.append(Picture("zeroed_heads", words, _head_maps(costs, "nats", log=True), "png"))
    return pictures


def _head_maps(panels: Mapping[str, np.ndarray], value: str, log: bool = False) -> Any:
    return drawing.maps(panels, x_label="head", y_label="layer", value_label=value, log=log)


def _quantisation_bars(models: Mapping[str, Mapping[str, float]]) -> list[Picture]:
    settings = list(dict.fromkeys(name for metrics in models.values() for name in _settings(metrics)))
    measured = {name: of for name, of in models.items() if all(setting in of for setting in settings)}
    if not settings or not measured:
        return []
    damage = {name: np.array([[100 * (of[setting] / of["perplexity"] - 1) for setting in settings]])
              for name, of in measured.items()}  # fmt: skip
    texts = {
        name: [percent(of[setting] / of["perplexity"] - 1) for setting in settings] for name, of in measured.items()
    }
    figure = drawing.bars(list(map(label, settings)), damage, y_label="change of perplexity, %", texts=texts)
    return [Picture("quantisation", "What quantisation does to perplexity.", figure)]


def _windows(measured: Measured, domains: Sequence[str]) -> list[Picture]:
    """The paper's picture of one head: what zeroing it costs on a window against how active it is there."""
    if not domains or f"sweep/{domains[0]}" not in measured.arrays:
        return []
    place = _places(np.ptp([_of_domain(measured, name, "active_score") for name in domains], axis=0), 1)[0]
    points = {}
    for name in domains:
        active, cost = _of_domain(measured, name, "active_by_window")[place], measured.arrays[f"sweep/{name}"][place]
        points[name] = [(float(a), float(c), "") for a, c in zip(active, cost, strict=True)]
    figure = drawing.scatter(points, x_label="active score on the window", y_label="loss change when zeroed (nats)")
    words = f"Layer {place[0]}, head {place[1]}, the head that differs most between domains: each point is a window."
    return [Picture("active_dormant_head", words, figure)]
