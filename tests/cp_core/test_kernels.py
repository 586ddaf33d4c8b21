"""Kernels, one block and merged blocks, against torch SDPA under a dense mask; forward and every gradient.

B batch, N query heads, K kv heads, S tokens, D head dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import cp_core.kernels.flex as flex
import cp_core.kernels.sdpa as sdpa
from cp_core import Segment
from cp_core.blocks import CausalMetadata
from cp_core.kernels import KERNELS, Block, Kernel, KernelRequest, SdpaKernel, attend_block
from cp_core.kernels.base import merge
from cp_core.kernels.flash import FlashKernel
from cp_core.kernels.flex import FlexKernel, block_mask
from cp_core.kernels.npu_flash import NpuFlashKernel
from cp_core.kernels.varlen import _Packed, runs_of
from cp_core.scoring import Dropout, Scoring
from tests.cp_core._helpers import Layout, dense_attention, relative, row, visible
from tests.cp_core._stubs import FlashStub, NpuStub, installed
from tests.cp_core.test_blocks import rows_of

B, N, K, D, V = 2, 6, 3, 8, 5
LAYOUT: Layout = [row(9, 20, -3, 16), row(-4, 1, 43)]
LENGTH = 48
SCALE = 0.3
SPANS = {"whole": ((0, LENGTH),), "shard": ((16, 32),), "halves": ((8, 16), (32, 40))}
SCORES: dict[str, dict[str, Any]] = {
    "causal": {},
    "non-causal": {"causal": False},
    "window": {"window": 7},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "float", "causal": False},
    "bool mask of heads": {"mask": "bool heads", "window": 11},
    "dropout": {"dropout": 0.3},
    "dropout and mask": {"dropout": 0.2, "mask": "float heads"},
}


class Plain(SdpaKernel):
    """What sdpa is on a device without the fused operator."""

    name = "plain"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Plain:
    monkeypatch.setattr(sdpa, "_is_plain", lambda block: True)
    return Plain()


def inputs(dtype: torch.dtype = torch.float64, v_dim: int = V) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, N, LENGTH, D), (B, K, LENGTH, D), (B, K, LENGTH, v_dim), (B, N, LENGTH, v_dim))
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes)


def user_mask(kind: str) -> Tensor:
    """Some keys of some queries; query 21 of row 0 sees nothing at all."""
    heads = N if "heads" in kind else 1
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(B, heads, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    seen = values > -0.5
    seen[0, :, 21] = False
    return seen if kind.startswith("bool") else values.masked_fill(~seen, -torch.inf)


def scoring(fields: dict[str, Any]) -> Scoring:
    fields = dict(fields)
    if "mask" in fields:
        fields["mask"] = user_mask(fields["mask"])
    if "dropout" in fields:
        fields["dropout"] = Dropout(fields["dropout"], seed=1234567890123, layer=3)
    return Scoring(SCALE, **fields)


def kept_weights(dropout: Dropout) -> Tensor:
    """``[B, N, S, S]``: one call for each entry's own counters, nothing in blocks."""
    index = [torch.arange(n) for n in (B, N, LENGTH, LENGTH)]
    b, n, q, k = (
        x.view(*(-1 if i == axis else 1 for i in range(4))) for axis, x in enumerate(index)
    )  # fmt: skip
    return dropout.keeps(dropout.stream(b, n), q, k).double() / (1 - dropout.p)


def wanted(rule: Scoring, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output and gradients of q, k, v over the whole sequence."""
    *leaves, dout = (x.to(torch.float64) for x in inputs(dtype))
    leaves = [x.requires_grad_() for x in leaves]
    keep = None if rule.dropout is None else kept_weights(rule.dropout)
    out = dense_attention(*leaves, LAYOUT, rule.causal, SCALE, rule.window, rule.mask, keep)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def over_spans(kernel: Kernel, rule: Scoring, dtype: torch.dtype, whole: str = "shard") -> list[Tensor]:
    """The same, from blocks whose queries are runs of the sequence and whose keys are all."""
    q, k, v, dout = inputs(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parts = {
        "whole": [((0, LENGTH),)],
        "shard": [((0, 16),), ((16, 32),), ((32, 48),)],
        "halves": [((0, 8), (40, 48)), ((8, 16), (32, 40)), ((16, 32),)],
    }[whole]
    out = torch.zeros_like(dout)
    for spans in parts:
        places = torch.cat([torch.arange(*span) for span in spans])
        meta = CausalMetadata(spans, 0, LENGTH, rows_of(LAYOUT), rule.causal, rule.window)
        out = out.index_copy(2, places, attend_block(Block(q[:, :, places], k, v, meta, rule), kernel))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def over_keys(kernel: Kernel, rule: Scoring, dtype: torch.dtype, heads: slice = slice(None)) -> list[Tensor]:
    """The same, from blocks of keys that share queries, merged as a ring does it, and each block's own backward."""
    q, k, v, dout = inputs(dtype)
    q, dout = q[:, heads], dout[:, heads]
    group = N // K
    kv = slice(heads.start // group, heads.stop // group) if heads.start is not None else heads
    k, v = k[:, kv], v[:, kv]
    borders = [0, 10, 33, LENGTH]
    blocks = [
        Block(
            q, k[:, :, a:b], v[:, :, a:b],
            CausalMetadata(((0, LENGTH),), a, b, rows_of(LAYOUT), rule.causal, rule.window), rule, heads.start or 0,
        )
        for a, b in itertools.pairwise(borders)
    ]  # fmt: skip
    out, lse = kernel.forward(blocks[0])
    for block in blocks[1:]:
        out, lse = merge(out.to(lse.dtype), lse, *kernel.forward(block))
    out = out.to(dtype)
    grads = [kernel.backward(dout, block, out, lse) for block in blocks]
    dq = torch.stack([grad[0] for grad in grads]).sum(0)
    return [out, dq, *(torch.cat([grad[i] for grad in grads], 2) for i in (1, 2))]


def close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for x, y in zip(got, want, strict=True):
        assert bool(x.isfinite().all())
        assert relative(x, y) < tolerance


@pytest.mark.parametrize("spans", list(SPANS))
@pytest.mark.parametrize("scores", list(SCORES))
def test_sdpa(scores: str, spans: str) -> None:
    rule = scoring(SCORES[scores])
    close(over_spans(SdpaKernel(), rule, torch.float64, spans), wanted(rule), 1e-12)
    close(over_spans(SdpaKernel(), rule, torch.float32, spans), wanted(rule, torch.float32), 2e-6)


@pytest.mark.parametrize("scores", list(SCORES))
def test_sdpa_of_merged_keys(scores: str) -> None:
    rule = scoring(SCORES[scores])
    want = wanted(rule)
    close(over_keys(SdpaKernel(), rule, torch.float64), want, 1e-12)
    some = over_keys(SdpaKernel(), rule, torch.float64, slice(2, 6))  # heads of a rank of ulysses
    group = N // K
    kv = slice(2 // group, 6 // group)
    close(some, [want[0][:, 2:6], want[1][:, 2:6], want[2][:, kv], want[3][:, kv]], 1e-12)


@pytest.mark.parametrize("slab", [1, 700, 1 << 24])
@pytest.mark.parametrize("scores", ["causal", "non-causal", "window", "dropout and mask"])
def test_plain_formula(plain: Plain, monkeypatch: pytest.MonkeyPatch, scores: str, slab: int) -> None:
    monkeypatch.setattr(sdpa, "_SLAB_SCORES", slab)
    rule = scoring(SCORES[scores])
    want = wanted(rule)
    close(over_spans(plain, rule, torch.float64, "halves"), want, 1e-12)
    close(over_keys(plain, rule, torch.float64), want, 1e-12)


@pytest.mark.parametrize("scores", ["causal", "window"])
def test_bf16(scores: str) -> None:
    rule = scoring(SCORES[scores])
    close(over_spans(SdpaKernel(), rule, torch.bfloat16), wanted(rule, torch.bfloat16), 2e-2)


def test_gradients_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [row(2, 3, -1), row(-2, 4)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, t, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for n, t in ((4, 4), (2, 6), (2, 6))
    )
    for is_plain in (False, True):
        monkeypatch.setattr(sdpa, "_is_plain", lambda block, plain=is_plain: plain)
        for window in (None, 2):
            meta = CausalMetadata(((2, 6),), 0, 6, rows_of(layout), True, window)

            def attend(*x: Tensor, meta: CausalMetadata = meta, window: int | None = window) -> Tensor:
                return attend_block(Block(*x, meta, Scoring(0.7, True, window)), SdpaKernel())

            assert torch.autograd.gradcheck(attend, (q, k, v))


def test_large_scores_do_not_overflow() -> None:
    """Scores near 1e4 of both signs, a shard that merges a rectangle and a triangle."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 8, dtype=torch.float64, generator=generator) for t in (8, 16, 16))
    q = q * 1e4
    meta = CausalMetadata(((8, 16),), 0, 16, ((Segment(0, 16),),))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend_block(Block(*leaves, meta, Scoring(1.0)), SdpaKernel())
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(bool(x.isfinite().all()) for x in (out, *grads))
        full = torch.cat([torch.zeros_like(q), q], 2).to(dtype).double()
        want = dense_attention(full, k.to(dtype).double(), v.to(dtype).double(), [[0] * 16], True, 1.0)[:, :, 8:]
        near = (out.double() - want).abs().amax(-1) < tolerance * 100
        assert float(near.float().mean()) >= (1.0 if dtype == torch.float64 else 0.9)


def test_merge_of_empty_parts() -> None:
    out, lse = torch.randn(1, 1, 2, 3), torch.tensor([[[0.5, -torch.inf]]])
    zero, never = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    out = out * torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    for a, b in (((out, lse), (zero, never)), ((zero, never), (out, lse))):
        merged, merged_lse = merge(*a, *b)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    big = torch.full((1, 1, 2), 800.0, dtype=torch.float64)  # exp would overflow
    merged, merged_lse = merge(out.double(), big, out.double(), big)
    torch.testing.assert_close(merged, out.double(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, big + 0.6931471805599453)


# ---------------------------------------------------------------- flex


@pytest.mark.parametrize("own_autograd", [False, True], ids=["by parts", "own autograd"])
@pytest.mark.parametrize("scores", list(SCORES))
def test_flex(scores: str, own_autograd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_has_own_autograd", lambda device: own_autograd)  # as on a GPU
    rule = scoring(SCORES[scores])
    want = wanted(rule)
    for spans in SPANS:
        close(over_spans(FlexKernel(), rule, torch.float64, spans), want, 1e-12)
    close(over_keys(FlexKernel(), rule, torch.float64), want, 1e-12)
    close(over_keys(FlexKernel(), rule, torch.float32), want, 3e-6)


def test_flex_and_sdpa_drop_the_same_weights() -> None:
    """And so do any shards and blocks of theirs: what drops is a matter of positions."""
    rule = scoring(SCORES["dropout"])
    parts = [
        over_spans(kernel, rule, torch.float64, spans) for kernel in (FlexKernel(), SdpaKernel()) for spans in SPANS
    ]
    for part in parts[1:]:
        close(part, parts[0], 1e-12)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 40), (True, 300)])
def test_block_masks_are_those_of_torch(causal: bool, window: int | None) -> None:
    """Against create_block_mask, which looks at every pair: same blocks, none more, none partial that could be full."""
    layout = [row(300, 213, -80, 431), row(1000, 24)]
    dense = visible(layout, causal, window)
    for spans, k_start, k_stop in (
        (((0, 1024),), 0, 1024),
        (((256, 512),), 0, 1024),
        (((300, 428), (640, 768)), 0, 1024),
        (((512, 900),), 130, 700),
    ):
        meta = CausalMetadata(spans, k_start, k_stop, rows_of(layout), causal, window)
        queries = torch.cat([torch.arange(*span) for span in spans])
        part = dense[:, queries, k_start:k_stop]
        made = block_mask(meta, torch.device("cpu"))
        exact = create_block_mask(lambda b, h, q, k, part=part: part[b, q, k], 2, 1, *part.shape[1:], device="cpu")
        assert torch.equal(made.to_dense(), exact.to_dense())
        ours, theirs = (torch.zeros(exact.to_dense().shape, dtype=torch.bool) for _ in range(2))
        for found, mask in ((ours, made), (theirs, exact)):
            counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
            assert counts is not None
            for place in counts.nonzero().tolist():
                found[(*place, indices[tuple(place)][: counts[tuple(place)]].long())] = True
        whole = torch.nn.functional.pad(part, (0, -part.shape[2] % 128, 0, -part.shape[1] % 128))
        whole = whole.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).all(4).all(2)[:, None]
        assert torch.equal(ours, whole)  # torch counts a cut block at the end as full or not by its padding
        assert bool((ours <= made.to_dense().bool()).all())
        index = [torch.arange(n) for n in part.shape]
        assert torch.equal(made.mask_mod(index[0].view(-1, 1, 1), 0, index[1].view(1, -1, 1), index[2]), part)


# ---------------------------------------------------------------- operators for packed sequences


VARLEN = {"flash": (FlashKernel, FlashStub, torch.bfloat16), "npu_flash": (NpuFlashKernel, NpuStub, torch.float32)}


@pytest.mark.parametrize("name", list(VARLEN))
@pytest.mark.parametrize("scores", ["causal", "non-causal", "window"])
def test_varlen(name: str, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, with the operator's reference in fp64, and in the operator's own dtype."""
    factory, stub, dtype = VARLEN[name]
    rule = scoring(SCORES[scores])
    want = wanted(rule)
    installed(monkeypatch, stub((torch.float64,)))
    for spans in SPANS:
        close(over_spans(factory(), rule, torch.float64, spans), want, 1e-12)
    close(over_keys(factory(), rule, torch.float64), want, 1e-12)
    installed(monkeypatch, stub())
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    close(over_spans(factory(), rule, dtype, "halves"), wanted(rule, dtype), tolerance)
    with pytest.raises(AssertionError, match="is not one of"):
        over_spans(factory(), rule, torch.float64)


@pytest.mark.parametrize("name", list(VARLEN))
def test_a_shard_is_one_native_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of one shard are sequences of one call; a head-tail shard too; no mask, nothing merged."""
    factory, stub, dtype = VARLEN[name]
    calls = installed(monkeypatch, stub()).calls
    rows = (tuple(Segment(*ends) for ends in ((0, 30), (30, 70), (70, 96))),)
    q, k, v = (torch.randn(1, heads, n, 16).to(dtype) for heads, n in ((4, 32), (2, 96), (2, 96)))
    for spans, sequences in (((((64, 96),), 2)), (((0, 16), (80, 96)), 2)):
        calls.clear()
        factory().forward(Block(q, k, v, CausalMetadata(spans, 0, 96, rows), Scoring(0.25)))
        assert [call["sequences"] for call in calls] == [sequences]


def test_packed_documents_are_not_copied() -> None:
    """Neighbouring sequences are one slice of the tensor."""
    rows = (tuple(Segment(*ends) for ends in ((0, 30), (30, 70), (70, 96))),)
    q, k, v = (torch.randn(1, 2, 96, 16) for _ in range(3))
    (run,) = runs_of(CausalMetadata(((0, 96),), 0, 96, rows))
    packed = _Packed(run, Block(q, k, v, CausalMetadata(((0, 96),), 0, 96, rows), Scoring(1.0)), 8)
    assert [x.data_ptr() for x in packed.qkv()] == [x.data_ptr() for x in (q, k, v)]


REQUEST = KernelRequest("cpu", torch.float32, 64, 64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sdpa", {"device": "npu", "dropout": 0.5}, ""),
        ("flex", {"dropout": 0.1}, ""),
        ("flex", {"device": "npu"}, "torch has no FlexAttention for 'npu' devices; use 'npu_flash' on an NPU"),
        ("flash", {}, "float16, bfloat16, not in torch.float32: use 'flex'"),
        ("flash", {"dtype": torch.bfloat16}, "runs on 'cuda' devices, not on 'cpu': use 'sdpa' or 'flex'"),
        ("flash", {"dtype": torch.bfloat16, "device": ""}, ""),
        ("flash", {"dtype": torch.bfloat16, "device": "cuda"}, "flash_attn cannot be imported (No module named"),
        ("flash", {"dtype": torch.bfloat16, "device": "cuda", "v_dim": 288}, "up to 256 wide, these are 288"),
        (
            "flash",
            {"dtype": torch.bfloat16, "device": "cuda", "dropout": 0.1},
            "so the cp size would matter: use 'flex'",
        ),
        ("npu_flash", {}, "runs on 'npu' devices, not on 'cpu'"),
        ("npu_flash", {"device": "npu"}, "torch_npu cannot be imported (No module named"),
        (
            "npu_flash",
            {"device": "npu", "dtype": torch.float64},
            "float16, bfloat16, float32, not in torch.float64: use 'sdpa'",
        ),
        ("npu_flash", {"device": "npu", "qk_dim": 576}, "up to 512 wide, these are 576"),
        ("npu_flash", {"device": "npu", "dropout": 0.1}, "so the cp size would matter: use 'sdpa'"),
    ],
)
def test_what_a_kernel_cannot_do(name: str, change: dict[str, Any], message: str) -> None:
    found = KERNELS[name]().obstacle(dataclasses.replace(REQUEST, **change))
    assert message in found
    assert bool(found) == bool(message)
