"""A recipe small enough for tests, and a worker that runs it on the process group of ``run_distributed``."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
import yaml

from cp_core.testing import run_distributed
from recipes.finetune import work
from recipes.loader import load_recipe, run_dir
from recipes.metrics import read_metrics

PRELOAD = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "recipes.finetune")


def write_corpus(folder: Path, documents: int = 24, characters: int = 900) -> Path:
    """A .jsonl file of short real documents of uneven length."""
    topics = [pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)]
    path = folder / "corpus.jsonl"
    with open(path, "w") as file:
        for index, text in enumerate(topics[:documents]):
            file.write(json.dumps({"text": text[: characters - 23 * index]}) + "\n")
    return path


def write_recipe(folder: Path, name: str = "tiny", **overrides: Any) -> Path:
    """A recipe file of a tiny model on that corpus; ``overrides`` are ``section__key=value``."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(folder)
    recipe: dict[str, Any] = {
        "name": name,
        "run_dir": str(folder / "runs" / "{name}"),
        "model": {
            "family": "qwen3_moe",
            "init": "random",
            "dtype": "float64",
            "config": {
                "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 24,
                "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.1,
                "router_aux_loss_coef": 0.01, "max_position_embeddings": 4096,
            },
        },
        "data": {"source": str(corpus), "tokenizer": "train_bpe", "vocab_size": 320, "seq_len": 90, "valid_fraction": 0.2},
        "parallel": {"nproc": 1, "cp": {"size": 1}},
        "optim": {"lr": 3e-3, "warmup_steps": 2},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 1},
        "export": {"hf": False},
        "log": {"plot": False},
    }  # fmt: skip
    for key, value in overrides.items():
        target = recipe
        *sections, last = key.split("__")
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_worker(rank: int, world_size: int, path: str) -> None:
    """Run the recipe at ``path`` on this process group."""
    recipe = load_recipe(Path(path))
    folder = run_dir(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)  # nothing may depend on it
    work(recipe, folder)


def losses(path: Path, key: str = "loss") -> list[float]:
    """One number a step from the run's metrics."""
    folder = run_dir(load_recipe(path))
    return [event[key] for event in read_metrics(folder / "metrics.jsonl") if event["kind"] == "step" and key in event]


def train(path: Path, processes: int, timeout: float = 120) -> None:
    """Run the recipe at ``path`` on so many processes."""
    run_distributed(run_worker, processes, str(path), timeout=timeout, preload=PRELOAD)


def curve(folder: Path, name: str, processes: int, **overrides: Any) -> torch.Tensor:
    """Write a recipe, run it, and return its losses, one a step."""
    path = write_recipe(folder, name, parallel__nproc=processes, **overrides)
    train(path, processes)
    return torch.tensor(losses(path), dtype=torch.float64)
