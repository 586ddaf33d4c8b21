"""The head exchange (Ulysses): sequence shards of all heads become the whole sequence of some heads, and back.

B batch, N heads, T local tokens, D head dim, U ranks. Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..collectives import Group, Transfer, start_exchange
from ..cost import AttentionShape, Cost, both_ways
from ..kernels.base import wide_dtype
from ..topology import Axis

HEADS, TOKENS = 1, 2  # dims of [B, N, T, D]


@dataclass(frozen=True)
class HeadExchange:
    """Exchange over one axis.

    Attributes:
        axis: the U ranks; they hold adjacent, equal shards.
        kv_repeat: how often each kv head is repeated before it travels, so that every rank gets one.
    """

    axis: Axis
    kv_repeat: int = 1

    def scatter(self, role: str) -> HeadScatter | None:
        """What travels of ``q``, ``k`` or ``v`` before attention; None on one rank."""
        if self.axis.group is None:
            return None
        return HeadScatter(self.axis.group, 1 if role == "q" else self.kv_repeat)

    def gather(self) -> HeadGather | None:
        """What travels of the output."""
        return None if self.axis.group is None else HeadGather(self.axis.group)

    def cost(self, shape: AttentionShape, shard_tokens: int, itemsize: int) -> Cost:
        """Of q, k, v and the output, of ``shard_tokens`` tokens (all rows together) a rank."""
        others, kv_heads = self.axis.size - 1, self.kv_repeat * shape.kv_heads
        widths = (shape.q_heads + kv_heads) * (shape.qk_dim + shape.v_dim)
        return both_ways(others * shard_tokens * widths * itemsize // self.axis.size, 4 * others)


@dataclass(frozen=True)
class HeadScatter:
    """``[B, N, T, D] -> [B, N / U, U * T, D]``; rank u gets the u-th run of heads."""

    group: Group
    repeat: int = 1

    def start(self, x: Tensor) -> Transfer:
        """See ``Exchange.start``."""
        if self.repeat > 1:
            x = x.repeat_interleave(self.repeat, HEADS)
        return start_exchange(x, HEADS, TOKENS, self.group)

    def start_reverse(self, grad: Tensor) -> Transfer:
        """See ``Exchange.start_reverse``; the gradients of a head's copies are summed in fp32 or wider."""
        arriving = start_exchange(grad, TOKENS, HEADS, self.group)
        if self.repeat == 1:
            return arriving
        copies = (-1, self.repeat)
        return arriving.then(lambda g: g.unflatten(HEADS, copies).sum(HEADS + 1, dtype=wide_dtype(g)).to(g.dtype))


@dataclass(frozen=True)
class HeadGather:
    """``[B, N / U, U * T, D] -> [B, N, T, D]``."""

    group: Group

    def start(self, x: Tensor) -> Transfer:
        """See ``Exchange.start``."""
        return start_exchange(x, TOKENS, HEADS, self.group)

    def start_reverse(self, grad: Tensor) -> Transfer:
        """See ``Exchange.start_reverse``."""
        return start_exchange(grad, HEADS, TOKENS, self.group)


def kv_repeat_factor(q_heads: int, kv_heads: int, degree: int) -> int | None:
    """The smallest f with ``f * kv_heads`` divisible by ``degree`` and ``q_heads`` divisible by ``f * kv_heads``.

    None where there is none. Worth its bytes only when ``kv_heads < degree``.
    """
    for factor in range(1, q_heads // kv_heads + 1):
        if (factor * kv_heads) % degree == 0 and q_heads % (factor * kv_heads) == 0:
            return factor
    return None
