"""One Qwen3-MoE decoder layer: attention, then experts (or one feed-forward layer), each with a norm before it."""

from __future__ import annotations

from torch import Tensor
from transformers import Qwen3MoeConfig

from cp_core import SequenceContext

from ..common.experts import Experts
from ..common.mlp import GatedMLP
from ..common.moe import SparseMoeBlock, TopKRouter
from ..common.norm import RMSNorm
from ..common.parallelize import CheckpointedLayer
from .attention import Qwen3MoeAttention
from .config import is_sparse


class Qwen3MoeDecoderLayer(CheckpointedLayer):
    """B batch, T local tokens, H hidden, E experts."""

    def __init__(self, config: Qwen3MoeConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Qwen3MoeAttention(config)
        self.mlp = _sparse_block(config) if is_sparse(config, index) else _dense_block(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def layer_forward(  # type: ignore[override]
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], sequence: SequenceContext
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, T, H]`` -> hidden ``[B, T, H]`` and router logits ``[B * T, E]`` (None in a dense layer)."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, sequence)
        normed = self.post_attention_layernorm(hidden)
        out, router_logits = self.mlp(normed) if isinstance(self.mlp, SparseMoeBlock) else (self.mlp(normed), None)
        return hidden + out, router_logits


def _dense_block(config: Qwen3MoeConfig) -> GatedMLP:
    return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


def _sparse_block(config: Qwen3MoeConfig) -> SparseMoeBlock:
    return SparseMoeBlock(
        TopKRouter(config.num_experts, config.hidden_size, config.num_experts_per_tok, config.norm_topk_prob),
        Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, config.hidden_act),
    )
