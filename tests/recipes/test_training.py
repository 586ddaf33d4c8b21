"""Whole runs: the same curve on every mesh, what stops a run, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import recipes.export
from cp_core.testing import WorkerError, run_distributed
from recipes.finetune import summary

from ._training import PRELOAD, curve, losses, run_worker, train, write_corpus, write_recipe


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
    for size, algorithm in ((2, "all_gather"), (4, "all_gather"), (2, "ulysses"), (4, "ulysses")):
        cp = {"parallel__cp__size": size, "parallel__cp__algorithm": algorithm}
        many = curve(tmp_path, f"{algorithm}{size}", size, **cp, **settings)
        torch.testing.assert_close(many[:5], one[:5], rtol=1e-5, atol=0)
        torch.testing.assert_close(many, one, rtol=1e-4, atol=0)


@pytest.mark.dist4
def test_data_parallel_beside_cp(tmp_path: Path) -> None:
    """dp 2 x cp 2, sharded, replicated and without FSDP, equals one process on the same micro-batches.

    SGD with active clipping: AdamW would forgive a gradient of the wrong scale. 18 valid rows at a width of 4 leave one
    data rank without a row in the last round.
    """
    settings = {
        "train__steps": 6,
        "optim__name": "sgd",
        "optim__lr": 0.3,
        "optim__max_grad_norm": 0.5,
        "train__eval_every": 2,
    }
    one = curve(tmp_path, "one", 1, train__micro_batch=2, **settings)
    assert min(losses(tmp_path / "one.yaml", "grad_norm")) > 0.5
    meshes: dict[str, dict[str, Any]] = {
        "shard": {"parallel__dp_shard": 2},
        "hsdp": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1},
        "plain": {"parallel__dp_shard": 2, "parallel__fsdp": False},
        "recompute": {"parallel__dp_shard": 2, "parallel__activation_checkpointing": "full"},
    }
    for name, mesh in meshes.items():
        many = curve(tmp_path, name, 4, parallel__cp__size=2, **mesh, **settings)
        torch.testing.assert_close(many, one, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        for key in ("grad_norm", "aux_loss", "valid_loss"):
            found, expected = (losses(tmp_path / f"{run}.yaml", key) for run in (name, "one"))
            assert found == pytest.approx(expected, rel=1e-9), (name, key)
            assert len(expected) == (3 if key == "valid_loss" else 6)


@pytest.mark.dist2
def test_finetune_recipe_in_bf16(tmp_path: Path) -> None:
    """The shipped recipe's path, small: a bf16 checkpoint, a .jsonl, activation checkpointing, cp 2; then as bf16 itself."""
    start = write_recipe(tmp_path, "start", model__dtype="bfloat16", export__hf=True, train__steps=2)
    train(start, 1)
    for dtype in ("float32", "bfloat16"):
        path = write_recipe(
            tmp_path, dtype, parallel__nproc=2, parallel__cp__size=2, model__dtype=dtype, train__steps=3,
            model__init="pretrained", model__path=str(tmp_path / "runs/start/export"), model__config={},
            data__tokenizer="model", parallel__activation_checkpointing="full", export__hf=True,
        )  # fmt: skip
        train(path, 2)
        assert losses(path)[0] < losses(start)[0]
        saved = json.loads((tmp_path / "runs" / dtype / "export" / "config.json").read_text())
        assert saved["dtype"] == "bfloat16"  # each tensor keeps the dtype that it had


def broken_export_worker(rank: int, world_size: int, path: str) -> None:
    def other_logits(run: Any, folder: Path) -> tuple[float, float, int] | None:
        return (0.5, 2.0, 7) if rank == 0 else None

    recipes.export.logit_difference = other_logits
    run_worker(rank, world_size, path)


@pytest.mark.dist2
def test_an_export_that_computes_something_else_fails_the_run(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path, "other", parallel__nproc=2, parallel__cp__size=2, model__dtype="float32", export__hf=True, train__steps=1,
        optim__warmup_steps=0,
    )  # fmt: skip
    with pytest.raises(WorkerError, match=r"transformers computes other logits from it: 5\.00e-01 over 7 tokens"):
        run_distributed(broken_export_worker, 2, str(path), timeout=120, preload=PRELOAD)


def test_summary_of_a_run_whose_metrics_are_gone() -> None:
    """Found by deleting metrics.jsonl of a finished run and running it again."""
    assert summary([]).startswith("no step in metrics.jsonl")
    step = {"kind": "step", "loss": 2.0, "valid_loss": 1.5}
    assert summary([{"kind": "start", "unigram_cross_entropy": 3.0}, step]) == (
        "training loss 2.000 -> 2.000; valid loss 1.500 (unigram cross entropy of the valid set: 3.000)"
    )


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
