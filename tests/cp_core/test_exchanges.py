"""The pieces of the composition: who is in a group, in which order tokens and heads arrive, what goes back, ring plans.

Numbered tensors: entry ``[b, n, t]`` holds ``1000 * n + t`` of the whole sequence, so that every place names its origin.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_core import Segment, Topology, shard_batch
from cp_core.blocks import pairs_of
from cp_core.pending import Exchange, exchange_now
from cp_core.strategies.gather import SequenceGather
from cp_core.strategies.head_exchange import HeadExchange
from cp_core.strategies.query_swap import HalfSwap, balanced_spans
from cp_core.strategies.ring import FirstHop, SequenceLayout
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests.cp_core._helpers import Layout, cp_mesh, random_layout, row, runs, strided_copies, visible

# ---------------------------------------------------------------- groups


def test_rank_groups_of_every_size_and_degree() -> None:
    """Inner: U adjacent ranks. Outer: every U-th rank. Together each pair of numbers names one rank."""
    for size in range(1, 17):
        for degree in (d for d in range(1, size + 1) if size % d == 0):
            places = []
            for rank in range(size):
                inner, outer = Topology(cp=Axis(size, rank)).split_cp(degree)
                assert (inner.size, outer.size) == (degree, size // degree)
                assert outer.rank * degree + inner.rank == rank
                places.append((outer.rank, inner.rank))
            assert places == sorted(places)
            assert len(set(places)) == size


def groups_worker(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shape, names in (((size,), ("cp",)), ((2, size // 2), ("dp_shard", "cp"))):
        topology = Topology.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
        for degree in (d for d in range(1, topology.cp.size + 1) if topology.cp.size % d == 0):
            first = topology.split_cp(degree)
            before = dist.distributed_c10d._world.group_count
            assert topology.split_cp(degree) == first
            assert dist.distributed_c10d._world.group_count == before  # cached
            found[f"{names} {degree}"] = [
                [rank] if axis.group is None else dist.get_process_group_ranks(axis.group) for axis in first
            ]
            assert all(axis.group is None or axis.group.rank() == axis.rank for axis in first)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    sequence = shard_batch({"input_ids": ids}, cp_mesh(size))["sequence"]
    assert sequence.cp_mesh is not None
    assert sequence.cp_mesh.mesh_dim_names == ("cp",)  # the inner axes stay inside
    return found


@pytest.mark.dist4
@pytest.mark.parametrize("size", [4, 8, 12])
def test_rank_groups_of_real_processes(size: int) -> None:
    for rank, found in enumerate(run_distributed(groups_worker, size, timeout=120)):
        for key, (inner, outer) in found.items():
            cp, degree = (size // 2 if "dp_shard" in key else size), int(key.split()[-1])
            base = rank // cp * cp
            first, place = base + (rank - base) // degree * degree, (rank - base) % degree
            assert inner == list(range(first, first + degree)), key
            assert outer == list(range(base + place, base + cp, degree)), key


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
        spans = tuple(((r * local, (r + 1) * local),) for r in range(size))
        layout = SequenceLayout(spans, local, False, ((Segment(0, local * size),),))
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
    for size in range(2, 9):
        local = 6
        length = size * local
        layouts = [
            [row(length)],
            [row(length // 3, length - length // 3)],
            *(random_layout(rng, 2, length) for _ in "ab"),
        ]
        for layout in layouts:
            for causal in (True, False):
                mask = visible(layout, causal)
                for balanced in (True, False):
                    spans = tuple(
                        balanced_spans(r, size, local) if balanced else ((r * local, (r + 1) * local),)
                        for r in range(size)
                    )
                    check_plan(SequenceLayout(spans, local, causal, rows_of(layout)), mask, size, local)


def check_plan(layout: SequenceLayout, mask: Tensor, size: int, local: int) -> None:
    plans = [layout.plan(rank) for rank in range(size)]
    for rank in range(size):
        queries = torch.cat([torch.arange(*span) for span in layout.spans[rank]])
        received = {rank}
        for owner in range(size):
            seen = mask[:, queries, owner * local : (owner + 1) * local]
            needed = bool(seen.any())
            assert pairs_of(layout.blocks(rank, owner)) == int(seen.sum())
            if owner != rank:
                assert (rank in layout.visits()[owner]) == needed
                received |= {owner} if needed else set()
        arrivals = [step.receive[0] for step in plans[rank].steps if step.receive is not None]
        assert sorted([rank, *arrivals]) == sorted(received)  # each once
        assert len(arrivals) == layout.received(rank)
    for step in range(size):
        sent = {(rank, owner, to) for rank in range(size) for owner, to in plans[rank].steps[step].sends}
        awaited = {
            (receive[1], receive[0], rank)
            for rank in range(size)
            if (receive := plans[rank].steps[step].receive) is not None
        }
        assert sent == awaited
        for rank, owner, _ in sent:  # it has what it sends: its own, or what came before
            earlier = [plans[rank].steps[s].receive for s in range(step)]
            assert owner == rank or any(r is not None and r[0] == owner for r in earlier)
    for owner in range(size):
        returned = {step.returned_by for step in plans[owner].steps if step.returned_by is not None}
        assert returned == set(layout.visits()[owner]) - {owner}
        assert len(returned) == layout.users(owner)


# ---------------------------------------------------------------- summation in narrow dtypes


def narrow_worker(rank: int, size: int) -> None:
    axis = Topology.from_mesh(cp_mesh(size)).cp
    generator = torch.Generator().manual_seed(0)
    partial = (torch.randn(size, 2, 3, size * 4, 5, generator=generator) * 3).to(torch.bfloat16)
    exchange = SequenceGather(axis).exchange()
    assert exchange is not None
    leaf = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(exchange_now(leaf, exchange), leaf, partial[rank])
    here = partial[:, :, :, rank * 4 : (rank + 1) * 4]
    assert torch.equal(grad, here.float().sum(0).to(torch.bfloat16))
    wrong = here[0]
    for part in here[1:]:
        wrong = wrong + part
    assert not torch.equal(grad, wrong)  # the case can tell


@pytest.mark.dist4
def test_partial_gradients_in_bf16_are_summed_in_fp32() -> None:
    run_distributed(narrow_worker, 4)
