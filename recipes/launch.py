"""Starts the workers of a run with torchrun on this machine, and tells why a run failed.

Workers get the resolved recipe as a file in the run's folder, so what ran can always be read (and run) again. Each
worker that fails leaves ``logs/rank-N.error``; the launcher shows the first of them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from cp_core.device import device_count

from .build import mesh_shape
from .checkpoint import write_atomically
from .lifetime import LAUNCH_LOCK, die_with_parent, launcher_environment, lock_folder
from .loader import dump_recipe, run_dir
from .schema import Recipe

RESOLVED = "recipe.yaml"
_HEADER = "# resolved from"
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
    if _is_own_file(recipe_path, folder / RESOLVED):
        print(
            f"run_dir: {folder} holds the recipe {recipe_path} itself and would replace it; set another",
            file=sys.stderr,
        )
        return 2
    try:
        lock = lock_folder(folder, LAUNCH_LOCK, patience=1.0)  # held until the end
        lock_folder(folder).close()  # a run that torchrun was started for by hand
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with lock:
        return _launch(recipe, recipe_path, folder, processes)


def _is_own_file(recipe_path: Path, resolved: Path) -> bool:
    """Whether the resolved recipe would overwrite one that a person wrote."""
    if not resolved.exists() or resolved.resolve() != recipe_path.resolve():
        return False
    return not resolved.read_text().startswith(_HEADER)


def _launch(recipe: Recipe, recipe_path: Path, folder: Path, processes: int) -> int:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("rank-*.error*"):
        stale.unlink()
    resolved = folder / RESOLVED
    write_atomically(resolved, f"{_HEADER} {recipe_path}\n{dump_recipe(recipe)}")
    environment = {**os.environ, **launcher_environment(folder)}
    threads = recipe.train.threads or max(1, (os.cpu_count() or 1) // processes)
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join([str(PROJECT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "recipes.worker", str(resolved),
    ]  # fmt: skip
    worker = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=die_with_parent
    )
    tail: deque[str] = deque(maxlen=200)
    reader = threading.Thread(target=_copy_lines, args=(worker.stderr, logs / "stderr.log", tail), daemon=True)
    reader.start()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        code = worker.wait()
    except KeyboardInterrupt as interrupt:
        worker.terminate()
        worker.wait()
        print(f"\nstopped; resume with the same command (run folder: {folder})", file=sys.stderr)
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    reader.join(timeout=5)
    if code != 0:
        print(failure_message(logs, code, "".join(tail)), file=sys.stderr)
    return code


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _copy_lines(lines: Iterable[str], path: Path, tail: deque[str]) -> None:
    """Write what torchrun and the workers say to a file, and keep its end: the disk may be what is full."""
    try:
        with open(path, "w") as log:
            for line in lines:
                tail.append(line)
                log.write(line)
                log.flush()
    except OSError as error:
        tail.append(f"{path}: {error}\n")
    tail.extend(lines)  # what is left when the file could not take it


def process_count(recipe: Recipe) -> int:
    """Processes on this machine: what the recipe says, else the accelerators, else what its mesh needs."""
    parallel = recipe.parallel
    if parallel.nproc is not None:
        return parallel.nproc
    needed = parallel.dp_replicate * (parallel.dp_shard or 1) * parallel.cp.size
    return needed if parallel.dp_shard is not None else (device_count() or needed)


def failure_message(logs: Path, code: int, stderr: str = "") -> str:
    """What the first worker that failed said, and where to read more.

    Args:
        logs: the run's ``logs`` folder.
        code: torchrun's exit code.
        stderr: the end of what torchrun and the workers wrote.
    """
    log = logs / "stderr.log"
    errors = sorted(logs.glob("rank-*.error"), key=lambda path: path.stat().st_mtime_ns)
    spoke = {path.stem.removeprefix("rank-") for path in errors}
    for rank, exit_code in re.findall(r"rank\s*: (\d+) \(.*?exitcode\s*: (-?\d+)", stderr, re.DOTALL):
        number = int(exit_code)
        if rank not in spoke and number not in (0, -signal.SIGTERM):  # peers of one that was killed blame the network
            how = f"was killed by signal {-number}" if number < 0 else f"ended with exit code {number}"
            hint = " (out of memory?)" if number == -signal.SIGKILL else ""
            return f"rank {rank} {how}{hint} and left no message; the others then failed. See {log}"
    if not errors:
        end = "".join(stderr.splitlines(keepends=True)[-30:])
        return f"{end}\nthe run failed (exit code {code}) and no worker left a message; see {log}"
    rank = errors[0].stem.removeprefix("rank-")
    return f"{errors[0].read_text().rstrip()}\n\nrank {rank} failed first; see {errors[0]} and {log}"
