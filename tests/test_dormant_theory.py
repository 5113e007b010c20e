"""Simplified models, sinks and norms of Active-Dormant Attention Heads: equations in NumPy float64, published norms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.data import BigramBackcopy
from orthojax.experiments.active_dormant import norm_toys, simplified, sink_theory
from orthojax.experiments.active_dormant.sink_theory import Chain

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


def chain(contexts=1, seed=0) -> Chain:
    rng = np.random.default_rng(seed)
    rows, weights = rng.dirichlet(np.ones(6), 4), rng.dirichlet(np.ones(4))
    rows[0, 2] = 0.0
    rows[0] /= rows[0].sum()
    return Chain(weights, rows, 3.0, rng.standard_normal((contexts, 6)))


def loss_of(of: Chain, alpha, beta):
    """The mean of pi_v KL(p_v || q_v), from softmax and logarithms."""
    total = 0.0
    for xi in of.contexts:
        for k, p in enumerate(of.rows):
            z = (np.exp(alpha[k]) * beta + xi) / (np.exp(alpha[k]) + of.others)
            q = p * np.exp(z) / np.sum(p * np.exp(z))
            total += of.weights[k] * np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0])) / len(of.contexts)
    return total


@pytest.mark.parametrize("contexts", [1, 3])
def test_gradients_are_those_of_the_kl(contexts):
    of, rng = chain(contexts), np.random.default_rng(1)
    alpha, beta = rng.standard_normal(4), rng.standard_normal(6)
    by_alpha = [loss_of(of, alpha + e, beta) - loss_of(of, alpha - e, beta) for e in 1e-5 * np.eye(4)]
    by_beta = [loss_of(of, alpha, beta + e) - loss_of(of, alpha, beta - e) for e in 1e-5 * np.eye(6)]
    for ours, differences in zip(of.gradients(alpha, beta), (by_alpha, by_beta), strict=True):
        np.testing.assert_allclose(ours, np.array(differences) / 2e-5, atol=1e-10)


def test_the_chain_is_the_simplified_model():
    tokens = np.asarray(TASK.batch(0, 8, 9, 3))[:, :-1]
    row = next(row for row in tokens if not TRIGGER[row[-1]])
    params = simplified.init(jax.random.key(5), TASK.vocab_size)
    size, v = TASK.vocab_size - 1, int(row[-1])
    counts = np.bincount(row[1:], minlength=size)[None]
    of = Chain.of_task(TASK, np.asarray(params["value"])[:size], counts)
    others = np.setdiff1d(np.arange(size), TASK.triggers)
    alpha = np.asarray(params["sink_logit"])[others]
    q = of.predictions(alpha, np.asarray(simplified.bos_value(params))[:size])
    output, _ = jax.jit(simplified.attend)(params, jnp.asarray(row[None]), jnp.asarray(TRIGGER))
    tilted = TASK.transition[v, :size] * np.exp(np.asarray(output)[0, -1, :size])
    np.testing.assert_allclose(q[0, list(others).index(v)], tilted / tilted.sum(), atol=1e-6)


def test_sink_logits_grow_by_half_of_ln_t():
    of = chain()
    of = Chain(of.weights, of.rows, of.others, 0.02 * of.contexts)  # so that the KL is quadratic
    rates, times = of.weights * of.curvatures(), np.geomspace(1e4, 1e14, 11)
    alpha, beta = sink_theory.flow(of, np.zeros(4), np.zeros(6), times, hold="beta")
    closed = np.stack([sink_theory.half_log(times, 0.0, rate, of.others) for rate in rates], axis=1)
    np.testing.assert_allclose(alpha, closed, atol=0.01)
    np.testing.assert_allclose((alpha[-1] - alpha[-3]) / np.log(times[-1] / times[-3]), 0.5, atol=1e-3)
    np.testing.assert_allclose(alpha[-1], sink_theory.half_log_asymptote(times[-1], rates), atol=1e-3)
    assert not beta.any()


def test_the_value_of_bos_converges_exponentially():
    of, start = chain(), np.arange(6.0)
    rates = sink_theory.bos_rates(of, 1.0)
    assert rates[0] == pytest.approx(0.0, abs=1e-12)
    times = np.array([8.0, 12.0, 40.0]) / rates[1]
    _, beta = sink_theory.flow(of, np.ones(4), start, times, hold="alpha")
    fixed = sink_theory.bos_fixed_point(1.0, of.contexts[0], start)
    distance = np.linalg.norm(beta - fixed, axis=1)
    assert np.log(distance[0] / distance[1]) / 4 == pytest.approx(1.0, abs=0.01)
    np.testing.assert_allclose(beta[2], fixed, atol=1e-8)
    np.testing.assert_allclose(of.predictions(np.ones(4), fixed)[0], of.rows, atol=1e-12)


def test_only_the_stationary_set_is_stationary():
    of = chain()
    alpha, beta = np.full(4, 0.7), 0.3 - np.exp(-0.7) * of.contexts[0]
    assert max(np.abs(g).max() for g in of.gradients(alpha, beta)) < 1e-15
    assert sink_theory.distance_to_stationary(alpha, beta, of) == pytest.approx((0.0, 0.0), abs=1e-12)
    moved = alpha + 0.1 * np.eye(4)[0]
    assert max(np.abs(g).max() for g in of.gradients(moved, beta)) > 1e-5
    assert sink_theory.distance_to_stationary(moved, beta, of)[0] > 0.01


def test_sgd_follows_closed_form_and_adam_the_paper():
    gradient = norm_toys.residual_norm_gradient(np.ones(1))
    with jax.enable_x64(True):
        start = jnp.full((1,), 10.0)
        sgd, adam = (
            np.asarray(norm_toys.train(optimizer, start, gradient, 10_000))[:, 0]
            for optimizer in (optax.sgd(0.3), optax.adam(0.3))
        )
    np.testing.assert_allclose(sgd, norm_toys.residual_norm_flow(np.arange(1, 10_001), 10.0, 0.3), rtol=1e-4)
    np.testing.assert_allclose(adam[[999, 2499, 4999, 7499, 9999]], [27.9, 33.6, 41.7, 51.2, 64.0], atol=0.06)


def test_gradient_flow_of_layer_norm_toy_keeps_invariant():
    m, y = norm_toys.layer_norm_flow([1.0, 1e3, 1e8], (0.5, 2.0), 0.3).T
    norm = np.sqrt(m**2 + 2 * 0.3 * m + 1)
    np.testing.assert_allclose(norm, norm_toys.norm_along_flow(y, (0.5, 2.0), 0.3), rtol=1e-8)
    with jax.enable_x64(True):
        by_autodiff = jax.grad(lambda m, y: jnp.exp(-y * norm_toys.cosine(m, 0.3)), (0, 1))(1.5, 2.5)
        np.testing.assert_allclose(norm_toys.layer_norm_gradient(1.5, 2.5, 0.3), by_autodiff, rtol=1e-12)


@pytest.mark.parametrize(("decay", "b2"), [(0.0, 0.99), (1e-3, 0.99), (4e-3, 0.99), (3e-4, 0.999), (2e-3, 0.999)])
def test_adams_gain_is_that_of_its_moments(decay, b2):
    mu = nu = 0.0
    for t in range(30_000):
        g = np.exp(-decay * t)
        mu, nu = 0.9 * mu + 0.1 * g, b2 * nu + (1 - b2) * g**2
    gain = norm_toys.adam_gain(decay, b2)
    assert gain == pytest.approx(mu / np.sqrt(nu), abs=5e-3 if gain else 0.05)
    assert (gain == 0) == (decay >= -np.log(b2) / 2)


@pytest.mark.parametrize("settings", [{"eps": 1e-30}, {"eps": 1e-8}, {"eps": 1e-30, "decay": 0.1}])
def test_growth_under_adam_follows_theory(settings):
    width, rate = 16, 3e-3
    start = np.zeros(width)
    start[:2] = 5.0, -5.0
    optimizer = optax.adamw(rate, 0.9, 0.99, settings["eps"], weight_decay=settings.get("decay", 0.0))
    gradient = norm_toys.residual_norm_gradient(np.full(width, 0.25))
    with jax.enable_x64(True):
        path = np.asarray(norm_toys.train(optimizer, jnp.asarray(start), gradient, 3000))
    theory = norm_toys.adam_norm_growth(4.0, 3000, rate, np.sqrt(50), **settings)
    assert np.linalg.norm(path[-1]) == pytest.approx(theory[-1], rel=0.03)
    assert np.linalg.norm(path[-1]) > 1.2 * np.sqrt(50)
