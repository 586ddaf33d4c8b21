"""Conversion: byte-exact both ways, refusals before anything is written, memory far below the checkpoint's size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.common import convert as work
from models.common.convert import compare, convert, layout_of, parse_size, roundtrip
from models.common.tiny import make_tiny_qwen3_moe, tiny_qwen3_moe_config
from models.common.weights import CheckpointError
from models.qwen3_moe.weights import weight_table
from tests.models.weights_helpers import edit, read_all, read_files, same, stack, write_files

ROOT = Path(__file__).resolve().parents[2]
TABLE = weight_table(tiny_qwen3_moe_config())
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


def run(*args):
    command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Eight shards in bf16, side files of every sort, one tensor with NaN, infinities and a denormal."""
    folder = make_tiny_qwen3_moe(tmp_path_factory.mktemp("convert") / "tiny", shards=8, dtype=torch.bfloat16)

    def odd(name, tensor):
        if name == "model.norm.weight":
            tensor.view(torch.int16)[:5] = torch.tensor([0x7FC1, 0x7F80, -128, 1, -32768], dtype=torch.int16)
        return tensor

    edit(folder, odd)
    config = (folder / "config.json").read_text().replace("{", '{\r\n\t"a\u00e9": 1.50e0,', 1)  # formatting of its own
    (folder / "config.json").write_bytes(config.rstrip().encode())
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "extra/template.jinja", ".gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}\n")
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", ".cache/huggingface/x.lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("weights")
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tiny")


def mixed(name, tensor):
    """bf16 with norms and router in fp32 and one layer's experts in fp16; expert 3 of layer 0 mixes within a group."""
    if "norm" in name or "mlp.gate." in name:
        return tensor.float() + 1e-5
    if name == EXPERT.format(3, "up"):
        return tensor.float() * 1.0001
    return tensor.half() if ".1.mlp.experts." in name else tensor


def test_there_and_back_byte_for_byte(folder, tmp_path):
    files = {name: next(f for f, t in read_files(folder).items() if name in t) for name in read_all(folder)}
    assert len({files[EXPERT.format(3, part)] for part in ("gate", "up", "down")}) == 3  # one expert in three files
    native, back = tmp_path / "native", tmp_path / "back"
    back.mkdir()  # empty is as good as absent
    report = convert(folder, native, "native", max_shard_bytes=30_000)
    assert same(read_all(native), stack(TABLE, read_all(folder)))
    assert layout_of(native) == "native"
    assert report.unstacked == ()
    assert set(report.left_out) == {"pytorch_model.bin", "original/consolidated.00.pth"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "LICENSE", "extra/template.jinja"} <= set(
        report.copied
    )
    assert json.loads((native / "config.json").read_bytes())["cp_zoo_layout"] == "native"
    report = convert(native, back, "hf", max_shard_bytes=30_000)
    assert same(read_all(back), read_all(folder))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    listed = sorted((name, file) for file, tensors in read_files(back).items() for name in tensors)
    assert sorted(index["weight_map"].items()) == listed
    assert index["metadata"]["total_size"] == report.nbytes == sum(t.nbytes for t in read_all(folder).values())
    for name in report.copied:
        assert (back / name).read_bytes() == (folder / name).read_bytes(), name
    assert {row.result for row in compare(folder, back)} == {"equal"}
    assert not list(tmp_path.glob("*.tmp"))


def test_mixed_dtypes_are_kept_exactly(folder, tmp_path):
    edit(folder, mixed)
    report = convert(folder, tmp_path / "native", "native")
    assert report.unstacked == ("model.layers.0.mlp.experts.gate_up_proj",)
    native = read_all(tmp_path / "native")
    assert native["model.layers.1.mlp.experts.gate_up_proj"].dtype == torch.float16
    assert EXPERT.format(3, "up") in native
    assert "model.layers.0.mlp.experts.down_proj" in native
    convert(tmp_path / "native", tmp_path / "back", "hf")
    assert same(read_all(tmp_path / "back"), read_all(folder))


@pytest.mark.parametrize("overrides", [{"mlp_only_layers": [1], "attention_bias": True}, {"num_experts": 0}])
def test_roundtrip_of_other_configs(tmp_path, overrides):
    rows = roundtrip(make_tiny_qwen3_moe(tmp_path / "tiny", **overrides))
    assert {row.result for row in rows} == {"equal"}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("with_head", [False, True])
def test_tied_checkpoints_keep_what_they_had(tmp_path, with_head):
    source = make_tiny_qwen3_moe(tmp_path / "tiny", tie_word_embeddings=True)
    if with_head:
        tensors = read_all(source)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        write_files(source, {"model.safetensors": tensors})
    assert ("lm_head.weight" in read_all(source)) is with_head
    assert {row.result for row in roundtrip(source)} == {"equal"}


def test_config_that_an_editor_has_rewritten(folder, tmp_path):
    convert(folder, tmp_path / "native", "native")
    config = tmp_path / "native" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()), sort_keys=True))
    convert(tmp_path / "native", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back/config.json").read_bytes()) == json.loads((folder / "config.json").read_bytes())


def refused(source, target, layout="native"):
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, layout)
    assert not target.with_name(target.name + ".tmp").exists()
    return str(caught.value)


def test_refusals_before_anything_is_written(folder, tmp_path):
    target = tmp_path / "out"
    assert "the layout is 'hf' already; use to-native" in refused(folder, target, "hf")
    convert(folder, tmp_path / "native", "native")
    assert "the layout is 'native' already; use to-hf" in refused(tmp_path / "native", target)
    assert "exists and is not an empty folder" in refused(folder, tmp_path / "native")
    assert "lies in the source folder" in refused(folder, folder / "out")
    assert "lies in the source folder" in refused(folder, folder)
    assert "config.json: missing" in refused(tmp_path, target)
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"left by a conversion that was killed.*; delete it"):
        convert(folder, target, "native")
    (tmp_path / "out.tmp").rmdir()
    edit(folder, lambda name, t: t.to(torch.float8_e4m3fn) if name == EXPERT.format(2, "up") else t)
    assert f"{EXPERT.format(2, 'up')}: dtype F8_E4M3 in model-" in refused(folder, target)
    files = read_files(folder)
    files[next(iter(files))]["mtp.fc.weight"] = torch.zeros(2)
    write_files(folder, files)
    assert "mtp.fc.weight: unexpected" in refused(folder, target)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert "model_type 'llama' is not one of qwen3_moe" in refused(folder, target)
    assert not target.exists()


def test_no_room_on_the_disk(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "the disk has 1,000 free" in refused(folder, tmp_path / "out")


def test_failure_half_way_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "_copy_files", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", "native")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_compare_sees_every_difference(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    edit(other, lambda name, t: None if name == EXPERT.format(0, "up") else t)
    edit(other, lambda name, t: t.float() if name == EXPERT.format(1, "up") else t)
    edit(other, lambda name, t: t.clone().index_fill_(0, torch.tensor([23]), -0.0) if name == "lm_head.weight" else t)
    (other / "LICENSE").write_text("another")
    (other / "tokenizer.json").unlink()
    found = {row.name: row.result for row in compare(folder, other) if row.result != "equal"}
    assert found == {
        EXPERT.format(0, "up"): f"missing in {other}",
        EXPERT.format(1, "up"): "BF16 [24, 32] became F32 [24, 32]",
        "lm_head.weight": "bytes differ",
        "LICENSE": "bytes differ",
        "tokenizer.json": f"missing in {other}",
    }


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5 kb", 1500), ("7B", 7), ("3TB", 3 * 10**12)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "", "GB", "-1GB", "0GB", "5 apples"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="must read like 5GB"):
        parse_size(text)


def test_script_both_ways_and_roundtrip(folder, tmp_path):
    done = run("to-native", folder, tmp_path / "native", "--max-shard-size", "40KB")
    assert done.returncode == 0, done.stderr
    assert "25 tensors" in done.stdout
    assert "not copied (other weights): original/consolidated.00.pth, pytorch_model.bin" in done.stdout
    done = run("to-hf", tmp_path / "native", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert same(read_all(tmp_path / "back"), read_all(folder))
    done = run("roundtrip", folder)
    assert done.returncode == 0, done.stderr
    assert "are equal, byte for byte" in done.stdout


def test_script_reports_a_difference_with_exit_code_1(folder, tmp_path):
    """A table that swaps gate and up only on the way back: the comparison must see it."""
    script = tmp_path / "swapped.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(ROOT / "scripts")!r})
import dataclasses
from models.common import convert
straight = convert.table_of
def table_of(folder):
    table = straight(folder)
    if convert.layout_of(folder) == "hf":
        return table
    swap = lambda e: dataclasses.replace(e, sources=tuple(names[::-1] for names in e.sources))
    return dataclasses.replace(table, entries=tuple(swap(e) for e in table))
convert.table_of = table_of
from convert_checkpoint import app
app()
"""
    )
    done = subprocess.run([sys.executable, script, "roundtrip", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert f"{EXPERT.format(0, 'gate')}: bytes differ" in done.stdout
    assert "and 2 more" in done.stdout  # 2 layers x 8 experts x gate and up


def test_script_refuses_without_a_traceback(folder, tmp_path):
    (folder / next(iter(read_files(folder)))).unlink()
    done = run("to-native", folder, tmp_path / "out")
    assert done.returncode == 2
    assert "named by model.safetensors.index.json, but not in the folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("to-native", folder, tmp_path / "out", "--max-shard-size", "big").returncode == 2


PEAK = """
import sys
from pathlib import Path
import torch, transformers
from models.common.convert import convert
from transformers import AutoConfig

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

source, target, layout, warm = map(str, sys.argv[1:])
convert(warm, target + ".warm", layout)  # imports and allocator, so that only the data count
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
convert(source, target, layout)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_one_group(tmp_path):
    """200 MB through less memory than one group (16 MB), both ways; a mapped input file counts as well."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 8}
    config = tiny_qwen3_moe_config(**sizes)
    table = weight_table(config)
    source, warm = tmp_path / "source", tmp_path / "warm"
    source.mkdir()
    tensors = {name: torch.rand(shape) for name, shape in table.hf_shapes.items()}
    save_file(tensors, source / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    group = max(torch.Size(shape).numel() for shape in table.native_shapes.values()) * 4
    del tensors
    config.save_pretrained(source)
    make_tiny_qwen3_moe(warm)
    convert(warm, tmp_path / "warm_native", "native")
    assert total > 200e6
    assert group < total / 10
    steps = ((source, "native", warm), (tmp_path / "native", "hf", tmp_path / "warm_native"))
    for folder, layout, small in steps:
        command = [sys.executable, "-c", PEAK, folder, tmp_path / layout, layout, small]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < group, f"{layout}: peak {int(done.stdout):,} over baseline, group {group:,}"
