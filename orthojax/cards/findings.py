"""What is wrong with a model, through what, and what was measured to help: three sentences made from its card."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orthojax.analysis import gaussian_max_over_median
from orthojax.cards.rounding import fails
from orthojax.formatting import number, percent, share

_STANDS_OUT = 5.0  # times the level of a Gaussian
_DESTROYED = 9.0  # relative loss of perplexity from which a difference of losses says little
_OTHERS = 2  # formats whose best remedy is named as well
_REMEDIES = {
    "_per_token": "scales for each token",
    "_float_first": "the first token in float",
    "_rotated": "a rotation",
}
Card = Mapping[str, Any]


class Finding(NamedTuple):
    """A sentence, and where its numbers stand on the page: (words, key of the table, name of the row or '')."""

    says: str
    rows: Sequence[tuple[str, str, str]] = ()


def findings(card: Card) -> list[Finding]:
    """Returns what is massive, what fails through it, and what to do; what was not measured is said to be so.

    A format fails as `orthojax.cards.rounding.fails` says. Names of tables are those of `orthojax.cards.page`, after
    the name of the model.
    """
    return [_massive(card), _failing(card), _to_do(card)]


def with_error(entry: Mapping[str, Any], name: str, suffix: str = "", show: Any = number) -> str:
    """Returns a number of an entry with its standard error: '0.31 ± 0.02'; '-' if it is missing."""
    value, error = entry.get(f"{name}{suffix}"), entry.get(f"{name}{suffix}_se")
    if value is None:
        return "-"
    return show(value) if error is None else f"{show(value)} ± {show(float(f'{error:.2g}')).lstrip('+')}"


def _massive(card: Card) -> Finding:
    entries = card.get("largest_activations")
    if not entries:
        return Finding("Massive activations: not measured.")
    of = max(entries, key=lambda entry: (entry.get("massive", False), entry.get("over_median", 0.0), entry["value"]))
    about, text = card["model"], card.get("measured", {}).get("text", {})
    level = None
    if "d_model" in about and "length" in text:
        level = gaussian_max_over_median(about["d_model"] * text["length"])
    ratio = of.get("over_median")
    if of.get("massive"):
        head = "Massive"
    elif ratio is None or level is None:
        head = "Not known to be massive"
    else:
        head = "Large, not massive" if ratio > _STANDS_OUT * level else "Nothing is massive"
    words = {
        "channel": "channel {}",
        "text": "of the token {!r}",
        "position": "at position {}",
        "layer": "after layer {}",
    }
    where = " ".join(text.format(of[key]) for key, text in words.items() if key in of) or "one channel"
    beside = "" if ratio is None else f", {number(ratio)} times the median"
    beside += "" if ratio is None or level is None else f" (a Gaussian: {number(level)})"
    return Finding(f"{head}: {where} has |x| = {number(of['value'])}{beside}. {_sinks(card)}",
                   [("largest activations", "largest", ""), ("sinks", "attention", "sink_rate")])  # fmt: skip


def _sinks(card: Card) -> str:
    rate = next((metric["value"] for metric in card["metrics"] if metric["name"] == "sink_rate"), None)
    if rate is None:
        return "Sinks: not measured."
    heads = f"{share(rate)} of the heads" if rate else "No head"
    return f"{heads} {'have' if rate else 'has'} over 30% of {'their' if rate else 'its'} attention on the first token."


def failing(card: Card) -> list[Mapping[str, Any]]:
    """Returns the formats of a card that fail: those with the most bits first, then those that lose most."""
    return sorted((entry for entry in card.get("rounding", ()) if fails(entry)),
                  key=lambda entry: (-entry.get("bits", 0), -entry.get("kl_nats", float("inf"))))  # fmt: skip


def _failing(card: Card) -> Finding:
    formats, failed = card.get("rounding", ()), failing(card)
    known = [entry for entry in formats if fails(entry) is not None]
    unknown = [entry["format"] for entry in formats if fails(entry) is None]
    missing = f" Not measured: {', '.join(unknown)}." if unknown else ""
    if not known:
        return Finding("Rounding: not measured.")
    if not failed:
        worst = max(known, key=lambda entry: entry["kl_nats"])
        return Finding(f"None of {len(known)} formats fails: the worst, {_costs(worst)}.{missing}",
                       [(worst["format"], "rounding", worst["format"])])  # fmt: skip
    worst = failed[0]
    if "loss_added_nats" not in worst:
        says = f"{worst['format']} fails: {worst['left_out']}"
    else:
        says = f"{_costs(worst)}{_through(worst)}"
    others = f" Of {len(known)} formats {len(failed)} fail" + (
        f", also {', '.join(entry['format'] for entry in failed[1:])}." if failed[1:] else "."
    )
    return Finding(f"Fails: {says}.{others}{missing}", [(worst["format"], "rounding", worst["format"])])


def _costs(entry: Mapping[str, Any]) -> str:
    loss = with_error(entry, "loss_added_nats")
    return (f"{entry['format']}, adds {loss} nats to the loss ({percent(entry['lost'])} perplexity): KL "
            f"{with_error(entry, 'kl_nats')}, the same likeliest token at {share(entry['agreement'])}")  # fmt: skip


def _through(entry: Mapping[str, Any]) -> str:
    """Returns the part of the loss that the first token brings."""
    if "d_sink_nats" not in entry:
        return ""
    words = f"; of this D_sink, {with_error(entry, 'd_sink_nats')} nats, goes if the first token is float"
    return words + (", which says little of a destroyed model" if entry["lost"] > _DESTROYED else "")


def remedies(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns what was tried for a format, in words -> share of the KL divergence that it recovers, best first.

    Of the layers in float it is the fewest that recover half, or all three.
    """
    if not entry.get("kl_nats"):
        return {}
    tried = {words: entry.get(f"kl_nats{suffix}") for suffix, words in _REMEDIES.items()}
    layers = [of for of in entry.get("float_layers", ()) if "kl_nats" in of]
    if layers:
        of = next((of for of in layers if of["kl_nats"] < entry["kl_nats"] / 2), layers[-1])
        tried[f"{' and '.join(of['layers'])} in float"] = of["kl_nats"]
    recovered = {words: 1 - kl / entry["kl_nats"] for words, kl in tried.items() if kl is not None}
    return dict(sorted(recovered.items(), key=lambda item: -item[1]))


def _to_do(card: Card) -> Finding:
    failed = failing(card)
    if not failed:
        known = any(fails(entry) is not None for entry in card.get("rounding", ()))
        return Finding("Nothing to do: these formats cost little." if known else "What to do: not measured.")
    says = [_advice(entry["format"], remedies(entry), entry) for entry in failed[: 1 + _OTHERS]]
    return Finding(" ".join(says), [(entry["format"], "helps", entry["format"]) for entry in failed[: 1 + _OTHERS]])


def _advice(name: str, recovered: Mapping[str, float], entry: Mapping[str, Any]) -> str:
    if not recovered:
        return f"For {name} nothing was tried."
    (best, much), *rest = recovered.items()
    others = f" ({_listed(rest)})" if rest else ""
    if much <= 0:
        return f"For {name} nothing that was tried helps."
    half = "" if much > 0.5 else f"Nothing recovers half of what {name} loses; "
    return f"{half or f'For {name}, '}{best} recovers {share(much)} of the KL divergence{others}."


def _listed(rest: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{words}: {share(much) if much > 0 else 'nothing'}" for words, much in rest)
