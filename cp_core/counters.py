"""Measuring from outside the strategies: what c10d really moves, and how long computing stands still for it.

    with count_communication() as seen:
        model(**local).loss.backward()
    seen.bytes, seen.messages, seen.calls["all_gather"]

Calls, messages and bytes are counted at the dispatcher; point-to-point messages count too (torch's ``CommDebugMode``
leaves them out). ``measure_waits`` does the same for time. Nothing is counted, and nothing costs time, outside the
``with``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .collectives import Transfer

# dispatcher name -> (our name, index of the argument whose bytes count, share of it that others sent: (n - 1) / n
# of a whole tensor, n - 1 of a shard, all of a received message, twice (n - 1) / n of an all-reduce)
_WHOLE, _SHARD, _MESSAGE, _TWICE = "whole", "shard", "message", "twice"
_OPS: dict[str, tuple[str, int, str]] = {
    "_allgather_base_": ("all_gather", 0, _WHOLE),
    "allgather_": ("all_gather", 0, _WHOLE),
    "_reduce_scatter_base_": ("reduce_scatter", 0, _SHARD),
    "reduce_scatter_": ("reduce_scatter", 0, _SHARD),
    "alltoall_base_": ("all_to_all", 0, _WHOLE),
    "alltoall_": ("all_to_all", 0, _WHOLE),
    "allreduce_": ("all_reduce", 0, _TWICE),
    "recv_": ("recv", 0, _MESSAGE),
}


class CommunicationCounter(TorchDispatchMode):
    """Use through ``count_communication``.

    Attributes:
        bytes: payload bytes that this rank received from others.
        messages: messages they came in; a collective of n ranks counts n - 1.
        calls: how often each kind was called: all_gather, reduce_scatter, all_to_all, all_reduce, send, recv.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.bytes = 0
        self.messages = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "send":
            self.calls["send"] += 1
        if name not in _OPS:
            return
        kind, index, share = _OPS[name]
        size = sum(leaf.nbytes for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor))
        others = 1 if share == _MESSAGE else _group_size(args) - 1
        received = {
            _WHOLE: size * others // (others + 1),
            _SHARD: size * others,
            _MESSAGE: size,
            _TWICE: 2 * size * others // (others + 1),
        }[share]
        self.calls[kind] += 1
        self.bytes += received
        self.messages += others * (2 if share == _TWICE else 1)


def count_communication() -> CommunicationCounter:
    """A context manager that counts this process's communication, forward and backward, while it is open."""
    return CommunicationCounter()


class WaitMeter:
    """Use through ``measure_waits``."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pairs: list[tuple[torch.Event, torch.Event]] = []

    @property
    def seconds(self) -> float:
        """Time for which computing stood still; on an accelerator this synchronizes."""
        if self._pairs:
            torch.accelerator.synchronize()
        return self._seconds + sum(before.elapsed_time(after) for before, after in self._pairs) / 1e3

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around one wait: the host's clock, or events on the stream, which is what waits on an accelerator."""
        if torch.accelerator.is_available():
            events = (torch.Event(enable_timing=True), torch.Event(enable_timing=True))
            events[0].record()
            yield
            events[1].record()
            self._pairs.append(events)
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started


@contextmanager
def measure_waits() -> Iterator[WaitMeter]:
    """How long this process waits for transfers that were started, forward and backward, while it is open."""
    meter, plain = WaitMeter(), Transfer.wait

    def timed(transfer: Transfer) -> Tensor:
        with meter.wait():
            return plain(transfer)

    Transfer.wait = timed  # type: ignore[method-assign,assignment]
    try:
        yield meter
    finally:
        Transfer.wait = plain  # type: ignore[method-assign]


def _group_size(args: Any) -> int:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(arg).size())
            except RuntimeError:  # another object, such as the kind of reduction
                continue
    raise AssertionError("a collective without a group")
