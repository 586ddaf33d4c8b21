"""Sharded parameters: right values, no byte more than the shard, and one complete file out of many ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from cp_core.testing import run_distributed
from models.common.checkpoint_io import load_weights, local_box, save_weights
from models.common.checkpoint_reader import CheckpointReader
from models.common.checkpoint_writer import CheckpointWriter
from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError, WeightTable
from models.qwen3_moe.weights import weight_table
from tests.models.weights_helpers import edit, read_all, same, skeleton, stack

PRELOAD = ("models.common.checkpoint_io", "safetensors.torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_tiny_qwen3_moe(tmp_path_factory.mktemp("dtensor") / "tiny", shards=3, num_experts=5)
    edit(folder, lambda name, tensor: tensor if "norm" in name else tensor.bfloat16())
    native = folder.with_name("native")
    shutil.copytree(folder, native)
    table = weight_table(tiny_qwen3_moe_config(num_experts=5))
    for path in native.glob("model*"):
        path.unlink()
    save_native(native, stack(table, read_all(folder)))
    return folder


def save_native(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from models.common.checkpoint_writer import TensorSpec

    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with CheckpointWriter(folder, specs, 2**30) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def check_load(folder: Path, table: WeightTable, targets) -> None:
    """Every local tensor equals its part of the whole, and nothing but those parts was read."""
    expected = stack(table, read_all(folder))
    for source in (folder, folder.with_name("native")):
        for tensor in targets.values():
            local_box(tensor)[0].fill_(torch.nan)
        with CheckpointReader(source) as reader:
            report = load_weights(targets, table, reader)
        share = 0
        for name, tensor in targets.items():
            local, box = local_box(tensor)
            assert torch.equal(local, expected[name][tuple(slice(*span) for span in box)].float()), name
            share += local.numel() * expected[name].element_size()
        assert report.bytes_read == share
    for name, tensor in targets.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name].float()), name


def distribute(table, mesh, choose):
    """One DTensor per entry, full of NaN; ``choose(entry)`` gives its placements."""
    return {entry.name: distribute_tensor(torch.zeros(entry.shape), mesh, choose(entry)) for entry in table}


def fsdp_worker(rank: int, world_size: int, folder: Path, table: WeightTable, out: Path) -> int:
    mesh = init_device_mesh("cpu", (world_size,))
    for dim in (0, 1):
        model = skeleton(table, device="meta")
        for name in ("0", "1"):
            layer = getattr(model.model.layers, name)
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(min(dim, p.ndim - 1)))
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with CheckpointReader(folder) as reader:
            report = load_weights(model, table, reader)
        check_load(folder, table, dict(model.named_parameters()))
    save_weights(model, table, out, dtypes=report.source_dtypes, max_shard_bytes=20_000, is_writer=rank == 0)
    with CheckpointReader(out) as reader:  # complete on every rank as soon as the call returns
        reader.match(table)
    if rank == 0:
        CheckpointWriter.write = lambda *args: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
    with pytest.raises(
        OSError if rank == 0 else CheckpointError, match="disk full" if rank == 0 else "rank that writes"
    ):
        save_weights(model, table, out, is_writer=rank == 0)
    return report.bytes_read


@pytest.mark.dist2
def test_fsdp2_on_two_ranks(folder, tmp_path):
    table = weight_table(tiny_qwen3_moe_config(num_experts=5))
    shares = run_distributed(fsdp_worker, 2, folder, table, tmp_path / "out", preload=PRELOAD)
    tensors = read_all(folder)
    assert sum(shares) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(shares) < 0.6 * sum(shares)
    assert same(read_all(tmp_path / "out"), tensors)
    assert not list((tmp_path / "out").glob("*.tmp"))


def mesh_worker(rank: int, world_size: int, folder: Path, table: WeightTable, out: Path) -> None:
    flat = init_device_mesh("cpu", (4,))
    check_load(folder, table, distribute(table, flat, lambda entry: [Shard(0)]))  # 5 experts: 2, 2, 1, none
    check_load(folder, table, distribute(table, flat, lambda entry: [Shard(len(entry.shape) - 1)]))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    last = lambda entry: Shard(len(entry.shape) - 1)  # noqa: E731
    for choose in (
        lambda entry: [Replicate(), Shard(0)],
        lambda entry: [Shard(0), Replicate()],
        lambda entry: [Shard(0), Shard(0)],
        lambda entry: [Shard(0), last(entry)],
        lambda entry: [last(entry), Shard(0)],
        lambda entry: [Replicate(), Replicate()],
    ):
        targets = distribute(table, grid, choose)
        check_load(folder, table, targets)
    # FSDP2 over tensor parallelism: rows cut over tp first, then over dp
    model = skeleton(table)
    for path, module in list(model.named_modules()):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            dim = 1 if "o_proj" in path or "down_proj" in f"{path}.{leaf}" else 0
            sharded = distribute_tensor(parameter.detach(), grid["tp"], [Shard(min(dim, parameter.ndim - 1))])
            setattr(module, leaf, torch.nn.Parameter(sharded))
    fully_shard(model, mesh=grid["dp"])
    targets = dict(model.named_parameters())
    assert any(isinstance(p, _StridedShard) for t in targets.values() for p in t.placements)
    check_load(folder, table, targets)
    save_weights(model, table, out, is_writer=rank == 3)
    with pytest.raises(ValueError, match="rows that are not adjacent"):
        local_box(
            DTensor.from_local(torch.zeros(2), grid, [Shard(0), _StridedShard(0, split_factor=2)], run_check=False)
        )
    with pytest.raises(ValueError, match="partial sum"):
        local_box(DTensor.from_local(torch.zeros(2), flat, [Partial()], run_check=False))
    dist.barrier()


@pytest.mark.dist4
def test_meshes_of_four_ranks(folder, tmp_path):
    table = weight_table(tiny_qwen3_moe_config(num_experts=5))
    run_distributed(mesh_worker, 4, folder, table, tmp_path / "out", preload=PRELOAD)
    saved = {name: tensor.float() for name, tensor in read_all(folder).items()}
    assert same(read_all(tmp_path / "out"), saved)
