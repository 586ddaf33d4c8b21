"""Checkpoints to resume from: DCP shards under ``checkpoints/step-000040``, and ``latest``, which names the newest.

A checkpoint is written as ``step-000040.tmp`` and renamed when every rank has finished; only then does ``latest``
change. So a run that is killed at any moment leaves nothing half written that a resume would take. Data order, learning
rate and the rest are functions of the step, so the step, the tensors and the random states are all there is to keep.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .schema import Recipe

_FORMAT = 1


class CheckpointFolder:
    """The checkpoints of one run. Every rank holds one and calls its methods together.

    Args:
        folder: where they lie; made when the first is saved.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        path = self.folder / pointer.read_text().strip()
        if not (path / "run.json").exists():
            raise ValueError(f"{pointer} names {path.name}, which is not there; delete {pointer.name} or restore it")
        return path

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Path:
        """Write the state after ``step`` optimizer steps; collective.

        Returns:
            Its folder.
        """
        final = self.folder / f"step-{step:06d}"
        temporary = final.with_name(final.name + ".tmp")
        if _rank() == 0:
            for stale in self.folder.glob("*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary / "tensors")
        torch.save(_random_state(), temporary / f"random.{_rank()}.pt")
        dist.barrier()
        if _rank() == 0:
            facts = {"format": _FORMAT, "step": step, "world_size": dist.get_world_size(), "data_order": _order(recipe)}
            (temporary / "run.json").write_text(json.dumps(facts, indent=1))
            shutil.rmtree(final, ignore_errors=True)  # of an earlier run that was started afresh here
            temporary.rename(final)
            write_atomically(self.folder / "latest", final.name)
            mine = [path for path in self.folder.glob("step-??????") if path.name <= final.name]
            for old in sorted(mine)[: -self.keep]:  # later steps are an earlier run's; they must not crowd this one out
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> int:
        """Restore a checkpoint in place; collective. DCP reshards, so the mesh may differ.

        Random states are restored only on the same number of processes.

        Returns:
            The number of optimizer steps done.

        Raises:
            ValueError: settings that change the data order or the model differ from those it was saved with.
        """
        facts = json.loads((path / "run.json").read_text())
        saved, now = facts["data_order"], _order(recipe)
        changed = [key for key in now if saved.get(key) != now[key]]
        if changed:
            detail = "; ".join(f"{key}: saved {saved.get(key)!r}, now {now[key]!r}" for key in changed)
            raise ValueError(
                f"{path}: cannot resume, the recipe has changed in what the run depends on: {detail}. Restore these "
                "values, or start afresh with another run_dir or checkpoint.resume=never"
            )
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path / "tensors")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if facts["world_size"] == dist.get_world_size():
            _restore_random_state(torch.load(path / f"random.{_rank()}.pt", weights_only=False))
        return int(facts["step"])


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary name beside ``path``, then rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _order(recipe: Recipe) -> dict[str, Any]:
    """What the next step's data and update depend on, beside the state that is saved."""
    return {
        "model": recipe.model.model_dump(mode="json"),
        "data": recipe.data.model_dump(mode="json"),
        "optim": recipe.optim.model_dump(mode="json"),
        "train.seed": recipe.train.seed,
        "train.global_batch": recipe.train.global_batch,
        "train.steps": recipe.train.steps,
    }


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])


def _rank() -> int:
    return dist.get_rank()
