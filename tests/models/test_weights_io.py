"""Loading and saving in one process: exact values and dtypes, strictness, and a save that fails half way."""

from __future__ import annotations

import json
import os
import shutil
import weakref

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3MoeForCausalLM

from models.common.checkpoint_io import load_weights, save_weights
from models.common.checkpoint_reader import CheckpointReader
from models.common.checkpoint_writer import CheckpointWriter, TensorSpec
from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError, WeightEntry, WeightTable, plain
from models.qwen3_moe.weights import weight_table
from tests.models.weights_helpers import INDEX, edit, read_all, read_files, same, skeleton, stack, write_files

TABLE = weight_table(tiny_qwen3_moe_config())
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("io") / "tiny", shards=4)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tiny")


def load(folder, model, table=TABLE, **options):
    with CheckpointReader(folder) as reader:
        return load_weights(model, table, reader, **options)


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def mixed(name, tensor):
    """Dtypes as they occur: norms and router in fp32, one layer's experts in fp16, the rest bf16."""
    if "norm" in name or "mlp.gate." in name:
        return tensor + 1e-5
    return tensor.half() if ".1.mlp.experts." in name else tensor.bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_load_fills_every_parameter(folder, dtype):
    model = skeleton(TABLE, dtype)
    report = load(folder, model, dtype=dtype)
    tensors = read_all(folder)
    expected = {name: tensor.to(dtype) for name, tensor in stack(TABLE, tensors).items()}
    assert same(parameters(model), expected)
    assert report.names == tuple(TABLE.by_name)
    assert report.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert report.source_dtypes == dict.fromkeys(TABLE.hf_shapes, torch.float32)


def test_load_holds_one_tensor_at_a_time(folder, monkeypatch):
    read, alive = CheckpointReader.read_bytes, []

    def watched(self, *args):
        assert not any(reference() is not None for reference in alive)
        data = read(self, *args)
        alive.append(weakref.ref(data))
        return data

    monkeypatch.setattr(CheckpointReader, "read_bytes", watched)
    load(folder, skeleton(TABLE))


def test_load_from_the_native_layout(folder, tmp_path):
    native = tmp_path / "native"
    native.mkdir()
    write_files(native, {"model.safetensors": stack(TABLE, read_all(folder))})
    one, two = skeleton(TABLE), skeleton(TABLE)
    load(folder, one)
    report = load(native, two)
    assert same(parameters(one), parameters(two))
    assert report.source_dtypes.keys() == TABLE.hf_shapes.keys()


def test_transformers_model_gives_the_same_logits(folder, tmp_path):
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))
    reference = Qwen3MoeForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = Qwen3MoeForCausalLM(tiny_qwen3_moe_config(attn_implementation="eager")).eval()
    load(folder, model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    save_weights(model, TABLE, tmp_path / "out")
    shutil.copyfile(folder / "config.json", tmp_path / "out" / "config.json")
    again, info = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("shards", [1, 4])
def test_save_writes_what_transformers_writes(tmp_path, shards):
    theirs = make_tiny_qwen3_moe(tmp_path / "theirs", shards=shards, dtype=torch.bfloat16)
    model = skeleton(TABLE, torch.bfloat16)
    load(theirs, model)
    size = 5 * 2**30 if shards == 1 else 30_000
    save_weights(model, TABLE, tmp_path / "ours", max_shard_bytes=size)
    assert same(read_all(tmp_path / "ours"), read_all(theirs))
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    if shards == 1:
        assert names == ["model.safetensors"]
        assert (tmp_path / "ours" / names[0]).read_bytes() == (theirs / names[0]).read_bytes()
        return
    index, reference = (json.loads((path / INDEX).read_text()) for path in (tmp_path / "ours", theirs))
    assert index["metadata"] == reference["metadata"]
    files = read_files(tmp_path / "ours")
    assert len(files) > 1
    listed = sorted((name, file) for file, tensors in files.items() for name in tensors)
    assert sorted(index["weight_map"].items()) == listed  # every tensor once
    assert all(sum(t.nbytes for t in tensors.values()) <= size for tensors in files.values())
    for file in files:
        with safe_open(tmp_path / "ours" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_dtypes_on_disk_survive(folder, tmp_path):
    edit(folder, mixed)
    before = read_all(folder)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32, torch.float16, torch.bfloat16}
    model = skeleton(TABLE, torch.float32)
    report = load(folder, model)
    save_weights(model, TABLE, tmp_path / "out", dtypes=report.source_dtypes, max_shard_bytes=50_000)
    assert same(read_all(tmp_path / "out"), before)
    save_weights(model, TABLE, tmp_path / "out")  # without them: the parameters' dtype; and the shards are gone
    assert {tensor.dtype for tensor in read_all(tmp_path / "out").values()} == {torch.float32}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_tensor_larger_than_a_shard_stands_alone(folder, tmp_path):
    model = skeleton(TABLE)
    load(folder, model)
    save_weights(model, TABLE, tmp_path, max_shard_bytes=1)
    assert len(read_files(tmp_path)) == len(TABLE.hf_shapes)
    assert same(parameters(model), stack(TABLE, read_all(tmp_path)))


def test_overflow_of_half_is_an_error(folder, tmp_path):
    model = skeleton(TABLE)
    load(folder, model)
    model.lm_head.weight.data[3, 5] = 1e6
    with pytest.raises(CheckpointError, match=r"lm_head.weight: values of torch.float32 overflow torch.float16"):
        save_weights(model, TABLE, tmp_path, dtypes={"lm_head.weight": torch.float16})
    assert not list(tmp_path.glob("model*"))


def test_tied_head_is_written_once(tmp_path):
    config = tiny_qwen3_moe_config(tie_word_embeddings=True)
    source = make_tiny_qwen3_moe(tmp_path / "tied", tie_word_embeddings=True)
    model = Qwen3MoeForCausalLM(config)
    load(source, model, weight_table(config))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_weights(model, weight_table(config), tmp_path / "out")
    assert same(read_all(tmp_path / "out"), read_all(source))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(CheckpointError, match=r"lm_head.weight: a parameter .* tie the two first"):
        load(source, model, weight_table(config))


def test_model_and_table_must_name_the_same_parameters(folder):
    model = skeleton(TABLE)
    del model.lm_head
    model.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(31))
    with pytest.raises(CheckpointError) as caught:
        load(folder, model)
    assert caught.value.problems == (
        "lm_head.weight: in the weight table, but no parameter of the model",
        "model.extra: a parameter of the model that the weight table does not produce",
        "model.norm.weight: the parameter is [31], the table says [32]",
    )
    assert model.model.embed_tokens.weight.isnan().all()  # nothing was touched


def test_meta_and_dtype_are_checked_first(folder):
    with pytest.raises(CheckpointError, match=r"meta device; call model.to_empty"):
        load(folder, skeleton(TABLE, device="meta"))
    with pytest.raises(CheckpointError, match=r"is torch.float32, expected torch.bfloat16"):
        load(folder, skeleton(TABLE), dtype=torch.bfloat16)
    table = WeightTable("x", (plain("a", (2,), keep_fp32=True),))
    with pytest.raises(CheckpointError, match=r"a: the parameter is torch.bfloat16, but must not be below"):
        load(folder, {"a": torch.zeros(2, dtype=torch.bfloat16)}, table)


def test_small_fp32_leaf_beside_bf16_is_never_rounded(tmp_path):
    """A bias of fp32 in an otherwise bf16 model, under another name on disk, and a buffer: bit-equal both ways."""
    values = torch.linspace(6.817, 7.063, 8)
    write_files(tmp_path, {"model.safetensors": {"block.bias": values, "w": torch.ones(2, 3).bfloat16()}})
    entries = (plain("w", (2, 3)), plain("block.state.bias", (8,), source="block.bias", keep_fp32=True))
    table = WeightTable("x", entries)
    model = skeleton(WeightTable("x", entries[:1]), torch.bfloat16)
    model.block, model.block.state = torch.nn.Module(), torch.nn.Module()
    model.block.state.register_buffer("bias", torch.zeros(8))
    report = load(tmp_path, model, table, dtype=torch.bfloat16)
    assert torch.equal(model.block.state.bias, values)
    save_weights(model, table, tmp_path / "out", dtypes=report.source_dtypes)
    assert same(read_all(tmp_path / "out"), read_all(tmp_path))


def test_uneven_concatenation(tmp_path):
    q, k = torch.randn(3, 2), torch.randn(5, 2)
    write_files(tmp_path, {"model.safetensors": {"q": q, "k": k}})
    table = WeightTable("x", (WeightEntry("qk", (8, 2), (("q", "k"),), rows=(3, 5)),))
    tensors = {"qk": torch.empty(8, 2)}
    load(tmp_path, tensors, table)
    assert torch.equal(tensors["qk"], torch.cat([q, k]))
    save_weights(tensors, table, tmp_path / "out")
    assert same(read_all(tmp_path / "out"), {"q": q, "k": k})


class Crash(BaseException):
    """What no ``except Exception`` catches, such as a KeyboardInterrupt."""


@pytest.mark.parametrize("error", [OSError, Crash])
@pytest.mark.parametrize("shard_bytes", [30_000, 2**30])
def test_crash_while_writing_leaves_the_old_files(folder, monkeypatch, error, shard_bytes):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = skeleton(TABLE)
    load(folder, model)
    write, calls = CheckpointWriter.write, []

    def failing(self, *args, **kwargs):
        calls.append(args[0])
        if len(calls) == 40:
            raise error("disk full")
        write(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "write", failing)
    with pytest.raises(error, match="disk full"):
        save_weights(model, TABLE, folder, max_shard_bytes=shard_bytes)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "model-00001-of-00099.safetensors.tmp").touch()  # what a killed process leaves disturbs nobody
    save_weights(model, TABLE, folder, max_shard_bytes=shard_bytes)
    assert not list(folder.glob("*.tmp"))
    assert same(stack(TABLE, read_all(folder)), parameters(model))


def test_crash_while_renaming_never_mixes_old_and_new(folder, monkeypatch):
    model = skeleton(TABLE)
    load(folder, model)
    replace, calls = os.replace, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise Crash
        replace(*args)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(Crash):
        save_weights(model, TABLE, folder, max_shard_bytes=80_000)
    with pytest.raises(CheckpointError, match="an interrupted download or save"):
        CheckpointReader(folder)


def test_save_over_the_folder_it_was_loaded_from(folder):
    with CheckpointReader(folder) as reader:
        model = skeleton(TABLE)
        load_weights(model, TABLE, reader)
        (folder / "notes.txt").write_text("mine")
        save_weights(model, TABLE, folder, max_shard_bytes=100_000)
    with CheckpointReader(folder) as reader:
        reader.match(TABLE)
    assert len(read_files(folder)) == 3
    assert (folder / "notes.txt").exists()
    save_weights(model, TABLE, folder)
    assert sorted(path.name for path in folder.glob("model*")) == ["model.safetensors"]
    with CheckpointReader(folder) as reader:
        reader.match(TABLE)


def test_writer_refuses_what_is_not_complete(tmp_path):
    specs = [TensorSpec("a", (2, 3), torch.float32), TensorSpec("b", (), torch.bfloat16)]
    with (
        pytest.raises(CheckpointError, match="a: 3 of 6 elements written"),
        CheckpointWriter(tmp_path, specs, 9) as out,
    ):
        out.write("a", torch.ones(3), 3)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="does not go into"), CheckpointWriter(tmp_path, specs, 9) as out:
        out.write("a", torch.ones(4), 3)
    with pytest.raises(ValueError, match="written twice"):
        CheckpointWriter(tmp_path, [specs[0], specs[0]], 100)
    with pytest.raises(ValueError, match=r"torch.int64 is not written"):
        CheckpointWriter(tmp_path, [TensorSpec("a", (1,), torch.int64)], 100)
    assert not list(tmp_path.iterdir())
