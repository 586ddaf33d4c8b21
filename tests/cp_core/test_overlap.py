"""Where exchanges run, read from profiler traces: async beside the projections, forward and backward; sync does not.

gloo's collectives appear on worker threads with their true start and end; its point-to-point windows appear on the main
thread, from launch to wait. Waits leave no event, so the workers mark them here. Order is asserted in every step. That
two spans overlap is asserted of some step of some rank, for a busy machine may wake a worker late; that sync never
overlaps is asserted of all. Nothing depends on how long it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

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
from cp_core.collectives import Transfer
from cp_core.device import device_count
from cp_core.testing import run_distributed
from tests.cp_core._helpers import cp_mesh

HIDDEN, HEADS, WIDTH, LOCAL, STEPS = 512, 16, 64, 1024, 5
LAUNCHES = {"all_gather": "c10d::_allgather_base_", "ulysses": "c10d::alltoall_base_", "hybrid": "c10d::alltoall_base_"}
SETTINGS = {
    2: [
        {"algorithm": "all_gather"},
        {"algorithm": "ulysses"},
        {"algorithm": "ring"},
        {"algorithm": "ring", "load_balance": True},
    ],
    4: [{"algorithm": "hybrid", "ulysses_degree": 2}],
}


class Span(NamedTuple):
    name: str
    start: float
    end: float
    main: bool

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


class Mark(torch.autograd.Function):
    """An identity whose backward leaves a span, to see where in backward a projection begins and ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with record_function(f"gradient {ctx.name}"):
            return grad.view_as(grad), None


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "vkq":
            self.add_module(f"{name}_proj", nn.Linear(HIDDEN, HEADS * WIDTH, bias=False))
            self.add_module(f"{name}_handoff", Handoff(name))
        self.cp = CPAttention(0.1)

    def cp_mixers(self) -> dict[str, str]:
        return {"": "softmax"}

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(HEADS, HEADS, WIDTH, WIDTH)

    def hand_off(self, name: str, x: Tensor, sequence: SequenceContext) -> Any:
        with record_function(f"project {name}"):
            x = Mark.apply(self.get_submodule(f"{name}_proj")(Mark.apply(x, f"behind {name}")), f"before {name}")
        return self.get_submodule(f"{name}_handoff")(x.unflatten(-1, (-1, WIDTH)).transpose(1, 2), sequence)

    def forward(self, x: Tensor, sequence: SequenceContext) -> Tensor:
        v, k, q = (self.hand_off(name, x, sequence) for name in "vkq")
        with record_function("attention"):
            return self.cp(q, k, v, sequence)  # type: ignore[no-any-return]


def trace_worker(rank: int, size: int, all_fields: list[dict[str, Any]]) -> list[list[list[Span]]]:
    """Per setting and step: the spans of one forward and backward, by start."""
    mesh = cp_mesh(size)
    mark_waits()
    found = []
    for fields in all_fields:
        mixer = Mixer()
        bind_context_parallel(mixer, Topology.from_mesh(mesh), ContextParallelConfig(**fields))
        documents = ((torch.arange(LOCAL * size) + 64) // 128).unsqueeze(0)  # short, across shards: attention is cheap
        batch = {"input_ids": torch.zeros_like(documents), "document_ids": documents}
        sequence = shard_batch(batch, mesh)["sequence"]
        x = torch.randn(1, LOCAL, HIDDEN, requires_grad=True)
        mixer(x, sequence).sum().backward()
        steps = []
        for _ in range(STEPS if fields["schedule"] == "async" else 2):
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                with record_function("forward"):
                    out = mixer(x, sequence)
                with record_function("backward"):
                    out.sum().backward()
            steps.append(spans_of(profiler))
        found.append(steps)
    return found


def mark_waits() -> None:
    """Every wait for a transfer leaves a span from now on; in a worker, which ends with its job."""
    wait = Transfer.wait

    def marked(self: Transfer) -> Tensor:
        with record_function("wait"):
            return wait(self)

    Transfer.wait = marked  # type: ignore[method-assign]


def spans_of(profiler: Any) -> list[Span]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    main = next(event["tid"] for event in events if event["name"] == "forward")
    wanted = (
        "gloo:",
        "c10d::",
        "project",
        "attention",
        "gradient ",
        "forward",
        "backward",
        "aten::_scaled_dot_product",
        "wait",
    )
    spans = [
        Span(event["name"], event["ts"], event["ts"] + event["dur"], event["tid"] == main)
        for event in events
        if event["name"].startswith(wanted)
    ]
    return sorted(spans, key=lambda span: span.start)


class Step:
    """One step's spans, by what they are."""

    def __init__(self, spans: list[Span], fields: dict[str, Any]) -> None:
        self.spans = spans
        algorithm, swap = fields["algorithm"], fields.get("load_balance", False)
        self.turn = self.one("backward").start
        p2p = algorithm == "ring"
        names = ("c10d::send", "c10d::recv_") if p2p else (LAUNCHES[algorithm],)
        back = ("c10d::_reduce_scatter_base_",) if algorithm == "all_gather" else names
        traced = (
            ("gloo:send", "gloo:recv")
            if p2p
            else ("gloo:all_gather",)
            if algorithm == "all_gather"
            else ("gloo:all_to_all",)
        )
        traced_back = ("gloo:all_reduce",) if algorithm == "all_gather" else traced  # gloo's reduce-scatter
        # a swap sends and receives at once, v, k and q each: one window stands for the two
        stride = 2 if swap else 1
        self.q_travels = swap or algorithm in ("ulysses", "hybrid")
        count = 3 if self.q_travels else 2
        self.launches = self.named(names, forward=True)[: stride * count : stride]
        self.transfers = self.named(traced, forward=True)[: stride * count : stride]
        self.reverse_launches = self.named(back, forward=False)[-stride * count :: stride]
        # Windows of launches in order; worker threads may start two in any order, so collectives stand by their end
        reverse = self.named(traced_back, forward=False)[-stride * count :: stride]
        # in backward the last in is the first out: gather and ring send k, then v; heads go q, k, v
        self.reverse_order = "qkv" if self.q_travels else "kv"
        if swap:  # the gradient of q leaves last, after the ring's own
            reverse = [reverse[2], *reverse[:2]]
        self.reverse_transfers = reverse if p2p else sorted(reverse, key=lambda span: span.end)
        self.waits = self.named(("wait",), forward=True)
        self.reverse_waits = self.named(("wait",), forward=False)
        self.kernels = [s for s in spans if s.name.startswith("aten::_scaled") and s.start < self.turn]

    def one(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def named(self, names: tuple[str, ...], forward: bool) -> list[Span]:
        return [span for span in self.spans if span.name in names and (span.start < self.turn) == forward]

    def waits_between(self, first: str, second: str) -> int:
        """How often main waited after one projection's gradient and before the next one's."""
        start, stop = self.gradient(first).end, self.gradient(second).start
        return sum(start <= wait.start and wait.end <= stop for wait in self.reverse_waits)

    def gradient(self, name: str) -> Span:
        """From where the projection's gradient begins to where it ends."""
        before, behind = self.one(f"gradient before {name}"), self.one(f"gradient behind {name}")
        return Span(name, before.start, behind.end, True)


def check_async(step: Step, p2p: bool) -> None:
    """Launched at the handoffs, awaited before attention; back: launched before, awaited before the projection."""
    project = {name: step.one(f"project {name}") for name in "vkq"}
    launch = dict(zip("vkq", step.launches, strict=False))
    assert project["v"].end <= launch["v"].start
    assert launch["v"].end <= project["k"].start
    assert project["k"].end <= launch["k"].start
    assert launch["k"].end <= project["q"].start
    attention = step.one("attention")
    assert project["q"].end <= attention.start
    assert all(attention.start < wait.start for wait in step.waits)
    assert len(step.waits) >= len(step.launches)
    if step.q_travels:
        assert project["q"].end <= launch["q"].start
        assert launch["q"].end <= attention.start
    if p2p:  # a window ends at its wait: after the projections, in attention
        assert all(attention.start < window.end < attention.end for window in step.transfers)
    else:  # all has arrived when attention computes
        assert all(not span.main for span in (*step.transfers, *step.reverse_transfers))
        assert max(span.end for span in step.transfers) <= step.kernels[0].start
    assert step.reverse_launches[-1].end <= step.one("gradient before q").start
    assert step.waits_between("q", "k") == step.waits_between("k", "v") == 1
    for name, transfer in zip(step.reverse_order, step.reverse_transfers, strict=True):
        assert transfer.end <= step.gradient(name).start, name
    if not p2p:  # of what was launched only q's is awaited before q's gradient
        launched, begins = step.reverse_launches[-1].end, step.gradient("q").start
        assert sum(launched <= wait.start < begins for wait in step.reverse_waits) == int(step.q_travels)
    else:  # it stays open over the projection before
        *_, of_k, of_v = step.reverse_transfers
        assert of_k.end >= step.gradient("q").end
        assert of_v.end >= step.gradient("k").end


def overlaps(step: Step) -> tuple[bool, bool]:
    """Whether v's or k's exchange ran beside a later projection; theirs on the way back beside an earlier gradient.

    Either of the two, for the other may be through before: in backward all are launched together.
    """
    k, q = step.one("project k"), step.one("project q")
    there = dict(zip("vkq", step.transfers, strict=False))
    back = dict(zip(step.reverse_order, step.reverse_transfers, strict=True))
    gradient_q, gradient_k = step.gradient("q"), step.gradient("k")
    return (
        there["v"].overlaps(k) or there["v"].overlaps(q) or there["k"].overlaps(q),
        back["k"].overlaps(gradient_q) or back["v"].overlaps(gradient_q) or back["v"].overlaps(gradient_k),
    )


def check_sync(step: Step) -> None:
    """The negative control: nothing is launched before the projections end, or on its way when gradients start."""
    assert step.waits_between("q", "k") == step.waits_between("k", "v") == 0
    assert all(wait.end <= step.gradient("q").start for wait in step.reverse_waits)
    assert step.launches[0].start >= step.one("project q").end
    assert step.transfers[0].start >= step.one("project q").end
    assert max(span.end for span in step.reverse_transfers) <= step.gradient("q").start
    assert overlaps(step) == (False, False)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)])
def test_async_overlaps_and_sync_does_not(size: int) -> None:
    settings = [{**fields, "schedule": schedule} for fields in SETTINGS[size] for schedule in ("sync", "async")]
    per_rank = run_distributed(trace_worker, size, settings, timeout=180)
    for index, fields in enumerate(settings):
        steps = [Step(spans, fields) for per_setting in per_rank for spans in per_setting[index]]
        if fields["schedule"] == "sync":
            for step in steps:
                check_sync(step)
            continue
        for step in steps:
            check_async(step, fields["algorithm"] == "ring")
        seen = [overlaps(step) for step in steps]
        assert any(forward for forward, _ in seen), (fields, seen)
        assert any(backward for _, backward in seen), (fields, seen)


@pytest.mark.gpu
@pytest.mark.skipif(device_count() < 2, reason="needs two accelerators")
def test_hidden_share_on_accelerators(tmp_path: Path) -> None:
    """Never run here: at least 70 % of all_gather's waiting is hidden, at sizes where the projections take longer."""
    result = tmp_path / "result.json"
    script = Path(__file__).parents[2] / "scripts" / "bench_cp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    sizes = ["--tokens", "65536", "--hidden", "8192", "--heads", "64", "--kv-heads", "8", "--dim", "128"]
    subprocess.run([*command, *sizes, "--json-file", str(result)], check=True, timeout=600)
    found = json.loads(result.read_text())
    sync, overlapped = (found[f"all_gather + head-tail, {schedule}"]["waits"] for schedule in ("sync", "async"))
    assert 1 - overlapped / sync >= 0.7
