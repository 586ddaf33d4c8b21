"""The pieces of the composition: who is in a group, in which order tokens and heads arrive, what goes back, ring plans.

Numbered tensors: entry ``[b, n, t]`` holds ``1000 * n + t`` of the whole sequence, so that every place names its origin.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_core import ContextParallelConfig, Segment, Topology, bind_context_parallel, register_kernel, shard_batch
from cp_core.blocks import pairs_of
from cp_core.kernels import Block, SdpaKernel
from cp_core.pending import Exchange, exchange_now
from cp_core.strategies.gather import SequenceGather
from cp_core.strategies.head_exchange import HeadExchange
from cp_core.strategies.query_swap import HalfSwap, Spans, balanced_spans
from cp_core.strategies.ring import FirstHop, SequenceLayout
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests.cp_core._helpers import Layout, cp_mesh, random_layout, row, runs, strided_copies, visible
from tests.cp_core.test_attention import settings
from tests.cp_core.test_cost import Model

# ---------------------------------------------------------------- groups


def test_rank_groups_of_every_size_and_degree() -> None:
    """Inner: U adjacent ranks. Outer: every U-th rank. Together each pair of numbers names one rank."""
    for size in range(1, 17):
        for degree in degrees(size):
            places = []
            for rank in range(size):
                inner, outer = Topology(cp=Axis(size, rank)).split_cp(degree)
                assert (inner.size, outer.size) == (degree, size // degree)
                assert outer.rank * degree + inner.rank == rank
                places.append((outer.rank, inner.rank))
            assert places == sorted(places)
            assert len(set(places)) == size


def degrees(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]


def groups_made() -> int:
    return int(dist.distributed_c10d._world.group_count)


def check_groups(topology: Topology, rank: int) -> None:
    """Each degree's groups hold the ranks they should, and asking again makes none."""
    size = topology.cp.size
    base = rank // size * size
    for degree in degrees(size):
        axes = topology.split_cp(degree)
        made = groups_made()
        assert topology.split_cp(degree) == axes
        assert groups_made() == made
        inner, outer = ([rank] if a.group is None else dist.get_process_group_ranks(a.group) for a in axes)
        first, place = base + (rank - base) // degree * degree, (rank - base) % degree
        assert inner == list(range(first, first + degree)), (size, degree, rank)
        assert outer == list(range(base + place, base + size, degree)), (size, degree, rank)
        assert all(axis.group is None or axis.group.rank() == axis.rank for axis in axes)


def fake_groups_worker(rank: int, size: int) -> int:
    """Every rank of every mesh in turn, in this one process: the fake backend makes groups and moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    seen = 0
    for data, cp in [(1, cp) for cp in range(1, 17)] + [(2, cp) for cp in (2, 3, 4, 8)]:
        shape, names = ((cp,), ("cp",)) if data == 1 else ((data, cp), ("dp_shard", "cp"))
        for place in range(data * cp):
            dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=data * cp)
            check_groups(Topology.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names)), place)
            dist.destroy_process_group()
            seen += 1
    return seen


def test_rank_groups_up_to_sixteen_ranks() -> None:
    assert run_distributed(fake_groups_worker, 1, timeout=120) == [sum(range(17)) + 2 * (2 + 3 + 4 + 8)]


def real_groups_worker(rank: int, size: int, data: int) -> None:
    cp = size // data
    shape, names = ((size,), ("cp",)) if data == 1 else ((data, cp), ("dp_shard", "cp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    topology = Topology.from_mesh(mesh)
    check_groups(topology, rank)
    made = groups_made()
    sequence = shard_batch({"input_ids": torch.zeros(1, 32, dtype=torch.int64)}, mesh)["sequence"]
    splits = [(name, d) for name in ("hybrid", "hybrid_ring") for d in degrees(cp) if 1 < d < cp]
    assert splits
    for algorithm, degree in [("all_gather", None), ("ring", None), ("ulysses", None), *splits]:
        model = Model(4, True, 8)
        bind_context_parallel(model, topology, ContextParallelConfig(algorithm=algorithm, ulysses_degree=degree))
        out = model.mixer(*(torch.ones(1, heads, 32 // cp, 8, requires_grad=True) for heads in (8, 4, 4)), sequence)
        out.sum().backward()
    assert groups_made() == made  # neither binding nor running makes any
    assert mesh.mesh_dim_names == names
    assert sequence.cp_mesh is not None
    assert sequence.cp_mesh.mesh_dim_names == ("cp",)  # the inner axes stay inside


@pytest.mark.dist4
@pytest.mark.parametrize("data", [1, 2])
def test_rank_groups_of_real_processes_and_none_made_later(data: int) -> None:
    run_distributed(real_groups_worker, 4 * data, data, timeout=120)


# ---------------------------------------------------------------- order


def numbered(heads: int, tokens: int, width: int = 2) -> Tensor:
    """``[2, heads, tokens, width]``."""
    entries = 1000.0 * torch.arange(heads).view(1, -1, 1, 1) + torch.arange(tokens).view(1, 1, -1, 1)
    row_and_channel = 1e6 * torch.arange(2).view(2, 1, 1, 1) + 0.25 * torch.arange(width)
    return (entries + row_and_channel).double()


def check_exchange(exchange: Exchange, x: Tensor, want: Tensor, grad: Tensor, want_grad: Tensor) -> None:
    """Forward and backward, from any memory layout of input and gradient."""
    for _, strided in [("contiguous", x), *strided_copies(x)]:
        leaf = strided.detach().requires_grad_()
        out = exchange_now(leaf, exchange)
        assert torch.equal(out, want)
        for _, upstream in [("contiguous", grad), *strided_copies(grad)]:
            (got,) = torch.autograd.grad(out, leaf, upstream, retain_graph=True)
            assert torch.equal(got, want_grad)


def order_worker(rank: int, size: int) -> None:
    axis = Topology.from_mesh(cp_mesh(size)).cp
    local, heads = 6, 2 * size
    whole = numbered(heads, local * size)
    here, mine = slice(rank * local, (rank + 1) * local), slice(2 * rank, 2 * rank + 2)
    generator = torch.Generator().manual_seed(0)
    ups = [torch.randn(2, heads, local * size, 2, dtype=torch.float64, generator=generator) for _ in range(size)]

    exchange = HeadExchange(axis)
    scatter, gather = exchange.scatter("q"), exchange.gather()
    assert scatter is not None
    assert gather is not None
    by_heads = [up[:, 2 * r : 2 * r + 2] for r, up in enumerate(ups)]  # what rank r hands back for its heads
    check_exchange(scatter, whole[:, :, here], whole[:, mine], by_heads[rank], torch.cat(by_heads, 1)[:, :, here])
    by_tokens = [up[:, :, r * local : (r + 1) * local] for r, up in enumerate(ups)]
    check_exchange(gather, whole[:, mine], whole[:, :, here], by_tokens[rank], torch.cat(by_tokens, 2)[:, mine])

    # kv heads repeated: copies side by side, their gradients added
    factor = 2
    few = numbered(size, local * size)
    repeated = HeadExchange(axis, factor).scatter("k")
    assert repeated is not None
    copies = few.repeat_interleave(factor, 1)
    summed = torch.cat(by_heads, 1)[:, :, here].unflatten(1, (size, factor)).sum(2)
    check_exchange(repeated, few[:, :, here], copies[:, mine], by_heads[rank], summed)
    assert HeadExchange(axis, factor).scatter("q") == scatter  # q is never repeated

    collect = SequenceGather(axis).exchange()
    assert collect is not None
    whole_numbers = [(up * 1000).round() for up in ups]  # sums of whole numbers are exact in any order
    check_exchange(
        collect, whole[:, :, here], whole, whole_numbers[rank], torch.stack(whole_numbers).sum(0)[:, :, here]
    )

    swap = HalfSwap(axis).exchange()
    if 2 * rank == size - 1:
        assert swap is None
    else:
        assert swap is not None
        spans = balanced_spans(rank, size, local)
        order = torch.cat([torch.arange(*span) for span in spans])
        assert spans[0] == (rank * local, rank * local + local // 2)
        balanced = [torch.cat([torch.arange(*s) for s in balanced_spans(r, size, local)]) for r in range(size)]
        returned = torch.empty_like(whole)
        for r, places in enumerate(balanced):
            returned[:, :, places] = by_tokens[r]
        check_exchange(swap, whole[:, :, here], whole[:, :, order], by_tokens[rank], returned[:, :, here])

    if size > 1:
        plain: tuple[Spans, ...] = tuple(((r * local, (r + 1) * local),) for r in range(size))
        layout = SequenceLayout(plain, local, ((Segment(0, local * size),),), causal=False)
        assert axis.group is not None
        arrived = FirstHop(layout.plan(rank), axis.group).start(whole[:, :, here]).wait()
        before = (rank - 1) % size
        assert torch.equal(arrived, whole[:, :, before * local : (before + 1) * local])


@pytest.mark.dist4
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_and_heads_arrive_in_order_and_gradients_go_back(size: int) -> None:
    run_distributed(order_worker, size)


def test_half_chunks_are_those_of_the_design() -> None:
    """Rank r computes half-chunks 2r and 2(P-1-r)+1 of 2P; the middle rank of an odd P its own."""
    for size in range(1, 9):
        seen = []
        for rank in range(size):
            (a, b), (c, d) = balanced_spans(rank, size, 10)
            assert (a // 5, c // 5) == (2 * rank, 2 * (size - 1 - rank) + 1)
            assert b - a == d - c == 5
            seen += [a, c]
        assert sorted(seen) == list(range(0, 10 * size, 5))


# ---------------------------------------------------------------- ring plans


def rows_of(layout: Layout) -> tuple[tuple[Segment, ...], ...]:
    return tuple(tuple(Segment(*run) for run in runs(tokens)) for tokens in layout)


def test_blocks_travel_to_those_who_need_them_and_to_nobody_else() -> None:
    """Against dense masks, for up to 8 ranks: visits, blocks, sends that meet receives, work."""
    rng = random.Random(1)
    for size in range(1, 9):
        local = 6
        length = size * local
        layouts = [
            [row(length)],
            [row(length // 3, length - length // 3)],
            *(random_layout(rng, 2, length) for _ in "ab"),
        ]
        for layout in layouts:
            for causal, window in ((True, None), (False, None), (True, 1), (True, 4), (True, 8)):
                mask = visible(layout, causal, window)
                for balanced in (True, False):
                    spans = tuple(
                        balanced_spans(r, size, local) if balanced else ((r * local, (r + 1) * local),)
                        for r in range(size)
                    )
                    check_plan(SequenceLayout(spans, local, rows_of(layout), causal, window), mask, size, local)


def check_plan(layout: SequenceLayout, mask: Tensor, size: int, local: int) -> None:
    plans = [layout.plan(rank) for rank in range(size)]
    for rank in range(size):
        queries = torch.cat([torch.arange(*span) for span in layout.spans[rank]])
        received = {rank}
        for owner in range(size):
            seen = mask[:, queries, owner * local : (owner + 1) * local]
            needed = bool(seen.any())
            assert pairs_of(layout.meta(rank, owner)) == int(seen.sum())
            if owner != rank:
                assert (rank in layout.visits()[owner]) == needed
                received |= {owner} if needed else set()
        arrivals = [step.receive[0] for step in plans[rank].steps if step.receive is not None]
        assert sorted([rank, *arrivals]) == sorted(received)  # each once
        assert len(arrivals) == layout.received(rank)
        for index, at in enumerate(plans[rank].steps):  # a block is held as long as it is sent, and no longer
            assert at.keeps == {owner for later in plans[rank].steps[index + 1 :] for owner, _ in later.sends}
    for step in range(size):
        sent = {(rank, owner, to) for rank in range(size) for owner, to in plans[rank].steps[step].sends}
        awaited = {
            (receive[1], receive[0], rank)
            for rank in range(size)
            if (receive := plans[rank].steps[step].receive) is not None
        }
        assert sent == awaited
        going_home = {(user, owner) for _, owner, user in awaited}  # a block's share leaves in the step it came in
        assert {(plan.steps[step].returned_by, plan.rank) for plan in plans} - {
            (None, r) for r in range(size)
        } == going_home
        for rank, owner, _ in sent:  # it has what it sends: its own, or what came before
            earlier = [plans[rank].steps[s].receive for s in range(step)]
            assert owner == rank or any(r is not None and r[0] == owner for r in earlier)
    for owner in range(size):
        returned = {step.returned_by for step in plans[owner].steps if step.returned_by is not None}
        assert returned == set(layout.visits()[owner]) - {owner}
        assert len(returned) == layout.users(owner)


# ---------------------------------------------------------------- summation in narrow dtypes
# Shares are whole numbers up to 256, exact in bf16, and so are their fp32 sums in any order; a running bf16 sum is not.


def shares(size: int, *shape: int) -> Tensor:
    """What each rank contributes, ``[size, *shape]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(129, 257, (size, *shape), generator=generator).to(torch.bfloat16)


def sum_in_fp32(parts: Tensor) -> Tensor:
    """Over the first dim, rounded once; differs from a sum in bf16, or the case could not tell."""
    once = parts.float().sum(0).to(torch.bfloat16)
    running = parts[0]
    for part in parts[1:]:
        running = running + part
    assert not torch.equal(once, running)
    return once


class SharesKernel(SdpaKernel):
    """Rank r's share of dK is ``dk[r]`` at the places that k names (its entries are their own positions); dV too."""

    name = "shares"
    rank = 0
    dk = shares(4, 1, 4, 32, 8)
    dv = dk.flip(-1)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(block.q), torch.zeros(block.q.shape[:-1])

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = block.k[0, 0, :, 0].long()
        return torch.zeros_like(block.q), self.dk[self.rank][:, :, places], self.dv[self.rank][:, :, places]


def narrow_worker(rank: int, size: int) -> int:
    mesh = cp_mesh(size)
    axis = Topology.from_mesh(mesh).cp

    partial = shares(size, 2, 3, size * 4, 5)
    leaf = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(exchange_now(leaf, SequenceGather(axis).exchange()), leaf, partial[rank])
    assert torch.equal(grad, sum_in_fp32(partial)[:, :, rank * 4 : (rank + 1) * 4])

    copies = shares(size, 2, 1, size * 4, 5)  # one kv head, a copy on each rank: what each hands back for its copy
    leaf = torch.zeros(2, 1, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(exchange_now(leaf, HeadExchange(axis, size).scatter("k")), leaf, copies[rank])
    assert torch.equal(grad, sum_in_fp32(copies)[:, :, rank * 4 : (rank + 1) * 4])

    register_kernel("shares", SharesKernel)
    SharesKernel.rank = rank
    here = slice(rank * 8, (rank + 1) * 8)
    sequence = shard_batch({"input_ids": torch.zeros(1, 32, dtype=torch.int64)}, mesh)["sequence"]
    checked = 0
    for fields in map(dict, settings(size)):
        if fields["algorithm"] not in ("all_gather", "ring") or fields.get("load_balance"):
            continue  # a swap cuts a rank's share in two
        model = Model(4, False, 8).to(torch.bfloat16)
        bind_context_parallel(model, Topology.from_mesh(mesh), ContextParallelConfig(kernel="shares", **fields))
        places = torch.arange(32).view(1, 1, -1, 1)[:, :, here]
        q, k, v = (places.expand(1, n, 8, 8).to(torch.bfloat16).requires_grad_() for n in (8, 4, 4))
        out = model.mixer(q, k, v, sequence)
        _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert torch.equal(dk, sum_in_fp32(SharesKernel.dk)[:, :, here]), fields
        assert torch.equal(dv, sum_in_fp32(SharesKernel.dv)[:, :, here]), fields
        checked += 1
    return checked


@pytest.mark.dist4
def test_shares_of_gradients_in_bf16_are_summed_in_fp32() -> None:
    """The gather's, the repeated heads' and the ring's, bit for bit."""
    assert run_distributed(narrow_worker, 4) == [4] * 4
