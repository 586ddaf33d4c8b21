"""What a safetensors folder holds: headers and index read and held against each other. No tensor data is touched."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .weights import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model(\.safetensors)?-\d{5}-of-\d{5}\.safetensors")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place on disk: file, shape, safetensors' dtype code, first byte and number of bytes."""

    name: str
    file: str
    shape: tuple[int, ...]
    code: str
    start: int
    nbytes: int


@dataclass
class Listing:
    """The content of a folder.

    Attributes:
        config: the parsed ``config.json``; empty when there is none.
        tensors: every tensor by name.
        problems: ``{tensor or file: what is wrong}``, one each.
        lost: tensors that the index places in a file that cannot be read.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)


def list_folder(folder: Path) -> Listing:
    """Read config, index and every header of a checkpoint folder.

    Raises:
        CheckpointError: there is no checkpoint here, or a JSON file cannot be read.
    """
    weight_map = _entry_point(folder)
    config = folder / "config.json"
    listing = Listing(read_json(config) if config.exists() else {})
    named = {SINGLE} if weight_map is None else set(weight_map.values())
    present = {path.name for path in folder.iterdir() if path.name == SINGLE or SHARD.fullmatch(path.name)}
    for file in sorted(named):
        _add_file(listing, folder, file, weight_map)
    for file in sorted(present - named):
        _add_stray(listing, folder, file)
    for name, file in (weight_map or {}).items():
        info = listing.tensors.get(name)
        if file in listing.problems:
            listing.lost.add(name)
        elif info is None or info.file != file:
            real = "no file holds it" if info is None else f"it is in {info.file}"
            listing.problems.setdefault(name, f"{INDEX} says {file}, but {real}; correct the index")
    return listing


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it is none.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(path.parent, [f"{path.name}: is not here; give the folder of a checkpoint"]) from None
    except ValueError as error:
        raise CheckpointError(path.parent, [f"{path.name}: not valid JSON ({error}); download it again"]) from error
    if not isinstance(found, dict):
        raise CheckpointError(path.parent, [f"{path.name}: holds no JSON object; download it again"])
    return found


def _entry_point(folder: Path) -> dict[str, str] | None:
    """The index's weight_map; None for a single file."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(folder, [f"{INDEX}: has no weight_map {{name: file}}; download it again"])
        return weight_map
    if (folder / SINGLE).exists():
        return None
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder"])
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
    hint = f"; found only {', '.join(others[:4])}" if others else ""
    problem = f"neither {SINGLE} nor {INDEX} is here{hint}; give a complete safetensors checkpoint"
    raise CheckpointError(folder, [f"{problem} (an interrupted download or save leaves shards without an index)"])


def _add_file(listing: Listing, folder: Path, file: str, weight_map: dict[str, str] | None) -> None:
    """Add one file that the entry point names."""
    if Path(file).name != file or not (folder / file).is_file():
        listing.problems[file] = f"named by {INDEX}, but not in the folder; download it"
        return
    try:
        header = _read_header(folder / file)
    except ValueError as error:
        listing.problems[file] = str(error)
        return
    for name, info in header.items():
        if name in listing.tensors:
            other = listing.tensors[name].file
            listing.problems[name] = f"doubled, in {other} and in {file}; remove one copy"
        elif weight_map is not None and name not in weight_map:
            listing.problems[name] = f"in {file}, but not in {INDEX}; add it to the index or remove it"
        listing.tensors.setdefault(name, info)


def _add_stray(listing: Listing, folder: Path, file: str) -> None:
    """Note a weight file that nothing names: which copy of its tensors is meant cannot be known."""
    try:
        header = _read_header(folder / file)
    except ValueError as error:
        listing.problems[file] = str(error)
        return
    doubled = [name for name in header if name in listing.tensors]
    also = f", {len(doubled)} of them doubled in other files (first: {doubled[0]})" if doubled else ""
    listing.problems[file] = (
        f"not named by the index; holds {len(header)} tensors{also}; delete it if it is left over from an older save"
    )


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """One file's tensors.

    Raises:
        ValueError: it is no whole safetensors file (safe_open holds the header against the file's length).
    """
    try:
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            pairs = json.loads(handle.read(size), object_pairs_hook=list)  # pairs, to see a name that comes twice
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        raise ValueError(f"truncated or corrupt, {size} bytes ({error}); download it again") from error
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"its header names {twice[0]} twice; write the file anew")
    found = {}
    for name, fields in pairs:
        if name != "__metadata__":
            entry = dict(fields)
            first, last = entry["data_offsets"]
            place = 8 + size + first
            found[name] = TensorInfo(name, path.name, tuple(entry["shape"]), entry["dtype"], place, last - first)
    return found
