"""The loss: one owner for token sums, token counts and their scale.

B batch, T local tokens, H hidden, V vocabulary.

``loss = (sum over supervised tokens of the whole CP group) / (their number)``. The value is equal on all ranks of a
CP group; the gradient is this rank's part, so that the SUM of gradients over dp x cp is the whole gradient. Logits of
all tokens never exist: the head and the cross entropy run over slabs of tokens, and in training the slab's gradients
are made at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives import sum_values
from .shard import IGNORE_INDEX
from .topology import Topology

CHUNK_TOKENS = 1024


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of ``hidden @ weight.T`` over the tokens that have a target. Local, no collective.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, the output head.
        targets: ``[...]`` int64; ``-100`` is no target.
        chunk_tokens: tokens whose logits exist at once; peak memory is ``chunk_tokens * V`` values.

    Returns:
        The sum (fp32, or fp64 for fp64 inputs; accumulated so whatever the inputs' dtype) and the number of targets
        (int64), both 0-dim.

    Raises:
        ValueError: shapes that do not agree, or a target outside 0 .. V - 1 (CPU only; a device would have to sync).
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} do not agree"
        )
    flat = targets.flatten()
    if flat.device.type == "cpu" and flat.numel():
        low, high = int(flat.masked_fill(flat == IGNORE_INDEX, 0).min()), int(flat.max())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(
                f"labels must be {IGNORE_INDEX} or in 0 .. {weight.shape[0] - 1}, got {min(low, high)} .. {high}"
            )
    if not torch.is_grad_enabled():  # inside apply, inputs look as if they needed their gradients
        hidden, weight = hidden.detach(), weight.detach()
    total = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, flat, chunk_tokens)
    return total, (flat != IGNORE_INDEX).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if need_hidden else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            now = slice(start, start + chunk_tokens)
            logits = (hidden[now] @ weight.T).to(wide)  # [t, V]
            supervised = (targets[now] != IGNORE_INDEX).unsqueeze(-1)  # [t, 1]
            index = targets[now].unsqueeze(-1).clamp_min(0)
            lse = logits.logsumexp(-1, keepdim=True)
            total += (lse - logits.gather(-1, index)).masked_fill_(~supervised, 0.0).sum()
            if not (need_hidden or need_weight):
                continue
            dlogits = logits.sub_(lse).exp_()  # softmax
            dlogits.scatter_add_(-1, index, torch.full_like(lse, -1.0))
            dlogits = dlogits.masked_fill_(~supervised, 0.0).to(hidden.dtype)
            if dhidden is not None:
                dhidden[now] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.T @ hidden[now]
        ctx.save_for_backward(dhidden, dweight)  # freed by backward, which an attribute of ctx would not be
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return (
            (dhidden * grad).to(dhidden.dtype) if dhidden is not None else None,
            (dweight * grad).to(ctx.dtype) if dweight is not None else None,
            None,
            None,
        )


def mean_loss(
    local_sum: Tensor, local_count: Tensor, topology: Topology, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """From this rank's sum of losses to the loss of the whole CP group; collective over the cp axis.

    Without ``num_items_in_batch`` the loss is the mean over the CP group's targets, and its gradient is divided by
    the number of data ranks, so that the sum over them is the mean of their means. With it, the sum is divided by
    that number: the targets of all data ranks and accumulation steps of one optimizer step, as in transformers.

    Args:
        local_sum: 0-dim, differentiable.
        local_count: 0-dim integer, this rank's targets.
        topology: whose ranks share the sequence.
        num_items_in_batch: see above.

    Returns:
        0-dim. Equal on every rank of the CP group; 0 if there is no target. Its gradient is this rank's part.
    """
    pair = torch.stack([local_sum.detach(), local_count.to(local_sum.dtype)])  # one message; HCCL has no fp64
    cp_sum, cp_count = sum_values(pair, topology.cp.group).unbind()
    if num_items_in_batch is None:
        denominator = cp_count.clamp_min(1)
        data_ranks = topology.dp.size
    else:
        denominator = torch.as_tensor(num_items_in_batch, device=local_sum.device).clamp_min(1).to(local_sum.dtype)
        data_ranks = 1
    value = cp_sum / denominator
    part = local_sum / (denominator * data_ranks)
    return value_with_gradient_of(value, part)


def value_with_gradient_of(value: Tensor, part: Tensor) -> Tensor:
    """``value`` in forward, exactly; the gradient goes to ``part`` (same shape)."""
    return _ValueWithGradientOf.apply(value, part)


class _ValueWithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, part: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad
