"""Data of a run: text -> documents -> tokens -> packed sequences -> the order in which steps take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..schema import Recipe
from .corpus import read_documents, split_documents
from .packing import PackedRow, collate, count_targets, pack, unigram_cross_entropy
from .sampler import batch_indices, rank_rows
from .tokenizer import build_tokenizer


@dataclass(frozen=True)
class DataBundle:
    """What the loop needs; ``report`` says in a few lines what was read and packed."""

    tokenizer: PreTrainedTokenizerBase
    train_rows: list[PackedRow]
    valid_rows: list[PackedRow]
    report: str


def build_datasets(recipe: Recipe, run_folder: Path) -> DataBundle:
    """Read, tokenize and pack; deterministic, so that every rank gets the same rows.

    Raises:
        ValueError: from any of the steps, naming the recipe's field.
    """
    section = recipe.data
    train, valid = split_documents(read_documents(section), section.valid_fraction, recipe.train.seed)
    model_path = Path(recipe.model.path) if recipe.model.path else None
    tokenizer = build_tokenizer(section, train, model_path, run_folder / "tokenizer")
    rows, lines = [], []
    for name, documents in (("train", train), ("valid", valid)):
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in documents]
        packed, facts = pack(ids, section.seq_len, section.long_documents, section.packing)
        rows.append(packed)
        lines.append(f"{name}    {facts}")
    return DataBundle(tokenizer, rows[0], rows[1], "\n".join(lines))


__all__ = [
    "DataBundle",
    "PackedRow",
    "batch_indices",
    "build_datasets",
    "collate",
    "count_targets",
    "rank_rows",
    "unigram_cross_entropy",
]
