"""One results.json from several, of runs that were trained separately: a seed at a time, or on several machines."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.errors import UserError

_SEEDS = {"train.seed", "data.seed"}
# What the same model may differ by where it is measured on two machines.
_TOLERANCE = 0.01

Parts = Mapping[Path, Mapping[str, Any]]


def join(parts: Parts, workdir: Path) -> dict[str, Any]:
    """The rows of all of them, seed by seed.

    A run that failed in one part and finished in another has finished. An existing model that each part measured
    keeps the numbers of the first.

    Args:
      parts: Path of a results.json -> its content.
      workdir: Where the result will be, for the paths of runs.

    Returns:
      The content of a results.json. Its provenance lists, as `joined`, where and when each part was made. What a
      training step costs is, for each variant, that of the first part that measured it, so that variants may have been
      timed on several machines, each beside its reference.

    Raises:
      UserError: Where they are of different experiments, scales or texts, a variant differs, a run is in two of them
        with different numbers, or there are no runs.
    """
    (first_path, first), *others = parts.items()
    for path, part in others:
        for name in ("experiment", "scale"):
            if part[name] != first[name]:
                problem = f"{path} is of {name} {part[name]!r}, {first_path} of {first[name]!r}"
                raise UserError(problem, allowed="results of one experiment at one scale")
    _require_same_configs(parts)
    rows = sorted(_rows(parts, workdir), key=lambda row: row["seed"])  # of a seed in the order of the first part
    if not rows:
        raise UserError(f"{first_path} has no runs to join", allowed="results of an experiment that trains or computes")
    costs: dict[str, Any] = {}
    for part in parts.values():
        for name, cost in part.get("costs", {}).items():
            if "failed" in costs.get(name, {"failed": ""}):
                costs[name] = cost
    return {**first, **({"costs": costs} if costs else {}), "provenance": _provenance(parts, rows), "rows": rows}


def _rows(parts: Parts, workdir: Path) -> Iterable[dict[str, Any]]:
    found: dict[tuple[str, int], tuple[Path, dict[str, Any]]] = {}
    for path, part in parts.items():
        for row in part["rows"]:
            key = row["variant"], row["seed"]
            before, known = found.get(key, (path, None))
            if before != path and known and not ("failed" in row or "failed" in known or _same(row, known)):
                problem = f"{key[0]}, seed {key[1]}, has other numbers in {path} than in {before}"
                raise UserError(problem, allowed="each run once")
            if known is None or ("failed" in known and "failed" not in row):
                found[key] = path, _moved(row, path.parent, workdir)
    return [row for _, row in found.values()]


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are of one model."""
    names = row["metrics"].keys()
    values = [[of["metrics"].get(name, np.nan) for name in names] for of in (row, other)]
    return names == other["metrics"].keys() and bool(np.allclose(*values, rtol=_TOLERANCE, atol=1e-6))


def _moved(row: Mapping[str, Any], folder: Path, workdir: Path) -> dict[str, Any]:
    run = {"run": os.path.relpath(folder.resolve() / row["run"], workdir.resolve())} if "run" in row else {}
    return {**row, **run}


def _require_same_configs(parts: Parts) -> None:
    """That a variant has one config, seeds aside, and rates that trials chose."""
    rows = [(path, row) for path, part in parts.items() for row in part["rows"]]
    tuned = {row["variant"] for _, row in rows if "learning_rates" in row}
    configs: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path, row in rows:
        left_out = _SEEDS | ({"optim.learning_rate"} if row["variant"] in tuned else set())
        config = {name: value for name, value in row["overrides"].items() if name not in left_out}
        before, known = configs.setdefault(row["variant"], (path, config))
        if different := sorted(name for name in known.keys() | config.keys() if known.get(name) != config.get(name)):
            name = different[0]
            problem = f"{row['variant']} has {name}={config.get(name)!r} in {path}, {known.get(name)!r} in {before}"
            raise UserError(problem, allowed="the same config of a variant in every file")


def _provenance(parts: Parts, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    provenances = [part["provenance"] for part in parts.values()]
    origins: list[dict[str, Any]] = []
    for provenance in provenances:
        for of in provenance.get("joined", [provenance]):
            origin = {"seeds": of.get("seeds", [0])} | {name: of[name] for name in ("date", "device", "versions")}
            origins += [origin] if origin not in origins else []
    if "wall_seconds" in provenances[0]:
        seconds = {"wall_seconds": round(sum(of.get("wall_seconds", 0.0) for of in provenances), 1)}
    else:
        seconds = {"training_seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1)}
    return {
        **provenances[0],
        **seconds,
        "date": max(origin["date"] for origin in origins),
        "device": "; ".join(dict.fromkeys(origin["device"] for origin in origins)),
        "seeds": sorted({seed for origin in origins for seed in origin["seeds"]}),
        "data": _texts(parts),
        "joined": origins,
    }


def _texts(parts: Parts) -> list[Mapping[str, Any]]:
    """What was read, each text and tokenizer once."""
    texts: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for path, part in parts.items():
        for entry in part["provenance"]["data"]:
            key = json.dumps([entry["source"], entry.get("tokenizer")])
            before, known = texts.setdefault(key, (path, entry))
            if known != entry:
                problem = f"the text of {path} is not that of {before}: {entry['source']}"
                raise UserError(problem, allowed="results on the same text, whose perplexities can be compared")
    return [entry for _, entry in texts.values()]
