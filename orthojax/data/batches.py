"""Datasets of configs, with tokens made once and kept in a cache folder; batches."""

import bisect
import dataclasses
import functools
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.config import DataConfig
from orthojax.data import preparation, token_files
from orthojax.data.tokenizers import tokenizer_identity
from orthojax.errors import UserError

# Goes up with any change to the rules for corpora, splits or tokenizers, so that older caches are not used.
RULES_VERSION = 4


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and validation tokens, regardless of their source."""

    vocab_size: int  # one more than the largest possible id
    bos_id: int  # starts a row if rows start with one
    eos_id: int  # follows every document
    train: Any  # uint16 or uint32 [n], a read-only memory map, or `JoinedTokens` of several
    validation: Any
    validation_bytes: int  # of its text in UTF-8, 0 if not known: bits per byte = nats / ln 2 * len(validation) / this
    tokenizer_path: Path | None  # for `load_tokenizer`; None if it is not beside the token files
    provenance: dict[str, Any]  # JSON: names, counts and sha256s of source, tokenizer and files


def open_dataset(config: DataConfig, cache_dir: str | Path, *, progress: preparation.Progress | None = None) -> Dataset:
    """Opens the tokens that a config names, tokenising the text the first time.

    The cache has one folder for every corpus (by sha256) and tokenizer, so a change of either makes a new one. Kind
    `tokens` does not use the cache. `progress` is as for `prepare`. Raises UserError for anything wrong with the files,
    the tokenizer or the cache folder, ValueError for kind `bigram_backcopy`, which has no token files.
    """
    if config.kind == "tokens":
        train, validation = (token_files.fetched_pattern(path, Path(cache_dir)) for path in config.paths)
        return _open_pair(train, validation, config)
    if config.kind == "bigram_backcopy":
        raise ValueError("bigram_backcopy is generated: see open_task")
    identity = tokenizer_identity(config.tokenizer)
    parts = preparation.text_parts(list(config.paths) or None, ["train", "validation"])
    rules = [token_files.FORMAT_VERSION, RULES_VERSION, config.kind, parts[0].source.sha256, identity]
    if config.repeated_share:
        parts = [_repeated(part, config.repeated_share) for part in parts]
        rules.append(config.repeated_share)
    key = hashlib.sha256(json.dumps(rules).encode())
    short = "file" if identity.startswith("sha256:") else identity.replace(":", "")
    folder = Path(cache_dir) / f"{config.kind}-{short}-{key.hexdigest()[:16]}"
    train, validation = folder / "train.bin", folder / "validation.bin"
    if not (train.exists() and validation.exists()):
        preparation.prepare(folder, parts, config.tokenizer, progress=progress)
    return _open_pair(train, validation, config)


class TokenBatches:
    """Batches of fixed-length rows, as a pure function of the seed and the step, which is the position in the data.

    A row has `sequence_length + 1` ids; inputs are row[:-1] and targets row[1:]. Row i starts at token i * T. Every row
    comes once per epoch, in an order that depends on the seed and the epoch; batches cross the ends of epochs.

    >>> batches = TokenBatches(np.arange(9), sequence_length=4, batch_size=2, seed=0)
    >>> batches.spread_rows(2)
    array([[0, 1, 2, 3, 4],
           [4, 5, 6, 7, 8]], dtype=int32)
    >>> TokenBatches(np.arange(9), sequence_length=4, batch_size=2, seed=0, bos_id=99).spread_rows(2)
    array([[99,  0,  1,  2,  3],
           [99,  4,  5,  6,  7]], dtype=int32)
    """

    def __init__(self, tokens: Any, sequence_length: int, batch_size: int, seed: int, bos_id: int | None = None):
        """Cuts integers [n], usually memory maps of token files, into rows; nothing is read yet.

        Without `bos_id` row i is [tok[i*T], ..., tok[i*T + T]]: neighbours share a token, and the very first one is not
        a target. With it, it is [bos, tok[i*T], ..., tok[i*T + T-1]], and every token is a target. Raises UserError if
        the tokens do not fill one batch.
        """
        extra = int(bos_id is None)  # the last target lies one past the inputs unless bos shifts them
        # Still the memory map, but slices of a plain array are cheaper.
        self.tokens = tokens if isinstance(tokens, token_files.JoinedTokens) else np.asarray(tokens)
        self.sequence_length, self.batch_size, self.seed, self.bos_id = sequence_length, batch_size, seed, bos_id
        self.n_rows = max(0, (len(tokens) - extra) // sequence_length)
        if self.n_rows < batch_size:
            needed = f"a batch of {batch_size} rows of {sequence_length} needs {batch_size * sequence_length + extra}"
            allowed = f"a batch of at most {self.n_rows} rows, shorter rows or more text"
            raise UserError(f"{len(tokens)} tokens are too few: {needed}", allowed=allowed)

    @functools.cached_property
    def _order(self) -> Any:
        import grain  # slow to import, and not needed for `spread_rows`

        return grain.MapDataset.range(self.n_rows).seed(self.seed).shuffle().repeat()

    def __call__(self, step: int) -> np.ndarray:
        """Returns the batch of one step, 0 or more without end: int32 [batch_size, sequence_length + 1]."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Returns `self(step)[start:stop]`, for a process that holds a part of the batch; no other rows are read."""
        if not 0 <= start <= stop <= self.batch_size:
            raise IndexError(f"rows {start}:{stop} of a batch of {self.batch_size}")
        order, first = self._order, step * self.batch_size
        return self._rows([int(order[first + i]) for i in range(start, stop)])

    def spread_rows(self, n: int) -> np.ndarray:
        """Returns rows spread evenly over the whole text, in text order, for evaluation: floor(i * n_rows / n), i < n.

        They are int32 [n, sequence_length + 1]. Raises UserError if there are fewer rows.
        """
        if n > self.n_rows:
            problem = f"{len(self.tokens)} tokens make {self.n_rows} rows of {self.sequence_length}, not {n}"
            raise UserError(problem, allowed=f"at most {self.n_rows} rows, shorter rows or more text")
        return self._rows([i * self.n_rows // n for i in range(n)])

    def _rows(self, indices: list[int]) -> np.ndarray:
        length, begin = self.sequence_length, 0
        rows = np.empty((len(indices), length + 1), np.int32)
        if self.bos_id is not None:
            rows[:, 0], begin = self.bos_id, 1
        for row, i in zip(rows, indices, strict=True):
            row[begin:] = self.tokens[i * length : i * length + length + 1 - begin]
        return rows


class PackedBatches(TokenBatches):
    """`TokenBatches` whose rows hold whole documents, and pieces of those that are longer than a row.

    A row has `sequence_length + 1` ids, then as many segment ids: 1 for the tokens of its first document, 2 for the
    next, ..., 0 for padding. Pieces of a long document are cut like the rows of `TokenBatches`, and with `bos_id` every
    document and piece starts with it. They are put together by best fit, the longest first, which leaves little
    padding. The tokens are read once at the start, to find where documents end.

    >>> packed = PackedBatches(np.array([5, 0, 7, 8, 9, 4, 6, 0, 3, 0]), 4, 1, seed=0, eos_id=0)
    >>> packed.spread_rows(2)
    array([[7, 8, 9, 4, 6, 1, 1, 1, 1, 1],
           [5, 0, 6, 0, 0, 1, 1, 2, 2, 0]], dtype=int32)
    """

    def __init__(
        self,
        tokens: Any,
        sequence_length: int,
        batch_size: int,
        seed: int,
        bos_id: int | None = None,
        *,
        eos_id: int,
    ):
        """Plans the rows of integers [n] in which `eos_id` ends every document; other arguments are the base's."""
        super().__init__(tokens, sequence_length, batch_size, seed, bos_id)
        starts, sizes = _pieces(self.tokens, eos_id, sequence_length, int(bos_id is None))
        row_of = _best_fit(sizes + (bos_id is not None), sequence_length + 1)
        order = np.argsort(row_of, kind="stable")
        self._starts, self._sizes = starts[order], sizes[order]
        self.n_rows = int(row_of.max(initial=-1)) + 1
        self._bounds = np.searchsorted(row_of[order], np.arange(self.n_rows + 1))
        if self.n_rows < batch_size:
            problem = f"{len(tokens)} tokens make {self.n_rows} packed rows of {sequence_length}, not {batch_size}"
            raise UserError(problem, allowed=f"a batch of at most {self.n_rows} rows, shorter rows or more text")

    def _rows(self, indices: list[int]) -> np.ndarray:
        rows = np.zeros((len(indices), 2, self.sequence_length + 1), np.int32)
        for (ids, segments), i in zip(rows, indices, strict=True):
            end = 0
            for number, piece in enumerate(range(self._bounds[i], self._bounds[i + 1]), 1):
                first, begin, size = end, end + (self.bos_id is not None), self._sizes[piece]
                end = begin + size
                ids[first:begin] = self.bos_id or 0
                ids[begin:end] = self.tokens[self._starts[piece] : self._starts[piece] + size]
                segments[first:end] = number
        return rows.reshape(len(indices), -1)


def _pieces(tokens: Any, eos_id: int, length: int, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the pieces of documents start, and their sizes; neighbours share a token if `shared` is 1."""
    at_once = 2**26  # of what may be a memory map
    parts = ((start, tokens[start : start + at_once]) for start in range(0, len(tokens), at_once))
    ends = [start + 1 + np.flatnonzero(part == eos_id) for start, part in parts]
    ends = np.unique(np.concatenate([*ends, [len(tokens)]]))
    begins = np.concatenate([[0], ends[:-1]])
    counts = -((begins - ends + shared) // length)  # none if there is no target, only the end of an empty document
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + length * numbers
    return starts, np.minimum(length + shared, np.repeat(ends, counts) - starts)


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns a row for each of the sizes: the fullest that has room for it, the largest size first."""
    row_of, rows = np.zeros(len(sizes), np.int64), 0
    rooms: list[int] = []  # what is left of the rows, sorted, each number once
    with_room: dict[int, list[int]] = defaultdict(list)
    for i in np.argsort(-sizes, kind="stable").tolist():
        at = bisect.bisect_left(rooms, sizes[i])
        if at == len(rooms):
            rooms.append(capacity)
            with_room[capacity].append(rows)
            rows += 1
        room, left = rooms[at], int(rooms[at] - sizes[i])
        row_of[i] = row = with_room[room].pop()
        if not with_room[room]:
            del rooms[at]
        if not with_room[left]:
            bisect.insort(rooms, left)
        with_room[left].append(row)
    return row_of


def _repeated(part: preparation.Part, share: float) -> preparation.Part:
    described = f"{part.source.description}, {share:.0%} of its passages repeated"
    source = dataclasses.replace(part.source, description=described)
    return dataclasses.replace(
        part, source=source, text=lambda document: preparation.repeat_passages(part.text(document), share)
    )


def _open_pair(train_path: Path | str, validation_path: Path | str, config: DataConfig) -> Dataset:
    open_file = functools.partial(token_files.open_token_file, verify=config.verify, tokenizer=config.tokenizer)
    train, validation = open_file(train_path), open_file(validation_path)
    if config.pack and (last := int(train.tokens[-1:][0])) != train.info.eos_id:  # as datatrove may be told
        problem = f"the last document of {train_path} ends with the id {last}, not {train.info.eos_id}, end of text"
        raise UserError(problem, allowed="data.pack=false, or datatrove's eos_token, which ends every document")
    if train.info.tokenizer_sha256 != validation.info.tokenizer_sha256:
        names = f"{train.info.tokenizer}, {validation.info.tokenizer}"
        problem = f"{train_path} and {validation_path} were created with different tokenizers ({names})"
        raise UserError(problem, allowed="two files of the same tokenizer")
    tokenizer = train.path.with_name("tokenizer.json")
    if train.path.suffix == ".ds":
        tokenizer = Path(config.tokenizer)
    kept = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
    info, counts = dataclasses.asdict(train.info), ("n_tokens", "n_bytes", "n_documents", "data_sha256")
    of_both = ("source", "source_sha256", "file_count", "tokenizer", "tokenizer_sha256", "bos_id")
    return Dataset(
        vocab_size=train.info.vocab_size,
        bos_id=train.info.bos_id,
        eos_id=train.info.eos_id,
        train=train.tokens,
        validation=validation.tokens,
        validation_bytes=validation.info.n_bytes,
        tokenizer_path=tokenizer if kept == train.info.tokenizer_sha256 else None,
        provenance={
            **{name: info[name] for name in of_both},
            "train": {name: info[name] for name in counts},
            "validation": {name: getattr(validation.info, name) for name in counts},
        },
    )
