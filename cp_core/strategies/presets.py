"""The strategies that users name, as presets of one composition, and the rules that each one's shape brings along."""

from __future__ import annotations

from ..config import Algorithm, ContextParallelConfig
from ..topology import Axis, Topology
from .base import MixerFacts
from .compose import ComposedStrategy
from .gather import SequenceGather
from .head_exchange import HeadExchange, kv_repeat_factor
from .query_swap import HalfSwap

SPLIT = (Algorithm.HYBRID, Algorithm.HYBRID_RING)  # take a degree between 1 and the cp size
HEADS_TRAVEL = (Algorithm.ULYSSES, *SPLIT)


def local(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """One rank holds the whole sequence."""
    return ComposedStrategy()


def all_gather(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """Local queries, gathered keys and values. Any number of heads."""
    return ComposedStrategy(gather=SequenceGather(topology.cp), swap=_swap(config, topology.cp))


def ring(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """Local queries; keys and values go round. Any number of heads."""
    return ComposedStrategy(ring=topology.cp, swap=_swap(config, topology.cp))


def ulysses(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """The whole sequence of N / P heads a rank."""
    return ComposedStrategy(heads=_heads(config, topology.cp, facts))


def hybrid(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """Heads exchanged in groups of U adjacent ranks, keys and values gathered across the groups."""
    inner, outer = topology.split_cp(config.ulysses_degree or 1)
    return ComposedStrategy(heads=_heads(config, inner, facts), gather=SequenceGather(outer))


def hybrid_ring(config: ContextParallelConfig, topology: Topology, facts: MixerFacts) -> ComposedStrategy:
    """Heads exchanged in groups of U adjacent ranks; keys and values go round across the groups."""
    inner, outer = topology.split_cp(config.ulysses_degree or 1)
    return ComposedStrategy(heads=_heads(config, inner, facts), ring=outer)


def _swap(config: ContextParallelConfig, axis: Axis) -> HalfSwap | None:
    return HalfSwap(axis) if config.load_balance else None


def _heads(config: ContextParallelConfig, axis: Axis, facts: MixerFacts) -> HeadExchange:
    kv_heads = facts.shape.kv_heads
    if kv_heads % axis.size == 0:
        return HeadExchange(axis)
    factor = kv_repeat_factor(facts.shape.q_heads, kv_heads, axis.size)
    assert factor is not None  # a rule
    return HeadExchange(axis, factor)


PRESETS = {
    "local": local,
    Algorithm.ALL_GATHER.value: all_gather,
    Algorithm.ULYSSES.value: ulysses,
    Algorithm.HYBRID.value: hybrid,
    Algorithm.RING.value: ring,
    Algorithm.HYBRID_RING.value: hybrid_ring,
}
