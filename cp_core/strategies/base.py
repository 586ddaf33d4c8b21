"""What a strategy is, and the registry that finds one by (kind of layer, algorithm).

B batch, N query heads, K kv heads, T local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..config import ContextParallelConfig
from ..cost import AttentionShape, Cost, Load
from ..kernels import Kernel
from ..pending import Exchange, Pending
from ..scoring import Scoring
from ..sequence import SequenceContext
from ..topology import Topology


class AttentionStrategy(Protocol):
    """How attention over a sharded sequence is computed. Knows tensors, groups and offsets, no kernel.

    The plain form, which is all that a strategy from outside must have; it runs with the sync schedule only.
    """

    @property
    def ulysses_degree(self) -> int:
        """Ranks that exchange heads; 1 where heads stay."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, sequence: SequenceContext, scoring: Scoring
    ) -> Tensor:
        """Attention of the local queries over the whole sequence; collective over the cp axis.

        Args:
            q: ``[B, N, T, D]``, the rank's contiguous tokens.
            k: ``[B, K, T, D]``; v likewise, its last dim may differ.
            kernel: computes the blocks.
            sequence: documents, padding and ranges of this batch.
            scoring: scale, causality, window, mask and dropout.

        Returns:
            ``[B, N, T, D]``, the same contiguous tokens, as wide as v. Gradients of k and v are whole: what other
            ranks' queries contributed has been added.
        """
        ...


@runtime_checkable
class LaunchingStrategy(Protocol):
    """A strategy that says what travels of each tensor before attention, so that it can start early."""

    @property
    def ulysses_degree(self) -> int:
        """As in ``AttentionStrategy``."""
        ...

    def exchange(self, role: str, sequence: SequenceContext, scoring: Scoring) -> Exchange | None:
        """What travels of ``q``, ``k`` or ``v`` first; None: nothing."""
        ...

    def attend_pending(
        self, q: Pending, k: Pending, v: Pending, kernel: Kernel, sequence: SequenceContext, scoring: Scoring
    ) -> Tensor:
        """As ``AttentionStrategy.attend``, of tensors that are under way."""
        ...


@runtime_checkable
class CostedStrategy(Protocol):
    """A strategy that states its cost."""

    def cost(self, shape: AttentionShape, load: Load) -> Cost:
        """What rank ``load.rank`` receives and computes for one batch; needs no groups."""
        ...


@dataclass(frozen=True)
class MixerFacts:
    """What a strategy may need to know of the layer that it is bound to; read from its parameters."""

    path: str
    kind: str
    shape: AttentionShape


StrategyFactory = Callable[[ContextParallelConfig, Topology, MixerFacts], "AttentionStrategy | LaunchingStrategy"]
STRATEGIES: dict[tuple[str, str], StrategyFactory] = {}


def register_strategy(kind: str, algorithm: str, factory: StrategyFactory) -> None:
    """Make a strategy available as ``ContextParallelConfig(algorithm=...)`` for one kind of layer.

    Args:
        kind: ``softmax | mla | dsa | gdn | kda``.
        algorithm: its name in a config.
        factory: called once a layer at bind time, also without groups (when a recipe is checked); refuses what it
            cannot do with ``ValueError``.

    Raises:
        ValueError: the pair is taken.
    """
    if (kind, algorithm) in STRATEGIES:
        raise ValueError(f"strategy {algorithm!r} for {kind!r} layers is registered already")
    STRATEGIES[kind, algorithm] = factory
