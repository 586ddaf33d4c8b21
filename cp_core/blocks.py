"""Which parts of attention a rank must compute: from where q and k sit to a list of rectangles and triangles.

A causal shard is never an S x S mask. For each document, the local queries ``[a, b)`` see the keys before them as a
plain rectangle ``[start, a)`` and themselves as a square lower triangle ``[a, b)``; the two results are merged by
their log-sum-exp. Padding is in no block, and a query in no block gets output 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .sequence import Row


@dataclass(frozen=True)
class CausalMetadata:
    """Where the q and k tensors of an attention call sit in the global sequence (half-open token ranges)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = True


class Block(NamedTuple):
    """One kernel call, in indices local to the tensors: ``q[b0:b1, :, q0:q1]`` against ``k[b0:b1, :, k0:k1]``.

    ``causal``: a square (q1 - q0 == k1 - k0) of which the lower triangle counts; else all of it.
    """

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


@lru_cache(maxsize=1024)
def attention_blocks(meta: CausalMetadata, rows: tuple[Row, ...]) -> tuple[Block, ...]:
    """The blocks of one attention call; rows with equal neighbours share theirs.

    Args:
        meta: where q and k sit.
        rows: the segments of each batch row.

    Raises:
        ValueError: a causal query range that starts before its keys do.
    """
    if meta.causal and meta.k_start > meta.q_start:
        raise ValueError(
            f"queries from token {meta.q_start} on cannot be causal over keys from token {meta.k_start} on"
        )
    blocks: list[Block] = []
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and rows[last] == rows[first]:
            last += 1
        blocks.extend(_row_blocks(meta, rows[first], first, last))
        first = last
    return tuple(blocks)


def _row_blocks(meta: CausalMetadata, row: Row, b0: int, b1: int) -> list[Block]:
    blocks = []
    for start, stop, padding in row:
        a, b = max(start, meta.q_start), min(stop, meta.q_stop)
        if padding or a >= b:
            continue
        q0, q1 = a - meta.q_start, b - meta.q_start
        k_first = max(start, meta.k_start) - meta.k_start
        if not meta.causal:
            k_last = min(stop, meta.k_stop) - meta.k_start
            if k_last > k_first:
                blocks.append(Block(b0, b1, q0, q1, k_first, k_last, False))
            continue
        if a - meta.k_start > k_first:
            blocks.append(Block(b0, b1, q0, q1, k_first, a - meta.k_start, False))
        blocks.append(Block(b0, b1, q0, q1, a - meta.k_start, b - meta.k_start, True))
    return blocks
