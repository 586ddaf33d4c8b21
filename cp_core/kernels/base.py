"""The interface of an attention kernel, and attention as one block or a merge of blocks.

B batch, N query heads, K kv heads (N divisible by K), T queries, S keys, D head dim.

A kernel computes one block, all that some queries do with some keys, and its log-sum-exp. Blocks that share queries
are merged exactly: with the merged output and log-sum-exp, each block's own backward gives its share of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..blocks import CausalMetadata
from ..scoring import Scoring


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and some keys of one attention call.

    Attributes:
        q: ``[B, N, T, D]``, any strides.
        k: ``[B, K, S, D]``.
        v: ``[B, K, S, D]``; its last dim may differ and is then the output's.
        meta: where they sit, and so which scores count.
        scoring: what becomes of them.
        first_head: number of the first query head, among those that ``scoring.mask`` and dropout count.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    meta: CausalMetadata
    scoring: Scoring
    first_head: int = 0

    @property
    def mask(self) -> Tensor | None:
        """The user's mask for these heads, ``[B or 1, N or 1, S, S]``, in global positions."""
        mask = self.scoring.mask
        return mask if mask is None or mask.shape[1] == 1 else mask.narrow(1, self.first_head, self.q.shape[1])


@dataclass(frozen=True)
class KernelRequest:
    """What a layer asks of a kernel, as far as it is known when the layer is bound.

    Attributes:
        device: type of the device, such as ``cuda``; empty: not known.
        dtype: of q, k and v.
        qk_dim: width of a head of q and k.
        v_dim: width of a head of v.
        causal: a query sees no later key.
        window: how many keys a query sees; None: all.
        dropout: share of the weights that drop in training.
    """

    device: str
    dtype: torch.dtype
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int | None = None
    dropout: float = 0.0


class Kernel(Protocol):
    """How one block of attention is computed. Holds no tensor of a batch; shared by all layers.

    Attributes:
        name: as in ``ContextParallelConfig(kernel=...)``.
        takes_masks: it honours ``Scoring.mask``.
    """

    name: str
    takes_masks: bool

    def obstacle(self, request: KernelRequest) -> str:
        """Why it cannot do this, and a remedy; empty if it can."""
        ...

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """Attention of one block.

        Returns:
            Output ``[B, N, T, Dv]`` (0 where a query sees no key) and natural log-sum-exp of the scaled scores
            ``[B, N, T]`` (fp32, or fp64; -inf where a query sees no key).
        """
        ...

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block, given the merged ``out`` and ``lse`` of its queries: ``dq, dk, dv``."""
        ...


@runtime_checkable
class WholeKernel(Protocol):
    """A kernel with an autograd of its own, used where all keys are in one block."""

    def attend(self, block: Block) -> Tensor:
        """Attention ``[B, N, T, Dv]``, differentiable."""
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


def attend_block(block: Block, kernel: Kernel) -> Tensor:
    """Attention ``[B, N, T, Dv]`` where all keys are in one block; differentiable."""
    return kernel.attend(block) if isinstance(kernel, WholeKernel) else attend_by_parts(block, kernel)


def attend_by_parts(block: Block, kernel: Kernel) -> Tensor:
    """The same by the kernel's ``forward`` and ``backward``."""
    return _AttendBlock.apply(block.q, block.k, block.v, block, kernel)


class _AttendBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: Kernel) -> Tensor:
        out, lse = kernel.forward(block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = (block.meta, block.scoring, block.first_head, kernel)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        *rest, kernel = ctx.plan
        grads = kernel.backward(dout, Block(q, k, v, *rest), out, lse)
        return (*(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which blocks are merged and gradients are summed: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of two blocks, from each block's output and log-sum-exp.

    Outputs ``[B, N, T, D]``, log-sum-exps ``[B, N, T]``; -inf marks a query that saw no key in that block.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = finite_lse(lse)
    weight_a, weight_b = (torch.exp(part - finite).unsqueeze(-1) for part in (lse_a, lse_b))
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


def finite_lse(lse: Tensor) -> Tensor:
    """With 0 for -inf, so that exp(score - lse) is 0 for a query that sees nothing, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
