"""What may be combined: the fail-fast table. One row a rule; read at bind time, before any forward.

Rules of the first table look at the config and the mixer's shape, those of the second at the strategy that was made.
Rules about the whole model (undeclared mixers, a second runtime) stand in ``bind.py``, those about a batch in
``attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .collectives import LACKING
from .config import ContextParallelConfig, did_you_mean
from .cost import AttentionShape
from .kernels import KERNELS, KernelRequest
from .strategies import STRATEGIES, AttentionStrategy, LaunchingStrategy
from .strategies.head_exchange import kv_repeat_factor
from .strategies.presets import HEADS_TRAVEL, SPLIT


@dataclass(frozen=True)
class Proposal:
    """How one mixer is about to be bound; what the rules look at and their messages quote."""

    path: str
    kind: str
    config: ContextParallelConfig
    cp_size: int
    shape: AttentionShape
    handoffs: tuple[str, ...] = ()
    backend: str = ""
    request: KernelRequest | None = None
    strategy: AttentionStrategy | LaunchingStrategy | None = None

    @property
    def algorithm(self) -> str:
        """What will run."""
        return self.config.algorithm if self.cp_size > 1 else "local"

    @property
    def known(self) -> bool:
        """Whether the registry has it, for this kind."""
        return (self.kind, self.algorithm) in STRATEGIES and (self.algorithm == "local") == (self.cp_size == 1)

    @property
    def algorithms(self) -> str:
        """What the registry has."""
        return " | ".join(name for kind, name in STRATEGIES if kind == self.kind and name != "local")

    @property
    def kernels(self) -> str:
        """What the registry has."""
        return " | ".join(KERNELS)

    @property
    def kernel_obstacle(self) -> str:
        """Why the kernel cannot do what the layer asks of it."""
        return KERNELS[self.config.kernel]().obstacle(self.request) if self.request is not None else ""

    @property
    def degree(self) -> int:
        """Ranks that would exchange heads."""
        if self.algorithm in SPLIT:
            return self.config.ulysses_degree or 1
        return self.cp_size if self.algorithm in HEADS_TRAVEL else 1

    @property
    def kv_repeat(self) -> int | None:
        """How often kv heads must be repeated, if that helps."""
        few = self.shape.kv_heads < self.degree
        return kv_repeat_factor(self.shape.q_heads, self.shape.kv_heads, self.degree) if few else None

    @property
    def inner_degrees(self) -> list[int]:
        """What an algorithm that splits the cp axis could be given."""
        return [d for d in range(2, self.cp_size) if self.cp_size % d == 0]

    @property
    def legal_degrees(self) -> str:
        """For an algorithm that splits the cp axis."""
        degrees = ", ".join(map(str, self.inner_degrees))
        return f"legal: {degrees}" if degrees else f"cp size {self.cp_size} has no such divisor"

    @property
    def remedy(self) -> str:
        """What to do about heads that do not divide."""
        heads = (self.shape.q_heads, self.shape.kv_heads)
        fits = [d for d in self.inner_degrees if d < self.degree and not any(n % d for n in heads)]
        with_degree = "" if self.algorithm in SPLIT else "algorithm 'hybrid' with "
        return "algorithm 'all_gather' or 'ring'" + (f", or {with_degree}ulysses_degree={fits[-1]}" if fits else "")

    @property
    def instead_of_degree(self) -> str:
        """What else there is where ulysses was given a degree of its own."""
        degrees = ", ".join(map(str, self.inner_degrees))
        return f", or use algorithm 'hybrid' with one of {degrees}" if degrees else ""

    @property
    def suggestion(self) -> str:
        """For a name with a slip in it."""
        return did_you_mean(self.algorithm, self.algorithms.split(" | "))

    @property
    def repeat_remedy(self) -> str:
        """What else to do about too few kv heads."""
        factor = self.kv_repeat
        return f", or kv_head_policy='repeat' (each kv head travels {factor} times)" if factor is not None else ""

    @property
    def lacking(self) -> str:
        """Collectives that the strategy needs and the backend does not have."""
        needs = getattr(self.strategy, "collectives", ())
        return ", ".join(name for name in needs if name in LACKING.get(self.backend, ()))


class Rule(NamedTuple):
    """One row: what it is about, when it is broken, and the message, formatted with the proposal as ``p``."""

    name: str
    broken: Callable[[Proposal], bool]
    message: str


RULES = (
    Rule(
        "algorithm",
        lambda p: not p.known,
        "algorithm {p.algorithm!r} is not available for {p.kind!r} layers; available: {p.algorithms}{p.suggestion}",
    ),
    Rule(
        "kernel",
        lambda p: p.config.kernel not in KERNELS,
        "kernel {p.config.kernel!r} is not available; available: {p.kernels}",
    ),
    Rule(
        "kernel cannot",
        lambda p: bool(p.kernel_obstacle),
        "kernel {p.config.kernel!r} cannot run this layer: {p.kernel_obstacle}",
    ),
    Rule(
        "degree without a head exchange",
        lambda p: p.config.ulysses_degree is not None and p.algorithm in ("all_gather", "ring"),
        "ulysses_degree={p.config.ulysses_degree} has no meaning with {p.algorithm!r}; leave it out",
    ),
    Rule(
        "ulysses degree",
        lambda p: p.algorithm == "ulysses" and p.config.ulysses_degree not in (None, p.cp_size),
        "ulysses_degree={p.config.ulysses_degree} with algorithm 'ulysses' must be the cp size {p.cp_size}: leave it "
        "out{p.instead_of_degree}",
    ),
    Rule(
        "hybrid degree missing",
        lambda p: p.algorithm in SPLIT and p.config.ulysses_degree is None,
        "algorithm {p.algorithm!r} needs ulysses_degree, a divisor of the cp size between 1 and {p.cp_size}; "
        "{p.legal_degrees}; without it use 'all_gather', 'ring' or 'ulysses'",
    ),
    Rule(
        "hybrid degree range",
        lambda p: p.algorithm in SPLIT and not 1 < p.degree < p.cp_size,
        "ulysses_degree={p.degree} with algorithm {p.algorithm!r} must lie between 1 and the cp size {p.cp_size}, both "
        "excluded ({p.legal_degrees}); the ends are 'all_gather' (or 'ring') and 'ulysses'",
    ),
    Rule(
        "hybrid degree divides",
        lambda p: p.algorithm in SPLIT and p.cp_size % p.degree != 0,
        "ulysses_degree={p.degree} does not divide the cp size {p.cp_size}; {p.legal_degrees}",
    ),
    Rule(
        "query heads",
        lambda p: p.shape.q_heads % p.degree != 0,
        "num_attention_heads={p.shape.q_heads} is not divisible by the ulysses degree {p.degree}: use {p.remedy}",
    ),
    Rule(
        "kv heads",
        lambda p: p.shape.kv_heads % p.degree != 0 and (p.config.kv_head_policy != "repeat" or p.kv_repeat is None),
        "num_key_value_heads={p.shape.kv_heads} is not divisible by the ulysses degree {p.degree}: use {p.remedy}"
        "{p.repeat_remedy}",
    ),
    Rule(
        "load balance",
        lambda p: p.config.load_balance and p.algorithm in HEADS_TRAVEL,
        "load_balance=True is for algorithms whose heads stay, not for {p.algorithm!r}: use 'all_gather' or 'ring', or "
        "load_balance=False (in per_layer for layers whose algorithm stands there)",
    ),
)

STRATEGY_RULES = (
    Rule(
        "backend",
        lambda p: bool(p.lacking),
        "algorithm {p.algorithm!r} needs {p.lacking}, which backend {p.backend!r} does not have; use another backend, "
        "or an algorithm that does without",
    ),
)

ASYNC_RULES = (  # with async_fallback="sync" these replace the schedule instead
    Rule(
        "async handoffs",
        lambda p: sorted(p.handoffs) != ["k", "q", "v"],
        "schedule 'async' needs one Handoff each for q, k and v in the mixer, found: {p.handoffs}",
    ),
    Rule(
        "async strategy",
        lambda p: not isinstance(p.strategy, LaunchingStrategy),
        "schedule 'async' needs a strategy that can launch (LaunchingStrategy); {p.algorithm!r} cannot",
    ),
)
ASYNC_REMEDY = "; use schedule='sync', or async_fallback='sync'"


def broken(rules: tuple[Rule, ...], proposal: Proposal) -> str | None:
    """The message of the first broken rule, without the path; None if all hold."""
    for rule in rules:
        if rule.broken(proposal):
            return rule.message.format(p=proposal)
    return None
