"""The interface of an attention kernel, and attention as a merge of blocks.

B batch, N query heads, K kv heads (N divisible by K), T queries, S keys, D head dim.

A kernel computes one block and its log-sum-exp. Blocks that share queries are merged exactly: with the merged output
and log-sum-exp, each block's own backward gives its share of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..blocks import Block


class Kernel(Protocol):
    """How one block of attention is computed. Stateless; shared by all layers."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of one block.

        Args:
            q: ``[B, N, T, D]``, any strides.
            k: ``[B, K, S, D]``.
            v: ``[B, K, S, D]``.
            causal: T == S, and query t sees keys 0 .. t; else every key.
            scale: factor of the scores.

        Returns:
            Output ``[B, N, T, D]`` and natural log-sum-exp of the scaled scores ``[B, N, T]`` (fp32, or fp64).
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block, given the merged ``out`` and ``lse`` of its queries: ``dq, dk, dv``."""
        ...


KERNELS: dict[str, Callable[[], Kernel]] = {}


def register_kernel(name: str, factory: Callable[[], Kernel]) -> None:
    """Make a kernel available as ``ContextParallelConfig(kernel=name)``.

    Raises:
        ValueError: the name is taken.
    """
    if name in KERNELS:
        raise ValueError(f"kernel {name!r} is registered already")
    KERNELS[name] = factory


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], kernel: Kernel, scale: float) -> Tensor:
    """Attention over a list of blocks; differentiable.

    Args:
        q: ``[B, N, T, D]``.
        k: ``[B, K, S, D]``; v likewise.
        blocks: a query may be in several blocks; in none: output 0.
        kernel: computes each block.
        scale: factor of the scores.

    Returns:
        ``[B, N, T, D]``.
    """
    return _AttendBlocks.apply(q, k, v, blocks, kernel, scale)


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], kernel: Kernel, scale: float
    ) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        merged = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        for block in blocks:
            rows, queries, _ = _slices(block)
            part, part_lse = kernel.forward(*_cut(block, q, k, v), block.causal, scale)
            merged[rows, :, queries], lse[rows, :, queries] = merge(
                merged[rows, :, queries], lse[rows, :, queries], part, part_lse
            )
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = (blocks, kernel, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, kernel, scale = ctx.plan
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for block in blocks:
            rows, queries, keys = _slices(block)
            grads = kernel.backward(
                dout[rows, :, queries], *_cut(block, q, k, v), out[rows, :, queries], lse[rows, :, queries],
                block.causal, scale,
            )  # fmt: skip
            for total, grad, tokens in zip(sums, grads, (queries, keys, keys), strict=True):
                total[rows, :, tokens] += grad
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, None, None, None


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of two blocks, from each block's output and log-sum-exp.

    Outputs ``[B, N, T, D]``, log-sum-exps ``[B, N, T]``; -inf marks a query that saw no key in that block.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)  # both empty: both weights become exp(-inf) = 0
    weight_a, weight_b = (torch.exp(part - finite).unsqueeze(-1) for part in (lse_a, lse_b))
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


def _slices(block: Block) -> tuple[slice, slice, slice]:
    return slice(block.b0, block.b1), slice(block.q0, block.q1), slice(block.k0, block.k1)


def _cut(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, keys = _slices(block)
    return q[rows, :, queries], k[rows, :, keys], v[rows, :, keys]
