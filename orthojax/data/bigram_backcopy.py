"""The Bigram-Backcopy task: a synthetic language on which attention sinks form within minutes.

A sequence starts with <s>. Most characters are followed by a draw from their bigram distribution, a few trigger
characters by a copy of the character before the trigger. The task is that of Guo et al., "Active-Dormant
Attention Heads" (arXiv:2410.13835); here the bigrams are those of any text, and the oracle is exact at <s> too.
"""

import dataclasses

import numpy as np

from orthojax.errors import UserError


def default_text() -> str:
    """The language reference inside the standard library (`pydoc_data.topics`), about 460,000 characters.

    Raises:
      UserError: If this Python comes without it.
    """
    try:
        import pydoc_data.topics  # type: ignore[import-untyped]
    except ImportError:
        raise UserError("this Python comes without pydoc_data.topics", allowed="a complete standard library") from None
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


@dataclasses.dataclass(frozen=True, eq=False)
class BigramBackcopy:
    """The task, made from the character statistics of a text with `from_text`.

    Ids are those of the sorted characters, then <s>; V is their number. With T the triggers and pi the character
    frequencies, a sequence x is drawn as

      x_0 = <s>;  x_1 ~ pi without T, renormalised;
      x_{i+1} = x_{i-1} if x_i is in T (backcopy), else x_{i+1} ~ P[x_i] (bigram).

    So two triggers are never adjacent, and <s> does not recur.
    """

    characters: tuple[str, ...]  # the alphabet, sorted; id i is characters[i]
    bos_id: int  # <s>, V - 1
    triggers: np.ndarray  # int [k], the k most frequent characters, the most frequent first
    marginal: np.ndarray  # pi, float64 [V]; 0 for <s>
    first: np.ndarray  # the distribution of x_1, float64 [V]; 0 for triggers and <s>
    # P, float64 [V, V]. The row of a character has the frequencies of its successors in the text, read as a circle so
    # that its last character has one too (and pi P = pi exactly). The row of <s> is `first`.
    transition: np.ndarray
    # For sampling: all characters of the text grouped by the one before them, and those that may come first. A draw
    # from P[x] picks an occurrence of x in the text, and takes its successor.
    _successors: np.ndarray = dataclasses.field(repr=False)
    _start: np.ndarray = dataclasses.field(repr=False)
    _count: np.ndarray = dataclasses.field(repr=False)
    _first_pool: np.ndarray = dataclasses.field(repr=False)

    @classmethod
    def from_text(cls, text: str, trigger_count: int = 3) -> "BigramBackcopy":
        """The task with the character statistics of a text.

        Args:
          text: Any text, such as `default_text()`.
          trigger_count: k, the number of most frequent characters that are triggers; ties go to the smaller character.

        Raises:
          UserError: If the text does not have more than k different characters.

        >>> task = BigramBackcopy.from_text("abacabad", trigger_count=1)
        >>> task.characters, task.bos_id, task.triggers.tolist(), task.transition[1].tolist()
        (('a', 'b', 'c', 'd'), 4, [0], [1.0, 0.0, 0.0, 0.0, 0.0])
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        points, ids, count = np.unique(points, return_inverse=True, return_counts=True)
        characters = tuple(map(chr, points.tolist()))
        if len(characters) <= trigger_count:
            raise UserError(
                f"a text with {len(characters)} different characters cannot have {trigger_count} triggers",
                allowed=f"data.trigger_count less than {len(characters)}" if len(characters) > 1 else "a longer text",
            )
        bos_id, size = len(characters), len(characters) + 1
        count = np.append(count, 0)
        triggers = np.argsort(-count[:bos_id], kind="stable")[:trigger_count]

        following = np.roll(ids, -1)
        transition = np.bincount(ids * size + following, minlength=size * size).reshape(size, size).astype(np.float64)
        transition[:bos_id] /= count[:bos_id, None]
        first = np.where(np.isin(np.arange(size), triggers), 0, count)
        first = first / first.sum()
        transition[bos_id] = first
        return cls(
            characters=characters,
            bos_id=bos_id,
            triggers=triggers,
            marginal=count / count.sum(),
            first=first,
            transition=transition,
            _successors=following[np.argsort(ids, kind="stable")].astype(np.int32),
            _start=np.cumsum(count) - count,
            _count=count,
            _first_pool=ids[~np.isin(ids, triggers)].astype(np.int32),
        )

    @property
    def vocab_size(self) -> int:
        """V: the characters and <s>."""
        return self.bos_id + 1

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> np.ndarray:
        """Draws the sequences of one step: a pure function of the arguments.

        A longer `sequence_length` continues the same sequences.

        Args:
          step: Counter, 0 or more.
          batch_size: B.
          sequence_length: T, the input positions.
          seed: 0 or more; use another one for evaluation.

        Returns:
          int32 [B, T + 1]: inputs are [:, :-1], targets [:, 1:].
        """
        uniform = np.random.default_rng([seed, step]).random((sequence_length, batch_size))
        trigger = np.isin(np.arange(self.vocab_size), self.triggers)
        x = np.empty((sequence_length + 1, batch_size), np.int32)
        x[0] = self.bos_id
        x[1] = self._first_pool[(uniform[0] * len(self._first_pool)).astype(np.int64)]
        for i in range(1, sequence_length):
            place = (uniform[i] * self._count[x[i]]).astype(np.int64)  # < count, as uniform <= 1 - 2**-53
            drawn = self._successors[self._start[x[i]] + place]
            x[i + 1] = np.where(trigger[x[i]], x[i - 1], drawn)
        return np.ascontiguousarray(x.T)

    def is_trigger(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each id is a trigger; bool, the shape of `tokens`."""
        return np.isin(tokens, self.triggers)

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """The true distribution of the next token at every position.

        Args:
          tokens: int [B, T], inputs that start with <s>.

        Returns:
          float64 [B, T, V]; rows sum to one. At a trigger all mass is on the token before it, elsewhere it is the
          bigram row, at <s> `first`.

        Raises:
          ValueError: If a sequence starts with a trigger, so that nothing precedes it.
        """
        tokens = np.asarray(tokens)
        trigger = self.is_trigger(tokens)
        if trigger[:, 0].any():
            raise ValueError("a sequence starts with a trigger: the oracle needs the token before it")
        law = self.transition[tokens]
        row, position = np.nonzero(trigger)
        law[row, position] = 0.0
        law[row, position, tokens[row, position - 1]] = 1.0
        return law
