"""Checks of results.json and the other files that experiments read back, made once, when they are read."""

import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orthojax.errors import UserError, nearest
from orthojax.files import read_json


class Kind(NamedTuple):
    """A kind of value, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]


def _is_number(value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN is not


def _is_text(value: Any) -> bool:
    """Returns whether text can be printed, written to a file or be its path: not with lone surrogates or NUL."""
    return isinstance(value, str) and len(value) < 4000 and not re.search("[\0\ud800-\udfff]", value)


NAME = Kind("a name", lambda value: _is_text(value) and 0 < len(value) <= 200 and value.isprintable())
TEXT = Kind("text", _is_text)
SEED = Kind("an integer, 0 to 2**32 - 1", lambda value: isinstance(value, int) and _is_number(value, 0, 2**32 - 1))
COUNT = Kind("an integer, 0 or more", lambda value: isinstance(value, int) and _is_number(value, 0, 2**63))
NUMBER = Kind("a finite number", _is_number)
NOT_NEGATIVE = Kind("a finite number, 0 or more", lambda value: _is_number(value, 0))
# Metrics with a limited range, by a pattern that matches their names. Weights of ReLU attention may exceed 1, and the
# kurtosis of a constant vector is 0.
_SHARE = Kind("a number, 0 to 1", lambda value: _is_number(value, -1e-4, 1 + 1e-4))  # up to rounding of float32 sums
_KINDS = (
    ("first_attention_fraction|sink_rate|active_at_triggers|active_elsewhere", _SHARE),
    ("perplexity", Kind("a finite number, 1 or more", lambda value: _is_number(value, 1 - 1e-6))),
    ("perplexity_.*", Kind("a finite number above 0", lambda value: _is_number(value, sys.float_info.min))),
    ("(post_attention_|rotated_)?(kurtosis|max_abs|norm_ratio)_.*|(validation_)?loss_nats", NOT_NEGATIVE),
)
FIELD = Kind("a number, text, true, false, null or a list of them", lambda value: not isinstance(value, dict))
TRUE = Kind("true", lambda value: value is True)
# A shape is a kind, a list of one, or a dict: key -> shape, with "?" behind a key that may be missing, or under `...`
# the shape of all values.
_DATA = {"source": TEXT, "source_sha256?": TEXT, "train?": {"n_tokens": COUNT}}
_PROVENANCE = {
    "seeds": [SEED], "date?": TEXT, "device?": TEXT, "versions?": {...: TEXT}, "data?": [_DATA],
    "wall_seconds?": NOT_NEGATIVE,
}  # fmt: skip
_COMPUTED = {"variant": NAME, "overrides": {...: FIELD}, "metrics": {...: NUMBER}}
_ROW = {"variant": NAME, "seed": SEED} | _COMPUTED | {"run?": TEXT, "given?": TRUE, "failed?": TEXT}
COMPUTED = {"rows": [_COMPUTED]}
RESULTS = {"experiment": NAME, "scale": NAME, "provenance": _PROVENANCE, "rows": [_ROW]}
_PLACE = re.compile(r"/(?:(?:layer|head)_(?![0-9]{1,4}(?:/|$))|step_(?![0-9]{1,7}(?:/|$)))")


def check(value: Any, shape: Any, where: str) -> None:
    """Raises UserError for a value of the wrong shape; `where` names it."""
    if isinstance(shape, Kind):
        if not shape.holds(value):
            raise UserError(f"{where} is {_brief(value)}", allowed=shape.allowed)
    elif not isinstance(value, type(shape)):
        raise UserError(f"{where} is {_brief(value)}", allowed="a list" if isinstance(shape, list) else "an object")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check(item, shape[0], f"{where}[{i}]")
    elif ... in shape:
        for key, item in value.items():
            check(item, shape[...], f"{where}, {_brief(key)}")
    else:
        for key, inner in shape.items():
            if (name := key.rstrip("?")) in value:
                check(value[name], inner, f"{where}, {name}")
            elif name == key:
                needed = ", ".join(name for name in shape if not name.endswith("?"))
                raise UserError(f"{where} has no {name!r}", allowed=f"an object with {needed}")


def _brief(value: Any) -> str:
    """Returns a value in a few words: an integer of thousands of digits cannot be printed."""
    if isinstance(value, int) and not _is_number(value, -1e15, 1e15) and not isinstance(value, bool):
        return "an integer of more than 15 digits"
    return reprlib.repr(value)


def check_metrics(metrics: Any, where: str) -> dict[str, float]:
    """Returns metrics, name -> finite number within the metric's range; raises UserError for others."""
    check(metrics, {...: NUMBER}, where)
    for name, value in metrics.items():
        base = name.partition("/")[0]
        check(value, next((kind for of, kind in _KINDS if re.fullmatch(of, base)), NUMBER), f"{where}, {name}")
        if _PLACE.search(name):
            raise UserError(f"{where} has {name!r}", allowed="layers, heads and steps as numbers, such as /layer_3")
    return {name: float(value) for name, value in metrics.items()}  # NumPy has no integers as large as JSON's


def read_results_file(path: Path) -> dict[str, Any]:
    """Reads a results.json.

    Raises:
      UserError: If there is none, or for a wrong shape, naming row and field.
    """
    raw = read_json(path, "results.json")
    check(raw, RESULTS, str(path))
    for i, row in enumerate(raw["rows"]):
        where, seeds = f"{path}, rows[{i}] ({row['variant']}, seed {row['seed']})", raw["provenance"]["seeds"]
        row["metrics"] = check_metrics(row["metrics"], f"{where}, metrics")
        if row["seed"] not in seeds and "given" not in row:
            raise UserError(f"{where} is of no seed of its provenance", allowed=", ".join(map(str, seeds)))
    return raw


def check_unique(rows: list[Mapping[str, Any]], where: str) -> None:
    """Refuses two rows of one variant and seed, since one would hide the other."""
    for (variant, seed), count in Counter((row["variant"], row["seed"]) for row in rows).items():
        if count > 1:
            raise UserError(f"{count} rows of {variant}, seed {seed}, in {where}", allowed="one of a variant and seed")


def check_variants(rows: list[Mapping[str, Any]], known: Mapping[str, Any], where: str) -> None:
    """Refuses rows of variants that a study does not have, unless they are existing models."""
    for row in rows:
        if row["variant"] not in known and "given" not in row:
            allowed = "the study's variants, and existing models ('given': true)"
            raise UserError(f"{where} has the variant {row['variant']!r}", allowed=allowed,
                            hint=nearest(row["variant"], known))  # fmt: skip
