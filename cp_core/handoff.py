"""``Handoff``: the module whose output *is* the q, k or v that attention consumes.

It stands directly before ``CPAttention``, after norm and RoPE, so that nothing can come between the tensor that
travels and the tensor that is used. With the sync schedule it passes its input on; strategies with an async schedule
launch their exchange here.
"""

from __future__ import annotations

from torch import Tensor, nn


class Handoff(nn.Module):
    """Marks one of the three tensors that enter attention.

    Args:
        role: ``q``, ``k`` or ``v``.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        if role not in ("q", "k", "v"):
            raise ValueError(f"role={role!r} is not one of q | k | v")
        self.role = role

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, T, D]``, unchanged."""
        return x

    def extra_repr(self) -> str:
        return f"role={self.role!r}"
