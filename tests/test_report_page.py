"""The page of a report: its order, its tables, its figures' colours, labels and lines of chance."""

import html
import itertools
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from committed import RESULTS, committed
from matplotlib import pyplot as plt

from orthojax.analysis import chance_of_first
from orthojax.errors import UserError
from orthojax.experiments import drawing
from orthojax.experiments import page as pages
from orthojax.experiments.catalog import ALL, find
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import Judged
from orthojax.experiments.from_attention.models import GRID, grid
from orthojax.experiments.headlines import headlines
from orthojax.experiments.layout import Cell, Shown, Table, layout
from orthojax.experiments.looks import COLORS, looks
from orthojax.experiments.ours import quick
from orthojax.experiments.page import Picture, Report, write_report
from orthojax.experiments.pictures import LayerCurves, StepCurves
from orthojax.experiments.pretrained import smollm2
from orthojax.experiments.rerender import read_raw, rerender, results_of
from orthojax.experiments.results import as_quantity, penalty
from orthojax.experiments.tables import change_text
from orthojax.formatting import number, percent

TEMPLATES = Path(drawing.__file__).parent / "templates"


@pytest.fixture(scope="module", name="main_job")
def _main_job():
    return results_of(find("quick"), read_raw(RESULTS / "quick-tiny/results.json"), RESULTS / "quick-tiny")


@pytest.fixture(scope="module", name="page")
def _page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    source = RESULTS / "quick-tiny/results.json"
    rerender(find("quick"), read_raw(source), source, folder)
    return (folder / "report.html").read_text()


# The order of a page.


def test_the_first_screen_has_the_count_three_numbers_and_one_figure_before_verdicts_and_tables(page, main_job):
    body = page[page.index("<body>") :]
    places = [body.index(words) for words in ("of 9 claims hold", '"headlines"', "<figure", 'id="claims"', "Tables<")]
    assert places == sorted(places)
    top = body[: body.index('id="claims"')]
    assert top.count("<figure") == 1
    assert 'alt="Kurtosis of hidden states' in top
    shown = re.findall(r"<b>([\d.]+|[+-][\d.]+%) → ([\d.]+|[+-][\d.]+%)</b>", top)
    assert len(shown) == 3
    assert "by chance, 64 tokens: 0.074" in top  # what the fraction compares with
    keys = ("kurtosis_first", "first_attention_fraction", "perplexity")
    for key, (before, after) in zip(keys, shown, strict=True):
        assert float(before) == pytest.approx(main_job["vanilla"][key], rel=0.01)
        assert float(after) == pytest.approx(main_job["cured"][key], rel=0.01)


def test_without_declared_headlines_they_are_what_claims_compare():
    results = committed(find("table5"))
    found = headlines(results)
    assert len(found) == 3 == len({headline.label for headline in found})
    compared = {as_quantity(quantity).label for claim in results.experiment.claims for quantity in claim.show}
    assert {headline.label for headline in found} <= compared
    assert not headlines(committed(find("break_conditions_map")))


def test_a_page_without_claims_opens_with_what_was_run(tmp_path):
    figure = drawing.lines({"a": ([1, 2], np.ones((1, 2)))}, x_label="x", y_label="y")
    write_report(Report("t", ["What it is."], [], [], [Picture("p", "c", figure)], [], []), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "claims hold" not in page
    assert page.index("<figure") < page.index("What it is.")


def test_failed_runs_are_told_on_top(tmp_path):
    failed = "cured, seed 0: the loss is not finite"
    judged = [Judged("holds", "It holds.", (), "Criterion: so.")]
    write_report(Report("t", ["about", failed], judged, [], [], [], [], failures=[failed]), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count(failed) == 1
    assert page.index(failed) < page.index("1 of 1 claim holds.") < page.index("about")


# Tables.


def _means(*values, **more):
    shown = Cell("as in report.md")
    vars(shown).update({"values": values, "show": number, "series": "x"} | more)
    return shown


def test_ranges_and_the_papers_numbers_are_smaller_lines_below():
    rows = [["r", _means(1.0, 2.0, 3.0), "31.9"], ["s", "-", "-"], ["u", "2 (1 to 3)", "4"]]
    shown = layout(Table("t", ["", "a", "paper"], rows))
    assert shown.columns == ["", "a"]
    assert [cells for _, cells in shown.rows] == [
        [Shown("2.00", ("1.00 to 3.00", "paper 31.9"))], [Shown("-")], [Shown("2", ("1 to 3", "paper 4"))],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "show", "texts"),
    [
        ((21.74, 2.981), number, ["21.74", "2.98"]),
        ((0.0822, 0.46, 0.0), number, ["0.0822", "0.4600", "0.0000"]),
        ((118507.0, 1.71), number, ["118,507", "1.71"]),  # no number of decimals suits both
        ((13883.0, 252.0), number, ["13,883", "252"]),
        ((0.000596, 0.5), percent, ["+0.06%", "+50.00%"]),
        ((-2.5, 10.0), number, ["-2.50", "10.00"]),
    ],
)
def test_numbers_of_one_quantity_have_equal_decimals(values, show, texts):
    table = Table("t", ["", "a"], [[str(i), _means(value, show=show)] for i, value in enumerate(values)])
    assert [cells[0].text for _, cells in layout(table).rows] == texts


def test_few_rows_are_turned_and_many_are_folded():
    wide = Table("t", ["", *"abcdef"], [["r", *"123456"], ["s", *"789012"]])
    turned = layout(wide)
    assert turned.columns == ["", "r", "s"]
    texts = [(name, [cell.text for cell in cells]) for name, cells in turned.rows]
    assert texts[:2] == [("a", ["1", "7"]), ("b", ["2", "8"])]
    long = layout(Table("t", ["", "a"], [[str(i), "1"] for i in range(30)]))
    assert (len(long.rows), len(long.folded)) == (12, 18)
    assert [len(part) for part in layout(Table("t", ["", "a"], [["r", "1"], ["s", "2"]], 1))[2:4]] == [1, 1]


def test_nothing_of_a_table_is_lost_on_the_page(page, main_job):
    table = main_job.experiment.tables[0](main_job)
    assert len(table.rows) > table.main
    for name, *_ in table.rows:
        assert f'<th scope="row">{html.escape(name)}</th>' in page
    assert page.count('<tbody class="folded">') == 1


def test_a_change_is_bold_where_its_interval_leaves_out_zero():
    assert change_text({0: (50.0, 100.0), 1: (52.0, 100.0), 2: (49.0, 100.0)}).matters
    assert not change_text({0: (90.0, 100.0), 1: (115.0, 100.0), 2: (99.0, 100.0)}).matters
    assert change_text({0: (80.0, 100.0)}).matters  # one seed: 10% or more
    assert not change_text({0: (95.0, 100.0)}).matters


def test_two_variants_have_a_change_and_it_is_that_of_the_means(main_job, page):
    table = main_job.experiment.tables[0](main_job)
    column = table.columns.index("change")
    mass = next(row for row in table.rows if row[0] == "attention mass on the first token")
    pairs = zip(*(main_job[name].values("first_attention_mass") for name in ("cured", "vanilla")), strict=True)
    change = 100 * np.expm1(np.mean([np.log(a / b) for a, b in pairs]))
    assert float(mass[column].split("%")[0]) == pytest.approx(change, abs=0.06)
    assert f'<td class="matters">{change:+.1f}%<small>' in page


def test_print_loses_nothing():
    css = (TEMPLATES / "report.css").read_text()
    printed = css[css.index("@media print") :]
    for rule in (".folded { display: table-row-group", "overflow: visible", "tr, figure", "break-inside: avoid",
                 ".hint, .unfold { display: none", "white-space: normal"):  # fmt: skip
        assert rule in printed


def test_what_is_cut_says_so(page):
    assert page.count('<p class="hint">') == page.count('<div class="scroll"')


# Colours: CIELAB distances as they are, and with full protanopia and deuteranopia (Machado et al. 2009, severity 1).

VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def _lab(color, seen):
    rgb = np.array(mpl.colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = np.array(to_xyz) @ np.clip(np.array(seen) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart(vision):
    seen = [_lab(color, VISION[vision]) for color in COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15
    old = [_lab(color, VISION[vision]) for color in ("#1f6fb2", "#6a51a3")]  # of an earlier palette
    assert (np.linalg.norm(old[0] - old[1]) > 15) == (vision == "normal")


def test_the_colour_is_the_optimizer_and_the_line_the_normalizer():
    labels = [
        f"{n} + {o}" for o in ("Adam", "OrthoAdam", "SGD with momentum") for n in ("softmax", "softmax-1", "ReLU")
    ]
    found = looks(labels)
    assert [len({look.color for look in found[i : i + 3]}) for i in (0, 3, 6)] == [1, 1, 1]
    assert len({look.color for look in found}) == 3
    assert [look.dash for look in found] == ["-", "--", ":"] * 3
    assert [look.hatch for look in found] == ["", "///", "..."] * 3
    assert [look.hatch for look in looks(["Adam", "OrthoAdam", "a model"])] == ["", "///", "..."]


def test_bars_have_their_hatches():
    figure = drawing.bars(["g"], {"softmax": np.ones((1, 1)), "softmax-1": np.ones((1, 1))}, y_label="y")
    assert [bar.get_hatch() for bar in figure.axes[0].patches] == ["", "///"]
    plt.close("all")


# Figures.


def test_names_of_points_do_not_overlap():
    rng = np.random.default_rng(0)
    points = [(float(x), float(y), f"stand-in for {i}") for i, (x, y) in enumerate(rng.normal(0, 0.2, (24, 2)))]
    figure = drawing.scatter({"a": points, "b": [(3.0, 3.0, "far")]}, x_label="x", y_label="y")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 25
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    plt.close("all")


def test_two_metrics_have_a_panel_each_and_one_scale():
    curve = ([1, 2, 3], np.ones((2, 3)))
    panels = {"first": ({"softmax + Adam": curve}, {"by chance": 0.5}), "others": ({"softmax-1 + Adam": curve}, {})}
    figure = drawing.panels(panels, x_label="layer", y_label="y", integer_x=True)
    first, others = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["first", "others"]
    assert first.get_ylim() == others.get_ylim()
    assert [line.get_label() for line in first.get_lines()] == ["softmax + Adam", "by chance"]
    assert list(first.get_xticks()) == [1, 2, 3]
    many = drawing.lines({"a": (list(range(1, 31)), np.ones((1, 30)))}, x_label="x", y_label="y", integer_x=True)
    assert len(many.axes[0].get_xticks()) <= 12
    plt.close("all")


def test_figures_of_attention_have_the_line_of_chance(main_job):
    draw = next(d for d in main_job.experiment.pictures if getattr(d, "name", "") == "first_attention_by_layer")
    (picture,) = draw(main_job)
    lines = {line.get_label(): line.get_ydata()[0] for line in picture.figure.axes[0].get_lines()}
    assert lines["equal logits, 64 tokens"] == pytest.approx(chance_of_first(64))
    assert lines["equal logits, softmax-1, 64 tokens"] == pytest.approx(chance_of_first(64, softmax1=True))
    (bars,) = quick._backcopy(main_job)
    assert "equal logits (softmax), equal norms" in bars.figure.axes[0].get_legend_handles_labels()[1]
    plt.close("all")


def test_every_curve_of_attention_knows_its_chance():
    found = set()
    for experiment in ALL:
        for draw in experiment.pictures:
            if isinstance(draw, LayerCurves | StepCurves) and experiment.variants:
                variants = experiment.variants_at(experiment.scales[0])
                for metric in draw.metrics:
                    lines = {words for variant in variants for words in chance_lines(metric, variant.config)}
                    if "attention" in metric and "entropy" not in metric and variants:
                        assert lines, (experiment.name, metric)
                        found.add(experiment.name)
                    assert "attention" in metric or not lines
    assert len(found) >= 5


def test_equal_logits_without_the_first_row():
    config = find("one_layer").variants_at("tiny")[0].config
    T = config.data.sequence_length
    (mass,) = chance_lines("sink_attention_rest/layer_0", config).values()
    assert mass == pytest.approx(np.mean(1 / np.arange(2, T + 1)))


def test_quantisation_is_a_change_in_percent(main_job):
    (picture,) = quick._quantization(main_job)
    heights = [bar.get_height() for bar in picture.figure.axes[0].patches]
    keys = [f"perplexity_{name}" for name in ("int8_fine", "int8_moderate", "int8_coarse", "int4_zeropoint")]
    expected = [100 * np.mean(main_job[name].values(penalty(key))) for name in ("vanilla", "cured") for key in keys]
    np.testing.assert_allclose(heights, expected)
    assert "%" in picture.figure.axes[0].get_ylabel()
    plt.close("all")


def test_a_stand_in_is_called_one():
    labels = {variant.name: variant.label for variant in grid("tiny")}
    assert labels["gpt2_1_4b_cured"] == "stand-in for GPT2 1.4B, 192 wide, softmax-1 + OrthoAdam"
    assert labels.keys() == GRID.keys()
    assert all(label.startswith("stand-in for ") for label in labels.values())
    assert not any("stand-in" in variant.label for variant in grid("paper"))


def test_a_real_model_stands_beside_the_two_of_the_main_job_where_it_is_installed(main_job, monkeypatch):
    def missing(name):
        raise UserError(f"{name} is not installed")

    monkeypatch.setattr(smollm2, "find_model", missing)
    assert find("quick").installed() == ()
    monkeypatch.setattr(smollm2, "find_model", lambda name: (Path("real.gguf"), main_job["vanilla"].config))
    (real,) = find("quick").installed()
    assert (real.checkpoint, real.config.data.tokenizer) == (Path("real.gguf"), "smollm2")
    row = next(row for row in main_job.raw["rows"] if row["variant"] == "vanilla")
    row = row | {"variant": real.name, "metrics": {"perplexity": 18.5}, "run": "models/real"}
    raw = main_job.raw | {"rows": [*(of for of in main_job.raw["rows"] if of["variant"] != real.name), row]}
    results = results_of(find("quick"), raw, RESULTS / "quick-tiny")
    table = find("quick").tables[0](results)
    assert table.columns == ["", "softmax + Adam", "softmax-1 + OrthoAdam", "change", real.name]
    assert next(row for row in table.rows if row[0] == "perplexity")[-1] == "18.5"
    assert any(real.name in text for text in quick._about(results))
    assert "--model" not in pages._notes(results)[0]  # which was not asked for
