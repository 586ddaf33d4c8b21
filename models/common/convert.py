"""The work of ``scripts/convert_checkpoint.py``: HF layout <-> native layout on disk, tensor by tensor, byte for byte.

The native layout holds the tensors of the weight table under their in-memory names, experts stacked; a marker in its
``config.json`` says so. Pieces are copied from place to place without arithmetic, so nothing is rounded and the memory
needed is one piece (a single expert's matrix, or the embedding). A group whose sources differ in dtype cannot be
stacked without rounding: it stays as its sources, which every reader of the native layout understands.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from .checkpoint_files import DTYPES, INDEX, SHARD, SINGLE, read_json
from .checkpoint_reader import CheckpointReader, Match
from .checkpoint_writer import CheckpointWriter, TensorSpec
from .weights import LAYOUT_KEY, CheckpointError, Piece, WeightEntry, WeightTable

MARKER = f'\n  "{LAYOUT_KEY}": "native",'  # goes in as text, so that taking it out restores every byte
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)|.*\.(safetensors|bin)\.index\.json")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B", re.IGNORECASE)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        tensors: number of tensors written.
        nbytes: bytes of tensor data written.
        files: weight files written.
        copied: other files copied.
        left_out: other weight files of the source folder, which were not copied.
        unstacked: groups that stay as their sources, for these differ in dtype.
    """

    tensors: int
    nbytes: int
    files: tuple[str, ...]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    unstacked: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """One tensor or file of a comparison; ``result`` is ``equal`` or says what differs."""

    name: str
    kind: str  # dtype and shape, or "file"
    nbytes: int
    result: str


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` (1000 based, as in transformers) or ``5GiB`` (1024 based).

    Raises:
        ValueError: no size, or below one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    if found:
        unit = found[2].upper()
        size = int(float(found[1]) * (1024 if "I" in unit else 1000) ** ("KMGT".find(unit[:1]) + 1 if unit else 0))
        if size >= 1:
            return size
    raise ValueError(f"size {text!r} must read like 5GB, 500MB or 2GiB")


def layout_of(folder: str | Path) -> str:
    """``native`` or ``hf``, by the marker in ``config.json``.

    Raises:
        CheckpointError: no ``config.json``.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(folder, ["config.json: missing; give a folder with a complete checkpoint"])
    return "native" if read_json(path).get(LAYOUT_KEY) == "native" else "hf"


def table_of(folder: str | Path) -> WeightTable:
    """The weight table for the checkpoint in ``folder``, from ``models.<model_type>.weights``.

    Raises:
        CheckpointError: no ``config.json``, or a family that the zoo does not have.
    """
    layout_of(folder)  # says if there is no config
    kind = read_json(Path(folder) / "config.json").get("model_type")
    families = sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/weights.py"))
    families.remove("common")
    if kind not in families:
        raise CheckpointError(folder, [f"config.json: model_type {kind!r} is not one of {', '.join(families)}"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    table: WeightTable = importlib.import_module(f"models.{kind}.weights").weight_table(config)
    return table


def convert(
    source: str | Path,
    target: str | Path,
    layout: str,
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write ``source`` in the other layout. ``target`` appears only when it is complete.

    Args:
        source: a folder in the opposite layout.
        target: a folder that does not exist or is empty.
        layout: ``native`` or ``hf``.
        max_shard_bytes: bytes of tensor data per file.
        progress: called with (bytes done, bytes in all).

    Raises:
        CheckpointError: the source has that layout already or does not fit its table, or the target is not free.
        ValueError: another layout.
    """
    source, target = Path(source), Path(target)
    if layout not in ("native", "hf"):
        raise ValueError(f"layout={layout!r} must be 'native' or 'hf'")
    if layout_of(source) == layout:
        other = "to-hf" if layout == "native" else "to-native"
        raise CheckpointError(source, [f"config.json: the layout is {layout!r} already; use {other}, or nothing"])
    table = table_of(source)
    scratch = _scratch(source, target)
    with CheckpointReader(source) as reader:
        match = reader.match(table)
        total = sum(info.nbytes for info in reader.tensors.values())
        specs = list(_specs(table, match, reader, layout))
        scratch.mkdir(parents=True)
        try:
            _check_space(total, scratch, target)
            with CheckpointWriter(scratch, specs, max_shard_bytes) as writer:
                done = 0
                for name, values, start in _copies(table, match, reader, layout):
                    writer.write(name, values, start)
                    done += values.nbytes
                    del values  # before the next is read
                    if progress is not None:
                        progress(done, total)
            copied, left_out = other_files(source)
            _copy_files(source, scratch, copied, layout)
            os.replace(scratch, target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    unstacked = tuple(entry.name for entry in table if layout == "native" and not _one_dtype(entry, match))
    return ConvertReport(len(specs), total, tuple(writer.files), copied, left_out, unstacked)


def _scratch(source: Path, target: Path) -> Path:
    """The name of the folder to write to until all is there."""
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise CheckpointError(target, ["lies in the source folder; give another one"])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(target, ["exists and is not an empty folder; give another one, or delete it"])
    scratch = target.with_name(target.name + ".tmp")
    if scratch.exists():
        raise CheckpointError(scratch, ["exists (left by a conversion that was killed?); delete it"])
    return scratch


def _check_space(needed: int, scratch: Path, target: Path) -> None:
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise CheckpointError(target, [f"needs {needed:,} bytes, the disk has {free:,} free; use another disk"])


def _one_dtype(entry: WeightEntry, match: Match) -> bool:
    return len({match.dtypes[piece.name] for piece in entry.pieces}) == 1


def _outputs(entry: WeightEntry, match: Match, layout: str) -> tuple[Piece, ...]:
    """What is written for one entry."""
    return (entry.whole,) if layout == "native" and _one_dtype(entry, match) else entry.pieces


def _specs(table: WeightTable, match: Match, reader: CheckpointReader, layout: str) -> Iterator[TensorSpec]:
    for entry in table:
        first = match.dtypes[entry.pieces[0].name]
        for piece in _outputs(entry, match, layout):
            yield TensorSpec(piece.name, piece.shape, match.dtypes.get(piece.name, first))
    for alias in match.tied:
        info = reader.tensors[alias]
        yield TensorSpec(alias, info.shape, DTYPES[info.code])


def _copies(
    table: WeightTable, match: Match, reader: CheckpointReader, layout: str
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Piece by piece ``(output name, values, first element)``; each piece is one run of bytes in either layout."""
    for entry in table:
        to_whole = _outputs(entry, match, layout) == (entry.whole,)
        from_whole = match.pieces[entry.name] == (entry.whole,)
        strides = [math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
        for piece in entry.pieces:
            start = sum(offset * stride for offset, stride in zip(piece.start, strides, strict=True)) if to_whole else 0
            name, box = (entry.name, piece.box) if from_whole else (piece.name, None)
            yield entry.name if to_whole else piece.name, reader.read(name, box), start
    for alias in match.tied:
        yield alias, reader.read(alias), 0


def other_files(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Relative names of the files that a conversion copies, and of foreign weight files, which it leaves out."""
    copied, left_out = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") and part != ".gitattributes" for part in name.parts):
            continue
        if not _WEIGHTS.fullmatch(path.name):
            copied.append(str(name))
        elif str(name) not in (SINGLE, INDEX) and not SHARD.fullmatch(str(name)):
            left_out.append(str(name))
    return tuple(copied), tuple(left_out)


def _copy_files(source: Path, target: Path, names: tuple[str, ...], layout: str) -> None:
    """Copy; ``config.json`` gains or loses the marker."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    config = target / "config.json"
    config.write_bytes(_mark(config.read_bytes()) if layout == "native" else _unmark(config.read_bytes()))


def _mark(text: bytes) -> bytes:
    return text.replace(b"{", b"{" + MARKER.encode(), 1)


def _unmark(text: bytes) -> bytes:
    plain = text.replace(MARKER.encode(), b"", 1)
    if plain != text:
        return plain
    fields = json.loads(text)  # an editor has re-written it meanwhile
    del fields[LAYOUT_KEY]
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def compare(a: str | Path, b: str | Path) -> list[Comparison]:
    """Compare two folders tensor by tensor (dtype, shape, every byte) and file by file, whatever their shards.

    Raises:
        CheckpointError: a folder whose files contradict each other.
    """
    found = []
    with CheckpointReader(a) as left, CheckpointReader(b) as right:
        for reader in (left, right):
            if reader.problems:
                raise CheckpointError(reader.folder, [f"{name}: {text}" for name, text in reader.problems.items()])
        for name in sorted(left.tensors.keys() | right.tensors.keys()):
            one, two = left.tensors.get(name), right.tensors.get(name)
            info = one or two
            assert info is not None
            if one is None or two is None:
                result = f"missing in {left.folder if one is None else right.folder}"
            elif (one.code, one.shape) != (two.code, two.shape):
                result = f"{one.code} {list(one.shape)} became {two.code} {list(two.shape)}"
            else:
                result = "equal" if left.same_bytes(name, right, name) else "bytes differ"
            found.append(Comparison(name, f"{info.code} {list(info.shape)}", info.nbytes, result))
    for name in sorted({*other_files(Path(a))[0], *other_files(Path(b))[0]}):
        paths = [Path(folder) / name for folder in (a, b)]
        missing = [str(folder) for folder, path in zip((a, b), paths, strict=True) if not path.is_file()]
        same = not missing and paths[0].read_bytes() == paths[1].read_bytes()
        result = f"missing in {missing[0]}" if missing else "equal" if same else "bytes differ"
        size = next(path.stat().st_size for path in paths if path.is_file())
        found.append(Comparison(name, "file", size, result))
    return found


def roundtrip(
    source: str | Path, *, max_shard_bytes: int = 5 * 10**9, progress: Callable[[int, int], None] | None = None
) -> list[Comparison]:
    """HF -> native -> HF in a temporary folder beside the source (twice its size), compared with the source.

    Raises:
        CheckpointError: the source cannot be converted, or the disk is too small.
    """
    source = Path(source).resolve()
    with tempfile.TemporaryDirectory(prefix=f".{source.name}.roundtrip-", dir=source.parent) as folder:
        native, back = Path(folder) / "native", Path(folder) / "hf"
        convert(source, native, "native", max_shard_bytes=max_shard_bytes, progress=progress)
        convert(native, back, "hf", max_shard_bytes=max_shard_bytes, progress=progress)
        return compare(source, back)
