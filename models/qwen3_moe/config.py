"""Qwen3-MoE's configuration is transformers' own; this file says what of it the zoo refuses."""

from __future__ import annotations

from transformers import Qwen3MoeConfig


def check_config(config: Qwen3MoeConfig) -> None:
    """Refuse what this version would compute wrongly.

    Raises:
        ValueError: the key, its value and what to do.
    """
    if config.sliding_window is not None:
        raise ValueError(
            f"sliding_window={config.sliding_window} (use_sliding_window=True) is not available in this version; "
            "set use_sliding_window=False"
        )
    if config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout} is not available in this version; set attention_dropout=0.0"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.num_experts and config.num_experts_per_tok > config.num_experts:
        raise ValueError(f"num_experts_per_tok={config.num_experts_per_tok} exceeds num_experts={config.num_experts}")


def is_sparse(config: Qwen3MoeConfig, layer: int) -> bool:
    """Whether decoder layer ``layer`` (from 0) has experts instead of one feed-forward layer."""
    if layer in (config.mlp_only_layers or ()) or not config.num_experts:
        return False
    return (layer + 1) % config.decoder_sparse_step == 0


def head_dim(config: Qwen3MoeConfig) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
