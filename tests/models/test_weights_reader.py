"""The reader refuses what does not fit, in one message that names tensor, file, expectation and remedy."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from models.common.checkpoint_reader import CheckpointReader
from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError
from models.qwen3_moe.weights import weight_table
from tests.models.weights_helpers import INDEX, edit, read_all, read_files, stack, write_files

DOWN = "model.layers.1.mlp.experts.{}.down_proj.weight"
TABLE = weight_table(tiny_qwen3_moe_config())


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("reader") / "tiny", shards=4)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tiny")


def problems(folder, table=TABLE):
    with pytest.raises(CheckpointError) as caught, CheckpointReader(folder) as reader:
        reader.match(table)
    return caught.value.problems


def only(folder, table=TABLE):
    found = problems(folder, table)
    assert len(found) == 1, found
    return found[0]


def file_of(folder, name):
    return next(file for file, tensors in read_files(folder).items() if name in tensors)


def test_reads_tensors_and_boxes(folder):
    tensors = read_all(folder)
    with CheckpointReader(folder) as reader:
        match = reader.match(TABLE)
        assert reader.tensors.keys() == tensors.keys() == match.dtypes.keys()
        assert reader.bytes_read == 0
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name), tensor)
        before = reader.bytes_read
        assert before == sum(tensor.nbytes for tensor in tensors.values())
        part = reader.read("lm_head.weight", ((5, 9), (30, 32)))
        assert torch.equal(part, tensors["lm_head.weight"][5:9, 30:32])
        assert reader.bytes_read - before == 4 * 2 * 4
        assert reader.read("model.norm.weight", ((3, 3),)).shape == (0,)
        part.fill_(0)  # memory of its own
        assert torch.equal(reader.read("lm_head.weight"), tensors["lm_head.weight"])


def test_reads_scalars_and_odd_offsets(tmp_path):
    tensors = {"a": torch.tensor(1.5, dtype=torch.float64), "b": torch.arange(3, dtype=torch.bfloat16)}
    save_file({**tensors, "c": torch.arange(5.0)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
        assert torch.equal(reader.read("c"), torch.arange(5.0))


def test_accepts_the_native_layout_group_by_group(folder):
    native = stack(TABLE, read_all(folder))
    tensors = read_all(folder)
    for name in list(tensors):
        if ".0.mlp.experts." in name:
            del tensors[name]
    tensors.update({name: native[name] for name in native if ".0.mlp.experts." in name})
    shutil.rmtree(folder)
    folder.mkdir()
    write_files(folder, {"model.safetensors": tensors})
    with CheckpointReader(folder) as reader:
        match = reader.match(TABLE)
        assert [piece.name for piece in match.pieces["model.layers.0.mlp.experts.down_proj"]] == [
            "model.layers.0.mlp.experts.down_proj"
        ]
        assert len(match.pieces["model.layers.1.mlp.experts.down_proj"]) == 8
        assert match.dtypes.keys() == TABLE.hf_shapes.keys()


def test_missing_unexpected_misshaped_all_at_once(folder):
    edit(folder, lambda name, tensor: None if name == DOWN.format(3) else tensor)
    files = read_files(folder)
    file = file_of(folder, DOWN.format(4))
    files[file][DOWN.format(8)] = torch.zeros(32, 24)
    files[file][DOWN.format(4)] = files[file][DOWN.format(4)].T.contiguous()
    write_files(folder, files)
    missing, turned, extra = sorted(problems(folder))
    assert missing.startswith(f"{DOWN.format(3)}: missing, expected [32, 24]")
    assert f"{DOWN.format(4)}: shape [24, 32] in {file}, expected [32, 24]; it is transposed" in turned
    assert f"{DOWN.format(8)}: unexpected, F32 [32, 24] in {file}" in extra
    assert "remove the tensor" in extra


def test_renamed_tensor_is_missing_and_unexpected(folder):
    files = read_files(folder)
    for tensors in files.values():
        if "model.norm.weight" in tensors:
            tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    write_files(folder, files)
    found = problems(folder)
    assert [problem.split(":")[0] for problem in found] == ["model.norm.weight", "model.final_norm.weight"]


def test_doubled_whatever_the_index_says(folder):
    files = read_files(folder)
    first, second = list(files)[:2]
    name = next(iter(files[first]))
    save_file({**files[second], name: files[first][name]}, folder / second)
    assert only(folder) == f"{name}: doubled, in {first} and in {second}; remove one copy"


def test_stray_shard_of_an_older_save(folder):
    tensors = next(iter(read_files(folder).values()))
    save_file(tensors, folder / "model-00001-of-00009.safetensors")
    text = only(folder)
    assert text.startswith("model-00001-of-00009.safetensors: not named by the index")
    assert f"{len(tensors)} of them doubled" in text
    assert "delete it" in text


def test_single_file_beside_an_index(folder):
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    assert only(folder).startswith("model.safetensors: not named by the index")


def test_index_names_a_file_without_the_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    real = index["weight_map"]["model.norm.weight"]
    other = next(file for file in index["weight_map"].values() if file != real)
    index["weight_map"]["model.norm.weight"] = other
    index["weight_map"]["model.ghost.weight"] = other
    (folder / INDEX).write_text(json.dumps(index))
    first, second = sorted(problems(folder))
    assert first == f"model.ghost.weight: {INDEX} says {other}, but no file holds it; correct the index"
    assert second == f"model.norm.weight: {INDEX} says {other}, but it is in {real}; correct the index"


def test_file_tensor_that_the_index_lacks(folder):
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    assert only(folder).startswith(f"model.norm.weight: in {file}, but not in {INDEX}")


def test_missing_shard_is_one_problem(folder):
    file = file_of(folder, DOWN.format(0))
    (folder / file).unlink()
    assert only(folder) == f"{file}: named by {INDEX}, but not in the folder; download it"


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard_is_one_problem(folder, keep):
    file = file_of(folder, DOWN.format(0))
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:keep])
    text = only(folder)
    assert text.startswith(f"{file}: truncated or corrupt")
    assert "download it again" in text


def test_corrupt_single_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"<html>rate limited</html>")
    found = problems(tmp_path)
    assert found[0].startswith("model.safetensors: truncated or corrupt")


def test_header_that_names_a_tensor_twice(tmp_path):
    part = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{part},{part}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    text = problems(tmp_path)[0]
    assert text.startswith("model.safetensors: ")
    assert "twice" in text or "corrupt" in text


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_foreign_dtypes(folder, dtype):
    edit(folder, lambda name, tensor: tensor.to(dtype) if name == DOWN.format(3) else tensor)
    text = only(folder)
    assert text.startswith(f"{DOWN.format(3)}: dtype ")
    assert "dequantise" in text


def test_quantised_config_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "quantization_config ('fp8') is not supported" in only(folder)


def test_another_family_is_named_alone(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert "this folder holds a 'llama' checkpoint, the model is 'qwen3_moe'" in only(folder)


def test_both_layouts_of_one_group(folder):
    files = read_files(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    first = next(iter(files))
    files[first][name] = torch.zeros(8, 32, 24)
    write_files(folder, files)
    found = problems(folder)
    assert found[0].startswith(f"{name}: stacked in {first}, and also in 8 single tensors")
    assert len(found) == 1


def test_head_missing_although_not_tied(folder):
    edit(folder, lambda name, tensor: None if name == "lm_head.weight" else tensor)
    text = only(folder)
    assert text.startswith("lm_head.weight: missing, expected [97, 32]")
    assert "tie_word_embeddings" in text


def test_tied_checkpoint_with_a_head_of_its_own(folder):
    table = weight_table(tiny_qwen3_moe_config(tie_word_embeddings=True))
    text = only(folder, table)
    assert text.startswith("lm_head.weight: config.json ties it to model.embed_tokens.weight, but their bytes differ")
    embed = read_all(folder)["model.embed_tokens.weight"]
    edit(folder, lambda name, tensor: embed.clone() if name == "lm_head.weight" else tensor)
    with CheckpointReader(folder) as reader:
        assert reader.match(table).tied == ("lm_head.weight",)
    edit(folder, lambda name, tensor: tensor.bfloat16() if name == "lm_head.weight" else tensor)
    assert "bytes differ" in only(folder, table)


def test_no_checkpoint_here(tmp_path, folder):
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointReader(tmp_path / "nowhere")
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .* found only model-00001-of-00004"):
        CheckpointReader(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        CheckpointReader(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        CheckpointReader(folder)


def test_index_may_not_point_outside(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../model-00001-of-00004.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert any(text.startswith("../model-00001-of-00004.safetensors: named by") for text in problems(folder))
