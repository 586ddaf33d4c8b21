"""Strict, streaming reader of a checkpoint folder: whether it fits a weight table, and any slice of any tensor.

Opening reads headers only; ``read`` reads data, slice by slice, into memory of their own. Nothing is skipped silently:
what is missing, unexpected, doubled, mis-shaped or of a foreign dtype is named, all in one ``CheckpointError``.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .checkpoint_files import DTYPES, TensorInfo, list_folder
from .weights import Box, CheckpointError, Piece, WeightEntry, WeightTable

_BLOCK_BYTES = 64 * 2**20  # what a comparison holds of each side
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Match:
    """How a checkpoint serves a table.

    Attributes:
        pieces: per entry the tensors that hold it: its sources, or the native tensor itself.
        dtypes: dtype on disk under the HF name of every source (the sources of a native tensor share its dtype).
        tied: aliases that the checkpoint holds although the config ties them; equal to their owners byte for byte.
    """

    pieces: dict[str, tuple[Piece, ...]]
    dtypes: dict[str, torch.dtype]
    tied: tuple[str, ...]


class CheckpointReader:
    """Reads ``model.safetensors`` or the shards of ``model.safetensors.index.json``; close it, or use it in ``with``.

    Args:
        folder: the checkpoint.

    Attributes:
        config: the parsed ``config.json``; empty when there is none.
        tensors: every tensor by name.
        problems: what is wrong with the files themselves, by tensor or file; ``match`` raises them with its own.
        bytes_read: bytes of tensor data handed out so far.

    Raises:
        CheckpointError: no weights in the folder, or a JSON file that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._listing = list_folder(self.folder)
        self._maps: dict[str, mmap.mmap] = {}
        self.config: dict[str, Any] = self._listing.config
        self.tensors: dict[str, TensorInfo] = self._listing.tensors
        self.problems: dict[str, str] = self._listing.problems
        self.bytes_read = 0

    def match(self, table: WeightTable) -> Match:
        """Hold the checkpoint against a table; each must account for all of the other.

        Raises:
            CheckpointError: another family, or anything that does not fit; lists all of it.
        """
        kind = self.config.get("model_type", table.model_type)
        if kind != table.model_type:
            problem = f"this folder holds a {kind!r} checkpoint, the model is {table.model_type!r}"
            raise CheckpointError(self.folder, [f"{problem}; use the class of {kind!r}"])
        problems = dict(self.problems)
        quantised = self.config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            problems["config.json"] = f"quantization_config ({method!r}) is not supported; dequantise to bf16 first"
        if not self.tensors:
            problems.setdefault("weights", "the checkpoint holds no tensor; download it again")
        else:
            pieces = {entry.name: self._choose(entry, problems) for entry in table}
            expected = {piece.name for chosen in pieces.values() for piece in chosen}
            tied = tuple(alias for alias in table.tied if alias in self.tensors)
            self._check_rest(table, expected.union(tied), problems)
            self._check_tied(table, tied, problems)
        if problems:
            raise CheckpointError(self.folder, [f"{subject}: {text}" for subject, text in problems.items()])
        dtypes = {}
        for entry in table:
            on_disk = {piece.name: DTYPES[self.tensors[piece.name].code] for piece in pieces[entry.name]}
            dtypes.update({piece.name: on_disk.get(piece.name) or on_disk[entry.name] for piece in entry.pieces})
        return Match(pieces, dtypes, tied)

    def _choose(self, entry: WeightEntry, problems: dict[str, str]) -> tuple[Piece, ...]:
        """The layout in which the checkpoint holds one entry, its tensors checked; both at once are a problem."""
        chosen = (entry.whole,) if entry.name in self.tensors else entry.pieces
        others = [piece for piece in entry.pieces if piece.name in self.tensors and piece not in chosen]
        if entry.is_group and others and chosen == (entry.whole,):
            first = self.tensors[others[0].name]
            problems[entry.name] = (
                f"stacked in {self.tensors[entry.name].file}, and also in {len(others)} single tensors (first: "
                f"{first.name} in {first.file}); keep one of the two"
            )
            return (*chosen, *others)
        for piece in chosen:
            info = self.tensors.get(piece.name)
            if info is None:
                if piece.name not in self._listing.lost:
                    hint = "the checkpoint is incomplete, or config.json belongs to another one"
                    if piece.name == "lm_head.weight":
                        hint += ", or tie_word_embeddings must be true"
                    problems.setdefault(piece.name, f"missing, expected {list(piece.shape)}; {hint}")
            elif info.code not in DTYPES:
                problems.setdefault(
                    piece.name,
                    f"dtype {info.code} in {info.file}, expected {', '.join(DTYPES)}; dequantise to bf16 first",
                )
            elif info.shape != piece.shape:
                turned = len(info.shape) > 1 and info.shape == piece.shape[::-1]
                hint = "it is transposed" if turned else "config.json belongs to another checkpoint"
                problems.setdefault(
                    piece.name, f"shape {list(info.shape)} in {info.file}, expected {list(piece.shape)}; {hint}"
                )
        return chosen

    def _check_rest(self, table: WeightTable, expected: set[str], problems: dict[str, str]) -> None:
        for name in sorted(self.tensors.keys() - expected):
            info = self.tensors[name]
            text = f"unexpected, {info.code} {list(info.shape)} in {info.file}; a {table.model_type!r} with this config"
            problems.setdefault(name, f"{text} has no such tensor: correct config.json, or remove the tensor")

    def _check_tied(self, table: WeightTable, tied: tuple[str, ...], problems: dict[str, str]) -> None:
        for alias in tied:
            owner = table.by_name[table.tied[alias]].pieces[0].name
            if owner in self.tensors and not self.same_bytes(alias, self, owner):
                text = f"config.json ties it to {owner}, but their bytes differ ({self.tensors[alias].file})"
                hint = "set tie_word_embeddings to false if the head is its own, else remove the tensor"
                problems.setdefault(alias, f"{text}; {hint}")

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a tensor, or a box of it.

        Args:
            name: tensor on disk, of a dtype in ``DTYPES``.
            box: ``(start, stop)`` for each of its dims; None: all of it.

        Returns:
            A contiguous CPU tensor of the box's shape, in the dtype on disk, in memory of its own.
        """
        info = self.tensors[name]
        shape = info.shape if box is None else tuple(stop - start for start, stop in box)
        data = self.read_bytes(name, box)
        if not data.size:
            return torch.empty(shape, dtype=DTYPES[info.code])
        return torch.from_numpy(data).view(DTYPES[info.code]).view(shape)

    def read_bytes(self, name: str, box: Box | None = None) -> Bytes:
        """The bytes of ``read``, flat; whole tensors may be of any dtype."""
        info = self.tensors[name]
        if info.nbytes == 0 or any(start >= stop for start, stop in box or ()):
            return np.empty(0, np.uint8)
        mapping = self._map(info.file)
        data: Bytes = np.frombuffer(mapping, np.uint8, info.nbytes, info.start)
        if box:
            item = info.nbytes // math.prod(info.shape)
            *outer, (first, last) = box
            data = data.reshape(*info.shape[:-1], info.shape[-1] * item)
            data = data[(*(slice(*span) for span in outer), slice(first * item, last * item))]
        data = data.flatten()  # a copy
        # Else the pages touched (and those the kernel maps around them) stay in the resident set, as with safe_open.
        mapping.madvise(mmap.MADV_DONTNEED)
        self.bytes_read += data.nbytes
        return data

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with open(self.folder / file, "rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    def same_bytes(self, name: str, other: CheckpointReader, other_name: str) -> bool:
        """Whether two tensors agree in dtype, shape and every byte; reads blocks of rows, not the whole."""
        a, b = self.tensors[name], other.tensors[other_name]
        if (a.code, a.shape, a.nbytes) != (b.code, b.shape, b.nbytes):
            return False
        if len(a.shape) < 2 or a.nbytes <= _BLOCK_BYTES:
            return np.array_equal(self.read_bytes(name), other.read_bytes(other_name))
        step = max(1, _BLOCK_BYTES * a.shape[0] // a.nbytes)
        rest = tuple((0, size) for size in a.shape[1:])
        boxes = [((row, min(row + step, a.shape[0])), *rest) for row in range(0, a.shape[0], step)]
        return all(np.array_equal(self.read_bytes(name, box), other.read_bytes(other_name, box)) for box in boxes)

    def close(self) -> None:
        """Give the files back."""
        for mapping in self._maps.values():
            mapping.close()
        self._maps.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
