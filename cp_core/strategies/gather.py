"""The sequence phase "gather": every rank keeps its queries and collects all keys and values.

K/V travel once, with their own number of heads; backward sends each rank's partial gradients back in a
reduce-scatter. Attention then reads only the prefix that the local queries can see.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import Group, Transfer, start_gather, start_scatter_sum
from ..cost import Cost, both_ways
from ..topology import Axis


@dataclass(frozen=True)
class SequenceGather:
    """Gather over one axis whose C ranks hold equal shards in sequence order."""

    axis: Axis

    def exchange(self) -> GatherExchange | None:
        """What travels of k, and of v; None on one rank."""
        return None if self.axis.group is None else GatherExchange(self.axis.group)

    def cost(self, shard_bytes: int) -> Cost:
        """Of gathering k and v, whose shards together have ``shard_bytes``."""
        others = self.axis.size - 1
        return both_ways(others * shard_bytes, 2 * others)


@dataclass(frozen=True)
class GatherExchange:
    """``[B, K, T, D] -> [B, K, C * T, D]``; its reverse sums over ranks."""

    group: Group

    def start(self, x: Tensor) -> Transfer:
        """See ``Exchange.start``."""
        return start_gather(x, 2, self.group)

    def start_reverse(self, grad: Tensor) -> Transfer:
        """See ``Exchange.start_reverse``."""
        return start_scatter_sum(grad, 2, self.group)
