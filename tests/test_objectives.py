"""Masked tokens and span corruption: what is corrupted and counted, and full and prefix attention that go with them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_oracle import TOKENS, numpy_forward, random_params
from scipy.special import log_softmax
from tiny_run import TINY

from orthojax.analysis import chance_of_first
from orthojax.analysis.catalogue import conditions, define
from orthojax.cards import measure_model
from orthojax.config import ModelConfig, replace
from orthojax.data.batches import Corruption, cut_spans, mask_tokens, span_sizes
from orthojax.errors import UserError
from orthojax.experiments.ours.bidirectional import KEYS
from orthojax.model import LoadedModel, Transformer, flops_per_token, init_cache
from orthojax.train import Inputs, model_flops_per_token, open_inputs
from orthojax.train.step import loss_sum_nats

FULL = {"model.attention_mask": "full", "data.objective": "masked"}
PREFIX = {"model.attention_mask": "prefix", "data.objective": "span_corruption"}
V, TEXT = 400, 258
rng = np.random.default_rng


@given(st.integers(8, 300), st.integers(0, 2**32 - 1))
def test_masked_rows_keep_all_that_is_no_target(length, seed):
    tokens = rng(seed).integers(0, TEXT, length)
    inputs, targets = mask_tokens(tokens, rng(seed), V, TEXT).reshape(2, length)
    counted = targets >= 0
    assert counted.sum() == max(1, round(0.15 * length))
    assert not counted[0]
    np.testing.assert_array_equal(targets[counted], tokens[counted])
    np.testing.assert_array_equal(inputs[~counted], tokens[~counted])


def test_targets_are_masked_replaced_and_kept_as_in_bert():
    tokens = np.full(64, TEXT)  # no id of text, so that a replacement shows
    rows = np.stack([mask_tokens(tokens, rng(seed), V, TEXT) for seed in range(2000)]).reshape(-1, 2, 64)
    counted = rows[:, 1] >= 0
    chosen = rows[:, 0][counted]
    shares = [np.mean(chosen == V - 1), np.mean(chosen < TEXT), np.mean(chosen == TEXT)]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.01)  # 20,000 draws: three deviations are 0.008
    np.testing.assert_allclose(counted[:, 1:].mean(0), 10 / 63, atol=0.03)  # every position alike
    replaced = np.bincount(chosen[chosen < TEXT], minlength=TEXT)
    assert 0 < replaced.min() <= replaced.max() < 30  # of a mean of 8


@given(st.integers(8, 300), st.integers(0, 2**32 - 1))
def test_spans_and_what_is_left_make_up_the_text(length, seed):
    n, noise, spans = span_sizes(length)
    tokens, end = rng(seed).integers(0, TEXT, n), n - noise + spans
    inputs, targets = cut_spans(tokens, rng(seed), V, length).reshape(2, length)
    assert np.flatnonzero(inputs == V - 1).tolist() == [end]
    np.testing.assert_array_equal(targets >= 0, np.arange(length) >= end)
    np.testing.assert_array_equal(targets[end:-1], inputs[end + 1 :])
    asked, text = targets[end:], inputs[:end]
    sentinels = V - 2 - np.arange(spans + 1)
    assert asked[asked >= TEXT].tolist() == sentinels.tolist()
    assert text[text >= TEXT].tolist() == sentinels[:-1].tolist()
    cut = dict(zip(sentinels, np.split(asked, np.flatnonzero(asked >= TEXT)[1:]), strict=True))
    restored = np.concatenate([cut[token][1:] if token >= TEXT else [token] for token in text])
    assert restored.tolist() == tokens.tolist()
    assert length < 64 or (abs(noise / n - 0.15) < 0.015 and abs(noise / spans - 3) < 0.6)


def test_all_ways_to_cut_are_equally_likely():
    n, noise, spans = span_sizes(44)
    assert (noise, spans) == (6, 2)  # spans of 1 + 5 to 5 + 1, and as many ways for the text between them
    rows = [cut_spans(np.zeros(n, int), rng(seed), V, 44)[:44].tolist() for seed in range(4000)]
    span = [row.index(V - 3, row.index(V - 1)) - row.index(V - 1) - 2 for row in rows]  # behind the first sentinel
    np.testing.assert_allclose(np.bincount(span, minlength=6)[1:] / 4000, 0.2, atol=0.03)
    text = [row.index(V - 2) for row in rows]
    np.testing.assert_allclose(np.bincount(text)[1:] / 4000, 1 / (n - noise - 1), atol=0.015)


@pytest.mark.parametrize("objective", ["masked", "span_corruption"])
def test_a_row_depends_on_its_key_and_place_alone(objective):
    corrupt = Corruption(objective, 64, V, TEXT)
    text = rng(0).integers(0, TEXT, (6, corrupt.text_length))
    whole = corrupt(text, (0, 7, 3))
    np.testing.assert_array_equal(corrupt(text[2:5], (0, 7, 3), 2), whole[2:5])
    for other in ((0, 8, 3), (0, 7, 4), (1, 7, 3)):
        assert (corrupt(text, other) != whole).any(axis=1).all()
    assert len(np.unique(corrupt(np.tile(text[:1], (6, 1)), (0, 7, 3)), axis=0)) == 6


def run(changes, **more):
    model = {"model.vocab_size": 272, "model.max_length": 24, "model.position": "rotary"}
    data = {"data.tokenizer": "bytes", "data.sequence_length": 24, "data.bos": True}
    return replace(TINY, {**changes, **model, **data, "eval.sequences": 8, **more})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens the inputs of a config on a text whose tokens are kept."""
    folder = tmp_path_factory.mktemp("cache")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"{i}: The quick brown fox jumps over the lazy dog. " * 40)
    source = {"data.kind": "text", "data.paths": (str(folder / "*.txt"),)}
    return lambda config: open_inputs(replace(config, source), folder)


def test_batches_are_functions_of_seed_and_step(opened):
    inputs, others = opened(run(FULL)), opened(run(FULL, **{"data.seed": 9}))
    np.testing.assert_array_equal(inputs.batch_rows(5, 1, 3), inputs.batch(5)[1:3])
    assert (inputs.batch(4) != inputs.batch(5)).any()
    assert (others.batch(0) != inputs.batch(0)).any()
    np.testing.assert_array_equal(others.evaluation, inputs.evaluation)  # one set for every seed
    assert inputs.bits_per_nat_of_loss is None


def test_ids_for_masks_and_sentinels_must_be_there(opened):
    for changes, needed in ((FULL, 259), (PREFIX, 258 + 1 + 2)):
        opened(run(changes, **{"model.vocab_size": needed}))
        with pytest.raises(UserError, match=f"at least {needed}"):
            opened(run(changes, **{"model.vocab_size": needed - 1}))


@pytest.mark.parametrize("changes", [FULL, PREFIX], ids=["masked", "span_corruption"])
def test_loss_and_measure_of_keys_are_those_of_the_float64_oracle(changes, opened):
    config = run(changes)
    inputs, params, rows = opened(config), random_params(config.model), opened(config).batch(0)
    assert rows.shape == (4, config.data.row_length)
    losses = []
    for row in rows:
        tokens, targets = row.reshape(2, 24)
        log_probs = log_softmax(numpy_forward(config.model, params, tokens)[0], axis=-1)
        losses += [-log_probs[t, target] for t, target in enumerate(targets) if target >= 0]
    model = Transformer(config.model)
    for options in ({}, {"chunk_positions": 5}):
        total, count = loss_sum_nats(model, params, jnp.asarray(rows), **options)
        assert int(count) == len(losses)
        assert float(total) == pytest.approx(sum(losses), rel=1e-4)

    at, of = np.zeros((4, 24)), np.zeros((4, 272))  # mass, share, kurtosis, count by position and id
    for row in inputs.evaluation:
        for seen in numpy_forward(config.model, params, row[:24])[1]:
            visible, x = seen["visible"][0], seen["residual"] - seen["residual"].mean(-1, keepdims=True)
            mass, share = seen["attention_weights"].mean(0).sum(0), (visible / visible.sum(-1, keepdims=True)).sum(0)
            values = np.stack([mass, share, (x**4).mean(-1) / (x**2).mean(-1) ** 2, np.ones(24)])
            at += values
            np.add.at(of.T, row[:24], values.T)
    found = KEYS.measure(LoadedModel(model, params, config, None, Path()), inputs, lambda what: None)
    position, ids = at[0] / at[1], np.flatnonzero(of[3])
    over, kurtoses = of[0, ids] / of[1, ids], of[2, ids] / of[3, ids]
    expected = {"first_over_share": position[0], "position_over_share": position.max(), "id_over_share": over.max(),
                "position_of_largest": position.argmax(), "id_of_largest": ids[over.argmax()],
                "last_id_over_share": over[-1], "kurtosis_of_id": kurtoses.max(),
                "id_of_kurtosis": ids[kurtoses.argmax()]}  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_what_needs_a_causal_model_refuses_others():
    for mask in ("full", "prefix"):
        with pytest.raises(UserError, match="attention_mask 'causal'"):
            init_cache(ModelConfig(attention_mask=mask), 1, 8)
    config = run(FULL)
    loaded = LoadedModel(Transformer(config.model), {}, config, None, Path())
    with pytest.raises(UserError, match="a causal model"):
        measure_model(loaded, Inputs(lambda step: TOKENS, TOKENS, None, {}, None))


def test_chance_of_the_first_token():
    assert chance_of_first(64, causal=False) == pytest.approx(1 / 64)
    assert chance_of_first(64, n=1.0, causal=False) == pytest.approx(1 / 65)
    for changes, expected in ((FULL, [1 / 24, 1 / 25]), (PREFIX, [None, None])):
        chances = [define(f"first_attention_{name}").chance(conditions(run(changes))) for name in ("fraction", "mass")]
        assert chances == (expected if changes == PREFIX else pytest.approx(expected))


def test_full_attention_computes_all_products():
    causal = ModelConfig(num_layers=3)
    full = dataclasses.replace(causal, attention_mask="full")
    assert model_flops_per_token(full, 64) == flops_per_token(causal, 64)
    assert model_flops_per_token(full, 64) - model_flops_per_token(causal, 64) == 6 * 3 * 64 * causal.d_model
