"""Collectives over one group: differentiable ones (gather a dim, exchange two dims), and the raw calls under them.

B batch, N heads, T local tokens, S = P * T global tokens, D head dim, P ranks.

Every raw c10d call goes through the functions at the end: gloo writes wrong values, without an error, into outputs
that are not contiguous, so outputs are always fresh and contiguous there. Inputs and gradients may have any strides.
All functions are collective: every rank of the group calls them, in the same order, with equal shapes. Those named
``start_`` return a ``Transfer`` at once; what they send must not change before its ``wait``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
_abandoned: weakref.WeakKeyDictionary[Group, list[Transfer]] = weakref.WeakKeyDictionary()


class Transfer:
    """One exchange under way.

    Args:
        works: what to wait for.
        finish: makes the result out of what has arrived.
        sent: tensors that must live until then.
        p2p: the group, if these are point-to-point messages: dropped before they are through, they would meet later
            ones (seen with gloo). A transfer that an error leaves behind therefore hands them to ``start_send_recv``.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], Tensor],
        *sent: Tensor,
        p2p: Group | None = None,
    ) -> None:
        self._works, self._finish, self._sent, self._p2p = list(works), finish, sent, p2p

    def wait(self) -> Tensor:
        """The result; call it once."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._sent = [], ()
        return self._finish()

    def __del__(self) -> None:
        if self._works and self._p2p is not None:
            _abandoned.setdefault(self._p2p, []).append(Transfer(self._works, self._finish, *self._sent))

    def then(self, step: Callable[[Tensor], Tensor]) -> Transfer:
        """The same exchange, its result passed through ``step``."""
        before = self._finish
        self._finish = lambda: step(before())
        return self


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
    return _AllToAll.apply(x, split_dim % x.ndim, concat_dim % x.ndim, group)


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
        return _join(all_gather_stacked(x, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ReduceScatterSequence.apply(grad, *ctx.args), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    """The gradient of a gather, and the other way round, so that second derivatives are right too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.args = (dim, group)
        return reduce_scatter_stacked(_parts(x, dim, group), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherSequence.apply(grad, *ctx.args), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
        ctx.args = (split_dim, concat_dim, group)
        return start_exchange(x, split_dim, concat_dim, group, async_op=False).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim, group = ctx.args
        return _AllToAll.apply(grad, concat_dim, split_dim, group), None, None, None


def start_gather(x: Tensor, dim: int, group: Group) -> Transfer:
    """Start what ``gather_sequence`` does, without a gradient."""
    return start_all_gather(x, group).then(lambda stacked: _join(stacked, dim))


def start_scatter_sum(x: Tensor, dim: int, group: Group) -> Transfer:
    """Start the reverse of ``start_gather``: ``[..., P * T, ...] -> [..., T, ...]``, summed over ranks."""
    return start_reduce_scatter(_parts(x, dim, group), group)


def start_exchange(x: Tensor, split_dim: int, concat_dim: int, group: Group, async_op: bool = True) -> Transfer:
    """Start what ``all_to_all`` does, without a gradient."""
    arrived = start_all_to_all(_parts(x, split_dim, group), group, async_op)
    return arrived.then(lambda stacked: _join(stacked, concat_dim))


def _parts(x: Tensor, dim: int, group: Group) -> Tensor:
    """``[..., P * n, ...] -> [P, ..., n, ...]``."""
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not divisible by the {size} ranks of the exchange")
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _join(stacked: Tensor, dim: int) -> Tensor:
    """``[P, ..., n, ...] -> [..., P * n, ...]``."""
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


# The raw calls. torch 2.13 renamed two of them; older builds (Ascend ones lag) know only the former names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Collectives that a backend does not have. A reduce-scatter is then an all-reduce and a slice; the rest is refused.
LACKING: dict[str, tuple[str, ...]] = {"mpi": ("reduce_scatter",), "threaded": ("send/recv",)}


def all_gather_stacked(x: Tensor, group: Group) -> Tensor:
    """``[...] -> [P, ...]``: one entry a rank."""
    return start_all_gather(x, group, async_op=False).wait()


def reduce_scatter_stacked(x: Tensor, group: Group) -> Tensor:
    """``[P, ...] -> [...]``: the sum over ranks of entry ``rank``; summed in fp32 or wider."""
    return start_reduce_scatter(x, group, async_op=False).wait()


def all_to_all_stacked(x: Tensor, group: Group) -> Tensor:
    """``[P, ...] -> [P, ...]``: entry p goes to rank p; entry p of the result came from rank p."""
    return start_all_to_all(x, group, async_op=False).wait()


def start_all_gather(x: Tensor, group: Group, async_op: bool = True) -> Transfer:
    """See ``all_gather_stacked``."""
    flat = x.contiguous().flatten()
    out = flat.new_empty(dist.get_world_size(group) * flat.numel())
    work = _all_gather(out, flat, group=group, async_op=async_op)
    shape = x.shape
    return Transfer([work], lambda: out.view(-1, *shape), flat)


def start_reduce_scatter(x: Tensor, group: Group, async_op: bool = True) -> Transfer:
    """See ``reduce_scatter_stacked``."""
    if x.dtype in (torch.bfloat16, torch.float16):
        dtype = x.dtype
        return start_all_to_all(x, group, async_op).then(lambda parts: parts.float().sum(0).to(dtype))
    shape = x.shape[1:]
    flat = x.contiguous().flatten()
    if "reduce_scatter" in LACKING.get(dist.get_backend(group), ()):
        total, rank = flat.clone(), dist.get_rank(group)
        work = dist.all_reduce(total, group=group, async_op=async_op)
        return Transfer([work], lambda: total.view(-1, *shape)[rank].clone())
    out = flat.new_empty(flat.numel() // dist.get_world_size(group))
    work = _reduce_scatter(out, flat, group=group, async_op=async_op)
    return Transfer([work], lambda: out.view(shape), flat)


def start_all_to_all(x: Tensor, group: Group, async_op: bool = True) -> Transfer:
    """See ``all_to_all_stacked``."""
    sent = x.contiguous()
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
    return Transfer([work], lambda: received, sent)


def start_send_recv(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group
) -> list[dist.Work]:
    """Start sending to, and receiving from, ranks of the group. Pairs of ranks match their messages by order.

    Args:
        sends: contiguous tensors and the group ranks they go to; must not change before the wait.
        receives: contiguous buffers and the group ranks they come from.

    Returns:
        What to wait for.
    """
    assert all(tensor.is_contiguous() for tensor, _ in (*sends, *receives))
    for transfer in _abandoned.pop(group, ()):
        transfer.wait()
    ops = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends]
    ops += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives]
    return dist.batch_isend_irecv(ops) if ops else []
