"""Judges all committed results: python results/verdicts.py [--write].

Without flags it compares the verdicts with results/verdicts.json, those under the first criteria of revised claims
included, and exits with 1 if any differs. With --write it writes verdicts.json, every report.md with its
committed figures, and docs/claims.md.
"""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

from orthojax.experiments.catalog import ALL
from orthojax.experiments.claims import judge
from orthojax.experiments.study import Study, StudyResults, make_report, read_results
from orthojax.report.page import Report, escape_markdown, markdown, svg

RESULTS = Path(__file__).parent
PUBLISHED = RESULTS.parent / "orthojax/experiments/published.json"  # beside the code, for a wheel has no results
CLAIMS = RESULTS.parent / "docs" / "claims.md"
SYMBOLS = {"holds": "+", "does not hold": "-", "not testable": "?", "not measured": "0"}


def folder(study: Study, scale: str) -> Path:
    """Returns the folder of a study's results at a scale."""
    return RESULTS / ("" if scale == "tiny" else scale) / study.name


@functools.cache
def committed() -> list[tuple[Study, str, StudyResults]]:
    """Returns every study and scale with committed results; without own numbers they are of Table 2's runs."""
    found = []
    for study in ALL:
        for scale in study.scales:
            own = folder(study, scale)
            source = own if (own / "results.json").exists() else own.parent / "table2"
            if own.exists() and source.exists():
                found.append((study, scale, read_results(study, source)))
    return found


def verdicts() -> dict[str, dict[str, str]]:
    """Returns 'NAME/SCALE' -> the verdicts of its claims in their order, and those under first criteria."""
    found = {}
    for study, scale, results in committed():
        judged = [judge(claim, results) for claim in study.claims]
        first = "".join(SYMBOLS[of.first] for of in judged if of.first)
        key = f"{study.name}/{scale}"
        found[key] = {"verdicts": "".join(SYMBOLS[of.verdict] for of in judged)} | ({"first": first} if first else {})
    return found


def with_committed_pictures(results: StudyResults) -> Report:
    """Returns the report with the pictures whose files are committed."""
    made = make_report(results)
    figures = folder(results.study, results.scale) / "figures"
    return made._replace(pictures=[of for of in made.pictures if (figures / f"{of.name}.svg").exists()])


def claims() -> str:
    """Returns docs/claims.md: a summary, then a table of the claims of each study with a link to its report."""
    lines = [
        "# All claims",
        "Written by `python results/verdicts.py --write` from the committed results. Whole claims, criteria, ranges "
        "over seeds and tables are in the reports that the headings link to. What follows from them is in "
        "[which recipe](which_recipe.md). A star marks a criterion that was revised after the data.",
        (RESULTS / "in_short.md").read_text().strip(),
    ]
    for study, scale, results in committed():
        path = (folder(study, scale) / "report.md").relative_to(RESULTS.parent)
        of_scale = "" if scale == "tiny" or not study.runs else f", scale {scale}"
        lines.append(f"## [{escape_markdown(study.title)}](../{path}){of_scale}")
        judged = zip(make_report(results).verdicts, study.claims, strict=True)
        rows = [[in_brief(of.says), of.verdict + " \\*" * bool(claim.revised), _first_numbers(of.brief)]
                for of, claim in judged]  # fmt: skip
        table = "\n".join(f"| {escape_markdown(says)} | {verdict} | {escape_markdown(number)} |"
                          for says, verdict, number in rows)  # fmt: skip
        lines.append(f"| claim | verdict | measured |\n|---|---|---|\n{table}" if rows else "No claims: a map.")
    return "\n\n".join(lines) + "\n"


def in_brief(text: str, words: int = 12) -> str:
    """Shortens a claim for a cell: its first sentence without what is in parentheses, clauses as long as they fit.

    >>> in_brief("Dominance falls by up to 95% (abstract: 65% to 3.3%; conclusion). Here it does not.")
    'Dominance falls by up to 95%'
    """
    text = re.split(r"(?<=[^.]{9})[.;] ", re.sub(r"\s+\([^()]*\)", "", text))[0].rstrip(".")
    if len(text.split()) <= words:
        return text
    shown = " ".join(text.split()[: words - 1])
    clauses = max(shown.rfind(", "), shown.rfind(": "))
    shown = shown[:clauses] if len(shown[: max(clauses, 0)].split()) > words // 2 else shown
    return shown.rstrip(",:") + " ..."


def _first_numbers(text: str, most: int = 3) -> str:
    parts = text.split(", ")
    return ", ".join(parts[:most]) + ", ..." * (len(parts) > most) or "-"


def published() -> str:
    """Returns published.json: study -> scale -> seeds, minutes and machine of the committed results, a line each."""
    found: dict[str, dict[str, Any]] = {}
    for study, scale, results in committed():
        of = results.raw["provenance"]
        minutes = float(f"{of.get('wall_seconds', 0) / 60 / len(results.seeds):.3g}")
        made = ", ".join((of["date"], of["device"]))
        found.setdefault(study.name, {})[scale] = {"seeds": results.seeds, "minutes": minutes, "made": made}
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in found.items()) + "\n}\n"


def write() -> None:
    """Writes verdicts.json, published.json, every report.md and docs/claims.md."""
    PUBLISHED.write_text(published())
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(of)}" for key, of in verdicts().items())
    (RESULTS / "verdicts.json").write_text(f"{{\n{text}\n}}\n")
    for study, scale, results in committed():
        made = with_committed_pictures(results)
        (folder(study, scale) / "report.md").write_text(markdown(made))
        for picture in made.pictures:
            (folder(study, scale) / "figures" / f"{picture.name}.svg").write_bytes(svg(picture.figure))
    CLAIMS.write_text(claims())


def differences() -> list[str]:
    """Returns a line for each study whose verdicts are not those of verdicts.json."""
    expected, found = json.loads((RESULTS / "verdicts.json").read_text()), verdicts()
    names = dict.fromkeys([*expected, *found])
    return [
        f"{name}: {expected.get(name)} -> {found.get(name)}" for name in names if expected.get(name) != found.get(name)
    ]


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    for name, of in verdicts().items():
        print(f"{name:36} {of['verdicts']}  {of.get('first', '')}")
    changed = differences()
    print("\n".join(["", *changed]) if changed else "\nall as in verdicts.json")
    sys.exit(bool(changed))
