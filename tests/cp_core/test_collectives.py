"""Order, gradients and memory layouts of the collectives, on numbered tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cp_core.collectives import all_gather_stacked, all_to_all, gather_sequence, reduce_scatter_stacked, sum_values
from cp_core.testing import run_distributed
from tests.cp_core._helpers import cp_mesh, refusal, strided_copies


def numbered(size: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """``[P, ...]``: what each rank holds; every entry its own number."""
    count = size * int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float64).view(size, *shape).to(dtype)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gathered(parts: Tensor, dim: int) -> Tensor:
    """Oracle of the gather."""
    return torch.cat(list(parts), dim)


def exchanged(parts: Tensor, rank: int, split_dim: int, concat_dim: int) -> Tensor:
    """Oracle of the exchange: part ``rank`` of what every rank cut."""
    return torch.cat([part.chunk(len(parts), split_dim)[rank] for part in parts], concat_dim)


def _differentiate(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = call(x)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def gather_worker(rank: int, size: int) -> None:
    group = cp_mesh(size).get_group()
    shape = (2, 3, 5, 4)
    parts = numbered(size, *shape)
    for dim in (0, 1, 2, 3, -1, -2):
        whole = gathered(parts, dim)
        upstream = noise(size, *whole.shape, seed=dim + 7)  # what each rank's loss says of the whole
        axis = dim % 4
        expected = upstream.sum(0).narrow(axis, rank * shape[axis], shape[axis])
        for name, x in [("contiguous", parts[rank]), *strided_copies(parts[rank])]:
            for grad_name, grad in [("contiguous", upstream[rank]), *strided_copies(upstream[rank])]:
                y, dx = _differentiate(lambda t, d=dim: gather_sequence(t, d, group), x, grad)
                assert torch.equal(y, whole), (dim, name)
                torch.testing.assert_close(dx, expected, rtol=1e-13, atol=1e-13, msg=f"{dim} {name} {grad_name}")
    # stride 0: an expanded input, and the gradients that sum() and a broadcast make
    x = torch.full((1, 1, 1, 4), float(rank)).expand(*shape).detach().requires_grad_()
    y = gather_sequence(x, 2, group)
    assert torch.equal(y.detach(), gathered(torch.arange(size).view(-1, 1, 1, 1, 1).expand(size, *shape).float(), 2))
    assert torch.equal(
        torch.autograd.grad(y.sum() * (rank + 1), x)[0], torch.full(shape, float(size * (size + 1) // 2))
    )
    row = noise(size, 1, 1, 1, 4, seed=3)
    dx = _differentiate(lambda t: gather_sequence(t, 2, group), parts[rank], row[rank].expand(2, 3, 5 * size, 4))[1]
    torch.testing.assert_close(dx, row.sum(0).expand(shape))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool):
        typed = (parts % 5).to(dtype)
        y = gather_sequence(typed[rank], 1, group)
        assert y.dtype == dtype
        assert torch.equal(y, gathered(typed, 1))
    # the raw calls underneath
    assert torch.equal(all_gather_stacked(parts[rank].transpose(0, 3), group), parts.transpose(1, 4))
    stacked = noise(size, size, 3, 4, seed=4)
    mine = stacked[rank].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(reduce_scatter_stacked(mine, group), stacked.sum(0)[rank])
    total = sum_values(stacked[rank].transpose(0, 1), group)
    torch.testing.assert_close(total, stacked.sum(0).transpose(0, 1))
    torch.testing.assert_close(mine, stacked[rank])  # inputs are left as they were
    scalar = torch.tensor(float(rank), requires_grad=True)
    assert not sum_values(scalar, group).requires_grad
    assert float(sum_values(scalar, group)) == sum(range(size))


def narrow_worker(rank: int, size: int) -> list[float]:
    """bf16 and fp16 partial gradients: summed in fp32, rounded once."""
    group = cp_mesh(size).get_group()
    equal = []
    for dtype in (torch.bfloat16, torch.float16):
        upstream = noise(size, 2, 64 * size, 33, seed=11).to(dtype)
        # magnitudes that differ between ranks, so that a running sum in the narrow dtype loses bits
        upstream = (upstream.float() * torch.tensor([1.0, 0.011, 37.0, 0.3])[:size].view(-1, 1, 1, 1)).to(dtype)
        x = torch.zeros(2, 64, 33, dtype=dtype)
        dx = _differentiate(lambda t: gather_sequence(t, 1, group), x, upstream[rank])[1]
        here = slice(64 * rank, 64 * (rank + 1))
        once = upstream.float().sum(0).to(dtype)[:, here]
        assert dx.dtype == dtype
        assert torch.equal(dx, once), dtype
        running = upstream[0, :, here].clone()
        for part in upstream[1:, :, here]:
            running += part
        equal.append(float((running == once).float().mean()))
    return equal


def exchange_worker(rank: int, size: int) -> None:
    group = cp_mesh(size).get_group()
    shape = (2, 2 * size, 3 * size, 4)
    parts = numbered(size, *shape)
    for split_dim, concat_dim in ((1, 2), (2, 1), (1, -1), (-2, 0), (2, 3), (1, 0)):
        expected = exchanged(parts, rank, split_dim, concat_dim)
        upstream = noise(size, *expected.shape, seed=split_dim + 5)
        dexpected = exchanged(upstream, rank, concat_dim, split_dim)
        for name, x in [("contiguous", parts[rank]), *strided_copies(parts[rank])]:
            for grad_name, grad in [("contiguous", upstream[rank]), *strided_copies(upstream[rank])]:
                y, dx = _differentiate(lambda t, s=split_dim, c=concat_dim: all_to_all(t, s, c, group), x, grad)
                assert torch.equal(y, expected), (split_dim, concat_dim, name)
                assert torch.equal(dx, dexpected), (split_dim, concat_dim, name, grad_name)
        y = all_to_all(all_to_all(parts[rank], split_dim, concat_dim, group), concat_dim, split_dim, group)
        assert torch.equal(y, parts[rank])
    # heads: rank r gets the r-th run of heads of the whole sequence in order; write (token, head) into the values
    tokens = torch.arange(3 * rank, 3 * rank + 3)
    local = (100 * tokens.view(1, 1, -1, 1) + torch.arange(2 * size).view(1, -1, 1, 1)).expand(1, 2 * size, 3, 2)
    y = all_to_all(local, 1, 2, group)
    assert y[0, :, :, 0].tolist() == [[100 * t + h for t in range(3 * size)] for h in (2 * rank, 2 * rank + 1)]
    # stride 0
    y, dx = _differentiate(
        lambda t: all_to_all(t, 1, 2, group), parts[rank], torch.ones(()).double().expand(2, 2, 3 * size * size, 4)
    )
    assert torch.equal(dx, torch.ones(shape, dtype=torch.float64))
    x = torch.arange(2.0 * size).view(1, -1, 1, 1).expand(2, 2 * size, 3, 4)
    assert torch.equal(all_to_all(x, 1, 2, group), x[:, 2 * rank : 2 * rank + 2, :1].expand(2, 2, 3 * size, 4))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        typed = (parts % 5).to(dtype)
        y = all_to_all(typed[rank], 1, 2, group)
        assert y.dtype == dtype
        assert torch.equal(y, exchanged(typed, rank, 1, 2))
    message = refusal(all_to_all, torch.zeros(2, 2 * size + 1, 3, 4), 1, 2, group)
    assert f"is not divisible by the {size} ranks" in message


def gradcheck_worker(rank: int, size: int) -> None:
    """One scalar over all ranks: the gradient of its rank-wise parts, added, is that of the whole computation."""
    group = cp_mesh(size).get_group()
    parts = noise(size, 1, 2 * size, 3, 4, seed=8)
    weights = noise(size, 1, 2 * size, 3, 4, seed=9)
    leaf = parts.clone().requires_grad_()
    whole = gathered(leaf, 2)  # [1, N, S, D]
    result = (whole.softmax(2) * whole.roll(1, 2)).tanh()
    sum((result[:, :, 3 * r : 3 * r + 3] * weights[r]).sum() for r in range(size)).backward()
    # by heads: exchange, work on the whole sequence, exchange back
    x = parts[rank].clone().requires_grad_()
    by_heads = all_to_all(x, 1, 2, group)
    out = all_to_all((by_heads.softmax(2) * by_heads.roll(1, 2)).tanh(), 2, 1, group)
    torch.testing.assert_close(out.detach(), result.detach()[:, :, 3 * rank : 3 * rank + 3], rtol=1e-12, atol=1e-12)
    (out * weights[rank]).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad[rank], rtol=1e-12, atol=1e-12)
    # by gather: each rank uses its part of the whole
    y = parts[rank].clone().requires_grad_()
    full = gather_sequence(y, 2, group)
    out = (full.softmax(2) * full.roll(1, 2)).tanh()[:, :, 3 * rank : 3 * rank + 3]
    (out * weights[rank]).sum().backward()
    torch.testing.assert_close(y.grad, leaf.grad[rank], rtol=1e-12, atol=1e-12)


def everything_worker(rank: int, size: int) -> list[float]:
    gather_worker(rank, size)
    exchange_worker(rank, size)
    gradcheck_worker(rank, size)
    return narrow_worker(rank, size)


@pytest.mark.dist2
def test_collectives_two() -> None:
    run_distributed(everything_worker, 2)


@pytest.mark.dist4
def test_collectives_four() -> None:
    equal = run_distributed(everything_worker, 4)
    assert max(max(result) for result in equal) < 0.99  # the check can tell a running bf16 sum from a single rounding


def test_no_group_is_one_rank() -> None:
    x = noise(2, 3, 4).requires_grad_()
    assert gather_sequence(x, 1, None) is x
    assert all_to_all(x, 1, 2, None) is x
    total = sum_values(x, None)
    assert torch.equal(total, x.detach())
    assert not total.requires_grad


def double_backward_worker(rank: int, size: int) -> list[float]:
    """Second derivatives of sums of cubes: every rank adds up all of a gather, but only its part of an exchange."""
    group = cp_mesh(size).get_group()
    errors = []
    for call, copies in ((lambda t: gather_sequence(t, 1, group), size), (lambda t: all_to_all(t, 0, 1, group), 1)):
        x = noise(4, 4, seed=rank).requires_grad_()
        (dx,) = torch.autograd.grad((call(x) ** 3).sum() + (x**3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        errors.append(float((ddx - 6 * (copies + 1) * x).abs().max()))
    return errors


@pytest.mark.dist2
def test_double_backward() -> None:
    for errors in run_distributed(double_backward_worker, 2):
        assert max(errors) < 1e-12
