"""What strategies say they cost against what is counted: bytes and messages at c10d, attention work in the kernel.

The formulas are written out here from the issue's text: S padded tokens, P ranks, U and C, b = S/P * 2 * Nkv * D.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cp_core import (
    AttentionShape,
    ContextParallelConfig,
    CPAttention,
    Handoff,
    ResolvedCP,
    Segment,
    SequenceContext,
    Topology,
    bind_context_parallel,
    count_communication,
    format_report,
    register_kernel,
    shard_batch,
)
from cp_core.bind import resolve
from cp_core.blocks import attention_tiles
from cp_core.collectives import (
    all_gather_stacked,
    all_to_all_stacked,
    reduce_scatter_stacked,
    start_all_gather,
    sum_values,
)
from cp_core.counters import measure_waits
from cp_core.kernels import Block, SdpaKernel
from cp_core.report import imbalance
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests.cp_core._helpers import Allocations, Layout, cp_mesh, row, visible
from tests.cp_core.test_attention import settings

D, V = 8, 8
LENGTH = 61
WINDOW = 11  # of the layout with that name
LAYOUTS: dict[str, Layout] = {
    "one document": [row(61), row(61)],
    "packed": [row(23, 38), row(1, 44, 5, 11)],
    "window": [row(61), row(61)],
    "packed and padded": [row(-6, 30, 25), row(40, -3, 9, -9)],
}


class CountingKernel(SdpaKernel):
    """Counts query-key pairs times query heads."""

    name = "counting"
    work = 0

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        for b0, b1, q0, q1, k0, k1, shape in attention_tiles(block.meta):
            t, s = q1 - q0, k1 - k0
            CountingKernel.work += (b1 - b0) * block.q.shape[1] * (t * s if shape == "full" else t * (t + 1) // 2)
        return super().forward(block)


class Model(nn.Module):
    def __init__(self, kv_heads: int, causal: bool, v_dim: int, window: int | None = None) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.handoffs = nn.ModuleDict({role: Handoff(role) for role in "qkv"})
        self.mixer.cp = CPAttention(0.3, causal, window=window)
        self.mixer.weight = nn.Parameter(torch.zeros(()))
        shape = AttentionShape(8, kv_heads, D, v_dim)
        self.mixer.attention_shape = lambda: shape  # type: ignore[assignment]
        self.mixer.forward = self.attend

    def cp_mixers(self) -> dict[str, str]:
        return {"mixer": "softmax"}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceContext) -> Tensor:
        hand: Any = self.mixer.handoffs
        v, k, q = hand["v"](v, sequence), hand["k"](k, sequence), hand["q"](q, sequence)
        result: Tensor = self.mixer.cp(q, k, v, sequence)  # type: ignore[operator]
        return result


Case = tuple[dict[str, Any], str, int, bool, torch.dtype, int]


def cases(size: int) -> list[Case]:
    found: list[Case] = []
    for fields in map(dict, settings(size)):
        if fields["algorithm"] == "ulysses" and 8 % size:
            continue
        for layout in LAYOUTS:
            for kv_heads in (4, 2, 1):
                for causal in (True, False) if layout == "one document" else (True,):
                    found.append((fields, layout, kv_heads, causal, torch.float32, V))
        found.append((fields, "one document", 4, True, torch.float64, 5))
        found.append((fields, "one document", 2, True, torch.bfloat16, 16))
        found.append((fields, "packed", 4, True, torch.bfloat16, 16))
    return found


def counted(case: Case, mesh: Any) -> tuple[list[int], tuple[Any, ...], Any, int]:
    """Bytes and messages of forward and backward; the costs stated for every rank; the record; work."""
    fields, layout, kv_heads, causal, dtype, v_dim = case
    model = Model(kv_heads, causal, v_dim, WINDOW if layout == "window" else None)
    model.mixer.to(dtype)
    config = ContextParallelConfig(kernel="counting", **fields)
    record = bind_context_parallel(model, Topology.from_mesh(mesh), config)[0]
    documents = torch.tensor(LAYOUTS[layout])
    sequence = shard_batch({"input_ids": torch.zeros_like(documents), "document_ids": documents}, mesh)["sequence"]
    tokens = sequence.padded_length // sequence.cp_size
    q, k, v = (
        torch.randn(2, heads, tokens, width).to(dtype).requires_grad_()
        for heads, width in ((8, D), (kv_heads, D), (kv_heads, v_dim))
    )
    CountingKernel.work = 0
    with count_communication() as forward:
        out = model.mixer(q, k, v, sequence)
    with count_communication() as backward:
        out.backward(torch.ones_like(out))
    numbers = [forward.bytes, backward.bytes, forward.messages, backward.messages]
    costs = record.costs(sequence.rows, sequence.padded_length)
    assert costs is not None
    return numbers, costs, record, CountingKernel.work


def formulas(case: Case, rank: int, size: int) -> tuple[int, int]:
    """Received bytes of forward and backward, from the issue; one document or every block needed."""
    fields, _, kv_heads, causal, dtype, v_dim = case
    itemsize = torch.empty((), dtype=dtype).element_size()
    degree = fields.get("ulysses_degree") or (size if fields["algorithm"] == "ulysses" else 1)
    repeat = 1
    if kv_heads % degree:
        repeat = min(f for f in range(1, 9) if f * kv_heads % degree == 0 and 8 % (f * kv_heads) == 0)
    nq, nkv, p, u = 8, repeat * kv_heads, size, degree
    s, c, co = -(-LENGTH // (2 * p)) * 2 * p, p // u, rank // u
    kv, qo = D + v_dim, D + v_dim  # 2 * D where v is as wide as k
    heads = (u - 1) * s * (nq * qo + nkv * kv) // (u * p)
    block = s // c * (nkv // u) * kv
    forward = backward = heads
    if fields["algorithm"] in ("all_gather", "hybrid"):
        forward += (c - 1) * block
        backward += (c - 1) * block
    if fields["algorithm"] in ("ring", "hybrid_ring"):
        received = co if causal else c - 1
        returned = c - 1 - co if causal else c - 1
        if fields.get("load_balance") and causal:
            received = max(rank, p - 1 - rank)
            returned = sum(rank <= max(other, p - 1 - other) for other in range(p) if other != rank)
        forward += received * block
        backward += (received + returned) * block
    if fields.get("load_balance") and 2 * rank != p - 1:
        forward += s // (2 * p) * nq * qo
        backward += s // (2 * p) * nq * qo
    return 2 * itemsize * forward, 2 * itemsize * backward  # two rows


def visible_work(layout: Layout, window: int | None, rank: int, size: int) -> int:
    """Pairs that the rank's own queries can see, times heads."""
    length = len(layout[0])
    padded = -(-length // (2 * size)) * 2 * size
    here = slice(rank * padded // size, (rank + 1) * padded // size)
    return 8 * int(visible(layout, True, window)[:, here].sum())


def cost_worker(rank: int, size: int) -> list[tuple[list[int], tuple[Any, ...], ResolvedCP, int]]:
    register_kernel("counting", CountingKernel)
    mesh = cp_mesh(size)
    return [counted(case, mesh) for case in cases(size)]


def check(size: int) -> None:
    per_rank = run_distributed(cost_worker, size, timeout=240)
    for index, case in enumerate(cases(size)):
        fields, layout, _, causal, _, _ = case
        window = WINDOW if layout == "window" else None
        total = []
        for rank, results in enumerate(per_rank):
            numbers, costs, record, work = results[index]
            cost = costs[rank]
            stated = [cost.forward_bytes, cost.backward_bytes, cost.forward_messages, cost.backward_messages]
            assert numbers == stated, (case, rank)
            assert costs == per_rank[0][index][1], (case, rank)  # every rank states the same for all
            assert work == cost.work, (case, rank)
            total.append(work)
            if layout == "one document":
                assert tuple(numbers[:2]) == formulas(case, rank, size), (case, rank)
            if causal and fields["algorithm"] == "all_gather" and not fields.get("load_balance"):
                assert work == visible_work(LAYOUTS[layout], window, rank, size), (case, rank)
            assert record.itemsize == torch.empty((), dtype=case[4]).element_size()
        if causal:  # nobody computes what nobody sees, and nothing twice
            assert sum(total) == 8 * int(visible(LAYOUTS[layout], True, window).sum()), case


@pytest.mark.dist2
def test_counted_is_stated_two() -> None:
    check(2)


@pytest.mark.dist4
def test_counted_is_stated_three() -> None:
    """An odd number of ranks: the middle one swaps nothing."""
    check(3)


@pytest.mark.dist4
def test_counted_is_stated_four() -> None:
    check(4)


# ---------------------------------------------------------------- work


def even_worker(rank: int, size: int) -> list[int]:
    register_kernel("counting", CountingKernel)
    mesh = cp_mesh(size)
    found = []
    for fields in map(dict, settings(size)):
        if fields["algorithm"] in ("all_gather", "ring"):
            model = Model(4, True, V)
            bind_context_parallel(model, Topology.from_mesh(mesh), ContextParallelConfig(kernel="counting", **fields))
            sequence = shard_batch({"input_ids": torch.zeros(1, 96, dtype=torch.int64)}, mesh)["sequence"]
            CountingKernel.work = 0
            model.mixer(*(torch.randn(1, heads, 96 // size, D) for heads in (8, 4, 4)), sequence)
            found.append(CountingKernel.work)
    return found


@pytest.mark.dist4
@pytest.mark.parametrize("size", [2, 3, 4])
def test_head_tail_is_exactly_even_on_one_document(size: int) -> None:
    per_rank = run_distributed(even_worker, size)
    chosen = [dict(s) for s in settings(size) if dict(s)["algorithm"] in ("all_gather", "ring")]
    for fields, work in zip(chosen, zip(*per_rank, strict=True), strict=True):
        ratio = max(work) * size / sum(work)
        if fields.get("load_balance"):
            assert ratio == 1.0, (fields, work)
        else:
            assert ratio > 1.4, (fields, work)


def dry(fields: dict[str, Any], size: int = 2) -> ResolvedCP:
    topology = Topology(cp=Axis(size=size), dp_cp=Axis(size=size))
    return resolve(Model(4, True, V), topology, ContextParallelConfig(**fields))[0]


def test_the_report_warns_where_balance_makes_it_worse() -> None:
    record = dry({"load_balance": True})
    for documents, worse in (([100, 28], True), ([32] * 4, True), ([128], False), ([28, 100], False)):
        batch = {"input_ids": torch.zeros(1, 128, dtype=torch.int64), "document_ids": torch.tensor([row(*documents)])}
        sequence = shard_batch(batch)["sequence"]
        text = format_report([record], sequence)
        assert ("warning: mixer: with these documents load_balance makes no rank faster" in text) == worse
        costs, plain = record.costs(sequence.rows, 128), record.costs(sequence.rows, 128, balanced=False)
        assert costs is not None
        assert plain is not None
        assert (
            imbalance(costs) >= imbalance(plain)
        ) == worse  # documents that fit into shards: no better, only more sent
    assert imbalance([]) == 1.0
    assert "warning" not in format_report([dry({})])


def test_costs_of_many_ranks_need_no_processes() -> None:
    """A million tokens over 64 ranks: bytes and balance before anything starts."""
    rows = ((Segment(0, 1 << 20),),)
    balanced = dry({"algorithm": "ring", "load_balance": True}, 64).costs(rows, 1 << 20)
    plain = dry({"algorithm": "ring"}, 64).costs(rows, 1 << 20)
    assert balanced is not None
    assert plain is not None
    assert imbalance(balanced) == 1.0
    assert imbalance(plain) == pytest.approx(2 - 1 / 64, abs=1e-4)
    block = (1 << 14) * 2 * 4 * D * 4
    assert [cost.forward_bytes for cost in plain] == [rank * block for rank in range(64)]


# ---------------------------------------------------------------- the counters


def counter_worker(rank: int, size: int) -> list[tuple[int, int, dict[str, int]]]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.zeros(size, 6)  # 24 bytes an entry
    found = []

    def note(seen: Any) -> None:
        found.append((seen.bytes, seen.messages, dict(seen.calls)))

    with count_communication() as seen:
        all_gather_stacked(x[0], group)
        note(seen)
        seen.reset()
        reduce_scatter_stacked(x, group)
        note(seen)
        seen.reset()
        all_to_all_stacked(x, group)
        note(seen)
        seen.reset()
        sum_values(x, group)
        note(seen)
        seen.reset()
        peer = torch.empty(5, dtype=torch.float64)
        if rank == 0:
            dist.send(peer, 1)
        elif rank == 1:
            dist.recv(peer, 0)
        note(seen)
        seen.reset()
    all_gather_stacked(x[0], group)
    note(seen)
    return found


@pytest.mark.dist4
@pytest.mark.parametrize("size", [2, 4])
def test_counters_against_calls_of_known_size(size: int) -> None:
    others = size - 1
    for rank, found in enumerate(run_distributed(counter_worker, size)):
        expected: list[tuple[int, int, dict[str, int]]] = [
            (others * 24, others, {"all_gather": 1}),
            (others * 24, others, {"reduce_scatter": 1}),
            (others * 24, others, {"all_to_all": 1}),
            (2 * others * 24, 2 * others, {"all_reduce": 1}),  # its bytes are those of a reduce-scatter and a gather
            {0: (0, 0, {"send": 1}), 1: (40, 1, {"recv": 1})}.get(rank, (0, 0, {})),
            (0, 0, {}),  # off
        ]
        assert found == expected


def list_worker(rank: int, size: int) -> tuple[int, int, dict[str, int]]:
    x = torch.zeros(size, 6)
    with count_communication() as seen:
        dist.all_to_all(list(torch.empty_like(x)), list(x))
    return seen.bytes, seen.messages, dict(seen.calls)


@pytest.mark.dist2
def test_an_all_to_all_of_lists_is_counted() -> None:
    assert run_distributed(list_worker, 2) == [(24, 1, {"all_to_all": 1})] * 2


def wait_worker(rank: int, size: int) -> tuple[float, float]:
    mesh = cp_mesh(size)
    x = torch.zeros(1000)
    with measure_waits() as meter:
        if rank == 0:
            time.sleep(0.3)
        start_all_gather(x, mesh.get_group()).wait()
    before = meter.seconds
    start_all_gather(x, mesh.get_group()).wait()
    return before, meter.seconds


@pytest.mark.dist2
def test_waits_are_measured_where_they_happen() -> None:
    (early, _), (late, after) = run_distributed(wait_worker, 2)
    assert late > 0.2  # rank 1 waited for rank 0
    assert early < late
    assert after == late  # off


# ---------------------------------------------------------------- memory


def allocation_worker(rank: int, size: int) -> list[tuple[dict[str, Any], int, str]]:
    mesh = cp_mesh(size)
    found = []
    for fields in map(dict, settings(size)):
        for layout in ([row(1024)], [row(300, 1, 700, -23)]):
            documents = torch.tensor(layout)
            batch = {"input_ids": torch.zeros_like(documents), "document_ids": documents}
            sequence = shard_batch(batch, mesh)["sequence"]
            model = Model(4, True, 4)
            bind_context_parallel(model, Topology.from_mesh(mesh), ContextParallelConfig(**fields))
            q, k, v = (torch.randn(1, heads, 1024 // size, 4, requires_grad=True) for heads in (8, 4, 4))
            with Allocations() as seen:
                out = model.mixer(q, k, v, sequence)
                out.backward(torch.ones_like(out))
            found.append((fields, seen.largest, seen.by))
    return found


@pytest.mark.dist4
@pytest.mark.parametrize("size", [2, 4])
def test_no_scores_are_allocated(size: int) -> None:
    """The largest tensor has all tokens, heads and channels: 1/16 of S_q x S_k, 1/8 at cp 4."""
    for found in run_distributed(allocation_worker, size):
        for fields, largest, by in found:
            assert largest <= 8 * 1024 * 4 < 1024 // size * 1024, (fields, by)
