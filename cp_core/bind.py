"""Binding: give every declared mixer of a model its strategy and kernel, or refuse before any forward.

A model declares its mixers: ``cp_mixers() -> {module path: kind}``. Each mixer has a ``cp`` module (``CPAttention``)
and says what its own parameters hold: ``attention_shape() -> AttentionShape``. ``resolve`` decides and changes
nothing; ``bind_context_parallel`` resolves all mixers first and then installs, all or none.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from .attention import CPAttention
from .config import KINDS, ContextParallelConfig
from .cost import AttentionShape
from .device import device_type
from .handoff import Handoff
from .kernels import KERNELS, KernelRequest
from .pending import Ledger
from .report import ResolvedCP, format_report
from .rules import ASYNC_REMEDY, ASYNC_RULES, RULES, STRATEGY_RULES, Proposal, Rule, broken
from .strategies import STRATEGIES, MixerFacts
from .topology import Topology

logger = logging.getLogger("cp_core")


class CPModel(Protocol):
    """What binding asks of a model (an ``nn.Module``)."""

    def cp_mixers(self) -> dict[str, str]:
        """Every layer that mixes tokens: module path -> ``softmax | mla | dsa | gdn | kda``."""
        ...


class Runtime(NamedTuple):
    """What a mixer was bound to; a second, different one is refused."""

    record: ResolvedCP
    topology: Topology


def bind_context_parallel(
    model: nn.Module, topology: Topology, config: ContextParallelConfig | None = None
) -> tuple[ResolvedCP, ...]:
    """Bind every mixer of ``model``; no communication, but hybrid's groups are made the first time.

    Binding again with the same result does nothing.

    Args:
        model: declares its mixers (``CPModel``).
        topology: of the mesh; cp size 1 binds the ``local`` strategy, whatever algorithm ``config`` names.
        config: None is ``all_gather`` + ``sync``.

    Returns:
        One record a mixer, in model order; also logged once by the first rank.

    Raises:
        ValueError: see ``resolve``; or a mixer is bound already, to something else. Nothing was changed then.
    """
    records = resolve(model, topology, config)
    mixers: list[tuple[Any, ResolvedCP]] = [(model.get_submodule(record.path), record) for record in records]
    planned: dict[int, Runtime] = {}
    for mixer, record in mixers:  # two paths may lead to one module
        runtime = Runtime(record, topology)
        _refuse_second(mixer.cp.runtime or planned.setdefault(id(mixer.cp), runtime), runtime)
    for mixer, record in mixers:
        _install(mixer, Runtime(record, topology))
    if topology.dp_cp.rank == 0:
        logger.info("context parallelism resolved:\n%s", format_report(records))
        for fallback in dict.fromkeys(record.fallback for record in records if record.fallback):
            logger.warning("schedule 'async' replaced by 'sync': %s", fallback)
    return records


def resolve(
    model: nn.Module, topology: Topology, config: ContextParallelConfig | None = None
) -> tuple[ResolvedCP, ...]:
    """What ``bind_context_parallel`` would do; changes nothing. Arguments as there.

    Raises:
        ValueError: a mixer that the model does not declare, an unknown strategy or kernel, or an illegal combination
            (``rules.py``); with the module path, the value and a remedy.
    """
    config = config or ContextParallelConfig()
    if not isinstance(config, ContextParallelConfig):
        raise ValueError(f"cp must be a ContextParallelConfig, got {type(config).__name__}")
    declare = getattr(model, "cp_mixers", None)
    if declare is None:
        raise ValueError(
            f"{type(model).__name__} does not declare its mixers: give it cp_mixers() -> {{module path: kind}}"
        )
    declared: dict[str, str] = declare()
    _refuse_undeclared(model, declared, topology.cp.size)
    _refuse_unmatched(config, declared)
    return tuple(
        _resolve_mixer(model.get_submodule(path), path, kind, topology, config) for path, kind in declared.items()
    )


def _refuse_undeclared(model: nn.Module, declared: dict[str, str], cp_size: int) -> None:
    """No layer may mix tokens of a shard on its own, and no declaration may lead nowhere."""
    modules = dict(model.named_modules(remove_duplicate=False))
    where = f"{type(model).__name__}.cp_mixers()"
    for path in declared:
        if path not in modules:
            raise ValueError(f"{path}: declared in {where}, but there is no such module")
    for path, module in modules.items():
        owner = path.rpartition(".")[0]
        if isinstance(module, CPAttention) and owner not in declared:
            raise ValueError(f"{owner or path}: a layer that mixes tokens is not declared in {where}")
        if isinstance(module, nn.MultiheadAttention) and cp_size > 1:
            raise ValueError(
                f"{path}: a layer that mixes tokens (MultiheadAttention) is not declared in {where}, and the core has "
                "no handler for it; write a mixer that calls CPAttention"
            )


def _refuse_unmatched(config: ContextParallelConfig, declared: dict[str, str]) -> None:
    """A kind may be absent from this model; a pattern that matches nothing is a mistake."""
    for key in config.per_layer:
        if key not in (*KINDS, *declared.values()) and not any(fnmatch.fnmatchcase(path, key) for path in declared):
            kinds, first = " | ".join(sorted(set(declared.values()))), next(iter(declared), "none")
            raise ValueError(
                f"per_layer[{key!r}] matches no layer; this model has kinds {kinds} and paths such as {first!r}"
            )


def _resolve_mixer(
    mixer: nn.Module, path: str, kind: str, topology: Topology, config: ContextParallelConfig
) -> ResolvedCP:
    call = getattr(mixer, "cp", None)
    if not isinstance(call, CPAttention) or call.kind != kind:
        raise ValueError(f"{path}: declared as a {kind!r} mixer, but its `cp` is {type(call).__name__}")
    shape = mixer.attention_shape()  # type: ignore[operator]
    handoffs = tuple(handoff.role for handoff in _handoffs(mixer))
    group = topology.cp.group
    proposal = Proposal(
        path, kind, config.for_layer(path, kind), topology.cp.size, shape, handoffs,
        backend=dist.get_backend(group) if group is not None else "", request=_request(mixer, shape, call, group),
    )  # fmt: skip
    _refuse(path, RULES, proposal)
    chosen = proposal.config
    strategy = STRATEGIES[kind, proposal.algorithm](chosen, topology, MixerFacts(path, kind, shape))
    proposal = replace(proposal, strategy=strategy)
    _refuse(path, STRATEGY_RULES, proposal)
    schedule, fallback = _schedule(proposal)
    return ResolvedCP(
        path=path,
        kind=kind,
        algorithm=proposal.algorithm,
        schedule=schedule,
        kernel=chosen.kernel,
        cp_size=topology.cp.size,
        ulysses_degree=strategy.ulysses_degree,
        sequence_degree=topology.cp.size // strategy.ulysses_degree,
        handoffs=handoffs,
        shape=shape,
        itemsize=next((p.element_size() for p in mixer.parameters()), 4),
        causal=call.causal,
        window=call.window,
        load_balance=chosen.load_balance and topology.cp.size > 1,
        fallback=fallback,
        strategy=strategy,
    )


def _request(mixer: nn.Module, shape: AttentionShape, call: CPAttention, group: Any) -> KernelRequest:
    """What the layer asks of its kernel; without groups (a recipe that is checked) no device is known."""
    weight = next(mixer.parameters(), torch.empty(0))
    device = weight.device.type
    if device == "meta":
        device = device_type() if group is not None else ""  # where it will lie
    return KernelRequest(device, weight.dtype, shape.qk_dim, shape.v_dim, call.causal, call.window, call.dropout)


def _schedule(proposal: Proposal) -> tuple[str, str]:
    """The schedule that will run, and what it replaces and why."""
    chosen = proposal.config
    if proposal.cp_size == 1 or chosen.schedule == "sync":
        return "sync", ""
    obstacle = broken(ASYNC_RULES, proposal)
    if obstacle is None:
        return "async", ""
    if chosen.async_fallback == "sync":
        return "sync", obstacle
    raise ValueError(f"{proposal.path}: {obstacle}{ASYNC_REMEDY}")


def _refuse(path: str, rules: tuple[Rule, ...], proposal: Proposal) -> None:
    message = broken(rules, proposal)
    if message is not None:
        raise ValueError(f"{path}: {message}")


def _handoffs(mixer: nn.Module) -> Iterable[Handoff]:
    return (module for module in mixer.modules() if isinstance(module, Handoff))


def _refuse_second(before: Runtime, runtime: Runtime) -> None:
    if replace(before.record, path=runtime.record.path) != runtime.record or before.topology != runtime.topology:
        raise ValueError(
            f"{runtime.record.path}: bound already, to {_named(before)}; a second runtime ({_named(runtime)}) would "
            "stack on it: build the model anew, or bind it once"
        )


def _named(runtime: Runtime) -> str:
    record = runtime.record
    return f"{record.algorithm} {record.schedule} at cp size {record.cp_size}"


def _install(mixer: Any, runtime: Runtime) -> None:
    call, record = mixer.cp, runtime.record
    if call.runtime is not None:
        return
    ledger = None
    if record.schedule == "async":
        ledger = Ledger(record.path)
        ledger.watch(mixer)
        for handoff in _handoffs(mixer):
            handoff.launch = call.launch
    call.bind(record.strategy, KERNELS[record.kernel](), record.cp_size, record.path, ledger)
    call.runtime = runtime
