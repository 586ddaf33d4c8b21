"""Reading documents and holding some out: what is read, and what each bad file is told."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.corpus import read_documents, split_documents
from recipes.schema import DataSection


def read(path: Path, content: str | bytes, **settings: str) -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_documents(DataSection(source=str(path), seq_len=16, **settings))


def test_pydoc_topics_are_sorted_and_whole() -> None:
    documents = read_documents(DataSection(source="pydoc_topics", seq_len=16))
    assert documents == [text for _, text in sorted(pydoc_data.topics.topics.items())]
    assert len(documents) > 70


def test_text_file_is_one_document_or_several_between_form_feed_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    assert read(path, "one\n\ntwo \f inside\n") == ["one\n\ntwo \f inside\n"]
    assert read(path, "\f\none\nmore\n\f\n\f\ntwo\n\f") == ["one\nmore\n", "two\n"]
    assert read(path, b"\xef\xbb\xbfstarts with a byte order mark") == ["starts with a byte order mark"]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["first", "line\u2028separator and\x85next line", "two\nlines  "]
    lines = "\n\n".join(json.dumps({"body": text, "id": 1}, ensure_ascii=False) for text in texts)
    assert read(path, lines + "\n", text_field="body") == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text": \n', r"a\.jsonl:2: not JSON \(Expecting value at column 10\)"),
        (
            "a.jsonl",
            '{"text": "fine"}\n\n{"body": "b", "id": 3}',
            r"a\.jsonl:3: no field 'text' \(it has 'body', 'id'\)",
        ),
        ("a.jsonl", '{"text": ["a"]}', r"a\.jsonl:1: 'text' must be a string, got list"),
        ("a.jsonl", '{"text": "  "}', r"a\.jsonl:1: 'text' is empty; delete the line"),
        ("a.jsonl", '["text"]', r"a\.jsonl:1: a JSON list; each line must be one object"),
        ("a.jsonl", "", r"a\.jsonl holds no text; put documents into it or choose another file"),
        ("a.txt", "", r"a\.txt holds no text"),
        ("a.txt", " \n\f\n \n", r"a\.txt holds no text"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 \(byte 3"),
        ("a.csv", "text", r"data\.source: '.*a\.csv'; give a \.txt or \.jsonl file, or 'pydoc_topics'"),
    ],
)
def test_bad_files_are_told_where_and_what(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, content)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.txt .*; give one, or 'pydoc_topics'"):
        read_documents(DataSection(source=str(tmp_path / "none.txt"), seq_len=16))


@given(count=st.integers(2, 60), fraction=st.floats(0.001, 0.98), seed=st.integers(-(2**40), 2**40))
def test_split_keeps_every_document_in_order_on_one_side(count: int, fraction: float, seed: int) -> None:
    documents = [str(index) for index in range(count)]
    if max(1, round(count * fraction)) >= count:
        with pytest.raises(ValueError, match="leave none to train on"):
            split_documents(documents, fraction, seed)
        return
    train, valid = split_documents(documents, fraction, seed)
    assert train
    assert len(valid) == max(1, round(count * fraction))
    assert sorted(train + valid, key=int) == documents
    for part in (train, valid):
        assert part == sorted(part, key=int)
    assert (train, valid) == split_documents(documents, fraction, seed)


def test_split_depends_on_the_seed_and_zero_holds_out_none() -> None:
    documents = [str(index) for index in range(100)]
    assert split_documents(documents, 0.1, 0) != split_documents(documents, 0.1, 1)
    assert split_documents(documents, 0.0, 0) == (documents, [])


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(
        ValueError, match=r"valid_fraction=0\.1 would hold out 1 of 1 document.*set data\.valid_fraction to 0"
    ):
        split_documents(["all there is"], 0.1, 0)
