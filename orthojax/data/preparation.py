"""A folder of token files from text of any size: what orthojax prepare and the cache of data sets do.

The folder gets `tokenizer.json`, and for each split `NAME.bin` with its sidecar, or one shard of it. Calls with the
same tokenizer share a folder, whether they make other splits or other shards, also at the same time.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from orthojax.data.documents import Document, Source, embedded_corpus, find_files, text_corpus
from orthojax.data.remote import is_remote, remote_corpus, remote_files
from orthojax.data.sealed import is_sha256, read_sealed, sealed
from orthojax.data.tfds import find_folder, open_tfds
from orthojax.data.token_files import TokenFile, require_alone
from orthojax.data.token_writer import Part, write_token_files
from orthojax.data.tokenizers import BOS, EOS, Tokenizer, load_tokenizer, make_tokenizer, tokenizer_identity
from orthojax.errors import UserError
from orthojax.files import make_folder, write_text

# A BPE is trained on the train split of a source of at most 64 MB on disk, and on that much of a larger one, from 64
# places that do not depend on the number of shards: every process trains the same.
BPE_SAMPLE_BYTES = 1 << 26
_TEXTS_FOR_THE_RULE = 4096
_OUR_FILES = ("tokenizer", "source")  # .json, beside the sidecars

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
        """What of a document belongs to `train`, `validation` or `all`; '' if nothing does."""
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
    """The rule for the user's text, wherever the files lie.

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


def divided(source: Source, hold_out: HoldOut, splits: Sequence[str]) -> list[Part]:
    """Splits of a source by a rule: `train` and `validation`, or `all`, with nothing held out."""
    return [Part(split, split, source, functools.partial(hold_out.part, split)) for split in splits]


def text_parts(paths: Sequence[str] | None, splits: Sequence[str], folder: Path) -> list[Part]:
    """Splits of text files, or of the embedded corpus.

    Args:
      paths: Files, folders and patterns, or addresses (see `remote_files`); None takes the standard library of the
        running Python.
      splits: `train` and `validation`, or `all`.
      folder: Of the token files. Its `source.json` keeps what takes reading the text: its sha256, valid until a file
        changes its size or time, and the rule that divides it, valid as long as the sha256.

    Raises:
      UserError: For an unknown split, or bad files.
    """
    for split in splits:
        if split not in ("train", "validation", "all"):
            raise UserError(f"there is no split {split!r} of text", allowed="train | validation | all")
    if paths is None:
        return divided(embedded_corpus(), HoldOut("name"), splits)
    if remote := is_remote(paths):
        files: list[list[Any]] = remote_files(paths)
    else:
        files = [[name, path.stat().st_size, path.stat().st_mtime_ns] for name, path in find_files(paths)]
    notes = folder / "source.json"
    before, sha256, hold_out = _read_notes(notes) if os.path.lexists(notes) else ([], "", HoldOut("end"))
    unchanged = before == files
    source = remote_corpus(files) if remote else text_corpus(paths, sha256 if unchanged else "")
    if source.sha256 != sha256:  # if only a date changed, the rule of an earlier version stays
        if list(splits) == ["all"]:
            return divided(source, HoldOut("end"), splits)  # never consulted
        hold_out = hold_out_by_text(source.documents())
    if not unchanged:
        make_folder(folder, "the folder of token files")
        content = {"files": files, "sha256": source.sha256, "hold_out": dataclasses.asdict(hold_out)}
        write_text(notes, sealed(content))
    return divided(source, hold_out, splits)


def tfds_parts(data_dir: Path, dataset: str, splits: Sequence[str], feature: str) -> list[Part]:
    """Splits of a TensorFlow Datasets folder; arguments and errors as `orthojax.data.tfds`."""
    folder = find_folder(data_dir, dataset)
    return [
        Part(split.partition("[")[0], split, open_tfds(folder, split, feature), lambda document: document.text)
        for split in splits
    ]


def renamed(parts: Sequence[Part], name: str) -> list[Part]:
    """The parts with another name for their token files; unchanged if it is ''.

    Raises:
      UserError: If it is not the name of a file, or that of another file of the folder.
    """
    if name and (name != Path(name).name or name.startswith(".") or name in _OUR_FILES):
        raise UserError(f"--name={name} is not the name of a file", allowed="a name such as train")
    if not name and (taken := {part.name for part in parts} & {*_OUR_FILES}):
        raise UserError(f"token files {min(taken)!r} would overwrite {min(taken)}.json", allowed="--name=NAME")
    return [dataclasses.replace(part, name=name or part.name) for part in parts]


def require_usable(folder: Path, tokenizer_spec: str) -> None:
    """Refuses what can be refused before any text is read.

    Raises:
      UserError: For an unknown tokenizer, or a folder with other things in it.
    """
    tokenizer_identity(tokenizer_spec)
    if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):  # another process may just begin
        ours = any((folder / name).exists() for name in ("tokenizer.json", "source.json"))
        if not ours or (folder / "checkpoints").exists():  # a run keeps its tokenizer, too
            raise UserError(f"{folder} already exists and holds no token files", allowed="a new or empty folder")
    elif folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", allowed="a new or empty folder")


def prepare(
    folder: Path,
    parts: Sequence[Part],
    tokenizer_spec: str,
    *,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> list[TokenFile]:
    """Writes the token files of some splits, or one shard of each; resumes what an earlier call left.

    Args:
      folder: Created if it does not exist.
      parts: The splits. A BPE that is not there yet is trained on the first.
      tokenizer_spec: As `make_tokenizer`.
      shard: (i, n) takes the i-th of n parts.
      progress: Called before a BPE is trained, and after every batch.

    Raises:
      UserError: For anything wrong with the text, the tokenizer, the folder or an earlier call.
    """
    require_usable(folder, tokenizer_spec)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise UserError(f"the token files would have one name: {', '.join(names)}", allowed="one split, with --name")
    for name in names:
        require_alone(folder / f"{name}.bin", shard[1])
    make_folder(folder, "the folder of token files")
    tokenizer = _shared_tokenizer(folder / "tokenizer.json", tokenizer_spec, parts[0], progress)
    files: dict[str, TokenFile] = {}
    for source in dict.fromkeys(part.source for part in parts):  # one pass over a text makes all splits of it
        together = [part for part in parts if part.source == source]
        label = " and ".join(part.name for part in together)
        label += "" if shard[1] == 1 else f", shard {shard[0]}/{shard[1]}"
        report = functools.partial(progress, label) if progress else None
        written = write_token_files(folder, together, tokenizer, shard=shard, report=report)
        files.update(zip((part.name for part in together), written, strict=True))
    return [files[name] for name in names]


def sample(source: Source, limit_bytes: int, parts: int = 64) -> Iterator[Document]:
    """All documents of a source of at most `limit_bytes`, otherwise the first with 1 / parts of that of each shard."""
    if source.n_bytes <= limit_bytes:
        yield from source.documents()
        return
    for index in range(parts):
        spent = 0
        for document in source.documents(index, parts):
            yield document
            spent += len(document.text.encode())
            if spent >= limit_bytes // parts:
                break


def _shared_tokenizer(path: Path, spec: str, part: Part, progress: Progress | None) -> Tokenizer:
    """The tokenizer of a folder of token files: the one that is there, or a new one."""
    if not path.exists():
        texts: Iterable[str] = ()
        if spec.startswith("bpe:"):
            texts = filter(None, map(part.text, sample(part.source, BPE_SAMPLE_BYTES)))
            if progress:
                progress(f"training {spec}", 0, min(part.source.n_bytes, BPE_SAMPLE_BYTES), 0)
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


def _read_notes(path: Path) -> tuple[list[Any], str, HoldOut]:
    """Files, their sha256 and the rule that divides them, from a `source.json`."""
    again = "delete it, and the rule that divides the text is found again"
    match read_sealed(path, "note on the text", again):
        case {"files": list(files), "sha256": sha256, "hold_out": {"rule": "text" | "end" as rule, "limit": limit}}:
            if is_sha256(sha256) and type(limit) is int and 0 <= limit < 1 << 64:
                return files, sha256, HoldOut(rule, limit)
    raise UserError(f"note on the text {path} is corrupt", hint=again)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
