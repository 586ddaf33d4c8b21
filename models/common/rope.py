"""Rotary position embedding with every ``rope_parameters`` type that transformers can compute.

B batch, T local tokens, N heads, D head dim.

The frequencies come from transformers' registry. They are no buffer: ``model.to(bfloat16)`` must not round them and
the meta device must not lose them. Types whose frequencies depend on the sequence (dynamic, longrope) use the largest
position of the *global* batch, so that every rank of a cp group turns by the same angle; unlike transformers they
keep no memory of longer batches seen before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LENGTH_DEPENDENT = ("dynamic", "longrope")


class RotaryEmbedding(nn.Module):
    """cos and sin of every token's angles.

    Args:
        config: has ``rope_parameters`` (``rope_type``, ``rope_theta``, ...) and ``head_dim``.

    Raises:
        ValueError: a rope type that transformers does not know.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.rope_type: str = config.rope_parameters["rope_type"]
        if self.rope_type != "default" and self.rope_type not in ROPE_INIT_FUNCTIONS:
            known = " | ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise ValueError(f"rope_parameters.rope_type={self.rope_type!r} is not one of {known}")
        self.config = config
        self._fixed = None if self.rope_type in _LENGTH_DEPENDENT else self._frequencies(None)

    def _frequencies(self, length: int | None) -> tuple[Tensor, float]:
        """Inverse frequencies ``[D / 2]`` (fp32, CPU) and the factor of cos and sin."""
        with torch.device("cpu"):
            if self.rope_type != "default":
                return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, torch.device("cpu"), seq_len=length)
            head_dim = getattr(self.config, "head_dim", None)
            head_dim = head_dim or self.config.hidden_size // self.config.num_attention_heads
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return self.config.rope_parameters["rope_theta"] ** -exponents, 1.0

    def forward(self, position_ids: Tensor, max_position: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles are made in fp32, or fp64 for fp64 models.

        Args:
            position_ids: ``[B, T]`` int64.
            max_position: the largest position of the global batch.
            dtype: of the result.

        Returns:
            cos and sin, each ``[B, 1, T, D]``.
        """
        inv_freq, factor = self._fixed if self._fixed is not None else self._frequencies(max_position + 1)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = position_ids.unsqueeze(-1).to(wide) * inv_freq.to(position_ids.device, wide)  # [B, T, D / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [B, 1, T, D]
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[B, N, T, D]``; dims i and i + D / 2 are a pair (the "half" layout)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
