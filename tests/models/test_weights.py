"""The weight table: exactly transformers' state dict, in memory and on disk; every piece tiles its parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeForCausalLM

from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError, WeightEntry, WeightTable, plain
from models.qwen3_moe.weights import weight_table
from tests.models.weights_helpers import read_all

CONFIGS = {
    "plain": {},
    "dense layer": {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "every second": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no experts": {"num_experts": 0},
    "no head_dim": {"head_dim": 4, "num_key_value_heads": 4},
    "all": {
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_table_is_the_state_dict_of_transformers(tmp_path, overrides):
    config = tiny_qwen3_moe_config(**overrides)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model.tie_weights()
    table = weight_table(config)
    assert table.native_shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    saved = read_all(make_tiny_qwen3_moe(tmp_path, **overrides))
    assert table.hf_shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@st.composite
def entries(draw):
    """Entries of every form: stacked or not, one to three row blocks of equal or own sizes, one to three dims."""
    rows = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    if draw(st.booleans()):
        rows = [rows[0]] * len(rows)
    tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    outer = draw(st.integers(1, 4)) if draw(st.booleans()) else None
    sources = tuple(tuple(f"s.{i}.{j}" for j in range(len(rows))) for i in range(outer or 1))
    shape = (sum(rows), *tail)
    own = None if len(set(rows)) == 1 else tuple(rows)
    return WeightEntry("n", shape if outer is None else (outer, *shape), sources, stacked=outer is not None, rows=own)


@settings(max_examples=200, deadline=None)
@given(entries(), st.data())
def test_pieces_are_the_inverse_of_concatenate_and_stack(entry, data):
    native = torch.arange(torch.Size(entry.shape).numel()).view(entry.shape)
    taken = {piece.name: native[tuple(slice(*s) for s in piece.box)].reshape(piece.shape) for piece in entry.pieces}
    blocks = [torch.cat([taken[name] for name in names]) for names in entry.sources]
    assert torch.equal(torch.stack(blocks) if entry.stacked else blocks[0], native)
    # any shard is filled once and fully, out of either layout
    box = tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in entry.shape)
    for pieces, disk in ((entry.pieces, taken), ((entry.whole,), {entry.name: native})):
        shard = torch.full([stop - start for start, stop in box], -1)
        for piece in pieces:
            if common := piece.overlap(box):
                target = shard[tuple(slice(*s) for s in common[1])]
                assert (target == -1).all()
                target.copy_(disk[piece.name][tuple(slice(*s) for s in common[0])].view(target.shape))
        assert torch.equal(shard, native[tuple(slice(*s) for s in box)])


def test_pieces_follow_the_bytes_of_the_native_tensor():
    """The converter writes each piece as one run of bytes."""
    entry = WeightEntry("n", (3, 5, 2), (("a", "b"), ("c", "d"), ("e", "f")), stacked=True, rows=(2, 3))
    assert [piece.start for piece in entry.pieces] == [(0, 0, 0), (0, 2, 0), (1, 0, 0), (1, 2, 0), (2, 0, 0), (2, 2, 0)]
    assert [piece.shape for piece in entry.pieces] == [(2, 2), (3, 2)] * 3


def test_scalar_entry():
    piece = plain("scale", ()).pieces[0]
    assert (piece.shape, piece.box, piece.overlap(())) == ((), (), ((), ()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WeightEntry("n", (3, 4), (("a",), ("b",)), stacked=True), "2 groups"),
        (lambda: WeightEntry("n", (3, 4), (("a", "b"),)), "give rows="),
        (lambda: WeightEntry("n", (3, 4), (("a", "b"),), rows=(1, 1)), "do not make the 3 rows"),
        (lambda: WeightEntry("n", (2, 4), (("a", "b"), ("c",)), stacked=True), "do not make shape"),
        (lambda: WeightTable("x", (plain("a", (1,)), plain("a", (1,)))), "belongs to both"),
        (lambda: WeightTable("x", (plain("a", (1,)), plain("b", (1,), source="a"))), "belongs to both"),
        (lambda: WeightTable("x", (WeightEntry("n", (2,), (("a", "a"),)),)), "named twice"),
        (lambda: WeightTable("x", (plain("a", (1,)),), {"head": "b"}), "tied head"),
        (lambda: WeightTable("x", (plain("a", (1,)),), {"a": "a"}), "tied a"),
    ],
)
def test_a_wrong_table_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_error_lists_twenty_and_counts_the_rest():
    error = CheckpointError("folder", [f"problem {i}" for i in range(23)])
    lines = str(error).splitlines()
    assert lines[0] == "folder: 23 problems"
    assert lines[20:] == ["  problem 19", "  ... and 3 more"]
    assert len(error.problems) == 23
