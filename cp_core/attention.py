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
from .scoring import Dropout, Scoring, check_mask, combine_masks
from .sequence import SequenceContext
from .strategies import AttentionStrategy, ComposedStrategy, LaunchingStrategy


class CPAttention(nn.Module):
    """Softmax attention over a sharded sequence.

    Args:
        scale: factor of the scores.
        causal: a query sees no later key.
        window: sliding window: how many keys a query sees, itself the last of them; None: all.
        dropout: share of the attention weights that drop in training, by a counter of global positions, so that the
            same ones drop at any cp size; the seed comes with the batch (``shard_batch(..., dropout_seed=)``).
        layer: number of the layer, so that layers drop different weights.
        seq_dim: dim of the tokens in q, k, v and the output; 2 is ``[B, N, T, D]``, 1 is ``[B, T, N, D]``.
        head_dim: dim of the heads, the other of the two.

    Raises:
        ValueError: dims that are neither of the two layouts; a window that is empty or not causal; a dropout share
            outside [0, 1).
    """

    kind = "softmax"

    def __init__(
        self,
        scale: float,
        causal: bool = True,
        seq_dim: int = 2,
        head_dim: int = 1,
        window: int | None = None,
        dropout: float = 0.0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if window is not None and (window < 1 or not causal):
            raise ValueError(f"window={window} with causal={causal}: a window counts at least 1 key and needs causal")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must lie in [0, 1)")
        if seq_dim == head_dim:
            raise ValueError(f"seq_dim and head_dim are both {seq_dim}; use (2, 1) for [B, N, T, D], (1, 2) for BTND")
        if {seq_dim, head_dim} != {1, 2}:
            raise ValueError(
                f"seq_dim={seq_dim}, head_dim={head_dim} are not 2, 1 ([B, N, T, D]) or 1, 2 ([B, T, N, D])"
            )
        self.scale, self.causal = scale, causal
        self.seq_dim, self.head_dim = seq_dim, head_dim
        self.window, self.dropout, self.layer = window, dropout, layer
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
        return self._pending(role, self._enter(role, x, sequence), sequence, self._scoring(sequence, None), frame)

    def forward(
        self,
        q: Tensor | Pending,
        k: Tensor | Pending,
        v: Tensor | Pending,
        sequence: SequenceContext | None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of the local queries over the whole sequence; collective over the cp axis.

        Args:
            q: ``[B, N, T, D]`` (or what ``seq_dim`` and ``head_dim`` say); with an async schedule what its handoff
                returned.
            k: ``[B, K, T, D]``, K dividing N; v likewise, its D may differ.
            sequence: the layout of this batch.
            mask: ``[B or 1, N or 1, S, S]`` of the whole padded sequence, beside the one that ``shard_batch`` was
                given: bool (True: seen) or float (added to the scaled scores), equal on all ranks; no gradient.

        Returns:
            ``[B, N, T, D]``, as wide as v; 0 on padding and where a query sees no key.

        Raises:
            ValueError: no sequence, one of another batch or cp size; q, k, v or a mask that do not fit together;
                dropout in training without the batch's seed.
            RuntimeError: with an async schedule, a tensor that is not what its handoff returned in this forward.
        """
        sequence = self._present(sequence)
        scoring = self._scoring(sequence, mask)
        if self.ledger is None:
            q, k, v = (self._enter(role, x, sequence) for role, x in (("q", q), ("k", k), ("v", v)))
            self._check(q, k, v, scoring)
            if not isinstance(self.strategy, LaunchingStrategy):
                return self._turn(self.strategy.attend(q, k, v, self.kernel, sequence, scoring))
            v, k, q = (self._pending(role, x, sequence, scoring) for role, x in (("v", v), ("k", k), ("q", q)))
        else:
            q, k, v = (self._handed_off(role, x, sequence) for role, x in (("q", q), ("k", k), ("v", v)))
            self._check(q, k, v, scoring)
        assert isinstance(self.strategy, LaunchingStrategy)
        return self._turn(self.strategy.attend_pending(q, k, v, self.kernel, sequence, scoring))

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

    def _pending(
        self, role: str, x: Tensor, sequence: SequenceContext, scoring: Scoring, frame: Frame | None = None
    ) -> Pending:
        assert isinstance(self.strategy, LaunchingStrategy)
        return Pending(role, x, self.strategy.exchange(role, sequence, scoring), sequence, self.path, frame)

    def _scoring(self, sequence: SequenceContext, mask: Tensor | None) -> Scoring:
        """Of this call."""
        dropout = None
        if self.dropout and self.training:
            if sequence.dropout_seed is None:
                raise ValueError(
                    f"{self.path}: dropout={self.dropout} needs the batch's seed: pass shard_batch(..., "
                    "dropout_seed=n), another n for every batch, or call model.eval()"
                )
            dropout = Dropout(self.dropout, sequence.dropout_seed, self.layer, sequence.first_row)
        if mask is not None:
            try:
                mask = check_mask(mask, len(sequence.rows), sequence.padded_length)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
        return Scoring(self.scale, self.causal, self.window, combine_masks(sequence.mask, mask), dropout)

    def _handed_off(self, role: str, x: Tensor | Pending, sequence: SequenceContext) -> Pending:
        if not isinstance(x, Pending):
            raise RuntimeError(
                f"{self.path}: {role!r} bypassed its handoff: with schedule 'async' attention takes what "
                f"Handoff({role!r}) returns, nothing computed from it or in its place"
            )
        assert self.ledger is not None
        x.check(role, self.path, self.ledger.current, sequence)
        return x

    def _check(self, q: Tensor | Pending, k: Tensor | Pending, v: Tensor | Pending, scoring: Scoring) -> None:
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
        if scoring.mask is None:
            return
        if not self.kernel.takes_masks:
            raise ValueError(
                f"{self.path}: kernel {self.kernel.name!r} takes no mask; use kernel 'sdpa' or 'flex', or no mask"
            )
        if scoring.mask.shape[1] not in (1, q_heads):
            raise ValueError(f"{self.path}: the mask has {scoring.mask.shape[1]} heads, q has {q_heads}; give 1 or all")

    def _turn(self, x: Tensor) -> Tensor:
        """``[B, T, N, D] <-> [B, N, T, D]`` where the layout asks for it."""
        return x if self.seq_dim == 2 else x.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"scale={self.scale:.4g}, causal={self.causal}, window={self.window}, dropout={self.dropout}, "
            f"seq_dim={self.seq_dim}, head_dim={self.head_dim}"
        )
