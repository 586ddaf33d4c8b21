"""The tokenizer of a run: trained on its own text, from the model's folder, or from another; never the network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..schema import DataSection

END_OF_TEXT = "<|endoftext|>"
# Without any of these files AutoTokenizer returns a tokenizer with an empty vocabulary and says nothing.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "*.tiktoken")


def build_tokenizer(
    section: DataSection, documents: Sequence[str], model_path: Path | None, cache_dir: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer that ``data.tokenizer`` asks for; it always has an end-of-text and a padding token.

    * ``train_bpe``: a byte-level BPE of exactly ``data.vocab_size``, lossless on any text, trained on ``documents``.
    * ``model``: what lies beside the weights.
    * else a folder.

    Args:
        section: the recipe's ``data``.
        documents: the training documents (validation text must not shape the vocabulary).
        model_path: ``model.path``.
        cache_dir: where a trained tokenizer is kept, under a name made from the text and the size it was trained with;
            ranks may come at the same time.

    Raises:
        ValueError: no tokenizer there, too little text for the vocabulary, or no end-of-text token.
    """
    if section.tokenizer == "train_bpe":
        file = cache_dir / f"train_bpe-{_fingerprint(documents, section.vocab_size)}.json"
        if not file.exists():
            _write(file, _train_bpe(documents, section.vocab_size))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,  # it would lose spaces before punctuation
        )
    if section.tokenizer != "model":
        return _load(Path(section.tokenizer))
    if model_path is None:
        raise ValueError(
            "data.tokenizer: 'model' reads the tokenizer beside the weights, but model.path is not set; set it, or set "
            "data.tokenizer to 'train_bpe' or a folder"
        )
    return _load(model_path)


def _load(folder: Path) -> PreTrainedTokenizerBase:
    if not any(next(folder.glob(name), None) for name in _VOCABULARIES):
        what = "has none of " + ", ".join(_VOCABULARIES) if folder.is_dir() else "is not a folder"
        raise ValueError(f"data.tokenizer: {folder} {what}; give a tokenizer's folder, 'model' or 'train_bpe'")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds, plain Exception among them
        raise ValueError(f"data.tokenizer: transformers cannot load the tokenizer in {folder}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"data.tokenizer: {folder} has no end-of-text token, and every document ends with one; set eos_token in "
            "its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked everywhere, so which one it is does not matter
    return tokenizer


def _train_bpe(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that no text is out of vocabulary
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"data.vocab_size={vocab_size}: the training text yields only {tokenizer.get_vocab_size()} tokens; lower "
            "it (and model.config.vocab_size with it), or give more text"
        )
    return tokenizer


def _fingerprint(documents: Sequence[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"byte-level bpe, {vocab_size}, {END_OF_TEXT}".encode())
    for document in documents:
        text = document.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()[:16]


def _write(file: Path, tokenizer: Tokenizer) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    tokenizer.save(str(temporary))
    temporary.replace(file)
