"""Checkpoints: exact resume, nothing half written, and what a resume refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_core.testing import WorkerError

from ._training import curve, losses, train, write_recipe


@pytest.mark.dist2
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resume_is_bitwise(tmp_path: Path, dtype: str) -> None:
    """Stop after 3 of 6 steps, start again: the metrics read as those of the unbroken run."""
    settings = {"parallel__cp__size": 2, "model__dtype": dtype, "checkpoint__every": 2}
    whole = curve(tmp_path, "whole", 2, **settings)
    curve(tmp_path, "broken", 2, train__stop_after=3, **settings)
    assert len(losses(tmp_path / "broken.yaml")) == 3
    resumed = curve(tmp_path, "broken", 2, **settings)
    assert torch.equal(resumed, whole)
    for key in ("grad_norm", "lr", "aux_loss"):
        assert losses(tmp_path / "broken.yaml", key) == losses(tmp_path / "whole.yaml", key)


@pytest.mark.dist4
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"parallel__dp_replicate": 2, "parallel__dp_shard": 1}, {"parallel__fsdp": False}, {}]
)
def test_resume_is_bitwise_at_dp2_cp2(tmp_path: Path, mesh: dict[str, Any]) -> None:
    """HSDP, whole parameters, and sharded, in bf16; validation losses too."""
    settings = {"parallel__cp__size": 2, "model__dtype": "bfloat16", "train__eval_every": 2, **mesh}
    whole = curve(tmp_path, "whole", 4, **settings)
    curve(tmp_path, "broken", 4, train__stop_after=3, **settings)
    assert torch.equal(curve(tmp_path, "broken", 4, **settings), whole)
    for key in ("grad_norm", "valid_loss"):
        assert losses(tmp_path / "broken.yaml", key) == losses(tmp_path / "whole.yaml", key)


@pytest.mark.dist4
def test_resume_on_another_mesh_goes_on(tmp_path: Path) -> None:
    """DCP reshards: saved at cp 2, continued at cp 4, the same curve to fp64 rounding."""
    whole = curve(tmp_path, "whole", 2, parallel__cp__size=2)
    curve(tmp_path, "broken", 2, parallel__cp__size=2, train__stop_after=3)
    resumed = curve(tmp_path, "broken", 4, parallel__cp__size=4)
    torch.testing.assert_close(resumed, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.dist2
def test_resume_refuses_another_data_order(tmp_path: Path) -> None:
    curve(tmp_path, "run", 2, parallel__cp__size=2, train__stop_after=2)
    with pytest.raises(WorkerError, match=r"cannot resume.*train\.seed: saved 0, now 1"):
        curve(tmp_path, "run", 2, parallel__cp__size=2, train__seed=1)


@pytest.mark.dist2
def test_resume_refuses_another_text(tmp_path: Path) -> None:
    """Other lines under the same path: another tokenizer, other rows, and held-out text may have been trained on."""
    curve(tmp_path, "run", 1, train__stop_after=2)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[4:]))
    with pytest.raises(
        WorkerError, match=r"cannot resume.*the token rows \(text and tokenizer\): saved '\w+', now '\w+'"
    ):
        curve(tmp_path, "run", 1)


def test_fresh_start_forgets_the_run_before_even_if_killed_at_once(tmp_path: Path) -> None:
    """A run started with resume=never and killed before its first checkpoint must not fall back to the older run."""
    curve(tmp_path, "run", 1, train__stop_after=3)
    path = write_recipe(tmp_path, "run", checkpoint__resume="never", optim__max_grad_norm=None, optim__lr=1e30)
    with pytest.raises(WorkerError, match="the update was not made"):
        train(path, 1)
    curve(tmp_path, "run", 1, train__stop_after=1)
    assert len(losses(tmp_path / "run.yaml")) == 1


def test_damaged_pointers_and_facts_say_what_to_do(tmp_path: Path) -> None:
    curve(tmp_path, "run", 1, train__stop_after=4, checkpoint__every=2)
    folder = tmp_path / "runs/run/checkpoints"
    (folder / "step-000004").rename(folder / "gone")
    for name, shown in (("step-000004", "'step-000004'"), ("", "''"), ("/etc", "'/etc'")):
        (folder / "latest").write_text(name)
        with pytest.raises(
            WorkerError, match=rf"names {shown}, which is no complete checkpoint.*write step-000002 into"
        ):
            curve(tmp_path, "run", 1)
    (folder / "latest").write_text("step-000002")
    facts = folder / "step-000002" / "run.json"
    whole = facts.read_text()
    facts.write_text("")
    with pytest.raises(WorkerError, match=r"run\.json is damaged"):
        curve(tmp_path, "run", 1)
    facts.write_text(whole.replace('"format": 1', '"format": 99'))
    with pytest.raises(WorkerError, match=r"run\.json has format 99, this version reads 1"):
        curve(tmp_path, "run", 1)
    facts.write_text(whole)
    assert len(curve(tmp_path, "run", 1)) == 6


@pytest.mark.dist2
def test_half_written_checkpoint_is_never_resumed(tmp_path: Path) -> None:
    """What a kill during a save leaves: a .tmp folder, newer than ``latest``. It is ignored, then cleared away."""
    settings = {"parallel__cp__size": 2, "checkpoint__every": 2}
    whole = curve(tmp_path, "whole", 2, **settings)
    curve(tmp_path, "run", 2, train__stop_after=2, **settings)
    checkpoints = tmp_path / "runs/run/checkpoints"
    half = checkpoints / "step-000004.tmp"
    shutil.copytree(checkpoints / "step-000002", half)
    next(half.glob("tensors/*.distcp")).write_bytes(b"half")
    resumed = curve(tmp_path, "run", 2, **settings)
    assert torch.equal(resumed, whole)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000004", "step-000006"]
    assert (checkpoints / "latest").read_text() == "step-000006"


@pytest.mark.dist2
def test_fresh_start_in_a_used_folder(tmp_path: Path) -> None:
    """The checkpoints of a run that is started afresh are not crowded out by later ones of the run before."""
    settings = {"parallel__cp__size": 2, "checkpoint__every": 2}
    whole = curve(tmp_path, "run", 2, **settings)
    curve(tmp_path, "run", 2, checkpoint__resume="never", train__stop_after=2, **settings)
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert (checkpoints / "latest").read_text() == "step-000002"
    assert (checkpoints / "step-000002" / "run.json").exists()
    resumed = curve(tmp_path, "run", 2, checkpoint__resume="must", **settings)
    assert torch.equal(resumed, whole)
