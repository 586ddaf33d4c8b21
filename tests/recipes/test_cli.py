"""The command line: exit codes, plain messages, and a start that does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.cli import CONFIGS, app

from .test_loader import QUICKSTART

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner()


def test_check_passes_and_fails() -> None:
    good = RUNNER.invoke(app, ["check", str(QUICKSTART)])
    assert good.exit_code == 0
    assert good.stdout == f"✓ {QUICKSTART}: 100 steps of 4 x 1024 tokens, cp 2 (all_gather, sync)\n"
    bad = RUNNER.invoke(app, ["check", str(QUICKSTART), "train.steps=x", "data.seqlen=3"])
    assert bad.exit_code == 2
    assert bad.stdout == ""
    assert bad.stderr.splitlines() == [
        "override 'train.steps=x'  train.steps: got 'x': input should be a valid integer",
        "override 'data.seqlen=3'  data.seqlen: unknown key (did you mean 'seq_len'?)",
    ]


def test_messages_are_whole(tmp_path: Path) -> None:
    """No wrapping, no markup, no traceback: brackets and long lines arrive as they are."""
    long = "[bold]" + "a" * 300 + "[/bold].txt"
    bad = RUNNER.invoke(app, ["check", str(QUICKSTART), f"data.source='{long}'"])
    assert bad.exit_code == 2
    override = f"override 'data.source='{long}''"
    assert bad.stderr == f"{override}  data.source: {long}: no such file; give the path of a .txt or .jsonl file\n"
    missing = RUNNER.invoke(app, ["check", str(tmp_path / "nowhere.yaml")])
    assert missing.exit_code == 2
    assert missing.stderr.count("\n") == 1
    assert "cannot be read (No such file or directory)" in missing.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_run_ends_with_the_code_of_the_launcher(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    calls = []
    monkeypatch.setattr("recipes.launch.launch", lambda recipe, path: calls.append((recipe, path)) or code)
    assert RUNNER.invoke(app, ["run", str(QUICKSTART), "train.steps=40"]).exit_code == code
    ((recipe, path),) = calls
    assert (recipe.train.steps, path) == (40, QUICKSTART)


def test_help_has_examples() -> None:
    for arguments in ([], ["--help"]):
        text = RUNNER.invoke(app, arguments).output
        assert "  python -m recipes run recipes/configs/qwen3_moe/quickstart.yaml train.steps=40\n" in text
    for verb in ("check", "run"):
        assert f"  python -m recipes {verb} " in RUNNER.invoke(app, [verb, "--help"]).output


def test_run_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    bad = RUNNER.invoke(app, ["run", str(QUICKSTART), "train.steps=x", f"run_dir={tmp_path}/run"])
    assert bad.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_list_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "list"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows.keys() == {"recipe", *(str(path.relative_to(ROOT)) for path in CONFIGS.rglob("*.yaml"))}
    assert "qwen3_moe, 2 layers, 128 wide, 8 experts" in rows["recipes/configs/qwen3_moe/quickstart.yaml"]
    assert "8 x all_gather" in rows["recipes/configs/qwen3_moe/finetune.yaml"]


def test_the_command_line_starts_without_torch() -> None:
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    code = f"import sys, recipes.cli, recipes.loader, recipes.schema; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
