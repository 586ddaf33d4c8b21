"""The gated feed-forward layer (SwiGLU with silu)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, no biases.

    Args:
        hidden_size: H.
        intermediate_size: width between.
        activation: a name in transformers' ``ACT2FN``.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
