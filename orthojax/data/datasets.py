"""From a config to tokens: corpus, tokenizer and token files, made once and kept in a cache folder."""

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from orthojax.config import DataConfig
from orthojax.data.corpus import Corpus, embedded_corpus, text_corpus
from orthojax.data.token_files import FORMAT_VERSION, Progress, prepare
from orthojax.data.token_shards import TokenFiles, Tokens, open_token_files
from orthojax.data.tokenizers import make_tokenizer, tokenizer_identity
from orthojax.errors import UserError

# Goes up with any change of the rules of corpora, splits or tokenizers, so that old caches are not taken for new ones.
RULES_VERSION = 3


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Tokens to train and to validate on, whatever they came from.

    Attributes:
      vocab_size: One more than the largest possible id.
      bos_id: Id that starts a row where rows start with one.
      eos_id: Id that follows every document.
      train: uint16 or uint32 [n], a read-only memory map or, of several files, what reads as one.
      validation: The same of the validation split.
      validation_bytes: UTF-8 bytes of the validation text; bits per byte are nats per token / ln 2 times
        len(validation) / validation_bytes.
      tokenizer_path: The tokenizer, for `orthojax.data.tokenizers.load_tokenizer`; None where only its ids are here.
      provenance: JSON values that say what the tokens are: names, counts and sha256s of source, tokenizer and files.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    train: Tokens
    validation: Tokens
    validation_bytes: int
    tokenizer_path: Path | None
    provenance: dict[str, Any]


def open_dataset(config: DataConfig, cache_dir: str | Path, *, progress: Progress | None = None) -> Dataset:
    """Opens the tokens that a config names, tokenising the text the first time.

    The cache has one folder for every corpus (by sha256) and tokenizer, so a change of either makes a new one. A
    folder is made aside and renamed when complete: of two processes that make the same one, the first wins.

    Args:
      config: Of kind `embedded`, `text` or `tokens`.
      cache_dir: Folder of tokenised corpora; not used for kind `tokens`.
      progress: Called now and then while tokenising.

    Raises:
      UserError: For anything wrong with the files, the tokenizer or the cache folder.
      ValueError: For kind `bigram_backcopy`, which has no token files.
    """
    if config.kind == "tokens":
        dataset = open_pair(Path(config.paths[0]), Path(config.paths[1]), verify=config.verify)
        _require_tokenizer(config.tokenizer, dataset)
        return dataset
    if config.kind == "bigram_backcopy":
        raise ValueError("bigram_backcopy is generated: see orthojax.data.bigram_backcopy")
    identity = tokenizer_identity(config.tokenizer)
    corpus = embedded_corpus() if config.kind == "embedded" else text_corpus(config.paths)
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, RULES_VERSION, corpus.kind, corpus.sha256, identity]).encode())
    short = "file" if identity.startswith("sha256:") else identity.replace(":", "")
    folder = Path(cache_dir) / f"{corpus.kind}-{short}-{key.hexdigest()[:16]}"
    if not folder.is_dir():
        build_dataset(folder, corpus, config.tokenizer, progress)
    return open_pair(folder / "train.bin", folder / "validation.bin", verify=config.verify)


def build_dataset(folder: Path, corpus: Corpus, tokenizer_spec: str, progress: Progress | None) -> None:
    """Makes a folder with the tokens of one corpus, complete or not at all.

    Args:
      folder: Gets `tokenizer.json`, `train.bin` and `validation.bin` with their sidecars.
      corpus: What is tokenised; it splits itself.
      tokenizer_spec: As `DataConfig.tokenizer`.
      progress: Called now and then.

    Raises:
      UserError: For an empty split, a bad tokenizer or a folder that cannot be written.
    """
    splits = dict(zip(("train", "validation"), corpus.split(), strict=True))
    n_bytes = {split: sum(len(document.text.encode()) for document in part) for split, part in splits.items()}
    if progress and tokenizer_spec.startswith("bpe:"):
        progress(f"training {tokenizer_spec}", 0, n_bytes["train"])
    # The tokenizer sees the train split only, as the model does.
    tokenizer = make_tokenizer(tokenizer_spec, (document.text for document in splits["train"]))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        tokenizer.save(partial / "tokenizer.json")
        for split, documents in splits.items():
            prepare(
                documents,
                tokenizer,
                partial / f"{split}.bin",
                split=split,
                source=corpus.description,
                source_sha256=corpus.sha256,
                file_count=corpus.file_count,
                total_bytes=n_bytes[split],
                progress=progress,
            )
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its files are the same
                raise
    except OSError as error:
        raise UserError(f"cannot write the data cache {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_pair(train_path: Path, validation_path: Path, *, verify: bool = False) -> Dataset:
    """Opens a train and a validation token file, or all shards of each: see `orthojax.data.token_shards`.

    A tokenizer.json beside the train file has to be the one that made it.

    Args:
      train_path: As `open_token_files`.
      validation_path: The same.
      verify: Compare the sha256 of every file, which reads them whole.

    Raises:
      UserError: Where a file is missing or damaged, or they do not belong together.
    """
    train, validation = open_token_files(train_path, verify=verify), open_token_files(validation_path, verify=verify)
    if train.info.tokenizer_sha256 != validation.info.tokenizer_sha256:
        raise UserError(
            f"{train_path} and {validation_path} were made with different tokenizers "
            f"({train.info.tokenizer}, {validation.info.tokenizer})",
            allowed="two files with the same tokenizer sha256",
        )
    if train.info.split == "validation" and validation.info.split == "train":
        raise UserError(
            f"{train_path} is a validation split and {validation_path} a train split",
            allowed="data.paths=TRAIN.bin,VALIDATION.bin",
        )
    if train.info.data_sha256 == validation.info.data_sha256:
        raise UserError(
            f"{train_path} and {validation_path} hold the same tokens", allowed="data.paths=TRAIN.bin,VALIDATION.bin"
        )
    return Dataset(
        vocab_size=train.info.vocab_size,
        bos_id=train.info.bos_id,
        eos_id=train.info.eos_id,
        train=train.tokens,
        validation=validation.tokens,
        validation_bytes=validation.info.n_bytes,
        tokenizer_path=_tokenizer_beside(train),
        provenance={
            "source": train.info.source,
            "source_sha256": train.info.source_sha256,
            "file_count": train.info.file_count,
            "tokenizer": train.info.tokenizer,
            "tokenizer_sha256": train.info.tokenizer_sha256,
            "train": _facts(train),
            "validation": _facts(validation),
        },
    )


def _require_tokenizer(spec: str, dataset: Dataset) -> None:
    """Refuses token files of another tokenizer than the config names; its default names none."""
    made_with, sha256 = dataset.provenance["tokenizer"], dataset.provenance["tokenizer_sha256"]
    if spec == DataConfig.tokenizer:
        return
    if spec.startswith("bpe:"):
        same = tokenizer_identity(spec) == made_with
    else:
        same = make_tokenizer(spec, ()).sha256 == sha256
    if not same:
        raise UserError(
            f"data.tokenizer={spec} is not what made the token files: that is {made_with}, sha256 {sha256}",
            allowed="its name or path, or the default, which takes any",
        )


def _tokenizer_beside(train: TokenFiles) -> Path | None:
    path = train.path.parent / "tokenizer.json"
    if not path.is_file():
        return None
    if hashlib.sha256(path.read_bytes()).hexdigest() != train.info.tokenizer_sha256:
        raise UserError(
            f"{path} is not the tokenizer of {train.path}: its sha256 is another one",
            hint="put the right one back, or delete it: training needs the ids only",
        )
    return path


def _facts(file: TokenFiles) -> dict[str, Any]:
    info = file.info
    return {
        "n_tokens": info.n_tokens,
        "n_bytes": info.n_bytes,
        "n_documents": info.n_documents,
        "data_sha256": info.data_sha256,
    }
