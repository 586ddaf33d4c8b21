"""Packing loses nothing and mixes nothing; a batch is what ``cp_core.shard_batch`` takes; targets are counted right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_core import shard_batch
from recipes.data import PackedRow, build_datasets, collate, count_targets, pack, unigram_cross_entropy
from recipes.schema import Recipe

LENGTHS = st.lists(st.integers(1, 40), max_size=25)


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    """Every token is another number, so that it can be found again."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


def runs(row: PackedRow) -> list[list[int]]:
    """The tokens under each document id."""
    return [
        [token for token, document in zip(row.input_ids, row.document_ids, strict=True) if document == wanted]
        for wanted in range(row.document_ids[-1] + 1)
    ]


@given(lengths=LENGTHS, seq_len=st.integers(2, 24), packing=st.booleans())
def test_packing_loses_no_token_and_mixes_no_documents(lengths: list[int], seq_len: int, packing: bool) -> None:
    documents = documents_of(lengths)
    result = pack(documents, seq_len, "split", packing)
    pieces = [piece for row in result.rows for piece in runs(row)]
    owner = {token: index for index, tokens in enumerate(documents) for token in tokens}
    for row in result.rows:
        assert 0 < len(row.input_ids) <= seq_len
        assert row.document_ids == sorted(row.document_ids)
        assert [token for piece in runs(row) for token in piece] == row.input_ids
        assert packing or row.document_ids[-1] == 0
    for piece in pieces:
        assert piece == list(range(piece[0], piece[0] + len(piece)))  # a stretch of the text, in order
        assert len({owner[token] for token in piece}) == 1
        assert len(piece) > 1 or len(documents[owner[piece[0]]]) == 1 or seq_len == 2
    assert sorted(token for piece in pieces for token in piece) == list(owner)
    assert result.tokens == len(owner)
    assert result.documents == len(documents)
    assert result.split == sum(length > seq_len for length in lengths)
    assert len(pieces) == result.pieces + len(documents) - result.split
    assert result == pack(documents, seq_len, "split", packing)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), seq_len=st.just(20))
def test_packing_is_first_fit_decreasing(lengths: list[int], seq_len: int) -> None:
    """The tree finds the bins that the plain algorithm finds."""
    documents = documents_of(lengths)
    bins: list[list[list[int]]] = []
    for tokens in sorted(documents, key=len, reverse=True):
        place = next((b for b in bins if sum(map(len, b)) + len(tokens) <= seq_len), None)
        if place is None:
            bins.append(place := [])
        place.append(tokens)
    assert [runs(row) for row in pack(documents, seq_len).rows] == bins


def test_policies_for_long_documents() -> None:
    documents = documents_of([3, 11, 9])
    split = pack(documents, 4, "split")
    assert (split.split, split.pieces) == (2, 6)
    assert sorted(len(piece) for row in split.rows for piece in runs(row)) == [2, 3, 3, 3, 4, 4, 4]
    assert "longer than that: 2, split into 6 pieces" in str(split)
    cut = pack(documents, 4, "truncate")
    assert (cut.truncated, cut.dropped_tokens, cut.tokens) == (2, 12, 11)
    assert [row.input_ids for row in cut.rows] == [[3, 4, 5, 6], [14, 15, 16, 17], [0, 1, 2]]
    assert "longer than that: 2, cut off (12 tokens dropped)" in str(cut)
    message = r"document 1 has 11 tokens .*data\.seq_len=4.*'error': raise data\.seq_len, .*'split' or 'truncate'"
    with pytest.raises(ValueError, match=message):
        pack(documents, 4, "error")
    whole = pack(documents, 12, "error")
    assert whole.efficiency == 23 / 24
    assert str(whole) == "3 documents, 23 tokens in 2 sequences of 12 (95.8% full)"


def test_nothing_to_pack() -> None:
    assert pack([], 8).rows == []
    assert pack([], 8).efficiency == 0


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), seq_len=st.integers(4, 12))
def test_targets_are_those_of_shard_batch(lengths: list[int], seq_len: int) -> None:
    """What the host counts is what the loss sees after the shift, with the same tokens."""
    rows = pack(documents_of(lengths), seq_len).rows
    batch = collate(rows, seq_len, pad_id=999)
    for value in batch.values():
        assert value.shape == (len(rows), seq_len)
        assert value.dtype == torch.int64
    labels = shard_batch(batch)["shift_labels"]
    for row, shifted, tokens in zip(rows, labels.tolist(), batch["input_ids"].tolist(), strict=True):
        brute = sum(len(piece) - 1 for piece in runs(row))
        assert count_targets(row) == brute == sum(label != -100 for label in shifted)
        for place, label in enumerate(shifted):
            assert label == -100 or (label == tokens[place + 1] != 999)


def test_collate() -> None:
    batch = collate([PackedRow([5, 6, 7], [0, 0, 1]), PackedRow([8], [0])], 5, pad_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2, 2], [8, 2, 2, 2, 2]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100, -100], [8, -100, -100, -100, -100]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    for rows in ([], [PackedRow([], [])], [PackedRow([1] * 6, [0] * 6)]):
        with pytest.raises(ValueError, match="a batch needs rows of 1 to 5 tokens"):
            collate(rows, 5, pad_id=2)


def test_unigram_cross_entropy_is_the_entropy_of_the_targets() -> None:
    rows = [PackedRow([9, 1, 1, 8, 1, 2], [0, 0, 0, 1, 1, 1]), PackedRow([7], [0])]  # targets 1, 1, 1, 2
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_cross_entropy(rows) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="no row has a target"):
        unigram_cross_entropy(rows[1:])


def recipe_of(source: Path | str, vocab: int = 400, **data: Any) -> Recipe:
    section = {"source": str(source), "tokenizer": "train_bpe", "vocab_size": 400, "seq_len": 64, **data}
    model = {"family": "qwen3_moe", "init": "random", "config": {"vocab_size": vocab}}
    train = {"steps": 1, "global_batch": 1}
    return Recipe.model_validate({"name": "t", "model": model, "data": section, "optim": {"lr": 1}, "train": train})


def test_build_datasets_from_text_to_rows(tmp_path: Path) -> None:
    recipe = recipe_of("pydoc_topics")
    data = build_datasets(recipe, tmp_path)
    again = build_datasets(recipe, tmp_path)
    assert (data.train_rows, data.valid_rows, data.report) == (again.train_rows, again.valid_rows, again.report)
    end = data.tokenizer.eos_token_id
    assert sum(row.input_ids.count(end) for row in data.train_rows + data.valid_rows) == 79
    first = data.report.splitlines()[0]
    assert first == "data     pydoc_topics: 79 documents; tokenizer train_bpe: 400"
    assert [line.split()[0] for line in data.report.splitlines()] == ["data", "train", "valid"]


def test_build_datasets_says_which_document_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["A short document, with words enough to train a tokenizer. " * 2] * 3 + ["The longest of all. " * 50]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = recipe_of(path, vocab_size=300, valid_fraction=0.0, long_documents="error", seq_len=99)
    with pytest.raises(ValueError, match=r"train document 3 \('The longest of all\. .*'\.\.\.\) has \d+ tokens"):
        build_datasets(recipe, tmp_path)


def test_build_datasets_refuses_tokens_that_the_model_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives token \d+, but the model's vocab_size is 320"):
        build_datasets(recipe_of("pydoc_topics", vocab=320), tmp_path)
