"""What was resolved for each mixer: one record a layer, written at bind time, read by everything that reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .cost import AttentionShape, Cost, Load
from .sequence import Row, Segment, SequenceContext
from .strategies import AttentionStrategy, ComposedStrategy, LaunchingStrategy
from .strategies.base import CostedStrategy


@dataclass(frozen=True)
class ResolvedCP:
    """How one layer runs under context parallelism.

    Attributes:
        path: module path of the mixer.
        kind: ``softmax | mla | dsa | gdn | kda``.
        algorithm: the strategy; ``local`` at cp size 1.
        schedule: ``sync | async``.
        kernel: how a block of attention is computed.
        cp_size: ranks that share a sequence.
        ulysses_degree: ranks that exchange heads (U).
        sequence_degree: groups of them that share the sequence (C); ``cp_size = C * U``.
        handoffs: roles of the handoff modules found, such as ``q k v``.
        shape: heads and widths, read from the mixer's parameters.
        itemsize: bytes of an element of those parameters.
        causal: a query sees no later key.
        window: how many keys a query sees; None: all.
        load_balance: head-tail balance of causal work.
        fallback: what was replaced and why; empty if nothing was.
        adapter: what binds the mixer: ``native`` for one that was written for the core.
        strategy: the object that the layer calls; states its cost.
    """

    path: str
    kind: str
    algorithm: str
    schedule: str
    kernel: str
    cp_size: int
    ulysses_degree: int
    sequence_degree: int
    handoffs: tuple[str, ...]
    shape: AttentionShape
    itemsize: int
    causal: bool = True
    window: int | None = None
    load_balance: bool = False
    fallback: str = ""
    adapter: str = "native"
    strategy: AttentionStrategy | LaunchingStrategy | None = field(default=None, repr=False, compare=False)

    def costs(self, rows: tuple[Row, ...], tokens: int, balanced: bool = True) -> tuple[Cost, ...] | None:
        """What each rank receives and computes for one batch.

        Args:
            rows: the segments of each row.
            tokens: S, of a row; padded.
            balanced: False: as if ``load_balance`` were off.

        Returns:
            One entry a rank; None if the strategy does not state its cost.
        """
        strategy = self.strategy
        if isinstance(strategy, ComposedStrategy) and not balanced:
            strategy = replace(strategy, swap=None)
        if not isinstance(strategy, CostedStrategy):
            return None
        return tuple(
            strategy.cost(self.shape, Load(rows, tokens, rank, self.causal, self.itemsize, self.window))
            for rank in range(self.cp_size)
        )


_COLUMNS = (
    "layer", "kind", "by", "strategy", "schedule", "balance", "kernel", "cp", "U x C", "handoffs", "fallback",
    "bytes/token", "work",
)  # fmt: skip
_TOKENS = 1024  # a rank, of the document that stands for a batch not known yet
_NOTE = (
    "bytes/token: received for each token of a row by the busiest rank, forward + backward; work: the slowest rank's "
    "attention over the mean"
)


def format_report(records: Sequence[ResolvedCP], sequence: SequenceContext | None = None) -> str:
    """The records as a text table; neighbours that differ only in their path share a line.

    Args:
        records: of one model.
        sequence: of a batch, for its own cost; else that of one causal document.

    Returns:
        The table, a line that explains its last columns, and a warning for each line whose ``load_balance`` does not
        make the slowest rank faster than it would be without.
    """
    if sequence is None:
        tokens = _TOKENS * max((record.cp_size for record in records), default=1)
        rows: tuple[Row, ...] = ((Segment(0, tokens),),)
    else:
        rows, tokens = sequence.rows, sequence.padded_length
    lines: list[tuple[str, ...]] = [_COLUMNS]
    warnings = []
    for first, last, count in _groups(records):
        name = first.path + (f" .. {last.path} ({count} layers)" if count > 1 else "")
        lines.append((name, *_cells(first), *_cost_cells(first.costs(rows, tokens), len(rows) * tokens)))
        warnings += _balance_warning(name, first, rows, tokens)
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*table, _NOTE, *warnings])


def _groups(records: Sequence[ResolvedCP]) -> list[tuple[ResolvedCP, ResolvedCP, int]]:
    """Runs of neighbours that are equal but for their path: first, last, how many."""
    runs: list[tuple[ResolvedCP, ResolvedCP, int]] = []
    for record in records:
        if runs and replace(runs[-1][0], path=record.path) == record:
            runs[-1] = (runs[-1][0], record, runs[-1][2] + 1)
        else:
            runs.append((record, record, 1))
    return runs


def _cells(record: ResolvedCP) -> tuple[str, ...]:
    return (
        record.kind,
        record.adapter,
        record.algorithm,
        record.schedule,
        "head-tail" if record.load_balance else "-",
        record.kernel,
        str(record.cp_size),
        f"{record.ulysses_degree} x {record.sequence_degree}",
        " ".join(record.handoffs) or "-",
        record.fallback or "-",
    )


def _cost_cells(costs: tuple[Cost, ...] | None, tokens: int) -> tuple[str, str]:
    if costs is None:
        return "not stated", "not stated"
    forward, backward = max(c.forward_bytes for c in costs), max(c.backward_bytes for c in costs)
    return f"{forward / tokens:,.0f} + {backward / tokens:,.0f}", f"{imbalance(costs):.2f}"


def imbalance(costs: Sequence[Cost]) -> float:
    """Attention work of the slowest rank over the mean; 1 where nobody computes anything."""
    work = [cost.work for cost in costs]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def _balance_warning(name: str, record: ResolvedCP, rows: tuple[Row, ...], tokens: int) -> list[str]:
    costs, plain = record.costs(rows, tokens), record.costs(rows, tokens, balanced=False)
    if not record.load_balance or costs is None or plain is None or imbalance(costs) < imbalance(plain):
        return []
    return [
        f"warning: {name}: with these documents load_balance makes no rank faster and sends more: the slowest rank's "
        f"work is {imbalance(costs):.2f} of the mean, {imbalance(plain):.2f} without; set load_balance=False"
    ]
