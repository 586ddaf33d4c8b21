"""Learning rate, weight decay groups and the gradient norm, each against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_core.testing import run_distributed
from recipes.optim import build_optimizer, clip_gradients, first_nonfinite, gradient_norm, learning_rate
from recipes.schema import OptimSection


def test_learning_rate() -> None:
    """Linear to the peak at the last warm-up step, then a cosine to lr * min_lr_ratio."""
    section = OptimSection(lr=0.4, warmup_steps=4, min_lr_ratio=0.25)
    rates = [learning_rate(section, step, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[8] == pytest.approx(0.25)  # half-way: the mean of 0.4 and 0.1
    assert rates[12] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_vectors_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = build_optimizer(model, OptimSection(lr=0.1, weight_decay=0.3)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.3, 1), (0.0, 3)]


def norm_worker(rank: int, size: int) -> list[float]:
    """Squares of 20 on one rank's shard and 100 on the other's; then the same beside a replicated gradient of 5."""
    mesh = init_device_mesh("cpu", (size,))
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    sharded.grad = DTensor.from_local(torch.tensor([math.sqrt((20.0, 100.0)[rank])]), mesh, [Shard(0)])
    replicated = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Replicate()]))
    replicated.grad = DTensor.from_local(torch.tensor([math.sqrt(5.0)]), mesh, [Replicate()])
    whole = nn.Parameter(torch.zeros(1))
    whole.grad = torch.tensor([2.0])
    parameters = [sharded, replicated, whole]
    norms = [float(gradient_norm(parameters[:count])) for count in (1, 2, 3)]
    clip_gradients(parameters, gradient_norm(parameters), 1.0)
    return [*norms, float(gradient_norm(parameters))]


@pytest.mark.dist2
def test_gradient_norm_counts_every_element_once() -> None:
    expected = [10.954452, math.sqrt(125.0), math.sqrt(129.0), 1.0]
    for found in run_distributed(norm_worker, 2):
        assert found == pytest.approx(expected, rel=1e-6)


def test_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert float(gradient_norm([parameter])) == 64.0
    clip_gradients([parameter], torch.tensor(64.0), 128.0)
    assert float(parameter.grad[0]) == 1.0  # a norm below the limit is left alone


def test_first_nonfinite_is_named() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.tensor([1.0, math.inf])
    assert first_nonfinite(model) == "bias"
    model.bias.grad = None
    assert first_nonfinite(model) == ""
