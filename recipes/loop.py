"""The training loop: batches, steps, validation, checkpoints, metrics. What a step does reads in ``training_step``.

Every rank knows the whole order of data, so the number of supervised tokens of a step is counted on the host, and
each loss is divided by it once. Gradients are then only ever summed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_core import SequenceContext, Topology, shard_batch, sync_gradients
from cp_core.collectives import sum_values
from cp_core.device import peak_memory_bytes
from models import CPPreTrainedModel

from .checkpoint import CheckpointFolder
from .data import DataBundle, PackedRow, batch_indices, collate, count_targets, rank_rows, unigram_cross_entropy
from .metrics import MetricsWriter
from .optim import clip_gradients, first_nonfinite, gradient_norm, learning_rate
from .progress import Progress, say
from .schema import Recipe


@dataclass
class Run:
    """Everything that a run holds. ``step`` is the number of optimizer steps done."""

    recipe: Recipe
    folder: Path
    mesh: DeviceMesh
    data: DataBundle
    model: CPPreTrainedModel
    optimizer: torch.optim.Optimizer
    checkpoints: CheckpointFolder
    console: Console
    step: int = 0
    resumed: bool = False

    @property
    def topology(self) -> Topology:
        """The axes of the mesh."""
        return self.model.topology

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.model.parameters()).device

    def resume(self) -> None:
        """Continue from the newest checkpoint as the recipe asks; collective.

        Raises:
            ValueError: ``resume: must`` without a checkpoint, or a checkpoint of other settings.
        """
        mode = self.recipe.checkpoint.resume
        if mode == "never":
            self.checkpoints.start_afresh()
        latest = self.checkpoints.latest()
        if latest is None:
            if mode == "must":
                raise ValueError(f"checkpoint.resume=must, but {self.checkpoints.folder} holds no checkpoint")
            return
        self.step = self.checkpoints.load(latest, self.model, self.optimizer, self.recipe)
        self.resumed = True
        say(self.console, f"resumed from {latest} (step {self.step})")


def train(run: Run) -> bool:
    """Train to the end, or to ``train.stop_after``; collective.

    Returns:
        Whether the run is finished.

    Raises:
        RuntimeError: a loss or gradient that is not finite, before it reaches the weights.
    """
    recipe, first = run.recipe, run.topology.dp_cp.rank == 0
    settings = recipe.train
    last = min(settings.steps, settings.stop_after or settings.steps)
    metrics = MetricsWriter(run.folder / "metrics.jsonl", run.step if run.resumed else None) if first else None
    if metrics is not None and not run.resumed:
        metrics.write("start", **_facts(run))
    with Progress(settings.steps, run.step, run.console, recipe.log.every, enabled=first) as progress:
        while run.step < last:
            record = training_step(run)
            run.step += 1
            if settings.eval_every and run.step % settings.eval_every == 0 and run.step < settings.steps:
                record["valid_loss"] = validate(run)
            if run.step == settings.steps and run.data.valid_rows:
                record["valid_loss"] = validate(run)
            if metrics is not None:
                metrics.write("step", step=run.step, **record)
            progress.update(run.step, record)
            every = recipe.checkpoint.every
            if run.step == last or (every and run.step % every == 0):
                run.checkpoints.save(run.step, run.model, run.optimizer, recipe)
    if metrics is not None:
        metrics.close()
    return run.step >= settings.steps


def training_step(run: Run) -> dict[str, Any]:
    """One optimizer step over one global batch; collective.

    Returns:
        What is logged: the mean loss over the step's supervised tokens, the router's loss, and so on.
    """
    started = time.perf_counter()
    recipe, topology = run.recipe, run.topology
    targets = sum(map(count_targets, _global_batch(run)))

    rate = learning_rate(recipe.optim, run.step, recipe.train.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    losses, aux_losses = [], []
    for micro in _micro_batches(run):
        local = _local_batch(run, micro)
        out = run.model(
            **local,
            num_items_in_batch=targets,
            output_router_logits=recipe.model.output_router_logits,
            return_logits=False,
        )
        out.loss.backward()
        losses.append(out.token_loss)
        if out.aux_loss is not None:
            aux_losses.append(out.aux_loss.detach())
    if not recipe.parallel.fsdp:
        sync_gradients(run.model, run.mesh)

    loss = float(sum_values(torch.stack(losses).sum(), topology.dp.group))
    norm = gradient_norm(run.model.parameters())
    if not math.isfinite(loss) or not bool(norm.isfinite()):
        where = first_nonfinite(run.model)
        raise RuntimeError(
            f"step {run.step + 1}: loss {loss}, gradient norm {float(norm)}; the update was not made. "
            + (f"First gradient that is not finite here: {where}" if where else "This rank's gradients are finite")
        )
    if recipe.optim.max_grad_norm is not None:
        clip_gradients(run.model.parameters(), norm, recipe.optim.max_grad_norm)
    run.optimizer.step()

    seconds = time.perf_counter() - started
    tokens = recipe.train.global_batch * recipe.data.seq_len
    record: dict[str, Any] = {"loss": loss, "grad_norm": float(norm), "lr": rate, "targets": targets}
    if aux_losses:
        record["aux_loss"] = float(torch.stack(aux_losses).mean())
    record.update(step_seconds=seconds, tokens_per_second=tokens / seconds, peak_memory_bytes=peak_memory_bytes())
    return record


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss over the supervised tokens of all valid rows; collective. Leaves no trace in the run."""
    topology, rows = run.topology, run.data.valid_rows
    targets = sum(map(count_targets, rows))
    width = run.recipe.train.micro_batch * topology.dp.size
    total = torch.zeros((), device=run.device)
    run.model.eval()
    for start in range(0, len(rows), width):
        mine = rows[start:][topology.dp.rank : width : topology.dp.size]
        # A rank that has run out of rows goes along with one that has no targets: others wait for its collectives.
        local = _local_batch(run, mine or rows[:1], supervised=bool(mine))
        out = run.model(**local, num_items_in_batch=targets, output_router_logits=False, return_logits=False)
        total = total + out.token_loss
    run.model.train()
    return float(sum_values(total, topology.dp.group))


def next_sequence(run: Run) -> SequenceContext:
    """The layout of the micro-batch that this rank takes next; the same on all ranks of its cp group."""
    sequence: SequenceContext = _local_batch(run, _micro_batches(run)[0])["sequence"]
    return sequence


def _step_indices(run: Run) -> list[int]:
    settings = run.recipe.train
    return batch_indices(len(run.data.train_rows), settings.seed, run.step, settings.global_batch)


def _global_batch(run: Run) -> list[PackedRow]:
    """The rows of the next step, of all data ranks."""
    return [run.data.train_rows[index] for index in _step_indices(run)]


def _micro_batches(run: Run) -> list[list[PackedRow]]:
    """Those of them that are this data rank's, as they go through the model."""
    dp, rows = run.topology.dp, run.data.train_rows
    mine = rank_rows(_step_indices(run), dp.rank, dp.size, run.recipe.train.micro_batch)
    return [[rows[index] for index in micro] for micro in mine]


def _local_batch(run: Run, rows: Sequence[PackedRow], supervised: bool = True) -> dict[str, Any]:
    pad = run.data.tokenizer.pad_token_id
    batch: dict[str, Tensor] = collate(rows, run.recipe.data.seq_len, pad)
    if not supervised:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return shard_batch(batch, run.mesh["cp"], device=run.device)


def _facts(run: Run) -> dict[str, Any]:
    """What a reader of the metrics needs to know first."""
    recipe, data = run.recipe, run.data
    facts: dict[str, Any] = {
        "name": recipe.name,
        "mesh": dict(zip(run.mesh.mesh_dim_names or (), run.mesh.shape, strict=True)),
        "algorithm": recipe.parallel.cp.algorithm,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "train_rows": len(data.train_rows),
        "valid_rows": len(data.valid_rows),
    }
    if data.valid_rows:
        facts["unigram_cross_entropy"] = unigram_cross_entropy(data.valid_rows)
    return facts
