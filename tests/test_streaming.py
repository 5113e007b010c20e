"""Long texts through a rolling window: which tokens are compared, and the verdicts on made-up results."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from planted_results import made_up
from tiny_run import drawn_params

from orthojax.config import replace
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.streaming import CLAIMS, EXPERIMENT, MODES, STREAMED, TIMES
from orthojax.experiments.pretrained import streamed as streamed_smollm2
from orthojax.experiments.results import Results
from orthojax.model import LoadedModel, Transformer
from orthojax.train import Inputs

T, VOCABULARY = 8, 32
SMALL = {
    "model.num_layers": 1, "model.d_model": 16, "model.num_heads": 2, "model.d_mlp": 32,
    "model.vocab_size": VOCABULARY, "data.sequence_length": T, "model.max_length": T,
}  # fmt: skip


def streamed(**parameters):
    config = replace(EXPERIMENT.variants_at("tiny")[0].config, SMALL)
    model = Transformer(config.model)
    params = drawn_params(config.model, 0.4)  # losses that differ from token to token
    params["layers_0"]["attention"] |= parameters
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, 128 * 8 * T + 1, dtype=np.uint16)
    rows = np.full((1, T + 1), VOCABULARY - 1, np.int32)
    inputs = Inputs(lambda step: rows, rows, None, {}, None, held_out=tokens)
    return STREAMED.measure(LoadedModel(model, params, config, None, Path()), inputs, lambda what: None)


@pytest.mark.slow
def test_the_same_tokens_are_compared():
    """A model without attention predicts a token from the one before it alone, wherever that stands."""
    found = streamed(output={"kernel": jnp.zeros((16, 16))})
    ratios = {name: value for name, value in found.metrics.items() if "ratio" in name}
    assert len(ratios) == len(MODES) * len(TIMES)
    assert list(ratios.values()) == pytest.approx([1.0] * len(ratios), rel=1e-5)
    assert found.metrics["perplexity_anew_4"] != pytest.approx(found.metrics["perplexity_anew_8"], rel=1e-4)
    for losses in found.arrays.values():
        assert losses.shape == (32,)
    with_attention = streamed()
    for name in ratios:
        assert abs(with_attention.metrics[name] - 1) > 1e-4


GOOD = {
    **{"perplexity": 20.0, "first_attention_fraction": 0.3, "perplexity_anew_4": 20.0, "perplexity_anew_8": 20.0},
    **{f"perplexity_ratio_{mode}_{times}": 1.0 for mode in MODES for times in TIMES},
}
SOFTMAX = {
    **{f"perplexity_ratio_window_{times}": 1.5 for times in TIMES},
    **{f"perplexity_ratio_sinks_{times}": 1.05 for times in TIMES},
    **{f"perplexity_ratio_whole_{times}": 1.4 for times in TIMES},
}


@pytest.mark.parametrize(
    ("softmax", "softmax1", "verdicts"),
    [
        ({}, {}, ["holds"] * 4),
        ({"perplexity_ratio_window_4": 1.04}, {}, ["does not hold", "does not hold", "holds", "holds"]),
        ({"perplexity_ratio_sinks_8": 1.2}, {}, ["holds", "does not hold", "holds", "holds"]),
        ({}, {"perplexity_ratio_window_8": 1.03}, ["holds", "holds", "does not hold", "holds"]),
        ({}, {"perplexity_ratio_whole_8": 1.3}, ["holds", "holds", "holds", "does not hold"]),
        ({"perplexity_ratio_whole_8": 0.9}, {}, ["holds", "holds", "holds", "not testable at this scale"]),
        ({"first_attention_fraction": 0.1}, {}, ["not testable at this scale"] * 4),
    ],
)
def test_verdicts(softmax, softmax1, verdicts):
    of = {"softmax": GOOD | SOFTMAX | softmax, "softmax1": GOOD | softmax1, "cured": GOOD}
    results = made_up(EXPERIMENT, (of | {"residual": GOOD}).get, scale="tiny")
    assert [judge(claim, results).verdict for claim in CLAIMS[:4]] == verdicts


@pytest.mark.parametrize(
    ("residual", "verdicts"),
    [
        ({}, ["holds"] * 3),
        ({"perplexity_ratio_window_8": 1.03}, ["does not hold", "holds", "holds"]),
        ({"kurtosis_first": 3.6}, ["holds", "does not hold", "holds"]),
        ({"first_attention_fraction": 0.2}, ["holds", "holds", "does not hold"]),
    ],
)
def test_verdicts_on_the_d_model_axes(residual, verdicts):
    without = {"first_attention_fraction": 0.08, "kurtosis_first": 3.0, "kurtosis_rest": 3.0}
    softmax = GOOD | SOFTMAX | without | {"first_attention_fraction": 0.3, "kurtosis_first": 8.0}
    of = {"softmax": softmax, "softmax1": GOOD, "cured": GOOD, "residual": GOOD | without | residual}
    results = made_up(EXPERIMENT, of.get, scale="tiny")
    assert [judge(claim, results).verdict for claim in CLAIMS[4:]] == verdicts


def test_smollm2_in_windows():
    """Without the model: what is made of its losses, and the verdicts."""
    losses = np.repeat(np.arange(5.0), 256) + np.array([[0.5], [-0.5]])
    found = streamed_smollm2.summary(losses)
    assert [found[f"loss_{i}"] for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found["perplexity"] == pytest.approx(np.exp(2.5))

    def verdicts(**perplexities):
        rows = [{"variant": name, "seed": 0, "overrides": {}, "metrics": {"perplexity": value}}
                for name, value in perplexities.items()]  # fmt: skip
        results = Results(streamed_smollm2.EXPERIMENT, "tiny", (0,), Path(), {"rows": rows}, None)
        return [judge(claim, results).verdict for claim in streamed_smollm2.CLAIMS]

    assert verdicts(window=21.7, sinks=12.1, whole=10.7) == ["holds", "holds"]
    assert verdicts(window=15.7, sinks=12.1, whole=10.7) == ["does not hold", "holds"]
    assert verdicts(window=21.7, sinks=14.1, whole=10.7) == ["holds", "does not hold"]
