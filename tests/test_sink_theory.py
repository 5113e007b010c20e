"""The theory of sinks, drains and norms against the equations in NumPy float64, and the published norms."""

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
def test_loss_and_gradients_are_those_of_the_kl(contexts):
    of, rng = chain(contexts), np.random.default_rng(1)
    alpha, beta = rng.standard_normal(4), rng.standard_normal(6)
    assert of.loss(alpha, beta) == pytest.approx(loss_of(of, alpha, beta), rel=1e-10)
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
    q = of.predictions(alpha, np.asarray(simplified.bos_value(params))[:size])[1]
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


def test_the_flow_is_gradient_descent_in_small_steps():
    of, alpha, beta = chain(2), np.zeros(4), np.ones(6)
    ours = sink_theory.flow(of, alpha, beta, [2.0])
    for _ in range(4000):
        by_alpha, by_beta = of.gradients(alpha, beta)
        alpha, beta = alpha - 5e-4 * by_alpha, beta - 5e-4 * by_beta
    np.testing.assert_allclose(ours[0][0], alpha, atol=1e-5)
    np.testing.assert_allclose(ours[1][0], beta, atol=1e-5)


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
    np.testing.assert_allclose(of.predictions(np.ones(4), fixed)[1][0], of.rows, atol=1e-12)


def test_only_the_stationary_set_is_stationary():
    of = chain()
    alpha, beta = np.full(4, 0.7), 0.3 - np.exp(-0.7) * of.contexts[0]
    assert max(np.abs(g).max() for g in of.gradients(alpha, beta)) < 1e-15
    assert sink_theory.distance_to_stationary(alpha, beta, of) == pytest.approx((0.0, 0.0), abs=1e-12)
    moved = alpha + 0.1 * np.eye(4)[0]
    assert max(np.abs(g).max() for g in of.gradients(moved, beta)) > 1e-5
    assert sink_theory.distance_to_stationary(moved, beta, of)[0] > 0.01


# Norms.


def test_sgd_follows_the_closed_form_and_adam_the_paper():
    gradient = norm_toys.residual_norm_gradient(np.ones(1))
    with jax.enable_x64(True):
        start = jnp.full((1,), 10.0)
        sgd, adam = (
            np.asarray(norm_toys.train(optimizer, start, gradient, 10_000))[:, 0]
            for optimizer in (optax.sgd(0.3), optax.adam(0.3))
        )
    np.testing.assert_allclose(sgd, norm_toys.residual_norm_flow(np.arange(1, 10_001), 10.0, 0.3), rtol=1e-4)
    np.testing.assert_allclose(adam[[999, 2499, 4999, 7499, 9999]], [27.9, 33.6, 41.7, 51.2, 64.0], atol=0.06)


def test_gradient_flow_of_the_layer_norm_toy_keeps_its_invariant():
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


def test_the_slope_of_adams_logit_solves_its_equation():
    slope = norm_toys.adam_logit_slope(9e-4, 0.999)
    assert slope == pytest.approx(9e-4 * norm_toys.adam_gain(slope, 0.999), rel=1e-6)
    assert norm_toys.adam_logit_slope(1.0, 0.999) < -np.log(0.999) / 2


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
