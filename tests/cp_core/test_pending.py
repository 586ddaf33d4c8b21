"""Exchanges under way: async is sync bit for bit, misuse is an error that names the module, nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cp_core import (
    AttentionShape,
    ContextParallelConfig,
    CPAttention,
    Handoff,
    SequenceContext,
    Topology,
    bind_context_parallel,
    count_communication,
    register_kernel,
    shard_batch,
)
from cp_core.collectives import Transfer
from cp_core.kernels import SdpaKernel
from cp_core.pending import Frame, Launched, Ledger, Link, Pending
from cp_core.testing import WorkerError, run_distributed
from tests.cp_core._helpers import cp_mesh, row
from tests.cp_core.test_attention import settings

HIDDEN, HEADS, KV, WIDTH, LENGTH = 12, 8, 4, 5, 32
Change = Callable[["Mixer", Tensor, SequenceContext], Tensor]


class Mixer(nn.Module):
    """V, K, Q in this order; ``between`` may do something else with them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, heads in (("v", KV), ("k", KV), ("q", HEADS)):
            self.add_module(f"{name}_proj", nn.Linear(HIDDEN, heads * WIDTH))
            self.add_module(f"{name}_handoff", Handoff(name))
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        self.cp = CPAttention(0.4)
        self.between: Change | None = None

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(HEADS, KV, WIDTH, WIDTH)

    def project(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    def hand(self, name: str, x: Tensor, sequence: SequenceContext) -> Any:
        return self.get_submodule(f"{name}_handoff")(self.project(name, x), sequence)

    def forward(self, x: Tensor, sequence: SequenceContext) -> Tensor:
        if self.between is not None:
            return self.between(self, x, sequence)
        v, k, q = (self.hand(name, x, sequence) for name in "vkq")
        return self.o_proj(self.cp(q, k, v, sequence).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Two mixers, so that there is another module to mix up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixer(), Mixer()

    def cp_mixers(self) -> dict[str, str]:
        return {"first": "softmax", "second": "softmax"}

    def forward(self, x: Tensor, sequence: SequenceContext) -> Tensor:
        return x + self.second(x + self.first(x, sequence), sequence)


def build(mesh: Any, **fields: Any) -> Block:
    block = Block()
    bind_context_parallel(block, Topology.from_mesh(mesh), ContextParallelConfig(**fields))
    return block


def batch(mesh: Any, seed: int = 0) -> tuple[Tensor, SequenceContext]:
    """This rank's hidden states and the sequence of two ragged rows."""
    documents = torch.tensor([row(11, 21), row(32)])
    sequence = shard_batch({"input_ids": torch.zeros_like(documents), "document_ids": documents}, mesh)["sequence"]
    x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x[:, slice(*sequence.ranges[sequence.rank])].clone().requires_grad_(), sequence


def results(block: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    """Output and all gradients after a backward of ``out.square().sum()``; the leaves are clean again."""
    block.zero_grad()
    x.grad = None
    out.square().sum().backward()
    return collect(block, x, out)


def collect(block: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    leaves = [leaf for leaf in (x, *block.parameters()) if leaf.grad is not None]
    found = [out.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- async is sync


def bitwise_worker(rank: int, size: int) -> list[tuple[Any, bool]]:
    mesh = cp_mesh(size)
    found = []
    for setting in settings(size):
        fields = dict(setting)
        if fields["schedule"] == "async":
            blocks = [build(mesh, **fields | {"schedule": schedule}) for schedule in ("sync", "async")]
            assert [block.second.cp.ledger is None for block in blocks] == [True, False]
            x, sequence = batch(mesh)
            a, b = (results(block, x, block(x, sequence)) for block in blocks)
            found.append((setting, len(a) == 2 + 16 and same(a, b)))
    return found


@pytest.mark.dist2
def test_async_is_sync_bit_for_bit_two() -> None:
    for found in run_distributed(bitwise_worker, 2):
        assert len(found) == 5
        assert all(equal for _, equal in found), found


@pytest.mark.dist4
def test_async_is_sync_bit_for_bit_four() -> None:
    for found in run_distributed(bitwise_worker, 4):
        assert len(found) == 7
        assert all(equal for _, equal in found), found


# ---------------------------------------------------------------- misuse


def forgotten(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    m.hand("v", x, s), m.hand("k", x, s)
    return x


def bypassed(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k = m.hand("v", x, s), m.hand("k", x, s)
    return m.cp(m.project("q", x), k, v, s)


def swapped(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    return m.cp(q, v, k, s)


def twice(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    m.cp(q, k, v, s)
    return m.cp(q, k, v, s)


def handed_twice(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    return m.cp(m.q_handoff(q, s), k, v, s)


def changed(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k = m.hand("v", x, s), m.project("k", x)
    pending = m.k_handoff(k, s)
    k.mul_(2)
    return m.cp(m.hand("q", x, s), pending, v, s)


def other_batch(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    return m.cp(q, k, v, dataclasses.replace(s))


def no_sequence(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    m.v_handoff(m.project("v", x))
    return x


def narrow(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, q = m.hand("v", x, s), m.hand("q", x, s)
    return m.cp(q, m.k_handoff(m.project("k", x)[..., :4], s), v, s)


def other_dtype(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, q = m.hand("v", x, s), m.hand("q", x, s)
    return m.cp(q, m.k_handoff(m.project("k", x).double(), s), v, s)


def flat(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    return m.v_handoff(m.project("v", x).flatten(2), s)


def whole(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    return m.v_handoff(m.project("v", torch.cat([x, x], 1)), s)


def bypassed_values(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    k, q = m.hand("k", x, s), m.hand("q", x, s)
    return m.cp(q, k, m.project("v", x), s)


def changed_query(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = m.hand("v", x, s), m.hand("k", x, s), m.project("q", x)
    pending = m.q_handoff(q, s)
    q[:, 0].zero_()  # through a view
    return m.cp(pending, k, v, s)


def no_sequence_at_last(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    return m.cp(q, k, v, None)


def heads_apart(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    k, q = m.hand("k", x, s), m.hand("q", x, s)
    return m.cp(q, k, m.v_handoff(m.project("v", x).repeat(1, 2, 1, 1), s), s)


def outer_in_inner(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    m.between = lambda m, x, s: m.cp(q, k, v, s)
    return m(x, s)


def planted(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    m.hand("v", x, s), m.hand("k", x, s)
    raise ValueError("of the mixer itself")


def planted_inside(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    """A forward in this one fails and is caught; this one's own frame must still be there."""
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    m.between = planted
    with pytest.raises(ValueError, match="of the mixer itself"):
        m(x, s)
    m.cp(q, k, v, s)
    raise ValueError("the outer one consumed its own")


KEPT: list[Any] = []


def keeping(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k, q = (m.hand(name, x, s) for name in "vkq")
    KEPT.append(m.hand("k", x, s))  # smuggled out: an error of its own
    return m.cp(q, k, v, s)


def smuggled(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    return m.cp(m.hand("q", x, s), KEPT.pop(), m.hand("v", x, s), s)


MISUSE: dict[Change, str] = {
    forgotten: "second: the exchange of 'k', 'v' was launched at its handoff and never consumed in this forward",
    bypassed: "second: 'q' bypassed its handoff: with schedule 'async'",
    swapped: "second: 'k' came from the handoff of 'v'; call self.cp(q, k, v, sequence)",
    twice: "second: 'q' was consumed before; hand it off again for a second attention",
    handed_twice: "second: 'q' was handed off twice",
    changed: "second: 'k' was changed in place after its handoff, while it travelled",
    other_batch: "second: 'q' was handed off in another forward (another micro-batch?)",
    no_sequence: "second: no sequence; pass the one that shard_batch returned to the handoffs",
    bypassed_values: "second: 'v' bypassed its handoff: with schedule 'async'",
    changed_query: "second: 'q' was changed in place after its handoff, while it travelled",
    no_sequence_at_last: "second: no sequence; pass the one that shard_batch returned to the handoffs",
    heads_apart: "second: q [2, 8, 16, 5], k [2, 4, 16, 5] and v [2, 8, 16, 5] do not fit together",
    outer_in_inner: "second: 'q' was handed off in another forward (another micro-batch?)",
    planted: "of the mixer itself",
    planted_inside: "the outer one consumed its own",
    narrow: "second: q [2, 8, 16, 5], k [2, 4, 16, 4] and v [2, 4, 16, 5] do not fit together",
    other_dtype: "second: q, k and v must have one dtype, got torch.float32, torch.float64, torch.float32",
    flat: "second: v must have 4 dims, got [2, 4, 80]",
    whole: "the input holds [2, 32] tokens, but sequence describes [2, 16]",
    keeping: "second: the exchange of 'k' was launched at its handoff and never consumed",
    smuggled: "second: 'k' was handed off in another forward (another micro-batch?)",
}


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def misuse_worker(rank: int, size: int, algorithm: str) -> tuple[dict[str, str], bool]:
    mesh = cp_mesh(size)
    block = build(mesh, algorithm=algorithm, schedule="async")
    x, sequence = batch(mesh)
    before = results(block, x, block(x, sequence))
    said = {}
    well = True
    for change in MISUSE:
        block.second.between = change
        said[change.__name__] = refused(lambda: block(x, sequence))
        block.second.between = None
        assert not ledger_of(block.second).frames  # the hook has cleaned up
        well = well and same(before, results(block, x, block(x, sequence)))
    said["outside"] = refused(lambda: block.second.forward(x, sequence))

    def lent(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
        def take(other: Mixer, y: Tensor, t: SequenceContext) -> Tensor:
            v, k, q = (other.hand(name, y, t) for name in "vkq")
            return m.cp(q, k, v, t)

        block.first.between = take
        return block.first(x, s)

    block.second.between = lent
    inner = block.first
    said["another module"] = refused(lambda: block.second(x, sequence))
    block.second.between = inner.between = None
    return said, well and same(before, results(block, x, block(x, sequence)))


def ledger_of(mixer: Mixer) -> Ledger:
    assert mixer.cp.ledger is not None
    return mixer.cp.ledger


@pytest.mark.dist2
@pytest.mark.parametrize("algorithm", ["all_gather", "ulysses", "ring"])
def test_misuse_names_the_module_and_leaves_it_usable(algorithm: str) -> None:
    for said, well in run_distributed(misuse_worker, 2, algorithm):
        for change, message in MISUSE.items():
            assert message in said[change.__name__], (change.__name__, said[change.__name__])
        assert "second: the handoff of 'v' was called outside the mixer's forward; call the module" in said["outside"]
        assert "second: 'q' was handed off by another module, first" in said["another module"]
        assert well


# ---------------------------------------------------------------- what must be safe


def safety_worker(rank: int, size: int, fields: dict[str, Any]) -> list[str]:
    """Names of the ways of use whose results differ from plain ones."""
    mesh = cp_mesh(size)
    block = build(mesh, **fields)
    (xa, sa), (xb, sb) = batch(mesh, 1), batch(mesh, 2)
    want_a, want_b = results(block, xa, block(xa, sa)), results(block, xb, block(xb, sb))
    wrong = []

    def expect(name: str, got: list[Tensor], want: list[Tensor]) -> None:
        if not same(got, want):
            wrong.append(name)

    for name, order in (("first in first out", "ab"), ("last in first out", "ba")):
        outs = {"a": block(xa, sa), "b": block(xb, sb)}
        for which in order:
            x, want = {"a": (xa, want_a), "b": (xb, want_b)}[which]
            expect(f"{name}: {which}", results(block, x, outs[which]), want)
    for reentrant in (True, False):
        name = f"checkpoint, reentrant={reentrant}"
        expect(name, results(block, xa, checkpoint(block, xa, sa, use_reentrant=reentrant)), want_a)
        mixed = xa + block.first(xa, sa)
        mixed = xa + checkpoint(block.second, mixed, sa, use_reentrant=reentrant)
        expect(f"{name}, one mixer", results(block, xa, mixed), want_a)
    with torch.no_grad():
        expect("no_grad", [block(xa, sa)], want_a[:1])
    with torch.inference_mode():
        expect("inference_mode", [block(xa, sa)], want_a[:1])
    block(xb, sb)  # its backward never comes
    expect("after a forward without backward", results(block, xa, block(xa, sa)), want_a)
    out = block(xa, sa)
    out.square().sum().backward(retain_graph=True)
    out.square().sum().backward()
    expect("backward twice", collect(block, xa, out), [want_a[0], *(2 * grad for grad in want_a[1:])])
    names = [name for name, _ in block.named_parameters()]
    for parameter in ("second.q_proj.weight", "first.k_proj.weight", "second.v_proj.bias"):
        out = block(xa, sa)
        (grad,) = torch.autograd.grad(out.square().sum(), [block.get_parameter(parameter)])
        expect(f"grad of {parameter} alone", [grad], [want_a[2 + names.index(parameter)]])
    twin = copy.deepcopy(block)
    expect("deepcopy", results(twin, xa, twin(xa, sa)), want_a)
    if fields["schedule"] == "async":
        assert twin.second.cp.ledger is not block.second.cp.ledger
        assert twin.second.q_handoff.launch.__self__ is twin.second.cp

    def nest(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
        """The same module runs whole inside its own forward, between handoffs and consumer."""
        v, k, q = (m.hand(name, x, s) for name in "vkq")
        m.between = None
        inner = m(x, s)
        m.between = nest
        return m.o_proj(m.cp(q, k, v, s).transpose(1, 2).flatten(2)) + 0 * inner

    block.second.between = nest
    out = block(xa, sa)
    block.second.between = None
    expect("nested", [out.detach()], want_a[:1])
    assert not block.second.cp.ledger or not block.second.cp.ledger.frames
    return wrong


@pytest.mark.dist2
def test_ways_of_use_two() -> None:
    for fields in map(dict, settings(2)):
        assert run_distributed(safety_worker, 2, fields) == [[], []], fields


@pytest.mark.dist4
def test_ways_of_use_four() -> None:
    for algorithm in ("hybrid", "hybrid_ring"):
        fields = {"algorithm": algorithm, "ulysses_degree": 2, "schedule": "async"}
        assert run_distributed(safety_worker, 4, fields) == [[]] * 4, algorithm


class Alone(nn.Module):
    """A model that is one mixer, so that nothing before it needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def cp_mixers(self) -> dict[str, str]:
        return {"mixer": "softmax"}


def frozen_worker(rank: int, size: int) -> list[tuple[dict[str, Any], str, int]]:
    """Per setting and frozen projections: messages that this rank received in backward."""
    mesh = cp_mesh(size)
    x, sequence = batch(mesh)
    found = []
    for fields in map(dict, settings(size)):
        whole: dict[str, Tensor] = {}
        for frozen in ("", "v", "k", "kv", "q"):
            model = Alone()
            bind_context_parallel(model, Topology.from_mesh(mesh), ContextParallelConfig(**fields))
            for name in frozen:
                model.get_submodule(f"mixer.{name}_proj").requires_grad_(False)
            out = model.mixer(x.detach(), sequence)
            with count_communication() as seen:
                out.square().sum().backward()
            torch.distributed.barrier()  # a message that nobody awaits would meet this one
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            whole = whole or grads
            assert len(grads) == 8 - 2 * len(frozen)
            assert all(torch.equal(grad, whole[name]) for name, grad in grads.items()), (fields, frozen)
            found.append((fields, frozen, seen.messages))
    return found


@pytest.mark.dist2
def test_frozen_producers_launch_no_way_back() -> None:
    for rank, found in enumerate(run_distributed(frozen_worker, 2)):
        for fields, frozen, messages in found:
            trained = {name for name in "qkv" if name not in frozen}
            keys = len(trained & {"k", "v"})
            expected = {
                "ulysses": 1 + len(trained),  # the output's, and one for each that is trained
                "all_gather": keys,
                "ring": keys if rank == 0 else 2,  # rank 1 sees block 0 again; its shares go home to rank 0
            }[fields["algorithm"]]
            if fields.get("load_balance"):  # the output's swap, and that of q; both ranks then use both blocks
                expected = (keys + 2 if fields["algorithm"] == "ring" else keys) + 1 + ("q" in trained)
            assert messages == expected, (fields, frozen, rank)


def corners_worker(rank: int, size: int) -> list[str]:
    """Names of the corners whose results differ from plain ones, or whose backward sends what nobody asked for."""
    mesh = cp_mesh(size)
    wrong: list[str] = []
    for fields in (dict(setting) for setting in settings(size)):
        if fields["schedule"] == "async":
            corners(mesh, fields, lambda name, fields=fields: wrong.append(f"{fields}: {name}"))
    return wrong


def corners(mesh: Any, fields: dict[str, Any], fail: Callable[[str], None]) -> None:
    block = build(mesh, **fields)
    names = [name for name, _ in block.named_parameters()]
    micro = {which: batch(mesh, seed) for seed, which in enumerate("abc")}
    want = {which: results(block, x, block(x, s)) for which, (x, s) in micro.items()}
    x, sequence = micro["a"]

    def expect(name: str, got: list[Tensor], wanted: list[Tensor]) -> None:
        if not same(got, wanted):
            fail(name)

    outs = {}
    for action in ("fa", "fb", "ba", "fc", "bb", "bc"):  # the steady state of 1F1B
        which = action[1]
        if action[0] == "f":
            outs[which] = block(*micro[which])
        else:
            expect(f"1F1B: {which}", results(block, micro[which][0], outs[which]), want[which])

    with set_checkpoint_early_stop(False):
        out = checkpoint(block, x, sequence, use_reentrant=False)
        expect("checkpoint recomputed to its end", results(block, x, out), want["a"])
    inner = x + checkpoint(block.first, x, sequence, use_reentrant=False)
    nested = checkpoint(lambda y: x + checkpoint(block.second, y, sequence, use_reentrant=False), inner,
                        use_reentrant=False)  # fmt: skip
    expect("checkpoint in a checkpoint", results(block, x, nested), want["a"])

    mixer = block.second
    plain = messages_of(mixer, x, sequence, list(mixer.parameters()))
    for role in "vkq":  # the rest of the graph has gradients too; this backward does not ask for them
        some = messages_of(mixer, x, sequence, [mixer.get_parameter(f"{role}_proj.weight")])
        frozen = messages_of(mixer, x.detach(), sequence, [mixer.get_parameter(f"{role}_proj.weight")], only=role)
        if some != frozen or some > plain or (some == plain and fields["algorithm"] == "ulysses"):
            fail(f"gradient of {role} alone: {some} messages, {frozen} if the others are frozen, {plain} in all")
    block.zero_grad()

    out = block(x, sequence)
    leaves = [block.get_parameter(name) for name in ("second.q_proj.weight", "second.k_proj.weight")]
    parts = [torch.autograd.grad(out.square().sum(), [leaf], retain_graph=True)[0] for leaf in leaves]
    expect("one leaf after another", parts, [want["a"][2 + names.index(f"second.{n}_proj.weight")] for n in "qk"])
    expect("and then all of them", results(block, x, out), want["a"])
    if "a second time" not in refused(lambda: results(block, x, out)):
        fail("a graph that was freed")
    block.zero_grad()
    x.grad = None

    def stop(grad: Tensor) -> None:
        raise RuntimeError("of a hook")

    out = block(x, sequence)
    handle = block.second.k_proj.weight.register_hook(stop)
    if refused(lambda: results(block, x, out)) != "of a hook":
        fail("an error in backward")
    handle.remove()
    expect("after an error in backward", results(block, x, block(x, sequence)), want["a"])

    def nest(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
        m.between = None
        first = m(x, s)
        v, k, q = (m.hand(name, x, s) for name in "vkq")
        second = m(x, s)
        m.between = nest
        return first + second + m.o_proj(m.cp(q, k, v, s).transpose(1, 2).flatten(2))

    mixer = block.first
    alone = results(mixer, x, 3 * mixer(x, sequence))
    mixer.between = nest
    got = results(mixer, x, mixer(x, sequence))
    mixer.between = None
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max())) for a, b in zip(got, alone, strict=True)]
    if not all(close):
        fail("gradients of nested forwards")
    assert not ledger_of(block.first).frames
    assert not ledger_of(block.second).frames

    autocast = []
    for schedule in ("sync", "async"):
        twin = build(mesh, **fields | {"schedule": schedule})
        twin.second.between = widened
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(twin, x, sequence, use_reentrant=False)
        autocast.append(results(twin, x, out))
    expect("autocast", *autocast)


def widened(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    """As after a RoPE in fp32; autocast narrows at the core again."""
    v, k, q = (m.get_submodule(f"{name}_handoff")(m.project(name, x).float(), s) for name in "vkq")
    assert (q.dtype if m.cp.ledger is not None else torch.bfloat16) == torch.bfloat16
    return m.o_proj(m.cp(q, k, v, s).transpose(1, 2).flatten(2))


def messages_of(mixer: Mixer, x: Tensor, sequence: SequenceContext, inputs: list[Any], only: str | None = None) -> int:
    """What this rank receives in a backward for ``inputs``; ``only``: the other projections are frozen."""
    for role in "vkq":
        mixer.get_submodule(f"{role}_proj").requires_grad_(only in (None, role))
    out = mixer(x, sequence)
    with count_communication() as seen:
        torch.autograd.grad(out.square().sum(), inputs)
    for role in "vkq":
        mixer.get_submodule(f"{role}_proj").requires_grad_(True)
    torch.distributed.barrier()
    return seen.messages


@pytest.mark.dist2
def test_corners_two() -> None:
    assert run_distributed(corners_worker, 2) == [[], []]


@pytest.mark.dist4
def test_corners_four() -> None:
    assert run_distributed(corners_worker, 4) == [[]] * 4


@pytest.mark.dist4
def test_frozen_producers_of_a_hybrid_launch_no_way_back() -> None:
    for found in run_distributed(frozen_worker, 4):
        hybrid = [entry for entry in found if entry[0]["algorithm"] == "hybrid"]
        assert len(hybrid) == 2 * 5
        for fields, frozen, messages in hybrid:
            trained = {name for name in "qkv" if name not in frozen}
            # heads: the output's and one for each that is trained; the gather's reverse: k's and v's
            assert messages == 1 + len(trained) + len(trained & {"k", "v"}), (fields, frozen)


def fallback_worker(rank: int, size: int, lacking: tuple[str, ...]) -> tuple[list[str], list[tuple[str, str]], bool]:
    """``lacking``: the mixers without a handoff of q; the other ones can be async."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cp_core").addHandler(handler)
    mesh = cp_mesh(size)
    x, sequence = batch(mesh)
    outcomes = []
    for fields in ({"schedule": "async", "async_fallback": "sync"}, {"schedule": "sync"}):
        block = Block()
        for name in lacking:
            mixer = block.get_submodule(name)
            del mixer.q_handoff
            mixer.between = without_query_handoff  # type: ignore[assignment]
        config = ContextParallelConfig(algorithm="ring", **fields)  # type: ignore[arg-type]
        records = bind_context_parallel(block, Topology.from_mesh(mesh), config)
        outcomes.append((records, results(block, x, block(x, sequence))))
    (records, got), (_, want) = outcomes
    resolved = [(record.schedule, record.fallback) for record in records]
    return [line for line in said if "replaced" in line], resolved, same(got, want)


def without_query_handoff(m: Mixer, x: Tensor, s: SequenceContext) -> Tensor:
    v, k = m.hand("v", x, s), m.hand("k", x, s)
    return m.o_proj(m.cp(m.project("q", x), k, v, s).transpose(1, 2).flatten(2))


@pytest.mark.dist2
@pytest.mark.parametrize("lacking", [("second",), ("first", "second")], ids=["one mixer", "both mixers"])
def test_async_fallback_is_logged_once_and_runs_as_sync(lacking: tuple[str, ...]) -> None:
    why = "schedule 'async' needs one Handoff each for q, k and v in the mixer, found: ('v', 'k')"
    for rank, (said, resolved, equal) in enumerate(run_distributed(fallback_worker, 2, lacking)):
        assert said == ([f"schedule 'async' replaced by 'sync': {why}"] if rank == 0 else [])
        assert resolved == [("sync", why) if name in lacking else ("async", "") for name in ("first", "second")]
        assert equal


def abandoned_worker(rank: int, size: int, algorithm: str) -> bool:
    mesh = cp_mesh(size)
    block = build(mesh, algorithm=algorithm, schedule="async")
    x, sequence = batch(mesh)
    want = results(block, x, block(x, sequence))
    well = True
    for _ in range(10):
        block.second.between = planted  # v and k are launched, then the mixer raises on every rank
        assert refused(lambda: block(x, sequence)) == "of the mixer itself"
        block.second.between = None
        well = well and same(want, results(block, x, block(x, sequence)))
    return well


@pytest.mark.dist2
@pytest.mark.parametrize("algorithm", ["all_gather", "ulysses", "ring"])
def test_exchanges_that_an_error_leaves_do_not_meet_the_next_forward(algorithm: str) -> None:
    assert run_distributed(abandoned_worker, 2, algorithm, timeout=20) == [True, True]


class Raising(nn.Module):
    """Of what a mixer's ledger sees, the failures alone; one process."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("mixer")
        self.refuse = False
        self.register_forward_pre_hook(self.before)  # of someone else, before binding
        self.ledger.watch(self)

    def before(self, module: nn.Module, args: Any) -> None:
        if self.refuse:
            raise ValueError("of a hook")

    def forward(self, body: Callable[[], None]) -> int:
        body()
        return len(self.ledger.frames)


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_a_pre_hook_that_raises_does_not_close_the_outer_forward() -> None:
    """torch calls the hook that leaves although the one that enters was never reached."""
    mixer = Raising()

    def body() -> None:
        mixer.refuse = True
        with pytest.raises(ValueError, match="of a hook"):
            mixer(lambda: None)
        mixer.refuse = False

    assert mixer(body) == 1


# ---------------------------------------------------------------- nothing is left


def growth_worker(rank: int, size: int, fields: dict[str, Any]) -> tuple[dict[str, int], int, bool]:
    mesh = cp_mesh(size)
    block = build(mesh, **fields)
    x, sequence = batch(mesh)

    def census() -> dict[str, int]:
        gc.collect()
        kinds = (Pending, Launched, Link, Frame, Transfer, Tensor)
        everything = gc.get_objects()
        return {kind.__name__: sum(isinstance(thing, kind) for thing in everything) for kind in kinds}

    def step(index: int) -> None:
        out = block(x, sequence)
        if index % 3:  # every third forward has no backward
            results(block, x, out)

    for index in range(6):
        step(index)
    before = census()
    for index in range(200):
        step(index)
    after = census()
    held = [block.second.project("v", x)]
    alive = weakref.ref(held[0])
    block.second.between = lambda m, x, s: m.cp(m.hand("q", x, s), m.hand("k", x, s), m.v_handoff(held.pop(), s), s)
    block.second(x, sequence)
    block.second.between = None
    gc.collect()
    grown = {name: after[name] - before[name] for name in after}
    return grown, len(ledger_of(block.first).frames), alive() is None


@pytest.mark.dist2
@pytest.mark.parametrize("algorithm", ["all_gather", "ulysses", "ring"])
def test_no_state_grows_over_200_steps(algorithm: str) -> None:
    for grown, frames, freed in run_distributed(growth_worker, 2, {"algorithm": algorithm, "schedule": "async"}):
        assert set(grown.values()) == {0}, grown
        assert frames == 0
        assert freed


# ---------------------------------------------------------------- a rank that fails


class Failing(SdpaKernel):
    name = "failing"
    where = "forward"

    def forward(self, *args: Any) -> Any:
        if self.where == "forward" and torch.distributed.get_rank() == 1:
            raise RuntimeError("planted in attention")
        return super().forward(*args)

    def backward(self, *args: Any) -> Any:
        if self.where == "backward" and torch.distributed.get_rank() == 1:
            raise RuntimeError("planted in attention")
        return super().backward(*args)


def failing_worker(rank: int, size: int, fields: dict[str, Any], where: str) -> None:
    mesh = cp_mesh(size)
    Failing.where = where
    register_kernel("failing", Failing)
    block = build(mesh, kernel="failing", **fields)
    x, sequence = batch(mesh)
    for _ in range(3):
        results(block, x, block(x, sequence))


@pytest.mark.dist2
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_rank_that_raises_in_attention_ends_the_others(algorithm: str, schedule: str, where: str) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 raised:[\s\S]*planted in attention"):
        run_distributed(failing_worker, 2, {"algorithm": algorithm, "schedule": schedule}, where, timeout=60)
    assert time.monotonic() - started < 30
