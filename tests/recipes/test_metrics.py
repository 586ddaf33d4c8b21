"""Metrics survive kills and resumes; the display and the picture say what was measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes.metrics import MetricsWriter, read_metrics
from recipes.plots import plot_curve
from recipes.progress import Progress

RECORD = {"loss": 5.25, "lr": 3e-3, "grad_norm": 1.5, "tokens_per_second": 12345.6}


def write_steps(path: Path, steps: range, resume_step: int | None = None, **values: Any) -> None:
    with MetricsWriter(path, resume_step) as writer:
        if resume_step is None:
            writer.write("start", name="run", mesh={"dp_shard": 1, "cp": 2})
        for step in steps:
            writer.write("step", step=step, loss=1 / step, **values)


def test_events_come_back_and_each_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writer = MetricsWriter(path, None)
    writer.write("start", name="run \u00e4\n", mesh={"cp": 2})
    assert read_metrics(path) == [{"schema": 1, "kind": "start", "name": "run \u00e4\n", "mesh": {"cp": 2}}]
    writer.write("step", step=1, loss=0.1 + 0.2)
    writer.write("eval", step=1, valid_loss=2)
    writer.write("end")
    assert [event["kind"] for event in read_metrics(path)] == ["start", "step", "eval", "end"]
    assert read_metrics(path)[1]["loss"] == 0.1 + 0.2  # every bit
    writer.close()


def test_numbers_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write("step", step=1, loss=math.nan, extra=[math.inf, {"low": -math.inf}])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    event = json.loads(path.read_text(), parse_constant=refuse)
    assert event["loss"] == "NaN"
    back = read_metrics(path)[0]
    assert math.isnan(back["loss"])
    assert back["extra"] == [math.inf, {"low": -math.inf}]


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_torn_last_line_is_passed_over_and_gone_after_a_resume(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 5))
    path.write_bytes(path.read_bytes()[:-cut])
    left = [event["step"] for event in read_metrics(path)[1:]]
    assert left == ([1, 2, 3, 4] if cut == 1 else [1, 2, 3])  # without its newline an event is still whole
    write_steps(path, range(4, 6), resume_step=3)
    write_steps(tmp_path / "whole.jsonl", range(1, 6))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_resume_reads_like_the_unbroken_run(tmp_path: Path) -> None:
    """The session wrote up to step 7 after the checkpoint of step 4, and an end; both are made again."""
    path, whole = tmp_path / "m.jsonl", tmp_path / "whole.jsonl"
    write_steps(path, range(1, 8))
    with MetricsWriter(path, 7) as writer:
        writer.write("eval", step=7, valid_loss=1.0)
        writer.write("end")
    write_steps(path, range(5, 10), resume_step=4)
    write_steps(whole, range(1, 10))
    assert path.read_bytes() == whole.read_bytes()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["m.jsonl", "whole.jsonl"]


def test_resume_without_a_file_and_a_fresh_start_over_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, range(3, 4), resume_step=2)
    assert [event["step"] for event in read_metrics(path)] == [3]
    before = path.read_bytes()
    write_steps(path, range(1, 2))
    assert [event["kind"] for event in read_metrics(path)] == ["start", "step"]
    assert (tmp_path / "m.previous.jsonl").read_bytes() == before


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"schema": 1, "kind": "start"}\n{"sche\n{"schema": 1, "kind": "end"}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: not a metrics line .*delete this line"):
        read_metrics(path)
    path.write_text('{"schema": 99, "kind": "start"}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:1: not an event of schema 1"):
        read_metrics(path)


def test_bad_events_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        with pytest.raises(ValueError, match="kind 'stop' is none of start, step, eval, end"):
            writer.write("stop")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a 'step' event needs step=<int>"):
            writer.write("step", loss=1.0)
        with pytest.raises(ValueError, match="'schema' is reserved"):
            writer.write("start", schema=2)
        with pytest.raises(TypeError, match="not JSON serializable"):
            writer.write("step", step=1, loss=object())
    assert path.read_bytes() == b""


def shown(capsys: pytest.CaptureFixture[str], terminal: bool, enabled: bool = True) -> str:
    console = Console(force_terminal=terminal, width=100)
    with Progress(total=10, done=2, console=console, every=4, enabled=enabled) as progress:
        for step in range(3, 11):
            progress.update(step, {**RECORD, **({"valid_loss": 5.5} if step == 7 else {})})
    return capsys.readouterr().out


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["3/10", "4/10", "7/10", "8/10", "10/10"]
    assert lines[0] == "step 3/10  loss 5.2500  lr 3.0e-03  grad 1.50  12,346 tok/s  eta -:--"
    assert lines[2].endswith("eta 0:00  valid 5.5000")


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, terminal=True)
    assert "10/10" in text
    assert "loss 5.2500" in text
    assert text.count("step ") == 1  # the validated one stays above the bar
    assert "valid 5.5000" in text


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, terminal=True, enabled=False) == shown(capsys, terminal=False, enabled=False) == ""


@pytest.mark.parametrize("valid", [True, False])
def test_picture(tmp_path: Path, valid: bool) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write("start", name="run", **({"unigram_cross_entropy": 0.5} if valid else {}))
        for step in range(1, 9):
            writer.write("step", step=step, loss=1 / step, **({"valid_loss": 0.6} if valid and step % 4 == 0 else {}))
        writer.write("step", step=9, loss=math.nan)
    picture = tmp_path / "loss.png"
    assert plot_curve(path, picture) == picture
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.png", "m.jsonl"]


def test_no_picture_without_a_step_or_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"m\.jsonl: no step with a finite loss"):
        plot_curve(tmp_path / "m.jsonl", tmp_path / "loss.png")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_curve(tmp_path / "m.jsonl", tmp_path / "loss.png") is None
    assert "pip install 'cp-zoo[plot]'" in caplog.text
