"""What the checkpoint tests share: folders read and rewritten as plain dicts, and modules made from a weight table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.common.weights import WeightTable

INDEX = "model.safetensors.index.json"
Files = dict[str, dict[str, torch.Tensor]]


def read_files(folder: Path) -> Files:
    """``{file: {name: tensor}}`` of a checkpoint."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """``{name: tensor}`` of a checkpoint."""
    return {name: tensor for tensors in read_files(folder).values() for name, tensor in tensors.items()}


def write_files(folder: Path, files: Files, *, index: bool = True) -> None:
    """Write shards, and an index that fits them."""
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if index and (folder / INDEX).exists():
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Replace each tensor by ``change(name, tensor)``; None removes it."""
    files = {}
    for file, tensors in read_files(folder).items():
        changed = {name: change(name, tensor) for name, tensor in tensors.items()}
        files[file] = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    write_files(folder, files)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes (NaN included)."""
    if a.keys() != b.keys():
        return False
    return all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def skeleton(table: WeightTable, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """A module without a forward whose parameters are those of ``table``, full of NaN."""
    root = nn.Module()
    for entry in table:
        *path, leaf = entry.name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.full(entry.shape, torch.nan, dtype=dtype, device=device)))
    return root


def stack(table: WeightTable, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The native tensors of an HF state dict, written out on its own: rows concatenated, then stacked."""
    native = {}
    for entry in table:
        blocks = [torch.cat([tensors[name] for name in names]) for names in entry.sources]
        native[entry.name] = torch.stack(blocks) if entry.stacked else blocks[0]
    return native
