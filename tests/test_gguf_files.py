"""GGUF files: read exactly, and refused by name if damaged or not understood."""

import dataclasses
import io
import json
import math
import struct

import jax
import numpy as np
import pytest
from model_oracle import random_params
from refusals import refused
from test_pretrained_import import KINDS

import orthojax
from orthojax.config import RopeConfig
from orthojax.data.chat import chat_template, render_chat
from orthojax.data.tokenizers import load_tokenizer
from orthojax.errors import UserError
from orthojax.model import llama2, unstack_layers
from orthojax.ops import llama3_frequencies, rotary_frequencies
from orthojax.pretrained import begins_with_bos, computed_as, read_gguf

gguf = pytest.importorskip("gguf")

TYPES = gguf.GGMLQuantizationType
QUANTIZED = {"attn_v": TYPES.Q8_0, "ffn_down": TYPES.Q4_1, "ffn_up": TYPES.F16}
SMALL = {"vocab_size": 11, "max_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_mlp": 32}
GGUF_LLAMA = llama2("tiny", **SMALL, num_kv_heads=2, tie_embeddings=True, norm_eps=1e-5,
                    rope_theta=500_000.0)  # fmt: skip
THERE = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
MLP = {"gate": "ffn_gate", "input": "ffn_up", "output": "ffn_down"}
PAIRED = ("llama", "smollm3")  # whose queries and keys llama.cpp turns in neighbouring pairs


def neighbours(rows, heads):
    """Interleaves the halves of a head (0, 1, ..., H-1): 0, H/2, 1, H/2 + 1, ..."""
    H = len(rows) // heads
    order = [head * H + half * (H // 2) + i for head in range(heads) for i in range(H // 2) for half in (0, 1)]
    return rows[order]


def gguf_tensors(config, params, architecture="llama"):
    """Returns every tensor as llama.cpp has it, float32."""
    params, norms = jax.device_get(params), {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    if architecture == "olmo2":
        norms = {"attention_norm": "post_attention_norm", "mlp_norm": "post_ffw_norm"}
    if architecture == "gpt-oss":
        norms["mlp_norm"] = "post_attention_norm"
    if config.block == "sandwich_norm":
        norms |= {"attention_output_norm": "post_attention_norm", "mlp_output_norm": "post_ffw_norm"}
    tensors = {
        "token_embd.weight": params["token_embedding"]["embedding"],
        "output_norm.weight": params["final_norm"]["scale"],
    }
    if not config.tie_embeddings:
        tensors["output.weight"] = params["head"]["kernel"].T
    for i in range(config.num_layers):
        block = params[f"layers_{i}"]
        for part, names in (("attention", THERE), ("mlp", MLP)):
            for here, there in names.items():
                if here not in block[part]:  # experts
                    continue
                tensors[f"blk.{i}.{there}.weight"] = block[part][here]["kernel"].T
                if "bias" in block[part][here]:
                    tensors[f"blk.{i}.{there}.bias"] = block[part][here]["bias"]
        if architecture in PAIRED:
            for there, heads in (("attn_q", config.num_heads), ("attn_k", config.kv_heads)):
                tensors[f"blk.{i}.{there}.weight"] = neighbours(tensors[f"blk.{i}.{there}.weight"], heads)
        if architecture == "phi3":
            parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
            parts = [tensors.pop(f"blk.{i}.ffn_{part}.weight") for part in ("gate", "up")]
            tensors[f"blk.{i}.ffn_up.weight"] = np.concatenate(parts)
        if config.normalizer == "learned_sink":
            tensors[f"blk.{i}.attn_sinks.weight"] = block["attention"]["sink"]
        if config.has_experts:
            tensors |= expert_tensors(i, config, block["mlp"])
        scales = {there: block[here] for here, there in norms.items()}
        scales |= {f"attn_{part[0]}_norm": block["attention"][f"{part}_norm"]
                   for part in ("query", "key") if config.qk_norm != "none"}  # fmt: skip
        tensors |= {f"blk.{i}.{there}.weight": norm["scale"] for there, norm in scales.items()}
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def expert_tensors(layer, config, mlp):
    """Returns the tensors of a mixture: the kernels of all experts as one, [experts, out, in]."""
    found, E = {}, config.experts.num_experts
    for leaf, end in (("kernel", "weight"), ("bias", "bias")):
        if leaf in mlp["router"]:
            found[f"blk.{layer}.ffn_gate_inp.{end}"] = mlp["router"][leaf].T
    for here, there in MLP.items():
        kernel = mlp["experts"][here]["kernel"]
        kernels = np.split(kernel, E, axis=0 if here == "output" else 1)
        found[f"blk.{layer}.{there}_exps.weight"] = np.stack([each.T for each in kernels])
        if "bias" in mlp["router"]:
            bias = mlp["bias"] if here == "output" else mlp["experts"][here]["bias"].reshape(E, -1)
            found[f"blk.{layer}.{there}_exps.bias"] = bias
    return found


def metadata_of(config):
    """Returns the metadata of an architecture that are not those of every model."""
    windows, rope = np.atleast_1d(config.attention_window or 0).tolist(), config.rope or RopeConfig()
    found = {"key_length": config.d_head, "value_length": config.d_head, "sliding_window": max(w or 0 for w in windows)}
    found = {f"attention.{name}": value for name, value in found.items()}
    found |= {"attn_logit_softcapping": config.attention_soft_cap, "final_logit_softcapping": config.final_soft_cap}
    if config.has_experts:
        experts = config.experts
        found |= {"expert_count": experts.num_experts, "expert_used_count": experts.per_token}
        found["expert_feed_forward_length"] = experts.d_expert
    if rope.scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling == "longrope":
        ratio = math.log(rope.factor) / math.log(rope.original_length)
        found["rope.scaling.attn_factor"] = math.sqrt(1.0 + rope.mscale * ratio)
    if rope.scaling in ("longrope", "yarn"):
        found["rope.scaling.original_context_length"] = rope.original_length
    return {name: value for name, value in found.items() if value}


def write_gguf(path, config, tensors, architecture="llama", quantized=QUANTIZED, **more):
    """Writes a file; `more` are further metadata, with __ for dots, and None for what the file does not have."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {
        "context_length": config.max_length, "embedding_length": config.d_model, "block_count": config.num_layers,
        "feed_forward_length": config.d_mlp, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta, "rope.dimension_count": config.rotary_channels, **metadata_of(config),
    }  # fmt: skip
    metadata = {f"{architecture}.{name}": value for name, value in metadata.items()}
    for name, value in (metadata | {name.replace("__", "."): value for name, value in more.items()}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add[type(value)](name, value)
    expected = {}
    for name, tensor in tensors.items():
        kind = quantized.get(name.split(".")[-2], TYPES.F32)
        stored = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


# llama.cpp's name of an architecture: a kind of folder, its changes here, metadata beside those of every model; and how
# some tensors are stored, of which the file has others than the model.
ARCHITECTURES = {
    "qwen2": ("qwen2 with windows", {"tie_embeddings": True}, {}),
    "qwen3": ("qwen3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "gemma": ("gemma", {"tie_embeddings": True}, {}),
    "gemma2": ("gemma 2", {"logits_width": None, "d_head": 6}, {}),
    "gemma3": ("gemma 3", {"num_layers": 3, "attention_window": (4, 4, None), "rope_local_theta": 10_000.0},
               {"gemma3__attention__sliding_window_pattern": 3}),
    "qwen3moe": ("qwen3 moe", {"mlp": "experts", "use_bias": False}, {}),
    "olmoe": ("olmoe", {}, {}),
    "llama of experts": ("mixtral", {}, {}),
    "llama with a window": ("llama", {"attention_window": 4}, {}),
    "phi3": ("phi3", {}, {}),
    "smollm3": ("smollm3", {"num_layers": 4, "rotary_layers": (True, True, True, False)}, {}),
    "gpt-oss": ("gpt-oss", {}, {"gpt-oss__expert_feed_forward_length": 64}),
    "gpt-oss in MXFP4": ("gpt-oss", {}, {"gpt-oss__expert_feed_forward_length": 64}, {
        f"{name}_exps": TYPES.MXFP4 for name in MLP.values()}),
    "llama in many types": ("llama", dataclasses.asdict(GGUF_LLAMA), {}, QUANTIZED),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_are_read_bit_for_bit(name, tmp_path):
    kind, changes, metadata, *types = ARCHITECTURES[name]
    architecture, quantized = name.partition(" ")[0], types[0] if types else {}
    config, path = dataclasses.replace(KINDS[kind][0], **changes), tmp_path / "model.gguf"
    params = random_params(config)
    tensors, factors = gguf_tensors(config, params, architecture), {}
    if architecture == "phi3":
        factors = {"long": config.rope.long_factors, "short": config.rope.short_factors}
        factors = {f"rope_factors_{name}.weight": np.array(x, np.float32) for name, x in factors.items()}
    stored = write_gguf(path, config, tensors | factors, architecture, quantized, **metadata)
    read, same = read_gguf(path)
    assert computed_as(read) == computed_as(config)
    same = unstack_layers(same) if read.scan_layers else same
    assert jax.tree.structure(params) == jax.tree.structure(same)
    found = gguf_tensors(config, same, architecture)
    for tensor_name, tensor in found.items():
        np.testing.assert_array_equal(tensor, stored[tensor_name], err_msg=tensor_name)
    rounded = {name.split(".")[-2] for name, tensor in found.items() if not np.array_equal(tensor, tensors[name])}
    assert rounded == set(quantized)
    if not quantized:
        jax.tree.map(np.testing.assert_array_equal, params, same)


TOKENS = ["<|endoftext|>", *"abcdefghi", "ab"]  # as many as the model has


def test_a_split_file_is_read_by_its_first_part(tmp_path):
    params = random_params(GGUF_LLAMA)
    tensors = list(gguf_tensors(GGUF_LLAMA, params).items())
    first, second = (tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2))

    def write(path, part, number):
        write_gguf(path, GGUF_LLAMA, dict(part), quantized={}, split__count=2, split__no=number)

    write(first, tensors[:3], 0)
    with pytest.raises(UserError, match=second.name):
        read_gguf(first)
    write(second, tensors[3:], 1)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(read_gguf(first)[1]), params)
    with pytest.raises(UserError, match="the first of them"):
        read_gguf(second)
    write(second, tensors[3:], 0)
    with pytest.raises(UserError, match="says that it is part 0"):
        read_gguf(first)
    write(second, [(name, 2 * tensor) for name, tensor in tensors[3:]], 1)
    again = unstack_layers(read_gguf(first)[1])
    np.testing.assert_array_equal(again["layers_1"]["mlp_norm"]["scale"], 2 * params["layers_1"]["mlp_norm"]["scale"])


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "model.gguf"
    words = {"model": "gpt2", "tokens": TOKENS, "merges": ["a b"], "token_type": [3] + 10 * [1]}
    tensors = gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA))

    def written(tensors):
        write_gguf(path, GGUF_LLAMA, tensors, **{f"tokenizer__ggml__{name}": value for name, value in words.items()})
        return orthojax.load(path)

    loaded = written(tensors)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode_batch(["cab"])[0].tolist() == [3, 10]
    scale = np.array(loaded.params["final_norm"]["scale"])
    # The same file with other numbers, of the same size.
    again = written(tensors | {"output_norm.weight": 2 * tensors["output_norm.weight"]})
    np.testing.assert_array_equal(again.params["final_norm"]["scale"], 2 * scale)
    np.testing.assert_array_equal(loaded.params["final_norm"]["scale"], scale)


def test_the_frequencies_of_llama_3_are_recognised(tmp_path):
    factor = 32.0
    plain = rotary_frequencies(GGUF_LLAMA.head_dim, GGUF_LLAMA.rope_theta)
    factors = np.asarray(plain / llama3_frequencies(plain, factor, 8192), np.float32)
    config, _ = read_with(tmp_path, {"rope_freqs.weight": factors})
    assert config.rope == RopeConfig(scaling="llama3", factor=factor, original_length=8192)
    assert orthojax.load(tmp_path / "model.gguf").tokenizer is None  # the file has none
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        read_with(tmp_path, {"rope_freqs.weight": 1.5 * factors})


def read_with(folder, tensors=None, damage=lambda content: content, **options):
    """Reads a file with other tensors, metadata or bytes."""
    path, tensors = folder / "model.gguf", gguf_tensors(GGUF_LLAMA, random_params(GGUF_LLAMA)) | (tensors or {})
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_gguf(path, GGUF_LLAMA, tensors, **options)
    path.write_bytes(damage(path.read_bytes()))
    return read_gguf(path)


ARRAY = b"llama.attention.head_count_kv"  # then: type 9, type of its elements, count


def read_overwritten(folder, name, offset, written):
    """Reads a file of which some bytes after a name are others."""

    def damage(content):
        place = content.index(name) + len(name) + offset
        return content[:place] + written + content[place + len(written) :]

    read_with(folder, damage=damage, quantized={}, llama__attention__head_count_kv=[2, 2])


TWO = np.ones(2, np.float32)


test_refused = refused(
    (lambda d, damage: read_with(d, damage=damage), [
        (damage, "model.gguf") for damage in (
            lambda content: content[: len(content) * 9 // 10], lambda content: content[: len(content) // 20],
            lambda content: b"", lambda content: b"GGML" + content[4:],
            lambda content: content[:16] + struct.pack("<Q", 2**60) + content[24:])]),
    (read_overwritten, [
        (ARRAY, 8, struct.pack("<Q", 2**62), "head_count_kv, 4,611,686,018,427,387,904 values, needs"),
        (ARRAY, 4, struct.pack("<IQ", 0, 2**62), "needs 4,611,686,018,427,387,904 bytes"),
        (ARRAY, 4, struct.pack("<I", 9), "an array of arrays"), (ARRAY, 4, struct.pack("<I", 77), "unknown type 77"),
        (b"general.architecture", 4, struct.pack("<Q", 2**40), "general.architecture needs"),
        (b"blk.1.ffn_norm.weight", 4 + 8 + 4, struct.pack("<Q", 0), "begins inside of"),  # a shared offset
        (b"llama.context_length", 4, struct.pack("<I", 0), "context_length=0")]),
    (read_with, [
        ({"blk.0.attn_q.lora": TWO}, "blk.0.attn_q.lora"), ({"blk.1.ffn_norm.weight": None}, "blk.1.ffn_norm.weight"),
        ({"blk.9.attn_output.weight": TWO}, "blk.9.attn_output.weight")]),
    (lambda d, options: read_with(d, **options), [
        ({"architecture": "mamba"}, "mamba"), ({"architecture": "gemma22"}, "did you mean 'gemma2'"),
        ({"llama__logit_scale": "2"}, "llama.logit_scale"), ({"llama__rope__scaling__type": "yarn"}, "factor"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon"),
        ({"architecture": "olmo2", "olmo2__attention__sliding_window": 3}, "olmo2.attention.sliding_window"),
        ({"llama__attention__head_count_kv": [2, 4]}, "differs between layers")]),
    (lambda d: load_tokenizer(tokenizer_file(d / "model.gguf", pre="tekken")), "'tekken'"),
)  # fmt: skip


# Tokenizers. GPT-2's 256 bytes come first, so that "!" is 0 and a space 220, then merges and other tokens.

BYTES = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = {"\u0120 !": "\u0120!", "1 2": "12", "3 4": "34", "12 3": "123", "a b": "ab", "z Z": "zZ"}
WORDS = [*BYTES, *MERGES.values(), "<think>", "   ", "<|endoftext|>"]
IDS = {word: i for i, word in enumerate(WORDS)} | {" ": 220}
TOKEN_TYPES = [1] * (len(WORDS) - 3) + [4, 4, 3]  # normal, user-defined, control


def tokenizer_file(path, **metadata):
    """Writes a .gguf file of a tokenizer and no tensors."""
    words = {"model": "gpt2", "tokens": WORDS, "merges": list(MERGES), "token_type": TOKEN_TYPES} | metadata
    named = {f"tokenizer__ggml__{name}": value for name, value in words.items() if value is not None}
    write_gguf(path, GGUF_LLAMA, {}, **named)
    return path


@pytest.mark.parametrize(("split", "text", "words"), [
    # The ids of llama.cpp.
    ("gpt-2", " !", ["\u0120!"]),
    ("default", " !", [" ", "!"]),
    (None, " !", [" ", "!"]),
    ("gpt-2", "1234", ["12", "34"]),
    ("default", "1234", ["123", "4"]),
    ("llama-bpe", "1234", ["123", "4"]),
    ("qwen2", "1234", ["1", "2", "3", "4"]),
    ("smollm", "ab12", ["ab", "1", "2"]),
    ("llama-bpe", "zZZ1234", ["zZ", "Z", "123", "4"]),
    ("gpt-4o", "zZZ1234", ["z", "Z", "Z", "123", "4"]),
    *((split, "ab<think>!", ["ab", "<think>", "!"]) for split in ("gpt-2", "llama-bpe", "qwen2")),
    ("gpt-2", "!   !", ["!", "   ", "!"]),
    ("gpt-2", "<|endoftext|>", list("<|endoftext|>")),  # text that mentions it
])  # fmt: skip
def test_text_is_cut_as_llama_cpp_cuts_it(split, text, words, tmp_path):
    tokenizer = load_tokenizer(tokenizer_file(tmp_path / "model.gguf", pre=split))
    ids = tokenizer.encode_batch([text])[0].tolist()
    assert ids == [IDS[word] for word in words]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("metadata", "begins"), [
    ({"pre": "llama-bpe"}, True),
    ({"pre": "llama3"}, True),
    ({"pre": "llama3", "add_bos_token": 0}, False),
    ({"pre": "qwen2"}, False),
    ({}, False),
    ({"pre": "smollm", "add_bos_token": 1}, True),
    ({"model": "llama"}, True),
])  # fmt: skip
def test_texts_begin_with_bos_as_in_llama_cpp(metadata, begins, tmp_path):
    assert begins_with_bos(tokenizer_file(tmp_path / "model.gguf", **metadata)) == begins


def test_a_sentencepiece_model_in_a_file_is_that_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    content = io.BytesIO()
    text = ["some words, some more words and others", "10 + 32 is 42", "a b ab  abc"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=content, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"], minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    pieces = sentencepiece_model_pb2.ModelProto.FromString(content.getvalue()).pieces
    words = {"tokens": [of.piece for of in pieces], "scores": [of.score for of in pieces],
             "token_type": [of.type for of in pieces]}  # fmt: skip
    tokenizer = load_tokenizer(tokenizer_file(tmp_path / "model.gguf", model="llama", merges=None, **words))
    for given in ("some words", "  two  spaces ", "na\u00efve \u5317", "<s> is text", "", "a<think>b"):
        ids = tokenizer.encode_batch([given])[0].tolist()
        assert ids == theirs.encode(given)
        assert tokenizer.decode(ids) == given
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, len(pieces))
    assert tokenizer.special_ids == (1, 2)
    wrong = tokenizer_file(tmp_path / "wrong.gguf", model="llama", merges=None, **words | {"scores": [0.5]})
    with pytest.raises(UserError, match="no whole tokenizer"):
        load_tokenizer(wrong)


TEMPLATE = """{% for m in messages %}
{% if m.role != "user" %}{{ raise_exception("no " + m.role) }}{% endif %}
[{{ m.role }}] {{ m.content }}
{% endfor %}{% if add_generation_prompt %}{{ eos_token }}{% endif %}"""


def test_a_chat_is_rendered_by_the_template_of_the_file(tmp_path):
    path = tokenizer_file(tmp_path / "model.gguf", chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        chat_template(path)
    end = IDS["<|endoftext|>"]
    words = {"tokenizer__ggml__tokens": WORDS, "tokenizer__ggml__eos_token_id": end}
    write_gguf(path, GGUF_LLAMA, {}, tokenizer__chat_template=TEMPLATE, **words)
    tokenizer, template = load_tokenizer(tokenizer_file(tmp_path / "words.gguf")), chat_template(path)
    text = render_chat(template, [{"role": "user", "content": "ab!"}])
    assert text == "[user] ab!\n<|endoftext|>"
    ids = tokenizer.encode_special(text).tolist()
    assert ids[-1] == IDS["<|endoftext|>"]
    assert len(tokenizer.encode_batch([text])[0]) > len(ids)  # where its name is text
    assert tokenizer.decode(ids) == "[user] ab!\n"
    with pytest.raises(UserError, match="no tool"):
        render_chat(template, [{"role": "tool", "content": ""}])
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    long = (
        "{{ 'a' * 10**10 }}",
        "{{ messages | tojson(indent=10**10) }}",
        "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
    )
    for wrong in ("{% if %}", "{{ 'a' + 1 }}", loops, *long, "{{ '\\ud800' }}"):
        with pytest.raises(UserError, match=r"chat template (refuses|gives)"):
            render_chat(template._replace(source=wrong), [{"role": "user", "content": "a"}], seconds=1)


def test_chat_templates_of_folders(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert chat_template(tmp_path) == ("one", "", "")
    several = [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert chat_template(tmp_path).source == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert chat_template(tmp_path).source == "four"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        chat_template(tmp_path)
