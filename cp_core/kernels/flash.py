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

from .varlen import Alignment, Ends, Pair, VarlenKernel


class FlashKernel(VarlenKernel):
    """FlashAttention-2; documents, causality and window natively."""

    name = "flash"
    operator = "flash-attn"
    package = "flash_attn"
    device = "cuda"
    dtypes = (torch.float16, torch.bfloat16)
    multiple = 8
    widest = 256
    instead = "flex"

    def load(self) -> object:
        """See ``VarlenKernel.load``."""
        return _interface()

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, alignment: Alignment, scale: float) -> Pair:
        """See ``VarlenKernel.run_forward``."""
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q, k, v, return_softmax=False, **_arguments(q, ends, alignment, scale)
        )
        return out, lse

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends,
        alignment: Alignment, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``VarlenKernel.run_backward``."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        exact = torch.are_deterministic_algorithms_enabled()
        _interface()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, deterministic=exact, **_arguments(q, ends, alignment, scale)
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
