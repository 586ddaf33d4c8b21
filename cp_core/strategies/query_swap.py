"""Head-tail balance: causal work made equal by swapping half of the queries with the mirror rank, and back.

Of 2P half-chunks, rank r holds 2r and 2r + 1. It keeps the first and swaps the second with rank P - 1 - r, so that it
computes one early and one late half, together as much as any other rank. Outputs of the second half are swapped back.
Data between layers stay contiguous. The middle rank of an odd P is its own mirror and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import Spans
from ..collectives import Transfer, start_send_recv
from ..cost import AttentionShape, Cost, both_ways
from ..topology import Axis


@dataclass(frozen=True)
class HalfSwap:
    """Swap the second half of dim 2 of ``[B, N, T, D]`` with the mirror rank; its own inverse, forward and backward."""

    axis: Axis

    def exchange(self) -> HalfSwap | None:
        """What travels of q, and of the output; None on the rank that is its own mirror."""
        return None if self.axis.group is None or 2 * self.axis.rank == self.axis.size - 1 else self

    def start(self, x: Tensor) -> Transfer:
        """See ``Exchange.start``."""
        assert self.axis.group is not None
        mirror, half = self.axis.size - 1 - self.axis.rank, x.shape[2] // 2
        first, second = x[:, :, :half], x[:, :, half:].contiguous()
        received = torch.empty_like(second)
        works = start_send_recv([(second, mirror)], [(received, mirror)], self.axis.group)
        return Transfer(works, lambda: torch.cat([first, received], 2), second, p2p=self.axis.group)

    start_reverse = start

    def cost(self, rank: int, shape: AttentionShape, shard_tokens: int, itemsize: int) -> Cost:
        """Of the queries and the output of rank ``rank``, of ``shard_tokens`` tokens (all rows together)."""
        if 2 * rank == self.axis.size - 1:
            return Cost()
        return both_ways(shard_tokens // 2 * shape.q_heads * (shape.qk_dim + shape.v_dim) * itemsize, 2)


def balanced_spans(rank: int, size: int, tokens: int) -> Spans:
    """Where the queries of a rank sit after the swap, given ``tokens`` a shard: two halves, in order of the tensor."""
    mirror, half = size - 1 - rank, tokens // 2
    return (rank * tokens, rank * tokens + half), (mirror * tokens + half, (mirror + 1) * tokens)
