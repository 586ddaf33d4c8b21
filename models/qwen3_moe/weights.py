"""Qwen3-MoE's weight table. Parameters are named as in transformers; only the experts differ on disk (one by one).

E experts, H hidden, I an expert's intermediate size, N query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from transformers import Qwen3MoeConfig

from ..common.weights import WeightEntry, WeightTable, plain
from .config import head_dim, is_sparse


def weight_table(config: Qwen3MoeConfig) -> WeightTable:
    """The table of one config; without ``lm_head.weight`` when that is tied to the embedding."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    entries = [plain("model.embed_tokens.weight", vocab_shape)]
    for layer in range(config.num_hidden_layers):
        entries += _layer(config, layer)
    entries.append(plain("model.norm.weight", (config.hidden_size,)))
    if config.tie_word_embeddings:
        return WeightTable("qwen3_moe", tuple(entries), {"lm_head.weight": "model.embed_tokens.weight"})
    entries.append(plain("lm_head.weight", vocab_shape))
    return WeightTable("qwen3_moe", tuple(entries))


def _layer(config: Qwen3MoeConfig, layer: int) -> list[WeightEntry]:
    path, hidden = f"model.layers.{layer}", config.hidden_size
    entries = [plain(f"{path}.input_layernorm.weight", (hidden,)), *_attention(config, f"{path}.self_attn")]
    entries.append(plain(f"{path}.post_attention_layernorm.weight", (hidden,)))
    if not is_sparse(config, layer):
        size = config.intermediate_size
        entries += [plain(f"{path}.mlp.{name}_proj.weight", (size, hidden)) for name in ("gate", "up")]
        return [*entries, plain(f"{path}.mlp.down_proj.weight", (hidden, size))]
    experts, size = config.num_experts, config.moe_intermediate_size
    each = [f"{path}.mlp.experts.{expert}" for expert in range(experts)]
    return [
        *entries,
        plain(f"{path}.mlp.gate.weight", (experts, hidden)),
        WeightEntry(
            f"{path}.mlp.experts.gate_up_proj",
            (experts, 2 * size, hidden),
            tuple((f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in each),
            stacked=True,
        ),
        WeightEntry(
            f"{path}.mlp.experts.down_proj",
            (experts, hidden, size),
            tuple((f"{expert}.down_proj.weight",) for expert in each),
            stacked=True,
        ),
    ]


def _attention(config: Qwen3MoeConfig, path: str) -> list[WeightEntry]:
    hidden, size = config.hidden_size, head_dim(config)
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size  # N * D, K * D
    entries = []
    for name, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
        entries.append(plain(f"{path}.{name}_proj.weight", (rows, columns)))
        if config.attention_bias:
            entries.append(plain(f"{path}.{name}_proj.bias", (rows,)))
    return [*entries, *(plain(f"{path}.{name}_norm.weight", (size,)) for name in "qk")]
