import dataclasses
import functools
import math
import re
from typing import get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import CONFIGS, GPT2, LLAMA2, RICH, TINY, TOKENS, numpy_forward, random_params, stacked_params
from refusals import refused
from thinned import quick_and_slow

from orthojax import model as models
from orthojax.config import RopeConfig, replace
from orthojax.config.model import NormalizerName
from orthojax.model import Transformer, bigram_backcopy, gpt2, llama2, parameter_shapes, stack_layers, unstack_layers


def shapes_of(params):
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@functools.cache
def shapes(config, length=7):
    """Returns paths and shapes of the parameters, without computing any."""
    tree = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, length), jnp.int32))
    return shapes_of(tree["params"])


def apply(config, params, tokens=TOKENS, **options):
    return Transformer(config).apply({"params": params}, tokens, **options)


@functools.cache
def logits_of(config):
    return apply(config, random_params(config))[0]


REPEATED = ("llama2", "latent attention and experts", "gated channels of latents")


@pytest.mark.parametrize("name", quick_and_slow(CONFIGS, REPEATED))
def test_model_and_taps_equal_the_float64_oracle(name):
    config = CONFIGS[name]
    params = random_params(config)
    logits, taps = apply(config, params, observe=lambda taps: taps)
    assert isinstance(taps, models.Taps)
    assert logits.dtype == jnp.float32
    assert logits.std() > 0.1
    assert (jnp.where(taps.visible, 0.0, taps.attention_weights) == 0.0).all()
    taps = taps._replace(visible=jnp.broadcast_to(taps.visible, (2, len(TOKENS), *taps.visible.shape[2:])))
    for i, tokens in enumerate(TOKENS):
        expected, layers = numpy_forward(config, params, tokens)
        np.testing.assert_allclose(logits[i], expected, rtol=1e-4, atol=1e-4)
        for layer, seen in enumerate(layers):
            for field, value in seen.items():
                np.testing.assert_allclose(
                    getattr(taps, field)[layer, i], value, rtol=1e-4, atol=1e-4, err_msg=f"{field} of layer {layer}"
                )


def test_the_oracle_knows_every_normalizer():
    assert {config.normalizer for config in CONFIGS.values()} == set(get_args(NormalizerName))


def test_equal_windows_of_all_layers_are_one_window():
    def program(window):
        config = dataclasses.replace(TINY, attention_window=window)
        return str(jax.make_jaxpr(lambda params: apply(config, params))(parameter_shapes(config)))

    assert program((3, 3)) == program(3)
    assert program((None, None)) == program(None)
    assert program((3, None)) != program(3)


def test_unread_taps_cost_nothing():
    config = dataclasses.replace(GPT2, scan_layers=True, attention_implementation="xla")
    params = stack_layers(random_params(config))

    def cost(observe):
        """Counts floating-point operations, and products in the program."""
        program = jax.jit(lambda params: apply(config, params, observe=observe)).lower(params).compile()
        return program.cost_analysis()["flops"], program.as_text().count(" dot(")

    nothing, norms = cost(None), cost(lambda taps: taps.value_norms)
    assert cost(lambda taps: ()) == nothing
    assert 0 < nothing[0] < norms[0]  # so that the measures can fail
    assert 0 < nothing[1] < norms[1]
    assert cost(lambda taps: (taps.attention_logits, taps.attention_weights, taps.values))[1] == nothing[1]


# Scanned, unrolled and recomputed layers are one model.


@functools.cache
def _loss_and_gradients(config):
    def loss(params):
        logits, seen = apply(config, params, observe=lambda taps: jnp.mean(taps.residual**2))
        return jnp.mean(jnp.sin(logits)), (logits, seen)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(stacked_params(config))


@pytest.mark.parametrize(("name", "changes"), [
    ("rich", {"scan_layers": True, "remat": True}),
    ("rich", {"scan_layers": True, "unroll_layers": True, "remat": "dots"}),
    pytest.param("query latents, groups of experts", {"scan_layers": True, "remat": True}, marks=pytest.mark.slow),
])  # fmt: skip
def test_scan_and_remat_change_no_results(name, changes):
    config = dataclasses.replace(CONFIGS[name], **changes)
    (_, (logits, seen)), gradients = _loss_and_gradients(CONFIGS[name])
    (_, (other_logits, other_seen)), other_gradients = _loss_and_gradients(config)
    np.testing.assert_allclose(other_logits, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other_seen, seen, rtol=1e-5)
    other_gradients = unstack_layers(other_gradients) if config.scan_layers else other_gradients
    assert jax.tree.structure(gradients) == jax.tree.structure(other_gradients)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, a), b in zip(leaves, jax.tree.leaves(other_gradients), strict=True):
        assert np.abs(a).max() > (0.0 if "key" in str(path) and "bias" in str(path) else 1e-5), path
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(a).max()), err_msg=str(path))


def test_stacking_twelve_layers_is_inverted_by_unstacking():
    config = dataclasses.replace(TINY, num_layers=12)
    params = random_params(config)
    stacked = stack_layers(params)
    assert stacked["layers"]["mlp"]["input"]["kernel"].shape == (12, 8, 12)
    again = unstack_layers(stacked)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert shapes(dataclasses.replace(config, scan_layers=True)) == shapes_of(stacked)


# Fields that the float64 oracle does not know.

WIDE = {"position": "rotary", "d_model": 16}
LLAMA3 = WIDE | {"rope": RopeConfig(scaling="llama3", factor=8.0, original_length=16)}
LAYERNORM = {"norm": "layernorm"}
LONGROPE = RopeConfig(1.0, "longrope", 4.0, 4, short_factors=(1.0, 2.0), long_factors=(2.0, 3.0))
FIELDS = {
    # path: (what the base needs for the field to matter, the new value)
    "rope.fraction": (WIDE, 0.5),
    "rope.scaling": (WIDE | {"rope": RopeConfig(factor=4.0, original_length=4)}, "linear"),
    "rope.original_length": (LLAMA3, 4),
    "rope.low_frequency_factor": (LLAMA3, 0.5),
    "rope.high_frequency_factor": (LLAMA3, 8.0),
    "rope.truncate": (WIDE | {"rope": RopeConfig(scaling="yarn", factor=4.0, original_length=64), "d_head": 8,
                              "rope_theta": 10.0}, False),
    "rope.short_factors": (WIDE | {"rope": dataclasses.replace(LONGROPE, original_length=16)}, (4.0, 3.0)),
    "rope.long_factors": (WIDE | {"rope": LONGROPE}, (4.0, 3.0)),
    "rope.mscale": (WIDE | {"rope": LONGROPE}, 0.5),
    "rope.factor": (WIDE | {"rope": RopeConfig(1.0, "dynamic", 2.0, 4)}, 4.0),
    "rotary_layers": (WIDE, (True, False)),
    "block": (LAYERNORM | {"block": "output_norm"}, "sandwich_norm"),
    "norm_eps": ({}, 0.1),
    "use_bias": (LAYERNORM | {"use_bias": "qkv"}, "attention"),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_parameters_or_logits(field):
    needs, value = FIELDS[field]
    base = dataclasses.replace(TINY, **needs)
    changed = replace(base, {field: value})
    if shapes(base) == shapes(changed):
        assert np.abs(logits_of(changed) - logits_of(base)).max() > 1e-4


@pytest.mark.parametrize("changes", [{"final_soft_cap": 3.0}, {"logits_multiplier": 0.5}])
def test_changed_logits_have_no_kernel_of_the_head(changes):
    changed = dataclasses.replace(TINY, **changes)
    assert Transformer(changed).head_kernel({}) is None  # so that no loss multiplies hidden states by it


@pytest.mark.slow
def test_init_std_fields_scale_what_they_name():
    def init(**changes):
        config = dataclasses.replace(TINY, d_model=64, d_mlp=64, num_layers=2, tie_embeddings=False, **changes)
        params = Transformer(config).init(jax.random.key(0), TOKENS[:1, :2])["params"]
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    base, changed = init(), init(init_std=0.5, embedding_init_std=0.1)
    for name, leaf in base.items():
        if "scale" in name:
            continue
        factor = 5 if "embedding" in name else 25
        np.testing.assert_allclose(changed[name], leaf * factor, rtol=1e-5, err_msg=name)
        std = 0.01 if "output" in name else 0.02  # what writes to the residual stream: 2 * 2 terms add up there
        assert 0.9 * std < leaf.std() < 1.1 * std, name


@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_fewer_numbers_for_the_backward_pass(scan):
    def saved_numbers(remat):
        config = dataclasses.replace(TINY, remat=remat, scan_layers=scan, d_mlp=64)
        logits = lambda params: apply(config, params)[0]  # noqa: E731
        pullback = jax.eval_shape(lambda params: jax.vjp(logits, params)[1], stacked_params(config))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pullback))

    assert saved_numbers("full") <= saved_numbers(True) < saved_numbers("dots") < 0.8 * saved_numbers(False)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_on_a_gpu_activations_keep_their_arguments_alone(mlp, monkeypatch):
    config = dataclasses.replace(TINY, mlp=mlp, d_mlp=256, num_layers=1, attention_implementation="xla")
    params = random_params(config)

    def loss(params):
        return jnp.mean(jnp.sin(apply(config, params)[0]))

    def kept_and_gradients():
        pullback = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        kept = sum(leaf.shape[-1:] == (256,) and leaf.ndim == 3 for leaf in jax.tree.leaves(pullback))
        return kept, jax.jit(jax.grad(loss))(params)

    before, expected = kept_and_gradients()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    after, found = kept_and_gradients()
    assert after == (3 if mlp == "swiglu" else 2) < before  # and their result, an argument of the next product
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_unrolled_layers_are_not_stacked_for_the_backward_pass():
    def stacks(unroll):
        config = dataclasses.replace(TINY, num_layers=3, scan_layers=True, unroll_layers=unroll)
        loss = lambda params: jnp.sum(jnp.sin(apply(config, params)[0]))  # noqa: E731
        params = stacked_params(config)
        return jax.jit(jax.grad(loss)).lower(params).compile().as_text().count(f"f32[3,{TOKENS.shape[0]},")

    assert stacks(True) == 0 < stacks(False)


def test_layers_are_unrolled_in_training_on_a_gpu(monkeypatch):
    def unrolled(observe=None, **changes):
        config = dataclasses.replace(TINY, scan_layers=True, attention_implementation="xla", **changes)
        program = jax.make_jaxpr(lambda p: apply(config, p, observe=observe))(parameter_shapes(config))
        return re.findall(r"unroll=(\d+)", str(program))

    assert unrolled(num_layers=3) == ["1"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert unrolled(num_layers=3) == ["3"]
    assert unrolled(num_layers=3, unroll_layers=False) == unrolled(num_layers=49) == ["1"]
    assert unrolled(num_layers=3, observe=lambda taps: taps.residual) == ["1"]


@pytest.mark.parametrize("block", ["pre_norm", "output_norm", "parallel"])
def test_a_bfloat16_residual_stream_is_near_that_of_float32(block):
    config = dataclasses.replace(TINY, block=block, norm="layernorm", num_layers=2, scan_layers=True)
    half = dataclasses.replace(config, residual_dtype="bfloat16")
    params = stacked_params(config)
    logits, residual = apply(half, params, observe=lambda taps: taps.residual)
    expected = apply(config, params)[0]
    assert (logits.dtype, residual.dtype) == (jnp.float32, jnp.bfloat16)
    # Rounded four times, by up to 2^-9 each.
    assert 1e-4 < np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_leaves_parameters_and_logits_float32(tied):
    config = dataclasses.replace(RICH, tie_embeddings=tied)
    half = dataclasses.replace(config, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(parameter_shapes(half))} == {jnp.dtype("float32")}
    # Small weights make attention smooth: with logits near 20 the rounding of the weights alone moves the argmax.
    params = jax.tree.map(lambda leaf: 0.4 * leaf, random_params(config))
    logits, taps = apply(half, params, observe=lambda taps: taps)
    expected = apply(config, params)[0]
    assert logits.dtype == jnp.float32
    assert taps.values.dtype == jnp.bfloat16
    assert taps.residual.dtype == taps.attention_weights.dtype == jnp.float32
    # bfloat16 keeps 8 bits, that is 0.004; two layers of products of that precision.
    assert 1e-4 < np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
    # The last product accumulates in float32, so its results are not multiples of bfloat16 steps.
    assert (logits.astype(jnp.bfloat16).astype(jnp.float32) != logits).mean() > 0.9


@pytest.mark.parametrize(
    ("name", "count"),
    [("rich", 2 * 8 + 1), ("latent attention and experts", 2 * 6 + 3 + 7 + 1), ("projected embeddings", 2 * 6 + 2)],
)
def test_every_kernel_passes_through_the_linear_function(name, count):
    config, paths = CONFIGS[name], []

    def recording(x, kernel, bias, path):
        paths.append(path)
        biased = config.has_bias and not re.search(r"^head|^embedding_output", path)
        assert (bias is not None) == biased
        return models.linear(x, kernel, bias, path)

    Transformer(config, recording).apply({"params": random_params(config)}, TOKENS)
    kernels = {name for name in shapes(config) if name.endswith("['kernel']")}
    assert {"".join(f"['{part}']" for part in path.split("/")) + "['kernel']" for path in paths} == kernels
    assert len(paths) == len(kernels) == count


def test_only_learned_positions_end_at_max_length():
    for position in ("rotary", "none"):
        assert shapes(dataclasses.replace(TINY, position=position, max_length=4), length=5)


def test_presets_are_stock():
    assert set(shapes(GPT2)) >= {"['position_embedding']['embedding']", "['layers_0']['mlp']['input']['bias']"}
    assert "['head']['kernel']" not in shapes(GPT2)
    assert "['head']['kernel']" in shapes(LLAMA2)
    assert not any("bias" in name or "position" in name for name in shapes(LLAMA2))
    assert models.parameter_count(gpt2("130m")) == 124_439_808  # GPT-2 small, as published
    assert gpt2("130m").normalizer == llama2("130m").normalizer == "softmax"
    assert gpt2("130m", normalizer="softmax1", d_model=384).d_model == 384


def test_bigram_backcopy_has_its_published_start():
    for layers, count in ((1, 887_808), (2, 1_675_264), (3, 2_462_720)):  # as its code counts them
        assert models.parameter_count(bigram_backcopy(layers)) == count
        assert sum(map(math.prod, shapes(bigram_backcopy(layers)).values())) == count
    config = bigram_backcopy(1)
    biases = {name for name in shapes(config) if "bias" in name}
    norms = ("['layers_0']['attention_norm']", "['layers_0']['mlp_norm']", "['final_norm']")
    assert biases == {f"{norm}['bias']" for norm in norms}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 67, (1, 256)))
    params = jax.jit(Transformer(config).init)(jax.random.key(0), tokens)["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, x = jax.tree_util.keystr(path), np.asarray(leaf)
        if "kernel" in name:  # also the output of the MLP, whatever the depth
            bound = x.shape[0] ** -0.5
            assert 0.99 * bound < np.abs(x).max() <= bound, name
            np.testing.assert_allclose(x.std(), bound / 3**0.5, rtol=0.02, err_msg=name)
        elif "embedding" in name:
            np.testing.assert_allclose(x.std(), 1.0, rtol=0.02, err_msg=name)
    _, residual = apply(config, params, tokens, observe=lambda taps: taps.residual)
    assert 20.0 < np.linalg.norm(residual[0, 0, 0]) < 28.0  # published at the start: 24.3


test_refused = refused(
    (lambda _, make, size, changes: make(size, **changes), [
        (gpt2, "130", {}, "130m"), (llama2, "1.4b", {}, "'1.4b'"),
        (bigram_backcopy, 2, {"normaliser": "softmax1"}, "model.normalizer"),
        (llama2, "tiny", {"d_model": 12, "num_heads": 4}, "even")]),
    (lambda _, config: models.fold_embedding_projection(
        *models.fold_embedding_projection(random_params(config), config)),
     [(CONFIGS["projected embeddings"], "nothing to fold")]),
    (lambda _: shapes(dataclasses.replace(TINY, position="learned", max_length=4), 5), "max_length=4", ValueError),
)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_folded_embedding_projections_leave_the_logits(tied):
    config = dataclasses.replace(TINY, embedding_projection=True, tie_embeddings=tied)
    params = random_params(config)
    folded, plain = models.fold_embedding_projection(params, config)
    assert plain == dataclasses.replace(TINY, tie_embeddings=False)
    assert shapes_of(folded) == shapes(plain)
    expected = logits_of(config)
    np.testing.assert_allclose(apply(plain, folded)[0], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(logits_of(plain) - expected).max() > 0.1


def test_embedding_projections_begin_orthogonal():
    config = dataclasses.replace(TINY, embedding_projection=True)
    params = Transformer(config).init(jax.random.key(0), TOKENS[:1, :2])["params"]
    first, last = (params[name]["kernel"] for name in ("embedding_output", "head_input"))
    for kernel in (first, last):
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(8), atol=1e-5)
    assert np.abs(first - last).max() > 0.1


def test_logits_stay_float32_inside_another_module():
    config = dataclasses.replace(LLAMA2, dtype="bfloat16")

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return Transformer(config, name="lm")(tokens)[0]

    tokens = np.arange(8)[None] % config.vocab_size
    params = random_params(config)
    nested = Outer().apply({"params": {"lm": params}}, tokens)
    np.testing.assert_array_equal(nested, Transformer(config).apply({"params": params}, tokens)[0])
    assert (np.asarray(nested) != np.asarray(jnp.asarray(nested, jnp.bfloat16), np.float32)).any()


def test_capped_logits_have_no_kernel_of_the_head():
    capped = dataclasses.replace(TINY, final_soft_cap=3.0)
    assert Transformer(capped).head_kernel({}) is None  # so that no loss multiplies hidden states by it
