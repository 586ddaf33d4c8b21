"""The context-parallel strategy core: how layers that mix tokens run on a sequence cut over ranks. Needs torch alone.

The way of the data: ``shard_batch`` cuts a global batch into contiguous slices and makes the ``SequenceContext``;
a mixer projects, hands off q, k and v and calls ``CPAttention``; its strategy moves what must travel and its kernel
computes blocks; ``loss`` sums tokens; gradients are summed over dp x cp.
"""

from .attention import CPAttention
from .bind import bind_context_parallel
from .config import Algorithm, ContextParallelConfig, Schedule
from .cost import AttentionShape, Cost, Load
from .counters import count_communication
from .gradients import sync_gradients
from .handoff import Handoff
from .kernels import register_kernel
from .report import ResolvedCP, format_report
from .sequence import Segment, SequenceContext
from .shard import shard_batch, unshard
from .strategies import register_strategy
from .topology import Topology

__all__ = [
    "Algorithm",
    "AttentionShape",
    "CPAttention",
    "ContextParallelConfig",
    "Cost",
    "Handoff",
    "Load",
    "ResolvedCP",
    "Schedule",
    "Segment",
    "SequenceContext",
    "Topology",
    "bind_context_parallel",
    "count_communication",
    "format_report",
    "register_kernel",
    "register_strategy",
    "shard_batch",
    "sync_gradients",
    "unshard",
]
