"""Text in: the documents of a recipe's ``data.source``, and which of them are held out.

A document is the unit that is never mixed with another: packing isolates it, and validation holds out whole ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..schema import DataSection
from .sampler import permutation

_FORM_FEED_LINE = re.compile(r"^\f\n?", re.MULTILINE)


def read_documents(section: DataSection) -> list[str]:
    """The documents of ``data.source``, in a fixed order.

    * ``pydoc_topics``: the help texts that come with Python (real technical English, no download), sorted by topic.
    * ``.jsonl``: one object a line, its text under ``data.text_field``; blank lines are passed over.
    * ``.txt``: one document, or several with lines between them that hold a form feed (``\\f``) and nothing else.

    Files are UTF-8; a relative path counts from the working directory.

    Args:
        section: the recipe's ``data``.

    Returns:
        At least one document; none is blank.

    Raises:
        ValueError: a file that is missing, of another kind, malformed or without text; with its path (and line).
    """
    if section.source == "pydoc_topics":
        import pydoc_data.topics

        topics = pydoc_data.topics.topics
        return [topics[name] for name in sorted(topics)]
    path = Path(section.source)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"data.source: {section.source!r}; give a .txt or .jsonl file, or 'pydoc_topics'")
    if not path.is_file():
        raise ValueError(f"data.source: no file {path} (from {Path.cwd()}); give one, or 'pydoc_topics'")
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: some editors start a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.source: {path} is not UTF-8 (byte {error.start}: {error.reason}); re-encode it"
        ) from None
    if path.suffix == ".jsonl":
        documents = _read_jsonl(path, text, section.text_field)
    else:
        documents = [part for part in _FORM_FEED_LINE.split(text) if part.strip()]
    if not documents:
        raise ValueError(f"data.source: {path} holds no text; put documents into it or choose another file")
    return documents


def split_documents(documents: list[str], valid_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Hold out a share of the documents, at least one; both parts keep the given order.

    Args:
        documents: all of them.
        valid_fraction: the share, of documents and not of tokens; 0 holds out none.
        seed: decides which; the same on every machine.

    Returns:
        Training and validation documents.

    Raises:
        ValueError: too few documents for both parts.
    """
    if valid_fraction == 0:
        return documents, []
    held = max(1, round(len(documents) * valid_fraction))
    if held >= len(documents):
        raise ValueError(
            f"data.valid_fraction={valid_fraction} would hold out {held} of {len(documents)} document(s) and leave "
            "none to train on: give more documents (a .txt file is one, unless lines with a form feed divide it), or "
            "set data.valid_fraction to 0"
        )
    chosen = set(permutation(len(documents), seed)[:held].tolist())
    train = [document for index, document in enumerate(documents) if index not in chosen]
    valid = [document for index, document in enumerate(documents) if index in chosen]
    return train, valid


def _read_jsonl(path: Path, text: str, field: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): JSON strings may hold U+2028 as it is
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); each line must be one object"
            ) from None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}:{number}: a JSON {type(entry).__name__}; each line must be one object")
        if field not in entry:
            keys = ", ".join(map(repr, entry)) or "nothing"
            raise ValueError(f"{path}:{number}: no field {field!r} (it has {keys}); set data.text_field")
        value = entry[field]
        if not isinstance(value, str):
            raise ValueError(f"{path}:{number}: {field!r} must be a string, got {type(value).__name__}")
        if not value.strip():
            raise ValueError(f"{path}:{number}: {field!r} is empty; delete the line or give it text")
        documents.append(value)
    return documents
