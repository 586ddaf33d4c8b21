"""The head exchange (Ulysses): sequence shards of all heads become the whole sequence of some heads, and back.

B batch, N heads, T local tokens, D head dim, U ranks. Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import all_to_all
from ..topology import Axis


@dataclass(frozen=True)
class HeadExchange:
    """Exchange over one axis.

    Attributes:
        axis: the U ranks; they hold adjacent, equal shards.
        kv_repeat: how often each kv head is repeated before it travels, so that every rank gets one.
    """

    axis: Axis
    kv_repeat: int = 1

    def scatter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, N, T, D] -> [B, N / U, U * T, D]`` for each; rank u gets the u-th run of heads."""
        if self.kv_repeat > 1:
            k, v = (x.repeat_interleave(self.kv_repeat, dim=1) for x in (k, v))
        v, k, q = (all_to_all(x, split_dim=1, concat_dim=2, group=self.axis.group) for x in (v, k, q))
        return q, k, v

    def gather(self, out: Tensor) -> Tensor:
        """``[B, N / U, U * T, D] -> [B, N, T, D]``."""
        return all_to_all(out, split_dim=2, concat_dim=1, group=self.axis.group)


def kv_repeat_factor(q_heads: int, kv_heads: int, degree: int) -> int | None:
    """The smallest f with ``f * kv_heads`` divisible by ``degree`` and ``q_heads`` divisible by ``f * kv_heads``.

    None where there is none. Worth its bytes only when ``kv_heads < degree``.
    """
    for factor in range(1, q_heads // kv_heads + 1):
        if (factor * kv_heads) % degree == 0 and q_heads % (factor * kv_heads) == 0:
            return factor
    return None
