"""The weight table: one declaration per model of how checkpoint tensors and parameters correspond, read both ways.

A ``WeightEntry`` is one parameter with the checkpoint tensors it is made of: rows are concatenated (gate over up), and
such blocks may be stacked on a new dim 0 (experts). So every checkpoint tensor fills one box of one parameter and owns
it alone, and its shape follows from the table. Loader, export and ``scripts/convert_checkpoint.py`` only copy boxes;
an inverse never has to be written. "Native" is the in-memory form, "HF" what transformers writes to disk.

    entry("mlp.experts.gate_up_proj", (E, 2 * I, H), stacked=True, sources=((gate_0, up_0), (gate_1, up_1), ...))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Box = tuple[tuple[int, int], ...]  # (start, stop) per dim
LAYOUT_KEY = "cp_zoo_layout"  # in config.json of a folder in the native layout, with the value "native"
_SHOWN = 20  # problems listed in one message; the rest is counted


class CheckpointError(ValueError):
    """A checkpoint that does not fit; lists every problem found, not the first one.

    Attributes:
        problems: one text per problem: tensor and file, what was found, what was expected, what to do.
    """

    def __init__(self, where: object, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"{where}: {len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"]
        lines += [f"  {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Piece:
    """One tensor on disk and the box of the native tensor that it fills.

    Attributes:
        name: its name on disk.
        shape: its shape on disk.
        start: where its box begins in the native tensor, one offset per native dim.
        stacked: it is one index of the native dim 0, which the tensor on disk lacks.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stacked: bool = False

    @property
    def box(self) -> Box:
        """The box it fills, in native coordinates."""
        sizes = (1, *self.shape) if self.stacked else self.shape
        return tuple((start, start + size) for start, size in zip(self.start, sizes, strict=True))

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """What it shares with ``box`` of the native tensor (a shard, or the box of another piece).

        Returns:
            ``(on_disk, inside)``: the common part in coordinates of the tensor on disk, and relative to the start of
            ``box`` (with native dims); None when nothing is shared.
        """
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.box, box, strict=True))
        if any(stop <= start for start, stop in common):
            return None
        on_disk = tuple((a - s, b - s) for (a, b), s in zip(common, self.start, strict=True))
        inside = tuple((a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
        return (on_disk[1:] if self.stacked else on_disk), inside


@dataclass(frozen=True)
class WeightEntry:
    """One parameter and what it is made of.

    Attributes:
        name: native name, equal to the parameter's name in the model.
        shape: native shape.
        sources: checkpoint names. Outer: stacked on a new dim 0 (one item when not ``stacked``); inner: concatenated
            along the rows, the first dim after that.
        stacked: the outer tuple is a dim of its own.
        rows: rows of each inner source; None: equal parts.
        keep_fp32: the parameter must never be held below float32 (states, router bias).

    Raises:
        ValueError: the sources do not tile the shape.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]
    stacked: bool = False
    rows: tuple[int, ...] | None = None
    keep_fp32: bool = False

    def __post_init__(self) -> None:
        outer, inner = len(self.sources), {len(names) for names in self.sources}
        if outer != (self.shape[0] if self.stacked else 1) or len(inner) != 1:
            raise ValueError(f"{self.name}: {outer} groups of {sorted(inner)} sources do not make shape {self.shape}")
        parts = inner.pop()
        if parts == 1 and self.rows is None:
            return
        total = self.shape[1 if self.stacked else 0]
        if self.rows is None and total % parts:
            raise ValueError(f"{self.name}: {total} rows do not divide into {parts} equal sources; give rows=")
        if self.rows is not None and (len(self.rows) != parts or sum(self.rows) != total):
            raise ValueError(f"{self.name}: rows={self.rows} do not make the {total} rows of {parts} sources")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The HF layout: one piece per source, in the order of the bytes of the native tensor."""
        inner = self.shape[1:] if self.stacked else self.shape
        parts = len(self.sources[0])
        rows = self.rows or ((inner[0] // parts,) * parts if parts > 1 else None)
        found = []
        for index, names in enumerate(self.sources):
            first_row = 0
            for part, name in enumerate(names):
                shape = inner if rows is None else (rows[part], *inner[1:])
                start = (first_row, *(0,) * (len(inner) - 1)) if inner else ()
                found.append(Piece(name, shape, (index, *start) if self.stacked else start, self.stacked))
                first_row += shape[0] if shape else 0
        return tuple(found)

    @cached_property
    def whole(self) -> Piece:
        """The native layout on disk: the tensor itself under its native name."""
        return Piece(self.name, self.shape, (0,) * len(self.shape))

    @property
    def is_group(self) -> bool:
        """Made of several checkpoint tensors, or of one with a dim less."""
        return self.stacked or len(self.pieces) > 1


def plain(name: str, shape: tuple[int, ...], source: str | None = None, *, keep_fp32: bool = False) -> WeightEntry:
    """A parameter that is one checkpoint tensor, under its own name unless ``source`` says otherwise."""
    return WeightEntry(name, shape, ((source or name,),), keep_fp32=keep_fp32)


@dataclass(frozen=True)
class WeightTable:
    """Every parameter of one model, once.

    Attributes:
        model_type: what ``config.json`` of its checkpoints says.
        entries: in the order in which they are written.
        tied: ``{alias: owner}``: names that share a parameter and are left out of the checkpoint. A checkpoint that
            holds the alias all the same must hold the owner's bytes.

    Raises:
        ValueError: a native or checkpoint name stands for two things.
    """

    model_type: str
    entries: tuple[WeightEntry, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for entry in self.entries:
            for name in {entry.name, *(piece.name for piece in entry.pieces)}:
                if name in owner:
                    raise ValueError(f"{name} belongs to both {owner[name]} and {entry.name}")
                owner[name] = entry.name
            if len({piece.name for piece in entry.pieces}) != len(entry.pieces):
                raise ValueError(f"{entry.name}: a source is named twice")
        for alias, target in self.tied.items():
            if alias in owner or target not in self.by_name:
                raise ValueError(f"tied {alias} -> {target}: the alias must not be an entry, and its owner must be one")

    def __iter__(self) -> Iterator[WeightEntry]:
        return iter(self.entries)

    @cached_property
    def by_name(self) -> dict[str, WeightEntry]:
        """Entries by native name."""
        return {entry.name: entry for entry in self.entries}

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the HF layout."""
        return {piece.name: piece.shape for entry in self.entries for piece in entry.pieces}

    @property
    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter."""
        return {entry.name: entry.shape for entry in self.entries}
