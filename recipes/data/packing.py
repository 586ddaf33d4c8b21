"""Documents of any length to sequences of one length, several documents in a sequence, none of them mixed.

B rows of a batch, S tokens of a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import log

import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedRow:
    """One sequence, without padding: its tokens, and which document each belongs to (0, 1, ... in order)."""

    input_ids: list[int]
    document_ids: list[int]


@dataclass
class PackingReport:
    """What packing did."""

    documents: int = 0
    split: int = 0
    truncated: int = 0
    dropped_tokens: int = 0
    rows: int = 0
    tokens: int = 0
    capacity: int = field(default=0, repr=False)

    def __str__(self) -> str:
        text = f"{self.documents} documents, {self.tokens} tokens in {self.rows} sequences"
        text += f" ({100 * self.tokens / max(1, self.capacity):.1f} % full)"
        if self.split:
            text += f"; {self.split} documents longer than a sequence were split"
        if self.truncated:
            text += f"; {self.truncated} were cut off ({self.dropped_tokens} tokens dropped)"
        return text


def pack(
    documents: Sequence[list[int]], seq_len: int, policy: str, packing: bool
) -> tuple[list[PackedRow], PackingReport]:
    """Fit documents into sequences: first-fit decreasing, deterministic.

    Args:
        documents: token ids of each, end-of-text included.
        seq_len: S.
        policy: for a document longer than S: ``split`` into pieces (each a document of its own), ``truncate``, ``error``.
        packing: False gives each document (or piece) a sequence of its own.

    Returns:
        The sequences and what was done.

    Raises:
        ValueError: a longer document under ``error``, with its index, its length and the remedies.
    """
    report = PackingReport(documents=len(documents))
    pieces: list[list[int]] = []
    for index, tokens in enumerate(documents):
        if len(tokens) > seq_len and policy == "error":
            raise ValueError(
                f"document {index} has {len(tokens)} tokens, data.seq_len is {seq_len} and data.long_documents is 'error': "
                "raise seq_len, or set long_documents to 'split' or 'truncate'"
            )
        if len(tokens) > seq_len and policy == "truncate":
            report.truncated += 1
            report.dropped_tokens += len(tokens) - seq_len
            tokens = tokens[:seq_len]
        report.split += len(tokens) > seq_len
        pieces += [tokens[start : start + seq_len] for start in range(0, len(tokens), seq_len)]
    bins: list[list[list[int]]] = []
    free: list[int] = []
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i]), i)) if packing else range(len(pieces))
    for index in order:
        piece = pieces[index]
        place = next((i for i, room in enumerate(free) if room >= len(piece)), None) if packing else None
        if place is None:
            bins.append([])
            free.append(seq_len)
            place = len(bins) - 1
        bins[place].append(piece)
        free[place] -= len(piece)
    rows = [
        PackedRow([t for piece in parts for t in piece], [i for i, piece in enumerate(parts) for _ in piece]) for parts in bins
    ]
    report.rows, report.tokens = len(rows), sum(len(row.input_ids) for row in rows)
    report.capacity = len(rows) * seq_len
    return rows, report


def collate(rows: Sequence[PackedRow], seq_len: int, pad_id: int) -> dict[str, Tensor]:
    """The global batch for ``cp_core.shard_batch``.

    Returns:
        int64 ``[B, S]`` each: ``input_ids``; ``labels``, not shifted, -100 on padding; ``document_ids``, padding keeps
        its row's last; ``attention_mask``, 1 on tokens, 0 on padding.
    """

    def padded(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (seq_len - len(values))]

    return {
        "input_ids": torch.tensor([padded(row.input_ids, pad_id) for row in rows]),
        "labels": torch.tensor([padded(row.input_ids, IGNORE_INDEX) for row in rows]),
        "document_ids": torch.tensor([padded(row.document_ids, row.document_ids[-1]) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.input_ids), 0) for row in rows]),
    }


def targets(row: PackedRow) -> list[int]:
    """The tokens that are predicted: every one but the first of each document."""
    pairs = zip(row.document_ids, row.document_ids[1:], row.input_ids[1:], strict=False)
    return [token for before, now, token in pairs if before == now]


def count_targets(row: PackedRow) -> int:
    """Number of supervised tokens of a row: its tokens less its documents."""
    return len(row.input_ids) - len(list(groupby(row.document_ids)))


def unigram_cross_entropy(rows: Sequence[PackedRow]) -> float:
    """Entropy in nats of the rows' own target distribution: the best loss of a model that ignores all context."""
    counts = Counter(token for row in rows for token in targets(row))
    total = counts.total()
    return -sum(count / total * log(count / total) for count in counts.values())
