"""Starts the workers of a run with torchrun on this machine, and tells why a run failed.

Workers get the resolved recipe as a file in the run's folder, so what ran can always be read (and run) again. Each
worker that fails leaves ``logs/rank-N.error``; the launcher shows the first of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from cp_core.device import device_count

from .build import mesh_shape
from .checkpoint import write_atomically
from .loader import dump_recipe, run_dir
from .schema import Recipe

PROJECT = Path(__file__).resolve().parent.parent


def launch(recipe: Recipe, recipe_path: Path) -> int:
    """Run a checked recipe and wait for its end.

    Args:
        recipe: resolved, overrides applied.
        recipe_path: where it came from, for messages.

    Returns:
        The exit code: 0, or what torchrun ended with.
    """
    processes = process_count(recipe)
    try:
        mesh_shape(recipe.parallel, processes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = run_dir(recipe)
    try:
        lock = lock_folder(folder, "launch.lock", patience=0.0)  # held until the end
        lock_folder(folder).close()  # a run that torchrun was started for by hand
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with lock:
        return _launch(recipe, recipe_path, folder, processes)


def _launch(recipe: Recipe, recipe_path: Path, folder: Path, processes: int) -> int:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("rank-*.error"):
        stale.unlink()
    resolved = folder / "recipe.yaml"
    write_atomically(resolved, f"# resolved from {recipe_path}\n{dump_recipe(recipe)}")
    environment = dict(os.environ)
    threads = recipe.train.threads or max(1, (os.cpu_count() or 1) // processes)
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join([str(PROJECT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "recipes.finetune", str(resolved),
    ]  # fmt: skip
    with open(logs / "stderr.log", "w") as log:  # torchrun repeats a failure at length; failure_message is shorter
        worker = subprocess.Popen(command, env=environment, stderr=log, preexec_fn=die_with_parent)
        try:
            code = worker.wait()
        except KeyboardInterrupt:
            worker.terminate()
            worker.wait()
            print(f"\nstopped; resume with the same command (run folder: {folder})", file=sys.stderr)
            return 130
    if code != 0:
        print(failure_message(logs, code), file=sys.stderr)
    return code


def lock_folder(folder: Path, name: str = "lock", patience: float = 10.0) -> TextIO:
    """Make sure that no other run writes to ``folder``; the lock goes with the returned file.

    Args:
        folder: the run's folder.
        name: ``lock`` is held by the first worker, ``launch.lock`` by the launcher.
        patience: seconds to wait for a run that is just ending.

    Raises:
        ValueError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / name, "a+")  # noqa: SIM115 - its life is the lock's
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{folder}: another run is writing here; wait for it, or set another run_dir"
                ) from None
            time.sleep(0.2)
    return file


def die_with_parent() -> None:
    """Have Linux end this process when its parent is killed; torchrun's workers would live on as orphans."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL)


def process_count(recipe: Recipe) -> int:
    """Processes on this machine: what the recipe says, else the accelerators, else what its mesh needs."""
    parallel = recipe.parallel
    if parallel.nproc is not None:
        return parallel.nproc
    needed = parallel.dp_replicate * (parallel.dp_shard or 1) * parallel.cp.size
    return needed if parallel.dp_shard is not None else (device_count() or needed)


def failure_message(logs: Path, code: int) -> str:
    """What the first worker that failed said, and where to read more."""
    errors = sorted(logs.glob("rank-*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return f"the run failed (exit code {code}) and no worker left a message; see {logs / 'stderr.log'}"
    rank = errors[0].stem.removeprefix("rank-")
    return f"{errors[0].read_text().rstrip()}\n\nrank {rank} failed first; see {errors[0]} and {logs / 'stderr.log'}"
