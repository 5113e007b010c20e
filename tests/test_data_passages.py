"""Repeated passages: what is repeated, how often, and how the corpora use it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthojax.config import DataConfig
from orthojax.data import load_tokenizer, open_dataset, repeat_passages
from orthojax.errors import UserError

# Every character differs from its neighbours for 20,000 characters, so that a repeat cannot be mistaken.
NUMBERED = "".join(chr(0x4E00 + i) for i in range(20_000))


def passages(text: str) -> list[tuple[str, int]]:
    """The passages of a text made of `NUMBERED`, and how often each is written; neighbours written once are joined."""
    found, start = [], 0
    while start < len(text):
        first = text[start]
        later = [i for i in (text.find(first, start + 1), text.rfind(first, start + 1)) if i > 0]
        if not later:
            end = start + 1
            while end < len(text) and text.count(text[end]) == 1:
                end += 1
            found.append((text[start:end], 1))
            start = end
        else:
            length = later[0] - start
            found.append((text[start : start + length], 1 + len(set(later))))
            start += length * found[-1][1]
    return found


def test_every_passage_is_written_two_or_three_times():
    found = passages(repeat_passages(NUMBERED, 1.0))
    assert "".join(passage for passage, _ in found) == NUMBERED
    lengths = [len(passage) for passage, _ in found]
    assert set(lengths[:-1]) <= set(range(40, 111))
    assert len(set(lengths)) > 60  # of 71 lengths, with 266 passages
    times = np.array([many for _, many in found])
    assert set(times.tolist()) == {2, 3}
    assert abs(np.mean(times == 3) - 0.3) < 3 * np.sqrt(0.3 * 0.7 / len(times))


@given(st.text(max_size=600), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_any_text_keeps_its_own(text, share, seed):
    made = repeat_passages(text, share, seed)
    assert made == repeat_passages(text, share, seed)
    assert len(text) <= len(made) <= 3 * len(text)
    assert set(made) == set(text)
    assert made.startswith(text[:40])
    assert repeat_passages(text, 0.0, seed) == text


def test_a_share_of_them_and_the_seed():
    assert repeat_passages(NUMBERED, 0.0) == NUMBERED
    third, two_thirds = ({p for p, many in passages(repeat_passages(NUMBERED, s)) if many > 1} for s in (1 / 3, 2 / 3))
    assert third < two_thirds
    repeated = sum(map(len, third)) / len(NUMBERED)
    assert 0.23 < repeated < 0.43
    assert repeat_passages(NUMBERED, 0.5, 1) != repeat_passages(NUMBERED, 0.5, 2)


def test_corpora(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i} " + NUMBERED[:3000])
    files = tuple(str(tmp_path / f"{i}.txt") for i in range(3))
    plain = DataConfig(kind="text", paths=files, tokenizer="bytes")
    repeated = dataclasses.replace(plain, repeated_share=0.5)
    opened = [open_dataset(config, tmp_path / "cache") for config in (plain, repeated)]
    opened.append(open_dataset(dataclasses.replace(repeated, repeat_seed=1), tmp_path / "cache"))
    assert len({np.asarray(of.train).tobytes() for of in opened}) == 3
    text = load_tokenizer(opened[1].tokenizer_path).decode(opened[1].train)
    wanted = [repeat_passages(f"{i} {NUMBERED[:3000]}"[: 3002 - 300], 0.5) for i in range(3)]
    assert text == "".join(wanted)
    assert opened[1].provenance["source"].endswith("50% of its passages repeated")
    assert opened[0].provenance["source"] == "0.txt, 1.txt, 2.txt"
    assert opened[1].validation_bytes > opened[0].validation_bytes


def test_refused():
    for changes, words in (
        ({"repeated_share": 1.5}, "0 to 1"),
        ({"repeat_seed": -1}, "0 to 2"),
        ({"kind": "bigram_backcopy", "repeated_share": 0.5}, "is not read by"),
    ):
        with pytest.raises(UserError, match=words):
            DataConfig(**changes)
