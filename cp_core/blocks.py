"""Which scores a rank must compute: from where q and k sit to pieces, and from pieces to rectangles and triangles.

``CausalMetadata`` says where the tensors of an attention call sit in the global sequence; it is host data and the key
of every plan that a kernel makes. A *piece* is one document's run of queries against the keys that they see. A *tile*
is a part of a piece that needs no mask: a full rectangle, or a square of which one triangle counts. A causal shard is
thus never an S x S mask: the local queries ``[a, b)`` see the keys before them as a rectangle and themselves as a
lower triangle; a sliding window adds an upper triangle at its far end. Padding is in no piece, and a query in no piece
gets output 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from .sequence import Row

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CausalMetadata:
    """Where the q and k tensors of an attention call sit in the global sequence (half-open token ranges).

    Attributes:
        spans: runs of the sequence that the q tensor holds, one after the other.
        k_start: first token of the k tensor.
        k_stop: end of the k tensor.
        rows: the segments of each row of the batch.
        causal: a query sees no later key.
        window: how many keys a query sees, itself the last of them; None: all. Only if causal.
    """

    spans: Spans
    k_start: int
    k_stop: int
    rows: tuple[Row, ...]
    causal: bool = True
    window: int | None = None

    @property
    def queries(self) -> int:
        """T, of the q tensor."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def keys(self) -> int:
        """S, of the k tensor."""
        return self.k_stop - self.k_start


class Piece(NamedTuple):
    """One document's queries ``q[b0:b1, :, q0:q1]`` against the keys ``k[b0:b1, :, k0:k1]`` that any of them sees.

    Indices are local to the tensors; ``q_pos`` and ``k_pos`` are the global positions of q0 and k0. Query ``q`` sees
    key ``k`` (global positions) if not causal, or if ``q - window < k <= q``. Every query sees some key.
    """

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    q_pos: int
    k_pos: int


class Tile(NamedTuple):
    """A part of a piece: ``lower`` and ``upper`` are squares whose triangle, diagonal included, counts."""

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    shape: Literal["full", "lower", "upper"]


@lru_cache(maxsize=1024)
def attention_pieces(meta: CausalMetadata) -> tuple[Piece, ...]:
    """The pieces of one attention call; rows with equal neighbours share theirs, and no query is in two pieces."""
    pieces: list[Piece] = []
    first = 0
    while first < len(meta.rows):
        last = first + 1
        while last < len(meta.rows) and meta.rows[last] == meta.rows[first]:
            last += 1
        offset = 0
        for start, stop in meta.spans:
            pieces += _pieces(meta, meta.rows[first], first, last, start, stop, offset)
            offset += stop - start
        first = last
    return tuple(pieces)


@lru_cache(maxsize=1024)
def attention_tiles(meta: CausalMetadata) -> tuple[Tile, ...]:
    """The same scores as tiles; a query may be in several of them."""
    return tuple(tile for piece in attention_pieces(meta) for tile in _tiles(piece, meta.causal, meta.window))


def pairs_of(meta: CausalMetadata) -> int:
    """Query-key pairs that count, over all rows."""
    total = 0
    for b0, b1, q0, q1, k0, k1, shape in attention_tiles(meta):
        width = q1 - q0
        total += (b1 - b0) * (width * (k1 - k0) if shape == "full" else width * (width + 1) // 2)
    return total


def _pieces(meta: CausalMetadata, row: Row, b0: int, b1: int, start: int, stop: int, offset: int) -> list[Piece]:
    """Of the queries ``[start, stop)``, which begin at index ``offset`` of the q tensor."""
    found = []
    for first, last, padding in row:
        a, b = max(first, start), min(last, stop)  # the document's queries ...
        lo, hi = max(first, meta.k_start), min(last, meta.k_stop)  # ... and its keys
        if meta.causal:
            a, hi = max(a, lo), min(hi, b)
            if meta.window is not None:
                lo, b = max(lo, a - meta.window + 1), min(b, hi + meta.window - 1)
        if not padding and a < b and lo < hi:
            q0, k0 = a - start + offset, lo - meta.k_start
            found.append(Piece(b0, b1, q0, q0 + b - a, k0, k0 + hi - lo, a, lo))
    return found


def _tiles(piece: Piece, causal: bool, window: int | None) -> list[Tile]:
    tiles: list[Tile] = []

    def add(q_from: int, q_to: int, k_from: int, k_to: int, shape: Literal["full", "lower", "upper"]) -> None:
        if q_from < q_to and k_from < k_to:
            q0, k0 = piece.q0 - piece.q_pos, piece.k0 - piece.k_pos
            tiles.append(Tile(piece.b0, piece.b1, q_from + q0, q_to + q0, k_from + k0, k_to + k0, shape))

    a, lo = piece.q_pos, piece.k_pos
    b, hi = a + piece.q1 - piece.q0, lo + piece.k1 - piece.k0
    if not causal:
        add(a, b, lo, hi, "full")
        return tiles
    for c0 in range(a, b, window or b - a):  # runs of queries no longer than the window
        c1 = min(c0 + (window or b - a), b)
        near = lo if window is None else max(lo, c1 - window)  # from here on the window cuts nothing off
        add(c0, c1, near, min(c0, hi), "full")
        first, last = max(c0, near), min(c1, hi)  # tokens that are both
        add(first, last, first, last, "lower")
        add(last, c1, first, last, "full")
        if window is not None:  # query c0 + i sees key c0 - window + 1 + j if j >= i
            far = c0 - window + 1
            k_from, k_to = max(lo, far), min(hi, c1 - window)
            add(c0, c0 + k_from - far, k_from, k_to, "full")
            add(c0 + k_from - far, c0 + k_to - far, k_from, k_to, "upper")
    return tiles
