"""The ``flex`` kernel: torch's FlexAttention, one call for any documents, window, mask and dropout.

B batch, N query heads, K kv heads, T queries, S keys, D head dim.

Documents, causality and window become a ``BlockMask``, made on the host from ``CausalMetadata`` without ever looking
at T x S entries, once for each layout and device and shared by all layers. A user's mask is added to the scores.
Dropout has no place in flex, so weights are dropped by scores of -inf and the output is brought back to the sum of all
weights by the two log-sum-exps. On a GPU, where all keys are in one block, flex's own autograd is used; merged blocks
(ring), and the CPU, compute the forward again in backward, with the share that each block had in the merged softmax.

On a GPU this is the public call, compiled. On the CPU the public call refuses a backward and compiles nothing useful,
so the operator below it is called, eagerly (torch 2.13: exact, in fp64 too, but with all scores in memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..blocks import CausalMetadata, attention_pieces
from .base import Block, KernelRequest, attend_by_parts, finite_lse

_SPARSE = 128  # queries and keys of one entry of a BlockMask; flex's own default

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexKernel:
    """FlexAttention; no state."""

    name = "flex"
    takes_masks = True

    def obstacle(self, request: KernelRequest) -> str:
        """See ``Kernel.obstacle``."""
        if request.device in ("", "cpu", "cuda", "xpu"):
            return ""
        return f"torch has no FlexAttention for {request.device!r} devices; use 'npu_flash' on an NPU, else 'sdpa'"

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """See ``Kernel.forward``."""
        with torch.no_grad():
            return _attend(block.q, block.k, block.v, block)

    def attend(self, block: Block) -> Tensor:
        """See ``WholeKernel.attend``."""
        if not _has_own_autograd(block.q.device):
            return attend_by_parts(block, self)
        return _attend(block.q, block.k, block.v, block)[0].to(block.q.dtype)

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernel.backward``.

        The merged output is the sum of ``exp(part_lse - lse) * part`` over blocks, and the merged ``lse`` their
        logsumexp; so the gradient of ``part_lse`` is that weight times ``dout . (part - out)``.
        """
        with torch.enable_grad():
            q, k, v = leaves = [x.detach().requires_grad_() for x in (block.q, block.k, block.v)]
            part, part_lse = _attend(q, k, v, block)
        with torch.no_grad():
            wide = lse.dtype
            share = (part_lse - finite_lse(lse)).exp()  # 0 where this block saw nothing
            dpart = share.unsqueeze(-1) * dout.to(wide)
            dlse = (dpart * (part.to(wide) - out.to(wide))).sum(-1)
        dq, dk, dv = torch.autograd.grad((part, part_lse), leaves, (dpart.to(part.dtype), dlse.to(part_lse.dtype)))
        return dq, dk, dv


def _has_own_autograd(device: torch.device) -> bool:
    """Whether the call may stand in a graph.

    The eager operator traces the score function with autograd while forward runs. Under activation checkpointing its
    saved tensors would be taken for the layer's, and the layer be computed again in the middle of its own forward.
    """
    return device.type != "cpu"


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, differentiable with respect to q, k and v, through both."""
    table = block_mask(block.meta, q.device)
    mods = _score_mods(block)
    scale, dropout = block.scoring.scale, block.scoring.dropout
    if dropout is None:
        return _flex(q, k, v, mods, table, scale)
    _, lse = _flex(q, k, v, mods, table, scale)
    part, part_lse = _flex(q, k, v, [*mods, _dropout_mod(block)], table, scale)
    share = (part_lse - finite_lse(lse)).exp() / (1 - dropout.p)
    return part * share.unsqueeze(-1).to(part.dtype), lse


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mods: list[ScoreMod], table: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        for mod in mods:
            score = mod(score, b, h, q_index, k_index)
        return score

    if q.device.type == "cpu":
        return _operator(q, k, v, score_mod, table, scale)
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = _compiled()(
        q, k, v, score_mod=score_mod if mods else None, block_mask=table, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def _operator(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod, table: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """The operator below the public call, eagerly; it counts its log-sum-exp in powers of 2."""
    from torch._higher_order_ops.flex_attention import flex_attention

    out, lse, _ = flex_attention(q, k, v, score_mod, table.as_tuple(), scale, {})
    return out, lse * math.log(2.0)


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


# ---------------------------------------------------------------- scores


def _score_mods(block: Block) -> list[ScoreMod]:
    """What a user's mask does to a score."""
    mask = block.mask
    if mask is None:
        return []
    q_pos, k_pos = positions(block.meta, block.q.device)
    rows, heads = (size > 1 for size in mask.shape[:2])

    def entry(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return mask[b if rows else 0, h if heads else 0, q_pos[q_index], k_pos[k_index]]

    if mask.dtype == torch.bool:
        return [lambda score, *at: torch.where(entry(*at), score, -torch.inf)]
    return [lambda score, *at: score + entry(*at)]


def _dropout_mod(block: Block) -> ScoreMod:
    dropout = block.scoring.dropout
    assert dropout is not None
    device, first = block.q.device, block.first_head
    q_pos, k_pos = positions(block.meta, device)
    rows = torch.arange(block.q.shape[0], device=device).unsqueeze(-1)
    stream = dropout.stream(rows, torch.arange(first, first + block.q.shape[1], device=device))  # [B, N]

    def mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return torch.where(dropout.keeps(stream[b, h], q_pos[q_index], k_pos[k_index]), score, -torch.inf)

    return mod


# ---------------------------------------------------------------- the block mask


@lru_cache(maxsize=64)
def positions(meta: CausalMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
    """Global positions of the queries ``[T]`` and of the keys ``[S]``."""
    queries = torch.cat([torch.arange(*span) for span in meta.spans])
    return queries.to(device), torch.arange(meta.k_start, meta.k_stop, device=device)


@lru_cache(maxsize=64)
def block_mask(meta: CausalMetadata, device: torch.device) -> BlockMask:
    """The BlockMask ``[B, 1, T, S]`` of one attention call."""
    some, full = _block_table(meta)
    make = partial(_ordered, device=device)
    q_document, k_document = _documents(meta, device)
    q_pos, k_pos = positions(meta, device)
    causal, window = meta.causal, meta.window

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        seen = q_document[b, q_index] == k_document[b, k_index]
        if causal:
            seen = seen & (k_pos[k_index] <= q_pos[q_index])
        if window is not None:
            seen = seen & (k_pos[k_index] > q_pos[q_index] - window)
        return seen

    return BlockMask.from_kv_blocks(
        *make(some & ~full), *make(full), BLOCK_SIZE=_SPARSE, mask_mod=mask_mod, seq_lengths=(meta.queries, meta.keys)
    )


def _block_table(meta: CausalMetadata) -> tuple[Tensor, Tensor]:
    """``[B, T / 128, S / 128]`` bool each: where some pair counts, and where every pair does."""
    blocks = (len(meta.rows), -(-meta.queries // _SPARSE), -(-meta.keys // _SPARSE))
    some, full = (torch.zeros(blocks, dtype=torch.bool) for _ in range(2))
    for b0, b1, q0, q1, k0, k1, q_pos, k_pos in attention_pieces(meta):
        ahead = (q_pos - q0) - (k_pos - k0)  # query index + ahead: the key index at the same position
        for block in range(q0 // _SPARSE, (q1 - 1) // _SPARSE + 1):
            first, last = max(q0, block * _SPARSE), min(q1, (block + 1) * _SPARSE) - 1
            any_from, any_to, all_from, all_to = k0, k1, k0, k1  # keys that any, and that all, of these queries see
            if meta.causal:
                any_to, all_to = min(k1, last + ahead + 1), min(k1, first + ahead + 1)
            if meta.window is not None:
                any_from = max(k0, first + ahead - meta.window + 1)
                all_from = max(k0, last + ahead - meta.window + 1)
            if any_from < any_to:
                some[b0:b1, block, any_from // _SPARSE : -(-any_to // _SPARSE)] = True
            if last - first + 1 == _SPARSE:
                full[b0:b1, block, -(-all_from // _SPARSE) : all_to // _SPARSE] = True
    return some, full


def _ordered(table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row of blocks how many are marked, and their indices first: ``[B, 1, q]`` and ``[B, 1, q, k]`` int32."""
    counts = table.sum(-1, dtype=torch.int32)
    indices = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1).to(device), indices.unsqueeze(1).to(device)


def _documents(meta: CausalMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of each query's document ``[B, T]`` and of each key's ``[B, S]``; on padding two numbers, never equal."""
    end = max((row[-1].stop for row in meta.rows), default=0)
    numbers = torch.empty(len(meta.rows), max(end, meta.k_stop), dtype=torch.int32)
    for index, row in enumerate(meta.rows):
        for number, (start, stop, padding) in enumerate(row):
            numbers[index, start:stop] = -1 if padding else number
    queries = torch.cat([numbers[:, slice(*span)] for span in meta.spans], 1)
    keys = numbers[:, meta.k_start : meta.k_stop]
    return queries.to(device), keys.masked_fill(keys < 0, -2).to(device)
