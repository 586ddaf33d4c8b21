"""Differentiable collectives over one group: gather a dim, exchange two dims, sum.

B batch, N heads, T local tokens, S = P * T global tokens, D head dim, P ranks.

Every raw c10d call goes through the four functions at the end: gloo writes wrong values, without an error, into
outputs that are not contiguous, so outputs are always fresh and contiguous there. Inputs and gradients may have any
strides. All functions are collective: every rank of the group calls them, in the same order, with equal shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def gather_sequence(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """Concatenate the ranks' tensors along ``dim`` in rank order.

    The gradient of a rank's part is the sum over ranks of their gradients for it (a reduce-scatter); in bf16 and
    fp16 the partial gradients travel as they are and are summed in fp32.

    Args:
        x: ``[..., T, ...]``, the same shape on every rank.
        dim: the dim of length T.
        group: the ranks; None is one rank.

    Returns:
        ``[..., P * T, ...]``.
    """
    if group is None:
        return x
    return _GatherSequence.apply(x, dim % x.ndim, group)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group | None) -> Tensor:
    """Cut ``x`` along ``split_dim`` into one part a rank, exchange, concatenate what arrived along ``concat_dim``.

    Sequence to heads is ``(split_dim=heads, concat_dim=sequence)``; its gradient is the reverse exchange.

    Args:
        x: any strides; ``x.shape[split_dim]`` divisible by P.

    Returns:
        ``split_dim`` is P times shorter, ``concat_dim`` P times longer; parts stand in rank order.

    Raises:
        ValueError: ``split_dim`` not divisible by the number of ranks.
    """
    if group is None:
        return x
    size = dist.get_world_size(group)
    split_dim, concat_dim = split_dim % x.ndim, concat_dim % x.ndim
    if x.shape[split_dim] % size:
        raise ValueError(f"dim {split_dim} of {tuple(x.shape)} is not divisible by the {size} ranks of the exchange")
    return _AllToAll.apply(x, split_dim, concat_dim, group)


def sum_values(x: Tensor, group: Group | None) -> Tensor:
    """The sum over ranks, without a gradient."""
    if group is None:
        return x.detach()
    total = x.detach().contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.args = (dim, group)
        stacked = all_gather_stacked(x, group)  # [P, ..., T, ...]
        return stacked.movedim(0, dim).flatten(dim, dim + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ReduceScatterSequence.apply(grad, *ctx.args), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    """The gradient of a gather, and the other way round, so that second derivatives are right too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.args = (dim, group)
        stacked = x.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0)  # [P, ..., T, ...]
        return reduce_scatter_stacked(stacked, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherSequence.apply(grad, *ctx.args), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
        ctx.args = (split_dim, concat_dim, group)
        return _exchange(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim, group = ctx.args
        return _AllToAll.apply(grad, concat_dim, split_dim, group), None, None, None


def _exchange(x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    parts = x.unflatten(split_dim, (size, -1)).movedim(split_dim, 0)  # [P, ...]
    arrived = all_to_all_stacked(parts, group)
    return arrived.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


# The raw calls. torch 2.13 renamed two of them; older builds (Ascend ones lag) know only the former names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_stacked(x: Tensor, group: Group) -> Tensor:
    """``[...] -> [P, ...]``: one entry a rank."""
    flat = x.contiguous().flatten()
    out = flat.new_empty(dist.get_world_size(group) * flat.numel())
    _all_gather(out, flat, group=group)
    return out.view(-1, *x.shape)


def reduce_scatter_stacked(x: Tensor, group: Group) -> Tensor:
    """``[P, ...] -> [...]``: the sum over ranks of entry ``rank``; summed in fp32 or wider."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return all_to_all_stacked(x, group).float().sum(0).to(x.dtype)
    flat = x.contiguous().flatten()
    out = flat.new_empty(flat.numel() // dist.get_world_size(group))
    _reduce_scatter(out, flat, group=group)
    return out.view(x.shape[1:])


def all_to_all_stacked(x: Tensor, group: Group) -> Tensor:
    """``[P, ...] -> [P, ...]``: entry p goes to rank p; entry p of the result came from rank p."""
    sent = x.contiguous()
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, sent, group=group)
    return received
