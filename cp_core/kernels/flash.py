"""The ``flash`` kernel: FlashAttention-2's operators for packed sequences, on CUDA.

The only file that imports ``flash_attn``. It calls the functions below the public ones, for only those take a merged
output and log-sum-exp in backward. Signature and constraints as in flash_attn/flash_attn_interface.py and README of
Dao-AILab/flash-attention, 2.7 and later: fp16 or bf16, head dim up to 256 (here padded to a multiple of 8, v to that of
q), cu_seqlens int32 on the device from 0 on, causality and window aligned to the last query and key, -1 for "all".
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .base import Block, KernelRequest
from .varlen import Alignment, Ends, Pair, varlen_backward, varlen_forward

_MULTIPLE = 8
_MAX_HEAD_DIM = 256


class FlashKernel:
    """FlashAttention-2; documents, causality and window natively."""

    name = "flash"
    takes_masks = False

    def obstacle(self, request: KernelRequest) -> str:
        """See ``Kernel.obstacle``."""
        if request.dropout:
            return "flash-attn draws dropout by place in its blocks, so it would change with the cp size: use 'flex'"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn computes in float16 and bfloat16, not in {request.dtype}; use 'flex' or 'sdpa'"
        width = max(request.qk_dim, request.v_dim)
        if width > _MAX_HEAD_DIM:
            return f"flash-attn takes heads up to {_MAX_HEAD_DIM} wide, these are {width}; use 'flex'"
        if request.device in ("", "meta"):
            return ""
        if request.device != "cuda":
            return f"flash-attn runs on CUDA devices, not on {request.device!r}; use 'sdpa', or 'npu_flash' on an NPU"
        try:
            _interface()
        except Exception as error:  # a broken installation raises all sorts of things, not ImportError alone
            return f"flash_attn cannot be imported ({error}); install flash-attn 2.7 or later, or use 'flex'"
        return ""

    def forward(self, block: Block) -> Pair:
        """See ``Kernel.forward``."""
        return varlen_forward(self, block, _MULTIPLE)

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernel.backward``."""
        return varlen_backward(self, dout, block, out, lse, _MULTIPLE)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, alignment: Alignment, scale: float) -> Pair:
        """See ``VarlenOperator.run_forward``."""
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q, k, v, return_softmax=False, **_arguments(q, ends, alignment, scale)
        )
        return out, lse

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends,
        alignment: Alignment, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``VarlenOperator.run_backward``."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _interface()._flash_attn_varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_arguments(q, ends, alignment, scale),
        )
        return dq, dk, dv


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _arguments(q: Tensor, ends: Ends, alignment: Alignment, scale: float) -> dict[str, Any]:
    """What forward and backward are told alike."""
    starts = [torch.tensor((0, *of), dtype=torch.int32).to(q.device, non_blocking=True) for of in ends]
    return {
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[1],
        "max_seqlen_q": ends.longest(0),
        "max_seqlen_k": ends.longest(1),
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": alignment == Alignment(None, 0),
        "window_size_left": -1 if alignment.before is None else alignment.before,
        "window_size_right": -1 if alignment.after is None else alignment.after,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
