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
        k: ``[B, K, S, D]``; v likewise, its last dim may differ and is then the output's.
        blocks: a query may be in several blocks; in none: output 0.
        kernel: computes each block.
        scale: factor of the scores.

    Returns:
        ``[B, N, T, D]``.
    """
    return _AttendBlocks.apply(q, k, v, blocks, kernel, scale)


class BlockMerger:
    """Forward of blocks that share queries, merged as they come, in fp32 or wider.

    Args:
        q: ``[B, N, T, D]``.
        v: its last dim is the output's.
    """

    def __init__(self, q: Tensor, v: Tensor, kernel: Kernel, scale: float) -> None:
        wide = wide_dtype(q)
        self.q, self.kernel, self.scale = q, kernel, scale
        self.out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)

    def add(self, k: Tensor, v: Tensor, blocks: tuple[Block, ...]) -> None:
        """Let the queries see more keys, ``[B, K, S, D]``."""
        for block in blocks:
            rows, queries, _ = _slices(block)
            part, lse = self.kernel.forward(*_cut(block, self.q, k, v), block.causal, self.scale)
            self.out[rows, :, queries], self.lse[rows, :, queries] = merge(
                self.out[rows, :, queries], self.lse[rows, :, queries], part, lse
            )


class BlockGradients:
    """Backward of the same blocks: dq is summed over all of them in fp32 or wider.

    Args:
        dout: gradient of the merged output, ``[B, N, T, D]``.
        q: the queries.
        out: the merged output.
        lse: the merged log-sum-exp, ``[B, N, T]``.
    """

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, kernel: Kernel, scale: float) -> None:
        self.dout, self.q, self.out, self.lse, self.kernel, self.scale = dout, q, out, lse, kernel, scale
        self.dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

    def add(self, k: Tensor, v: Tensor, blocks: tuple[Block, ...]) -> tuple[Tensor, Tensor]:
        """The gradients of these keys and values, in fp32 or wider."""
        dk, dv = (torch.zeros(x.shape, dtype=self.lse.dtype, device=x.device) for x in (k, v))
        for block in blocks:
            rows, queries, keys = _slices(block)
            grads = self.kernel.backward(
                self.dout[rows, :, queries], *_cut(block, self.q, k, v), self.out[rows, :, queries],
                self.lse[rows, :, queries], block.causal, self.scale,
            )  # fmt: skip
            for total, grad, tokens in zip((self.dq, dk, dv), grads, (queries, keys, keys), strict=True):
                total[rows, :, tokens] += grad
        return dk, dv


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], kernel: Kernel, scale: float
    ) -> Tensor:
        merger = BlockMerger(q, v, kernel, scale)
        merger.add(k, v, blocks)
        out = merger.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merger.lse)
        ctx.plan = (blocks, kernel, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, kernel, scale = ctx.plan
        sums = BlockGradients(dout, q, out, lse, kernel, scale)
        dk, dv = sums.add(k, v, blocks)
        return sums.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which blocks are merged and gradients are summed: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
