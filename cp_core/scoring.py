"""``Scoring``: what becomes of the scores of one attention call, beside which of them count.

B batch rows, N query heads, S global tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # counters are 32 bits wide, kept in int64


@dataclass(frozen=True)
class Dropout:
    """Which weights drop: a function of the seed and global positions alone, so of no rank, chunk or order.

    Attributes:
        p: the share that drops; what stays is scaled by 1 / (1 - p).
        seed: of this batch.
        layer: so that layers drop different weights.
        first_row: number of the batch's first row.
    """

    p: float
    seed: int
    layer: int = 0
    first_row: int = 0

    def stream(self, rows: Tensor, heads: Tensor) -> Tensor:
        """One 32-bit number for each row and head (int64, broadcast), the start of its own stream."""
        start = (self.seed ^ (self.seed >> 32)) & _LOW
        base = _mix(_mix(torch.full_like(rows, start)) ^ _spread(rows + self.first_row, 1))
        return _mix(_mix(base ^ _spread(torch.full_like(rows, self.layer), 2)) ^ _spread(heads, 3))

    def keeps(self, stream: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Bool, True where the weight of query ``q_pos`` for key ``k_pos`` stays; int64, broadcast."""
        return _mix(_mix(stream ^ _spread(q_pos, 4)) ^ _spread(k_pos, 5)) >= int(self.p * 2**32)


@dataclass(frozen=True, eq=False)
class Scoring:
    """How queries weigh keys.

    Attributes:
        scale: factor of the scores.
        causal: a query sees no later key.
        window: how many keys a query sees, itself the last of them; None: all.
        mask: ``[B or 1, N or 1, S, S]`` on top of all that: bool, True where a key is seen; or float, added to the
            scaled scores (-inf: not seen). Of the whole sequence and of all heads that this rank's q has before any
            exchange. No gradient.
        dropout: of the weights.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    mask: Tensor | None = None
    dropout: Dropout | None = None


def check_mask(mask: Tensor, batch: int, length: int) -> Tensor:
    """A user's mask in the form that kernels take: the lowest finite values of a float mask become -inf.

    (Added to every score of a row, such a value would change nothing: a query that may see nothing would see all.)

    Args:
        mask: ``[B or 1, N or 1, S, S]`` bool or float.
        batch: B.
        length: S.

    Raises:
        ValueError: another shape or dtype, or a mask that wants a gradient.
    """
    shape = tuple(mask.shape)
    if mask.ndim != 4 or shape[0] not in (1, batch) or shape[2:] != (length, length):
        raise ValueError(f"a mask must be [{batch} or 1, heads or 1, {length}, {length}], got {list(shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"a mask must be bool (True: seen) or float (added to the scores), got {mask.dtype}")
    if mask.requires_grad:
        raise ValueError("a mask has no gradient here, but this one requires it; pass mask.detach()")
    return mask if mask.dtype == torch.bool else mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def combine_masks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Both masks at once: AND of bool ones, else the sum, where a bool one counts as 0 and -inf."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == b.dtype == torch.bool:
        return a & b
    a, b = (additive(x, y.dtype) for x, y in ((a, b), (b, a)))
    return a + b


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one to add; a float one as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit reaches every output bit (Appleby, MurmurHash3, fmix32)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _LOW
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def _spread(x: Tensor, salt: int) -> Tensor:
    """Small counters over all 32 bits; another salt, another stream."""
    return (x * 0x9E3779B1 + salt * 0x7F4A7C15) & _LOW
