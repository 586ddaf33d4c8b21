"""Summing gradients over dp x cp for training loops without FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .topology import Topology

_BUCKET_ELEMENTS = 1 << 24


def sync_gradients(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace every gradient by its sum over dp x cp; collective over both axes. Call once, after the last backward.

    A parameter without a gradient on this rank takes part with zeros, so that no rank waits for another. The sum is
    made in fp32 or wider. Nothing is averaged: the loss has the scale already (``mean_loss``).

    Args:
        model: its parameters must be whole on every rank.
        mesh: the mesh that ``from_pretrained`` got; None does nothing.

    Raises:
        ValueError: parameters sharded by FSDP2, which sums gradients itself.
    """
    group = Topology.from_mesh(mesh).dp_cp.group
    if group is None:
        return
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in parameters:
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded by FSDP2, which sums gradients itself; do not call sync_gradients as well"
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[Tensor] = []
    for _, parameter in parameters:
        assert parameter.grad is not None
        if bucket and _must_flush(bucket, parameter.grad):
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _sum_bucket(bucket, group)


def _must_flush(bucket: list[Tensor], grad: Tensor) -> bool:
    return grad.dtype != bucket[0].dtype or sum(g.numel() for g in bucket) + grad.numel() > _BUCKET_ELEMENTS


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    flat = torch.cat([grad.flatten().to(wide) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
