"""Checks of results.json and the other files that experiments read back, made once, when they are read."""

import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orthojax.analysis.catalogue import limits
from orthojax.errors import UserError, nearest
from orthojax.files import read_with_digest


class Kind(NamedTuple):
    """A kind of value, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]


def _number(allowed: str, low: float, high: float = sys.float_info.max, kinds: Any = int | float) -> Kind:
    # A bool is an int, and NaN in no range.
    return Kind(allowed, lambda x: isinstance(x, kinds) and not isinstance(x, bool) and low <= x <= high)


def _is_text(value: Any) -> bool:
    """Returns whether text can be printed, written to a file or be its path: not with lone surrogates or NUL."""
    return isinstance(value, str) and len(value) < 4000 and not re.search("[\0\ud800-\udfff]", value)


NAME = Kind("a name", lambda value: _is_text(value) and 0 < len(value) <= 200 and value.isprintable())
TEXT = Kind("text", _is_text)
SEED = _number("an integer, 0 to 2**32 - 1", 0, 2**32 - 1, int)
COUNT = _number("an integer, 0 or more", 0, 2**63, int)
NUMBER = _number("a finite number", -sys.float_info.max)
NOT_NEGATIVE = _number("a finite number, 0 or more", 0)
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
            raise UserError(f"{where} is {reprlib.repr(value)}", allowed=shape.allowed)
    elif not isinstance(value, type(shape)):
        allowed = "a list" if isinstance(shape, list) else "an object"
        raise UserError(f"{where} is {reprlib.repr(value)}", allowed=allowed)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check(item, shape[0], f"{where}[{i}]")
    elif ... in shape:
        for key, item in value.items():
            check(item, shape[...], f"{where}, {reprlib.repr(key)}")
    else:
        for key, inner in shape.items():
            if (name := key.rstrip("?")) in value:
                check(value[name], inner, f"{where}, {name}")
            elif name == key:
                needed = ", ".join(name for name in shape if not name.endswith("?"))
                raise UserError(f"{where} has no {name!r}", allowed=f"an object with {needed}")


def check_metrics(metrics: Any, where: str) -> dict[str, float]:
    """Returns metrics, name -> finite number within the limits of the catalogue; raises UserError for others."""
    check(metrics, {...: NUMBER}, where)
    for name, value in metrics.items():
        low, high = limits(name)
        words = f"a number, {low:g} to {high:g}" if high < math.inf else f"a finite number, {low:g} or more"
        rounding = 1e-4  # of float32 sums
        check(value, _number(words, low - rounding, high + rounding), f"{where}, {name}")
        if _PLACE.search(name):
            raise UserError(f"{where} has {name!r}", allowed="layers, heads and steps as numbers, such as /layer_3")
    return {name: float(value) for name, value in metrics.items()}  # NumPy has no integers as large as JSON's


def read_results_file(path: Path) -> dict[str, Any]:
    """Reads a results.json; raises UserError if there is none, or for a wrong shape, naming row and field."""
    raw = read_with_digest(path, "results.json")
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
