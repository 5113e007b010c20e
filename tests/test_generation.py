"""Generation with a cache: the same logits as without one, the distribution of the draws, and rolling windows."""

import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import model_oracle
import numpy as np
import pytest
from model_oracle import stacked_params
from refusals import refused
from scipy.special import log_softmax
from thinned import quick_and_slow

from orthojax import Interventions
from orthojax.config import Config, DataConfig, ModelConfig, RopeConfig
from orthojax.errors import UserError
from orthojax.model import LoadedModel, Transformer, init_cache, llama2
from orthojax.model.generation import generate, sampling_logits, stream, stream_loss_nats
from orthojax.train.evaluation import streamed_perplexities

SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_mlp": 12}
T = 11
TOKENS = np.random.default_rng(0).integers(0, 11, (2, T))


def loaded(config):
    run = Config(model=config, data=DataConfig(sequence_length=8))
    return LoadedModel(Transformer(config), stacked_params(config), run, None, Path())


@partial(jax.jit, static_argnums=0)
def uncached(config, params, tokens, given=None):
    return Transformer(config).apply({"params": params}, tokens, interventions=given)[0]


@partial(jax.jit, static_argnums=0)
def cached(config, params, tokens, cache, given=None):
    """Reads five tokens at once, then two, then one by one."""

    def read(cache, tokens):
        logits, cache = Transformer(config).apply({"params": params}, tokens, cache=cache, interventions=given)
        return cache, logits

    cache, first = read(cache, tokens[:, :5])
    cache, second = read(cache, tokens[:, 5:7])
    cache, others = jax.lax.scan(read, cache, tokens[:, 7:].T[..., None])
    return jnp.concatenate([first, second, jnp.moveaxis(others[:, :, 0], 0, 1)], 1), cache


# What the float64 oracle does not know, and layers in a scan.
CASES = {
    "softmax1": {"position": "rotary", "num_kv_heads": 2, "relaxed_causal_tokens": 4, "qk_norm": "head"},
    "softmax_n": {"position": "rotary", "rope": RopeConfig(0.5), "num_kv_heads": 1, "block": "parallel",
                  "normalizer_n": 3.0, "scan_layers": False},
    "learned_sink": {"position": "none", "block": "output_norm", "gated_attention": "elementwise"},
    "relu": {"position": "rotary", "rope": RopeConfig(scaling="llama3", factor=2.0, original_length=8),
             "embedding_projection": True},
    "gelu": {"position": "learned", "attention_window": 3, "attention_implementation": "xla_chunked"},
    "softpick": {"position": "rotary", "attention_window": 4, "relaxed_causal_tokens": 3, "qk_norm": "all",
                 "use_bias": True},
    "softmax": {"position": "rotary", "rotary_layers": (False, True), "scan_layers": False, "rope": RopeConfig(
        1.0, "longrope", 4.0, 12, short_factors=(1.0, 2.0), long_factors=(2.0, 3.0))},
}  # fmt: skip
CONFIGS = {name: ModelConfig(**SMALL | case, norm="layernorm", normalizer=name) for name, case in CASES.items()}
KNOWN = ("gpt2", "layers differ", "a gate for each channel", "gpt-oss", "gemma", "multipliers and one norm",
         "query latents, groups of experts")  # fmt: skip
CONFIGS |= {name: model_oracle.CONFIGS[name] for name in KNOWN}


@pytest.mark.parametrize("name", quick_and_slow(CONFIGS, ("gpt2", "gelu")))
def test_cached_logits_equal_uncached(name):
    config = CONFIGS[name]
    params = stacked_params(config)
    expected = uncached(config, params, TOKENS)
    logits, cache = cached(config, params, TOKENS, init_cache(config, len(TOKENS), 14))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))
    assert expected.std() > 0.1
    assert cache.length == T
    assert cache.keys.shape == (config.num_layers, len(TOKENS), 14, config.kv_heads, config.head_dim)
    assert cache.values.shape == (*cache.keys.shape[:-1], config.value_dim)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_keys_of_a_cache_are_rotated_for_the_length_so_far(scaling):
    factors = {"short_factors": (1.0, 2.0), "long_factors": (2.0, 3.0)} if scaling == "longrope" else {}
    # Of one layer, since what later layers read was computed when the text was shorter.
    config = llama2("tiny", **SMALL | {"num_layers": 1}, rope=RopeConfig(1.0, scaling, 4.0, 8, **factors))
    params = stacked_params(config)
    logits, _ = cached(config, params, TOKENS, init_cache(config, len(TOKENS), 14))
    for length in (7, 8, 9, T):
        expected = uncached(config, params, TOKENS[:, :length])[:, -1]
        np.testing.assert_allclose(logits[:, length - 1], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(logits[:, 7] - uncached(config, params, TOKENS)[:, 7]).max() > 1e-3


@pytest.mark.parametrize("prompt", [3, 7, 8, 9])
def test_text_that_outgrows_longrope_is_read_again(prompt):
    rope = RopeConfig(1.0, "longrope", 4.0, 8, short_factors=(1.0, 2.0), long_factors=(2.0, 3.0))
    config = llama2("tiny", **SMALL, rope=rope)
    params = jax.tree.map(lambda leaf: 3 * leaf, stacked_params(config))  # so that tokens depend on what was read
    loaded = LoadedModel(Transformer(config), params, Config(model=config), None, Path("model"))
    tokens = TOKENS[:, :prompt]
    for _ in range(6):
        logits = uncached(config, params, tokens)[:, -1]
        tokens = np.concatenate([tokens, np.asarray(logits).argmax(-1)[:, None].astype(np.int32)], 1)
    np.testing.assert_array_equal(generate(loaded, TOKENS[:, :prompt], 6), tokens[:, prompt:])
    if prompt == 3:  # rows of other lengths are those of the row by itself
        both = generate(loaded, [TOKENS[0, :5], TOKENS[1, :3]], 6)
        np.testing.assert_array_equal(both[1], tokens[1, 3:])
        np.testing.assert_array_equal(both[0], generate(loaded, TOKENS[:1, :5], 6)[0])


def test_interventions_are_those_of_the_uncached_model():
    config = ModelConfig(**SMALL)
    params, cache = stacked_params(config), init_cache(config, 2, T)
    given = Interventions(head_scale=jnp.arange(8.0).reshape(2, 4), mlp_scale=jnp.array([0.5, 2.0]))
    expected = uncached(config, params, TOKENS, given)
    logits, _ = cached(config, params, TOKENS, cache, given)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"window": 6, "sinks": 2}], ids=str
)
def test_prompts_of_different_lengths_are_continued_as_alone(options):
    model = loaded(ModelConfig(**SMALL, position="learned" if options == {} else "rotary"))
    prompts = [list(TOKENS[0, :3]), TOKENS[1, :7], list(TOKENS[1, 2:7]), TOKENS[0, :3]]
    together = generate(model, prompts, 4, **options)
    assert together.shape == (4, 4)
    for b, prompt in enumerate(prompts):
        # A row's draws depend on its place in the batch.
        alone = generate(model, np.broadcast_to(prompt, (b + 1, len(prompt))), 4, **options)[b]
        np.testing.assert_array_equal(together[b], alone)


def nucleus(logits, temperature, top_p):
    """Computes probabilities [V] in float64, from the definition."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for i in np.argsort(-p, kind="stable"):
        if mass >= top_p:
            break
        kept[i], mass = p[i], mass + p[i]
    return kept / kept.sum()


def test_the_distribution_is_that_of_the_definition():
    logits = np.random.default_rng(1).normal(size=(6, 50)).astype(np.float32)
    logits[:, 7] = logits[:, 3] = logits.max(1)  # of equal ones the lower id comes first
    distribution = jax.jit(lambda *given: jax.nn.softmax(sampling_logits(*given)))
    for temperature, top_p in itertools.product((0.3, 1.0, 4.0), (1e-6, 0.2, 0.7, 0.999)):
        found = distribution(logits, temperature, top_p)
        expected = [nucleus(row, temperature, top_p) for row in logits]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_tokens_are_drawn_from_that_distribution():
    model, draws, temperature, top_p = loaded(llama2("tiny", **SMALL)), 4096, 4.0, 0.6
    logits = uncached(model.model.config, model.params, TOKENS[:1, :4])[0, -1]
    expected = nucleus(logits, temperature, top_p)
    written = generate(model, np.tile(TOKENS[0, :4], (draws, 1)), 1, temperature=temperature, top_p=top_p, seed=5)
    found = np.bincount(written[:, 0], minlength=11) / draws
    assert not found[expected == 0].any()
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()
    assert (expected > 0.02).sum() > 2


PLAIN, RELAXED = ModelConfig(**SMALL), ModelConfig(**SMALL, relaxed_causal_tokens=4)


def with_cache(_, rows, length, tokens=TOKENS, **options):
    """Reads tokens, if need be after eight others, with a cache of these rows and this length."""
    model, params, cache = Transformer(PLAIN), stacked_params(PLAIN), init_cache(PLAIN, rows, length)
    if tokens is not TOKENS:
        cache = model.apply({"params": params}, TOKENS[:, :8], cache=cache)[1]
    model.apply({"params": params}, tokens, cache=cache, **options)


test_refused = refused(
    (with_cache, [(2, T - 1, "cache of 10"), (1, T, "keys (2, 1, 11, 4, 4)"), (2, T, TOKENS[:, :4], "cache of 11"),
                  (1, 17, "max_length=16")]),
    (lambda _: with_cache(_, 2, T, interventions=Interventions(first_mlp_scale=jnp.ones(2))),
     "first_mlp_scale with a cache", ValueError),
    (lambda _, prompt, options: stream(loaded(PLAIN), prompt, **{"steps": 4} | options), [
        ([1, 11], {}, "no token 11"), ([0.5], {}, "float64"), ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"top_p": 1.1}, "top_p=1.1"), ([1], {"steps": 0}, "steps=0"), ([1], {"steps": 17}, "the model has 16"),
        ([1], {"seed": -1}, "seed=-1"),
        ([1], {"steps": 2.0}, "steps=2.0"), ([1], {"top_p": [1]}, "top_p=[1]"),
        ([1], {"window": 0}, "window=0"), ([1], {"sinks": 2}, "sinks=2")]),
    (lambda _, prompts: generate(loaded(PLAIN), prompts, 2), [
        ([[1], [2, 10**6]], "no token 1000000"), ([TOKENS[:2, :3], TOKENS[:1, :5]], "shapes")]),
    (lambda _: stream(loaded(RELAXED), [1, 2, 3], 2), "at least 4 tokens"),
    (lambda _: stream_loss_nats(loaded(RELAXED), TOKENS), "token by token"),
)  # fmt: skip


def test_a_window_that_is_large_enough_changes_nothing():
    model = loaded(llama2("tiny", **SMALL, num_kv_heads=2))
    log_probabilities = log_softmax(uncached(model.model.config, model.params, TOKENS[:, :-1]), -1)
    expected = -np.take_along_axis(log_probabilities, TOKENS[:, 1:, None], -1)[..., 0]
    for options in ({}, {"window": 64}, {"window": 60, "sinks": 4}):  # all of one size
        found = stream_loss_nats(model, TOKENS, **options)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())
    np.testing.assert_array_equal(generate(model, TOKENS, 4, window=60, sinks=4), generate(model, TOKENS, 4))


@pytest.mark.parametrize(("window", "sinks"), [(6, 0), (4, 2)])  # of one size
def test_a_window_sees_first_and_latest_tokens(window, sinks):
    config = llama2("tiny", **SMALL | {"num_layers": 1}, num_kv_heads=2, normalizer="gelu")
    model, tokens = loaded(config), np.random.default_rng(3).integers(0, 11, 24)

    def left(end):
        """Returns the tokens before `end` that are still there, padded to one length, and the index of the last."""
        kept = tokens[:end] if end <= sinks + window else np.r_[tokens[:sinks], tokens[end - window : end]]
        return np.pad(kept, (0, sinks + window - len(kept))), len(kept) - 1

    rows, last = zip(*map(left, range(1, len(tokens))), strict=True)
    logits = uncached(config, model.params, np.stack(rows))[np.arange(len(rows)), np.array(last)]
    expected = -log_softmax(logits, -1)[np.arange(len(rows)), tokens[1:]]
    found = stream_loss_nats(model, tokens, window, sinks)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())
    # A prompt longer than the window is read to its end.
    assert generate(model, tokens[:-1], 1, window=window, sinks=sinks) == logits[-1].argmax()


def test_window_positions_end_at_its_size():
    config = ModelConfig(**SMALL | {"num_layers": 1}, tie_embeddings=False)
    model, tokens = loaded(config), np.random.default_rng(4).integers(0, 11, 40)
    other = model.params["position_embedding"]["embedding"].at[6:].set(9.0)
    changed = model._replace(params=model.params | {"position_embedding": {"embedding": other}})
    found = [stream_loss_nats(m, tokens, 5, 1) for m in (model, changed)]
    np.testing.assert_array_equal(*found)
    assert (found[0] != stream_loss_nats(changed, tokens, 6, 1)).any()


def test_streaming_of_several_windows_is_that_of_each():
    model = loaded(llama2("tiny", **SMALL, num_kv_heads=2))
    rows = np.random.default_rng(5).integers(0, 11, (2, 25))
    found = streamed_perplexities(model, rows, 2, [(8, 0), (8, 3)])
    for of in found["grid"]:
        losses = stream_loss_nats(model, rows, of["window"] - of["sinks"], of["sinks"])[:, 12:]
        assert of["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert streamed_perplexities(model, rows, 2, [(6, 2)])["grid"][0]["perplexity"] == found["perplexity_sinks"]
    for wrong in ((4, 4), (25, 0)):
        with pytest.raises(UserError, match=r"first tokens of \d+ in view"):
            streamed_perplexities(model, rows, 2, [wrong])


def test_greedy_tokens_have_the_largest_logits():
    model = loaded(ModelConfig(**SMALL, relaxed_causal_tokens=3, position="rotary"))
    written = generate(model, TOKENS[:, :3], 7)
    assert written.shape == (2, 7)
    assert written.dtype == np.int32
    tokens = np.concatenate([TOKENS[:, :3], written], 1)
    logits = uncached(model.model.config, model.params, tokens)  # causal from the end of the prompt on
    np.testing.assert_array_equal(logits[:, 2:-1].argmax(-1), written)


def test_a_seed_gives_its_tokens_in_any_batch():
    model, prompts = loaded(llama2("tiny", **SMALL)), np.random.default_rng(2).integers(0, 11, (5, 4))
    write = partial(generate, model, steps=8, temperature=3.0, top_p=0.95)
    written = write(prompts, seed=1)
    np.testing.assert_array_equal(write(prompts[:2], seed=1), written[:2])
    assert (write(prompts, seed=2) != written).any()
    first, second = write(prompts[[0, 0]], seed=1)
    assert (first != second).any()
