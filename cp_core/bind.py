"""Binding: give every declared mixer of a model its strategy and kernel, or refuse before any forward.

A model declares its mixers: ``cp_mixers() -> {module path: kind}``. Each mixer has a ``cp`` module (``CPAttention``)
and says how many heads its own parameters hold: ``attention_heads() -> (q_heads, kv_heads)``.
"""

from __future__ import annotations

import fnmatch
import logging
from typing import Protocol

from torch import nn

from .attention import CPAttention
from .config import KINDS, ContextParallelConfig
from .handoff import Handoff
from .kernels import KERNELS
from .report import ResolvedCP, format_report
from .strategies import STRATEGIES, MixerFacts
from .topology import Topology

logger = logging.getLogger("cp_core")


class CPModel(Protocol):
    """What binding asks of a model (an ``nn.Module``)."""

    def cp_mixers(self) -> dict[str, str]:
        """Every layer that mixes tokens: module path -> ``softmax | mla | dsa | gdn | kda``."""
        ...


def bind_context_parallel(
    model: nn.Module, topology: Topology, config: ContextParallelConfig | None = None
) -> tuple[ResolvedCP, ...]:
    """Bind every mixer of ``model``; no communication, no groups made.

    Args:
        model: declares its mixers (``CPModel``).
        topology: of the mesh; cp size 1 binds the ``local`` strategy, whatever algorithm ``config`` names.
        config: None is ``all_gather`` + ``sync``.

    Returns:
        One record a mixer, in model order; also logged once by the first rank.

    Raises:
        ValueError: a mixer that the model does not declare, an unknown strategy or kernel, or an illegal combination;
            with the module path, the value and a remedy.
    """
    config = config or ContextParallelConfig()
    if not isinstance(config, ContextParallelConfig):
        raise ValueError(f"cp must be a ContextParallelConfig, got {type(config).__name__}")
    declared: dict[str, str] = model.cp_mixers()  # type: ignore[operator]
    _refuse_undeclared(model, declared)
    _refuse_unmatched(config, declared)
    records = [_bind_mixer(model.get_submodule(path), path, kind, topology, config) for path, kind in declared.items()]
    if topology.dp_cp.rank == 0:
        logger.info("context parallelism resolved:\n%s", format_report(records))
    return tuple(records)


def _refuse_undeclared(model: nn.Module, declared: dict[str, str]) -> None:
    for path, module in model.named_modules():
        owner = path.rpartition(".")[0]
        if isinstance(module, CPAttention) and owner not in declared:
            raise ValueError(
                f"{owner or path}: a layer that mixes tokens is not declared in {type(model).__name__}.cp_mixers()"
            )


def _refuse_unmatched(config: ContextParallelConfig, declared: dict[str, str]) -> None:
    """A kind may be absent from this model; a pattern that matches nothing is a mistake."""
    for key in config.per_layer:
        if key not in (*KINDS, *declared.values()) and not any(fnmatch.fnmatchcase(path, key) for path in declared):
            kinds, first = " | ".join(sorted(set(declared.values()))), next(iter(declared), "none")
            raise ValueError(
                f"per_layer[{key!r}] matches no layer; this model has kinds {kinds} and paths such as {first!r}"
            )


def _bind_mixer(
    mixer: nn.Module, path: str, kind: str, topology: Topology, config: ContextParallelConfig
) -> ResolvedCP:
    call = getattr(mixer, "cp", None)
    if not isinstance(call, CPAttention) or call.kind != kind:
        raise ValueError(f"{path}: declared as a {kind!r} mixer, but its `cp` is {type(call).__name__}")
    chosen = config.for_layer(path, kind)
    algorithm = chosen.algorithm if topology.cp.size > 1 else "local"
    if (kind, algorithm) not in STRATEGIES or (algorithm == "local" and topology.cp.size > 1):
        known = " | ".join(name for k, name in STRATEGIES if k == kind and name != "local")
        raise ValueError(f"{path}: algorithm {algorithm!r} is not available for {kind!r} layers; available: {known}")
    if chosen.kernel not in KERNELS:
        raise ValueError(f"{path}: kernel {chosen.kernel!r} is not available; available: {' | '.join(KERNELS)}")
    if topology.cp.size > 1:
        _refuse_unavailable(path, algorithm, chosen)
    facts = MixerFacts(path, kind, *mixer.attention_heads())  # type: ignore[operator]
    strategy = STRATEGIES[kind, algorithm](chosen, topology, facts)
    kernel = KERNELS[chosen.kernel]()
    call.bind(strategy, kernel, topology.cp.size)
    return ResolvedCP(
        path=path,
        kind=kind,
        algorithm=algorithm,
        schedule="sync",
        kernel=chosen.kernel,
        cp_size=topology.cp.size,
        ulysses_degree=strategy.ulysses_degree,
        sequence_degree=topology.cp.size // strategy.ulysses_degree,
        handoffs=tuple(module.role for module in mixer.children() if isinstance(module, Handoff)),
    )


def _refuse_unavailable(path: str, algorithm: str, chosen: ContextParallelConfig) -> None:
    """What a config can say and this version cannot do yet."""
    if chosen.schedule != "sync":
        raise ValueError(f"{path}: schedule 'async' is not available in this version; use schedule='sync'")
    if chosen.load_balance:
        raise ValueError(f"{path}: load_balance is not available in this version; use load_balance=False")
    if chosen.ulysses_degree is not None and algorithm == "all_gather":
        raise ValueError(
            f"{path}: ulysses_degree={chosen.ulysses_degree} has no meaning with 'all_gather'; leave it out"
        )
