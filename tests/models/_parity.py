"""What the Qwen3-MoE tests share: tiny checkpoints, batches, transformers as the oracle, one step of the zoo's model.

The oracle never sees a packed or padded row: each document runs alone (a "span"), and losses are written out here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cp_core import ContextParallelConfig, shard_batch, sync_gradients, unshard
from models import Qwen3MoeForCausalLM
from models.common.tiny import make_tiny_qwen3_moe

PRELOAD = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "tests.models._parity")
VOCAB = 97
COEF = 0.01  # router_aux_loss_coef of the tiny config
T = TypeVar("T")
Batch = dict[str, Tensor]
Span = tuple[int, int, int]  # row, start, stop of one document


@dataclass(frozen=True)
class Outcome:
    """One forward and backward: values in fp64, logits in global order, whole gradients."""

    loss: float
    aux: float | None
    logits: Tensor
    grads: dict[str, Tensor]


def remembered(job: Callable[[int], T]) -> Callable[[int], T]:
    """Run ``job(size)`` once for all tests that read it; a failure is remembered too, not repeated by each of them."""
    found: dict[int, T | Exception] = {}

    def call(size: int) -> T:
        if size not in found:
            try:
                found[size] = job(size)
            except Exception as error:
                found[size] = error
        result = found[size]
        if isinstance(result, Exception):
            raise result
        return result

    return call


# Checkpoints.


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qwen3_moe_tests_")


_folders: dict[str, Path] = {}


def checkpoint(**overrides: Any) -> Path:
    """A tiny checkpoint in the HF layout, written once a process; fp32 weights, random norms and biases."""
    key = repr(sorted(overrides.items()))
    if key not in _folders:
        _folders[key] = make_tiny_qwen3_moe(Path(_scratch().name) / str(len(_folders)), **overrides)
    return _folders[key]


def mesh_of(sizes: dict[str, int]) -> DeviceMesh | None:
    """A CPU mesh with these axes; None for one process."""
    if not sizes:
        return None
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


# Batches.


def random_ids(rows: int, length: int, seed: int, low: int = 0, high: int = VOCAB) -> Tensor:
    return torch.randint(low, high, (rows, length), generator=torch.Generator().manual_seed(seed))


def uneven_labels(input_ids: Tensor, seed: int) -> Tensor:
    """Row 0 is supervised mostly in its first third, the others here and there."""
    chance = torch.full(input_ids.shape, 0.3)
    chance[0] = 0.02
    chance[0, : input_ids.shape[1] // 3] = 0.9
    kept = torch.rand(input_ids.shape, generator=torch.Generator().manual_seed(seed)) < chance
    return input_ids.masked_fill(~kept, -100)


def random_batch(length: int, seed: int = 0, rows: int = 2) -> Batch:
    input_ids = random_ids(rows, length, seed)
    return {"input_ids": input_ids, "labels": uneven_labels(input_ids, seed + 1)}


def spans_of(lengths: Iterable[Iterable[int]]) -> list[Span]:
    """Lengths of each row's documents -> spans; a negative length is padding."""
    spans = []
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            if length > 0:
                spans.append((row, start, start + length))
            start += abs(length)
    return spans


def document_ids(spans: list[Span], shape: tuple[int, ...]) -> Tensor:
    """-1 outside the spans."""
    ids = torch.full(shape, -1)
    for number, (row, start, stop) in enumerate(spans):
        ids[row, start:stop] = number
    return ids


# The oracle.


class NoNarrowing(TorchFunctionMode):
    """Makes transformers' code ask for fp64 where it asks for fp32 (norms, RoPE, router, loss), so that parity in fp64
    does not end at 1e-6."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named)


def _exactly(dtype: torch.dtype) -> AbstractContextManager[object]:
    return NoNarrowing() if dtype == torch.float64 else nullcontext()


@lru_cache(maxsize=8)
def oracle(folder: Path, dtype: torch.dtype) -> transformers.Qwen3MoeForCausalLM:
    """transformers' model; its grouped experts know no fp64, and its eager attention leaves fp64."""
    return transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", attn_implementation="sdpa"
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name (a copy); zeros where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def transformers_step(folder: Path, dtype: torch.dtype, batch: Batch, **forward: Any) -> Outcome:
    """transformers' own loss on a batch that it understands."""
    model = oracle(folder, dtype)
    model.zero_grad()
    with _exactly(dtype):
        out = model(**batch, **forward)
    out.loss.backward()
    aux = None if out.aux_loss is None else out.aux_loss.item()
    return Outcome(out.loss.item(), aux, out.logits.detach(), gradients(model))


def alone(
    folder: Path, dtype: torch.dtype, batch: Batch, spans: list[Span], items: int | None = None, with_aux: bool = True
) -> Outcome:
    """Each span run alone in transformers; loss over all targets, aux loss over all spans' tokens, one backward."""
    model = oracle(folder, dtype)
    model.zero_grad()
    input_ids, labels = batch["input_ids"], batch["labels"]
    logits = torch.zeros(*input_ids.shape, model.config.vocab_size, dtype=dtype)
    total, count, routed = torch.zeros((), dtype=torch.float64), 0, []
    for row, start, stop in spans:
        with _exactly(dtype):
            out = model(input_ids[row : row + 1, start:stop], output_router_logits=True)
        logits[row, start:stop] = out.logits[0].detach()
        targets = labels[row, start + 1 : stop]
        total = total + F.cross_entropy(out.logits[0, :-1].double(), targets, reduction="sum")
        count += int((targets != -100).sum())
        routed.append(out.router_logits)
    loss, aux = total / max(1, count if items is None else items), None
    if with_aux:
        by_layer = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
        with _exactly(dtype):
            aux = load_balancing_loss_func(by_layer, model.config.num_experts, model.config.num_experts_per_tok)
        loss = loss + model.config.router_aux_loss_coef * aux * (1 if items is None else count / items)
    loss.backward()
    return Outcome(loss.item(), None if aux is None else aux.item(), logits, gradients(model))


def aux_by_hand(router_logits: Iterable[Tensor], top_k: int) -> Tensor:
    """Switch Transformer, eq. 4-6, over all layers' tokens together; differentiable, in the logits' dtype."""
    scores = torch.cat(list(router_logits)).softmax(-1)
    chosen = F.one_hot(scores.topk(top_k, dim=-1).indices, scores.shape[-1]).to(scores.dtype)
    return scores.shape[-1] * (chosen.sum(1).mean(0) * scores.mean(0)).sum()


# The zoo.


STRATEGIES: dict[str, dict[str, Any]] = {
    "all_gather": {"algorithm": "all_gather"},
    "ulysses": {"algorithm": "ulysses"},
    "all_gather async": {"algorithm": "all_gather", "schedule": "async"},
    "ulysses async": {"algorithm": "ulysses", "schedule": "async"},
    "ring async head-tail": {"algorithm": "ring", "schedule": "async", "load_balance": True},
    "hybrid async": {"algorithm": "hybrid", "schedule": "async", "ulysses_degree": 2},
    "hybrid_ring async": {"algorithm": "hybrid_ring", "schedule": "async", "ulysses_degree": 2},
}


def strategies(size: int) -> list[str]:
    """Those that ``size`` ranks can run."""
    return [name for name in STRATEGIES if size > 2 or "hybrid" not in name]


def load(
    folder: Path, dtype: torch.dtype, mesh: DeviceMesh | None = None, algorithm: str = "all_gather", **arguments: Any
) -> Qwen3MoeForCausalLM:
    cp = ContextParallelConfig(**STRATEGIES[algorithm], kv_head_policy="repeat")
    return Qwen3MoeForCausalLM.from_pretrained(folder, mesh=mesh, cp=cp, dtype=dtype, **arguments).train()


def step(model: Qwen3MoeForCausalLM, batch: Batch, mesh: DeviceMesh | None = None, **forward: Any) -> Outcome:
    """Shard, forward, backward, sum gradients. Every parameter must have got a gradient on this rank."""
    local = shard_batch(batch, mesh)
    model.zero_grad()
    out = model(**local, **forward)
    out.loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient on this rank: {missing}"
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        sync_gradients(model, mesh)
    aux = None if out.aux_loss is None else out.aux_loss.item()
    logits = torch.empty(0) if out.logits is None else unshard(out.logits, 1, local["sequence"]).detach()
    return Outcome(out.loss.item(), aux, logits, gradients(model))


def close(
    got: Outcome, want: Outcome, loss: float, logits: float, grads: float, spans: list[Span] | None = None
) -> None:
    """Compare; every tolerance is relative to the largest reference value. ``spans``: the tokens whose logits count."""
    assert abs(got.loss - want.loss) <= loss * max(abs(want.loss), 1e-300), (got.loss, want.loss)
    if want.aux is not None:
        assert got.aux is not None
        assert abs(got.aux - want.aux) <= loss * abs(want.aux), (got.aux, want.aux)
    if got.logits.numel():
        assert got.logits.shape == want.logits.shape
        here = torch.ones(want.logits.shape[:2], dtype=torch.bool)
        if spans is not None:
            here = document_ids(spans, tuple(here.shape)) >= 0
        assert _relative(got.logits[here], want.logits[here]) <= logits
    assert got.grads.keys() == want.grads.keys()
    worst = {name: _relative(got.grads[name], want.grads[name]) for name in want.grads}
    wrong = {name: error for name, error in worst.items() if not error <= grads}
    assert not wrong, wrong


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest reference value; a reference of zeros must be met exactly."""
    scale = b.double().abs().max()
    error = (a.double() - b.double()).abs().max()
    return float(error / scale) if scale > 0 else (0.0 if error == 0 else float("inf"))


FP32 = {"loss": 1e-6, "logits": 1e-5, "grads": 1e-4}
FP64_OUTSIDE = {"loss": 1e-10, "logits": 1e-10, "grads": 1e-10}  # with NoNarrowing
FP64 = {"loss": 1e-10, "logits": 1e-10, "grads": 1e-10}


def outside(dtype: torch.dtype) -> dict[str, float]:
    """Tolerances against transformers."""
    return FP64_OUTSIDE if dtype == torch.float64 else FP32
