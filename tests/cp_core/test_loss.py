"""The token-exact loss against torch's cross entropy: values, gradients, memory, and its scale over several ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_core import Topology
from cp_core.loss import linear_cross_entropy, mean_loss, value_with_gradient_of
from cp_core.testing import run_distributed
from tests.cp_core._helpers import Allocations, cp_mesh, relative

HIDDEN, VOCAB = 16, 50


def problem(tokens: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Sum, dhidden and dweight by torch in fp64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    total = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    return total.detach(), *torch.autograd.grad(total, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_sum_and_gradients(dtype: torch.dtype, tolerance: float, chunk: int) -> None:
    hidden, weight, targets = problem(130, dtype)
    total, count = linear_cross_entropy(hidden, weight, targets, chunk)
    assert (total.dtype, total.shape, count.shape) == (dtype, (), ())
    assert int(count) == int((targets != -100).sum())
    assert not count.dtype.is_floating_point
    want = exact(hidden, weight, targets)
    grads = torch.autograd.grad(3.7 * total, (hidden, weight))
    for got, expected in zip((total, *(g / 3.7 for g in grads)), want, strict=True):
        assert relative(got, expected) <= tolerance


def test_leading_dims_and_strides() -> None:
    hidden, weight, targets = problem(24)
    want = exact(hidden, weight, targets)
    strided = hidden.detach().T.contiguous().T.unflatten(0, (2, 3, 4)).requires_grad_()
    column = weight.detach().T.contiguous().T.requires_grad_()
    assert not strided.is_contiguous()
    total, count = linear_cross_entropy(strided, column, targets.view(2, 3, 4), 5)
    total.backward()
    torch.testing.assert_close(total.detach(), want[0])
    torch.testing.assert_close(strided.grad.flatten(0, 2), want[1])
    torch.testing.assert_close(column.grad, want[2])
    assert int(count) == int((targets != -100).sum())


def test_bf16_is_accumulated_in_fp32() -> None:
    hidden, weight, targets = problem(5000, torch.bfloat16)
    for chunk in (7, 1024):
        total, _ = linear_cross_entropy(hidden, weight, targets, chunk)
        want = exact(hidden, weight, targets)
        assert total.dtype == torch.float32
        assert relative(total, want[0]) < 2e-4
        dhidden, dweight = torch.autograd.grad(total, (hidden, weight))
        assert dhidden.dtype == dweight.dtype == torch.bfloat16
        assert relative(dhidden, want[1]) < 1e-2
        assert relative(dweight, want[2]) < 1e-2
    running = torch.zeros((), dtype=torch.bfloat16)  # what must not happen
    for part in F.cross_entropy(hidden.float() @ weight.float().T, targets, reduction="none").split(7):
        running += part.sum().to(torch.bfloat16)
    assert relative(running, want[0]) > 1e-2


def test_no_targets_at_all() -> None:
    hidden, weight, _ = problem(20)
    total, count = linear_cross_entropy(hidden, weight, torch.full((20,), -100), 6)
    assert float(total.detach()) == 0.0
    assert int(count) == 0
    total.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()
    nothing = torch.zeros(0, HIDDEN, requires_grad=True)
    total, count = linear_cross_entropy(nothing, weight.float(), torch.zeros(0, dtype=torch.int64))
    assert (float(total.detach()), int(count)) == (0.0, 0)
    total.backward()


def test_tokens_without_a_target_get_exactly_no_gradient() -> None:
    hidden, weight, targets = problem(40)
    linear_cross_entropy(hidden, weight, targets, 7)[0].backward()
    assert not hidden.grad[targets == -100].any()
    assert bool((hidden.grad[targets != -100].abs().amax(-1) > 0).all())


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_frozen_inputs(frozen: str) -> None:
    hidden, weight, targets = problem(30)
    want = exact(hidden, weight, targets)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    total, _ = linear_cross_entropy(hidden, weight, targets, 7)
    torch.testing.assert_close(total.detach(), want[0])
    assert total.requires_grad == (frozen != "both")
    if frozen == "weight":
        total.backward()
        torch.testing.assert_close(hidden.grad, want[1])
        assert weight.grad is None
    if frozen == "hidden":
        total.backward()
        torch.testing.assert_close(weight.grad, want[2])
        assert hidden.grad is None


def test_gradients_by_finite_differences() -> None:
    hidden, weight, targets = problem(5)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, 2)[0], (hidden, weight))
    total, _ = linear_cross_entropy(hidden, weight, targets, 2)
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_logits() -> None:
    hidden, weight, targets = problem(30, torch.float32)
    big = (hidden.detach() * 1e4).requires_grad_()
    want = exact(big, weight, targets)
    total, _ = linear_cross_entropy(big, weight, targets, 7)
    total.backward()
    assert relative(total, want[0]) < 1e-5
    assert bool(big.grad.isfinite().all())


def test_labels_out_of_range() -> None:
    hidden, weight, targets = problem(10)
    for bad, span in ((VOCAB, rf"got .* \.\. {VOCAB}"), (-1, r"got -1 \.\."), (-101, r"got -101 \.\.")):
        targets = targets.clone()
        targets[4] = bad
        with pytest.raises(ValueError, match=rf"labels must be -100 or in 0 \.\. {VOCAB - 1}, {span}"):
            linear_cross_entropy(hidden, weight, targets)
        targets[4] = 0


def test_shapes_that_do_not_agree() -> None:
    hidden, weight, targets = problem(10)
    for arguments in (
        (hidden, weight, targets[:9]),
        (hidden[:, :8], weight, targets),
        (hidden.view(2, 5, 16), weight, targets),
    ):
        with pytest.raises(ValueError, match="do not agree"):
            linear_cross_entropy(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_tokens_never_exist(dtype: torch.dtype) -> None:
    tokens, chunk = 3000, 1024
    hidden, weight, targets = problem(tokens, dtype)
    with Allocations() as seen:
        total, _ = linear_cross_entropy(hidden, weight, targets, chunk)
        total.backward()
    assert seen.largest <= max(chunk * VOCAB, tokens * HIDDEN), seen.by
    assert tokens > chunk > HIDDEN
    with Allocations() as seen:  # the meter can see them
        F.cross_entropy(hidden @ weight.T, targets)
    assert seen.largest >= tokens * VOCAB


def test_without_autograd_no_gradients_are_computed() -> None:
    """Evaluation must not pay for a [V, H] gradient."""
    hidden, weight, targets = problem(30)
    want = exact(hidden, weight, targets)[0]
    with torch.no_grad(), Allocations() as seen:
        total, _ = linear_cross_entropy(hidden, weight, targets, 10)
    assert not total.requires_grad
    torch.testing.assert_close(total, want)
    assert seen.calls["aten.mm.default"] == 3  # the logits of three chunks


def test_gradients_are_freed_by_backward() -> None:
    """A loss that is kept for logging must not keep [V, H] in fp32 with it."""
    hidden, weight, targets = problem(30)
    before = {id(x) for x in gc.get_objects()}
    total, _ = linear_cross_entropy(hidden, weight, targets)
    made = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in before and x.shape == weight.shape]
    held = [weakref.ref(x) for x in made]
    del made
    total.backward()
    weight.grad = None
    gc.collect()
    assert total.grad_fn is not None
    assert not [ref for ref in held if ref() is not None]


def test_what_stands_on_ignored_tokens_never_enters_the_value() -> None:
    hidden, weight, targets = problem(30)
    want = exact(hidden, weight, targets)[0]
    spoiled = hidden.detach().clone()
    spoiled[targets == -100] = torch.nan
    assert float(F.cross_entropy(spoiled @ weight.T, targets, reduction="sum")) == pytest.approx(float(want))
    assert float(linear_cross_entropy(spoiled, weight, targets)[0]) == pytest.approx(float(want))


def test_value_with_gradient_of() -> None:
    value, part = torch.tensor(3.0), torch.tensor(0.7, requires_grad=True)
    result = value_with_gradient_of(value, part)
    assert float(result) == 3.0
    (2 * result).backward()
    assert float(part.grad) == 2.0


# ---------------------------------------------------------------- mean_loss


@pytest.mark.parametrize("items", [None, 40, torch.tensor(40), torch.tensor(40.0)])
def test_mean_of_one_process(items: Any) -> None:
    hidden, weight, targets = problem(30)
    want = exact(hidden, weight, targets)
    number = int((targets != -100).sum()) if items is None else 40
    loss = mean_loss(*linear_cross_entropy(hidden, weight, targets), Topology(), items)
    loss.backward()
    torch.testing.assert_close(loss.detach(), want[0] / number)
    torch.testing.assert_close(weight.grad, want[2] / number)


def test_mean_of_nothing_is_zero() -> None:
    for items in (None, 0, torch.tensor(0)):
        hidden, weight, targets = problem(30)
        loss = mean_loss(*linear_cross_entropy(hidden, weight, targets.fill_(-100)), Topology(), items)
        loss.backward()
        assert float(loss) == 0.0
        assert not weight.grad.any()
        assert not hidden.grad.any()


def _supervised(name: str, tokens: int, size: int) -> Tensor:
    """Which tokens of ``[tokens]`` have a target."""
    shard = tokens // size
    t = torch.arange(tokens)
    return {
        "all": t >= 0,
        "all on the first rank": t < shard,
        "all on the last rank": t >= tokens - shard,
        "none on the last rank": (t < tokens - shard) & (t % 3 > 0),
        "one token": t == shard,  # the first token of rank 1: known fault B1
        "none": t < 0,
    }[name]


CASES = ("all", "all on the first rank", "all on the last rank", "none on the last rank", "one token", "none")


def mean_worker(rank: int, size: int, dtype: torch.dtype) -> dict[str, float]:
    topology = Topology.from_mesh(cp_mesh(size))
    tokens = 32
    shard = slice(rank * tokens // size, (rank + 1) * tokens // size)
    values = {}
    for name in CASES:
        for items in (None, 57, torch.tensor(57)):
            hidden, weight, targets = problem(tokens, dtype, ignored=0.0)
            targets[~_supervised(name, tokens, size)] = -100
            want = exact(hidden, weight, targets)
            number = 57 if items is not None else max(int((targets != -100).sum()), 1)
            local = hidden.detach()[shard].requires_grad_()
            loss = mean_loss(*linear_cross_entropy(local, weight, targets[shard], 5), topology, items)
            loss.backward()
            tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(loss.detach(), (want[0] / number).to(dtype), **tolerance)
            assert loss.shape == ()
            torch.testing.assert_close(local.grad, (want[1][shard] / number).to(dtype), **tolerance)
            total = weight.grad.clone()  # a gradient on every rank, zeros where there is no target
            dist.all_reduce(total)
            torch.testing.assert_close(total, (want[2] / number).to(dtype), **tolerance)
            if name == "none":
                assert float(loss) == 0.0
                assert not total.any()
            values[f"{name} {items}"] = float(loss)
    return values


@pytest.mark.dist2
def test_mean_loss_two() -> None:
    for dtype in (torch.float64, torch.float32):
        first, second = run_distributed(mean_worker, 2, dtype)
        assert first == second


@pytest.mark.dist4
def test_mean_loss_four() -> None:
    results = run_distributed(mean_worker, 4, torch.float64)
    assert all(result == results[0] for result in results)  # bitwise equal on all ranks


def data_parallel_worker(rank: int, size: int) -> tuple[float, float]:
    """dp 2 x cp 2, rows with 5 and 11 targets: known fault B5."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    topology = Topology.from_mesh(mesh)
    dp, cp = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("cp")
    hidden, weight, targets = problem(32, ignored=0.0)
    targets = targets.view(2, 16)
    targets[0, 5:] = -100
    targets[1, :5] = -100
    rows = [exact(hidden[16 * r : 16 * r + 16], weight, targets[r]) for r in range(2)]
    values = []
    here = slice(8 * cp, 8 * cp + 8)
    for items in (None, 16):
        weight.grad = None
        local = hidden.detach()[16 * dp : 16 * dp + 16][here]
        loss = mean_loss(*linear_cross_entropy(local, weight, targets[dp, here]), topology, items)
        loss.backward()
        total = weight.grad.clone()
        dist.all_reduce(total)
        if items is None:  # the mean of the two rows' means
            torch.testing.assert_close(loss.detach(), rows[dp][0] / (5, 11)[dp])
            torch.testing.assert_close(total, (rows[0][2] / 5 + rows[1][2] / 11) / 2)
        else:  # one mean over all 16
            torch.testing.assert_close(loss.detach(), rows[dp][0] / 16)
            torch.testing.assert_close(total, (rows[0][2] + rows[1][2]) / 16)
        values.append(float(loss))
    return values[0], values[1]


@pytest.mark.dist4
def test_mean_loss_with_data_ranks() -> None:
    results = run_distributed(data_parallel_worker, 4)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0] != results[2]
