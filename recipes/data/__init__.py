"""Data of a run: text -> documents -> tokens -> packed rows -> the order in which steps take them.

``corpus`` reads and holds out, ``tokenizer`` is trained or loaded, ``packing`` makes rows and batches, ``sampler`` says
which rows a step takes. Every rank does all of it and gets the same; nothing is sent.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..schema import Recipe
from .corpus import read_documents, split_documents
from .packing import PackedDataset, PackedRow, collate, count_targets, pack, unigram_cross_entropy
from .sampler import batch_indices, rank_rows
from .tokenizer import build_tokenizer

__all__ = [
    "DataBundle",
    "PackedDataset",
    "PackedRow",
    "batch_indices",
    "build_datasets",
    "build_tokenizer",
    "collate",
    "count_targets",
    "pack",
    "rank_rows",
    "read_documents",
    "split_documents",
    "unigram_cross_entropy",
]


@dataclass(frozen=True)
class DataBundle:
    """What the loop needs.

    Args:
        tokenizer: with an end-of-text and a padding token.
        train_rows: at least one.
        valid_rows: empty with ``data.valid_fraction: 0``.
        report: a few lines for the reader of the run: what was read, split, dropped and packed.
    """

    tokenizer: PreTrainedTokenizerBase
    train_rows: list[PackedRow]
    valid_rows: list[PackedRow]
    report: str

    def digest(self) -> str:
        """Of every token and document border: what a resumed run must find unchanged."""
        digest = hashlib.sha256()
        for row in (*self.train_rows, *self.valid_rows):
            digest.update(array("q", [len(row.input_ids), *row.input_ids, *row.document_ids]).tobytes())
        return digest.hexdigest()[:16]


def build_datasets(recipe: Recipe, run_dir: Path) -> DataBundle:
    """Read, hold out, tokenize and pack; a function of the recipe and the files it names.

    A document is the tokens of its text and the end-of-text token. A special token that is written out in a text counts
    as that token, so that text which already is in a model's chat format keeps its meaning.

    Args:
        recipe: checked.
        run_dir: the run's folder; a trained tokenizer is kept in ``tokenizer/``.

    Raises:
        ValueError: from any of the steps, naming the recipe's field.
    """
    section = recipe.data
    documents = read_documents(section)
    train, valid = split_documents(documents, section.valid_fraction, recipe.train.seed)
    model_path = Path(recipe.model.path) if recipe.model.path else None
    tokenizer = build_tokenizer(section, train, model_path, run_dir / "tokenizer")
    lines = [f"data     {section.source}: {len(documents)} documents; tokenizer {section.tokenizer}: {len(tokenizer)}"]
    parts = []
    for name, texts in (("train", train), ("valid", valid)):
        part = _tokenize_and_pack(recipe, tokenizer, texts, name)
        _check_vocabulary(recipe, part)
        parts.append(part.rows)
        if texts:
            lines.append(f"{name:<8} {part}")
    return DataBundle(tokenizer, parts[0], parts[1], "\n".join(lines))


def _tokenize_and_pack(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, texts: list[str], name: str
) -> PackedDataset:
    section = recipe.data
    ids: list[list[int]] = []
    if texts:
        # verbose: no warning about the model's length, which is what splitting is for
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = [[*tokens, tokenizer.eos_token_id] for tokens in encoded["input_ids"]]

    def describe(index: int) -> str:
        return f"{name} document {index} ({texts[index][:40]!r}...)"

    return pack(ids, section.seq_len, section.long_documents, section.packing, describe)


def _check_vocabulary(recipe: Recipe, part: PackedDataset) -> None:
    """A token that the embedding lacks is an obscure error on a CPU and a crash of the device elsewhere."""
    section = recipe.model
    config = dict(section.config)
    if section.path is not None and section.init == "pretrained":
        file = Path(section.path) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
    size = config.get("text_config", config).get("vocab_size")
    largest = max((token for row in part.rows for token in row.input_ids), default=0)
    if size is not None and largest >= size:
        raise ValueError(
            f"data.tokenizer: {recipe.data.tokenizer!r} gives token {largest}, but the model's vocab_size is {size}; "
            "use the tokenizer of the model, or (init: random) raise model.config.vocab_size"
        )
