"""Which parts of attention a rank must compute: from where q and k sit to a list of rectangles and triangles.

A causal shard is never an S x S mask. For each document, the local queries ``[a, b)`` see the keys before them as a
plain rectangle ``[start, a)`` and themselves as a square lower triangle ``[a, b)``; the two results are merged by
their log-sum-exp. Keys that start or end inside the queries cut the triangle short. Padding is in no block, and a
query in no block gets output 0.
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
    """
    blocks: list[Block] = []
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and rows[last] == rows[first]:
            last += 1
        blocks.extend(_row_blocks(meta, rows[first], first, last))
        first = last
    return tuple(blocks)


def span_blocks(
    spans: tuple[tuple[int, int], ...], k_start: int, k_stop: int, causal: bool, rows: tuple[Row, ...]
) -> tuple[Block, ...]:
    """The blocks of queries that are several runs of the sequence, one after the other in one tensor."""
    blocks: list[Block] = []
    offset = 0
    for start, stop in spans:
        for block in attention_blocks(CausalMetadata(start, stop, k_start, k_stop, causal), rows):
            blocks.append(block._replace(q0=block.q0 + offset, q1=block.q1 + offset))
        offset += stop - start
    return tuple(blocks)


def pairs_of(blocks: tuple[Block, ...]) -> int:
    """Query-key pairs that the blocks compute, over all rows."""
    total = 0
    for b0, b1, q0, q1, k0, k1, causal in blocks:
        width = q1 - q0
        total += (b1 - b0) * (width * (width + 1) // 2 if causal else width * (k1 - k0))
    return total


def _row_blocks(meta: CausalMetadata, row: Row, b0: int, b1: int) -> list[Block]:
    blocks = []

    def add(q_from: int, q_to: int, k_from: int, k_to: int, causal: bool) -> None:
        if q_from < q_to and k_from < k_to:
            q0, q1, k0, k1 = q_from - meta.q_start, q_to - meta.q_start, k_from - meta.k_start, k_to - meta.k_start
            blocks.append(Block(b0, b1, q0, q1, k0, k1, causal))

    for start, stop, padding in row:
        a, b = max(start, meta.q_start), min(stop, meta.q_stop)  # the document's queries ...
        lo, hi = max(start, meta.k_start), min(stop, meta.k_stop)  # ... and its keys
        if padding or a >= b or lo >= hi:
            continue
        if not meta.causal:
            add(a, b, lo, hi, False)
            continue
        first, last = max(a, lo), min(b, hi)  # tokens that are both
        add(a, b, lo, min(a, hi), False)
        add(first, last, first, last, True)
        add(last, b, first, last, False)
    return blocks
