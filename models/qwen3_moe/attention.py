"""Qwen3's attention: grouped heads, RMSNorm on every q and k head before RoPE.

B batch, T local tokens, H hidden, N query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from cp_core import AttentionShape, CPAttention, Handoff, SequenceContext

from ..common.norm import RMSNorm
from ..common.rope import apply_rope
from .config import head_dim


class Qwen3MoeAttention(nn.Module):
    """``project -> norm, RoPE -> handoff -> attend -> output``. Head counts are read from the projections."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = head_dim(config)
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.q_handoff, self.k_handoff, self.v_handoff = Handoff("q"), Handoff("k"), Handoff("v")
        self.cp = CPAttention(scale=self.head_dim**-0.5)

    def attention_shape(self) -> AttentionShape:
        """Heads and widths that this module's parameters hold."""
        q_heads, kv_heads = (proj.weight.shape[0] // self.head_dim for proj in (self.q_proj, self.k_proj))
        return AttentionShape(q_heads, kv_heads, self.head_dim, self.head_dim)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], sequence: SequenceContext) -> Tensor:
        """``[B, T, H] -> [B, T, H]``; collective over the cp axis.

        V first, Q last: with an async schedule V and K travel while Q is still being projected.
        """
        v = self.v_handoff(self._heads(self.v_proj(hidden)), sequence)  # [B, K, T, D]
        k = self.k_handoff(apply_rope(self.k_norm(self._heads(self.k_proj(hidden))), *rope), sequence)
        q = self.q_handoff(apply_rope(self.q_norm(self._heads(self.q_proj(hidden))), *rope), sequence)  # [B, N, T, D]
        out = self.cp(q, k, v, sequence)  # [B, N, T, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, T, heads * D] -> [B, heads, T, D]``."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
