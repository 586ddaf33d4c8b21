"""From what a user says about a batch (documents, padding) to the segments of each row. Host code, no collectives.

B batch rows, S global tokens. Documents come as ``document_ids [B, S]`` (equal neighbours are one document, a
negative id is padding), as ``cu_seqlens`` over the flattened rows, or from ``position_ids`` that start again at 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequence import Row, Segment


def find_rows(
    batch: int,
    length: int,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Row, ...]:
    """The segments of every row.

    Args:
        batch: B.
        length: S.
        document_ids: ``[B, S]`` integers.
        cu_seqlens: ``[n + 1]`` integers, document borders over the B * S flattened tokens; a row's end is one too.
        attention_mask: ``[B, S]``, 1 or True on real tokens, 0 on padding.
        position_ids: ``[B, S]``; looked at only when neither documents nor a mask are given: a position 0 starts
            a document, as in transformers' packed format.

    Raises:
        ValueError: contradicting or malformed descriptions, with the row and token.
    """
    if document_ids is not None and cu_seqlens is not None:
        raise ValueError("give document_ids or cu_seqlens, not both")
    if attention_mask is not None:
        attention_mask = _mask(attention_mask, batch, length)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    if document_ids is not None:
        ids = document_ids.detach().cpu().to(torch.int64)
        if tuple(ids.shape) != (batch, length):
            raise ValueError(
                f"document_ids has shape {list(ids.shape)}, input_ids [{batch}, {length}]; they must agree"
            )
    elif cu_seqlens is not None:
        ids = _ids_from_cu_seqlens(cu_seqlens, batch, length)
    elif position_ids is not None and attention_mask is None:
        positions = position_ids.detach().cpu()
        restart = torch.zeros_like(ids)
        restart[:, 1:] = positions[:, 1:] == 0
        ids = restart.cumsum(1)
    padding = ids < 0
    if attention_mask is not None:
        padding = padding | (attention_mask == 0)
    changes = torch.ones(batch, length, dtype=torch.bool)
    changes[:, 1:] = (padding[:, 1:] != padding[:, :-1]) | ((ids[:, 1:] != ids[:, :-1]) & ~padding[:, 1:])
    rows = []
    for row in range(batch):
        starts = changes[row].nonzero().flatten().tolist()
        segments = tuple(
            Segment(start, stop, bool(padding[row, start]))
            for start, stop in zip(starts, [*starts[1:], length], strict=True)
        )
        _refuse_repeats(row, segments, ids[row])
        rows.append(segments)
    return tuple(rows)


def _mask(mask: Tensor, batch: int, length: int) -> Tensor:
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; it must be the padding mask [{batch}, {length}] "
            "(1 real, 0 padding). Documents are given as document_ids or cu_seqlens"
        )
    mask = mask.detach().cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 0 and 1 only (1 real, 0 padding)")
    return mask


def _ids_from_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    borders = cu_seqlens.detach().cpu().to(torch.int64)
    total = batch * length
    rising = borders.ndim == 1 and borders.numel() >= 2 and bool((borders[1:] > borders[:-1]).all())
    if not rising or int(borders[0]) != 0 or int(borders[-1]) != total:
        raise ValueError(
            f"cu_seqlens must rise strictly from 0 to batch * length = {total} (rows flattened), got {borders.tolist()}"
        )
    starts = torch.zeros(total, dtype=torch.int64)
    starts[borders[1:-1]] = 1
    return starts.cumsum(0).view(batch, length)


def _refuse_repeats(row: int, segments: Row, ids: Tensor) -> None:
    """A document must be one run: no other document and no padding in its middle."""
    seen: dict[int, int] = {}
    for start, stop, padding in segments:
        if padding:
            continue
        document = int(ids[start])
        if document in seen:
            raise ValueError(
                f"row {row}: document {document} ends at token {seen[document]} and goes on at token {start}; a "
                "document must be one run without padding (or another document) inside it. Give its parts different "
                "ids, or move the padding to an end"
            )
        seen[document] = stop
