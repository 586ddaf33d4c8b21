"""The ``sdpa`` kernel: exact attention on every device, without a package beside torch.

B batch, N query heads, K kv heads, T queries, S keys, D head dim.

On the CPU it calls torch's fused flash operator a tile at a time: it takes grouped heads natively and has a backward
that accepts a merged output and log-sum-exp; a v of another width than q and k is padded with zeros, an upper triangle
is a lower one of reversed tokens. With a user's mask or dropout, and on other devices, it is the plain formula, in
fp32, a slab of queries at a time against the keys that they may see: right everywhere, fast nowhere. On a GPU or NPU
use ``flex``, ``flash`` or ``npu_flash``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import Piece, Tile, attention_pieces, attention_tiles
from .base import Block, KernelRequest, finite_lse, merge, wide_dtype

_SLAB_SCORES = 1 << 24  # scores held at once by the plain formula


class SdpaKernel:
    """Fused on the CPU, the plain formula elsewhere and for masks and dropout."""

    name = "sdpa"
    takes_masks = True

    def obstacle(self, request: KernelRequest) -> str:
        """See ``Kernel.obstacle``: it can do everything."""
        return ""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """See ``Kernel.forward``."""
        q, v = block.q, block.v
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide_dtype(q), device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=out.dtype, device=q.device)
        if _is_plain(block):
            for slab in _slabs(block):
                at = slab.queries
                out[at], lse[at] = _plain_forward(block, slab)
            return out, lse
        for tile in attention_tiles(block.meta):
            at, keys = _places(tile)
            part, part_lse = fused_forward(q[at], block.k[keys], v[keys], tile.shape, block.scoring.scale)
            out[at], lse[at] = merge(out[at], lse[at], part, part_lse)
        return out, lse

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernel.backward``; sums in fp32 or wider."""
        q, k, v = block.q, block.k, block.v
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide_dtype(q), device=q.device) for x in (q, k, v))
        if _is_plain(block):
            for slab in _slabs(block):
                at, keys = slab.queries, slab.keys
                grads = _plain_backward(dout[at], block, slab, out[at], lse[at])
                for total, grad, where in zip((dq, dk, dv), grads, (at, keys, keys), strict=True):
                    total[where] += grad
            return dq, dk, dv
        for tile in attention_tiles(block.meta):
            at, keys = _places(tile)
            parts = fused_backward(
                dout[at], q[at], k[keys], v[keys], out[at], lse[at], tile.shape, block.scoring.scale
            )  # fmt: skip
            for total, grad, where in zip((dq, dk, dv), parts, (at, keys, keys), strict=True):
                total[where] += grad
        return dq, dk, dv


Place = tuple[slice, slice, slice]  # of a batch, all heads, and tokens


def _places(part: Piece | Tile) -> tuple[Place, Place]:
    """Where its queries and its keys lie."""
    rows, heads = slice(part.b0, part.b1), slice(None)
    return (rows, heads, slice(part.q0, part.q1)), (rows, heads, slice(part.k0, part.k1))


# ---------------------------------------------------------------- fused, on the CPU


def fused_forward(q: Tensor, k: Tensor, v: Tensor, shape: str, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one tile by torch's flash operator for the CPU."""
    width = v.shape[-1]
    q, k, v = _reverse_upper(shape, *_one_width(q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, shape != "full", scale=scale)
    return tuple(_reverse_upper(shape, out[..., :width], lse))  # type: ignore[return-value]


def fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: str, scale: float
) -> tuple[Tensor, ...]:
    """Its gradients, from the merged output and log-sum-exp."""
    qk_width, v_width = q.shape[-1], v.shape[-1]
    dout, q, k, v, out = _one_width(dout, q, k, v, out.to(q.dtype))
    dout, q, k, v, out, lse = _reverse_upper(shape, dout, q, k, v, out, lse)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, shape != "full", scale=scale
    )
    return tuple(_reverse_upper(shape, dq[..., :qk_width], dk[..., :qk_width], dv[..., :v_width]))


def _reverse_upper(shape: str, *tensors: Tensor) -> list[Tensor]:
    """Tokens (dim 2) in reverse order if the tile is an upper triangle: it is a lower one then."""
    return [x.flip(2) if shape == "upper" else x for x in tensors]


def _one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What the fused operator takes for granted: one last dim (zeros change no score), and stride 1 in it."""
    width = max(x.shape[-1] for x in tensors)
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in padded)


# ---------------------------------------------------------------- the plain formula


class Slab(NamedTuple):
    """Some queries of a piece and the keys that any of them may see."""

    queries: Place
    keys: Place
    q_pos: int
    k_pos: int


def _is_plain(block: Block) -> bool:
    return block.q.device.type != "cpu" or block.mask is not None or block.scoring.dropout is not None


def _slabs(block: Block) -> Iterator[Slab]:
    """The pieces, cut so that the scores of each part fit into ``_SLAB_SCORES``."""
    heads, meta = block.q.shape[1], block.meta
    for piece in attention_pieces(meta):
        step = max(1, _SLAB_SCORES // ((piece.b1 - piece.b0) * heads * (piece.k1 - piece.k0)))
        for q0 in range(piece.q0, piece.q1, step):
            q1 = min(q0 + step, piece.q1)
            k0, k1, ahead = piece.k0, piece.k1, piece.k0 - piece.k_pos
            first, last = (q - piece.q0 + piece.q_pos for q in (q0, q1 - 1))
            if meta.causal:
                k1 = min(k1, last + 1 + ahead)
            if meta.window is not None:
                k0 = max(k0, first - meta.window + 1 + ahead)
            queries, keys = _places(piece._replace(q0=q0, q1=q1, k0=k0, k1=k1))
            yield Slab(queries, keys, first, k0 - ahead)


def _plain_forward(block: Block, slab: Slab) -> tuple[Tensor, Tensor]:
    """Output ``[b, N, t, Dv]`` and log-sum-exp ``[b, N, t]``."""
    scores, keep = _scores(block, slab)
    lse = scores.logsumexp(-1, keepdim=True)  # [b, K, G, t, 1]
    weights = (scores - finite_lse(lse)).exp()
    out = torch.einsum("bkgts,bksd->bkgtd", weights if keep is None else weights * keep, _wide(block.v[slab.keys]))
    return out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(dout: Tensor, block: Block, slab: Slab, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the formula (Dao et al., FlashAttention, algorithm 4)."""
    k = block.k[slab.keys]
    q, dout, out = (_grouped(x, k) for x in (block.q[slab.queries], dout, out))
    scores, keep = _scores(block, slab)
    weights = (scores - finite_lse(lse).unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
    dweights = torch.einsum("bkgtd,bksd->bkgts", dout, _wide(block.v[slab.keys]))
    kept = weights
    if keep is not None:
        dweights, kept = dweights * keep, weights * keep
    dv = torch.einsum("bkgts,bkgtd->bksd", kept, dout)
    dscores = block.scoring.scale * weights * (dweights - (dout * out).sum(-1, keepdim=True))
    dq = torch.einsum("bkgts,bksd->bkgtd", dscores, _wide(k))
    return dq.flatten(1, 2), torch.einsum("bkgts,bkgtd->bksd", dscores, q), dv


def _scores(block: Block, slab: Slab) -> tuple[Tensor, Tensor | None]:
    """Scaled and masked scores ``[b, K, G, t, s]``, and what dropout multiplies the weights with."""
    meta, scoring, device = block.meta, block.scoring, block.q.device
    k = block.k[slab.keys]
    scores = torch.einsum("bkgtd,bksd->bkgts", _grouped(block.q[slab.queries], k), _wide(k)) * scoring.scale
    t, s = scores.shape[-2:]
    q_pos = torch.arange(slab.q_pos, slab.q_pos + t, device=device).unsqueeze(-1)
    k_pos = torch.arange(slab.k_pos, slab.k_pos + s, device=device)
    if meta.causal:
        scores = scores.masked_fill(k_pos > q_pos, -torch.inf)
    if meta.window is not None:
        scores = scores.masked_fill(k_pos <= q_pos - meta.window, -torch.inf)
    mask = block.mask
    if mask is not None:
        rows = slice(None) if mask.shape[0] == 1 else slab.queries[0]
        part = mask[rows, :, slab.q_pos : slab.q_pos + t, slab.k_pos : slab.k_pos + s]
        part = part.unsqueeze(1) if part.shape[1] == 1 else part.unflatten(1, scores.shape[1:3])
        scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part.to(scores.dtype)
    if scoring.dropout is None:
        return scores, None
    row = torch.arange(slab.queries[0].start, slab.queries[0].stop, device=device).view(-1, 1, 1, 1)
    heads = torch.arange(block.first_head, block.first_head + block.q.shape[1], device=device).view(1, -1, 1, 1)
    kept = scoring.dropout.keeps(scoring.dropout.stream(row, heads), q_pos, k_pos)  # [b, N, t, s]
    return scores, kept.unflatten(1, scores.shape[1:3]).to(scores.dtype) / (1 - scoring.dropout.p)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[B, N, T, D] -> [B, K, N / K, T, D]``, fp32 or wider."""
    return _wide(x).unflatten(1, (k.shape[1], -1))
