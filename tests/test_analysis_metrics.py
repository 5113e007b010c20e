"""Every metric of one layer against plain float64 loops and against planted values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import analysis

B, N, T, D, V = 3, 2, 6, 16, 5


def reference_kurtosis(x):
    centred = x - x.mean()
    return (centred**4).mean() / (centred**2).mean() ** 2


def compiled(name):
    """A metric compiled whole: op by op, every new shape would compile a dozen little programs."""
    return jax.jit(getattr(analysis, name))


def hidden_states(seed=0):
    return np.random.default_rng(seed).standard_t(4, (B, T, D))


def attention_weights(seed=0, n=N):
    logits = np.random.default_rng(seed).normal(size=(B, n, T, T)) * 2
    weights = np.exp(logits) * np.tril(np.ones((T, T)))
    return weights / (1 + weights.sum(-1, keepdims=True))


def test_activation_metrics_match_loops():
    x = hidden_states()
    first, rest, pooled, ratio_first, ratio_rest, norm_first, norm_rest = [], [], [], [], [], [], []
    peaks_first, peaks_rest = [], []
    for b in range(B):
        peaks_first.append(max(abs(v) for v in x[b, 0]))
        peaks_rest.append(max(abs(v) for t in range(1, T) for v in x[b, t]))
        for t in range(T):
            kappa, norm = reference_kurtosis(x[b, t]), np.sqrt((x[b, t] ** 2).sum())
            ratio = np.abs(x[b, t]).max() / norm
            pooled.append(kappa)
            (first if t == 0 else rest).append(kappa)
            (ratio_first if t == 0 else ratio_rest).append(ratio)
            (norm_first if t == 0 else norm_rest).append(norm)
    expected = {
        "kurtosis_first": np.mean(first),
        "kurtosis_rest": np.mean(rest),
        "kurtosis_pooled": np.mean(pooled),
        "max_abs_first": np.mean(peaks_first),
        "max_abs_rest": np.mean(peaks_rest),
        "max_abs_first_maximum": max(peaks_first),
        "max_abs_rest_maximum": max(peaks_rest),
        "norm_ratio_first": np.mean(ratio_first),
        "norm_ratio_rest": np.mean(ratio_rest),
        "residual_norm_first": np.mean(norm_first),
        "residual_norm_rest": np.mean(norm_rest),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(compiled(name)(x), value, rtol=1e-5, err_msg=name)


def test_a_spike_planted_at_position_0_is_seen_there_only():
    x = np.tile([1.0, -1.0], (B, T, D // 2))
    x[:, 0] = 0.0
    x[:, 0, 5] = -300.0
    np.testing.assert_allclose(compiled("kurtosis_first")(x), D - 2 + 1 / (D - 1), rtol=1e-6)
    np.testing.assert_allclose(compiled("kurtosis_rest")(x), 1.0, rtol=1e-6)
    assert (compiled("max_abs_first")(x), compiled("max_abs_rest")(x)) == (300.0, 1.0)
    assert (compiled("norm_ratio_first")(x), compiled("norm_ratio_rest")(x)) == (1.0, 1 / D**0.5)
    assert (compiled("residual_norm_first")(x), compiled("residual_norm_rest")(x)) == (300.0, D**0.5)


def test_max_abs_is_a_mean_of_maxima_and_the_maximum_is_reported_beside_it():
    x = np.zeros((2, 3, 4))
    x[0, 0, 1], x[1, 0, 2] = -8.0, 2.0
    x[0, 1, 0], x[0, 2, 0], x[1, 2, 3] = 3.0, -6.0, 4.0
    assert (compiled("max_abs_first")(x), compiled("max_abs_first_maximum")(x)) == (5.0, 8.0)
    assert (compiled("max_abs_rest")(x), compiled("max_abs_rest_maximum")(x)) == (5.0, 6.0)


@pytest.mark.parametrize("normalised", [True, False])
def test_attention_metrics_match_loops(normalised):
    weights = attention_weights()
    if not normalised:
        weights = np.maximum(weights - 0.3, 0.0)  # like ReLU attention: many rows are all zero
        weights[0, 0, 3] = 0.0
    wins, mass, share = 0, 0.0, 0.0
    for b in range(B):
        for n in range(N):
            for t in range(T):
                row = weights[b, n, t]
                wins += row[0] > 0 and all(row[0] > other for other in row[1:])
                mass += row[0]
                share += row[0] / row.sum() if row.sum() > 0 else 0.0
    np.testing.assert_allclose(compiled("first_attention_fraction")(weights), wins / (B * N * T), rtol=1e-6)
    np.testing.assert_allclose(compiled("first_attention_mass")(weights), mass / (B * N * T), rtol=1e-6)
    np.testing.assert_allclose(compiled("first_attention_share")(weights), share / (B * N * T), rtol=1e-6)
    by_head = compiled("first_attention_mass_by_head")(weights)
    np.testing.assert_allclose(by_head, [weights[:, n, :, 0].mean() for n in range(N)], rtol=1e-6)


def test_what_counts_as_attending_most_to_the_first_key():
    def fraction(*rows):
        return float(compiled("first_attention_fraction")(jnp.array(rows)[None, None]))

    assert fraction([0.6, 0.4], [0.4, 0.6]) == 0.5
    assert fraction([0.5, 0.5], [1.0, 0.0]) == 0.5  # a tie does not count
    assert fraction([0.0, 0.0], [0.0, 0.0]) == 0.0  # nor does an all-zero ReLU row
    assert fraction([1e-30, 0.0], [0.0, 1e-30]) == 0.5  # but any positive weight does
    sink = np.zeros((2, 3, 8, 8))
    sink[..., 0] = 1.0
    assert compiled("first_attention_fraction")(sink) == compiled("first_attention_mass")(sink) == 1.0
    diagonal = np.broadcast_to(np.eye(8), (2, 3, 8, 8))
    np.testing.assert_allclose(compiled("first_attention_fraction")(diagonal), 1 / 8)  # query 0 adds 1 / T
    np.testing.assert_allclose(compiled("first_attention_mass")(diagonal), 1 / 8)
    assert fraction([1.0]) == 1.0  # a single key
    assert fraction([0.0]) == 0.0


def test_sink_rate_counts_heads_above_the_threshold():
    mass = jnp.array([[0.2, 0.31, 0.9], [0.3, 0.0, 1.0]])
    assert analysis.sink_rate(mass) == 0.5
    assert analysis.sink_rate(mass, threshold=0.95) == np.float32(1 / 6)
    weights = np.zeros((4, 2, 5, 5))
    weights[:, 1, :, 0] = 0.5
    assert analysis.sink_rate(compiled("first_attention_mass_by_head")(weights)) == 0.5


def test_value_norms():
    norms = np.random.default_rng(1).uniform(size=(B, N, T))
    np.testing.assert_allclose(compiled("value_norm_first")(norms), norms[:, :, 0].mean(), rtol=1e-6)
    np.testing.assert_allclose(compiled("value_norm_rest")(norms), norms[:, :, 1:].mean(), rtol=1e-6)


def test_half_precision_is_reduced_in_float32():
    x = jnp.asarray(hidden_states(), jnp.bfloat16)
    for name in ("kurtosis_rest", "max_abs_rest", "norm_ratio_rest", "residual_norm_rest"):
        assert jax.eval_shape(getattr(analysis, name), x).dtype == jnp.float32
    weights = jnp.asarray(attention_weights(), jnp.bfloat16)
    assert jax.eval_shape(analysis.first_attention_mass, weights).dtype == jnp.float32


def backcopy_case(seed=0):
    rng = np.random.default_rng(seed)
    is_trigger = rng.uniform(size=(B, T)) < 0.4
    is_trigger[:, :2] = False
    is_trigger[0, 2] = True
    oracle = rng.dirichlet(np.ones(V), (B, T))
    oracle[:, :, 1] = 0.0  # impossible tokens
    oracle /= oracle.sum(-1, keepdims=True)
    oracle[is_trigger] = np.eye(V)[rng.integers(V, size=is_trigger.sum())]
    log_probs = np.log(rng.dirichlet(np.ones(V), (B, T)))
    return log_probs, oracle, is_trigger


def test_risks_match_loops():
    log_probs, oracle, is_trigger = backcopy_case()
    backcopy, bigram, bigram_oracle = [], [], []
    for b in range(B):
        for t in range(T):
            possible = [v for v in range(V) if oracle[b, t, v] > 0]
            risk = -sum(oracle[b, t, v] * log_probs[b, t, v] for v in possible)
            if is_trigger[b, t]:
                backcopy.append(risk)
            else:
                bigram.append(risk)
                bigram_oracle.append(-sum(oracle[b, t, v] * np.log(oracle[b, t, v]) for v in possible))
    np.testing.assert_allclose(
        compiled("backcopy_risk_nats")(log_probs, oracle, is_trigger), np.mean(backcopy), rtol=1e-5
    )
    np.testing.assert_allclose(
        compiled("bigram_excess_risk_nats")(log_probs, oracle, is_trigger),
        np.mean(bigram) - np.mean(bigram_oracle),
        rtol=1e-5,
    )


def test_the_oracle_has_no_risk_and_a_uniform_guess_has_the_known_one():
    _, oracle, is_trigger = backcopy_case()
    with np.errstate(divide="ignore"):
        log_oracle = np.log(oracle)  # -inf where the oracle says impossible
    assert compiled("backcopy_risk_nats")(log_oracle, oracle, is_trigger) == 0.0
    assert abs(compiled("bigram_excess_risk_nats")(log_oracle, oracle, is_trigger)) < 1e-6
    uniform = np.full(oracle.shape, -np.log(V))
    np.testing.assert_allclose(compiled("backcopy_risk_nats")(uniform, oracle, is_trigger), np.log(V), rtol=1e-6)
    assert jnp.isnan(compiled("backcopy_risk_nats")(uniform, oracle, np.zeros_like(is_trigger)))


def test_an_oracle_with_the_wrong_law_at_bos_shows_an_excess():
    """A perfect model measured against an oracle that allows triggers at position 1."""
    true_law, wrong_law = np.array([0.0, 0.5, 0.5]), np.array([0.3, 0.35, 0.35])
    model = np.log(np.maximum(true_law, np.exp(-10.0)))[None, None]
    no_trigger = np.zeros((1, 1), bool)
    assert abs(compiled("bigram_excess_risk_nats")(model, true_law[None, None], no_trigger)) < 1e-6
    expected = sum(q * (np.log(q) - p) for q, p in zip(wrong_law, model[0, 0], strict=True))
    excess = compiled("bigram_excess_risk_nats")(model, wrong_law[None, None], no_trigger)
    np.testing.assert_allclose(excess, expected, rtol=1e-5)
    assert excess > 2


def test_sink_attention_and_logit_gap_match_loops():
    _, _, is_trigger = backcopy_case()
    weights, logits = attention_weights(), np.random.default_rng(7).normal(size=(B, N, T, T))
    attention, gaps = [], []
    for b in range(B):
        for i in range(T):
            if is_trigger[b, i]:
                continue
            attention += [weights[b, n, i, 0] for n in range(N)]
            if i >= 2:
                gaps += [logits[b, n, i, 0] - np.mean([logits[b, n, i, j] for j in range(1, i)]) for n in range(N)]
    np.testing.assert_allclose(compiled("sink_attention")(weights, is_trigger), np.mean(attention), rtol=1e-5)
    np.testing.assert_allclose(compiled("sink_logit_gap")(logits, is_trigger), np.mean(gaps), rtol=1e-5)


def test_planted_sink():
    is_trigger = np.zeros((1, 5), bool)
    is_trigger[0, 3] = True
    weights = np.zeros((1, 1, 5, 5))
    weights[..., 0] = 1.0
    weights[0, 0, 3] = [0, 0, 1, 0, 0]  # the trigger copies and is not asked
    assert compiled("sink_attention")(weights, is_trigger) == 1.0
    no_sink = np.eye(5)[None, None]
    assert compiled("sink_attention")(no_sink, is_trigger) == 0.25  # the BOS row is one of four
    assert compiled("sink_attention_rest")(weights, is_trigger) == 1.0
    assert compiled("sink_attention_rest")(no_sink, is_trigger) == 0.0
    logits = np.zeros((1, 1, 5, 5))
    logits[..., 0] = 4.0
    logits[0, 0] += np.triu(np.full((5, 5), np.inf))  # own and later keys, which the mask would hide, never enter
    logits[0, 0, 3] = np.nan  # nor does a trigger's query
    assert compiled("sink_logit_gap")(logits, is_trigger) == 4.0
    assert jnp.isnan(compiled("sink_logit_gap")(logits[..., :2, :2], is_trigger[:, :2]))
