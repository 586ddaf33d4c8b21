"""Pieces and tiles: painted into a dense mask they give what is visible, each entry once."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from cp_core import Segment
from cp_core.blocks import CausalMetadata, Piece, Spans, Tile, attention_pieces, attention_tiles, pairs_of
from cp_core.sequence import Row
from tests.cp_core._helpers import Layout, random_layout, row, runs, visible

LAYOUTS: list[Layout] = [
    [row(37, 51, 40), row(128)],
    [row(7, 2, 9, -6), row(7, 2, 9, -6), row(24)],
    [row(-5, 1, 1, 20), row(-27)],
]


def rows_of(layout: Layout) -> tuple[Row, ...]:
    return tuple(tuple(Segment(*run) for run in runs(tokens)) for tokens in layout)


def placements(length: int) -> list[tuple[Spans, int, int]]:
    """Shards of all_gather, blocks of a ring in both directions, two runs of queries, one token."""
    third, half = length // 3, length // 2
    whole = ((0, length),)
    return [
        (whole, 0, length),
        (((third, half),), 0, length),
        (((length - 5, length),), 0, length),
        (((third, half),), third - 3, half + 2),
        (((half, length),), 0, third),
        (((0, third),), half, length),
        (((0, half),), third, length),
        (((2, third), (half + 1, length)), 0, length),
        (((0, third), (length - third, length)), third - 2, half),
        (((half, half + 1),), 0, length),
    ]


def painted(meta: CausalMetadata) -> Tensor:
    found = torch.zeros(len(meta.rows), meta.queries, meta.keys, dtype=torch.int64)
    for b0, b1, q0, q1, k0, k1, shape in attention_tiles(meta):
        assert b0 < b1
        assert q0 < q1
        assert k0 < k1
        square = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        if shape != "full":
            assert q1 - q0 == k1 - k0
            square = square.tril() if shape == "lower" else square.triu()
        found[b0:b1, q0:q1, k0:k1] += square
    return found


def check(layout: Layout, causal: bool, window: int | None) -> None:
    dense = visible(layout, causal, window)
    for spans, k_start, k_stop in placements(len(layout[0])):
        meta = CausalMetadata(spans, k_start, k_stop, rows_of(layout), causal, window)
        queries = torch.cat([torch.arange(*span) for span in spans])
        want = dense[:, queries, k_start:k_stop]
        assert torch.equal(painted(meta), want.long()), meta
        assert pairs_of(meta) == int(want.sum())
        seen = torch.zeros_like(want)
        for piece in attention_pieces(meta):
            rows, keys = slice(piece.b0, piece.b1), slice(piece.k0, piece.k1)
            part = want[rows, piece.q0 : piece.q1, keys]
            assert bool(part.any(2).all())  # no query without a key ...
            assert bool(part.any(1).all())  # ... and no key that nobody sees
            assert int(queries[piece.q0]) == piece.q_pos
            assert piece.k0 + k_start == piece.k_pos
            assert not bool(seen[rows, piece.q0 : piece.q1].any())  # no query in two pieces
            seen[rows, piece.q0 : piece.q1, keys] = True
        assert bool((seen | ~want).all())


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), *((True, w) for w in (1, 2, 5, 16, 1000))])
def test_tiles_cover_exactly_what_is_visible(causal: bool, window: int | None) -> None:
    for layout in LAYOUTS:
        check(layout, causal, window)


def test_tiles_of_random_rows() -> None:
    rng = random.Random(0)
    for _ in range(20):
        layout = random_layout(rng, 2, rng.randint(10, 40))
        for causal, window in product((True, False), (None, rng.randint(1, 12))):
            if causal or window is None:
                check(layout, causal, window)


def test_rows_with_the_same_documents_share_tiles() -> None:
    rows = ((Segment(0, 8),),) * 3 + ((Segment(0, 4), Segment(4, 8)),)
    assert attention_tiles(CausalMetadata(((0, 8),), 0, 8, rows)) == (
        Tile(0, 3, 0, 8, 0, 8, "lower"),
        Tile(3, 4, 0, 4, 0, 4, "lower"),
        Tile(3, 4, 4, 8, 4, 8, "lower"),
    )


def test_queries_before_their_keys_see_nothing() -> None:
    """As ring blocks have it: the keys of a later rank, or keys that begin inside the queries."""
    rows = ((Segment(0, 8),),)
    assert attention_pieces(CausalMetadata(((0, 4),), 4, 8, rows)) == ()
    assert attention_pieces(CausalMetadata(((0, 6),), 4, 8, rows)) == (Piece(0, 1, 4, 6, 0, 2, 4, 4),)


def test_a_shard_is_a_rectangle_and_a_triangle() -> None:
    """However long the sequence is; a window of 8 in 1024 tokens costs 128 runs of a few tiles, not 1024 x 1024."""
    rows = ((Segment(0, 1024),),)
    assert len(attention_tiles(CausalMetadata(((512, 1024),), 0, 1024, rows))) == 2
    tiles = attention_tiles(CausalMetadata(((0, 1024),), 0, 1024, rows, True, 8))
    assert len(tiles) < 3 * 128
    assert sum((q1 - q0) * (k1 - k0) for _, _, q0, q1, k0, k1, _ in tiles) < 1024 * 16
