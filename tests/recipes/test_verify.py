"""``recipes verify``: it passes what is right, and names the layer of every fault that was planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import recipes.verify
from cp_core.collectives import Transfer
from cp_core.strategies import ComposedStrategy
from cp_core.strategies.gather import GatherExchange, SequenceGather
from cp_core.testing import WorkerError
from models import CPPreTrainedModel
from recipes.cli import CONFIGS, app
from recipes.loader import load_recipe
from recipes.schema import Recipe
from recipes.verify import TOLERANCE, Verdict, first_batch, lines, narrow_config, verify

QUICKSTART = CONFIGS / "qwen3_moe" / "quickstart.yaml"
SMALL = [
    "data.tokenizer=train_bpe",
    "data.vocab_size=300",
    "model.config.vocab_size=300",
    "model.config.num_hidden_layers=3",
]
LAYER = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file, so that the tokenizer is trained in no time; documents of many lengths."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = (" ".join(f"{(i * j) ** 3 % 9973:x}ring" for j in range(3 + 29 * i % 100)) for i in range(1, 40))
    file.write_text("\n".join(f'{{"text": "{document}"}}' for document in documents))
    return file


def recipe(text: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [*SMALL, f"data.source={text}", *overrides])


class Early(ComposedStrategy):
    """Every query stands one token later than it does: it sees its successor."""

    def _spans(self, rank: int, size: int, tokens: int) -> Any:
        return tuple((start + 1, stop + 1) for start, stop in super()._spans(rank, size, tokens))


@dataclasses.dataclass(frozen=True)
class Deaf(GatherExchange):
    """The gradient's way back is left out: each rank keeps what its own queries say."""

    def start_reverse(self, grad: Tensor) -> Transfer:
        mine = grad.chunk(self.group.size(), 2)[self.group.rank()].clone()
        return Transfer([], lambda: mine)


class DeafGather(SequenceGather):
    def exchange(self) -> GatherExchange | None:
        return Deaf(self.axis.group) if self.axis.group is not None else None


def strategy_of(model: CPPreTrainedModel) -> tuple[Any, ComposedStrategy]:
    call: Any = model.get_submodule(f"{LAYER}.cp")
    return call, call.strategy


def offset_off_by_one(model: CPPreTrainedModel) -> None:
    call, strategy = strategy_of(model)
    call.strategy = Early(**{f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)})


def dropped_reverse_exchange(model: CPPreTrainedModel) -> None:
    call, strategy = strategy_of(model)
    assert strategy.gather is not None
    call.strategy = dataclasses.replace(strategy, gather=DeafGather(strategy.gather.axis))


def halved_gradient(model: CPPreTrainedModel) -> None:
    model.get_parameter(f"{LAYER}.k_proj.weight").register_hook(lambda grad: grad / 2)


def halved_query_gradient(model: CPPreTrainedModel) -> None:
    """Of an activation: every parameter before it is wrong too."""

    def halve(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(lambda grad: grad / 2)

    model.get_submodule(f"{LAYER}.q_norm").register_forward_hook(halve)


def not_a_number(model: CPPreTrainedModel) -> None:
    model.get_parameter(f"{LAYER}.v_proj.weight").register_hook(lambda grad: grad * torch.nan)


def raising(model: CPPreTrainedModel) -> None:
    raise RuntimeError("planted")


@pytest.mark.dist2
@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (offset_off_by_one, "output"),
        (dropped_reverse_exchange, "gradient of model.layers.1.self_attn.k_proj.weight"),
        (halved_gradient, "gradient of model.layers.1.self_attn.k_proj.weight"),
        (halved_query_gradient, "gradient of model.layers.1.self_attn.q_proj.weight"),
        (not_a_number, "gradient of model.layers.1.self_attn.v_proj.weight"),
    ],
)
def test_a_planted_fault_is_named(text: Path, fault: Any, what: str, schedule: str) -> None:
    verdict = verify(recipe(text, f"parallel.cp.schedule={schedule}"), prepare=fault)
    assert verdict.first is not None
    assert (verdict.first.layer, verdict.first.what) == (LAYER, what)
    assert not verdict.first.error <= 1e-6  # nowhere near the tolerance
    said = list(lines(verdict))
    assert said[-1].startswith(f"\u2717 the first that differs is {LAYER}: {what}, ")


def check(verdict: Verdict, layers: int) -> None:
    assert verdict.first is None, str(verdict.first)
    assert [found.layer for found in verdict.outputs] == [
        f"model.layers.{i}{part}" for i in range(layers) for part in (".self_attn", "")
    ]
    named = {found.what.removeprefix("gradient of ") for found in verdict.gradients}
    for parameter in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        f"{LAYER}.o_proj.weight",
        f"{LAYER}.q_norm.weight",
    ):
        assert parameter in named
    assert {f"gradient at the output of {found.layer}" for found in verdict.outputs} <= named


@pytest.mark.dist4
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.cp.size=4", "parallel.nproc=4", "parallel.cp.algorithm=hybrid", "parallel.cp.ulysses_degree=2"],
        ["parallel.cp.algorithm=ring", "parallel.cp.load_balance=true", "parallel.activation_checkpointing=full"],
        ["parallel.cp.size=4", "parallel.nproc=4", 'parallel.cp.per_layer={"model.layers.1.*": {algorithm: ring}}'],
    ],
)
def test_what_is_right_passes(text: Path, overrides: list[str]) -> None:
    verdict = verify(recipe(text, "parallel.cp.schedule=async", *overrides))
    check(verdict, 3)
    said = list(lines(verdict))
    assert said[0] == verdict.report.split("\n")[0] or said[0].startswith("layer")
    assert said[-1] == "\u2713 equal within 1e-10"
    assert TOLERANCE == 1e-10


def test_the_narrow_model_keeps_layers_heads_and_documents(text: Path) -> None:
    whole = recipe(text, "model.config.num_key_value_heads=4", "model.config.num_experts_per_tok=3")
    config = narrow_config(whole)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 8, 4)
    assert (config.hidden_size, config.head_dim, config.vocab_size, config.num_experts_per_tok) == (64, 8, 300, 3)
    batch = first_batch(whole, config)
    assert batch["input_ids"].shape == (2, 256)
    assert int(batch["input_ids"].max()) < 300
    assert any(len(row.unique()) > 1 for row in batch["document_ids"])


def test_a_cp_size_of_one_has_nothing_to_compare(text: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.cp\.size is 1: there is nothing to compare; add parallel\.cp\.si"):
        verify(recipe(text, "parallel.cp.size=1", "parallel.nproc=1"))


@pytest.mark.dist2
def test_a_process_that_fails_is_heard(text: Path) -> None:
    with pytest.raises(WorkerError, match="planted"):
        verify(recipe(text), prepare=raising)


@pytest.mark.dist2
def test_exit_codes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*overrides: str) -> Any:
        return CliRunner().invoke(app, ["verify", str(QUICKSTART), *SMALL, f"data.source={text}", *overrides])

    passed = call()
    assert passed.exit_code == 0, passed.output
    assert "\u2713 equal within 1e-10" in passed.output
    assert "bytes/token" in passed.output
    alone = call("parallel.cp.size=1", "parallel.nproc=1")
    assert alone.exit_code == 2
    assert "there is nothing to compare" in alone.output
    illegal = call("parallel.cp.size=2", "parallel.cp.algorithm=hybrid")
    assert illegal.exit_code == 2
    assert "needs ulysses_degree" in illegal.output
    right = recipes.verify.verify
    monkeypatch.setattr(recipes.verify, "verify", lambda checked: right(checked, prepare=halved_gradient))
    wrong = call()
    assert wrong.exit_code == 1
    assert f"\u2717 the first that differs is {LAYER}: gradient of {LAYER}.k_proj.weight, 5.0e-01" in wrong.output
    monkeypatch.setattr(recipes.verify, "verify", lambda checked: right(checked, prepare=raising))
    broken = call()
    assert broken.exit_code == 1
    assert "planted" in broken.output
