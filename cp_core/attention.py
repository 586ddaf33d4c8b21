"""``CPAttention``: the one call of a softmax mixer into the core.

A mixer reads ``project -> Handoff(q|k|v) -> self.cp(q, k, v, sequence) -> o_proj``. The strategy and kernel are set
at bind time; unbound, it is the ``local`` strategy of one process, on the same path. With an async schedule the
handoffs launch here (``launch``) and pass on a ``Pending`` each; with a sync one the same exchanges, in the same
order, start in ``forward``.

B batch, N query heads, K kv heads, T local tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .kernels import Kernel, SdpaKernel
from .pending import Frame, Ledger, Pending
from .sequence import SequenceContext
from .strategies import AttentionStrategy, ComposedStrategy, LaunchingStrategy


class CPAttention(nn.Module):
    """Softmax attention over a sharded sequence.

    Args:
        scale: factor of the scores.
        causal: a query sees no later key.
        seq_dim: dim of the tokens in q, k, v and the output; 2 is ``[B, N, T, D]``, 1 is ``[B, T, N, D]``.
        head_dim: dim of the heads, the other of the two.

    Raises:
        ValueError: dims that are neither of the two layouts.
    """

    kind = "softmax"

    def __init__(self, scale: float, causal: bool = True, seq_dim: int = 2, head_dim: int = 1) -> None:
        super().__init__()
        if seq_dim == head_dim:
            raise ValueError(f"seq_dim and head_dim are both {seq_dim}; use (2, 1) for [B, N, T, D], (1, 2) for BTND")
        if {seq_dim, head_dim} != {1, 2}:
            raise ValueError(
                f"seq_dim={seq_dim}, head_dim={head_dim} are not 2, 1 ([B, N, T, D]) or 1, 2 ([B, T, N, D])"
            )
        self.scale, self.causal = scale, causal
        self.seq_dim, self.head_dim = seq_dim, head_dim
        self.cp_size = 1
        self.path = "attention"
        self.strategy: AttentionStrategy | LaunchingStrategy = ComposedStrategy()
        self.kernel: Kernel = SdpaKernel()
        self.ledger: Ledger | None = None  # of an async schedule
        self.runtime: object = None  # what bind_context_parallel installed

    def bind(
        self,
        strategy: AttentionStrategy | LaunchingStrategy,
        kernel: Kernel,
        cp_size: int,
        path: str = "attention",
        ledger: Ledger | None = None,
    ) -> None:
        """Set how attention is computed from now on; called by ``bind_context_parallel``.

        Args:
            strategy: a ``LaunchingStrategy`` if there is a ledger.
            kernel: computes the blocks.
            cp_size: ranks that share a sequence.
            path: of the mixer, for messages.
            ledger: of the mixer's forwards, with an async schedule.
        """
        self.strategy, self.kernel, self.cp_size, self.path, self.ledger = strategy, kernel, cp_size, path, ledger

    def launch(self, role: str, x: Tensor, sequence: SequenceContext | None) -> Pending:
        """Start what travels of q, k or v; its handoff calls this with an async schedule. Collective.

        Raises:
            ValueError: no sequence, or one of another batch or cp size.
            RuntimeError: not inside a forward of the mixer.
        """
        assert self.ledger is not None
        frame = self.ledger.current
        if frame is None:
            raise RuntimeError(
                f"{self.path}: the handoff of {role!r} was called outside the mixer's forward; call the module itself, "
                "mixer(...), not mixer.forward(...)"
            )
        sequence = self._present(sequence)
        return self._pending(role, self._enter(role, x, sequence), sequence, frame)

    def forward(
        self, q: Tensor | Pending, k: Tensor | Pending, v: Tensor | Pending, sequence: SequenceContext | None
    ) -> Tensor:
        """Attention of the local queries over the whole sequence; collective over the cp axis.

        Args:
            q: ``[B, N, T, D]`` (or what ``seq_dim`` and ``head_dim`` say); with an async schedule what its handoff
                returned.
            k: ``[B, K, T, D]``, K dividing N; v likewise, its D may differ.
            sequence: the layout of this batch.

        Returns:
            ``[B, N, T, D]``, as wide as v; 0 on padding.

        Raises:
            ValueError: no sequence, one of another batch or cp size; q, k and v that do not fit together.
            RuntimeError: with an async schedule, a tensor that is not what its handoff returned in this forward.
        """
        sequence = self._present(sequence)
        if self.ledger is None:
            q, k, v = (self._enter(role, x, sequence) for role, x in (("q", q), ("k", k), ("v", v)))
            self._check(q, k, v)
            if not isinstance(self.strategy, LaunchingStrategy):
                return self._turn(self.strategy.attend(q, k, v, self.kernel, sequence, self.causal, self.scale))
            v, k, q = (self._pending(role, x, sequence) for role, x in (("v", v), ("k", k), ("q", q)))
        else:
            q, k, v = (self._handed_off(role, x, sequence) for role, x in (("q", q), ("k", k), ("v", v)))
            self._check(q, k, v)
        assert isinstance(self.strategy, LaunchingStrategy)
        return self._turn(self.strategy.attend_pending(q, k, v, self.kernel, sequence, self.causal, self.scale))

    def _present(self, sequence: SequenceContext | None) -> SequenceContext:
        if sequence is None:
            raise ValueError(
                f"{self.path}: no sequence; pass the one that shard_batch returned to the handoffs and to self.cp"
            )
        return sequence

    def _enter(self, role: str, x: Tensor | Pending, sequence: SequenceContext) -> Tensor:
        """One of q, k, v as ``[B, N, T, D]``, in autocast's dtype, known to belong to this batch."""
        if isinstance(x, Pending):
            raise RuntimeError(
                f"{self.path}: {role!r} was handed off twice, or by {x.path} to a layer whose schedule is 'sync'"
            )
        if x.ndim != 4:
            raise ValueError(f"{self.path}: {role} must have 4 dims, got {list(x.shape)}")
        x = self._turn(x)
        try:
            sequence.check(x.shape[0], x.shape[2], self.cp_size)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        device = x.device.type
        narrow = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return x.to(torch.get_autocast_dtype(device)) if narrow else x

    def _pending(self, role: str, x: Tensor, sequence: SequenceContext, frame: Frame | None = None) -> Pending:
        assert isinstance(self.strategy, LaunchingStrategy)
        return Pending(role, x, self.strategy.exchange(role, sequence, self.causal), sequence, self.path, frame)

    def _handed_off(self, role: str, x: Tensor | Pending, sequence: SequenceContext) -> Pending:
        if not isinstance(x, Pending):
            raise RuntimeError(
                f"{self.path}: {role!r} bypassed its handoff: with schedule 'async' attention takes what "
                f"Handoff({role!r}) returns, nothing computed from it or in its place"
            )
        assert self.ledger is not None
        x.check(role, self.path, self.ledger.current, sequence)
        return x

    def _check(self, q: Tensor | Pending, k: Tensor | Pending, v: Tensor | Pending) -> None:
        """Refuse tensors that do not fit together."""
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"{self.path}: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        if not q.device == k.device == v.device:
            raise ValueError(f"{self.path}: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
        (_, q_heads, _, q_width), (_, k_heads, _, k_width), v_heads = q.shape, k.shape, v.shape[1]
        if k_heads != v_heads or q_heads % k_heads or q_width != k_width:
            raise ValueError(
                f"{self.path}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together: k and v "
                "need the same heads, a divisor of q's, and k the width of q ([B, heads, tokens, width])"
            )

    def _turn(self, x: Tensor) -> Tensor:
        """``[B, T, N, D] <-> [B, N, T, D]`` where the layout asks for it."""
        return x if self.seq_dim == 2 else x.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, causal={self.causal}, seq_dim={self.seq_dim}, head_dim={self.head_dim}"
