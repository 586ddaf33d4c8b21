"""What a config may say, what binding refuses, the report, the registries, and the topology of a mesh."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from cp_core import (
    Algorithm,
    AttentionShape,
    ContextParallelConfig,
    ResolvedCP,
    Schedule,
    SequenceContext,
    Topology,
    bind_context_parallel,
    format_report,
    register_kernel,
    register_strategy,
    shard_batch,
    sync_gradients,
    unshard,
)
from cp_core.kernels import KERNELS, SdpaKernel
from cp_core.loss import linear_cross_entropy, mean_loss
from cp_core.scoring import Scoring
from cp_core.strategies import STRATEGIES
from cp_core.strategies.head_exchange import kv_repeat_factor
from cp_core.testing import run_distributed
from cp_core.topology import Axis, cp_submesh
from tests.cp_core._helpers import refusal
from tests.cp_core._models import Model, ranks


@pytest.fixture
def _registries() -> Iterator[None]:
    strategies, kernels = dict(STRATEGIES), dict(KERNELS)
    yield
    for registry, before in ((STRATEGIES, strategies), (KERNELS, kernels)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


# ---------------------------------------------------------------- config


def test_defaults_and_enums() -> None:
    config = ContextParallelConfig()
    assert (config.algorithm, config.schedule, config.kernel, config.linear_attention) == (
        "all_gather",
        "sync",
        "sdpa",
        "state_p2p",
    )
    named = ContextParallelConfig(algorithm=Algorithm.ULYSSES, schedule=Schedule.ASYNC)
    assert named == ContextParallelConfig(algorithm="ulysses", schedule="async")
    assert type(named.algorithm) is type(named.schedule) is str
    assert [str(a) for a in Algorithm] == ["all_gather", "ulysses", "hybrid", "ring", "hybrid_ring"]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ContextParallelConfig().algorithm = "ring"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "later"}, r"schedule='later' is not one of sync \| async"),
        ({"async_fallback": "warn"}, r"async_fallback='warn' is not one of error \| sync"),
        ({"kv_head_policy": True}, r"kv_head_policy=True is not one of error \| repeat"),
        ({"algorithm": 3}, "algorithm=3 must be a string"),
        ({"kernel": None}, "kernel=None must be a string"),
        ({"linear_attention": None}, "linear_attention=None must be a string"),
        ({"ulysses_degree": 0}, "ulysses_degree=0 must be a positive integer or None"),
        ({"ulysses_degree": -2}, "ulysses_degree=-2 must be"),
        ({"ulysses_degree": True}, "ulysses_degree=True must be"),
        ({"ulysses_degree": 2.0}, "ulysses_degree=2.0 must be"),
        ({"ulysses_degree": "2"}, "ulysses_degree='2' must be"),
        (
            {"per_layer": {"softmax": {"algoritm": "ulysses"}}},
            r"per_layer\['softmax'\]: unknown field 'algoritm'; legal: algorithm.*did you mean 'algorithm'\?",
        ),
        ({"per_layer": {"a.*": {"per_layer": {}}}}, "unknown field 'per_layer'"),
    ],
)
def test_illegal_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallelConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"per_layer": {"softmax": {"schedule": "later"}}},
        {"load_balance": "no"},
        {"per_layer": {"a": {"ulysses_degree": 0}}},
    ],
)
def test_illegal_values_are_refused_when_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"schedule='later'|load_balance='no'|ulysses_degree=0"):
        ContextParallelConfig(**fields)


def test_path_beats_kind_beats_top_level() -> None:
    config = ContextParallelConfig(
        algorithm="ring",
        kernel="flex",
        per_layer={
            "model.layers.3.*": {"algorithm": "ulysses"},
            "softmax": {"algorithm": "hybrid", "ulysses_degree": 2},
            "mla": {"kernel": "flash"},
            "*.self_attn": {"kernel": "sdpa"},
        },
    )

    def chosen(path: str, kind: str) -> tuple[str, int | None, str]:
        layer = config.for_layer(path, kind)
        assert not layer.per_layer
        return layer.algorithm, layer.ulysses_degree, layer.kernel

    assert chosen("model.layers.3.self_attn", "softmax") == ("ulysses", 2, "sdpa")
    assert chosen("model.layers.3.mixer", "softmax") == ("ulysses", 2, "flex")
    assert chosen("model.layers.30.mixer", "softmax") == ("hybrid", 2, "flex")
    assert chosen("model.layers.0.mixer", "mla") == ("ring", None, "flash")
    assert chosen("model.layers.3.self_attn", "mla") == ("ulysses", None, "sdpa")
    assert chosen("model.layers.0.mixer", "gdn") == ("state_p2p", None, "flex")  # linear_attention is its default
    assert chosen("model.layers.3.mixer", "kda") == ("ulysses", None, "flex")
    by_kind = ContextParallelConfig(linear_attention="state_gather", per_layer={"gdn": {"algorithm": "ulysses"}})
    assert by_kind.for_layer("x", "gdn").algorithm == "ulysses"
    assert by_kind.for_layer("x", "kda").algorithm == "state_gather"


def test_patterns_that_disagree_are_refused() -> None:
    patterns = {"a.*": {"algorithm": "ulysses"}, "*.b": {"algorithm": "ring"}}
    config = ContextParallelConfig(per_layer=patterns)
    message = r"a\.b: per_layer 'a\.\*' says algorithm='ulysses' and '\*\.b' says algorithm='ring'; make the patterns"
    with pytest.raises(ValueError, match=message):
        config.for_layer("a.b", "softmax")
    assert config.for_layer("a.c", "softmax").algorithm == "ulysses"
    agreeing = ContextParallelConfig(
        per_layer={"a.*": {"algorithm": "ring"}, "*.b": {"algorithm": "ring", "kernel": "k"}}
    )
    assert agreeing.for_layer("a.b", "softmax").kernel == "k"


# ---------------------------------------------------------------- bind


def test_one_process_binds_local_whatever_the_config_says() -> None:
    for config in (
        None,
        ContextParallelConfig(algorithm="hybrid", ulysses_degree=3),
        ContextParallelConfig(schedule="async"),
    ):
        model = Model((7, 7), (8, 2))
        records = bind_context_parallel(model, Topology(), config)
        assert [(r.algorithm, r.schedule, r.cp_size, r.ulysses_degree, r.sequence_degree) for r in records] == [
            ("local", "sync", 1, 1, 1)
        ] * 2


@pytest.mark.parametrize(
    ("fields", "degrees"),
    [
        ({"algorithm": "all_gather", "load_balance": True}, (1, 4)),
        ({"algorithm": "ulysses"}, (4, 1)),
        ({"algorithm": "ring", "load_balance": True, "schedule": "async"}, (1, 4)),
        ({"algorithm": "hybrid", "ulysses_degree": 2, "schedule": "async"}, (2, 2)),
        ({"algorithm": "hybrid_ring", "ulysses_degree": 2}, (2, 2)),
    ],
)
def test_bound_records(fields: dict[str, Any], degrees: tuple[int, int]) -> None:
    model = Model((8, 4), (8, 8))
    records = bind_context_parallel(model, ranks(4), ContextParallelConfig(**fields))
    assert records == tuple(
        ResolvedCP(
            path=f"layers.{i}.self_attn",
            kind="softmax",
            algorithm=fields["algorithm"],
            schedule=fields.get("schedule", "sync"),
            kernel="sdpa",
            cp_size=4,
            ulysses_degree=degrees[0],
            sequence_degree=degrees[1],
            handoffs=("q", "k", "v"),
            shape=AttentionShape(8, kv_heads, 16, 16),
            itemsize=4,
            causal=True,
            load_balance=fields.get("load_balance", False),
            fallback="",
            adapter="native",
        )
        for i, kv_heads in enumerate((4, 8))
    )
    call = model.layers[0]["self_attn"].cp
    assert (call.cp_size, call.path) == (4, "layers.0.self_attn")
    assert call.strategy is records[0].strategy
    assert (call.ledger is not None) == (records[0].schedule == "async")


def test_default_config_is_all_gather() -> None:
    assert bind_context_parallel(Model(), ranks(2))[0].algorithm == "all_gather"


def test_repeated_heads_bind() -> None:
    for cp, heads, factor in ((4, (8, 2), 2), (4, (8, 1), 4), (4, (12, 3), 4), (2, (8, 1), 2), (4, (8, 4), 1)):
        model = Model(heads)
        config = ContextParallelConfig(algorithm="ulysses", kv_head_policy="repeat", ulysses_degree=cp)
        bind_context_parallel(model, ranks(cp), config)
        assert model.layers[0]["self_attn"].cp.strategy.heads.kv_repeat == factor


def test_repeat_factor_is_the_smallest() -> None:
    for q_heads in range(1, 33):
        for kv_heads in (n for n in range(1, q_heads + 1) if q_heads % n == 0):
            for degree in range(1, 17):
                legal = [
                    f
                    for f in range(1, 200)
                    if f * kv_heads % degree == 0 and f * kv_heads <= q_heads and q_heads % (f * kv_heads) == 0
                ]
                assert kv_repeat_factor(q_heads, kv_heads, degree) == (min(legal) if legal else None)
    assert kv_repeat_factor(64, 8, 16) == 2
    assert math.lcm(8, 16) // 8 == 2


# ---------------------------------------------------------------- report


def test_report_text(caplog: pytest.LogCaptureFixture) -> None:
    model = Model((8, 4), (8, 4), (8, 4), (8, 8))
    config = ContextParallelConfig(per_layer={"layers.3.*": {"algorithm": "ulysses"}})
    with caplog.at_level(logging.INFO, logger="cp_core"):
        records = bind_context_parallel(model, ranks(4), config)
    lines = format_report(records).split("\n")
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "layer kind by strategy schedule balance kernel cp U x C handoffs fallback bytes/token work",
        "layers.0.self_attn .. layers.2.self_attn (3 layers) softmax native all_gather sync - sdpa 4 1 x 4 q k v - "
        "384 + 384 1.75",
        "layers.3.self_attn softmax native ulysses sync - sdpa 4 4 x 1 q k v - 384 + 384 1.00",
    ]
    assert lines[3].startswith("bytes/token: received")
    assert len(lines) == 4
    columns = [line.index(word) for line, word in zip(lines, ("strategy", "all_gather", "ulysses"), strict=False)]
    assert len(set(columns)) == 1
    assert [record.getMessage().partition("\n")[2] for record in caplog.records] == ["\n".join(lines)]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cp_core"):  # every rank but the first is silent
        bind_context_parallel(Model(), Topology(cp=Axis(4, 1), dp_cp=Axis(4, 1)))
    assert not caplog.records


def test_report_of_nothing_and_of_a_fallback(caplog: pytest.LogCaptureFixture) -> None:
    assert len(format_report([]).split("\n")) == 2
    model = Model((8, 4), (8, 4), (8, 4))
    model.layers[1]["self_attn"].handoffs[1] = nn.Identity()
    model.layers[2]["self_attn"].handoffs[1] = nn.Identity()
    config = ContextParallelConfig(algorithm="ring", schedule="async", async_fallback="sync")
    with caplog.at_level(logging.WARNING, logger="cp_core"):
        records = bind_context_parallel(model, ranks(2), config)
    assert [record.schedule for record in records] == ["async", "sync", "sync"]
    assert [record.fallback == "" for record in records] == [True, False, False]
    lines = format_report(records).split("\n")
    assert len(lines) == 4
    assert "layers.1.self_attn .. layers.2.self_attn (2 layers)" in lines[2]
    why = "schedule 'async' needs one Handoff each for q, k and v in the mixer, found: ('q', 'v')"
    assert why in lines[2]
    assert [r.getMessage() for r in caplog.records] == [f"schedule 'async' replaced by 'sync': {why}"]  # once


def test_a_strategy_that_does_not_state_its_cost() -> None:
    record = bind_context_parallel(Model(), ranks(2))[0]
    silent = dataclasses.replace(record, strategy=Shifted(None))
    assert silent.costs((), 4) is None
    assert "not stated" in format_report([silent])


# ---------------------------------------------------------------- registries


class Shifted:
    """A strategy and kernel from outside: returns v plus what the kernel says."""

    ulysses_degree = 1

    def __init__(self, facts: Any) -> None:
        self.facts = facts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Any, sequence: Any, scoring: Scoring) -> Tensor:
        return q + kernel.number


class NumberKernel(SdpaKernel):
    name = "number"
    number = 41.0


@pytest.mark.usefixtures("_registries")
def test_strategies_and_kernels_from_outside() -> None:
    register_strategy("softmax", "shifted", lambda config, topology, facts: Shifted(facts))
    register_kernel("number", NumberKernel)
    model = Model()
    records = bind_context_parallel(model, ranks(2), ContextParallelConfig(algorithm="shifted", kernel="number"))
    assert (records[0].algorithm, records[0].kernel, records[0].sequence_degree) == ("shifted", "number", 2)
    sequence = SequenceContext(
        position_ids=torch.zeros(1, 2),
        valid=torch.ones(1, 2),
        rows=(),
        ranges=((0, 2), (2, 4)),
        rank=0,
        length=4,
        max_position=3,
    )
    q = torch.zeros(1, 8, 2, 4)
    call = model.layers[0]["self_attn"].cp
    assert torch.equal(call(q, q, q, sequence), q + 41)
    facts = call.strategy.facts
    assert (facts.path, facts.kind, facts.shape) == ("layers.0.self_attn", "softmax", AttentionShape(8, 4, 16, 16))
    with pytest.raises(ValueError, match="strategy 'shifted' for 'softmax' layers is registered already"):
        register_strategy("softmax", "shifted", lambda *_: Shifted(None))
    register_strategy("mla", "shifted", lambda *_: Shifted(None))  # another kind is another entry
    with pytest.raises(ValueError, match="kernel 'number' is registered already"):
        register_kernel("number", NumberKernel)
    with pytest.raises(ValueError, match=r"available: all_gather \| .* \| hybrid_ring \| shifted"):
        bind_context_parallel(Model(), ranks(2), ContextParallelConfig(algorithm="shift"))


def test_registries_hold_what_is_promised() -> None:
    names = ("all_gather", "hybrid", "hybrid_ring", "local", "ring", "ulysses")
    assert sorted(STRATEGIES) == [("softmax", name) for name in names]
    assert sorted(KERNELS) == ["flash", "flex", "npu_flash", "sdpa"]


# ---------------------------------------------------------------- topology


def test_no_mesh_is_one_process() -> None:
    topology = Topology.from_mesh(None)
    assert (topology.cp, topology.dp, topology.dp_cp, topology.mesh, topology.fsdp_mesh) == (
        Axis(),
        Axis(),
        Axis(),
        None,
        None,
    )


def axes(topology: Topology) -> dict[str, tuple[int, int, list[int] | None]]:
    """``{axis: (size, rank, global ranks)}``."""
    return {
        name: (axis.size, axis.rank, dist.get_process_group_ranks(axis.group) if axis.group is not None else None)
        for name, axis in (("cp", topology.cp), ("dp", topology.dp), ("dp_cp", topology.dp_cp))
    }


def topology_worker(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def mesh(shape: tuple[int, ...], *names: str) -> Any:
        return init_device_mesh("cpu", shape, mesh_dim_names=names or None)

    for shape, names in (
        ((4,), ("cp",)),
        ((4,), ("dp_shard",)),
        ((4,), ("dp_replicate",)),
        ((2, 2), ("dp_shard", "cp")),
        ((2, 2), ("dp_replicate", "cp")),
        ((2, 2), ("dp_replicate", "dp_shard")),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "cp")),
        ((1, 2, 2), ("dp_replicate", "dp_shard", "cp")),
        ((1, 1, 2, 2, 1), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        ((2, 2, 1), ("dp_replicate", "dp_shard", "cp")),
    ):
        one = mesh(shape, *names)
        topology = Topology.from_mesh(one)
        fsdp = topology.fsdp_mesh
        found[" ".join(f"{n}{s}" for n, s in zip(names, shape, strict=True))] = (
            axes(topology),
            (tuple(fsdp.mesh.shape), fsdp.mesh.flatten().tolist()) if fsdp is not None else None,
        )
        again = Topology.from_mesh(one)
        assert axes(again) == axes(topology)
        assert again.dp_cp.group is topology.dp_cp.group
    found["refused"] = [
        refusal(Topology.from_mesh, mesh((4,))),
        refusal(Topology.from_mesh, mesh((4,), "context")),
        refusal(Topology.from_mesh, mesh((2, 2), "dp", "cp")),
        refusal(Topology.from_mesh, mesh((2, 2), "cp", "tp")),
        refusal(Topology.from_mesh, mesh((2, 2), "pp", "cp")),
        refusal(cp_submesh, mesh((2, 2))),
        refusal(cp_submesh, mesh((2, 2), "rows", "columns")),
        refusal(Topology.from_mesh, mesh((2, 2), "cp", "dp_shard")),
    ]
    for whole in (mesh((4,), "cp"), mesh((4,), "context"), mesh((4,)), mesh((1, 4), "dp_shard", "cp")):
        assert cp_submesh(whole).size() == 4
    for none in (
        mesh((4,), "dp_shard"),
        mesh((4, 1), "dp_shard", "cp"),
        mesh((2, 2), "dp_replicate", "dp_shard"),
        None,
    ):
        assert cp_submesh(none) is None
    return found


@pytest.mark.dist4
def test_axes_of_meshes() -> None:
    results = run_distributed(topology_worker, 4)
    for rank, found in enumerate(results):
        inner, outer = rank % 2, rank // 2  # cp is the inner axis
        pair, column = [2 * outer, 2 * outer + 1], [inner, inner + 2]
        one, four = (1, 0, None), (4, rank, [0, 1, 2, 3])
        assert found["cp4"] == ({"cp": four, "dp": one, "dp_cp": four}, ((4,), [0, 1, 2, 3]))
        assert found["dp_shard4"] == ({"cp": one, "dp": four, "dp_cp": four}, ((4,), [0, 1, 2, 3]))
        assert found["dp_replicate4"][0] == {"cp": one, "dp": four, "dp_cp": four}
        two = {"cp": (2, inner, pair), "dp": (2, outer, column), "dp_cp": four}
        assert found["dp_shard2 cp2"] == (two, ((4,), [0, 1, 2, 3]))
        assert found["dp_replicate2 cp2"] == (two, ((2, 2), [0, 1, 2, 3]))
        assert found["dp_replicate2 dp_shard2"] == ({"cp": one, "dp": four, "dp_cp": four}, ((2, 2), [0, 1, 2, 3]))
        assert found["dp_replicate2 dp_shard1 cp2"] == (two, ((2, 2), [0, 1, 2, 3]))
        assert found["dp_replicate1 dp_shard2 cp2"] == (two, ((4,), [0, 1, 2, 3]))
        assert found["pp1 dp_replicate1 dp_shard2 cp2 tp1"] == (two, ((4,), [0, 1, 2, 3]))
        assert found["dp_replicate2 dp_shard2 cp1"] == ({"cp": one, "dp": four, "dp_cp": four}, ((2, 2), [0, 1, 2, 3]))
        unnamed, unknown, dp, tp, pp, two_unnamed, two_unknown, turned = found["refused"]
        assert "the mesh needs axis names" in unnamed
        assert "mesh axis 'context' is not one of pp, dp_replicate, dp_shard, cp, tp" in unknown
        assert "for data parallelism write 'dp_shard' or 'dp_replicate'" in dp
        assert "mesh axis 'tp' of size 2: not available in this version" in tp
        assert "mesh axis 'pp' of size 2: not available in this version" in pp
        assert "the mesh needs axis names" in two_unnamed
        assert "mesh axis 'rows' is not one of" in two_unknown
        assert "mesh axes cp, dp_shard stand in another order than pp, dp_replicate, dp_shard, cp, tp" in turned


def groups_worker(rank: int, size: int) -> tuple[int, int]:
    """Groups are made when the topology is; never by a batch, a forward, a backward or a gradient sync."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    topology = Topology.from_mesh(mesh)
    model = Model((8, 4), (8, 4))
    config = ContextParallelConfig(per_layer={"layers.1.*": {"algorithm": "ulysses"}})
    before = len(distributed_c10d._world.pg_map)
    bind_context_parallel(model, topology, config)
    head = nn.Parameter(torch.randn(11, 8 * 4))
    model.register_parameter("head", head)
    for length in (8, 13):
        ids = torch.arange(length).unsqueeze(0) % 11
        local = shard_batch({"input_ids": ids, "labels": ids}, mesh, compare=True)
        sequence = local["sequence"]
        tokens = local["input_ids"].shape[1]
        x = torch.randn(1, 8, tokens, 4, requires_grad=True)
        kv = torch.randn(1, 4, tokens, 4, requires_grad=True)
        for layer in model.layers:
            x = layer["self_attn"].cp(x, kv, kv, sequence)
        unshard(x, 2, sequence)
        hidden = x.transpose(1, 2).flatten(2)
        mean_loss(*linear_cross_entropy(hidden, head, local["shift_labels"]), topology).backward()
        sync_gradients(model, mesh)
        Topology.from_mesh(mesh)
    return before, len(distributed_c10d._world.pg_map)


@pytest.mark.dist4
def test_no_groups_are_made_in_a_step() -> None:
    for before, after in run_distributed(groups_worker, 4):
        assert before == after > 0
