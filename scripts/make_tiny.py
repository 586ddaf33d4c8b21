"""Write a tiny random checkpoint in the HF layout: ``python scripts/make_tiny.py qwen3_moe OUT --shards 3``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository need not be installed

FAMILIES = {"qwen3_moe": "make_tiny_qwen3_moe"}


class Dtype(StrEnum):
    """Of every tensor."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def main(
    family: Annotated[str, typer.Argument(help=f"One of: {', '.join(FAMILIES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must hold no checkpoint yet.")],
    shards: Annotated[int, typer.Option(min=1, help="Number of weight files.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of every tensor.")] = Dtype.float32,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied", help="The head shares the embedding.")] = False,
    layers: Annotated[int, typer.Option(min=1, help="Number of decoder layers.")] = 2,
) -> None:
    """Write a tiny random checkpoint, by transformers itself, with shapes that hide no transposition."""
    if family not in FAMILIES:
        typer.echo(f"unknown family {family!r}; legal: {', '.join(FAMILIES)}", err=True)
        raise typer.Exit(2)
    import torch  # late: --help should not wait for torch

    from models.common import tiny

    make = getattr(tiny, FAMILIES[family])
    try:
        make(
            out,
            shards=shards,
            dtype=getattr(torch, dtype.value),
            seed=seed,
            tie_word_embeddings=tied,
            num_hidden_layers=layers,
        )
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
    typer.run(main)
