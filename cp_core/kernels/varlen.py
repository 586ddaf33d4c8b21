"""What kernels for packed sequences have in common: an attention call as a few *runs* of one operator.

B batch, N query heads, K kv heads, T queries, S keys, D head dim.

Such an operator takes tokens of many sequences behind each other, ``[tokens, heads, D]``, with the end of each
sequence, and aligns causality and a window to the last query and the last key of each. So a piece whose keys end
where its queries end is one sequence; where the keys end earlier (a block of a ring), the queries behind them see all
keys, or a window's tail, and are a sequence of their own. Sequences with equal alignment share a call; nothing is
copied where they are the whole tensor already. Which sequences there are is known on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import CausalMetadata, Piece, attention_pieces
from .base import Block, KernelRequest, wide_dtype


class Alignment(NamedTuple):
    """Which keys a query of a sequence sees, counted from the diagonal that ends at its last query and last key.

    Attributes:
        before: how many keys before the diagonal; None: all.
        after: how many keys after it, 0 or all.
    """

    before: int | None
    after: int | None


@dataclass(frozen=True)
class Run:
    """One call: sequences of one alignment, as places in q and in k."""

    alignment: Alignment
    sequences: tuple[Piece, ...]


class Ends(NamedTuple):
    """Where each sequence ends among the packed queries and keys; rising, both as many."""

    q: tuple[int, ...]
    k: tuple[int, ...]

    def longest(self, side: int) -> int:
        """Tokens of the longest sequence, of queries (0) or keys (1)."""
        return max(end - start for start, end in pairwise((0, *self[side])))


Pair = tuple[Tensor, Tensor]


@lru_cache(maxsize=1024)
def runs_of(meta: CausalMetadata) -> tuple[Run, ...]:
    """The calls of one attention block; every query is in at most one sequence."""
    grouped: dict[Alignment, list[Piece]] = {}
    for piece in attention_pieces(meta):
        for alignment, part in _sequences(piece, meta.causal, meta.window):
            b0, b1 = part.b0, part.b1
            grouped.setdefault(alignment, []).extend(part._replace(b0=b, b1=b + 1) for b in range(b0, b1))
    return tuple(Run(alignment, tuple(sorted(parts))) for alignment, parts in grouped.items())


class VarlenKernel(ABC):
    """A kernel over such an operator. A device's file says what it takes, imports it and calls it."""

    name: str
    takes_masks: bool = False
    operator: str  # for messages
    package: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # head dims are padded to one of it, and v to q's
    widest: int
    instead: str  # the kernel that does what the operator does not

    @abstractmethod
    def load(self) -> object:
        """Import the package."""

    @abstractmethod
    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, alignment: Alignment, scale: float) -> Pair:
        """Of tokens ``[tokens, heads, D]``: output ``[tokens, N, D]`` and log-sum-exp ``[N, tokens]`` fp32."""

    @abstractmethod
    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends,
        alignment: Alignment, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``dq, dk, dv``, from an output and log-sum-exp that may be those of more keys."""

    def obstacle(self, request: KernelRequest) -> str:
        """See ``Kernel.obstacle``."""
        if request.dropout:
            return f"{self.operator} drops by place in its blocks, so the cp size would matter: use {self.instead!r}"
        if request.dtype not in self.dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"{self.operator} computes in {known}, not in {request.dtype}: use {self.instead!r}"
        width = max(request.qk_dim, request.v_dim)
        if width > self.widest:
            return f"{self.operator} takes heads up to {self.widest} wide, these are {width}: use {self.instead!r}"
        if not request.device:
            return ""
        if request.device != self.device:
            return f"{self.operator} runs on {self.device!r} devices, not on {request.device!r}: use 'sdpa' or 'flex'"
        try:
            self.load()
        except Exception as error:  # a broken installation raises all sorts of things, not ImportError alone
            return f"{self.package} cannot be imported ({error}): install it, or use {self.instead!r}"
        return ""

    def forward(self, block: Block) -> Pair:
        """See ``Kernel.forward``."""
        q, v = block.q, block.v
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide_dtype(q), device=q.device)
        for run in runs_of(block.meta):
            packed = _Packed(run, block, self.multiple)
            part, part_lse = self.run_forward(*packed.qkv(), packed.ends, run.alignment, block.scoring.scale)
            packed.unpack_queries(part[..., : v.shape[-1]], out)
            packed.unpack_queries(part_lse.T.unsqueeze(-1), lse.unsqueeze(-1))
        return out, lse

    def backward(self, dout: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernel.backward``; sums in fp32 or wider."""
        q, k, v = block.q, block.k, block.v
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide_dtype(q), device=q.device) for x in (q, k, v))
        for run in runs_of(block.meta):
            packed = _Packed(run, block, self.multiple)
            grads = self.run_backward(
                packed.queries(dout.to(q.dtype)), *packed.qkv(), packed.queries(out.to(q.dtype)),
                packed.queries(lse.unsqueeze(-1), pad=False).squeeze(-1).T.contiguous(), packed.ends, run.alignment,
                block.scoring.scale,
            )  # fmt: skip
            packed.unpack_queries(grads[0][..., : q.shape[-1]], dq)
            for total, grad in ((dk, grads[1]), (dv, grads[2])):
                packed.add_keys(grad[..., : total.shape[-1]], total)
        return dq, dk, dv


def _sequences(piece: Piece, causal: bool, window: int | None) -> Iterator[tuple[Alignment, Piece]]:
    """A piece as sequences that an operator can align."""
    if not causal:
        yield Alignment(None, None), piece
        return
    q_end, k_end = piece.q_pos + piece.q1 - piece.q0, piece.k_pos + piece.k1 - piece.k0
    inside = k_end - piece.q_pos  # queries that are not behind the last key (which is never behind the last query)
    if inside > 0:
        yield Alignment(None if window is None else window - 1, 0), piece._replace(q1=piece.q0 + inside)
    if inside < q_end - piece.q_pos:
        rest = max(inside, 0)
        behind = piece._replace(q0=piece.q0 + rest, q_pos=piece.q_pos + rest)
        yield Alignment(None if window is None else window - 1 - (q_end - k_end), None), behind


class _Packed:
    """The tokens of one run, behind each other."""

    def __init__(self, run: Run, block: Block, multiple: int) -> None:
        self.block = block
        width = max(block.q.shape[-1], block.v.shape[-1])
        self.width = -(-width // multiple) * multiple
        self.q_places = [(piece.b0, piece.q0, piece.q1) for piece in run.sequences]
        self.k_places = [(piece.b0, piece.k0, piece.k1) for piece in run.sequences]
        self.ends = Ends(_ends(self.q_places), _ends(self.k_places))

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[tokens, heads, D]`` each, of one width."""
        k, v = (self._pack(x, self.k_places) for x in (self.block.k, self.block.v))
        return self.queries(self.block.q), k, v

    def queries(self, x: Tensor, pad: bool = True) -> Tensor:
        """Something that there is for each query, ``[B, N, T, D]``."""
        return self._pack(x, self.q_places, pad)

    def unpack_queries(self, x: Tensor, into: Tensor) -> None:
        """Put it where it came from."""
        for (b, first, last), part in _parts(x, self.q_places, self.ends.q):
            into[b, :, first:last] = part

    def add_keys(self, x: Tensor, into: Tensor) -> None:
        """Add it where it came from; keys may be in several sequences."""
        for (b, first, last), part in _parts(x, self.k_places, self.ends.k):
            into[b, :, first:last] += part

    def _pack(self, x: Tensor, places: list[tuple[int, int, int]], pad: bool = True) -> Tensor:
        if pad and x.shape[-1] < self.width:
            x = F.pad(x, (0, self.width - x.shape[-1]))
        tokens = [x[b, :, first:last].transpose(0, 1) for b, first, last in _joined(places)]  # [t, N, D]
        packed = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        return packed if packed.stride(-1) == 1 else packed.contiguous()


def _joined(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours as one place: packed documents are one slice of a row."""
    joined: list[tuple[int, int, int]] = []
    for b, first, last in places:
        if joined and joined[-1][0] == b and joined[-1][2] == first:
            joined[-1] = (b, joined[-1][1], last)
        else:
            joined.append((b, first, last))
    return joined


def _ends(places: list[tuple[int, int, int]]) -> tuple[int, ...]:
    ends, total = [], 0
    for _, first, last in places:
        total += last - first
        ends.append(total)
    return tuple(ends)


def _parts(
    x: Tensor, places: list[tuple[int, int, int]], ends: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
    """Each place with its tokens, ``[heads, t, D]``."""
    for place, end in zip(places, ends, strict=True):
        yield place, x[end - (place[2] - place[1]) : end].transpose(0, 1)
