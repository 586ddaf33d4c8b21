"""The ``npu_flash`` kernel: Ascend's fused attention for packed sequences.

The only file of the kernels that imports ``torch_npu``. Signature and constraints as in the documentation of
``torch_npu.npu_fusion_attention`` (Ascend Extension for PyTorch, hiascend.com) and its gradient operator: layout TND
with the ends of all sequences as host numbers; fp16, bf16 or fp32; head dim here padded to a multiple of 16, v to that
of q; ``sparse_mode`` 0 without a mask, 3 for causality and 4 for a band, both aligned to the last query and key of
each sequence, with one compressed 2048 x 2048 upper-triangular mask; softmax statistics fp32, eight equal entries a
query. A merged log-sum-exp enters backward as the maximum, with a sum of 1.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .varlen import Alignment, Ends, Pair, VarlenKernel

_COMPRESSED = 2048  # side of the mask that sparse modes 3 and 4 want, whatever the lengths
_ALL = 2**31 - 1  # tokens before or after the diagonal: no limit
_STATISTICS = 8  # equal entries of the softmax statistics


class NpuFlashKernel(VarlenKernel):
    """npu_fusion_attention; documents, causality and window natively."""

    name = "npu_flash"
    operator = "npu_fusion_attention"
    package = "torch_npu"
    device = "npu"
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    multiple = 16
    widest = 512
    instead = "sdpa"

    def load(self) -> object:
        """See ``VarlenKernel.load``."""
        return _torch_npu()

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, alignment: Alignment, scale: float) -> Pair:
        """See ``VarlenKernel.run_forward``."""
        out, maximum, total, *_ = _torch_npu().npu_fusion_attention(
            q.contiguous(), k.contiguous(), v.contiguous(), scale=scale, **_arguments(q, ends, alignment)
        )
        return out, (maximum[..., 0] + total[..., 0].log()).T  # [N, tokens]

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends,
        alignment: Alignment, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``VarlenKernel.run_backward``."""
        maximum = lse.T.unsqueeze(-1).expand(-1, -1, _STATISTICS).contiguous()  # [tokens, N, 8]
        dq, dk, dv, *_ = _torch_npu().npu_fusion_attention_grad(
            q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous(), softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum), attention_in=out.contiguous(), scale_value=scale,
            **_arguments(q, ends, alignment),
        )  # fmt: skip
        return dq, dk, dv


@cache
def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")


@lru_cache(maxsize=8)
def _compressed_mask(device: torch.device) -> Tensor:
    """True above the diagonal: not seen."""
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


def _arguments(q: Tensor, ends: Ends, alignment: Alignment) -> dict[str, Any]:
    """What forward and backward are told alike."""
    before, after = (_ALL if side is None else side for side in alignment)
    mode = {Alignment(None, None): 0, Alignment(None, 0): 3}.get(alignment, 4)
    return {
        "head_num": q.shape[1],
        "input_layout": "TND",
        "atten_mask": None if mode == 0 else _compressed_mask(q.device),
        "keep_prob": 1.0,
        "pre_tockens": before,
        "next_tockens": after,
        "actual_seq_qlen": list(ends.q),
        "actual_seq_kvlen": list(ends.k),
        "sparse_mode": mode,
    }
