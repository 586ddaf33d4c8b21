"""Ways of using pending exchanges that must be safe: recompute, micro-batches, no_grad, frozen producers, nesting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cp_core import (
    ContextParallelConfig,
    SequenceContext,
    Topology,
    bind_context_parallel,
    count_communication,
)
from cp_core.testing import run_distributed
from tests.cp_core._helpers import cp_mesh
from tests.cp_core._mixers import (
    Mixer,
    batch,
    build,
    collect,
    ledger_of,
    refused,
    results,
    same,
)
from tests.cp_core.test_attention import settings

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
