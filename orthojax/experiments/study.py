"""A study as data: what runs, what it claims, and what its report shows."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from orthojax import analysis
from orthojax.config import Config, replace
from orthojax.errors import UserError, nearest
from orthojax.experiments.claims import Claim, Judged, judge
from orthojax.experiments.measures import Measure
from orthojax.experiments.stored import check_unique, check_variants, read_results_file
from orthojax.formatting import duration
from orthojax.report.page import Cell, Picture, Report, Table, Verdict
from orthojax.report.pictures import headlines
from orthojax.report.results import Missing, Numbers, Quantity, Result, Results, as_quantity
from orthojax.report.tables import Columns, Quantities


class Given(NamedTuple):
    """An existing model that is measured and not trained."""

    config: Config  # of its run, with the data and the evaluation rows that it is measured on
    checkpoint: Path  # the step folder, or a pretrained model
    other_data: bool = False  # whether these rows come from another run, whose token ids must have the same meaning


class Row(NamedTuple):
    """A row of a computation for one seed: its name, its numbers and its setting."""

    variant: str
    metrics: Mapping[str, float]
    overrides: Mapping[str, Any] = MappingProxyType({})


class Published(NamedTuple):
    """The origin of a study's committed numbers."""

    seeds: tuple[int, ...]  # all of them
    # Of one seed, summed over its runs, as committed; 0 if unknown. Nothing is extrapolated from the current machine.
    minutes: float
    made: str  # date and device

    def __str__(self) -> str:
        took = f": {duration(60 * self.minutes)} a seed, summed over its runs" if self.minutes else ""
        return f"--seeds={','.join(map(str, self.seeds))}{took} ({self.made})"


@functools.cache
def _published() -> dict[str, dict[str, Published]]:
    content = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
    at = lambda of: Published(tuple(of["seeds"]), of["minutes"], of["made"])  # noqa: E731
    return {name: {scale: at(published) for scale, published in scales.items()} for name, scales in content.items()}


Paper = Mapping[str, Mapping[str, float]]  # variant -> metric -> what the paper prints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A table, figure or appendix: an entry that reads like its caption. It has either `runs` or `rows`."""

    name: str  # as in --experiment
    title: str
    # Scale -> variant -> config of the models that are trained; a seed replaces `train.seed` and `data.seed`.
    runs: Callable[[str], Mapping[str, Config]] | None = None
    # Seed -> rows that follow from formulas, samples or models too small to be runs; with float64 enabled.
    rows: Callable[[int], Iterable[Row]] | None = None
    scales: tuple[str, ...] = ("tiny",)  # for which `runs` is defined
    seeds: tuple[int, ...] = (0,)  # by default
    also: tuple[str, ...] = ()  # further names, such as of figures that differ only by model
    # The models of --model by name -> those measured beside the runs, including installed ones; None if it takes none.
    models: Callable[[Mapping[str, Given]], Mapping[str, Given]] | None = None
    measures: tuple[Measure, ...] = ()  # beyond `measures.ALWAYS`
    rounding: bool = True  # whether the perplexity of language models at each of `quant.SETTINGS` is also measured
    # Variant -> the one that time and memory of its training step are relative to; they are then metrics `cost_*`.
    cost_reference: Callable[[str], str] | None = None
    trains: bool = True  # False if these costs are all that is measured
    # Alias -> variant: further names for claims, if variants depend on scale or on given models.
    aliases: Callable[["StudyResults"], Mapping[str, str]] | None = None
    paper: Paper | Callable[[str], Paper] = dataclasses.field(default_factory=dict)  # for all scales, or by scale
    columns: Quantities = ()  # of the table of all variants
    tables: Sequence[Callable[[Results], Table | Sequence[Table]]] = ()  # further ones
    claims: Sequence[Claim] = ()
    pictures: Sequence[Callable[[Results], Sequence[Picture]]] = ()
    headlines: Sequence[tuple[str | Quantity, str, str]] = ()  # (metric, variant before, variant after), on top
    note: str = ""  # what a reader must know besides the table
    imported_as: str = ""  # module:STUDY, for one from outside

    @property
    def experiment(self) -> str:
        """What --experiment names it."""
        return self.imported_as or self.name

    @property
    def published(self) -> Mapping[str, Published]:
        """The study's committed numbers in results/, by scale, as `python results/verdicts.py --write` noted them."""
        return _published().get(self.name, {})

    @property
    def needs_a_model(self) -> bool:
        """Whether the study cannot run without a model of --model."""
        return not self.rows and not any(self.runs_at(scale) for scale in self.scales)

    def runs_at(self, scale: str) -> Mapping[str, Config]:
        """Returns the runs of one scale; none for a computation.

        Raises UserError if the study does not have the scale.
        """
        if scale not in self.scales:
            allowed, hint = " | ".join(self.scales), nearest(scale, self.scales)
            raise UserError(f"experiment {self.name!r} has no scale {scale!r}", allowed=allowed, hint=hint)
        return self.runs(scale) if self.runs else {}

    def paper_at(self, scale: str) -> Paper:
        """Returns the paper's numbers by variant."""
        return self.paper(scale) if callable(self.paper) else self.paper


def grid(base: Config, *factors: Mapping[str, Mapping[str, Any]]) -> dict[str, Config]:
    """Returns the runs of every combination of factors, each a name -> its changes of the config.

    >>> list(grid(Config(), {"softmax": {}, "relu": {"model.normalizer": "relu"}}, {"adam": {}, "sgd": {}}))
    ['softmax_adam', 'softmax_sgd', 'relu_adam', 'relu_sgd']
    """
    runs: dict[str, dict[str, Any]] = {"": {}}
    for factor in factors:
        runs = {f"{a}_{b}".strip("_"): {**one, **two} for a, one in runs.items() for b, two in factor.items()}
    return {name: replace(base, changes) for name, changes in runs.items()}


class StudyResults(Results):
    """The results of a study, with the content `raw` of its results.json, in `workdir`."""

    def __init__(self, study: Study, raw: Mapping[str, Any], configs: Mapping[str, Config], workdir: Path = Path()):
        """Sorts the rows of `raw`; `configs` are those of the variants that are models."""
        self.study, self.raw, self.scale = study, raw, raw["scale"]
        self.seeds = tuple(raw["provenance"].get("seeds", (0,)))
        rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in configs}
        for row in raw["rows"]:
            rows.setdefault(row["variant"], []).append(row)
        paper, results = study.paper_at(self.scale), {}
        for name, of_variant in rows.items():
            config = configs.get(name)
            done = [row for row in of_variant if row["metrics"] and "failed" not in row]
            results[name] = Result(
                name,
                config,
                {row["seed"]: Numbers(row["metrics"], config) for row in done},
                Numbers(paper.get(name, {})),
                given=any("given" in row for row in of_variant),
                folders={row["seed"]: workdir / row["run"] for row in done if "run" in row},
                started=bool(of_variant),
            )
        super().__init__(results)
        self.aliases = study.aliases(self) if study.aliases else {}

    def failures(self) -> list[str]:
        """Returns a line for each run that did not finish."""
        return [f"{row['variant']}, seed {row['seed']}: {row['failed']}" for row in self.raw["rows"] if "failed" in row]


def read_results(study: Study, folder: Path, *more: Path) -> StudyResults:
    """Reads a folder's results.json, from this study or one that shares variants with it; adds rows of further folders.

    Raises UserError if there is none, its shape is wrong, or it has no variant of the study.
    """
    parts = [read_results_file(at / "results.json") for at in (folder, *more)]
    for at, part in zip((folder, *more), parts, strict=True):
        if part["scale"] not in study.scales or part["scale"] != parts[0]["scale"]:
            allowed = " | ".join(study.scales if at == folder else [parts[0]["scale"]])
            raise UserError(f"{at}/results.json is of scale {part['scale']!r}", allowed=allowed)
    rows = [row for part in parts for row in part["rows"]]
    check_unique(rows, " and ".join(map(str, (folder, *more))))
    raw = parts[0] | {"rows": rows, "provenance": _joined([part["provenance"] for part in parts])}
    return results_of(study, raw, folder)


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the provenance of several results: all seeds, dates, devices, versions and data, and the sum of times."""
    joined: dict[str, Any] = {"seeds": sorted({seed for part in parts for seed in part["seeds"]})}
    for key in ("date", "device"):
        if values := dict.fromkeys(part[key] for part in parts if key in part):
            joined[key] = "; ".join(values)
    versions: dict[str, dict[str, None]] = {}
    for name, version in (item for part in parts for item in part.get("versions", {}).items()):
        versions.setdefault(name, {})[version] = None
    data = [entry for part in parts for entry in part.get("data", ())]
    joined |= {"versions": {name: " and ".join(several) for name, several in versions.items()}} if versions else {}
    joined |= {"data": [entry for i, entry in enumerate(data) if entry not in data[:i]]}
    if all("wall_seconds" in part for part in parts):
        joined["wall_seconds"] = sum(part["wall_seconds"] for part in parts)
    return joined


def results_of(study: Study, raw: Mapping[str, Any], folder: Path = Path()) -> StudyResults:
    """Returns the results of a study from the content of a results.json, which may have more variants."""
    configs = dict(study.runs_at(raw["scale"]))
    if study.runs:
        own = raw["experiment"] == study.name
        if own:
            check_variants(raw["rows"], configs, f"{folder}/results.json")
        rows = [row for row in raw["rows"] if own or row["variant"] in configs]
        if not rows:
            raise UserError(f"{folder}/results.json has no variant of {study.name!r}", allowed=raw["experiment"])
        raw = dict(raw) | {"rows": rows}
        for row in rows:
            if row["variant"] not in configs:  # an existing model
                configs[row["variant"]] = replace(Config(), from_lists(row["overrides"]))
    return StudyResults(study, raw, configs, folder)


def from_lists(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns overrides as configs have them, with tuples in place of JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in overrides.items()}


def make_report(results: StudyResults) -> Report:
    """Returns the report of a study; parts that need runs that are gone or failed are left out."""
    study = results.study
    tables: list[Table] = []
    columns = [Columns("Means over seeds", study.columns)] if study.columns else []
    for build in (*columns, *study.tables):
        try:
            built = build(results)
        except Missing:
            continue
        tables += [built] if isinstance(built, Table) else built
    pictures: list[Picture] = []
    for draw in (functools.partial(headlines, shown=study.headlines), *study.pictures):
        try:
            pictures += draw(results)
        except Missing:
            continue
    judged = [judge(claim, results) for claim in study.claims]
    untestable = {read for claim in judged for case in claim.cases if not case.testable for read in case.reads}
    return Report(
        title=study.title[:1].upper() + study.title[1:],
        setting=_setting(results),
        sentences=[study.note, *_about_the_data(results)],
        headlines=_headlines(results),
        verdicts=[as_verdict(claim) for claim in judged],
        tables=[_plain(table, untestable) for table in tables],
        pictures=pictures,
        notes=_notes(results),
        failures=results.failures(),
    )


def _plain(table: Table, untestable: Collection[tuple[str, str]]) -> Table:
    """Returns a table without bold in cells, by column and row, that a claim calls not testable."""

    def plain(cell: str | Cell, column: str, row: str | Cell) -> str | Cell:
        return cell._replace(bold=False) if isinstance(cell, Cell) and (column, row) in untestable else cell

    return table._replace(
        rows=[[plain(*cells, row[0]) for cells in zip(row, table.columns, strict=True)] for row in table.rows]
    )


def as_verdict(judged: Judged) -> Verdict:
    """Returns a judged claim as the report shows it."""
    claim, numbers = judged.claim, []
    for case in judged.cases:
        mark = "" if len(judged.cases) == 1 else "" if case.holds else " (does not hold)"
        mark = mark if case.testable else f" (not testable: {case.lacks})"
        numbers.append(": ".join(filter(None, (case.name, "; ".join(case.numbers)))) + mark)
    remarks = [f"Not measured: {claim.unmeasured}"] if claim.unmeasured else []
    if judged.missing:
        remarks.append(f"Missing: {', '.join(judged.missing[:6])}")
    if claim.added:
        remarks.append(f"The claim was stated after the data: {claim.added}")
    if claim.revised:
        why, first = claim.revised
        remarks.append(f"Revised after the data: {why}. First: {first.criterion}; under it: {judged.first}")
    cases = judged.cases
    brief = f"{sum(case.holds for case in cases)} of {len(cases)} cases" if cases else ""
    if len(cases) == 1:  # for an untestable one what it lacks, without the metric's name
        lacks = cases[0].lacks if judged.verdict == "not testable" else ""
        brief = lacks.partition(": ")[2] or lacks or cases[0].brief
    return Verdict(judged.verdict, claim.says, numbers, claim.criterion, remarks, brief)


def _headlines(results: StudyResults) -> list[tuple[str, str, str]]:
    shown = []
    for metric, before, after in results.study.headlines:
        quantity = as_quantity(metric)
        try:
            numbers = [quantity.text(results[name][quantity]) for name in (before, after)]
        except Missing:
            continue
        # Perplexity of equal logits is not worth comparing with.
        known, config = quantity.name != "perplexity", results[after].config
        beside = analysis.compared_with(quantity.name, {}, analysis.conditions(config)) if known and config else ""
        several = [of for of, *_ in results.study.headlines].count(metric) > 1
        shown.append((quantity.label + (f", {after}" if several else ""), " → ".join(numbers), beside))
    return shown


def _setting(results: StudyResults) -> str:
    provenance, seeds = results.raw["provenance"], results.seeds
    parts = [f"scale {results.scale}"] if results.study.runs else []
    if "paper" in results.study.scales and results.scale != "paper":
        parts[-1:] = [f"{''.join(parts[-1:])} (far smaller models stand in for the paper's)".strip()]
    parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return " · ".join([*parts, *(provenance[key] for key in ("date", "device") if key in provenance)])


def _about_the_data(results: StudyResults) -> list[str]:
    configs = [result.config for result in results.values() if result.config is not None and results.study.trains]
    sentences, elsewhere = [], results.study.published
    if elsewhere and results.scale not in elsewhere:
        commands = [f"--scale={scale} {option}" for scale, option in elsewhere.items()]
        sentences.append(f"What is published of this experiment is another scale: {'; '.join(commands)}.")
    if len(results.seeds) == 1 and configs:
        known = elsewhere[results.scale].seeds if results.scale in elsewhere else ()
        seeds = ",".join(map(str, known if len(known) > 1 else (0, 1, 2)))
        sentences.append(f"One seed is an anecdote: --seeds={seeds} shows the spread.")
    if any(config.data.kind == "embedded" for config in configs):
        sentences.append(
            "The text is Python's own standard library, evaluated on held-out files. It is not C4: numbers compare "
            "with each other, not with the paper's."
        )
    return sentences


_NOT_IN_NAMES = r"[^\w.-]"  # of --model


def command(results: StudyResults) -> str:
    """Returns the command that makes these numbers, with scale, seeds, and a PATH to fill in for each given model."""
    scale = f" --scale={results.scale}" if results.study.runs else ""
    given = [f"{re.sub(_NOT_IN_NAMES, '_', result.name)}=PATH" for result in results.values() if result.given]
    models = f" --model={','.join(given)}" if given else ""
    seeds = ",".join(map(str, results.seeds))
    return f"orthojax reproduce --experiment={results.study.experiment}{scale} --seeds={seeds}{models}"


def _notes(results: StudyResults) -> list[str]:
    provenance, notes = results.raw["provenance"], [command(results)]
    if given := [result.name for result in results.values() if result.given]:
        notes.append(f"existing models, of which PATH says where they are: {', '.join(given)}")
    if "versions" in provenance:
        versions = [f"{name} {version}" for name, version in provenance["versions"].items()]
        notes.append(", ".join([*(provenance[key] for key in ("date", "device") if key in provenance), *versions]))
    for entry in provenance.get("data", ()):
        tokens = f", {entry['train']['n_tokens']:,} training tokens" if "train" in entry else ""
        sha256 = f", sha256 {entry['source_sha256']}" if "source_sha256" in entry else ""
        notes.append(f"{entry['source']}{tokens}{sha256}")
    if "wall_seconds" in provenance:
        notes.append(f"{duration(provenance['wall_seconds'])} of training and computing, summed over runs")
    return notes
