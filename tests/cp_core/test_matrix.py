"""Every strategy against one process: a whole mixer, forward, input gradient and every weight's gradient.

The full cross of algorithm, schedule, cp size, balance and mask is run; with activation checkpointing, layouts, head
counts, frozen projections and dtypes every pair of values (``tests/_pairwise.py``). The oracle is torch SDPA with a
dense mask on one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_core import (
    AttentionShape,
    ContextParallelConfig,
    CPAttention,
    Handoff,
    SequenceContext,
    Topology,
    bind_context_parallel,
    shard_batch,
    sync_gradients,
)
from cp_core.bind import resolve
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests._pairwise import Case, all_pairs, legal_pairs, pairs_in
from tests.cp_core._helpers import Layout, cp_mesh, dense_attention, relative, row

HIDDEN, HEADS, WIDTH, SCALE = 20, 8, 6, 0.37
MASKS: dict[str, Layout] = {  # 61 tokens: padding is added on 2 and on 4 ranks
    "causal": [row(61), row(61)],
    "non-causal": [row(61), row(61)],
    "packed": [row(23, 38), row(1, 44, 5, 11)],
    "packed and padded": [row(-6, 30, 25), row(40, -3, 9, -9)],
}
LISTS: dict[str, Sequence[Any]] = {
    "algorithm": ("all_gather", "ulysses", "hybrid", "ring", "hybrid_ring"),
    "schedule": ("sync", "async"),
    "cp": (2, 4),
    "balance": (False, True),
    "mask": tuple(MASKS),
    "checkpointing": ("none", "non-reentrant", "reentrant"),
    "kv_heads": (8, 4, 1),
    "layout": ("BNTD", "BTND"),
    "frozen": ("", "k_proj v_proj", "q_proj"),
    "dtype": (torch.float64, torch.float32),
    "v_width": (6, 3, 8),
    "batch": (1, 2),
}
BASE: Case = {name: values[0] for name, values in LISTS.items()} | {"kv_heads": 4, "v_width": 5, "batch": 2}


def legal(case: Case) -> bool:
    split = case["algorithm"] in ("hybrid", "hybrid_ring")
    if split and case["cp"] == 2:
        return False
    return not case["balance"] or case["algorithm"] in ("all_gather", "ring")


def config_of(case: Case) -> ContextParallelConfig:
    split = case["algorithm"] in ("hybrid", "hybrid_ring")
    return ContextParallelConfig(
        algorithm=case["algorithm"],
        schedule=case["schedule"],
        ulysses_degree=2 if split else None,
        load_balance=case["balance"],
        kv_head_policy="repeat",
    )


def matrix() -> list[Case]:
    """Algorithm x schedule x cp x balance x mask, in fp64 and fp32."""
    names = ("algorithm", "schedule", "cp", "balance", "mask", "dtype")
    cases = [BASE | dict(zip(names, v, strict=True)) for v in itertools.product(*(LISTS[name] for name in names))]
    return [case for case in cases if legal(case)]


@lru_cache
def pairwise() -> list[Case]:
    return all_pairs(LISTS, legal)


class Mixer(nn.Module):
    """Projections, a rotation by position, handoffs, attention, output. ``alone``: one process, dense mask."""

    def __init__(self, case: Case, alone: bool) -> None:
        super().__init__()
        self.case, self.alone = case, alone
        generator = torch.Generator().manual_seed(7)
        kv, wide = case["kv_heads"], case["v_width"]
        for name, outputs, inputs in (
            ("q_proj", HEADS * WIDTH, HIDDEN),
            ("k_proj", kv * WIDTH, HIDDEN),
            ("v_proj", kv * wide, HIDDEN),
            ("o_proj", HIDDEN, HEADS * wide),
        ):
            layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
            layer.weight.data = torch.randn(outputs, inputs, dtype=torch.float64, generator=generator) * inputs**-0.5
            layer.weight.requires_grad_(name not in case["frozen"].split())
            self.add_module(name, layer.to(case["dtype"]))
        self.q_handoff, self.k_handoff, self.v_handoff = Handoff("q"), Handoff("k"), Handoff("v")
        dims = (2, 1) if case["layout"] == "BNTD" else (1, 2)
        self.cp = CPAttention(SCALE, case["mask"] != "non-causal", *dims)

    def cp_mixers(self) -> dict[str, str]:
        return {"": "softmax"}

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(HEADS, self.case["kv_heads"], WIDTH, self.case["v_width"])

    def forward(self, hidden: Tensor, positions: Tensor, sequence: SequenceContext | None) -> Tensor:
        v = self.heads(self.v_proj(hidden), self.case["v_width"])
        v = v if self.alone else self.v_handoff(v, sequence)
        k = rotate(self.heads(self.k_proj(hidden), WIDTH), positions, self.heads_dim)
        k = k if self.alone else self.k_handoff(k, sequence)
        q = rotate(self.heads(self.q_proj(hidden), WIDTH), positions, self.heads_dim)
        q = q if self.alone else self.q_handoff(q, sequence)
        if self.alone:
            layout = MASKS[self.case["mask"]][-self.case["batch"] :]
            out = dense_attention(q, k, v, layout, self.case["mask"] != "non-causal", SCALE)
        else:
            out = self.cp(q, k, v, sequence)
        return self.o_proj((out if self.heads_dim == 2 else out.transpose(1, 2)).flatten(2))

    @property
    def heads_dim(self) -> int:
        return 1 if self.alone or self.case["layout"] == "BNTD" else 2

    def heads(self, x: Tensor, width: int) -> Tensor:
        x = x.unflatten(-1, (-1, width))
        return x.transpose(1, 2) if self.heads_dim == 1 else x


def rotate(x: Tensor, positions: Tensor, heads_dim: int) -> Tensor:
    """Pairs of channels turned by an angle that grows with the position."""
    angle = positions.to(x.dtype).unsqueeze(heads_dim).unsqueeze(-1) * torch.tensor([0.9, 0.31, 0.07], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def batch_of(case: Case) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The global batch, hidden states and the upstream gradient, in fp64."""
    layout = torch.tensor(MASKS[case["mask"]][-case["batch"] :])
    generator = torch.Generator().manual_seed(11)
    hidden, dout = (torch.randn(*layout.shape, HIDDEN, dtype=torch.float64, generator=generator) for _ in "ab")
    return {"input_ids": torch.zeros_like(layout), "document_ids": layout}, hidden, dout


@lru_cache
def alone(*settings: tuple[str, Any]) -> dict[str, Tensor]:
    """Output and gradients of one process, in fp64."""
    case = dict(settings) | {"dtype": torch.float64}
    batch, hidden, dout = batch_of(case)
    sequence = shard_batch(batch)["sequence"]
    mixer = Mixer(case, alone=True)
    hidden.requires_grad_()
    out = mixer(hidden, sequence.position_ids, None)
    out.backward(dout)
    assert hidden.grad is not None
    return {"out": out.detach(), "dx": hidden.grad} | grads_of(mixer)


def grads_of(mixer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}


def run_case(case: Case, mesh: Any) -> dict[str, Tensor]:
    """This rank's output and input gradient, and the summed weight gradients."""
    batch, hidden, dout = batch_of(case)
    sequence = shard_batch(batch, mesh)["sequence"]
    start, stop = sequence.ranges[sequence.rank]
    extra = sequence.padded_length - sequence.length

    def cut(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, extra), value=3.0)[:, start:stop].to(case["dtype"]).contiguous()

    mixer = Mixer(case, alone=False)
    bind_context_parallel(mixer, Topology.from_mesh(mesh), config_of(case))
    x = cut(hidden).requires_grad_()
    here = cut(dout)
    here[:, max(0, sequence.length - start) :] = 0  # what stands behind the batch has no loss
    arguments = (mixer, x, sequence.position_ids, sequence)
    if case["checkpointing"] == "none":
        out = mixer(*arguments[1:])
    else:
        out = checkpoint(*arguments, use_reentrant=case["checkpointing"] == "reentrant")
    out.backward(here)
    sync_gradients(mixer, mesh)
    assert x.grad is not None
    return {"out": out.detach(), "dx": x.grad} | grads_of(mixer)


def worker(rank: int, size: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    mesh = cp_mesh(size)
    return [run_case(case, mesh) for case in cases]


def check(cases: list[Case], size: int) -> None:
    cases = [case for case in cases if case["cp"] == size]
    assert cases
    per_rank = run_distributed(worker, size, cases, timeout=240)
    for index, case in enumerate(cases):
        key = {name: case[name] for name in ("mask", "kv_heads", "frozen", "v_width", "batch")}
        want = alone(*(BASE | key).items())
        results = [result[index] for result in per_rank]
        assert results[0].keys() == want.keys()
        fp64 = case["dtype"] == torch.float64
        for name, expected in want.items():
            local = name in ("out", "dx")
            got = torch.cat([r[name] for r in results], 1)[:, :61] if local else results[0][name]
            tolerance = 1e-10 if fp64 else 1e-5 if name == "out" else 1e-4
            assert got.dtype == case["dtype"]
            assert relative(got, expected) <= tolerance, (case, name, relative(got, expected))


@pytest.mark.dist2
def test_matrix_two() -> None:
    check(matrix(), 2)


@pytest.mark.dist4
def test_matrix_four() -> None:
    check(matrix(), 4)


@pytest.mark.dist2
def test_every_pair_two() -> None:
    check(pairwise(), 2)


@pytest.mark.dist4
def test_every_pair_four() -> None:
    check(pairwise(), 4)


def test_every_legal_pair_is_covered() -> None:
    covered = set().union(*map(pairs_in, pairwise()))
    assert covered == legal_pairs(LISTS, legal)
    assert len(pairwise()) < 60  # of 103,680
    assert all(map(legal, pairwise()))


def test_what_is_left_out_is_refused_and_nothing_else() -> None:
    """The predicate hides no combination that binding takes."""
    for values in itertools.product(*(LISTS[name] for name in ("algorithm", "schedule", "cp", "balance", "kv_heads"))):
        case = BASE | dict(zip(("algorithm", "schedule", "cp", "balance", "kv_heads"), values, strict=True))
        topology = Topology(cp=Axis(size=case["cp"]))
        if legal(case):
            assert resolve(Mixer(case, alone=False), topology, config_of(case))[0].algorithm == case["algorithm"]
        else:
            with pytest.raises(ValueError, match=r"ulysses_degree|load_balance"):
                resolve(Mixer(case, alone=False), topology, config_of(case))


def test_the_generator_finds_what_it_should() -> None:
    lists = {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2)}
    cases = all_pairs(lists, lambda case: case["a"] != case["b"])
    assert all(case["a"] != case["b"] for case in cases)
    assert len(set().union(*map(pairs_in, cases))) == 4 + 6 + 4
    assert len(cases) < 8
