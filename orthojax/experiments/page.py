"""The report of an experiment, and its three forms: console, Markdown, one self-contained HTML page."""

import base64
import collections
import io
import json
import os
import re
import shlex
import struct
import textwrap
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from orthojax.errors import UserError
from orthojax.experiments.claims import Judged, judge, tally, tally_text
from orthojax.experiments.headlines import Headline, headlines, line
from orthojax.experiments.layout import Table, layout
from orthojax.experiments.rendering import render_page
from orthojax.experiments.results import NotMeasured, Results
from orthojax.experiments.training_view import TrainingView, write_training_view
from orthojax.files import make_folder, write_atomically, write_text
from orthojax.formatting import align

_LINKS_SHOWN = 12  # of files of runs; more are folded


class Picture(NamedTuple):
    """A figure, or the content of its file as an earlier call drew it, with its file name (no ending) and caption."""

    name: str
    caption: str
    figure: Figure | bytes
    form: Literal["svg", "png"] = "svg"


class Report(NamedTuple):
    """Everything that a reader gets to see, in its order."""

    title: str
    summary: Sequence[str]  # paragraphs
    claims: Sequence[Judged]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    notes: Sequence[str]  # what was run on what, and how to run it again
    links: Sequence[tuple[str, str]]  # (text, URL relative to the workdir)
    views: Sequence[TrainingView] = ()  # of the page with the slider
    headlines: Sequence[Headline] = ()
    figure: str = ""  # name of the picture on top of the page; the first where none has it
    setting: str = ""  # scale, seeds, date and device, in a line below the title
    failures: Sequence[str] = ()  # which of the paragraphs are runs that did not finish


# What a figure or table may raise where a run that it needs failed; elsewhere these are mistakes of ours.
WITHOUT_A_RUN = (ArithmeticError, LookupError, NotMeasured, ValueError)


def make_report(results: Results) -> Report:
    """The report that an experiment describes, of its results."""
    experiment = results.experiment
    built = [build(results) for build in experiment.tables]
    pictures, left_out = _pictures(results)
    failures, about_figures = results.failures(), []
    if left_out:
        about_figures = [f"Left out, since a run failed: {left_out} of {len(experiment.pictures)} kinds of figures."]
    return Report(
        title=experiment.title[:1].upper() + experiment.title[1:],
        summary=[*experiment.about(results), *_data_sentences(results), *failures, *about_figures],
        claims=[judge(claim, results) for claim in experiment.claims],
        tables=[table for made in built for table in ([made] if isinstance(made, Table) else made)],
        pictures=pictures,
        notes=[*_notes(results), *experiment.notes(results)],
        links=_links(results),
        views=experiment.views(results) if experiment.views and results.finished and not failures else (),
        headlines=headlines(results),
        figure=experiment.figure,
        setting=_setting(results),
        failures=failures,
    )


def _pictures(results: Results) -> tuple[list[Picture], int]:
    """All that can be drawn, and of how many kinds none can; all of them where every run finished."""
    drawn, left_out, failed = [], 0, bool(results.failures())
    for draw in results.experiment.pictures if results.finished else ():
        try:
            drawn += draw(results)
        except (OSError, UserError, *WITHOUT_A_RUN):
            if not failed:
                raise
            left_out += 1
    return drawn, left_out


def _setting(results: Results) -> str:
    provenance, seeds = results.raw["provenance"], results.seeds
    parts = [f"scale {results.scale}"] if results.experiment.variants else []
    parts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    return " · ".join([*parts, *(str(provenance[key]) for key in ("date", "device") if key in provenance)])


def _data_sentences(results: Results) -> list[str]:
    """The seeds and the text."""
    if results.experiment.compute or not results.experiment.trains:
        return []
    data = results.raw["provenance"]["data"]
    sources = "; and ".join(dict.fromkeys(entry["source"] for entry in data)) or "unknown, as no run started"
    given, sentences = [r for r in results if r.given], []
    if len(given) < len(list(results)):
        anecdote = " One seed is an anecdote: run with --seeds=0,1,2 for a spread." if len(results.seeds) == 1 else ""
        sentences.append(f"Seeds: {', '.join(map(str, results.seeds))}.{anecdote}")
    if results.first.config.data.kind != "embedded":
        return [*sentences, f"The text is {sources}. Evaluation uses held-out rows."]
    files = f"{data[0]['file_count']} files, " if data else ""
    shares = {result.config.data.repeated_share for result in results if not result.given}
    share = shares.pop() if len(shares) == 1 else 0.0  # where they differ, the tables say so
    repeated = f", {share:.0%} of its passages repeated" if share else ""
    sentences.append(
        f"The text is Python's own standard library ({files}real text on every machine){repeated}; evaluation uses "
        "held-out files. It is not C4: numbers compare with each other, not with the paper's."
    )
    other = any(result.config.data.kind != "embedded" for result in given)
    return [*sentences, *([f"Given models may have other text: {sources}."] if other and data[1:] else [])]


def _notes(results: Results) -> list[str]:
    """The command, the machine, the data, the time and the evaluation."""
    provenance, experiment = results.raw["provenance"], results.experiment
    found = {variant.name for variant in experiment.installed()}  # without being asked for
    given = [variant for variant in results.variants if variant.checkpoint and variant.name not in found]
    models = ",".join(f"{variant.name}={os.path.relpath(str(variant.checkpoint))}" for variant in given)
    command = (
        f"orthojax reproduce --experiment={experiment.name} --scale={results.scale} "
        f"--seeds={','.join(map(str, results.seeds))}" + (f" --model={shlex.quote(models)}" if models else "")
    )
    parts = [(f"seed{'s' * (len(of['seeds']) > 1)} {', '.join(map(str, of['seeds']))}: ", of)
             for of in provenance.get("joined", ())]  # fmt: skip
    notes = [command, *(prefix + _made(of) for prefix, of in parts or [("", provenance)])]
    if experiment.compute:
        return [
            *notes,
            f"{provenance['wall_seconds']} seconds, with float64 enabled; computed in one process, "
            + ("no run is kept" if experiment.settings is None else "rows are kept under computed/"),
        ]
    if not experiment.trains:
        return notes
    config, runs = results.first.config, sum("seconds" in row for row in results.raw["rows"])
    return [
        *notes,
        *_trained(results),
        *map(_corpus, provenance["data"]),
        f"{provenance['training_seconds'] / 60:.1f} minutes of training, summed over {runs} runs, of which several run "
        "at once"
        if runs
        else "nothing was trained",
        f"evaluated on {config.eval.sequences} sequences; dynamic quantisation scales over batches of "
        f"{config.eval.batch_size}; only linear layers are quantised",
    ]


def _trained(results: Results) -> list[str]:
    """When and where the runs were trained, unless on the kind of device and by the versions of the first note."""

    def key(of: Mapping[str, Any]) -> tuple[str, str]:
        return of["device"].partition(" x ")[0], json.dumps(of["versions"], sort_keys=True)

    provenance = results.raw["provenance"]
    called = {key(of) for of in (provenance, *provenance.get("joined", ()))}
    rows = [row["trained"] for row in results.raw["rows"] if "trained" in row]
    if {key(of) for of in rows} <= called:
        return []
    return [
        f"{count} of the runs were trained on {made}" for made, count in collections.Counter(map(_made, rows)).items()
    ]


def _made(provenance: Mapping[str, Any]) -> str:
    """When and where."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return f"{provenance['date']}, {provenance['device']}, {versions}"


def _corpus(entry: Mapping[str, Any]) -> str:
    """What was read, exactly; `entry` is `Inputs.provenance`."""
    if "tokenizer" not in entry:
        return entry["source"]
    read = f"corpus sha256 {entry['source_sha256']}, tokenizer {entry['tokenizer']}"
    return f"{read}, {entry['train']['n_tokens']:,} training tokens"


def _links(results: Results) -> list[tuple[str, str]]:
    """The raw results, step costs and the config of every run."""
    configs = [
        (f"{row['variant']}, seed {row['seed']}: config", f"{row['run']}/config.json")
        for row in results.raw["rows"]
        if "run" in row and (results.workdir / row["run"] / "config.json").exists()  # given models have none
    ]
    own = [name for name in ("results.json", "costs.json", "report.md") if (results.workdir / name).exists()]
    return [(text, urllib.parse.quote(path)) for text, path in [*zip(own, own, strict=True), *configs]]


def console_table(table: Table) -> str:
    """A table with aligned columns."""
    head, *body = align([list(table.columns), *map(list, table.rows)], numeric=True)
    rule = "-" * max(map(len, (head, *body)))
    return "\n".join([table.caption, rule, head, rule, *body])


def print_report(report: Report) -> None:
    """Tables and claims on standard output, where the last lines are those that are seen."""
    for table in report.tables:
        print("\n" + console_table(table))
    print()
    if report.claims:
        print(f"{tally_text(report.claims)}\n")
    for headline in report.headlines:
        print(line(headline))
    if report.headlines:
        print()
    for claim in report.claims:
        print(textwrap.fill(f"{claim.verdict.upper()}: {claim.paragraph}", 110, subsequent_indent="  "))


def write_report(report: Report, workdir: Path) -> None:
    """Writes report.md, report.html, figures/ and, of a report with views, training.html under the workdir."""
    figures = workdir / "figures"
    make_folder(figures, "figures folder")
    embedded = []
    for picture in report.pictures:
        content = picture.figure if isinstance(picture.figure, bytes) else _render(picture.figure, picture.form)
        write_atomically(figures / f"{picture.name}.{picture.form}", lambda file, content=content: file.write(content))
        kind = "svg+xml" if picture.form == "svg" else "png"
        source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        embedded.append((picture, source, f"{_shape(content):.4f}"))
    on_top = next((i for i, (picture, *_) in enumerate(embedded) if picture.name == report.figure), 0)
    top = [embedded.pop(on_top)] if embedded else []
    write_text(workdir / "report.md", _markdown(report))
    if report.views:
        title = f"{report.title}: over training"
        write_training_view(report.views, workdir / "training.html", title=title, report="report.html")
    page = render_page(
        "report.html",
        report=report,
        counts=tally(report.claims),
        tally=tally_text(report.claims),
        top=top,
        pictures=embedded,
        tables=list(map(layout, report.tables)),
        links=_link_lists(report),
    )
    write_text(workdir / "report.html", page)


def _link_lists(report: Report) -> list[tuple[str, list[tuple[str, str]], bool]]:
    """(heading, links, whether they are folded): the files of the study, then those of its runs, which may be many."""
    own, runs = ([link for link in report.links if ("/" in link[1]) == of_run] for of_run in (False, True))
    lists = [("", own, False), (f"{len(runs)} files of runs", runs, len(runs) > _LINKS_SHOWN)]
    return [part for part in lists if part[1]]


def _shape(content: bytes) -> float:
    """Width over height of an SVG, or of a PNG, which has them in its first chunk."""
    if content.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", content[16:24])
        return width / height
    found = re.search(rb'<svg[^>]* width="([\d.]+)pt" height="([\d.]+)pt"', content)  # as matplotlib writes it
    return float(found[1]) / float(found[2]) if found else 1.4


def _render(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "orthojax"}):  # the same picture is the same file
        figure.savefig(buffer, format=form, dpi=130, metadata={"Date": None} if form == "svg" else {})
    plt.close(figure)
    return buffer.getvalue()


_SPECIAL = re.compile(
    r"""[\\`*\[\]|~$]              # code, emphasis, links, tables, strikethrough, formulas
    | <(?=[a-zA-Z/!?])             # HTML
    | (?<![^\W_])_ | _(?![^\W_])  # emphasis, which underscores within words are not
    | &(?=[#\w])                   # entities
    | ^[#>=] | ^[+-](?!\d) | ^\d+[.)](?!\d)  # headings, quotes, rules, lists; a number is none of them
    """,
    re.VERBOSE,
)


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(lambda special: f"{special[0][:-1]}\\{special[0][-1]}", " ".join(text.split()))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join("-" if cell == "-" else escape_markdown(cell) for cell in cells) + " |"


def _markdown(report: Report) -> str:
    escape = escape_markdown
    parts = [f"# {escape(report.title)}", *map(escape, report.summary)]
    for table in report.tables:
        rule = "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|"
        parts.append("\n".join([f"**{escape(table.caption)}**", "", _row(table.columns), rule, *map(_row, table.rows)]))
    if report.claims:
        parts += ["## What held and what did not", tally_text(report.claims)]
        lines = []
        for claim in report.claims:
            lines += [f"- **{claim.verdict}**: {escape(claim.says)}", *(f"  - {escape(case)}" for case in claim.cases)]
            lines += [f"\n  {escape(claim.closing)}"]
        parts.append("\n".join(lines))
    for picture in report.pictures:
        path, caption = urllib.parse.quote(f"figures/{picture.name}.{picture.form}"), escape(picture.caption)
        parts.append(f"![{caption}]({path})\n\n*{caption}*")
    parts.append("## How this was made")
    parts.append("\n".join(f"- {escape(note)}" for note in report.notes))
    if report.links:
        parts.append("\n".join(f"- [{escape(text)}]({path})" for text, path in report.links if path != "report.md"))
    return "\n\n".join(parts) + "\n"
