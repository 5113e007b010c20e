"""Configs of published models <-> ours, by the tables of `orthojax.pretrained.families`.

Reading refuses any field that no row explains, by name.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from orthojax.config import ModelConfig, RopeConfig, fields_affecting, flatten, from_flat, require
from orthojax.errors import UserError
from orthojax.ops.rotary import yarn_mscale
from orthojax.pretrained.families import Choice, Equal, Family, Only, Same, integer

# Fields that do not affect what a model computes, and those that `_read_rotary` and `_read_window` read.
_IGNORED = re.compile(
    r"_.*|.*drop(out)?|.*dropout_prob|.*_token_id|.*2label|label2id|_?num_labels|output_(attentions|hidden_states|past|router_logits|scores)|summary_.*"
    r"|architectures|attn_implementation|auto_map|cache_implementation|chunk_size_feed_forward|(torch_)?dtype|finetuning_task"
    r"|gradient_checkpointing|init_std|initializer_range|is_decoder|is_llama_config|max_sequence_length|model_type"
    r"|initial_context_length|n_ctx|n_special|predict_special_tokens|prefix|pretraining_tp|problem_type|router_(aux_loss_coef|jitter_noise)|task_specific_params|tf_legacy_loss"
    r"|tokenizer_class|torchscript|transformers.*|unsloth_.*|use_bfloat16|use_cache"
    # Sampling of text.
    r"|bad_words_ids|.*suppress_tokens|.*_penalty|do_sample|early_stopping|(max|min)_length|max_new_tokens"
    r"|.*no_repeat_ngram_size|num_beam.*|num_return_sequences|remove_invalid_values|return_dict.*|temperature"
    r"|top_[kp]|typical_p"
    r"|partial_rotary_factor|rope_(interleaved|local_base_freq|parameters|scaling|theta)|rotary_(emb_base|pct)"
    r"|original_max_position_embeddings|layer_types|max_window_layers|sliding_window_(pattern|size)|use_sliding_window"
)
# Fields that have no effect with this value, but do with another one; None has no effect in any field.
_NOTHING = {
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,  # of Phi-3
    "add_cross_attention": False, "is_causal": True, "is_encoder_decoder": False, "pruned_heads": {},
    "tie_encoder_decoder": False, "use_bidirectional_attention": False, "use_mrope": False,
}  # fmt: skip
_COUNTS = {"vocab_size", "d_model", "num_layers", "num_heads"}  # used in arithmetic before types are checked


def read_foreign_config(family: Family, foreign: Mapping[str, Any]) -> ModelConfig:
    """Returns the `ModelConfig` that the content of a foreign config.json describes.

    Raises UserError for a field that is missing or unknown, or has an unsupported value.
    """
    fields = dict(family.base)
    for name, row in family.fields.items():
        value = foreign.get(name, ...)
        if isinstance(row, Only):
            allowed = " | ".join(map(str, row.values))
            require(value is ... or value in row.values, f"{name}={value} is not supported", allowed)
        elif isinstance(row, Equal):
            same = value in (..., None, foreign.get(row.other))
            require(same, f"{name}={value} is not supported", f"that of {row.other}")
        else:
            if value is ...:
                require(row.default is not ..., f"the config has no {name}", f"that of a {family.name} model")
                value = row.default
            elif isinstance(row, Choice):
                known = isinstance(value, str | bool) and value in row.values
                require(known, f"{name}={value!r} is not supported", " | ".join(map(str, row.values)))
                value = row.values[value]
            fields[row.ours] = integer({name: value}, name) if row.ours in _COUNTS else value
    _require_known(family, foreign)
    if fields.get("d_mlp") is None:
        fields["d_mlp"] = 4 * fields["d_model"]
    read_rotary = _read_local_rotary if family.local_rope else _read_rotary
    fields = (read_rotary(family, foreign, fields.get("max_length")) if family.rotary else {}) | fields
    if family.more is not None:
        fields |= family.more.read(foreign)
    if isinstance(fields.get("d_head"), int) and fields["d_head"] * fields["num_heads"] == fields["d_model"]:
        fields["d_head"] = None
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    # Before layers are counted one by one.
    require(0 < fields["num_layers"] <= 2**12, f"a model of {fields['num_layers']} layers", "1 to 4096")
    fields |= _read_window(family, foreign, fields.get("attention_window"), fields["num_layers"])
    if fields["attention_window"] is None:
        fields.pop("rope_local_theta", None)
    return from_flat(ModelConfig, fields)


def _require_known(family: Family, foreign: Mapping[str, Any]) -> None:
    known = {*family.fields, *(family.more.names if family.more else ())}
    for name, value in sorted(foreign.items()):
        nothing = _NOTHING.get(name)
        says_nothing = value is None or (type(value) is type(nothing) and value == nothing)  # 0 is not False
        if name not in known and not says_nothing and not _IGNORED.fullmatch(name):
            raise UserError(f"config field {name}={value!r} is not known of {family.name} models")


_KINDS = ("full_attention", "sliding_attention")


def _read_window(family: Family, foreign: Mapping[str, Any], window: int | None, num_layers: int) -> dict[str, Any]:
    """Returns the windows of all layers; refuses contradictory declarations, and those that the family ignores."""
    used, kinds = foreign.get("use_sliding_window"), foreign.get("layer_types")
    if family.window_switch:
        window = window if used else None
    else:
        problem = f"use_sliding_window={used!r} is not supported of {family.name} models"
        require(used in (None, window is not None), problem, str(window is not None))
    if kinds is None:
        windowed = family.windowed or (lambda foreign, layer: layer >= integer(foreign, "max_window_layers", 0))
        kinds = [_KINDS[window is not None and windowed(foreign, layer)] for layer in range(num_layers)]
    allowed = _KINDS if window is not None and family.windowed else (_KINDS[window is not None],)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    shown = ", ".join(dict.fromkeys(map(str, kinds)))
    problem = f"layer_types={shown} of {len(kinds)} layers is not supported of {family.name} models"
    fits = len(kinds) == num_layers and all(kind in allowed for kind in kinds)
    require(fits, problem, f"{' or '.join(allowed)} of each of {num_layers}")
    windows = tuple(window if kind == _KINDS[1] else None for kind in kinds)
    if len(set(kinds)) == 1:
        return {"attention_window": windows[0]}
    return {"attention_window": windows, "scan_layers": False}


def _write_window(family: Family, config: ModelConfig) -> dict[str, Any]:
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    window = next((window for window in windows if window is not None), None)
    row, foreign = family.fields.get("sliding_window"), {}
    if isinstance(row, Same):
        unused = row.default if family.windowed and not family.window_switch else None  # transformers asks for it
        foreign = {"sliding_window": unused if window is None else window}
    if family.window_switch:  # and for libraries that read no `layer_types`, the first layer with a window
        foreign |= {"use_sliding_window": window is not None}
        foreign |= {"max_window_layers": windows.index(window) if window is not None else config.num_layers}
    if family.windowed:
        foreign["layer_types"] = [_KINDS[window is not None] for window in windows]
    return foreign


# `rope_type` -> its fields -> those of `RopeConfig`.
_LONGER = {"factor": "factor", "original_max_position_embeddings": "original_length"}
_SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": _LONGER | {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"},
    "yarn": _LONGER | {"beta_slow": "low_frequency_factor", "beta_fast": "high_frequency_factor"},
    "dynamic": {"factor": "factor"},  # from `max_position_embeddings` on
    "longrope": _LONGER,
}
_MSCALES = {"mscale": "mscale", "mscale_all_dim": "mscale_all"}
_ORIGINAL = "original_max_position_embeddings"


def _read_local_rotary(family: Family, foreign: Mapping[str, Any], max_length: Any) -> dict[str, Any]:
    """Reads rotary fields if layers with a window have their own, plain ones."""
    rope, theta = foreign.get("rope_parameters") or {}, foreign.get("rope_local_base_freq", 10_000.0)
    if isinstance(rope, dict) and rope.keys() & set(_KINDS):
        local, rope = (rope.get(kind) or {} for kind in reversed(_KINDS))
        plain = isinstance(local, dict) and local.get("rope_type", "default") == "default"
        require(plain, f"rope_parameters.{_KINDS[1]}={local} is not supported", "rope_type default")
        theta = local.get("rope_theta", theta)
    return _read_rotary(family, dict(foreign) | {"rope_parameters": rope}, max_length) | {"rope_local_theta": theta}


def _read_rotary(family: Family, foreign: Mapping[str, Any], max_length: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = foreign.get(name) or {}
        require(isinstance(value, dict), f"{name}={value!r} is not supported", "an object of rope_type and its fields")
        rope |= value
    theta = family.rope["rope_theta"]
    rope = rope or {name: value for name, value in family.rope.items() if name != "rope_theta"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in older configs
    require(kind in tuple(_SCALINGS), f"rope_type={kind!r} is not supported", " | ".join(_SCALINGS))
    theta = rope.get("rope_theta", foreign.get("rope_theta", foreign.get("rotary_emb_base", theta)))
    numbers, fraction = {"rope_theta": theta}, rope.pop("partial_rotary_factor", None)
    if family.rotary_fraction is None:  # transformers rotates all channels whatever it says, or fails
        require(kind == "default" or fraction in (None, 1), f"partial_rotary_factor={fraction} is not supported", "1.0")
    else:
        given_fraction = foreign.get("partial_rotary_factor", foreign.get("rotary_pct", family.rotary_fraction))
        numbers["partial_rotary_factor"] = given_fraction if fraction is None else fraction
    scaling = dict(_SCALINGS[kind])
    # As in transformers: a length beside `rope_parameters` has precedence over one in it; default is the whole length.
    defaults = {"beta_slow": 1.0, "beta_fast": 32.0, _ORIGINAL: max_length}
    rope |= {_ORIGINAL: foreign.get(_ORIGINAL) or rope.get(_ORIGINAL)} if _ORIGINAL in scaling else {}
    if kind == "longrope" and isinstance(rope[_ORIGINAL], int) and isinstance(max_length, int):
        defaults["factor"] = max(max_length / max(rope[_ORIGINAL], 1), 1.0)
    numbers |= {name: defaults.get(name) if rope.get(name) is None else rope[name] for name in scaling}
    if kind == "yarn" and family.mscales and (rope.get("mscale") or rope.get("mscale_all_dim")):
        # If one of them is missing, implementations differ.
        scaling |= _MSCALES
        numbers |= {name: rope.get(name) or None for name in _MSCALES}
    missing = sorted(name for name, value in numbers.items() if value is None)
    require(not missing, f"rope_type={kind!r} has no {', '.join(missing)}", ", ".join(numbers))
    known = {*numbers, "rope_type", "type"}
    more = {"linear": {_ORIGINAL}, "longrope": {"attention_factor", "short_factor", "long_factor"}}
    more["yarn"] = {"attention_factor", "truncate"} | (set() if family.mscales else set(_MSCALES))
    known |= more.get(kind, set())
    unknown = sorted(name for name in set(rope) - known if rope[name] is not None)
    require(not unknown, f"field {', '.join(unknown)} of rope_type={kind!r} is not known", ", ".join(sorted(known)))
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(is_number, f"{name}={value!r} is not supported", "a number")
    found = {"rope_theta": numbers["rope_theta"]}
    if numbers.get("partial_rotary_factor", 1.0) != 1.0:
        found["rope.fraction"] = numbers["partial_rotary_factor"]
    if kind != "default":
        found |= {f"rope.{ours}": numbers[name] for name, ours in scaling.items()} | {"rope.scaling": kind}
    if kind == "dynamic":
        found["rope.original_length"] = max_length
    if kind == "longrope":
        return found | _read_longrope(rope, numbers)
    return found | (_read_yarn(family, rope, numbers) if kind == "yarn" else {})


def _read_longrope(rope: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a factor for each pair of channels, and `attention_factor` f: f^2 = 1 + mscale ln(factor) / ln(length)."""
    found: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        fits = isinstance(factors, list) and all(isinstance(x, int | float) for x in factors)
        require(fits, f"{name}={factors!r} of rope_type='longrope' is not supported", "a list of numbers")
        found[f"rope.{name}s"] = tuple(factors or ())
    if (f := rope.get("attention_factor")) is not None:
        factor, length = numbers["factor"], numbers[_ORIGINAL]
        problem = f"attention_factor={f!r} with factor={factor} is not supported"
        fits = isinstance(f, int | float) and 1.0 <= f <= 1e6 and factor > 1.0 and length > 1
        require(fits, problem, "1 or more, with a factor and a length above 1")
        found["rope.mscale"] = round((f**2 - 1.0) * math.log(length) / math.log(factor), 12)
    return found


def _read_yarn(family: Family, rope: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `truncate`, and `attention_factor` f in place of `mscale`: f = m(mscale) / m(mscale_all_dim)."""
    truncate, attention_factor = rope.get("truncate", True), rope.get("attention_factor")
    require(isinstance(truncate, bool), f"truncate={truncate!r} is not supported", "true | false")
    factor, mscales = numbers["factor"], [rope[name] for name in _MSCALES if rope.get(name)]
    if attention_factor is None and not family.mscales and len(mscales) == 2:  # logits stay as they are
        require(all(isinstance(x, int | float) for x in mscales), f"mscale={mscales} is not supported", "numbers")
        attention_factor = yarn_mscale(factor, mscales[0]) / yarn_mscale(factor, mscales[1])
    if attention_factor is None:
        return {"rope.truncate": truncate}
    is_number = isinstance(attention_factor, int | float)
    m = attention_factor * yarn_mscale(factor, numbers.get("mscale_all_dim", 0.0)) if is_number and factor > 1 else 0.0
    problem = f"attention_factor={attention_factor!r} with factor={factor} is not supported"
    require(m >= 1.0, problem, "one that makes rotated channels no smaller, with a factor above 1")
    # Rounded, so that the number that `_write_rotary` writes is read back unchanged.
    return {"rope.truncate": truncate, "rope.mscale": round((m - 1.0) / (yarn_mscale(factor, 1.0) - 1.0), 12)}


def _write_rotary(family: Family, config: ModelConfig) -> dict[str, Any]:
    rope, outside = config.rope, {}
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if rope is not None and rope.scaling != "none":
        scaling = _SCALINGS[rope.scaling]
        if rope.scaling == "yarn" and family.mscales and rope.mscale_all:
            scaling = scaling | _MSCALES
        elif rope.scaling == "yarn" and rope.mscale != 1.0:
            written["attention_factor"] = yarn_mscale(rope.factor, rope.mscale)
        written |= {} if rope.truncate else {"truncate": False}
        written |= {"rope_type": rope.scaling} | {name: getattr(rope, ours) for name, ours in scaling.items()}
    if rope is not None and rope.scaling == "longrope":
        written |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        if rope.mscale != 1.0:
            ratio = math.log(rope.factor) / math.log(rope.original_length)
            written["attention_factor"] = math.sqrt(1.0 + rope.mscale * ratio)
        outside = {_ORIGINAL: rope.original_length}  # where it counts, and is 4096 for Phi-3 if missing
    if family.rotary_fraction is not None:
        written["partial_rotary_factor"] = 1.0 if rope is None else rope.fraction
    if family.local_rope:
        theta = config.rope_theta if config.rope_local_theta is None else config.rope_local_theta
        written = dict(zip(_KINDS, (written, {"rope_type": "default", "rope_theta": theta}), strict=True))
    return outside | {"rope_parameters": written}


def write_config(family: Family, config: ModelConfig) -> dict[str, Any] | None:
    """Returns a model's foreign config, without fields that do not affect results; None if its family has none."""
    # No padding token: the family's default, used if the field is missing, may not be in the vocabulary.
    foreign: dict[str, Any] = {"model_type": family.name, "pad_token_id": None}
    ours = flatten(config)
    for name, row in family.fields.items():
        if isinstance(row, Only):
            foreign[name] = row.values[0]
        elif isinstance(row, Equal):
            foreign[name] = foreign[row.other]
        else:
            value = ours[row.ours]
            if isinstance(row, Choice):
                names = [there for there, here in row.values.items() if here == value]
                if not names:
                    return None
                value = names[0]
            foreign[name] = value
    if "num_key_value_heads" in foreign:
        foreign["num_key_value_heads"] = config.kv_heads
    if "head_dim" in foreign:
        foreign["head_dim"] = config.head_dim
    if "query_pre_attn_scalar" in foreign:
        foreign["query_pre_attn_scalar"] = config.logits_width or config.head_dim
    foreign |= _write_window(family, config)
    foreign |= family.more.write(config) if family.more else {}
    foreign |= _write_rotary(family, config) if family.rotary else {}
    try:
        same = computed_as(read_foreign_config(family, foreign)) == computed_as(config)
    except UserError:
        return None
    return foreign if same else None


def computed_as(config: ModelConfig) -> ModelConfig:
    """Returns a config with every default filled in, and without fields that do not affect what a model computes."""
    plain, unread = ModelConfig(), {"dtype", "residual_dtype", *fields_affecting(ModelConfig, "computation", "start")}
    if config.position != "learned":
        unread |= {"max_length"}
    if config.position != "rotary":
        unread |= {"rope", "rope_theta"}
    if config.rope_local_theta == config.rope_theta and (config.rope is None or config.rope.scaling == "none"):
        unread |= {"rope_local_theta"}
    if config.normalizer != "softmax_n":
        unread |= {"normalizer_n"}
    if not config.has_experts:
        unread |= {"experts"}
    changes: dict[str, Any] = {name: getattr(plain, name) for name in unread}
    changes |= {"num_kv_heads": config.kv_heads, "d_head": config.head_dim}
    changes |= {"logits_width": config.logits_width or config.head_dim}
    if config.rope == RopeConfig():
        changes["rope"] = None
    if config.latent is not None:
        changes["latent"] = dataclasses.replace(config.latent, d_value=config.value_dim)
    if config.experts is not None and config.has_experts:
        width, count = config.experts.d_expert or config.d_mlp, config.experts.num_shared
        shared = {"d_shared": count * (config.experts.d_shared or width) or None, "num_shared": min(count, 1)}
        changes["experts"] = dataclasses.replace(config.experts, d_expert=width, **shared)
    if config.use_bias == "norm" and not config.has_norm_bias:
        changes["use_bias"] = False
    for name in ("mlp", "attention_window", "rotary_layers"):
        value = getattr(config, name)
        changes |= {name: value[0]} if isinstance(value, tuple) and len(set(value)) == 1 else {}
    return dataclasses.replace(config, **changes | {"scan_layers": False})
