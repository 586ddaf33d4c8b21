"""Run a function on several processes of this machine and get back what each rank returned.

Workers come from a forkserver that has torch loaded already (about 0.1 s a job), talk over gloo, use one thread
each and have uninitialised memory filled with NaN, so that a buffer that nobody wrote cannot pass. A rank that raises
ends the job with its traceback; a job that blocks ends at the timeout with the stacks of the ranks that hang.

    def worker(rank: int, world_size: int, scale: float) -> torch.Tensor: ...
    results = run_distributed(worker, 2, 3.0)          # one entry a rank
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "cp_core.testing"]
_GRACE_SECONDS = 3.0  # what the other ranks get to fail by themselves once one has failed


class WorkerError(RuntimeError):
    """A rank raised, or the job took too long; the message holds the traceback or the stacks."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, preload: tuple[str, ...] = ()
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` gloo processes.

    Args:
        fn: a function at the top level of an importable module.
        world_size: number of processes.
        args: what else ``fn`` gets; must pickle.
        timeout: seconds for the whole job, start included.
        preload: more modules for the forkserver; they count only for the first job of this process.

    Returns:
        What ``fn`` returned on rank 0, 1, ...; tensors arrive on the CPU.

    Raises:
        WorkerError: a rank raised (its traceback is in the message), died, or the time ran out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    with tempfile.TemporaryDirectory(prefix="cp_core_testing_") as folder:
        workers = [
            context.Process(target=_worker, args=(fn, rank, world_size, folder, timeout, args), daemon=True)
            for rank in range(world_size)
        ]
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # the forkserver hands its environment on
        try:
            for worker in workers:
                worker.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        try:
            _wait(workers, Path(folder), timeout)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
        return [torch.load(Path(folder) / f"result.{rank}", weights_only=False) for rank in range(world_size)]


def _wait(workers: Sequence[BaseProcess], folder: Path, timeout: float) -> None:
    """Wait for all; raise for the rank that failed first."""
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while any(worker.is_alive() for worker in workers):
        now = time.monotonic()
        if failed_at is None and any(worker.exitcode not in (None, 0) for worker in workers):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_SECONDS:
            break
        if failed_at is None and now > deadline:
            alive = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
            stacks = "\n".join(f"--- rank {rank}\n{_read(folder / f'stack.{rank}')}" for rank in alive)
            raise WorkerError(f"no end after {timeout:.0f} s; ranks {alive} still ran:\n{stacks}")
        time.sleep(0.005)
    for rank, worker in enumerate(workers):  # one that was killed leaves no message; its peers' would mislead
        if worker.exitcode not in (None, 0) and not (folder / f"error.{rank}").exists():
            raise WorkerError(f"rank {rank} died with exit code {worker.exitcode}\n{_read(folder / f'stack.{rank}')}")
    errors = [(path.stat().st_mtime_ns, path) for path in folder.glob("error.*")]
    if errors:
        first = min(errors)[1]
        raise WorkerError(f"rank {first.suffix[1:]} raised:\n{_read(first)}")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _worker(
    fn: Callable[..., Any], rank: int, world_size: int, folder: str, timeout: float, args: tuple[Any, ...]
) -> None:
    stack = open(Path(folder) / f"stack.{rank}", "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(max(1.0, timeout - 1.0), file=stack)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills torch.empty with NaN
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = fn(rank, world_size, *args)
        torch.save(result, Path(folder) / f"result.{rank}")
    except BaseException:  # a rank that raises SystemExit or a DCP error (a BaseException) has failed as well
        temporary = Path(folder) / f"trace.{rank}"
        temporary.write_text(traceback.format_exc())
        temporary.rename(Path(folder) / f"error.{rank}")
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no tear-down: a peer may be gone already
