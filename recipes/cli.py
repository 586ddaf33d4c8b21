"""The command line: ``python -m recipes list | check | verify | run``. Thin: each verb calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .schema import Recipe

CONFIGS = Path(__file__).parent / "configs"
_FACTS = {"num_hidden_layers": "layers", "hidden_size": "wide", "num_experts": "experts"}
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets stay as they are written
    help="""Fine-tune long context from a recipe: a YAML file, and A.B=C for every value to change.

    \b
    Examples:
      python -m recipes list
      python -m recipes check recipes/configs/qwen3_moe/quickstart.yaml
      python -m recipes verify recipes/configs/qwen3_moe/quickstart.yaml parallel.cp.algorithm=ring
      python -m recipes run recipes/configs/qwen3_moe/quickstart.yaml train.steps=40
    """,
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=C", help="values to change, such as optim.lr=1e-4")]


@app.command("list")
def list_recipes() -> None:
    """Show the recipes that come with CP Zoo."""
    from .loader import load_recipe

    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "name", "model", "sequence", "context parallel"):
        table.add_column(heading, no_wrap=True)
    for path in sorted(CONFIGS.rglob("*.yaml")):
        recipe = load_recipe(path, rules=False)
        cp = recipe.parallel.cp
        cells = (_shown(path), recipe.name, _model(recipe), f"{recipe.data.seq_len:,}", f"{cp.size} x {cp.algorithm}")
        table.add_row(*map(Text, cells))
    Console(width=1000).print(table)  # nothing is cut; a line too long for the terminal is the terminal's to wrap


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe and show every mistake, with its line.

    \b
    Example:
      python -m recipes check my.yaml parallel.nproc=4 parallel.cp.size=4
    """
    checked = _load(recipe, overrides)
    cp, train = checked.parallel.cp, checked.train
    typer.echo(
        f"\u2713 {recipe}: {train.steps} steps of {train.global_batch} x {checked.data.seq_len} tokens, "
        f"cp {cp.size} ({cp.algorithm}, {cp.schedule})"
    )


@app.command()
def verify(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check that cp.size processes compute what one does, on a narrow model.

    Loss, outputs and gradients of the recipe's first batch (short) and model (all layers and heads, few channels,
    random weights), in float64. Ends with 0 if all agree, with 1 and the first layer that differs if not.

    \b
    Example:
      python -m recipes verify my.yaml parallel.nproc=4 parallel.cp.size=4 parallel.cp.schedule=async
    """
    checked = _load(recipe, overrides)
    from cp_core.testing import WorkerError

    from .verify import lines
    from .verify import verify as compare

    try:
        verdict = compare(checked)
    except ValueError as error:
        typer.echo(f"{recipe}: {error}", err=True)
        raise typer.Exit(2) from None
    except WorkerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for line in lines(verdict):
        typer.echo(line)
    raise typer.Exit(0 if verdict.first is None else 1)


@app.command()
def run(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe and run it on this machine; called again, it resumes.

    \b
    Example:
      python -m recipes run recipes/configs/qwen3_moe/quickstart.yaml train.steps=40
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


def _model(recipe: Recipe) -> str:
    """Family and sizes, or where they come from."""
    if recipe.model.init == "pretrained":
        return f"{recipe.model.family} from {recipe.model.path}"
    sizes = recipe.model.config
    facts = [f"{sizes[key]} {name}" for key, name in _FACTS.items() if sizes.get(key)]
    return ", ".join([recipe.model.family, *facts])


def _shown(path: Path) -> str:
    """Relative to the current folder where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
