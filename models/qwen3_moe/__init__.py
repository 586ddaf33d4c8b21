"""Qwen3-MoE: softmax attention with grouped heads and q/k norms, dense or sparse MLP per layer."""
