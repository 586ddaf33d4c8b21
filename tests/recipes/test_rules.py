"""Each rule of ``recipes/rules.py`` by its message; the line of the key is in front of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from models.common.tiny import make_tiny_qwen3_moe
from recipes.cli import CONFIGS
from recipes.loader import RecipeError, load_recipe
from recipes.rules import VERSION

from .test_loader import QUICKSTART, line_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["parallel.cp.size=3"], "parallel.cp.size", r"cp\.size=3 x dp_replicate=1 does not divide nproc=2; use nproc: 3"),
        (["parallel.nproc=4", "parallel.dp_shard=4"], "parallel.dp_shard", "is 8, nproc is 4; use dp_shard: 2"),
        (["train.global_batch=6"], "train.global_batch", "6 is not a multiple of micro_batch=4 x 1 data ranks; use 8"),
        (["parallel.nproc=4"], "train.global_batch", "4 is not a multiple of micro_batch=4 x 2 data ranks; use 8"),
        (["optim.warmup_steps=101"], "optim.warmup_steps", "101 exceeds train.steps=100"),
        (["data.valid_fraction=0.0"], "train.eval_every", "validation needs data"),
        (["data.source=nowhere.jsonl"], "data.source", "no such file"),
        (["data.source=notes.pdf"], "data.source", "neither 'pydoc_topics' nor a .txt or .jsonl file"),
        (["model.path=x"], "model.path", "belongs to init: pretrained"),
        (["model.config={}"], "model.config", "init: random needs the model's sizes"),
        (["data.tokenizer=model"], "data.tokenizer", "'model' needs a checkpoint"),
        (["data.vocab_size=4096"], "data.vocab_size", "4096 exceeds model.config.vocab_size=2048"),
        (["model.init=pretrained", "model.config={}"], "model.path", "needs the folder of a checkpoint"),
        (["model.config.num_expert=4"], "model.config.num_expert", r"unknown key \(did you mean 'num_experts'\?\)"),
        (["model.config.hidden_size=wide"], "model.config.hidden_size", "no model can be built .*expected int, got str"),
        (["model.config.hidden_act=foo"], "model.config", "no model can be built from this config: KeyError: 'foo'"),
        (["model.config.rope_parameters={rope_type: foo, rope_theta: 1.0}"], "model.config", "'foo' is not one of default"),
        (["model.config.num_hidden_layers=100000"], "model.config.num_hidden_layers", "got 100000, legal is 1 to 1000"),
        (["model.config.hidden_size=0"], "model.config.hidden_size", "got 0, legal is at least 1"),
        (["model.config.num_experts=-1"], "model.config.num_experts", "got -1, legal is at least 0"),
        (["model.config.dtype=float32"], "model.config.dtype", r"is said by model\.dtype; leave it out here"),
        (["model.config.model_type=llama"], "model.config.model_type", r"is said by model\.family"),
        (["data.tokenizer=gpt2"], "data.tokenizer", "'gpt2' is neither 'model' nor 'train_bpe' nor a tokenizer's folder"),
        ([f"data.source={'a' * 5000}.txt"], "data.source", "no such file"),
        (["model.config.use_sliding_window=true"], "model.config", "sliding_window=4096 .*not available in this version"),
        (["model.config.attention_dropout=0.1"], "model.config", "attention_dropout=0.1 is not available"),
        (["data.seq_len=8192"], "data.seq_len", r"8192 exceeds the model's 4096 positions .*yarn, factor: 2\.0"),
        (
            ["data.seq_len=8193", "model.config.rope_parameters={rope_type: yarn, factor: 2.0, rope_theta: 10000.0}"],
            "data.seq_len",
            "8193 exceeds the model's 8192 positions",
        ),
        (["parallel.cp.algorithm=hybrid"], "parallel.cp.algorithm", r"algorithm 'hybrid' needs ulysses_degree, a divisor of the cp size between 1 and 2; cp size 2 has no such divisor"),
        (["parallel.cp.algorithm=hybrid_ring", "parallel.cp.ulysses_degree=2"], "parallel.cp.ulysses_degree", "ulysses_degree=2 with algorithm 'hybrid_ring' must lie between 1 and the cp size 2"),
        (["parallel.cp.load_balance=true", "parallel.cp.algorithm=ulysses"], "parallel.cp.load_balance", r"model\.layers\.0\.self_attn: load_balance=True is for algorithms whose heads stay, not for 'ulysses'"),
        (["parallel.cp.kernel=flash"], "parallel.cp.kernel", r'"flash" is not available in this version \(0\.1\.0\): use sdpa'),
        (
            ["parallel.cp.algorithm=ulysses", "parallel.nproc=4", "parallel.cp.size=4"],
            "parallel.cp.algorithm",
            "num_key_value_heads=2 is not divisible by the ulysses degree 4: use algorithm 'all_gather' or 'ring', "
            r"or algorithm 'hybrid' with ulysses_degree=2, or kv_head_policy='repeat' \(each kv head travels 2 times\)",
        ),
        (
            ["parallel.cp.algorithm=ulysses", "parallel.nproc=3", "parallel.cp.size=3"],
            "parallel.cp.algorithm",
            "num_attention_heads=8 is not divisible by the ulysses degree 3: use algorithm 'all_gather' or 'ring'",
        ),
        (
            ["parallel.cp.algorithm=ulysses", "parallel.cp.ulysses_degree=1"],
            "parallel.cp.ulysses_degree",
            "ulysses_degree=1 with algorithm 'ulysses' must be the cp size 2: leave it out",
        ),
        (["parallel.cp.ulysses_degree=2"], "parallel.cp.ulysses_degree", "ulysses_degree=2 has no meaning with 'all_gather'; leave it out"),
        (["parallel.cp.per_layer={softmax: {algoritm: ulysses}}"], "parallel.cp.per_layer", "unknown field 'algoritm'"),
        (["parallel.cp.per_layer.softmax.algorithm=5"], "parallel.cp.per_layer", "algorithm=5 must be a string"),
        (["parallel.cp.per_layer.softmax.algorithm=ulyses"], "parallel.cp.per_layer", r"algorithm 'ulyses' is not available for 'softmax' layers; available: all_gather \| ulysses"),
        (["parallel.cp.per_layer.softmax.kernel=sdp"], "parallel.cp.per_layer", "kernel 'sdp' is not available; available: sdpa"),
        (
            ["parallel.cp.per_layer={model.layers.7.*: {algorithm: ulysses}}"],
            r"parallel\.cp\.per_layer",
            r"matches no layer; this model has kinds softmax and paths such as .model\.layers\.0\.self_attn",
        ),
        (
            ["parallel.nproc=4", "parallel.cp.size=4", "parallel.cp.per_layer={'*.1.*': {algorithm: ulysses}}"],
            "parallel.cp.per_layer",
            "num_key_value_heads=2 is not divisible by the ulysses degree 4",
        ),
    ],
)  # fmt: skip
def test_rule(overrides: list[str], path: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?m)^(override '.*'|quickstart\.yaml:\d+)  {path}: .*{message}"):
        load_recipe(QUICKSTART, overrides)


def test_rule_says_the_line(tmp_path: Path) -> None:
    text = QUICKSTART.read_text().replace("    size: 2\n", "    size: 3\n")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=rf"mine\.yaml:{line_of('size')}  parallel\.cp\.size"):
        load_recipe(file)


def test_kv_heads_may_be_repeated() -> None:
    overrides = ["parallel.cp.algorithm=ulysses", "parallel.nproc=4", "parallel.cp.size=4"]
    assert load_recipe(QUICKSTART, [*overrides, "parallel.cp.kv_head_policy=repeat"]).parallel.cp.size == 4


def test_scaled_rotary_embeddings_reach_further() -> None:
    rope = "model.config.rope_parameters={rope_type: yarn, factor: 2.0, rope_theta: 10000.0}"
    recipe = load_recipe(QUICKSTART, ["data.seq_len=8192", rope])
    assert recipe.model.config["rope_parameters"] == {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}


def test_a_dense_model_and_double_precision_are_legal() -> None:
    assert load_recipe(QUICKSTART, ["model.config.num_experts=0", "model.dtype=float64"]).model.dtype == "float64"


def test_data_ranks_that_nobody_knows_yet() -> None:
    """Without nproc the devices decide at the start; dp_replicate is known already."""
    recipe = load_recipe(QUICKSTART, ["parallel.nproc=null", "parallel.dp_replicate=2", "train.global_batch=8"])
    assert recipe.parallel.nproc is None
    with pytest.raises(RecipeError, match="4 is not a multiple of micro_batch=4 x 2 data ranks"):
        load_recipe(QUICKSTART, ["parallel.nproc=null", "parallel.dp_replicate=2"])


def test_the_version_in_messages_is_the_projects() -> None:
    project = tomllib.loads((CONFIGS.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_empty_data_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RecipeError, match=r"data\.source: .*empty\.jsonl is empty; put text into it"):
        load_recipe(QUICKSTART, [f"data.source={tmp_path / 'empty.jsonl'}"])


def test_finetune_recipe_with_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The recipe for a checkpoint of one's own is right once its two paths exist."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "hello"}\n')
    base = [f"model.path={checkpoint}", f"data.source={text}", "data.seq_len=2048"]
    recipe = load_recipe(CONFIGS / "qwen3_moe" / "finetune.yaml", base)
    assert recipe.parallel.cp.size == 8
    cases = {
        "data.tokenizer=train_bpe": "'train_bpe' does not fit trained weights",
        "model.config={vocab_size: 97}": "belongs to init: random",
        "parallel.cp.algorithm=ulysses": "num_key_value_heads=2 is not divisible by the ulysses degree 8",
    }
    for override, message in cases.items():
        with pytest.raises(RecipeError, match=message):
            load_recipe(CONFIGS / "qwen3_moe" / "finetune.yaml", [*base, override])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "llama"}', r"holds a 'llama' checkpoint, model\.family is 'qwen3_moe'; make them agree"),
        ("[]", "holds a None checkpoint"),
        ("{", r"config\.json cannot be read as JSON"),
        ('{"model_type": "qwen3_moe", "num_experts": "x"}', "no model can be built from this config: .*num_experts"),
        (None, r"is no folder with a config\.json"),
    ],
)
def test_folder_that_is_no_checkpoint_of_the_family(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(RecipeError, match=rf"(?m)^override 'model\.path=.*'  model\.path: .*{message}"):
        load_recipe(
            QUICKSTART, ["model.init=pretrained", "model.config={}", f"model.path={tmp_path}", "data.tokenizer=model"]
        )
