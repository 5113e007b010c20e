"""What rounding costs: the perplexities of a small model against its own definition, and what overflows float16."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_results import made_up
from tiny_run import TINY, inputs

from orthojax import quant
from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.damage import CLAIMS, DAMAGED, EXPERIMENT, LARGEST_FLOAT16, ROUNDED, STATIC
from orthojax.model import LoadedModel, Transformer
from orthojax.train import evaluate


def damaged(scan_layers=False, factor=1.0, settings=None):
    config = replace(TINY, {"model.scan_layers": scan_layers})
    model = Transformer(config.model)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    if factor > 1:  # a norm follows before the head
        params["layers_0"]["mlp"]["output"]["kernel"] *= factor
    loaded = LoadedModel(model, params, config, None, Path())
    said = []
    found = DAMAGED.measure(loaded, inputs(), said.append)
    assert len(said) == DAMAGED.stages(config)
    assert found.arrays == {}
    assert found.metrics.keys() == (ROUNDED.keys() - {f"perplexity_{name}" for name in quant.SETTINGS}) | {
        "largest_value"
    }
    return found.metrics, evaluate(loaded, inputs(), settings=settings or {}, quantize_head=True)


def test_settings_are_those_of_evaluate_stacked_or_not():
    of = {"int8_coarse": quant.INT8_COARSE, "w4a4": quant.setting_named("w4a4")}
    found, evaluated = damaged(scan_layers=True, settings=of)
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


def test_what_overflows_float16_predicts_nothing():
    found, evaluated = damaged(factor=1e6)
    assert found["largest_value"] > LARGEST_FLOAT16
    assert found["perplexity_float16"] > 1e300
    assert found["perplexity_bfloat16"] < 1e300
    assert np.isfinite(evaluated["perplexity"])


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
