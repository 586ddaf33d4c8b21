"""What the core's tests share. Oracles are written out here with loops and dense masks and use nothing of ``cp_core``.

A layout is a list of rows; a row is a list with each token's document number, -1 for padding.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Layout = list[list[int]]
PAD = -1


def row(*parts: int) -> list[int]:
    """Tokens of one row: ``row(-5, 37, 51)`` is 5 tokens of padding and two documents."""
    tokens: list[int] = []
    for number, length in enumerate(parts):
        tokens += [PAD if length < 0 else number] * abs(length)
    return tokens


def runs(tokens: list[int]) -> list[tuple[int, int, bool]]:
    """``(start, stop, is padding)`` of every run of equal entries."""
    found, start = [], 0
    for document, group in itertools.groupby(tokens):
        stop = start + len(list(group))
        found.append((start, stop, document == PAD))
        start = stop
    return found


def random_layout(rng: random.Random, batch: int, length: int, padding: bool = True) -> Layout:
    """Rows of random documents, some with padding on the left, some on the right, some between documents."""
    layout = []
    for _ in range(batch):
        tokens: list[int] = []
        number = 0
        while len(tokens) < length:
            take = min(rng.randint(1, max(2, length // 2)), length - len(tokens))
            is_padding = padding and rng.random() < 0.25
            tokens += [PAD if is_padding else number] * take
            number += 1
        layout.append(tokens)
    return layout


def expected_targets(labels: Tensor, layout: Layout) -> Tensor:
    """Next token's label inside the document, token by token."""
    result = torch.full_like(labels, -100)
    for b, tokens in enumerate(layout):
        for t in range(len(tokens) - 1):
            if tokens[t] != PAD and tokens[t] == tokens[t + 1]:
                result[b, t] = labels[b, t + 1]
    return result


def expected_positions(layout: Layout) -> Tensor:
    """0, 1, 2, ... in every run."""
    return torch.tensor(
        [[t - start for start, stop, _ in runs(tokens) for t in range(start, stop)] for tokens in layout]
    )


def visible(layout: Layout, causal: bool, window: int | None = None) -> Tensor:
    """``[B, S, S]`` bool: query i may see key j; with a window only its own and the ``window - 1`` before."""
    length = len(layout[0])
    mask = torch.zeros(len(layout), length, length, dtype=torch.bool)
    for b, tokens in enumerate(layout):
        for i in range(length):
            for j in range(i + 1 if causal else length):
                mask[b, i, j] = tokens[i] != PAD and tokens[i] == tokens[j] and (window is None or i - j < window)
    return mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    scale: float,
    window: int | None = None,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """torch SDPA with a dense mask and kv heads written out; 0 for queries that see nothing. Differentiable.

    ``mask`` (bool or to be added) comes on top; ``keep`` ``[B, N, S, S]`` multiplies the weights (softmax by hand then).
    """
    bias = torch.zeros(1, 1, 1, 1, dtype=q.dtype).masked_fill(~visible(layout, causal, window)[:, None], -torch.inf)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    dead = (bias == -torch.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(dead, 0.0)  # any finite row will do
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    if keep is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale) * ~dead
    return ((q @ k.transpose(-1, -2) * scale + bias).softmax(-1) * keep @ v) * ~dead


def strided_copies(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``x`` in memory layouts that are not contiguous, values equal."""
    if x.ndim >= 2:
        yield "last dims swapped", x.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield "first and last swapped", x.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), 7, dtype=x.dtype)
    wide[..., 1 : 1 + 2 * x.shape[-1] : 2] = x
    yield "every second entry of a slice", wide[..., 1 : 1 + 2 * x.shape[-1] : 2]


class Allocations(TorchDispatchMode):
    """Records the most elements that one tensor made by an operator had, which operator it was, and all their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.by = ""
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                held = leaf.untyped_storage().nbytes() // leaf.element_size()  # an expanded view holds little
                if held > self.largest:
                    self.largest, self.by = held, str(func)
        return result


def cp_mesh(size: int) -> DeviceMesh:
    """A mesh with one axis, cp."""
    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError that ``call`` raises; for workers, where pytest is not at hand."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{call} was not refused")


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest reference value."""
    a, b = a.detach(), b.detach()
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300))


def error_norm(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((a.double() - b.double()).norm() / b.double().norm())
