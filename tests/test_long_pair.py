"""The overnight pair: what rounding costs at every checkpoint that is kept, and the verdicts on made-up results."""

import numpy as np
import pytest
from planted_results import made_up
from tiny_run import TINY, blank_state, drawn_params, inputs

from orthojax.config import replace
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.long_pair import CLAIMS, DAMAGE, EXPERIMENT, SETTINGS
from orthojax.train import Checkpoints, evaluate, load


@pytest.mark.slow
def test_every_kept_checkpoint_is_evaluated_as_it_is_and_rounded(tmp_path, monkeypatch):
    for name in [*SETTINGS][2:]:  # each is a program more
        monkeypatch.delitem(SETTINGS, name)
    config = replace(TINY, {"train.checkpoint_every_steps": 2, "train.keep_every_steps": 4})
    blank, kept = blank_state(config), {"keep": 2, "keep_every_steps": config.train.keep_every_steps}
    with Checkpoints(tmp_path / "checkpoints", **kept) as checkpoints:
        for step in range(2, 13, 2):
            params = drawn_params(config.model, 0.05 * step)
            checkpoints.save(blank._replace(step=np.int32(step), params=params), config, inputs().provenance)
    said = []
    found = DAMAGE.measure(load(tmp_path), inputs(), said.append)
    assert found.arrays["steps"].tolist() == [4, 8, 12]
    assert len(said) == DAMAGE.stages(config) == 3
    for i, step in enumerate((4, 8, 12)):
        expected = evaluate(load(tmp_path / f"checkpoints/{step}"), inputs(), settings=SETTINGS)
        assert found.arrays["nats_float32"][i] == pytest.approx(expected["loss_nats"], rel=1e-6)
        for name in SETTINGS:
            assert np.exp(found.arrays[f"nats_{name}"][i]) == pytest.approx(expected[f"perplexity_{name}"], rel=1e-5)
    assert found.metrics == {f"perplexity_{name}": pytest.approx(expected[f"perplexity_{name}"]) for name in SETTINGS}


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
