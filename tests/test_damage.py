"""What rounding costs: the perplexities of a small model against its own definition, and what overflows float16."""

from pathlib import Path

import numpy as np
import pytest
from planted_results import made_up
from tiny_run import TINY, drawn_params, inputs

from orthojax import quant
from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.damage import CLAIMS, DAMAGED, EXPERIMENT, FOUR_BITS, LARGEST_FLOAT16, ROUNDED, STATIC
from orthojax.model import LoadedModel, Transformer
from orthojax.train import evaluate

PAPERS = dict(quant.SETTINGS)


@pytest.fixture
def one_setting(monkeypatch):
    """Of the paper's settings one, with which the head is rounded: each is a program more."""
    for name in PAPERS.keys() - {"int8_coarse"}:
        monkeypatch.delitem(quant.SETTINGS, name)


def damaged(scan_layers=True, factor=1.0, settings=None):
    config = replace(TINY, {"model.scan_layers": scan_layers})
    model = Transformer(config.model)
    params = drawn_params(config.model, 0.3)
    if factor > 1:  # a norm follows before the head
        params["layers"]["mlp"]["output"]["kernel"] *= factor
    loaded = LoadedModel(model, params, config, None, Path())
    said = []
    found = DAMAGED.measure(loaded, inputs(), said.append)
    assert len(said) == DAMAGED.stages(config)
    assert found.arrays == {}
    left_out = {f"perplexity_{name}" for name in PAPERS}
    left_out |= {f"perplexity_{name}_with_head" for name in PAPERS.keys() - quant.SETTINGS.keys()}
    assert found.metrics.keys() == (ROUNDED.keys() - left_out) | {"largest_value"}
    return found.metrics, evaluate(loaded, inputs(), settings=settings or {}, quantize_head=True)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_settings_are_those_of_evaluate_stacked_or_not(scan_layers):
    of = {"int8_coarse": quant.INT8_COARSE, "w4a4": quant.setting_named("w4a4")}
    found, evaluated = damaged(scan_layers, settings=of)
    assert found["perplexity_w4a4"] == pytest.approx(evaluated["perplexity_w4a4"], rel=1e-5)
    assert found["perplexity_int8_coarse_with_head"] == pytest.approx(
        evaluated["perplexity_int8_coarse_with_head"], rel=1e-5
    )
    assert found["perplexity_w4a4"] != pytest.approx(evaluated["perplexity"], rel=1e-4)
    for name in STATIC:  # the scales of one batch are near those of another
        assert found[f"perplexity_{name}_static"] == pytest.approx(evaluated["perplexity"], rel=0.05)
    assert found["perplexity_float16"] == pytest.approx(evaluated["perplexity"], rel=1e-2)
    assert abs(found["perplexity_bfloat16"] / evaluated["perplexity"] - 1) < 0.1
    assert 0 < found["largest_value"] < LARGEST_FLOAT16


@pytest.mark.slow
def test_four_bits_alone_are_those_of_the_whole_measure(one_setting):
    config = replace(TINY, {"model.scan_layers": True})
    loaded = LoadedModel(Transformer(config.model), drawn_params(config.model, 0.3), config, None, Path())
    said = []
    found = FOUR_BITS.measure(loaded, inputs(), said.append)
    assert said == ["perplexity_w4a8", "perplexity_w4a4"]
    assert FOUR_BITS.stages(config) == 2
    whole, _ = damaged()
    assert found.metrics == {name: pytest.approx(whole[name]) for name in said}


@pytest.mark.usefixtures("one_setting")
def test_what_overflows_float16_predicts_nothing():
    found, evaluated = damaged(factor=1e6, settings={"int8_coarse": quant.INT8_COARSE})
    assert found["largest_value"] > LARGEST_FLOAT16
    assert found["perplexity_float16"] > 1e300
    assert found["perplexity_bfloat16"] < 1e300
    assert np.isfinite(evaluated["perplexity"])
    assert found["perplexity_int8_coarse_with_head"] == pytest.approx(
        evaluated["perplexity_int8_coarse_with_head"], rel=1e-5
    )


def test_nothing_trains_in_float16():
    with pytest.raises(UserError, match="no loss scaling"):
        replace(TINY, {"model.dtype": "float16"})


GOOD = {"perplexity": 20.0, "largest_value": 90.0, **dict.fromkeys(ROUNDED, 20.01)}
VANILLA = {"perplexity_w4a4": 22.0, "perplexity_int8_coarse_static": 20.5}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"cured_256": {"perplexity_w4a4": 23.0}}, 0),
        ({"vanilla_256": {"perplexity_int8_coarse": 20.0}}, 1),
        ({"vanilla_128": {"perplexity_int8_coarse_static": 19.0}}, 2),
        ({"vanilla_128": {"perplexity_float16": 1e304}}, 3),
    ],
)
def test_verdicts(changes, wrong):
    numbers = {f"cured_{width}": GOOD for width in (128, 256)} | {
        f"vanilla_{width}": GOOD | VANILLA | {"perplexity_int8_coarse": 20 + width / 1000} for width in (128, 256)
    }
    of = {name: numbers[name] | changes.get(name, {}) for name in numbers}
    results = made_up(EXPERIMENT, of.get, scale="tiny")
    verdicts = [judge(claim, results).verdict for claim in CLAIMS]
    assert verdicts == ["holds" if i != wrong else "does not hold" for i in range(len(CLAIMS))]
