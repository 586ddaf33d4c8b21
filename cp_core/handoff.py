"""``Handoff``: the module whose output *is* the q, k or v that attention consumes.

It stands directly before ``CPAttention``, after norm and RoPE, so that nothing can come between the tensor that
travels and the tensor that is used. With the sync schedule it passes its input on; with an async one it launches the
exchange and returns a ``Pending`` in the tensor's place.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .pending import Pending
from .sequence import SequenceContext

Launch = Callable[[str, Tensor, SequenceContext | None], Pending]


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
        self.launch: Launch | None = None  # set at bind time for an async schedule

    def forward(self, x: Tensor, sequence: SequenceContext | None = None) -> Tensor | Pending:
        """Hand one tensor off to attention.

        Args:
            x: ``[B, N, T, D]``, or what the consumer's ``seq_dim`` and ``head_dim`` say.
            sequence: the layout of this batch.

        Returns:
            ``x`` itself (sync), or what ``CPAttention`` takes in its place (async).
        """
        return x if self.launch is None else self.launch(self.role, x, sequence)

    def extra_repr(self) -> str:
        return f"role={self.role!r}, schedule={'sync' if self.launch is None else 'async'}"
