"""What a finished experiment shows, and its three forms: console, Markdown, one self-contained HTML page."""

import base64
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from orthojax.train import write_text

_LINKS_SHOWN = 12  # of files of runs; more are folded


class Table(NamedTuple):
    """A table of texts; the first column names the row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A figure with its file name (no ending) and caption."""

    name: str
    caption: str
    figure: Figure
    form: Literal["svg", "png"] = "svg"


Verdict = Literal["holds", "does not hold", "not visible at this scale"]


def verdict(holds: bool, *, visible: bool = True) -> Verdict:
    """What a claim's criterion says."""
    return "not visible at this scale" if not visible else "holds" if holds else "does not hold"


class Claim(NamedTuple):
    """Whether something held.

    Attributes:
      verdict: What the criterion says.
      text: What is claimed, with its numbers and the criterion where these are few.
      cases: The numbers of each model, where there are several.
      closing: What follows the cases: how many of them it holds for, and the criterion.
    """

    verdict: Verdict
    text: str
    cases: Sequence[str] = ()
    closing: str = ""

    def whole(self) -> str:
        """All of it as one paragraph."""
        cases = f" {'; '.join(self.cases)}." if self.cases else ""
        return f"{self.text}{cases} {self.closing}".strip()


class Report(NamedTuple):
    """Everything that a reader gets to see."""

    title: str
    summary: Sequence[str]  # paragraphs
    claims: Sequence[Claim]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    notes: Sequence[str]  # what was run on what, and how to run it again
    links: Sequence[tuple[str, str]]  # (text, path relative to the workdir)


def to_text(table: Table) -> str:
    """A table for a console, columns aligned."""
    rows = [list(table.columns), *[list(row) for row in table.rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([table.caption, "-" * len(lines[0]), lines[0], "-" * len(lines[0]), *lines[1:]])


def print_report(report: Report) -> None:
    """Tables and claims on standard output."""
    for table in report.tables:
        print("\n" + to_text(table))
    print()
    for claim in report.claims:
        print(textwrap.fill(f"{claim.verdict.upper()}: {claim.whole()}", 110, subsequent_indent="  "))


def write_report(report: Report, workdir: Path) -> None:
    """Writes report.md, report.html and figures/ under the workdir."""
    figures = workdir / "figures"
    figures.mkdir(exist_ok=True)
    embedded = []
    for picture in report.pictures:
        width, height = picture.figure.get_size_inches()
        content = _render(picture.figure, picture.form)
        (figures / f"{picture.name}.{picture.form}").write_bytes(content)
        kind = "svg+xml" if picture.form == "svg" else "png"
        embedded.append(
            (picture, f"data:image/{kind};base64,{base64.b64encode(content).decode()}", f"{width / height:.4f}")
        )
    write_text(workdir / "report.md", _markdown(report))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orthojax.experiments.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html").render(report=report, pictures=embedded, links=_link_lists(report))
    write_text(workdir / "report.html", page)


def _claim_markdown(claim: Claim) -> str:
    lines = [f"- **{claim.verdict}**: {claim.text}", *(f"  - {case}" for case in claim.cases)]
    return "\n".join([*lines, *([f"\n  {claim.closing}"] if claim.closing else [])])


def _link_lists(report: Report) -> list[tuple[str, list[tuple[str, str]], bool]]:
    """(heading, links, whether they are folded): the files of the study, then those of its runs, which may be many."""
    own = [link for link in report.links if "/" not in link[1]]
    runs = [link for link in report.links if "/" in link[1]]
    lists = [("", own, False), (f"{len(runs)} files of runs", runs, len(runs) > _LINKS_SHOWN)]
    return [part for part in lists if part[1]]


def _render(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    figure.savefig(buffer, format=form, dpi=130, metadata=metadata)
    plt.close(figure)
    return buffer.getvalue()


def _markdown(report: Report) -> str:
    parts = [f"# {report.title}", *report.summary]
    for table in report.tables:
        head = "| " + " | ".join(cell.replace("|", "\\|") for cell in table.columns) + " |"
        rule = "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|"
        body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
        parts.append("\n".join([f"**{table.caption}**", "", head, rule, *body]))
    if report.claims:
        parts.append("## What held and what did not")
        parts.append("\n".join(map(_claim_markdown, report.claims)))
    for picture in report.pictures:
        parts.append(f"![{picture.caption}](figures/{picture.name}.{picture.form})\n\n*{picture.caption}*")
    parts.append("## How this was made")
    parts.append("\n".join(f"- {note}" for note in report.notes))
    if report.links:
        parts.append("\n".join(f"- [{text}]({path})" for text, path in report.links if path != "report.md"))
    return "\n\n".join(parts) + "\n"
