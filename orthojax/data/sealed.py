"""JSON files that carry the sha256 of their own content, so that an edit does not go unnoticed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from orthojax.errors import UserError
from orthojax.files import read_json

_CHECKSUM = "content_sha256"  # of the other fields as JSON with sorted keys and no spaces


def sealed(values: dict[str, Any]) -> str:
    """The text of a JSON file with these fields and their checksum."""
    return json.dumps({**values, _CHECKSUM: _sha256(values)}, indent=2) + "\n"


def read_sealed(path: Path, what: str, hint: str, *, required: bool = False) -> dict[str, Any]:
    """The fields of a file that `sealed` wrote; their types are not checked.

    Args:
      path: The file.
      what: What it is, for errors.
      hint: What to do about an error.
      required: Whether a file without a checksum, as earlier versions wrote them, is refused.

    Raises:
      UserError: As `read_json`; where the content is not what was written.
    """
    try:
        values = read_json(path, what)
        sealing = required or _CHECKSUM in values
        changed = sealing and values.pop(_CHECKSUM, None) != _sha256(values)
    except RecursionError:
        raise UserError(f"{what} {path} is nested too deeply", hint=hint) from None
    except UserError as error:
        raise UserError(str(error), hint=hint) from None
    if changed:
        raise UserError(f"{what} {path} was edited: it does not match its checksum", hint=hint)
    return values


def is_count(value: Any) -> bool:
    """Whether a JSON value is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def is_sha256(value: Any) -> bool:
    """Whether a JSON value is 64 hexadecimal digits."""
    return type(value) is str and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _sha256(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
