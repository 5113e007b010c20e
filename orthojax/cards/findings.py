"""What is wrong with a model, through what, and what was measured to help: three sentences made from its card."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orthojax.analysis import gaussian_max_over_median
from orthojax.cards.rounding import fails
from orthojax.formatting import number, percent, share

_STANDS_OUT = 5.0  # times the level of a Gaussian
_DESTROYED = 9.0  # relative loss of perplexity from which a difference of losses says little
_OTHERS = 2  # formats whose best remedy is named as well
REMEDIES = {
    "_per_token": "scales for each token",
    "_float_first": "the first token in float",
    "_rotated": "a rotation",
    "_float_layers": "layers in float",
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


def with_error(entry: Card, name: str, show: Any = number) -> str:
    """Returns a number of an entry with its standard error: '0.31 ± 0.02'; '-' if it is missing."""
    value, error = entry.get(name), entry.get(f"{name}_se")
    if value is None:
        return "-"
    return show(value) if error is None else f"{show(value)} ± {show(float(f'{error:.2g}')).lstrip('+')}"


def _massive(card: Card) -> Finding:
    entries = card.get("largest_activations")
    if not entries:
        return Finding("Massive activations: not measured.")
    of = max(entries, key=lambda entry: (entry.get("massive", False), entry.get("over_median", 0.0), entry["value"]))
    width, text = card["model"].get("d_model"), card.get("measured", {}).get("text", {})
    ratio, level, head, beside = of.get("over_median"), math.nan, "Not known to be massive", ""
    if ratio is not None:
        beside = f", {number(ratio)} times the median"
        if width and "length" in text:
            level = gaussian_max_over_median(width * text["length"])
            beside += f" (a Gaussian: {number(level)})"
            head = "Large, not massive" if ratio > _STANDS_OUT * level else "Nothing is massive"
    words = {"channel": "channel {}", "text": "of {!r}", "position": "at position {}", "layer": "after layer {}"}
    where = " ".join(text.format(of[key]) for key, text in words.items() if key in of) or "one channel"
    head = "Massive" if of.get("massive") else head
    return Finding(f"{head}: {where} has |x| = {number(of['value'])}{beside}. {_sinks(card)}",
                   [("largest activations", "largest", ""), ("sinks", "attention", "sink_rate")])  # fmt: skip


def _sinks(card: Card) -> str:
    rate = next((metric["value"] for metric in card["metrics"] if metric["name"] == "sink_rate"), None)
    if rate is None:
        return "Sinks: not measured."
    on_first = "over 30% of {} weight on the first token"
    if not rate:
        return f"No head is a sink: none puts {on_first.format('its')}."
    return f"{share(rate)} of the heads are sinks: they put {on_first.format('their')}."


def failing(card: Card) -> list[Card]:
    """Returns the formats of a card that fail: those with the most bits first, then those that lose most."""
    return sorted((entry for entry in card.get("rounding", ()) if fails(entry)),
                  key=lambda entry: (-entry.get("bits", 0), -entry.get("kl_nats", math.inf)))  # fmt: skip


def _failing(card: Card) -> Finding:
    formats, failed = card.get("rounding", ()), failing(card)
    known = [entry for entry in formats if fails(entry) is not None]
    unknown = [entry["format"] for entry in formats if fails(entry) is None]
    missing = f" Not measured: {', '.join(unknown)}." if unknown else ""
    if not known:
        return Finding("Rounding: not measured.")
    worst = failed[0] if failed else max(known, key=lambda entry: entry.get("kl_nats", 0.0))
    if failed:
        others = f", also {', '.join(entry['format'] for entry in failed[1:])}" if failed[1:] else ""
        says = f"Fails: {_costs(worst)}{_through(worst)}. {len(failed)} of {len(known)} formats fail{others}.{missing}"
    else:
        says = f"None of {len(known)} formats fails: the worst, {_costs(worst)}.{missing}"
    return Finding(says, [(worst["format"], "rounding", worst["format"])])


def _costs(entry: Card) -> str:
    if "kl_nats" not in entry:
        return f"{entry['format']}, {percent(entry['lost']) if 'lost' in entry else entry['left_out']}"
    added, kl, same = with_error(entry, "loss_added_nats"), with_error(entry, "kl_nats"), share(entry["agreement"])
    lost = f"{entry['format']}, adds {added} nats to the loss ({percent(entry['lost'])} perplexity)"
    return f"{lost}; KL {kl}, same likeliest token {same}"


def _through(entry: Card) -> str:
    """Returns the part of the loss that the first token brings."""
    if "d_sink_nats" not in entry:
        return ""
    found = with_error(entry, "d_sink_nats")
    if not entry["d_sink_nats"] > 2 * entry.get("d_sink_nats_se", 0.0):
        return f"; none of it measurably goes with the first token in float (D_sink {found})"
    words = f"; {found} of this goes with the first token in float (D_sink)"
    return words + (", which says little of a destroyed model" if entry["lost"] > _DESTROYED else "")


def remedies(entry: Card) -> dict[str, tuple[float, str]]:
    """Returns what was tried for a format, as in `REMEDIES` -> share of the KL divergence it takes away, in words.

    The best are first. Of the layers in float it is the fewest that take half away, or all three. In cards of 0.1.0,
    which have no KL divergence, it is the share of the lost perplexity. Of what overflows there is no share, nan: the
    words then say what is left.
    """
    key = "kl_nats" if "kl_nats" in entry or "lost" not in entry else "lost"
    cost = entry.get(key, math.inf)
    if not cost > 0:
        return {}
    tried = {kind: (entry.get(f"{key}{kind}"), words) for kind, words in REMEDIES.items()}
    layers = [of for of in entry.get("float_layers", ()) if key in of]
    if layers:
        of = next((of for of in layers if of[key] < cost / 2), layers[-1])
        tried["_float_layers"] = of[key], f"{', '.join(of['layers'])} in float"
    ordered = sorted((left, kind, words) for kind, (left, words) in tried.items() if left is not None)
    if cost == math.inf:
        return {kind: (math.nan, f"{words} (KL {number(left)} nats)") for left, kind, words in ordered}
    return {kind: (1 - left / cost, words) for left, kind, words in ordered}


def _to_do(card: Card) -> Finding:
    failed = failing(card)
    if not failed:
        known = any(fails(entry) is not None for entry in card.get("rounding", ()))
        return Finding("Nothing to do: these formats cost little." if known else "What to do: not measured.")
    shown = failed[: 1 + _OTHERS]
    says = "; ".join(f"at {of['format']}, {_advice(list(remedies(of).values()), i)}" for i, of in enumerate(shown))
    rows = [(of["format"], "helps", of["format"]) for of in shown if remedies(of)]
    of_what = "KL divergence" if any("kl_nats" in of for of in shown) else "lost perplexity"
    return Finding(f"What helps, and the share of the {of_what} that it removes: {says}.", rows)


def _advice(recovered: Sequence[tuple[float, str]], others: int) -> str:
    """Returns what helps a format, best first; for those after the first one only the best."""
    if not recovered:
        return "nothing was tried"
    if recovered[0][0] <= 0:
        return "nothing that was tried"
    shown = [words if math.isnan(much) else f"{words} {share(max(much, 0.0))}" for much, words in recovered]
    return ("less than half: " if recovered[0][0] <= 0.5 else "") + ", ".join(shown[:1] if others else shown)
