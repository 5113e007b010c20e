"""The Bigram-Backcopy task: a synthetic language on which attention sinks form within minutes.

The task comes from Guo et al., "Active-Dormant Attention Heads" (arXiv:2410.13835); here the bigrams can come from any
text, and the oracle is exact at <s> as well. The law is in NumPy float64; JAX draws from it and computes the oracle.
Every random number is a function of (seed, stream, step) and of its place in the batch, and every draw is integer
arithmetic, so a batch has the same bits on every device, mesh and precision.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.config import DataConfig, TriggerRule
from orthojax.data.sources import text_corpus
from orthojax.errors import UserError

Counts = tuple[tuple[str, str, int], ...]  # (a, b, n): b followed a n times; sorted, every pair once

TRAINING, EVALUATION = 0, 1  # streams of batches
_ONE = 2**31  # probabilities as integers, compared with 31 random bits


def default_text() -> str:
    """Returns the language reference inside the standard library (`pydoc_data.topics`), about 460,000 characters.

    Raises UserError if this Python comes without it.
    """
    try:
        import pydoc_data.topics  # type: ignore[import-untyped]
    except ImportError:
        raise UserError("this Python comes without pydoc_data.topics", allowed="a complete standard library") from None
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def count_pairs(text: str) -> Counts:
    """Counts how often each character follows each; the text is read as a circle, so its last one has a successor.

    >>> count_pairs("abac")
    (('a', 'b', 1), ('a', 'c', 1), ('b', 'a', 1), ('c', 'a', 1))
    """
    pairs = collections.Counter(zip(text, text[1:] + text[:1], strict=True))
    return tuple(sorted((a, b, n) for (a, b), n in pairs.items()))


@dataclasses.dataclass(frozen=True)
class BigramBackcopy:
    """The task, made from counts of how often each character follows each.

    Ids go to the sorted characters, then to the BOS tokens, then to the delimiter; V is their number. With triggers T
    and character frequencies pi, a sequence x is drawn as

      BOS tokens, then the first character from pi without T, renormalised;
      x_{i+1} by the rule if x_i is in T, else x_{i+1} ~ P[x_i] (bigram), or with `skip_bigram` x_{i+1} ~ P[x_{i-1}].

    The rule is one of

      backcopy           x_{i+1} = x_{i-1}: two triggers are never adjacent
      in_context_bigram  x_{i+1} = o(x_i), where the sequence draws o for each trigger, uniform over the characters that
                         are not triggers (Bietti et al., arXiv:2306.00802)
      bigram_backward    x_{i+1} ~ P[x_{i-1}]
      markov             x_{i+1} ~ P[x_i], as everywhere
      skip_bigram        x_{i+1} ~ P[x_{i-1}], as everywhere with this rule, so that every prediction needs the token
                         before; what follows the first character is drawn as the first character is

    or, with `other_rule_probability`, drawn anew at every trigger, `other_rule`, which changes nothing elsewhere: with
    rule `skip_bigram`, other rule `markov` and probability 1, only triggers do not need the token before. A delimiter
    occupies one position; the character after it is drawn from pi, and the chain is `markov` from there on.
    """

    counts: Counts  # from `count_pairs`: something follows each character
    trigger_count: int = 3  # k: the most frequent characters are triggers; ties go to the smaller character
    rule: TriggerRule = "backcopy"
    other_rule: TriggerRule = "markov"
    other_rule_probability: float = 0.0
    bos_count: int = 1  # BOS tokens at the start, each with its own id: 0, 1 or 2
    delimiter_position: int | None = None  # None: there is none

    def __post_init__(self):
        size = len(self.characters)
        if size <= self.trigger_count:
            problem = f"{size} different characters cannot have {self.trigger_count} triggers"
            raise UserError(problem, allowed=f"data.trigger_count less than {size}" if size > 1 else "a longer text")

    @classmethod
    def from_text(cls, text: str, trigger_count: int = 3, **options) -> "BigramBackcopy":
        """Makes the task with the character statistics of a text of more than k characters, such as `default_text()`.

        >>> task = BigramBackcopy.from_text("abacabad", trigger_count=1)
        >>> task.characters, task.bos_ids, task.triggers.tolist(), task.transition[1].tolist()
        (('a', 'b', 'c', 'd'), (4,), [0], [1.0, 0.0, 0.0, 0.0, 0.0])
        """
        return cls(count_pairs(text), trigger_count, **options)

    @functools.cached_property
    def characters(self) -> tuple[str, ...]:
        """The alphabet, sorted; id i is characters[i]."""
        return tuple(sorted({character for a, b, _ in self.counts for character in (a, b)}))

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """The ids of the BOS tokens: the first tokens of every sequence, in this order, which do not recur."""
        size = len(self.characters)
        return tuple(range(size, size + self.bos_count))

    @property
    def delimiter_id(self) -> int | None:
        """The id of the delimiter, V - 1; None without one."""
        return None if self.delimiter_position is None else self.vocab_size - 1

    @property
    def vocab_size(self) -> int:
        """V: characters, BOS tokens and the delimiter."""
        return len(self.characters) + self.bos_count + (self.delimiter_position is not None)

    @property
    def rules(self) -> dict[TriggerRule, float]:
        """The rules at a trigger with their probabilities, which are above 0 and add up to 1."""
        p = self.other_rule_probability
        if p == 0.0 or self.rule == self.other_rule:
            return {self.rule: 1.0}
        return {self.other_rule: 1.0} if p == 1.0 else {self.rule: 1.0 - p, self.other_rule: p}

    @functools.cached_property
    def _table(self) -> np.ndarray:
        ids = {character: i for i, character in enumerate(self.characters)}
        table = np.zeros((self.vocab_size, self.vocab_size))
        for a, b, n in self.counts:
            table[ids[a], ids[b]] = n
        return table

    @functools.cached_property
    def marginal(self) -> np.ndarray:
        """pi, float64 [V]: how often each character comes first in a pair; 0 for BOS and the delimiter."""
        count = self._table.sum(1)
        return count / count.sum()

    @functools.cached_property
    def triggers(self) -> np.ndarray:
        """The ids of the triggers, int [k], the most frequent first."""
        return np.argsort(-self.marginal, kind="stable")[: self.trigger_count]

    @functools.cached_property
    def plain(self) -> np.ndarray:
        """The ids of the characters that are not triggers, ascending."""
        return np.setdiff1d(np.arange(len(self.characters)), self.triggers)

    @functools.cached_property
    def first(self) -> np.ndarray:
        """The distribution of the first character, float64 [V]; 0 for triggers, BOS and the delimiter."""
        first = self.marginal.copy()
        first[self.triggers] = 0.0
        return first / first.sum()

    @functools.cached_property
    def transition(self) -> np.ndarray:
        """P, float64 [V, V]: what follows if no trigger acts; the row of the last BOS token is `first`."""
        law = self._table.copy()
        size = len(self.characters)
        law[:size] /= law[:size].sum(1, keepdims=True)
        for bos_id in self.bos_ids:
            law[bos_id] = self.first
        for bos_id, next_id in itertools.pairwise(self.bos_ids):
            law[bos_id] = np.arange(self.vocab_size) == next_id
        if self.delimiter_id is not None:
            law[self.delimiter_id] = self.marginal
        return law

    @property
    def rule_positions(self) -> float:
        """The first position at which triggers no longer act: the one before the delimiter, or infinity without one."""
        return math.inf if self.delimiter_position is None else self.delimiter_position - 1

    def batch(
        self, step: ArrayLike, batch_size: int, sequence_length: int, seed: ArrayLike, stream: int = TRAINING
    ) -> jax.Array:
        """Draws the sequences of one step: a pure function of the arguments, the same on any mesh, jitted or not.

        `step` is 0 or more, `seed` below 2**32, both may be traced; the streams TRAINING and EVALUATION have no batch
        in common. Returns int32 [B, T + 1], inputs [:, :-1] and targets [:, 1:]; a longer T continues the same
        sequences.
        """
        # JAX takes a Python integer as 32 bits with a sign.
        step, seed = (np.uint32(number) if isinstance(number, int) else number for number in (step, seed))
        return _batch(self, step, batch_size, sequence_length, seed, np.uint32(stream))

    def is_trigger(self, tokens: ArrayLike) -> jax.Array:
        """Marks the positions, bool [..., T], at which the rule decides what comes next: triggers up to a delimiter."""
        tokens = jnp.asarray(tokens)
        is_one = jnp.asarray(_slots(self) >= 0)[tokens]
        return is_one & jnp.broadcast_to(jnp.arange(tokens.shape[-1]) < self.rule_positions, tokens.shape)

    def oracle(self, tokens: ArrayLike) -> jax.Array:
        """Computes the true distribution of the next token at every position, given all tokens before it.

        At a trigger it is the distribution of the rule, or the mixture for both rules; for `in_context_bigram` it is
        the posterior of o, uniform at the first occurrence and, if it is the only rule, exact afterwards. Elsewhere it
        is the bigram row, with `skip_bigram` the row of the token before; at the last BOS token it is `first`. Tokens
        int [B, T] are sequences of the task, none of which starts with a trigger; the result is float32 [B, T, V],
        float64 under x64.
        """
        return _oracle(self, jnp.asarray(tokens))


def open_task(config: DataConfig) -> tuple[BigramBackcopy, dict[str, Any]]:
    """Opens the task of kind `bigram_backcopy`, with its provenance: JSON, names and the sha256 of its counts."""
    if config.paths:
        corpus = text_corpus(config.paths)
        source, counts = corpus.description, count_pairs("\n".join(document.text for document in corpus.documents()))
    else:
        source, counts = "pydoc_data.topics", count_pairs(default_text())
    rules = (config.rule, config.other_rule, config.other_rule_probability)
    delimiter = config.middle if config.delimiter else None
    task = BigramBackcopy(counts, config.trigger_count, *rules, config.bos_tokens, delimiter)
    return task, {
        "source": f"bigram_backcopy of {source}",
        "characters": "".join(task.characters),
        "counts_sha256": hashlib.sha256(json.dumps(counts).encode()).hexdigest(),
    }


def _as_integers(probability: float | np.ndarray) -> np.ndarray:
    return np.round(np.asarray(probability) * _ONE).astype(np.uint32)


def _cumulative(task: BigramBackcopy) -> tuple[jax.Array, int]:
    """Returns the cumulative rows of `transition`, then the row of `first`, flat, and their length, a power of 2."""
    # A token of probability 0 has the entry of the one before it, so it is never drawn.
    law = np.vstack([task.transition, task.first])
    width = 1 << (task.vocab_size - 1).bit_length()
    rows = np.full((len(law), width), _ONE, np.uint32)
    rows[:, : task.vocab_size] = _as_integers(np.cumsum(law, axis=1))
    return jnp.asarray(rows.reshape(-1)), width


def _slots(task: BigramBackcopy) -> np.ndarray:
    """Maps an id, or V for the state before the first token, to the number of its trigger, or -1: int32 [V + 1]."""
    slots = np.full(task.vocab_size + 1, -1, np.int32)
    slots[task.triggers] = np.arange(len(task.triggers))
    return slots


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _batch(
    task: BigramBackcopy, step: ArrayLike, batch_size: int, sequence_length: int, seed: ArrayLike, stream: ArrayLike
) -> jax.Array:
    """Draws a batch, as `BigramBackcopy.batch`, in one scan over positions."""
    B, n, V, k = batch_size, sequence_length + 1 - task.bos_count, task.vocab_size, len(task.triggers)
    (rule, _), *other = task.rules.items()
    # The key of the seed stream * 2**32 + seed; the random numbers of later positions come last.
    key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(stream), jnp.uint32(seed)]), impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(key, step), (k + n * (1 + len(other)), B), jnp.uint32)
    outputs = jnp.asarray(task.plain.astype(np.int32))[bits[:k].T % len(task.plain)]
    bits = bits[k:].reshape(n, 1 + len(other), B) >> 1
    slots = jnp.asarray(_slots(task))
    cumulative, width = _cumulative(task)

    def drawn_from(row: jax.Array, uniform: jax.Array) -> jax.Array:
        token, half = jnp.zeros_like(row), width // 2  # binary search: how many entries are at most `uniform`
        while half:
            entry = cumulative.at[row * width + token + half - 1].get(mode="promise_in_bounds")
            token, half = token + jnp.where(entry <= uniform, half, 0), half // 2
        return token

    def by_rule(rule: TriggerRule, before: jax.Array, current: jax.Array, uniform: jax.Array) -> jax.Array:
        if rule == "backcopy":
            return before
        if rule == "in_context_bigram":
            return jnp.take_along_axis(outputs, slots[current][:, None], axis=1)[:, 0]
        return drawn_from(current if rule == "markov" else before, uniform)

    def following(carry: tuple[jax.Array, jax.Array], xs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (before, current), (position, (uniform, *bits)) = carry, xs
        answer = by_rule(rule, before, current, uniform)
        for (name, probability), bit in zip(other, bits, strict=True):
            answer = jnp.where(bit < _as_integers(probability), by_rule(name, before, current, uniform), answer)
        within = position - 1 < task.rule_positions
        acts = (slots[current] >= 0) & within
        row = jnp.where(within, before, current) if task.rule == "skip_bigram" else current
        token = jnp.where(acts, answer, drawn_from(row, uniform))
        if task.delimiter_id is not None:
            token = jnp.where(position == task.delimiter_position, task.delimiter_id, token)
        return (current, token), token

    start = jnp.full(B, V, jnp.int32)
    positions = jnp.arange(task.bos_count, task.bos_count + n)
    _, tokens = jax.lax.scan(following, (start, start), (positions, bits))
    bos = jnp.broadcast_to(jnp.asarray(task.bos_ids, jnp.int32), (B, task.bos_count))
    return jnp.concatenate([bos, tokens.T], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _oracle(task: BigramBackcopy, tokens: jax.Array) -> jax.Array:
    V, dtype = task.vocab_size, jnp.result_type(float)
    transition = jnp.asarray(task.transition, dtype)
    before, acts = jnp.roll(tokens, 1, axis=1), task.is_trigger(tokens)
    laws = {
        "backcopy": lambda: jax.nn.one_hot(before, V, dtype=dtype),
        "bigram_backward": lambda: transition[before],
        "skip_bigram": lambda: transition[before],
        "markov": lambda: transition[tokens],
    }
    rules = dict(task.rules)
    in_context = rules.pop("in_context_bigram", 0.0)
    mixture = sum((p * laws[rule]() for rule, p in rules.items()), jnp.zeros((*tokens.shape, V), dtype))
    if in_context:
        mixture += in_context * _posterior(task, tokens, acts, in_context, mixture)
    law = jnp.where(acts[..., None], mixture, _elsewhere(task, tokens, transition))
    if task.delimiter_id is None or task.delimiter_position is None:
        return law
    certain = jax.nn.one_hot(task.delimiter_id, V, dtype=dtype)
    is_before = jnp.arange(tokens.shape[1]) == task.delimiter_position - 1
    return jnp.where(is_before[None, :, None], certain[None, None], law)


def _elsewhere(task: BigramBackcopy, tokens: jax.Array, transition: jax.Array) -> jax.Array:
    """Returns the law of what follows if no trigger acts, [B, T, V]."""
    if task.rule != "skip_bigram":
        return transition[tokens]
    B, V = len(tokens), len(transition)
    first = jnp.broadcast_to(jnp.asarray(task.first, transition.dtype), (B, 1, V))
    before = jnp.concatenate([first, transition[tokens[:, :-1]]], axis=1)
    position = jnp.arange(tokens.shape[1])
    own = (position < task.bos_count) | (position >= task.rule_positions)
    return jnp.where(own[None, :, None], transition[tokens], before)


def _posterior(
    task: BigramBackcopy, tokens: jax.Array, acts: jax.Array, probability: float, others: jax.Array
) -> jax.Array:
    """Computes what `in_context_bigram` predicts at a trigger: the law [B, T, V] of its output o, given the past.

    By Bayes, each earlier occurrence, followed by y, multiplies the law of o by p [o = y] + q(y), where q, the
    `others`, is the other rules' law times their probability. The result has no meaning if no rule acts.
    """
    V, k = task.vocab_size, len(task.triggers)
    slot = jax.nn.one_hot(jnp.asarray(_slots(task))[tokens], k, dtype=bool) & acts[..., None]
    uniform = np.zeros(V)
    uniform[task.plain] = 1.0 / len(task.plain)
    following = jnp.roll(tokens, -1, axis=1)  # what follows the last one is not read

    def update(known: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
        slot, following, others = xs  # [B, k], [B], [B, V]
        now = jnp.einsum("bk,bkv->bv", slot.astype(known.dtype), known, precision="highest")
        seen = probability * jax.nn.one_hot(following, V, dtype=known.dtype)
        after = now * (seen + jnp.take_along_axis(others, following[:, None], axis=1))
        total = jnp.sum(after, axis=1, keepdims=True)
        after = jnp.where(total > 0, after / jnp.where(total > 0, total, 1.0), now)
        return jnp.where(slot[..., None], after[:, None], known), now

    known = jnp.broadcast_to(jnp.asarray(uniform, others.dtype), (tokens.shape[0], k, V))
    _, predicted = jax.lax.scan(update, known, (slot.swapaxes(0, 1), following.T, others.swapaxes(0, 1)))
    return predicted.swapaxes(0, 1)
