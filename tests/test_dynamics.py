"""Checkpoints of one run: which are found, and the verdicts on made-up and on real ones."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt
from tiny_run import TINY, blank_state, drawn_params, inputs, rows

from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.experiments.analyzing import Asked, Given, analyze, measure_models, pages
from orthojax.experiments.analyzing.dynamics import CLAIMS, checkpoint_series
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import judge
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.overview import compared_with
from orthojax.experiments.results import Results
from orthojax.formatting import number
from orthojax.train import Checkpoints

LENGTHS = {"data.sequence_length": 64, "model.max_length": 64}
CONFIG = replace(TINY, {"model.num_layers": 2, "model.normalizer": "softmax", **LENGTHS})
EXPERIMENT = Experiment(name="analyze", title="", variants=lambda scale: (), trains=False)
STEPS = (100, 200, 400)


def verdicts(tmp_path, config=CONFIG, **changes):
    """Of a run in whose second layer a sink, a drain, a peak and a gap grow with the steps, but for the changes."""
    values = {
        "first_attention_mass": (0.08, 0.2, 0.5),
        "value_norm_first": (2.0, 1.0, 0.5),
        "value_norm_rest": (2.0, 2.0, 2.0),
        "residual_norm_first": (10.0, 20.0, 40.0),
        "residual_norm_rest": (10.0, 10.0, 10.0),
        "sink_logit_gap": (0.0, 1.0, 3.0),
        **changes,
    }
    table = []
    for i, step in enumerate(STEPS):
        metrics = {f"{name}/layer_1": of[i] for name, of in values.items()}
        metrics |= dict.fromkeys((f"{name}/layer_0" for name in values), 1.0) | {"first_attention_mass/layer_0": 0.07}
        table.append({"variant": str(step), "seed": 0, "overrides": {}, "metrics": metrics})
    variants = [Variant(str(step), str(step), config) for step in STEPS]
    results = Results(EXPERIMENT, "given", (0,), tmp_path, {"rows": table}, variants)
    return [judge(claim, results).verdict for claim in CLAIMS]


NO = "does not hold"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, {}),
        ({"value_norm_first": (2.0, 1.0, 1.1)}, {1: NO}),
        ({"value_norm_first": (0.8, 0.9, 0.9)}, {1: NO}),  # small from the start
        ({"residual_norm_first": (10.0, 20.0, 19.0)}, {2: NO}),  # no peak at the end
        ({"residual_norm_first": (60.0, 10.0, 50.0)}, {2: NO}),  # not on a line
        ({"residual_norm_first": (30.0, 30.0, 30.0)}, {2: NO}),
        ({"sink_logit_gap": (2.5, 2.0, 3.0)}, {3: NO}),
    ],
)
def test_verdicts(tmp_path, changes, wrong):
    assert verdicts(tmp_path, **changes) == [wrong.get(i, "holds") for i in range(4)]


def test_without_a_sink_the_rest_is_not_testable(tmp_path):
    other = "not testable at this scale"
    for masses in ((0.08, 0.1, 0.12), (0.6, 0.55, 0.5)):  # equal logits give 0.074
        assert verdicts(tmp_path, first_attention_mass=masses) == [NO, other, other, other]
    mass = (0.05, 0.1, 0.13)  # of softmax-1 less is needed, since equal logits give it 0.059
    softmax1 = replace(CONFIG, {"model.normalizer": "softmax1"})
    assert verdicts(tmp_path, first_attention_mass=mass)[0] == NO
    assert verdicts(tmp_path, softmax1, first_attention_mass=mass)[0] == "holds"
    for model in (
        {"normalizer": "learned_sink"},
        {"attention_window": 8},
        {"normalizer": "relu", "attention_window": 8},
    ):
        changed = replace(CONFIG, {f"model.{name}": value for name, value in model.items()})
        assert verdicts(tmp_path, changed, first_attention_mass=mass)[0] == "holds"


@pytest.mark.parametrize(
    ("normalizer", "nothing"), [("softmax", 0), ("learned_sink", 1), ("softmax_n", 5), ("relu", None)]
)
@pytest.mark.parametrize("window", [None, 3])
def test_levels_of_chance_are_those_of_equal_logits(normalizer, nothing, window):
    fields = {"normalizer": normalizer, "normalizer_n": 5.0, "attention_window": window}
    config = replace(CONFIG, {f"model.{name}": value for name, value in fields.items()})
    seen, last = np.tril(np.ones((64, 64))), window or 64
    seen *= np.triu(np.ones((64, 64)), 1 - last)  # query t sees keys t - last + 1 to t
    found = compared_with({"perplexity": 1.0, "loss_nats": 0.0}, config)
    chance = (seen / seen.sum(1, keepdims=True))[:, 0].mean()
    assert found["first_attention_fraction"] == f"{number(chance)} by chance"
    of = "by chance, 64 tokens" + (", windows of 3" if window else "")
    assert chance_lines("first_attention_fraction", config) == {of: pytest.approx(chance)}
    if nothing is None:
        assert "first_attention_mass" not in found
    else:
        mass = (seen / (nothing + seen.sum(1, keepdims=True)))[:, 0].mean()
        assert found["first_attention_mass"] == f"{number(mass)} if all logits are 0"


@pytest.fixture
def run(tmp_path):
    """A workdir with three checkpoints."""
    state = blank_state(CONFIG)._replace(params=drawn_params(CONFIG.model))
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=3) as checkpoints:
        for step in (5, 20, 100):
            checkpoints.save(state._replace(step=np.asarray(step)), CONFIG, inputs().provenance)
    return tmp_path / "run"


def test_series(run):
    checkpoints = run / "checkpoints"
    wanted = {str(step): str(checkpoints / str(step)) for step in (5, 20, 100)}
    assert checkpoint_series([str(run)]) == checkpoint_series([str(checkpoints)]) == wanted
    assert list(checkpoint_series(["30=c,4=a", "12=b"]).items()) == [("4", "a"), ("12", "b"), ("30", "c")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["1=a,1=b"], "step 1 twice"),
        (["1=a"], "1 checkpoint"),
        ([], "0 checkpoints"),
        (["first=a,2=b"], "'first=a'"),
        (["2=,3=a"], "'2='"),
        (["smollm2"], "no checkpoints of a run in smollm2"),
    ],
)
def test_wrong_series(given, words):
    with pytest.raises(UserError, match=words):
        checkpoint_series(given)


@pytest.mark.slow
def test_the_page_of_two_checkpoints(run, tmp_path):
    np.save(tmp_path / "ids.npy", rows(0, 4))
    given, asked = Given(token_ids=str(tmp_path / "ids.npy"), length=8), Asked(settings=(), dynamics=True)
    models = {step: path for step, path in checkpoint_series([str(run)]).items() if step != "20"}
    analyzed = measure_models(models, given, asked, tmp_path / "found")
    *_, (folder, page) = pages(analyzed, asked, tmp_path / "found")
    plt.close("all")  # nothing is drawn here, which takes seconds
    assert folder == tmp_path / "found"
    assert any("2 checkpoints of one run, from step 5 to 100" in text for text in page.summary)
    assert {row[0] for table in page.tables for row in table.rows} >= {"5", "100"}
    drawn = {picture.name for picture in page.pictures}
    assert drawn >= {"value_norms", "residual_norms", "attention", "logit_gap", "kurtosis", "perplexity"}
    assert [row["variant"] for row in analyzed.results["rows"]] == ["5", "100"]


@pytest.mark.slow
def test_pages(run, tmp_path):
    np.save(tmp_path / "ids.npy", rows(0, 4))
    given = Given(token_ids=str(tmp_path / "ids.npy"), length=8)
    models, asked = checkpoint_series([str(run)]), Asked(settings=("int8_coarse",), dynamics=True)
    analyze(models, given, asked, tmp_path / "found")
    page = (tmp_path / "found" / "report.md").read_text()
    assert "3 checkpoints of one run, from step 5 to 100" in page
    assert "| 20 |" in page
    for name in ("value_norms", "residual_norms", "attention", "logit_gap", "kurtosis", "perplexity", "quantisation"):
        assert (tmp_path / "found" / "figures" / f"{name}.svg").exists()
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    assert [row["variant"] for row in found["rows"]] == ["5", "20", "100"]
    assert (tmp_path / "found" / "100" / "report.html").exists()
