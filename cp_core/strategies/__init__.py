"""Context-parallel strategies. The names below are presets of one composition; ``register_strategy`` adds more."""

from .base import STRATEGIES, AttentionStrategy, MixerFacts, StrategyFactory, register_strategy
from .compose import ComposedStrategy, all_gather, local, ulysses

register_strategy("softmax", "local", local)
register_strategy("softmax", "all_gather", all_gather)
register_strategy("softmax", "ulysses", ulysses)

__all__ = ["STRATEGIES", "AttentionStrategy", "ComposedStrategy", "MixerFacts", "StrategyFactory", "register_strategy"]
