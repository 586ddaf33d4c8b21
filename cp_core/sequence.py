"""``SequenceContext``: what a layer must know about the batch beside its values; built once a batch, passed down.

B batch rows, T local tokens, S global tokens (padded to what every strategy needs).

Each rank holds the contiguous slice ``ranges[rank]`` of every row. A row is a list of segments that cover it without
a gap: documents, and runs of padding, which count as segments that nobody attends to or from. Segments and ranges
are host data (tuples), so plans made from them need no device sync and can be cached by value. The context is a
pytree: its tensors are leaves, the rest is static.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree


class Segment(NamedTuple):
    """Tokens ``start <= t < stop`` of a row (global numbering): one document, or one run of padding."""

    start: int
    stop: int
    padding: bool = False


Row = tuple[Segment, ...]


@dataclass(frozen=True, eq=False)
class SequenceContext:
    """One batch's layout as this rank sees it. Immutable; never stored on a module.

    Attributes:
        position_ids: ``[B, T]`` int64, positions of the local tokens for RoPE.
        valid: ``[B, T]`` bool, False on padding.
        rows: the segments of each row, over all S tokens.
        ranges: ``(start, stop)`` of every cp rank, in rank order.
        rank: this rank's index in ``ranges``.
        length: tokens of a row before ``shard_batch`` padded it.
        max_position: the largest position of the whole batch (dynamic RoPE needs it).
        cp_mesh: the cp axis; None at cp size 1.
        mask: a user's mask of the whole padded sequence, ``[B or 1, N or 1, S, S]``, bool or float (``scoring.py``).
        dropout_seed: of this batch, for attention dropout.
        first_row: number of the first row, for attention dropout; above 0 in a later micro-batch of ``split``.
    """

    position_ids: Tensor
    valid: Tensor
    rows: tuple[Row, ...]
    ranges: tuple[tuple[int, int], ...]
    rank: int
    length: int
    max_position: int
    cp_mesh: DeviceMesh | None = None
    mask: Tensor | None = None
    dropout_seed: int | None = None
    first_row: int = 0

    @property
    def cp_size(self) -> int:
        """Number of ranks that share a row."""
        return len(self.ranges)

    @property
    def padded_length(self) -> int:
        """S: tokens of a row, padding included."""
        return self.ranges[-1][1]

    def to(self, device: torch.device | str) -> SequenceContext:
        """The same context with its tensors on ``device``."""
        leaves, static = _flatten(self)
        return _unflatten([leaf.to(device) for leaf in leaves], static)

    def split(self, chunks: int) -> tuple[SequenceContext, ...]:
        """Cut the rows into micro-batches of equal size, for a pipeline schedule.

        Raises:
            ValueError: the rows do not divide into ``chunks``.
        """
        batch = len(self.rows)
        if chunks < 1 or batch % chunks:
            raise ValueError(f"{batch} rows cannot be split into {chunks} equal micro-batches")
        size = batch // chunks
        return tuple(
            dataclasses.replace(
                self,
                position_ids=self.position_ids[i : i + size],
                valid=self.valid[i : i + size],
                rows=self.rows[i : i + size],
                mask=self.mask if self.mask is None or len(self.mask) == 1 else self.mask[i : i + size],
                first_row=self.first_row + i,
            )
            for i in range(0, batch, size)
        )

    def check(self, batch: int, tokens: int, cp_size: int) -> None:
        """Refuse a context that does not belong to a batch of ``[batch, tokens]`` on ``cp_size`` ranks.

        Raises:
            ValueError: which of them differs.
        """
        if self.cp_size != cp_size:
            raise ValueError(
                f"sequence was made for cp size {self.cp_size}, but the model is bound to cp size {cp_size}: "
                "give shard_batch the mesh that from_pretrained got"
            )
        if tuple(self.position_ids.shape) != (batch, tokens):
            raise ValueError(
                f"the input holds [{batch}, {tokens}] tokens, but sequence describes {list(self.position_ids.shape)}: "
                "pass input_ids and sequence of the same shard_batch call"
            )


def _flatten(context: SequenceContext) -> tuple[list[Any], Any]:
    static = tuple(getattr(context, name) for name in _STATIC)
    leaves = [context.position_ids, context.valid]
    return leaves if context.mask is None else [*leaves, context.mask], static


def _unflatten(leaves: Any, static: Any) -> SequenceContext:
    tensors: dict[str, Any] = dict(zip(_LEAVES, leaves, strict=False))  # the mask is there or not
    return SequenceContext(**tensors, **dict(zip(_STATIC, static, strict=True)))


_LEAVES = ("position_ids", "valid", "mask")
_STATIC = tuple(field.name for field in dataclasses.fields(SequenceContext) if field.name not in _LEAVES)
pytree.register_pytree_node(
    SequenceContext, _flatten, _unflatten, serialized_type_name="cp_core.sequence.SequenceContext"
)
