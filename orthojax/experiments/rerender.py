"""Writing a report again from a results.json, without its runs: after claims, criteria or words have changed."""

import dataclasses
import os
import re
import urllib.parse
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from orthojax.config import FIRST_DEFAULTS, Config, replace
from orthojax.errors import UserError
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.layout import Table
from orthojax.experiments.page import WITHOUT_A_RUN, Picture, Report, make_report, write_report
from orthojax.experiments.results import Results
from orthojax.files import read_json

_PICTURE = re.compile(r"!\[(.*)\]\(figures/(.+)\.(svg|png)\)")
_SEPARATOR = re.compile(r"(?<!\\)\|")


def read_raw(path: Path) -> dict[str, Any]:
    """The content of a results.json.

    Raises:
      UserError: Where it is absent or is none.
    """
    raw = read_json(path, "results.json")
    if missing := {"experiment", "scale", "provenance", "rows"} - raw.keys():
        raise UserError(
            f"{path} is not a results.json of orthojax: it has no {min(missing)!r}",
            allowed="one that orthojax reproduce wrote",
        )
    if missing := {"date", "device", "versions", "data"} - raw["provenance"].keys():
        raise UserError(f"{path} does not say its {min(missing)}", allowed="one that orthojax reproduce wrote")
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
            config = _config(row["overrides"])
            on = _config(row["measured_on"]) if "measured_on" in row else None
            name, checkpoint = row["variant"], workdir / row["run"]
            variants.append(Variant(name, name, config, checkpoint=checkpoint, measured_on=on))
            known.add(row["variant"])
    return Results(experiment, raw["scale"], raw["provenance"].get("seeds", (0,)), workdir, raw, variants or None)


def _config(overrides: dict[str, Any]) -> Config:
    return replace(FIRST_DEFAULTS, {k: tuple(v) if isinstance(v, list) else v for k, v in overrides.items()})


def rerender(experiment: Experiment, raw: dict[str, Any], source: Path, workdir: Path) -> Report:
    """Writes report.md, report.html and figures/ from raw numbers alone.

    Pictures and tables that need the runs where these are gone stay as an earlier call wrote them, in report.md and on
    the page.

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
    complete = bool(experiment.compute or (folders and all(map(Path.exists, folders))))
    tables = [build for build in experiment.tables if _can_be_built(build, results)]
    pictures = [draw for draw in experiment.pictures if complete or _can_be_built(draw, results)]
    plt.close("all")  # those of the attempts
    views = experiment.views if experiment.views and complete and _can_be_built(experiment.views, results) else None
    present = dataclasses.replace(experiment, tables=tables, pictures=pictures, views=views)
    report = make_report(Results(present, results.scale, results.seeds, workdir, results.raw, results.variants or None))
    path = workdir / "report.md"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    same_seeds = f"Seeds: {', '.join(map(str, results.seeds))}." in before
    kept_tables = _tables_of(before) if len(tables) < len(experiment.tables) and same_seeds else []
    kept_tables = [table for table in kept_tables if table.caption not in {table.caption for table in report.tables}]
    drawn = {picture.name: picture for picture in report.pictures}
    shown = {picture.name: picture for picture in ([] if complete else _pictures_of(before, workdir))} | drawn
    command = [line[2:] for line in before.split("\n") if line.startswith(("- python launch/", "- orthojax "))]
    if "joined" in raw["provenance"]:
        command = []  # an earlier report names the seeds of its part
    notes = [*(command or report.notes[:1]), *report.notes[1:]]
    notes.append(f"written again from {os.path.relpath(source, workdir)}, without training")
    if kept_tables or len(shown) > len(drawn):
        notes[-1] += "; pictures and tables that need the runs are those of the first time"
    elif len(pictures) < len(experiment.pictures):
        notes[-1] += "; pictures that need the runs are left out, since these are not here"
    shown_tables = [*report.tables, *kept_tables]
    report = report._replace(notes=notes, tables=shown_tables, pictures=list(shown.values()))
    write_report(report, workdir)
    return report


def _can_be_built(build: Any, results: Results) -> bool:
    try:
        build(results)
    except (OSError, UserError):  # arrays or logs of a run that is gone
        return False
    except WITHOUT_A_RUN:
        if not results.failures():
            raise
        return False
    return True


def _tables_of(markdown: str) -> list[Table]:
    """The tables of a report.md."""
    found, parts = [], markdown.split("\n\n")
    for caption, table in pairwise(parts):
        lines = table.strip().split("\n")
        if caption.startswith("**") and len(lines) > 1 and lines[1].startswith("|---"):
            head, _, *body = ([_plain(cell) for cell in _SEPARATOR.split(line)[1:-1]] for line in lines)
            found.append(Table(_plain(caption.strip("*")), head, body))
    return found


def _pictures_of(markdown: str, workdir: Path) -> list[Picture]:
    """The pictures of a report.md whose files are there."""
    found = []
    for caption, name, form in _PICTURE.findall(markdown):
        path = workdir / "figures" / f"{urllib.parse.unquote(name)}.{form}"
        if path.is_file():
            found.append(Picture(path.stem, _plain(caption), path.read_bytes(), form))
    return found


def _plain(text: str) -> str:
    """Undoes `escape_markdown`."""
    return re.sub(r"\\(\W)", r"\1", text.strip())
