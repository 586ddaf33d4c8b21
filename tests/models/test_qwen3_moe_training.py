"""Optimizer steps with uneven accumulation, data parallel beside cp, FSDP2: equal to one process, in fp64."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_core import Topology, shard_batch, sync_gradients
from cp_core.testing import run_distributed
from models import ParallelConfig, Qwen3MoeForCausalLM
from tests.models._parity import (
    COEF,
    FP32,
    FP64,
    PRELOAD,
    Batch,
    Outcome,
    alone,
    aux_by_hand,
    checkpoint,
    close,
    gradients,
    load,
    mesh_of,
    random_batch,
    random_ids,
    remembered,
    spans_of,
    step,
)

DP_CP = {"dp_shard": 2, "cp": 2}
HSDP = {"dp_replicate": 2, "cp": 2}
LENGTH, ITEMS = 30, 16
SUPERVISED = ((3, 0), (0, 0), (2, 11))  # tokens of each row of each micro-batch; 16 in all


@dataclass(frozen=True)
class Run:
    """A mesh and what is applied."""

    sizes: tuple[tuple[str, int], ...]
    fsdp: bool
    checkpointing: str
    optimizer: str
    algorithm: str = "all_gather"

    @property
    def world_size(self) -> int:
        return int(torch.tensor([size for _, size in self.sizes]).prod())


def micro_batches(step: int) -> list[Batch]:
    """Three of two rows; few labels, some without any."""
    batches = []
    for number, counts in enumerate(SUPERVISED):
        input_ids = random_ids(2, LENGTH, 100 * step + number)
        labels = torch.full_like(input_ids, -100)
        for row, count in enumerate(counts):
            order = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(step + 7 * number + row))
            chosen = order[:count] + 1
            labels[row, chosen] = input_ids[row, chosen]
        batches.append({"input_ids": input_ids, "labels": labels})
    return batches


def my_rows(batch: Batch, mesh: DeviceMesh | None) -> Batch:
    """This data rank's rows of the global batch."""
    dp = Topology.from_mesh(mesh).dp
    return {key: value.chunk(dp.size)[dp.rank] for key, value in batch.items()}


def train(model: Qwen3MoeForCausalLM, mesh: DeviceMesh | None, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of three micro-batches; this data rank's part of the losses, and the whole parameters after."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    parameters = list(model.parameters())
    if optimizer == "sgd":
        chosen: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
    else:
        chosen = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    losses = []
    for number in range(3):
        total = 0.0
        for batch in micro_batches(number):
            local = shard_batch(my_rows(batch, mesh), mesh)
            out = model(**local, num_items_in_batch=ITEMS, output_router_logits=True, return_logits=False)
            out.loss.backward()
            total += out.token_loss.item()
        if not sharded:
            sync_gradients(model, mesh)
        chosen.step()
        chosen.zero_grad()
        losses.append(total)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return losses, {name: value.detach().clone() for name, value in whole.items()}


@cache
def one_process(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(load(checkpoint(), torch.float64), None, optimizer)


def digest(parameters: dict[str, Tensor]) -> str:
    joined = hashlib.sha256()
    for value in parameters.values():
        joined.update(value.contiguous().numpy().tobytes())
    return joined.hexdigest()


Trained = tuple[int, list[float], str, dict[str, Tensor]]  # data rank, losses, hash, parameters (rank 0)


def worker(rank: int, size: int, folder: Path, runs: list[Run]) -> dict[Run, Trained]:
    found = {}
    for run in runs:
        mesh = mesh_of(dict(run.sizes))
        parallel = ParallelConfig(fsdp=run.fsdp, activation_checkpointing=run.checkpointing)
        model = load(folder, torch.float64, mesh, run.algorithm, parallel=parallel)
        losses, parameters = train(model, mesh, run.optimizer)
        found[run] = (model.topology.dp.rank, losses, digest(parameters), parameters if rank == 0 else {})
    return found


def _runs() -> list[Run]:
    cp2, cp4, data, replicas = (("cp", 2),), (("cp", 4),), tuple(DP_CP.items()), tuple(HSDP.items())
    runs = [Run(cp2, fsdp, ac, opt) for fsdp in (False, True) for ac in ("none", "full") for opt in ("sgd", "adamw")]
    runs += [Run(cp2, True, "none", "adamw", "ulysses"), Run((("dp_shard", 2),), True, "none", "sgd")]
    runs += [Run(cp4, False, "none", "sgd"), Run(cp4, True, "full", "adamw", "ulysses")]
    runs += [Run(sizes, fsdp, "none", "adamw") for sizes in (data, replicas) for fsdp in (False, True)]
    runs += [Run(cp2, True, "full", "adamw", "ring async head-tail"), Run(cp4, True, "full", "adamw", "hybrid async")]
    return [
        *runs,
        Run(data, True, "none", "adamw", "all_gather async"),
        Run(data, True, "full", "sgd"),
        Run((("dp_replicate", 2), ("dp_shard", 1), ("cp", 2)), True, "full", "sgd"),
    ]


RUNS = _runs()


@remembered
def trained(size: int) -> list[dict[Run, Trained]]:
    runs = [run for run in RUNS if run.world_size == size]
    return run_distributed(worker, size, checkpoint(), runs, preload=PRELOAD, timeout=150)


def _case(run: Run) -> object:
    name = "x".join(f"{axis}{size}" for axis, size in run.sizes)
    text = f"{name}-{run.algorithm}-{'fsdp' if run.fsdp else 'plain'}-ac_{run.checkpointing}-{run.optimizer}"
    return pytest.param(run, id=text, marks=pytest.mark.dist2 if run.world_size == 2 else pytest.mark.dist4)


@pytest.mark.parametrize("run", [_case(run) for run in RUNS])
def test_three_steps_equal_one_process(run: Run) -> None:
    results = [ranks[run] for ranks in trained(run.world_size)]
    losses, parameters = one_process(run.optimizer)
    got = {data_rank: part for data_rank, part, _, _ in results}
    for data_rank, part, _, _ in results:
        assert part == got[data_rank]  # equal on every cp rank
    for number, want in enumerate(losses):
        assert abs(sum(part[number] for part in got.values()) - want) <= 1e-9 * want
    assert len({text for _, _, text, _ in results}) == 1  # every replica holds the same bits
    whole = results[0][3]
    assert whole.keys() == parameters.keys()
    for name, want in parameters.items():
        assert float((whole[name] - want).abs().max()) <= 1e-9 * float(want.abs().max()), name


def test_one_process_steps_move_every_parameter() -> None:
    start = load(checkpoint(), torch.float64)
    for optimizer in ("sgd", "adamw"):
        _, parameters = one_process(optimizer)
        for name, parameter in start.named_parameters():
            assert not torch.equal(parameters[name], parameter), name


def test_accumulation_is_one_big_batch() -> None:
    """Without the router's loss, whose statistics are a micro-batch's, three micro-batches are one batch."""
    model = load(checkpoint(), torch.float64)
    batches = micro_batches(0)
    for batch in batches:
        model(**batch, num_items_in_batch=ITEMS).loss.backward()
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    want = alone(checkpoint(), torch.float64, whole, spans_of([[LENGTH]] * 6), with_aux=False)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want.grads[name], rtol=1e-10, atol=1e-12)


# dp 2 x cp 2 in every gradient.


def uneven_rows(length: int = 16) -> Batch:
    """Known fault B5: 5 and 11 targets."""
    batch = random_batch(length, seed=21)
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, count in enumerate((5, 11)):
        batch["labels"][row, length - count :] = batch["input_ids"][row, length - count :]
    return batch


def by_hand(folder: Path, batch: Batch, items: int | None) -> Outcome:
    """One process, both rows at once; the loss from the logits: the mean of the rows' means, or the sum over items."""
    model = load(folder, torch.float64)
    out = model(batch["input_ids"], output_router_logits=True)
    rows = [
        F.cross_entropy(out.logits[row, :-1], batch["labels"][row, 1:], reduction="mean" if items is None else "sum")
        for row in range(2)
    ]
    aux = aux_by_hand(out.router_logits, model.config.num_experts_per_tok)
    token_loss = sum(rows) / (2 if items is None else items)
    (token_loss + COEF * aux * (1 if items is None else 16 / items)).backward()
    return Outcome(token_loss.item(), aux.item(), torch.empty(0), gradients(model))


def data_parallel_worker(
    rank: int, size: int, folder: Path, sizes: dict[str, int], fsdp: bool, dtype: torch.dtype
) -> list[tuple[float, Outcome]]:
    mesh = mesh_of(sizes)
    found = []
    for items in (None, 40):
        model = load(folder, dtype, mesh, parallel=ParallelConfig(fsdp=fsdp))
        batch = my_rows(uneven_rows(), mesh)
        outcome = step(model, batch, mesh, num_items_in_batch=items, output_router_logits=True, return_logits=False)
        share = COEF * outcome.aux * (1 if items is None else 16 / items)
        found.append((outcome.loss - share, outcome))
    return found


@pytest.mark.dist4
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])  # FSDP2 sums them differently
@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("sizes", [DP_CP, HSDP], ids=["dp_shard", "dp_replicate"])
def test_dp_2_cp_2_gradients(sizes: dict[str, int], fsdp: bool, dtype: torch.dtype) -> None:
    results = run_distributed(data_parallel_worker, 4, checkpoint(), sizes, fsdp, dtype, preload=PRELOAD)
    tolerance = FP64 if dtype == torch.float64 else FP32
    for index, items in enumerate((None, 40)):
        want = by_hand(checkpoint(), uneven_rows(), items)
        parts = [results[rank][index][0] for rank in (0, 2)]  # a data rank's own mean, or its part of the sum
        assert sum(parts) / (2 if items is None else 1) == pytest.approx(want.loss, rel=tolerance["loss"])
        for ranks in results:
            outcome = ranks[index][1]
            close(Outcome(want.loss, outcome.aux, torch.empty(0), outcome.grads), want, **tolerance)


# Switches that must not change a number.


def test_gradient_checkpointing_changes_no_bit() -> None:
    model, batch = load(checkpoint(), torch.float32), random_batch(40)
    want = step(model, batch, output_router_logits=True)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].self_attn.q_proj.register_forward_hook(count)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    got = step(model, batch, output_router_logits=True)
    assert calls == 2  # it did recompute
    assert got.loss == want.loss
    assert got.aux == want.aux
    for name, grad in want.grads.items():
        assert torch.equal(got.grads[name], grad), name
    model.eval()
    calls = 0
    step(model, batch)
    assert calls == 1
    model.train().gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    calls = 0
    step(model, batch)
    assert calls == 1
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        model.gradient_checkpointing_enable({"use_reentrant": True})


def checkpointing_worker(rank: int, size: int, folder: Path) -> None:
    mesh, batch = mesh_of({"cp": size}), random_batch(61)
    for algorithm in ("all_gather", "ulysses"):
        model = load(folder, torch.float32, mesh, algorithm)
        want = step(model, batch, mesh, output_router_logits=True)
        model.gradient_checkpointing_enable()
        got = step(model, batch, mesh, output_router_logits=True)
        assert got.loss == want.loss
        for name, grad in want.grads.items():
            assert torch.equal(got.grads[name], grad), name


@pytest.mark.dist2
def test_gradient_checkpointing_changes_no_bit_at_cp_2() -> None:
    run_distributed(checkpointing_worker, 2, checkpoint(), preload=PRELOAD)
