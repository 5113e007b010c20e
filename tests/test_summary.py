"""`analysis.summarize`: the numbers of its functions, with levels of chance that equal logits and Gaussians have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from orthojax import analysis, ops

L, B, N, T, D = 3, 2, 4, 12, 256
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(L, B, T, D)).astype(np.float32)
LOGITS = RNG.normal(size=(L, B, N, T, T)).astype(np.float32)
CAUSAL = np.tril(np.ones((T, T), bool))


def weights_of(logits, normalizer):
    return np.asarray(normalizer(jnp.asarray(logits), where=CAUSAL))


SOFTMAX, SOFTMAX1 = (weights_of(LOGITS, normalizer) for normalizer in (ops.softmax, ops.softmax1))


def test_numbers_are_those_of_the_functions():
    summary = analysis.summarize(HIDDEN, SOFTMAX)
    assert [row.name for row in summary.rows][-3:] == ["first_attention_fraction", "first_attention_mass", "sink_rate"]
    for row in summary.rows:
        layers = SOFTMAX if row.name in ("first_attention_fraction", "first_attention_mass") else HIDDEN
        if row.name != "sink_rate":
            expected = [float(getattr(analysis, row.name)(layer)) for layer in layers]
            np.testing.assert_allclose(row.by_layer, expected, rtol=1e-6)
        assert row.value == pytest.approx(row.by_layer.mean())
    assert summary.metrics["sink_rate"] == np.mean(SOFTMAX[..., 0].mean((1, 3)) > 0.3)


def test_layers_may_come_stacked_listed_or_alone():
    stacked, listed = analysis.summarize(HIDDEN, SOFTMAX), analysis.summarize(list(HIDDEN), list(SOFTMAX))
    assert stacked.metrics == listed.metrics
    alone = analysis.summarize(HIDDEN[0], SOFTMAX[0])
    assert alone.metrics["kurtosis_rest"] == stacked.rows[1].by_layer[0]
    assert len(analysis.summarize(HIDDEN).rows) + len(analysis.summarize(weights=SOFTMAX).rows) == len(stacked.rows)


def rows_of(weights):
    return {row.name.removeprefix("first_attention_"): row for row in analysis.summarize(weights=weights).rows}


@pytest.mark.parametrize(("normalizer", "weights"), [(ops.softmax, SOFTMAX), (ops.softmax1, SOFTMAX1)])
def test_equal_logits_have_the_mass_of_chance(normalizer, weights):
    mass = rows_of(weights_of(0 * LOGITS, normalizer))["mass"]
    assert mass.value == pytest.approx(mass.chance)
    assert rows_of(weights)["mass"].chance == mass.chance


def test_windows_lower_the_level_of_chance():
    near = np.subtract.outer(np.arange(T), np.arange(T)) < 2
    rows = rows_of(np.asarray(ops.softmax(jnp.zeros((1, N, T, T)), where=CAUSAL & near)))
    assert rows["mass"].value == pytest.approx(rows["mass"].chance)
    assert rows["fraction"].chance == pytest.approx(analysis.chance_of_first(T, window=2))
    suppressed = SOFTMAX.copy()
    suppressed[..., 1:, 0] = 0.0
    assert rows_of(suppressed)["fraction"].chance == pytest.approx(analysis.chance_of_first(T))


def test_random_weights_have_the_fraction_of_chance():
    logits = np.random.default_rng(1).normal(size=(200, N, T, T))
    for weights, chance in ((weights_of(logits, ops.softmax), None), (np.asarray(jax.nn.softmax(logits)), 1 / T)):
        row = rows_of(weights)["fraction"]
        assert row.value == pytest.approx(row.chance, abs=4 * 0.5 / np.sqrt(200 * N * T))
        assert chance in (None, row.chance)


def test_other_normalizers_have_no_chance_mass():
    assert np.isnan(rows_of(2.0 * SOFTMAX)["mass"].chance)
    assert "nan" not in str(analysis.summarize(weights=2.0 * SOFTMAX))


def test_gaussian_states_have_the_numbers_of_chance():
    many = np.random.default_rng(2).normal(size=(1, 400, 2, D))
    rows = {row.name: row for row in analysis.summarize(many).rows}
    for name in ("kurtosis_first", "kurtosis_rest", "norm_ratio_first", "norm_ratio_rest", "residual_norm_first"):
        assert rows[name].value == pytest.approx(rows[name].chance, rel=0.05)
    many[:, :, 0, 5] = 100.0
    summary = analysis.summarize(many)
    assert summary.metrics["kurtosis_first"] > 0.9 * D
    line = next(line for line in str(summary).splitlines() if line.startswith("kurtosis_first"))
    assert line.split()[2] == "3"


test_wrong_arrays_are_refused = refused((
    lambda _, arrays: analysis.summarize(**arrays), [
        ({}, "without arrays"),
        ({"hidden": HIDDEN[0, 0]}, "hidden states"),
        ({"hidden": [HIDDEN[0], HIDDEN[1, 0]]}, "layer 1"),
        ({"hidden": {"layers_0": HIDDEN[0]}}, "dict"),
        ({"hidden": [(HIDDEN[0],)]}, "layer 0"),  # as flax sows them
        ({"hidden": [HIDDEN[0], HIDDEN[1] * np.nan]}, "layer 1"),
        ({"hidden": HIDDEN.swapaxes(1, 2), "weights": SOFTMAX}, "weights"),  # [positions, batch, channels]
        ({"weights": LOGITS}, "logits"),
        # Heads last.
        ({"hidden": np.ones((1, 2, 5, 8)), "weights": np.full((1, 2, 5, 5, 3), 0.2)},
         "weights over 3 keys, hidden states of 5 positions"),
    ], ValueError,
))  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_token(side):
    """Rows of 5, 8 and 3 tokens: each alone, and their mean."""
    rng, lengths, T = np.random.default_rng(0), (5, 8, 3), 8
    rows = [rng.normal(size=(2, 1, length, 16)) for length in lengths]
    weights = [np.tril(rng.uniform(size=(2, 1, 4, length, length))) for length in lengths]
    weights = [w / w.sum(-1, keepdims=True) for w in weights]
    hidden, attention, mask = np.full((2, 3, T, 16), 99.0), np.full((2, 3, 4, T, T), 0.5), np.zeros((3, T), int)
    for i, length in enumerate(lengths):
        own = slice(T - length, T) if side == "left" else slice(length)
        hidden[:, i, own], attention[:, i, :, own, own], mask[i, own] = rows[i][:, 0], weights[i][:, 0], 1
    found = analysis.summarize(hidden, attention, attention_mask=mask)
    alone = [analysis.summarize(x, w) for x, w in zip(rows, weights, strict=True)]
    for row in found.rows:
        same = [next(r for r in one.rows if r.name == row.name) for one in alone]
        if row.name != "sink_rate":
            assert row.value == pytest.approx(np.mean([r.value for r in same]), rel=1e-5), row.name
            assert row.chance == pytest.approx(np.mean([r.chance for r in same]), rel=1e-5, nan_ok=True), row.name
    masses = np.mean([w[..., 0].mean((1, 3)) for w in weights], axis=0)
    assert found.metrics["sink_rate"] == pytest.approx((masses > 0.3).mean())
    for wrong in (mask[:2], mask * 2, np.zeros_like(mask), np.eye(3, 8, dtype=int) + np.eye(3, 8, 4, dtype=int)):
        with pytest.raises(ValueError, match="attention_mask"):
            analysis.summarize(hidden, attention_mask=wrong)
