"""Bigram-Backcopy: the invariants of the task, its statistics against independent references, and the exact oracle."""

import collections
import functools
import itertools
import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from thinned import quick_and_slow

from orthojax.config import DataConfig
from orthojax.data import BigramBackcopy, default_text, open_task
from orthojax.data.bigram_backcopy import EVALUATION, TRAINING

B2, T2 = 256, 23
TEXT = "the cat sat, a hat set. " * 3 + "see the tea at sea, that etc. "


def test_statistics_against_plain_counting():
    """And the laws that follow from them."""
    task, text = BigramBackcopy.from_text(default_text(), 3), default_text()
    V = task.vocab_size
    follows = collections.defaultdict(collections.Counter)
    for a, b in zip(text, text[1:] + text[0], strict=True):
        follows[a][b] += 1
    shares = collections.Counter(text)
    assert list(task.characters) == sorted(shares)
    for i, a in enumerate(task.characters):
        assert task.marginal[i] == pytest.approx(shares[a] / len(text), rel=1e-12)
        expected = [follows[a][b] / sum(follows[a].values()) for b in task.characters]
        np.testing.assert_allclose(task.transition[i], [*expected, 0.0], rtol=1e-12)
    most = [character for character, _ in shares.most_common(3)]
    assert [task.characters[i] for i in task.triggers] == most == [" ", "e", "t"]
    assert task.bos_ids == (len(task.characters),) == (V - 1,)
    np.testing.assert_allclose(task.transition.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(task.marginal @ task.transition, task.marginal, atol=1e-15)  # pi is stationary
    assert (task.transition[:, V - 1] == 0).all()
    expected = task.marginal.copy()
    expected[task.triggers] = 0
    np.testing.assert_allclose(task.first, expected / expected.sum(), rtol=1e-12)
    np.testing.assert_array_equal(task.transition[V - 1], task.first)  # not the marginal, which has triggers


@functools.cache
def small(**options):
    return BigramBackcopy.from_text(TEXT, 2, **options)


# One program for each; the text has few characters, so that everything can be enumerated. Rule, another rule and its
# probability, BOS tokens, position of the delimiter.
CASES = {
    "backcopy": ("backcopy", "markov", 0.0, 1, None),
    "backward": ("bigram_backward", "markov", 0.0, 1, None),
    "markov": ("markov", "markov", 0.0, 0, None),
    "skip": ("skip_bigram", "markov", 0.0, 1, None),
    "skip, not at triggers": ("skip_bigram", "markov", 1.0, 2, 17),
    "skip or in-context": ("skip_bigram", "in_context_bigram", 0.3, 0, None),
    "in-context": ("in_context_bigram", "markov", 0.0, 2, 18),
    "backcopy or in-context": ("backcopy", "in_context_bigram", 0.3, 1, None),
    "in-context or backward": ("in_context_bigram", "bigram_backward", 0.4, 0, 16),
}
OPTIONS = ("rule", "other_rule", "other_rule_probability", "bos_count", "delimiter_position")
CASES = {name: dict(zip(OPTIONS, row, strict=True)) for name, row in CASES.items()}
# Two of what others have one by one, or with another partner.
QUICK_AND_SLOW = quick_and_slow(CASES, ["skip or in-context", "backcopy or in-context"])


def batch_of(name, step=0, seed=0, stream=TRAINING):
    return np.asarray(small(**CASES[name]).batch(step, B2, T2, seed, stream))


def test_batches_are_function_of_seed_stream_and_step():
    task, tokens = small(), batch_of("backcopy")
    assert tokens.shape == (B2, T2 + 1)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(task.batch(0, B2, 9, seed=0), tokens[:, :10])
    assert BigramBackcopy.from_text(TEXT, 2) == task
    with jax.enable_x64(True):
        np.testing.assert_array_equal(batch_of("backcopy"), tokens)
    keys = itertools.product((0, 1, 2**32 - 1), (0, 1, 2**32 - 1), (TRAINING, EVALUATION))
    different = {batch_of("backcopy", step, seed, stream).tobytes() for step, seed, stream in keys}
    assert len(different) == 18


@given(st.sampled_from(list(CASES)), st.integers(0, 2**31), st.integers(0, 2**32 - 1), st.integers(0, 1))
def test_every_batch_keeps_the_invariants(name, step, seed, stream):
    task, tokens = small(**CASES[name]), batch_of(name, step, seed, stream)
    n, at, size = task.bos_count, task.delimiter_position, len(task.characters)
    assert tokens.min() >= 0
    np.testing.assert_array_equal(tokens[:, :n], np.broadcast_to(task.bos_ids, (B2, n)))  # BOS, and never again
    characters = np.delete(tokens[:, n:], [] if at is None else at - n, axis=1)
    assert characters.max() < size
    if at is not None:
        assert (tokens[:, at] == task.delimiter_id).all()
        assert task.delimiter_id == size + n == task.vocab_size - 1
    trigger = np.isin(tokens, task.triggers)
    assert not trigger[:, n].any()
    acts = np.asarray(task.is_trigger(tokens))
    np.testing.assert_array_equal(acts, trigger & (np.arange(T2 + 1) < (T2 + 1 if at is None else at - 1)))
    row, i = np.nonzero(acts[:, :-1])
    assert len(row) > 500
    if task.rules.keys() <= {"backcopy", "in_context_bigram"}:
        assert not trigger[row, i + 1].any()  # two in a row never occur where copying goes on
    if task.rules == {"backcopy": 1.0}:
        np.testing.assert_array_equal(tokens[row, i + 1], tokens[row, i - 1])
    if task.rules == {"in_context_bigram": 1.0}:
        answers = collections.defaultdict(set)
        for b, x, y in zip(row, tokens[row, i], tokens[row, i + 1], strict=True):
            answers[b, x].add(y)
        assert all(len(found) == 1 for found in answers.values())
        assert {y for found in answers.values() for y in found} == set(task.plain)


def standardised_squares(counts, mean, variance):
    """How many standard deviations the sum of squared z-scores lies from its expectation, over well-filled cells."""
    assert (counts[mean == 0] == 0).all()
    keep = variance > 5
    return (((counts - mean)[keep] ** 2 / variance[keep]).sum() - keep.sum()) / math.sqrt(2 * keep.sum())


def counts_by_context(task, tokens, law):
    """(counts, expectation, variance) of next tokens by the token that decides and whether a trigger acts, [2V, V]."""
    V, acts = task.vocab_size, np.asarray(task.is_trigger(tokens[:, :-1]))
    decides = tokens[:, :-1]
    if task.rule == "skip_bigram":
        decides = np.concatenate([decides[:, :1], decides[:, :-1]], axis=1)
    context = np.eye(2 * V)[(decides + V * acts).ravel()].T
    law = law.reshape(-1, V)
    return context @ np.eye(V)[tokens[:, 1:].ravel()], context @ law, context @ (law * (1 - law))


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_frequencies_are_those_of_the_oracle(name):
    task = small(**CASES[name])
    batches = [batch_of(name, step) for step in range(8)]
    tokens = np.concatenate(batches)
    law = np.concatenate([np.asarray(task.oracle(rows[:, :-1]), np.float64) for rows in batches])
    counts, mean, variance = counts_by_context(task, tokens, law)
    certain = variance < 1e-6
    np.testing.assert_allclose(counts[certain], mean[certain], atol=0.05)  # copies
    assert abs(standardised_squares(counts, mean, variance)) < 5
    other = 0.9 * law + 0.1 * law[:, ::-1]
    assert standardised_squares(*counts_by_context(task, tokens, other)) > 50  # so the test can tell


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_a_batch_has_same_bits_on_any_mesh(sizes):
    """And where it is split over rows, although the program that draws it is then another one."""
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    task = small(**CASES["in-context or backward"])
    draw = jax.jit(lambda step, seed: task.batch(step, B2, T2, seed), out_shardings=rows)
    drawn = draw(np.uint32(5), np.uint32(6))
    assert drawn.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_array_equal(drawn, batch_of("in-context or backward", 5, 6))


def law_by_hand(task, row):
    """The law of the next token after every prefix of one sequence, float64 [T, V], from the counts by enumeration."""
    names = sorted({a for a, *_ in task.counts})
    n, V = len(names), len(names) + task.bos_count + (task.delimiter_position is not None)
    P_, share = np.zeros((V, V)), np.zeros(V)
    for a, b, count in task.counts:
        P_[names.index(a), names.index(b)] += count
        share[names.index(a)] += count
    P_[:n] /= share[:n, None]
    share /= share.sum()
    triggers = sorted(range(n), key=lambda i: (-share[i], i))[: task.trigger_count]
    plain = [i for i in range(n) if i not in triggers]
    first = np.where(np.isin(np.arange(V), plain), share, 0) / share[plain].sum()
    p = task.other_rule_probability

    def at_trigger(rule, i, outputs):
        if rule == "backcopy":
            return np.eye(V)[row[i - 1]]
        if rule == "in_context_bigram":
            return np.eye(V)[outputs[row[i]]]
        return P_[row[i - 1] if rule in ("bigram_backward", "skip_bigram") else row[i]]

    def given_outputs(i, outputs):
        if i + 1 < task.bos_count:
            return np.eye(V)[n + i + 1]
        if i + 1 == task.bos_count:
            return first
        if i + 1 == task.delimiter_position:
            return np.eye(V)[V - 1]
        if i == task.delimiter_position:
            return share
        if row[i] in triggers and not (task.delimiter_position and i > task.delimiter_position):
            return (1 - p) * at_trigger(task.rule, i, outputs) + p * at_trigger(task.other_rule, i, outputs)
        if task.rule == "skip_bigram" and not (task.delimiter_position and i > task.delimiter_position):
            return first if i in (0, task.bos_count) else P_[row[i - 1]]
        return P_[row[i]]

    worlds = [dict(zip(triggers, outputs, strict=True)) for outputs in itertools.product(plain, repeat=len(triggers))]
    weights, laws = np.ones(len(worlds)), []
    for i in range(len(row)):
        each = np.array([given_outputs(i, world) for world in worlds])
        laws.append(weights @ each / weights.sum())
        if i + 1 < len(row):
            weights = weights * each[:, row[i + 1]]
    return np.array(laws)


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_the_oracle_is_the_law_by_enumeration(name, x64):
    task, rows = small(**CASES[name]), batch_of(name)[:8, :-1]
    law = task.oracle(rows)
    assert law.shape == (8, T2, task.vocab_size)
    assert law.dtype == np.float64
    np.testing.assert_allclose(law, [law_by_hand(task, row) for row in rows], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.sum(law, -1), 1.0, rtol=1e-12)


def test_a_task_is_opened_as_its_config_says(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"rule": "markov", "other_rule": "backcopy", "other_rule_probability": 0.25}
    paths = (str(tmp_path / "text.txt"),)
    config = DataConfig("bigram_backcopy", paths, sequence_length=9, delimiter=True, bos_tokens=2, **options)
    opened, provenance = open_task(config)
    assert opened == BigramBackcopy.from_text(TEXT, 3, bos_count=2, delimiter_position=5, **options)
    assert json.loads(json.dumps(provenance)) == provenance
    assert "text.txt" in provenance["source"]
    task, provenance = open_task(DataConfig("bigram_backcopy"))
    assert task == BigramBackcopy.from_text(default_text())
    assert provenance["source"] == "bigram_backcopy of pydoc_data.topics"
    assert provenance["characters"] == "".join(task.characters)


def test_ties_go_to_the_smaller_character():
    task = BigramBackcopy.from_text("cbacba", trigger_count=2)
    assert [task.characters[i] for i in task.triggers] == ["a", "b"]
    assert task.is_trigger(np.arange(4)).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("p", "name"), [(0.0, "backcopy"), (1.0, "backward")])
def test_interpolation_ends_in_its_two_rules(p, name):
    mixed, rows = small(other_rule="bigram_backward", other_rule_probability=p), batch_of(name)
    np.testing.assert_array_equal(mixed.batch(0, B2, T2, 0), rows)
    law = small(**CASES[name]).oracle(rows[:, :-1])
    np.testing.assert_array_equal(mixed.oracle(rows[:, :-1]), law)
