"""The tokenizer of a run: trained on its own text, from the model's folder, or from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..schema import DataSection

END_OF_TEXT = "<|endoftext|>"


def build_tokenizer(
    section: DataSection, documents: list[str], model_path: Path | None, cache: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer that ``data.tokenizer`` asks for; it has an end-of-text and a padding token.

    Args:
        section: ``train_bpe`` trains a byte-level BPE of exactly ``vocab_size`` on ``documents``; ``model`` reads the
            model's folder; else a folder.
        documents: the training documents.
        model_path: folder of the pretrained model.
        cache: where a trained tokenizer is kept; read when it is there.

    Raises:
        ValueError: no tokenizer at the place, too little text for the vocabulary, or no end-of-text token.
    """
    if section.tokenizer == "train_bpe":
        if not (cache / "tokenizer.json").exists():
            _save(_train(documents, section.vocab_size), cache)
        return PreTrainedTokenizerFast.from_pretrained(cache)
    folder = model_path if section.tokenizer == "model" else Path(section.tokenizer)
    if folder is None or not folder.is_dir():
        raise ValueError(f"data.tokenizer: {section.tokenizer!r}: no folder {folder}; give one, 'model' or 'train_bpe'")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer: {folder} holds no tokenizer that transformers can load: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"data.tokenizer: {folder} has no end-of-text token (eos_token); documents need one at their end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _train(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(
            f"data.vocab_size={vocab_size}: the training text yields only {bpe.get_vocab_size()} tokens; lower it (with "
            "model.config.vocab_size) or give more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
