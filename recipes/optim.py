"""Optimizer, learning rate and gradient norm of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .schema import OptimSection


def build_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.Optimizer:
    """AdamW or SGD; matrices decay, vectors (norms, biases) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def learning_rate(section: OptimSection, step: int, total_steps: int) -> float:
    """The rate of step ``step`` (from 0): linear warm-up, then a cosine from ``lr`` to ``lr * min_lr_ratio``."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    decay_steps = max(1, total_steps - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * cosine)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients as one vector, every element counted once whatever is sharded; collective.

    Squares are summed in fp32 or wider. Parameters with equal mesh and placements are reduced together.

    Returns:
        0-dim, equal on every rank.
    """
    sums: dict[object, Tensor] = {}
    shards: dict[object, list[dist.ProcessGroup]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        key: object = None
        groups: list[dist.ProcessGroup] = []
        if isinstance(grad, DTensor):
            mesh, placements = grad.device_mesh, grad.placements
            key = (mesh, placements)
            groups = [mesh.get_group(axis) for axis, place in enumerate(placements) if isinstance(place, Shard)]
            grad = grad.to_local()
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        square = grad.to(wide).square().sum()
        sums[key] = sums[key] + square if key in sums else square
        shards[key] = groups
    total = None
    for key, square in sums.items():
        for group in shards[key]:
            dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    return torch.zeros(()) if total is None else total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most ``max_norm``; no collective."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(factor.to(local.dtype))


def first_nonfinite(model: nn.Module) -> str:
    """Name of the first parameter whose gradient on this rank is not finite; empty if there is none."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if not bool(local.isfinite().all()):
                return name
    return ""
