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


def test_rows_are_slices_of_the_tokens():
    for step in range(6):
        batch = batches()(step)
        assert batch.dtype == np.int32
        assert batch.shape == (B, T + 1)
        np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(T + 1))
        assert (batch[:, 0] % T == 0).all()


def test_random_access_equals_iteration_and_resume():
    source = batches()
    forward = [source(step) for step in range(10)]
    for step in reversed(range(10)):
        np.testing.assert_array_equal(source(step), forward[step])
    resumed = batches()
    np.testing.assert_array_equal(resumed(7), forward[7])  # the first thing that a restarted run asks for


def test_order_equals_iteration_of_grain():
    import grain

    dataset = grain.MapDataset.range(ROWS).seed(5).shuffle().repeat(3).batch(B)
    for step, indices in enumerate(dataset.to_iter_dataset()):
        assert row_numbers(batches()(step)) == indices.tolist()


def test_another_process_agrees_and_spread_rows_do_not_import_grain():
    code = (
        "import sys\nimport numpy as np\nfrom orthojax.data import TokenBatches\n"
        f"batches = TokenBatches(np.arange({ROWS * T + 1}), {T}, {B}, 5)\n"
        "batches.spread_rows(2)\nprint('grain' in sys.modules, batches(8).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"False {batches()(8).tolist()}"


def test_epochs_hold_every_row_once_in_new_orders():
    source = batches()
    epochs = [[row for step in range(3) for row in row_numbers(source(3 * epoch + step))] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != list(range(ROWS))
    assert row_numbers(batches(seed=6)(0)) != row_numbers(batches(seed=5)(0))


def test_batches_run_across_epochs():
    source = batches(batch_size=5)
    rows = [row for step in range(12) for row in row_numbers(source(step))]
    for epoch in range(5):
        assert sorted(rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))


def test_layout_with_bos():
    source = batches(tokens=np.arange(ROWS * T), bos_id=999)
    assert source.n_rows == ROWS
    rows = source.spread_rows(ROWS)
    assert (rows[:, 0] == 999).all()
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(ROWS * T))  # every token is a target, once
    batch = source(2)
    assert (batch[:, 0] == 999).all()
    np.testing.assert_array_equal(batch[:, 1:], batch[:, 1:2] + np.arange(T))


def test_layout_without_bos():
    rows = batches().spread_rows(ROWS)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(1, ROWS * T + 1))
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(ROWS * T))
    assert (batches(bos_id=0).spread_rows(3)[:, 0] == 0).all()  # 0 is an id


def test_too_few_tokens():
    exact = B * T + 1
    assert batches(tokens=np.arange(exact)).n_rows == B
    with pytest.raises(
        UserError, match=f"{exact - 1} tokens are too few for a batch of 4 rows of 3: {exact} are needed"
    ):
        batches(tokens=np.arange(exact - 1))
    assert batches(tokens=np.arange(B * T), bos_id=0).n_rows == B
    with pytest.raises(UserError, match=f"{B * T} are needed"):
        batches(tokens=np.arange(B * T - 1), bos_id=0)
    with pytest.raises(UserError, match="37 tokens make 12 rows of 3, but 13 are wanted"):
        batches().spread_rows(ROWS + 1)
    with pytest.raises(UserError, match="too few"):
        batches(tokens=np.arange(0))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_read_their_rows_of_the_one_batch(processes):
    source, share = batches(batch_size=8), 8 // processes
    for step in (0, 3, 11):
        parts = [batches(batch_size=8).rows(step, p * share, (p + 1) * share) for p in range(processes)]
        np.testing.assert_array_equal(np.concatenate(parts), source(step))
    assert source.rows(0, 3, 3).shape == (0, T + 1)
    with pytest.raises(IndexError, match="rows 4:9 of a batch of 8"):
        source.rows(0, 4, 9)


def test_no_other_rows_are_read():
    """A part of a batch touches no more of the file than its own rows."""
    read = []

    class Watched(JoinedTokens):
        def __init__(self):
            pass

        def __len__(self):
            return ROWS * T + 1

        def __getitem__(self, part):
            read.append(part.start // T)
            return np.arange(part.start, part.stop)

    source = TokenBatches(Watched(), T, B, 5)
    rows = source.rows(4, 1, 3)
    assert read == row_numbers(rows) == row_numbers(batches()(4))[1:3]
