"""Stand-ins for device operators: they enforce the documented signature, dtypes, layouts and constraints, and compute.

``flash_attn.flash_attn_interface``: Dao-AILab/flash-attention 2.7 (the file of that name, and its README).
``torch_npu.npu_fusion_attention``: hiascend.com, Ascend Extension for PyTorch, API reference of the operator.
A device cannot be enforced here. ``extra_dtypes`` lets tests compare in fp64 what the operators do in 16 bits.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ALL = 2**31 - 1


def visible_sequence(queries: int, keys: int, before: int, after: int) -> Tensor:
    """``[t, s]`` bool; before and after count from the diagonal that ends in the lower right corner."""
    ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    return (ahead >= -before) & (ahead <= after)


def scores_of(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """``[N, t, s]`` fp64, of ``[t, N, D]`` and ``[s, K, D]``."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("tnd,snd->nts", q.double(), k) * scale).masked_fill(~seen, -torch.inf)


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: list[tuple[int, ...]], before: int, after: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[tokens, N, D]`` and log-sum-exp ``[N, tokens]``, sequence by sequence."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    for at, keys in slices(ends):
        seen = visible_sequence(at.stop - at.start, keys.stop - keys.start, before, after)
        assert bool(seen.any(1).all()), "a query that sees nothing: its statistics are not defined"
        scores = scores_of(q[at], k[keys], scale, seen)
        values = v[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[at] = torch.einsum("nts,snd->tnd", scores.softmax(-1), values).to(q.dtype)
        lse[:, at] = scores.logsumexp(-1)
    return out, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: list[tuple[int, ...]],
    before: int, after: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients from the log-sum-exp ``[N, tokens]`` and output that were given."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for at, keys in slices(ends):
        seen = visible_sequence(at.stop - at.start, keys.stop - keys.start, before, after)
        weights = (scores_of(q[at], k[keys], scale, seen) - lse[:, at, None].double()).exp()
        values, rows = v[keys].double().repeat_interleave(group, 1), k[keys].double().repeat_interleave(group, 1)
        g = dout[at].double()
        delta = (g * out[at].double()).sum(-1).T[..., None]
        dscores = scale * weights * (torch.einsum("tnd,snd->nts", g, values) - delta)
        dq[at] = torch.einsum("nts,snd->tnd", dscores, rows)
        for total, part in (
            (dk, torch.einsum("nts,tnd->snd", dscores, q[at].double())),
            (dv, torch.einsum("nts,tnd->snd", weights, g)),
        ):
            total[keys] = part.unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def slices(ends: list[tuple[int, ...]]) -> list[tuple[slice, slice]]:
    starts = [(0, *side[:-1]) for side in ends]
    return [
        (slice(a, b), slice(c, d)) for a, b, c, d in zip(starts[0], ends[0], starts[1], ends[1], strict=True)
    ]  # fmt: skip


def check_tokens(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...], multiple: int, most: int) -> None:
    assert q.ndim == k.ndim == v.ndim == 3, "tokens, heads, head dim"
    assert q.dtype == k.dtype == v.dtype, "one dtype"
    assert q.dtype in dtypes, f"{q.dtype} is not one of {dtypes}"
    assert q.shape[2] == k.shape[2] == v.shape[2], "one head dim"
    assert q.shape[2] % multiple == 0, f"head dim {q.shape[2]} is no multiple of {multiple}"
    assert q.shape[2] <= most, f"head dim {q.shape[2]} is above {most}"
    assert k.shape[:2] == v.shape[:2], "as many keys as values"
    assert q.shape[1] % k.shape[1] == 0, "kv heads divide query heads"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "last dim contiguous"


class FlashStub:
    """``flash_attn.flash_attn_interface``."""

    def __init__(self, extra_dtypes: tuple[torch.dtype, ...] = ()) -> None:
        self.dtypes = (torch.float16, torch.bfloat16, *extra_dtypes)
        self.calls: list[dict[str, Any]] = []

    def _flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        sides = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        ends, before, after = self._read(q, k, v, sides, causal, window_size_left, window_size_right)
        assert dropout_p == softcap == 0
        assert not return_softmax
        assert alibi_slopes is None
        self.calls.append(
            {"sequences": len(ends[0]), "causal": causal, "window": (window_size_left, window_size_right)}
        )
        out, lse = reference_forward(q, k, v, ends, before, after, softmax_scale)
        exact = q.dtype == torch.float64
        return out, lse if exact else lse.float(), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        sides = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        ends, before, after = self._read(q, k, v, sides, causal, window_size_left, window_size_right)
        assert dout.dtype == out.dtype == q.dtype
        assert dout.shape == out.shape == q.shape
        assert softmax_lse.shape == (q.shape[1], q.shape[0])
        assert softmax_lse.is_contiguous()
        assert softmax_lse.dtype in (torch.float32, *([torch.float64] if q.dtype == torch.float64 else []))
        grads = reference_backward(dout, q, k, v, out, softmax_lse, ends, before, after, softmax_scale)
        for buffer, like, grad in zip((dq, dk, dv), (q, k, v), grads, strict=True):
            assert buffer.shape == like.shape
            assert buffer.dtype == like.dtype
            assert buffer.is_contiguous()
            buffer.copy_(grad)
        return torch.empty(0)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, sides: Any, causal: bool, left: int, right: int
    ) -> tuple[list[tuple[int, ...]], int, int]:
        check_tokens(q, k, v, self.dtypes, 8, 256)
        ends = []
        for starts, longest, x in zip(sides[:2], sides[2:], (q, k), strict=True):
            assert starts.dtype == torch.int32
            assert starts.is_contiguous()
            numbers = starts.tolist()
            assert numbers[0] == 0
            assert numbers[-1] == len(x)
            assert longest == max(b - a for a, b in pairwise(numbers))
            ends.append(tuple(numbers[1:]))
        assert min(left, right) >= -1, "-1 is all; below it means nothing"
        after = 0 if causal else right
        return ends, ALL if left == -1 else left, ALL if after == -1 else after


class NpuStub:
    """``torch_npu``, as far as attention goes."""

    def __init__(self, extra_dtypes: tuple[torch.dtype, ...] = ()) -> None:
        self.dtypes = (torch.float16, torch.bfloat16, torch.float32, *extra_dtypes)
        self.calls: list[dict[str, Any]] = []

    def npu_fusion_attention(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
        padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0,
        keep_prob: float = 1.0, pre_tockens: int = ALL, next_tockens: int = ALL, inner_precise: int = 0,
        prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        lengths = (actual_seq_qlen, actual_seq_kvlen)
        ends, before, after = self._read(
            query, key, value, head_num, input_layout, atten_mask, pre_tockens, next_tockens, lengths, sparse_mode
        )
        assert keep_prob == 1.0
        self.calls.append({"mode": sparse_mode, "sequences": len(ends[0]), "tokens": (pre_tockens, next_tockens)})
        out, lse = reference_forward(query, key, value, ends, before, after, scale)
        lse = lse.T if query.dtype == torch.float64 else lse.T.float()
        maximum = (lse - 0.5).unsqueeze(-1).repeat(1, 1, 8)  # any pair whose max + log(sum) is right
        total = torch.full_like(maximum, 0.5).exp()
        return out, maximum, total, torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
        pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
        softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
        attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
        pre_tockens: int = ALL, next_tockens: int = ALL, inner_precise: int = 0, seed: int = 0, offset: int = 0,
        numels: int = 0, prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        lengths = (actual_seq_qlen, actual_seq_kvlen)
        ends, before, after = self._read(
            query, key, value, head_num, input_layout, atten_mask, pre_tockens, next_tockens, lengths, sparse_mode
        )
        assert keep_prob == 1.0
        assert attention_in is not None
        assert softmax_max is not None
        assert softmax_sum is not None
        assert dy.shape == attention_in.shape == query.shape
        assert dy.dtype == attention_in.dtype == query.dtype
        exact = [torch.float64] if query.dtype == torch.float64 else []
        for statistics in (softmax_max, softmax_sum):
            assert statistics.shape == (*query.shape[:2], 8)
            assert statistics.dtype in (torch.float32, *exact)
            assert statistics.is_contiguous()
            assert bool((statistics == statistics[..., :1]).all())
        lse = (softmax_max + softmax_sum.log())[..., 0].T
        grads = reference_backward(dy, query, key, value, attention_in, lse, ends, before, after, scale_value)
        return (*grads, torch.empty(0))

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, head_num: int, layout: str, mask: Tensor | None, before: int,
        after: int, lengths: Any, mode: int,
    ) -> tuple[list[tuple[int, ...]], int, int]:  # fmt: skip
        check_tokens(q, k, v, self.dtypes, 16, 512)
        assert layout == "TND"
        assert head_num == q.shape[1]
        for side, x in zip(lengths, (q, k), strict=True):
            assert isinstance(side, list), "host numbers"
            assert side == sorted(side)
            assert side[-1] == len(x)
            assert x.is_contiguous()
        assert mode in (0, 3, 4)
        if mode == 0:
            assert mask is None
            assert before == after == ALL
        else:
            assert mask is not None
            assert mask.dtype == torch.bool
            assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        if mode == 3:  # the operator ignores both
            before, after = ALL, 0
        return [tuple(side) for side in lengths], before, after


def installed(monkeypatch: Any, stub: Any) -> Any:
    """Put a stub where its kernel looks, for one test."""
    from cp_core.kernels import flash, npu_flash

    module, name = (flash, "_interface") if isinstance(stub, FlashStub) else (npu_flash, "_torch_npu")
    monkeypatch.setattr(module, name, lambda: stub)
    return SimpleNamespace(calls=stub.calls)
