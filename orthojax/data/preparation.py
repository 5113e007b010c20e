"""Folders of token files, made from text of any size for orthojax prepare and for the cache of data sets.

The folder gets `tokenizer.json`, and for each split `NAME.bin` with its sidecar, or one shard of it. Calls with the
same tokenizer share a folder, whether they make other splits or other shards, also at the same time. A file appears
under its name when it is complete, and is then kept; a call that was killed starts over with the others.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orthojax.data.sources import Document, Piece, Source, embedded_corpus, text_corpus
from orthojax.data.tfds import find_folder, open_tfds
from orthojax.data.token_files import (
    FORMAT_VERSION,
    TokenFile,
    TokenWriter,
    open_token_file,
    shard_path,
    sidecar_path,
    token_dtype,
)
from orthojax.data.tokenizers import BOS, EOS, Tokenizer, load_tokenizer, make_tokenizer, tokenizer_identity
from orthojax.errors import UserError
from orthojax.files import make_folder, write_text

_BPE_SAMPLE_BYTES = 1 << 26  # on disk: of a larger source, a BPE is trained on a part, the same for any --shard
_TEXTS_FOR_THE_RULE = 4096
_PASSAGE_LENGTHS = (40, 110)  # characters of a passage, uniform
_THRICE = 0.3  # of the repeated passages
_BATCH_CHARACTERS = 1 << 20  # text tokenised at once, which bounds memory and paces the progress
_LONGEST_TEXT = 1 << 22  # characters; a longer document is tokenised in pieces

Progress = Callable[..., Any]  # (what is being done, bytes of the source done, bytes in total, tokens so far)


@dataclasses.dataclass(frozen=True)
class HoldOut:
    """A rule that divides documents into train and validation, found once, that holds for each document alone.

    `name` holds out files by the sha256 of their names, 3 in 32; `text` documents by the sha256 of their texts; `end`
    the last tenth of the characters of each document.
    """

    rule: Literal["name", "text", "end"]
    limit: int = 0  # of `text`: the largest sha256 that is held out, its first eight bytes as a number

    def part(self, split: str, document: Document) -> str:
        """Returns what of a document belongs to `train`, `validation` or `all`; '' if nothing does."""
        if split == "all":
            return document.text
        if self.rule == "end":
            cut = len(document.text) - len(document.text) // 10
            return document.text[:cut] if split == "train" else document.text[cut:]
        if self.rule == "name":
            held_out = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()[0] < 24
        else:
            held_out = _number(document.text) <= self.limit
        return document.text if held_out == (split == "validation") else ""


def hold_out_by_text(documents: Iterable[Document]) -> HoldOut:
    """Finds the rule for the user's text, wherever the files lie.

    The tenth of the different texts (rounded down) with the smallest sha256 is held out, so that equal texts are on
    the same side. The first 4,096 determine it to half a percent of the whole; no more are read. With fewer than 20
    different texts it is the last tenth of the characters of each document.

    >>> hold_out_by_text([Document("a", "0123456789" * 2)]).rule
    'end'
    """
    numbers: set[int] = set()
    for document in documents:
        numbers.add(_number(document.text))
        if len(numbers) == _TEXTS_FOR_THE_RULE:
            break
    if len(numbers) < 20:
        return HoldOut("end")
    return HoldOut("text", sorted(numbers)[len(numbers) // 10 - 1])


def repeat_passages(text: str, share: float, seed: int = 0) -> str:
    """Writes a share of the passages of a text, of 40 to 110 characters, twice or, 3 in 10, three times.

    A repeated passage follows itself at once, without anything between. The cuts and what is repeated depend on
    the text and the seed alone, so that documents can be read in any order; with another share the cuts are the same,
    and what a smaller share repeats a larger one repeats as well.

    Args:
      text: Of one document.
      share: Share of the passages, 0 to 1.
      seed: Another one repeats other passages.

    >>> text = "".join(map(chr, range(33, 133)))
    >>> len(repeat_passages(text, 1.0)) in range(200, 301), repeat_passages(text, 0.0) == text
    (True, True)
    """
    if not text:
        return text
    digest = hashlib.sha256(f"{seed} {text}".encode("utf-8", "surrogatepass")).digest()
    count = len(text) // _PASSAGE_LENGTHS[0] + 1
    uniform = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8]))).random((count, 3))
    shortest, longest = _PASSAGE_LENGTHS
    lengths = shortest + np.floor(uniform[:, 0] * (longest - shortest + 1)).astype(int)
    times = 1 + (uniform[:, 1] < share) * (1 + (uniform[:, 2] < _THRICE))
    passages, start = [], 0
    for length, many in zip(lengths.tolist(), times.tolist(), strict=True):
        passages.append(text[start : start + length] * many)
        start += length
    return "".join(passages)


@dataclasses.dataclass(frozen=True)
class Part:
    """A split of a source."""

    name: str  # of the token file, without its suffix
    split: str  # for the sidecar
    source: Source
    text: Callable[[Document], str]  # what of a document belongs to it; '' if nothing does


def text_parts(paths: Sequence[str] | None, splits: Sequence[str]) -> list[Part]:
    """Opens splits of text files, or of the embedded corpus.

    Args:
      paths: As `text_corpus`; None takes the standard library of the running Python.
      splits: `train` and `validation`, or `all`.

    Raises:
      UserError: For an unknown split, or bad files.
    """
    for split in splits:
        if split not in ("train", "validation", "all"):
            raise UserError(f"there is no split {split!r} of text", allowed="train | validation | all")
    if paths is None:
        source, hold_out = embedded_corpus(), HoldOut("name")
    else:
        source = text_corpus(paths)
        hold_out = hold_out_by_text(source.documents() if {*splits} != {"all"} else ())
    return [Part(split, split, source, functools.partial(hold_out.part, split)) for split in splits]


def tfds_parts(data_dir: Path, dataset: str, splits: Sequence[str], feature: str) -> list[Part]:
    """Opens splits of a TensorFlow Datasets folder; arguments and errors as `orthojax.data.tfds`."""
    folder = find_folder(data_dir, dataset)
    return [
        Part(split.partition("[")[0], split, open_tfds(folder, split, feature), lambda document: document.text)
        for split in splits
    ]


def require_usable(folder: Path, tokenizer: str) -> None:
    """Refuses what can be refused before any text is read.

    Raises:
      UserError: For an unknown tokenizer, or a folder with other things in it.
    """
    tokenizer_identity(tokenizer)
    if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):  # another process may just begin
        # The folder of a run has a tokenizer as well.
        if not (folder / "tokenizer.json").exists() or (folder / "checkpoints").exists():
            raise UserError(f"{folder} already exists and holds no token files", allowed="a new or empty folder")
    elif folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", allowed="a new or empty folder")


def prepare(
    folder: Path,
    parts: Sequence[Part],
    tokenizer: str,
    *,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> list[TokenFile]:
    """Writes the token files of some splits, or one shard of each; those that are complete are kept.

    Args:
      folder: Created if it does not exist.
      parts: The splits, each with a name of its own. A BPE that is not there yet is trained on the first.
      tokenizer: As `make_tokenizer`. To bound memory, a document of more than 4 million characters is tokenised in
        pieces that end with a line; only there may its ids differ from those of the whole.
      shard: (i, n) takes the i-th of n consecutive parts of the source, each of whole files.
      progress: Called before a BPE is trained, and after every batch.

    Raises:
      UserError: For anything wrong with the text, the tokenizer or the folder; if a file was created from something
        else, or there is no text for it.
    """
    require_usable(folder, tokenizer)
    for name in (names := [part.name for part in parts]):
        if name in ("", "tokenizer") or name[0] == "." or name != Path(name).name or names.count(name) > 1:
            problem = f"{name!r} is not the name of a token file, or is that of two"
            raise UserError(problem, allowed="--name=NAME, such as train, for one split")
    make_folder(folder, "the folder of token files")
    made = _shared_tokenizer(folder / "tokenizer.json", tokenizer, parts[0], progress)
    for source in dict.fromkeys(part.source for part in parts):  # one pass over a text makes all splits of it
        with contextlib.ExitStack() as stack:
            writers: dict[TokenWriter, Part] = {}
            for part in parts:
                writer = _writer(folder, part, made, shard) if part.source == source else None
                if writer:
                    writers[stack.enter_context(writer)] = part
            if writers:
                _write(writers, made, source.pieces(*shard), shard, progress or (lambda *_: None))
    return [open_token_file(shard_path(folder / f"{part.name}.bin", *shard)) for part in parts]


def _writer(folder: Path, part: Part, tokenizer: Tokenizer, shard: tuple[int, int]) -> TokenWriter | None:
    """Opens a writer of the token file of a part; None if it is complete."""
    path = shard_path(folder / f"{part.name}.bin", *shard)
    created_from = {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.spec,
        "tokenizer_sha256": tokenizer.sha256,
        "source": part.source.description,
        "source_sha256": part.source.sha256,
        "file_count": len(part.source.files),
        "split": part.split,
        "shard": "" if shard[1] == 1 else f"{shard[0]}/{shard[1]}",
    }
    if not (path.exists() and sidecar_path(path).exists()):
        return TokenWriter(path, created_from)
    info = open_token_file(path).info
    for name, value in created_from.items():
        if (before := getattr(info, name)) != value:
            problem = f"{path} was created with a different {name}: {before!r}, not {value!r}"
            raise UserError(problem, allowed="the same command, or another --output")
    return None


def _write(
    writers: dict[TokenWriter, Part],
    tokenizer: Tokenizer,
    pieces: list[Piece],
    shard: tuple[int, int],
    report: Progress,
) -> None:
    """Tokenises the pieces once for all parts; a batch is tokenised and written while the next one is read."""
    what = " and ".join(part.name for part in writers.values())
    what += "" if shard[1] == 1 else f", shard {shard[0]}/{shard[1]}"
    total, before, characters = sum(piece.n_bytes for piece in pieces), 0, 0
    waiting: dict[TokenWriter, list[str]] = {writer: [] for writer in writers}

    def write(batch: dict[TokenWriter, list[str]], done: int) -> None:
        for writer, texts in batch.items():
            if texts:
                writer.append(_encode(tokenizer, texts), len(texts), sum(len(text.encode()) for text in texts))
        report(what, min(done, total - 1), total, sum(writer.n_tokens for writer in writers))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(write, {}, 0)
        for piece in pieces:
            for document, done in piece.read():
                for writer, part in writers.items():
                    text = part.text(document)
                    waiting[writer] += [text] if text else []
                    characters += len(text)
                if characters >= _BATCH_CHARACTERS:
                    future.result()
                    future = pool.submit(write, waiting, before + done)
                    waiting, characters = {writer: [] for writer in writers}, 0
            before += piece.n_bytes
        future.result()
    write(waiting, before)
    for writer in writers:
        writer.complete()
    report(what, total, total, sum(writer.n_tokens for writer in writers))


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Returns the ids of some documents as they stand in a token file."""
    pieces = [piece for text in texts for piece in _cut(text)]
    rows = tokenizer.encode_batch([piece for piece, _ in pieces])
    end = np.array([tokenizer.eos_id], np.int32)
    return np.concatenate(
        [x for row, (_, last) in zip(rows, pieces, strict=True) for x in ((row, end) if last else (row,))]
    )


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """Cuts a document into pieces; the flag marks the last one."""
    begin = 0
    while len(text) - begin > _LONGEST_TEXT:
        end = text.rfind("\n", begin, begin + _LONGEST_TEXT) + 1 or begin + _LONGEST_TEXT
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def _sample(source: Source) -> Iterator[Document]:
    """Yields all documents of at most 64 MB, otherwise the first with 1 / n of that of each of n <= 64 shards."""
    count = min(len(source.files), 64) if source.n_bytes > _BPE_SAMPLE_BYTES else 1
    for index in range(count):
        spent = 0
        for document in source.documents(index, count):
            yield document
            spent += len(document.text.encode())
            if spent >= _BPE_SAMPLE_BYTES // count and source.n_bytes > _BPE_SAMPLE_BYTES:
                break


def _shared_tokenizer(path: Path, spec: str, part: Part, progress: Progress | None) -> Tokenizer:
    """Returns the tokenizer of a folder of token files: the one that is there, or a new one."""
    if not path.exists():
        texts: Iterable[str] = ()
        if spec.startswith("bpe:"):
            texts = filter(None, map(part.text, _sample(part.source)))
            if progress:
                progress(f"training {spec}", 0, min(part.source.n_bytes, _BPE_SAMPLE_BYTES), 0)
        made = make_tokenizer(spec, texts)
        write_text(path, made.serialized)
        return made
    if spec.startswith("bpe:"):
        spec = tokenizer_identity(spec)
        found = load_tokenizer(path, spec)
        same = f"bpe:{found.vocab_size}" == spec and all(json.dumps(name) in found.serialized for name in (BOS, EOS))
    else:
        found = make_tokenizer(spec, ())
        same = found.sha256 == load_tokenizer(path).sha256
    if not same:
        raise UserError(f"{path} is not the tokenizer {spec!r}", allowed="the same tokenizer, or another --output")
    return found


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
