"""The small model on which pending exchanges are tested: mixers whose forward may be told to misbehave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cp_core import (
    AttentionShape,
    ContextParallelConfig,
    CPAttention,
    Handoff,
    SequenceContext,
    Topology,
    bind_context_parallel,
    shard_batch,
)
from cp_core.pending import Ledger
from tests.cp_core._helpers import row

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


def ledger_of(mixer: Mixer) -> Ledger:
    assert mixer.cp.ledger is not None
    return mixer.cp.ledger


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"
