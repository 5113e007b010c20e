"""Measures several models, writes results.json and their pages."""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orthojax.data.tokenizers import load_tokenizer
from orthojax.errors import UserError
from orthojax.experiments.analyzing.dynamics import dynamics_report
from orthojax.experiments.analyzing.measuring import (
    Asked,
    Measured,
    interventions_of,
    measure_model,
    metric_changes,
    rows_at_once,
    spread_over_devices,
    work,
)
from orthojax.experiments.analyzing.report import comparing_report, model_report
from orthojax.experiments.analyzing.stages import Kept
from orthojax.experiments.analyzing.texts import TOPICS, Cut, Text, open_ids, open_text, require_files
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Report, write_report
from orthojax.experiments.results import Results
from orthojax.files import make_folder, write_atomically, write_text
from orthojax.machine import environment
from orthojax.model import LoadedModel
from orthojax.progress import Progress
from orthojax.train import find_model, load, require_tokenizer

_LENGTH = 256
_EXPERIMENT = Experiment(name="analyze", title="Measurements of given models", variants=lambda scale: (), trains=False)


@dataclasses.dataclass(frozen=True)
class Given:
    """What the models read.

    Attributes:
      text: Files, as `texts.open_text` takes them.
      domains: Name -> files of texts whose windows are compared.
      token_ids: A .npy file in the place of `text`.
      tokenizer: File of the tokenizer, where the model's own is not known.
      rows: Rows of the text; 0 for all.
      windows: Windows of each domain.
      length: Tokens of a row; 0 for the length at which the model was trained, 256 at most.
      bos: Whether rows start with the tokenizer's BOS token; None for as the model was trained.
    """

    text: tuple[str, ...] = (TOPICS,)
    domains: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    token_ids: str = ""
    tokenizer: str = ""
    rows: int = 64
    windows: int = 100
    length: int = 0
    bos: bool | None = None


class Analyzed(NamedTuple):
    """Measured models.

    Attributes:
      results: The content of results.json.
      runs: Name -> the model, without parameters; what was measured; its texts.
      parts: How many parts were measured by this call, and not read.
    """

    results: dict[str, Any]
    runs: dict[str, tuple[LoadedModel, Measured, list[Text]]]
    parts: int


def analyze(models: Mapping[str, str], given: Given, asked: Asked, workdir: Path) -> Analyzed:
    """`measure_models`, and writes `pages`, each to its folder."""
    analyzed = measure_models(models, given, asked, workdir)
    for folder, page in pages(analyzed, asked, workdir):
        write_report(page, folder)
    return analyzed


def measure_models(models: Mapping[str, str], given: Given, asked: Asked, workdir: Path) -> Analyzed:
    """Measures models, and writes results.json under the workdir, and arrays under MODEL/measured.

    A second call measures only what is not there yet: parts are kept under MODEL/parts, each under what it depends on.

    Args:
      models: Name -> path, as `orthojax.load` takes it.
      given: What they read.
      asked: What is measured.
      workdir: Of the results.

    Raises:
      UserError: For a model or text that cannot be read, or what `measure_model` refuses.
    """
    places = _checked(models, given, asked)  # before the workdir, which may have the name of a model
    make_folder(workdir, "workdir", files=["results.json", "report.html"])
    started, total, batch, runs = time.monotonic(), 0, 0, {}
    for name, place in places.items():
        loaded = load(place)
        loaded, texts = _with_texts(loaded, given, workdir / "texts")
        config = loaded.model.config
        steps = work(texts[0], texts[1:], asked, config.num_layers * config.num_heads)
        with Progress(steps) as progress:
            kept = Kept(workdir / name / "parts", loaded, progress, name)
            spread = spread_over_devices(loaded)
            batch = rows_at_once(asked, spread.params)
            measured = measure_model(spread, texts[0], texts[1:], asked, kept)
            progress.finish(f"{name}: measured")
        total += kept.measured
        _write_arrays(workdir / name, measured)
        runs[name] = (loaded._replace(params=None), measured, texts)
        del loaded, spread  # one model in memory at a time
    rows = [row for name, (_, measured, _) in runs.items() for row in _rows(name, models[name], measured)]
    texts = {t.sha256: t for *_, texts in runs.values() for t in texts}.values()
    provenance = environment() | {
        "seeds": [0],
        "models": dict(models),
        "data": [{"name": t.name, "source": t.source, "rows": len(t.rows), "length": t.rows.shape[1] - 1,
                  "tokens_sha256": t.sha256} for t in texts],
        "options": dataclasses.asdict(asked),
        "batch_rows": batch,
        "wall_seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    content = {"experiment": "analyze", "scale": "given", "provenance": provenance, "rows": rows}
    write_text(workdir / "results.json", json.dumps(content, indent=2) + "\n")
    return Analyzed(content, runs, total)


def _checked(models: Mapping[str, str], given: Given, asked: Asked) -> dict[str, Path]:
    """Where the models are; refuses before the work what a model would be refused for after others were measured."""
    for files in (*([] if given.token_ids else [given.text]), *given.domains.values()):
        require_files(files)
    places = {}
    for name, path in models.items():
        places[name], found = find_model(path)
        config = found.model
        if config.position == "learned" and given.length > config.max_length:
            problem = f"--length={given.length} is longer than the positions of the model {path}"
            raise UserError(problem, allowed=f"1 to {config.max_length}")
        interventions_of(asked, config)
    return places


def _with_texts(loaded: LoadedModel, given: Given, folder: Path) -> tuple[LoadedModel, list[Text]]:
    """The model with its tokenizer and the length of its rows, and its texts: first that of the metrics."""
    config = loaded.model.config
    tokenizer: Any = loaded.tokenizer  # token ids need none
    if given.tokenizer:
        tokenizer = load_tokenizer(given.tokenizer)
    elif given.domains or not given.token_ids:
        tokenizer = require_tokenizer(loaded)
    length = given.length or min(_LENGTH, loaded.config.data.sequence_length)
    bos = loaded.config.data.bos and not given.token_ids if given.bos is None else given.bos
    cut = Cut(given.rows, length, bos)
    if given.token_ids:
        texts = [open_ids("text", Path(given.token_ids), config, cut, folder)]
    else:
        texts = [open_text("text", given.text, tokenizer, config, cut, folder)]
    windows = dataclasses.replace(cut, rows=given.windows)
    texts += [open_text(name, files, tokenizer, config, windows, folder) for name, files in given.domains.items()]
    data = dataclasses.replace(loaded.config.data, sequence_length=length)
    return loaded._replace(config=dataclasses.replace(loaded.config, data=data), tokenizer=tokenizer), texts


def _write_arrays(folder: Path, measured: Measured) -> None:
    make_folder(folder / "measured", "folder of arrays")
    arrays: dict[str, Any] = {name.replace("/", "."): array for name, array in measured.arrays.items()}
    write_atomically(folder / "measured" / "arrays.npz", lambda file: np.savez_compressed(file, **arrays))


def _rows(name: str, path: str, measured: Measured) -> list[dict[str, Any]]:
    """The model's row, and one for each intervention."""
    base = {"variant": name, "seed": 0, "overrides": {"model": path, "label": name}, "run": name}
    rows = [base | {"metrics": measured.metrics}]
    for what, metrics in measured.changed.items():
        overrides = {"model": path, "label": f"{name}, {what}", "intervention": what}
        changed = metric_changes(measured.metrics, metrics)
        rows.append({"variant": f"{name}, {what}", "seed": 0, "overrides": overrides, "metrics": changed})
    return rows


def pages(analyzed: Analyzed, asked: Asked, workdir: Path) -> Iterator[tuple[Path, Report]]:
    """(folder, page) one after the other: a single model has the workdir's, of several each has a folder of its own.

    The workdir's page then compares them. Figures are open until a page is written.
    """
    content, runs = analyzed.results, analyzed.runs
    provenance = content["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    notes = [
        "orthojax analyze " + " ".join(map(shlex.quote, sys.argv[1:])),
        f"{provenance['date']}, {provenance['device']}, {versions}",
        *(f"{t['name']}: {t['rows']} rows of {t['length']} tokens, {t['source']}, sha256 of the tokens "
          f"{t['tokens_sha256'][:12]}" for t in provenance["data"]),
        f"batches of {provenance['batch_rows']} rows, of which dynamic quantisation scales are; sink heads have a mean "
        f"weight above {asked.threshold:g} on the first token",
        f"{provenance['wall_seconds']} seconds, of which what an earlier call had measured took none",
    ]  # fmt: skip
    variants = [Variant(name, name, loaded.config, checkpoint=loaded.source) for name, (loaded, *_) in runs.items()]

    def results(names: Sequence[str]) -> Results:
        rows = [row for row in content["rows"] if row["variant"] in names]
        return Results(_EXPERIMENT, "given", (0,), workdir, content | {"rows": rows},
                       [variant for variant in variants if variant.name in names])  # fmt: skip

    several = len(runs) > 1
    for name, (loaded, measured, texts) in runs.items():
        here, up = (f"{name}/", "") if not several else ("", "../")
        links = [("arrays", f"{here}measured/arrays.npz"), ("all results", f"{up}results.json")]
        page = model_report(name, loaded, measured, results([name]), texts, asked, notes, links)
        yield workdir / name if several else workdir, page
    if several:
        of_all = {name: of for name, (_, of, _) in runs.items()}
        compare = dynamics_report if asked.dynamics else comparing_report
        yield workdir, compare(of_all, results(list(runs)), notes)
