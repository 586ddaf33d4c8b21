"""The ``sdpa`` kernel: torch's scaled dot-product attention, one block at a time.

B batch, N query heads, K kv heads, T queries, S keys, D head dim.

On the CPU it calls torch's fused flash operator, which takes grouped heads natively and has a backward that accepts
a merged output and log-sum-exp; a v of another width than q and k is padded with zeros. On other devices this version
uses the plain formula below, a slab of queries at a time: right everywhere, fast nowhere (fused device kernels are
issue 5's).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SLAB_SCORES = 1 << 24  # scores held at once by the plain formula


class SdpaKernel:
    """Fused on the CPU, the plain formula elsewhere."""

    name = "sdpa"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See ``Kernel.forward``."""
        if q.device.type != "cpu":
            return plain_forward(q, k, v, causal, scale)
        width = v.shape[-1]
        q, k, v = _one_width(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out[..., :width], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernel.backward``."""
        if q.device.type != "cpu":
            return plain_backward(dout, q, k, v, out, lse, causal, scale)
        qk_width, v_width = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = _one_width(dout, q, k, v, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq[..., :qk_width], dk[..., :qk_width], dv[..., :v_width]


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention by its formula, in fp32 or wider; shapes as in ``Kernel.forward``."""
    qg, kw, vw = _grouped(q, k), _wide(k), _wide(v)
    outs, lses = [], []
    for first, last in _slabs(q, k):
        scores = _scores(qg[:, :, :, first:last], kw, causal, scale, first)
        lse = scores.logsumexp(-1)  # [B, K, G, t]
        outs.append(torch.einsum("bkgts,bksd->bkgtd", (scores - lse.unsqueeze(-1)).exp(), vw))
        lses.append(lse)
    return torch.cat(outs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3).flatten(1, 2)


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the formula (Dao et al., FlashAttention, algorithm 4), in fp32 or wider."""
    qg, kw, vw, dg = _grouped(q, k), _wide(k), _wide(v), _grouped(dout, k)
    lse_g = lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)  # [B, K, G, T, 1]
    delta = (dg * _grouped(out, k)).sum(-1, keepdim=True)  # [B, K, G, T, 1]
    dq, dk, dv = torch.zeros_like(qg), torch.zeros_like(kw), torch.zeros_like(vw)
    for first, last in _slabs(q, k):
        now = slice(first, last)
        probs = (_scores(qg[:, :, :, now], kw, causal, scale, first) - lse_g[:, :, :, now]).exp()
        dv += torch.einsum("bkgts,bkgtd->bksd", probs, dg[:, :, :, now])
        dscores = torch.einsum("bkgtd,bksd->bkgts", dg[:, :, :, now], vw)
        dscores = scale * probs * (dscores - delta[:, :, :, now])
        dq[:, :, :, now] = torch.einsum("bkgts,bksd->bkgtd", dscores, kw)
        dk += torch.einsum("bkgts,bkgtd->bksd", dscores, qg[:, :, :, now])
    return dq.flatten(1, 2), dk, dv


def _one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What the fused operator takes for granted: one last dim (zeros change no score), and stride 1 in it."""
    width = max(x.shape[-1] for x in tensors)
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in padded)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[B, N, T, D] -> [B, K, N / K, T, D]``, fp32 or wider."""
    return _wide(x).unflatten(1, (k.shape[1], -1))


def _slabs(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Query ranges whose scores fit into ``_SLAB_SCORES``."""
    tokens = q.shape[2]
    step = max(1, _SLAB_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [(first, min(first + step, tokens)) for first in range(0, tokens, step)]


def _scores(qg: Tensor, kw: Tensor, causal: bool, scale: float, first: int) -> Tensor:
    """Scaled scores ``[B, K, G, t, S]``; -inf above the diagonal of the square block that starts at query 0."""
    scores = torch.einsum("bkgtd,bksd->bkgts", qg, kw) * scale
    if causal:
        t, s = scores.shape[-2:]
        above = torch.arange(s, device=kw.device) > torch.arange(first, first + t, device=kw.device).unsqueeze(-1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores
