"""Routed experts: many gated feed-forward layers, each on the tokens that chose it.

T tokens, k choices a token, E experts, H hidden, I intermediate, R = T * k routed rows.

Rows are sorted by expert and multiplied in groups: by torch's grouped matmul where it can (no host sync), else by a
loop over experts (fp64, widths that are no multiple of 16 bytes). Both give every expert a gradient, zeros for one
that got no token, on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN


class Experts(nn.Module):
    """E experts with stacked weights ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation: a name in transformers' ``ACT2FN``.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of each token's experts, weighted.

        Args:
            x: ``[T, H]``.
            chosen: ``[T, k]`` int64, expert of each choice.
            weights: ``[T, k]``, fp32 or wider.

        Returns:
            ``[T, H]``, dtype of ``x``.
        """
        num_experts, top_k = self.gate_up_proj.shape[0], chosen.shape[1]
        flat = chosen.flatten()  # [R]
        order = flat.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        rows = x[order // top_k]  # [R, H], sorted by expert
        gate, up = expert_linear(rows, self.gate_up_proj, counts).chunk(2, dim=-1)  # [R, I] each
        out = expert_linear(self.act_fn(gate) * up, self.down_proj, counts)  # [R, H]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        out = out[back].view(*chosen.shape, -1)  # [T, k, H]
        return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def expert_linear(rows: Tensor, weight: Tensor, counts: Tensor, grouped: bool | None = None) -> Tensor:
    """``rows`` of expert e times ``weight[e].T``.

    Args:
        rows: ``[R, in]``, sorted by expert.
        weight: ``[E, out, in]``.
        counts: ``[E]`` int64, rows of each expert; they sum to R.
        grouped: force the grouped matmul (True) or the loop (False); default: what the dtype and widths allow.

    Returns:
        ``[R, out]``.
    """
    if grouped is None:
        grouped = can_group(rows, weight)
    if grouped:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())  # the one host read of this path
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(0), strict=True)])


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matmul takes these: no fp64, rows of 16-byte multiples."""
    widths = (weight.shape[1] * weight.element_size(), weight.shape[2] * weight.element_size())
    narrow = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return narrow and rows.dtype == weight.dtype and all(width % 16 == 0 for width in widths)
