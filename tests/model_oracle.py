"""The model in float64 NumPy, from its definition, one sequence at a time."""

import dataclasses
import math
import zlib
from functools import cache, partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from orthojax.model import Interventions, bigram_backcopy, gpt2, llama2, parameter_shapes, stack_layers

# Models of every kind that this file knows, and tokens for them.
SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 8, "num_layers": 2, "num_heads": 4, "d_mlp": 12}
SMALL |= {"scan_layers": False}
TINY = ModelConfig(**SMALL)
GPT2 = gpt2("tiny", **SMALL)
LLAMA2 = llama2("tiny", **SMALL)
RICH = dataclasses.replace(
    LLAMA2, num_kv_heads=2, gated_attention=True, normalizer="learned_sink", use_bias=True, relaxed_causal_tokens=2
)
LATENT_AND_EXPERTS = dataclasses.replace(
    LLAMA2, d_head=6, norm="rmsnorm", normalizer="softmax1", rope_theta=100.0, mlp=("swiglu", "experts"),
    latent=LatentConfig(d_latent=5, d_rotary=2, d_value=3),
    rope=RopeConfig(scaling="yarn", factor=4.0, original_length=64, high_frequency_factor=32.0, mscale=0.7,
                    mscale_all=0.5),
    experts=ExpertsConfig(num_experts=6, per_token=2, num_shared=2, d_expert=5, scale=1.5),
)  # fmt: skip
CONFIGS = {
    "gpt2": GPT2,
    "llama2": LLAMA2,
    "rich": RICH,
    "rich, chunked": dataclasses.replace(RICH, attention_implementation="xla_chunked", normalizer="sigmoid"),
    "gated relu": dataclasses.replace(
        GPT2, gated_attention=True, normalizer="relu", mlp="relu", norm="layernorm_nonparametric"
    ),
    "a gate for each channel": dataclasses.replace(LLAMA2, gated_attention="elementwise", normalizer="softpick"),
    "gated channels of latents": dataclasses.replace(
        LATENT_AND_EXPERTS, gated_attention="elementwise", use_bias=True, experts=ExpertsConfig(
            6, 3, d_expert=5, groups=3, groups_per_token=2, scores="sigmoid", normalize=True, scale=1.5)),
    "projected embeddings": dataclasses.replace(GPT2, embedding_projection=True),
    "layers differ": dataclasses.replace(TINY, mlp=("linear", "none"), attention=(False, True), norm="none"),
    "gpt-oss": dataclasses.replace(
        LLAMA2, d_head=6, num_kv_heads=1, norm="rmsnorm", normalizer="learned_sink", use_bias="attention",
        attention_window=(3, None), mlp=("swiglu_clamped", "experts"),
        experts=ExpertsConfig(6, 3, num_shared=1, d_shared=7, gate_shared=True, d_expert=5, normalize=True,
                              mlp="swiglu_clamped", use_bias=True)),
    "gemma": dataclasses.replace(
        LLAMA2, d_head=6, num_kv_heads=2, block="sandwich_norm", qk_norm="head", mlp="geglu", tie_embeddings=True,
        scale_embeddings=True, logits_width=9, attention_soft_cap=1.5, final_soft_cap=3.0, attention_window=(None, 3),
        rope_local_theta=30.0, rope=LATENT_AND_EXPERTS.rope),
    "multipliers and one norm": dataclasses.replace(
        LLAMA2, block="parallel_one_norm", norm="layernorm", attention=(True, False),
        scale_embeddings=True, embedding_multiplier=1.7, residual_multiplier=0.6, logits_multiplier=0.3,
        final_soft_cap=5.0, num_kv_heads=2, use_bias=True),
    "sigmoid": dataclasses.replace(LLAMA2, normalizer="sigmoid", norm="rmsnorm_single", rope_theta=50.0),
    "bigram-backcopy": bigram_backcopy(**SMALL, mlp=("linear", "relu"), normalizer="gelu"),
    "parts": dataclasses.replace(GPT2, normalizer="gelu", mlp=("relu", "none"), attention=(False, True)),
    "softmax_n": dataclasses.replace(TINY, normalizer="softmax_n", normalizer_n=3.0, position="none", use_bias=True),
    "latent attention and experts": LATENT_AND_EXPERTS,
    "query latents, groups of experts": dataclasses.replace(
        LATENT_AND_EXPERTS, latent=LatentConfig(d_latent=5, d_rotary=2, d_value=9, d_query_latent=7),
        normalizer="learned_sink", mlp="experts",
        experts=ExpertsConfig(num_experts=6, d_expert=5, groups=3, groups_per_token=2, scale=3.0)),
}  # fmt: skip
END = SMALL["vocab_size"] - 1
TOKENS = np.array([[4, 2, END, 1, 5, 3, 3], [1, 2, 3, 4, 5, 6, END], [END, 2, 3, END, 1, 1, 2], [1, 2, 3, 4, 5, 6, 7]])


@cache
def random_params(config):
    """Draws every parameter, biases, scales and sinks included; one name gives the same numbers in every config."""
    config = dataclasses.replace(config, scan_layers=False)
    tree = parameter_shapes(config)

    def leaf(path, leaf):
        name = jax.tree_util.keystr(path)
        draw = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape)
        return jnp.asarray(0.5 * draw + ("scale" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def stacked_params(config):
    """Returns `random_params` in the layout of the config: stacked if its layers are scanned."""
    return stack_layers(random_params(config)) if config.scan_layers else random_params(config)


def _np_linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _np_norm(x, config, p):
    if config.norm == "none":
        return x
    if config.norm.startswith("layernorm"):
        x = x - x.mean(-1, keepdims=True)
    p = {"scale": 1.0} if p is None else p
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * p["scale"] + p.get("bias", 0.0)


def _np_theta_and_rope(config, layer):
    local = config.rope_local_theta is not None and _at(config.attention_window, layer) is not None
    return (config.rope_local_theta, None) if local else (config.rope_theta, config.rope)


def _np_rotary(x, config, layer):
    """[T, heads, H] with its first channels rotated, lowered and scaled as YaRN does if that is asked."""
    (theta, rope), half = _np_theta_and_rope(config, layer), config.rotary_channels // 2
    frequencies, scale = theta ** (-np.arange(half) / half), 1.0
    if rope is not None and rope.scaling == "yarn":
        bounds = rope.high_frequency_factor, rope.low_frequency_factor
        pairs = [half * math.log(rope.original_length / (2 * math.pi * n), theta) for n in bounds]
        first, last = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), 2 * half - 1)
        share = np.clip((np.arange(half) - first) / (last - first), 0, 1)
        frequencies = (1 - share) * frequencies + share * frequencies / rope.factor
        scale = _np_mscale(rope, rope.mscale) / _np_mscale(rope, rope.mscale_all)
    angles = np.outer(np.arange(x.shape[0]), frequencies)[:, None]
    z = scale * (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def _np_mscale(rope, k):
    return 0.1 * k * math.log(rope.factor) + 1


def _np_latent_query_key_value(config, x, p):
    read = x
    if config.latent.d_query_latent:
        read = _np_norm(_np_linear(x, p["query_latent"]), config, p["query_latent_norm"])
    latent = _np_norm(_np_linear(x, p["latent"]), config, p["latent_norm"])
    own = _np_linear(latent, p["key"]).reshape(len(x), config.num_heads, -1)
    shared = np.repeat(_np_linear(x, p["rotary_key"])[:, None], config.num_heads, 1)
    query, value = (
        _np_linear(a, p[name]).reshape(*own.shape[:2], -1) for a, name in ((read, "query"), (latent, "value"))
    )
    return query, np.concatenate([shared, own], -1), value


def _np_attention(config, x, p, given, layer):
    """Maps one sequence [T, D] -> output [T, D] and what the taps show of it."""
    T, N, H = len(x), config.num_heads, config.head_dim
    t, s = np.indices((T, T))
    visible = (s <= t) | ((t < config.relaxed_causal_tokens) & (s < config.relaxed_causal_tokens))
    if (window := _at(config.attention_window, layer)) is not None:
        visible &= s > t - window
    normalizers = {"softmax_n": config.normalizer_n, "learned_sink": p.get("sink")}
    if config.latent:
        query, key, value = _np_latent_query_key_value(config, x, p)
    else:
        widths = {"query": H, "key": H, "value": H}
        query, key, value = (_np_linear(x, p[name]).reshape(T, -1, width) for name, width in widths.items())
    if config.qk_norm == "head":
        query, key = _np_norm(query, config, p["query_norm"]), _np_norm(key, config, p["key_norm"])
    if config.position == "rotary":
        query, key = _np_rotary(query, config, layer), _np_rotary(key, config, layer)
    if given.first_value_scale is not None:
        value[0] *= given.first_value_scale[layer][:, None]
    query, key, value = (
        _np_replaced_heads(a, given, name, layer) for a, name in ((query, "queries"), (key, "keys"), (value, "values"))
    )
    k, v = (np.repeat(a, N // config.kv_heads, 1) for a in (key, value))
    logits = np.einsum("TNH,SNH->NTS", query, k) / math.sqrt(config.logits_width or H)
    rope = _np_theta_and_rope(config, layer)[1]
    if rope is not None and rope.scaling == "yarn":
        logits = logits * _np_mscale(rope, rope.mscale_all) ** 2
    logits = _np_capped(logits, config.attention_soft_cap)
    biased = logits if given.attention_bias is None else logits + _of_layer(given.attention_bias, layer)
    weights = attention_oracle.weights(biased, visible, normalizers.get(config.normalizer, config.normalizer))
    if given.forced_share is not None:
        forced = _of_layer(given.forced_weights, layer)
        share = given.forced_share[layer].reshape(N, -1, 1)
        weights = (1.0 - share) * weights + share * forced
    heads = np.einsum("NTS,SNH->TNH", weights, v)
    if config.gated_attention:
        heads = heads / (1.0 + np.exp(-_np_linear(x, p["gate"]).reshape(T, N, -1)))
    if given.head_scale is not None:
        heads = heads * given.head_scale[layer][:, None]
    heads = _np_replaced_heads(heads, given, "head_outputs", layer)
    written = np.einsum("SNH,NHD->NSD", v, p["output"]["kernel"].reshape(N, v.shape[-1], -1))
    taps = {"attention_logits": logits, "attention_weights": weights, "keys": key, "values": value}
    taps |= {"queries": query, "head_outputs": heads}
    head_outputs = np.einsum("TNH,NHD->NTD", heads, p["output"]["kernel"].reshape(N, v.shape[-1], -1))
    norms = {"value_norms": written, "head_norms": head_outputs}
    taps |= {"visible": visible[None]}
    taps |= {name: config.residual_multiplier * np.linalg.norm(x, axis=-1) for name, x in norms.items()}
    return _np_linear(heads.reshape(T, -1), p["output"]), taps


def _np_replaced_heads(x, given, name, layer):
    """[T, N, H], with a share for each head or for each head and position."""
    values, share = getattr(given, name), getattr(given, f"{name}_share")
    if share is None:
        return x
    x = x.copy()
    for t, head in np.ndindex(*x.shape[:2]):
        of = share[layer][head] if share.ndim == 2 else share[layer][head, t]
        x[t, head] = (1.0 - of) * x[t, head] + of * values[layer][t, head]
    return x


def _np_capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _of_layer(array, layer):
    return array if array.ndim == 2 else array[layer]


def _np_experts(config, x, p):
    """Goes token by token and expert by expert, and computes the chosen ones only."""
    of, y = config.experts, np.zeros_like(x)
    kernels = {name: p["experts"][name]["kernel"] for name in ("gate", "input", "output")}
    by_expert = {name: np.split(k, of.num_experts, axis=0 if name == "output" else 1) for name, k in kernels.items()}
    biases = {name: np.split(p["experts"][name].get("bias", np.zeros(of.num_experts)), of.num_experts)
              for name in ("gate", "input")}  # fmt: skip
    for t, token in enumerate(x):
        scores = np.exp(_np_linear(token, p["router"]))
        scores /= scores.sum() if of.scores == "softmax" else 1.0 + scores
        choice = scores + p.get("choice_bias", 0.0)
        by_group = choice.reshape(of.groups, -1)
        best = np.sort(by_group)[:, -1 if of.scores == "softmax" else -2 :].sum(1)
        for group in np.argsort(best)[: -of.groups_per_token]:
            by_group[group] = -np.inf
        chosen = np.argsort(choice)[-of.per_token :]
        if of.normalize:
            scores /= scores[chosen].sum()
        for expert in chosen:
            own = {name: {"kernel": by_expert[name][expert]} for name in kernels}
            for name, bias in biases.items():
                own[name]["bias"] = bias[expert]
            bias = p["bias"][expert] if of.use_bias else 0.0
            y[t] += of.scale * scores[expert] * (_np_mlp(config, of.mlp, token, own) + bias)
    y = y + p["experts"]["output"].get("bias", 0.0)
    gate = 1.0 / (1.0 + np.exp(-_np_linear(x, p["shared_gate"]))) if of.gate_shared else 1.0
    return y + gate * _np_mlp(config, of.mlp, x, p["shared"]) if of.num_shared else y


def _np_gelu(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _np_mlp(config, kind, x, p, units=1.0):
    if kind == "experts":
        return _np_experts(config, x, p)
    if kind == "linear":
        return _np_linear(x, p["output"])
    hidden = _np_linear(x, p["input"])
    if kind == "swiglu":
        gate = _np_linear(x, p["gate"])
        hidden = gate / (1.0 + np.exp(-gate)) * hidden
    elif kind == "geglu":
        hidden = _np_gelu(_np_linear(x, p["gate"])) * hidden
    elif kind == "swiglu_clamped":
        gate = np.minimum(_np_linear(x, p["gate"]), 7.0)
        hidden = gate / (1.0 + np.exp(-1.702 * gate)) * (np.clip(hidden, -7.0, 7.0) + 1.0)
    elif kind == "gelu":
        hidden = _np_gelu(hidden)
    else:
        hidden = np.maximum(hidden, 0.0)
    return _np_linear(units * hidden, p["output"])


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
    """Computes logits of one sequence [T, V], and the taps of every layer.

    `given` are its interventions, without axes of the batch: bias and forced weights [T, S] or [L, N, T, S],
    outputs [L, T, D].
    """
    given = Interventions() if given is None else given
    given = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), given)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = params["token_embedding"]["embedding"]
    scale = config.embedding_multiplier * (math.sqrt(config.d_model) if config.scale_embeddings else 1.0)
    x = scale * table[np.asarray(tokens)]
    if config.embedding_projection:
        x = x @ params["embedding_output"]["kernel"]
    if config.position == "learned":
        x = x + params["position_embedding"]["embedding"][: len(tokens)]
    layers = []
    for layer in range(config.num_layers):
        p = params.get(f"layers_{layer}", {})
        attended, mlp = 0.0 * x, 0.0 * x
        norms, outputs = (
            {part: partial(_np_norm, config=config, p=p.get(f"{part}{name}")) for part in ("attention", "mlp")}
            for name in ("_norm", "_output_norm")
        )
        outputs = outputs if config.block == "sandwich_norm" else {}
        same, attends, kind = (lambda x: x), _at(config.attention, layer), _at(config.mlp, layer)
        before_block = x
        taps = dict.fromkeys(
            ("attention_logits", "attention_weights", "queries", "keys", "values", "head_outputs"), 0.0
        )
        taps |= dict.fromkeys(("value_norms", "head_norms"), 0.0)
        if attends:
            read = norms["attention"](x)
            attended, taps = _np_attention(config, read, p["attention"], given, layer)
        attended = (outputs.get("attention", same) if attends else same)(attended)
        attended = _np_intervened(config.residual_multiplier * attended, given, layer, "attention")
        middle = x + attended
        if kind != "none":
            one_norm = config.block == "parallel_one_norm"
            units = 1.0 if given.mlp_unit_scale is None else given.mlp_unit_scale[layer]
            mlp = _np_mlp(config, kind, norms["attention"](x) if one_norm else norms["mlp"](middle), p["mlp"], units)
        mlp = (outputs.get("mlp", same) if kind != "none" else same)(mlp)
        mlp = _np_intervened(config.residual_multiplier * mlp, given, layer, "mlp")
        x = _np_replaced(middle + mlp, given.residual, given.residual_share, layer)
        taps |= {"attention_output": attended, "mlp_output": mlp, "post_attention": middle, "residual": x}
        taps["residual_before"] = before_block
        layers.append(taps)
    x = _np_norm(x, config, params.get("final_norm"))
    if config.embedding_projection:
        x = x @ params["head_input"]["kernel"]
    logits = x @ (table.T if config.tie_embeddings else params["head"]["kernel"])
    return _np_capped(config.logits_multiplier * logits, config.final_soft_cap), layers
