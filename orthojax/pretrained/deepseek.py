"""DeepSeek-V2: latent attention and experts; DeepSeek-V2-Lite is measured by both papers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orthojax.config import ModelConfig, require
from orthojax.pretrained.family import (
    SAME,
    TRANSPOSED,
    Equal,
    Family,
    More,
    Only,
    Same,
    Transform,
    Weight,
    integer,
    norm_rows,
    pair,
    unpair,
)


def _has_query_latent(c: ModelConfig) -> bool:
    return c.latent is not None and c.latent.d_query_latent is not None


# Weights. There the rotated channels of a head are the last ones, in neighbouring pairs; here the first, in halves.


def _read_query(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    own, turned = np.split(x.reshape(c.num_heads, c.head_dim, -1), [c.head_dim - c.rotary_channels], axis=1)
    turned = unpair(turned.reshape(-1, x.shape[1]), c.num_heads).reshape(turned.shape)
    return (np.concatenate([turned, own], axis=1).reshape(x.shape).T,)


def _write_query(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    rows = x[0].T
    turned, own = np.split(rows.reshape(c.num_heads, c.head_dim, -1), [c.rotary_channels], axis=1)
    turned = pair(turned.reshape(-1, rows.shape[1]), c.num_heads).reshape(turned.shape)
    return np.concatenate([own, turned], axis=1).reshape(rows.shape)


def _read_latent(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    latent, turned = np.split(x, [-c.rotary_channels])
    return latent.T, unpair(turned, 1).T


def _read_key_value(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    own = c.head_dim - c.rotary_channels
    parts = np.split(x.reshape(c.num_heads, own + c.value_dim, -1), [own], axis=1)
    return [part.reshape(-1, x.shape[1]).T for part in parts]


def _write_key_value(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    parts = [part.T.reshape(c.num_heads, -1, part.shape[0]) for part in x]
    return np.concatenate(parts, axis=1).reshape(-1, x[0].shape[0])


_QUERY = Transform(_read_query, _write_query)
_LATENT = Transform(_read_latent, lambda x, c: np.concatenate([x[0].T, pair(x[1].T, 1)]))
_KEY_VALUE = Transform(_read_key_value, _write_key_value)
_ATTENTION, _HERE = "layers.{}.self_attn.", "layers/attention/"
_GATED = {"gate_proj": "gate", "up_proj": "input", "down_proj": "output"}

# Config.

_NAMES = {"first_k_dense_replace", "head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"}
_NAMES |= {"aux_loss_alpha", "ep_size", "n_group", "seq_aux", "topk_group", "topk_method"}


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    own, turned = integer(given, "qk_nope_head_dim", 128), integer(given, "qk_rope_head_dim", 64)
    require(given.get("head_dim") in (None, turned), f"head_dim={given.get('head_dim')} is not supported", f"{turned}")
    require(min(own, turned) > 0, f"qk_nope_head_dim={own}, qk_rope_head_dim={turned}", "positive numbers")
    layers, dense = integer(given, "num_hidden_layers"), integer(given, "first_k_dense_replace", 0)
    dense = min(max(dense, 0), layers)
    fields = {"d_head": own + turned, "latent.d_rotary": turned}
    fields |= {"mlp": ("swiglu",) * dense + ("experts",) * (layers - dense), "scan_layers": dense in (0, layers)}
    method, groups = given.get("topk_method", "greedy"), {}
    allowed = ("greedy", "group_limited_greedy")
    require(method in allowed, f"topk_method={method!r} is not supported", " | ".join(allowed))
    if method != "greedy":
        groups = {"experts.groups": integer(given, "n_group"), "experts.groups_per_token": integer(given, "topk_group")}
    return fields | groups


def _write(c: ModelConfig) -> dict[str, Any]:
    kinds = [c.layer_mlp(layer) for layer in range(c.num_layers)]
    given: dict[str, Any] = {
        "first_k_dense_replace": kinds.index("experts") if "experts" in kinds else c.num_layers,
        "qk_nope_head_dim": c.head_dim - c.rotary_channels,
        "qk_rope_head_dim": c.rotary_channels,
        "topk_method": "greedy",
    }
    if (of := c.experts) is not None:
        given["moe_intermediate_size"] = of.d_expert or c.d_mlp
        if of.groups_per_token < of.groups:
            given |= {"topk_method": "group_limited_greedy", "n_group": of.groups, "topk_group": of.groups_per_token}
    return given


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {"position": "rotary", "norm": "rmsnorm", "use_bias": False, "normalizer": "softmax", "norm_eps": 1e-6},
    {
        "vocab_size": Same("vocab_size"),
        "hidden_size": Same("d_model"),
        "intermediate_size": Same("d_mlp"),
        "num_hidden_layers": Same("num_layers"),
        "num_attention_heads": Same("num_heads"),
        "num_key_value_heads": Equal("num_attention_heads"),
        "max_position_embeddings": Same("max_length", 2048),
        "kv_lora_rank": Same("latent.d_latent", 512),
        "q_lora_rank": Same("latent.d_query_latent", 1536),
        "v_head_dim": Same("latent.d_value", 128),
        "n_routed_experts": Same("experts.num_experts", 64),
        "num_experts_per_tok": Same("experts.per_token"),
        "n_shared_experts": Same("experts.num_shared", 2),
        "moe_intermediate_size": Same("experts.d_expert", 1407),
        "routed_scaling_factor": Same("experts.scale", 1.0),
        "norm_topk_prob": Only((False,)),  # true in no published model, and implementations differ in what it means
        "scoring_func": Only(("softmax",)),
        "moe_layer_freq": Only((1,)),
        "hidden_act": Only(("silu",)),
        "attention_bias": Only((False,)),
        "mlp_bias": Only((False,)),
        "rms_norm_eps": Only((1e-6,)),  # that of the latents is 1e-6, whatever this says
        "tie_word_embeddings": Same("tie_embeddings", False),
    },
    [
        Weight("embed_tokens.weight", ("token_embedding/embedding",), SAME),
        *norm_rows("norm", "final_norm"),
        Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
        *norm_rows("layers.{}.input_layernorm", "layers/attention_norm"),
        *norm_rows("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
        Weight(_ATTENTION + "q_proj.weight", (_HERE + "query/kernel",), _QUERY,
               where=lambda c: not _has_query_latent(c)),
        Weight(_ATTENTION + "q_b_proj.weight", (_HERE + "query/kernel",), _QUERY,
               where=_has_query_latent),
        Weight(_ATTENTION + "q_a_proj.weight", (_HERE + "query_latent/kernel",), TRANSPOSED),
        *norm_rows(_ATTENTION + "q_a_layernorm", _HERE + "query_latent_norm"),
        Weight(_ATTENTION + "kv_a_proj_with_mqa.weight", (_HERE + "latent/kernel", _HERE + "rotary_key/kernel"),
               _LATENT),
        *norm_rows(_ATTENTION + "kv_a_layernorm", _HERE + "latent_norm"),
        Weight(_ATTENTION + "kv_b_proj.weight", (_HERE + "key/kernel", _HERE + "value/kernel"), _KEY_VALUE),
        Weight(_ATTENTION + "o_proj.weight", (_HERE + "output/kernel",), TRANSPOSED),
        Weight("layers.{}.mlp.gate.weight", ("layers/mlp/router/kernel",), TRANSPOSED),
        *(Weight(f"layers.{{}}.mlp.{there}.weight", (f"layers/mlp/{here}/kernel",), TRANSPOSED)
          for there, here in _GATED.items()),
        *(Weight(f"layers.{{}}.mlp.shared_experts.{there}.weight", (f"layers/mlp/shared/{here}/kernel",), TRANSPOSED)
          for there, here in _GATED.items()),
        *(Weight(f"layers.{{}}.mlp.experts.{{expert}}.{there}.weight", (f"layers/mlp/experts/{here}/kernel",),
                 TRANSPOSED, -2 if here == "output" else -1) for there, here in _GATED.items()),
    ],
    mscales=True,
    more=More(frozenset(_NAMES), _read, _write),
)  # fmt: skip
