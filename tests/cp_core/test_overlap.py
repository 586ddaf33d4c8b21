"""Where exchanges run, read from profiler traces: async beside the projections, forward and backward; sync does not.

gloo's collectives appear on worker threads with their true start and end; its point-to-point windows appear on the main
thread, from launch to wait. Order is asserted in every step. That two spans overlap is asserted of some step, for a
busy machine may wake a worker late; that sync never overlaps is asserted of all. Nothing depends on how long it takes.
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
from cp_core.device import device_count
from cp_core.testing import run_distributed
from tests.cp_core._helpers import cp_mesh

HIDDEN, HEADS, WIDTH, LOCAL, STEPS = 512, 16, 64, 1024, 5
LAUNCHES = {"all_gather": "c10d::_allgather_base_", "ulysses": "c10d::alltoall_base_", "hybrid": "c10d::alltoall_base_"}
SETTINGS = {
    2: [{"algorithm": "all_gather"}, {"algorithm": "ulysses"}, {"algorithm": "ring"}],
    4: [{"algorithm": "hybrid", "ulysses_degree": 2}],
}


class Span(NamedTuple):
    name: str
    start: float
    end: float
    main: bool

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
    assert step.launches[0].start >= step.one("project q").end
    assert step.transfers[0].start >= step.one("project q").end
    assert max(span.end for span in step.reverse_transfers) <= step.gradient("q").start
    assert overlaps(step) == (False, False)


@pytest.mark.dist4
@pytest.mark.parametrize("size", [2, 4])
def test_async_overlaps_and_sync_does_not(size: int) -> None:
    settings = [{**fields, "schedule": schedule} for fields in SETTINGS[size] for schedule in ("sync", "async")]
    for per_setting in run_distributed(trace_worker, size, settings, timeout=180):
        for fields, traces in zip(settings, per_setting, strict=True):
            steps = [Step(spans, fields["algorithm"]) for spans in traces]
            for step in steps:
                if fields["schedule"] == "async":
                    check_async(step, fields["algorithm"] == "ring")
                else:
                    check_sync(step)
            if fields["schedule"] == "async":
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
