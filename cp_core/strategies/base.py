"""What a strategy is, and the registry that finds one by (kind of layer, algorithm).

B batch, N query heads, K kv heads, T local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..config import ContextParallelConfig
from ..kernels import Kernel
from ..sequence import SequenceContext
from ..topology import Topology


class AttentionStrategy(Protocol):
    """How attention over a sharded sequence is computed. Knows tensors, groups and offsets, no kernel."""

    @property
    def ulysses_degree(self) -> int:
        """Ranks that exchange heads; 1 where heads stay."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, sequence: SequenceContext, causal: bool, scale: float
    ) -> Tensor:
        """Attention of the local queries over the whole sequence; collective over the cp axis.

        Args:
            q: ``[B, N, T, D]``, the rank's contiguous tokens.
            k: ``[B, K, T, D]``; v likewise.
            kernel: computes the blocks.
            sequence: documents, padding and ranges of this batch.
            causal: a query sees no later key.
            scale: factor of the scores.

        Returns:
            ``[B, N, T, D]``, the same contiguous tokens. Gradients of k and v are whole: what other ranks' queries
            contributed has been added.
        """
        ...


@dataclass(frozen=True)
class MixerFacts:
    """What a strategy may need to know of the layer that it is bound to; read from its parameters."""

    path: str
    kind: str
    q_heads: int
    kv_heads: int


StrategyFactory = Callable[[ContextParallelConfig, Topology, MixerFacts], AttentionStrategy]
STRATEGIES: dict[tuple[str, str], StrategyFactory] = {}


def register_strategy(kind: str, algorithm: str, factory: StrategyFactory) -> None:
    """Make a strategy available as ``ContextParallelConfig(algorithm=...)`` for one kind of layer.

    Args:
        kind: ``softmax | mla | dsa | gdn | kda``.
        algorithm: its name in a config.
        factory: called once a layer at bind time; refuses what it cannot do with ``ValueError``.

    Raises:
        ValueError: the pair is taken.
    """
    if (kind, algorithm) in STRATEGIES:
        raise ValueError(f"strategy {algorithm!r} for {kind!r} layers is registered already")
    STRATEGIES[kind, algorithm] = factory
