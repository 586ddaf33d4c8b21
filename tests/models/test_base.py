"""Building, loading, saving, switches and refusals of the zoo's classes, shown with Qwen3-MoE."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import models
from cp_core import ContextParallelConfig, format_report, shard_batch
from cp_core.testing import run_distributed
from models import AutoModelForCausalLM, ParallelConfig, Qwen3MoeForCausalLM
from models.common.checkpoint_reader import CheckpointReader
from models.common.norm import RMSNorm
from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError
from tests.cp_core._helpers import refusal
from tests.models._parity import PRELOAD, checkpoint, load, mesh_of, random_batch, step
from tests.models.weights_helpers import read_all, same, stack

SIZES = [pytest.param(2, marks=pytest.mark.dist2), pytest.param(4, marks=pytest.mark.dist4)]
FSDP = ParallelConfig(fsdp=True)


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other entries in its config; None removes one."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (target / "config.json").write_text(json.dumps(config))
    return target


def native(folder: Path, config: Any = None) -> dict[str, Tensor]:
    """The file's tensors under native names, put together without the loader."""
    config = config or transformers.Qwen3MoeConfig.from_pretrained(folder)
    return stack(Qwen3MoeForCausalLM.weight_table(config), read_all(folder))


def whole(model: Qwen3MoeForCausalLM) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = value.detach().clone()
    return found


# Refusals by message.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": "auto"}, r"from_pretrained does not take device_map: the zoo loads by mesh=, cp=, parallel="),
        ({"torch_dtype": "auto", "quantization_config": {}}, "does not take quantization_config, torch_dtype"),
        ({"attn_implementation": "eager"}, "does not take attn_implementation"),
        ({"validate": True}, "validate=True is not available in this version; use validate=False"),
        ({"dtype": "float99"}, "dtype='float99' is not one of float32, bfloat16, float16, float64"),
        ({"dtype": "nn"}, "dtype='nn' is not one of float32"),
        ({"dtype": torch.int64}, "dtype=torch.int64 is not one of float32"),
        ({"dtype": "float8_e4m3fn"}, "dtype=.*float8_e4m3fn.* is not one of float32"),
        ({"parallel": FSDP}, "fsdp=True needs a mesh with a dp_shard or cp axis: pass mesh=, or use fsdp=False"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3MoeForCausalLM.from_pretrained(checkpoint(), **arguments)


def test_refused_parallel_settings() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing='selective' is not available in this version"):
        ParallelConfig(activation_checkpointing="selective")
    with pytest.raises(ValueError, match="compile='inductor' is not available in this version; use None"):
        ParallelConfig(compile="inductor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 4}, r"sliding_window=4 .* set use_sliding_window=False"),
        (
            {"attention_dropout": 0.1},
            "attention_dropout=0.1 is not available in this version; set attention_dropout=0.0",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 must be a multiple of num_key_value_heads=3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3MoeForCausalLM.from_pretrained(edited(checkpoint(), tmp_path / "a", **changes))
    with pytest.raises(ValueError, match=message):
        Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(**changes))
    with pytest.raises(ValueError, match=message):
        Qwen3MoeForCausalLM(tiny_qwen3_moe_config(**changes))


def test_refused_folders(tmp_path: Path) -> None:
    other = edited(checkpoint(), tmp_path / "other", model_type="llama")
    with pytest.raises(CheckpointError, match="this folder holds a 'llama' checkpoint; use the class of 'llama'"):
        Qwen3MoeForCausalLM.from_pretrained(other)
    with pytest.raises(ValueError, match=r"other: model_type 'llama' is not in the zoo; it has qwen3_moe"):
        AutoModelForCausalLM.from_pretrained(other)
    with pytest.raises(ValueError, match="LlamaConfig: model_type 'llama' is not in the zoo"):
        AutoModelForCausalLM.from_config(transformers.LlamaConfig())
    with pytest.raises(TypeError, match=r"use AutoModelForCausalLM\.from_pretrained"):
        AutoModelForCausalLM()
    for cls in (Qwen3MoeForCausalLM, AutoModelForCausalLM):
        with pytest.raises(
            ValueError, match=r"nowhere: no such folder \(and not a model id of the form 'owner/name'\)"
        ):
            cls.from_pretrained(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"\./nowhere: no such folder"):
            cls.from_pretrained("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: 1 problem\n  neither model.safetensors nor"):
        Qwen3MoeForCausalLM.from_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match="nobody/nothing: no such folder, and it could not be fetched as a model id"):
        Qwen3MoeForCausalLM.from_pretrained("nobody/nothing")  # HF_HUB_OFFLINE in the test command


def test_auto_model_names_the_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + r"(.|\n)*config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_generate_says_where_to_generate() -> None:
    model = load(checkpoint(), torch.float32)
    with pytest.raises(NotImplementedError, match=r"no KV cache: save_pretrained\(folder\), then generate with"):
        model.generate(torch.tensor([[1]]), max_new_tokens=2)
    assert not model.can_generate()
    with pytest.raises(ValueError, match="save_pretrained does not take push_to_hub"):
        model.save_pretrained("unused", push_to_hub=True)


def mesh_worker(rank: int, size: int, folder: Path) -> dict[str, str]:
    def say(sizes: dict[str, int], **arguments: Any) -> str:
        return refusal(Qwen3MoeForCausalLM.from_pretrained, folder, mesh=mesh_of(sizes), **arguments)

    six = tiny_qwen3_moe_config(num_attention_heads=6, num_key_value_heads=3)
    return {
        "tp": say({"cp": 1, "tp": 2}),
        "pp": say({"pp": 2}),
        "unknown": say({"context": 2}),
        "dp": say({"dp": 2}),
        "order": say({"cp": 2, "dp_shard": 1}),
        "replicated fsdp": say({"dp_replicate": 2}, parallel=FSDP),
        "balance": say({"cp": 2}, cp=ContextParallelConfig(algorithm="ulysses", load_balance=True)),
        "hybrid": say({"cp": 2}, cp=ContextParallelConfig(algorithm="hybrid", ulysses_degree=2)),
        "kernel": say({"cp": 2}, cp=ContextParallelConfig(kernel="flash")),
        "heads": refusal(
            Qwen3MoeForCausalLM.from_config,
            six,
            mesh=mesh_of({"cp": 2}),
            cp=ContextParallelConfig(algorithm="ulysses", kv_head_policy="repeat"),
        ),
    }


@pytest.mark.dist2
def test_refused_meshes_and_strategies() -> None:
    messages = {
        "tp": "mesh axis 'tp' of size 2: not available in this version; use size 1",
        "pp": "mesh axis 'pp' of size 2: not available in this version",
        "unknown": "mesh axis 'context' is not one of pp, dp_replicate, dp_shard, cp, tp",
        "dp": "mesh axis 'dp' is not one of .*write 'dp_shard' or 'dp_replicate'",
        "order": "mesh axes cp, dp_shard stand in another order",
        "replicated fsdp": "fsdp=True needs a mesh with a dp_shard or cp axis",
        "balance": r"model\.layers\.0\.self_attn: load_balance=True is for algorithms whose heads stay, not for 'ulysses'",
        "hybrid": r"model\.layers\.0\.self_attn: ulysses_degree=2 with algorithm 'hybrid' must lie between 1 and the",
        "kernel": "kernel 'flash' cannot run this layer: flash-attn computes in float16",
        "heads": "num_key_value_heads=3 is not divisible by the ulysses degree 2: use algorithm 'all_gather'",
    }
    for said in run_distributed(mesh_worker, 2, checkpoint(), preload=PRELOAD):
        assert said.keys() == messages.keys()
        for name, message in messages.items():
            assert re.search(message, said[name]), said[name]


def heads_worker(rank: int, size: int, folder: Path) -> str:
    cp = ContextParallelConfig(algorithm="ulysses")
    return refusal(Qwen3MoeForCausalLM.from_pretrained, folder, mesh=mesh_of({"cp": size}), cp=cp)


@pytest.mark.dist4
def test_fewer_kv_heads_than_ranks_are_refused_with_the_ways_out() -> None:
    for said in run_distributed(heads_worker, 4, checkpoint(), preload=PRELOAD):
        for part in (
            "num_key_value_heads=2",
            "ulysses degree 4",
            "'all_gather'",
            "kv_head_policy='repeat'",
            "'hybrid' with ulysses_degree=2",
        ):
            assert part in said


# Values.


@pytest.mark.parametrize("dtype", [None, "auto", torch.float32, torch.float64, torch.bfloat16, "bfloat16"])
def test_loaded_parameters_are_the_files(dtype: Any) -> None:
    """Poisoned memory: what is not read would be NaN; nothing is initialised again."""
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint(), dtype=dtype)
    want = torch.float32 if dtype in (None, "auto") else getattr(torch, str(dtype).removeprefix("torch."))
    assert not model.training
    assert model.dtype == model.config.dtype == want
    expected = native(checkpoint())
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert parameter.requires_grad
        assert torch.equal(parameter, expected[name].to(want)), name


def test_dtype_of_a_bf16_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_moe(tmp_path / "bf16", dtype=torch.bfloat16, shards=2)
    assert Qwen3MoeForCausalLM.from_pretrained(folder).dtype == torch.bfloat16  # the config says so
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "out")
    assert same(read_all(tmp_path / "out"), read_all(folder))  # dtypes of the disk, byte for byte
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def mesh_values_worker(rank: int, size: int, folder: Path, tied: Path, out: Path) -> dict[str, Any]:
    meshes = [{"cp": size}, {"dp_shard": size}]
    if size == 4:
        meshes += [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
    seeded, expected = [], native(folder)
    for sizes in meshes:
        for parallel in (None, FSDP):
            mesh = mesh_of(sizes)
            loaded = whole(Qwen3MoeForCausalLM.from_pretrained(folder, mesh=mesh, parallel=parallel))
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
            made = Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(), mesh=mesh, parallel=parallel, seed=3)
            seeded.append(whole(made))
    mesh = mesh_of({"cp": size})
    model = load(folder, torch.float32, mesh, parallel=FSDP)
    model.save_pretrained(out / "fsdp", max_shard_size=20_000)
    load(folder, torch.float32, mesh).save_pretrained(out / "whole")
    results: dict[str, Any] = {"seeded": seeded}
    for parallel in (None, FSDP):
        model = load(tied, torch.float32, mesh, parallel=parallel)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        outcome = step(model, random_batch(61), mesh)
        assert model.lm_head.weight is model.model.embed_tokens.weight  # also after FSDP gathered and freed it
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        results["tied " + ("whole" if parallel is None else "fsdp")] = (outcome, whole(model))
    model.save_pretrained(out / "tied")
    return results


@pytest.mark.parametrize("size", SIZES)
def test_values_on_every_mesh(size: int, tmp_path: Path) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    results = run_distributed(mesh_values_worker, size, checkpoint(), tied, tmp_path, preload=PRELOAD)

    want = whole(Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(), seed=3))
    other = whole(Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(), seed=4))
    assert not torch.equal(want["lm_head.weight"], other["lm_head.weight"])
    for result in results:
        for seeded in result["seeded"]:
            assert seeded.keys() == want.keys()
            assert all(torch.equal(seeded[name], value) for name, value in want.items())

    for name in ("fsdp", "whole"):
        assert same(read_all(tmp_path / name), read_all(checkpoint()))
    assert len(list((tmp_path / "fsdp").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "fsdp" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == read_all(checkpoint()).keys()

    untied = load(tied, torch.float32)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    parts = step(untied, random_batch(61)).grads
    assert parts["lm_head.weight"].any()
    for result in results:
        for kind in ("tied whole", "tied fsdp"):
            outcome, after = result[kind]
            total = parts["model.embed_tokens.weight"] + parts["lm_head.weight"]
            torch.testing.assert_close(outcome.grads["model.embed_tokens.weight"], total, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(
                after["model.embed_tokens.weight"],
                native(tied)["model.embed_tokens.weight"] - 0.1 * total,
                rtol=1e-5,
                atol=1e-6,
            )
    saved = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "tied")
    assert torch.equal(saved.lm_head.weight, results[0]["tied fsdp"][1]["model.embed_tokens.weight"])


def test_tied_weights_stay_tied() -> None:
    folder = checkpoint(tie_word_embeddings=True)
    for model in (
        Qwen3MoeForCausalLM.from_pretrained(folder),
        Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(tie_word_embeddings=True)),
        Qwen3MoeForCausalLM(tiny_qwen3_moe_config(tie_word_embeddings=True)),
        Qwen3MoeForCausalLM.from_pretrained(folder).to(torch.bfloat16),
        copy.deepcopy(Qwen3MoeForCausalLM.from_pretrained(folder)),
    ):
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert "lm_head.weight" not in dict(model.named_parameters())
    untied = Qwen3MoeForCausalLM.from_pretrained(checkpoint())
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


def test_initial_values_are_as_transformers_draws_them() -> None:
    config = tiny_qwen3_moe_config(attention_bias=True, initializer_range=0.05, hidden_size=64)
    model = Qwen3MoeForCausalLM.from_config(config, seed=1)
    theirs = dict(transformers.Qwen3MoeForCausalLM(copy.deepcopy(config)).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all()
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.005, name
        assert parameter.std().item() == pytest.approx(theirs[name].std().item(), rel=0.12, abs=1e-6), name
    weights = [p for name, p in model.named_parameters() if name.endswith("q_proj.weight")]
    assert not torch.equal(*weights)  # each by its own name
    config_before = config.to_dict()
    Qwen3MoeForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert config.to_dict() == config_before  # the caller's config is left alone


def test_built_directly_works_as_in_transformers() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_qwen3_moe_config())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert all(torch.equal(m.weight, torch.ones_like(m.weight)) for m in model.modules() if isinstance(m, RMSNorm))
    theirs = transformers.Qwen3MoeForCausalLM(tiny_qwen3_moe_config())
    theirs.load_state_dict(model.state_dict())
    batch = random_batch(21)
    ours, want = model(**batch), theirs(**batch)
    assert ours.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    ours.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.load_state_dict(theirs.state_dict())
    torch.manual_seed(1)
    other = Qwen3MoeForCausalLM(tiny_qwen3_moe_config())
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    torch.manual_seed(0)
    again = Qwen3MoeForCausalLM(tiny_qwen3_moe_config())
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head


@pytest.mark.parametrize("implementation", [{}, {"experts_implementation": "eager"}, {"attn_implementation": "eager"}])
def test_a_config_that_transformers_has_used_is_taken(implementation: dict[str, str]) -> None:
    """A model of transformers writes its choice of kernels into its config; the zoo has its own."""
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(checkpoint(), **implementation)
    batch = random_batch(21)
    for model in (Qwen3MoeForCausalLM.from_config(theirs.config), Qwen3MoeForCausalLM(copy.deepcopy(theirs.config))):
        model.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, rtol=0, atol=1e-5)


# Saving.


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_is_saved(tied: bool, tmp_path: Path) -> None:
    model = Qwen3MoeForCausalLM.from_config(
        tiny_qwen3_moe_config(tie_word_embeddings=tied, mlp_only_layers=[1], attention_bias=True), seed=5
    )
    batch = random_batch(33)
    torch.optim.SGD(model.parameters(), lr=0.3).zero_grad()
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.3).step()
    model.save_pretrained(tmp_path / "out", max_shard_size=30_000)
    theirs, report = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    want, got = model(**batch), theirs(**batch)
    assert (got.logits - want.logits).abs().max().item() <= 1e-5 * want.logits.abs().max().item()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["model_type"] == "qwen3_moe"
    assert config["dtype"] == "float32"
    assert config["mlp_only_layers"] == [1]
    assert config["tie_word_embeddings"] is tied
    assert not [key for key in config if key.startswith(("_", "cp_"))]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict() == theirs.config.to_dict()
    names = set(read_all(tmp_path / "out"))
    assert ("lm_head.weight" in names) is not tied
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(**batch).logits, want.logits)


def test_saving_what_was_loaded_is_byte_exact(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copytree(checkpoint(), tmp_path / "in", dirs_exist_ok=True)
    (tmp_path / "in" / "generation_config.json").write_text('{"top_k": 7}')
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == {"top_k": 7}
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "float32"  # as it was on disk
    rounded = {name: value.bfloat16().float() for name, value in read_all(checkpoint()).items()}
    assert same(read_all(tmp_path / "a"), rounded)
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64)
    model.save_pretrained(tmp_path / "b")
    assert same(read_all(tmp_path / "b"), read_all(checkpoint()))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint(), tmp_path / "b"))
    assert after == before
    random = Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(), dtype=torch.bfloat16)
    random.save_pretrained(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(tmp_path / "c" / "model.safetensors").values()} == {torch.bfloat16}


# Finding the class, the report, what forward leaves alone, peft.


def test_auto_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64)
    assert type(model) is Qwen3MoeForCausalLM
    assert model.dtype == torch.float64
    made = AutoModelForCausalLM.from_config(tiny_qwen3_moe_config(), seed=2)
    assert type(made) is Qwen3MoeForCausalLM
    assert torch.equal(
        made.lm_head.weight, Qwen3MoeForCausalLM.from_config(tiny_qwen3_moe_config(), seed=2).lm_head.weight
    )
    with pytest.raises(AttributeError, match="module 'models' has no attribute 'Llama'; it has AutoModelForCausalLM"):
        models.Llama  # noqa: B018


def test_report_of_one_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cp_core"):
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint(num_hidden_layers=3))
    assert [record.path for record in model.cp_report] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert {record.algorithm for record in model.cp_report} == {"local"}
    assert {record.handoffs for record in model.cp_report} == {("q", "k", "v")}
    text = format_report(model.cp_report)
    assert [" ".join(line.split()) for line in text.splitlines()[:-1]] == [
        "layer kind by strategy schedule balance kernel cp U x C handoffs fallback bytes/token work",
        "model.layers.0.self_attn .. model.layers.2.self_attn (3 layers) softmax native local sync - sdpa 1 1 x 1 q k v "
        "- 0 + 0 1.00",
    ]
    logged = [record.getMessage() for record in caplog.records if record.name == "cp_core"]
    assert logged == [f"context parallelism resolved:\n{text}"]


def quiet_worker(rank: int, size: int, folder: Path) -> tuple[list[Any], int, int]:
    """The report, and the number of process groups before and after training and evaluation."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cp_core").addHandler(handler)
    logging.getLogger("cp_core").setLevel(logging.INFO)
    mesh = mesh_of({"dp_shard": 1, "cp": size})
    cp = ContextParallelConfig(
        algorithm="ulysses", kv_head_policy="repeat", per_layer={"model.layers.1.*": {"algorithm": "all_gather"}}
    )
    report, groups = [], []
    for parallel in (None, FSDP):
        model = Qwen3MoeForCausalLM.from_pretrained(folder, mesh=mesh, cp=cp, parallel=parallel).train()
        report.append(model.cp_report)
        local = shard_batch(random_batch(61), mesh)
        before = dist.distributed_c10d._world.group_count, len(dist.distributed_c10d._world.pg_map)
        for _ in range(2):
            model(**local, output_router_logits=True).loss.backward()
        with torch.no_grad():
            model.eval()(**local, return_logits=False)
        groups.append((before, (dist.distributed_c10d._world.group_count, len(dist.distributed_c10d._world.pg_map))))
    assert len(logged) == (2 if rank == 0 else 0)  # once a model, by one rank
    if rank == 0:
        assert logged[0].endswith(format_report(report[0]))
    assert all(before == after for before, after in groups), groups
    return report[0]


@pytest.mark.dist4
def test_report_and_process_groups() -> None:
    for report in run_distributed(quiet_worker, 4, checkpoint(), preload=PRELOAD):
        assert [(r.algorithm, r.cp_size, r.ulysses_degree, r.sequence_degree) for r in report] == [
            ("ulysses", 4, 4, 1),
            ("all_gather", 4, 1, 4),
        ]
        lines = format_report(report).splitlines()
        assert len(lines) == 4
        assert " ".join(lines[1].split()[1:11]) == "softmax native ulysses sync - sdpa 4 4 x 1"
        assert " ".join(lines[2].split()[1:11]) == "softmax native all_gather sync - sdpa 4 1 x 4"


def test_a_batch_leaves_nothing_on_the_modules() -> None:
    model = load(checkpoint(), torch.float32)

    def state() -> dict[str, list[str]]:
        return {path: sorted(vars(module)) for path, module in model.named_modules()}

    before = state()
    want = step(model, random_batch(21))
    step(model, random_batch(90, seed=3))
    assert state() == before
    again = step(model, random_batch(21))
    assert again.loss == want.loss
    assert torch.equal(again.logits, want.logits)
    torch.testing.assert_close(copy.deepcopy(model)(**random_batch(21)).logits, want.logits, rtol=0, atol=0)


def test_peft_lora_trains() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = load(checkpoint(), torch.float32)
    base = {name: value.clone() for name, value in whole(model).items()}
    batch = random_batch(33)
    want = model(**batch).logits.detach()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora)
    trainable = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * 2 * 2
    assert all("lora_" in name for name in trainable)
    assert torch.equal(wrapped(**batch).logits, want)  # B starts at zero
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        out = wrapped(**batch, return_logits=False)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] - 0.05
    merged = wrapped.merge_and_unload()
    after = whole(merged)
    changed = {name for name, value in after.items() if not torch.equal(value, base[name])}
    assert changed == {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qv"}


def test_the_reader_and_the_model_agree_on_names() -> None:
    with CheckpointReader(checkpoint()) as reader:
        config = transformers.Qwen3MoeConfig.from_pretrained(checkpoint())
        reader.match(Qwen3MoeForCausalLM.weight_table(config))
    table = Qwen3MoeForCausalLM.weight_table(config)
    shapes = {name: tuple(p.shape) for name, p in Qwen3MoeForCausalLM(config).named_parameters()}
    assert table.native_shapes == shapes


def test_autocast_trains(tmp_path: Path) -> None:
    """Under autocast norms give fp32 and projections bf16; transformers' own loss under it is the oracle."""
    folder = make_tiny_qwen3_moe(tmp_path / "m")
    ids = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(0))
    ours, theirs = Qwen3MoeForCausalLM.from_pretrained(folder), transformers.Qwen3MoeForCausalLM.from_pretrained(folder)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(input_ids=ids, labels=ids).loss
        expected = theirs(input_ids=ids, labels=ids).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=5e-3)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in ours.parameters())


def test_what_would_break_the_model_later_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_moe(tmp_path / "m")
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    with pytest.raises(NotImplementedError, match="resize the vocabulary before training"):
        model.resize_token_embeddings(100)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states=True is not available"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="cp must be a ContextParallelConfig, got dict"):
        Qwen3MoeForCausalLM.from_pretrained(folder, cp={"algorithm": "ulysses"})


def copy_worker(rank: int, size: int, folder: str) -> bool:
    model = load(Path(folder), torch.float32, mesh_of({"cp": size}), "ulysses")
    local = shard_batch({"input_ids": torch.arange(18).view(2, 9)}, model.topology.mesh)
    return torch.equal(copy.deepcopy(model)(**local).logits, model(**local).logits)


@pytest.mark.dist2
def test_a_bound_model_can_be_copied(tmp_path: Path) -> None:
    """As an average of weights does; the copy talks over the same groups."""
    folder = make_tiny_qwen3_moe(tmp_path / "m")
    assert run_distributed(copy_worker, 2, str(folder), preload=PRELOAD) == [True, True]


def test_shard_size_as_transformers_writes_it(tmp_path: Path) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(make_tiny_qwen3_moe(tmp_path / "m"))
    model.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="must read like 5GB"):
        model.save_pretrained(tmp_path / "other", max_shard_size="large")
