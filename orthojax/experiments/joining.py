"""One results.json from several, of runs that were trained apart: a seed at a time, or on several machines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orthojax.errors import UserError

_SEEDS = ("train.seed", "data.seed")


def join(parts: Mapping[Path, Mapping[str, Any]], workdir: Path) -> dict[str, Any]:
    """The rows of all of them, as one call would have written them.

    Args:
      parts: Path of a results.json -> its content.
      workdir: Where the result will be, for the paths of runs.

    Returns:
      The content of a results.json. Its provenance lists, as `joined`, where and when each part was made. Costs of
      training steps are those of the first part that has some.

    Raises:
      UserError: Where they are of different experiments, scales or texts, a variant differs, or a run is there twice
        with different numbers.
    """
    (first_path, first), *_ = parts.items()
    rows: dict[tuple[str, int], tuple[Path, dict[str, Any]]] = {}
    configs: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path, part in parts.items():
        for name in ("experiment", "scale"):
            if part[name] != first[name]:
                problem = f"{path} is of {name} {part[name]!r}, {first_path} of {first[name]!r}"
                raise UserError(problem, allowed="results of one experiment at one scale")
        for row in part["rows"]:
            _require_same_config(configs, path, row)
            key = row["variant"], row["seed"]
            before, known = rows.setdefault(key, (path, _moved(row, path.parent, workdir)))
            if before != path and known["metrics"] != row["metrics"]:
                problem = f"{key[0]}, seed {key[1]}, is in {before} and in {path}, with different numbers"
                raise UserError(problem, allowed="each run once")
    provenance = _provenance(parts)
    return {**first, **_costs(parts), "provenance": provenance, "rows": [row for _, row in rows.values()]}


def _require_same_config(configs: dict[str, tuple[Path, dict[str, Any]]], path: Path, row: Mapping[str, Any]) -> None:
    """Compares a row's config, seeds aside, with that of the same variant before, which it enters."""
    of = {name: value for name, value in row["overrides"].items() if name not in _SEEDS}
    before, known = configs.setdefault(row["variant"], (path, of))
    if different := sorted(name for name in known.keys() | of.keys() if known.get(name) != of.get(name)):
        name = different[0]
        problem = f"{row['variant']} has {name}={of.get(name)!r} in {path}, {known.get(name)!r} in {before}"
        raise UserError(problem, allowed="variants of one config in all of them")


def _moved(row: Mapping[str, Any], folder: Path, workdir: Path) -> dict[str, Any]:
    run = {"run": os.path.relpath(folder / row["run"], workdir)} if "run" in row else {}
    return {**row, **run}


def _costs(parts: Mapping[Path, Mapping[str, Any]]) -> dict[str, Any]:
    return next(({"costs": part["costs"]} for part in parts.values() if "costs" in part), {})


def _provenance(parts: Mapping[Path, Mapping[str, Any]]) -> dict[str, Any]:
    of = [part["provenance"] for part in parts.values()]
    made = [of_part for one in of for of_part in one.get("joined", [one])]
    seconds = {
        name: round(sum(one.get(name, 0.0) for one in of), 1)
        for name in ("training_seconds", "wall_seconds")
        if name in of[0]
    }
    return {
        **of[0],
        **seconds,
        "date": max(one["date"] for one in of),
        "device": " and ".join(dict.fromkeys(one["device"] for one in made)),
        "seeds": sorted({seed for one in of for seed in one.get("seeds", ())}),
        "data": _texts(parts),
        "joined": [
            {name: one[name] for name in ("seeds", "date", "device", "versions") if name in one} for one in made
        ],
    }


def _texts(parts: Mapping[Path, Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What was read, each text once."""
    texts: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for path, part in parts.items():
        for entry in part["provenance"]["data"]:
            before, known = texts.setdefault(entry["source"], (path, entry))
            if known != entry:
                problem = f"the text of {path} is not that of {before}: {entry['source']}"
                raise UserError(problem, allowed="results on the same text, whose perplexities can be compared")
    return [entry for _, entry in texts.values()]
