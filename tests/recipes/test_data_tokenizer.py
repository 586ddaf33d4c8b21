"""Tokenizers: lossless, deterministic, of the exact size; a folder without one is refused."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from recipes.data.tokenizer import END_OF_TEXT, build_tokenizer
from recipes.schema import DataSection

TOPICS = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)][:12]


def build(
    cache: Path, texts: list[str] | None = None, model_path: Path | None = None, **values: Any
) -> PreTrainedTokenizerBase:
    section = DataSection(
        **{"source": "pydoc_topics", "seq_len": 64, "tokenizer": "train_bpe", "vocab_size": 400, **values}
    )
    return build_tokenizer(section, TOPICS if texts is None else texts, model_path, cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> PreTrainedTokenizerBase:
    return build(cache)


def test_trained_tokenizer_has_its_size_and_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: END_OF_TEXT not in text))
def test_round_trip_is_lossless_on_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_round_trip_of_the_topics(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in (*TOPICS, " , leading and trailing , ", "a .  b ' s n't\r\n\ttabs", "\u00e4\u4e2d\U0001f600\x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_training_is_deterministic(tokenizer: PreTrainedTokenizerBase, cache: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    (here,), (there,) = cache.glob("train_bpe-*.json"), tmp_path.iterdir()
    assert here.name == there.name
    assert here.read_bytes() == there.read_bytes()


def test_trained_tokenizer_is_read_again_but_never_for_other_text_or_size(tmp_path: Path) -> None:
    build(tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    build(tmp_path)
    assert file.stat().st_mtime_ns == before
    assert len(build(tmp_path, vocab_size=350)) == 350
    assert build(tmp_path, texts=TOPICS[6:]).get_vocab() != build(tmp_path).get_vocab()
    assert len(list(tmp_path.iterdir())) == 3


def test_too_little_text_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size=400: the training text yields only \d+ tokens; lower it"):
        build(tmp_path, texts=["a few words"])
    assert not list(tmp_path.iterdir())


def test_folder_and_model_give_what_was_exported(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Also beside a config.json, whose model type must not change the tokenizer's class or its splitting of text."""
    folder = tmp_path / "export"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    for loaded in (build(tmp_path, tokenizer=str(folder)), build(tmp_path, tokenizer="model", model_path=folder)):
        assert loaded(TOPICS)["input_ids"] == tokenizer(TOPICS)["input_ids"]
        assert loaded.decode(loaded(TOPICS[0])["input_ids"]) == TOPICS[0]
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 0)


def test_padding_falls_back_to_the_end_of_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "a")
    edit_config(tmp_path / "a", "pad_token")
    assert build(tmp_path, tokenizer=str(tmp_path / "a")).pad_token == END_OF_TEXT


def test_places_without_a_tokenizer_are_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*nowhere is not a folder; give a tokenizer's folder"):
        build(tmp_path, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"model\.path is not set"):
        build(tmp_path, tokenizer="model")
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))  # transformers: an empty vocabulary
    with pytest.raises(ValueError, match=r"weights has none of tokenizer\.json"):
        build(tmp_path, tokenizer="model", model_path=folder)
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"transformers cannot load the tokenizer in .*weights"):
        build(tmp_path, tokenizer=str(folder))
    shutil.rmtree(folder)
    tokenizer.save_pretrained(folder)
    edit_config(folder, "eos_token")
    with pytest.raises(ValueError, match=r"weights has no end-of-text token.*set eos_token"):
        build(tmp_path, tokenizer=str(folder))


def edit_config(folder: Path, drop: str) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config[drop]
    file.write_text(json.dumps(config))
