"""``sync_gradients`` over dp x cp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cp_core.gradients as gradients
from cp_core import Topology, sync_gradients
from cp_core.testing import run_distributed
from tests.cp_core._helpers import cp_mesh, refusal

SHAPES = {"a": (3, 4), "b": (5,), "narrow": (300,), "c": (2, 2, 2), "wide": (4,), "unused": (6,)}
DTYPES = {"narrow": torch.bfloat16, "wide": torch.float64}


def build() -> nn.Module:
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=DTYPES.get(name, torch.float32))))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    return model


def gradient(name: str, rank: int) -> Tensor | None:
    """Rank 2 never used ``c``, nobody used ``unused``."""
    if name == "unused" or (name == "c" and rank == 2):
        return None
    generator = torch.Generator().manual_seed(31 * rank + len(name))
    scale = (1.0, 0.013, 41.0, 0.37)[rank]
    return (scale * torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)).to(
        DTYPES.get(name, torch.float32)
    )


def sync_worker(rank: int, size: int, bucket: int) -> dict[str, Tensor]:
    gradients._BUCKET_ELEMENTS = bucket
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = build()
    strides = {}
    for name, parameter in model.named_parameters():
        if name != "frozen":
            parameter.grad = gradient(name, rank)
    model.a.grad = model.a.grad.T.contiguous().T  # a layout of its own stays
    strides["a"] = model.a.grad.stride()
    sync_gradients(model, mesh)
    assert model.frozen.grad is None
    assert model.a.grad.stride() == strides["a"]
    return {name: parameter.grad for name, parameter in model.named_parameters() if name != "frozen"}


@pytest.mark.dist4
@pytest.mark.parametrize("bucket", [1 << 24, 10])
def test_sums_over_both_axes(bucket: int) -> None:
    results = run_distributed(sync_worker, 4, bucket)
    for name in SHAPES:
        parts = [g for g in (gradient(name, rank) for rank in range(4)) if g is not None]
        want = sum((part.double() for part in parts), torch.zeros(SHAPES[name], dtype=torch.float64))
        for result in results:
            assert result[name].dtype == DTYPES.get(name, torch.float32)
            assert torch.equal(result[name], results[0][name])  # bitwise equal on all ranks
        tolerance = {"narrow": 2**-8, "wide": 1e-14}.get(name, 1e-6)
        torch.testing.assert_close(results[0][name].double(), want, rtol=tolerance, atol=tolerance / 100)
    # bf16: the fp32 sum, rounded once. A running bf16 sum differs in many entries
    parts = [gradient("narrow", rank) for rank in range(4)]
    once = torch.stack([part.float() for part in parts]).sum(0).to(torch.bfloat16)
    running = parts[0].clone()
    for part in parts[1:]:
        running += part
    assert float((results[0]["narrow"] == once).float().mean()) > 0.99  # the order of an fp32 sum may move a last bit
    assert float((running == once).float().mean()) < 0.95
    assert not results[0]["unused"].any()


def refused_worker(rank: int, size: int) -> list[str]:
    mesh = cp_mesh(size)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=Topology.from_mesh(mesh).fsdp_mesh)
    said = [refusal(sync_gradients, model, mesh)]
    sync_gradients(nn.Linear(2, 2), None)
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp_shard", "cp"))
    plain = nn.Linear(2, 2, bias=False)
    plain.weight.grad = torch.full((2, 2), float(rank + 1))
    sync_gradients(plain, alone)  # cp 1: over the data ranks alone
    assert torch.equal(plain.weight.grad, torch.full((2, 2), 3.0))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    tied[0].weight.grad = torch.ones(2, 2)
    sync_gradients(tied, mesh)  # a shared parameter is summed once
    assert torch.equal(tied[0].weight.grad, torch.full((2, 2), 2.0))
    return said


@pytest.mark.dist2
def test_fsdp_parameters_are_refused() -> None:
    for (said,) in run_distributed(refused_worker, 2):
        assert "1.weight is sharded by FSDP2, which sums gradients itself" in said


def test_no_mesh_does_nothing() -> None:
    model = nn.Linear(2, 2)
    sync_gradients(model, None)
    assert model.weight.grad is None
