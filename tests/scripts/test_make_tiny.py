"""make_tiny: a checkpoint that transformers wrote and reads, with the shards, dtype and shapes asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from models.common.tiny import make_tiny_qwen3_moe
from tests.models.weights_helpers import read_all, read_files, same

ROOT = Path(__file__).resolve().parents[2]


def run(*args):
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_script_and_function_write_the_same(tmp_path):
    options = ("--shards", 3, "--dtype", "bfloat16", "--seed", 5, "--tied", "--layers", 3)
    done = run("qwen3_moe", tmp_path / "a", *options)
    assert done.returncode == 0, done.stderr
    make_tiny_qwen3_moe(
        tmp_path / "b", shards=3, dtype=torch.bfloat16, seed=5, tie_word_embeddings=True, num_hidden_layers=3
    )
    assert same(read_all(tmp_path / "a"), read_all(tmp_path / "b"))
    assert len(read_files(tmp_path / "a")) == 3
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["tie_word_embeddings"], config["dtype"]) == (3, True, "bfloat16")
    done = run("qwen3_moe", tmp_path / "a")
    assert done.returncode == 2
    assert "holds a checkpoint already" in done.stderr


def test_unknown_family():
    done = run("llama", "nowhere")
    assert done.returncode == 2
    assert "unknown family 'llama'; legal: qwen3_moe" in done.stderr


def test_checkpoint_hides_no_fault(tmp_path):
    state = torch.get_rng_state()
    folder = make_tiny_qwen3_moe(tmp_path / "tiny", attention_bias=True)
    assert torch.equal(torch.get_rng_state(), state)
    tensors = read_all(folder)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert tensor.float().std() > 0.01, f"{name} is constant"
        assert tensor.ndim < 2 or tensor.shape[0] != tensor.shape[1], f"{name} is square"
    model, info = Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 48, 32)


@pytest.mark.parametrize("shards", [1, 2, 5, 8])
def test_number_of_shards(tmp_path, shards):
    assert len(read_files(make_tiny_qwen3_moe(tmp_path, shards=shards))) == shards


def test_impossible_number_of_shards(tmp_path):
    with pytest.raises(ValueError, match="shards=500"):
        make_tiny_qwen3_moe(tmp_path / "tiny", shards=500)
    assert not (tmp_path / "tiny").exists()
