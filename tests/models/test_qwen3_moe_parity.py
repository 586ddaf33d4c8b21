"""Qwen3-MoE against transformers: loss, aux loss, logits and every gradient, at cp 1, 2 and 4."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_core.testing import run_distributed
from models import ParallelConfig
from tests.models._parity import (
    FP64,
    PRELOAD,
    Batch,
    Outcome,
    checkpoint,
    close,
    load,
    mesh_of,
    outside,
    random_batch,
    remembered,
    step,
    strategies,
    transformers_step,
)

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """A config and a length; odd lengths make ``shard_batch`` pad."""

    length: int
    config: dict[str, Any] = field(default_factory=dict)
    stride: int = 1  # of the positions
    aux: bool = True

    def batch(self) -> Batch:
        batch = random_batch(self.length, seed=self.length)
        if self.stride > 1:
            jumps = torch.randint(1, 2 * self.stride, (2, self.length), generator=torch.Generator().manual_seed(3))
            batch["position_ids"] = torch.stack([self.stride * torch.arange(self.length), jumps[1].cumsum(0)])
        return batch


CASES = {
    "T1": Case(64),
    "T1 without aux loss": Case(17, aux=False),
    "4 kv heads": Case(61, {"num_key_value_heads": 4}),
    "1 kv head": Case(30, {"num_key_value_heads": 1}),
    "mlp_only_layers": Case(30, {"mlp_only_layers": [1]}),
    "decoder_sparse_step": Case(17, {"decoder_sparse_step": 2}),
    "norm_topk_prob off": Case(15, {"norm_topk_prob": False}),
    "attention_bias": Case(61, {"attention_bias": True}),
    "tied": Case(33, {"tie_word_embeddings": True}),
    "yarn": Case(
        61,
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "positions with gaps": Case(30, stride=3),
}  # fmt: skip
Key = tuple[str, str, torch.dtype]


@cache
def reference(name: str, dtype: torch.dtype) -> Outcome:
    case = CASES[name]
    batch = case.batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # else transformers takes gaps for document starts
    return transformers_step(checkpoint(**case.config), dtype, batch, output_router_logits=case.aux)


@cache
def one_process(name: str, dtype: torch.dtype) -> Outcome:
    case = CASES[name]
    return step(load(checkpoint(**case.config), dtype), case.batch(), output_router_logits=case.aux)


def worker(rank: int, size: int, folders: dict[str, Path]) -> tuple[dict[Key, Outcome], dict[Key, float]]:
    """All cases; whole outcomes from rank 0, losses from every rank."""
    mesh = mesh_of({"cp": size})
    outcomes, losses = {}, {}
    for name, case in CASES.items():
        for algorithm in strategies(size):
            for dtype in DTYPES:
                model = load(folders[name], dtype, mesh, algorithm)
                outcome = step(model, case.batch(), mesh, output_router_logits=case.aux)
                losses[name, algorithm, dtype] = outcome.loss
                if rank == 0:
                    outcomes[name, algorithm, dtype] = outcome
    return outcomes, losses


@remembered
def distributed(size: int) -> list[tuple[dict[Key, Outcome], dict[Key, float]]]:
    folders = {name: checkpoint(**case.config) for name, case in CASES.items()}
    return run_distributed(worker, size, folders, preload=PRELOAD, timeout=280)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str, dtype: torch.dtype) -> None:
    close(one_process(name, dtype), reference(name, dtype), **outside(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("size", "algorithm"),
    [
        pytest.param(size, algorithm, id=f"cp{size}-{algorithm}", marks=marker)
        for size, marker in ((2, pytest.mark.dist2), (4, pytest.mark.dist4))
        for algorithm in strategies(size)
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_context_parallel(name: str, size: int, algorithm: str, dtype: torch.dtype) -> None:
    results = distributed(size)
    outcome = results[0][0][name, algorithm, dtype]
    close(outcome, reference(name, dtype), **outside(dtype))
    if dtype == torch.float64:
        close(outcome, one_process(name, dtype), **FP64)
    assert len({losses[name, algorithm, dtype] for _, losses in results}) == 1  # bitwise equal on every rank


def test_padding_token_among_the_inputs() -> None:
    """transformers' embedding gives the row of ``pad_token_id`` no gradient, where the token is no padding as well."""
    folder, batch = checkpoint(pad_token_id=5), random_batch(21)
    batch["input_ids"][:, 3] = 5
    close(step(load(folder, torch.float64), batch), transformers_step(folder, torch.float64, batch), **FP64)


def bf16_worker(rank: int, size: int, folder: Path, batch: Batch) -> list[Outcome]:
    mesh = mesh_of({"cp": size})
    return [
        step(load(folder, torch.bfloat16, mesh, algorithm, parallel=ParallelConfig(fsdp=fsdp)), batch, mesh)
        for algorithm in strategies(size)
        for fsdp in (False, True)
    ]


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)], ids=["cp2", "cp4"]
)
def test_bf16_is_as_near_to_fp64_as_one_process(size: int) -> None:
    # dense layers: a router's near ties flip in bf16 and would hide everything else
    folder, batch = checkpoint(mlp_only_layers=[0, 1]), random_batch(61, seed=5)
    exact, alone = step(load(folder, torch.float64), batch), step(load(folder, torch.bfloat16), batch)

    def errors(outcome: Outcome) -> Tensor:
        """Norm of the difference over the norm: of the logits, and of all gradients together."""
        got, want = (torch.cat([x.flatten() for x in side.grads.values()]).double() for side in (outcome, exact))
        logits = (outcome.logits - exact.logits).norm() / exact.logits.norm()
        return torch.stack([logits, (got - want).norm() / want.norm()])

    bound = errors(alone)
    assert bool((bound > 0).all())
    for outcome in run_distributed(bf16_worker, size, folder, batch, preload=PRELOAD)[0]:
        assert bool((errors(outcome) <= 1.5 * bound).all()), (errors(outcome), bound)
