"""Writing a report again from a results.json, without its runs: after claims, criteria or words have changed."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthojax.config import Config, replace
from orthojax.errors import UserError
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Report, make_report, write_report
from orthojax.experiments.results import Results
from orthojax.files import read_json, write_text

_PICTURE, _TABLE, _CLAIMS, _NOTES = "![", "**", "## What held", "## How this was made"


def read_raw(path: Path) -> dict[str, Any]:
    """The content of a results.json.

    Raises:
      UserError: Where it is absent or is none.
    """
    raw = read_json(path, "results.json")
    if missing := {"experiment", "scale", "provenance", "rows"} - raw.keys():
        raise UserError(f"{path} is no results.json: it has no {min(missing)!r}", allowed="one that reproduce.py wrote")
    return raw


def results_of(experiment: Experiment, raw: dict[str, Any], workdir: Path) -> Results:
    """Results from the content of a results.json, of this experiment or of another that has its variants.

    Args:
      experiment: Whose variants, tables and claims.
      raw: The content; rows of variants that another experiment has beyond these are left out.
      workdir: What the paths of runs are relative to.
    """
    variants = list(experiment.variants_at(raw["scale"]))
    known = {variant.name for variant in variants}
    if raw["experiment"] != experiment.name:
        rows = [row for row in raw["rows"] if row["variant"] in known]
        seconds = round(sum(row.get("seconds", 0.0) for row in rows), 1)
        raw = raw | {"rows": rows, "provenance": raw["provenance"] | {"training_seconds": seconds}}
    for row in raw["rows"] if experiment.variants is not None else ():
        if row["variant"] not in known:  # a given model
            overrides = {k: tuple(v) if isinstance(v, list) else v for k, v in row["overrides"].items()}
            config = replace(Config(), overrides)
            variants.append(Variant(row["variant"], row["variant"], config, checkpoint=workdir / row["run"]))
            known.add(row["variant"])
    return Results(experiment, raw["scale"], raw["provenance"].get("seeds", (0,)), workdir, raw, variants or None)


def rerender(experiment: Experiment, raw: dict[str, Any], source: Path, workdir: Path) -> Report:
    """Writes report.md, report.html and figures/ from raw numbers alone.

    Pictures and tables that need the runs where these are gone stay in report.md as an earlier call wrote them.

    Args:
      experiment: Which report.
      raw: The content of a results.json.
      source: Where that is, for the notes.
      workdir: Folder of the report.

    Raises:
      UserError: Where the numbers are not of the experiment's variants.
    """
    results = results_of(experiment, raw, workdir)
    if experiment.trains and not results.raw["rows"]:
        raise UserError(f"{source} has no variant of experiment {experiment.name!r}", allowed="its own results.json")
    folders = [folder for result in results for folder in result.folders.values()]
    drawn = bool(experiment.compute or (folders and all(map(Path.exists, folders))))
    tables = [build for build in experiment.tables if _can_be_built(build, results)]
    pictures = experiment.pictures if drawn else ()
    views = experiment.views if experiment.views and drawn and _can_be_built(experiment.views, results) else None
    present = dataclasses.replace(experiment, tables=tables, pictures=pictures, views=views)
    report = make_report(Results(present, results.scale, results.seeds, workdir, results.raw, results.variants or None))
    path = workdir / "report.md"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    built = tuple(f"**{table.caption}**" for table in report.tables)
    kept_tables = _blocks(before, _TABLE) if len(tables) < len(experiment.tables) else []
    kept_tables = [block for block in kept_tables if not block.startswith(built)]
    kept_pictures = [] if drawn else _blocks(before, _PICTURE)
    command = [line[2:] for line in before.split("\n") if line.startswith(("- python launch/", "- orthojax "))]
    notes = [*(command or report.notes[:1]), *report.notes[1:]]
    notes.append(f"written again from {os.path.relpath(source, workdir)}, without training")
    if kept_tables or kept_pictures:
        notes[-1] += "; pictures, and tables that need the runs, are those of the first time"
    report = report._replace(notes=notes)
    write_report(report, workdir)
    written = path.read_text(encoding="utf-8")
    written = _insert(written, kept_tables, _CLAIMS)
    write_text(path, _insert(written, kept_pictures, _NOTES))
    return report


def _can_be_built(build: Any, results: Results) -> bool:
    try:
        build(results)
    except (OSError, UserError):  # arrays of a run that is gone
        return False
    return True


def _blocks(markdown: str, start: str) -> list[str]:
    """The tables, or the pictures with their captions, of a report.md."""
    parts = markdown.split("\n\n")
    return ["\n\n".join(parts[i : i + 2]) for i, part in enumerate(parts) if part.startswith(start)]


def _insert(markdown: str, blocks: Sequence[str], before: str) -> str:
    """Puts blocks before the heading that starts so."""
    head, heading, rest = markdown.partition(before)
    return head + "".join(f"{block}\n\n" for block in blocks) + heading + rest
