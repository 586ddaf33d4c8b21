"""``shard_batch``: the one place where a global batch becomes this rank's part; ``unshard``: the way back.

B batch rows, S global tokens, T = padded S / P local tokens.

Labels shift before the cut, so that a rank's last token has its target; targets that would cross a document's end or
touch padding become -100; positions and documents are worked out on the whole rows. Then every rank takes its
contiguous slice.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import all_gather_stacked, gather_sequence
from .scoring import check_mask
from .segments import find_rows
from .sequence import Row, Segment, SequenceContext
from .topology import cp_submesh

IGNORE_INDEX = -100
_KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "document_ids", "cu_seqlens", "attention_mask", "mask")
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups whose first batch was compared


def shard_batch(
    batch: Mapping[str, Tensor],
    cp_mesh: DeviceMesh | None = None,
    *,
    device: torch.device | str | None = None,
    compare: bool | None = None,
    dropout_seed: int | None = None,
) -> dict[str, Any]:
    """Cut a global batch into this rank's part; collective over the cp axis when it compares.

    Rows are padded on the right to a multiple of 2 * P (not at cp size 1), which suits every strategy.

    Args:
        batch: the GLOBAL batch, equal on every rank of a cp group: ``input_ids [B, S]``; optionally ``labels [B, S]``
            (not shifted, -100 where there is no target) or ``shift_labels [B, S]`` (shifted already; wins),
            ``position_ids [B, S]`` or ``[S]``, ``document_ids [B, S]`` or ``cu_seqlens``, ``attention_mask [B, S]``
            (padding, 0/1), ``mask [B or 1, N or 1, S, S]`` (bool: True where a query sees a key, on top of documents
            and causality; float: added to the scaled scores; a four-dimensional ``attention_mask`` is taken for one).
            Without ``position_ids`` positions count from 0 in every document.
        cp_mesh: the cp axis, or a mesh that has one; None is cp size 1.
        device: where the result shall lie; default: where ``input_ids`` lies.
        compare: compare a hash of the batch between the ranks; default: on the first batch of a cp group.
        dropout_seed: for attention dropout; another one for every batch (and data rank), equal in a cp group.

    Returns:
        ``input_ids [B, T]``, ``shift_labels [B, T]`` (if labels were given), ``position_ids [B, T]`` and ``sequence``:
        what the models take as keyword arguments.

    Raises:
        ValueError: an unknown key, a wrong shape, contradicting documents, or ranks with different batches.
    """
    batch = _named(batch)
    mesh = cp_submesh(cp_mesh)
    size, rank = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)
    if mesh is not None:
        group = mesh.get_group()
        if compare or (compare is None and group not in _compared):
            compare_batches(batch, mesh)
            _compared.add(group)
    input_ids = _check_shapes(batch)
    length = input_ids.shape[1]
    given = batch["position_ids"].cpu().expand(input_ids.shape) if "position_ids" in batch else None
    documents, cu_seqlens, mask = (batch.get(key) for key in ("document_ids", "cu_seqlens", "attention_mask"))
    rows = find_rows(input_ids.shape[0], length, documents, cu_seqlens, mask, given)
    positions = restart_positions(rows, length) if given is None else given
    valid = valid_tokens(rows, length)
    max_position = int(positions[valid].max()) if bool(valid.any()) else 0

    extra = -length % (2 * size) if size > 1 else 0
    total = length + extra
    if extra:
        rows = tuple((*row, Segment(length, total, True)) for row in rows)
    shard = total // size
    ranges = tuple((r * shard, (r + 1) * shard) for r in range(size))
    target = torch.device(device) if device is not None else input_ids.device

    def cut(x: Tensor, fill: int) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, extra), value=fill)
        return padded[:, slice(*ranges[rank])].contiguous().to(target)

    mask = batch.get("mask")
    if mask is not None:
        mask = check_mask(mask, input_ids.shape[0], length)
        unseen = False if mask.dtype == torch.bool else -torch.inf
        mask = torch.nn.functional.pad(mask, (0, extra, 0, extra), value=unseen).to(target)
    result: dict[str, Any] = {"input_ids": cut(input_ids, 0)}
    if "shift_labels" in batch:
        result["shift_labels"] = cut(batch["shift_labels"].cpu().masked_fill(~valid, IGNORE_INDEX), IGNORE_INDEX)
    elif "labels" in batch:
        result["shift_labels"] = cut(shift_labels(batch["labels"].cpu(), rows), IGNORE_INDEX)
    local_positions = cut(positions.to(torch.int64), 0)
    result["position_ids"] = local_positions
    result["sequence"] = SequenceContext(
        position_ids=local_positions,
        valid=cut(valid, False),
        rows=rows,
        ranges=ranges,
        rank=rank,
        length=length,
        max_position=max_position,
        cp_mesh=mesh,
        mask=mask,
        dropout_seed=dropout_seed,
    )
    return result


def unshard(x: Tensor, dim: int, sequence: SequenceContext) -> Tensor:
    """The whole sequence in global order, padding of ``shard_batch`` removed; collective over the cp axis.

    Differentiable: the gradients of all ranks for one token add up.

    Args:
        x: ``[..., T, ...]``, such as ``out.logits``.
        dim: the dim of length T.
        sequence: from the same ``shard_batch`` call.

    Returns:
        ``[..., S, ...]`` on every rank.

    Raises:
        ValueError: ``dim`` does not have T entries.
    """
    start, stop = sequence.ranges[sequence.rank]
    if x.shape[dim] != stop - start:
        raise ValueError(f"dim {dim} of {list(x.shape)} should hold this rank's {stop - start} tokens")
    group = sequence.cp_mesh.get_group() if sequence.cp_mesh is not None else None
    return gather_sequence(x, dim, group).narrow(dim, 0, sequence.length)


def shift_labels(labels: Tensor, rows: tuple[Row, ...]) -> Tensor:
    """Each token's target: the next token's label inside the same document, else -100.

    Args:
        labels: ``[B, S]`` int64 on the CPU, not shifted; every row's segments cover at least S tokens.
        rows: the segments of each row.
    """
    length = labels.shape[1]
    shifted = torch.full_like(labels, IGNORE_INDEX)
    for row, segments in enumerate(rows):
        for start, stop, padding in segments:
            stop = min(stop, length)
            if not padding and stop - start > 1:
                shifted[row, start : stop - 1] = labels[row, start + 1 : stop]
    return shifted


def restart_positions(rows: tuple[Row, ...], length: int) -> Tensor:
    """``[B, S]`` int64: 0, 1, 2, ... in every segment."""
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, segments in enumerate(rows):
        for start, stop, _ in segments:
            positions[row, start:stop] = torch.arange(stop - start)
    return positions


def valid_tokens(rows: tuple[Row, ...], length: int) -> Tensor:
    """``[B, S]`` bool: False on padding."""
    valid = torch.ones(len(rows), length, dtype=torch.bool)
    for row, segments in enumerate(rows):
        for start, stop, padding in segments:
            if padding:
                valid[row, start:stop] = False
    return valid


def compare_batches(batch: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Make sure that all ranks of a cp group hold the same batch; collective, a few bytes.

    Raises:
        ValueError: on every rank, naming the entries that differ and the ranks that differ from rank 0.
    """
    numbers = [_fingerprint(batch.get(key)) for key in _KEYS]
    numbers.append(_fingerprint(torch.tensor(bytearray(",".join(sorted(map(str, batch))).encode()), dtype=torch.uint8)))
    mine = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    everyone = all_gather_stacked(mine, mesh.get_group()).cpu()  # [P, keys + 1]
    differs = everyone != everyone[:1]
    if bool(differs.any()):
        names = [name for name, column in zip((*_KEYS, "the keys"), differs.T, strict=True) if bool(column.any())]
        ranks = differs.any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"the ranks of this cp group got different batches: {', '.join(names)} on cp rank {ranks} differ from cp "
            "rank 0. All ranks of a cp group must read the same rows (shuffle by data rank, not by global rank)"
        )


def _fingerprint(x: Tensor | None) -> int:
    if not isinstance(x, Tensor):
        return hash(x is None)
    value = x.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode())
    digest.update(ctypes.string_at(value.data_ptr(), value.nbytes) if value.nbytes else b"")
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def _named(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without entries that are None; a four-dimensional attention_mask, as transformers takes it, is a ``mask``."""
    named = {key: value for key, value in batch.items() if value is not None}
    given = named.get("attention_mask")
    if isinstance(given, Tensor) and given.ndim == 4:
        if "mask" in named:
            raise ValueError("give mask or a four-dimensional attention_mask, not both")
        named["mask"] = named.pop("attention_mask")
    return named


def _check_shapes(batch: Mapping[str, Tensor]) -> Tensor:
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key} must be a tensor, got {type(value).__name__}")
    unknown = [key for key in batch if key not in _KEYS]
    if unknown:
        raise ValueError(f"shard_batch does not know {unknown[0]!r}; it takes {', '.join(_KEYS)}")
    if "input_ids" not in batch:
        raise ValueError("shard_batch needs 'input_ids' [batch, length]")
    input_ids = batch["input_ids"]
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be [batch, length], both above 0, got {list(input_ids.shape)}")
    for key in ("labels", "shift_labels"):
        if key in batch and batch[key].shape != input_ids.shape:
            raise ValueError(
                f"{key} has shape {list(batch[key].shape)}, input_ids {list(input_ids.shape)}; they must agree"
            )
    positions = batch.get("position_ids")
    batch_size, length = input_ids.shape
    if positions is not None and tuple(positions.shape) not in ((batch_size, length), (1, length), (length,)):
        raise ValueError(f"position_ids has shape {list(positions.shape)}, input_ids {list(input_ids.shape)}")
    return input_ids
