"""Exchanges under way: launched at a handoff, awaited at the consumer, and the reverse in backward, through autograd.

Two autograd nodes stand for one exchange. ``_Launch`` starts it and returns a scalar, the carrier; ``_Wait`` takes
the carrier and returns what arrived. In backward ``_Wait`` comes first: it starts the reverse exchange, and
``_Launch``, which runs just before the producer's own backward, awaits it. A producer without a gradient makes a
carrier without one, so no reverse exchange is started that nobody awaits.

A ``Pending`` is passed along by value, in place of the tensor. ``Ledger`` says which of them belong to one forward of
a mixer, so that one which is forgotten, used twice or mixed up is an error that names the module.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .collectives import Transfer
from .sequence import SequenceContext


class Exchange(Protocol):
    """What travels of one tensor before attention; knows groups and dims, holds no tensor."""

    def start(self, x: Tensor) -> Transfer:
        """Start it; collective."""
        ...

    def start_reverse(self, grad: Tensor) -> Transfer:
        """Start the way back of the gradient; the result has the shape that ``x`` had. Collective."""
        ...


class Link:
    """What the two nodes of one exchange share: the transfer now under way in each direction."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.forward: Transfer | None = None
        self.backward: Transfer | None = None

    def take_forward(self) -> Transfer:
        """The transfer that was launched; leaves none."""
        transfer, self.forward = self.forward, None
        assert transfer is not None
        return transfer

    def take_backward(self) -> Transfer:
        """The reverse transfer; leaves none, so that a second backward starts its own."""
        transfer, self.backward = self.backward, None
        assert transfer is not None
        return transfer


class Launched(NamedTuple):
    """A tensor (detached) whose exchange is under way, the scalar that stands for it in the graph, and the link."""

    x: Tensor
    carrier: Tensor
    link: Link

    def wait(self) -> Tensor:
        """What arrives; differentiable with respect to the tensor that was launched."""
        return _Wait.apply(self.carrier, self.link)


def start(x: Tensor, exchange: Exchange) -> Launched:
    """Launch an exchange of ``x``; collective."""
    link = Link(exchange)
    return Launched(x.detach(), _Launch.apply(x, link), link)


def exchange_now(x: Tensor, exchange: Exchange | None) -> Tensor:
    """Launch and wait; differentiable."""
    return x if exchange is None else start(x, exchange).wait()


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        link.forward = link.exchange.start(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.link.take_backward().wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.take_forward().wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.link.backward = ctx.link.exchange.start_reverse(grad)
        return grad.new_zeros(()), None


class Frame:
    """One forward of a mixer: the exchanges launched in it and not consumed yet."""

    def __init__(self) -> None:
        self.open: set[Pending] = set()


class Ledger:
    """The forwards of one mixer that are running (several, if they nest). Empty between forwards.

    Args:
        path: module path of the mixer, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.frames: list[Frame] = []

    @property
    def current(self) -> Frame | None:
        """The innermost forward."""
        return self.frames[-1] if self.frames else None

    def watch(self, mixer: nn.Module) -> None:
        """Hear of every forward of the mixer. (torch tells of one that ends by Ctrl-C only when it begins.)"""
        mixer.register_forward_pre_hook(self.enter, prepend=True)  # before any that may raise
        mixer.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """A forward begins (forward pre-hook of the mixer)."""
        self.frames.append(Frame())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward ends (forward hook, called after a failure too; ``output`` is None then).

        Raises:
            RuntimeError: an exchange was launched and not consumed.
        """
        if not self.frames:  # a pre-hook before ours raised
            return
        frame = self.frames.pop()
        left, frame.open = frame.open, set()
        if left and output is not None:
            roles = ", ".join(sorted(repr(pending.role) for pending in left))
            raise RuntimeError(
                f"{self.path}: the exchange of {roles} was launched at its handoff and never consumed in this forward; "
                "pass what the handoffs return to self.cp(q, k, v, sequence)"
            )


class Pending:
    """A tensor whose exchange is under way; stands in its place between handoff and consumer.

    Args:
        role: ``q``, ``k`` or ``v``.
        x: the tensor that was handed off, ``[B, N, T, D]``.
        exchange: what travels; None: nothing, the tensor is used as it is.
        sequence: the batch it belongs to.
        path: module path of the mixer.
        frame: the mixer's forward that must consume it; None: nobody looks.
    """

    def __init__(
        self,
        role: str,
        x: Tensor,
        exchange: Exchange | None,
        sequence: SequenceContext,
        path: str,
        frame: Frame | None = None,
    ) -> None:
        self.role, self.sequence, self.path, self.frame = role, sequence, path, frame
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.consumed = False
        self._handed, self._version = x, _version(x)
        self._launched = None if exchange is None else start(x, exchange)
        if self.frame is not None:
            self.frame.open.add(self)

    def wait(self) -> Tensor:
        """What arrived; once."""
        x, launched = self._handed, self._take()
        return x if launched is None else launched.wait()

    def unpack(self) -> Launched | Tensor:
        """For a strategy that awaits the exchange inside a node of its own (the tensor, if nothing travels); once."""
        x, launched = self._handed, self._take()
        return x if launched is None else launched

    def check(self, role: str, path: str, frame: Frame | None, sequence: SequenceContext) -> None:
        """Refuse a pending that is not this consumer's, this forward's and this batch's.

        Raises:
            RuntimeError: which of them it is; naming the module.
        """
        what = f"{path}: {role!r}"
        if self.path != path:
            raise RuntimeError(f"{what} was handed off by another module, {self.path}")
        if self.role != role:
            raise RuntimeError(f"{what} came from the handoff of {self.role!r}; call self.cp(q, k, v, sequence)")
        if self.consumed:
            raise RuntimeError(f"{what} was consumed before; hand it off again for a second attention")
        if self.frame is not frame or self.sequence is not sequence:
            raise RuntimeError(
                f"{what} was handed off in another forward (another micro-batch?); consume it where it was launched, "
                "with the same sequence"
            )
        if _version(self._handed) != self._version:
            raise RuntimeError(f"{what} was changed in place after its handoff, while it travelled")

    def _take(self) -> Launched | None:
        assert not self.consumed
        self.consumed = True
        if self.frame is not None:
            self.frame.open.discard(self)
        launched, self._launched = self._launched, None
        del self._handed
        return launched


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not say."""
    return 0 if x.is_inference() else x._version
