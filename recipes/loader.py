"""From a YAML file and ``a.b=c`` overrides to a checked ``Recipe``, or to every mistake at once.

A message reads ``quickstart.yaml:12  parallel.cp.algorithm: 'ulyses' is not one of ... (did you mean 'ulysses'?)``:
where, what was read, what is legal, what to do. Types are strict (no ``true`` for 1, no ``2.5`` for an integer), but
``1e-5``, which YAML takes for text, is a number here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .rules import check_rules, suggest
from .schema import Recipe

Keys = tuple[str, ...]
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


class RecipeError(ValueError):
    """Everything that is wrong with a recipe; one problem a line."""


class _Source:
    """The values of a recipe and where each was written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.places: dict[Keys, str] = {(): file.name}
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}

    def read(self) -> None:
        try:
            node = yaml.compose(self.file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise RecipeError(
                f"{self.file}: cannot be read ({error.strerror}); `python -m recipes list` shows recipes"
            ) from None
        except UnicodeDecodeError:
            raise RecipeError(f"{self.file}: is not UTF-8 text") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.file.name}:{mark.line + 1}" if mark else self.file.name
            raise RecipeError(f"{where}  not YAML: {getattr(error, 'problem', None) or error}") from None
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{self.file.name}  a recipe is a mapping of sections (name:, model:, data:, ...)")
        self.values = self._mapping(node, ())

    def _mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (*path, key)
            line = f"{self.file.name}:{key_node.start_mark.line + 1}"
            if key in result:
                self.problems.append(f"{line}  {'.'.join(here)}: is given twice (first: {self.places[here]}); keep one")
                continue
            self.places[here] = line
            result[key] = self._value(value_node, here)
        return result

    def _value(self, node: yaml.Node, path: Keys) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        try:
            return _scalar(node)
        except (ValueError, yaml.YAMLError) as error:
            self.problems.append(f"{self.places.get(path, self.file.name)}  {'.'.join(path)}: {error}")
            return None

    def override(self, text: str) -> None:
        place = f"override '{text}'"
        dotted, equals, value = text.partition("=")
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            self.problems.append(f"{place}  must have the form a.b=value")
            return
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader) if value.strip() else None
            parsed = None if node is None else self._value(node, path)
        except yaml.YAMLError:
            self.problems.append(f"{place}  the value is not YAML; put it in quotes")
            return
        target = self.values
        for depth, section in enumerate(path[:-1]):
            inner = target.setdefault(section, {})
            if not isinstance(inner, dict):
                self.problems.append(f"{place}  {'.'.join(path[: depth + 1])} is a value, not a section")
                return
            target = inner
        target[path[-1]] = parsed
        self.places = {known: where for known, where in self.places.items() if known[: len(path)] != path}
        self.places[path] = place

    def place(self, path: Keys) -> str:
        """Where the nearest enclosing thing that was written stands."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, rules: bool = True) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: the YAML file.
        overrides: ``a.b=c`` each; the value is YAML.
        rules: also check what needs more than one field, files or the model's config (``rules.py``).

    Raises:
        RecipeError: every problem found.
    """
    source = _Source(Path(path))
    source.read()
    for text in overrides:
        source.override(text)
    recipe = None
    try:
        # JSON mode is strict where it matters and still takes a list for a tuple.
        recipe = Recipe.model_validate_json(json.dumps(source.values, default=str), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            where = tuple(str(part) for part in item["loc"])
            source.problems.append(f"{source.place(where)}  {'.'.join(where)}: {_explain(dict(item), where)}")
    if recipe is not None and rules:
        source.problems += [
            f"{source.place(tuple(p.path.split('.')))}  {p.path}: {p.message}" for p in check_rules(recipe)
        ]
    if source.problems or recipe is None:
        raise RecipeError("\n".join(source.problems))
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loads again to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def run_dir(recipe: Recipe) -> Path:
    """The folder of the run's results; ``{name}`` in ``run_dir`` is the recipe's name."""
    return Path(recipe.run_dir.replace("{name}", recipe.name))


def _scalar(node: yaml.Node) -> Any:
    if node.tag.endswith(":str") and getattr(node, "style", None) is None and _FLOAT.fullmatch(node.value):
        return float(node.value)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    finally:
        loader.dispose()


def _explain(item: dict[str, Any], where: Keys) -> str:
    kind, value = item["type"], item["input"]
    parent = _model_at(where[:-1])
    if kind == "extra_forbidden":
        return f"unknown key{suggest(where[-1], list(parent.model_fields) if parent else [])}"
    if kind == "missing":
        return "is required and not given"
    shown = "null" if value is None else repr(value)
    if kind == "literal_error" and parent is not None:
        choices = [choice for choice in get_args(parent.model_fields[where[-1]].annotation) if isinstance(choice, str)]
        return f"{shown} is not one of {' | '.join(choices)}{suggest(str(value), choices)}"
    message = item["msg"]
    return f"got {shown}: {message[0].lower()}{message[1:]}"


def _model_at(path: Keys) -> type[BaseModel] | None:
    """The section's class at a path of the schema; None where there is none."""
    model: type[BaseModel] = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model
