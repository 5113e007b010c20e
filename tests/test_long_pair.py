"""The long pair: what is measured at every checkpoint that is kept, and the verdicts on made-up results."""

import numpy as np
import pytest
from planted_results import made_up
from tiny_run import TINY, blank_state, drawn_params, inputs

from orthojax.config import replace
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.long_pair import CLAIMS, EXPERIMENT, GROWTH, LAYERS, SETTINGS
from orthojax.train import Checkpoints, evaluate, load
from orthojax.train.evaluation import validation_loss_nats


@pytest.mark.slow
def test_every_kept_checkpoint_is_evaluated_as_it_is_and_rounded(tmp_path, monkeypatch):
    for name in [*SETTINGS][2:]:  # each is a program more
        monkeypatch.delitem(SETTINGS, name)
    config = replace(TINY, {"train.checkpoint_every_steps": 2, "train.keep_every_steps": 4, "train.steps": 12})
    blank, kept = blank_state(config), {"keep": 2, "keep_every_steps": config.train.keep_every_steps}
    with Checkpoints(tmp_path / "checkpoints", **kept) as checkpoints:
        for step in range(2, 13, 2):
            params = drawn_params(config.model, 0.05 * step)
            checkpoints.save(blank._replace(step=np.int32(step), params=params), config, inputs().provenance)
    said = []
    found = GROWTH.measure(load(tmp_path), inputs(), said.append)
    assert found.arrays["steps"].tolist() == [4, 8, 12]
    assert len(said) == GROWTH.stages(config) == 9
    for i, step in enumerate((4, 8, 12)):
        params = load(tmp_path / f"checkpoints/{step}").params
        assert found.arrays["nats_float32"][i] == pytest.approx(validation_loss_nats(config, params, inputs()))
        expected = evaluate(load(tmp_path / f"checkpoints/{step}"), inputs(), settings=SETTINGS)
        for name in SETTINGS:
            assert np.exp(found.arrays[f"nats_{name}"][i]) == pytest.approx(expected[f"perplexity_{name}"], rel=1e-5)
        for name in LAYERS:
            assert found.arrays[name].shape == (3, config.model.num_layers)
            assert found.arrays[name][i].mean() == pytest.approx(expected[name], rel=1e-5)
    last = {name: pytest.approx(expected[name]) for name in [f"perplexity_{setting}" for setting in SETTINGS]}
    assert {name: value for name, value in found.metrics.items() if "/" not in name} == last
    by_step = {f"{name}/step_12": pytest.approx(expected[name]) for name in ("perplexity", "kurtosis_rest", *last)}
    assert by_step.items() <= {name: found.metrics[name] for name in by_step}.items()
    assert {f"kurtosis_first/step_{step}" for step in (4, 8, 12)} <= found.metrics.keys()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"first_attention_fraction": 0.3}, [0]),
        ({"kurtosis_first": 3.6}, [1]),
        ({"perplexity": 20.3}, [2]),
        ({"perplexity_w4a4": 26.0}, [3]),
    ],
)
def test_verdicts(changes, wrong):
    calm = {"perplexity": 20.0, "kurtosis_first": 3.0, "kurtosis_rest": 3.0, "first_attention_fraction": 0.03}
    calm |= {"first_attention_mass": 0.03, **{f"perplexity_{name}": 20.4 for name in SETTINGS}}
    sinking = calm | {"kurtosis_first": 40.0, "first_attention_fraction": 0.4}
    of = {"vanilla": sinking | {f"perplexity_{name}": 25.0 for name in SETTINGS}, "cured": calm | changes}
    results = made_up(EXPERIMENT, of.get, scale="overnight")
    verdicts = [judge(claim, results).verdict for claim in CLAIMS]
    assert [i for i, verdict in enumerate(verdicts) if verdict != "holds"] == wrong
