"""The order of the data as a pure function of the step: nothing to save, nothing to replay on a resume.

Position p of the run's endless stream of rows is row ``permutation(epoch)[p % rows]`` of epoch ``p // rows``. A step
takes the next ``global_batch`` positions, so neither the mesh nor the micro-batch changes what a step sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def batch_indices(num_rows: int, seed: int, step: int, global_batch: int) -> list[int]:
    """The rows of one optimizer step. Every epoch takes each row once; epochs follow one another without a gap.

    Args:
        num_rows: rows of the training set; fewer than ``global_batch`` is fine, the batch then reaches into the next
            epoch.
        seed: of the order.
        step: optimizer steps done before this one (0 for the first).
        global_batch: rows of a step, over all data ranks and micro-batches.

    Returns:
        ``global_batch`` indices.

    Raises:
        ValueError: no rows, or sizes below one.
    """
    if num_rows < 1:
        raise ValueError("the training set has no rows: give more text, or hold out less (data.valid_fraction)")
    if global_batch < 1 or step < 0:
        raise ValueError(f"global_batch={global_batch} must be at least 1, step={step} at least 0")
    places = (divmod(place, num_rows) for place in range(step * global_batch, (step + 1) * global_batch))
    return [int(_epoch_order(num_rows, seed, epoch)[offset]) for epoch, offset in places]


def rank_rows(indices: Sequence[int], dp_rank: int, dp_size: int, micro_batch: int) -> list[list[int]]:
    """One data rank's micro-batches of a global batch.

    The batch is cut into micro-steps first and into ranks then: micro-step 0 holds the same rows on two ranks with one
    row each as on one rank with two, which is what equality of the router's statistics needs.

    Args:
        indices: the global batch, from ``batch_indices``.
        dp_rank: this rank among the data ranks (not the global rank: a cp group shares its rows).
        dp_size: data ranks.
        micro_batch: rows of a forward on each.

    Returns:
        ``len(indices) / (dp_size * micro_batch)`` lists of ``micro_batch`` indices.

    Raises:
        ValueError: the batch does not divide, or a rank that does not exist.
    """
    width = micro_batch * dp_size
    if len(indices) % width:
        raise ValueError(
            f"train.global_batch={len(indices)} must be a multiple of train.micro_batch={micro_batch} x {dp_size} data "
            f"rank(s) = {width}: change global_batch, or micro_batch, or the data axes of the mesh"
        )
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank} must be in [0, {dp_size})")
    starts = range(dp_rank * micro_batch, len(indices), width)
    return [list(indices[start : start + micro_batch]) for start in starts]


def permutation(size: int, *seeds: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)`` that depends on the seeds alone.

    numpy promises that the stream of ``RandomState`` never changes; ``random``, ``torch`` and numpy's newer generators
    promise that only within a version, and a run may be resumed on another.
    """
    return np.random.RandomState([seed % 2**32 for seed in seeds]).permutation(size)


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(num_rows, seed, epoch)
