"""Model <-> checkpoint: ``load_weights`` streams a folder into (sharded) parameters, ``save_weights`` streams them out.

Both walk the weight table entry by entry. Loading reads, per tensor on disk, just the slice that lies in this rank's
shard; saving gathers one parameter at a time, on every rank, and one rank writes it in the HF layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from .checkpoint_files import DTYPES
from .checkpoint_reader import CheckpointReader
from .checkpoint_writer import CheckpointWriter, TensorSpec
from .weights import Box, CheckpointError, WeightEntry, WeightTable

__all__ = ["DTYPES", "CheckpointError", "CheckpointReader", "LoadReport", "load_weights", "save_weights"]


@dataclass(frozen=True)
class LoadReport:
    """What a rank loaded.

    Attributes:
        names: native names of the parameters filled.
        bytes_read: bytes of tensor data that this rank read for its shards.
        source_dtypes: ``{HF name: dtype on disk}`` of every source, for ``save_weights(dtypes=)``.
    """

    names: tuple[str, ...]
    bytes_read: int
    source_dtypes: dict[str, torch.dtype]


@torch.no_grad()
def load_weights(
    model: nn.Module | Mapping[str, torch.Tensor],
    table: WeightTable,
    reader: CheckpointReader,
    *,
    dtype: torch.dtype | None = None,
) -> LoadReport:
    """Fill every parameter in place; ranks need not call together, nothing is communicated.

    Values are converted to their parameter's dtype. Memory: one slice of one tensor on disk.

    Args:
        model: its parameters (and the buffers that the table names) are plain tensors or DTensors (``Shard``,
            ``Replicate``, FSDP2's strided shards) on any device but meta; or a mapping of native names to such
            tensors, for a model whose own names differ.
        table: what the model consists of.
        reader: the checkpoint, in the HF or the native layout.
        dtype: what every parameter must have, ``keep_fp32`` entries excepted; None: no demand.

    Raises:
        CheckpointError: table, model and checkpoint do not fit each other exactly; no parameter was touched.
    """
    targets = _targets(model, table, dtype)
    match = reader.match(table)
    before = reader.bytes_read  # the check of tied tensors is not this rank's share
    for entry in table:
        local, box = targets[entry.name]
        for piece in match.pieces[entry.name]:
            common = piece.overlap(box)
            if common is None:
                continue
            on_disk, inside = common
            target = local[tuple(slice(*span) for span in inside)]
            target.copy_(reader.read(piece.name, on_disk).view(target.shape))  # no name: gone before the next is read
    return LoadReport(tuple(targets), reader.bytes_read - before, match.dtypes)


@torch.no_grad()
def save_weights(
    model: nn.Module | Mapping[str, torch.Tensor],
    table: WeightTable,
    out_dir: str | Path,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    max_shard_bytes: int = 5 * 2**30,
    is_writer: bool = True,
) -> None:
    """Write the HF layout. Every rank of the parameters' meshes must call it; gathering is collective.

    Ranks that share a mesh with the writer return after the files are complete. Memory: one whole parameter.

    Args:
        model: as for ``load_weights``.
        table: what the model consists of.
        out_dir: a checkpoint in it is replaced once the new one is complete; other files stay.
        dtypes: ``{HF name: dtype on disk}``, such as ``LoadReport.source_dtypes``; a tensor without one is written in
            its parameter's dtype.
        max_shard_bytes: bytes of tensor data per file.
        is_writer: this rank writes; the others only take part in the gathering.

    Raises:
        CheckpointError: model and table do not fit, a value overflows its dtype on disk, or (on the ranks that do not
            write) the writer failed.
        OSError: the disk; old files are then still in place.
    """
    targets = _targets(model, table, None)
    source = _tensors(model)
    wanted = dtypes or {}
    failure: Exception | None = None
    writer: CheckpointWriter | None = None
    if is_writer:
        specs = [
            TensorSpec(piece.name, piece.shape, wanted.get(piece.name, source[entry.name].dtype))
            for entry in table
            for piece in entry.pieces
        ]
        try:
            writer = CheckpointWriter(out_dir, specs, max_shard_bytes)
        except Exception as error:  # the other ranks wait in full_tensor: go on with them, raise at the end
            failure = error
    try:
        for name in targets:
            tensor = source[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writer is not None and failure is None:
                try:
                    _write_entry(writer, table.by_name[name], whole, wanted)
                except Exception as error:
                    failure = error
            del whole
        if writer is not None and failure is None:
            try:
                writer.commit()
            except Exception as error:
                failure = error
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    if writer is not None and failure is not None:
        writer.abort()
    _agree(source, failure, out_dir)


def _write_entry(
    writer: CheckpointWriter, entry: WeightEntry, whole: torch.Tensor, dtypes: Mapping[str, torch.dtype]
) -> None:
    for piece in entry.pieces:
        values = whole[tuple(slice(*span) for span in piece.box)]
        stored = values.to(dtypes.get(piece.name, values.dtype))
        # Only float16 has a smaller range than what models are trained in.
        if stored.dtype == torch.float16 != values.dtype and not torch.equal(stored.isfinite(), values.isfinite()):
            problem = f"{piece.name}: values of {values.dtype} overflow torch.float16, its dtype on disk"
            raise CheckpointError(writer.folder, [f"{problem}; give dtypes without it to keep the parameter's dtype"])
        writer.write(piece.name, stored)


def _agree(source: Mapping[str, torch.Tensor], failure: Exception | None, out_dir: str | Path) -> None:
    """Let every rank that shares a mesh know whether the files are complete, which also makes it wait for them."""
    sharded = next((tensor for tensor in source.values() if isinstance(tensor, DTensor)), None)
    if sharded is not None:
        mesh = sharded.device_mesh
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=sharded.to_local().device)
        for dim in range(mesh.ndim):
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        if failure is None and failed.item():
            raise CheckpointError(out_dir, ["the rank that writes failed; its own error says why"])
    if failure is not None:
        raise failure


def _tensors(model: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor that a table may name; a parameter shared under two names counts once, under the first."""
    if isinstance(model, nn.Module):
        return {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return dict(model)


def _targets(
    model: nn.Module | Mapping[str, torch.Tensor], table: WeightTable, dtype: torch.dtype | None
) -> dict[str, tuple[torch.Tensor, Box]]:
    """This rank's tensors and the boxes they cover, in table order; model and table must name the same parameters."""
    tensors = _tensors(model)
    required = dict(model.named_parameters()) if isinstance(model, nn.Module) else tensors
    problems, found = [], {}
    for name in required.keys() - table.by_name.keys():
        hint = f"; config ties it to {table.tied[name]}: tie the two first" if name in table.tied else ""
        problems.append(f"{name}: a parameter of the model that the weight table does not produce{hint}")
    for entry in table:
        tensor = tensors.get(entry.name)
        if tensor is None:
            problems.append(f"{entry.name}: in the weight table, but no parameter of the model")
        elif tuple(tensor.shape) != entry.shape:
            problems.append(f"{entry.name}: the parameter is {list(tensor.shape)}, the table says {list(entry.shape)}")
        elif tensor.device.type == "meta":
            problems.append(f"{entry.name}: is on the meta device; call model.to_empty(device=...) first")
        elif entry.keep_fp32 and tensor.dtype.itemsize < 4:
            problems.append(f"{entry.name}: the parameter is {tensor.dtype}, but must not be below torch.float32")
        elif dtype is not None and tensor.dtype != dtype and not entry.keep_fp32:
            problems.append(f"{entry.name}: the parameter is {tensor.dtype}, expected {dtype}; build the model in it")
        else:
            try:
                found[entry.name] = local_box(tensor)
            except ValueError as error:
                problems.append(f"{entry.name}: {error}")
    if problems:
        raise CheckpointError(f"weight table of {table.model_type}", sorted(problems))
    return found


def local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """This rank's part of a tensor and where it lies in the whole; the one place that knows DTensor's internals.

    Returns:
        ``(local, box)``: the local tensor (no copy) and its ``(start, stop)`` per dim; an empty shard has an empty box.

    Raises:
        ValueError: the part is no box of the whole (``Partial``, or strided shards that are not FSDP over TP).
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple((0, size) for size in tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(f"placements {placements} hold a partial sum, not values")
        if isinstance(placement, _StridedShard):
            later = range(axis + 1, len(placements))
            inner = math.prod(mesh.size(i) for i in later if placements[i].is_shard(placement.dim))
            if placement.split_factor != inner:
                raise ValueError(f"placements {placements} give a rank rows that are not adjacent")
    local: torch.Tensor = tensor.to_local().detach()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"placements {placements} say {shape}, the local tensor is {list(local.shape)}")
    return local, tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
