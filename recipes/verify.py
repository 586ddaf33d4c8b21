"""``python -m recipes verify``: is this recipe's context parallelism right? Answered on this machine, before it runs.

The recipe's model, made narrow (all its layers and heads, few channels and experts, random weights), and its first
batch, made short, run once on one process and once on ``cp.size`` processes, in float64. Loss, the output of every
mixer and layer, and every gradient must agree; else the first layer that differs is named. Weights, mixed precision
and the data axes are not looked at.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from cp_core import ContextParallelConfig, format_report, shard_batch, sync_gradients
from cp_core.testing import run_distributed
from models import AutoModelForCausalLM, CPPreTrainedModel, ParallelConfig

from .build import cp_config, model_config
from .data import batch_indices, build_datasets, collate
from .schema import Recipe

TOLERANCE = 1e-10  # of the largest entry; float64
# The widths of the narrow model. Layers and heads keep their number: they are what strategies depend on.
_NARROW = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8, "vocab_size": 512,
    "num_experts": 8, "num_experts_per_tok": 4,
}  # fmt: skip
_ROWS, _TOKENS, _TOKENS_A_RANK = 2, 256, 64
_TIMEOUT = 900.0
Prepare = Callable[[CPPreTrainedModel], None]


class Finding(NamedTuple):
    """One thing compared: the layer it speaks of, what it is, and the largest difference over the largest value."""

    layer: str
    what: str
    error: float

    @property
    def agrees(self) -> bool:
        """False for NaN too."""
        return self.error <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}, {self.error:.1e}"


@dataclass(frozen=True)
class Verdict:
    """What was compared, in the order in which a step computes it."""

    loss: float
    loss_error: float
    outputs: tuple[Finding, ...]
    gradients: tuple[Finding, ...]
    report: str
    shape: str

    @property
    def first(self) -> Finding | None:
        """The first that differs; None if all agree."""
        loss = Finding("the model", "loss", self.loss_error)
        return next((found for found in (*self.outputs, loss, *self.gradients) if not found.agrees), None)


class Job(NamedTuple):
    """What every process gets."""

    config: PretrainedConfig
    cp: ContextParallelConfig
    checkpointing: str
    router_loss: bool
    seed: int
    batch: dict[str, Tensor]
    prepare: Prepare | None


class Seen(NamedTuple):
    """What one process saw. ``outputs`` and ``arriving`` (their gradients): local tokens, ``[B, T, H]``, as called."""

    loss: float
    outputs: dict[str, Tensor]
    arriving: dict[str, Tensor]
    parameters: dict[str, Tensor]
    report: str


def verify(recipe: Recipe, prepare: Prepare | None = None) -> Verdict:
    """Compare one process with ``recipe.parallel.cp.size`` of them.

    Args:
        recipe: checked.
        prepare: changes the model on the many processes before the step (to try what a fault looks like); a function
            at the top level of an importable module.

    Raises:
        ValueError: the recipe has a cp size of 1.
        WorkerError: a process failed; with its message.
    """
    size = recipe.parallel.cp.size
    if size == 1:
        raise ValueError("parallel.cp.size is 1: there is nothing to compare; add parallel.cp.size=2 to try a size")
    config = narrow_config(recipe)
    job = Job(
        config, cp_config(recipe.parallel.cp), recipe.parallel.activation_checkpointing,
        recipe.model.output_router_logits, recipe.train.seed, first_batch(recipe, config), prepare,
    )  # fmt: skip
    rows, tokens = job.batch["input_ids"].shape
    (alone,) = run_distributed(_step, 1, job._replace(prepare=None), timeout=_TIMEOUT, preload=("recipes.verify",))
    together = run_distributed(_step, size, job, timeout=_TIMEOUT)
    outputs, gradients = _compare(alone, together, tokens)
    return Verdict(
        loss=alone.loss,
        loss_error=max(abs(seen.loss - alone.loss) / abs(alone.loss) for seen in together),
        outputs=outputs,
        gradients=gradients,
        report=together[0].report,
        shape=f"{config.num_hidden_layers} layers, narrow; {rows} x {tokens} tokens; float64; 1 process against {size}",
    )


def narrow_config(recipe: Recipe) -> PretrainedConfig:
    """The model's config with few channels, experts and tokens of vocabulary."""
    config = model_config(recipe)
    for name, value in _NARROW.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(value, getattr(config, name)))
    return config


def first_batch(recipe: Recipe, config: PretrainedConfig) -> dict[str, Tensor]:
    """Rows of the recipe's first step, packed anew for a short sequence; token numbers folded into the vocabulary."""
    tokens = min(recipe.data.seq_len, max(_TOKENS, _TOKENS_A_RANK * recipe.parallel.cp.size))
    data = recipe.data.model_copy(update={"seq_len": tokens, "long_documents": "split"})
    short = recipe.model_copy(update={"data": data})
    with tempfile.TemporaryDirectory() as folder:
        bundle = build_datasets(short, Path(folder))
    settings = recipe.train
    indices = batch_indices(len(bundle.train_rows), settings.seed, 0, settings.global_batch)[:_ROWS]
    batch = collate([bundle.train_rows[index] for index in indices], tokens, bundle.tokenizer.pad_token_id)
    for name in ("input_ids", "labels"):
        values = batch[name]
        batch[name] = torch.where(values < 0, values, values % config.vocab_size)
    return batch


def lines(verdict: Verdict) -> Iterator[str]:
    """The verdict for a reader."""
    yield verdict.report
    yield verdict.shape
    yield f"loss       {verdict.loss:.6f}, difference {verdict.loss_error:.1e}"
    for name, found in (("outputs", verdict.outputs), ("gradients", verdict.gradients)):
        worst = max(found, key=lambda finding: (finding.error != finding.error, finding.error))
        yield f"{name:<10} {len(found)} compared; worst: {worst}"
    first = verdict.first
    if first is None:
        yield f"\u2713 equal within {TOLERANCE:.0e}"
    else:
        yield f"\u2717 the first that differs is {first} (allowed: {TOLERANCE:.0e})"


def _step(rank: int, size: int, job: Job) -> Seen:
    """One forward and backward; watches what every mixer and layer returns, and the gradient that comes back to it."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)) if size > 1 else None
    parallel = ParallelConfig(activation_checkpointing=job.checkpointing)
    model = AutoModelForCausalLM.from_config(
        job.config, mesh=mesh, cp=job.cp, parallel=parallel, dtype=torch.float64, seed=job.seed
    ).train()
    report = format_report(model.cp_report)
    if job.prepare is not None:
        job.prepare(model)
    local = shard_batch(job.batch, mesh)
    outputs: dict[str, Tensor] = {}
    arriving: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if name in outputs:  # computed again, in backward
                return
            outputs[name] = hidden.detach().clone()
            hidden.register_hook(lambda grad: arriving.__setitem__(name, grad.detach().clone()))

        return hook

    layers = {id(layer) for layer in model.decoder_layers()}
    for name, module in model.named_modules():
        if id(module) in layers or name in model.cp_mixers():
            module.register_forward_hook(watch(name))
    out = model(**local, output_router_logits=job.router_loss, return_logits=False)
    out.loss.backward()
    sync_gradients(model, mesh)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Seen(float(out.loss.detach()), outputs, arriving, grads if rank == 0 else {}, report)


def _compare(alone: Seen, together: Sequence[Seen], tokens: int) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Outputs in the order of forward, gradients in the order of backward."""

    def error(name: str, kind: str) -> float:
        parts = [getattr(seen, kind)[name] for seen in together]
        return _error(torch.cat(parts, 1)[:, :tokens], getattr(alone, kind)[name][:, :tokens])

    names = list(alone.outputs)
    outputs = tuple(Finding(name, "output", error(name, "outputs")) for name in names)
    largest = max(float(grad.abs().max()) for grad in alone.parameters.values())
    of_parameter = {
        name: _error(grad, alone.parameters[name], floor=1e-8 * largest)
        for name, grad in together[0].parameters.items()
    }
    gradients: list[Finding] = []

    def add(layer: str, belongs: Callable[[str], bool]) -> None:
        mine = [name for name in of_parameter if belongs(name)]
        gradients.extend(Finding(layer, f"gradient of {name}", of_parameter.pop(name)) for name in mine)

    def visit(inside: str, above: str) -> str:
        """The modules in one, last first; what arrives at an output was made by the one above."""
        within = [name for name in names if name.startswith(inside)]
        for name in reversed(within):
            if any(name.startswith(f"{other}.") for other in within):
                continue
            gradients.append(Finding(above, f"gradient at the output of {name}", error(name, "arriving")))
            above = visit(f"{name}.", name)
            add(name, lambda parameter, name=name: parameter.startswith(f"{name}."))  # type: ignore[misc]
        return above

    first = next(iter(of_parameter))  # the embedding's
    add("the head", lambda parameter: not parameter.startswith(tuple(names)) and parameter != first)
    visit("", "the head")
    add("the embedding", lambda parameter: True)
    return outputs, tuple(gradients)


def _error(got: Tensor, want: Tensor, floor: float = 1e-300) -> float:
    """Largest difference over the largest entry."""
    return float((got - want).abs().max()) / max(float(want.abs().max()), floor)
