"""The sequence phase "gather": every rank keeps its queries and collects all keys and values.

K/V travel once, with their own number of heads; backward sends each rank's partial gradients back in a
reduce-scatter. Attention then reads only the prefix that the local queries can see.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import gather_sequence
from ..topology import Axis


@dataclass(frozen=True)
class SequenceGather:
    """Gather over one axis whose ranks hold equal shards in sequence order."""

    axis: Axis

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, K, T, D] -> [B, K, C * T, D]`` for each."""
        v, k = (gather_sequence(x, 2, self.axis.group) for x in (v, k))
        return k, v
