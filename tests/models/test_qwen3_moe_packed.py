"""Packed documents, padding and labels that few ranks have: against each document run alone in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_core import shard_batch, sync_gradients, unshard
from cp_core.testing import run_distributed
from tests.models._parity import (
    FP64,
    PRELOAD,
    Batch,
    Outcome,
    Span,
    alone,
    checkpoint,
    close,
    document_ids,
    load,
    mesh_of,
    oracle,
    outside,
    random_ids,
    remembered,
    spans_of,
    step,
    uneven_labels,
)

DTYPES = (torch.float32, torch.float64)
REAL = 80  # real tokens are below, padding is at or above
ALGORITHMS = ("all_gather", "ulysses", "ring async head-tail")
SIZES = [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)]


@dataclass(frozen=True)
class Scenario:
    """Document lengths of each row (negative: padding) and the tokens whose labels count (None: uneven)."""

    rows: tuple[tuple[int, ...], ...]
    supervised: tuple[int, ...] | None = None
    packed_as: str = "document_ids"  # or "cu_seqlens", "position_ids", "attention_mask"

    @property
    def spans(self) -> list[Span]:
        return spans_of(self.rows)

    def batch(self) -> Batch:
        length = sum(map(abs, self.rows[0]))
        shape = (len(self.rows), length)
        ids = document_ids(self.spans, shape)
        real = ids >= 0
        input_ids = torch.where(real, random_ids(*shape, 7, 1, REAL), random_ids(*shape, 8, REAL, 97))
        labels = uneven_labels(input_ids, 9)
        if self.supervised is not None:
            kept = torch.zeros(shape, dtype=torch.bool)
            kept[:, list(self.supervised)] = True
            labels = input_ids.masked_fill(~kept, -100)
        return {"input_ids": input_ids, "labels": labels.masked_fill(~real, -100), **self._layout(ids)}

    def _layout(self, ids: Tensor) -> Batch:
        if self.packed_as == "document_ids":
            return {"document_ids": ids}
        if self.packed_as == "attention_mask":
            return {"attention_mask": (ids >= 0).long()}
        length = ids.shape[1]
        if self.packed_as == "cu_seqlens":
            return {"cu_seqlens": torch.tensor([0, *(row * length + stop for row, _, stop in self.spans)])}
        positions = torch.zeros_like(ids)
        for row, start, stop in self.spans:
            positions[row, start:stop] = torch.arange(stop - start)
        return {"position_ids": positions}


DOCUMENTS = ((37, 51, 40), (1, 5, 90, 32))
SCENARIOS = {
    "packed": Scenario(DOCUMENTS),
    "packed, cu_seqlens": Scenario(DOCUMENTS, packed_as="cu_seqlens"),
    "packed, positions start again": Scenario(DOCUMENTS, packed_as="position_ids"),
    "packed, odd": Scenario(((20, 40, 1), (61,))),
    "left padding": Scenario(((-5, 11), (16,)), packed_as="attention_mask"),
    "right padding": Scenario(((11, -5), (16,)), packed_as="attention_mask"),
    "both paddings and packed": Scenario(((-5, 29, 14, -15), (40, -3, 20))),
    "a row of padding": Scenario(((-30,), (13, 17))),
    "labels on one rank": Scenario(((32,), (32,)), tuple(range(9, 16))),
    "one label, first token of a rank": Scenario(((32,), (32,)), (16,)),
    "ranks without tokens": Scenario(((8, -24), (7, -25)), packed_as="attention_mask"),
    "17 tokens": Scenario(((17,), (17,))),
    "1 token a rank and fewer": Scenario(((3,), (3,))),
}


@cache
def reference(name: str, dtype: torch.dtype) -> Outcome:
    return alone(checkpoint(), dtype, SCENARIOS[name].batch(), SCENARIOS[name].spans)


@cache
def one_process(name: str, dtype: torch.dtype) -> Outcome:
    return step(load(checkpoint(), dtype), SCENARIOS[name].batch(), output_router_logits=True)


Key = tuple[str, str, torch.dtype]


def worker(rank: int, size: int, folder: Path) -> dict[Key, Outcome]:
    mesh, outcomes = mesh_of({"cp": size}), {}
    for algorithm in ALGORITHMS:
        for dtype in DTYPES:
            model = load(folder, dtype, mesh, algorithm)
            for name, scenario in SCENARIOS.items():
                outcome = step(model, scenario.batch(), mesh, output_router_logits=True)
                if rank == 0:
                    outcomes[name, algorithm, dtype] = outcome
    return outcomes


@remembered
def distributed(size: int) -> dict[Key, Outcome]:
    return run_distributed(worker, size, checkpoint(), preload=PRELOAD, timeout=120)[0]


def check(name: str, outcome: Outcome, dtype: torch.dtype) -> None:
    close(outcome, reference(name, dtype), **outside(dtype), spans=SCENARIOS[name].spans)
    embedding = outcome.grads["model.embed_tokens.weight"]
    assert not embedding[REAL:].any()  # ids of padding
    assert not embedding[0].any()  # the id that shard_batch pads with; no real token has it
    assert embedding[1:REAL].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process(name: str, dtype: torch.dtype) -> None:
    check(name, one_process(name, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_context_parallel(name: str, size: int, algorithm: str, dtype: torch.dtype) -> None:
    outcome = distributed(size)[name, algorithm, dtype]
    check(name, outcome, dtype)
    if dtype == torch.float64:
        close(outcome, one_process(name, dtype), **FP64, spans=SCENARIOS[name].spans)


@pytest.mark.parametrize("name", ["left padding", "right padding"])
def test_aux_loss_of_padding_is_that_of_transformers_with_a_mask(name: str) -> None:
    batch = SCENARIOS[name].batch()
    want = oracle(checkpoint(), torch.float32)(
        batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True
    )
    got = one_process(name, torch.float32)
    assert got.aux == pytest.approx(want.aux_loss.item(), rel=1e-6)
    for row, start, stop in SCENARIOS[name].spans:
        torch.testing.assert_close(got.logits[row, start:stop], want.logits[row, start:stop], rtol=0, atol=1e-5)


def silent_worker(rank: int, size: int, folder: Path) -> None:
    """No target anywhere, and none in one row of padding."""
    sizes = {"cp": size} if size > 1 else {}
    mesh = mesh_of(sizes)
    for algorithm in ALGORITHMS:
        for dtype in DTYPES:
            model = load(folder, dtype, mesh, algorithm)
            for extra in ({}, {"return_logits": False}, {"num_items_in_batch": 0}):
                batch = SCENARIOS["both paddings and packed"].batch()
                batch["labels"].fill_(-100)
                local = shard_batch(batch, mesh)
                model.zero_grad()
                out = model(**local, **extra)
                assert out.loss.item() == 0.0
                out.loss.backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None, name
                    assert not parameter.grad.any(), name
                sync_gradients(model, mesh)
                assert not any(parameter.grad.any() for parameter in model.parameters())


def test_no_label_at_all_one_process() -> None:
    silent_worker(0, 1, checkpoint())


@pytest.mark.parametrize("size", SIZES)
def test_no_label_at_all(size: int) -> None:
    run_distributed(silent_worker, size, checkpoint(), preload=PRELOAD)


# What one token can reach.


def isolation_worker(rank: int, size: int, folder: Path, dense: Path) -> None:
    mesh = mesh_of({"cp": size} if size > 1 else {})
    for algorithm in ALGORITHMS:
        _gradient_stays_in_its_document(folder, mesh, algorithm)
        _perturbation_stays_in_its_document(dense, mesh, algorithm)
        _causality(dense, mesh, algorithm)


def _gradient_stays_in_its_document(folder: Path, mesh: DeviceMesh | None, algorithm: str) -> None:
    scenario = SCENARIOS["packed"]
    for dtype in DTYPES:
        model = load(folder, dtype, mesh, algorithm)
        batch = scenario.batch()
        row, start, stop = scenario.spans[1]
        batch["labels"].fill_(-100)[row, start:stop] = batch["input_ids"][row, start:stop]
        local = shard_batch(batch, mesh)
        embedded = model.model.embed_tokens(local.pop("input_ids")).detach().requires_grad_()
        model(inputs_embeds=embedded, **local).loss.backward()
        grad = unshard(embedded.grad, 1, local["sequence"])
        inside = torch.zeros(grad.shape[:2], dtype=torch.bool)
        inside[row, start:stop] = True
        assert not grad[~inside].any()
        assert bool(grad[row, start : stop - 1].any(-1).all())


def _logits(model: Any, batch: Batch, mesh: DeviceMesh | None) -> Tensor:
    local = shard_batch(batch, mesh)
    with torch.no_grad():
        return unshard(model(**local).logits, 1, local["sequence"])


def _perturbation_stays_in_its_document(dense: Path, mesh: DeviceMesh | None, algorithm: str) -> None:
    # dense layers: another routing would change the number of rows of a matmul and with it the last bit
    scenario = SCENARIOS["packed"]
    model = load(dense, torch.float32, mesh, algorithm)
    batch = scenario.batch()
    before = _logits(model, batch, mesh)
    batch["input_ids"][0, :37] = random_ids(1, 37, 99, 1, REAL)[0]
    change = (_logits(model, batch, mesh) - before).abs().amax(-1)
    assert bool((change[0, :37] > 0).all())
    assert not change[0, 37:].any()
    assert not change[1].any()


def _causality(dense: Path, mesh: DeviceMesh | None, algorithm: str) -> None:
    model = load(dense, torch.float32, mesh, algorithm)
    batch = SCENARIOS["17 tokens"].batch()
    before = _logits(model, batch, mesh)
    for token, reached in ((0, slice(0, None)), (8, slice(8, None)), (16, slice(16, None))):
        changed = {key: value.clone() for key, value in batch.items()}
        changed["input_ids"][0, token] += 1
        change = (_logits(model, changed, mesh) - before).abs().amax(-1)
        assert bool((change[0, reached] > 0).all())
        assert not change[0, : reached.start].any()
        assert not change[1].any()


def test_isolation_one_process() -> None:
    isolation_worker(0, 1, checkpoint(), checkpoint(mlp_only_layers=[0, 1]))


@pytest.mark.parametrize("size", SIZES)
def test_isolation(size: int) -> None:
    run_distributed(isolation_worker, size, checkpoint(), checkpoint(mlp_only_layers=[0, 1]), preload=PRELOAD)
