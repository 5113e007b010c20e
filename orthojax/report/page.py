"""A report and its three forms: lines on the console, Markdown, and one self-contained HTML page."""

import base64
import hashlib
import io
import re
import textwrap
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2

from orthojax.errors import printable
from orthojax.files import make_folder, write_atomically, write_text
from orthojax.formatting import align

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Cell(NamedTuple):
    """A cell of a table: its text, the small text below, and whether it is bold."""

    text: str
    below: str = ""
    bold: bool = False
    name: str = ""  # of a first cell, if the row is linked by another one than its text

    def __str__(self) -> str:
        return f"{self.text} ({self.below})" if self.below else self.text


class Table(NamedTuple):
    """A table; the first cell of each row is its name. A click on a column of a sortable one sorts its rows.

    With a key, a table and its rows can be linked to, as `key` and `key/name`.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    key: str = ""
    sortable: bool = False

    def link(self, row: Sequence[str | Cell]) -> str:
        """Returns what a row is linked by; '' without a key."""
        name = row[0].name or row[0].text if isinstance(row[0], Cell) else row[0]
        return f"{self.key}/{name}" if self.key else ""


class Picture(NamedTuple):
    """A figure with the name of its file, without ending, and its caption."""

    name: str
    caption: str
    figure: "Figure"


class Verdict(NamedTuple):
    """A claim as the report shows it, with a line of numbers for each case, and the shortest of them in `brief`.

    `remarks` say what is missing, and when the criterion was set or revised after the data.
    """

    verdict: str
    says: str
    numbers: Sequence[str] = ()
    criterion: str = ""
    remarks: Sequence[str] = ()
    brief: str = ""


class Report(NamedTuple):
    """Everything that a reader sees, in order."""

    title: str
    setting: str = ""  # scale, seeds, date and device, in one line
    sentences: Sequence[str] = ()  # paragraphs that say what was run
    # Sentences on top of the page, each with where its numbers stand: (words, key of a table, name of a row or "").
    findings: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
    headlines: Sequence[tuple[str, str, str]] = ()  # (metric, "31 → 2.6", its level of chance) of the numbers on top
    verdicts: Sequence[Verdict] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()  # the first is on top of the page
    notes: Sequence[str] = ()  # the command, and how the report was made
    failures: Sequence[str] = ()  # a line for each run that did not finish

    @property
    def headline(self) -> str:
        """The numbers on top as a sentence: 'Kurtosis, first token: 31 → 2.6 (3 for a Gaussian).'."""
        parts = [f"{name}: {numbers}" + (f" ({beside})" if beside else "") for name, numbers, beside in self.headlines]
        return f"{'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}." if parts else ""

    @property
    def tally(self) -> str:
        """The count of claims by verdict, as '2 of 9 claims hold, 5 do not, 2 not testable'."""
        counts = Counter(claim.verdict for claim in self.verdicts)
        words = {"does not hold": "do not", "not testable": "not testable", "not measured": "not measured"}
        if counts["does not hold"] == 1:
            words["does not hold"] = "does not"
        others = [f"{counts[verdict]} {text}" for verdict, text in words.items() if counts[verdict]]
        return ", ".join([f"{counts['holds']} of {len(self.verdicts)} claims hold", *others])


_SORT = """
document.querySelectorAll("table.sortable th[scope=col]").forEach(head => head.onclick = () => {
  const body = head.closest("table").tBodies[0], up = head.classList.toggle("up") ? 1 : -1;
  const text = row => row.cells[head.cellIndex].innerText, value = row => parseFloat(text(row).replace(/[,+]/g, ""));
  const order = (a, b) => (value(a) - value(b) || text(a).localeCompare(text(b))) * up;
  [...body.rows].sort(order).forEach(row => body.append(row));
});
"""


def write_report(report: Report, workdir: Path) -> None:
    """Writes report.md, report.html and figures/*.svg under the workdir."""
    make_folder(workdir, "workdir", files=("report.md", "report.html"))
    images = []
    for picture in report.pictures:
        content = svg(picture.figure)
        make_folder(workdir / "figures", "figures folder")
        write_atomically(workdir / f"figures/{picture.name}.svg", lambda file, content=content: file.write(content))
        source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
        images.append((source, picture.caption))
    write_text(workdir / "report.md", markdown(report))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orthojax.report", "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    values: dict[str, object] = {"report": report, "images": images}
    sortable = any(table.sortable for table in report.tables)
    for name, content in (("style", environment.get_template("page.css").render()), ("script", _SORT * sortable)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()  # the page forbids all else
        values |= {name: content, f"{name}_hash": f"'sha256-{digest}'" if content else "'none'"}
    write_text(workdir / "report.html", environment.get_template("page.html").render(values))


def svg(figure: "Figure") -> bytes:
    """Renders a figure, with the same bytes for the same figure, and closes it."""
    from matplotlib import pyplot as plt

    buffer = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "orthojax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    plt.close(figure)
    return buffer.getvalue()


def print_report(report: Report) -> None:
    """Prints the tables, then the verdicts, since the last lines are the ones that are seen."""
    print("\n".join(printable(textwrap.fill(says, _CONSOLE)) for says, _ in report.findings))
    for table in report.tables:
        cells = ([cell.text if isinstance(cell, Cell) and not i else str(cell) for i, cell in enumerate(row)]
                 for row in table.rows)  # fmt: skip
        head, *body = align([list(table.columns), *cells], numeric=True)
        rule = "-" * max(map(len, (head, *body)))
        print("\n".join(["", table.caption, rule, head, rule, *body]))
    if report.verdicts:
        print()
        for claim in report.verdicts:
            print(f"{claim.verdict.upper():13}  {claim.says}")
        print(f"\n{report.tally}.")
    for failure in report.failures:
        print(printable(f"failed: {failure}"))


_SHOWN_VERDICTS, _CONSOLE = 9, 118


def print_summary(report: Report, page: str, *, seconds: float, next_command: str = "") -> None:
    """Prints the end of a study in 15 lines: the verdicts with their numbers, the page, and what to run next.

    `page` is the path of the report, and `seconds` the time that this call took. Without claims the tables come first.
    """
    if not report.verdicts:
        print_report(report)
    minutes, rest = divmod(round(seconds), 60)
    tally = f" {report.tally}." if report.verdicts else ""
    print(f"\nDone in {minutes}:{rest:02}.{tally} {report.setting}")
    if report.headline:
        print(textwrap.fill(report.headline, _CONSOLE))
    shown = [(claim.verdict, textwrap.shorten(claim.says.rstrip("."), 60, placeholder=" ..."), claim.brief)
             for claim in report.verdicts[:_SHOWN_VERDICTS]]  # fmt: skip
    for line in align(shown) if shown else ():
        print(line if len(line) <= _CONSOLE else f"{line[: _CONSOLE - 4]} ...")
    if more := len(report.verdicts) - len(shown):
        print(f"and {more} more in the report")
    for failure in report.failures:
        print(printable(f"failed: {failure}"))
    print(printable(f"Report: {page}" + (f"   Next: {next_command}" if next_command else "")))


_SPECIAL = re.compile(r"[\\`*\[\]|~$<]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])")


def escape_markdown(text: str) -> str:
    """Escapes text so that Markdown shows it as it is, in one line."""
    return _SPECIAL.sub(lambda special: f"\\{special[0]}" if special[0] != "<" else "&lt;", " ".join(text.split()))


def markdown(report: Report) -> str:
    """Returns the report as Markdown; pictures are referred to under figures/."""
    escape = escape_markdown
    parts = [f"# {escape(report.title)}", f"**{escape(report.headline)}**" if report.headline else ""]
    parts += map(escape, (report.setting, *report.failures))
    parts.append("\n".join(f"- {escape(says)}" for says, _ in report.findings))
    parts += map(escape, report.sentences)
    if report.verdicts:
        parts.append(f"## Claims: {report.tally}")
        parts.append("\n".join(f"{i}. {_claim(claim)}" for i, claim in enumerate(report.verdicts, 1)))
    for table in report.tables:
        rule = "|".join(["---", *["---:"] * (len(table.columns) - 1)])
        rows = [f"| {' | '.join(escape(str(cell)) for cell in row)} |" for row in (table.columns, *table.rows)]
        parts.append("\n".join([f"**{escape(table.caption)}**", "", rows[0], f"|{rule}|", *rows[1:]]))
    for picture in report.pictures:
        path = urllib.parse.quote(f"figures/{picture.name}.svg")
        parts.append(f"![{escape(picture.caption)}]({path})\n\n*{escape(picture.caption)}*")
    parts += ["## How this was made", "\n".join(f"- {escape(note)}" for note in report.notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _claim(claim: Verdict) -> str:
    criterion = [f"Criterion: {claim.criterion}."] if claim.criterion else []
    lines = [*claim.numbers, *criterion, *(f"{remark}." for remark in claim.remarks)]
    details = (f"   - {escape_markdown(line)}" for line in lines)
    return "\n".join([f"**{claim.verdict}**: {escape_markdown(claim.says)}", *details])
