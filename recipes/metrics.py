"""``metrics.jsonl``: one JSON object a line, written as it happens, so that a killed run loses the last line at most.

Every object has ``schema`` (the version of this layout), ``kind`` and, for ``step`` and ``eval``, ``step``:

* ``start``: facts about the run, once; ``unigram_cross_entropy`` is the line that the plot draws.
* ``step``: what one optimizer step measured; ``valid_loss`` where it was followed by a validation.
* ``eval``: a validation by itself.
* ``end``: the run is finished.

JSON has no numbers that are not finite: they are written as the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``,
and ``read_metrics`` turns them back.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

SCHEMA = 1
Kind = Literal["start", "step", "eval", "end"]
_KINDS = ("start", "step", "eval", "end")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends events. One process of a run has one, and closes it (or uses it as a context manager).

    Args:
        path: the file; its folder is made.
        resume_step: the step of the checkpoint that the run continues from. What an earlier session wrote after it is
            dropped, so that the file reads like that of an unbroken run. None starts anew and keeps an older file as
            ``*.previous.jsonl``.

    Raises:
        ValueError: an older file that cannot be continued (see ``read_metrics``).
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _rewrite(path, [event for event in read_metrics(path) if _belongs(event, resume_step)])
        elif path.exists() and path.stat().st_size:
            path.replace(path.with_suffix(".previous" + path.suffix))
        self._file = open(path, "a", encoding="ascii")  # noqa: SIM115 - open as long as the run

    def write(self, kind: Kind, **values: Any) -> None:
        """Append one event and flush it.

        Args:
            kind: which; ``step`` and ``eval`` need a value ``step``.
            values: JSON values (numbers of Python, not tensors).

        Raises:
            ValueError: an unknown kind, a missing step, or a value named ``schema``.
            TypeError: a value that JSON does not know.
        """
        if kind not in _KINDS:
            raise ValueError(f"metrics: kind {kind!r} is none of {', '.join(_KINDS)}")
        if kind in ("step", "eval") and not isinstance(values.get("step"), int):
            raise ValueError(f"metrics: a {kind!r} event needs step=<int>; resume cuts the file by it")
        if "schema" in values:
            raise ValueError("metrics: the value 'schema' is reserved")
        # The whole line is made first, so that a bad value leaves nothing behind, and handed over in one piece.
        self._file.write(_line({"schema": SCHEMA, "kind": kind, **values}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All events of a file; a missing file has none, and a last line torn by a kill is passed over.

    Args:
        path: a ``metrics.jsonl``.

    Returns:
        The objects, in the order in which they were written.

    Raises:
        ValueError: a line before the last that is no event, or one of another schema; with its number.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}:{number}: not a metrics line ({error.msg}); delete this line to read the others"
            ) from None
        if not isinstance(event, dict) or event.get("schema") != SCHEMA:
            raise ValueError(f"{path}:{number}: not an event of schema {SCHEMA}, which this version reads")
        events.append(_from_json(event))
    return events


def _belongs(event: dict[str, Any], resume_step: int) -> bool:
    """Whether an event is part of a run that continues from ``resume_step``; its end is still to come."""
    return event["kind"] != "end" and event.get("step", 0) <= resume_step


def _rewrite(path: Path, events: list[dict[str, Any]]) -> None:
    """Replace the file at once: a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="ascii") as file:
        file.writelines(map(_line, events))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(_to_json(event), allow_nan=False) + "\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
