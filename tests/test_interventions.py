"""Interventions: against the model in float64 NumPy, and against models whose parameters were changed instead."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import model_oracle
import numpy as np
import pytest
from attention_oracle import assert_slope
from model_oracle import numpy_forward, random_params, stacked_params
from thinned import quick_and_slow

from orthojax import Interventions, LoadedModel, analysis
from orthojax.config import ModelConfig
from orthojax.model import Transformer, attention_pattern, bigram_backcopy, gpt2, llama2, parameter_shapes, stack_layers

L, B, T, N, D = 2, 2, 6, 4, 8
SMALL = {"vocab_size": 11, "max_length": 16, "d_model": D, "num_layers": L, "num_heads": N, "d_mlp": 12}
UNROLLED, SCANNED = SMALL | {"scan_layers": False}, SMALL | {"scan_layers": True, "remat": True}
GPT2 = gpt2("tiny", **SCANNED)
GROUPED = llama2(
    "tiny", **SCANNED, num_kv_heads=2, gated_attention=True, normalizer="learned_sink", relaxed_causal_tokens=2
)
BACKCOPY = bigram_backcopy(**UNROLLED, normalizer="relu", attention=(False, True), mlp=("linear", "none"))
BIASES = ModelConfig(**SCANNED, use_bias=True, normalizer="softmax1")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (B, T)))
SCALES = tuple(name for name in Interventions._fields if name.endswith("_scale"))
SHARES = tuple(name for name in Interventions._fields if name.endswith("_share"))
OUTPUTS = ("attention_output", "mlp_output", "residual")
OF_HEADS = ("queries", "keys", "values", "head_outputs")
SEEN = ("attention_logits", "attention_weights", *OF_HEADS, "value_norms", *OUTPUTS, "post_attention")
MATRICES = ("attention_bias", "forced_weights")
FUSED = (*SCALES, "attention_bias")
EFFECTS = (*FUSED, *SHARES)
NO_UNITS = tuple(name for name in EFFECTS if name != "mlp_unit_scale")  # of linear MLPs and experts
CONFIGS = {
    "llama2": (model_oracle.CONFIGS["llama2"], FUSED),
    "grouped": (GROUPED, EFFECTS),
    "bigram_backcopy": (BACKCOPY, NO_UNITS),
    "biases": (BIASES, EFFECTS),
    "capped": (model_oracle.CONFIGS["gemma"], FUSED),
    "latent attention": (model_oracle.CONFIGS["query latents, groups of experts"], NO_UNITS),
}


@partial(jax.jit, static_argnums=0)
def apply(config, params, given=None, tokens=TOKENS):
    """Computes logits and taps."""
    return Transformer(config).apply({"params": params}, tokens, interventions=given, observe=lambda taps: taps)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-0.5, 1.5, shape).astype(np.float32)


def random_interventions(config):
    """Draws every field, as the oracle takes them, without axes of the batch."""
    shapes = {"head_scale": (L, N), "first_value_scale": (L, config.kv_heads)} | dict.fromkeys(MATRICES, (L, N, T, T))
    shapes |= {"forced_share": (L, N, T), "attention_output_share": (L,), "mlp_output_share": (L, T)}
    shapes |= {"residual_share": (L, T)} | dict.fromkeys(OUTPUTS, (L, T, D)) | {"mlp_unit_scale": (L, config.d_mlp)}
    c, K = config, config.kv_heads
    shapes |= {"queries": (L, T, N, c.head_dim), "keys": (L, T, K, c.head_dim), "values": (L, T, K, c.value_dim)}
    shapes |= {"head_outputs": (L, T, N, c.value_dim), "queries_share": (L, N), "keys_share": (L, K, T)}
    shapes |= {"values_share": (L, K), "head_outputs_share": (L, N, T)}
    fields = Interventions._fields
    drawn = Interventions(**{name: uniform(*shapes.get(name, (L,)), seed=len(name)) for name in fields})
    drawn.head_scale[1, 2] = 0.0  # an ablation
    return drawn


def neutral(config):
    """Makes such fields without effect: factors of 1, shares and a bias of 0."""
    given, ends = random_interventions(config)._asdict(), {"scale": 1.0, "share": 0.0, "_bias": 0.0}
    return Interventions(**{name: 0 * a + ends[name[-5:]] if name[-5:] in ends else a for name, a in given.items()})


def only(given, names):
    return Interventions(**{name: getattr(given, name) for name in names})


def with_batch_axes(given):
    axes = dict.fromkeys((*MATRICES, *OUTPUTS, *OF_HEADS), (1,))
    arrays = {name: jnp.expand_dims(a, axes.get(name, ())) for name, a in given._asdict().items() if a is not None}
    return Interventions(**arrays)


@pytest.mark.parametrize("name", quick_and_slow(CONFIGS, ("llama2", "biases")))
def test_intervened_logits_and_taps_equal_the_oracle(name):
    config, effects = CONFIGS[name]
    params, ones, random = stacked_params(config), neutral(config), random_interventions(config)
    ones = only(ones, FUSED) if effects == FUSED else ones
    ones = ones._replace(mlp_unit_scale=None) if effects == NO_UNITS else ones
    plain = apply(config, params)[0]
    logits = apply(config, params, with_batch_axes(ones))[0]
    np.testing.assert_allclose(logits, plain, rtol=0, atol=1e-6 * np.abs(plain).max())
    for changed in [*([field] for field in effects), effects]:
        given = ones._replace(**{field: getattr(random, field) for field in changed})
        logits, taps = apply(config, params, with_batch_axes(given))
        for i in range(B):
            expected, layers = numpy_forward(config, random_params(config), TOKENS[i], given)
            np.testing.assert_allclose(logits[i], expected, rtol=1e-4, atol=1e-4, err_msg=str(changed))
            for layer, seen in enumerate(layers):
                for field in SEEN:
                    tap = getattr(taps, field)[layer, i]
                    np.testing.assert_allclose(tap, seen[field], rtol=1e-4, atol=1e-4, err_msg=f"{changed}: {field}")


# Forced patterns, and activations of another run.


def test_taps_show_forced_patterns_in_chosen_heads_only():
    params, plain = stacked_params(GROUPED), apply(GROUPED, stacked_params(GROUPED))[1].attention_weights
    keys = {"identity": np.arange(T), "first": np.zeros(T, int), "previous": np.maximum(np.arange(T) - 1, 0)}
    patterns = {kind: np.asarray(attention_pattern(kind, T)) for kind in keys}
    for kind, pattern in patterns.items():
        np.testing.assert_array_equal(pattern, np.eye(T)[keys[kind]])
    share = np.zeros((L, N, T), np.float32)
    share[1, 2] = share[0, :, -1] = 1.0
    for pattern in [*patterns.values(), uniform(B, T, T)]:
        _, taps = apply(GROUPED, params, Interventions(forced_weights=pattern, forced_share=share))
        expected = np.where(share[:, None, ..., None] == 1.0, pattern.reshape(1, -1, 1, T, T), plain)
        np.testing.assert_array_equal(taps.attention_weights[0], expected[0])
        np.testing.assert_array_equal(taps.attention_weights[1, :, 2], expected[1, :, 2])
    with pytest.raises(ValueError, match="'diagonal'"):
        attention_pattern("diagonal", T)


@pytest.mark.parametrize("config", quick_and_slow([GPT2, BACKCOPY], [BACKCOPY]), ids=["scanned", "unrolled"])
def test_a_shared_bias_equals_one_for_each_layer(config):
    params = stacked_params(config)
    for bias in (uniform(T, T), uniform(B, T, T)):
        by_layer = np.broadcast_to(bias.reshape(1, -1, 1, T, T), (L, B, N, T, T))
        shared, each = (apply(config, params, Interventions(attention_bias=array)) for array in (bias, by_layer))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), shared, each)
    hidden = np.zeros((T, T), np.float32)
    hidden[1:, 0] = -1e30
    _, taps = apply(config, params, Interventions(attention_bias=hidden))
    assert (taps.attention_weights[..., 1:, 0] == 0.0).all()
    assert (np.abs(taps.attention_logits) < 100).all()


# Gradients: to every array, and through them to the parameters, against differences of the float64 model.


def test_gradients_are_the_differences_of_the_float64_model():
    point = {"params": random_params(GROUPED), **random_interventions(GROUPED)._asdict()}
    weights = 20 * uniform(T, 11, seed=3)

    def loss(point):
        given = with_batch_axes(Interventions(**{name: point[name] for name in Interventions._fields}))
        logits, _ = apply(GROUPED, stack_layers(point["params"]), given)
        return jnp.vdot(weights, logits[0])

    slopes = jax.jit(jax.grad(loss))(point)

    def float64_loss(field, moved):
        arrays = point | {field: moved}
        params = arrays.pop("params")
        return np.vdot(weights, numpy_forward(GROUPED, params, TOKENS[0], Interventions(**arrays))[0])

    for field, value in point.items():
        assert_slope(partial(float64_loss, field), value, slopes[field], 1e-4, field)


def test_only_forced_weights_need_the_matrix_of_weights():
    size = SCANNED | {"d_model": 32, "max_length": 64}
    config = gpt2("tiny", **size, dtype="bfloat16", attention_implementation="cudnn")
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    params = parameter_shapes(config)

    def kernels(given):
        text = apply.trace(config, params, given, tokens).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"@__cudnn\$fmha(?:ScaleBias)?Softmax\(", text))

    fused = only(random_interventions(config), SCALES)._replace(attention_bias=np.zeros((64, 64)))
    assert kernels(None) == kernels(fused) == 1
    forced = Interventions(forced_weights=attention_pattern("first", 64), forced_share=np.ones((L, N)))
    assert kernels(forced) == 0


REFUSED = {"head_scale": (N, L), "attention_scale": (1,), "attention_bias": (B, N, T, T), "forced_weights": (T, T - 1)}
REFUSED |= {"residual": (L, B, T, D + 1), "residual_share": (), "mlp_output_share": (L,), "keys": (L, B, T, N, 2)}
REFUSED |= {"head_outputs_share": (N, L), "mlp_unit_scale": (L, 5)}


@pytest.mark.parametrize("field", REFUSED)
def test_wrong_shapes_and_values_without_shares_are_refused(field):
    with pytest.raises(ValueError, match=rf"interventions\.{field}"):
        apply(GROUPED, stacked_params(GROUPED), Interventions(**{field: np.ones(REFUSED[field])}))


@pytest.mark.parametrize("field", OF_HEADS)
def test_what_heads_did_in_another_run_is_put_into_this_one(field):
    """With all of them replaced in the last layer, its attention is that of the other run."""
    params = stacked_params(GROUPED)
    (_, here), (_, there) = (apply(GROUPED, params, None, tokens) for tokens in (TOKENS, (TOKENS + 3) % 11))
    share = np.zeros((L, GROUPED.kv_heads if field in ("keys", "values") else N), np.float32)
    share[1] = 1.0
    given = Interventions(**{field: getattr(there, field), f"{field}_share": share})
    _, taps = apply(GROUPED, params, given)
    np.testing.assert_array_equal(getattr(taps, field)[1], getattr(there, field)[1])
    np.testing.assert_array_equal(getattr(taps, field)[0], getattr(here, field)[0])
    if field == "head_outputs":
        np.testing.assert_allclose(taps.attention_output[1], there.attention_output[1], rtol=1e-5, atol=1e-6)


def test_units_of_experts_and_linear_mlps_are_refused():
    for config, kind in ((BACKCOPY, "linear"), (CONFIGS["latent attention"][0], "experts")):
        given = Interventions(mlp_unit_scale=np.ones((config.num_layers, config.d_mlp)))
        with pytest.raises(ValueError, match=f"mlp_unit_scale with mlp='{kind}'"):
            apply(config, stacked_params(config), given)


def test_measure_takes_interventions_and_compiles_once():
    params, traces = stacked_params(GPT2), []
    loaded = LoadedModel(Transformer(GPT2), params, None, None, None)
    batches = [(TOKENS, uniform(B, T, T)), (TOKENS[::-1], uniform(B, T, T, seed=1))]

    def residual(taps, pattern):
        traces.append(pattern)
        return taps.residual

    def check(given, by_batch):
        seen = analysis.measure(loaded, batches, residual, given, join=analysis.concatenate)
        tokens = [tokens for tokens, _ in batches]
        expected = [apply(GPT2, params, *both)[1].residual for both in zip(by_batch, tokens, strict=True)]
        np.testing.assert_allclose(seen, np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-5)
        return len(traces)

    heads = [Interventions(head_scale=jnp.ones((L, N)).at[0, head].set(0.0)) for head in range(N)]
    assert len({check(given, [given, given]) for given in heads}) == 1

    def forced(tokens, pattern):
        return Interventions(forced_weights=pattern, forced_share=jnp.ones((L, N, T)))

    check(forced, [forced(*batch) for batch in batches])


def test_norms_of_ablated_heads_have_a_gradient():
    config = ModelConfig(d_model=8, num_layers=1, num_heads=2, d_mlp=8, vocab_size=16, max_length=4)
    tokens = jnp.array([[1, 2, 3]])
    params = stacked_params(config)

    def total(scale):
        options = {"interventions": Interventions(head_scale=scale), "observe": lambda taps: taps.head_norms.sum()}
        return Transformer(config).apply({"params": params}, tokens, **options)[1].sum()

    gradient = jax.jit(jax.grad(total))(jnp.array([[0.0, 1.0]]))
    assert np.isfinite(gradient).all()
    assert gradient[0, 1] > 0


def test_a_sweep_over_heads_is_one_program():
    model, params = Transformer(GROUPED), stacked_params(GROUPED)
    run = jax.jit(lambda scale: model.apply({"params": params}, TOKENS, interventions=Interventions(scale))[0])
    scales = 1.0 - jnp.eye(L * N).reshape(L * N, L, N)
    loop = [run(scale) for scale in scales]
    assert run._cache_size() == 1
    np.testing.assert_allclose(jax.jit(lambda scales: jax.lax.map(run, scales))(scales), loop, rtol=1e-5, atol=1e-5)


def test_patched_activations_are_those_of_another_run():
    params, other = stacked_params(GPT2), (TOKENS + 3) % 11
    logits, taps = apply(GPT2, params, None, other)
    patch = Interventions(residual=taps.residual, residual_share=jnp.array([1.0, 0.0]))
    np.testing.assert_array_equal(apply(GPT2, params, patch)[0], logits)  # what follows sees nothing else
    plain, taps = apply(GPT2, params)
    own = Interventions(forced_weights=taps.attention_weights, forced_share=jnp.ones((L, 1)))
    np.testing.assert_allclose(apply(GPT2, params, own)[0], plain, rtol=1e-5, atol=1e-5)
