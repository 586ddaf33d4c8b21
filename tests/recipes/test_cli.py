"""The command line: exit codes, plain messages, and a start that does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from recipes.cli import app

from .test_loader import QUICKSTART

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner()


def test_check_passes_and_fails() -> None:
    good = RUNNER.invoke(app, ["check", str(QUICKSTART)])
    assert good.exit_code == 0
    assert "right. 100 steps of 4 x 1024 tokens, cp 2 (all_gather, sync)" in good.output
    bad = RUNNER.invoke(app, ["check", str(QUICKSTART), "train.steps=x", "data.seqlen=3"])
    assert bad.exit_code == 2
    assert "override 'train.steps=x'  train.steps: got 'x'" in bad.output
    assert "override 'data.seqlen=3'  data.seqlen: unknown key (did you mean 'seq_len'?)" in bad.output


def test_run_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    bad = RUNNER.invoke(app, ["run", str(QUICKSTART), "train.steps=x", f"run_dir={tmp_path}/run"])
    assert bad.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_list_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "list"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "recipes/configs/qwen3_moe/quickstart.yaml" in done.stdout
    assert "recipes/configs/qwen3_moe/finetune.yaml" in done.stdout
    assert RUNNER.invoke(app, []).output.count("check") >= 1


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, recipes.cli, recipes.loader, recipes.schema; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
