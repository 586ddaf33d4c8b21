"""Who writes to a run's folder, and which processes may outlive which. Standard library only: it loads at once."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

LAUNCH_LOCK = "launch.lock"
_LAUNCHER_FOLDER = "CP_ZOO_RUN_FOLDER"  # set for the workers of a launcher


def lock_folder(folder: Path, name: str = "lock", patience: float = 10.0) -> TextIO:
    """Make sure that no other run writes to ``folder``; the lock goes with the returned file.

    Args:
        folder: the run's folder; made if missing.
        name: ``lock`` is held by the first worker, ``LAUNCH_LOCK`` by the launcher.
        patience: seconds to wait for a run that is just ending.

    Raises:
        ValueError: another run holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+")  # noqa: SIM115 - its life is the lock's
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be written to ({error.strerror}); set another run_dir") from None
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise ValueError(
                    f"{folder}: another run is writing here; wait for it, or set another run_dir"
                ) from None
            time.sleep(0.2)


def die_with_parent() -> None:
    """Have Linux end this process when its parent is killed; torchrun's workers would live on as orphans."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL)


def launcher_environment(folder: Path) -> dict[str, str]:
    """What ``stop_without_launcher`` looks for."""
    return {_LAUNCHER_FOLDER: str(folder.resolve())}


def stop_without_launcher() -> None:
    """End this worker if its launcher, which holds its lock all its life, was dead before ``die_with_parent``.

    Call it a while after that: a process that is just being killed still holds its lock for a moment.
    """
    folder = os.environ.get(_LAUNCHER_FOLDER)
    if folder is None:
        return  # torchrun was started by hand
    with open(Path(folder) / LAUNCH_LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: workers that ask at once must not see each other
        except BlockingIOError:
            return  # it is held: the launcher lives
    raise SystemExit("the launcher of this worker is gone")
