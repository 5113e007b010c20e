"""A run of seconds on random tokens, and its arrays by path: shared by the tests of training."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.model import LoadedModel, Transformer, parameter_shapes
from orthojax.train import Inputs, read_metrics, state_shapes

# A constant learning rate, so that leaving steps out changes nothing else.
TINY = Config(
    model=ModelConfig(vocab_size=32, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False),
    optim=OptimConfig(optimizer="adam", learning_rate=0.02, warmup_steps=0, final_learning_rate_fraction=1.0),
    data=DataConfig(sequence_length=8),
    train=TrainConfig(
        steps=12, batch_size=4, log_every_steps=1, eval_every_steps=0, checkpoint_every_steps=4, probe_every_steps=0
    ),
    eval=EvalConfig(sequences=16, batch_size=8),
)
POISON = 1000  # an id that the model does not have: its embedding, and so the loss, is nan


def rows(step, n=4, vocab=32):
    """Random tokens int32 [n, 9], a batch of the step."""
    return np.random.default_rng(step).integers(0, vocab, (n, 9), dtype=np.int32)


def inputs(poisoned=(), batch=rows, evaluation=16, vocab=32, bits=0.75, **provenance):
    """The data of a run, of which some batches are poisoned."""

    def batch_or_poison(step):
        tokens = batch(step)
        if step in poisoned:
            tokens[1, 4] = POISON
        return tokens

    return Inputs(batch_or_poison, rows(999, evaluation, vocab), bits, {"source": "test"} | provenance, None)


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def bits(tree):
    """Dtype, shape and bytes of every leaf: equal where no bit differs, the sign of zero and nan included."""
    return {path: (np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for path, x in by_path(tree).items()}


def assert_trees_close(a, b, **tolerance):
    a, b = by_path(a), by_path(b)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_allclose(a[path], b[path], err_msg=path, **tolerance)


def lines(workdir, name="step"):
    """The lines of metrics.jsonl that have a name, without their speed."""
    found = [line for line in read_metrics(workdir / "metrics.jsonl") if name in line]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in found]


def assert_lines_close(found, expected):
    """What was logged is the same, numbers but for the rounding of another order of sums."""
    for a, b in itertools.zip_longest(found, expected, fillvalue={}):
        floats = {key: pytest.approx(value, rel=1e-3, abs=1e-5) for key, value in b.items() if isinstance(value, float)}
        assert a == b | floats


def drawn_params(model, std=0.1):
    """Any parameters of a model: its initialisation takes longer to compile than a step of training."""
    shapes = parameter_shapes(model)
    noise = np.random.default_rng(0)

    def drawn(path, leaf):
        return jnp.asarray(std * noise.normal(size=leaf.shape) + ("scale" in str(path[-1])), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, shapes)


def blank_state(config):
    """A state of a run whose arrays are all zeros; nothing is compiled."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), state_shapes(config))


def loaded(config, params):
    """Parameters as `orthojax.load` gives them."""
    return LoadedModel(Transformer(config.model), params, config, None, Path())


class Stop(Exception):
    pass


def stop_at(step):
    """A callback that ends a run after a step."""

    def on_step(done, loss):
        if done == step:
            raise Stop

    return on_step
