"""Convert checkpoints between the HF layout and the native one; the work is in ``models/common/convert.py``.

    python scripts/convert_checkpoint.py to-native SRC DST
    python scripts/convert_checkpoint.py to-hf     SRC DST
    python scripts/convert_checkpoint.py roundtrip SRC         exit code 1 if a byte differs

Exit code 2: refused, with the reason; nothing was written.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository need not be installed

if TYPE_CHECKING:
    from models.common.convert import Comparison

app = typer.Typer(help="Convert checkpoints, streaming and byte for byte.", no_args_is_help=True, add_completion=False)
Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint folder.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Folder that does not exist or is empty.")]
ShardSize = Annotated[str, typer.Option(help="Bytes of tensors per file: 5GB, 500MB, 2GiB.")]
_LINES = 30  # differences shown in full


@app.command()
def to_native(source: Source, target: Target, max_shard_size: ShardSize = "5GB") -> None:
    """HF layout -> native layout (in-memory names, experts stacked)."""
    _convert(source, target, "native", max_shard_size)


@app.command()
def to_hf(source: Source, target: Target, max_shard_size: ShardSize = "5GB") -> None:
    """Native layout -> HF layout."""
    _convert(source, target, "hf", max_shard_size)


@app.command()
def roundtrip(source: Source, max_shard_size: ShardSize = "5GB") -> None:
    """HF -> native -> HF beside SRC, compared byte for byte; needs twice the space of SRC for a while."""
    with _refusals():
        from models.common import convert

        with _bar("roundtrip") as progress:
            rows = convert.roundtrip(source, max_shard_bytes=convert.parse_size(max_shard_size), progress=progress)
    different = [row for row in rows if row.result != "equal"]
    console = Console()
    console.print(_summary(rows))
    for row in different[:_LINES]:
        console.print(f"{row.name}: {row.result}", markup=False)
    if len(different) > _LINES:
        console.print(f"... and {len(different) - _LINES} more")
    console.print(f"{len(rows) - len(different)} of {len(rows)} tensors and files are equal, byte for byte")
    if different:
        raise typer.Exit(1)


def _convert(source: Path, target: Path, layout: str, max_shard_size: str) -> None:
    with _refusals():
        from models.common import convert

        with _bar(f"to {layout}") as progress:
            size = convert.parse_size(max_shard_size)
            report = convert.convert(source, target, layout, max_shard_bytes=size, progress=progress)
    typer.echo(f"{target}: {report.tensors} tensors, {report.nbytes:,} bytes in {len(report.files)} file(s)")
    typer.echo(f"copied: {', '.join(report.copied)}")
    if report.left_out:
        typer.echo(f"not copied (other weights): {', '.join(report.left_out)}")
    for name in report.unstacked:
        typer.echo(f"{name}: its sources differ in dtype, so they stay single")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Print what the user can mend without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _summary(rows: list[Comparison]) -> Table:
    """One line per kind of tensor: layer and expert numbers are folded."""
    folded: dict[tuple[str, str], list[Comparison]] = {}
    for row in rows:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name) if row.kind != "file" else row.name
        folded.setdefault((name, row.kind), []).append(row)
    table = Table("tensor or file", "dtype and shape", "count", "bytes", "result")
    for (name, kind), group in folded.items():
        bad = sum(row.result != "equal" for row in group)
        result = f"{bad} differ" if bad else "equal"
        table.add_row(name, kind.replace("[", r"\["), str(len(group)), f"{sum(row.nbytes for row in group):,}", result)
    return table


if __name__ == "__main__":
    app()
