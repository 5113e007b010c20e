"""Tiny random models of transformers beside ours: logits, hidden states and attention weights, read from their files.

Needs the extra `parity` and is left out of the README's test command:

    pip install -e .[parity] && python -m pytest -m parity
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import model_oracle
import numpy as np
import pytest
import test_generation
from model_oracle import LLAMA2, stacked_params
from model_oracle import SMALL as SMALLEST
from test_gguf_files import IDS, tokenizer_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from orthojax.config import ModelConfig, RopeConfig
from orthojax.data.chat import chat_template, render_chat
from orthojax.data.tokenizers import from_json, load_tokenizer
from orthojax.errors import UserError
from orthojax.model import Transformer, gpt2
from orthojax.pretrained import FAMILIES, begins_with_bos, computed_as, read_folder, read_folder_config, write_folder
from orthojax.pretrained.export import as_family, field_without_code

pytestmark = [pytest.mark.parity, pytest.mark.slow]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

V, T = 50, 24
BOS = IDS["<|endoftext|>"]
SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 64}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
DEEPSEEK = SMALL | {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
                    "moe_intermediate_size": 12, "first_k_dense_replace": 1}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK | {"num_key_value_heads": 4, "n_group": 3, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 40.0, "beta_fast": 8, "beta_slow": 1, "mscale": 0.9,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 64}  # fmt: skip
GPT_OSS = GROUPED | {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5,
                     "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "truncate": False,
                                         "original_max_position_embeddings": 8}}  # fmt: skip
GEMMA2 = GROUPED | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "attn_logit_softcapping": 2.0,
                    "final_logit_softcapping": 3.0}  # fmt: skip
GEMMA3 = {name: value for name, value in GEMMA2.items() if "softcapping" not in name} | {"sliding_window_pattern": 2}
QWEN3_MOE = GROUPED | {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
QWEN2_MOE = QWEN3_MOE | {"shared_expert_intermediate_size": 20}
PHI3 = GROUPED | {"pad_token_id": 0}
SMOLLM3 = PHI3 | {"no_rope_layer_interval": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0]}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
GPT2_SIZES = {"vocab_size": V, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
GRANITE = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.5, "logits_scaling": 3.7}
COHERE2 = PHI3 | {"sliding_window": 5, "sliding_window_pattern": 2, "logit_scale": 0.25}
# name: (model_type, fields of its config)
CASES = {
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt2 untied, exact GELU": ("gpt2", GPT2_SIZES | {"tie_word_embeddings": False, "activation_function": "gelu",
                                                      "n_inner": 40}),
    "llama 1 and 2": ("llama", SMALL),
    "llama 3.1": ("llama", GROUPED | {"rope_parameters": LLAMA3}),
    "llama 3.2": ("llama", GROUPED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear scaling": ("llama", SMALL | {"rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                                                    "rope_theta": 100.0}}),
    "mistral": ("mistral", GROUPED | {"sliding_window": 7, "head_dim": 6}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2 with windows": ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5,
                                               "max_window_layers": 0}),
    "qwen2 with late windows": ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5,
                                                    "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3 with windows, one key-value head": ("qwen3", SMALL | {
        "num_key_value_heads": 1, "head_dim": 12, "use_sliding_window": True, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 12}),
    "olmo": ("olmo", GROUPED),
    "olmo2": ("olmo2", GROUPED),
    "qwen2, yarn": ("qwen2", GROUPED | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                                                            "original_max_position_embeddings": 16}}),
    "deepseek_v2 lite": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": 14, "topk_method": "group_limited_greedy", "n_group": 3,
                                               "topk_group": 2, "routed_scaling_factor": 3.0}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3 | {"q_lora_rank": 14}),
    "deepseek_v3, every switch": ("deepseek_v3", DEEPSEEK_V3 | {
        "q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
        "rope_parameters": YARN, "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, default rope, tied": ("gpt_oss", GPT_OSS | {
        "rope_parameters": None, "tie_word_embeddings": True, "attention_bias": False, "head_dim": 8,
        "num_key_value_heads": 1, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "gemma, one key-value head": ("gemma", SMALL | {"num_key_value_heads": 1, "head_dim": 12}),
    "gemma, untied, biases": ("gemma", GROUPED | {"head_dim": 8, "tie_word_embeddings": False,
                                                  "attention_bias": True}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2, full attention, no caps": ("gemma2", GEMMA2 | {
        "layer_types": ["full_attention"] * 3, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, stretched, capped": ("gemma3_text", GEMMA3 | {
        "final_logit_softcapping": 2.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2_moe, every switch": ("qwen2_moe", QWEN2_MOE | {
        "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False, "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe, some layers dense, normalised": ("qwen3_moe", QWEN3_MOE | {
        "norm_topk_prob": True, "decoder_sparse_step": 2, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 5}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": 6}),
    "olmoe": ("olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe, normalised": ("olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True,
                                            "tie_word_embeddings": True}),
    "phi3": ("phi3", PHI3 | {"sliding_window": 6}),
    "phi3, longrope": ("phi3", PHI3 | {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "phi3, longrope, longer": ("phi3", PHI3 | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE | {
        "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]}}),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3 with windows and biases": ("smollm3", SMOLLM3 | {
        "use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1, 0], "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": False}),
    "llama with biases of attention": ("llama", GROUPED | {"attention_bias": True, "head_dim": 12}),
    "llama with all biases, one key-value head": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True,
                                                                    "num_key_value_heads": 1}),
    "qwen3 with biases": ("qwen3", GROUPED | {"head_dim": 12, "attention_bias": True}),
    "gpt2, gelu_fast": ("gpt2", GPT2_SIZES | {"activation_function": "gelu_fast"}),
    "llama, dynamic": ("llama", GROUPED | {"rope_parameters": DYNAMIC}),
    "llama, dynamic, longer": ("llama", GROUPED | {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "llama, longrope with a factor": ("llama", SMALL | {"rope_parameters": LONGROPE | {
        "attention_factor": 1.3, "original_max_position_embeddings": 16, "factor": 4.0}}),
    "llama, yarn with mscales": ("llama", GROUPED | {"rope_parameters": YARN | {"factor": 4.0}}),
    "olmo2, yarn, attention_factor": ("olmo2", GROUPED | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "attention_factor": 1.2, "truncate": False,
        "original_max_position_embeddings": 16}}),
    "olmo3": ("olmo3", GROUPED | {"num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3, stretched": ("olmo3", GROUPED | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                            "full_attention": YARN | {"factor": 4.0, "mscale": None, "mscale_all_dim": None}}}),
    "seed_oss": ("seed_oss", GROUPED | {"head_dim": 12}),
    "seed_oss without biases": ("seed_oss", GROUPED | {
        "head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("glm4", GROUPED | {"head_dim": 12, "pad_token_id": 0}),
    "glm4, no biases, yarn": ("glm4", SMALL | {
        "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0, "attention_bias": False, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "rope_parameters": YARN | {"factor": 4.0, "partial_rotary_factor": 0.75}}),
    "granite": ("granite", GROUPED),
    "granite, multipliers and biases": ("granite", GROUPED | GRANITE | {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12,
        "rope_parameters": LLAMA3}),
    "cohere2": ("cohere2", COHERE2),
    "cohere2, some layers without windows, biases": ("cohere2", COHERE2 | {
        "head_dim": 12, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.7, "rope_theta": 100.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "granite_swa": ("granite_swa", GROUPED | {
        **GRANITE, "sliding_window": 5, "layer_rope_theta": [100.0, 0, 100.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "pythia": ("gpt_neox", SMALL),
    "gpt_neox in series": ("gpt_neox", SMALL | {"use_parallel_residual": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}),
    "opt": ("opt", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
}  # fmt: skip


def foreign_model(model_type, fields, seed=0):
    """Makes a model of transformers with every parameter random, norms and biases included."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    size = 0.2 if "deepseek" in model_type else 0.3  # logits of its attention have four kernels each, and two norms
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            norm = "norm" in name or "ln_" in name
            parameter.copy_((1.0 if norm and name.endswith("weight") else 0.0) + size * torch.randn_like(parameter))
    return model


def reloaded(folder, **options):
    transformers = pytest.importorskip("transformers")
    options |= {"dtype": "float32", "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def foreign_outputs(model, tokens):
    import torch

    with torch.no_grad():
        seen = model(torch.tensor(tokens), output_hidden_states=True, output_attentions=True)
    to_numpy = lambda several: [x if x is None else x.float().numpy() for x in several]  # noqa: E731
    return seen.logits.float().numpy(), to_numpy(seen.hidden_states), to_numpy(seen.attentions)


def our_outputs(config, params, tokens):
    with jax.default_matmul_precision("highest"):
        logits, seen = Transformer(config).apply(
            {"params": params}, jnp.asarray(tokens), observe=lambda taps: (taps.residual, taps.attention_weights)
        )
    return np.asarray(logits), *map(np.asarray, seen)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, V, (2, T))


def close(ours, theirs, atol=1e-4):
    scale = max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(ours / scale, theirs / scale, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_transformers_which_reads_what_is_exported(name, tokens, tmp_path):
    model = foreign_model(*CASES[name])
    model.save_pretrained(tmp_path / "there")
    config, params = read_folder(tmp_path / "there")
    logits, residuals, weights = our_outputs(config, params, tokens)
    their_logits, their_residuals, their_weights = foreign_outputs(model, tokens)
    assert np.abs(their_logits).max() > 1
    close(logits, their_logits, 2e-5)
    for ours, theirs in zip(residuals[:-1], their_residuals[1:-1], strict=True):  # the last one has the final norm
        close(ours, theirs)
    if name == "granite_swa":  # whose weights are from before its sinks
        weights = weights / weights.sum(-1, keepdims=True)
    for ours, theirs in zip(weights, their_weights, strict=True):
        close(ours, theirs)
    written = write_folder(tmp_path / "back", config, params)
    assert written in FAMILIES  # an OPT model is a GPT-2 with another activation, a Mistral without windows a Llama
    again, same = read_folder(tmp_path / "back")
    assert computed_as(again) == computed_as(config)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    close(logits, foreign_outputs(reloaded(tmp_path / "back"), tokens)[0])


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3", "mixtral", "phi3", "llama 3.1"])
def test_shards_of_bfloat16(name, tokens, tmp_path):
    foreign_model(*CASES[name]).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    if name == "llama 3.1":  # with older fields
        given = json.loads((tmp_path / "config.json").read_text())
        rope = given.pop("rope_parameters")
        given |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        (tmp_path / "config.json").write_text(json.dumps(given))
    # Read again, since the frequencies of a model in bfloat16 are rounded as well.
    close(our_outputs(*read_folder(tmp_path), tokens)[0], foreign_outputs(reloaded(tmp_path), tokens)[0])


@pytest.mark.parametrize("kind", ["headwise", "elementwise"])
def test_gated_attention_of_qwen(kind, tokens, tmp_path):
    """Gates the heads of a model of transformers by hooks; its file has rows of gates behind those of each group."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    model = foreign_model("qwen3", GROUPED | {"head_dim": 12})
    state, heads, groups, width = model.state_dict(), 4, 2, 12
    normed, torch_gates = {}, []
    for i, layer in enumerate(model.model.layers):
        gates = torch.randn(heads, 1 if kind == "headwise" else width, 32)
        torch_gates.append(gates)
        name = f"model.layers.{i}.self_attn.q_proj.weight"
        query, rows = state[name].reshape(heads, width, 32), []
        for group in np.split(np.arange(heads), groups):
            rows += [query[group].reshape(-1, 32), gates[group].reshape(-1, 32)]
        state[name] = torch.cat(rows)

        def keep(_, args, kwargs, i=i):
            normed[i] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        def gate(_, args, i=i):
            logits = torch.einsum("btd,hcd->bthc", normed[i], torch_gates[i])
            by_head = args[0].reshape(*args[0].shape[:2], heads, width)
            return ((by_head * torch.sigmoid(logits)).reshape(args[0].shape),)

        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        layer.self_attn.o_proj.register_forward_pre_hook(gate)
    given = model.config.to_dict() | {f"{kind}_attn_output_gate": True, "use_qk_norm": True, "qkv_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(given))
    save_file(state, tmp_path / "model.safetensors")
    config, params = read_folder(tmp_path)
    logits, residuals, _ = our_outputs(config, params, tokens)
    their_logits, their_residuals, _ = foreign_outputs(model, tokens)
    close(logits, their_logits)
    close(residuals[0], their_residuals[1])
    assert write_folder(tmp_path / "out", config, params) == "orthojax"  # which no qwen3 of transformers computes
    close(logits, foreign_outputs(reloaded(tmp_path / "out", trust_remote_code=True), tokens)[0])


# Models with code of their own.

WITHOUT_CODE = {"gpt-oss": "mlp", "latent attention and experts": "latent", "gated channels of latents": "latent",
                "query latents, groups of experts": "latent", "projected embeddings": "embedding_projection",
                "relu": "embedding_projection", "softmax": "rope"}  # fmt: skip
OWN = model_oracle.CONFIGS | test_generation.CONFIGS | {
    "cured": gpt2("tiny", **SMALLEST, normalizer="softmax1", norm="rmsnorm_single", use_bias=False),
    "yarn, biases, windows": ModelConfig(
        **SMALLEST | {"num_layers": 3}, position="rotary", use_bias="qkv", attention_window=(None, 3, 2),
        norm="rmsnorm", rotary_layers=(True, False, True), rope=RopeConfig(
            scaling="yarn", factor=4.0, original_length=8, mscale=0.7)),
}  # fmt: skip


def whole_and_in_pieces(model, tokens):
    """Logits of one pass, and of five tokens, two, and then one by one, with a cache."""
    import torch

    tokens, cache, pieces = torch.tensor(np.asarray(tokens)), None, []
    with torch.no_grad():
        for piece in (tokens[:, :5], tokens[:, 5:7], *tokens[:, 7:].split(1, 1)):
            seen = model(piece, past_key_values=cache, use_cache=True)
            cache = getattr(seen, "cache", None) or seen.past_key_values
            pieces.append(seen.logits)
        return model(tokens).logits.numpy(), torch.cat(pieces, 1).numpy()


@pytest.mark.parametrize("name", OWN)
def test_models_with_their_code_compute_the_same(name, tmp_path):
    config, tokens = OWN[name], test_generation.TOKENS
    if name in WITHOUT_CODE:
        assert field_without_code(config).startswith(f"model.{WITHOUT_CODE[name]}=")
        return
    params = stacked_params(config)
    assert write_folder(tmp_path / "there", config, params, code=True) == "orthojax"
    model = reloaded(tmp_path / "there", trust_remote_code=True)
    logits, residuals, weights = our_outputs(config, params, tokens)
    their_logits, their_residuals, their_weights = foreign_outputs(model, tokens)
    scale = max(1.0, np.abs(logits).max())
    for theirs in (their_logits, *whole_and_in_pieces(model, tokens)):
        np.testing.assert_allclose(theirs / scale, logits / scale, rtol=0, atol=1e-5)
    for ours, theirs in zip(residuals[:-1], their_residuals[1:-1], strict=True):
        close(ours, theirs)
    for ours, theirs in zip(weights, their_weights, strict=True):
        close(ours, np.zeros_like(ours) if theirs is None else theirs)
    model.save_pretrained(tmp_path / "back")
    assert (tmp_path / "back/modeling_orthojax.py").is_file()
    for folder in ("there", "back"):
        read, same = read_folder(tmp_path / folder)
        assert read == config
        jax.tree.map(np.testing.assert_array_equal, params, same)


def test_text_of_a_model_with_its_code_does_not_depend_on_padding_and_beams(tmp_path):
    torch = pytest.importorskip("torch")
    config = OWN["cured"]
    write_folder(tmp_path, config, stacked_params(config))
    model, options = reloaded(tmp_path, trust_remote_code=True), {"max_new_tokens": 6, "pad_token_id": 0}
    tokens = torch.tensor(test_generation.TOKENS[:, :5])
    padded = torch.cat([torch.zeros(len(tokens), 3, dtype=torch.long), tokens], 1)
    mask = (torch.arange(8) >= 3).long().expand(padded.shape)
    alone = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert alone.unique(dim=0).shape[0] > 1
    assert (model.generate(padded, attention_mask=mask, **options)[:, 3:] == alone).all()
    two = [model.generate(tokens, attention_mask=torch.ones_like(tokens), num_beams=2, use_cache=cached, **options)
           for cached in (True, False)]  # fmt: skip
    assert (two[0] == two[1]).all()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert model.layers[0].attention.query.weight.grad.abs().max() > 0


def test_the_lines_of_the_guide_write_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "The": 2} | {str(i): i for i in range(3, 11)}))
    backend.pre_tokenizer = Whitespace()
    config, tokenizer = OWN["cured"], from_json(backend.to_str(), "words", "a test")
    write_folder("exported", config, stacked_params(config), tokenizer, bos=True)
    guide = (Path(__file__).parents[1] / "docs/checkpoints.md").read_text()
    (lines,) = re.findall(r"```python\n(from transformers.*?)```", guide, re.DOTALL)
    exec(lines, scope := {})
    assert scope["text"].startswith("<s> The")
    assert len(scope["text"].split()) == 10


CURED = {"normalizer": "softmax1", "norm": "rmsnorm_single"}


@pytest.mark.parametrize(("changes", "family"), [
    (CURED, "granite_swa"),
    (CURED | {"num_kv_heads": 2, "d_head": 6, "tie_embeddings": True, "use_bias": "attention"}, "granite_swa"),
    ({"normalizer": "softmax_n", "normalizer_n": 2.5, "attention_window": (3, None), "rotary_layers": (False, True)},
     "granite_swa"),
    ({"norm": "rmsnorm_single", "embedding_projection": True}, "llama"),
    ({"norm": "rmsnorm_single", "qk_norm": "head"}, "qwen3"),
])  # fmt: skip
def test_a_family_holds_a_model_in_other_words(changes, family, tmp_path):
    config = dataclasses.replace(LLAMA2, **changes)
    params, tokens = stacked_params(config), test_generation.TOKENS
    plain, same = as_family(config, params)
    assert write_folder(tmp_path, plain, same) == family
    logits = our_outputs(config, params, tokens)[0]
    close(our_outputs(*read_folder(tmp_path), tokens)[0], logits)
    close(foreign_outputs(reloaded(tmp_path), tokens)[0], logits)


def test_the_text_model_of_a_gemma3_for_images(tokens, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=GEMMA3, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    logits, *_ = our_outputs(*read_folder(tmp_path), tokens)
    close(logits, foreign_outputs(model, tokens)[0])
    # Only what its class does not assume stands in published configs.
    given = json.loads((tmp_path / "config.json").read_text())
    given["text_config"] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "sliding_window": 5}
    (tmp_path / "config.json").write_text(json.dumps(given))
    plain = transformers.Gemma3TextConfig(**given["text_config"])
    with pytest.raises(UserError, match="token_embedding"):  # of another size
        read_folder(tmp_path)
    found = read_folder_config(tmp_path)
    assert (found.vocab_size, found.num_heads, found.kv_heads, found.head_dim, found.max_length) == (
        plain.vocab_size, plain.num_attention_heads, plain.num_key_value_heads, plain.head_dim,
        plain.max_position_embeddings)  # fmt: skip


def test_blocks_of_mxfp4_are_those_of_transformers():
    torch, mxfp4 = pytest.importorskip("torch"), pytest.importorskip("transformers.integrations.mxfp4")
    from orthojax.pretrained.folders import _read_mxfp4

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 4, 2, 16), dtype=np.uint8)
    scales = random.integers(110, 140, blocks.shape[:-1], dtype=np.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.testing.assert_array_equal(_read_mxfp4("x", lambda: blocks, lambda: scales), theirs.numpy())


# Text of .gguf files; llama.cpp's own tokenizer is in the package llama-cpp-python, which the extra does not have.

TEXTS = [" !", "1234", "12 34 567", "ab<think>!", "!     !", "<|endoftext|>", "don't DON'T we'll", "a\n\n b", "\t x",
         "x=1+2<=3|4~^$", "na\u00efve caf\u00e9 \u5317\u4eac 123456", "  a   b  ", "a\r\nb", "...!!!",
         "\u2460\u2461\u00bd", "e.g. (a)", "12.5%", "`code`"]  # fmt: skip


@pytest.mark.parametrize("split", ["default", "gpt-2", "llama-bpe", "llama-v3", "olmo", "qwen2", "smollm", None])
def test_text_is_cut_as_llama_cpp_cuts_it(split, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tokenizer_file(tmp_path / "model.gguf", pre=split, bos_token_id=BOS, eos_token_id=BOS)
    theirs, ours = llama_cpp.Llama(str(path), vocab_only=True, verbose=False), load_tokenizer(path)
    for text in TEXTS:
        expected = theirs.tokenize(text.encode(), add_bos=False, special=False)
        assert ours.encode_batch([text])[0].tolist() == expected, text
    assert begins_with_bos(path) == (theirs.tokenize(b"a")[0] == BOS)


def test_the_lines_of_the_guide_measure_a_model_of_transformers(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    backend.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "gpt2")
    foreign_model("gpt2", GPT2_SIZES).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text("a b " * 20)
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[1] / "docs/measure.md").read_text()
    (lines,) = re.findall(r"```python\n(import orthojax, torch\n.*?)```", guide, re.DOTALL)
    exec(lines.replace("openai-community/gpt2", "gpt2"), scope := {})
    assert len(scope["hidden"]) == len(scope["weights"]) == 2  # of three layers, the last with its final norm
    assert "kurtosis_first" in capsys.readouterr().out


MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " Hi\n<s> there "}]
TEMPLATES = {
    "tools": "{% for m in messages %}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
             "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "chatml": "{% for m in messages %}{{'<s>' + m['role'] + '\n' + m['content'] + '</s>' + '\n'}}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {%- if loop.first %}\n{{ m.content | trim }}\n"
              "    {%- else %}\n{{ m | tojson }}{{ eos_token }}\n    {%- continue %}\n    {%- endif %}\n"
              "{%- endfor %}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    backend.pre_tokenizer = Whitespace()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    text = render_chat(chat_template(tmp_path), MESSAGES)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode_special(text).tolist() == ids
