"""From a recipe to its mesh and model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from cp_core import ContextParallelConfig
from models import AutoModelForCausalLM, CPPreTrainedModel, ParallelConfig

from .schema import CPSection, ParallelSection, Recipe

AXES = ("dp_replicate", "dp_shard", "cp")


def mesh_shape(parallel: ParallelSection, world_size: int) -> tuple[int, int, int]:
    """Sizes of (dp_replicate, dp_shard, cp); an unset dp_shard takes what is left of the world.

    Raises:
        ValueError: the sizes do not multiply to ``world_size``.
    """
    fixed = parallel.dp_replicate * parallel.cp.size
    dp_shard = parallel.dp_shard if parallel.dp_shard is not None else max(1, world_size // fixed)
    if fixed * dp_shard != world_size:
        raise ValueError(
            f"parallel: dp_replicate={parallel.dp_replicate} x dp_shard={dp_shard} x cp.size={parallel.cp.size} is "
            f"{fixed * dp_shard}, but {world_size} processes run: change parallel.nproc or the sizes"
        )
    return parallel.dp_replicate, dp_shard, parallel.cp.size


def build_mesh(recipe: Recipe, device: str) -> DeviceMesh:
    """The mesh over all processes; collective."""
    return init_device_mesh(device, mesh_shape(recipe.parallel, dist.get_world_size()), mesh_dim_names=AXES)


def cp_config(section: CPSection) -> ContextParallelConfig:
    """The core's config out of a recipe's section."""
    return ContextParallelConfig(**section.model_dump(exclude={"size"}))


def model_config(recipe: Recipe, **special: int | None) -> PretrainedConfig:
    """The HF config that the recipe writes out, or that of its checkpoint.

    Args:
        recipe: its model section.
        special: defaults that the recipe's own values override (tokens of a tokenizer).
    """
    section = recipe.model
    if section.init == "pretrained":
        return AutoConfig.from_pretrained(section.path or "", local_files_only=True)
    return AutoConfig.for_model(section.family, **{**special, **copy.deepcopy(section.config)})  # it edits dicts


def build_model(recipe: Recipe, mesh: DeviceMesh, tokenizer: PreTrainedTokenizerBase) -> CPPreTrainedModel:
    """The model, bound and sharded, in training mode; collective over the mesh."""
    section, parallel = recipe.model, recipe.parallel
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "cp": cp_config(parallel.cp),
        "parallel": ParallelConfig(
            fsdp=parallel.fsdp,
            activation_checkpointing=parallel.activation_checkpointing,
            reshard_after_forward=parallel.reshard_after_forward,
        ),
        "dtype": getattr(torch, section.dtype),
    }
    if section.init == "pretrained":
        assert section.path is not None  # a rule
        return AutoModelForCausalLM.from_pretrained(section.path, **arguments).train()
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(recipe, **special)
    return AutoModelForCausalLM.from_config(config, seed=recipe.train.seed, **arguments).train()
