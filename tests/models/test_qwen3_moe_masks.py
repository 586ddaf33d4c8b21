"""A user's mask, and the flex kernel, in the whole model: against transformers with the same mask."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_core import ContextParallelConfig
from cp_core.testing import run_distributed
from models import Qwen3MoeForCausalLM
from tests.models._parity import (
    PRELOAD,
    STRATEGIES,
    Batch,
    Outcome,
    checkpoint,
    close,
    mesh_of,
    outside,
    random_batch,
    step,
    strategies,
    transformers_step,
)

LENGTH = 45
DTYPE = torch.float64
SIZES = [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)]


def user_mask() -> Tensor:
    """``[B, 1, S, S]`` bool; every query sees itself, and some of the keys before it."""
    seen = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5
    return seen | torch.eye(LENGTH, dtype=torch.bool)


@cache
def reference() -> Outcome:
    """transformers takes a mask of four dims as it is, so causality is in it."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return transformers_step(checkpoint(), DTYPE, {**random_batch(LENGTH), "attention_mask": user_mask() & causal})


def outcome(folder: Path, kernel: str, name: str, mesh: DeviceMesh | None = None) -> Outcome:
    cp = ContextParallelConfig(**STRATEGIES[name], kernel=kernel, kv_head_policy="repeat")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, mesh=mesh, cp=cp, dtype=DTYPE).train()
    assert {record.kernel for record in model.cp_report} == {kernel}
    batch: Batch = {**random_batch(LENGTH), "attention_mask": user_mask()}
    return step(model, batch, mesh)


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_one_process(kernel: str) -> None:
    close(outcome(checkpoint(), kernel, "all_gather"), reference(), **outside(DTYPE))


def worker(rank: int, size: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    mesh = mesh_of({"cp": size})
    return {
        (kernel, name): outcome(folder, kernel, name, mesh) for kernel in ("sdpa", "flex") for name in strategies(size)
    }


@pytest.mark.parametrize("size", SIZES)
def test_context_parallel(size: int) -> None:
    for found in run_distributed(worker, size, checkpoint(), preload=PRELOAD, timeout=120):
        for key, got in found.items():
            close(got, reference(), **outside(DTYPE))
            assert got.loss != step_without_mask(), key


@cache
def step_without_mask() -> float:
    return transformers_step(checkpoint(), DTYPE, random_batch(LENGTH)).loss
