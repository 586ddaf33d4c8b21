"""``metrics.jsonl``: one JSON object a line, written as it happens, so that a killed run loses at most the last line.

Every object has ``schema`` and ``kind`` (``start`` or ``step``). After a resume the file reads as if the run had never
stopped. Numbers that are not finite are written as strings (``"nan"``), which JSON can hold.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

SCHEMA = 1


class MetricsWriter:
    """Appends events; only the first rank has one.

    Args:
        path: the file.
        resume_step: keep what an earlier session wrote up to this step; None starts the file anew.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [e for e in read_metrics(path) if e.get("step", 0) <= resume_step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(event) + "\n" for event in kept))
        temporary.replace(path)
        self._file = open(path, "a")  # noqa: SIM115 - open for the whole run

    def write(self, kind: str, **values: Any) -> None:
        """Append one event."""
        event = {"schema": SCHEMA, "kind": kind, **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(event) + "\n")
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
    """All whole events; a torn last line and a missing file are no error.

    Raises:
        ValueError: a line before the last that is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a metrics line ({error.msg})") from None
    return events


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
