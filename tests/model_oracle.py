"""The model in float64 NumPy, from its definition, one sequence at a time."""

import dataclasses
import math
import zlib
from functools import cache, partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np

from orthojax.model import Interventions, Transformer
from orthojax.ops.normalizers import ClippedSoftmax


@cache
def random_params(config):
    """Every parameter random, biases, scales and sinks too; a parameter of one name is the same in every config."""
    config = dataclasses.replace(config, scan_layers=False)
    tree = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]

    def leaf(path, leaf):
        name = jax.tree_util.keystr(path)
        draw = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape)
        return jnp.asarray(0.5 * draw + ("scale" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _np_linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _np_norm(x, config, p):
    if config.norm == "none":
        return x
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * p["scale"] + p.get("bias", 0.0)


def _np_rotary(x, theta):
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[0]), theta ** (-np.arange(half) / half))[:, None]
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def _np_attention(config, x, p, given, layer):
    """One sequence [T, D] -> output [T, D] and what the taps show of it."""
    T, N, H = len(x), config.num_heads, config.head_dim
    t, s = np.indices((T, T))
    visible = (s <= t) | ((t < config.relaxed_causal_tokens) & (s < config.relaxed_causal_tokens))
    normalizers = {"softmax_n": config.normalizer_n, "learned_sink": p.get("sink")}
    normalizers["clipped_softmax"] = ClippedSoftmax(config.normalizer_gamma, config.normalizer_zeta)
    query, key, value = (_np_linear(x, p[name]).reshape(T, -1, H) for name in ("query", "key", "value"))
    if config.position == "rotary":
        query, key = _np_rotary(query, config.rope_theta), _np_rotary(key, config.rope_theta)
    if given.first_value_scale is not None:
        value[0] *= given.first_value_scale[layer][:, None]
    k, v = (np.repeat(a, N // config.kv_heads, 1) for a in (key, value))
    logits = np.einsum("TNH,SNH->NTS", query, k) / math.sqrt(H)
    biased = logits if given.attention_bias is None else logits + _of_layer(given.attention_bias, layer)
    weights = attention_oracle.weights(biased, visible, normalizers.get(config.normalizer, config.normalizer))
    if given.forced_share is not None:
        forced = _of_layer(given.forced_weights, layer)
        share = given.forced_share[layer].reshape(N, -1, 1)
        weights = (1.0 - share) * weights + share * forced
    heads = np.einsum("NTS,SNH->TNH", weights, v)
    if config.gated_attention:
        heads = heads / (1.0 + np.exp(-_np_linear(x, p["gate"])))[..., None]
    if given.head_scale is not None:
        heads = heads * given.head_scale[layer][:, None]
    written = np.einsum("SNH,NHD->NSD", v, p["output"]["kernel"].reshape(N, H, -1))
    taps = {"attention_logits": logits, "attention_weights": weights, "keys": key, "values": value}
    head_outputs = np.einsum("TNH,NHD->NTD", heads, p["output"]["kernel"].reshape(N, H, -1))
    norms = {"value_norms": written, "head_norms": head_outputs}
    taps |= {"visible": visible[None]} | {name: np.linalg.norm(x, axis=-1) for name, x in norms.items()}
    return _np_linear(heads.reshape(T, -1), p["output"]), taps


def _of_layer(array, layer):
    return array if array.ndim == 2 else array[layer]


def _np_mlp(kind, x, p):
    if kind == "linear":
        return _np_linear(x, p["output"])
    hidden = _np_linear(x, p["input"])
    if kind == "swiglu":
        gate = _np_linear(x, p["gate"])
        hidden = gate / (1.0 + np.exp(-gate)) * hidden
    elif kind == "gelu":
        hidden = 0.5 * hidden * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * hidden**3)))
    else:
        hidden = np.maximum(hidden, 0.0)
    return _np_linear(hidden, p["output"])


def _np_intervened(x, given, layer, part):
    scale, first = getattr(given, f"{part}_scale"), getattr(given, f"first_{part}_scale")
    x = x * (1.0 if scale is None else scale[layer])
    x[0] *= 1.0 if first is None else first[layer]
    return _np_replaced(x, getattr(given, f"{part}_output"), getattr(given, f"{part}_output_share"), layer)


def _np_replaced(x, values, share, layer):
    if share is None:
        return x
    share = np.broadcast_to(share[layer], len(x))[:, None]
    return (1.0 - share) * x + share * values[layer]


def _at(value, layer):
    return value[layer] if isinstance(value, tuple) else value


def numpy_forward(config, params, tokens, given=None):
    """Logits of one sequence [T, V], and the taps of every layer.

    `given` are its interventions, without axes of the batch: bias and forced weights [T, S] or [L, N, T, S],
    outputs [L, T, D].
    """
    given = Interventions() if given is None else given
    given = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), given)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = params["token_embedding"]["embedding"]
    x = table[np.asarray(tokens)]
    if config.position == "learned":
        x = x + params["position_embedding"]["embedding"][: len(tokens)]
    layers = []
    for layer in range(config.num_layers):
        p = params.get(f"layers_{layer}", {})
        attended, mlp = 0.0 * x, 0.0 * x
        norms = {
            part: partial(_np_norm, config=config, p=p.get(f"{part}_norm"))
            for part, switch in (("attention", config.attention_norm), ("mlp", config.mlp_norm))
            if _at(switch, layer)
        }
        before, after = ({}, norms) if config.post_norm else (norms, {})
        same, attends, kind = (lambda x: x), _at(config.attention, layer), _at(config.mlp, layer)
        before_block = x
        taps = dict.fromkeys(("attention_logits", "attention_weights", "keys", "values"), 0.0)
        taps |= dict.fromkeys(("value_norms", "head_norms"), 0.0)
        if attends:
            read = before.get("attention", same)(x)
            attended, taps = _np_attention(config, read, p["attention"], given, layer)
        attended = _np_intervened(attended, given, layer, "attention")
        middle = (after.get("attention", same) if attends else same)(x + attended)
        if kind != "none":
            mlp = _np_mlp(kind, before.get("mlp", same)(middle), p["mlp"])
        mlp = _np_intervened(mlp, given, layer, "mlp")
        x = (after.get("mlp", same) if kind != "none" else same)(middle + mlp)
        x = _np_replaced(x, given.residual, given.residual_share, layer)
        taps |= {"attention_output": attended, "mlp_output": mlp, "post_attention": middle, "residual": x}
        taps["residual_before"] = before_block
        layers.append(taps)
    if not config.post_norm:
        x = _np_norm(x, config, params.get("final_norm"))
    return x @ (table.T if config.tie_embeddings else params["head"]["kernel"]), layers
