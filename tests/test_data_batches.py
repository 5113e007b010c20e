"""Batches: a pure function of seed and step, every row once in an epoch, and the two layouts of a row."""

import subprocess
import sys

import numpy as np
import pytest

from orthojax.data import TokenBatches
from orthojax.data.token_files import JoinedTokens
from orthojax.errors import UserError

T, B, ROWS = 3, 4, 12


def batches(**changes):
    """Twelve rows, so that three batches are an epoch; token i has the value i."""
    arguments = {"tokens": np.arange(ROWS * T + 1, dtype=np.uint16), "sequence_length": T, "batch_size": B, "seed": 5}
    return TokenBatches(**(arguments | changes))


def row_numbers(batch):
    return (batch[:, 0] // T).tolist()


@pytest.mark.parametrize("batch_size", [B, 5])
def test_batches_in_any_order_are_those_of_grain(batch_size):
    """Also where a batch runs across the end of an epoch, and for a restarted run, whatever it asks for first."""
    import grain

    dataset = grain.MapDataset.range(ROWS).seed(5).shuffle().repeat(5).batch(batch_size)
    expected = [indices.tolist() for indices in dataset.to_iter_dataset()]
    for steps in (range(12), range(11, -1, -1)):
        source = batches(batch_size=batch_size)
        for step in steps:
            batch = source(step)
            assert batch.dtype == np.int32
            np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(T + 1))
            assert (batch[:, 0] % T == 0).all()
            assert row_numbers(batch) == expected[step]
    rows = [row for indices in expected for row in indices]
    epochs = [tuple(rows[i : i + ROWS]) for i in range(0, 4 * ROWS, ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(range(ROWS)), *epochs}) == 5
    assert row_numbers(batches(seed=6)(0)) != row_numbers(batches(seed=5)(0))


def test_another_process_agrees_and_spread_rows_do_not_import_grain():
    code = (
        "import sys\nimport numpy as np\nfrom orthojax.data import TokenBatches\n"
        f"batches = TokenBatches(np.arange({ROWS * T + 1}), {T}, {B}, 5)\n"
        "batches.spread_rows(2)\nprint('grain' in sys.modules, batches(8).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"False {batches()(8).tolist()}"


def test_layouts_of_rows():
    rows = batches().spread_rows(ROWS)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(1, ROWS * T + 1))
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(ROWS * T))
    source = batches(tokens=np.arange(ROWS * T), bos_id=999)
    assert source.n_rows == ROWS
    rows = source.spread_rows(ROWS)
    assert (rows[:, 0] == 999).all()
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(ROWS * T))  # every token is a target, once
    batch = source(2)
    assert (batch[:, 0] == 999).all()
    np.testing.assert_array_equal(batch[:, 1:], batch[:, 1:2] + np.arange(T))
    assert (batches(bos_id=0).spread_rows(3)[:, 0] == 0).all()  # 0 is an id


def test_too_few_tokens():
    for bos_id, needed in ((None, B * T + 1), (0, B * T)):
        assert batches(tokens=np.arange(needed), bos_id=bos_id).n_rows == B
        message = f"{needed - 1} tokens are too few for a batch of 4 rows of 3: {needed} are needed"
        with pytest.raises(UserError, match=message):
            batches(tokens=np.arange(needed - 1), bos_id=bos_id)
    with pytest.raises(UserError, match="37 tokens make 12 rows of 3, but 13 are wanted"):
        batches().spread_rows(ROWS + 1)
    with pytest.raises(UserError, match="too few"):
        batches(tokens=np.arange(0))


def test_processes_read_their_rows_of_the_one_batch_and_no_others():
    read = []

    class Watched(JoinedTokens):
        def __init__(self):
            pass

        def __len__(self):
            return ROWS * T + 1

        def __getitem__(self, part):
            read.append(part.start // T)
            return np.arange(part.start, part.stop)

    source, whole = batches(tokens=Watched(), batch_size=8), batches(batch_size=8)
    for step in (0, 3, 11):
        for share in (2, 4):
            parts = [source.rows(step, start, start + share) for start in range(0, 8, share)]
            np.testing.assert_array_equal(np.concatenate(parts), whole(step))
            assert read == row_numbers(whole(step))
            read.clear()
    assert source.rows(0, 3, 3).shape == (0, T + 1)
    with pytest.raises(IndexError, match="rows 4:9 of a batch of 8"):
        source.rows(0, 4, 9)
