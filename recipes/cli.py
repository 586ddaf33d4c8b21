"""The command line: ``python -m recipes list | check | run``. Thin: each verb calls one function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .schema import Recipe

CONFIGS = Path(__file__).parent / "configs"
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune long context from a recipe.",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="values to change")]


@app.command("list")
def list_recipes() -> None:
    """Show the recipes that come with CP Zoo."""
    from .loader import load_recipe

    table = Table("recipe", "model", "sequence", "context parallel", box=None, pad_edge=False)
    for path in sorted(CONFIGS.rglob("*.yaml")):
        recipe = load_recipe(path, rules=False)
        sizes = recipe.model.config
        model: str = str(recipe.model.family)
        if sizes:
            model += f", {sizes.get('num_hidden_layers')} layers of {sizes.get('hidden_size')}"
            model += f", {sizes.get('num_experts')} experts"
        else:
            model += f" from {recipe.model.path}"
        cp = recipe.parallel.cp
        table.add_row(_shown(path), model, f"{recipe.data.seq_len:,}", f"{cp.size} x {cp.algorithm}")
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe and show every mistake, with its line.

    Example: python -m recipes check my.yaml parallel.cp.size=4
    """
    checked = _load(recipe, overrides)
    cp, train = checked.parallel.cp, checked.train
    typer.echo(
        f"{recipe}: right. {train.steps} steps of {train.global_batch} x {checked.data.seq_len} tokens, "
        f"cp {cp.size} ({cp.algorithm}, {cp.schedule})"
    )


@app.command()
def run(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe, start its workers with torchrun, and wait for the end. Called again, it resumes.

    Example: python -m recipes run recipes/configs/qwen3_moe/quickstart.yaml train.steps=40
    """
    checked = _load(recipe, overrides)
    from .launch import launch

    raise typer.Exit(launch(checked, recipe))


def _load(path: Path, overrides: list[str] | None) -> Recipe:
    from .loader import RecipeError, load_recipe

    try:
        return load_recipe(path, overrides or ())
    except RecipeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _shown(path: Path) -> str:
    """Relative to the current folder where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
