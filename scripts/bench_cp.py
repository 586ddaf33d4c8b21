"""Every strategy beside one process, in one run: time, waiting, bytes, memory. One attention layer, fp32.

    python scripts/bench_cp.py                                  2 processes on this machine's CPU
    python scripts/bench_cp.py --cp 4 --tokens 8192
    torchrun --nproc-per-node=4 scripts/bench_cp.py             on this machine's accelerators

Rounds go through all settings in turn, so that all see the same machine; figures are medians over rounds, of the
slowest rank. One process (one thread, the whole sequence) runs in the same rounds while the others are idle. "hidden"
is the share of the sync schedule's waiting that async does without: q, the output and their gradients have little to
hide behind, v and k have the projections that come after them.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository need not be installed

from cp_core import (
    AttentionShape,
    ContextParallelConfig,
    CPAttention,
    Handoff,
    SequenceContext,
    Topology,
    bind_context_parallel,
    count_communication,
    shard_batch,
)
from cp_core.counters import measure_waits
from cp_core.device import backend_for, device_type, local_device
from cp_core.testing import run_distributed

ALONE = "one process"
_LEAST_WAIT = 1e-3  # seconds; below, a share of it would be noise


class Sizes(NamedTuple):
    """B = 1 row; H hidden, N query heads, K kv heads, D head dim."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    rounds: int


class Layer(nn.Module):
    """Projections, attention, output: what a decoder layer has of attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        for name, heads in (("v", sizes.kv_heads), ("k", sizes.kv_heads), ("q", sizes.heads)):
            self.add_module(f"{name}_proj", nn.Linear(sizes.hidden, heads * sizes.dim, bias=False))
            self.add_module(f"{name}_handoff", Handoff(name))
        self.o_proj = nn.Linear(sizes.heads * sizes.dim, sizes.hidden, bias=False)
        self.cp = CPAttention(sizes.dim**-0.5)

    def cp_mixers(self) -> dict[str, str]:
        return {"": "softmax"}

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(self.sizes.heads, self.sizes.kv_heads, self.sizes.dim, self.sizes.dim)

    def forward(self, x: Tensor, sequence: SequenceContext) -> Tensor:
        v, k, q = (self.hand_off(name, x, sequence) for name in "vkq")
        return self.o_proj(self.cp(q, k, v, sequence).transpose(1, 2).flatten(2))

    def hand_off(self, name: str, x: Tensor, sequence: SequenceContext) -> Any:
        x = self.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, self.sizes.dim)).transpose(1, 2)
        return self.get_submodule(f"{name}_handoff")(x, sequence)


class Case(NamedTuple):
    """One line of the table: a forward and backward to call, and its layer."""

    name: str
    step: Callable[[], None]


def settings(cp: int) -> dict[str, dict[str, Any]]:
    """Every strategy that ``cp`` ranks can run, by name."""
    inner = next((d for d in range(2, cp) if cp % d == 0), None)
    found: dict[str, dict[str, Any]] = {
        "all_gather": {"algorithm": "all_gather"},
        "all_gather + head-tail": {"algorithm": "all_gather", "load_balance": True},
        "ring": {"algorithm": "ring"},
        "ring + head-tail": {"algorithm": "ring", "load_balance": True},
        "ulysses": {"algorithm": "ulysses", "kv_head_policy": "repeat"},
    }
    if inner is not None:
        split = {"ulysses_degree": inner, "kv_head_policy": "repeat"}
        found |= {name: {"algorithm": name, **split} for name in ("hybrid", "hybrid_ring")}
    return {
        f"{name}, {schedule}": {**fields, "schedule": schedule}
        for name, fields in found.items()
        for schedule in ("sync", "async")
    }


def step_of(layer: Layer, x: Tensor, sequence: SequenceContext) -> Callable[[], None]:
    """Forward and backward of one layer."""

    def step() -> None:
        layer(x, sequence).square().mean().backward()
        layer.zero_grad()
        x.grad = None

    return step


def measure(rank: int, size: int, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Collective: times, waits, bytes and memory of every case, as this rank saw them."""
    device = local_device()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("cp",))
    ids = torch.zeros(1, sizes.tokens, dtype=torch.int64)
    sequence = shard_batch({"input_ids": ids}, mesh, device=device)["sequence"]
    whole = shard_batch({"input_ids": ids}, device=device)["sequence"]
    hidden = torch.randn(1, sizes.tokens, sizes.hidden, generator=torch.Generator().manual_seed(0)).to(device)
    mine = hidden[:, slice(*sequence.ranges[rank])].clone().requires_grad_()
    cases = [Case(ALONE, step_of(Layer(sizes).to(device), hidden.clone().requires_grad_(), whole))]
    for name, fields in settings(size).items():
        layer = Layer(sizes).to(device)
        try:
            bind_context_parallel(layer, Topology.from_mesh(mesh), ContextParallelConfig(**fields))
        except ValueError as error:  # the same on every rank
            if rank == 0:
                print(f"left out: {name}{error}", file=sys.stderr)
            continue
        cases.append(Case(name, step_of(layer, mine, sequence)))
    cases += attention_alone(sizes, mesh, sequence, rank, size, device)

    def run(case: Case) -> float:
        """Seconds of one step, started together; the others stand still while one process runs alone."""
        dist.barrier()
        started = time.perf_counter()
        if case.name != ALONE or rank == 0:
            case.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    times: dict[str, list[float]] = {case.name: [] for case in cases}
    waits: dict[str, list[float]] = {case.name: [] for case in cases}
    for index in range(sizes.rounds + 1):
        for case in cases:
            with measure_waits() as meter:
                seconds = run(case)
            if index:  # the first round warms up
                times[case.name].append(seconds)
                waits[case.name].append(meter.seconds)
    found = {}
    for case in cases:
        with count_communication() as seen, memory(device) as held:
            run(case)
        found[case.name] = {
            "seconds": statistics.median(times[case.name]),
            "waits": statistics.median(waits[case.name]),
            "bytes": float(seen.bytes),
            "memory": float(held[0]),
        }
    return found


def attention_alone(
    sizes: Sizes, mesh: Any, sequence: SequenceContext, rank: int, size: int, device: torch.device
) -> list[Case]:
    """Balanced attention, swap and gather included, and what the slowest unbalanced rank does with a dense mask."""
    generator = torch.Generator().manual_seed(1)
    local = sizes.tokens // size
    q, k, v = (
        torch.randn(1, heads, length, sizes.dim, generator=generator).to(device).requires_grad_()
        for heads, length in ((sizes.heads, local), (sizes.kv_heads, sizes.tokens), (sizes.kv_heads, sizes.tokens))
    )
    mask = torch.ones(local, sizes.tokens, dtype=torch.bool, device=device).tril(sizes.tokens - local)
    layer = Layer(sizes)
    config = ContextParallelConfig(load_balance=True)
    bind_context_parallel(layer, Topology.from_mesh(mesh), config)
    here = slice(rank * local, (rank + 1) * local)
    shard_k, shard_v = (x.detach()[:, :, here].clone().requires_grad_() for x in (k, v))

    def dense() -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).sum().backward()

    def balanced() -> None:
        layer.cp(q, shard_k, shard_v, sequence).sum().backward()

    return [Case(DENSE, dense), Case(BALANCED, balanced)]


DENSE, BALANCED = "attention: slowest rank, dense mask", "attention: all_gather + head-tail"


@contextmanager
def memory(device: torch.device) -> Iterator[list[int]]:
    """Peak bytes held above what was held before; on Linux' CPU the resident set, else the allocator's number."""
    held = [0]
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        yield held
        held[0] = torch.accelerator.max_memory_allocated() - before
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once, and does not hide the next peak
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    yield held
    held[0] = _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def summarise(per_rank: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The slowest rank of each case; of waits the shortest, for the others also wait for the slowest rank's work."""
    return {
        name: {
            key: (min if key == "waits" else max)(found[name][key] for found in per_rank) for key in per_rank[0][name]
        }
        for name in per_rank[0]
    }


def show(console: Console, result: dict[str, dict[str, float]], cp: int, sizes: Sizes) -> None:
    """The table, and the two ratios that are promised."""
    console.print(
        f"{device_type()}, cp {cp}, {sizes.tokens} tokens, hidden {sizes.hidden}, {sizes.heads} query and "
        f"{sizes.kv_heads} kv heads of {sizes.dim}, fp32, forward + backward; medians of {sizes.rounds} rounds"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "ms", "of one process", "waiting ms", "hidden", "MB received", "peak MB"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "layer" else "right")
    alone = result[ALONE]["seconds"]
    for name, found in result.items():
        if name in (DENSE, BALANCED):
            continue
        twin = result.get(name.replace(", async", ", sync"), found)
        shown = name.endswith(", async") and twin["waits"] > _LEAST_WAIT
        hidden = f"{1 - found['waits'] / twin['waits']:.0%}" if shown else ""
        table.add_row(
            name, f"{found['seconds'] * 1e3:.0f}", f"{found['seconds'] / alone:.2f}", f"{found['waits'] * 1e3:.1f}",
            hidden, f"{found['bytes'] / 1e6:.2f}", f"{found['memory'] / 1e6:.0f}",
        )  # fmt: skip
    console.print(table)
    ratio = result[BALANCED]["seconds"] / result[DENSE]["seconds"]
    console.print(
        f"attention alone: head-tail with its swap and gather takes {ratio:.2f} of what the slowest unbalanced rank "
        f"takes with a dense mask ({result[BALANCED]['seconds'] * 1e3:.0f} of {result[DENSE]['seconds'] * 1e3:.0f} ms)"
    )


def wrong_sizes(cp: int, sizes: Sizes) -> str:
    """Why no benchmark can be run with them; empty if one can."""
    if min(cp - 1, *sizes) < 1:
        return f"cp={cp} must be at least 2, and {sizes} all at least 1"
    if sizes.tokens % (2 * cp):
        return f"tokens={sizes.tokens} must be a multiple of 2 * cp = {2 * cp}, so that nothing is padded"
    if sizes.heads % sizes.kv_heads:
        return f"heads={sizes.heads} must be a multiple of kv-heads={sizes.kv_heads}"
    return ""


def main(
    cp: Annotated[int, typer.Option(help="Processes (without torchrun).")] = 2,
    tokens: Annotated[int, typer.Option(help="S, of the one row.")] = 4096,
    hidden: int = 1024,
    heads: int = 8,
    kv_heads: int = 4,
    dim: int = 64,
    rounds: int = 7,
    json_file: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Time, waiting, bytes and memory of every strategy beside one process."""
    sizes = Sizes(tokens, hidden, heads, kv_heads, dim, rounds)
    world = int(os.environ.get("WORLD_SIZE", cp))
    wrong = wrong_sizes(world, sizes)
    if wrong:
        typer.echo(f"error: {wrong}", err=True)
        raise typer.Exit(2)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local_device()
        dist.init_process_group(backend_for(device_type()))
        cp, rank = dist.get_world_size(), dist.get_rank()
        per_rank: list[Any] = [None] * cp
        dist.all_gather_object(per_rank, measure(rank, cp, sizes))
        dist.destroy_process_group()
        if rank:
            return
    else:
        per_rank = run_distributed(measure, cp, sizes, timeout=1800)
    result = summarise(per_rank)
    show(Console(width=120), result, cp, sizes)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
