"""The catalogue of metrics: label, unit, definition, range and level of chance of every name in results and tables.

Names with a suffix or prefix are resolved to the entry that they modify: `kurtosis_first/layer_3`,
`post_attention_kurtosis_first`, `rotated_kurtosis_first`, `perplexity_int8_coarse`, `perplexity_w4a8_with_head`.

An entry describes a metric in one sentence; the function of the same name in `orthojax.analysis` defines it in full,
with its equation and source.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orthojax.analysis.activations import gaussian_max_over_median, gaussian_norm_ratio
from orthojax.analysis.attention import chance_of_first
from orthojax.config import Config
from orthojax.formatting import number, percent, share


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The circumstances on which levels of chance depend.

    Attributes:
      length: T, tokens of a row.
      d_model: D, channels of a hidden state.
      vocab_size: V, token ids.
      n: The constant in the denominator of softmax_n, 0 for softmax and 1 for softmax-1; None for normalizers without a
        sum, such as ReLU and sigmoid.
      windows: Maximum number of keys that a query sees, one for each layer or one for all; None for no limit.
      bos_tokens: BOS tokens at the start of a row.
      causal: False if the mask shows several tokens to each other, so that no token is the first.
    """

    length: int
    d_model: int
    vocab_size: int
    n: float | None = 0.0
    windows: tuple[int | None, ...] = (None,)
    bos_tokens: int = 1
    causal: bool = True


def conditions(config: Config) -> Conditions:
    """Returns the conditions of a model and the rows it reads."""
    model = config.model
    windows = model.attention_window
    n = {"softmax": 0.0, "softmax1": 1.0, "learned_sink": 1.0, "softmax_n": model.normalizer_n}.get(model.normalizer)
    return Conditions(
        length=config.data.sequence_length,
        d_model=model.d_model,
        vocab_size=model.vocab_size,
        n=n,
        windows=windows if isinstance(windows, tuple) else (windows,),
        bos_tokens=max(1, config.data.bos_tokens),
        causal=model.relaxed_causal_tokens < 2,
    )


@dataclasses.dataclass(frozen=True)
class Definition:
    """One metric.

    Attributes:
      name: The key in results.json, evaluation.json or metrics.jsonl.
      label: The name that people read, in tables and figures.
      unit: "nats", "bits", "fraction", "tokens/s"; "" for numbers without one.
      definition: One sentence.
      chance: Conditions -> the value if nothing stands out; None without such a level.
      chance_words: The case that the level of chance describes.
      low: The smallest value that it may have, up to rounding.
      high: The largest.
      source: Whose measure it is; "" if it is common or ours.
      curves: The metric whose picture of curves, over layers or steps, has a panel for it; "" if it is not drawn.
      log: Whether that picture has a logarithmic axis.
      group: "loss", "hidden states", "attention", "quantisation" or "training".
    """

    name: str
    label: str
    unit: str
    definition: str
    chance: Callable[[Conditions], float | None] | None = None
    chance_words: str = ""
    _: dataclasses.KW_ONLY
    low: float = -math.inf
    high: float = math.inf
    source: str = ""
    curves: str = ""
    log: bool = False
    group: str = ""

    @property
    def fraction(self) -> bool:
        """Whether it is a fraction of a whole, written in percent."""
        return self.unit == "fraction"


def _mean_over_layers(given: Conditions, n: float = 0.0) -> float:
    of_layers = [chance_of_first(given.length, n=n, window=window) for window in given.windows]
    return sum(of_layers) / len(of_layers)


def _most_attended(given: Conditions) -> float | None:
    return _mean_over_layers(given) if given.causal else None


def _mass(given: Conditions) -> float | None:
    if given.n is None or not given.causal:
        return None
    return _mean_over_layers(given, n=given.n)


def _bos_mass(given: Conditions, start: int = 0) -> float | None:
    """Returns the mean over queries from `start` on; triggers, which the metric leaves out, are a little later."""
    if given.n is None or not given.causal:
        return None
    t = np.arange(start, given.length)
    return float(np.mean(np.minimum(given.bos_tokens, t + 1) / (t + 1 + given.n)))


_EQUAL, _ZERO, _GAUSSIAN = "if all logits are equal", "if all attention logits are 0", "for a Gaussian"
_LAW = "for the law of the data"
_OUTLIERS, _SINKS = "From Attention to Activation, arXiv 2410.17174", "Active-Dormant Attention Heads, arXiv 2410.13835"
_KURTOSIS = f"{_OUTLIERS}, Eq. 2 and Table 2"
_GU = "When Attention Sink Emerges in Language Models, arXiv 2410.10781"


def _both(
    name: str, label: str, definition: str, chance: Callable[[Conditions], float] | None = None, **more: Any
) -> list[Definition]:
    """Returns the entries of a metric of the first token and of the others; {} in the definition stands for which."""
    more = {"chance_words": _GAUSSIAN if chance else "", "curves": f"{name}_first", "log": True} | more
    kinds = {"first": ("first token", "at position 0"), "rest": ("other tokens", "at later positions")}
    return [
        Definition(f"{name}_{kind}", f"{label}, {which}", "", definition.format(where), chance, **more)
        for kind, (which, where) in kinds.items()
    ]


_LOSSES = [
    Definition("perplexity", "perplexity", "", "Exponential of the mean cross-entropy per token.",
               lambda c: c.vocab_size, _EQUAL, low=1),
    Definition("sliding_perplexity", "perplexity, sliding window", "",
               "Exponential of the mean cross-entropy of all tokens of a text, each in the first window that has it.",
               lambda c: c.vocab_size, _EQUAL, low=1),
    Definition("loss_nats", "loss (nats)", "nats", "Mean cross-entropy of the next token.",
               lambda c: math.log(c.vocab_size), _EQUAL, low=0, curves="loss_nats"),
    Definition("bits_per_byte", "bits per byte", "bits", "Cross-entropy per byte of the text.", low=0),
    Definition("backcopy_risk_nats", "backcopy risk (nats)", "nats",
               "Cross-entropy under the law of the data where the task is to copy."),
    Definition("backcopy_excess_risk_nats", "backcopy excess risk (nats)", "nats",
               "Cross-entropy above that of the law of the data at triggers.", lambda c: 0.0, _LAW),
    Definition("bigram_excess_risk_nats", "bigram excess risk (nats)", "nats",
               "Cross-entropy above that of the law of the data at all other tokens.", lambda c: 0.0, _LAW),
]  # fmt: skip
_HIDDEN_STATES = [
    *_both("kurtosis", "kurtosis", "Raw kurtosis over channels {}, mean over sequences and layers.", lambda c: 3.0,
           low=0, source=_KURTOSIS),
    Definition("kurtosis_pooled", "kurtosis, all tokens", "",
               "Raw kurtosis over channels, mean over all positions, sequences and layers.", lambda c: 3.0, _GAUSSIAN,
               low=0, source=_KURTOSIS),
    *_both("max_abs", "max |activation|", "Largest |x| over channels {}, mean over sequences and layers.",
           low=0, source=f"{_OUTLIERS}, Table 2"),
    Definition("max_abs_first_maximum", "max |activation| over the whole set, first token", "",
               "Largest |x| at position 0 of all sequences and layers; grows with their number.", low=0),
    Definition("max_abs_rest_maximum", "max |activation| over the whole set, other tokens", "",
               "Largest |x| at later positions of all sequences and layers; grows with their number.", low=0),
    *_both("norm_ratio", "max / l2 norm", "max|x| / ||x||_2 {}, mean over sequences and layers.",
           lambda c: gaussian_norm_ratio(c.d_model), low=0, source=f"{_OUTLIERS}, section 4.2", curves=""),
    *_both("residual_norm", "residual norm", "||x||_2 after a block {}, mean over sequences and layers.",
           source=f"{_SINKS}, residual-state peaks"),
]  # fmt: skip
_SPECIAL = [
    Definition("kurtosis_special", "kurtosis, special tokens", "",
               "Raw kurtosis over channels at later special tokens, such as separators, mean over layers.",
               lambda c: 3.0, _GAUSSIAN, low=0),
    Definition("max_abs_special", "max |activation|, special tokens", "",
               "Largest |x| over channels at a later special token, mean over them and layers.", low=0),
]  # fmt: skip
_PEAKS = [
    Definition("residual_peak", "residual norm, <s> less others", "", "Residual norm of <s> less the others' mean."),
    Definition("residual_peak_ratio", "residual norm, <s> over others", "",
               "Residual norm of <s> over the others' mean."),
]  # fmt: skip
_PREDICTORS = [  # the excess kurtosis of a Gaussian is nearly normal, with variance 24 / D
    Definition("osp_kurtosis", "excess kurtosis of OSP", "",
               "mean(x^4) / std(x)^4 - 3 over channels, at least 0 and not centred, mean over tokens, embeddings and "
               "layers.", lambda c: math.sqrt(12 / (math.pi * c.d_model)), "about, for a wide Gaussian",
               low=0, source="Outlier-Safe Pre-Training, arXiv 2506.19697, its code"),
    Definition("max_over_median", "max / median |activation|", "",
               "max|x| / median|x| of a layer's input, mean over sequences and layers.",
               lambda c: gaussian_max_over_median(c.d_model * c.length), _GAUSSIAN,
               low=1, source="Beyond Outliers, arXiv 2509.23500"),
]  # fmt: skip
_ATTENTION = [
    Definition("first_attention_fraction", "first token gets most attention", "fraction",
               "Fraction of (query, head) pairs whose strictly largest weight is on key 0.",
               _most_attended, "by chance", low=0, high=1, source=f"{_OUTLIERS}, Table 2",
               curves="first_attention_fraction"),
    Definition("first_attention_mass", "attention mass on the first token", "fraction",
               "Mean weight on key 0 over queries, heads and layers.", _mass, _ZERO,
               curves="first_attention_fraction"),  # weights of ReLU attention may exceed 1
    Definition("sink_rate", "sink heads", "fraction",
               "Fraction of heads whose mean weight on key 0 is above 0.3.", low=0, high=1,
               curves="first_attention_fraction"),
    Definition("gu_sink_rate", "sinks at the first token", "fraction",
               "Fraction of (sequence, head) whose mean weight on key 0 is above 0.3.", low=0, high=1, source=_GU),
    Definition("gu_sink_rate_any", "sinks at any token", "fraction",
               "Fraction of (sequence, head) whose mean weight on a key, over the queries that see it, is above 0.3.",
               low=0, high=1, source=_GU),
    Definition("null_mass", "attention to no token", "fraction", "1 - sum of a row of weights, mean over queries."),
    Definition("attention_entropy_nats", "entropy of attention (nats)", "nats",
               "Entropy of a row of weights, the unused mass as one more key.", curves="attention_entropy_nats"),
    *_both("value_norm", "value norm", "||W_o v||_2 of the value {}, mean over heads, sequences and layers.",
           source=f"{_SINKS}, value-state drains"),
    Definition("value_drain", "value norm, <s> over others", "", "Value norm of <s> over the others' mean.",
               source=f"{_SINKS}, value-state drains"),
    Definition("sink_attention", "attention of non-triggers to <s>, its own row with it", "fraction",
               "Mean weight on <s> at tokens that are no triggers, mean over heads, largest over layers.",
               _bos_mass, _ZERO),
    Definition("sink_attention_rest", "attention of non-triggers to <s>", "fraction",
               "`sink_attention` without the row of <s> itself.", lambda c: _bos_mass(c, c.bos_tokens), _ZERO),
    Definition("sink_logit", "logit on <s>", "", "Mean attention logit on <s> at tokens that are no triggers."),
    Definition("sink_logit_gap", "sink logit gap", "",
               "Attention logit on key 0 less the mean over keys between it and the query, triggers left out.",
               lambda c: 0.0, _EQUAL, source=f"{_SINKS}, Delta logit", curves="sink_logit_gap"),
    Definition("sink_logit_gap_tokens", "sink logit gap, mean over tokens", "",
               "`sink_logit_gap` with equal weight on each token of the vocabulary.", lambda c: 0.0, _EQUAL),
    *(Definition(f"sink_logit_gap_q{q}", f"sink logit gap, {q}% quantile over tokens", "",
                 f"{q}% quantile of `sink_logit_gap` over tokens of the vocabulary.") for q in (10, 90)),
    Definition("max_attention_logit", "max attention logit", "",
               "Largest attention logit over rows, queries, the keys that they see, heads and layers.",
               source="S_max of QK-clip, Kimi K2, arXiv 2507.20534"),
    Definition("sink_logit_spread", "spread of logits on <s>", "",
               "Standard deviation over queries of the attention logit on <s>."),
    Definition("other_logit_spread", "spread of logits on other tokens", "",
               "Standard deviation over queries of the logit on one token as key, mean over tokens."),
    Definition("active_at_triggers", "heads active at triggers", "fraction",
               "Fraction of trigger queries at which a head writes a tenth of its largest activity or more.",
               low=0, high=1),
    Definition("active_elsewhere", "heads active at other tokens", "fraction",
               "Fraction of other queries at which a head writes a tenth of its largest activity or more.",
               low=0, high=1),
]  # fmt: skip
_TRAINING = [
    Definition("validation_loss_nats", "held-out loss (nats)", "nats", "Mean cross-entropy on held-out tokens.",
               lambda c: math.log(c.vocab_size), _EQUAL, low=0, curves="loss_nats"),
    Definition("learning_rate", "learning rate", "", "Learning rate of the step."),
    Definition("grad_norm", "gradient norm", "", "l2 norm of the gradient of all parameters.", curves="grad_norm",
               log=True),
    Definition("tokens_per_second", "tokens per second", "tokens/s", "Training tokens per second since the last line."),
    Definition("mfu", "MFU", "fraction", "Model FLOP/s over the peak of the device."),
    Definition("d_model", "width D", "", "Channels of a hidden state."),
    Definition("num_layers", "layers", "", "Blocks of the model."),
]  # fmt: skip

HIDDEN_STATES = tuple(d.name for d in _HIDDEN_STATES)  # functions of `activations` have these names
_GROUPS = {"loss": _LOSSES, "hidden states": _HIDDEN_STATES + _SPECIAL + _PEAKS + _PREDICTORS, "attention": _ATTENTION}
_GROUPS |= {"training": _TRAINING}
CATALOGUE: dict[str, Definition] = {
    d.name: dataclasses.replace(d, group=group) for group, entries in _GROUPS.items() for d in entries
}
_PREFIXES = {"post_attention_": "after attention", "rotated_": "in the optimizer's basis"}


def define(name: str) -> Definition | None:
    """Returns the definition behind a metric's name, including its layer, prefix and suffix; None for unknown names.

    >>> define("rotated_kurtosis_first/layer_2").label
    "kurtosis, first token, in the optimizer's basis, layer 2"
    >>> define("perplexity_w4a8_with_head").label
    'perplexity, w4a8, with the head'
    """
    base, *places = name.split("/")
    words = [place.replace("_", " ") for place in places if re.fullmatch(r"(layer|head)_\d+", place)]
    if len(words) < len(places):
        return None
    for prefix, where in _PREFIXES.items():
        if base.startswith(prefix):
            base, words = base.removeprefix(prefix), [where, *words]
    definition = CATALOGUE.get(base)
    if definition is None and base.startswith("perplexity_"):
        definition = _quantised(base.removeprefix("perplexity_"))
    if definition is None:
        return None
    return dataclasses.replace(definition, name=name, label=", ".join([definition.label, *words]))


def _quantised(setting: str) -> Definition:
    head = setting.endswith("_with_head")
    words = setting.removesuffix("_with_head").replace("_", " ")
    layers = "linear layers and the output head" if head else "linear layers"
    definition = f"Perplexity with {layers} quantised as {words} in `orthojax.quant`."
    label = f"perplexity, {words}, with the head" if head else f"perplexity, {words}"
    return Definition("", label, "", definition, low=1, group="quantisation")


def label(name: str) -> str:
    """Returns the label of a metric for tables, claims and figures; for an unknown one, its name without underscores.

    >>> label("kurtosis_first"), label("perplexity_int8_coarse")
    ('kurtosis, first token', 'perplexity, int8 coarse')
    """
    definition = define(name)
    return name.replace("_", " ") if definition is None else definition.label


@functools.cache
def limits(name: str) -> tuple[float, float]:
    """Returns the smallest and the largest value that a metric may have; for an unknown one, any.

    >>> limits("sink_rate/layer_0"), limits("perplexity"), limits("of_an_experiment")
    ((0, 1), (1, inf), (-inf, inf))
    """
    definition = define(name.partition("/")[0])
    return (-math.inf, math.inf) if definition is None else (definition.low, definition.high)


def chance(name: str, given: Conditions) -> float | None:
    """Returns the level of chance of a metric, None if it has none or is unknown.

    >>> round(chance("first_attention_mass", Conditions(length=64, d_model=128, vocab_size=512)), 3)
    0.074
    """
    definition, layer = define(name), re.search(r"/layer_(\d+)", name)
    if layer and 1 < len(given.windows):
        given = dataclasses.replace(given, windows=given.windows[int(layer[1]) :][:1])
    return None if definition is None or definition.chance is None else definition.chance(given)


def show(name: str, value: float) -> str:
    """Returns a value of a metric as text, fractions in percent.

    >>> show("loss_nats", 4.16312), show("kurtosis_first", 14731.6), show("first_attention_mass/layer_0", 0.2813)
    ('4.16', '14,732', '28.1%')
    """
    definition = define(name)
    return share(value) if definition is not None and definition.fraction else number(value)


def compared_with(name: str, metrics: Mapping[str, float], given: Conditions) -> str:
    """Returns in words what a number is compared with: its level of chance, or for quantised models the float one.

    Args:
      name: Name of the metric.
      metrics: Metrics of the same model, by name.
      given: The model and its rows.

    >>> compared_with("kurtosis_rest", {}, Conditions(64, 128, 512))
    '3 for a Gaussian'
    >>> metrics = {"perplexity": 10.0, "perplexity_w4a8": 11.0}
    >>> compared_with("perplexity_w4a8", metrics, Conditions(64, 128, 512))
    '+10% against float'
    """
    definition = define(name)
    if definition is None:
        return ""
    if definition.group == "quantisation":
        return f"{percent(metrics[name] / metrics['perplexity'] - 1)} against float" if metrics["perplexity"] else ""
    level = chance(name, given)
    return "" if level is None else f"{show(name, level)} {definition.chance_words}"
