"""Softmax strategies as one composition of pieces, and the presets that users name.

P = C x U: a head exchange over U adjacent ranks, a sequence phase over the C groups of them (none, gather or ring),
and for balance a swap of query halves. ``local`` has nothing, ``ulysses`` is C = 1, ``all_gather`` and ``ring`` are
U = 1, ``hybrid`` and ``hybrid_ring`` have both.

Of v, k and q, in this order, the first exchange is launched at the handoff (async) or at attention (sync), and awaited
at attention, in the same order: the two schedules are one algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..blocks import CausalMetadata, Spans, pairs_of
from ..cost import AttentionShape, Cost, Load
from ..kernels import Block, Kernel, attend_block
from ..pending import Exchange, Launched, Pending, exchange_now, start
from ..scoring import Scoring
from ..sequence import Row, SequenceContext
from ..topology import Axis
from .gather import GatherExchange, SequenceGather
from .head_exchange import HeadExchange
from .query_swap import HalfSwap, balanced_spans
from .ring import FirstHop, SequenceLayout, ring_attention, ring_cost


@dataclass(frozen=True)
class ComposedStrategy:
    """Head exchange, query swap, sequence phase, attention, and back. None leaves a piece out.

    Attributes:
        heads: over the inner axis, U ranks.
        gather: over the outer axis, C ranks.
        ring: the outer axis, if k and v go round instead.
        swap: over the outer axis; only where heads stay.
    """

    heads: HeadExchange | None = None
    gather: SequenceGather | None = None
    ring: Axis | None = None
    swap: HalfSwap | None = None

    @property
    def ulysses_degree(self) -> int:
        """U."""
        return self.heads.axis.size if self.heads is not None else 1

    @property
    def sequence_degree(self) -> int:
        """C."""
        return self.ring.size if self.ring is not None else self.gather.axis.size if self.gather is not None else 1

    def exchange(self, role: str, sequence: SequenceContext, scoring: Scoring) -> Exchange | None:
        """What travels first of ``q``, ``k`` or ``v``."""
        if self.heads is not None:
            return self.heads.scatter(role)
        if role == "q":
            return self._swap()
        return self._phase(self._layout(sequence.rows, sequence.padded_length, scoring.causal, scoring.window))

    def attend_pending(
        self, q: Pending, k: Pending, v: Pending, kernel: Kernel, sequence: SequenceContext, scoring: Scoring
    ) -> Tensor:
        """See ``LaunchingStrategy.attend_pending``."""
        layout = self._layout(sequence.rows, sequence.padded_length, scoring.causal, scoring.window)
        phase = self._phase(layout)
        values = self._launch_phase(v, phase)
        keys = self._launch_phase(k, phase)
        queries = q.wait()  # [B, N / U, U * T, D]
        outer, inner = divmod(sequence.rank, self.ulysses_degree)
        first_head = inner * queries.shape[1]
        if isinstance(phase, FirstHop):
            assert isinstance(keys, Launched)
            assert isinstance(values, Launched)
            out = ring_attention(queries, keys, values, phase, kernel, scoring, first_head)
        else:  # [B, K / U, S, D]
            values, keys = (x.wait() if isinstance(x, Launched) else x for x in (values, keys))
            block = Block(queries, keys, values, self._meta(layout, outer), scoring, first_head)
            out = attend_block(block, kernel)
        return exchange_now(out, self.heads.gather() if self.heads is not None else self._swap())

    def cost(self, shape: AttentionShape, load: Load) -> Cost:
        """See ``CostedStrategy.cost``."""
        layout = self._layout(load.rows, load.tokens, load.causal, load.window)
        u, outer = self.ulysses_degree, load.rank // self.ulysses_degree
        total = Cost()
        shard_tokens = len(load.rows) * (layout.tokens // u)
        kv_heads = shape.kv_heads
        if self.heads is not None:
            total += self.heads.cost(shape, shard_tokens, load.itemsize)
            kv_heads = kv_heads * self.heads.kv_repeat // u
        block_bytes = len(load.rows) * layout.tokens * kv_heads * (shape.qk_dim + shape.v_dim) * load.itemsize
        if self.gather is not None:
            total += self.gather.cost(block_bytes)
        if self.ring is not None:
            total += ring_cost(layout, outer, block_bytes)
            pairs = sum(pairs_of(layout.meta(outer, owner)) for owner in range(self.sequence_degree))
        else:
            pairs = pairs_of(self._meta(layout, outer))
        if self.swap is not None:
            total += self.swap.cost(outer, shape, shard_tokens, load.itemsize)
        return replace(total, work=pairs * shape.q_heads // u)

    @property
    def collectives(self) -> tuple[str, ...]:
        """What the backend must have."""
        needs = {"all_to_all": self.heads, "all_gather": self.gather, "send/recv": self.ring or self.swap}
        return tuple(name for name, piece in needs.items() if piece is not None)

    def _swap(self) -> HalfSwap | None:
        return None if self.swap is None else self.swap.exchange()

    def _layout(self, rows: tuple[Row, ...], padded_length: int, causal: bool, window: int | None) -> SequenceLayout:
        """Where everybody's queries sit once the heads are exchanged."""
        size = self.sequence_degree
        tokens = padded_length // size
        spans = tuple(self._spans(rank, size, tokens) for rank in range(size))
        return SequenceLayout(spans, tokens, rows, causal, window)

    def _spans(self, rank: int, size: int, tokens: int) -> Spans:
        return ((rank * tokens, (rank + 1) * tokens),) if self.swap is None else balanced_spans(rank, size, tokens)

    def _meta(self, layout: SequenceLayout, rank: int) -> CausalMetadata:
        """Of a rank's queries against the whole sequence."""
        return layout.between(rank, 0, len(layout.spans) * layout.tokens)

    def _phase(self, layout: SequenceLayout) -> GatherExchange | FirstHop | None:
        """What travels of k and v in the sequence phase."""
        if self.ring is not None and self.ring.group is not None:
            return FirstHop(layout.plan(self.ring.rank), self.ring.group)
        return self.gather.exchange() if self.gather is not None else None

    def _launch_phase(self, x: Pending, phase: GatherExchange | FirstHop | None) -> Launched | Tensor:
        """k or v with its sequence phase under way (launched at the handoff, unless heads had to travel first)."""
        if self.heads is None:
            return x.unpack()
        arrived = x.wait()
        return arrived if phase is None else start(arrived, phase)
