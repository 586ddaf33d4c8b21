"""Streaming safetensors writer: shards are laid out from names, shapes and dtypes alone, then filled in any order.

Memory: what the caller hands to one ``write``. Files get temporary names and are renamed by ``commit``, which runs only
when every element has been written; a crash before that leaves what was in the folder as it was.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from safetensors import safe_open

from .checkpoint_files import DTYPES, INDEX, SHARD, SINGLE, read_json
from .weights import CheckpointError

CODES = {dtype: code for code, dtype in DTYPES.items()}
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data on disk."""
        return self.numel * self.dtype.itemsize


@dataclass
class _Place:
    spec: TensorSpec
    file: str
    start: int  # first byte in the file
    written: int = 0  # elements


class CheckpointWriter:
    """Writes ``model.safetensors``, or shards and an index when one shard is not enough. Used in ``with``.

    Args:
        folder: made if need be. An older checkpoint in it is replaced by ``commit``.
        specs: every tensor, in the order in which they fill the shards.
        max_shard_bytes: bytes of tensor data per file; a larger tensor gets a file of its own.

    Raises:
        ValueError: a name comes twice, or a dtype that is not written.
    """

    def __init__(self, folder: str | Path, specs: Iterable[TensorSpec], max_shard_bytes: int) -> None:
        self.folder = Path(folder)
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
        shards = _split(specs, max_shard_bytes)
        count = len(shards)
        self.files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._places: dict[str, _Place] = {}
        headers = [self._place(file, shard) for file, shard in zip(self.files, shards, strict=True)]
        self._open_file: tuple[str, BinaryIO] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("model*" + _TEMPORARY):  # of a save that crashed
            if SHARD.fullmatch(left.stem) or left.stem in (SINGLE, INDEX):
                left.unlink()
        for file, header in zip(self.files, headers, strict=True):
            (self.folder / (file + _TEMPORARY)).write_bytes(header)

    def _place(self, file: str, shard: list[TensorSpec]) -> bytes:
        """Give every tensor of a shard its place, the widest dtypes first so that each is aligned.

        Returns:
            The file's header with its length in front.
        """
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ordered = sorted(shard, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        offset = 0
        for spec in ordered:
            if spec.name in self._places:
                raise ValueError(f"{spec.name} would be written twice")
            if spec.dtype not in CODES:
                raise ValueError(f"{spec.name}: {spec.dtype} is not written; legal: {', '.join(map(str, CODES))}")
            span = [offset, offset + spec.nbytes]
            fields[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
            self._places[spec.name] = _Place(spec, file, offset)
            offset += spec.nbytes
        header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        for spec in ordered:
            self._places[spec.name].start += 8 + len(header)
        return len(header).to_bytes(8, "little") + header

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Write consecutive elements of one tensor.

        Args:
            name: which tensor.
            values: of the tensor's dtype, any shape and device.
            start: index of the first element in the flattened tensor.

        Raises:
            ValueError: wrong dtype, or more elements than the tensor has.
        """
        place = self._places[name]
        if values.dtype != place.spec.dtype or start + values.numel() > place.spec.numel:
            raise ValueError(f"{name}: {values.numel()} x {values.dtype} at {start} does not go into {place.spec}")
        place.written += values.numel()
        if not values.numel():
            return
        data = values.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        handle = self._handle(place.file)
        handle.seek(place.start + start * place.spec.dtype.itemsize)
        handle.write(data.data)

    def _handle(self, file: str) -> BinaryIO:
        if self._open_file is None or self._open_file[0] != file:
            self._close_file()
            handle = open(self.folder / (file + _TEMPORARY), "r+b")  # noqa: SIM115 - closed by _close_file
            self._open_file = (file, handle)
        return self._open_file[1]

    def _close_file(self) -> None:
        if self._open_file is not None:
            self._open_file[1].close()
            self._open_file = None

    def commit(self) -> None:
        """Check that all is there and put the files in place.

        Raises:
            CheckpointError: a tensor is not complete; nothing was replaced.
        """
        self._close_file()
        partial = [place for place in self._places.values() if place.written != place.spec.numel]
        if partial:
            texts = [f"{place.spec.name}: {place.written} of {place.spec.numel} elements written" for place in partial]
            raise CheckpointError(self.folder, texts)
        for file in self.files:
            self._verify(file)
        specs = [place.spec for place in self._places.values()]
        sizes = {"total_parameters": sum(s.numel for s in specs), "total_size": sum(s.nbytes for s in specs)}
        weight_map = {name: place.file for name, place in self._places.items()}
        index = self.folder / (INDEX + _TEMPORARY)
        if len(self.files) > 1:
            text = json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True)
            index.write_text(text + "\n")
        stale = self._stale()
        # From here on a crash must not leave old and new shards under one index: without an index readers refuse.
        (self.folder / INDEX).unlink(missing_ok=True)
        for file in self.files:
            os.replace(self.folder / (file + _TEMPORARY), self.folder / file)
        if len(self.files) > 1:
            os.replace(index, self.folder / INDEX)
        for path in stale:
            path.unlink(missing_ok=True)

    def _stale(self) -> list[Path]:
        """Weight files of an older checkpoint that the new one does not replace."""
        names = {path.name for path in self.folder.iterdir() if path.name == SINGLE or SHARD.fullmatch(path.name)}
        if (self.folder / INDEX).exists():
            try:
                listed = read_json(self.folder / INDEX).get("weight_map", {}).values()
            except (CheckpointError, AttributeError):  # an old index that nobody can read names nothing
                listed = ()
            names.update(name for name in listed if name == Path(name).name and name.endswith(".safetensors"))
        return [self.folder / name for name in sorted(names - set(self.files))]

    def _verify(self, file: str) -> None:
        path = self.folder / (file + _TEMPORARY)
        with open(path, "r+b") as handle:
            os.fsync(handle.fileno())
        expected = {name for name, place in self._places.items() if place.file == file}
        with safe_open(path, framework="pt") as opened:  # checks the header against the file's length
            if set(opened.keys()) != expected:
                raise CheckpointError(self.folder, [f"{file}: the file written does not hold the tensors planned"])

    def abort(self) -> None:
        """Remove the temporary files."""
        self._close_file()
        for file in [*self.files, INDEX]:
            (self.folder / (file + _TEMPORARY)).unlink(missing_ok=True)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit after success, abort after an exception."""
        if error is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


def _split(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in order; a new one begins where a tensor does not fit any more."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards
