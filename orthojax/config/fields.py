"""Fields of config dataclasses: checked types, strict overrides by dotted path, and a JSON round trip."""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from orthojax.errors import UserError, nearest

T = TypeVar("T")

# What a field of a config affects: `numbers`, what a run computes; `start`, what it computes, but only through its
# initial values; `computation`, how it is computed, with equal results up to rounding; `nothing`, only what is logged,
# probed, evaluated while training or kept.
Affects = Literal["numbers", "start", "computation", "nothing"]

_type_hints = functools.cache(typing.get_type_hints)


class Range(NamedTuple):
    """What holds for a value, or every value of a tuple, and the same in words; None is in every range."""

    holds: Callable[[Any], bool]
    allowed: str


NOT_NEGATIVE = Range(lambda x: x >= 0, "at least 0")
POSITIVE = Range(lambda x: x > 0, "above 0")
SHARE = Range(lambda x: 0.0 <= x <= 1.0, "0 to 1")
SEED = Range(lambda seed: seed >= 0, "0 to 2**32 - 1")  # `check_fields` sets the upper bound

Check = tuple[bool, str, str]  # what must hold, the problem otherwise, what is allowed


def setting(default: T, within: Range | None = None, *, affects: Affects = "numbers") -> T:
    """Declares a field of a config dataclass with its range and what it affects; a plain default affects numbers."""
    return typing.cast(Any, dataclasses.field(default=default, metadata={"within": within, "affects": affects}))


def describe_type(hint: Any) -> str:
    """Returns the allowed values of an annotation, in words for a user."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(str(value) for value in args)
    if origin is tuple:
        return f"a comma-separated list of ({describe_type(args[0])})"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(describe_type(option) for option in args)
    plain = {type(None): "none", bool: "true | false", int: "an integer", float: "a number", str: "a string"}
    return plain.get(hint) or hint.__name__


def _conforms(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_conforms(item, args[0]) for item in value)
    if origin in (typing.Union, types.UnionType):
        return any(_conforms(value, option) for option in args)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


_LARGEST_FLOAT32 = 3.4028234e38


def check_types(config: Any, group: str) -> None:
    """Raises UserError for a config value that its annotation does not allow or that no array of a run can hold.

    Floats must be finite in 32 bits; integers must fit in 31 bits, or in 32 for a `seed`.
    """
    for name, hint in _type_hints(type(config)).items():
        value = getattr(config, name)
        if not _conforms(value, hint):
            raise _not_valid(f"{group}.{name}", value, hint)
        bits = 32 if name == "seed" else 31
        most, allowed = 2**bits - 1, f"an integer below 2**{bits}"
        if _conforms(0.5, hint):
            most, allowed = _LARGEST_FLOAT32, "a finite number of 32 bits"
        numbers = value if isinstance(value, tuple) else (value,)
        holds = all(abs(number) <= most for number in numbers if isinstance(number, int | float))  # False for NaN
        require(holds, f"{group}.{name}={str(value)[:200]}", allowed)


def check_fields(config: Any, group: str, checks: Callable[[], Iterable[Check]] = tuple) -> None:
    """Raises UserError unless types, then ranges, then what `checks` returns hold; `group` is the path in errors."""
    check_types(config, group)
    for field in dataclasses.fields(config):
        value, within = getattr(config, field.name), field.metadata.get("within")
        if within is not None:
            items = value if isinstance(value, tuple) else (value,)
            holds = all(item is None or within.holds(item) for item in items)
            require(holds, f"{group}.{field.name}={value}", within.allowed)
    for holds, problem, allowed in checks():
        require(holds, f"{group}.{problem}", allowed)


def _not_valid(path: str, value: Any, hint: Any) -> UserError:
    near = nearest(value, _words(hint)) if isinstance(value, str) else ""
    shown = text if len(text := repr(value)) <= 200 else f"{text[:200]}..."
    return UserError(f"{path}={shown} is not valid", allowed=describe_type(hint), hint=near)


def _words(hint: Any) -> list[str]:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(map(str, options))
    found = {bool: ["true", "false"], type(None): ["none"]}.get(hint, [])
    return [*found, *(word for option in options for word in _words(option))]


def require(holds: bool, problem: str, allowed: str = "") -> None:
    """Raises a UserError that names the problem and what is allowed, unless `holds`."""
    if not holds:
        raise UserError(problem, allowed=allowed)


def read_value(text: str, hint: Any) -> Any:
    """Reads a command-line text as a value of the annotated type.

    The type is bool, int, float, str, None, a Literal, a tuple of one type, or a union of these.

    Raises:
      ValueError: If the text is not such a value.
      OverflowError: For an infinite integer.

    >>> from orthojax.config import Mlp
    >>> read_value("1e3", int), read_value("none", float | None), read_value("relu,gelu", Mlp | tuple[Mlp, ...])
    (1000, None, ('relu', 'gelu'))
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(read_value(part, args[0]) for part in text.split(",") if part.strip())
    if origin in (typing.Union, types.UnionType):
        for option in sorted(args, key=lambda option: typing.get_origin(option) is tuple):  # one value before many
            try:
                return read_value(text, option)
            except ValueError:
                continue
        raise ValueError(text)
    if hint is int:
        value = float(text) if set(".eE") & set(text) else int(text)  # 1e3 is an int to anyone who types it
        if value != int(value):
            raise ValueError(text)
        return int(value)
    if hint in (float, str):
        return hint(text)
    if origin is Literal:
        words, word = {str(value): value for value in args}, text.strip()
    else:
        words, word = {bool: {"true": True, "false": False}, type(None): {"none": None}}[hint], text.strip().lower()
    if word not in words:
        raise ValueError(text)
    return words[word]


def _group(hint: Any) -> tuple[type | None, bool]:
    """Returns the config class of a field that is a group of fields, else None, and whether the group is optional."""
    options = [option for option in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(option)]
    return (typing.cast(type, options[0]), options[0] is not hint) if options else (None, False)


@functools.cache
def _leaves(cls: type) -> tuple[tuple[str, Any, Mapping[Any, Any]], ...]:
    hints, leaves = _type_hints(cls), []
    for field in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[field.name]
        group, optional = _group(hint)
        if group is None:
            leaves.append((field.name, hint, field.metadata))
            continue
        for path, inner, metadata in _leaves(group):
            leaves.append((f"{field.name}.{path}", inner | None if optional else inner, metadata))
    return tuple(leaves)


def field_paths(cls: type) -> dict[str, Any]:
    """Returns every leaf field of a (nested) config class by dotted path, with its type."""
    return {path: hint for path, hint, _ in _leaves(cls)}


def fields_affecting(cls: type, *what: Affects) -> tuple[str, ...]:
    """Returns the dotted paths of the fields of a config class that affect one of `what`."""
    return tuple(path for path, _, metadata in _leaves(cls) if metadata.get("affects", "numbers") in what)


def flatten(config: Any) -> dict[str, Any]:
    """Returns every leaf value by dotted path; leaves of a group that is None are None."""

    def value(path: str) -> Any:
        return functools.reduce(lambda group, name: getattr(group, name, None), path.split("."), config)

    return {path: value(path) for path in field_paths(type(config))}


def changed_fields(base: Any, config: Any) -> dict[str, Any]:
    """Returns the fields by which `config` differs from `base`, by dotted path."""
    before = flatten(base)
    return {path: value for path, value in flatten(config).items() if value != before[path]}


def replace(config: T, changes: Mapping[str, Any]) -> T:
    """Copies a config with values changed by dotted path, all at once: fields that must agree can change together.

    Args:
      config: A config.
      changes: Dotted path -> new value; a str is read as typed on a command line unless the field is a str.

    Raises:
      UserError: For an unknown field, a value of the wrong type, or an impossible combination.

    >>> from orthojax.config import Config
    >>> replace(Config(), {"model.d_model": 6, "model.num_heads": "3"}).model.head_dim
    2
    """
    hints, flat = field_paths(type(config)), flatten(config)
    for path, value in changes.items():
        if path not in hints:
            raise unknown_field(path, hints)
        hint = hints[path]
        if isinstance(value, str) and not _conforms(value, hint):
            try:
                value = read_value(value, hint)
            except (ValueError, OverflowError):
                raise _not_valid(f"config.{path}", value, hint) from None
        flat[path] = value
    return from_flat(type(config), flat)


def from_flat(cls: type[T], flat: Mapping[str, Any], prefix: str = "") -> T:
    """Builds a config from values by dotted path; unnamed fields have their defaults.

    An optional group is None if all of its values are; otherwise values that are None take their defaults.

    >>> from orthojax.config import Config
    >>> from_flat(Config, {"optim.rotation.kind": "haar"}).optim.rotation.kind
    'haar'
    """
    values = {}
    for name, hint in _type_hints(cls).items():
        path = prefix + name
        group, optional = _group(hint)
        if group is None:
            values |= {name: flat[path]} if path in flat else {}
            continue
        inside = {key: value for key, value in flat.items() if key.startswith(f"{path}.")}
        if optional:
            inside = {key: value for key, value in inside.items() if value is not None}
        values[name] = from_flat(group, inside, f"{path}.") if inside or not optional else None
    return cls(**values)


def unknown_field(path: str, known: Iterable[str]) -> UserError:
    """Returns the error for an unknown dotted path, with the nearest known one as a hint."""
    hint = nearest_field(path, known)
    return UserError(f"unknown config field {path!r}", allowed="the fields that orthojax train --help lists", hint=hint)


def nearest_field(path: str, known: Iterable[str]) -> str:
    """Returns the hint 'did you mean ...?' for a mistyped path, which may lack its group; '' if none is near.

    >>> nearest_field("learning-rte", ["optim.b1", "optim.learning_rate"])
    "did you mean 'optim.learning_rate'?"
    """
    words = {name.rpartition(".")[2]: name for name in reversed(list(known))} | {name: name for name in known}
    for word in (path, path.rpartition(".")[2]):
        if found := difflib.get_close_matches(word.replace("-", "_").lower(), words, n=1, cutoff=0.7):
            return f"did you mean {words[found[0]]!r}?"
    return ""


def describe_fields(cls: type, prefix: str = "") -> dict[str, str]:
    """Returns the meaning of every leaf field of a config class by dotted path, from `Attributes:` of docstrings."""
    attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in found}
    described = {}
    for name, hint in _type_hints(cls).items():
        if (group := _group(hint)[0]) is not None:
            described |= describe_fields(group, f"{prefix}{name}.")
        else:
            described[prefix + name] = texts.get(name, "")
    return described


def to_json(config: Any) -> str:
    """Returns the config as indented JSON; `from_json` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2)


# Fields of 0.1.0 that are gone, by class, each with the value at which a config means the same without it.
_REMOVED: dict[str, dict[str, Any]] = {
    "ModelConfig": {
        "attention_norm": True,
        "mlp_norm": True,
        "gated_norm_rank": 0,
        "attention_mask": "causal",
        "fixed_rotation": False,
    },
    "DataConfig": {"objective": "next_token"},
    "OptimConfig": {"sink_anneal_steps": 0},
}


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """Builds a config from nested plain values, of this version or an earlier one, down to 0.1.0.

    A missing field has its default. A field that was removed is dropped if it had no effect. Raises UserError for a
    missing group, an unknown field, a wrong value, or a removed field that had an effect.
    """
    hints, given = _type_hints(cls), dict(values) if isinstance(values, Mapping) else {}
    for name, idle in _REMOVED.get(cls.__name__, {}).items():
        value = given.pop(name, idle)
        require(value == idle, f"{where}.{name}={value!r}: the field was removed after 0.1.0", f"{idle!r}")
    fields = dataclasses.fields(typing.cast(Any, cls))
    required = {field.name for field in fields if field.default is dataclasses.MISSING or not given}
    missing, unknown = required - given.keys(), given.keys() - hints.keys()
    if missing or unknown:
        missing, unknown = (", ".join(sorted(names)[:3]) or "nothing" for names in (missing, unknown))
        problem = f"{where} does not describe a {cls.__name__} of this version of orthojax"
        raise UserError(problem, hint=f"missing: {missing}; unknown: {unknown}")
    for name, value in given.items():
        group, optional = _group(hints[name])
        if group is not None and not (optional and value is None):
            given[name] = from_dict(group, value, f"{where}.{name}")
        elif isinstance(value, list):
            given[name] = tuple(value)
        if not _conforms(given[name], hints[name]):
            raise _not_valid(f"{where}.{name}", given[name], hints[name])
    return cls(**given)


def from_json(cls: type[T], text: str) -> T:
    """Reads what `to_json` wrote; raises UserError if the text is not JSON or not of this class."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise UserError(f"not a JSON config: {error}") from None
    return from_dict(cls, values)
