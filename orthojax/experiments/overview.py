"""All metrics of one model for the console: in groups, with what they mean and what they would be by chance."""

import math
from collections.abc import Mapping

from orthojax.analysis import chance_of_first, gaussian_norm_ratio
from orthojax.config import Config
from orthojax.experiments.labels import LABELS
from orthojax.formatting import align, number, percent

_HIDDEN_STATES = (
    *("kurtosis_first", "kurtosis_rest", "kurtosis_pooled", "max_abs_first", "max_abs_rest"),
    *("max_abs_first_maximum", "max_abs_rest_maximum", "norm_ratio_first", "norm_ratio_rest"),
    *("residual_norm_first", "residual_norm_rest"),
)
_ATTENTION = (
    *("first_attention_fraction", "first_attention_mass", "sink_rate"),
    *("sink_attention", "sink_attention_rest", "sink_logit_gap", "value_norm_first", "value_norm_rest"),
)
_LOSSES = ("perplexity", "loss_nats", "bits_per_byte", "backcopy_risk_nats", "backcopy_excess_risk_nats")
_LOSSES += ("bigram_excess_risk_nats",)
_MEANINGS = LABELS | {
    "perplexity": "exp of the loss",
    "loss_nats": "cross-entropy, nats per token",
    "bits_per_byte": "cross-entropy, bits per byte of text",
    "backcopy_risk_nats": "cross-entropy where the task is to copy, nats",
    "backcopy_excess_risk_nats": "cross-entropy above the law of the data at triggers, nats",
    "bigram_excess_risk_nats": "cross-entropy above the law of the data elsewhere, nats",
    "max_abs_first_maximum": "its maximum over all sequences, first token",
    "max_abs_rest_maximum": "its maximum over all sequences, other tokens",
    "sink_attention": "attention on <s> at non-triggers, largest over layers",
    "sink_attention_rest": "the same without the row of <s> itself",
    "sink_logit_gap": "logit of <s> less the mean of the others, at non-triggers",
}


def overview(metrics: Mapping[str, float], config: Config) -> list[str]:
    """Lines that show metrics of `orthojax.train.evaluate`, without those of single layers.

    Each has the name in evaluation.json, the number, and where there is one a number to compare it with: of a Gaussian
    vector, of a model whose logits are equal, or of attention whose logits are 0.

    Args:
      metrics: Of a model.
      config: Of its run.
    """
    left = {name: value for name, value in metrics.items() if "/" not in name and name != "sequences"}
    count, compared, lines = metrics["sequences"], compared_with(metrics, config), []
    rows, sizes = [], []
    groups = {
        f"loss, {count:.0f} held-out sequences of {config.data.sequence_length} tokens": _LOSSES,
        "hidden states after each block, mean over layers": _HIDDEN_STATES,
        "hidden states after attention, mean over layers": [f"post_attention_{name}" for name in _HIDDEN_STATES],
        "hidden states in the optimizer's basis, mean over layers": [f"rotated_{name}" for name in _HIDDEN_STATES],
        "attention, mean over heads and layers": _ATTENTION,
        "perplexity with quantised linear layers": [name for name in left if name.startswith("perplexity_")],
        "others": list(left),
    }
    for title, names in groups.items():
        found = [name for name in names if name in left]
        rows += [[f"  {name}", f"{left.pop(name):.6g}", compared.get(name, ""), _meaning(name)] for name in found]
        sizes.append((title, len(found)))
    aligned = iter(align(rows))
    for title, size in sizes:
        if size:
            lines += ["", title, *(next(aligned) for _ in range(size))]
    return lines[1:]


def _meaning(name: str) -> str:
    name = name.removeprefix("post_attention_").removeprefix("rotated_")
    base = name.removesuffix("_with_head")
    return _MEANINGS.get(base, "") + (", and the output head" if base != name and base in _MEANINGS else "")


def compared_with(metrics: Mapping[str, float], config: Config) -> dict[str, str]:
    """Metric -> what to compare it with: of a Gaussian vector, of equal logits, of the model in floats."""
    vocabulary, D, T = config.model.vocab_size, config.model.d_model, config.data.sequence_length
    equal = {"perplexity": vocabulary, "loss_nats": math.log(vocabulary)}
    if metrics.get("bits_per_byte"):
        equal["bits_per_byte"] = math.log(vocabulary) * metrics["bits_per_byte"] / metrics["loss_nats"]
    texts = {name: f"{number(value)} if all logits are equal" for name, value in equal.items()}
    largest = gaussian_norm_ratio(D)
    for prefix in ("", "post_attention_", "rotated_"):
        texts |= {f"{prefix}kurtosis_{of}": "3 for a Gaussian" for of in ("first", "rest", "pooled")}
        texts |= {f"{prefix}norm_ratio_{of}": f"{number(largest)} for a Gaussian" for of in ("first", "rest")}
    if config.model.relaxed_causal_tokens < 2:
        chance = chance_of_first(T, window=config.model.attention_window)
        texts["first_attention_fraction"] = f"{number(chance)} by chance"
        if (mass := equal_logits_mass_of_first(config)) is not None:
            texts["first_attention_mass"] = f"{number(mass)} if all logits are 0"
    texts["sink_logit_gap"] = "0 if all logits are equal"
    texts |= dict.fromkeys(("backcopy_excess_risk_nats", "bigram_excess_risk_nats"), "0 for the law of the data")
    for name in metrics:
        if name.startswith("perplexity_") and metrics["perplexity"]:
            texts[name] = f"{percent(metrics[name] / metrics['perplexity'] - 1)} against float"
    return texts


def equal_logits_mass_of_first(config: Config) -> float | None:
    """Mean weight on the first token of a row if all logits were 0, that of a learned sink too.

    Args:
      config: Of a model and its rows.

    Returns:
      None for normalizers that give keys of equal logits no share of a sum, as ReLU and sigmoid.
    """
    model = config.model
    n = {"softmax": 0.0, "softmax1": 1.0, "learned_sink": 1.0, "softmax_n": model.normalizer_n}.get(model.normalizer)
    return None if n is None else chance_of_first(config.data.sequence_length, n=n, window=model.attention_window)
