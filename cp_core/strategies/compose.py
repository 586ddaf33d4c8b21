"""Softmax strategies as one composition of pieces, and the presets that users name.

P = C x U: a head exchange over U adjacent ranks, then a sequence phase over the C groups of them. ``local`` has
neither, ``ulysses`` is C = 1, ``all_gather`` is U = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..blocks import CausalMetadata, attention_blocks
from ..config import ContextParallelConfig
from ..kernels import Kernel, attend_blocks
from ..sequence import SequenceContext
from ..topology import Topology
from .base import MixerFacts
from .gather import SequenceGather
from .head_exchange import HeadExchange, kv_repeat_factor


@dataclass(frozen=True)
class ComposedStrategy:
    """Head exchange, sequence phase, attention, head exchange back. None leaves a piece out."""

    heads: HeadExchange | None = None
    sequence_phase: SequenceGather | None = None

    @property
    def ulysses_degree(self) -> int:
        """U."""
        return self.heads.axis.size if self.heads is not None else 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, sequence: SequenceContext, causal: bool, scale: float
    ) -> Tensor:
        """See ``AttentionStrategy.attend``."""
        start, stop = sequence.ranges[sequence.rank]
        if self.heads is not None:  # [B, N, T, D] -> [B, N/U, U*T, D]
            q, k, v = self.heads.scatter(q, k, v)
            tokens = q.shape[2]  # the U ranks are adjacent, so theirs is one aligned run of the sequence
            start, stop = start // tokens * tokens, (start // tokens + 1) * tokens
        meta = CausalMetadata(start, stop, start, stop, causal)
        if self.sequence_phase is not None:  # [B, K, T, D] -> [B, K, S, D]
            k, v = self.sequence_phase(k, v)
            meta = CausalMetadata(start, stop, 0, sequence.padded_length, causal)
        out = attend_blocks(q, k, v, attention_blocks(meta, sequence.rows), kernel, scale)
        return self.heads.gather(out) if self.heads is not None else out


def local(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """One rank holds the whole sequence."""
    return ComposedStrategy()


def all_gather(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """Local queries, gathered keys and values. Any number of heads."""
    return ComposedStrategy(sequence_phase=SequenceGather(topology.cp))


def ulysses(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """The whole sequence of N / P heads a rank.

    Raises:
        ValueError: heads that do not divide, or a degree other than the cp size.
    """
    size = topology.cp.size
    if config.ulysses_degree not in (None, size):
        raise ValueError(
            f"{facts.path}: ulysses_degree={config.ulysses_degree} with algorithm 'ulysses' must be the cp size "
            f"{size}: leave it out, or use algorithm 'hybrid'"
        )
    return ComposedStrategy(heads=HeadExchange(topology.cp, check_heads(config, facts, size)))


def check_heads(config: ContextParallelConfig, facts: MixerFacts, degree: int) -> int:
    """Refuse heads that cannot be spread over ``degree`` ranks; else how often kv heads must be repeated.

    Raises:
        ValueError: with the head counts and the alternatives.
    """
    q_heads, kv_heads = facts.q_heads, facts.kv_heads
    fitting = [d for d in range(1, degree) if degree % d == 0 and q_heads % d == 0 and kv_heads % d == 0]
    smaller = f"a cp size of {' or '.join(map(str, fitting))}"
    if q_heads % degree:
        raise ValueError(
            f"{facts.path}: num_attention_heads={q_heads} is not divisible by the ulysses degree {degree}: use "
            f"algorithm 'all_gather', or {smaller}"
        )
    if kv_heads % degree == 0:
        return 1
    factor = kv_repeat_factor(q_heads, kv_heads, degree) if kv_heads < degree else None
    if config.kv_head_policy == "repeat" and factor is not None:
        return factor
    repeat = f", or kv_head_policy='repeat' (each kv head travels {factor} times)" if factor is not None else ""
    raise ValueError(
        f"{facts.path}: num_key_value_heads={kv_heads} is not divisible by the ulysses degree {degree}: use algorithm "
        f"'all_gather', or {smaller}{repeat}"
    )
