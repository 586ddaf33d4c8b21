"""``run_distributed``: what it gives back, and what it says when a rank raises, dies or blocks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from cp_core.testing import WorkerError, run_distributed


def results_worker(rank: int, size: int, scale: float) -> dict[str, object]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return {
        "rank": rank,
        "sum": total * scale,
        "threads": torch.get_num_threads(),
        "environment": (
            os.environ["RANK"],
            os.environ["WORLD_SIZE"],
            os.environ["LOCAL_RANK"],
            os.environ["OMP_NUM_THREADS"],
        ),
        "fresh": bool(torch.empty(64).isnan().all()),
    }


def raises_worker(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        raise KeyError("the reason")
    dist.barrier()  # the others block here, then lose their peer


def exits_worker(rank: int, size: int) -> None:
    if rank == 0:
        raise SystemExit(0)


def dies_worker(rank: int, size: int, by: str) -> None:
    if rank == 1:
        if by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    time.sleep(0.3)


def dies_while_others_wait_worker(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(0.3)
        os._exit(7)
    dist.barrier()


def blocks_worker(rank: int, size: int) -> None:
    if rank == 1:
        _sleeps_here()


def _sleeps_here() -> None:
    time.sleep(600)


def unpicklable_worker(rank: int, size: int) -> object:
    return (lambda: 0) if rank else 0


@pytest.mark.dist2
def test_results_come_back_in_rank_order() -> None:
    threads = os.environ.get("OMP_NUM_THREADS")
    results = run_distributed(results_worker, 2, 3.0)
    assert [result["rank"] for result in results] == [0, 1]
    assert [float(result["sum"]) for result in results] == [3.0, 3.0]
    assert [result["threads"] for result in results] == [1, 1]
    assert [result["environment"] for result in results] == [("0", "2", "0", "1"), ("1", "2", "1", "1")]
    assert all(result["fresh"] for result in results)
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.dist2
def test_a_rank_that_raises() -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"rank 1 raised:\nTraceback[\s\S]*raises_worker[\s\S]*KeyError: 'the reason'"
    ):
        run_distributed(raises_worker, 2)
    assert time.monotonic() - started < 20
    with pytest.raises(WorkerError, match=r"rank 0 raised:[\s\S]*SystemExit: 0"):
        run_distributed(exits_worker, 2)
    with pytest.raises(WorkerError, match=r"rank 1 raised:[\s\S]*pickle"):
        run_distributed(unpicklable_worker, 2)


@pytest.mark.dist2
@pytest.mark.parametrize(("by", "code"), [("exit", "7"), ("kill", "-9")])
def test_a_rank_that_dies(by: str, code: str) -> None:
    with pytest.raises(WorkerError, match=f"rank 1 died with exit code {code}"):
        run_distributed(dies_worker, 2, by)


@pytest.mark.dist2
def test_a_rank_that_dies_while_others_wait() -> None:
    with pytest.raises(WorkerError, match="rank 1 died with exit code 7"):
        run_distributed(dies_while_others_wait_worker, 2)


@pytest.mark.dist2
def test_a_rank_that_blocks() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"no end after 4 s; ranks \[1\] still ran:\n--- rank 1\n[\s\S]*_sleeps_here"):
        run_distributed(blocks_worker, 2, timeout=4.0)
    assert time.monotonic() - started < 15
