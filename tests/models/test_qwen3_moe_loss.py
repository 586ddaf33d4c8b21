"""What the loss counts, which labels win, what is refused, and that logits of all tokens never exist in training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_core import shard_batch
from cp_core.testing import run_distributed
from models import Qwen3MoeForCausalLM
from models.common.tiny import tiny_qwen3_moe_config
from tests.cp_core._helpers import Allocations, refusal
from tests.models._parity import (
    FP64,
    PRELOAD,
    Batch,
    Outcome,
    alone,
    checkpoint,
    close,
    load,
    mesh_of,
    oracle,
    random_batch,
    spans_of,
    step,
    transformers_step,
)

SIZES = [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)]


def shifted(labels: Tensor) -> Tensor:
    """Written out: target of token t is label t + 1."""
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    return targets


def mean_of(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), ignore_index=-100).item()


# One process, called as transformers is called.


def test_called_like_transformers() -> None:
    batch = random_batch(21)
    want = transformers_step(checkpoint(), torch.float32, batch)
    model = load(checkpoint(), torch.float32)
    out = model(**batch)
    assert out.loss.item() == pytest.approx(want.loss, rel=1e-6)
    torch.testing.assert_close(out.logits, want.logits, rtol=0, atol=1e-5)
    assert out.aux_loss is None
    assert out.router_logits is None
    assert out["loss"] is out.loss
    assert [key for key, _ in out.items()] == ["loss", "logits", "token_loss"]
    assert model(input_ids=batch["input_ids"]).loss is None
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :6] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    labels[0, 6] = -100  # transformers would predict the first real token from padding
    theirs = oracle(checkpoint(), torch.float32)(batch["input_ids"], attention_mask=mask, labels=labels)
    ours = model(batch["input_ids"], attention_mask=mask, labels=labels)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_router_logits_are_those_of_transformers() -> None:
    batch = random_batch(21)
    config = {"output_router_logits": True}
    theirs = oracle(checkpoint(**config), torch.float32)(**batch)
    model = load(checkpoint(**config), torch.float32)
    ours = model(**batch)  # the config asks for them
    assert len(ours.router_logits) == len(theirs.router_logits) == 2
    for a, b in zip(ours.router_logits, theirs.router_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert ours.token_loss.item() + 0.01 * ours.aux_loss.item() == pytest.approx(ours.loss.item(), rel=1e-6)
    assert not ours.token_loss.requires_grad
    without = model(**batch, output_router_logits=False)
    assert without.aux_loss is None
    assert without.loss.item() == pytest.approx(ours.token_loss.item(), rel=1e-7)
    only_aux = model(batch["input_ids"], output_router_logits=True)
    assert only_aux.loss is None
    assert only_aux.aux_loss.item() == pytest.approx(ours.aux_loss.item(), rel=1e-6)


@pytest.mark.parametrize("through_shard_batch", [False, True])
def test_shift_labels_win(through_shard_batch: bool) -> None:
    """Known fault B3: shift_labels only, both, both disagreeing."""
    model = load(checkpoint(), torch.float64)
    batch = random_batch(21)
    other = torch.full_like(batch["input_ids"], -100)
    other[0, 3], other[1, 17] = 5, 6
    logits = model(batch["input_ids"]).logits
    targets = shifted(batch["labels"])

    def loss(**labels: Tensor) -> float:
        given = {"input_ids": batch["input_ids"], **labels}
        return model(**(shard_batch(given) if through_shard_batch else given)).loss.item()

    assert loss(labels=batch["labels"]) == pytest.approx(mean_of(logits, targets), rel=1e-12)
    assert loss(shift_labels=targets) == pytest.approx(mean_of(logits, targets), rel=1e-12)
    assert loss(labels=batch["labels"], shift_labels=targets) == pytest.approx(mean_of(logits, targets), rel=1e-12)
    assert loss(labels=batch["labels"], shift_labels=other) == pytest.approx(mean_of(logits, other), rel=1e-12)


def test_labels_beside_a_sequence_shift_inside_documents() -> None:
    model = load(checkpoint(), torch.float64)
    batch = random_batch(20)
    layout = {"document_ids": torch.tensor([[0] * 7 + [1] * 13, [0] * 20])}
    want = model(**shard_batch({**batch, **layout})).loss.item()
    local = shard_batch({"input_ids": batch["input_ids"], **layout})
    assert model(**local, labels=batch["labels"]).loss.item() == want
    assert model(**batch, sequence=local["sequence"]).loss.item() == want  # positions come from the sequence as well


@pytest.mark.parametrize("number", [50, torch.tensor(50), torch.tensor(50.0)], ids=["int", "tensor", "float tensor"])
@pytest.mark.parametrize("aux", [False, True])
def test_num_items_in_batch(number: Any, aux: bool) -> None:
    batch = random_batch(21)
    spans = spans_of([[21], [21]])
    want = alone(checkpoint(), torch.float64, batch, spans, items=50, with_aux=aux)
    got = step(load(checkpoint(), torch.float64), batch, num_items_in_batch=number, output_router_logits=aux)
    close(got, want, **FP64)
    if not aux:  # the very argument of transformers
        theirs = transformers_step(checkpoint(), torch.float64, batch, num_items_in_batch=number)
        close(got, theirs, **FP64)


def test_training_and_evaluation_agree() -> None:
    batch = random_batch(40)
    model = load(checkpoint(), torch.float32)
    want = model(**batch).loss.item()
    with torch.no_grad():
        assert model(**batch).loss.item() == want
        assert model(**batch, return_logits=False).loss.item() == want
    with torch.inference_mode():
        assert model.eval()(**batch).loss.item() == want


# Context parallel.


def loss_worker(rank: int, size: int, folder: Path) -> tuple[dict[str, Outcome], dict[str, str]]:
    mesh = mesh_of({"cp": size} if size > 1 else {})
    model = load(folder, torch.float64, mesh)
    batch = random_batch(61)
    found = {
        "plain": step(model, batch, mesh),
        "no logits": step(model, batch, mesh, return_logits=False),
        "items": step(model, batch, mesh, num_items_in_batch=77, output_router_logits=True),
        "items, tensor": step(model, batch, mesh, num_items_in_batch=torch.tensor(77), output_router_logits=True),
    }
    other = torch.full_like(batch["input_ids"], -100)
    other[0, 40] = 3
    found["both"] = step(model, {**batch, "shift_labels": other}, mesh)
    local = shard_batch(batch, mesh)
    assert model(**local, return_logits=False).logits is None
    swapped = {**local, "sequence": shard_batch(random_batch(90), mesh)["sequence"]}
    said = {"sequence of another batch": refusal(model, **swapped)}
    fewer = {**local, "sequence": shard_batch({"input_ids": batch["input_ids"][:1]}, mesh)["sequence"]}
    said["sequence of fewer rows"] = refusal(model, **fewer)
    mask = torch.ones_like(local["input_ids"])
    said["mask beside sequence"] = refusal(model, **local, attention_mask=mask)
    said["both inputs"] = refusal(model, **local, inputs_embeds=torch.zeros(2, local["input_ids"].shape[1], 32))
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        said[name] = refusal(model, **local, **{name: True})
        model(**local, **{name: False})
    said["return_dict"] = refusal(model, **local, return_dict=False)
    if size > 1:
        said["no sequence"] = refusal(model, **batch)
        positions = {key: local[key] for key in ("input_ids", "position_ids", "shift_labels")}
        said["positions alone"] = refusal(model, **positions)
        unshifted = {key: local[key] for key in ("input_ids", "position_ids", "sequence")}
        said["labels"] = refusal(model, **unshifted, labels=local["input_ids"])
        said["sequence of one process"] = refusal(model, batch["input_ids"], sequence=shard_batch(batch)["sequence"])
    return found, said


MESSAGES = {
    "sequence of another batch": "but sequence describes .* pass input_ids and sequence of the same shard_batch call",
    "sequence of fewer rows": "the input holds .* tokens, but sequence describes",
    "mask beside sequence": "attention_mask goes into shard_batch",
    "both inputs": "give exactly one of input_ids and inputs_embeds",
    "use_cache": "use_cache=True is not available",
    "output_attentions": "output_attentions=True is not available",
    "output_hidden_states": "output_hidden_states=True is not available",
    "return_dict": "return_dict=False is not available",
    "no sequence": r"bound to cp size \d and cannot tell a shard from a whole row: call shard_batch\(batch, mesh\)",
    "positions alone": "cannot tell a shard from a whole row",
    "labels": "labels must be shifted before the cut: pass the shift_labels of shard_batch",
    "sequence of one process": r"sequence was made for cp size 1, but the model is bound to cp size \d: give shard_batch",
}


def check_losses(found: dict[str, Outcome], said: dict[str, str]) -> None:
    batch, spans = random_batch(61), spans_of([[61], [61]])
    close(found["plain"], alone(checkpoint(), torch.float64, batch, spans, with_aux=False), **FP64)
    items = alone(checkpoint(), torch.float64, batch, spans, items=77)
    close(found["items"], items, **FP64)
    close(found["items, tensor"], items, **FP64)
    assert found["no logits"].loss == found["plain"].loss
    for name, grad in found["plain"].grads.items():
        assert torch.equal(found["no logits"].grads[name], grad)
    one = torch.full_like(batch["labels"], -100)
    one[0, 41] = 3
    alone_target = alone(checkpoint(), torch.float64, {**batch, "labels": one}, spans, with_aux=False)
    close(found["both"], alone_target, **FP64)
    for name, message in said.items():
        assert re.search(MESSAGES[name], message), (name, message)


def test_losses_and_refusals_one_process() -> None:
    check_losses(*loss_worker(0, 1, checkpoint()))


@pytest.mark.parametrize("size", SIZES)
def test_losses_and_refusals(size: int) -> None:
    for found, said in run_distributed(loss_worker, size, checkpoint(), preload=PRELOAD):
        check_losses(found, said)
        assert said.keys() == MESSAGES.keys()


# Memory.

TOKENS, VOCAB, CHUNK = 1500, 1200, 1024  # tokens > chunk > hidden; tokens * vocabulary is the largest thing by far


def largest_tensor(mesh: Any, **forward: Any) -> tuple[int, str]:
    config = tiny_qwen3_moe_config(vocab_size=VOCAB)
    model = Qwen3MoeForCausalLM.from_config(config, mesh=mesh).train()
    size = 1 if mesh is None else mesh.size()
    batch: Batch = {"input_ids": torch.arange(TOKENS * size)[None] % VOCAB}
    local = shard_batch({**batch, "labels": batch["input_ids"]}, mesh)
    with Allocations() as seen:
        model(**local, **forward).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return seen.largest, seen.by


def memory_worker(rank: int, size: int) -> tuple[int, str]:
    return largest_tensor(mesh_of({"cp": size}), return_logits=False, output_router_logits=True)


def check_memory(largest: int, by: str) -> None:
    assert largest <= CHUNK * VOCAB, by
    assert largest < TOKENS * VOCAB // 1.3, by


def test_no_tensor_of_tokens_times_vocabulary() -> None:
    check_memory(*largest_tensor(None, return_logits=False, output_router_logits=True))
    assert largest_tensor(None)[0] >= TOKENS * VOCAB  # the measure sees the logits when they are asked for


@pytest.mark.dist2
def test_no_tensor_of_tokens_times_vocabulary_at_cp_2() -> None:
    for largest, by in run_distributed(memory_worker, 2, preload=PRELOAD):
        check_memory(largest, by)
