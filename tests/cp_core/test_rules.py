"""What binding refuses, row by row of the fail-fast table: each by its message, before any forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cp_core.collectives
from cp_core import (
    ContextParallelConfig,
    CPAttention,
    Topology,
    bind_context_parallel,
    register_strategy,
    shard_batch,
)
from cp_core.bind import resolve
from cp_core.rules import ASYNC_RULES, RULES, STRATEGY_RULES, broken
from cp_core.strategies import STRATEGIES
from cp_core.testing import run_distributed
from cp_core.topology import Axis
from tests.cp_core._helpers import cp_mesh, refusal
from tests.cp_core._models import Mixer, Model, ranks


def unbound(model: nn.Module) -> bool:
    return all(m.runtime is None and m.cp_size == 1 for m in model.modules() if isinstance(m, CPAttention))


class Deaf:
    """A strategy from outside without any launching."""

    ulysses_degree = 1

    def attend(self, *args: Any) -> Any:
        return args[0]


@pytest.fixture
def _deaf() -> Iterator[None]:
    register_strategy("softmax", "deaf", lambda *_: Deaf())
    yield
    del STRATEGIES["softmax", "deaf"]


U: dict[str, Any] = {"algorithm": "ulysses"}
H: dict[str, Any] = {"algorithm": "hybrid"}
HR: dict[str, Any] = {"algorithm": "hybrid_ring"}
REPEAT: dict[str, Any] = {"kv_head_policy": "repeat"}
ASYNC: dict[str, Any] = {"schedule": "async"}

# rule of the table, cp size, heads of the layer at fault, fields of its config, what the message says
CASES: list[tuple[str, int, tuple[int, int], dict[str, Any], list[str]]] = [
    ("algorithm", 4, (8, 4), {"algorithm": "ulises"}, ["algorithm 'ulises' is not", "all_gather | ulysses | hybrid"]),
    ("algorithm", 2, (8, 4), {"algorithm": "Ring"}, ["algorithm 'Ring' is not available", "did you mean 'ring'?"]),
    ("hybrid degree missing", 2, (8, 4), {"algorithm": "hybrid"}, ["no such divisor; without it use 'all_gather'"]),
    ("ulysses degree", 2, (8, 4), U | {"ulysses_degree": 3}, ["must be the cp size 2: leave it out"]),
    ("algorithm", 4, (8, 4), {"algorithm": "local"}, ["algorithm 'local' is not available for 'softmax' layers"]),
    ("kernel", 4, (8, 4), {"kernel": "flax"}, ["kernel 'flax' is not available; available: sdpa | flex | flash"]),
    ("kernel", 1, (8, 4), {"kernel": "flax"}, ["kernel 'flax' is not available; available: sdpa | flex | flash"]),
    ("kernel cannot", 1, (8, 4), {"kernel": "flash"}, ["kernel 'flash' cannot run this layer: flash-attn computes in"]),
    ("kernel cannot", 2, (8, 4), {"kernel": "npu_flash"}, ["runs on 'npu' devices, not on 'cpu': use 'sdpa' or 'flex'"]),
    (
        "degree without a head exchange", 4, (8, 4), {"ulysses_degree": 4},
        ["ulysses_degree=4 has no meaning with 'all_gather'; leave it out"],
    ),
    (
        "degree without a head exchange", 4, (8, 4), {"algorithm": "ring", "ulysses_degree": 1},
        ["ulysses_degree=1 has no meaning with 'ring'"],
    ),
    (
        "ulysses degree", 4, (8, 4), U | {"ulysses_degree": 2},
        ["ulysses_degree=2 with algorithm 'ulysses' must be the cp size 4", "use algorithm 'hybrid'"],
    ),
    (
        "hybrid degree missing", 8, (8, 8), H,
        ["algorithm 'hybrid' needs ulysses_degree, a divisor of the cp size between 1 and 8; legal: 2, 4"],
    ),
    ("hybrid degree missing", 3, (9, 9), HR, ["'hybrid_ring' needs ulysses_degree", "cp size 3 has no such divisor"]),
    (
        "hybrid degree range", 4, (8, 4), H | {"ulysses_degree": 4},
        ["ulysses_degree=4 with algorithm 'hybrid' must lie between 1 and the cp size 4", "legal: 2", "'ulysses'"],
    ),
    ("hybrid degree range", 4, (8, 4), HR | {"ulysses_degree": 1}, ["ulysses_degree=1", "'all_gather' (or 'ring')"]),
    ("hybrid degree range", 4, (8, 4), H | {"ulysses_degree": 8}, ["ulysses_degree=8", "legal: 2"]),
    (
        "hybrid degree divides", 8, (9, 9), H | {"ulysses_degree": 3},
        ["ulysses_degree=3 does not divide the cp size 8; legal: 2, 4"],
    ),
    (
        "query heads", 4, (6, 6), U,
        ["num_attention_heads=6 is not divisible by the ulysses degree 4", "'all_gather'", "'hybrid' with ulysses_degree=2"],
    ),
    ("query heads", 4, (6, 3), U | REPEAT, ["num_attention_heads=6"]),
    (
        "query heads", 8, (6, 6), H | {"ulysses_degree": 4},
        ["num_attention_heads=6 is not divisible by the ulysses degree 4", "'all_gather' or 'ring', or ulysses_degree=2"],
    ),
    (
        "kv heads", 4, (8, 2), U,
        [
            "num_key_value_heads=2 is not divisible by the ulysses degree 4", "'all_gather'", "'hybrid' with ulysses_degree=2",
            "kv_head_policy='repeat' (each kv head travels 2 times)",
        ],
    ),
    ("kv heads", 2, (6, 3), U, ["num_key_value_heads=3 is not divisible by the ulysses degree 2", "'all_gather'"]),
    ("kv heads", 2, (6, 3), U | REPEAT, ["num_key_value_heads=3"]),
    ("kv heads", 8, (24, 3), U, ["num_key_value_heads=3", "'all_gather' or 'ring'", "(each kv head travels 8 times)"]),
    (
        "kv heads", 4, (8, 1), HR | {"ulysses_degree": 2},
        ["num_key_value_heads=1 is not divisible by the ulysses degree 2: use algorithm 'all_gather' or 'ring', or kv_h"],
    ),
    ("load balance", 2, (8, 4), U | {"load_balance": True}, ["load_balance=True is for", "not for 'ulysses'", "'ring'"]),
    ("load balance", 4, (8, 4), H | {"load_balance": True, "ulysses_degree": 2}, ["load_balance", "not for 'hybrid'"]),
    ("load balance", 4, (8, 4), HR | {"load_balance": True, "ulysses_degree": 2}, ["not for 'hybrid_ring'"]),
    (
        "async strategy", 2, (8, 4), ASYNC | {"algorithm": "deaf"},
        ["needs a strategy that can launch", "'deaf' cannot; use schedule='sync', or async_fallback='sync'"],
    ),
]  # fmt: skip


@pytest.mark.usefixtures("_deaf")
@pytest.mark.parametrize(("rule", "cp", "heads", "fields", "parts"), CASES)
def test_illegal_combinations_are_refused(
    rule: str, cp: int, heads: tuple[int, int], fields: dict[str, Any], parts: list[str]
) -> None:
    """The second layer is at fault, and is named; no layer was changed. It is the first row that is broken."""
    model = Model((24, 24), heads)
    config = ContextParallelConfig(per_layer={"layers.1.*": fields})
    with pytest.raises(ValueError, match=r"^layers\.1\.self_attn: ") as caught:
        bind_context_parallel(model, ranks(cp), config)
    for part in parts:
        assert part in str(caught.value)
    assert unbound(model)
    table = {row.name: row for row in (*RULES, *STRATEGY_RULES, *ASYNC_RULES)}
    assert rule in table


def test_every_row_of_the_table_has_a_case() -> None:
    elsewhere = {"backend", "async handoffs"}  # below
    assert {row.name for row in (*RULES, *STRATEGY_RULES, *ASYNC_RULES)} == {case[0] for case in CASES} | elsewhere


@pytest.mark.parametrize("roles", ["", "q", "qk", "qkk", "qkvv"])
def test_async_without_handoffs_is_refused(roles: str) -> None:
    model = Model((8, 4), roles=roles)
    found = f"schedule 'async' needs one Handoff each for q, k and v in the mixer, found: {tuple(roles)}"
    with pytest.raises(ValueError, match=r"^layers\.0\.self_attn: ") as caught:
        bind_context_parallel(model, ranks(2), ContextParallelConfig(schedule="async"))
    assert found in str(caught.value)
    assert str(caught.value).endswith("; use schedule='sync', or async_fallback='sync'")
    allowed = ContextParallelConfig(schedule="async", async_fallback="sync")
    record = bind_context_parallel(model, ranks(2), allowed)[0]
    assert (record.schedule, record.fallback) == ("sync", found)
    assert all(handoff.launch is None for handoff in model.layers[0]["self_attn"].handoffs)


def backend_worker(rank: int, size: int) -> list[str]:
    topology = Topology.from_mesh(cp_mesh(size))
    said = []
    for missing, fields in (
        ("send/recv", {"algorithm": "ring"}),
        ("send/recv", {"load_balance": True}),
        ("all_to_all", {"algorithm": "ulysses"}),
        ("all_gather", {}),
    ):
        cp_core.collectives.LACKING[dist.get_backend()] = (missing,)
        said.append(refusal(bind_context_parallel, Model(), topology, ContextParallelConfig(**fields)))
    bind_context_parallel(Model(), topology, ContextParallelConfig(algorithm="ring"))  # needs nothing that is missing
    cp_core.collectives.LACKING[dist.get_backend()] = ("reduce_scatter",)
    bind_context_parallel(Model(), topology)  # all-reduce and a slice
    return said


@pytest.mark.dist2
def test_a_backend_without_the_collective_is_refused() -> None:
    for ring, balance, ulysses, gather in run_distributed(backend_worker, 2):
        assert ring.startswith("layers.0.self_attn: algorithm 'ring' needs send/recv, which backend 'gloo' does not")
        assert "algorithm 'all_gather' needs send/recv" in balance
        assert "algorithm 'ulysses' needs all_to_all" in ulysses
        assert "algorithm 'all_gather' needs all_gather" in gather


def test_a_cp_size_of_one_needs_no_rule() -> None:
    fields: dict[str, Any]
    for fields in (H, HR | {"ulysses_degree": 7}, U | {"load_balance": True}, ASYNC):
        record = bind_context_parallel(Model((7, 7), roles=""), Topology(), ContextParallelConfig(**fields))[0]
        assert (record.algorithm, record.schedule, record.load_balance, record.fallback) == ("local", "sync", False, "")


# ---------------------------------------------------------------- the whole model


def test_undeclared_mixers_are_refused() -> None:
    model = Model((8, 4), (8, 4), declared={"layers.0.self_attn": "softmax"})
    with pytest.raises(ValueError, match=r"^layers\.1\.self_attn: .* not declared in Model\.cp_mixers\(\)"):
        bind_context_parallel(model, ranks(2))
    bare = nn.Sequential(CPAttention(1.0))
    with pytest.raises(ValueError, match=r"Sequential does not declare its mixers: give it cp_mixers\(\)"):
        bind_context_parallel(bare, ranks(2))
    bare.cp_mixers = dict  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^0: .* not declared"):
        bind_context_parallel(bare, ranks(2))
    foreign = Model()
    foreign.tail = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match=r"^tail: a layer that mixes tokens \(MultiheadAttention\) is not declared"):
        bind_context_parallel(foreign, ranks(2))
    bind_context_parallel(foreign, Topology())  # one process: nothing to be wrong about


def test_declarations_that_do_not_fit_are_refused() -> None:
    model = Model(declared={"layers.0.self_attn": "gdn"})
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn: declared as a 'gdn' mixer, but its `cp` is CPAttention"
    ):
        bind_context_parallel(model, ranks(2))
    model = Model(declared={"layers.0.self_attn": "softmax", "layers.0": "softmax"})
    with pytest.raises(ValueError, match=r"layers\.0: declared as a 'softmax' mixer, but its `cp` is NoneType"):
        bind_context_parallel(model, ranks(2))
    model = Model(declared={"layers.9.self_attn": "softmax", "layers.0.self_attn": "softmax"})
    with pytest.raises(ValueError, match=r"layers\.9\.self_attn: declared in Model\.cp_mixers\(\), but there is no"):
        bind_context_parallel(model, ranks(2))


@pytest.mark.parametrize("key", ["sofmtax", "model.layer.0.*", "layers.7.*"])
def test_settings_for_a_layer_that_does_not_exist_are_refused(key: str) -> None:
    config = ContextParallelConfig(per_layer={key: {"algorithm": "ulysses"}})
    with pytest.raises(ValueError, match="per_layer"):
        bind_context_parallel(Model(), ranks(2), config)


def test_contradicting_settings_are_refused() -> None:
    model = Model()
    config = ContextParallelConfig(per_layer={"layers.0.*": {"algorithm": "ring"}, "*.self_attn": U})
    with pytest.raises(ValueError, match=r"^layers\.0\.self_attn: per_layer 'layers\.0\.\*' says algorithm='ring' and"):
        bind_context_parallel(model, ranks(2), config)
    assert unbound(model)


def test_a_second_runtime_is_refused_and_the_same_is_not() -> None:
    model = Model()
    model.layers.append(nn.ModuleDict({"self_attn": Mixer()}))
    config = ContextParallelConfig(algorithm="ring", schedule="async")
    first = bind_context_parallel(model, ranks(2), config)
    call = model.layers[0]["self_attn"].cp
    strategy, hooks = call.strategy, len(model.layers[0]["self_attn"]._forward_pre_hooks)
    assert bind_context_parallel(model, ranks(2), config) == first
    assert call.strategy is strategy
    assert len(model.layers[0]["self_attn"]._forward_pre_hooks) == hooks == 1
    message = r"^layers\.0\.self_attn: bound already, to ring async at cp size 2; a second runtime \({}\) would stack"
    with pytest.raises(ValueError, match=message.format("all_gather sync at cp size 2")):
        bind_context_parallel(model, ranks(2))
    with pytest.raises(ValueError, match=message.format("ring async at cp size 4")):
        bind_context_parallel(model, ranks(4), config)
    with pytest.raises(ValueError, match=message.format("local sync at cp size 1")):
        bind_context_parallel(model, Topology(), config)
    with pytest.raises(ValueError, match=message.format("ring async at cp size 2")):  # other ranks
        bind_context_parallel(model, dataclasses.replace(ranks(2), cp=Axis(2, 1)), config)
    assert resolve(model, ranks(2))[0].algorithm == "all_gather"  # asking changes nothing
    assert call.strategy is strategy


def test_one_module_under_two_paths() -> None:
    model = Model((8, 4), (8, 4))
    model.layers[1]["self_attn"] = model.layers[0]["self_attn"]
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn: bound already, to all_gather sync at cp size 2; a sec"
    ):
        bind_context_parallel(
            model, ranks(2), ContextParallelConfig(per_layer={"layers.1.*": {"algorithm": "ulysses"}})
        )
    assert unbound(model)
    assert len(bind_context_parallel(model, ranks(2))) == 2


# ---------------------------------------------------------------- layout and batch


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((1, 1), "seq_dim and head_dim are both 1"),
        ((2, 2), "seq_dim and head_dim are both 2"),
        ((0, 1), "seq_dim=0, head_dim=1 are not"),
        ((2, 3), "seq_dim=2, head_dim=3 are not"),
        ((-2, 1), "seq_dim=-2, head_dim=1 are not"),
    ],
)
def test_layouts_that_do_not_exist_are_refused(dims: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPAttention(1.0, seq_dim=dims[0], head_dim=dims[1])


def batch_worker(rank: int, size: int) -> dict[str, str]:
    mesh = cp_mesh(size)
    model = Model((6, 3))
    bind_context_parallel(model, Topology.from_mesh(mesh))
    call = model.layers[0]["self_attn"].cp
    sequence = shard_batch({"input_ids": torch.zeros(2, 16, dtype=torch.int64)}, mesh)["sequence"]
    q, k = torch.zeros(2, 6, 8, 16), torch.zeros(2, 3, 8, 16)
    return {
        "missing": refusal(call, q, k, k, None),
        "layout": refusal(call, *(x.transpose(1, 2) for x in (q, k, k)), sequence),
        "dims": refusal(call, q[0], k, k, sequence),
        "dtype": refusal(call, q, k.double(), k, sequence),
        "device": refusal(call, q, k.to("meta"), k, sequence),
        "heads": refusal(call, q[:, :5], k, k, sequence),
        "kv": refusal(call, q, k, k[:, :2], sequence),
        "width": refusal(call, q, k[..., :8], k, sequence),
    }


@pytest.mark.dist2
def test_what_does_not_fit_the_batch_is_refused() -> None:
    for said in run_distributed(batch_worker, 2):
        assert all(message.startswith("layers.0.self_attn: ") for key, message in said.items() if key != "layout")
        assert "no sequence; pass the one that shard_batch returned" in said["missing"]
        assert "the input holds [2, 6] tokens, but sequence describes [2, 8]" in said["layout"]
        assert "q must have 4 dims, got [6, 8, 16]" in said["dims"]
        assert "one dtype, got torch.float32, torch.float64, torch.float32" in said["dtype"]
        assert "one device, got cpu, meta, cpu" in said["device"]
        for key in ("heads", "kv", "width"):
            assert "do not fit together" in said[key]


def test_a_rule_that_holds_says_nothing() -> None:
    assert broken((), None) is None  # type: ignore[arg-type]
