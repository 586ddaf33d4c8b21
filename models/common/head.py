"""The output head: hidden states to logits, to a sum of losses, or to both.

B batch, T local tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from cp_core.loss import linear_cross_entropy


class LMHead(nn.Linear):
    """A linear layer without bias whose ``forward`` also owns the loss, so that FSDP2's hooks surround both."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, return_logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Logits and loss, each only if asked for; the loss never needs all logits at once.

        Args:
            hidden: ``[B, T, H]``.
            targets: ``[B, T]`` int64, shifted, -100 where there is none; None: no loss.
            return_logits: whether logits ``[B, T, V]`` are made.

        Returns:
            logits or None; sum of the losses or None; number of targets or None.
        """
        logits = super().forward(hidden) if return_logits else None
        if targets is None:
            return logits, None, None
        return logits, *linear_cross_entropy(hidden, self.weight, targets)
