"""Tiny random checkpoints, written by transformers itself: what tests and a first look at the scripts run on.

The shapes are asymmetric on purpose, so that a transposed or swapped tensor cannot pass; norm weights are not constant,
so that a norm that was forgotten or applied twice shows.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_qwen3_moe_config(**overrides: Any) -> Qwen3MoeConfig:
    """A config of 8 query and 2 kv heads of 8, 8 experts of 24 (top 2), hidden size 32, 2 layers.

    Weights are drawn wider (0.1) than HF's default, so that experts and attention matter in the logits.
    """
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "initializer_range": 0.1,
        "max_position_embeddings": 4096,
    }
    return Qwen3MoeConfig(**{**fields, **overrides})


def make_tiny_qwen3_moe(
    out_dir: str | Path,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Write a tiny Qwen3-MoE checkpoint in the HF layout.

    Args:
        out_dir: must not hold a checkpoint yet.
        shards: number of weight files.
        dtype: of every tensor.
        seed: of the weights; the caller's random state is left alone.
        config_overrides: fields of ``Qwen3MoeConfig`` that differ from ``tiny_qwen3_moe_config``.

    Returns:
        ``out_dir``.

    Raises:
        ValueError: a checkpoint is there already, or no split into ``shards`` files exists.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and any(out_dir.glob("*.safetensors*")):
        raise ValueError(f"{out_dir} holds a checkpoint already; give another folder, or delete it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(tiny_qwen3_moe_config(**config_overrides))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(".bias"):
                    parameter.uniform_(-0.1, 0.1)  # transformers starts them at zero
    _save(model.to(dtype), out_dir, shards)  # type: ignore[arg-type]
    return out_dir


def _save(model: PreTrainedModel, out_dir: Path, shards: int) -> None:
    """Save with the smallest ``max_shard_size`` that gives no more than ``shards`` files."""
    size = -(-sum(parameter.nbytes for parameter in model.parameters()) // shards)
    while True:
        with tempfile.TemporaryDirectory() as scratch:
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar per attempt
                model.save_pretrained(f"{scratch}/{out_dir.name}", max_shard_size=size)
            files = list(Path(scratch).glob("*/*.safetensors"))
            if len(files) == shards:
                shutil.copytree(f"{scratch}/{out_dir.name}", out_dir, dirs_exist_ok=True)
                return
        if len(files) < shards:
            raise ValueError(f"shards={shards}: the tensors allow no such split; {len(files)} files are the next fewer")
        size += max(1, size // 50)
