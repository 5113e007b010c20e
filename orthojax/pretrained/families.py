"""The families of published models as tables: their config fields and weights <-> ours."""

from collections.abc import Mapping

from orthojax.pretrained.deepseek import DEEPSEEK_V2
from orthojax.pretrained.family import (
    PADDED_BY_TWO,
    QKV,
    SAME,
    THIRDS,
    THIRDS_BY_HEAD,
    TRANSPOSED,
    Choice,
    Equal,
    Family,
    Only,
    Same,
    Weight,
    dense_rows,
    fused_rows,
    norm_rows,
)  # fmt: skip

_SIZES = {
    "vocab_size": Same("vocab_size"),
    "hidden_size": Same("d_model"),
    "intermediate_size": Same("d_mlp"),
    "num_hidden_layers": Same("num_layers"),
    "num_attention_heads": Same("num_heads"),
    "max_position_embeddings": Same("max_length", 2048),
}
_LLAMA_FIELDS = _SIZES | {
    "num_key_value_heads": Same("num_kv_heads", None),
    "head_dim": Same("d_head", None),
    "rms_norm_eps": Same("norm_eps", 1e-6),
    "hidden_act": Only(("silu",)),
    "attention_bias": Only((False,)),
    "mlp_bias": Only((False,)),
    "tie_word_embeddings": Same("tie_embeddings", False),
}
_LLAMA_BASE = {"position": "rotary", "norm": "rmsnorm", "use_bias": False, "mlp": "swiglu", "normalizer": "softmax"}
_GATED = [
    *dense_rows("layers.{}.mlp.gate_proj", "layers/mlp/gate"),
    *dense_rows("layers.{}.mlp.up_proj", "layers/mlp/input"),
    *dense_rows("layers.{}.mlp.down_proj", "layers/mlp/output"),
]
_ATTENTION = [
    *(row for part in QKV for row in dense_rows(f"layers.{{}}.self_attn.{part[0]}_proj", f"layers/attention/{part}")),
    *dense_rows("layers.{}.self_attn.o_proj", "layers/attention/output"),
    *norm_rows("layers.{}.self_attn.q_norm", "layers/attention/query_norm"),
    *norm_rows("layers.{}.self_attn.k_norm", "layers/attention/key_norm"),
]
_ENDS = [
    Weight("embed_tokens.weight", ("token_embedding/embedding",), SAME),
    *norm_rows("norm", "final_norm"),
    Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
]
_LLAMA_WEIGHTS = [
    *_ENDS,
    *_ATTENTION,
    *_GATED,
    *norm_rows("layers.{}.input_layernorm", "layers/attention_norm"),
    *norm_rows("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
]


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {"position": "learned", "norm": "layernorm", "use_bias": True, "normalizer": "softmax"},
    {
        "vocab_size": Same("vocab_size"),
        "n_positions": Same("max_length", 1024),
        "n_embd": Same("d_model"),
        "n_layer": Same("num_layers"),
        "n_head": Same("num_heads"),
        "n_inner": Same("d_mlp", None),
        "layer_norm_epsilon": Same("norm_eps", 1e-5),
        "activation_function": Choice(
            "mlp", {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}, "gelu"
        ),
        "tie_word_embeddings": Same("tie_embeddings", True),
        "scale_attn_weights": Only((True,)),
        "scale_attn_by_inverse_layer_idx": Only((False,)),
        "reorder_and_upcast_attn": Only((False, True)),  # float32 logits, which ours are anyway
        "add_cross_attention": Only((False,)),
    },
    [
        Weight("wte.weight", ("token_embedding/embedding",), SAME),
        Weight("wpe.weight", ("position_embedding/embedding",), SAME),
        *norm_rows("ln_f", "final_norm"),
        Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
        *norm_rows("h.{}.ln_1", "layers/attention_norm"),
        *fused_rows("h.{}.attn.c_attn", THIRDS),
        *dense_rows("h.{}.attn.c_proj", "layers/attention/output", SAME),
        *norm_rows("h.{}.ln_2", "layers/mlp_norm"),
        *dense_rows("h.{}.mlp.c_fc", "layers/mlp/input", SAME),
        *dense_rows("h.{}.mlp.c_proj", "layers/mlp/output", SAME),
    ],
    prefixes=("transformer.", ""),
    ignored=(".attn.bias", ".attn.masked_bias"),
    rotary=False,
)
LLAMA = Family("llama", "LlamaForCausalLM", _LLAMA_BASE, _LLAMA_FIELDS, _LLAMA_WEIGHTS)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _LLAMA_BASE,
    _LLAMA_FIELDS | {"sliding_window": Same("attention_window", 4096)},
    _LLAMA_WEIGHTS,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _LLAMA_BASE | {"use_bias": "qkv"},
    _LLAMA_FIELDS | {"sliding_window": Same("attention_window", 4096)},
    _LLAMA_WEIGHTS,
    window_switch=True,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _LLAMA_BASE | {"qk_norm": "head"},
    _LLAMA_FIELDS | {"sliding_window": Same("attention_window", 4096), "head_dim": Same("d_head", 128)},
    _LLAMA_WEIGHTS,
    window_switch=True,
)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    _LLAMA_BASE | {"norm": "layernorm_nonparametric", "norm_eps": 1e-5},
    {name: row for name, row in _LLAMA_FIELDS.items() if name != "rms_norm_eps"} | {"clip_qkv": Only((None,))},
    _LLAMA_WEIGHTS,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _LLAMA_BASE | {"block": "output_norm", "qk_norm": "all"},
    _LLAMA_FIELDS | {"rms_norm_eps": Same("norm_eps", 1e-5)},
    [
        *_ENDS,
        *_ATTENTION,
        *_GATED,
        *norm_rows("layers.{}.post_attention_layernorm", "layers/attention_norm"),
        *norm_rows("layers.{}.post_feedforward_layernorm", "layers/mlp_norm"),
    ],
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {"position": "rotary", "norm": "layernorm", "use_bias": True, "normalizer": "softmax"},
    _SIZES | {
        "hidden_act": Choice("mlp", {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_fast": "gelu", "relu": "relu"},
                             "gelu_exact"),
        "layer_norm_eps": Same("norm_eps", 1e-5),
        "use_parallel_residual": Choice("block", {True: "parallel", False: "pre_norm"}, "parallel"),
        "attention_bias": Only((True,)),
        "tie_word_embeddings": Same("tie_embeddings", False),
    },
    [
        Weight("embed_in.weight", ("token_embedding/embedding",), SAME),
        *norm_rows("final_layer_norm", "final_norm"),
        Weight("embed_out.weight", ("head/kernel",), TRANSPOSED),
        *norm_rows("layers.{}.input_layernorm", "layers/attention_norm"),
        *norm_rows("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
        *fused_rows("layers.{}.attention.query_key_value", THIRDS_BY_HEAD),
        *dense_rows("layers.{}.attention.dense", "layers/attention/output"),
        *dense_rows("layers.{}.mlp.dense_h_to_4h", "layers/mlp/input"),
        *dense_rows("layers.{}.mlp.dense_4h_to_h", "layers/mlp/output"),
    ],
    prefixes=("gpt_neox.", ""),
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    rotary_fraction=0.25,
)  # fmt: skip
OPT = Family(
    "opt",
    "OPTForCausalLM",
    {"position": "learned", "norm": "layernorm", "normalizer": "softmax"},
    {
        "vocab_size": Same("vocab_size"),
        "hidden_size": Same("d_model"),
        "ffn_dim": Same("d_mlp"),
        "num_hidden_layers": Same("num_layers"),
        "num_attention_heads": Same("num_heads"),
        "max_position_embeddings": Same("max_length", 2048),
        "activation_function": Choice("mlp", {"relu": "relu", "gelu": "gelu_exact"}, "relu"),
        "enable_bias": Choice("use_bias", {True: True, False: "norm"}, True),
        "tie_word_embeddings": Same("tie_embeddings", True),
        "word_embed_proj_dim": Equal("hidden_size"),
        "do_layer_norm_before": Only((True,)),
        "layer_norm_elementwise_affine": Only((True,)),
        "_remove_final_layer_norm": Only((False,)),
    },
    [
        Weight("embed_tokens.weight", ("token_embedding/embedding",), SAME),
        Weight("embed_positions.weight", ("position_embedding/embedding",), PADDED_BY_TWO),
        *norm_rows("final_layer_norm", "final_norm"),
        Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
        *(
            row
            for part in QKV
            for row in dense_rows(f"layers.{{}}.self_attn.{part[0]}_proj", f"layers/attention/{part}")
        ),
        *dense_rows("layers.{}.self_attn.out_proj", "layers/attention/output"),
        *norm_rows("layers.{}.self_attn_layer_norm", "layers/attention_norm"),
        *norm_rows("layers.{}.final_layer_norm", "layers/mlp_norm"),
        *dense_rows("layers.{}.fc1", "layers/mlp/input"),
        *dense_rows("layers.{}.fc2", "layers/mlp/output"),
    ],
    prefixes=("model.decoder.", "decoder.", ""),
    rotary=False,
)
FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO, OLMO2, GPT_NEOX, OPT, DEEPSEEK_V2)
}
