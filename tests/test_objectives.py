"""Masked tokens and span corruption: what is corrupted and counted, and full and prefix attention that go with them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_oracle import numpy_forward, random_params
from tiny_run import TINY, bits

from orthojax.analysis import chance_of_first
from orthojax.analysis.catalogue import conditions, define
from orthojax.cards import measure_model
from orthojax.config import ModelConfig, replace
from orthojax.data.objectives import Corruption, cut_spans, mask_tokens, span_sizes
from orthojax.errors import UserError
from orthojax.experiments.ours.bidirectional import KEYS, observe_keys
from orthojax.model import LoadedModel, Transformer, flops_per_token, gpt2, init_cache, llama2, stack_layers
from orthojax.ops import cross_entropy_nats
from orthojax.train import Inputs, model_flops_per_token, open_inputs, train
from orthojax.train.step import loss_sum_nats, split_tokens

FULL = {"model.attention_mask": "full", "data.objective": "masked"}
PREFIX = {"model.attention_mask": "prefix", "data.objective": "span_corruption"}
V, TEXT = 400, 258
SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 8, "num_layers": 2, "num_heads": 4, "d_mlp": 12}
SMALL |= {"scan_layers": False}
END = SMALL["vocab_size"] - 1
# Prefixes of 3, of all 7, of the first of two, and none.
TOKENS = np.array([[4, 2, END, 1, 5, 3, 3], [1, 2, 3, 4, 5, 6, END], [END, 2, 3, END, 1, 1, 2], [1, 2, 3, 4, 5, 6, 7]])


# Rows.


def rng(seed=0):
    return np.random.default_rng(seed)


@given(st.integers(8, 300), st.integers(0, 2**32 - 1))
def test_masked_rows_keep_all_that_is_no_target(length, seed):
    tokens = rng(seed).integers(0, TEXT, length)
    inputs, targets = mask_tokens(tokens, rng(seed), V, TEXT).reshape(2, length)
    counted = targets >= 0
    assert counted.sum() == max(1, round(0.15 * length))
    assert not counted[0]
    np.testing.assert_array_equal(targets[counted], tokens[counted])
    np.testing.assert_array_equal(inputs[~counted], tokens[~counted])
    assert ((inputs < TEXT) | (inputs == V - 1)).all()


def test_targets_are_masked_replaced_and_kept_as_in_bert():
    tokens = np.full(64, TEXT)  # no id of text, so that a replacement shows
    rows = np.stack([mask_tokens(tokens, rng(seed), V, TEXT) for seed in range(2000)]).reshape(-1, 2, 64)
    counted = rows[:, 1] >= 0
    chosen = rows[:, 0][counted]
    shares = [np.mean(chosen == V - 1), np.mean(chosen < TEXT), np.mean(chosen == TEXT)]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.01)  # 20,000 draws: three deviations are 0.008
    np.testing.assert_allclose(counted[:, 1:].mean(0), 10 / 63, atol=0.03)  # every position alike
    replaced = np.bincount(chosen[chosen < TEXT], minlength=TEXT)
    assert replaced.min() > 0
    assert replaced.max() < 30  # of a mean of 8


def restored(row, vocab):
    """Puts the spans of the targets back in the place of their sentinels, by reading the row alone."""
    T = len(row) // 2
    whole = np.append(row[:T], row[-1])  # the last target is the last id of the row
    end = int(np.flatnonzero(whole == vocab - 1)[0])
    asked, found = whole[end + 1 :].tolist(), []
    for token in whole[:end].tolist():
        if token < TEXT:
            found.append(token)
            continue
        place = asked.index(token) + 1
        while asked[place] < TEXT:
            found.append(asked[place])
            place += 1
    return found


@given(st.integers(8, 300), st.integers(0, 2**32 - 1))
def test_spans_and_what_is_left_make_up_the_text(length, seed):
    n, noise, spans = span_sizes(length)
    tokens = rng(seed).integers(0, TEXT, n)
    row = cut_spans(tokens, rng(seed), V, length)
    inputs, targets = row.reshape(2, length)
    assert restored(row, V) == tokens.tolist()
    assert inputs[0] == tokens[0]
    end = n - noise + spans
    assert inputs[end] == V - 1
    assert (inputs == V - 1).sum() == 1
    np.testing.assert_array_equal(targets >= 0, np.arange(length) >= end)
    np.testing.assert_array_equal(targets[end:-1], inputs[end + 1 :])
    sentinels = V - 2 - np.arange(spans + 1)
    assert [t for t in inputs[:end] if t >= TEXT] == sentinels[:-1].tolist()
    assert [t for t in targets[end:] if t >= TEXT] == sentinels.tolist()
    if length >= 64:
        assert noise / n == pytest.approx(0.15, abs=0.015)
        assert noise / spans == pytest.approx(3, abs=0.6)


def test_all_ways_to_cut_are_equally_likely():
    n, noise, spans = span_sizes(44)
    assert (noise, spans) == (6, 2)  # spans of 1 + 5 to 5 + 1, and as many ways for the text between them
    sizes = [cut_spans(np.zeros(n, int), rng(seed), V, 44)[:44] for seed in range(4000)]
    first = [int(np.flatnonzero(row == V - 2)[-1] - np.flatnonzero(row == V - 1)[0]) for row in sizes]
    assert set(first) == {1}  # the first sentinel follows the end of the prefix
    span = [int(np.flatnonzero(row == V - 3)[-1] - np.flatnonzero(row == V - 2)[-1] - 1) for row in sizes]
    np.testing.assert_allclose(np.bincount(span, minlength=6)[1:] / 4000, 0.2, atol=0.03)
    text = [int(np.flatnonzero(row == V - 2)[0]) for row in sizes]
    np.testing.assert_allclose(np.bincount(text)[1:] / 4000, 1 / (n - noise - 1), atol=0.015)


@pytest.mark.parametrize("objective", ["masked", "span_corruption"])
def test_a_row_depends_on_its_key_and_place_alone(objective):
    corrupt = Corruption(objective, 64, V, TEXT)
    text = rng().integers(0, TEXT, (6, corrupt.text_length))
    whole = corrupt(text, (0, 7, 3))
    np.testing.assert_array_equal(corrupt(text[2:5], (0, 7, 3), 2), whole[2:5])
    for other in ((0, 8, 3), (0, 7, 4), (1, 7, 3)):
        assert (corrupt(text, other) != whole).any(axis=1).all()
    same = corrupt(np.tile(text[:1], (6, 1)), (0, 7, 3))
    assert len(np.unique(same, axis=0)) == 6  # rows of a batch are cut differently


# What counts.


def run(changes, **more):
    model = {"model.vocab_size": 272, "model.max_length": 24, "model.position": "rotary"}
    data = {"data.tokenizer": "bytes", "data.sequence_length": 24, "data.bos": True}
    return replace(TINY, {**changes, **model, **data, "eval.sequences": 8, **more})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder with a text, and its tokens once they were read."""
    folder = tmp_path_factory.mktemp("cache")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"{i}: The quick brown fox jumps over the lazy dog. " * 40)
    return folder


def opened(config, cache):
    return open_inputs(replace(config, {"data.kind": "text", "data.paths": (str(cache / "*.txt"),)}), cache)


@pytest.mark.parametrize("changes", [FULL, PREFIX], ids=["masked", "span_corruption"])
def test_loss_is_that_of_the_counted_positions_alone(changes, cache):
    config = run(changes)
    inputs = opened(config, cache)
    rows = inputs.batch(0)
    assert rows.shape == (4, config.data.row_length)
    assert rows.max() == 271
    model, params = Transformer(config.model), random_params(config.model)
    total, count = loss_sum_nats(model, params, jnp.asarray(rows))
    expected = number = 0
    for row in rows:
        tokens, targets = row.reshape(2, 24)
        logits = numpy_forward(config.model, params, tokens)[0]
        log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_probs -= logits.max(-1, keepdims=True)
        expected -= sum(log_probs[t, target] for t, target in enumerate(targets) if target >= 0)
        number += (targets >= 0).sum()
    assert int(count) == number
    assert float(total) == pytest.approx(expected, rel=1e-4)
    chunked = loss_sum_nats(model, params, jnp.asarray(rows), chunk_positions=5)
    assert float(chunked[0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mask", ["causal", "full", "prefix"])
def test_no_gradient_from_positions_that_do_not_count(mask):
    model = ModelConfig(attention_mask=mask, relaxed_causal_tokens=3 if mask == "causal" else 0)
    rows = rng().integers(0, 9, (2, 9 if mask == "causal" else 16))
    if mask != "causal":
        rows[:, 8:12] = -1
    inputs, targets, counted = (jnp.asarray(x) for x in split_tokens(rows, model))
    assert inputs.shape == targets.shape == (2, 8)

    def loss(logits):
        return jnp.sum(jnp.where(counted, cross_entropy_nats(logits, targets), 0.0))

    gradient = jax.grad(loss)(jnp.asarray(rng(1).normal(size=(2, 8, 9)), jnp.float32))
    nonzero = np.abs(gradient).max(-1) > 0
    np.testing.assert_array_equal(nonzero, np.broadcast_to(counted, (2, 8)))
    assert nonzero.sum() == {"causal": 12, "full": 8, "prefix": 8}[mask]


def test_next_tokens_are_split_as_before():
    tokens = rng().integers(0, 9, (2, 9))
    inputs, targets, counted = split_tokens(tokens, ModelConfig())
    np.testing.assert_array_equal(inputs, tokens[:, :-1])
    np.testing.assert_array_equal(targets, tokens[:, 1:])
    assert counted.shape == (1, 8)
    assert counted.all()


@pytest.mark.parametrize("changes", [FULL, PREFIX], ids=["masked", "span_corruption"])
def test_a_resumed_run_has_the_same_bits(changes, cache, tmp_path):
    config = run(changes, **{"train.steps": 4, "train.checkpoint_every_steps": 2})
    inputs = opened(config, cache)
    np.testing.assert_array_equal(inputs.batch_rows(5, 1, 3), inputs.batch(5)[1:3])
    assert (inputs.batch(4) != inputs.batch(5)).any()
    others = opened(replace(config, {"data.seed": 9}), cache)
    np.testing.assert_array_equal(others.evaluation, inputs.evaluation)  # one set for every seed
    assert (others.batch(0) != inputs.batch(0)).any()
    assert inputs.bits_per_nat_of_loss is None
    whole = train(config, inputs, tmp_path / "whole")

    def fail(step, loss):
        if step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, opened(config, cache), tmp_path / "parts", on_step=fail)
    started = []
    resumed = train(config, opened(config, cache), tmp_path / "parts", on_start=started.append)
    assert started == [2]
    assert bits(resumed.params) == bits(whole.params)


def test_ids_for_masks_and_sentinels_must_be_there(cache):
    for changes, needed in ((FULL, 259), (PREFIX, 258 + 1 + 2)):
        opened(run(changes, **{"model.vocab_size": needed}), cache)
        with pytest.raises(UserError, match=f"at least {needed}"):
            opened(run(changes, **{"model.vocab_size": needed - 1}), cache)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"model.attention_mask": "full"}, "objective 'masked'"),
        ({"data.objective": "masked"}, "objective 'next_token'"),
        ({"model.attention_mask": "prefix", "data.objective": "masked"}, "objective 'span_corruption'"),
        (FULL | {"model.attention_window": 4}, "attention_mask 'causal'"),
        (PREFIX | {"model.relaxed_causal_tokens": 4}, "attention_mask 'causal'"),
        (PREFIX | {"model.attention_implementation": "splash"}, "xla_chunked"),
        (FULL | {"data.kind": "bigram_backcopy"}, "kinds with text"),
        (FULL | {"data.sequence_length": 7}, "at least 8"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, allowed):
    with pytest.raises(UserError, match=allowed):
        replace(TINY, changes)


# The masks.


ORACLES = {
    "full": gpt2("tiny", **SMALL, attention_mask="full"),
    "full, rotary, softmax-1, groups": llama2(
        "tiny", **SMALL, num_kv_heads=2, normalizer="softmax1", attention_mask="full"
    ),
    "full, in chunks": gpt2("tiny", **SMALL, attention_mask="full", attention_implementation="xla_chunked"),
    "prefix": gpt2("tiny", **SMALL, attention_mask="prefix"),
    "prefix, rotary, softmax-1, groups": llama2(
        "tiny", **SMALL, num_kv_heads=2, normalizer="softmax1", attention_mask="prefix"
    ),
    "prefix, in chunks": gpt2("tiny", **SMALL, attention_mask="prefix", attention_implementation="xla_chunked"),
}


@pytest.mark.parametrize("name", ORACLES)
def test_model_and_taps_equal_the_float64_oracle(name):
    config = ORACLES[name]
    params = random_params(config)
    logits, taps = Transformer(config).apply({"params": params}, jnp.asarray(TOKENS), observe=lambda taps: taps)
    visible = jnp.broadcast_to(taps.visible, (2, 4, 1, 7, 7))
    for i, tokens in enumerate(TOKENS):
        expected, layers = numpy_forward(config, params, tokens)
        np.testing.assert_allclose(logits[i], expected, rtol=1e-4, atol=1e-4)
        for layer, seen in enumerate(layers):
            np.testing.assert_allclose(taps.attention_weights[layer, i], seen["attention_weights"], atol=1e-5)
            np.testing.assert_array_equal(visible[layer, i], seen["visible"])


def test_scanned_layers_see_the_same_prefix():
    config = ORACLES["prefix"]
    params = random_params(config)
    unrolled = Transformer(config).apply({"params": params}, jnp.asarray(TOKENS))[0]
    for changes in ({}, {"remat": True}):
        scanned = Transformer(dataclasses.replace(config, scan_layers=True, **changes))
        again = scanned.apply({"params": stack_layers(params)}, jnp.asarray(TOKENS))[0]
        np.testing.assert_allclose(again, unrolled, rtol=1e-5, atol=1e-5)


def test_a_row_without_an_end_of_the_prefix_is_causal():
    config = ORACLES["prefix"]
    causal = Transformer(dataclasses.replace(config, attention_mask="causal"))
    params, tokens = random_params(config), jnp.asarray(TOKENS[3:])
    found = Transformer(config).apply({"params": params}, tokens)[0]
    np.testing.assert_allclose(found, causal.apply({"params": params}, tokens)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["full", "prefix"])
def test_no_cache_for_tokens_that_see_later_ones(mask):
    with pytest.raises(UserError, match="attention_mask 'causal'"):
        init_cache(ModelConfig(attention_mask=mask), 1, 8)


def test_chance_of_the_first_token():
    assert chance_of_first(64, causal=False) == pytest.approx(1 / 64)
    assert chance_of_first(64, n=1.0, causal=False) == pytest.approx(1 / 65)
    for changes, expected in ((FULL, (1 / 24, 1 / 25)), (PREFIX, (None, None))):
        given = conditions(run(changes))
        chances = [define(f"first_attention_{name}").chance(given) for name in ("fraction", "mass")]
        assert chances == (list(expected) if expected[0] is None else pytest.approx(expected))


@pytest.mark.parametrize("mask", ["causal", "full", "prefix"])
def test_mass_over_share_is_one_for_equal_weights_and_finds_a_sink(mask):
    config = dataclasses.replace(ORACLES[mask if mask != "causal" else "full"], attention_mask=mask)
    zero = jax.tree.map(jnp.zeros_like, random_params(config))
    observe = lambda taps: observe_keys(taps, jnp.asarray(TOKENS), jnp.zeros(11))  # noqa: E731
    of = Transformer(config).apply({"params": zero}, jnp.asarray(TOKENS), observe=observe)[1]
    np.testing.assert_allclose(of["mass"], of["share"], rtol=1e-5)
    np.testing.assert_allclose(of["id_mass"], of["id_share"], rtol=1e-5)
    np.testing.assert_allclose(of["share"].sum(-1), TOKENS.size, rtol=1e-5)
    np.testing.assert_array_equal(of["id_count"][0], np.bincount(TOKENS.ravel(), minlength=11))
    taps = Transformer(config).apply({"params": zero}, jnp.asarray(TOKENS), observe=lambda taps: taps)[1]
    one = jax.tree.map(lambda x: x[0], taps)
    sink = one._replace(attention_weights=jnp.zeros_like(one.attention_weights).at[..., 0].set(1.0))
    found = observe_keys(sink, jnp.asarray(TOKENS), jnp.zeros(11))
    assert float(found["mass"][0]) == TOKENS.size
    assert int(jnp.argmax(found["id_mass"] / jnp.maximum(found["id_share"], 1e-9))) in TOKENS[:, 0]


@pytest.mark.parametrize("changes", [FULL, PREFIX], ids=["masked", "span_corruption"])
def test_the_measure_of_keys_is_that_of_the_oracle(changes, cache):
    config = run(changes)
    inputs = opened(config, cache)
    params = random_params(config.model)
    loaded = LoadedModel(Transformer(config.model), params, config, None, cache)
    found = KEYS.measure(loaded, inputs, lambda what: None).metrics
    mass, share = np.zeros(24), np.zeros(24)
    by_id = np.zeros((3, 272))  # mass, share, count
    squares = np.zeros(272)
    for row in inputs.evaluation:
        for seen in numpy_forward(config.model, params, row[:24])[1]:
            given = seen["attention_weights"].mean(0).sum(0)
            visible = seen["visible"][0]
            equal = (visible / visible.sum(-1, keepdims=True)).sum(0)
            mass, share = mass + given, share + equal
            np.add.at(by_id.T, row[:24], np.stack([given, equal, np.ones(24)], axis=1))
            x = seen["residual"] - seen["residual"].mean(-1, keepdims=True)
            np.add.at(squares, row[:24], (x**4).mean(-1) / (x**2).mean(-1) ** 2)
    ids = np.flatnonzero(by_id[2])
    over = by_id[0, ids] / by_id[1, ids]
    assert found["first_over_share"] == pytest.approx(mass[0] / share[0], rel=1e-3)
    assert found["position_over_share"] == pytest.approx((mass / share).max(), rel=1e-3)
    assert found["position_of_largest"] == (mass / share).argmax()
    assert found["id_over_share"] == pytest.approx(over.max(), rel=1e-3)
    assert found["id_of_largest"] == ids[over.argmax()]
    assert found["last_id_over_share"] == pytest.approx(over[-1], rel=1e-3)
    assert found["kurtosis_of_id"] == pytest.approx((squares[ids] / by_id[2, ids]).max(), rel=1e-3)


def test_text_without_targets_is_refused():
    config = run(FULL)
    loaded = LoadedModel(Transformer(config.model), {}, config, None, Path())
    with pytest.raises(UserError, match="a causal model"):
        measure_model(loaded, Inputs(lambda step: TOKENS, TOKENS, None, {}, None))


def test_full_attention_computes_all_products():
    causal = ModelConfig(num_layers=3)
    full = dataclasses.replace(causal, attention_mask="full")
    assert model_flops_per_token(full, 64) == flops_per_token(causal, 64)
    assert model_flops_per_token(full, 64) - model_flops_per_token(causal, 64) == 6 * 3 * 64 * causal.d_model
