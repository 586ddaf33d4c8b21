"""What the README tells a reader to type is typed here, in the order of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cp_core import ContextParallelConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ELSEWHERE = (
    "git clone",
    "bash scripts/",
)  # the first needs a server; test.sh runs this file, quickstart has its own test


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, shell=True, cwd=cwd, env=environment, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.dist2
def test_commands_of_the_readme(tmp_path: Path) -> None:
    """Every line of every bash block, with /tmp and the number of steps replaced."""
    seen = []
    for line in "".join(blocks("bash")).splitlines():
        command = line.split("#")[0].strip()
        if not command or command.startswith(ELSEWHERE):
            continue
        seen.append(command.split()[1])
        command = command.replace("/tmp/", f"{tmp_path}/")
        if " run " in command:
            command += f" train.steps=2 optim.warmup_steps=1 run_dir={tmp_path}/run"
        if "bench_cp" in command:
            command += " --tokens 256 --hidden 64 --rounds 1"
        run(command)
    assert seen.count("scripts/convert_checkpoint.py") == 3
    assert seen.count("-m") == 4
    assert seen.count("scripts/bench_cp.py") == 1
    assert (tmp_path / "run/export/model.safetensors").exists()


@pytest.mark.dist2
def test_python_block_of_the_readme_trains(tmp_path: Path) -> None:
    run(f"python scripts/make_tiny.py qwen3_moe {tmp_path / 'tiny'}")
    block = blocks("python")[0]
    assert "path/to/hf/folder" in block
    (tmp_path / "train.py").write_text(block.replace("path/to/hf/folder", str(tmp_path / "tiny")))
    run("torchrun --standalone --nproc-per-node=2 train.py", cwd=tmp_path)
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_configs_of_the_readme_are_legal() -> None:
    """The second python block, as it is written."""
    names = {"ContextParallelConfig": ContextParallelConfig}
    lines = blocks("python")[1].splitlines()
    made = [eval(line, names) for line in lines]
    assert [config.algorithm for config in made] == ["ring", "hybrid", "hybrid"]
    assert made[2].ulysses_degree == 4


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "models").glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"
