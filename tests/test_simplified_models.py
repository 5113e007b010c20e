"""The simplified models of Active-Dormant Attention Heads against their definition in NumPy float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.data import BigramBackcopy
from orthojax.experiments.active_dormant import simplified

TASK = BigramBackcopy.from_text(
    "the cat sat on the mat and the rat ran from the cat to the man in the hat, a big dog plows ", 2
)
TRIGGER = TASK.is_trigger(np.arange(TASK.vocab_size))


def logits_of(params, tokens):
    """One sequence, one query at a time, from the attention logits of the definition."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    beta, rows = p["bos_value"] @ p["bos_output"], []
    for i, v in enumerate(tokens):
        logits = np.zeros(i + 1)
        if TRIGGER[v]:
            logits[i - 1] = p["previous_logit"][v]
        else:
            logits[0] = p["sink_logit"][v]
        weights = np.exp(logits - logits.max())
        values = np.stack([beta, *(p["value"][x] * np.eye(TASK.vocab_size)[x] for x in tokens[1 : i + 1])])
        rows.append(weights / weights.sum() @ values + np.maximum(p["mlp_in"][v], 0.0) @ p["mlp_out"])
    return np.array(rows)


@pytest.mark.parametrize("scale", [1.0, 200.0])  # of the logits; exp(200) is no float32
def test_the_one_layer_model_is_its_definition(scale):
    tokens = np.asarray(TASK.batch(0, 2, 12, 0))[:, :-1]
    params = simplified.init(jax.random.key(1), TASK.vocab_size)
    params |= {name: scale * params[name] for name in ("sink_logit", "previous_logit")}
    logits, bos_weight, _ = jax.jit(simplified.apply)(params, jnp.asarray(tokens), jnp.asarray(TRIGGER))
    np.testing.assert_allclose(logits, np.stack([logits_of(params, row) for row in tokens]), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(bos_weight[:, 0], 1.0)


def test_the_three_layer_model_adds_a_key():
    tokens, trigger = jnp.asarray(TASK.batch(0, 2, 12, 0)[:, :-1]), jnp.asarray(TRIGGER)
    params = simplified.init_three_layers(jax.random.key(2), TASK.vocab_size)
    logits, _, residuals = jax.jit(simplified.apply_three_layers)(params, tokens, trigger)

    def norm(x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5)

    def minimal(p, r):
        p = {name: np.asarray(value, np.float64) for name, value in p.items()}
        r = r + norm(r) @ p["value"] @ p["output"]
        return r + np.maximum(norm(r) @ p["mlp_in"], 0.0) @ p["mlp_out"]

    first = minimal(params["below"], np.eye(TASK.vocab_size)[TASK.bos_ids[0]])
    copy = params["copy"]
    scaled = copy | {"sink_logit": copy["sink_logit"] * (norm(first) @ np.asarray(params["direction"], np.float64))}
    middle = logits_of(scaled, np.asarray(tokens[0]))
    third = minimal(params["above"], first + middle[0])
    np.testing.assert_allclose(residuals[0], first, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[0, 1:], middle[1:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[0, 0], norm(third) @ params["readout"], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_training_solves_the_task():
    with jax.enable_x64(False):
        params = simplified.init(jax.random.key(0), TASK.vocab_size)
        found = simplified.train(simplified.apply, params, simplified.adamw(), TASK, (0, 100, 200), 0)
    assert list(found) == [0, 100, 200]
    assert found[0]["backcopy_risk"] > 1.5
    assert found[200]["backcopy_risk"] < 0.2
    assert found[200]["bigram_excess_risk"] < 0.2 < found[0]["bigram_excess_risk"]


def test_only_the_copy_layer_keeps_its_optimizer():
    params = jax.jit(simplified.init_three_layers, static_argnums=1)(jax.random.key(0), TASK.vocab_size)
    ones = jax.tree.map(lambda leaf: 0.01 + np.abs(leaf), params)

    @jax.jit
    def first_updates(ones, params):
        of = {name: simplified.outer_optimizer(name, 0) for name in ("adam", "sgd", "orthoadam")}
        return {name: of[name].update(ones, of[name].init(params), params)[0] for name in of}

    updates = first_updates(ones, params)
    for a, b in itertools.pairwise(updates.values()):
        np.testing.assert_array_equal(a["copy"]["sink_logit"], b["copy"]["sink_logit"])
        assert not np.allclose(a["below"]["value"], b["below"]["value"])
    assert float(jnp.abs(updates["adam"]["copy"]["value"]).mean()) == pytest.approx(0.03, rel=0.01)
    assert float(jnp.abs(updates["adam"]["below"]["value"]).mean()) == pytest.approx(3e-4, rel=0.01)
