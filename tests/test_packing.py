"""Packed rows: several sequences in a row are what they are in rows of their own."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_near
from hypothesis import given
from hypothesis import strategies as st
from model_oracle import stacked_params
from thinned import quick_and_slow
from tiny_run import TINY

from orthojax import train
from orthojax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig, replace
from orthojax.data import PackedBatches
from orthojax.errors import UserError
from orthojax.model import Transformer, init_cache
from orthojax.ops.normalizers import Name
from orthojax.train.step import loss_sum_nats

LENGTHS = [[5, 1, 6], [13], [3, 8]]  # of the sequences in rows of 13; what is left of a row is padding
SMALL = {"vocab_size": 40, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_mlp": 32, "max_length": 12}
ROTARY = {"position": "rotary", "num_kv_heads": 2}
MODELS = {name: {"normalizer": name} for name in (*get_args(Name), "softmax_n", "learned_sink")}
MODELS |= {
    "rotary, chunks": ROTARY | {"attention_implementation": "xla_chunked"},
    "rotary, windows": ROTARY | {"attention_window": (2, None), "scan_layers": False, "remat": "full"},
    "yarn, relaxed causal": ROTARY | {"relaxed_causal_tokens": 3, "rope": RopeConfig(scaling="yarn", factor=2.0)},
    "latent, experts": {"position": "rotary", "mlp": "experts", "experts": ExpertsConfig(num_experts=4),
                        "latent": LatentConfig(d_latent=8, d_rotary=2)},
}  # fmt: skip


def packed_rows():
    """Returns rows int32 [3, 2 * 13], ids and segment ids, and the sequences in them."""
    rows, sequences = np.zeros((len(LENGTHS), 2, 13), np.int32), []
    for row, lengths in zip(rows, LENGTHS, strict=True):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), 1):
            sequences.append(np.random.default_rng(len(sequences)).integers(0, 40, length))
            row[0, end - length : end], row[1, end - length : end] = sequences[-1], number
    return rows.reshape(len(rows), -1), sequences


# The others' normalizers and structures are in the tests of attention and of the model.
QUICK = ("learned_sink",)  # the others take seven seconds or more each


@pytest.mark.parametrize("name", quick_and_slow(MODELS, MODELS.keys() - {*QUICK}))
def test_packed_rows_train_as_separate_ones(name):
    model = Transformer(ModelConfig(**(SMALL | MODELS[name])))
    params, (rows, sequences) = jax.tree.map(lambda p: p / 2, stacked_params(model.config)), packed_rows()
    loss = lambda params, rows, packed: loss_sum_nats(model, params, rows, packed=packed)  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (total, count), gradients = both(params, rows, True)
    alone = [both(params, row[None], False) for row in sequences if len(row) > 1]
    (expected, counts), slopes = jax.tree.map(lambda *leaves: sum(map(np.float64, leaves)), *alone)
    assert count == counts
    means = jax.tree.map(lambda x: x / counts, ((total, gradients), (expected, slopes)))
    assert_near(*means, 1e-6)


@pytest.mark.parametrize("name", ["gelu", "rotary, windows"])
def test_logits_of_packed_rows_are_those_of_separate_ones(name):
    model = Transformer(ModelConfig(**(SMALL | MODELS[name] | {"max_length": 13})))
    params, (rows, sequences) = {"params": stacked_params(model.config)}, packed_rows()
    ids, segments = np.split(rows, 2, axis=1)
    apply = jax.jit(lambda ids, segments=None: model.apply(params, ids, segment_ids=segments)[0])
    expected = np.concatenate([apply(sequence[None])[0] for sequence in sequences])
    assert_near(apply(ids, segments)[segments > 0], expected, 1e-6)


TOKENS, DYNAMIC = jnp.zeros((1, 4), jnp.int32), RopeConfig(scaling="dynamic", factor=2.0)
REFUSED = {  # by words of the error: changes of the model, segment ids
    "with a cache": ({}, TOKENS),
    "'dynamic'": (ROTARY | {"rope": DYNAMIC}, TOKENS),
    r"\(1, 5\)\nallowed: integers of the shape of the tokens, \(1, 4\)": ({}, jnp.zeros((1, 5), jnp.int32)),
    "float32": ({}, jnp.zeros((1, 4))),
}


@pytest.mark.parametrize("words", REFUSED)
def test_segments_are_refused_where_rows_would_not_be_separate(words):
    model = Transformer(ModelConfig(**(SMALL | REFUSED[words][0])))
    cache = init_cache(model.config, 1, 4) if "cache" in words else None
    with pytest.raises(UserError, match=words):
        model.apply({"params": stacked_params(model.config)}, TOKENS, cache=cache, segment_ids=REFUSED[words][1])


# Data.


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(2, 9), st.booleans(), st.booleans())
def test_every_document_is_whole_in_a_row_or_cut_as_a_row(lengths, length, with_bos, ends_with_eos):
    bos = 999 if with_bos else None
    text = [[*range(1 + 30 * i, 1 + 30 * i + n), 0] for i, n in enumerate(lengths)]
    text[-1] = text[-1] if ends_with_eos else text[-1][:-1]
    documents = [[*range(2000, 2000 + length), 0], *text]  # the first is a row, so that there is a batch
    tokens = np.concatenate(documents).astype(np.uint16)
    packed = PackedBatches(tokens, length, 1, seed=0, bos_id=bos, eos_id=0)
    rows = packed.spread_rows(packed.n_rows).reshape(-1, 2, length + 1)
    found = [ids[segments == n].tolist() for ids, segments in rows for n in range(1, segments.max() + 1)]
    assert all((np.diff(segments[segments > 0]) >= 0).all() for _, segments in rows)
    assert all((ids[segments == 0] == 0).all() for ids, segments in rows)
    shared = int(not with_bos)
    pieces = [
        [bos] * with_bos + document[start : start + length + shared]
        for document in documents for start in range(0, len(document) - shared, length)
    ]  # fmt: skip
    assert sorted(found) == sorted(pieces)
    filled = np.count_nonzero(rows[:, 1], axis=1)
    assert np.count_nonzero(2 * filled <= length + 1) <= 1  # of two half empty rows, one would be in the other


def test_a_run_trains_on_packed_rows_on_any_mesh(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"{i}: The quick brown fox jumps over the lazy dog. "[: 12 + 4 * i] * 2)
    text = {"data.kind": "text", "data.paths": (str(tmp_path / "*.txt"),), "data.tokenizer": "bytes", "data.pack": True}
    text |= {"data.sequence_length": 24, "model.vocab_size": 258, "model.max_length": 24, "eval.sequences": 1}
    alone = replace(TINY, text)
    meshed = replace(alone, {"mesh.data": 2, "mesh.tensor": 2, "train.accumulation_steps": 2})
    inputs, results = train.open_inputs(alone, tmp_path / "cache"), []
    segments = inputs.batch(0)[:, 25:]
    assert (inputs.batch(0).shape, inputs.evaluation.shape) == ((4, 50), (1, 25))
    for config in (alone, meshed):
        rows = train.place_rows(train.make_mesh(config), 4, lambda first, last: inputs.batch_rows(0, first, last))
        results.append(jax.device_get(train.make_train_step(config)(train.init_state(config), rows)))
    (state, metrics), (same, others) = results
    assert metrics.target_tokens == others.target_tokens == ((np.diff(segments) == 0) & (segments[:, 1:] > 0)).sum()
    assert_near((same.params, others.loss_sum_nats), (state.params, metrics.loss_sum_nats))
    with pytest.raises(UserError, match="make 0 packed rows of 4, not 2"):
        PackedBatches(np.zeros(10, np.uint16), 4, 2, seed=0, eos_id=0)
    with pytest.raises(UserError, match=r"pack with data\.kind='bigram_backcopy'"):
        replace(alone, {"data.kind": "bigram_backcopy", "data.paths": ()})
