"""Exchanges under way: async is sync bit for bit, misuse is an error that names the module, nothing is left behind."""

from __future__ import annotations

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

from cp_core import (
    ContextParallelConfig,
    SequenceContext,
    Topology,
    bind_context_parallel,
    register_kernel,
)
from cp_core.collectives import Transfer
from cp_core.kernels import SdpaKernel
from cp_core.pending import Frame, Launched, Ledger, Link, Pending
from cp_core.testing import WorkerError, run_distributed
from tests.cp_core._helpers import cp_mesh
from tests.cp_core._mixers import (
    Block,
    Change,
    Mixer,
    batch,
    build,
    ledger_of,
    refused,
    results,
    same,
)
from tests.cp_core.test_attention import settings

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


@pytest.mark.dist2
@pytest.mark.parametrize("algorithm", ["all_gather", "ulysses", "ring"])
def test_misuse_names_the_module_and_leaves_it_usable(algorithm: str) -> None:
    for said, well in run_distributed(misuse_worker, 2, algorithm):
        for change, message in MISUSE.items():
            assert message in said[change.__name__], (change.__name__, said[change.__name__])
        assert "second: the handoff of 'v' was called outside the mixer's forward; call the module" in said["outside"]
        assert "second: 'q' was handed off by another module, first" in said["another module"]
        assert well


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
