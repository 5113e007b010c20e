"""Packed rows: several sequences in a row are what they are in rows of their own."""

from typing import get_args

import jax
import numpy as np
import pytest
from attention_oracle import assert_near
from model_oracle import stacked_params

from orthojax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from orthojax.model import Transformer
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


@pytest.mark.parametrize("name", MODELS)
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
