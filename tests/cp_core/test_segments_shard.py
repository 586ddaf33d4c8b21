"""Documents, padding, labels and positions: found on whole rows, cut once; judged against loops over tokens."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import cp_core.shard as shard_module
from cp_core import Segment, SequenceContext, shard_batch, unshard
from cp_core.segments import find_rows
from cp_core.shard import restart_positions, shift_labels, valid_tokens
from cp_core.testing import run_distributed
from tests.cp_core._helpers import (
    PAD,
    Layout,
    cp_mesh,
    expected_positions,
    expected_targets,
    random_layout,
    refusal,
    row,
    runs,
)


def batch_of(layout: Layout, **more: Any) -> dict[str, Tensor]:
    """Token t of row b has id 1000 b + t + 1 and is its own label."""
    batch, length = len(layout), len(layout[0])
    ids = torch.arange(1, length + 1).repeat(batch, 1) + 1000 * torch.arange(batch).unsqueeze(1)
    return {"input_ids": ids, "labels": ids.clone(), "document_ids": torch.tensor(layout), **more}


# ---------------------------------------------------------------- find_rows


@st.composite
def layouts(draw: st.DrawFn, padding: bool = True, shortest: int = 1) -> Layout:
    """One to three rows: padding on the left, documents, padding on the right."""
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 4) if padding else st.just(0),
                st.lists(st.integers(shortest, 7), min_size=0 if padding else 1, max_size=5),
            ),
            min_size=1,
            max_size=3,
        )
    )
    length = max(max(left + sum(documents) for left, documents in shapes), 1)
    layout = []
    for left, documents in shapes:
        tokens = [PAD] * left
        for number, size in enumerate(documents):
            tokens += [number] * size
        rest = length - len(tokens)
        layout.append(tokens + ([PAD] * rest if padding else [len(documents)] * rest))
    return layout


def expected_rows(layout: Layout) -> tuple[tuple[Segment, ...], ...]:
    return tuple(tuple(Segment(*run) for run in runs(tokens)) for tokens in layout)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.randoms())
def test_rows_from_document_ids(layout: Layout, rng: random.Random) -> None:
    names = rng.sample(range(0, 50), 20)  # any ids will do, and any negative number is padding
    ids = torch.tensor([[rng.choice((-1, -7)) if d == PAD else names[d] for d in tokens] for tokens in layout])
    assert find_rows(*ids.shape, document_ids=ids.to(rng.choice((torch.int32, torch.int64)))) == expected_rows(layout)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.randoms())
def test_rows_from_document_ids_and_mask(layout: Layout, rng: random.Random) -> None:
    mask = torch.tensor([[int(d != PAD) for d in tokens] for tokens in layout])
    filled = []
    for tokens in layout:  # padding carries the id of a neighbour, as collators leave it
        documents = [d for d in tokens if d != PAD]
        first, last = (documents[0], documents[-1]) if documents else (3, 3)
        seen = False
        new = []
        for d in tokens:
            seen = seen or d != PAD
            new.append(d if d != PAD else last if seen else first)
        filled.append(new)
    mask = mask.to(rng.choice((torch.bool, torch.int64, torch.float32)))
    rows = find_rows(*mask.shape, document_ids=torch.tensor(filled), attention_mask=mask)
    assert rows == expected_rows(layout)


@settings(max_examples=150, deadline=None)
@given(layouts(padding=False), st.data())
def test_rows_from_cu_seqlens(layout: Layout, data: st.DataObject) -> None:
    batch, length = len(layout), len(layout[0])
    total = batch * length
    borders = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=6)) if total > 1 else set())
    borders = [0, *borders, total]
    number, flat = -1, []
    for t in range(total):  # a document that runs over a row's end is two
        number += t in borders or t % length == 0
        flat.append(number)
    expected = expected_rows([flat[b * length : (b + 1) * length] for b in range(batch)])
    assert find_rows(batch, length, cu_seqlens=torch.tensor(borders, dtype=torch.int32)) == expected


@settings(max_examples=100, deadline=None)
@given(layouts(padding=False, shortest=2))
def test_rows_from_restarting_positions(layout: Layout) -> None:
    positions = expected_positions(layout)
    assert find_rows(*positions.shape, position_ids=positions) == expected_rows(layout)
    whole = tuple((Segment(0, len(layout[0])),) for _ in layout)
    mask = torch.ones_like(positions)  # transformers looks for packing only where there is no mask
    assert find_rows(*positions.shape, position_ids=positions, attention_mask=mask) == whole
    named = torch.zeros_like(positions)
    assert find_rows(*positions.shape, position_ids=positions, document_ids=named) == whole


def test_positions_that_do_not_restart_are_one_document() -> None:
    for positions in ([0, 3, 6, 9], [5, 6, 7, 8], [9, 4, 2, 1], [1, 1, 1, 1], [7, 1, 2, 3]):
        assert find_rows(1, 4, position_ids=torch.tensor([positions])) == ((Segment(0, 4),),)


def test_restarting_positions_with_a_document_of_one_token() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])  # documents of 3, 1 and 2 tokens
    assert find_rows(1, 6, position_ids=positions) == ((Segment(0, 3), Segment(3, 4), Segment(4, 6)),)


def test_cu_seqlens_with_padding() -> None:
    """Right padding is in no document, whether cu_seqlens names it as one or lets the last document run over it."""
    mask = torch.tensor([[1] * 7 + [0] * 3])
    expected = ((Segment(0, 4), Segment(4, 7), Segment(7, 10, True)),)
    for borders in ([0, 4, 7, 10], [0, 4, 10]):
        assert find_rows(1, 10, cu_seqlens=torch.tensor(borders), attention_mask=mask) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"document_ids": torch.zeros(2, 6), "cu_seqlens": torch.tensor([0, 12])},
            "document_ids or cu_seqlens, not both",
        ),
        ({"document_ids": torch.zeros(1, 6)}, r"document_ids has shape \[1, 6\], input_ids \[2, 6\]"),
        ({"document_ids": torch.zeros(2, 7)}, r"document_ids has shape \[2, 7\]"),
        (
            {"document_ids": torch.tensor([[0] * 6, [0, 0, 1, 1, 0, 0]])},
            "row 1: document 0 ends at token 2 and goes on at token 4",
        ),
        (
            {"document_ids": torch.tensor([[0] * 6, [0, 0, -1, -1, 0, 0]])},
            "row 1: document 0 ends at token 2 and goes on at token 4",
        ),
        (
            {"attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 1, 1, 1]])},
            "row 1: document 0 ends at token 2 and goes on at token 3",
        ),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask has shape \[2, 1, 6, 6\]"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \[2, 5\]"),
        ({"attention_mask": torch.full((2, 6), 2)}, "0 and 1 only"),
        ({"attention_mask": torch.full((2, 6), float("-inf"))}, "0 and 1 only"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"from 0 to batch \* length = 12 .*\[0, 6\]"),
        ({"cu_seqlens": torch.tensor([1, 6, 12])}, "from 0 to"),
        ({"cu_seqlens": torch.tensor([0, 6, 6, 12])}, "rise strictly"),
        ({"cu_seqlens": torch.tensor([0, 8, 6, 12])}, "rise strictly"),
        ({"cu_seqlens": torch.tensor([0, 13])}, "from 0 to"),
        ({"cu_seqlens": torch.tensor([12])}, "rise strictly"),
        ({"cu_seqlens": torch.tensor([[0, 12]])}, "rise strictly"),
    ],
)
def test_contradicting_documents_are_refused(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_rows(2, 6, **arguments)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_targets_positions_and_validity(layout: Layout) -> None:
    length = len(layout[0])
    labels = torch.arange(len(layout) * length).view(len(layout), length)
    rows = expected_rows(layout)
    targets = shift_labels(labels, rows)
    assert torch.equal(targets, expected_targets(labels, layout))
    tokens = sum(d != PAD for tokens in layout for d in tokens)
    documents = sum(not padding for tokens in layout for *_, padding in runs(tokens))
    assert int((targets != -100).sum()) == tokens - documents
    assert torch.equal(restart_positions(rows, length), expected_positions(layout))
    assert torch.equal(valid_tokens(rows, length), torch.tensor(layout) != PAD)


# ---------------------------------------------------------------- shard_batch on one process


def test_one_process_pads_nothing() -> None:
    for length in (1, 2, 15, 17, 30):
        local = shard_batch(batch_of([row(length)]))
        assert local["input_ids"].shape == (1, length)
        assert sorted(local) == ["input_ids", "position_ids", "sequence", "shift_labels"]
        sequence = local["sequence"]
        assert (sequence.ranges, sequence.rank, sequence.length, sequence.padded_length) == (
            ((0, length),),
            0,
            length,
            length,
        )
        assert sequence.cp_size == 1
        assert sequence.cp_mesh is None
        assert sequence.max_position == length - 1
        assert torch.equal(unshard(local["input_ids"], 1, sequence), batch_of([row(length)])["input_ids"])


def test_packed_targets_of_one_process() -> None:
    """Known fault B2."""
    ids = torch.arange(6).unsqueeze(0)
    expected = [[1, 2, -100, 4, 5, -100]]
    for documents in (
        {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])},
        {"cu_seqlens": torch.tensor([0, 3, 6])},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
    ):
        local = shard_batch({"input_ids": ids, "labels": ids, **documents})
        assert local["shift_labels"].tolist() == expected
        assert local["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]


def test_given_positions_are_kept() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    irregular = torch.tensor([0, 3, 4, 9, 27])
    for positions in (irregular, irregular.repeat(2, 1), irregular.unsqueeze(0), irregular.to(torch.int32)):
        local = shard_batch({"input_ids": ids, "position_ids": positions})
        assert local["position_ids"].tolist() == [irregular.tolist()] * 2
        assert local["position_ids"].dtype == torch.int64
        assert local["sequence"].max_position == 27
        assert local["sequence"].rows == ((Segment(0, 5),),) * 2
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    local = shard_batch({"input_ids": ids, "position_ids": irregular, "attention_mask": mask})
    assert local["sequence"].max_position == 4  # padding does not count


def test_labels_shifted_already_win_and_padding_never_counts() -> None:
    ids = torch.arange(6).unsqueeze(0)
    shifted = torch.tensor([[5, -100, 4, 3, 2, 1]])
    batch = {
        "input_ids": ids,
        "labels": ids,
        "shift_labels": shifted,
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0]]),
    }
    assert shard_batch(batch)["shift_labels"].tolist() == [[-100, -100, 4, 3, 2, -100]]
    assert shifted.tolist() == [[5, -100, 4, 3, 2, 1]]  # the caller's tensor is not written to
    del batch["shift_labels"]
    assert shard_batch(batch)["shift_labels"].tolist() == [[-100, 2, 3, 4, -100, -100]]


def test_labels_of_minus_100_stay() -> None:
    ids = torch.arange(6).unsqueeze(0)
    labels = torch.tensor([[0, -100, -100, 3, -100, 5]])
    assert shard_batch({"input_ids": ids, "labels": labels})["shift_labels"].tolist() == [
        [-100, -100, 3, -100, 5, -100]
    ]
    assert "shift_labels" not in shard_batch({"input_ids": ids})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": torch.zeros(1, 4), "pixel_values": torch.zeros(1)},
            "does not know 'pixel_values'; it takes input_ids, labels",
        ),
        ({"labels": torch.zeros(1, 4)}, "needs 'input_ids'"),
        ({"input_ids": torch.zeros(4)}, r"must be \[batch, length\], both above 0, got \[4\]"),
        ({"input_ids": torch.zeros(1, 0)}, r"both above 0, got \[1, 0\]"),
        (
            {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 3)},
            r"labels has shape \[1, 3\], input_ids \[1, 4\]",
        ),
        ({"input_ids": torch.zeros(1, 4), "shift_labels": torch.zeros(2, 4)}, r"shift_labels has shape \[2, 4\]"),
        ({"input_ids": torch.zeros(1, 4), "position_ids": torch.zeros(1, 5)}, r"position_ids has shape \[1, 5\]"),
        ({"input_ids": torch.zeros(3, 4), "position_ids": torch.zeros(3, 3, 4)}, r"position_ids has shape \[3, 3, 4\]"),
        (
            {"input_ids": torch.zeros(1, 4), "attention_mask": torch.tensor([[1, 0, 1, 1]])},
            "document 0 ends at token 1",
        ),
    ],
)
def test_malformed_batches_are_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch)


def test_positions_for_another_batch_size_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("position_ids has shape [2, 4]")):
        shard_batch({"input_ids": torch.zeros(3, 4, dtype=torch.int64), "position_ids": torch.zeros(2, 4)})


def test_unshard_refuses_a_dim_of_another_length() -> None:
    local = shard_batch(batch_of([row(5)]))
    with pytest.raises(ValueError, match=re.escape("dim 0 of [1, 5] should hold this rank's 5 tokens")):
        unshard(local["input_ids"], 0, local["sequence"])


# ---------------------------------------------------------------- SequenceContext


def _context() -> SequenceContext:
    return shard_batch(batch_of([row(3, 5), row(-2, 6), row(8), row(7, -1)]))["sequence"]


def test_context_is_a_pytree() -> None:
    context = _context()
    leaves, spec = pytree.tree_flatten({"sequence": context})
    assert [leaf.shape for leaf in leaves] == [(4, 8), (4, 8)]
    again = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)["sequence"]
    assert isinstance(again, SequenceContext)
    for name in ("rows", "ranges", "rank", "length", "max_position", "cp_mesh"):
        assert getattr(again, name) == getattr(context, name)
    assert torch.equal(again.position_ids, context.position_ids)
    assert torch.equal(again.valid, context.valid)
    assert pytree.tree_flatten({"sequence": again})[1] == spec
    assert pytree.tree_flatten({"sequence": context.split(2)[0]})[1] != spec  # other documents: another structure


def test_context_moves_and_is_frozen() -> None:
    context = _context()
    moved = context.to("meta")
    assert (moved.position_ids.device.type, moved.valid.device.type) == ("meta", "meta")
    assert moved.rows == context.rows
    assert context.valid.device.type == "cpu"
    with pytest.raises(AttributeError):
        context.rank = 1  # type: ignore[misc]


def test_context_splits_by_rows() -> None:
    context = _context()
    parts = context.split(2)
    assert [part.rows for part in parts] == [context.rows[:2], context.rows[2:]]
    assert torch.equal(torch.cat([part.valid for part in parts]), context.valid)
    assert torch.equal(torch.cat([part.position_ids for part in parts]), context.position_ids)
    parts[1].check(2, 8, 1)
    assert len(context.split(4)) == 4
    assert len(context.split(1)) == 1
    for chunks in (3, 0, 8, -1):
        with pytest.raises(ValueError, match="4 rows cannot be split"):
            context.split(chunks)


def test_context_of_another_batch_is_refused() -> None:
    context = _context()
    context.check(4, 8, 1)
    with pytest.raises(ValueError, match="made for cp size 1, but the model is bound to cp size 2"):
        context.check(4, 8, 2)
    for shape in ((4, 7), (3, 8), (8, 4)):
        with pytest.raises(ValueError, match="the input holds"):
            context.check(*shape, 1)


# ---------------------------------------------------------------- several processes


def _check_cut(layout: Layout, rank: int, size: int, mesh: Any, **more: Any) -> int:
    """One layout on this rank, against whole rows padded and cut by hand. Returns this rank's number of targets."""
    batch = batch_of(layout, **more)
    local = shard_batch(batch, mesh)
    length = len(layout[0])
    total = -(-length // (2 * size)) * 2 * size
    here = slice(rank * total // size, (rank + 1) * total // size)

    def cut(x: Tensor, fill: int) -> Tensor:
        whole = torch.full((x.shape[0], total), fill, dtype=x.dtype)
        whole[:, :length] = x
        return whole[:, here]

    assert torch.equal(local["input_ids"], cut(batch["input_ids"], 0))
    assert torch.equal(local["shift_labels"], cut(expected_targets(batch["labels"], layout), -100))
    positions = more.get("position_ids", expected_positions(layout))
    assert torch.equal(local["position_ids"], cut(positions, 0))
    sequence = local["sequence"]
    assert torch.equal(sequence.position_ids, local["position_ids"])
    assert torch.equal(sequence.valid, cut(torch.tensor(layout) != PAD, False))
    assert sequence.ranges == tuple((r * total // size, (r + 1) * total // size) for r in range(size))
    assert (sequence.rank, sequence.length, sequence.padded_length, sequence.cp_size) == (rank, length, total, size)
    for segments, tokens in zip(sequence.rows, layout, strict=True):  # the segments cover the padded row without a gap
        kinds = [None] * total
        for start, stop, padding in segments:
            assert all(kind is None for kind in kinds[start:stop])
            kinds[start:stop] = [padding] * (stop - start)
        assert kinds == [d == PAD for d in tokens] + [True] * (total - length)
    assert torch.equal(unshard(local["input_ids"], 1, sequence), batch["input_ids"])
    return int((local["shift_labels"] != -100).sum())


def shard_worker(rank: int, size: int) -> dict[str, Any]:
    mesh = cp_mesh(size)
    rng = random.Random(5)
    counts = {"B1": _check_cut([row(16)], rank, size, mesh)}
    for length in (1, 2, 3, 15, 17, 30, 33):
        counts[length] = _check_cut([row(length), row(-(length // 3), length - length // 3)], rank, size, mesh)
    for _ in range(12):
        layout = random_layout(rng, rng.randint(1, 3), rng.randint(2, 50))
        irregular = torch.tensor([sorted(rng.sample(range(500), len(layout[0]))) for _ in layout])
        counts.setdefault("documents", 0)
        counts["documents"] += _check_cut(layout, rank, size, mesh)
        _check_cut(layout, rank, size, mesh, position_ids=irregular)
    # B2: packed rows
    ids = torch.arange(6).unsqueeze(0)
    packed = shard_batch({"input_ids": ids, "labels": ids, "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])}, mesh)
    counts["B2"] = packed["shift_labels"][0].tolist()
    counts["B2 positions"] = packed["position_ids"][0].tolist()

    # unshard: values on every dim and shape, gradient of a token = sum of all ranks' gradients for it
    local = shard_batch(batch_of([row(13), row(13)]), mesh)
    sequence = local["sequence"]
    start, stop = sequence.ranges[rank]
    whole = torch.randn(2, 3, 8 * size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = whole[:, :, : sequence.padded_length]
    weights = torch.randn(size, 2, 3, 13, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for dim, order in ((2, (0, 1, 2, 3)), (-2, (0, 1, 2, 3)), (0, (2, 0, 1, 3)), (3, (0, 1, 3, 2))):
        x = whole[:, :, start:stop].permute(order).detach().requires_grad_()  # strided on purpose
        full = unshard(x, dim, sequence)
        assert torch.equal(full, whole[:, :, :13].permute(order)), dim
        (full * weights[rank].permute(order)).sum().backward()
        padded = torch.nn.functional.pad(weights.sum(0), (0, 0, 0, sequence.padded_length - 13))
        torch.testing.assert_close(x.grad, padded[:, :, start:stop].permute(order), rtol=1e-13, atol=1e-13)
    assert "should hold this rank's" in refusal(unshard, local["input_ids"], 0, sequence)
    return counts


@pytest.mark.dist2
def test_shard_two() -> None:
    _check_shard(2)


@pytest.mark.dist4
def test_shard_four() -> None:
    _check_shard(4)


def _check_shard(size: int) -> None:
    results = run_distributed(shard_worker, size)
    assert sum(result["B1"] for result in results) == 15  # known fault B1
    for length in (1, 2, 3, 15, 17, 30, 33):
        real = length - length // 3
        assert sum(result[length] for result in results) == length - 1 + max(real - 1, 0)
    targets = [t for result in results for t in result["B2"]]
    assert targets[:6] == [1, 2, -100, 4, 5, -100]
    assert set(targets[6:]) <= {-100}
    positions = [t for result in results for t in result["B2 positions"]]
    assert positions[:6] == [0, 1, 2, 0, 1, 2]


def compare_worker(rank: int, size: int) -> tuple[dict[str, str], int]:
    mesh = cp_mesh(size)
    last = size - 1
    good = batch_of([row(16)])
    said: dict[str, str] = {}

    def spoil(name: str, **changes: Tensor | None) -> None:
        batch = dict(good)
        if rank == last:
            batch.update(changes)
            batch = {key: value for key, value in batch.items() if value is not None}
        said[name] = refusal(shard_batch, batch, mesh, compare=True if name.startswith("again") else None)

    other = good["labels"].clone()
    other[0, 3] = 7
    spoil("labels", labels=other)
    spoil("length", input_ids=good["input_ids"][:, :-1])
    spoil("dtype", input_ids=good["input_ids"].to(torch.int32))
    spoil("key", document_ids=None)
    spoil("unknown key", extra=torch.zeros(1))
    calls = []
    original = shard_module.compare_batches
    shard_module.compare_batches = lambda *args: calls.append(original(*args))
    try:
        shard_batch(good, mesh)  # the first good batch is compared
        for _ in range(3):
            shard_batch(good, mesh)  # later ones are not ...
        assert len(calls) == 1, len(calls)
        spoil("again labels", labels=other)  # ... unless asked for
        shard_batch(good, mesh, compare=True)
        assert len(calls) == 2
        shard_batch(good, mesh, compare=False)
        assert len(calls) == 2
        shard_batch(good, mesh["cp"])  # the same group by another object
        return said, len(calls)
    finally:
        shard_module.compare_batches = original


@pytest.mark.dist2
def test_ranks_with_different_batches_are_told_on_every_rank() -> None:
    results = run_distributed(compare_worker, 2)
    expected = {
        "labels": "got different batches: labels on cp rank [1]",
        "length": "got different batches: input_ids on cp rank [1]",
        "dtype": "got different batches: input_ids on cp rank [1]",
        "key": "got different batches: document_ids, the keys on cp rank [1]",
        "unknown key": "got different batches: the keys on cp rank [1]",
        "again labels": "got different batches: labels on cp rank [1]",
    }
    for said, compared in results:
        assert compared == 2
        for name, message in expected.items():
            assert message in said[name], (name, said[name])


def bad_geometry_worker(rank: int, size: int) -> list[str]:
    mesh = cp_mesh(size)
    hole = torch.ones(1, 16)
    hole[0, 5] = 0
    return [
        refusal(shard_batch, batch_of([row(16)], attention_mask=hole), mesh),
        refusal(shard_batch, {"input_ids": torch.zeros(16)}, mesh),
        refusal(shard_batch, batch_of([row(16)], cu_seqlens=torch.tensor([0, 16])), mesh),
    ]


@pytest.mark.dist4
def test_bad_batches_are_refused_on_every_rank() -> None:
    for said in run_distributed(bad_geometry_worker, 4, timeout=20.0):
        assert "document 0 ends at token 5" in said[0]
        assert "must be [batch, length]" in said[1]
        assert "not both" in said[2]
