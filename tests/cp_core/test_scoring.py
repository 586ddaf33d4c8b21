"""What becomes of scores: user masks, dropout, and what of them is refused.

B batch, N query heads, S tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_core import CPAttention, SequenceContext, shard_batch
from cp_core.kernels.flash import FlashKernel
from cp_core.scoring import Dropout, check_mask, combine_masks
from tests.cp_core.test_kernels import LENGTH, kept_weights

# ---------------------------------------------------------------- masks


def test_masks_are_combined_never_replaced() -> None:
    seen, other = torch.rand(2, 1, 4, 4) > 0.5, torch.rand(1, 3, 4, 4) > 0.5
    both = combine_masks(seen, other)
    assert both is not None
    assert torch.equal(both, seen & other)
    bias = torch.randn(1, 3, 4, 4)
    for mixed in (combine_masks(seen, bias), combine_masks(bias, seen)):
        assert mixed is not None
        assert torch.equal(mixed, bias.expand(2, 3, 4, 4).masked_fill(~seen, -torch.inf))
    summed = combine_masks(bias, 2 * bias)
    assert summed is not None
    torch.testing.assert_close(summed, 3 * bias)
    assert combine_masks(None, bias) is bias
    assert combine_masks(bias, None) is bias
    assert combine_masks(None, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_lowest_finite_value_means_not_seen(dtype: torch.dtype) -> None:
    """Otherwise a query with nothing but such keys would see the average of all of them."""
    mask = torch.zeros(1, 1, 3, 3, dtype=dtype)
    mask[..., 1, :] = torch.finfo(dtype).min
    mask[..., 0, 0] = -3.0
    checked = check_mask(mask, 2, 3)
    assert bool((checked[0, 0, 1] == -torch.inf).all())
    assert float(checked[0, 0, 0, 0]) == -3.0


# ---------------------------------------------------------------- dropout


def test_dropout_drops_its_share_everywhere() -> None:
    for p in (0.1, 0.5, 0.9):
        keep = kept_weights(Dropout(p, seed=7)) * (1 - p)
        for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # by row, head, query, key
            share, count = keep.mean(dims), keep.numel() // keep.shape[({0, 1, 2, 3} - set(dims)).pop()]
            sigma = (p * (1 - p) / count) ** 0.5
            assert float((share - (1 - p)).abs().max()) < 5 * sigma


def test_dropout_depends_on_every_counter() -> None:
    """Between neighbours of each kind, and between seeds and layers, the agreement is that of independent draws."""
    base = Dropout(0.5, seed=7)
    keep = kept_weights(base) > 0
    others = {
        "seed": Dropout(0.5, seed=8),
        "seed, high half": Dropout(0.5, seed=7 + (1 << 40)),
        "layer": Dropout(0.5, seed=7, layer=1),
        "row": Dropout(0.5, seed=7, first_row=1),
    }
    agreements = {name: (keep == (kept_weights(other) > 0)) for name, other in others.items()}
    agreements |= {f"axis {axis}": keep == keep.roll(1, axis) for axis in range(1, 4)}
    agreements["half a sequence"] = keep[:, :, : LENGTH // 2] == keep[:, :, LENGTH // 2 :]
    agreements["queries and keys"] = keep == keep.transpose(2, 3)
    agreements["heads and rows"] = keep[0, 1] == keep[1, 0]
    for name, same in agreements.items():
        share = float(same.double().mean())
        if name == "queries and keys":  # its diagonal agrees with itself, each pair counts twice
            assert abs(share - 0.5) < 0.05, name
        else:
            assert abs(share - 0.5) < 5 * 0.5 / same.numel() ** 0.5, name
    assert torch.equal(kept_weights(Dropout(0.5, seed=7)), kept_weights(base))
    shifted = kept_weights(Dropout(0.5, seed=7, first_row=1))[0]  # row 1 under its own number
    assert torch.equal(shifted, kept_weights(base)[1])


def test_dropout_does_not_repeat_far_away() -> None:
    """Positions of a million tokens; and every 32-bit counter is met as itself."""
    drop = Dropout(0.5, seed=11)
    stream = drop.stream(torch.tensor(0), torch.tensor(0))
    rng = random.Random(0)
    k = torch.arange(4096)
    first = drop.keeps(stream, torch.tensor(5), k)
    for _ in range(20):
        far = rng.randrange(1 << 20)
        share = float((first == drop.keeps(stream, torch.tensor(far), k + rng.randrange(1 << 20))).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / 4096**0.5


# ---------------------------------------------------------------- the way in, and what is refused


IDS = torch.zeros(2, 6, dtype=torch.int64)


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
def test_masks_enter_through_shard_batch(name: str) -> None:
    """A four-dimensional attention_mask is one; on one process nothing is padded."""
    mask = torch.rand(2, 1, 6, 6) > 0.5
    sequence = shard_batch({"input_ids": IDS, name: mask})["sequence"]
    assert sequence.mask is not None
    assert torch.equal(sequence.mask, mask)
    halves = sequence.split(2)
    assert [half.first_row for half in halves] == [0, 1]
    assert all(torch.equal(half.mask, mask[i : i + 1]) for i, half in enumerate(halves))
    shared = shard_batch({"input_ids": IDS, name: mask[:1]})["sequence"].split(2)
    assert all(torch.equal(half.mask, mask[:1]) for half in shared)
    assert torch.equal(sequence.to("cpu").mask, mask)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"mask": torch.ones(2, 6, 6, dtype=torch.bool)}, r"must be \[2 or 1, heads or 1, 6, 6\], got \[2, 6, 6\]"),
        ({"mask": torch.ones(3, 1, 6, 6, dtype=torch.bool)}, r"got \[3, 1, 6, 6\]"),
        ({"mask": torch.ones(2, 1, 6, 5, dtype=torch.bool)}, r"got \[2, 1, 6, 5\]"),
        ({"mask": torch.ones(2, 1, 6, 6, dtype=torch.int64)}, "must be bool .* or float .*, got torch.int64"),
        ({"mask": torch.ones(2, 1, 6, 6).requires_grad_()}, "a mask has no gradient here"),
        (
            {"mask": torch.ones(2, 1, 6, 6), "attention_mask": torch.ones(2, 1, 6, 6)},
            "give mask or a four-dimensional attention_mask, not both",
        ),
    ],
)
def test_masks_that_are_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch({"input_ids": IDS, **batch})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window=0 with causal=True"),
        ({"window": 4, "causal": False}, "window=4 with causal=False: a window counts at least 1 key and needs causal"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout=-0.1 must lie"),
    ],
)
def test_arguments_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPAttention(1.0, **fields)


def call(attention: CPAttention, sequence: SequenceContext, mask: Tensor | None = None) -> Tensor:
    q, k, v = (torch.randn(2, heads, 6, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    return attention(q, k, v, sequence, mask)


def test_calls_that_are_refused() -> None:
    sequence = shard_batch({"input_ids": IDS})["sequence"]
    attention = CPAttention(1.0, dropout=0.5)
    attention.path = "layers.0.attention"
    with pytest.raises(ValueError, match=r"layers\.0\.attention: dropout=0.5 needs the batch's seed: pass shard_batch"):
        call(attention, sequence)
    attention.eval()
    assert torch.equal(call(attention, sequence), call(CPAttention(1.0), sequence))  # and no seed is needed
    with pytest.raises(ValueError, match=r"layers\.0\.attention: a mask must be \[2 or 1"):
        call(attention, sequence, torch.ones(2, 1, 5, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"layers\.0\.attention: the mask has 2 heads, q has 4; give 1 or all"):
        call(attention, sequence, torch.ones(2, 2, 6, 6, dtype=torch.bool))
    attention.kernel = FlashKernel()
    with pytest.raises(ValueError, match=r"layers\.0\.attention: kernel 'flash' takes no mask; use kernel 'sdpa'"):
        call(attention, sequence, torch.ones(2, 1, 6, 6, dtype=torch.bool))


def test_dropout_is_that_of_the_batchs_seed() -> None:
    attention = CPAttention(1.0, dropout=0.5)
    outs = [call(attention, shard_batch({"input_ids": IDS}, dropout_seed=seed)["sequence"]) for seed in (3, 3, 4)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
