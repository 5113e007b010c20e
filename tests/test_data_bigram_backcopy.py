"""Bigram-Backcopy: the invariants of the task, its statistics against independent references, and the exact oracle."""

import collections

import numpy as np
import pytest

from orthojax.data.bigram_backcopy import BigramBackcopy, default_text
from orthojax.errors import UserError

B, T = 1024, 64


@pytest.fixture(scope="module")
def task():
    return BigramBackcopy.from_text(default_text(), 3)


@pytest.fixture(scope="module")
def tokens(task):
    return task.batch(0, B, T, seed=7)


def test_statistics_against_plain_counting(task):
    """And the laws that follow from them."""
    text = default_text()
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
    assert task.bos_id == len(task.characters) == task.vocab_size - 1
    np.testing.assert_allclose(task.transition.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(task.marginal @ task.transition, task.marginal, atol=1e-15)  # pi is stationary
    assert (task.transition[:, task.bos_id] == 0).all()
    expected = task.marginal.copy()
    expected[task.triggers] = 0
    np.testing.assert_allclose(task.first, expected / expected.sum(), rtol=1e-12)
    np.testing.assert_array_equal(task.transition[task.bos_id], task.first)  # not the marginal, which has triggers


def test_batches_keep_the_invariants_and_are_a_function_of_seed_and_step(task, tokens):
    assert tokens.shape == (B, T + 1)
    assert tokens.dtype == np.int32
    trigger = task.is_trigger(tokens)
    assert (tokens[:, 0] == task.bos_id).all()
    assert (tokens[:, 1:] < task.bos_id).all()
    assert not trigger[:, :2].any()
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()
    row, i = np.nonzero(trigger[:, :-1])
    assert len(row) > 1000
    np.testing.assert_array_equal(tokens[row, i + 1], tokens[row, i - 1])
    task.batch(5, 3, 9, seed=1)
    np.testing.assert_array_equal(task.batch(0, B, T, seed=7), tokens)
    np.testing.assert_array_equal(task.batch(0, B, 9, seed=7), tokens[:, :10])
    again = BigramBackcopy.from_text(default_text(), 3)
    np.testing.assert_array_equal(again.batch(3, 4, 8, seed=2), task.batch(3, 4, 8, seed=2))
    different = {task.batch(step, 4, 32, seed=seed).tobytes() for step in range(3) for seed in range(3)}
    assert len(different) == 9
    assert len({row.tobytes() for row in tokens}) > 0.99 * B


def chi_square_z(counts, law):
    """How many standard deviations Pearson's statistic lies from its mean, over cells that are expected at all."""
    expected = counts.sum(-1, keepdims=True) * law
    assert (counts[expected == 0] == 0).all()
    keep = expected > 5
    freedom = (keep.sum(-1) - 1).clip(0).sum()
    statistic = ((counts - expected) ** 2 / np.where(keep, expected, 1))[keep].sum()
    return (statistic - freedom) / np.sqrt(2 * freedom)


def test_frequencies(task, tokens):
    many = np.concatenate([task.batch(step, B, T, seed=11) for step in range(4)])
    first = np.bincount(many[:, 1], minlength=task.vocab_size)
    assert abs(chi_square_z(first, task.first)) < 5
    plain = ~task.is_trigger(many[:, :-1])
    plain[:, 0] = False
    for part in (slice(0, T // 2), slice(T // 2, T), slice(0, T)):  # early and late in a row
        pairs = np.zeros((task.vocab_size, task.vocab_size))
        np.add.at(pairs, (many[:, :-1][:, part][plain[:, part]], many[:, 1:][:, part][plain[:, part]]), 1)
        assert abs(chi_square_z(pairs, task.transition)) < 5
    shifted = np.roll(task.transition, 1, axis=0) * 0.1 + task.transition * 0.9
    assert chi_square_z(pairs * (shifted > 0), shifted) > 50  # so the test can tell


def test_oracle_rows(task, tokens):
    inputs = tokens[:64, :-1]
    law = task.oracle(inputs)
    assert law.shape == (64, T, task.vocab_size)
    assert law.dtype == np.float64
    np.testing.assert_allclose(law.sum(-1), 1.0, rtol=1e-12)
    for b in range(64):
        for i in range(T):
            if inputs[b, i] in task.triggers:
                assert law[b, i, inputs[b, i - 1]] == 1.0
            else:
                np.testing.assert_array_equal(law[b, i], task.transition[inputs[b, i]])
    np.testing.assert_array_equal(law[:, 0], np.broadcast_to(task.first, law[:, 0].shape))
    with pytest.raises(ValueError, match="starts with a trigger"):
        task.oracle(np.array([[int(task.triggers[0]), 1]]))


def test_oracle_has_the_least_cross_entropy(task, tokens):
    law = task.oracle(tokens[:, :-1])

    def nats(prediction):
        return -np.log(np.take_along_axis(prediction, tokens[:, 1:, None], -1)).mean()

    oracle = nats(law)
    entropy = -(law * np.log(np.where(law > 0, law, 1))).sum(-1).mean()
    assert oracle == pytest.approx(entropy, rel=0.01)  # finite, so every token drawn was possible
    sharper = law**1.1
    for other in (0.98 * law + 0.02 / task.vocab_size, sharper / sharper.sum(-1, keepdims=True)):
        assert nats(other) > oracle
    with_triggers_at_bos = law.copy()
    with_triggers_at_bos[:, 0] = task.marginal
    assert nats(with_triggers_at_bos) == pytest.approx(
        oracle - np.log(1 - task.marginal[task.triggers].sum()) / T, rel=1e-9
    )


def test_last_character_without_successor():
    task = BigramBackcopy.from_text("aabaab" * 3 + "z", trigger_count=1)
    z, a = task.characters.index("z"), task.characters.index("a")
    assert task.transition[z, a] == 1.0  # the text is a circle
    assert np.isfinite(task.transition).all()
    tokens = task.batch(0, 500, 20, seed=0)
    after_z = tokens[:, 1:][tokens[:, :-1] == z]
    assert len(after_z) > 100
    assert (after_z == a).all()


def test_ties_and_too_few_characters():
    task = BigramBackcopy.from_text("cbacba", trigger_count=2)
    assert [task.characters[i] for i in task.triggers] == ["a", "b"]
    assert task.is_trigger(np.arange(4)).tolist() == [True, True, False, False]
    for text, count in (("", 1), ("aaaa", 1), ("abc", 3)):
        with pytest.raises(UserError, match=f"cannot have {count} triggers"):
            BigramBackcopy.from_text(text, count)


def test_missing_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"pydoc_data\.topics"):
        default_text()
