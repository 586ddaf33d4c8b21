"""What one attention call costs a rank, as a function of shapes: bytes and messages received, attention computed.

B batch rows, S global tokens (padded), N query heads, K kv heads, D head dim. Bytes are payload elements x itemsize
that a rank receives from others. ``counters.py`` measures the same numbers where the calls happen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .sequence import Row


@dataclass(frozen=True)
class AttentionShape:
    """What a mixer's own parameters say about its attention."""

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


@dataclass(frozen=True)
class Load:
    """One batch as one rank sees it: what a cost depends on beside the heads.

    Attributes:
        rows: the segments of each row, over S tokens.
        tokens: S.
        rank: this rank's index on the cp axis.
        causal: a query sees no later key.
        window: how many keys a query sees; None: all.
        itemsize: bytes of an element of q, k and v.
    """

    rows: tuple[Row, ...]
    tokens: int
    rank: int
    causal: bool = True
    itemsize: int = 4
    window: int | None = None


@dataclass(frozen=True)
class Cost:
    """Received bytes and messages of a forward and of its backward, and query-key pairs times heads computed."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_messages: int = 0
    backward_messages: int = 0
    work: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def both_ways(size: int, messages: int) -> Cost:
    """An exchange whose backward receives as much as its forward."""
    return Cost(size, size, messages, messages)
