"""Configs of published models <-> ours, by the tables of `orthojax.model.families`.

Reading refuses, by name, what no row explains.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from orthojax.config import ModelConfig, fields_affecting
from orthojax.config.fields import require
from orthojax.errors import UserError
from orthojax.model.family import Choice, Equal, Family, More, Only, integer

# Says nothing about what the model computes.
IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation_internal", "_flash_attn_2_enabled", "_name_or_path", "_num_labels", "activation_dropout",
    "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation", "attn_pdrop",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "dropout",
    "dtype", "embd_pdrop", "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_dropout",
    "hidden_dropout_prob", "id2label", "init_std", "initializer_range", "is_decoder", "is_llama_config", "label2id",
    "layerdrop", "max_sequence_length", "model_type", "n_ctx", "n_special", "num_labels", "output_attentions",
    "output_hidden_states", "output_past", "output_router_logits", "pad_token_id", "partial_rotary_factor",
    "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict",
    "rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
    # How text is drawn.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
# Says nothing with this value, and something with another one.
_NOTHING = {
    "add_cross_attention": False, "is_causal": True, "is_encoder_decoder": False, "pruned_heads": {},
    "tie_encoder_decoder": False, "use_mrope": False,
}  # fmt: skip
_LAYER_TYPES = ("layer_types", "max_window_layers", "use_sliding_window")
_COUNTS = {"vocab_size", "d_model", "num_layers", "num_heads"}  # whose arithmetic comes before the check of types


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
            require(
                given.get(name) in (None, given.get(row.other)),
                f"{name}={given.get(name)} is not supported",
                f"that of {row.other}",
            )
            continue
        value = given.get(name, ...)
        if value is ...:
            require(row.default is not ..., f"the config has no {name}", f"that of a {family.name} model")
            value = row.default
        elif isinstance(row, Choice):
            known = isinstance(value, str) and value in row.values
            require(known, f"{name}={value!r} is not supported", " | ".join(row.values))
            value = row.values[value]
        fields[row.ours] = integer(given, name) if row.ours in _COUNTS else value
    more = family.more or More(frozenset(), lambda given: {}, lambda config: {})
    known = {*IGNORED, *_LAYER_TYPES, *family.fields, *more.names}
    unknown = sorted(name for name in given if name not in known and not _says_nothing(name, given[name]))
    if unknown:
        raise UserError(f"config field {unknown[0]}={given[unknown[0]]!r} is not known of {family.name} models")
    if fields.get("d_mlp") is None:
        fields["d_mlp"] = 4 * fields["d_model"]
    fields = (_read_rotary(family, given) if family.rotary else {}) | fields | more.read(given)
    if isinstance(fields.get("d_head"), int) and fields["d_head"] * fields["num_heads"] == fields["d_model"]:
        fields["d_head"] = None
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    _require_windows(family, given, fields.get("attention_window"), fields["num_layers"])
    return ModelConfig(**fields)


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a field that no family reads has the value of models that do not have it; 0 is not False."""
    nothing = _NOTHING.get(name)
    return value is None or (type(value) is type(nothing) and value == nothing)


def _require_windows(family: Family, given: Mapping[str, Any], window: int | None, num_layers: int) -> None:
    """Refuses what says that layers see other keys than they do here, all of them in the same window or in none.

    `Family.more` has read these fields where the family has windows in some of its layers.
    """
    kinds = given.get("layer_types")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        seen = "full_attention" if window is None else "sliding_attention"
        shown = ", ".join(dict.fromkeys(map(str, kinds)))
        problem, allowed = f"layer_types={shown} of {len(kinds)} layers", f"{seen} of each of {num_layers}"
        require(kinds == [seen] * num_layers, f"{problem} is not supported of {family.name} models", allowed)
    if family.more is not None and "use_sliding_window" in family.more.names:
        return
    used, first = given.get("use_sliding_window"), given.get("max_window_layers")
    problem = f"use_sliding_window={used!r} is not supported of {family.name} models"
    require(used is None or used is (window is not None), problem, str(window is not None))
    problem = f"max_window_layers={first!r} is not supported of {family.name} models"
    require(window is None or first in (None, 0), problem, "0")


_LLAMA3 = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "low_freq_factor": "rope_low_frequency_factor",
    "high_freq_factor": "rope_high_frequency_factor",
}
_YARN = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "beta_slow": "rope_low_frequency_factor",
    "beta_fast": "rope_high_frequency_factor",
}
_MSCALES = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all"}
_SCALINGS = {"none": {}, "linear": {"factor": "rope_factor"}, "llama3": _LLAMA3, "yarn": _YARN}
_SCALING_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}


def _read_rotary(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = given.get(name) or {}
        require(isinstance(value, dict), f"{name}={value!r} is not supported", "an object of rope_type and its fields")
        rope |= value
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    require(kind in tuple(_SCALINGS), f"rope_type={kind!r} is not supported", "default | linear | llama3 | yarn")
    theta = rope.get("rope_theta", given.get("rope_theta", given.get("rotary_emb_base", 10_000.0)))
    fraction = given.get("partial_rotary_factor", given.get("rotary_pct", family.rotary_fraction))
    numbers = {"rope_theta": theta, "partial_rotary_factor": rope.get("partial_rotary_factor", fraction)}
    ours = {"rope_theta": "rope_theta", "partial_rotary_factor": "rotary_fraction"} | _SCALINGS[kind]
    numbers |= {name: rope.get(name, _SCALING_DEFAULTS.get(name)) for name in _SCALINGS[kind]}
    if kind == "yarn" and family.mscales and (rope.get("mscale") or rope.get("mscale_all_dim")):
        # Where one of them is missing, implementations differ.
        ours |= _MSCALES
        numbers |= {name: rope.get(name) or None for name in _MSCALES}
    missing = sorted(name for name, value in numbers.items() if value is None)
    require(not missing, f"rope_type={kind!r} has no {', '.join(missing)}", ", ".join(ours))
    known = {*ours, "rope_type", "type", *(("original_max_position_embeddings",) if kind == "linear" else ())}
    unknown = sorted(name for name in set(rope) - known if rope[name] is not None)
    require(not unknown, f"field {', '.join(unknown)} of rope_type={kind!r} is not known", ", ".join(sorted(known)))
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(is_number, f"{name}={value!r} is not supported", "a number")
    found: dict[str, Any] = {ours[name]: value for name, value in numbers.items()}
    return found | {"rope_scaling": kind}


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
    given |= family.more.write(config) if family.more else {}
    if family.rotary:
        kind = "default" if config.rope_scaling == "none" else config.rope_scaling
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": config.rope_theta}
        scaled = _SCALINGS[config.rope_scaling]
        if config.rope_scaling == "yarn" and family.mscales and config.rope_mscale_all:
            scaled = scaled | _MSCALES
        rope |= {name: getattr(config, ours) for name, ours in scaled.items()}
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
    resolved: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "d_head": config.head_dim,
        "d_value": config.value_dim,
        "norm_bias": config.has_norm_bias,
        "qkv_bias": config.has_qkv_bias,
    }
    if config.normalizer != "softmax_n":
        unread |= {"normalizer_n"}
    if config.normalizer != "clipped_softmax":
        unread |= {"normalizer_gamma", "normalizer_zeta"}
    kinds = tuple(config.layer_mlp(layer) for layer in range(config.num_layers))
    if "experts" not in kinds:
        unread |= {field.name for field in dataclasses.fields(ModelConfig) if "expert" in field.name}
    else:
        resolved["d_expert"] = config.expert_dim
    if len(set(kinds)) == 1:
        resolved["mlp"] = kinds[0]
    changes = {name: getattr(plain, name) for name in unread} | resolved
    return dataclasses.replace(config, **changes | {"scan_layers": False})
