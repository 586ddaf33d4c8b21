"""Rotary embedding against a fresh Qwen3MoeRotaryEmbedding of transformers, for every rope type it can compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from cp_core import shard_batch
from cp_core.testing import run_distributed
from models.common.rope import RotaryEmbedding, apply_rope
from models.common.tiny import tiny_qwen3_moe_config
from tests.models._parity import (
    FP64,
    PRELOAD,
    alone,
    checkpoint,
    close,
    load,
    mesh_of,
    random_batch,
    spans_of,
    step,
)

ORIGINAL, LONGEST = 32, 128  # lengths of training before and after extension
DIM = 8

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, mscale": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 0.7,
        "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn, attention_factor": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "proportional": {"factor": 2.0},
    "proportional, partial": {"factor": 2.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def config_of(name: str, **overrides: Any) -> Any:
    longest = ORIGINAL if name == "dynamic" else LONGEST  # dynamic grows beyond max_position_embeddings
    parameters = {"rope_type": name.split(",")[0], "rope_theta": 10_000.0, **TYPES[name]}
    return tiny_qwen3_moe_config(**{"max_position_embeddings": longest, "rope_parameters": parameters, **overrides})


def theirs(config: Any, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = Qwen3MoeRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def ours(config: Any, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(config)(positions, int(positions.max()), dtype)


def positions_of(kind: str) -> Tensor:
    """Two rows; the second has gaps."""
    length = {"short": 11, "just short": ORIGINAL, "just long": ORIGINAL + 1, "long": 100}.get(kind, 60)
    row = torch.arange(length)
    if kind == "stride 3":
        return torch.stack([3 * row, (row * row) % 181])
    return torch.stack([row, row.flip(0)])


def test_every_type_that_transformers_knows_is_here() -> None:
    assert {name.split(",")[0] for name in TYPES} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("kind", ["short", "just short", "just long", "long", "stride 3"])
@pytest.mark.parametrize("name", TYPES)
def test_equals_transformers(name: str, kind: str) -> None:
    config, positions = config_of(name), positions_of(kind)
    for got, want in zip(ours(config, positions), theirs(config, positions), strict=True):
        assert got.shape == want.shape == (2, 1, positions.shape[1], DIM)
        assert got.dtype == want.dtype
        assert float((got - want).abs().max()) <= 2e-7 * float(want.abs().max()), name


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_long_and_short_differ_and_nothing_is_remembered(name: str) -> None:
    config = config_of(name)
    rope = RotaryEmbedding(config)
    positions = torch.arange(11)[None]
    before = rope(positions, 10, torch.float32)
    long = rope(positions, 99, torch.float32)
    assert not torch.equal(long[1], before[1])
    again = rope(positions, 10, torch.float32)
    assert torch.equal(before[0], again[0])
    assert torch.equal(before[1], again[1])


def test_legacy_rope_scaling_is_understood() -> None:
    """Older configs: rope_scaling with "type", and rope_theta beside it."""
    legacy = tiny_qwen3_moe_config(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = tiny_qwen3_moe_config(rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0})
    positions = positions_of("long")
    for a, b, c in zip(ours(legacy, positions), ours(new, positions), theirs(legacy, positions), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=2e-7)


def test_head_dim_of_the_config_or_of_the_hidden_size() -> None:
    for head_dim, want in ((16, 16), (None, 4)):  # 32 / 8
        config = tiny_qwen3_moe_config(head_dim=head_dim)
        cos, _ = ours(config, torch.arange(5)[None])
        assert cos.shape[-1] == want
        torch.testing.assert_close(cos, theirs(config, torch.arange(5)[None])[0], rtol=0, atol=2e-7)


def test_casting_the_model_does_not_round_frequencies() -> None:
    """Known fault B33: a buffer cast by a later ``.to``; at position 4000 bf16 frequencies are off by whole turns."""
    positions = torch.arange(3990, 4000)[None]
    rope = RotaryEmbedding(config_of("default"))
    want = rope(positions, 3999, torch.float32)
    assert not list(rope.buffers())
    assert not list(rope.parameters())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        rope.to(dtype)
        for got, reference in zip(rope(positions, 3999, torch.float32), want, strict=True):
            assert torch.equal(got, reference)
    model = load(checkpoint(), torch.float32).to(torch.bfloat16)
    got = model.model.rotary_emb(positions, 3999, torch.bfloat16)[0]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, RotaryEmbedding(model.config)(positions, 3999, torch.float32)[0].bfloat16())


def test_built_on_meta_and_fp64_angles() -> None:
    positions = positions_of("long")
    for name in TYPES:
        config = config_of(name)
        with torch.device("meta"):
            rope = RotaryEmbedding(config)
        cos, sin = rope(positions, 99, torch.float64)
        assert cos.dtype == torch.float64
        assert bool(cos.isfinite().all())
        assert bool(sin.any())
        # angles in fp64 from the fp32 frequencies: on the unit circle to the last bit, times the factor
        factor = rope._frequencies(100)[1]
        torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, factor**2), rtol=1e-13, atol=0)


def test_apply_equals_transformers() -> None:
    cos, sin = ours(config_of("default"), positions_of("short"))
    q, k = torch.randn(2, 8, 11, DIM), torch.randn(2, 2, 11, DIM)
    for got, want in zip(
        (apply_rope(q, cos, sin), apply_rope(k, cos, sin)),
        apply_rotary_pos_emb(q, k, cos.squeeze(1), sin.squeeze(1)),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_unknown_type_is_refused() -> None:
    config = config_of("default")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ValueError, match=r"rope_type='spiral' is not one of default \| linear \| dynamic \| yarn"):
        RotaryEmbedding(config)


# Types that depend on the length must see the global one.

LENGTH = 61


def length_worker(rank: int, size: int, folders: dict[str, Path]) -> dict[tuple[str, str], Any]:
    mesh, found = mesh_of({"cp": size}), {}
    for name, folder in folders.items():
        for algorithm in ("all_gather", "ulysses"):
            model = load(folder, torch.float64, mesh, algorithm)
            found[name, algorithm] = step(model, random_batch(LENGTH), mesh)
    return found


@pytest.mark.dist2
def test_dynamic_and_longrope_use_the_longest_position_of_all_ranks() -> None:
    folders = {}
    for name in ("dynamic", "longrope", "llama3"):
        config = config_of(name)
        folders[name] = checkpoint(
            rope_parameters=dict(config.rope_parameters), max_position_embeddings=config.max_position_embeddings
        )
    results = run_distributed(length_worker, 2, folders, preload=PRELOAD)[0]  # rank 0 holds 31 tokens, less than 32
    for name, folder in folders.items():
        one = step(load(folder, torch.float64), random_batch(LENGTH))
        want = alone(folder, torch.float64, random_batch(LENGTH), spans_of([[LENGTH]] * 2), with_aux=False)
        for algorithm in ("all_gather", "ulysses"):
            close(results[name, algorithm], one, **FP64)
            close(results[name, algorithm], want, loss=1e-6, logits=1e-6, grads=1e-5)


def test_padding_does_not_lengthen_the_sequence() -> None:
    """Real positions decide; a row of 30 real tokens is short however far it is padded."""
    folder = checkpoint(rope_parameters=dict(config_of("dynamic").rope_parameters), max_position_embeddings=ORIGINAL)
    model, batch = load(folder, torch.float32), random_batch(30)
    want = model(**batch).logits
    padded = {key: torch.nn.functional.pad(value, (20, 20), value=1) for key, value in batch.items()}
    mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (20, 20))
    local = shard_batch({**padded, "attention_mask": mask})
    assert local["sequence"].max_position == 29
    torch.testing.assert_close(model(**local).logits[:, 20:50], want, rtol=0, atol=1e-5)
