"""Text in: the documents of a recipe's ``data.source``, and which of them are held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ..schema import DataSection


def read_documents(section: DataSection) -> list[str]:
    """The documents of ``data.source``, in a fixed order.

    ``pydoc_topics`` is the help text that ships with Python (real technical English, no download). A ``.jsonl`` file
    holds one document a line under ``text_field``; a ``.txt`` file is one document, or several between form feeds.

    Raises:
        ValueError: a file that is missing, empty, or malformed, with its path and line.
    """
    if section.source == "pydoc_topics":
        import pydoc_data.topics

        topics = pydoc_data.topics.topics
        return [topics[name] for name in sorted(topics)]
    path = Path(section.source)
    if not path.is_file():
        raise ValueError(f"data.source: {path} is not a file; give a .txt or .jsonl file, or 'pydoc_topics'")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        documents = _read_jsonl(path, text, section.text_field)
    elif path.suffix == ".txt":
        documents = [part for part in text.split("\f") if part.strip()]
    else:
        raise ValueError(f"data.source: {path} ends in {path.suffix!r}; .txt and .jsonl are read")
    if not documents:
        raise ValueError(f"data.source: {path} holds no text; put documents into it or choose another file")
    return documents


def split_documents(documents: list[str], valid_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Hold out a share of the documents (at least one); both parts keep the given order.

    Returns:
        Training and validation documents; the latter empty for ``valid_fraction`` 0.

    Raises:
        ValueError: too few documents for both parts.
    """
    if not valid_fraction:
        return documents, []
    held = max(1, round(len(documents) * valid_fraction))
    if held >= len(documents):
        raise ValueError(
            f"data.valid_fraction={valid_fraction} holds out {held} of {len(documents)} documents and leaves none to train "
            "on: give more documents, or valid_fraction: 0"
        )
    chosen = set(random.Random(seed).sample(range(len(documents)), held))
    parts: tuple[list[str], list[str]] = ([], [])
    for index, document in enumerate(documents):
        parts[index in chosen].append(document)
    return parts


def _read_jsonl(path: Path, text: str, field: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}); each line must be one object") from None
        if not isinstance(entry, dict) or not isinstance(entry.get(field), str) or not entry[field]:
            keys = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{path}:{number}: no text under {field!r} (found: {keys}); set data.text_field")
        documents.append(entry[field])
    return documents
