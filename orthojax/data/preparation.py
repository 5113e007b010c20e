"""A folder of token files from text of any size: what launch/prepare_data.py does.

The folder gets `tokenizer.json`, and for each split `NAME.bin` with its sidecar, or one shard of it. Calls with the
same tokenizer share a folder, whether they make other splits or other shards, also at the same time.
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from orthojax.data.corpus import Corpus, embedded_corpus, text_corpus
from orthojax.data.sources import Source, documents, sample, text_source
from orthojax.data.splits import HoldOut
from orthojax.data.text_files import Document, find_files
from orthojax.data.tfds_folder import find_folder, open_tfds
from orthojax.data.token_files import TokenFile
from orthojax.data.token_shards import require_alone, shard_path
from orthojax.data.token_writer import Output, Report, write_token_files
from orthojax.data.tokenizers import BOS, EOS, Tokenizer, load_tokenizer, make_tokenizer, tokenizer_identity
from orthojax.errors import UserError

BPE_SAMPLE_BYTES = 1 << 26
"""A BPE is trained on the whole train split of a source of at most 64 MB on the disk, and on so much of a larger one,
from 64 places that do not depend on the number of shards: every process trains the same."""
_TEXT_SPLITS = ("train", "validation", "all")


@dataclasses.dataclass(frozen=True)
class Part:
    """A split of a source.

    Attributes:
      name: Of the token file, without its ending.
      split: For the sidecar.
      source: The documents.
      text: What of a document belongs to it; '' where nothing does.
    """

    name: str
    split: str
    source: Source
    text: Callable[[Document], str]


def require_usable(folder: Path, tokenizer_spec: str) -> None:
    """Refuses what can be refused before any text is read.

    Raises:
      UserError: For an unknown tokenizer, or a folder with other things in it.
    """
    tokenizer_identity(tokenizer_spec)
    if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):  # another process may just begin
        if not any((folder / name).exists() for name in ("tokenizer.json", "source.json")):
            raise UserError(f"{folder} already exists and holds no token files", allowed="a new or empty folder")
    elif folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", allowed="a new or empty folder")


def make_folder(folder: Path) -> None:
    """Makes a folder, where it is not there.

    Raises:
      UserError: Where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None


def text_parts(paths: Sequence[str] | None, splits: Sequence[str], folder: Path) -> list[Part]:
    """Splits of text files, or of the embedded corpus.

    Args:
      paths: Files, folders and patterns; None takes the standard library of the running Python.
      splits: `train` and `validation`, as `orthojax.data.splits` divides them, or `all`, with nothing set aside.
      folder: Of the token files. To know the sha256 of the text it is read once more, and its beginning to divide it;
        what comes of it is kept in `source.json` there: the sha256 as long as no file changes its size or time, and
        the rule that divides the text as long as the sha256 is the same.

    Raises:
      UserError: For an unknown split, or bad files.
    """
    for split in splits:
        if split not in _TEXT_SPLITS:
            raise UserError(f"there is no split {split!r} of text", allowed=" | ".join(_TEXT_SPLITS))
    corpus, hold_out = _open_text(paths, folder, divide=tuple(splits) != ("all",))
    source = text_source(corpus)
    return [Part(split, split, source, _taker(hold_out, split)) for split in splits]


def tfds_parts(data_dir: Path, dataset: str, splits: Sequence[str], feature: str) -> list[Part]:
    """Splits of a TensorFlow Datasets folder; see `orthojax.data.tfds_folder`.

    Raises:
      UserError: Where something of it is missing.
    """
    version = find_folder(data_dir, dataset)
    return [
        Part(split.partition("[")[0], split, open_tfds(version, split, feature), lambda document: document.text)
        for split in splits
    ]


def renamed(parts: Sequence[Part], name: str) -> list[Part]:
    """The parts with another name for their token files; as they are where it is ''.

    Raises:
      UserError: Where it is no name of a file, or that of another file of the folder.
    """
    if name and (name != Path(name).name or name.startswith(".") or name in ("tokenizer", "source")):
        raise UserError(f"--name={name} is no name of a file", allowed="a name such as train")
    return [dataclasses.replace(part, name=name or part.name) for part in parts]


def prepare(
    folder: Path,
    parts: Sequence[Part],
    tokenizer_spec: str,
    *,
    shard: tuple[int, int] = (0, 1),
    report: Callable[[str], Report] | None = None,
) -> list[TokenFile]:
    """Writes the token files of some splits, or one shard of each; goes on with what an earlier call left.

    Args:
      folder: Made where it is not there.
      parts: The splits. A BPE that is not there yet is trained on the first.
      tokenizer_spec: As `make_tokenizer`.
      shard: (i, n) takes the i-th of n parts.
      report: Called with what is done next, gives what is called with its progress.

    Raises:
      UserError: For anything wrong with the text, the tokenizer, the folder or an earlier call.
    """
    require_usable(folder, tokenizer_spec)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise UserError(f"the token files would have one name: {', '.join(names)}", allowed="one split, with --name")
    for name in names:
        require_alone(folder / f"{name}.bin", shard[1])
    make_folder(folder)
    tokenizer = shared_tokenizer(folder / "tokenizer.json", tokenizer_spec, lambda: _sample(parts[0]))
    made: dict[str, TokenFile] = {}
    for source in dict.fromkeys(part.source for part in parts):  # splits of the same text are made together
        together = [part for part in parts if part.source == source]
        label = " and ".join(part.name for part in together)
        outputs = [Output(shard_path(folder / f"{part.name}.bin", *shard), part.split, part.text) for part in together]
        files = write_token_files(
            outputs,
            source,
            tokenizer,
            shard=shard,
            report=report(label if shard[1] == 1 else f"{label}, shard {shard[0]}/{shard[1]}") if report else None,
        )
        made.update(zip((part.name for part in together), files, strict=True))
    return [made[part.name] for part in parts]


def shared_tokenizer(path: Path, spec: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer of a folder of token files: the one that is there, or a new one.

    Args:
      path: Its tokenizer.json.
      spec: As `make_tokenizer`.
      texts: What a BPE is trained on where there is none yet.

    Raises:
      UserError: Where the one that is there is another one.
    """
    if not path.exists():
        made = make_tokenizer(spec, texts() if spec.startswith("bpe:") else ())
        _replace(path, made.serialized)
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


def _sample(part: Part) -> Iterable[str]:
    return filter(None, map(part.text, sample(part.source, BPE_SAMPLE_BYTES)))


def _taker(hold_out: HoldOut, split: Any) -> Callable[[Document], str]:
    return lambda document: hold_out.part(document, split)


def _open_text(paths: Sequence[str] | None, folder: Path, *, divide: bool) -> tuple[Corpus, HoldOut]:
    if paths is None:
        corpus = embedded_corpus()
        return corpus, corpus.hold_out(())
    files = [[name, path.stat().st_size, path.stat().st_mtime_ns] for name, path in find_files(paths)]
    notes = folder / "source.json"
    known = _read_notes(notes)
    unchanged = known.get("files") == files
    corpus = text_corpus(paths, known["sha256"] if unchanged else "")
    if corpus.sha256 == known.get("sha256"):  # also where only a date changed: a rule of an earlier version goes on
        hold_out = HoldOut(**known["hold_out"])
    elif divide:
        hold_out = corpus.hold_out(documents(text_source(corpus).pieces(0, 1)))
    else:
        return corpus, HoldOut("end")  # which is not asked
    if not unchanged:
        make_folder(folder)
        content = {"files": files, "sha256": corpus.sha256, "hold_out": dataclasses.asdict(hold_out)}
        _replace(notes, json.dumps(content, indent=2) + "\n")
    return corpus, hold_out


def _read_notes(notes: Path) -> dict[str, Any]:
    """What an earlier call found out about its files; {} where there was none."""
    try:
        content = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    whole = isinstance(content, dict) and {"files", "sha256", "hold_out"} <= content.keys()
    return content if whole else {}


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
