"""Context-parallel strategies. The names below are presets of one composition; ``register_strategy`` adds more."""

from .base import STRATEGIES, AttentionStrategy, LaunchingStrategy, MixerFacts, StrategyFactory, register_strategy
from .compose import ComposedStrategy
from .presets import PRESETS

for _name, _factory in PRESETS.items():
    register_strategy("softmax", _name, _factory)

__all__ = [
    "STRATEGIES",
    "AttentionStrategy",
    "ComposedStrategy",
    "LaunchingStrategy",
    "MixerFacts",
    "StrategyFactory",
    "register_strategy",
]
