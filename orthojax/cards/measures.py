"""The measurement of a model for its card, in stages that are kept."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orthojax import analysis, quant
from orthojax.cards.rounding import Rounding, mean_and_error
from orthojax.config import Config
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError
from orthojax.files import finite, kept, read_with_digest
from orthojax.model import LoadedModel
from orthojax.ops.cross_entropy import perplexity
from orthojax.train import Inputs, evaluate_by_head
from orthojax.train.evaluation import Settings, knock_out, sliding_loss_nats, streamed_perplexities

FORMATS = ("int8_fine", "int8_moderate", "int8_coarse", "int4_zeropoint", "w4a4", "w4a4kv4",
           *(name for name in quant.FLOATS if name != "fp8_e5m2"))  # fmt: skip  # E5M2 is for gradients
QUICK = ("int8_coarse", "w4a4")
ROTATED = (*QUICK, *(name for name in quant.FLOATS if quant.setting_named(name).bits == 4))
CACHES = {"kv8": (8, 0), "kv4": (4, 0), "kv4_float_first": (4, 1)}  # bits, and first tokens in float
SINKS = 4  # tokens that stay in view when a text is streamed
_STREAMED_ROWS, _SPREAD_ROWS = 4, 8

Plan = dict[str, tuple[Callable[[], dict[str, Any]], tuple[Any, ...]]]  # stage -> its function, and options of it


class Stages:
    """The finished parts of a measurement, each in its own file."""

    def __init__(self, folder: Path | None, subject: Any = None, say: Callable[[str], object] = lambda what: None):
        """Keeps parts in an existing folder, None for none; those there of the same JSON value `subject` are reused."""
        self._folder, self._subject, self._say = folder, subject, say

    def __call__(self, name: str, compute: Callable[[], Any], *options: Any) -> Any:
        """Returns the JSON value that `compute` makes, or made earlier with these options; arrays become lists.

        For a UserError it is {"left_out": its message}, and is not kept.
        """
        plain = lambda: json.loads(json.dumps(compute(), default=lambda array: array.tolist()))  # noqa: E731
        try:
            part = self._kept(self._folder, name, plain, options) if self._folder else plain()
        except UserError as error:
            part = {"left_out": str(error).partition("\n")[0]}
        self._say(name)
        return part

    def _kept(self, folder: Path, name: str, compute: Callable[[], Any], options: Any) -> Any:
        path, subject = folder / f"{name}.json", json.dumps({"of": self._subject, "with": options})
        key, kept_key = hashlib.sha256(subject.encode()).hexdigest(), None
        with contextlib.suppress(UserError):  # a missing or damaged part is computed
            kept_key = read_with_digest(path, "stage").get("of")
        if kept_key != key:
            path.unlink(missing_ok=True)
        return kept(path, "stage", lambda: {"of": key, "found": compute()})["found"]


def default_settings(quick: bool = False) -> Settings:
    """Returns the quantisation settings of a card, or two of them, by name."""
    return {name: quant.setting_named(name) for name in (QUICK if quick else FORMATS)}


class Measured(NamedTuple):
    """A measured model."""

    config: Config
    metrics: dict[str, float]  # the finite ones
    arrays: dict[str, np.ndarray]  # by head or channel, of `evaluate_by_head` and `knock_out`
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
    return Measured(loaded.config, **_statistics(loaded, inputs))


def _statistics(loaded: LoadedModel, inputs: Inputs, *, errors: bool = False) -> dict[str, Any]:
    model, rows, T = loaded.config.model, inputs.evaluation, inputs.evaluation.shape[1] - 1
    if rows.min() < 0 or rows.max() >= model.vocab_size:
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise UserError(f"token id {wrong} is not the model's", allowed=f"0 to {model.vocab_size - 1}")
    if model.position == "learned" and model.max_length < T:
        raise UserError(f"rows of {T} tokens are longer than the model's positions", allowed=f"1 to {model.max_length}")
    metrics, arrays, extremes = evaluate_by_head(loaded, inputs)
    metrics = finite(metrics)
    tokens, sections = rows[:, :T], {"largest_activations": [], "secondary_sinks": []}
    if extremes is not None:
        sections["largest_activations"] = analysis.largest_activations(extremes, tokens)
        sections["secondary_sinks"] = analysis.secondary_sinks(extremes, tokens)
    named = {
        section: [entry._asdict() | {"text": token_text(loaded.tokenizer, entry.token)} for entry in entries]
        for section, entries in sections.items()
    }
    return {
        "metrics": metrics,
        "arrays": arrays,
        "sections": named | {"errors": _errors(loaded, inputs) if errors else {}},
    }


def _errors(loaded: LoadedModel, inputs: Inputs) -> dict[str, float]:
    """Returns the standard errors over rows of the metrics that are means over rows, from at most 8 of them."""
    if (n := len(inputs.evaluation)) < 2:
        return {}
    some = np.linspace(0, n - 1, min(n, _SPREAD_ROWS)).astype(int)
    # Of sink_rate it is the mean over rows that exceeds a limit: it is no mean of what single rows have.
    no_means = re.compile(r"sink_rate(/|$)|max_attention|.*_maximum$")
    by_row = [evaluate_by_head(loaded, inputs._replace(evaluation=inputs.evaluation[i : i + 1]))[0] for i in some]
    spread = {name: np.array([of[name] for of in by_row]) for name in by_row[0]}
    found = {
        name: mean_and_error("of", x)["of_se"] * (len(some) / n) ** 0.5
        for name, x in spread.items()
        if np.isfinite(x).all() and not no_means.match(name)
    }
    if "perplexity" in found:
        found["perplexity"] = perplexity(float(spread["loss_nats"].mean())) * found["loss_nats"]
    return finite(found)


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
    sliding: tuple[np.ndarray, int] | None = None,
    streamed: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Returns the stages of `measure` in order.

    Args:
      loaded: The model, with length and batch of the evaluation in its config: see `prepared`.
      inputs: Rows of text.
      settings: Quantisation by name.
      quick: Leave out rotation, layers in float, caches, streaming and the metrics' errors.
      quantize_head: Also round the output head.
      knock_out_rows: Number of rows on which every part is removed in turn.
      sliding: Tokens of a text, int32 [tokens], and how far apart windows over it begin.
      streamed: Tokens in view and how many of them are the first of the row, for each streaming to add.
    """
    stages: Plan = {"statistics": (lambda: _statistics(loaded, inputs, errors=not quick), (quick,))}
    rounding, options = Rounding(loaded, inputs), {"quick": quick, "quantize_head": quantize_head}
    for name, setting in settings.items():
        stages[name] = functools.partial(rounding.of_format, setting, **options), tuple(options.values())
    if not quick:
        for name in filter(settings.__contains__, ROTATED):
            stages[f"{name}_rotated"] = functools.partial(rounding.rotated, settings[name]), ()
        stages |= {name: (functools.partial(rounding.cached, *cache), ()) for name, cache in CACHES.items()}
    if knock_out_rows:
        stages["knock_out"] = lambda: knock_out(loaded, inputs, knock_out_rows), (knock_out_rows,)
    if sliding is not None:
        tokens, T = sliding[0], inputs.evaluation.shape[1] - 1
        which = hashlib.sha256(tokens.tobytes()).hexdigest(), T, sliding[1]
        stages["sliding"] = lambda: {"loss_nats": sliding_loss_nats(loaded, tokens, T, sliding[1])}, which
    if streamed or not quick:
        rows = inputs.evaluation[:_STREAMED_ROWS]
        stages["streaming"] = lambda: streamed_perplexities(loaded, rows, SINKS, streamed), tuple(streamed)
    return stages


def measure(loaded: LoadedModel, settings: Settings, plan: Plan, stages: Stages) -> Measured:
    """Measures a model by a plan for it and these settings, whose stages are kept.

    Raises:
      UserError: As for `measure_model`.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, (compute, chosen) in plan.items():
        parts[name] = stages(name, compute, *chosen)
        # What was asked for by name; streaming has then a window and a number of first tokens.
        asked = name in ("statistics", "sliding") or (name == "streaming" and chosen)
        if asked and "left_out" in parts[name]:
            raise UserError(parts[name]["left_out"])
    metrics, arrays, sections = (dict(parts["statistics"][key]) for key in ("metrics", "arrays", "sections"))
    model, part = loaded.config.model, lambda name: parts.get(name, {})
    metrics |= {f"perplexity_{name}{suffix}": part(name)[f"perplexity{suffix}"] for name in settings
                for suffix in ("", "_with_head") if f"perplexity{suffix}" in part(name)}  # fmt: skip
    if "sliding" in parts:
        metrics["sliding_perplexity"] = perplexity(parts["sliding"]["loss_nats"])
    arrays |= {key: value for key, value in part("knock_out").items() if key != "left_out"}
    sections["rounding"] = [
        {"format": name, "bits": of.bits} | part(f"{name}_rotated") | part(name) for name, of in settings.items()
    ]
    # Besides its bits, each head's keys have a scale and a smallest value of 16, as have its values.
    sections["kv_cache"] = [
        {"format": name, "bytes_per_token": model.num_layers * model.kv_heads
         * ((model.head_dim + model.value_dim) * bits / 8 + 2 * 4)} | parts[name]
        for name, (bits, _) in CACHES.items() if name in parts
    ]  # fmt: skip
    sections["streaming"] = part("streaming")
    return Measured(loaded.config, metrics, {name: np.array(array) for name, array in arrays.items()}, sections)
