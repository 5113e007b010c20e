"""Every metric of one layer against float64 NumPy and planted values; statistics of layers and batches; measuring."""

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from refusals import refused
from tiny_run import assert_trees_close, drawn_params

from orthojax import analysis, ops
from orthojax.config import Config
from orthojax.model import LoadedModel, Transformer, gpt2

L, B, N, T, D, V = 3, 8, 2, 6, 16, 5
assert_same = partial(assert_trees_close, rtol=1e-5, atol=1e-6)


@cache
def compiled(name, **options):
    """A metric compiled whole: op by op, every new shape would compile a dozen little programs."""
    return jax.jit(partial(getattr(analysis, name), **options))


def check(expected, *arrays, rtol=1e-5, **options):
    """Holds metrics by name to their values."""
    for name, value in expected.items():
        np.testing.assert_allclose(compiled(name, **options)(*arrays), value, rtol=rtol, err_msg=name)


def layers_of_taps(seed=0):
    """Taps stacked over layers, leaves [L, B, ...]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(L, B, N, T, T)) * 2
    weights = np.exp(logits) * np.tril(np.ones((T, T)))
    weights[:, :, 1, :, 0] *= 5
    arrays = {
        "attention_logits": logits, "attention_weights": weights / (1 + weights.sum(-1, keepdims=True)),
        "value_norms": rng.uniform(size=(L, B, N, T)), "head_norms": 10.0 ** rng.uniform(-2, 1, size=(L, B, N, T)),
        "residual_before": rng.normal(size=(L, B, T, D)), "post_attention": rng.standard_t(4, (L, B, T, D)),
        "residual": rng.standard_t(4, (L, B, T, D)),
    }  # fmt: skip
    return {name: np.float32(array) for name, array in arrays.items()}


TAPS = layers_of_taps()
LAYER = {name: np.float64(array[0]) for name, array in TAPS.items()}
IS_TRIGGER = np.random.default_rng(3).uniform(size=(B, T)) < 0.4
IS_TRIGGER[:, :2] = False
IS_TRIGGER[:2, 2:] = True  # the first part of the split has no query for the logit gap
IDS = np.random.default_rng(5).integers(0, V - 1, (B, T))  # the last id is never seen


def test_activation_metrics_are_their_definitions():
    x, norms = LAYER["residual"], LAYER["value_norms"]
    kurtosis = scipy.stats.kurtosis(x, axis=-1, fisher=False)
    peak, norm = np.abs(x).max(-1), np.sqrt((x**2).sum(-1))
    check({"kurtosis_pooled": kurtosis.mean()}, x)
    check({"max_abs_first": peak[:, 0].mean(), "max_abs_first_maximum": peak[:, 0].max()}, x)
    check({"max_abs_rest": peak[:, 1:].max(1).mean(), "max_abs_rest_maximum": peak[:, 1:].max()}, x)
    for name, values in (("kurtosis", kurtosis), ("norm_ratio", peak / norm), ("residual_norm", norm)):
        check({f"{name}_first": values[:, 0].mean(), f"{name}_rest": values[:, 1:].mean()}, x)
    check({"value_norm_first": norms[..., 0].mean(), "value_norm_rest": norms[..., 1:].mean()}, norms, rtol=1e-6)


def test_special_positions_are_no_others():
    special = np.random.default_rng(7).uniform(size=(B, T)) < 0.4
    special[0, 1:], special[1, 1:] = True, False
    taps = SimpleNamespace(**LAYER, visible=np.ones((1, 1, T, T), bool))
    statistics = jax.jit(lambda: analysis.observe_language_model(taps, special=special))()
    found = {n: float(x) / int(statistics.count[n]) for n, x in statistics.total.items() if x.ndim == 0}
    x, kept = LAYER["residual"][:, 1:], ~special[:, 1:]
    peak, norm = np.abs(x).max(-1), np.linalg.norm(x, axis=-1)
    values = {"kurtosis": scipy.stats.kurtosis(x, axis=-1, fisher=False)}
    values |= {"norm_ratio": peak / norm, "residual_norm": norm}
    for name, of in values.items():
        by_row = [row[of_row].mean() if of_row.any() else 0.0 for row, of_row in zip(of, kept, strict=True)]
        assert found[f"{name}_rest"] == pytest.approx(np.mean(by_row), rel=1e-5)
    assert found["max_abs_rest"] == pytest.approx(np.where(kept, peak, 0.0).max(1).mean(), rel=1e-5)
    assert float(statistics.maximum["max_abs_rest_maximum"]) == pytest.approx(peak[kept].max(), rel=1e-5)
    assert found["kurtosis_special"] == pytest.approx(values["kurtosis"][~kept].mean(), rel=1e-5)
    assert found["max_abs_special"] == pytest.approx(peak[~kept].mean(), rel=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
def test_attention_metrics_are_their_definitions(normalised):
    weights = LAYER["attention_weights"].copy()
    if not normalised:
        weights = np.maximum(weights - 0.3, 0.0)  # like ReLU attention: many rows are all zero
        weights[0, 0, 3] = 0.0
    rows = weights.reshape(-1, T)
    check(
        {
            "first_attention_fraction": np.mean([row[0] > 0 and all(row[0] > row[1:]) for row in rows]),
            "first_attention_mass": rows[:, 0].mean(),
            "first_attention_mass_by_head": weights[..., 0].mean((0, 2)),
        },
        weights,
        rtol=1e-6,
    )


def test_ties_and_empty_rows_attend_to_no_key():
    def fraction(*rows):
        return float(compiled("first_attention_fraction")(jnp.array(rows)[None, None]))

    assert fraction([0.6, 0.4], [0.4, 0.6]) == 0.5
    assert fraction([0.5, 0.5], [1.0, 0.0]) == 0.5  # a tie does not count
    assert fraction([0.0, 0.0], [0.0, 0.0]) == 0.0  # nor does an all-zero ReLU row
    assert fraction([1e-30, 0.0], [0.0, 1e-30]) == 0.5  # but any positive weight does
    assert fraction([1.0]) == 1.0  # a single key
    assert fraction([0.0]) == 0.0


def test_sink_rate_counts_heads_above_the_threshold():
    mass = jnp.array([[0.2, 0.31, 0.9], [0.3, 0.0, 1.0]])
    assert analysis.sink_rate(mass) == 0.5
    assert analysis.sink_rate(mass, threshold=0.95) == np.float32(1 / 6)


def test_half_precision_is_reduced_in_float32():
    for tap, names in {
        "residual": ("kurtosis_rest", "max_abs_rest", "norm_ratio_rest", "residual_norm_rest"),
        "attention_weights": ("first_attention_mass",),
    }.items():
        for name in names:
            half = jnp.asarray(LAYER[tap], jnp.bfloat16)
            assert jax.eval_shape(getattr(analysis, name), half).dtype == jnp.float32


def oracle_and_guess(seed=0):
    """Log-probabilities of a model, and the law of the data with impossible tokens and certain copies."""
    rng = np.random.default_rng(seed)
    oracle = rng.dirichlet(np.ones(V), (B, T))
    oracle[:, :, 1] = 0.0
    oracle /= oracle.sum(-1, keepdims=True)
    oracle[IS_TRIGGER] = np.eye(V)[rng.integers(V, size=IS_TRIGGER.sum())]
    return np.log(rng.dirichlet(np.ones(V), (B, T))), oracle


def test_risks_are_their_definitions():
    log_probs, oracle = oracle_and_guess()
    with np.errstate(divide="ignore"):
        log_oracle = np.log(oracle)  # -inf where the oracle says impossible
    risk, entropy = (-(oracle * np.where(oracle > 0, p, 0.0)).sum(-1) for p in (log_probs, log_oracle))
    excess = (risk - entropy)[~IS_TRIGGER].mean()
    expected = {"backcopy_risk_nats": risk[IS_TRIGGER].mean(), "bigram_excess_risk_nats": excess}
    check(expected, log_probs, oracle, IS_TRIGGER)
    # Of a rule whose outcome is not certain, too: here where the bigram law holds.
    check({"backcopy_excess_risk_nats": excess, "backcopy_risk_nats": risk[~IS_TRIGGER].mean()},
          log_probs, oracle, ~IS_TRIGGER)  # fmt: skip
    # The oracle has no risk, and a uniform guess the known one.
    assert compiled("backcopy_risk_nats")(log_oracle, oracle, IS_TRIGGER) == 0.0
    assert abs(compiled("bigram_excess_risk_nats")(log_oracle, oracle, IS_TRIGGER)) < 1e-6
    uniform = np.full(oracle.shape, -np.log(V))
    check({"backcopy_risk_nats": np.log(V)}, uniform, oracle, IS_TRIGGER, rtol=1e-6)
    assert jnp.isnan(compiled("backcopy_risk_nats")(uniform, oracle, np.zeros_like(IS_TRIGGER)))


def test_sink_attention_and_logit_gap_are_their_definitions():
    weights, logits, asked = LAYER["attention_weights"], LAYER["attention_logits"], ~IS_TRIGGER
    on_first = weights[..., 0].mean(1)
    gaps = np.stack([logits[:, :, i, 0] - logits[:, :, i, 1:i].mean(-1) for i in range(2, T)], -1).mean(1)
    rest = on_first[:, 1:][asked[:, 1:]].mean()
    both, log_both = weights[..., :2].sum(-1).mean(1), np.log(np.exp(logits[..., :2]).sum(-1))  # of two BOS tokens
    gaps_of_both = np.stack([log_both[:, :, i] - logits[:, :, i, 2:i].mean(-1) for i in range(3, T)], -1).mean(1)
    check({"sink_attention": both[asked].mean(), "sink_attention_rest": both[:, 2:][asked[:, 2:]].mean()},
          weights, IS_TRIGGER, bos_count=2)  # fmt: skip
    check({"sink_logit_gap": gaps_of_both[asked[:, 3:]].mean()}, logits, IS_TRIGGER, bos_count=2)
    check({"sink_attention": on_first[asked].mean()}, weights, IS_TRIGGER, bos_count=0)  # the first token
    check({"sink_attention": on_first[asked].mean(), "sink_attention_rest": rest}, weights, IS_TRIGGER)
    check({"sink_logit_gap": gaps[asked[:, 2:]].mean()}, logits, IS_TRIGGER)


def test_planted_sink():
    is_trigger = np.zeros((1, 5), bool)
    is_trigger[0, 3] = True
    weights = np.zeros((1, 1, 5, 5))
    weights[..., 0] = 1.0
    weights[0, 0, 3] = [0, 0, 1, 0, 0]  # the trigger copies and is not asked
    check({"sink_attention": 1.0, "sink_attention_rest": 1.0}, weights, is_trigger, rtol=0)
    logits = np.zeros((1, 1, 5, 5))
    logits[..., 0] = 4.0
    logits[0, 0] += np.triu(np.full((5, 5), np.inf))  # own and later keys, which the mask would hide, never enter
    logits[0, 0, 3] = np.nan  # nor does a trigger's query
    assert compiled("sink_logit_gap")(logits, is_trigger) == 4.0
    sums = compiled("logit_sums", vocab_size=2)(logits, np.zeros((1, 5), int), is_trigger)
    assert sums["gap_of_token"][0].tolist() == [[8.0], [0.0]]
    assert jnp.isnan(compiled("sink_logit_gap")(logits[..., :2, :2], is_trigger[:, :2]))


def test_metrics_of_heads_are_their_definitions():
    weights, norms, written = LAYER["attention_weights"], LAYER["value_norms"], LAYER["head_norms"]
    null = 1 - weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(weights * np.log(weights), -1) - null * np.log(null)
    relu = np.maximum(LAYER["attention_logits"], 0.0) * np.tri(T) + 1.0  # rows of more than 1
    shares = relu / relu.sum(-1, keepdims=True)
    expected = {"null_mass_by_head": null.mean((0, 2)), "attention_entropy_by_head": entropy.mean((0, 2))}
    check(expected, weights)
    expected = {"null_mass_by_head": 1 - relu.sum(-1).mean((0, 2))}
    check(expected | {"attention_entropy_by_head": -(shares * np.log(shares)).sum(-1).mean((0, 2))}, relu)
    for first in (1, 2):
        before, after = norms[..., :first], norms[..., first:]
        check({"value_norm_first": before.mean(), "value_norm_rest": after.mean()}, norms, first=first)
        expected = {"value_norm_first": before.mean((0, 2)), "value_norm_rest": after.mean((0, 2))}
        check(expected, norms, first=first, by_head=True)
    sizes = np.linalg.norm(LAYER["residual"], axis=-1)
    check({"residual_norm_first": sizes[:, :2].mean(), "residual_norm_rest": sizes[:, 2:].mean()}, LAYER["residual"],
          first=2)  # fmt: skip
    activity = written / np.linalg.norm(LAYER["residual_before"], axis=-1)[:, None]
    check({"head_activity": activity}, written, LAYER["residual_before"])
    histogram = analysis.activity_histogram(activity, IS_TRIGGER.astype(int), 3)
    largest = activity.max((0, 2))
    assert histogram.sum() == activity.size
    for n in range(N):
        shares = analysis.active_shares(histogram)[:, n]
        bins = [
            [(activity[:, n] > edge * largest[n])[IS_TRIGGER == d].mean() for edge in (0.113, 0.088)] for d in (0, 1)
        ]
        assert all(low <= share <= high for share, (low, high) in zip(shares[:2], bins, strict=True))
        assert np.isnan(shares[2])
    assert 0.1 < analysis.active_shares(histogram)[0, 0] < 0.9  # a bound that both ends would satisfy shows nothing
    silent = analysis.activity_histogram(0 * activity, IS_TRIGGER.astype(int), 2)
    np.testing.assert_array_equal(analysis.active_shares(silent), 0.0)


@pytest.mark.parametrize("bos_count", [1, 2])
def test_logits_by_token_are_those_of_loops(bos_count):
    logits, first = LAYER["attention_logits"], bos_count + 1
    sums = compiled("logit_sums", vocab_size=V, bos_count=bos_count)(np.float32(logits), IDS, IS_TRIGGER)
    means = {name: np.array(total, float) for name, (total, _) in sums.items()}
    for name, (_, count) in sums.items():
        with np.errstate(invalid="ignore"):
            means[name] /= np.asarray(count)[..., None]
    found = analysis.logit_summary(means)
    for n in range(N):
        on_bos, gaps, keys = [], {}, {}
        for b, t in np.argwhere(~IS_TRIGGER):
            if t >= first:
                on_bos.append(np.log(np.exp(logits[b, n, t, :bos_count]).sum()))
                gaps.setdefault(IDS[b, t], []).append(on_bos[-1] - logits[b, n, t, bos_count:t].mean())
                for s in range(bos_count, t):
                    keys.setdefault(IDS[b, s], []).append(logits[b, n, t, s])
        band = np.quantile([np.mean(of) for of in gaps.values()], (0.1, 0.9))
        expected = {"sink_logit": np.mean(on_bos), "sink_logit_spread": np.std(on_bos)}
        expected |= {"sink_logit_gap_tokens": np.mean([np.mean(of) for of in gaps.values()])}
        expected |= {"sink_logit_gap_q10": band[0], "sink_logit_gap_q90": band[1]}
        expected |= {"other_logit_spread": np.mean([np.std(of) for of in keys.values()])}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][n], value, rtol=1e-4, err_msg=name)


WEIGHTS, HIDDEN = TAPS["attention_weights"][0], TAPS["residual"][0]
_log_probs, _oracle = oracle_and_guess()
REFUSED = [
    (lambda: analysis.first_attention_fraction(TAPS["attention_weights"]), ("attention weights", "[B, N, T, S]")),
    (lambda: analysis.attention_entropy_by_head(WEIGHTS[0, 0]), ("attention weights", "[B, N, T, S]")),
    (lambda: analysis.kurtosis_first(HIDDEN[0]), ("hidden states", "[B, T, D]")),
    (lambda: analysis.max_abs_rest(TAPS["residual"]), ("hidden states", "[B, T, D]")),
    (lambda: analysis.norm_ratio_rest(HIDDEN[:, :1]), "T >= 2"),
    (lambda: analysis.value_norm_first(np.ones((B, T))), "[B, N, S]"),
    (lambda: analysis.value_norm_rest(np.ones((B, N, 1))), "S >= 2"),
    (lambda: analysis.osp_kurtosis(HIDDEN[0]), ("hidden states", "[B, T, D]")),
    (lambda: analysis.gu_sink_rate(WEIGHTS[:, :, 1:]), "as many queries as keys"),
    (lambda: analysis.sink_attention(WEIGHTS, IS_TRIGGER.astype(int)), "is_trigger"),
    (lambda: analysis.sink_attention(WEIGHTS, IS_TRIGGER[:, 1:]), "is_trigger"),
    (lambda: analysis.sink_logit_gap(WEIGHTS[0], IS_TRIGGER), "logits"),
    *(
        (lambda name=name: getattr(analysis, name)(TAPS["attention_logits"][0]), "not logits")
        for name in (
            *("first_attention_fraction", "first_attention_mass", "first_attention_mass_by_head", "gu_sink_rate"),
            *("null_mass_by_head", "attention_entropy_by_head"),
        )
    ),
    *(
        (lambda length=length, window=window: analysis.chance_of_first(length, window=window), "allowed: 1 or more")
        for length, window in ((-1, None), (0, None), (float("nan"), None), (8, 0), (8, float("nan")))
    ),
    (lambda: analysis.bigram_excess_risk_nats(_log_probs, _oracle[0], IS_TRIGGER), "oracle_probs"),
    (lambda: analysis.observe_language_model(SimpleNamespace(residual=HIDDEN), basis=np.eye(5)), "basis"),
]


test_other_shapes_are_refused_by_name = refused((lambda _, call: call(), REFUSED, ValueError))


def test_entropy_is_finite_for_weights_of_gelu():
    gelu = np.asarray(ops.gelu(jnp.asarray(TAPS["attention_logits"][0]), where=np.tri(T, dtype=bool)))
    assert gelu.min() < -1e-3
    assert np.all(np.isfinite(analysis.attention_entropy_by_head(gelu)))


FIRST_AND_REST = {
    f"{name}_{where}"
    for name in ("kurtosis", "max_abs", "norm_ratio", "value_norm", "residual_norm")
    for where in ("first", "rest")
}
LANGUAGE_MODEL_KEYS = FIRST_AND_REST | {
    *("kurtosis_pooled", "max_abs_first_maximum", "max_abs_rest_maximum"),
    *("first_attention_fraction", "first_attention_mass", "sink_rate"),
}
BACKCOPY_KEYS = {name for name in FIRST_AND_REST if "norm_" in name and "ratio" not in name}
BACKCOPY_KEYS |= {"sink_attention", "sink_attention_rest", "sink_logit_gap", "null_mass", "attention_entropy_nats"}
BACKCOPY_KEYS |= {"value_drain", "residual_peak", "residual_peak_ratio", "active_at_triggers", "active_elsewhere"}
BACKCOPY_KEYS |= {f"sink_logit{end}" for end in ("", "_gap_q10", "_gap_q90", "_gap_tokens", "_spread")} | {
    "other_logit_spread"
}


def observe_layers(observe, arrays=TAPS, sequences=slice(None)):
    """Runs an observe function inside a scan over layers, as a model does."""

    def layer(carry, taps):
        return carry, observe(SimpleNamespace(**taps, visible=jnp.tri(T, dtype=bool)[None, None]))

    return jax.lax.scan(layer, 0, {name: array[:, sequences] for name, array in arrays.items()})[1]


def observe_predictors(sequences=slice(None)):
    return observe_layers(analysis.observe_predictors, sequences=sequences)


def observe_risks(sequences=slice(None)):
    log_probs, oracle = oracle_and_guess()
    return analysis.observe_backcopy_risks(log_probs[sequences], oracle[sequences], IS_TRIGGER[sequences])


CASES = {
    "language model": lambda part: observe_layers(analysis.observe_language_model, sequences=part),
    "backcopy": lambda part: observe_layers(
        analysis.observe_backcopy(IS_TRIGGER[part], tokens=IDS[part], vocab_size=V), sequences=part
    ),
    "predictors": observe_predictors,
    "risks": observe_risks,
}


@pytest.mark.parametrize(
    "name", [pytest.param("language model", marks=pytest.mark.slow), "backcopy", "predictors", "risks"]
)
def test_statistics_do_not_depend_on_the_batches(name):
    whole = analysis.finalize(CASES[name](slice(None)))
    parts = [CASES[name](part) for part in (slice(0, 2), slice(2, 8))]
    assert whole["sequences"] == B
    assert_same(whole, analysis.finalize(analysis.combine(*parts)))
    assert_same(whole, analysis.finalize(jax.jit(analysis.combine)(*reversed(parts))))


def test_metrics_are_means_or_maxima_over_layers():
    language_model = analysis.finalize(CASES["language model"](slice(None)))
    backcopy = analysis.finalize(CASES["backcopy"](slice(None)))
    for metrics, keys in ((language_model, LANGUAGE_MODEL_KEYS), (backcopy, BACKCOPY_KEYS)):
        assert metrics.keys() == {"sequences"} | keys | {f"{name}/layer_{i}" for name in keys for i in range(L)}
        assert all(type(value) is float for value in metrics.values())
        direct = [name for name in keys - {"sink_rate"} if hasattr(analysis, name)]
        for name in direct:
            sources = {"value": "value_norms", "first_": "attention_weights", "sink_a": "attention_weights"}
            sources["sink_l"] = "attention_logits"
            source = next((array for prefix, array in sources.items() if name.startswith(prefix)), "residual")
            extra = (IS_TRIGGER,) if name.startswith("sink") else ()
            layers = [float(compiled(name)(TAPS[source][layer], *extra)) for layer in range(L)]
            by_layer = [metrics[f"{name}/layer_{i}"] for i in range(L)]
            np.testing.assert_allclose(by_layer, layers, rtol=1e-5, err_msg=name)
            over_layers = np.max if name.endswith("_maximum") or name.startswith("sink_attention") else np.mean
            np.testing.assert_allclose(metrics[name], over_layers(layers), rtol=1e-5, err_msg=name)
    for i in range(L):
        of = {name: backcopy[f"{name}/layer_{i}"] for name in BACKCOPY_KEYS}
        first, rest = (TAPS["value_norms"][i][..., part].mean((0, 2)) for part in (slice(1), slice(1, None)))
        np.testing.assert_allclose(of["value_drain"], (first / rest).mean(), rtol=1e-5)
        assert of["residual_peak"] == pytest.approx(of["residual_norm_first"] - of["residual_norm_rest"])
        assert of["residual_peak_ratio"] == pytest.approx(of["residual_norm_first"] / of["residual_norm_rest"])
        activity = analysis.head_activity(TAPS["head_norms"][i], TAPS["residual_before"][i])[..., 1:]  # without BOS
        histogram = analysis.activity_histogram(activity, IS_TRIGGER[:, 1:].astype(int), 2)
        shares = analysis.active_shares(histogram).mean(1)
        assert [of["active_elsewhere"], of["active_at_triggers"]] == pytest.approx(shares)
    by_head = analysis.finalize(CASES["backcopy"](slice(None)), by_head=True)
    heads = [by_head[f"sink_attention/layer_1/head_{head}"] for head in range(N)]
    assert np.mean(heads) == pytest.approx(backcopy["sink_attention/layer_1"])
    assert heads[0] != heads[1]
    risks = analysis.finalize(observe_risks())
    assert risks.keys() == {"sequences", "backcopy_risk_nats", "backcopy_excess_risk_nats", "bigram_excess_risk_nats"}
    for name in risks.keys() - {"sequences"}:
        np.testing.assert_allclose(risks[name], compiled(name)(*oracle_and_guess(), IS_TRIGGER), rtol=1e-6)


def test_sink_rate_share_of_heads_of_all_batches():
    by_head = TAPS["attention_weights"][..., 0].mean(axis=(1, 3))
    metrics = analysis.finalize(CASES["language model"](slice(None)))
    assert metrics["sink_rate"] == np.mean(by_head > 0.3)
    assert metrics["sink_rate/layer_1"] == np.mean(by_head[1] > 0.3)
    assert 0 < metrics["sink_rate"] < 1


def test_predictors_are_their_definitions_in_float64():
    before, after, weights = (np.float64(TAPS[name]) for name in ("residual_before", "residual", "attention_weights"))
    metrics = analysis.finalize(observe_predictors())

    def osp(x):
        excess = np.mean(x**4, -1) / np.std(x, -1, ddof=1) ** 4 - 3
        return np.maximum(excess, 0).mean((-1, -2))

    assert 0.1 < osp(before[0]) < osp(after[0])
    np.testing.assert_allclose([metrics[f"osp_kurtosis/layer_{i}"] for i in range(L)], osp(after), rtol=1e-5)
    assert metrics["osp_kurtosis"] == pytest.approx((osp(before[0]) + osp(after).sum()) / (L + 1), rel=1e-5)
    flat = np.abs(before).reshape(L, B, -1)
    ratio = (flat.max(-1) / np.median(flat, -1)).mean(1)
    np.testing.assert_allclose([metrics[f"max_over_median/layer_{i}"] for i in range(L)], ratio, rtol=1e-5)
    assert metrics["max_over_median"] == pytest.approx(ratio.mean(), rel=1e-5)
    alpha = np.stack([weights[..., k:, k].mean(-1) for k in range(T)], -1)
    assert metrics["gu_sink_rate"] == pytest.approx((alpha[..., 0] > 0.3).mean())
    assert metrics["gu_sink_rate_any"] == pytest.approx((alpha > 0.3).any(-1).mean())
    assert 0 < metrics["gu_sink_rate"] < metrics["gu_sink_rate_any"] < 1
    named = {"osp_kurtosis", "max_over_median", "gu_sink_rate", "gu_sink_rate_any"}
    assert metrics.keys() == {"sequences"} | named | {f"{name}/layer_{i}" for name in named for i in range(L)}


def test_queries_that_do_not_see_a_key_do_not_count():
    """A window of 3 keys, in which softmax-like rows give key 0 most of what its queries have."""
    rng, length, window = np.random.default_rng(1), 12, 3
    distance = np.arange(length)[:, None] - np.arange(length)
    visible = ((distance >= 0) & (distance < window))[None, None]
    weights = np.where(visible, rng.uniform(0.1, 1.0, (2, 4, length, length)), 0.0)
    weights[:, :2, :, 0] *= 200.0
    weights /= weights.sum(-1, keepdims=True)
    alpha = np.stack([weights[..., k : k + window, k].mean(-1) for k in range(length)], -1)
    np.testing.assert_allclose(analysis.mean_weights_by_key(weights, visible), alpha, rtol=1e-5)
    found = [analysis.gu_sink_rate(weights, 0.9, any_key=any_key, visible=visible) for any_key in (False, True)]
    assert found == pytest.approx([(alpha[..., 0] > 0.9).mean(), (alpha > 0.9).any(-1).mean()])
    assert found[0] == 0.5 > analysis.gu_sink_rate(weights, 0.9)
    logits = rng.normal(size=(2, 4, length, length))
    gaps = [logits[..., i, 0] - logits[..., i, 1:i].mean(-1) for i in range(2, window)]
    nobody = np.zeros((2, length), bool)
    assert analysis.sink_logit_gap(logits, nobody, visible=visible) == pytest.approx(np.mean(gaps), rel=1e-5)


def test_osp_kurtosis_is_not_centred_and_survives_what_is_constant_or_large():
    x = np.random.default_rng(0).normal(size=(1, 400, 1024))
    chance = analysis.chance("osp_kurtosis", analysis.Conditions(T, 1024, 32))
    assert compiled("osp_kurtosis")(x) == pytest.approx(chance, rel=0.15)
    assert compiled("osp_kurtosis")(x + 2) == pytest.approx(40, rel=0.03)
    for factor in (1e-30, 1e30):
        np.testing.assert_allclose(compiled("osp_kurtosis")(x * factor), compiled("osp_kurtosis")(x), rtol=1e-4)
    assert compiled("osp_kurtosis")(np.stack([np.zeros((2, 8)), np.full((2, 8), 3.0)])) == 0.0
    chance = analysis.chance("max_over_median", analysis.Conditions(400, 1024, 32))
    assert compiled("max_over_median")(x) == pytest.approx(chance, rel=0.1)


def test_post_attention_residual_is_an_option():
    plain = analysis.finalize(CASES["language model"](slice(None)))
    both = analysis.finalize(observe_layers(partial(analysis.observe_language_model, post_attention=True)))
    assert plain.items() <= both.items()
    moved = TAPS | {"residual": TAPS["post_attention"]}
    swapped = analysis.finalize(observe_layers(analysis.observe_language_model, moved))
    extra = {name.removeprefix("post_attention_") for name in both.keys() - plain.keys()}
    assert {"kurtosis_first/layer_0", "max_abs_rest_maximum"} < extra
    assert_same({name: both[f"post_attention_{name}"] for name in extra}, {name: swapped[name] for name in extra})


def test_arrays_by_head_are_those_of_the_functions():
    observe = partial(analysis.observe_language_model, by_head=True)
    statistics = observe_layers(observe)
    plain, found = analysis.finalize(CASES["language model"](slice(None))), analysis.finalize(statistics)
    assert plain == pytest.approx({name: found[name] for name in plain}, rel=1e-5)
    arrays = analysis.finalize_arrays(statistics)
    of = {
        "null_mass": ("attention_weights", "null_mass_by_head"),
        "attention_entropy_nats": ("attention_weights", "attention_entropy_by_head"),
        "first_attention_mass": ("attention_weights", "first_attention_mass_by_head"),
    }
    for name, (tap, function) in of.items():
        layers = [compiled(function)(array) for array in TAPS[tap]]
        np.testing.assert_allclose(arrays[name], layers, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(arrays[name].mean(), found[name], rtol=1e-6)
    np.testing.assert_allclose(arrays["value_norm_rest"], TAPS["value_norms"][..., 1:].mean((1, 3)), rtol=1e-5)
    for head in range(N):
        of_one = compiled("first_attention_fraction")(TAPS["attention_weights"][1][:, [head]])
        np.testing.assert_allclose(arrays["first_attention_fraction"][1, head], of_one, rtol=1e-6)
    np.testing.assert_allclose(arrays["max_abs_by_channel"], np.abs(TAPS["residual"]).max((1, 2)), rtol=1e-6)


# The one loop. Functions of the module, so that one program serves all calls.


def _scaled_residual(taps, scale):
    return {"residual": scale * taps.residual, "weights": taps.attention_weights}


def _largest(logits, scale):
    return scale * jnp.max(logits, axis=-1)[None]


@pytest.fixture(scope="module")
def loaded():
    model = gpt2("tiny", d_model=8, num_layers=2, num_heads=2, d_mlp=8, vocab_size=16, max_length=8)
    return LoadedModel(Transformer(model), drawn_params(model), Config(), None, Path())


TOKENS = np.random.default_rng(0).integers(0, 16, (6, 8))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_measure_joins_batches_on_any_mesh(loaded, devices):
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        loaded = loaded._replace(params=jax.device_put(loaded.params, placed))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    else:
        rows = jax.devices()[0]
    batches = [
        (jax.device_put(TOKENS[:4], rows), jnp.float32(2.0)),
        (jax.device_put(TOKENS[4:], rows), jnp.float32(3.0)),
    ]
    whole = jax.jit(lambda params: loaded.model.apply({"params": params}, TOKENS, observe=lambda taps: taps))
    logits, taps = jax.device_get(whole(jax.device_get(loaded.params)))
    scale = np.float32([2, 2, 2, 2, 3, 3]).reshape(6, 1, 1)
    seen, largest = analysis.measure(
        loaded, iter(batches), _scaled_residual, output=_largest, join=analysis.concatenate
    )
    np.testing.assert_allclose(seen["residual"], scale * taps.residual, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen["weights"], taps.attention_weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(largest[0], scale[..., 0] * logits.max(-1), rtol=1e-5)
    one = analysis.measure(loaded, batches[:1], _scaled_residual)
    np.testing.assert_allclose(one["residual"], 2 * taps.residual[:, :4], rtol=1e-5, atol=1e-6)
    assert one["residual"].is_fully_replicated


def test_measuring_compiles_once_for_all_batches(loaded):
    whole = analysis.finalize(analysis.measure(loaded, [TOKENS], analysis.observe_language_model))
    assert whole["sequences"] == 6
    parts = [TOKENS[:3], TOKENS[3:]]
    assert_same(whole, analysis.finalize(analysis.measure(loaded, parts, analysis.observe_language_model)))
    calls = []

    def counting(taps):
        calls.append(taps)
        return analysis.Statistics(jnp.int32(3), {"x": taps.residual.sum()}, {"x": jnp.int32(1)}, {})

    for _ in range(2):
        analysis.measure(loaded, parts, counting)
    traced = len(calls)
    analysis.measure(loaded, parts, counting)
    assert 1 <= len(calls) == traced
    for arguments, says in (
        (([], counting), "no batches"),
        ((TOKENS, None), "observe of type NoneType"),
        ((5, counting), "batches of type int"),
        ((["ab"], counting), "a batch of str; allowed: tokens"),
        ((parts, counting, {"head_scale": 1}), "interventions: dict"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            analysis.measure(loaded, *arguments)


@pytest.mark.parametrize("attention", [(True, False), (False, True), (False, False)])
def test_layers_without_attention_leave_attention_means_alone(attention):
    shape = {"d_model": 8, "num_layers": 2, "num_heads": 2, "d_mlp": 8, "vocab_size": 16, "max_length": 8}
    config = gpt2("tiny", **shape, attention=attention, scan_layers=False)
    tokens = TOKENS[:, :8]
    params = Transformer(config).init(jax.random.key(0), tokens)["params"]
    loaded = LoadedModel(Transformer(config), params, Config(), None, Path())
    observers = (
        analysis.observe_language_model,
        analysis.observe_backcopy(tokens % 3 == 0),
        analysis.observe_predictors,
    )
    for observe in observers:
        batches = [tokens] if observe is observers[1] else [tokens[:3], tokens[3:]]
        found = analysis.finalize(analysis.measure(loaded, batches, observe), by_head=True)
        for name in [name for name in found if f"{name}/layer_0" in found]:
            layers = [found[f"{name}/layer_{i}"] for i in range(2)]
            if name.startswith(("residual", "kurtosis", "max_", "norm_ratio", "osp_kurtosis")):
                assert np.isfinite(layers).all()
                continue
            assert list(np.isnan(layers)) == [not attends for attends in attention], name
            of_head = [found[key] for i in range(2) if (key := f"{name}/layer_{i}/head_0") in found]
            assert list(np.isnan(of_head)) in ([], [not attends for attends in attention]), name
            expected = np.array(layers)[list(attention)]
            np.testing.assert_equal(found[name], np.nan if not len(expected) else expected[0])


def test_a_spike_at_position_0_is_seen_there():
    x = np.tile([1.0, -1.0], (B, T, D // 2))
    x[:, 0] = 0.0
    x[:, 0, 5] = -300.0
    check({"kurtosis_first": D - 2 + 1 / (D - 1), "kurtosis_rest": 1.0}, x, rtol=1e-6)
    check({"max_abs_first": 300.0, "max_abs_rest": 1.0, "norm_ratio_first": 1.0, "norm_ratio_rest": 0.25}, x, rtol=0)
    check({"residual_norm_first": 300.0, "residual_norm_rest": 4.0}, x, rtol=0)
