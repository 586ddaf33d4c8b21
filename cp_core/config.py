"""``ContextParallelConfig``: which strategy each kind of layer uses. Data only; nothing here communicates."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Algorithm(StrEnum):
    """How softmax attention is spread over the ranks of a context-parallel group."""

    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"
    RING = "ring"
    HYBRID_RING = "hybrid_ring"


class Schedule(StrEnum):
    """Where q, k and v are sent off: ``sync`` at attention, ``async`` at their handoffs. Both wait at attention."""

    SYNC = "sync"
    ASYNC = "async"


_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": tuple(Schedule),
    "async_fallback": ("error", "sync"),
    "kv_head_policy": ("error", "repeat"),
}
_PER_LAYER_KEYS = (
    "algorithm", "schedule", "ulysses_degree", "load_balance", "async_fallback", "kv_head_policy", "kernel",
)  # fmt: skip
KINDS = ("softmax", "mla", "dsa", "gdn", "kda")
LINEAR_KINDS = ("gdn", "kda")  # recurrent mixers: their default algorithm is `linear_attention`


@dataclass(frozen=True)
class ContextParallelConfig:
    """The choice of strategy, kernel and fallbacks; frozen. ``algorithm`` and ``kernel`` may name registered additions.

    Attributes:
        algorithm: ``all_gather | ulysses | hybrid | ring | hybrid_ring`` or a registered name.
        schedule: ``sync | async``.
        ulysses_degree: hybrid and hybrid_ring: ranks that exchange heads, ``1 < degree < cp``; ulysses: None or the
            cp size.
        load_balance: head-tail balance of causal work (all_gather and ring).
        async_fallback: what to do where async is impossible: ``error``, or ``sync`` with a log line.
        kv_head_policy: KV heads fewer than the degree: ``error``, or ``repeat`` each as few times as will do.
        linear_attention: the algorithm of recurrent layers (gdn, kda).
        kernel: how a block of attention is computed.
        per_layer: ``{kind or module path pattern: {field: value}}``; path beats kind beats top level.

    Raises:
        ValueError: a value outside its choices, with the field, the value and the choices.
    """

    algorithm: str = "all_gather"
    schedule: str = "sync"
    ulysses_degree: int | None = None
    load_balance: bool = False
    async_fallback: str = "error"
    kv_head_policy: str = "error"
    linear_attention: str = "state_p2p"
    kernel: str = "sdpa"
    per_layer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, legal in _CHOICES.items():
            value = getattr(self, name)
            if value not in legal:
                raise ValueError(f"{name}={value!r} is not one of {' | '.join(legal)}")
        for name in ("algorithm", "schedule", "async_fallback", "kv_head_policy", "linear_attention", "kernel"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"{name}={value!r} must be a string")
            object.__setattr__(self, name, str(value))  # enums become plain strings
        degree = self.ulysses_degree
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise ValueError(f"ulysses_degree={degree!r} must be a positive integer or None")
        if not isinstance(self.load_balance, bool):
            raise ValueError(f"load_balance={self.load_balance!r} must be True or False")
        if not isinstance(self.per_layer, Mapping):
            raise ValueError(f"per_layer={self.per_layer!r} must map layer kinds or path patterns to their settings")
        for key, fields in self.per_layer.items():
            self._check_layer(key, fields)

    def _check_layer(self, key: str, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"per_layer[{key!r}]={fields!r} must be a mapping such as {{'algorithm': 'ulysses'}}")
        unknown = sorted(set(fields) - set(_PER_LAYER_KEYS))
        if unknown:
            raise ValueError(
                f"per_layer[{key!r}]: unknown field {unknown[0]!r}; legal: {', '.join(_PER_LAYER_KEYS)}"
                + did_you_mean(unknown[0], _PER_LAYER_KEYS)
            )
        try:
            dataclasses.replace(self, per_layer={}, **fields)
        except ValueError as error:
            raise ValueError(f"per_layer[{key!r}]: {error}") from None

    @classmethod
    def from_degree(cls, degree: int, cp_size: int, **fields: Any) -> ContextParallelConfig:
        """Settings of the old style, where one number said the strategy: 1 is all_gather, cp ulysses, else hybrid.

        Args:
            degree: ranks that exchange heads; divides ``cp_size``.
            cp_size: ranks that share a sequence.
            fields: further fields of the config.

        Raises:
            ValueError: a degree that is none of these.
        """
        for name, value in (("degree", degree), ("cp_size", cp_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if cp_size % degree:
            raise ValueError(f"degree={degree} does not divide cp_size={cp_size}; use a divisor of it")
        if degree == 1:
            return cls(algorithm="all_gather", **fields)
        if degree == cp_size:
            return cls(algorithm="ulysses", **fields)
        return cls(algorithm="hybrid", ulysses_degree=degree, **fields)

    def for_layer(self, path: str, kind: str) -> ContextParallelConfig:
        """The settings of one mixer: top level, overridden by its kind, overridden by patterns that match its path.

        Args:
            path: module path, such as ``model.layers.3.self_attn``.
            kind: ``softmax | mla | dsa | gdn | kda``.

        Raises:
            ValueError: two patterns match the path and disagree.
        """
        chosen: dict[str, Any] = {"algorithm": self.linear_attention} if kind in LINEAR_KINDS else {}
        chosen.update(self.per_layer.get(kind, {}))
        by_path: dict[str, tuple[str, Any]] = {}
        for pattern, fields in self.per_layer.items():
            if pattern == kind or not fnmatch.fnmatchcase(path, pattern):
                continue
            for name, value in fields.items():
                if name in by_path and by_path[name][1] != value:
                    other, before = by_path[name]
                    raise ValueError(
                        f"{path}: per_layer {other!r} says {name}={before!r} and {pattern!r} says {name}={value!r}; "
                        "make the patterns disjoint or let them agree"
                    )
                by_path[name] = (pattern, value)
        chosen.update({name: value for name, (_, value) in by_path.items()})
        return dataclasses.replace(self, per_layer={}, **chosen)


def did_you_mean(name: str, choices: Sequence[str]) -> str:
    """The end of a message about a name with a slip in it; empty where no choice is near."""
    near = difflib.get_close_matches(name.lower(), choices, 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
