"""The launcher and its processes: a failing rank ends the job, none is left behind, a folder has one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.build import mesh_shape
from recipes.launch import failure_message, process_count
from recipes.lifetime import lock_folder
from recipes.loader import load_recipe

from ._training import curve, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def launch(path: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "recipes", "run", str(path), *overrides],
        cwd=ROOT, env={**os.environ, **(env or {})}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.dist2
def test_killed_run_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL to the launcher in the middle of a run that saves at every step; the metrics then read as if unbroken."""
    settings = {"parallel__cp__size": 2, "train__steps": 400}
    path = write_recipe(tmp_path, "killed", parallel__nproc=2, checkpoint__every=1, **settings)
    job = subprocess.Popen([sys.executable, "-m", "recipes", "run", str(path)], cwd=ROOT, start_new_session=True)
    checkpoints = tmp_path / "runs/killed/checkpoints"
    try:
        deadline = time.monotonic() + 90
        while not (checkpoints / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.37)
    finally:
        job.kill()  # the launcher alone: torchrun and the workers must go with it
        job.wait()
    latest = (checkpoints / "latest").read_text()
    step = int(latest.removeprefix("step-"))
    resumed = curve(tmp_path, "killed", 2, train__stop_after=step + 2, **settings)
    whole = curve(tmp_path, "whole", 2, train__stop_after=step + 2, train__threads=1, **settings)
    assert len(whole) == step + 2
    torch.testing.assert_close(resumed, whole, rtol=1e-12, atol=0)


@pytest.mark.dist2
def test_rank_that_raises_ends_the_job_with_its_message(tmp_path: Path) -> None:
    """Rank 1 raises in the middle of step 2, while rank 0 waits for it in a collective."""
    path = write_recipe(tmp_path, "failing", parallel__nproc=2, parallel__cp__size=2, train__steps=50)
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import cp_core.kernels.base as base\n"
        "    real, calls = base.attend_block, [0]\n"
        "    def failing(*args):\n"
        "        calls[0] += 1\n"
        "        if calls[0] == 13:\n"
        "            raise RuntimeError('disk on fire on this rank')\n"
        "        return real(*args)\n"
        "    import cp_core.strategies.compose as compose\n"
        "    compose.attend_block = failing\n"
    )
    job = launch(path, env={"PYTHONPATH": os.pathsep.join([str(hook), str(ROOT)])})
    failed_at = None
    folder = tmp_path / "runs/failing/logs"
    deadline = time.monotonic() + 120
    while job.poll() is None and time.monotonic() < deadline:
        if failed_at is None and (folder / "rank-1.error").exists():
            failed_at = time.monotonic()
        time.sleep(0.05)
    took = time.monotonic() - (failed_at or 0)
    job.kill()
    _, err = job.communicate()
    assert failed_at is not None
    assert took < 30
    assert job.returncode not in (0, -9)
    assert "disk on fire on this rank" in err
    assert "rank 1 failed first" in err


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the launcher's grandchildren: torchrun's workers."""

    def children(pid: int) -> list[int]:
        try:
            return [
                int(child)
                for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
        except OSError:
            return []

    found = [grandchild for child in children(launcher.pid) for grandchild in children(child)]
    return [pid for pid in found if b"recipes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(condition: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.dist2
@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux telling a child of its parent's death")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_launcher_that_dies_early(tmp_path: Path, number: signal.Signals) -> None:
    """While the workers still import: they used to wait for torchrun's store for ever."""
    job = launch(write_recipe(tmp_path, "early", parallel__nproc=2, parallel__cp__size=2, train__steps=400))
    pids = wait_for(lambda: len(workers_of(job)) == 2 and workers_of(job), 60)
    assert len(pids) == 2
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert number == signal.SIGKILL or "stopped; resume with the same command" in err
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 20)


@pytest.mark.dist2
@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    """Its peer, whose connection closed, leaves a message and used to get the blame."""
    job = launch(write_recipe(tmp_path, "shot", parallel__nproc=2, parallel__cp__size=2, train__steps=4000))
    metrics = tmp_path / "runs/shot/metrics.jsonl"
    assert wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, 90)
    (shot,) = [pid for pid in workers_of(job) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(shot, signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "rank 1 was killed by signal 9 (out of memory?) and left no message" in err


def test_failure_message_without_any_message(tmp_path: Path) -> None:
    """A full disk holds neither the message nor the log: the end of stderr is shown."""
    assert "No space left on device" in failure_message(tmp_path, 1, "OSError: No space left on device\n")


def test_the_recipe_is_not_replaced_by_the_resolved_one(tmp_path: Path) -> None:
    text = write_recipe(tmp_path, "recipe", run_dir=str(tmp_path)).read_text()
    job = launch(tmp_path / "recipe.yaml")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "holds the recipe" in err
    assert (tmp_path / "recipe.yaml").read_text() == text


def test_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = launch(write_recipe(tmp_path, "nowhere", run_dir=str(tmp_path / "file")))
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err.startswith("run_dir: ")
    assert "Traceback" not in err


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run: another run is writing here; wait for it, or set another run_dir"):
        lock_folder(tmp_path / "run", patience=0.3)
    lock.close()
    lock_folder(tmp_path / "run", patience=0.0).close()


def test_second_launch_touches_nothing_of_the_first(tmp_path: Path) -> None:
    """It used to rewrite recipe.yaml and clear the logs before the worker's lock refused it."""
    path = write_recipe(tmp_path, "busy")
    folder = tmp_path / "runs/busy"
    lock = lock_folder(folder, "launch.lock")
    (folder / "recipe.yaml").write_text("the first run's")
    job = launch(path)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "another run is writing here" in err
    assert sorted(p.name for p in folder.iterdir()) == ["launch.lock", "recipe.yaml"]
    assert (folder / "recipe.yaml").read_text() == "the first run's"
    lock.close()


def test_process_count_and_mesh(tmp_path: Path) -> None:
    """What runs where, and sizes that do not multiply to the processes there are."""
    recipe = load_recipe(
        write_recipe(tmp_path, "mesh", parallel__nproc=8, parallel__cp__size=2, parallel__dp_replicate=2)
    )
    assert process_count(recipe) == 8
    assert mesh_shape(recipe.parallel, 8) == (2, 2, 2)
    free = load_recipe(write_recipe(tmp_path, "free", parallel__nproc=None, parallel__cp__size=3, parallel__dp_shard=2))
    assert process_count(free) == 6
    assert mesh_shape(free.parallel, 6) == (1, 2, 3)
    with pytest.raises(ValueError, match=r"dp_replicate=1 x dp_shard=2 x cp\.size=3 is 6, but 4 processes run: change"):
        mesh_shape(free.parallel, 4)
