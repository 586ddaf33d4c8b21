"""The worker: ``torchrun -m recipes.finetune RECIPE``. One process of a run; ``recipes run`` starts them for you.

It reads top to bottom as the list of steps: processes, mesh, data, model, optimizer, resume, loop, export.
"""

from __future__ import annotations

import datetime
import logging
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from cp_core import format_report
from cp_core.device import backend_for, device_type, local_device

from .build import build_mesh, build_model
from .checkpoint import CheckpointFolder, write_atomically
from .data import build_datasets
from .export import export_hf
from .lifetime import lock_folder
from .loader import load_recipe, run_dir
from .loop import Run, next_sequence, train
from .metrics import read_metrics
from .optim import build_optimizer
from .plots import plot_curve
from .progress import say
from .schema import Recipe

_TIMEOUT = datetime.timedelta(minutes=10)


def main(arguments: list[str]) -> None:
    """Run one worker; on an error leave ``logs/rank-N.error`` in the run's folder and fail."""
    if len(arguments) != 1:
        raise SystemExit("usage: torchrun --nproc-per-node=N -m recipes.finetune RECIPE.yaml")
    recipe = load_recipe(arguments[0])
    folder = run_dir(recipe)
    try:
        _start(recipe)
        work(recipe, folder)
    except BaseException as error:  # DCP's errors are no Exceptions
        _leave_message(folder, error)
        raise
    dist.barrier()
    dist.destroy_process_group()


def _start(recipe: Recipe) -> None:
    device = local_device()
    logging.basicConfig(level=logging.WARNING)
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    random.seed(recipe.train.seed)
    np.random.seed(recipe.train.seed)
    torch.manual_seed(recipe.train.seed)
    dist.init_process_group(backend_for(device.type), timeout=_TIMEOUT)


def work(recipe: Recipe, folder: Path) -> None:
    """The run itself, on a process group that exists already; collective over all processes.

    Args:
        recipe: checked.
        folder: where results go.
    """
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    lock = lock_folder(folder) if first else None  # held until the process ends
    mesh = build_mesh(recipe, device_type())

    if first:
        build_datasets(recipe, folder)  # trains and stores the tokenizer; the others then read it
    dist.barrier()
    data = build_datasets(recipe, folder)
    say(console, data.report)

    model = build_model(recipe, mesh, data.tokenizer)
    optimizer = build_optimizer(model, recipe.optim)
    checkpoints = CheckpointFolder(folder / "checkpoints", recipe.checkpoint.keep, data.digest())
    run = Run(recipe, folder, mesh, data, model, optimizer, checkpoints, console)
    run.resume()
    say(console, format_report(model.cp_report, next_sequence(run)))
    finished = train(run)
    if not finished:
        say(
            console,
            f"stopped: {run.step} of {recipe.train.steps} steps are done (train.stop_after); run again to resume",
        )
        return

    if first and recipe.log.plot:
        plot = plot_curve(folder / "metrics.jsonl", folder / "loss.png")
        say(console, f"curve    {plot or 'not drawn: install the extra cp-zoo[plot]'}")
    say(console, f"metrics  {folder / 'metrics.jsonl'}")
    if first:
        say(console, f"result   {summary(read_metrics(folder / 'metrics.jsonl'))}")
    if recipe.export.hf:
        export_hf(run)
    dist.barrier()
    del lock


def summary(events: list[dict[str, Any]]) -> str:
    """The run in one line, from its metrics: where the losses began and ended, and what they are to be held against."""
    steps = [event for event in events if event["kind"] == "step"]
    start = next((event for event in events if event["kind"] == "start"), {})
    if not steps:
        return "no step in metrics.jsonl (it was removed, or no step was made)"
    text = f"training loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}"
    if "valid_loss" in steps[-1]:
        text += f"; valid loss {steps[-1]['valid_loss']:.3f}"
    if "unigram_cross_entropy" in start:
        text += f" (unigram cross entropy of the valid set: {start['unigram_cross_entropy']:.3f})"
    return text


def _leave_message(folder: Path, error: BaseException) -> None:
    rank = os.environ.get("RANK", "0")
    logs = folder / "logs"
    causes = getattr(error, "failures", {})  # DCP collects what its ranks raised
    told = "".join(f"on rank {r}: {type(e[0]).__name__}: {e[0]}\n" for r, e in causes.items())
    text = f"{told}{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        write_atomically(logs / f"rank-{rank}.error", text)
    except OSError as second:  # the same full disk, perhaps; the traceback still reaches the launcher
        print(f"(rank {rank} could not leave its message: {second})", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
