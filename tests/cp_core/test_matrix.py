"""The test matrix: a whole mixer under every strategy against one process that knows neither shards nor strategies.

``hidden x -> linear v, k, q -> rotation by position -> handoffs -> cp -> linear o``: the output, the gradient of x and
those of the four weights (summed over the ranks) are compared with torch SDPA under a dense mask. What the matrix
crosses in full is algorithm, schedule, cp size, balance, mask and dtype; of everything else every legal pair is run.

B batch, S tokens, T local tokens, N query heads, K kv heads, D head dim, H hidden.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
)
from cp_core.bind import resolve
from cp_core.scoring import Dropout
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests._pairwise import Factors, Pair, Values, all_pairs, pairs_of, pairwise
from tests.cp_core._helpers import Layout, cp_mesh, dense_attention, expected_positions, relative, row

ROOT = Path(__file__).parents[2]
HIDDEN, HEADS, DIM, LENGTH, SCALE = 20, 8, 6, 61, 0.37
KV_HEADS = {"equal": HEADS, "grouped": 4, "one": 1}
V_DIM = {"equal": DIM, "smaller": 4, "larger": 10}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
TOLERANCE = {"fp64": (1e-10, 1e-10), "fp32": (1e-5, 1e-4)}  # output, gradients; of the largest entry
FROZEN = {"none": "", "kv": "kv", "k": "k", "q": "q"}
GARBAGE = 7.0  # what stands on padding; nobody may see it
RAGGED = [row(23, 1, 30, 7), row(4, 40, 17)]
MASKS: dict[str, tuple[Layout, bool]] = {  # documents and padding of two rows; whether causal
    "causal": ([row(LENGTH)] * 2, True),
    "non-causal": ([row(LENGTH)] * 2, False),
    "packed": (RAGGED, True),
    "packed non-causal": (RAGGED, False),
    "packed padded left": ([row(-18, 9, 34), row(-5, 1, 40, 15)], True),
    "packed padded right": ([row(9, 34, -18), row(40, 18, -3)], True),
}
WINDOW, SHARE, SEED, LAYER = 9, 0.25, 4711, 2
SCORES = ("plain", "window", "bool mask", "additive mask", "two masks", "dropout")  # on top of MASKS
FACTORS: Factors = {
    "algorithm": ["all_gather", "ulysses", "hybrid", "hybrid_ring", "ring"],
    "schedule": ["sync", "async"],
    "cp": [2, 4],
    "balance": [False, True],
    "mask": list(MASKS),
    "scores": list(SCORES),
    "kernel": ["sdpa", "flex"],
    "checkpoint": ["off", "non-reentrant", "reentrant"],
    "kv": list(KV_HEADS),
    "layout": ["BNSD", "BSND"],
    "frozen": list(FROZEN),
    "dtype": list(DTYPES),
    "v_width": list(V_DIM),
    "batch": [1, 2],
}
SEEN_BY_BINDING = ("algorithm", "schedule", "cp", "balance", "mask", "scores", "kernel", "kv", "dtype")


class Case(NamedTuple):
    """One value of each factor; the defaults are what the matrix uses."""

    algorithm: str
    schedule: str
    cp: int
    balance: bool
    mask: str
    dtype: str
    checkpoint: str = "off"
    kv: str = "grouped"
    layout: str = "BNSD"
    frozen: str = "none"
    v_width: str = "larger"
    batch: int = 2
    scores: str = "plain"
    kernel: str = "sdpa"

    @property
    def rows(self) -> Layout:
        """The documents of the whole batch."""
        return MASKS[self.mask][0][: self.batch]


def legal(case: Values) -> bool:
    """What binding accepts; ``test_cases_cover_what_binding_accepts`` holds it against binding itself."""
    split = case.get("algorithm") in ("hybrid", "hybrid_ring")
    if split and case.get("cp") == 2:  # 1 < U < cp
        return False
    if case.get("scores") == "window" and not MASKS[case.get("mask", "causal")][1]:
        return False
    return not (case.get("balance") and (split or case.get("algorithm") == "ulysses"))


def matrix(cp: int) -> list[Case]:
    """The full cross."""
    names = ("algorithm", "schedule", "balance", "dtype")
    crossed = itertools.product(*(FACTORS[name] for name in names), ("causal", "non-causal", "packed"))
    found = [dict(zip((*names, "mask"), values, strict=True), cp=cp) for values in crossed]
    return [Case(**values) for values in found if legal(values)]


@lru_cache
def pairwise_cases() -> list[Values]:
    return pairwise(FACTORS, legal)


# ---------------------------------------------------------------- the mixer


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """``[B, T, N, D]``: pairs (i, i + D / 2) turn by position times a frequency."""
    half = x.shape[-1] // 2
    angles = positions.to(x.dtype)[:, :, None, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Mixer(nn.Module):
    """A frozen projection is fed without gradient too, so that its q, k or v has a producer that wants none."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.shape = AttentionShape(HEADS, KV_HEADS[case.kv], DIM, V_DIM[case.v_width])
        self.frozen = FROZEN[case.frozen]
        widths = {"v": self.shape.kv_heads * self.shape.v_dim, "k": self.shape.kv_heads * DIM, "q": HEADS * DIM}
        self.linear = nn.ModuleDict({role: nn.Linear(HIDDEN, width, bias=False) for role, width in widths.items()})
        self.linear["o"] = nn.Linear(HEADS * self.shape.v_dim, HIDDEN, bias=False)
        for role in self.frozen:
            self.linear[role].requires_grad_(False)
        self.handoffs = nn.ModuleDict({role: Handoff(role) for role in "qkv"})
        self.heads_first = case.layout == "BNSD"
        dims = {"seq_dim": 2, "head_dim": 1} if self.heads_first else {"seq_dim": 1, "head_dim": 2}
        fields: dict[str, Any] = {"window": {"window": WINDOW}, "dropout": {"dropout": SHARE, "layer": LAYER}}
        self.cp = CPAttention(SCALE, causal=MASKS[case.mask][1], **dims, **fields.get(case.scores, {}))
        self.scores = case.scores

    def attention_shape(self) -> AttentionShape:
        return self.shape

    def forward(self, x: Tensor, sequence: SequenceContext) -> Tensor:
        v, k, q = (self.project(role, x, sequence) for role in "vkq")
        mask = None
        if self.scores in ("additive mask", "two masks"):
            extra = sequence.padded_length - LENGTH
            mask = F.pad(user_masks(self.scores)[1], (0, extra, 0, extra), value=GARBAGE)
        out = self.cp(q, k, v, sequence, mask)
        return self.linear["o"]((out.transpose(1, 2) if self.heads_first else out).flatten(2))

    def project(self, role: str, x: Tensor, sequence: SequenceContext) -> Any:
        """``[B, T, H]`` -> ``[B, N, T, D]`` or ``[B, T, N, D]``, handed off."""
        width = self.shape.v_dim if role == "v" else DIM
        out = self.linear[role](x.detach() if role in self.frozen else x).unflatten(-1, (-1, width))
        out = out if role == "v" else rotate(out, sequence.position_ids)
        return self.handoffs[role](out.transpose(1, 2) if self.heads_first else out, sequence)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.mixer = Mixer(case)

    def cp_mixers(self) -> dict[str, str]:
        return {"mixer": "softmax"}


def config_of(case: Case) -> ContextParallelConfig:
    return ContextParallelConfig(
        algorithm=case.algorithm,
        schedule=case.schedule,
        ulysses_degree=2 if case.algorithm in ("hybrid", "hybrid_ring") else None,
        load_balance=case.balance,
        kv_head_policy="repeat" if case.kv == "one" else "error",
        kernel=case.kernel,
    )


def tensors(kv: str, v_width: str, batch: int, dtype: str) -> dict[str, Tensor]:
    """x and the output's gradient ``[B, S, H]``, the weights; in fp64, rounded to ``dtype``, equal in every process."""
    kv_heads, v_dim = KV_HEADS[kv], V_DIM[v_width]
    shapes = {
        "x": (batch, LENGTH, HIDDEN), "dout": (batch, LENGTH, HIDDEN), "q": (HEADS * DIM, HIDDEN),
        "k": (kv_heads * DIM, HIDDEN), "v": (kv_heads * v_dim, HIDDEN), "o": (HIDDEN, HEADS * v_dim),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(100 * kv_heads + v_dim)
    made = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    for role in "qkvo":
        made[role] /= made[role].shape[1] ** 0.5
    return {name: x.to(DTYPES[dtype]) for name, x in made.items()}


def user_masks(scores: str) -> tuple[Tensor | None, Tensor]:
    """``[1, N, S, S]`` bool for ``shard_batch`` and ``[1, 1, S, S]`` float for the module; some queries see nothing."""
    generator = torch.Generator().manual_seed(17)
    seen = torch.rand(1, HEADS, LENGTH, LENGTH, generator=generator) > 0.4
    bias = torch.randn(1, 1, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, torch.finfo(torch.float64).min)
    seen[:, :, 20], seen[:, 3, 40] = False, False
    bias[:, :, 31] = -torch.inf
    return seen if scores in ("bool mask", "two masks") else None, bias


Found = dict[str, Tensor]  # out, and the gradients of x, q, k, v, o as far as there are any


def run_case(case: Case, mesh: DeviceMesh) -> Found:
    """This rank's tokens of the output and of the gradient of x; its part of the weights' gradients."""
    given = tensors(case.kv, case.v_width, case.batch, case.dtype)
    model = Model(case).to(DTYPES[case.dtype])
    model.load_state_dict({f"mixer.linear.{role}.weight": given[role] for role in "qkvo"})
    bind_context_parallel(model, Topology.from_mesh(mesh), config_of(case))
    batch: dict[str, Any] = {"input_ids": torch.zeros(case.batch, LENGTH, dtype=torch.int64)}
    if case.mask.startswith("packed"):
        batch["document_ids"] = torch.tensor(case.rows)
    if case.scores in ("bool mask", "two masks"):
        batch["mask"] = user_masks(case.scores)[0]
    sequence = shard_batch(batch, mesh, dropout_seed=SEED if case.scores == "dropout" else None)["sequence"]

    def cut(whole: Tensor) -> Tensor:
        padded = F.pad(whole, (0, 0, 0, sequence.padded_length - LENGTH), value=GARBAGE)
        return padded[:, slice(*sequence.ranges[sequence.rank])].clone()

    x = cut(given["x"]).requires_grad_()
    if case.checkpoint == "off":
        out = model.mixer(x, sequence)
    else:
        out = checkpoint(model.mixer, x, sequence, use_reentrant=case.checkpoint == "reentrant")
    out.backward(cut(given["dout"]))
    found = {"out": out.detach(), "x": x.grad, **{role: model.mixer.linear[role].weight.grad for role in "qkvo"}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def worker(rank: int, size: int, cases: list[Case]) -> list[Found]:
    mesh = cp_mesh(size)
    return [run_case(case, mesh) for case in cases]


# ---------------------------------------------------------------- one process


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """``rotate`` in complex numbers, of ``[B, S, N, D]``."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, :, None, None] * torch.tensor([0.3**i for i in range(half)], dtype=torch.float64)
    z = torch.complex(*x.split(half, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


@lru_cache
def expected(mask: str, scores: str, kv: str, frozen: str, v_width: str, batch: int, dtype: str) -> Found:
    """The same mixer in fp64 from plain matmuls and torch SDPA under a dense mask, over the whole sequence."""
    given = {name: x.double() for name, x in tensors(kv, v_width, batch, dtype).items()}
    fixed = FROZEN[frozen]
    wanted = [name for name in ("x", *"qkvo") if name not in fixed]
    leaves = [given[name].requires_grad_() for name in wanted]
    layout, causal = MASKS[mask][0][:batch], MASKS[mask][1]
    positions = expected_positions(layout)
    q, k, v = (
        ((given["x"].detach() if role in fixed else given["x"]) @ given[role].T).unflatten(-1, (heads, -1))
        for role, heads in (("q", HEADS), ("k", KV_HEADS[kv]), ("v", KV_HEADS[kv]))
    )
    q, k, v = (x.transpose(1, 2) for x in (turned(q, positions), turned(k, positions), v))
    seen, bias = user_masks(scores)
    if scores in ("additive mask", "two masks"):
        bias = bias.masked_fill(bias == torch.finfo(bias.dtype).min, -torch.inf)
        seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
    keep = kept(batch) if scores == "dropout" else None
    window = WINDOW if scores == "window" else None
    out = dense_attention(q, k, v, layout, causal, SCALE, window, seen, keep).transpose(1, 2).flatten(2) @ given["o"].T
    grads = torch.autograd.grad(out, leaves, given["dout"])
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


def kept(batch: int) -> Tensor:
    """``[B, N, S, S]``: what dropout multiplies the weights with, entry by entry."""
    dropout = Dropout(SHARE, SEED, LAYER)
    stream = dropout.stream(torch.arange(batch).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1))
    return dropout.keeps(stream, torch.arange(LENGTH)[:, None], torch.arange(LENGTH)).double() / (1 - SHARE)


def faults(case: Case, ranks: list[Found]) -> list[str]:
    """Where the ranks together differ from one process."""
    want = expected(case.mask, case.scores, case.kv, case.frozen, case.v_width, case.batch, case.dtype)
    found = [f"has {sorted(part)}, not {sorted(want)}" for part in ranks if part.keys() != want.keys()]
    for name, reference in want.items() if not found else ():
        parts = [part[name] for part in ranks]
        whole = torch.stack(parts).sum(0) if name in "qkvo" else torch.cat(parts, 1)
        if name in ("out", "x"):
            if bool(whole[:, LENGTH:].any()):
                found.append(f"{name}: not 0 on the padding of shard_batch")
            whole = whole[:, :LENGTH]
        error, allowed = relative(whole, reference), TOLERANCE[case.dtype][name != "out"]
        if not error <= allowed or whole.dtype != DTYPES[case.dtype]:
            found.append(f"{name}: {error:.1e}, allowed {allowed:.0e} ({whole.dtype})")
    return [f"{case}: {fault}" for fault in found]


def run_all(cases: list[Case], size: int) -> dict[Case, list[Found]]:
    """Every case in one job; each rank's findings."""
    by_rank = run_distributed(worker, size, cases, timeout=120)
    return {case: [found[i] for found in by_rank] for i, case in enumerate(cases)}


sizes = pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)]
)

# ---------------------------------------------------------------- the tests


@sizes
def test_matrix(size: int) -> None:
    """Also: async is sync, bit for bit in fp32, the whole mixer with its projections included."""
    cases = matrix(size)
    strategies = {2: 5, 4: 7}[size]  # all_gather and ring balanced too
    assert len(cases) == strategies * len(FACTORS["schedule"]) * len(FACTORS["dtype"]) * 3
    results = run_all(cases, size)
    assert [fault for case in cases for fault in faults(case, results[case])] == []
    different = [
        f"{case}, rank {rank}: {name}"
        for case in cases
        if (case.dtype, case.schedule) == ("fp32", "async")
        for rank, (a, b) in enumerate(zip(results[case], results[case._replace(schedule="sync")], strict=True))
        for name in a
        if not torch.equal(a[name], b[name])
    ]
    assert different == []


@sizes
def test_pairs(size: int) -> None:
    cases = [Case(**values) for values in pairwise_cases() if values["cp"] == size]
    results = run_all(cases, size)
    assert [fault for case in cases for fault in faults(case, results[case])] == []


def accepted_pairs() -> set[Pair]:
    """The pairs of values that binding accepts, asked by a dry run over the full cross of what it can see."""
    models: dict[Any, Model] = {}
    topologies = {cp: Topology(cp=Axis(size=cp), dp_cp=Axis(size=cp)) for cp in FACTORS["cp"]}
    accepted: set[Pair] = set()
    for values in itertools.product(*(FACTORS[name] for name in SEEN_BY_BINDING)):
        fields = dict(zip(SEEN_BY_BINDING, values, strict=True))
        case = Case(**fields)
        key = (case.mask, case.scores, case.kv, case.dtype)
        try:
            if key not in models:
                models[key] = Model(case).to(DTYPES[case.dtype])
            resolve(models[key], topologies[case.cp], config_of(case))
        except ValueError:
            continue
        accepted |= pairs_of(fields)
    possible = {value for pair in accepted for value in pair}
    possible |= {(name, value) for name in FACTORS if name not in SEEN_BY_BINDING for value in FACTORS[name]}
    unseen = {pair for pair in all_pairs(FACTORS) if any(name not in SEEN_BY_BINDING for name, _ in pair)}
    return accepted | {pair for pair in unseen if pair <= possible}


def test_cases_cover_what_binding_accepts() -> None:
    """Every legal pair is run; and a pair that is not run is one that binding refuses, whatever goes with it."""
    covered = set().union(*map(pairs_of, pairwise_cases()))
    accepted = accepted_pairs()
    assert covered == accepted
    refused = {tuple(sorted(pair, key=str)) for pair in all_pairs(FACTORS) if pair not in covered}
    assert refused == {
        *((("algorithm", name), ("cp", 2)) for name in ("hybrid", "hybrid_ring")),
        *((("algorithm", name), ("balance", True)) for name in ("ulysses", "hybrid", "hybrid_ring")),
        *((("mask", name), ("scores", "window")) for name in ("non-causal", "packed non-causal")),
    }


# ---------------------------------------------------------------- the generator


def test_generator_is_the_same_every_time() -> None:
    """Sets of strings have another order in every process; the cases have not."""
    script = f"from tests._pairwise import pairwise; print(pairwise({FACTORS}, lambda case: True))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout.strip() == str(pairwise(FACTORS, lambda case: True)), done.stderr


def test_generator_makes_few_cases() -> None:
    cases = pairwise_cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    assert all(list(case) == list(FACTORS) and legal(case) for case in cases)
    least = len(FACTORS["scores"]) * len(FACTORS["mask"])  # every pair of the two longest lists
    assert least <= len(cases) <= 1.5 * least


def test_generator_goes_back_and_leaves_out_the_impossible() -> None:
    """A rule over three factors: some pairs are legal with one third value only, some with none."""
    factors = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1], "d": [0, 1]}

    def rule(case: Values) -> bool:
        if not {"a", "b", "c"} <= set(case):
            return True
        return case["a"] + case["b"] != 4 and (case["a"] == case["b"] or case["c"] == 1)

    every = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    possible = set().union(*(pairs_of(case) for case in every if rule(case)))
    cases = pairwise(factors, rule)
    assert all(map(rule, cases))
    assert set().union(*map(pairs_of, cases)) == possible
    assert 0 < len(set(all_pairs(factors)) - possible) < 5
