"""The BOS and end tokens that the files of a published model declare."""

import json

import pytest
import tokenizers as hf

from orthojax.data.tokenizers import from_json
from orthojax.pretrained import begins_with_bos, with_declared_tokens


def word_level(*special):
    """Makes a tokenizer of a few words and these special tokens, whose ids come first."""
    backend = hf.Tokenizer(hf.models.WordLevel({word: len(special) + i for i, word in enumerate("abc")}, unk_token="a"))
    backend.add_special_tokens(list(special))
    whole = json.loads(backend.to_str())
    whole["model"]["vocab"] |= {word: i for i, word in enumerate(special)}
    whole["added_tokens"] = [of | {"id": i} for i, of in enumerate(whole["added_tokens"])]
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("files", "bos_id", "ends"),
    [
        ({}, 0, {1}),
        ({"tokenizer_config.json": {"bos_token": "</s>", "eos_token": {"content": "<|eot_id|>"}}}, 1, {1, 2}),
        ({"config.json": {"bos_token_id": 2, "eos_token_id": 2}}, 2, {1, 2}),
        ({"generation_config.json": {"eos_token_id": [1, 2]}, "tokenizer_config.json": {"bos_token": None}}, 0, {1, 2}),
        ({"config.json": {"bos_token_id": 99, "eos_token_id": None}}, 0, {1}),
    ],
)
def test_bos_and_ends_are_those_a_model_declares(tmp_path, files, bos_id, ends):
    tokenizer = from_json(word_level("<s>", "</s>", "<|eot_id|>"), "mine", "here")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = with_declared_tokens(tokenizer, tmp_path)
    assert (found.bos_id, found.ends, found.eos_id) == (bos_id, ends, 1)
    assert found.sha256 == tokenizer.sha256


LLAMA = {"tokenizer_class": "LlamaTokenizer"}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
BYTES = {"type": "ByteLevel", "add_prefix_space": False}


@pytest.mark.parametrize(
    ("files", "begins"),
    [
        ({}, False),
        ({"tokenizer_config.json": {"add_bos_token": True}}, True),
        ({"tokenizer_config.json": {"add_bos_token": False}, "tokenizer.json": {"post_processor": TEMPLATE}}, False),
        ({"tokenizer.json": {"post_processor": TEMPLATE}}, True),
        ({"tokenizer.json": {"post_processor": {"type": "Sequence", "processors": [BYTES, TEMPLATE]}}}, True),
        ({"tokenizer.json": {"post_processor": BYTES}, "tokenizer_config.json": LLAMA}, False),
        ({"tokenizer.json": {"post_processor": {"single": [5]}}}, False),
        ({"tokenizer.json": {"post_processor": TEMPLATE | {"single": TEMPLATE["single"][1:]}}}, False),
        ({"tokenizer.model": {}, "tokenizer_config.json": LLAMA}, True),
    ],
)
def test_texts_begin_with_bos_as_a_model_declares(tmp_path, files, begins):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert begins_with_bos(tmp_path) == begins
