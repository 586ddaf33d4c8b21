"""Router, experts and the load-balancing loss against transformers' modules, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, load_balancing_loss_func

import models.common.moe as moe
from cp_core import Topology
from models.common.experts import Experts, can_group, expert_linear
from models.common.moe import SparseMoeBlock, TopKRouter, load_balancing_loss
from models.common.tiny import tiny_qwen3_moe_config
from tests.models._parity import NoNarrowing, aux_by_hand

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 32, 24, 2


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(dtype: torch.dtype, **config: Any) -> tuple[SparseMoeBlock, Qwen3MoeSparseMoeBlock]:
    """The zoo's block and transformers' (eager experts), with the same weights."""
    settings = tiny_qwen3_moe_config(**config)
    settings._experts_implementation = "eager"
    theirs = Qwen3MoeSparseMoeBlock(settings).to(dtype)
    ours = SparseMoeBlock(
        TopKRouter(settings.num_experts, settings.hidden_size, settings.num_experts_per_tok, settings.norm_topk_prob),
        Experts(settings.num_experts, settings.hidden_size, settings.moe_intermediate_size, settings.hidden_act),
    ).to(dtype)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(theirs.named_parameters()):
            parameter.copy_(0.3 * randn(*parameter.shape, seed=seed, dtype=dtype))
            ours.get_parameter(name).copy_(parameter)
    return ours, theirs


def compare(ours: SparseMoeBlock, theirs: Qwen3MoeSparseMoeBlock, x: Tensor, tolerance: float) -> None:
    """Output, router logits, gradients of input and of every parameter."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, logits = ours(inputs[0])
    if x.dtype == torch.float64:
        with NoNarrowing():
            want = theirs(inputs[1])
    else:
        want = theirs(inputs[1])
    upstream = randn(*x.shape, seed=77, dtype=x.dtype)
    (out * upstream).sum().backward()
    (want * upstream).sum().backward()
    found = {"out": (out, want), "x": (inputs[0].grad, inputs[1].grad)}
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(name).grad
        assert mine is not None
        found[name] = (mine, parameter.grad)
    for name, (a, b) in found.items():
        assert a.dtype == b.dtype
        assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max()), name
    torch.testing.assert_close(logits, torch.nn.functional.linear(x.flatten(0, 1), theirs.gate.weight))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("width", [24, 25])  # 25 fp32 values are no multiple of 16 bytes
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_block_equals_transformers(
    top_k: int, width: int, dtype: torch.dtype, tolerance: float, norm_topk_prob: bool
) -> None:
    config = {"moe_intermediate_size": width, "num_experts_per_tok": top_k, "norm_topk_prob": norm_topk_prob}
    ours, theirs = pair(dtype, **config)
    compare(ours, theirs, randn(2, 19, HIDDEN, seed=5, dtype=dtype), tolerance)


def test_which_path_is_taken() -> None:
    def takes(dtype: torch.dtype, width: int, hidden: int = HIDDEN) -> bool:
        return can_group(torch.zeros(3, hidden, dtype=dtype), torch.zeros(EXPERTS, 2 * width, hidden, dtype=dtype))

    assert takes(torch.float32, 24)
    assert takes(torch.bfloat16, 24)
    assert takes(torch.float16, 24)
    assert not takes(torch.float64, 24)
    assert not takes(torch.float32, 25)
    assert not takes(torch.bfloat16, 26)  # 104 bytes
    assert not takes(torch.float32, 24, hidden=30)
    assert not can_group(torch.zeros(3, HIDDEN), torch.zeros(EXPERTS, 48, HIDDEN, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts", [[3, 0, 5, 0, 0, 1, 0, 4], [0, 0, 0, 13, 0, 0, 0, 0], [13] + [0] * 7, [0] * 7 + [13]]
)
def test_grouped_equals_loop(counts: list[int], dtype: torch.dtype) -> None:
    results = []
    for grouped in (True, False):
        rows = randn(sum(counts), HIDDEN, seed=1, dtype=dtype).requires_grad_()
        weight = randn(EXPERTS, 2 * WIDTH, HIDDEN, seed=2, dtype=dtype).requires_grad_()
        out = expert_linear(rows, weight, torch.tensor(counts), grouped)
        (out * randn(*out.shape, seed=3, dtype=dtype)).sum().backward()
        results.append((out, rows.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    for expert, count in enumerate(counts):
        assert bool(results[0][2][expert].any()) == bool(results[1][2][expert].any()) == (count > 0)
    plain = torch.cat(
        [rows @ matrix.T for rows, matrix in zip(results_rows(counts, dtype), weight.detach(), strict=True)]
    )
    torch.testing.assert_close(results[1][0], plain)


def results_rows(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn(sum(counts), HIDDEN, seed=1, dtype=dtype).split(counts)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_experts_equal_a_loop_over_tokens(tokens: int, top_k: int, seed: int, few: bool) -> None:
    """Any routing, also the same expert chosen twice; fp32 (grouped) and fp64 (loop)."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        experts = Experts(5, 8, 12, "silu").to(dtype)
        with torch.no_grad():
            for index, parameter in enumerate(experts.parameters()):
                parameter.copy_(randn(*parameter.shape, seed=seed + index, dtype=dtype))
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(0, 2 if few else 5, (tokens, top_k), generator=generator)
        x, weights = randn(tokens, 8, seed=seed, dtype=dtype), torch.rand(tokens, top_k, generator=generator)
        out = experts(x, chosen, weights)
        want = torch.zeros_like(x)
        for t in range(tokens):
            for slot in range(top_k):
                gate, up = (experts.gate_up_proj[chosen[t, slot]] @ x[t]).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                want[t] += weights[t, slot].to(dtype) * (experts.down_proj[chosen[t, slot]] @ inner)
        assert out.dtype == dtype
        assert float((out - want).detach().abs().max()) <= tolerance * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_expert_gets_every_token(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype, num_experts_per_tok=1)
    x = randn(2, 19, HIDDEN, seed=5, dtype=dtype).abs()
    with torch.no_grad():
        for block in (ours, theirs):
            block.gate.weight.zero_()
            block.gate.weight[3] = 1.0  # positive inputs: expert 3 always wins
    compare(ours, theirs, x, 1e-5)
    for parameter in ours.experts.parameters():
        assert bool(parameter.grad[3].any())
        others = torch.arange(EXPERTS) != 3
        assert not parameter.grad[others].any()  # zeros, not None and not garbage


def test_router_scores_are_fp32_for_bf16_models() -> None:
    router = TopKRouter(EXPERTS, HIDDEN, TOP_K, norm_topk_prob=True).to(torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(randn(EXPERTS, HIDDEN))
    logits, weights, chosen = router(randn(11, HIDDEN, seed=1, dtype=torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    scores = logits.float().softmax(-1)
    assert torch.equal(chosen, scores.topk(TOP_K, dim=-1).indices)
    torch.testing.assert_close(weights.sum(-1), torch.ones(11))
    assert moe.router_scores(logits.double()).dtype == torch.float64


# The load-balancing loss.


def balancing(logits: list[Tensor], valid: Tensor, targets: int = 7) -> tuple[Tensor, Tensor]:
    return load_balancing_loss(logits, valid, TOP_K, Topology(), torch.tensor(targets))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_balancing_loss_equals_transformers(layers: int, masked: bool) -> None:
    valid = torch.ones(2, 19, dtype=torch.bool)
    if masked:
        valid[0, :7] = False
        valid[1, 15:] = False
    ours = [randn(38, EXPERTS, seed=seed).requires_grad_() for seed in range(layers)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    got, targets = balancing(ours, valid)
    want = load_balancing_loss_func(tuple(theirs), EXPERTS, TOP_K, valid.long() if masked else None)
    got.backward()
    want.backward()
    assert targets.item() == 7
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-9)
        assert not a.grad[~valid.flatten()].any()


def test_balancing_loss_in_fp64_and_without_tokens() -> None:
    logits = [randn(38, EXPERTS, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(2)]
    got, _ = balancing(logits, torch.ones(2, 19, dtype=torch.bool))
    assert got.item() == pytest.approx(aux_by_hand(logits, TOP_K).item(), rel=1e-13)
    none, targets = balancing(logits, torch.zeros(2, 19, dtype=torch.bool), targets=0)
    none.backward()
    assert none.item() == 0.0
    assert targets.item() == 0
    assert not any(x.grad.any() for x in logits)


def test_balancing_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = [randn(38, EXPERTS, dtype=torch.bfloat16)]
    got, _ = balancing(logits, torch.ones(2, 19, dtype=torch.bool))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(aux_by_hand([logits[0].double()], TOP_K).item(), rel=1e-6)


class Counters(TorchDispatchMode):
    """dtypes of what is counted into."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scatter_add" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_counts_are_integers() -> None:
    """fp32 stops counting at 2^24: 2^24 + 1 is 2^24."""
    with Counters() as seen:
        balancing([randn(38, EXPERTS)], torch.ones(2, 19, dtype=torch.bool))
        Experts(EXPERTS, HIDDEN, WIDTH, "silu")(
            torch.zeros(3, HIDDEN), torch.zeros(3, TOP_K, dtype=torch.int64), torch.zeros(3, TOP_K)
        )
    assert seen.dtypes == [torch.int64, torch.int64]


@pytest.mark.slow
def test_counts_above_2_to_the_24() -> None:
    """All of 2^24 + 2^22 tokens choose expert 0, so the loss is E times its mean score."""
    tokens = 2**24 + 2**22
    logits = torch.tensor([1.0, 0.0]).repeat(tokens, 1)
    with torch.no_grad():
        got, _ = load_balancing_loss(
            [logits], torch.ones(1, tokens, dtype=torch.bool), 1, Topology(), torch.tensor(tokens)
        )
    assert got.item() == pytest.approx(2 * logits[0].softmax(-1)[0].item(), rel=1e-2)  # a saturated count is 20 % off
