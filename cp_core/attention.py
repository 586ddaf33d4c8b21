"""``CPAttention``: the one call of a softmax mixer into the core.

A mixer reads ``project -> Handoff(q|k|v) -> self.cp(q, k, v, sequence) -> o_proj``. The strategy and kernel are set
at bind time; unbound, it is the ``local`` strategy of one process, on the same path.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .kernels import Kernel, SdpaKernel
from .sequence import SequenceContext
from .strategies import AttentionStrategy, ComposedStrategy


class CPAttention(nn.Module):
    """Causal softmax attention over a sharded sequence.

    Args:
        scale: factor of the scores.
        causal: a query sees no later key.
    """

    kind = "softmax"

    def __init__(self, scale: float, causal: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.cp_size = 1
        self.strategy: AttentionStrategy = ComposedStrategy()
        self.kernel: Kernel = SdpaKernel()

    def bind(self, strategy: AttentionStrategy, kernel: Kernel, cp_size: int) -> None:
        """Set how attention is computed from now on; called by ``bind_context_parallel``."""
        self.strategy, self.kernel, self.cp_size = strategy, kernel, cp_size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceContext) -> Tensor:
        """Attention of the local queries over the whole sequence; collective over the cp axis.

        Args:
            q: ``[B, N, T, D]``.
            k: ``[B, K, T, D]``, K dividing N; v likewise.
            sequence: the layout of this batch.

        Returns:
            ``[B, N, T, D]``; 0 on padding.

        Raises:
            ValueError: a sequence of another batch or cp size; q, k and v of different dtypes (autocast aside).
        """
        sequence.check(q.shape[0], q.shape[2], self.cp_size)
        if torch.is_autocast_enabled(q.device.type):
            narrow = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
        elif not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        return self.strategy.attend(q, k, v, self.kernel, sequence, self.causal, self.scale)
