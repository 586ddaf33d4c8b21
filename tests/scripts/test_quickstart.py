"""The quickstart, as a newcomer runs it: what it prints and leaves behind must be what the README promises."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.dist2
def test_quickstart_learns_resumes_and_exports(tmp_path: Path) -> None:
    """Loss falls by 1.5; the valid loss beats the unigram entropy by 0.3; the export computes the same in fp32."""
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", f"run_dir={tmp_path}/run"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert "resumed from" in out
    assert out.count("bytes/token  work") == 2  # the report, with the first batch's figures: once a session
    numbers = re.search(r"training loss ([\d.]+) -> ([\d.]+); valid loss ([\d.]+) \(unigram .*?: ([\d.]+)\)", out)
    assert numbers, out
    first, last, valid, unigram = map(float, numbers.groups())
    assert last <= first - 1.5
    assert valid <= unigram - 0.3
    difference = re.search(r"largest logit difference ([\d.e+-]+)", out)
    assert difference, out
    assert float(difference[1]) <= 1e-5
    for name in (
        "metrics.jsonl",
        "loss.png",
        "export/model.safetensors",
        "export/tokenizer.json",
        "checkpoints/latest",
    ):
        assert (tmp_path / "run" / name).exists(), name
        if name != "checkpoints/latest":
            assert name.split("/")[0] in out
