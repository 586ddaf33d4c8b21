"""What was resolved for each mixer: one record a layer, written at bind time, read by everything that reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ResolvedCP:
    """How one layer runs under context parallelism.

    Attributes:
        path: module path of the mixer.
        kind: ``softmax | mla | dsa | gdn | kda``.
        algorithm: the strategy; ``local`` at cp size 1.
        schedule: ``sync | async``.
        kernel: how a block of attention is computed.
        cp_size: ranks that share a sequence.
        ulysses_degree: ranks that exchange heads (U).
        sequence_degree: groups of them that share the sequence (C); ``cp_size = C * U``.
        handoffs: roles of the handoff modules found, such as ``q k v``.
        fallback: what was replaced and why; empty if nothing was.
    """

    path: str
    kind: str
    algorithm: str
    schedule: str
    kernel: str
    cp_size: int
    ulysses_degree: int
    sequence_degree: int
    handoffs: tuple[str, ...]
    fallback: str = ""


_COLUMNS = ("layer", "kind", "strategy", "schedule", "kernel", "cp", "U x C", "handoffs", "fallback")


def format_report(records: Sequence[ResolvedCP]) -> str:
    """The records as a text table; neighbours that differ only in their path share a line."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    index = 0
    while index < len(records):
        last = index
        while last + 1 < len(records) and _cells(records[last + 1])[1:] == _cells(records[index])[1:]:
            last += 1
        cells = _cells(records[index])
        more = f" .. {records[last].path} ({last - index + 1} layers)" if last > index else ""
        lines.append((cells[0] + more, *cells[1:]))
        index = last + 1
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(record: ResolvedCP) -> tuple[str, ...]:
    return (
        record.path,
        record.kind,
        record.algorithm,
        record.schedule,
        record.kernel,
        str(record.cp_size),
        f"{record.ulysses_degree} x {record.sequence_degree}",
        " ".join(record.handoffs) or "-",
        record.fallback or "-",
    )
