"""Families of published models: rows for the fields of their configs and for their weights, each read both ways."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orthojax.config import ExpertsConfig, ModelConfig, require
from orthojax.errors import UserError

# Config fields.


class Same(NamedTuple):
    """A foreign field that is one of ours, by its dotted path; the foreign library uses `default` if it is missing."""

    ours: str
    default: Any = ...


class Choice(NamedTuple):
    """A foreign field whose values are names of ours."""

    ours: str
    values: Mapping[Any, Any]
    default: Any = ...


class Only(NamedTuple):
    """A foreign field with a few supported values; the first is written, and used if the field is missing."""

    values: Sequence[Any]


class Equal(NamedTuple):
    """A foreign field that must equal another one, and does if it is missing."""

    other: str


class More(NamedTuple):
    """Foreign fields without rows of their own."""

    names: frozenset[str]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]  # a foreign config -> fields of ours
    write: Callable[[ModelConfig], dict[str, Any]]  # the reverse


# Weights.


class Transform(NamedTuple):
    """Maps a foreign tensor to one or several arrays of ours, and back if models are written."""

    read: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray] = lambda x, c: x[0]


class Weight(NamedTuple):
    """The name of a foreign tensor, and the paths of its parts in our model, for one layer.

    A row applies if a model has these parameters, so that optional biases need no condition.
    """

    there: str  # with {} for the layer and {expert} for an expert
    here: Sequence[str]  # paths of our parameters; those in layers begin with `layers/`
    how: Transform
    share: int | None = None  # the axis of our parameters that experts share equally
    where: Callable[[ModelConfig], bool] = lambda c: True  # a further condition on the model

    def places(self, config: ModelConfig) -> Iterator[tuple[int | None, int | None]]:
        """Yields every (layer, expert) that has such a tensor."""
        layers = range(config.num_layers) if "{}" in self.there else (None,)
        return itertools.product(layers, (None,) if self.share is None else range(self.experts(config)))

    def experts(self, config: ModelConfig) -> int:
        """Returns how many experts a model has."""
        return 0 if config.experts is None else config.experts.num_experts


SAME = Transform(lambda x, c: (x,))
TRANSPOSED = Transform(lambda x, c: (x.T,), lambda x, c: x[0].T)
THIRDS = Transform(lambda x, c: np.split(x, 3, axis=-1), lambda x, c: np.concatenate(x, axis=-1))
PADDED_BY_TWO = Transform(lambda x, c: (x[2:],), lambda x, c: np.pad(x[0], ((2, 0), (0, 0))))


def unpair(x: np.ndarray, heads: int) -> np.ndarray:
    """Reorders output rows [out, ...] of every head from neighbouring pairs, for rotary positions, to halves."""
    return np.swapaxes(x.reshape(heads, -1, 2, *x.shape[1:]), 1, 2).reshape(x.shape)


def pair(x: np.ndarray, heads: int) -> np.ndarray:
    """Inverts `unpair`."""
    return np.swapaxes(x.reshape(heads, 2, -1, *x.shape[1:]), 1, 2).reshape(x.shape)


def _split_by_head(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    by_head = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return [by_head[:, part].reshape(-1, *x.shape[1:]).T for part in range(3)]


def _join_by_head(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    parts = [part.T.reshape(c.num_heads, c.head_dim, *part.T.shape[1:]) for part in x]
    return np.stack(parts, axis=1).reshape(-1, *x[0].T.shape[1:])


THIRDS_BY_HEAD = Transform(_split_by_head, _join_by_head)
QKV = ("query", "key", "value")


def norm_rows(there: str, here: str) -> list[Weight]:
    """Makes rows for scale and bias of a norm."""
    return [Weight(f"{there}.weight", (f"{here}/scale",), SAME), Weight(f"{there}.bias", (f"{here}/bias",), SAME)]


def dense_rows(there: str, here: str, how: Transform = TRANSPOSED) -> list[Weight]:
    """Makes rows for kernel and bias of a linear layer."""
    return [Weight(f"{there}.weight", (f"{here}/kernel",), how), Weight(f"{there}.bias", (f"{here}/bias",), SAME)]


def fused_rows(there: str, how: Transform) -> list[Weight]:
    """Makes rows for kernels and biases of queries, keys and values that are one foreign tensor."""
    names = {"weight": "kernel", "bias": "bias"}.items()
    return [Weight(f"{there}.{n}", tuple(f"layers/attention/{part}/{ours}" for part in QKV), how) for n, ours in names]


def _end_rows(embedding: str, norm: str, head: str) -> list[Weight]:
    return [
        Weight(f"{embedding}.weight", ("token_embedding/embedding",), SAME),
        *norm_rows(norm, "final_norm"),
        Weight(f"{head}.weight", ("head/kernel",), TRANSPOSED),
    ]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of published model: its configs and its tensors."""

    name: str  # `model_type` in its config.json
    architecture: str  # the class of transformers
    base: Mapping[str, Any]  # fields of `ModelConfig` that all of its models have in common
    fields: Mapping[str, Same | Choice | Only | Equal]  # foreign field -> its meaning
    weights: Sequence[Weight]
    prefixes: tuple[str, ...] = ("model.", "")  # of the names of all tensors but the head; the first is written
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # suffixes of tensors that are not parameters
    rotary: bool = True  # `rope_parameters`, or the older fields, are read
    # The share of rotated channels if no field gives it; None if the foreign library reads no such field.
    rotary_fraction: float | None = None
    # Rotary fields if a config has none, and its `rope_theta` if there is none.
    rope: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"rope_theta": 10_000.0})
    mscales: bool = False  # YaRN scales logits by `mscale` and `mscale_all_dim`
    window_switch: bool = False  # windows are on if `use_sliding_window` says so
    # Whether a layer (of a config) has a window if no `layer_types` say so; None if all have one, or none.
    windowed: Callable[[Mapping[str, Any], int], bool] | None = None
    local_rope: bool = False  # `rope_parameters` has an object for layers with windows, and one for the others
    beside: tuple[str, ...] = ()  # prefixes of tensors that belong to other parts, such as those for images
    more: More | None = None


# Names of heads, which have no prefix; left out if tied.
HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")


def integer(foreign: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Reads an integer from a foreign config."""
    value = default if foreign.get(name) is None else foreign[name]
    if value is None:
        raise UserError(f"the config has no {name}", allowed="an integer")
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name}={value!r} is not supported", allowed="an integer")
    return value


def foreign_names(family: Family, there: str) -> list[str]:
    """Returns the names that a tensor of a table may have in a file; the first is written."""
    return [there] if there in HEADS else [prefix + there for prefix in family.prefixes]


# Tables.

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
_UNCLIPPED = {"clip_qkv": Only((None,))}
_BIASED = {"attention_bias": Choice("use_bias", {False: False, True: "attention"}, False)}
_QKV_BIASED = Choice("use_bias", {True: "qkv", False: False}, True)
_LLAMA_BASE = {"position": "rotary", "norm": "rmsnorm", "use_bias": False, "mlp": "swiglu", "normalizer": "softmax"}
_ACTIVATIONS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu")
_ACTIVATIONS |= {"gelu": "gelu_exact", "relu": "relu"}
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "input", "down_proj": "output"}
_GATED = [
    row for there, here in _PROJECTIONS.items() for row in dense_rows(f"layers.{{}}.mlp.{there}", f"layers/mlp/{here}")
]
_QKV = [row for part in QKV for row in dense_rows(f"layers.{{}}.self_attn.{part[0]}_proj", f"layers/attention/{part}")]
_ATTENTION = [
    *_QKV,
    *dense_rows("layers.{}.self_attn.o_proj", "layers/attention/output"),
    *norm_rows("layers.{}.self_attn.q_norm", "layers/attention/query_norm"),
    *norm_rows("layers.{}.self_attn.k_norm", "layers/attention/key_norm"),
]


def _expert_rows(there: str, names: Mapping[str, str], shared: str | None = None) -> list[Weight]:
    return [
        Weight(f"layers.{{}}.{there}.gate.weight", ("layers/mlp/router/kernel",), TRANSPOSED),
        *(Weight(f"layers.{{}}.{there}.experts.{{expert}}.{name}.weight", (f"layers/mlp/experts/{here}/kernel",),
                 TRANSPOSED, -2 if here == "output" else -1) for name, here in names.items()),
        *(Weight(f"layers.{{}}.{there}.{shared}.{name}.weight", (f"layers/mlp/shared/{here}/kernel",), TRANSPOSED)
          for name, here in names.items() if shared),
    ]  # fmt: skip


_SINKS = Weight("layers.{}.self_attn.sinks", ("layers/attention/sink",), SAME)
_ENDS = _end_rows("embed_tokens", "norm", "lm_head")
_NORMS = [
    *norm_rows("layers.{}.input_layernorm", "layers/attention_norm"),
    *norm_rows("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
]
_LLAMA_WEIGHTS = [*_ENDS, *_ATTENTION, *_GATED, *_NORMS]


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
        "activation_function": Choice("mlp", _ACTIVATIONS, "gelu"),
        "tie_word_embeddings": Same("tie_embeddings", True),
        "scale_attn_weights": Only((True,)),
        "scale_attn_by_inverse_layer_idx": Only((False,)),
        "reorder_and_upcast_attn": Only((False, True)),  # float32 logits, as ours always are
        "add_cross_attention": Only((False,)),
    },
    [
        *_end_rows("wte", "ln_f", "lm_head"),
        Weight("wpe.weight", ("position_embedding/embedding",), SAME),
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


def _read_biases(foreign: Mapping[str, Any]) -> dict[str, Any]:
    of_attention, of_mlp = foreign.get("attention_bias") or False, foreign.get("mlp_bias") or False
    known = {(False, False): False, (True, False): "attention", (True, True): True}
    problem = f"attention_bias={of_attention}, mlp_bias={of_mlp} is not supported"
    require((of_attention, of_mlp) in tuple(known), problem, "biases of attention, of both, or none")
    return {"use_bias": known[of_attention, of_mlp]}


def _write_biases(c: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": c.has_output_bias, "mlp_bias": c.has_bias}


_NO_BIASES = {name: row for name, row in _LLAMA_FIELDS.items() if not name.endswith("_bias")}
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _LLAMA_BASE,
    _NO_BIASES,
    _LLAMA_WEIGHTS,
    more=More(frozenset({"attention_bias", "mlp_bias"}), _read_biases, _write_biases),
)


def _is_late(foreign: Mapping[str, Any], layer: int) -> bool:
    return layer >= integer(foreign, "max_window_layers", 28)


_WINDOWED = _LLAMA_FIELDS | {"sliding_window": Same("attention_window", 4096)}
MISTRAL = Family("mistral", "MistralForCausalLM", _LLAMA_BASE, _WINDOWED, _LLAMA_WEIGHTS)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _LLAMA_BASE | {"use_bias": "qkv"},
    _WINDOWED,
    _LLAMA_WEIGHTS,
    window_switch=True,
    windowed=_is_late,
)
# The models of Gated Attention (arXiv 2505.06708) call themselves qwen3: in `q_proj`, the rows of their gates follow
# the rows of the queries, for each key-value head. transformers would not read them, so they are not written.
_GATES = {"headwise_attn_output_gate": True, "elementwise_attn_output_gate": "elementwise"}


def _read_gates(foreign: Mapping[str, Any]) -> dict[str, Any]:
    gates = [gate for name, gate in _GATES.items() if foreign.get(name)]
    plain = foreign.get("use_qk_norm") in (None, True) and not foreign.get("qkv_bias")
    fits = plain and len(gates) < 2 and not (gates and foreign.get("attention_bias"))
    allowed = "use_qk_norm, one kind of gate or none, and no biases beside it"
    require(fits, "such a variant of qwen3 is not supported", allowed)
    return {"gated_attention": gates[0] if gates else False}


def _read_gated_query(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    parts = np.split(x.reshape(c.kv_heads, -1, x.shape[-1]), [c.num_heads // c.kv_heads * c.head_dim], axis=1)
    return [part.reshape(-1, x.shape[-1]).T for part in parts]


_QUERY_THERE = "layers.{}.self_attn.q_proj.weight"
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _LLAMA_BASE | {"qk_norm": "head"},
    _WINDOWED | _BIASED | {"head_dim": Same("d_head", 128)},
    [
        *(row._replace(where=lambda c: not c.gated_attention) if row.there == _QUERY_THERE else row
          for row in _LLAMA_WEIGHTS),
        Weight(_QUERY_THERE, ("layers/attention/query/kernel", "layers/attention/gate/kernel"),
               Transform(_read_gated_query)),
    ],
    window_switch=True,
    windowed=_is_late,
    more=More(frozenset({*_GATES, "use_qk_norm", "qkv_bias"}), _read_gates, lambda c: {}),
)  # fmt: skip
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    _LLAMA_BASE | {"norm": "layernorm_nonparametric", "norm_eps": 1e-5},
    {name: row for name, row in (_LLAMA_FIELDS | _BIASED | _UNCLIPPED).items() if name != "rms_norm_eps"},
    _LLAMA_WEIGHTS,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _LLAMA_BASE | {"block": "output_norm", "qk_norm": "all"},
    _LLAMA_FIELDS | _BIASED | {"rms_norm_eps": Same("norm_eps", 1e-5)},
    [
        *_ENDS,
        *_ATTENTION,
        *_GATED,
        *norm_rows("layers.{}.post_attention_layernorm", "layers/attention_norm"),
        *norm_rows("layers.{}.post_feedforward_layernorm", "layers/mlp_norm"),
    ],
)


def _read_olmo3(foreign: Mapping[str, Any]) -> dict[str, Any]:
    local = (foreign.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {"rope_local_theta": local.get("rope_theta", 500_000.0)}  # whatever the older `rope_theta` says


OLMO3 = dataclasses.replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    fields={**OLMO2.fields, "sliding_window": Same("attention_window", 4096)},
    rope={"rope_theta": 500_000.0},
    windowed=lambda foreign, layer: (layer + 1) % 4 != 0,
    local_rope=True,
    more=More(frozenset(), _read_olmo3, lambda c: {}),
)
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    _LLAMA_BASE,
    _LLAMA_FIELDS | {
        "attention_bias": _QKV_BIASED,
        "attention_out_bias": Only((False,)),
        "head_dim": Same("d_head", 128),
        "num_key_value_heads": Same("num_kv_heads", 8),
    },
    _LLAMA_WEIGHTS,
)  # fmt: skip
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {"position": "rotary", "norm": "layernorm", "use_bias": True, "normalizer": "softmax"},
    _SIZES | {
        "hidden_act": Choice("mlp", _ACTIVATIONS, "gelu_exact"),
        "layer_norm_eps": Same("norm_eps", 1e-5),
        "use_parallel_residual": Choice("block", {True: "parallel", False: "pre_norm"}, "parallel"),
        "attention_bias": Only((True,)),
        "tie_word_embeddings": Same("tie_embeddings", False),
    },
    [
        *_end_rows("embed_in", "final_layer_norm", "embed_out"),
        *_NORMS,
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
        *_end_rows("embed_tokens", "final_layer_norm", "lm_head"),
        Weight("embed_positions.weight", ("position_embedding/embedding",), PADDED_BY_TWO),
        *_QKV,
        *dense_rows("layers.{}.self_attn.out_proj", "layers/attention/output"),
        *norm_rows("layers.{}.self_attn_layer_norm", "layers/attention_norm"),
        *norm_rows("layers.{}.final_layer_norm", "layers/mlp_norm"),
        *dense_rows("layers.{}.fc1", "layers/mlp/input"),
        *dense_rows("layers.{}.fc2", "layers/mlp/output"),
    ],
    prefixes=("model.decoder.", "decoder.", ""),
    rotary=False,
)


def _has_query_latent(c: ModelConfig) -> bool:
    return c.latent is not None and c.latent.d_query_latent is not None


# DeepSeek-V2. There the rotated channels of a head are the last ones, in neighbouring pairs; here the first, in halves.


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
_THERE, _HERE = "layers.{}.self_attn.", "layers/attention/"

# Its config.

_NAMES = {"first_k_dense_replace", "head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"}
_NAMES |= {"aux_loss_alpha", "ep_size", "n_group", "seq_aux", "topk_group", "topk_method"}


def _read(foreign: Mapping[str, Any], *allowed: str) -> dict[str, Any]:
    own, turned = integer(foreign, "qk_nope_head_dim", 128), integer(foreign, "qk_rope_head_dim", 64)
    width = foreign.get("head_dim")
    require(width in (None, turned), f"head_dim={width} is not supported", f"{turned}")
    require(min(own, turned) > 0, f"qk_nope_head_dim={own}, qk_rope_head_dim={turned}", "positive numbers")
    layers, dense = integer(foreign, "num_hidden_layers"), integer(foreign, "first_k_dense_replace", 0)
    dense = min(max(dense, 0), layers)
    fields = {"d_head": own + turned, "latent.d_rotary": turned}
    fields |= {"mlp": ("swiglu",) * dense + ("experts",) * (layers - dense), "scan_layers": dense in (0, layers)}
    method, groups = foreign.get("topk_method", allowed[0]), {}
    require(method in allowed, f"topk_method={method!r} is not supported", " | ".join(allowed))
    if method != "greedy":
        groups = {"experts.groups": integer(foreign, "n_group")}
        groups |= {"experts.groups_per_token": integer(foreign, "topk_group")}
    return fields | groups


def _write(c: ModelConfig) -> dict[str, Any]:
    kinds = [c.layer_mlp(layer) for layer in range(c.num_layers)]
    foreign: dict[str, Any] = {
        "first_k_dense_replace": kinds.index("experts") if "experts" in kinds else c.num_layers,
        "qk_nope_head_dim": c.head_dim - c.rotary_channels,
        "qk_rope_head_dim": c.rotary_channels,
        "topk_method": "greedy",
    }
    if (of := c.experts) is not None:
        foreign["moe_intermediate_size"] = of.d_expert or c.d_mlp
        if of.scores == "sigmoid" or of.groups_per_token < of.groups:
            method = "noaux_tc" if of.scores == "sigmoid" else "group_limited_greedy"
            foreign |= {"topk_method": method, "n_group": of.groups, "topk_group": of.groups_per_token}
    return foreign


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {"position": "rotary", "norm": "rmsnorm", "use_bias": False, "normalizer": "softmax", "norm_eps": 1e-6},
    _SIZES | {
        "num_key_value_heads": Equal("num_attention_heads"),
        "kv_lora_rank": Same("latent.d_latent", 512),
        "q_lora_rank": Same("latent.d_query_latent", 1536),
        "v_head_dim": Same("latent.d_value", 128),
        "n_routed_experts": Same("experts.num_experts", 64),
        "num_experts_per_tok": Same("experts.per_token"),
        "n_shared_experts": Same("experts.num_shared", 2),
        "moe_intermediate_size": Same("experts.d_expert", 1407),
        "routed_scaling_factor": Same("experts.scale", 1.0),
        "norm_topk_prob": Only((False,)),  # true in no published model, and implementations differ in its meaning
        "scoring_func": Only(("softmax",)),
        "moe_layer_freq": Only((1,)),
        "hidden_act": Only(("silu",)),
        "attention_bias": Only((False,)),
        "mlp_bias": Only((False,)),
        "rms_norm_eps": Only((1e-6,)),  # latents use 1e-6, whatever this says
        "tie_word_embeddings": Same("tie_embeddings", False),
    },
    [
        *_ENDS,
        *_NORMS,
        Weight(_THERE + "q_proj.weight", (_HERE + "query/kernel",), _QUERY,
               where=lambda c: not _has_query_latent(c)),
        Weight(_THERE + "q_b_proj.weight", (_HERE + "query/kernel",), _QUERY,
               where=_has_query_latent),
        Weight(_THERE + "q_a_proj.weight", (_HERE + "query_latent/kernel",), TRANSPOSED),
        *norm_rows(_THERE + "q_a_layernorm", _HERE + "query_latent_norm"),
        Weight(_THERE + "kv_a_proj_with_mqa.weight", (_HERE + "latent/kernel", _HERE + "rotary_key/kernel"),
               _LATENT),
        *norm_rows(_THERE + "kv_a_layernorm", _HERE + "latent_norm"),
        Weight(_THERE + "kv_b_proj.weight", (_HERE + "key/kernel", _HERE + "value/kernel"), _KEY_VALUE),
        Weight(_THERE + "o_proj.weight", (_HERE + "output/kernel",), TRANSPOSED),
        *_GATED,
        *_expert_rows("mlp", _PROJECTIONS, "shared_experts"),
    ],
    mscales=True,
    more=More(frozenset(_NAMES), lambda foreign: _read(foreign, "greedy", "group_limited_greedy"), _write),
)  # fmt: skip
_NEEDED = {n: Same(row.ours) for n, row in DEEPSEEK_V2.fields.items() if isinstance(row, Same) and "." in row.ours}
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    base={**DEEPSEEK_V2.base, "experts.scores": "sigmoid"},
    fields={**DEEPSEEK_V2.fields, **_NEEDED, "norm_topk_prob": Same("experts.normalize", True),
            "scoring_func": Only(("sigmoid",)), "rope_interleave": Only((True,))},
    weights=[*DEEPSEEK_V2.weights,
             Weight("layers.{}.mlp.gate.e_score_correction_bias", ("layers/mlp/choice_bias",), SAME)],
    # Layers that predict further tokens are not read: their tensors are refused.
    more=More(frozenset(_NAMES | {"num_nextn_predict_layers"}), lambda foreign: _read(
        {"first_k_dense_replace": 3} | dict(foreign), "noaux_tc"), _write),
)  # fmt: skip


# gpt-oss: all experts in one tensor [E, in, out], gates and the other hidden units alternating.


def _read_interleaved(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    return [np.moveaxis(part, 0, -2).reshape(*x.shape[1:-1], -1) for part in (x[..., ::2], x[..., 1::2])]


def _write_interleaved(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    experts = _experts(c)
    both = [np.moveaxis(part.reshape(*part.shape[:-1], experts, -1), -2, 0) for part in x]
    return np.stack(both, axis=-1).reshape(*both[0].shape[:-1], -1)


def _experts(c: ModelConfig) -> int:
    return 1 if c.experts is None else c.experts.num_experts


def _read_quantized(foreign: Mapping[str, Any]) -> dict[str, Any]:
    how = foreign.get("quantization_config") or {"quant_method": "mxfp4"}
    method = how.get("quant_method") if isinstance(how, dict) else how
    require(method == "mxfp4", f"quantization_config.quant_method={method!r} is not supported", "mxfp4")
    return {}


_INTERLEAVED = Transform(_read_interleaved, _write_interleaved)
_STACKED = Transform(
    lambda x, c: (x.reshape(-1, x.shape[-1]),), lambda x, c: x[0].reshape(_experts(c), -1, x[0].shape[-1])
)
_MOE = "layers.{}.mlp.experts."
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _LLAMA_BASE | {"mlp": "experts", "normalizer": "learned_sink", "experts.normalize": True,
                   "experts.mlp": "swiglu_clamped", "experts.use_bias": True},
    _NO_BIASES | {
        "head_dim": Same("d_head", 64),
        "rms_norm_eps": Same("norm_eps", 1e-5),
        "attention_bias": Choice("use_bias", {True: "attention", False: False}, True),
        "sliding_window": Same("attention_window", 128),
        "num_local_experts": Same("experts.num_experts", 128),
        "num_experts_per_tok": Same("experts.per_token", 4),
        "experts_per_token": Equal("num_experts_per_tok"),
        "swiglu_alpha": Only((1.702,)),
        "swiglu_limit": Only((7.0,)),
    },
    [
        *_ENDS,
        *_NORMS,
        *_ATTENTION,
        _SINKS,
        *dense_rows("layers.{}.mlp.router", "layers/mlp/router"),
        *(Weight(_MOE + f"gate_up_proj{end}", [f"layers/mlp/experts/{part}/{leaf}" for part in ("gate", "input")],
                 _INTERLEAVED) for end, leaf in (("", "kernel"), ("_bias", "bias"))),
        Weight(_MOE + "down_proj", ("layers/mlp/experts/output/kernel",), _STACKED),
        Weight(_MOE + "down_proj_bias", ("layers/mlp/bias",), SAME),
    ],
    rope={"rope_theta": 150_000.0, "rope_type": "yarn", "factor": 32.0, "truncate": False,
          "original_max_position_embeddings": 4096},
    windowed=lambda foreign, layer: layer % 2 == 0,
    more=More(frozenset({"quantization_config"}), _read_quantized, lambda c: {}),
)  # fmt: skip
# Gemma. Its norms store w for a scale of 1 + w: ours is read back exactly if it is 0.5 or more, as w then is.

_ONE_MORE = Transform(lambda x, c: (x.astype(np.float32) + 1,), lambda x, c: x[0].astype(np.float32) - 1)
_GEMMA_BASE = _LLAMA_BASE | {"mlp": "geglu", "scale_embeddings": True}
_GELU = Only(("gelu_pytorch_tanh", "gelu", "gelu_new", None))  # the approximation by tanh, whatever it says
_GEMMA_FIELDS = {
    **_NO_BIASES,
    **_BIASED,
    "head_dim": Same("d_head", 256),
    "hidden_act": _GELU,
    "hidden_activation": _GELU,
    "tie_word_embeddings": Same("tie_embeddings", True),
}
_GEMMA2_FIELDS = _GEMMA_FIELDS | {
    "hidden_act": Only(("gelu_pytorch_tanh", None)),
    "hidden_activation": Only(("gelu_pytorch_tanh",)),
    "query_pre_attn_scalar": Same("logits_width", 256),
    "attn_logit_softcapping": Same("attention_soft_cap", 50.0),
    "final_logit_softcapping": Same("final_soft_cap", 30.0),
    "sliding_window": Same("attention_window", 4096),
}
_GEMMA2_WEIGHTS = [
    *_ENDS,
    *_ATTENTION,
    *_GATED,
    *norm_rows("layers.{}.input_layernorm", "layers/attention_norm"),
    *norm_rows("layers.{}.post_attention_layernorm", "layers/attention_output_norm"),
    *norm_rows("layers.{}.pre_feedforward_layernorm", "layers/mlp_norm"),
    *norm_rows("layers.{}.post_feedforward_layernorm", "layers/mlp_output_norm"),
]


def _one_more(rows: Sequence[Weight]) -> list[Weight]:
    return [row._replace(how=_ONE_MORE) if row.here[0].endswith("norm/scale") else row for row in rows]


GEMMA = Family("gemma", "GemmaForCausalLM", _GEMMA_BASE, _GEMMA_FIELDS, _one_more(_LLAMA_WEIGHTS))
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _GEMMA_BASE | {"block": "sandwich_norm"},
    _GEMMA2_FIELDS,
    _one_more(_GEMMA2_WEIGHTS),
    windowed=lambda foreign, layer: layer % 2 == 0,
)
_PUBLISHED_GEMMA3 = {
    "vocab_size": Same("vocab_size", 262_208),
    "num_attention_heads": Same("num_heads", 8),
    "num_key_value_heads": Same("num_kv_heads", 4),
    "max_position_embeddings": Same("max_length", 131_072),
}
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA_BASE | {"block": "sandwich_norm", "qk_norm": "head"},
    _GEMMA2_FIELDS | _PUBLISHED_GEMMA3 | {
        "attn_logit_softcapping": Only((None,)),  # ignored by the implementation
        "final_logit_softcapping": Same("final_soft_cap", None),
    },
    _one_more(_GEMMA2_WEIGHTS),
    rope={"rope_theta": 1_000_000.0},
    windowed=lambda foreign, layer: (layer + 1) % max(integer(foreign, "sliding_window_pattern", 6), 1) != 0,
    local_rope=True,
)  # fmt: skip
# With images, which are not read: the text model is in `text_config`, without the fields that its class assumes.
GEMMA3_IMAGES = dataclasses.replace(
    GEMMA3,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    prefixes=("model.language_model.", "language_model.model."),
    beside=tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
)


# Mixtures of experts with one tensor for each expert.


def _read_kinds(foreign: Mapping[str, Any], count: int = 128) -> dict[str, Any]:
    layers, step = integer(foreign, "num_hidden_layers"), integer(foreign, "decoder_sparse_step", 1)
    dense = foreign.get("mlp_only_layers") or []
    # The second is that of transformers 5.
    experts = integer(foreign, "num_experts", integer(foreign, "num_local_experts", count))
    problem = f"mlp_only_layers={dense}, decoder_sparse_step={step} is not supported"
    require(isinstance(dense, list) and step > 0, problem, "a list of layers, and 1 or more")
    sparse = (layer not in dense and (layer + 1) % step == 0 for layer in range(min(layers, 2**12)))
    kinds = tuple("experts" if is_sparse else "swiglu" for is_sparse in sparse)
    return {"mlp": kinds, "scan_layers": len(set(kinds)) == 1, "experts.num_experts": experts}


def _write_kinds(c: ModelConfig) -> dict[str, Any]:
    foreign: dict[str, Any] = {"mlp_only_layers": [i for i in range(c.num_layers) if c.layer_mlp(i) != "experts"]}
    if c.experts is not None:
        foreign |= {"num_experts": c.experts.num_experts, "moe_intermediate_size": c.experts.d_expert or c.d_mlp}
    return foreign


_KIND_NAMES = frozenset({"decoder_sparse_step", "mlp_only_layers", "num_experts", "num_local_experts"})
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _LLAMA_BASE | {"qk_norm": "head"},
    _WINDOWED | _BIASED | {
        "num_experts_per_tok": Same("experts.per_token", 8),
        "moe_intermediate_size": Same("experts.d_expert", 768),
        "norm_topk_prob": Same("experts.normalize", False),
    },
    [*_LLAMA_WEIGHTS, *_expert_rows("mlp", _PROJECTIONS)],
    window_switch=True,
    more=More(_KIND_NAMES, _read_kinds, _write_kinds),
)  # fmt: skip


def _write_shared(c: ModelConfig) -> dict[str, Any]:
    of = c.experts or ExpertsConfig()
    width = of.num_shared * (of.d_shared or of.d_expert or c.d_mlp)
    return _write_kinds(c) | {"shared_expert_intermediate_size": width}


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _LLAMA_BASE | {"experts.num_shared": 1, "experts.gate_shared": True},
    _WINDOWED | {
        "qkv_bias": _QKV_BIASED,
        "num_experts_per_tok": Same("experts.per_token", 4),
        "moe_intermediate_size": Same("experts.d_expert", 1408),
        "shared_expert_intermediate_size": Same("experts.d_shared", 5632),
        "norm_topk_prob": Same("experts.normalize", False),
    },
    [*_LLAMA_WEIGHTS, *_expert_rows("mlp", _PROJECTIONS, "shared_expert"),
     Weight("layers.{}.mlp.shared_expert_gate.weight", ("layers/mlp/shared_gate/kernel",), TRANSPOSED)],
    window_switch=True,
    windowed=lambda foreign, layer: layer % 2 == 0 and not _is_late(foreign, layer),
    more=More(_KIND_NAMES, lambda foreign: _read_kinds(foreign, 60), _write_shared),
)  # fmt: skip
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _LLAMA_BASE | {"mlp": "experts", "experts.normalize": True},
    _LLAMA_FIELDS | {
        "rms_norm_eps": Same("norm_eps", 1e-5),
        "sliding_window": Same("attention_window", None),
        "num_local_experts": Same("experts.num_experts", 8),
        "num_experts_per_tok": Same("experts.per_token", 2),
    },
    [*_ENDS, *_ATTENTION, *_NORMS, *_expert_rows("block_sparse_moe", {"w1": "gate", "w3": "input", "w2": "output"})],
    rope={"rope_theta": 1_000_000.0},
)  # fmt: skip
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _LLAMA_BASE | {"mlp": "experts", "qk_norm": "all"},
    _LLAMA_FIELDS | _BIASED | _UNCLIPPED | {
        "rms_norm_eps": Same("norm_eps", 1e-5),
        "num_experts": Same("experts.num_experts", 64),
        "num_experts_per_tok": Same("experts.per_token", 8),
        "norm_topk_prob": Same("experts.normalize", False),
    },
    [*_ENDS, *_ATTENTION, *_NORMS, *_expert_rows("mlp", _PROJECTIONS)],
)  # fmt: skip

# Dense models.


def _read_qkv(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    ends = [c.num_heads * c.head_dim, (c.num_heads + c.kv_heads) * c.head_dim]
    return [part.T for part in np.split(x, ends)]


def _write_rows(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    return np.concatenate([part.T for part in x])


_FUSED = Transform(_read_qkv, _write_rows)
_HALVES = Transform(lambda x, c: [part.T for part in np.split(x, 2)], _write_rows)
_FUSED_GATED = [
    Weight("layers.{}.mlp.gate_up_proj.weight", ("layers/mlp/gate/kernel", "layers/mlp/input/kernel"), _HALVES),
    *dense_rows("layers.{}.mlp.down_proj", "layers/mlp/output"),
]
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _LLAMA_BASE,
    _LLAMA_FIELDS | {"rms_norm_eps": Same("norm_eps", 1e-5), "sliding_window": Same("attention_window", None)},
    [
        *_ENDS,
        *_NORMS,
        Weight(_THERE + "qkv_proj.weight", [f"{_HERE}{part}/kernel" for part in QKV], _FUSED),
        Weight(_THERE + "o_proj.weight", (_HERE + "output/kernel",), TRANSPOSED),
        *_FUSED_GATED,
    ],
    rotary_fraction=1.0,
)


def _rotates(foreign: Mapping[str, Any], layer: int) -> bool:
    rotating = foreign.get("no_rope_layers")  # 1 if a layer has rotary positions
    if rotating is None:
        return (layer + 1) % max(integer(foreign, "no_rope_layer_interval", 4), 1) != 0
    fits = isinstance(rotating, list) and layer < len(rotating) == integer(foreign, "num_hidden_layers")
    require(fits, f"no_rope_layers={rotating} is not supported", "0 or 1 for each layer")
    return bool(rotating[layer])


def _read_rotating(foreign: Mapping[str, Any]) -> dict[str, Any]:
    layers = tuple(_rotates(foreign, layer) for layer in range(min(integer(foreign, "num_hidden_layers"), 2**12)))
    return _read_biases(foreign) | {"rotary_layers": layers, "scan_layers": len(set(layers)) == 1}


def _write_rotating(c: ModelConfig) -> dict[str, Any]:
    return _write_biases(c) | {"no_rope_layers": [int(c.layer_rotates(layer)) for layer in range(c.num_layers)]}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    _LLAMA_BASE,
    _NO_BIASES | {
        "num_key_value_heads": Same("num_kv_heads", 4),
        "sliding_window": Same("attention_window", None),
        "tie_word_embeddings": Same("tie_embeddings", True),
    },
    _LLAMA_WEIGHTS,
    rope={"rope_theta": 2_000_000.0},
    window_switch=True,
    windowed=lambda foreign, layer: not _rotates(foreign, layer),
    more=More(frozenset({"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"}), _read_rotating,
              _write_rotating),
)  # fmt: skip


# Rotary positions of neighbouring channels, as if they were halves; channels that are not rotated come last.


def _reordered(x: np.ndarray, c: ModelConfig, how: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    heads = x.reshape(-1, c.head_dim, *x.shape[1:])
    turned, rest = np.split(heads, [c.rotary_channels], axis=1)
    turned = how(turned.reshape(-1, *x.shape[1:]), len(heads)).reshape(turned.shape)
    return np.concatenate([turned, rest], axis=1).reshape(x.shape)


_PAIRED = Transform(lambda x, c: (_reordered(x, c, unpair).T,), lambda x, c: _reordered(x[0].T, c, pair))
_TURNED = (_HERE + "query/", _HERE + "key/")
_PAIRED_ATTENTION = [row._replace(how=_PAIRED) if row.here[0].startswith(_TURNED) else row for row in _ATTENTION]


def _slides(foreign: Mapping[str, Any], layer: int) -> bool:
    kinds = foreign.get("layer_types")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "sliding_attention"
    return (layer + 1) % max(integer(foreign, "sliding_window_pattern", 4), 1) != 0


def _read_cohere(foreign: Mapping[str, Any]) -> dict[str, Any]:
    switch, pattern = foreign.get("layer_switch"), integer(foreign, "sliding_window_pattern", 4)
    require(switch in (None, pattern), f"layer_switch={switch} is not supported", f"{pattern}")
    require(foreign.get("sliding_window", ...) is not None, "sliding_window=None is not supported", "an integer")
    layers = tuple(_slides(foreign, layer) for layer in range(min(integer(foreign, "num_hidden_layers"), 2**12)))
    return {"rotary_layers": layers, "scan_layers": len(set(layers)) == 1}


COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _LLAMA_BASE | {"norm": "layernorm", "block": "parallel_one_norm"},
    {name: row for name, row in (_LLAMA_FIELDS | _BIASED).items() if name != "rms_norm_eps"} | {
        "max_position_embeddings": Same("max_length", 8192),
        "layer_norm_eps": Same("norm_eps", 1e-5),
        "logit_scale": Same("logits_multiplier", 0.0625),
        "sliding_window": Same("attention_window", 4096),
        "tie_word_embeddings": Same("tie_embeddings", True),
        # What published configs say beside what transformers reads.
        "order_of_interleaved_layers": Only(("local_attn_first",)),
        "position_embedding_type": Only(("rope_gptj",)),
        "use_qk_norm": Only((False,)),
        **dict.fromkeys(("use_gated_activation", "use_parallel_block"), Only((True,))),
        **dict.fromkeys(("use_embedding_sharing", "use_parallel_embedding"), Only((True, False))),
    },
    [*_ENDS, *_PAIRED_ATTENTION, *_GATED, *norm_rows("layers.{}.input_layernorm", "layers/attention_norm")],
    windowed=_slides,  # these layers have rotary positions, and no others
    more=More(frozenset({"layer_switch"}), _read_cohere, lambda c: {}),
)  # fmt: skip


GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _LLAMA_BASE | {"block": "sandwich_norm"},
    _LLAMA_FIELDS | {
        "attention_bias": _QKV_BIASED,
        "head_dim": Same("d_head", 128),
        "max_position_embeddings": Same("max_length", 131_072),
        "num_key_value_heads": Same("num_kv_heads", 2),
        "rms_norm_eps": Same("norm_eps", 1.5625e-7),
    },
    [*_ENDS, *_PAIRED_ATTENTION, *_FUSED_GATED, *_NORMS,
     *norm_rows("layers.{}.post_self_attn_layernorm", "layers/attention_output_norm"),
     *norm_rows("layers.{}.post_mlp_layernorm", "layers/mlp_output_norm")],
    rotary_fraction=0.5,
)  # fmt: skip


# Granite: Llamas with factors.


def _read_granite(foreign: Mapping[str, Any]) -> dict[str, Any]:
    scale, divisor = foreign.get("attention_multiplier", 1.0), foreign.get("logits_scaling", 1.0)
    width = round(scale**-2) if isinstance(scale, int | float) and scale > 1e-9 else 0
    require(
        width > 0 and abs(width**-0.5 - scale) < 1e-9, f"attention_multiplier={scale!r}", "1 / the root of an integer"
    )
    fits = isinstance(divisor, int | float) and 1e-9 < divisor < 1e9
    require(fits, f"logits_scaling={divisor!r} is not supported", "a positive number")
    return _read_biases(foreign) | {"logits_width": width, "logits_multiplier": 1.0 / divisor}


def _write_granite(c: ModelConfig) -> dict[str, Any]:
    scale = (c.logits_width or c.head_dim) ** -0.5
    return _write_biases(c) | {"attention_multiplier": scale, "logits_scaling": 1.0 / c.logits_multiplier}


_GRANITE = More(
    frozenset({"attention_bias", "mlp_bias", "attention_multiplier", "logits_scaling"}), _read_granite, _write_granite
)
_GRANITE_FIELDS = _NO_BIASES | {name: Same(name, 1.0) for name in ("embedding_multiplier", "residual_multiplier")}
GRANITE = Family("granite", "GraniteForCausalLM", _LLAMA_BASE, _GRANITE_FIELDS, _LLAMA_WEIGHTS, more=_GRANITE)


def _read_granite_swa(foreign: Mapping[str, Any]) -> dict[str, Any]:
    fields, layers = _read_granite(foreign), integer(foreign, "num_hidden_layers")
    thetas = foreign.get("layer_rope_theta")  # 0 for layers without rotary positions
    if thetas is None:
        return fields
    fits = isinstance(thetas, list) and len(thetas) == layers and len({theta for theta in thetas if theta}) == 1
    require(fits, f"layer_rope_theta={thetas} is not supported", "0 or one other number for each layer")
    rotating = tuple(bool(theta) for theta in thetas)
    fields |= {"rope_theta": max(thetas), "rotary_layers": rotating}
    return fields | {"scan_layers": len(set(rotating)) == 1}


def _write_granite_swa(c: ModelConfig) -> dict[str, Any]:
    thetas = [c.rope_theta if c.layer_rotates(layer) else 0 for layer in range(c.num_layers)]
    return _write_granite(c) | {"layer_rope_theta": thetas}


GRANITE_SWA = Family(
    "granite_swa",
    "GraniteSWAForCausalLM",
    _LLAMA_BASE | {"normalizer": "learned_sink"},
    _GRANITE_FIELDS | {
        "num_key_value_heads": Same("num_kv_heads", 4),
        "rms_norm_eps": Same("norm_eps", 1e-5),
        "sliding_window": Same("attention_window", 128),
        "tie_word_embeddings": Same("tie_embeddings", True),
    },
    [*_LLAMA_WEIGHTS, _SINKS],
    windowed=lambda foreign, layer: layer % 4 != 0,
    more=More(_GRANITE.names | {"layer_rope_theta"}, _read_granite_swa, _write_granite_swa),
)  # fmt: skip
_ALL = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO, OLMO2, GPT_NEOX, OPT, DEEPSEEK_V2, GPT_OSS, GEMMA, GEMMA2, GEMMA3)
_ALL += (GEMMA3_IMAGES, QWEN3_MOE, MIXTRAL, OLMOE, PHI3, SMOLLM3, GRANITE, GRANITE_SWA, OLMO3, SEED_OSS)
_ALL += (QWEN2_MOE, COHERE2, GLM4, DEEPSEEK_V3)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
