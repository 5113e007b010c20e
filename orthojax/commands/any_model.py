"""Measurements and reports of any model: a run, a published model, a .gguf file.

All numbers come from `orthojax.train.evaluate_by_head`.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.config import Config
from orthojax.data import embedded_corpus, text_corpus
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.experiments import figures
from orthojax.experiments.report import Picture, Report, Table
from orthojax.files import finite, require_file
from orthojax.formatting import number, percent, signed
from orthojax.model import Interventions, LoadedModel
from orthojax.ops.cross_entropy import cross_entropy_nats
from orthojax.train import Inputs, evaluate_by_head
from orthojax.train.evaluation import validation_loss_nats

_SHOWN_HEADS = 12
_QUANTISED = "perplexity_"  # how the names of metrics of quantised models begin


def _documents(files: Sequence[str]) -> tuple[Iterable[str], str]:
    """Returns the documents of `--text`, and their description."""
    if list(files) == ["topics"]:
        from pydoc_data.topics import topics

        return ["\n\n".join(topics.values())], "pydoc_data.topics (Python's documentation)"
    corpus = embedded_corpus() if list(files) == ["stdlib"] else text_corpus(files)
    return (document.text for document in corpus.documents()), corpus.description


def read_rows(
    files: Sequence[str], tokenizer: Tokenizer, *, rows: int, length: int, bos: bool = False, packed: bool = False
) -> Inputs:
    """Reads rows of a model's tokens, each from one document: the first row of every document, then the second rows.

    So no row has a separator, which is often a second sink. The rest of a document after its last whole row is skipped.

    Args:
      files: As for `orthojax.data.text_corpus`; or "topics", Python's documentation, or "stdlib", its sources.
      tokenizer: The model's.
      rows: Maximum number of rows; 0 for all.
      length: T, tokens that the model sees; rows have one more, the last target.
      bos: Start every row with the tokenizer's BOS token.
      packed: Cut rows from all documents joined, with an end-of-text token after each document.

    Raises:
      UserError: For files that cannot be read, or text shorter than one row.
    """
    documents, source = _documents(files)
    width = length + (not bos)
    parts, found, tokens, size = [], 0, 0, 0
    for text in documents:
        parts.append(tokenizer.encode_batch([text])[0])
        tokens, size = tokens + len(parts[-1]) + packed, size + len(text.encode())
        found = tokens // width if packed else found + (len(parts[-1]) >= width)
        if rows and found >= rows:
            break
    if packed:
        parts = [np.concatenate([np.append(part, tokenizer.eos_id) for part in parts])] if parts else []
    whole = [part[: len(part) // width * width].reshape(-1, width) for part in parts]
    turns = range(max(map(len, whole), default=0))
    ids = [part[i] for i in turns for part in whole if i < len(part)][: rows or None]
    if not ids:
        what = "tokens" if packed else "tokens in each document"
        raise UserError(f"{source}: fewer than {width} {what}, one row", allowed="more text, or a smaller --length")
    ids = np.array(ids, np.int32)
    if bos:
        ids = np.concatenate([np.full((len(ids), 1), tokenizer.bos_id, np.int32), ids], axis=1)
    inputs = _inputs(ids, source, tokens / size / math.log(2))
    inputs.provenance["rows_of"] = "packed documents" if packed else "one document"
    return inputs._replace(special_ids=tokenizer.special_ids)


def read_token_ids(path: Path, *, rows: int, length: int) -> Inputs:
    """Reads rows of token ids from a .npy file, [rows, T + 1 or more] or [tokens]; 0 rows for all.

    Raises:
      UserError: For any other file, or one shorter than one row.
    """
    require_file(path, "file of token ids")
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise UserError(f"{path} is not a .npy file: {str(error)[:200]}") from None
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{path} holds {ids.dtype} {ids.shape}", allowed="integers [rows, length + 1] or [tokens]")
    width = length + 1
    ids = ids[: len(ids) // width * width].reshape(-1, width) if ids.ndim == 1 else ids
    if not len(ids) or ids.shape[1] < width:
        most = ids.shape[1] - 1 if ids.ndim == 2 and ids.shape[0] and ids.shape[1] > 1 else 0
        allowed = f"--length={most} or less" if most else "a smaller --length"
        raise UserError(f"{path} holds {ids.shape}: no row of {width} tokens", allowed=allowed)
    ids = ids[: rows or None, :width]
    extreme = ids.min() if ids.min() < 0 else ids.max()
    if not 0 <= extreme < 2**31:  # in 32 bits it would be another id
        raise UserError(f"{path} holds the token id {extreme}", allowed="those of the model")
    return _inputs(np.ascontiguousarray(ids, np.int32), f"{path.name} (token ids)", None)


def read_text(files: Sequence[str], tokenizer: Tokenizer, *, bos: bool = False) -> np.ndarray:
    """Reads files, as for `read_rows`, as one text with empty lines between documents, int32 [tokens]."""
    ids = tokenizer.encode_batch(["\n\n".join(_documents(files)[0])])[0]
    return np.concatenate([np.full(int(bos), tokenizer.bos_id, np.int32), ids])


def sliding_loss_nats(loaded: LoadedModel, tokens: np.ndarray, length: int, stride: int) -> float:
    """Computes the mean loss over all tokens of a text but the first, each with as much context as a window allows.

    Windows of `length` tokens begin every `stride` tokens; the first predicts all of its tokens but one, each later one
    those that the previous one did not. Published perplexities of long texts are computed this way; the guide of
    transformers gives later windows the weight of one token less. If `stride` equals `length`, the pieces of the text
    are independent, and their first tokens are not predicted.

    Args:
      loaded: A causal model.
      tokens: int32 [tokens], at least 2.
      length: Tokens of a window, at most the model's positions.
      stride: 1 to `length`.
    """
    if not 1 <= stride <= length or length < 2 or len(tokens) < 2:
        problem = f"a text of {len(tokens)} tokens, stride={stride} and length={length}"
        raise UserError(problem, allowed="2 tokens or more, a length of 2 or more, a stride up to it")
    if loaded.config.model.relaxed_causal_tokens > 1:
        raise UserError("a sliding window over a model with relaxed_causal_tokens", allowed="a causal mask")
    starts = range(0, max(len(tokens) - length + stride, 1), stride)
    padded = np.concatenate([tokens, np.zeros(starts[-1] + length - len(tokens), np.int32)])
    size, total, count = loaded.config.eval.batch_size, 0.0, 0

    @jax.jit
    def losses(params: Any, rows: jax.Array) -> jax.Array:
        logits: Any = loaded.model.apply({"params": params}, rows)[0]
        return cross_entropy_nats(logits[:, :-1], rows[:, 1:])  # [rows, length - 1]

    for first in range(0, len(starts), size):
        few = list(starts[first : first + size])
        few += [few[-1]] * (size - len(few))  # for one shape
        found = np.asarray(losses(loaded.params, np.stack([padded[at : at + length] for at in few])), np.float64)
        for at, row in dict(zip(few, found, strict=True)).items():
            seen = max(length - stride, 1) if at else 1  # the previous window predicted the rest
            counted = row[seen - 1 : len(tokens) - at - 1]
            total, count = total + counted.sum(), count + len(counted)
    return total / count


def _inputs(rows: np.ndarray, source: str, bits_per_nat: float | None) -> Inputs:
    about = {"source": source, "rows": len(rows), "length": rows.shape[1] - 1}
    about["tokens_sha256"] = hashlib.sha256(rows.tobytes()).hexdigest()
    return Inputs(lambda step: rows, rows, bits_per_nat, about, None)


class Measured(NamedTuple):
    """A measured model."""

    config: Config
    metrics: dict[str, float]  # the finite ones of `evaluate_by_head`
    arrays: dict[str, np.ndarray]  # of `evaluate_by_head` and `knock_out`


def measure_model(loaded: LoadedModel, inputs: Inputs) -> Measured:
    """Measures a model in float as `evaluate_by_head` does.

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
    metrics, arrays = evaluate_by_head(loaded, inputs, settings={})
    return Measured(loaded.config, finite(metrics), arrays)


def knock_out(loaded: LoadedModel, inputs: Inputs, rows: int) -> dict[str, np.ndarray]:
    """Computes the change of the loss in nats on the first rows if a part writes nothing to the residual stream.

    Returns:
      `knocked_out_head` [L, N], `knocked_out_attention` [L] and `knocked_out_mlp` [L].
    """
    L, N = loaded.config.model.num_layers, loaded.config.model.num_heads
    few = inputs._replace(evaluation=inputs.evaluation[:rows])
    # All have the same shapes, so that one compiled program serves them.
    whole = {"head": np.ones((L, N), np.float32), "attention": np.ones(L, np.float32), "mlp": np.ones(L, np.float32)}

    def loss(scales: Mapping[str, np.ndarray]) -> float:
        given = Interventions(**{f"{part}_scale": jnp.asarray(scale) for part, scale in scales.items()})
        return validation_loss_nats(loaded.config, loaded.params, few, model=loaded.model, interventions=given)

    before, changes = loss(whole), {}
    for part, scale in whole.items():
        change = changes[f"knocked_out_{part}"] = np.zeros(scale.shape)
        for place in np.ndindex(scale.shape):
            without = scale.copy()
            without[place] = 0.0
            change[place] = loss(whole | {part: without}) - before
    return changes


_SHOWN_TOKENS = 64


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


def report(
    measured: Mapping[str, Measured],
    sources: Sequence[str],
    notes: Sequence[str],
    more: Mapping[str, tuple[Sequence[Table], Sequence[Picture]]] | None = None,
) -> Report:
    """Returns the report of one or several models.

    Args:
      measured: Name -> measurements; if all names are numbers, they are steps of one run, in order.
      sources: The texts.
      notes: The command, the machine and the time.
      more: Further tables and pictures of a model, by its name.
    """
    series = len(measured) > 1 and all(name.isdecimal() for name in measured)
    title = f"{len(measured)} checkpoints of one run" if series else ", ".join(measured)
    sentences = [f"All metrics are of {'; '.join(sources)}. Layers and heads count from 0."]
    if len(measured) > 1 and not series:
        sentences.append("Losses are per token: models with different tokenizers compare by bits per byte.")
    shown = dict(list(measured.items())[-1:]) if series else measured  # by layer and head, for a series its end
    for name, of in shown.items():
        model = of.config.model
        shape = f"{model.num_layers} layers of width {model.d_model}, {model.num_heads} heads"
        sentences.append(f"{name}: {shape}, {model.normalizer} attention.")
    pictures = []
    if series:
        steps = {int(name): of.metrics for name, of in measured.items()}
        pictures += curve_pictures({"mean over layers": steps}, "step")
    pictures += curve_pictures({name: _by_layer(of) for name, of in shown.items()}, "layer")
    metrics = {name: of.metrics for name, of in measured.items()}
    config = next(iter(measured.values())).config
    tables = [metrics_table(f"Metrics on {'; '.join(sources)}, means over layers and heads", metrics, config)]
    for name, of in shown.items():
        further = (more or {}).get(name, ((), ()))
        tables += [*further[0], _layer_table(name, of), _head_table(name, of)]
        metric, weights = next(iter(_by_head(of).items()))
        figure = figures.maps({"": weights}, x_label="head", y_label="layer", value_label="weight")
        pictures.append(Picture(f"{name}_heads", f"{name}: {analysis.label(metric)}, by head.", figure))
        pictures += further[1]
    names = dict.fromkeys(name for of in metrics.values() for name in of)
    notes = [*notes, *(f"{analysis.label(name)}: {analysis.CATALOGUE[name].definition}" for name in analysis.CATALOGUE
                       if name in names)]  # fmt: skip
    headlines = _headlines(next(iter(metrics.values())), config) if len(metrics) == 1 else []
    return Report(title=title, headlines=headlines, sentences=sentences, tables=tables, pictures=pictures, notes=notes)


def _headlines(metrics: Mapping[str, float], config: Config) -> list[tuple[str, str, str]]:
    """Returns the numbers on top of the page of one model: outliers, the sink, the cost of the coarsest rounding."""
    given = analysis.conditions(config)
    found = [(analysis.label(name), analysis.show(name, metrics[name]), analysis.compared_with(name, metrics, given))
             for name in ("kurtosis_first", "first_attention_fraction") if name in metrics]  # fmt: skip
    coarse = metrics.get(f"{_QUANTISED}int8_coarse")
    if coarse is not None and metrics.get("perplexity"):
        found.append(("perplexity lost to int8, one scale per tensor", percent(coarse / metrics["perplexity"] - 1), ""))
    return found


def metrics_table(caption: str, metrics: Mapping[str, Mapping[str, float]], config: Config) -> Table:
    """Returns a table of metrics by model name, without those of single layers.

    The levels of chance are for the run `config`.
    """
    given, first = analysis.conditions(config), next(iter(metrics.values()))
    found = dict.fromkeys(name for of in metrics.values() for name in of)
    quantised = [name for name in found if name.startswith(_QUANTISED)]
    rows = []
    for name in [*(name for name in analysis.CATALOGUE if name in found), *quantised]:
        beside = "" if name in quantised else analysis.compared_with(name, first, given)
        rows.append([analysis.label(name), *(_cell(of, name) for of in metrics.values()), beside])
    return Table(caption, ["", *metrics, "compare with"], rows)


def _cell(metrics: Mapping[str, float], name: str) -> str:
    """Returns a value, for quantised models with the change from the float one; '-' if it is missing."""
    if name not in metrics:
        return "-"
    shown = analysis.show(name, metrics[name])
    if not name.startswith(_QUANTISED) or not metrics.get("perplexity"):
        return shown
    return f"{shown} ({percent(metrics[name] / metrics['perplexity'] - 1)})"


def _layer_table(name: str, of: Measured) -> Table:
    layers = range(of.config.model.num_layers)
    shown = [metric for metric in analysis.CATALOGUE if f"{metric}/layer_0" in of.metrics]
    columns = {analysis.label(metric): [_cell(of.metrics, f"{metric}/layer_{i}") for i in layers] for metric in shown}
    if "max_abs_by_channel" in of.arrays:
        largest = []
        for channels in of.arrays["max_abs_by_channel"]:
            top = np.argsort(-channels, kind="stable")[:3]
            largest.append(", ".join(f"{channel} ({number(float(channels[channel]))})" for channel in top))
        columns["largest channels"] = largest
    for part, words in {"attention": "attention", "mlp": "the MLP"}.items():
        if (changes := of.arrays.get(f"knocked_out_{part}")) is not None:
            columns[f"loss change without {words} (nats)"] = [signed(float(change)) for change in changes]
    rows = [[str(i), *(cells[i] for cells in columns.values())] for i in layers]
    return Table(f"{name}, by layer", ["layer", *columns], rows)


def _by_head(of: Measured) -> dict[str, np.ndarray]:
    """Returns metric -> [L, N], with attention to the first token first."""
    found = {name: of.arrays[name] for name in (*analysis.CATALOGUE, "knocked_out_head") if name in of.arrays}
    first = "first_attention_mass" if "first_attention_mass" in found else "sink_attention"
    return {first: found[first]} | found


def _head_table(name: str, of: Measured) -> Table:
    found, N = _by_head(of), of.config.model.num_heads
    order = np.argsort(-np.nan_to_num(next(iter(found.values()))), axis=None, kind="stable")[:_SHOWN_HEADS]
    rows = []
    for layer, head in (divmod(int(place), N) for place in order):
        cells = [analysis.show(metric, float(x[layer, head])) for metric, x in found.items()]
        rows.append([f"layer {layer}, head {head}", *cells])
    columns = ["loss change without it (nats)" if of == "knocked_out_head" else analysis.label(of) for of in found]
    return Table(f"{name}, heads with the most attention on the first token", ["", *columns], rows)


def _by_layer(of: Measured) -> dict[int, dict[str, float]]:
    """Returns the metrics of each layer, named without the layer."""
    found: dict[int, dict[str, float]] = {i: {} for i in range(of.config.model.num_layers)}
    for name, value in of.metrics.items():
        metric, _, layer = name.partition("/layer_")
        if layer.isdecimal():
            found[int(layer)][metric] = value
    return found


def curve_pictures(curves: Mapping[str, Mapping[int, Mapping[str, float]]], x_label: str) -> list[Picture]:
    """Draws metrics over layers or steps in the pictures that the catalogue says, with a panel for each metric.

    `curves` is label -> x -> metrics; a metric is drawn if at least two x have it.
    """
    drawn = [metric for metric in analysis.CATALOGUE.values() if metric.curves]
    pictures = []
    for name, log in {metric.curves: metric.log for metric in drawn}.items():
        panels: dict[str, dict[str, figures.Curve]] = {}
        for metric in (metric for metric in drawn if metric.curves == name):
            for label, of in curves.items():
                points = {x: found[metric.name] for x, found in of.items() if metric.name in found}
                if len(points) > 1:
                    panels.setdefault(metric.label, {})[label] = list(points), np.array([list(points.values())])
        if panels:
            figure = figures.lines(panels, x_label=x_label, y_label="", y_scale="log" if log else "linear")
            pictures.append(Picture(f"{name}_by_{x_label}", f"{'; '.join(panels)}, by {x_label}.", figure))
    return pictures
