"""The page with a slider over training: its embedded numbers, its strip of steps, and what it must not contain."""

import base64
import html
import io
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orthojax.errors import UserError
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import make_report, write_report
from orthojax.experiments.rerender import rerender
from orthojax.experiments.results import Results
from orthojax.experiments.study import run_experiment
from orthojax.experiments.training_view import (
    MOST_TOKENS,
    Frame,
    TrainingView,
    render_training_view,
    write_training_view,
)


def made(title="softmax", steps=(0, 1, 10), shape=(2, 1, 5), *, causal=True, largest=1.0, seed=0, **fields):
    """A view of random numbers; `shape` is L, N, T."""
    rng = np.random.default_rng(seed)
    layers, heads, length = shape
    frames = []
    for step in steps:
        attention = rng.uniform(0, largest, (layers, heads, length, length))
        attention = np.tril(attention) if causal else attention
        norms = rng.lognormal(0, 3, shape), rng.lognormal(0, 3, (layers, length))
        frames.append(Frame(step, attention, *norms))
    made_up = {
        "tokens": ["<s>", *"abcdefgh" * length][:length],
        "is_trigger": [False, True, *[False] * length][:length],
        "curves": {"risk (nats)": rng.normal(size=len(steps)).tolist()},
        "about": "One row.",
    }
    return TrainingView(title, frames=frames, **{**made_up, **fields})


def embedded(page):
    """The data of the page with its arrays decoded as its JavaScript does."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text)
    for run in data["runs"]:
        frames, layers, heads, size = len(run["steps"]), run["layers"], run["heads"], len(run["tokens"])
        codes = np.frombuffer(base64.b64decode(run["attention"]), np.uint8)
        attention = np.zeros((frames, layers, heads, size, size), np.uint8)
        if run["causal"]:
            queries, keys = np.tril_indices(size)
            attention[..., queries, keys] = codes.reshape(frames, layers, heads, -1)
        else:
            attention[:] = codes.reshape(attention.shape)
        run["weights"] = (attention / 255) ** 2 * run["scale"]
        for name, form in (("value_norms", attention.shape[:4]), ("residual_norms", (frames, layers, size))):
            run[name] = np.frombuffer(base64.b64decode(run[name]), "<f4").reshape(form)
    return data


def without_scripts(page):
    return re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=4, unique=True).map(sorted),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 7)),
    st.booleans(),
    st.sampled_from([0.0, 0.02, 1.0, 30.0]),
    st.integers(0, 99),
)
@settings(max_examples=12)
def test_every_number_can_be_read_back_from_the_page(steps, shape, causal, largest, seed):
    views = [made("first", steps, shape, causal=causal, largest=largest, seed=seed), made("second", seed=seed)]
    for view, run in zip(views, embedded(render_training_view(views))["runs"], strict=True):
        assert (run["title"], run["about"], run["tokens"]) == (view.title, view.about, view.tokens)
        assert run["steps"] == [frame.step for frame in view.frames]
        assert run["triggers"] == view.is_trigger
        for name, array in (("weights", "attention"), ("value_norms",) * 2, ("residual_norms",) * 2):
            given_values = np.stack([getattr(frame, array) for frame in view.frames])
            tolerance = {"atol": max(1, run["scale"]) / 255, "rtol": 0} if name == "weights" else {"rtol": 1e-6}
            np.testing.assert_allclose(run[name], given_values, **tolerance)
        for name, values in run["curves"]:
            np.testing.assert_allclose(values, view.curves[name], rtol=1e-4)


def test_small_weights_keep_more_digits_than_a_linear_byte():
    view = made(shape=(1, 1, 64), largest=1 / 64)
    (run,) = embedded(render_training_view([view]))["runs"]
    assert np.abs(run["weights"] - np.stack([frame.attention for frame in view.frames])).max() < 1 / 255 / 4


def test_curves_keep_their_order_and_what_is_not_finite_is_a_gap():
    view = made(curves={"z": [1.0, float("nan"), 3.0], "a": [float("inf"), 2.0, np.float32(0.1)]})
    page = render_training_view([view])
    assert embedded(page)["runs"][0]["curves"] == [["z", [1.0, None, 3.0]], ["a", [None, 2.0, 0.1]]]
    assert re.search(r'<th scope="row">z</th><td>1</td><td>-</td><td>3</td>', page)


def test_the_page_loads_nothing():
    page = render_training_view([made("a"), made("b")], report="report.html")
    assert not re.search(r"https?:|@import|url\(|<link|<iframe|fetch\(|XMLHttpRequest|import\(", page)
    assert set(re.findall(r'(?:src|href)="([^"]*?)[,"]', page)) == {"data:image/png;base64", "report.html"}
    assert "default-src 'none'" in page


def test_the_controls_that_the_script_looks_for_are_there():
    page = render_training_view([made()])
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    looked_for = set(re.findall(r'byId\("([^"]+)"\)', page))
    assert len(looked_for) > 10
    assert looked_for <= ids


def test_tokens_titles_and_texts_are_escaped():
    nasty = '<s>&"</script><script>alert(1)</script>'
    tokens = [nasty, " ", "\n", "a&b", "</script>"]
    page = render_training_view([made(nasty, tokens=tokens, about=nasty, curves={nasty: [1, 2, 3]})], title=nasty)
    scripts = re.findall(r"<script[^>]*>", page)
    assert scripts == ['<script type="application/json" id="data">', "<script>"]
    assert page.count("</script>") == 2
    (run,) = embedded(page)["runs"]
    assert run["tokens"] == [nasty, "␣", "\\n", "a&b", "</script>"]
    assert (run["title"], run["about"], run["curves"][0][0]) == (nasty,) * 3
    assert f"<h1>{html.escape(nasty, quote=False)}</h1>" in page.replace("&#34;", '"')


def test_without_scripts_there_is_a_strip_of_steps_in_the_colours_of_the_weights():
    steps = [0, 1, 2, 4, 8, 16, 32, 1000]
    view = made(steps=steps, shape=(6, 2, 5))
    eye = np.tile(np.eye(5), (6, 2, 1, 1))
    view = view._replace(frames=[frame._replace(attention=eye) for frame in view.frames])
    page = without_scripts(render_training_view([view]))
    assert re.findall(r"<figcaption>step (.*?)</figcaption>", page)[:5] == ["0", "2", "8", "16", "1,000"]
    assert [layer for layer in range(1, 7) if f"Layer {layer} of 6, head 1 of 2" in page] == [1, 3, 4, 6]
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 5 * 4
    image = plt.imread(io.BytesIO(base64.b64decode(images[0])))[..., :3]
    assert image.shape == (5, 5, 3)
    dark, light = image[np.eye(5, dtype=bool)], image[~np.eye(5, dtype=bool)]
    assert dark.mean() < 0.3 < 0.9 < light.mean()
    assert "@media print" in page
    assert "<noscript>" in page


def test_charts_of_the_strip_show_each_position_at_its_height():
    values = np.array([1.0, 10.0, 100.0, 100.0, 10.0])
    frame = Frame(0, np.tri(5)[None, None], np.tile(values, (1, 1, 1)), np.array([[0.0, 1.0, 2.0, 3.0, 4.0]]))
    page = render_training_view([made(steps=(0,), curves={})._replace(frames=[frame])])
    charts = re.findall(r'<svg class="dots".*?</svg>', page)
    assert len(charts) == 2
    assert "value norms from 1 to 100, logarithmic; residual norms from 0 to 4." in page
    for chart, expected in zip(charts, ([0, 0.5, 1, 1, 0.5], [0, 0.25, 0.5, 0.75, 1]), strict=True):
        dots = sorted((int(x), float(y)) for x, y in re.findall(r"M(\d+) (\d+)h0", chart))
        heights = np.array([y for _, y in dots])
        np.testing.assert_allclose((heights[0] - heights) / (heights[0] - heights.min()), expected, atol=0.02)
        (first,), (trigger,) = (re.findall(rf'class="{kind}" d="M(\d+)', chart) for kind in ("first", "trigger"))
        assert [int(first), int(trigger)] == [x for x, _ in dots[:2]]


def test_long_sequences_are_cut_and_the_page_says_so():
    view = made(steps=(0,), shape=(1, 1, MOST_TOKENS + 9), curves={})
    page = render_training_view([view])
    (run,) = embedded(page)["runs"]
    assert run["weights"].shape == (1, 1, 1, MOST_TOKENS, MOST_TOKENS)
    np.testing.assert_allclose(run["residual_norms"][0], view.frames[0].residual_norms[:, :MOST_TOKENS], rtol=1e-6)
    assert (len(run["triggers"]), run["token_count"]) == (MOST_TOKENS, MOST_TOKENS + 9)
    assert f"The first {MOST_TOKENS} of {MOST_TOKENS + 9} tokens." in without_scripts(page)


def test_five_runs_of_the_usual_size_stay_below_three_megabytes():
    views = [made(str(seed), range(30), (3, 1, 64), seed=seed, curves={}) for seed in range(5)]
    assert len(render_training_view(views)) < 3e6


def test_the_same_views_give_the_same_file(tmp_path):
    for name in ("a", "b"):
        write_training_view([made("x"), made("y", seed=1)], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


VIEW = made()


def with_frame(**fields):
    return VIEW._replace(frames=[*VIEW.frames[:2], VIEW.frames[2]._replace(**fields)])


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "training views"),
        ([VIEW, VIEW], "of different titles"),
        ([VIEW._replace(frames=[])], "steps of run 'softmax': "),
        ([with_frame(step=1)], r"steps of run 'softmax': \[0, 1, 1\]"),
        ([VIEW._replace(is_trigger=[True])], "is_trigger of run 'softmax' has 1 entries\nallowed: one per token, 5"),
        ([VIEW._replace(curves={"risk": [1.0]})], "curve 'risk' of run .* has 1 values\nallowed: one per frame, 3"),
        ([with_frame(attention=np.ones((2, 1, 5, 4)))], r"attention of run .* at step 10 has shape \(2, 1, 5, 4\)"),
        ([with_frame(value_norms=np.ones((2, 5)))], r"value_norms .* \(2, 5\)\nallowed: \[L, N, T\] = \(2, 1, 5\)"),
        ([with_frame(residual_norms=np.ones((2, 6)))], r"residual_norms .*\nallowed: \[L, T\] = \(2, 5\)"),
        ([with_frame(value_norms=np.full((2, 1, 5), np.nan))], "value_norms .* at step 10 has values .* not finite"),
        ([with_frame(attention=np.full((2, 1, 5, 5), -0.1))], "attention .* has values that are negative"),
        ([VIEW._replace(tokens=[], is_trigger=[])], "2 layers, 1 heads, 0 tokens"),
        ([made(steps=(0,), shape=(2, 1, 4))._replace(tokens=list("abcde"), is_trigger=[False] * 5, curves={})],
         r"attention .* \(2, 1, 4, 4\)\nallowed: \[L, N, T, T\] = \(2, 1, 5, 5\)"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_name(views, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        render_training_view(views)


def one_row(seed):
    return [Case("row", {}, {"x": 1.0})]


def test_an_experiment_with_views_writes_the_page_and_links_to_it(tmp_path):
    experiment = Experiment(name="made", title="made up", compute=one_row, views=lambda done: [VIEW])
    done = run_experiment(experiment, "tiny", (0,), tmp_path)
    write_report(make_report(done), tmp_path)
    assert '<a href="training.html">' in (tmp_path / "report.html").read_text()
    page = (tmp_path / "training.html").read_text()
    assert "<h1>Made up: over training</h1>" in page
    assert '<a href="report.html">' in page
    (tmp_path / "again").mkdir()
    rerender(experiment, done.raw, tmp_path / "results.json", tmp_path / "again")
    assert (tmp_path / "again/training.html").read_text() == page


def gone(results):
    raise UserError("no such arrays: x.npz")


@pytest.mark.parametrize(("failed", "views"), [(True, lambda done: [VIEW]), (False, lambda done: []), (False, None)])
def test_without_views_there_is_neither_page_nor_link(tmp_path, failed, views):
    row = {"variant": "row", "seed": 0, "overrides": {}, "metrics": {"x": 1.0}}
    raw = {"rows": [row, *([{**row, "seed": 1, "metrics": {}, "failed": "not finite"}] if failed else [])]}
    raw["provenance"] = {"versions": {}, "date": "-", "device": "-", "data": [], "wall_seconds": 0}
    experiment = Experiment(name="made", title="made up", compute=one_row, views=views)
    write_report(make_report(Results(experiment, "tiny", (0,), tmp_path, raw)), tmp_path)
    assert "training.html" not in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "training.html").exists()


def test_a_report_is_written_again_where_the_arrays_of_its_views_are_gone(tmp_path):
    experiment = Experiment(name="made", title="made up", compute=one_row, views=gone)
    raw = run_experiment(experiment, "tiny", (0,), tmp_path).raw
    rerender(experiment, raw, tmp_path / "results.json", tmp_path)
    assert "training.html" not in (tmp_path / "report.html").read_text()
