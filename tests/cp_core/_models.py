"""Models that are nothing but mixers, for what binding reads of one; and ranks without processes."""

from __future__ import annotations

from torch import nn

from cp_core import AttentionShape, CPAttention, Handoff, Topology
from cp_core.topology import Axis


class Mixer(nn.Module):
    def __init__(self, q_heads: int = 8, kv_heads: int = 4, roles: str = "qkv") -> None:
        super().__init__()
        self.heads = (q_heads, kv_heads)
        self.handoffs = nn.ModuleList(Handoff(role) for role in roles)
        self.cp = CPAttention(0.5)

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(*self.heads, 16, 16)


class Model(nn.Module):
    """Layers with a mixer each; ``declared`` overrides what it says about them."""

    def __init__(self, *heads: tuple[int, int], roles: str = "qkv", declared: dict[str, str] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Mixer(*pair, roles)}) for pair in heads or ((8, 4),))
        self.declared = declared

    def cp_mixers(self) -> dict[str, str]:
        if self.declared is not None:
            return self.declared
        return {f"layers.{i}.self_attn": "softmax" for i in range(len(self.layers))}


def ranks(cp: int) -> Topology:
    """A topology without processes: binding needs no communication."""
    axis = Axis(size=cp, rank=0)
    return Topology(cp=axis, dp_cp=axis)
