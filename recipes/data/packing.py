"""Documents of any length to sequences of one length: several documents in a sequence, none of them mixed.

B rows of a batch, S tokens of a sequence (``data.seq_len``).

A row holds whole documents (or pieces of long ones), each with an id of its own; ``cp_core.shard_batch`` isolates
them, restarts positions, and drops the target that would cross a border. So a document of n tokens has n - 1 targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Literal

import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedRow:
    """One sequence without its padding: at most S tokens, and the document of each (0, 1, 2, ... in order)."""

    input_ids: list[int]
    document_ids: list[int]


@dataclass(frozen=True)
class PackedDataset:
    """The rows of one part of the data, and what became of its documents.

    Args:
        rows: in the order in which they were opened; the sampler shuffles them.
        seq_len: S.
        documents: how many went in.
        split: how many were longer than S and cut into pieces.
        pieces: how many pieces these gave.
        truncated: how many were longer than S and cut off.
        dropped_tokens: how many tokens that cost.
    """

    rows: list[PackedRow]
    seq_len: int
    documents: int
    split: int = 0
    pieces: int = 0
    truncated: int = 0
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def efficiency(self) -> float:
        """Tokens over capacity: 1 is without any padding."""
        return self.tokens / (len(self.rows) * self.seq_len) if self.rows else 0.0

    def __str__(self) -> str:
        """One line for the reader of a run."""
        text = f"{self.documents} documents, {self.tokens:,} tokens in {len(self.rows)} sequences of {self.seq_len}"
        text += f" ({self.efficiency:.1%} full)"
        if self.split:
            text += f"; longer than that: {self.split}, split into {self.pieces} pieces"
        if self.truncated:
            text += f"; longer than that: {self.truncated}, cut off ({self.dropped_tokens:,} tokens dropped)"
        return text


def pack(
    documents: Sequence[list[int]],
    seq_len: int,
    long_documents: Literal["split", "truncate", "error"] = "split",
    packing: bool = True,
    describe: Callable[[int], str] = "document {}".format,
) -> PackedDataset:
    """Fit documents into sequences by first-fit decreasing; deterministic.

    Args:
        documents: token ids of each, its end-of-text token included.
        seq_len: S.
        long_documents: for one with more than S tokens: ``split`` into pieces, each from then on a document of its own;
            ``truncate`` to its first S tokens; or ``error``.
        packing: False gives each document or piece a sequence of its own.
        describe: from a document's index to what an error calls it.

    Raises:
        ValueError: a longer document under ``error``: which, its length, S and the remedies.
    """
    pieces: list[list[int]] = []
    split = split_pieces = truncated = dropped = 0
    for index, tokens in enumerate(documents):
        if len(tokens) <= seq_len:
            pieces.append(tokens)
        elif long_documents == "split":
            parts = _cut(tokens, seq_len)
            pieces += parts
            split += 1
            split_pieces += len(parts)
        elif long_documents == "truncate":
            pieces.append(tokens[:seq_len])
            truncated += 1
            dropped += len(tokens) - seq_len
        else:
            raise ValueError(
                f"{describe(index)} has {len(tokens)} tokens with its end, more than data.seq_len={seq_len}, and "
                "data.long_documents is 'error': raise data.seq_len, or set long_documents to 'split' or 'truncate'"
            )
    lengths = list(map(len, pieces))
    bins = _first_fit_decreasing(lengths, seq_len) if packing else [[index] for index in range(len(pieces))]
    rows = [
        PackedRow(
            input_ids=[token for index in members for token in pieces[index]],
            document_ids=[document for document, index in enumerate(members) for _ in pieces[index]],
        )
        for members in bins
    ]
    return PackedDataset(rows, seq_len, len(documents), split, split_pieces, truncated, dropped)


def collate(rows: Sequence[PackedRow], seq_len: int, pad_id: int) -> dict[str, Tensor]:
    """The GLOBAL batch for ``cp_core.shard_batch``, padded on the right.

    Args:
        rows: B of them.
        seq_len: S.
        pad_id: the token that fills up ``input_ids``.

    Returns:
        int64 ``[B, S]`` each: ``input_ids``; ``labels``, not shifted, -100 on padding; ``document_ids``, where padding
        keeps its row's last; ``attention_mask``, 1 on tokens and 0 on padding.

    Raises:
        ValueError: no rows, an empty row, or one longer than S.
    """
    if not rows or not all(0 < len(row.input_ids) <= seq_len for row in rows):
        lengths = [len(row.input_ids) for row in rows]
        raise ValueError(f"a batch needs rows of 1 to {seq_len} tokens (data.seq_len), got rows of {lengths}")

    def padded(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (seq_len - len(values))]

    return {
        "input_ids": torch.tensor([padded(row.input_ids, pad_id) for row in rows]),
        "labels": torch.tensor([padded(row.input_ids, IGNORE_INDEX) for row in rows]),
        "document_ids": torch.tensor([padded(row.document_ids, row.document_ids[-1]) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.input_ids), 0) for row in rows]),
    }


def count_targets(row: PackedRow) -> int:
    """Supervised targets of a row: its tokens less its documents (a document is a run of equal ids)."""
    return sum(1 for _ in _targets(row))


def unigram_cross_entropy(rows: Sequence[PackedRow]) -> float:
    """Cross entropy of the rows' targets under their own unigram distribution, in nats per target.

    That is the entropy of the targets: no model that ignores its context can have a lower loss on these rows, not even
    one that has seen their counts (with few rows it is lower than the language's own entropy: the counts fit the
    sample). A model below this line has learned to use context.

    Raises:
        ValueError: rows without a target.
    """
    counts = Counter(token for row in rows for token in _targets(row))
    total = counts.total()
    if not total:
        raise ValueError("no row has a target: a document needs two tokens at least")
    return -sum(count / total * log(count / total) for count in counts.values())


def _targets(row: PackedRow) -> Iterator[int]:
    """The tokens that are predicted: every one but the first of each document."""
    pairs = zip(row.document_ids, row.document_ids[1:], row.input_ids[1:], strict=False)
    return (token for before, now, token in pairs if before == now)


def _cut(tokens: list[int], seq_len: int) -> list[list[int]]:
    cuts = [*range(0, len(tokens), seq_len), len(tokens)]
    if cuts[-1] - cuts[-2] == 1 and seq_len > 2:
        cuts[-2] -= 1  # a last piece of one token would have no target, and a row of it alone would divide by zero
    return [tokens[start:stop] for start, stop in pairwise(cuts)]


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Members of each bin. The longest piece first, each into the first bin with room for it.

    A tree over the bins holds the largest room below each node, so that a search is a walk down: n log n in all, where
    looking through the bins would take n^2. All bins are there from the start, and the unopened ones come last.
    """
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * size)  # node n has the children 2n and 2n + 1; the leaves start at `size`
    bins: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        bins[node - size].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [members for members in bins if members]
