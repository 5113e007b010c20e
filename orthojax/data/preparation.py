"""Folders of token files made from text of any size, for orthojax prepare and for the cache of data sets.

The folder gets `tokenizer.json`, and for each split `NAME.bin` with its sidecar, or `NAME-00000-of-00064.bin` and so
on, one for each group of input files. Calls with the same tokenizer can share a folder, even concurrently: one makes a
file, the others wait for it. A file appears under its name once it is complete, and is then kept; rerunning a killed
call redoes only the others.
"""

import dataclasses
import functools
import hashlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.data.sources import Document, Source, embedded_corpus, find_tfds, open_tfds, text_corpus
from orthojax.data.token_files import FORMAT_VERSION, TokenFile, open_token_file, write_token_file
from orthojax.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer, tokenizer_identity
from orthojax.errors import UserError
from orthojax.files import make_folder, one_writer, write_text

_BPE_SAMPLE_BYTES = 1 << 26  # on disk; a BPE is trained on a part of a larger source
_TEXTS_FOR_THE_RULE = 4096
_PASSAGE_LENGTHS = (40, 110)  # characters of a passage, uniform
_THRICE = 0.3  # of the repeated passages
_BATCH_CHARACTERS = 1 << 20  # text tokenised at once, which bounds memory and paces the progress
_LONGEST_TEXT = 1 << 22  # characters; a longer document is tokenised in pieces

Progress = Callable[..., Any]  # (what is being done, bytes of the source done, bytes in total, tokens so far)


# The part of a document that belongs to `train` or `validation`: (split, document) -> text, '' if none does.
HoldOut = Callable[[str, Document], str]


def hold_out_by_name(split: str, document: Document) -> str:
    """Divides the embedded corpus: files are held out by the sha256 of their names, 3 in 32."""
    held_out = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()[0] < 24
    return document.text if held_out == (split == "validation") else ""


def hold_out_by_text(documents: Iterable[Document]) -> HoldOut:
    """Finds the rule that divides the user's text, regardless of where the files are.

    The tenth of the distinct texts (rounded down) with the smallest sha256 is held out, so that equal texts are on the
    same side. The first 4,096 texts determine it to half a percent of the whole; no more are read. With fewer than 20
    distinct texts, the last tenth of each document's characters is held out.

    >>> hold_out_by_text([])("validation", Document("a", "0123456789" * 2))
    '89'
    """
    numbers: set[int] = set()
    for document in documents:
        numbers.add(_number(document.text))
        if len(numbers) == _TEXTS_FOR_THE_RULE:
            break
    if len(numbers) < 20:
        return _hold_out_ends
    limit = sorted(numbers)[len(numbers) // 10 - 1]
    return functools.partial(_hold_out_below, limit)


def _hold_out_below(limit: int, split: str, document: Document) -> str:
    return document.text if (_number(document.text) <= limit) == (split == "validation") else ""


def _hold_out_ends(split: str, document: Document) -> str:
    cut = len(document.text) - len(document.text) // 10
    return document.text[:cut] if split == "train" else document.text[cut:]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def repeat_passages(text: str, share: float) -> str:
    """Writes a fraction of a text's passages (40 to 110 characters) twice or, 3 in 10 of them, three times.

    A repeated passage follows itself directly. The cuts and the choice of passages depend only on the text, so
    documents can be read in any order; a larger share repeats everything that a smaller one does.

    >>> text = "".join(map(chr, range(33, 133)))
    >>> len(repeat_passages(text, 1.0)) in range(200, 301), repeat_passages(text, 0.0) == text
    (True, True)
    """
    digest = hashlib.sha256(f"0 {text}".encode("utf-8", "surrogatepass")).digest()  # 0 is the seed
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
    text: Callable[[Document], str]  # the part of a document that belongs to it; '' if none does


def text_parts(paths: Sequence[str] | None, splits: Sequence[str]) -> list[Part]:
    """Opens splits (`train` and `validation`, or `all`) of text files or, without paths, of the embedded corpus."""
    for split in splits:
        if split not in ("train", "validation", "all"):
            raise UserError(f"there is no split {split!r} of text", allowed="train | validation | all")
    if paths is None:
        source, hold_out = embedded_corpus(), hold_out_by_name
    else:
        source = text_corpus(paths)
        hold_out = hold_out_by_text(source.documents() if {*splits} != {"all"} else ())
    texts = {split: attrgetter("text") if split == "all" else functools.partial(hold_out, split) for split in splits}
    return [Part(split, split, source, text) for split, text in texts.items()]


def tfds_parts(data_dir: Path, dataset: str, splits: Sequence[str], feature: str) -> list[Part]:
    """Opens splits of a TensorFlow Datasets folder; arguments and errors are as for `find_tfds` and `open_tfds`."""
    folder = find_tfds(data_dir, dataset)
    sources = {split: open_tfds(folder, split, feature) for split in splits}
    return [Part(split.partition("[")[0], split, source, attrgetter("text")) for split, source in sources.items()]


def prepare(
    folder: Path,
    parts: Sequence[Part],
    tokenizer: str,
    *,
    shards: int = 1,
    share: tuple[int, int] = (0, 1),
    workers: int = 1,
    progress: Progress | None = None,
) -> list[TokenFile]:
    """Writes the token files of some splits; those that are complete are kept.

    Args:
      folder: Created if it does not exist.
      parts: The splits, each with its own name. A BPE that does not exist yet is trained on the first.
      tokenizer: As for `make_tokenizer`. To bound memory, a document of more than 4 million characters is tokenised in
        pieces that end with a line; only there may its ids differ from those of the whole.
      shards: Token files of each split, each of neighbouring input files, which together have the tokens that one file
        would have. They are called NAME-00000-of-00064.bin and so on; 1 is NAME.bin.
      share: (i, n): only the i-th of every n token files, as on one of n machines that share the folder.
      workers: Processes that read and tokenise, each one token file at a time. With several, the main module of a
        script must be importable, as for `multiprocessing`.
      progress: Called before a BPE is trained, and after every batch, or with several workers after every file.

    Returns:
      The files of this share.

    Raises:
      UserError: For anything wrong with the text, the tokenizer or the folder; if a file was created from something
        else, or there is no text for it.
    """
    for name in (names := [part.name for part in parts]):
        if name == "tokenizer" or not re.fullmatch(r"\w[\w.+-]*", name) or names.count(name) > 1:
            problem = f"{name!r} is not the name of a token file, or is that of two"
            raise UserError(problem, allowed="--name=NAME, such as train, for one split")
    if shards > (least := min(len(part.source.files) for part in parts)):
        problem = f"{shards} token files of {least} input files"
        raise UserError(problem, allowed=f"1 to {least}, or more and smaller input files")
    make_folder(folder, "the folder of token files")
    made = _shared_tokenizer(folder / "tokenizer.json", tokenizer, parts[0], progress)
    jobs: list[tuple[Part, Path]] = []
    for part in parts:
        for i in range(share[0], shards, share[1]):
            name = part.name if shards == 1 else f"{part.name}-{i:05}-of-{shards:05}"
            group = dataclasses.replace(part, source=part.source.group(i, shards))
            jobs.append((group, folder / f"{name}.bin"))
    report = _of_all(jobs, progress or (lambda *_: None))
    if min(workers, len(jobs)) > 1:
        _make_in_processes(jobs, made, workers, report)
        return [open_token_file(path) for _, path in jobs]
    return [_token_file(path, part, made, functools.partial(report, part, path)) for part, path in jobs]


_Report = Callable[[Part, Path, int, int], None]  # of a part and one of its files: bytes and tokens done


def _of_all(jobs: Sequence[tuple[Part, Path]], progress: Progress) -> _Report:
    """Returns a report that adds up the files of each part."""
    done: dict[str, dict[Path, tuple[int, int]]] = {part.name: {} for part, _ in jobs}
    totals = {name: sum(part.source.n_bytes for part, _ in jobs if part.name == name) for name in done}

    def report(part: Part, path: Path, n_bytes: int, tokens: int) -> None:
        done[part.name][path] = n_bytes, tokens
        all_bytes, all_tokens = map(sum, zip(*done[part.name].values(), strict=True))
        progress(part.name, all_bytes, totals[part.name], all_tokens)

    return report


def _make_in_processes(jobs: Sequence[tuple[Part, Path]], tokenizer: Tokenizer, workers: int, report: _Report) -> None:
    """Makes token files in processes that end with this one, whatever ends it."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context("spawn"), _start_worker)
    try:
        futures = {pool.submit(_count_of, path, part, tokenizer): (part, path) for part, path in jobs}
        for future in as_completed(futures):
            tokens, (part, path) = future.result(), futures[future]
            report(part, path, part.source.n_bytes, tokens)
        pool.shutdown()
    except BrokenProcessPool:
        hint = "complete files are kept: run the same command again, with fewer --workers if memory was short"
        raise UserError("a process that made token files was ended from outside", hint=hint) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends these
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()  # returns when it is gone, even by kill -9
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _count_of(path: Path, part: Part, tokenizer: Tokenizer) -> int:
    return _token_file(path, part, tokenizer, lambda *_: None).info.n_tokens


def _token_file(path: Path, part: Part, tokenizer: Tokenizer, report: Callable[[int, int], None]) -> TokenFile:
    """Returns the token file of a part, or of a group of its files: the existing one, or a new one."""
    created_from = {
        "format_version": FORMAT_VERSION,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.spec,
        "tokenizer_sha256": tokenizer.sha256,
        "source": part.source.description,
        "source_sha256": part.source.sha256,
        "file_count": len(part.source.files),
        "split": part.split,
    }
    with one_writer(path):  # else two of other sources would each leave one file
        if not path.exists():
            batches = _tokenised(part, tokenizer, report)
            write_token_file(path, created_from, batches, may_be_empty=path.stem != part.name)
    file = open_token_file(path)
    for name, value in created_from.items():
        if (before := getattr(file.info, name)) != value:
            problem = f"{path} was created with a different {name}: {before!r}, not {value!r}"
            raise UserError(problem, allowed="the same command, or another --output")
    report(part.source.n_bytes, file.info.n_tokens)
    return file


def _tokenised(
    part: Part, tokenizer: Tokenizer, report: Callable[[int, int], None]
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yields the batches of `write_token_file`."""
    tokens = 0
    for texts, done in _batches(part):
        ids = _encode(tokenizer, texts)
        yield ids, len(texts), sum(len(text.encode()) for text in texts)
        tokens += len(ids)
        report(min(done, part.source.n_bytes - 1), tokens)


def _batches(part: Part) -> Iterator[tuple[list[str], int]]:
    """Yields texts of a million characters in total, and how many bytes of the source have been read so far."""
    texts: list[str] = []
    before = characters = 0
    for piece in part.source.files:
        for document, done in piece.read():
            if text := part.text(document):
                texts.append(text)
                characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield texts, before + done
                texts, characters = [], 0
        before += piece.n_bytes
    if texts:
        yield texts, before


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Returns the ids of some documents as a token file stores them."""
    pieces = [_cut(text) for text in texts]
    rows = iter(tokenizer.encode_batch([piece for of_text in pieces for piece in of_text]))
    end = np.array([tokenizer.eos_id], np.int32)
    return np.concatenate([ids for of_text in pieces for ids in (*(next(rows) for _ in of_text), end)])


def _cut(text: str) -> list[str]:
    """Cuts a long document into pieces, at the ends of lines if there are any."""
    pieces, begin = [], 0
    while len(text) - begin > _LONGEST_TEXT:
        end = text.rfind("\n", begin, begin + _LONGEST_TEXT) + 1 or begin + _LONGEST_TEXT
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]


def _sample(source: Source) -> Iterator[Document]:
    """Yields the documents that a BPE is trained on: all of up to 64 MB, else a part of each of at most 64 files."""
    is_large = source.n_bytes > _BPE_SAMPLE_BYTES
    files = source.files[:: -(-len(source.files) // 64)] if is_large else source.files
    for piece in files:
        spent = 0
        for document, _ in piece.read():
            yield document
            spent += len(document.text.encode())
            if is_large and spent >= _BPE_SAMPLE_BYTES // len(files):
                break


def _shared_tokenizer(path: Path, spec: str, part: Part, progress: Progress | None) -> Tokenizer:
    """Returns the tokenizer of a folder of token files: the existing one, or a new one."""
    is_bpe = spec.startswith("bpe:")
    with one_writer(path):
        if not path.exists():
            texts = filter(None, map(part.text, _sample(part.source))) if is_bpe else ()
            if is_bpe and progress:
                progress(f"training {spec}", 0, min(part.source.n_bytes, _BPE_SAMPLE_BYTES), 0)
            made = make_tokenizer(spec, texts)
            write_text(path, made.serialized)
            return made
    found = load_tokenizer(path, tokenizer_identity(spec)) if is_bpe else make_tokenizer(spec, ())
    same = f"bpe:{found.vocab_size}" == found.spec if is_bpe else found.sha256 == load_tokenizer(path).sha256
    if not same:
        raise UserError(f"{path} is not the tokenizer {spec!r}", allowed="the same tokenizer, or another --output")
    return found
