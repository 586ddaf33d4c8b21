"""The sequence phase "ring": keys and values go round while the previous block is computed; partial results merge.

B batch, N query heads, K kv heads, T tokens of a shard, D head dim, C ranks. Block j is rank j's keys and values.

Block j visits, in ring order after j, the ranks whose queries see any of it, and no other: at step s it reaches rank
j + s from the visitor before. Outputs and log-sum-exps are merged in fp32. In backward the same blocks travel again;
each visitor sends its share of dK and dV straight to the owner, in the input's dtype, who sums in fp32 as they come.
Which blocks travel is known from the documents on the host, so all ranks agree without a word.

Source: Liu et al., Ring Attention, arXiv 2310.01889; the merge and the backward of a block are FlashAttention's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..blocks import CausalMetadata, Spans
from ..collectives import Group, Transfer, start_send_recv
from ..cost import Cost
from ..kernels import Block, Kernel, merge
from ..pending import Launched, Link
from ..scoring import Scoring
from ..sequence import Row

Visits = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SequenceLayout:
    """Where everybody's queries sit; equal on all ranks.

    Attributes:
        spans: for each of the C ranks, the runs of the sequence that its query tensor holds.
        tokens: T, of one block of keys.
        rows: the segments of each row.
        causal: a query sees no later key.
        window: how many keys a query sees; None: all.
    """

    spans: tuple[Spans, ...]
    tokens: int
    rows: tuple[Row, ...]
    causal: bool = True
    window: int | None = None

    def visits(self) -> Visits:
        """For each block the ranks that hold it, in order: its owner first."""
        return _visits(self)

    def meta(self, rank: int, owner: int) -> CausalMetadata:
        """Of the queries of ``rank`` against the block of ``owner``."""
        return self.between(rank, owner * self.tokens, (owner + 1) * self.tokens)

    def between(self, rank: int, k_start: int, k_stop: int) -> CausalMetadata:
        """Of the queries of ``rank`` against a run of keys."""
        return CausalMetadata(self.spans[rank], k_start, k_stop, self.rows, self.causal, self.window)

    def received(self, rank: int) -> int:
        """How many blocks a rank receives."""
        return sum(rank in path[1:] for path in self.visits())

    def users(self, rank: int) -> int:
        """How many other ranks use its block."""
        return len(self.visits()[rank]) - 1

    def plan(self, rank: int) -> RingPlan:
        """The rank's part."""
        return _plan(self, rank)


@dataclass(frozen=True)
class Step:
    """What a rank does at one step, of C.

    Attributes:
        receive: ``(owner of the block, rank that sends it)``.
        sends: ``(owner of the block, rank that gets it)`` of each block to pass on at the same time.
        keeps: owners of the blocks that a later step still sends.
        returned_by: the rank whose share of this rank's dK and dV arrives after this step's backward.
    """

    receive: tuple[int, int] | None
    sends: tuple[tuple[int, int], ...]
    keeps: frozenset[int]
    returned_by: int | None


@dataclass(frozen=True)
class RingPlan:
    """One rank's steps; step 0 is its own block."""

    layout: SequenceLayout
    rank: int
    steps: tuple[Step, ...]


@lru_cache(maxsize=256)
def _visits(layout: SequenceLayout) -> Visits:
    size, tokens = len(layout.spans), layout.tokens
    needs: set[tuple[int, int]] = set()  # (rank, owner)
    for start, stop, padding in {segment for row in layout.rows for segment in row}:
        if padding:
            continue
        for rank, spans in enumerate(layout.spans):
            for a, b in ((max(a, start), min(b, stop)) for a, b in spans):
                if a < b:  # queries of this document; together they see [first, last)
                    first = start if layout.window is None else max(start, a - layout.window + 1)
                    last = b if layout.causal else stop
                    needs.update((rank, owner) for owner in range(first // tokens, (last - 1) // tokens + 1))
    return tuple(
        (owner, *(rank for step in range(1, size) if ((rank := (owner + step) % size), owner) in needs))
        for owner in range(size)
    )


@lru_cache(maxsize=256)
def _plan(layout: SequenceLayout, rank: int) -> RingPlan:
    visits, size = layout.visits(), len(layout.spans)
    steps: list[Step] = []
    later: frozenset[int] = frozenset()
    for step in reversed(range(size)):
        receive, sends = None, []
        for owner, path in enumerate(visits):
            visitor = (owner + step) % size
            if step == 0 or visitor not in path:
                continue
            sender = path[path.index(visitor) - 1]
            if visitor == rank:
                receive = (owner, sender)
            if sender == rank:
                sends.append((owner, visitor))
        user = (rank + step) % size
        steps.append(Step(receive, tuple(sends), later, user if step and user in visits[rank] else None))
        later |= {owner for owner, _ in sends}
    return RingPlan(layout, rank, tuple(reversed(steps)))


def ring_cost(layout: SequenceLayout, rank: int, block_bytes: int) -> Cost:
    """Of a rank's transfers; a block is k and v of one shard, all rows together."""
    received, returned = layout.received(rank), layout.users(rank)
    return Cost(received * block_bytes, (received + returned) * block_bytes, 2 * received, 2 * (received + returned))


@dataclass(frozen=True)
class FirstHop:
    """The exchange of k, or of v: step 1 of the ring. Its result is the block that arrives, or an empty tensor."""

    plan: RingPlan
    group: Group

    def start(self, x: Tensor) -> Transfer:
        """See ``Exchange.start``."""
        return _post(self.plan.steps[1], {self.plan.rank: x}, x, self.group)

    def start_reverse(self, grad: Tensor) -> Transfer:
        """Never called: the ring's own backward sends gradients home."""
        raise NotImplementedError


def ring_attention(
    q: Tensor, k: Launched, v: Launched, hop: FirstHop, kernel: Kernel, scoring: Scoring, first_head: int
) -> Tensor:
    """Attention of the local queries over all blocks; differentiable; collective over the C ranks.

    Args:
        q: ``[B, N, T, D]``, what ``hop.plan.layout`` says.
        k: ``[B, K, T, D]``, launched with ``hop``; v likewise, before k.
        hop: the plan and its group.
        kernel: computes the blocks.
        scoring: scale, causality, window, mask and dropout.
        first_head: number of q's first head, for mask and dropout.
    """
    part = _Part(hop.plan, scoring, first_head)
    return _RingAttention.apply(q, k.carrier, v.carrier, k.x, v.x, k.link, v.link, hop, kernel, part)


class _RingAttention(torch.autograd.Function):
    """The gradients of k and v leave through the links of their carriers, so that they are awaited at the handoffs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, carrier_k: Tensor, carrier_v: Tensor, k: Tensor, v: Tensor, link_k: Link, link_v: Link,
        hop: FirstHop, kernel: Kernel, part: _Part,
    ) -> Tensor:  # fmt: skip
        merged: tuple[Tensor, Tensor] | None = None  # output and log-sum-exp, in fp32 or wider
        for block in _travel(k, v, _UnderWay(link_k.take_forward(), link_v.take_forward()), hop):
            if block is not None:
                part_out, part_lse = kernel.forward(part.block(q, block))
                arrived = (part_out.to(part_lse.dtype), part_lse)
                merged = arrived if merged is None else merge(*merged, *arrived)
        assert merged is not None  # the rank's own block comes first
        out, lse = merged[0].to(q.dtype), merged[1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = (link_k, link_v, hop, kernel, part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        link_k, link_v, hop, kernel, part = ctx.args
        plan = hop.plan
        dq: Tensor | None = None
        homes = [_Home(x, link, hop) if _is_wanted(ctx, i) else None for i, x, link in ((1, k, link_k), (2, v, link_v))]
        travelling = _UnderWay(v=hop.start(v), k=hop.start(k))
        for step, block in enumerate(_travel(k, v, travelling, hop)):
            shares: tuple[Tensor, Tensor] | None = None
            if block is not None:
                grads = kernel.backward(dout, part.block(q, block), out, lse)
                share_q, *shares_kv = (grad.to(lse.dtype) for grad in grads)
                dq = share_q if dq is None else dq + share_q
                shares = (shares_kv[0], shares_kv[1])
            for index, home in enumerate(homes):
                if home is not None:
                    home.step(plan.steps[step], shares and shares[index], block and block.owner)
        for home in homes:
            if home is not None:
                home.leave()
        zero = dout.new_zeros(())
        assert dq is not None
        return (dq.to(q.dtype), zero, zero, *[None] * 7)


class _Block(NamedTuple):
    owner: int
    k: Tensor
    v: Tensor


class _Part(NamedTuple):
    """What one rank computes, block by block."""

    plan: RingPlan
    scoring: Scoring
    first_head: int

    def block(self, q: Tensor, keys: _Block) -> Block:
        """The queries against one block of keys and values."""
        meta = self.plan.layout.meta(self.plan.rank, keys.owner)
        return Block(q, keys.k, keys.v, meta, self.scoring, self.first_head)


class _UnderWay(NamedTuple):
    k: Transfer
    v: Transfer


def _travel(k: Tensor, v: Tensor, under_way: _UnderWay, hop: FirstHop) -> Iterator[_Block | None]:
    """One entry a step, None where no block comes; when it is yielded the transfers of the next step are under way."""
    plan = hop.plan
    held = {plan.rank: _Block(plan.rank, k, v)}
    yield held[plan.rank]
    for index, step in enumerate(plan.steps[1:], start=1):
        arrived_v, arrived_k = under_way.v.wait(), under_way.k.wait()
        block = None
        if step.receive is not None:
            block = _Block(step.receive[0], arrived_k, arrived_v)
            held[block.owner] = block
        if index + 1 < len(plan.steps):
            following = plan.steps[index + 1]
            next_v = _post(following, {owner: b.v for owner, b in held.items()}, v, hop.group)
            next_k = _post(following, {owner: b.k for owner, b in held.items()}, k, hop.group)
            under_way = _UnderWay(next_k, next_v)
        held = {owner: b for owner, b in held.items() if owner in step.keeps}
        yield block


def _post(step: Step, held: Mapping[int, Tensor], like: Tensor, group: Group) -> Transfer:
    """Start one step's sends and its receive, of k or of v."""
    sends = [(held[owner].contiguous(), rank) for owner, rank in step.sends]
    received = _buffer(like, step.receive is not None)
    receives = [(received, step.receive[1])] if step.receive is not None else []
    works = start_send_recv(sends, receives, group)
    return Transfer(works, lambda: received, *(tensor for tensor, _ in sends), p2p=group)


class _Home:
    """Where the gradient of one rank's k, or v, comes together.

    Shares of other ranks are added in fp32 or wider one step after they were posted; the last is left to the handoff.
    """

    def __init__(self, x: Tensor, link: Link, hop: FirstHop) -> None:
        self.x, self.link, self.hop = x, link, hop
        self.total: Tensor | None = None
        self.arriving = Transfer([], lambda: x.new_empty(0))

    def step(self, step: Step, share: Tensor | None, owner: int | None) -> None:
        """Keep this rank's own share, or send one to its owner and expect one from a user of this rank's block."""
        if owner == self.hop.plan.rank:
            self.total = share
            return
        sends = [(share.to(self.x.dtype).contiguous(), owner)] if share is not None and owner is not None else []
        received = _buffer(self.x, step.returned_by is not None)
        receives = [(received, step.returned_by)] if step.returned_by is not None else []
        works = start_send_recv(sends, receives, self.hop.group)
        sent = (tensor for tensor, _ in sends)
        before, self.arriving = self.arriving, Transfer(works, lambda: received, *sent, p2p=self.hop.group)
        self._add(before.wait())

    def leave(self) -> None:
        """Hand the last transfer to the link."""
        self.link.backward = self.arriving.then(lambda received: self._add(received).to(self.x.dtype))

    def _add(self, received: Tensor) -> Tensor:
        assert self.total is not None
        if received.numel():
            self.total += received
        return self.total


def _buffer(like: Tensor, wanted: bool) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format) if wanted else like.new_empty(0)


def _is_wanted(ctx: Any, index: int) -> bool:
    """Whether backward goes on behind an input: it has a gradient, and this very backward asks for it.

    ``needs_input_grad`` alone does not tell the latter, and a share that nobody awaits must not be sent.
    """
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)
