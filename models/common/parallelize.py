"""``ParallelConfig`` and the one function that applies every technique beside CP, in one documented order.

Order: (TP, EP: later versions) -> activation checkpointing -> (compile: a later version) -> FSDP2. Gradients are SUMMED
over dp x cp, never averaged: the loss has its scale already. The factor is set here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cp_core.topology import Topology


@dataclass(frozen=True)
class ParallelConfig:
    """What is applied to a model beside context parallelism; sizes come from the mesh.

    Attributes:
        fsdp: shard parameters, gradients and optimizer over dp_shard x cp (replicated over dp_replicate).
        activation_checkpointing: ``none``, or ``full``: keep each layer's input only and recompute in backward.
        compile: must be None in this version.
        reshard_after_forward: free gathered parameters between forward and backward.

    Raises:
        ValueError: a value that this version cannot do.
    """

    fsdp: bool = False
    activation_checkpointing: str = "none"
    compile: str | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.activation_checkpointing not in ("none", "full"):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r} is not available in this version; "
                "use 'none' or 'full'"
            )
        if self.compile is not None:
            raise ValueError(f"compile={self.compile!r} is not available in this version; use None")


class CheckpointedLayer(nn.Module):
    """A layer that can keep only its input and recompute itself in backward.

    Subclasses write ``layer_forward``; recomputation happens inside the module, so that FSDP2's hooks see one call.
    """

    gradient_checkpointing = False

    def layer_forward(self, *args: object) -> object:
        """The layer's computation."""
        raise NotImplementedError

    def forward(self, *args: object) -> object:
        """``layer_forward``, recomputed in backward if ``gradient_checkpointing`` is set and the layer trains."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.layer_forward, *args, use_reentrant=False)
        return self.layer_forward(*args)


def parallelize(
    model: nn.Module, layers: Iterable[CheckpointedLayer], topology: Topology, config: ParallelConfig
) -> None:
    """Apply ``config`` to ``model``, which may still be on the meta device.

    Args:
        model: the whole model.
        layers: its decoder layers; each becomes one FSDP2 unit, what is left another.
        topology: of the mesh.
        config: what to apply.

    Raises:
        ValueError: FSDP without a mesh.
    """
    layers = list(layers)
    for layer in layers:
        layer.gradient_checkpointing = config.activation_checkpointing == "full"
    if config.fsdp:
        if topology.fsdp_mesh is None:
            raise ValueError("fsdp=True needs a mesh with a dp_shard or cp axis: pass mesh=, or use fsdp=False")
        _apply_fsdp(model, layers, topology, config)


def _apply_fsdp(model: nn.Module, layers: list[CheckpointedLayer], topology: Topology, config: ParallelConfig) -> None:
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    for layer in layers:
        fully_shard(
            layer, mesh=topology.fsdp_mesh, reshard_after_forward=config.reshard_after_forward, mp_policy=policy
        )
    fully_shard(model, mesh=topology.fsdp_mesh, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both are needed, on every unit, for a sum (gloo has no pre-scaled sum)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
