"""Whole runs: the same curve on every mesh, exact resume, no half checkpoints, and a failing rank that ends the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_core.testing import WorkerError, run_distributed
from recipes.finetune import summary
from recipes.launch import failure_message
from recipes.lifetime import lock_folder

from ._training import PRELOAD, losses, run_worker, write_corpus, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def train(path: Path, processes: int, timeout: float = 120) -> None:
    run_distributed(run_worker, processes, str(path), timeout=timeout, preload=PRELOAD)


def curve(folder: Path, name: str, processes: int, **overrides: Any) -> torch.Tensor:
    path = write_recipe(folder, name, parallel__nproc=processes, **overrides)
    train(path, processes)
    return torch.tensor(losses(path), dtype=torch.float64)


@pytest.mark.dist4
def test_curve_is_the_same_at_cp_1_2_4_in_fp64(tmp_path: Path) -> None:
    """20 steps with clipping, warm-up, accumulation (4 micro-batches), packing and the router's loss: 1e-9."""
    settings = {"train__steps": 20, "train__eval_every": 10}
    one = curve(tmp_path, "cp1", 1, **settings)
    assert one[-1] < one[0] - 0.3
    for size, algorithm in ((2, "all_gather"), (2, "ulysses"), (4, "all_gather"), (4, "ulysses")):
        name = f"{algorithm}{size}"
        many = curve(tmp_path, name, size, parallel__cp__size=size, parallel__cp__algorithm=algorithm, **settings)
        torch.testing.assert_close(many, one, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    for key in ("grad_norm", "aux_loss", "targets"):
        expected = losses(tmp_path / "cp1.yaml", key)
        assert losses(tmp_path / "ulysses4.yaml", key) == pytest.approx(expected, rel=1e-9)
    valid = [
        json.loads(line).get("valid_loss") for line in (tmp_path / "runs/cp1/metrics.jsonl").read_text().splitlines()
    ]
    other = [
        json.loads(line).get("valid_loss")
        for line in (tmp_path / "runs/all_gather4/metrics.jsonl").read_text().splitlines()
    ]
    assert [v for v in valid if v] == pytest.approx([v for v in other if v], rel=1e-9)
    assert len([v for v in valid if v]) == 2


@pytest.mark.dist4
def test_curve_is_the_same_at_cp_1_2_4_in_fp32(tmp_path: Path) -> None:
    """1e-5 over 5 steps, 1e-4 at 20 (routers flip: another batch split alone moves as much)."""
    settings = {"train__steps": 20, "model__dtype": "float32"}
    one = curve(tmp_path, "cp1", 1, **settings)
    for size in (2, 4):
        many = curve(tmp_path, f"cp{size}", size, parallel__cp__size=size, **settings)
        torch.testing.assert_close(many[:5], one[:5], rtol=1e-5, atol=0)
        torch.testing.assert_close(many, one, rtol=1e-4, atol=0)


@pytest.mark.dist4
def test_data_parallel_beside_cp(tmp_path: Path) -> None:
    """dp 2 x cp 2, sharded, replicated and without FSDP, equals one process on the same micro-batches."""
    settings = {"train__steps": 6, "optim__max_grad_norm": 0.5}
    one = curve(tmp_path, "one", 1, train__micro_batch=2, **settings)
    meshes: dict[str, dict[str, Any]] = {
        "shard": {"parallel__dp_shard": 2},
        "hsdp": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1},
        "plain": {"parallel__dp_shard": 2, "parallel__fsdp": False},
        "recompute": {"parallel__dp_shard": 2, "parallel__activation_checkpointing": "full"},
    }
    for name, mesh in meshes.items():
        many = curve(tmp_path, name, 4, parallel__cp__size=2, **mesh, **settings)
        torch.testing.assert_close(many, one, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


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


def launch(path: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "recipes", "run", str(path), *overrides],
        cwd=ROOT, env={**os.environ, **(env or {})}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.dist2
def test_killed_run_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL to the launcher's whole process group in the middle of a run that saves at every step."""
    path = write_recipe(
        tmp_path, "killed", parallel__nproc=2, parallel__cp__size=2, train__steps=400, checkpoint__every=1
    )
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
    path = write_recipe(
        tmp_path, "killed", parallel__nproc=2, parallel__cp__size=2, train__steps=400, train__stop_after=step + 2
    )
    train(path, 2)
    assert len(losses(path)) == step + 2


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
        "    real, calls = base.attend_blocks, [0]\n"
        "    def failing(*args):\n"
        "        calls[0] += 1\n"
        "        if calls[0] == 13:\n"
        "            raise RuntimeError('disk on fire on this rank')\n"
        "        return real(*args)\n"
        "    import cp_core.strategies.compose as compose\n"
        "    compose.attend_blocks = failing\n"
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


def test_summary_of_a_run_whose_metrics_are_gone() -> None:
    """Found by deleting metrics.jsonl of a finished run and running it again."""
    assert summary([]).startswith("no step in metrics.jsonl")
    step = {"kind": "step", "loss": 2.0, "valid_loss": 1.5}
    assert summary([{"kind": "start", "unigram_cross_entropy": 3.0}, step]) == (
        "training loss 2.000 -> 2.000; valid loss 1.500 (unigram cross entropy of the valid set: 3.000)"
    )


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


@pytest.mark.dist2
def test_nonfinite_loss_stops_before_the_update(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path, "nan", parallel__nproc=2, parallel__cp__size=2, optim__lr=1e30, optim__max_grad_norm=None
    )
    with pytest.raises(
        WorkerError, match=r"step 2: loss .*gradient norm nan; the update was not made.*not finite here: model\."
    ):
        train(path, 2)


@pytest.mark.dist2
def test_export_loads_in_transformers(tmp_path: Path) -> None:
    """The folder holds all that transformers needs, and computes the same in fp32."""
    import transformers

    path = write_recipe(
        tmp_path, "export", parallel__nproc=2, parallel__cp__size=2, model__dtype="float32",
        export__hf=True, log__plot=True, train__steps=3,
    )  # fmt: skip
    train(path, 2)
    folder = tmp_path / "runs/export/export"
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("lambda x: x")["input_ids"]) == "lambda x: x"
    ids = torch.tensor([tokenizer("The if statement is used for conditional execution.")["input_ids"]])
    from models import AutoModelForCausalLM

    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(ours(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert (tmp_path / "runs/export/loss.png").stat().st_size > 5000
    # and the export is what a next recipe starts from
    again = write_recipe(
        tmp_path, "again", parallel__nproc=2, parallel__cp__size=2, model__dtype="float32", train__steps=2,
        model__init="pretrained", model__path=str(folder), model__config={}, data__tokenizer="model",
    )  # fmt: skip
    train(again, 2)
    assert losses(again)[0] < losses(path)[0]


@pytest.mark.dist2
def test_document_longer_than_the_sequence(tmp_path: Path) -> None:
    """``error`` refuses it with its length and the remedies; the other policies say what they did."""
    write_corpus(tmp_path, documents=6, characters=4000)
    path = write_recipe(tmp_path, "long", data__long_documents="error")
    with pytest.raises(WorkerError, match=r"(?s)long_documents.*split.*truncate"):
        train(path, 1)
