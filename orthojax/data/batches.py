"""Batches of fixed-length rows of a token file, as a pure function of the seed and the step."""

import functools
from typing import Any

import numpy as np

from orthojax.data.token_shards import JoinedTokens, Tokens
from orthojax.errors import UserError


class TokenBatches:
    """Rows of `sequence_length + 1` ids; inputs are row[:-1] and targets row[1:].

    The tokens are cut into consecutive rows, row i starting at token i * T. Every row comes once in an epoch, in an
    order that depends on the seed and the epoch; batches run across the end of an epoch. Calling with a step gives
    the same batch in any order, in any process and after any restart, so the position in the data is the step.

    >>> batches = TokenBatches(np.arange(9), sequence_length=4, batch_size=2, seed=0)
    >>> batches.spread_rows(2)
    array([[0, 1, 2, 3, 4],
           [4, 5, 6, 7, 8]], dtype=int32)
    >>> TokenBatches(np.arange(9), sequence_length=4, batch_size=2, seed=0, bos_id=99).spread_rows(2)
    array([[99,  0,  1,  2,  3],
           [99,  4,  5,  6,  7]], dtype=int32)
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        batch_size: int,
        seed: int,
        bos_id: int | None = None,
    ):
        """Cuts the tokens into rows; nothing is read yet.

        Args:
          tokens: Integers [n], usually the memory map of a token file or those of several.
          sequence_length: T, the input positions of a row.
          batch_size: Rows of a batch.
          seed: Seed of the order of the rows.
          bos_id: Where given, row i is [bos, tok[i*T], ..., tok[i*T + T-1]]: every row starts with this id, and every
            token is a target. Otherwise it is [tok[i*T], ..., tok[i*T + T]]: neighbours share a token, and the very
            first one is no target.

        Raises:
          UserError: Where the tokens do not fill one batch.
        """
        extra = 0 if bos_id is not None else 1  # the last target lies one past the inputs unless bos shifts them
        # Still the memory map, but slices of a plain array are cheaper.
        self.tokens = tokens if isinstance(tokens, JoinedTokens) else np.asarray(tokens)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.bos_id = bos_id
        self.n_rows = max(0, (len(tokens) - extra) // sequence_length)
        if self.n_rows < batch_size:
            raise UserError(
                f"{len(tokens)} tokens are too few for a batch of {batch_size} rows of {sequence_length}: "
                f"{batch_size * sequence_length + extra} are needed",
                allowed=f"a batch of at most {self.n_rows} rows, shorter rows or more text",
            )

    @functools.cached_property
    def _order(self) -> Any:
        import grain  # slow to import, and not needed for `spread_rows`

        return grain.MapDataset.range(self.n_rows).seed(self.seed).shuffle().repeat()

    def __call__(self, step: int) -> np.ndarray:
        """The batch of one step.

        Args:
          step: 0 or more; there is no last one.

        Returns:
          int32 [batch_size, sequence_length + 1].
        """
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Some rows of the batch of one step, for a process that holds a part of it; no others are read.

        Args:
          step: 0 or more.
          start: The first row of the batch.
          stop: The row after the last, at most batch_size.

        Returns:
          int32 [stop - start, sequence_length + 1], equal to `self(step)[start:stop]`.
        """
        if not 0 <= start <= stop <= self.batch_size:
            raise IndexError(f"rows {start}:{stop} of a batch of {self.batch_size}")
        order, first = self._order, step * self.batch_size
        return self._rows([int(order[first + i]) for i in range(start, stop)])

    def spread_rows(self, n: int) -> np.ndarray:
        """Rows spread evenly over the whole text, in its order, for evaluation.

        Args:
          n: Number of rows.

        Returns:
          int32 [n, sequence_length + 1]: the rows floor(i * n_rows / n).

        Raises:
          UserError: Where there are fewer rows.
        """
        if n > self.n_rows:
            raise UserError(
                f"{len(self.tokens)} tokens make {self.n_rows} rows of {self.sequence_length}, but {n} are wanted",
                allowed=f"at most {self.n_rows} rows, shorter rows or more text",
            )
        return self._rows([i * self.n_rows // n for i in range(n)])

    def _rows(self, indices: list[int]) -> np.ndarray:
        length, begin = self.sequence_length, 0
        rows = np.empty((len(indices), length + 1), np.int32)
        if self.bos_id is not None:
            rows[:, 0], begin = self.bos_id, 1
        for row, i in zip(rows, indices, strict=True):
            row[begin:] = self.tokens[i * length : i * length + length + 1 - begin]
        return rows
