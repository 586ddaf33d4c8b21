"""Sizes that no benchmark can be run with are refused in one line, before any process starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "257"], "error: tokens=257 must be a multiple of 2 * cp = 4"),
        (["--heads", "3", "--kv-heads", "2"], "error: heads=3 must be a multiple of kv-heads=2"),
        (["--rounds", "0"], "rounds=0) all at least 1"),
        (["--cp", "1"], "error: cp=1 must be at least 2"),
    ],
)
def test_sizes_that_are_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench_cp.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
