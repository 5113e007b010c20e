"""Small tasks beside perplexity, asked of models whose answers are known."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_results import made_up

from orthojax.config import Config, replace
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.downstream import ASKED, CLAIMS, DISTANCES, EXPERIMENT, bracket_ids, with_copies
from orthojax.model import LoadedModel
from orthojax.train import Inputs

V, T = 258, 64
SHORT = 12  # a row that no distance fits into, so that nothing is copied
CONFIG = replace(Config(), {"model.vocab_size": V, "data.sequence_length": T, "eval.batch_size": 16})


class Successor:
    """Says that the next token is the last one plus 1."""

    def apply(self, variables, tokens):
        return 9.0 * jax.nn.one_hot((tokens + 1) % V, V), None


class Copier:
    """Says that the next token is what followed the last earlier place of this one."""

    def apply(self, variables, tokens):
        before = jnp.tril(tokens[:, :, None] == tokens[:, None, :], -1)
        place = jnp.max(jnp.where(before, jnp.arange(tokens.shape[1]), -1), axis=-1)
        follows = jnp.take_along_axis(tokens, jnp.minimum(place + 1, tokens.shape[1] - 1), axis=1)
        return 9.0 * jax.nn.one_hot(jnp.where(place >= 0, follows, -1), V), None


class Closer:
    """Prefers one byte whatever comes."""

    def __init__(self, text):
        self.byte = ord(text)

    def apply(self, variables, tokens):
        return jnp.broadcast_to(9.0 * jax.nn.one_hot(self.byte, V), (*tokens.shape, V)), None


def asked(model, rows, bos=False, tokenizer=None):
    inputs = Inputs(lambda step: rows, rows.astype(np.int32), None, {}, None)
    loaded = LoadedModel(model, {}, replace(CONFIG, {"data.bos": bos}), tokenizer, Path())
    said = []
    found = ASKED.measure(loaded, inputs, said.append).metrics
    assert len(said) == ASKED.stages(CONFIG)
    return found


def test_endings_that_follow_are_chosen():
    rows = (np.arange(T + 1) + 7 * np.arange(20)[:, None]) % V
    assert asked(Successor(), rows)["cloze_accuracy"] == 1.0
    shuffled = np.random.default_rng(0).permuted(rows, axis=1)
    assert asked(Successor(), shuffled)["cloze_accuracy"] < 0.8


@pytest.mark.parametrize("bos", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_copier_copies_at_every_distance_and_another_does_not(bos):
    rows = np.full((4, T + 1), 257)
    copying, counting = asked(Copier(), rows, bos), asked(Successor(), rows, bos)
    for distance in DISTANCES:
        assert copying[f"induction_accuracy_{distance}"] == 1.0
        assert counting[f"induction_accuracy_{distance}"] < 0.1
    copies = with_copies(8, 65, range(10, 50), 257 if bos else None, seed=3)
    assert copies.shape == (256, 65)
    assert (copies[:, 0] == 257).all() == bos
    assert len(np.unique(copies[0, bos : bos + 8])) == 8
    np.testing.assert_array_equal(copies[:, bos : 65 - 8], copies[:, bos + 8 :])


def test_brackets_are_told_apart():
    text = "(a) [b] (c) {d} (e) [f] "
    rows = np.frombuffer((text * 20).encode(), np.uint8)[: 16 * (SHORT + 1)].reshape(16, SHORT + 1).astype(np.int32)
    targets = rows[:, 1:]
    share = {b: (targets == ord(b)).sum() / np.isin(targets, [ord(c) for c in ")]}"]).sum() for b in ")]}"}
    for bracket in ")]}":
        found = asked(Closer(bracket), rows, tokenizer=ByteTokenizer())
        assert found["bracket_accuracy"] == pytest.approx(share[bracket])
        assert found["bracket_majority"] == pytest.approx(share[")"])
    assert "bracket_accuracy" not in asked(Closer("("), rows)
    words = ["a", ")", " )", "))", "]", "}"]
    assert bracket_ids(lambda ids: words[ids[0]], 6) == [[1, 2], [4], [5]]


@pytest.mark.parametrize(("method", "wrong"), [("softmax1", 0), ("orthoadam", 1), ("cured", 2)])
def test_verdicts(method, wrong):
    tasks = ["cloze_accuracy", "bracket_accuracy", *(f"induction_accuracy_{d}" for d in DISTANCES)]

    def verdicts(changes):
        of = {"perplexity": 80.0, "bracket_majority": 0.6, **dict.fromkeys(tasks, 0.7)}
        results = made_up(EXPERIMENT, lambda name: of | (changes if name == method else {}), scale="tiny")
        return [judge(claim, results).verdict for claim in CLAIMS]

    assert verdicts({}) == verdicts({"cloze_accuracy": 0.69}) == ["holds"] * 3
    assert verdicts({"induction_accuracy_8": 0.67})[wrong] == "does not hold"
