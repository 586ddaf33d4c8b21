"""The order of the data as a pure function of the step: nothing to save, nothing to replay on a resume."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache


def batch_indices(num_rows: int, seed: int, step: int, global_batch: int) -> list[int]:
    """The rows of optimizer step ``step`` (from 0). Each epoch is a permutation of its own; epochs follow seamlessly.

    Raises:
        ValueError: no rows.
    """
    if num_rows < 1:
        raise ValueError("there is no training sequence; give more text or a smaller data.seq_len")
    positions = range(step * global_batch, (step + 1) * global_batch)
    return [_permutation(num_rows, seed, position // num_rows)[position % num_rows] for position in positions]


def rank_rows(indices: Sequence[int], dp_rank: int, dp_size: int, micro_batch: int) -> list[list[int]]:
    """One data rank's micro-batches of a global batch.

    The batch is cut into micro-steps first and into ranks then, so that micro-step m holds the same rows on two ranks
    of 1 as on one rank of 2.

    Raises:
        ValueError: the batch does not divide into micro-batches of all ranks.
    """
    width = micro_batch * dp_size
    if len(indices) % width:
        raise ValueError(
            f"train.global_batch={len(indices)} must be a multiple of micro_batch={micro_batch} x {dp_size} data ranks"
        )
    starts = range(dp_rank * micro_batch, len(indices), width)
    return [list(indices[start : start + micro_batch]) for start in starts]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_rows))
    random.Random(f"{seed}.{epoch}").shuffle(order)
    return tuple(order)
