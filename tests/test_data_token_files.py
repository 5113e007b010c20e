"""Token files: the bytes in them, what their sidecars say, and that a wrong one is refused."""

import hashlib
import json

import numpy as np
import pytest

from orthojax.data import Part, prepare
from orthojax.data.preparation import open_token_file, sidecar_path, write_token_file
from orthojax.data.sources import Document, Piece, Source
from orthojax.data.tokenizers import ByteTokenizer


def make(path, texts=("hé", "x")):
    """A token file of some texts."""
    piece = Piece(lambda: ((Document("", text), 1) for text in texts), 1)
    part = Part(path.stem, "train", Source("test", "abc", (piece,)), lambda document: document.text)
    return prepare(path.parent, [part], "bytes")[0]


def test_contents_and_sidecar_are_these_bytes(tmp_path):
    file = make(tmp_path / "train.bin")
    assert file.tokens.tolist() == [104, 195, 169, 257, 120, 257]
    assert isinstance(file.tokens, np.memmap)
    assert not file.tokens.flags.writeable
    raw = (tmp_path / "train.bin").read_bytes()
    assert raw == bytes([104, 0, 195, 0, 169, 0, 1, 1, 120, 0, 1, 1])  # little-endian
    assert json.loads(sidecar_path(file.path).read_text()) == {
        "format_version": 2,
        "dtype": "uint16",
        "n_tokens": 6,
        "n_bytes": 4,
        "n_documents": 2,
        "vocab_size": 258,
        "bos_id": 256,
        "eos_id": 257,
        "tokenizer": "bytes",
        "tokenizer_sha256": ByteTokenizer().sha256,
        "source": "test",
        "source_sha256": "abc",
        "file_count": 1,
        "split": "train",
        "data_sha256": hashlib.sha256(raw).hexdigest(),
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "train.bin", "train.json"]


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_ids_have_the_width_of_the_sidecar(tmp_path, dtype, size):
    make(tmp_path / "train.bin")
    created_from = json.loads((tmp_path / "train.json").read_text()) | {"dtype": dtype}
    del created_from["data_sha256"]
    write_token_file(tmp_path / "b.bin", created_from, [(np.array([5, 65_535, 257], np.int32), 1, 9)] * 2)
    file = open_token_file(tmp_path / "b.bin", verify=True)
    assert (file.tokens.tolist(), file.tokens.dtype) == ([5, 65_535, 257] * 2, dtype)
    assert (file.info.n_tokens, file.info.n_documents, file.info.n_bytes) == (6, 2, 18)
    assert file.path.stat().st_size == 6 * size
