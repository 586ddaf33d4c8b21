"""The order of data: each row once an epoch, the same for every mesh, a function of the step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.sampler import batch_indices, permutation, rank_rows

ROWS, SEED, BATCH = st.integers(1, 40), st.integers(-5, 2**33), st.integers(1, 17)


@given(rows=ROWS, seed=SEED, batch=BATCH)
def test_every_epoch_takes_each_row_once(rows: int, seed: int, batch: int) -> None:
    """Also where the batch is larger than the set, and where an epoch ends inside a batch."""
    stream = [index for step in range(3 * rows) for index in batch_indices(rows, seed, step, batch)]
    for start in range(0, len(stream) - rows + 1, rows):
        assert sorted(stream[start : start + rows]) == list(range(rows))


@given(rows=ROWS, seed=SEED, small=st.integers(1, 5), factor=st.integers(1, 4), step=st.integers(0, 9))
def test_batches_cut_one_stream(rows: int, seed: int, small: int, factor: int, step: int) -> None:
    parts = [batch_indices(rows, seed, step * factor + part, small) for part in range(factor)]
    assert batch_indices(rows, seed, step, small * factor) == [index for part in parts for index in part]


@given(micro=st.integers(1, 3), size=st.integers(1, 4), accumulation=st.integers(1, 3))
def test_micro_steps_hold_the_same_rows_on_every_mesh(micro: int, size: int, accumulation: int) -> None:
    indices = list(range(100, 100 + micro * size * accumulation))
    alone = rank_rows(indices, 0, 1, micro * size)
    ranks = [rank_rows(indices, rank, size, micro) for rank in range(size)]
    assert len(alone) == accumulation
    for step, together in enumerate(alone):
        assert [index for rank in ranks for index in rank[step]] == together
        assert all(len(rank[step]) == micro for rank in ranks)


def test_epochs_and_seeds_differ() -> None:
    epochs = [tuple(batch_indices(50, 0, step, 50)) for step in range(3)]
    assert len(set(epochs)) == 3
    assert batch_indices(50, 0, 0, 50) != batch_indices(50, 1, 0, 50)


def test_the_order_never_changes_between_versions() -> None:
    """A run that is resumed with another numpy must go on with the same rows."""
    assert permutation(8, 0).tolist() == [3, 7, 0, 1, 2, 4, 6, 5]
    assert batch_indices(5, 7, 1, 4) == [0, 3, 2, 0]


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="the training set has no rows: give more text"):
        batch_indices(0, 0, 0, 4)
    with pytest.raises(ValueError, match="global_batch=0 must be at least 1"):
        batch_indices(3, 0, 0, 0)
    message = r"train\.global_batch=6 must be a multiple of train\.micro_batch=2 x 2 data rank\(s\) = 4"
    with pytest.raises(ValueError, match=message):
        rank_rows(range(6), 0, 2, 2)
    with pytest.raises(ValueError, match=r"dp_rank=2 must be in \[0, 2\)"):
        rank_rows(range(4), 2, 2, 2)
