"""Families of published models as tables: their config fields and weights <-> ours, each row read both ways.

A row of `Family.fields` says what a field of a foreign config.json means, a row of `Family.weights` where a tensor
lives. Reading refuses, by name, what no row explains.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orthojax.config import ModelConfig, fields_affecting
from orthojax.config.fields import require
from orthojax.errors import UserError

# Config fields.


class Same(NamedTuple):
    """A foreign field that is one of ours; `default` is what the foreign library takes where it is missing."""

    ours: str
    default: Any = ...


class Choice(NamedTuple):
    """A foreign field whose values are names of ours."""

    ours: str
    values: Mapping[Any, Any]
    default: Any = ...


class Only(NamedTuple):
    """A foreign field of which only some values are supported; the first is written, and taken where it is missing."""

    values: Sequence[Any]


class Equal(NamedTuple):
    """A foreign field that must have the value of another one, and has it where it is missing."""

    other: str


FieldRow = Same | Choice | Only | Equal
# Says nothing about what the model computes.
IGNORED = {
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id",
    "classifier_dropout", "dropout", "dtype", "embd_pdrop", "eos_token_id", "gradient_checkpointing", "hidden_dropout",
    "init_std", "initializer_range", "is_decoder", "is_llama_config", "layerdrop", "model_type", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "resid_pdrop",
    "return_dict", "rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct",
    "partial_rotary_factor", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_cache", "n_ctx", "id2label", "label2id",
    "chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "output_router_logits", "max_window_layers",
    "layer_types", "use_sliding_window", "activation_dropout",
}  # fmt: skip

# Weights.


class Transform(NamedTuple):
    """What a foreign tensor is in terms of ours: one or several arrays, and back."""

    read: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]


class Weight(NamedTuple):
    """Where a tensor is there, with {} for the layer, and where its parts are here, of one layer.

    A row counts where a model has these parameters, so that optional biases need no condition.
    """

    there: str
    here: Sequence[str]
    how: Transform


SAME = Transform(lambda x, c: (x,), lambda x, c: x[0])
TRANSPOSED = Transform(lambda x, c: (x.T,), lambda x, c: x[0].T)
THIRDS = Transform(lambda x, c: np.split(x, 3, axis=-1), lambda x, c: np.concatenate(x, axis=-1))
PADDED_BY_TWO = Transform(lambda x, c: (x[2:],), lambda x, c: np.pad(x[0], ((2, 0), (0, 0))))


def _split_by_head(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    by_head = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return [by_head[:, part].reshape(-1, *x.shape[1:]).T for part in range(3)]


def _join_by_head(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    parts = [part.T.reshape(c.num_heads, c.head_dim, *part.T.shape[1:]) for part in x]
    return np.stack(parts, axis=1).reshape(-1, *x[0].T.shape[1:])


THIRDS_BY_HEAD = Transform(_split_by_head, _join_by_head)
_QKV = ("query", "key", "value")


def _norm(there: str, here: str) -> list[Weight]:
    return [Weight(f"{there}.weight", (f"{here}/scale",), SAME), Weight(f"{there}.bias", (f"{here}/bias",), SAME)]


def _dense(there: str, here: str, how: Transform = TRANSPOSED) -> list[Weight]:
    return [
        Weight(f"{there}.weight", (f"{here}/kernel",), how),
        Weight(f"{there}.bias", (f"{here}/bias",), SAME),
    ]


def _fused(there: str, how: Transform) -> list[Weight]:
    names = ("kernel", "bias")
    return [Weight(f"{there}.{there_name}", tuple(f"layers/attention/{part}/{name}" for part in _QKV), how)
            for there_name, name in zip(("weight", "bias"), names, strict=True)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """How one kind of published models is written down.

    Attributes:
      name: `model_type` in its config.json.
      architecture: The class of transformers.
      base: What all of its models have in common, as fields of `ModelConfig`.
      fields: Foreign field -> what it means.
      weights: The tensors.
      prefixes: What the names of tensors but the head's may begin with; the first is written.
      ignored: Ends of names of tensors that are no parameters.
      rotary: Whether `rope_parameters`, or the older fields, are read.
      rotary_fraction: What the foreign library takes where no field says it.
      windows: Whether `sliding_window` counts only where `use_sliding_window` is set.
    """

    name: str
    architecture: str
    base: Mapping[str, Any]
    fields: Mapping[str, FieldRow]
    weights: Sequence[Weight]
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    rotary: bool = True
    rotary_fraction: float = 1.0
    windows: bool = False


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
    *_dense("layers.{}.mlp.gate_proj", "layers/mlp/gate"),
    *_dense("layers.{}.mlp.up_proj", "layers/mlp/input"),
    *_dense("layers.{}.mlp.down_proj", "layers/mlp/output"),
]
_ATTENTION = [
    *(row for part in _QKV for row in _dense(f"layers.{{}}.self_attn.{part[0]}_proj", f"layers/attention/{part}")),
    *_dense("layers.{}.self_attn.o_proj", "layers/attention/output"),
    *_norm("layers.{}.self_attn.q_norm", "layers/attention/query_norm"),
    *_norm("layers.{}.self_attn.k_norm", "layers/attention/key_norm"),
]
_ENDS = [
    Weight("embed_tokens.weight", ("token_embedding/embedding",), SAME),
    *_norm("norm", "final_norm"),
    Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
]
_LLAMA_WEIGHTS = [
    *_ENDS,
    *_ATTENTION,
    *_GATED,
    *_norm("layers.{}.input_layernorm", "layers/attention_norm"),
    *_norm("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
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
        *_norm("ln_f", "final_norm"),
        Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
        *_norm("h.{}.ln_1", "layers/attention_norm"),
        *_fused("h.{}.attn.c_attn", THIRDS),
        *_dense("h.{}.attn.c_proj", "layers/attention/output", SAME),
        *_norm("h.{}.ln_2", "layers/mlp_norm"),
        *_dense("h.{}.mlp.c_fc", "layers/mlp/input", SAME),
        *_dense("h.{}.mlp.c_proj", "layers/mlp/output", SAME),
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
    _LLAMA_BASE | {"qkv_bias": True},
    _LLAMA_FIELDS | {"sliding_window": Same("attention_window", None)},
    _LLAMA_WEIGHTS,
    windows=True,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _LLAMA_BASE | {"qk_norm": "head"},
    _LLAMA_FIELDS | {"sliding_window": Same("attention_window", None), "head_dim": Same("d_head", 128)},
    _LLAMA_WEIGHTS,
    windows=True,
)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    _LLAMA_BASE | {"norm": "layernorm", "norm_scale": False, "norm_bias": False, "norm_eps": 1e-5},
    {name: row for name, row in _LLAMA_FIELDS.items() if name != "rms_norm_eps"} | {"clip_qkv": Only((None,))},
    _LLAMA_WEIGHTS,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _LLAMA_BASE | {"output_norm": True, "qk_norm": "all"},
    _LLAMA_FIELDS | {"rms_norm_eps": Same("norm_eps", 1e-5)},
    [
        *_ENDS,
        *_ATTENTION,
        *_GATED,
        *_norm("layers.{}.post_attention_layernorm", "layers/attention_norm"),
        *_norm("layers.{}.post_feedforward_layernorm", "layers/mlp_norm"),
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
        "use_parallel_residual": Same("parallel_blocks", True),
        "attention_bias": Only((True,)),
        "tie_word_embeddings": Same("tie_embeddings", False),
    },
    [
        Weight("embed_in.weight", ("token_embedding/embedding",), SAME),
        *_norm("final_layer_norm", "final_norm"),
        Weight("embed_out.weight", ("head/kernel",), TRANSPOSED),
        *_norm("layers.{}.input_layernorm", "layers/attention_norm"),
        *_norm("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
        *_fused("layers.{}.attention.query_key_value", THIRDS_BY_HEAD),
        *_dense("layers.{}.attention.dense", "layers/attention/output"),
        *_dense("layers.{}.mlp.dense_h_to_4h", "layers/mlp/input"),
        *_dense("layers.{}.mlp.dense_4h_to_h", "layers/mlp/output"),
    ],
    prefixes=("gpt_neox.", ""),
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    rotary_fraction=0.25,
)  # fmt: skip
OPT = Family(
    "opt",
    "OPTForCausalLM",
    {"position": "learned", "norm": "layernorm", "norm_bias": True, "normalizer": "softmax"},
    {
        "vocab_size": Same("vocab_size"),
        "hidden_size": Same("d_model"),
        "ffn_dim": Same("d_mlp"),
        "num_hidden_layers": Same("num_layers"),
        "num_attention_heads": Same("num_heads"),
        "max_position_embeddings": Same("max_length", 2048),
        "activation_function": Choice("mlp", {"relu": "relu", "gelu": "gelu_exact"}, "relu"),
        "enable_bias": Same("use_bias", True),
        "tie_word_embeddings": Same("tie_embeddings", True),
        "word_embed_proj_dim": Equal("hidden_size"),
        "do_layer_norm_before": Only((True,)),
        "layer_norm_elementwise_affine": Only((True,)),
        "_remove_final_layer_norm": Only((False,)),
    },
    [
        Weight("embed_tokens.weight", ("token_embedding/embedding",), SAME),
        Weight("embed_positions.weight", ("position_embedding/embedding",), PADDED_BY_TWO),
        *_norm("final_layer_norm", "final_norm"),
        Weight("lm_head.weight", ("head/kernel",), TRANSPOSED),
        *(row for part in _QKV for row in _dense(f"layers.{{}}.self_attn.{part[0]}_proj", f"layers/attention/{part}")),
        *_dense("layers.{}.self_attn.out_proj", "layers/attention/output"),
        *_norm("layers.{}.self_attn_layer_norm", "layers/attention_norm"),
        *_norm("layers.{}.final_layer_norm", "layers/mlp_norm"),
        *_dense("layers.{}.fc1", "layers/mlp/input"),
        *_dense("layers.{}.fc2", "layers/mlp/output"),
    ],
    prefixes=("model.decoder.", "decoder.", ""),
    rotary=False,
)
FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO, OLMO2, GPT_NEOX, OPT)
}
HEADS = ("lm_head.weight", "embed_out.weight")  # which have no prefix, and are left out where they are tied


def family_named(model_type: str) -> Family:
    """The family of a config.json.

    Raises:
      UserError: For another one.
    """
    require(model_type in FAMILIES, f"model_type {model_type!r} is not supported", " | ".join(FAMILIES))
    return FAMILIES[model_type]


# Reading and writing of configs.


def read_config(family: Family, given: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that a foreign config describes.

    Args:
      family: Of its `model_type`.
      given: The content of config.json.

    Raises:
      UserError: For a field that is missing, has a value that is not supported, or is not known.
    """
    fields = dict(family.base)
    for name, row in family.fields.items():
        if isinstance(row, Only):
            allowed = " | ".join(map(str, row.values))
            require(given.get(name, row.values[0]) in row.values, f"{name}={given.get(name)} is not supported", allowed)
            continue
        if isinstance(row, Equal):
            same = given.get(name, given.get(row.other)) == given.get(row.other)
            require(same, f"{name}={given.get(name)} is not supported", f"that of {row.other}")
            continue
        value = given.get(name, ...)
        if value is ...:
            require(row.default is not ..., f"the config has no {name}", f"that of a {family.name} model")
            value = row.default
        elif isinstance(row, Choice):
            require(value in row.values, f"{name}={value!r} is not supported", " | ".join(row.values))
            value = row.values[value]
        fields[row.ours] = value
    known = IGNORED | set(family.fields)
    if unknown := sorted(name for name in given if name not in known and given[name] not in (None, False)):
        raise UserError(f"config field {unknown[0]}={given[unknown[0]]!r} is not known of {family.name} models")
    if fields.get("d_mlp") is None:
        fields["d_mlp"] = 4 * fields["d_model"]
    if fields.get("d_head") is not None and fields["d_head"] * fields["num_heads"] == fields["d_model"]:
        fields["d_head"] = None
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    if family.windows and not _has_windows(given, fields["num_layers"]):
        fields["attention_window"] = None
    return ModelConfig(**fields, **(_read_rotary(family, given) if family.rotary else {}))


def _has_windows(given: Mapping[str, Any], num_layers: int) -> bool:
    """Whether all layers of a Qwen model have them; none has by default."""
    if not given.get("use_sliding_window"):
        return False
    kinds = set(given.get("layer_types") or ())
    first = given.get("max_window_layers", 28)  # the layers before it see everything
    none = kinds == {"full_attention"} if kinds else first >= num_layers
    every = kinds == {"sliding_attention"} if kinds else first <= 0
    problem = f"max_window_layers={first}: windows in some of {num_layers} layers are not supported"
    require(none or every, problem, f"0, or {num_layers} and more")
    return every


_LLAMA3 = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "low_freq_factor": "rope_low_frequency_factor",
    "high_freq_factor": "rope_high_frequency_factor",
}


def _read_rotary(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", given.get("rope_theta", given.get("rotary_emb_base", 10_000.0)))
    fraction = given.get("partial_rotary_factor", given.get("rotary_pct", family.rotary_fraction))
    fraction = rope.get("partial_rotary_factor", fraction)
    found = {"rope_theta": float(theta), "rotary_fraction": float(fraction)}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "linear":
        found |= {"rope_scaling": "linear", "rope_factor": float(rope["factor"])}
        known |= {"factor", "original_max_position_embeddings"}
    elif kind == "llama3":
        missing = sorted(name for name in _LLAMA3 if name not in rope)
        require(not missing, f"rope_type 'llama3' has no {', '.join(missing)}", ", ".join(_LLAMA3))
        found |= {"rope_scaling": "llama3"} | {ours: rope[name] for name, ours in _LLAMA3.items()}
        known |= set(_LLAMA3)
    else:
        require(kind == "default", f"rope_type={kind!r} is not supported", "default | linear | llama3")
    unknown = sorted(set(rope) - known)
    require(not unknown, f"field {', '.join(unknown)} of rope_type={kind!r} is not known", ", ".join(sorted(known)))
    return found


def write_config(family: Family, config: ModelConfig) -> dict[str, Any] | None:
    """A foreign config that describes a model: the inverse of `read_config`; None where the family cannot express it.

    What has no influence on results, as how parameters start, is not written.
    """
    given: dict[str, Any] = {"model_type": family.name}
    for name, row in family.fields.items():
        if isinstance(row, Only):
            given[name] = row.values[0]
            continue
        if isinstance(row, Equal):
            given[name] = given[row.other]
            continue
        value = getattr(config, row.ours)
        if isinstance(row, Choice):
            names = [name for name, ours in row.values.items() if ours == value]
            if not names:
                return None
            value = names[0]
        given[name] = value
    if "num_key_value_heads" in given:
        given["num_key_value_heads"] = config.kv_heads
    if "head_dim" in given:
        given["head_dim"] = config.head_dim
    if family.windows:
        windowed = config.attention_window is not None
        given |= {"use_sliding_window": windowed, "max_window_layers": 0 if windowed else config.num_layers}
    if family.rotary:
        kind = "default" if config.rope_scaling == "none" else config.rope_scaling
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": config.rope_theta}
        scaled = {"none": (), "linear": ("factor",), "llama3": _LLAMA3}[config.rope_scaling]
        rope |= {name: getattr(config, _LLAMA3[name]) for name in scaled}
        if family.rotary_fraction != 1.0:
            rope["partial_rotary_factor"] = config.rotary_fraction
        given["rope_parameters"] = rope
    try:
        same = computed_as(read_config(family, given)) == computed_as(config)
    except UserError:
        return None
    return given if same else None


def computed_as(config: ModelConfig) -> ModelConfig:
    """A config without what does not say what a model computes from its parameters, and with every default written."""
    plain, unread = ModelConfig(), {"dtype", *fields_affecting(ModelConfig, "computation", "start")}
    if config.position != "learned":
        unread |= {"max_length"}
    resolved = {
        "num_kv_heads": config.kv_heads,
        "d_head": config.head_dim,
        "norm_bias": config.has_norm_bias,
        "qkv_bias": config.has_qkv_bias,
    }
    if config.normalizer != "softmax_n":
        unread |= {"normalizer_n"}
    if config.normalizer != "clipped_softmax":
        unread |= {"normalizer_gamma", "normalizer_zeta"}
    return dataclasses.replace(config, **{name: getattr(plain, name) for name in unread}, **resolved)


def foreign_names(family: Family, there: str) -> list[str]:
    """The names that a tensor of a table may have in a file, the one that is written first."""
    return [there] if there in HEADS else [prefix + there for prefix in family.prefixes]
