"""Checkpoints to resume from: DCP shards under ``checkpoints/step-000040``, and ``latest``, which names the newest.

A checkpoint is written as ``step-000040.tmp`` and renamed when every rank has finished; only then does ``latest``
change. So a run that is killed at any moment leaves nothing half written that a resume would take. Data order, learning
rate and the rest are functions of the step, so the step, the tensors and the random states are all there is to keep.
"""

from __future__ import annotations

import json
import os
import random
import re
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
_STEP = re.compile(r"step-\d{6,}")


class CheckpointFolder:
    """The checkpoints of one run. Every rank holds one and calls its methods together.

    Args:
        folder: where they lie; made when the first is saved.
        keep: how many to keep.
        data_digest: of the run's token rows; a checkpoint goes on with the same rows only.
    """

    def __init__(self, folder: Path, keep: int, data_digest: str) -> None:
        self.folder = folder
        self.keep = keep
        self.data_digest = data_digest

    def start_afresh(self) -> None:
        """Forget what an earlier run saved here, before the first step; collective.

        Its folders stay; ``latest`` becomes ``latest.previous``. Otherwise a kill before this run's first checkpoint
        would let the next resume go on with the earlier run.
        """
        pointer = self.folder / "latest"
        if _rank() == 0 and pointer.exists():
            pointer.replace(pointer.with_name("latest.previous"))
        dist.barrier()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        name = pointer.read_text(errors="replace").strip()
        path = self.folder / name
        if _STEP.fullmatch(name) and (path / "run.json").exists():
            return path
        whole = [found.name for found in self._steps() if (found / "run.json").exists()]
        remedy = f"write {whole[-1]} into {pointer}" if whole else "start afresh with checkpoint.resume=never"
        raise ValueError(f"{pointer} names {name!r}, which is no complete checkpoint here; restore it, or {remedy}")

    def _steps(self) -> list[Path]:
        """All checkpoint folders, oldest step first."""
        found = [path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=_step_of)

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
            facts = {
                "format": _FORMAT,
                "step": step,
                "world_size": dist.get_world_size(),
                "data_order": self._order(recipe),
            }
            (temporary / "run.json").write_text(json.dumps(facts, indent=1))
            shutil.rmtree(final, ignore_errors=True)  # of an earlier run that was started afresh here
            temporary.rename(final)
            write_atomically(self.folder / "latest", final.name)
            mine = [path for path in self._steps() if _step_of(path) <= step]
            for old in mine[: -self.keep]:  # later steps are an earlier run's; they must not crowd this one out
                shutil.rmtree(old)
        dist.barrier()
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> int:
        """Restore a checkpoint in place; collective. DCP reshards, so the mesh may differ.

        Random states are restored only on the same number of processes.

        Returns:
            The number of optimizer steps done.

        Raises:
            ValueError: settings or data that the run depends on differ from those it was saved with, or ``run.json``
                is damaged or of another version.
        """
        facts = _read_facts(path / "run.json")
        saved, now = facts["data_order"], self._order(recipe)
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

    def _order(self, recipe: Recipe) -> dict[str, Any]:
        """What the next step depends on, beside the state that is saved; flat, so that a message shows one change."""
        sections = {"model": recipe.model, "data": recipe.data, "optim": recipe.optim}
        order = {
            f"{name}.{key}": value
            for name, section in sections.items()
            for key, value in section.model_dump(mode="json").items()
        }
        train = recipe.train
        order |= {"train.seed": train.seed, "train.global_batch": train.global_batch, "train.steps": train.steps}
        return {**order, "the token rows (text and tokenizer)": self.data_digest}


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary name beside ``path``, then rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
        version = facts["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); resume from another checkpoint of {path.parent.parent}"
        ) from None
    if version != _FORMAT:
        raise ValueError(
            f"{path} has format {version!r}, this version reads {_FORMAT}; resume it with the version it is of"
        )
    return facts


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


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
