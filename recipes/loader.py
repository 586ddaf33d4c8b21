"""From a YAML file and ``a.b=c`` overrides to a checked ``Recipe``, or to every mistake at once.

A message reads ``quickstart.yaml:12  parallel.cp.algorithm: 'ulyses' is not one of ... (did you mean 'ulysses'?)``:
where, what was read, what is legal, what to do. Types are strict (no ``true`` for 1, no ``2.5`` for an integer), but
``1e-5``, which YAML takes for text, is a number here. What YAML 1.1 reads otherwise than it looks (``0100`` is 64,
``1:30`` is 90) is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .rules import check_rules, suggest
from .schema import Recipe

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_MISREAD = "is a number that YAML reads otherwise than it looks; write it in decimal, or in quotes if it is text"


class RecipeError(ValueError):
    """Everything that is wrong with a recipe; one problem a line, in the order of the file, then of the overrides."""


class _Place(NamedTuple):
    order: int
    name: str


class _Source:
    """The values of a recipe, and where each dotted path was written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.places = {"": _Place(1, f"{file.name}:1")}
        self.problems: list[tuple[_Place, str]] = []
        self.unread: set[str] = set()  # paths whose value was refused; None stands there
        self._override: _Place | None = None  # the one being read
        self._collections: set[yaml.Node] = set()

    def report(self, path: str, message: str) -> None:
        """Note a problem at the nearest enclosing thing that was written."""
        known = path
        while known not in self.places:
            known = known.rpartition(".")[0]
        self.problems.append((self.places[known], f"{path}: {message}" if path else message))

    def read(self) -> None:
        """Read the file.

        Raises:
            RecipeError: there is no YAML mapping to go on with.
        """
        try:
            text = self.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{self.file}: is not UTF-8 text") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = getattr(error, "strerror", None) or error
            raise RecipeError(f"{self.file}: cannot be read ({why}); `python -m recipes list` shows recipes") from None
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if not isinstance(node, yaml.MappingNode):
                what = "the file is empty" if node is None else "this is none"
                raise RecipeError(f"{self.file.name}:1  a recipe is a mapping of sections (name:, model:, ...); {what}")
            self.values = self._mapping(node, "")
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
            why = getattr(error, "problem", None) or " ".join(str(error).split())
            raise RecipeError(f"{self.file.name}:{line + 1}  not YAML: {why}") from None
        except RecursionError:
            raise RecipeError(f"{self.file.name}:1  is nested too deeply for a recipe") from None

    def override(self, order: int, text: str) -> None:
        """Apply one ``a.b=c``."""
        self._override = place = _Place(order, f"override '{text}'")
        path, equals, value = text.partition("=")
        path = path.strip()
        keys = path.split(".")
        if not equals or not all(keys):
            self.problems.append((place, "must have the form a.b=value"))
            return
        self.places = {known: at for known, at in self.places.items() if not f"{known}.".startswith(f"{path}.")}
        self.places[path] = place
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader)
            parsed = None if node is None else self._value(node, path)
        except (yaml.YAMLError, RecursionError):
            self.problems.append((place, "the value is not YAML; put it in quotes"))
            return
        target = self.values
        for depth, key in enumerate(keys[:-1], 1):
            section = ".".join(keys[:depth])
            self.places.setdefault(section, place)
            inner = target.setdefault(key, {})
            if not isinstance(inner, dict):
                self.problems.append((place, f"{section} is a value, not a section"))
                return
            target = inner
        target[keys[-1]] = parsed

    def _value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except ValueError as error:
                return self._refuse(path, str(error))
        if node in self._collections:  # else a few lines of aliases make a recipe without end
            return self._refuse(path, "an alias (*) of a whole section is not read; write it out")
        self._collections.add(node)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            return self._refuse(path, _foreign(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self._value(item, f"{path}.{index}") for index, item in enumerate(node.value)]

    def _refuse(self, path: str, message: str) -> None:
        self.unread.add(path)
        self.report(path, message)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            place = self._override or _Place(line, f"{self.file.name}:{line}")
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _TAG + "merge":
                what = f"{path}: " if path else ""
                self.problems.append((place, f"{what}a key is one word, neither a list nor '<<'; write the keys out"))
                continue
            key = key_node.value
            here = f"{path}.{key}" if path else key
            if key in result:
                self.problems.append((place, f"{here}: is given twice (first: {self.places[here].name}); keep one"))
                continue
            self.places[here] = place
            result[key] = self._value(value_node, here)
        return result


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
    for index, text in enumerate(overrides):
        source.override(10**9 + index, text)  # after every line of the file
    recipe = None
    try:
        # JSON mode is strict where it matters and still takes a list for a tuple.
        recipe = Recipe.model_validate_json(json.dumps(source.values), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            where = tuple(str(part) for part in item["loc"])
            if ".".join(where) not in source.unread:
                source.report(".".join(where), _explain(dict(item), where))
    if recipe is not None and rules and not source.unread:
        for problem in check_rules(recipe):
            source.report(*problem)
    if source.problems or recipe is None:
        raise RecipeError("\n".join(f"{place.name}  {text}" for place, text in sorted(source.problems, key=_order)))
    return recipe


class _Dumper(yaml.SafeDumper):
    """Text that this loader would take for a number is quoted."""


_Dumper.add_implicit_resolver(_TAG + "float", re.compile(rf"(?:{_EXPONENT.pattern})$"), list("+-.0123456789"))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loads again to an equal one."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def run_dir(recipe: Recipe) -> Path:
    """The folder of the run's results; ``{name}`` in ``run_dir`` is the recipe's name."""
    return Path(recipe.run_dir.replace("{name}", recipe.name))


def _order(problem: tuple[_Place, str]) -> int:
    return problem[0].order


def _scalar(node: yaml.ScalarNode) -> Any:
    """One plain value.

    Raises:
        ValueError: what it is instead.
    """
    kind, text = node.tag.removeprefix(_TAG), node.value
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("holds half of a surrogate pair, which is no text")
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in yaml.SafeLoader.bool_values:
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind == "int":
        if not _DECIMAL.fullmatch(text):
            raise ValueError(f"{text!r} {_MISREAD}")
        if len(text) > 20 or abs(int(text)) >= 2**63:
            raise ValueError(f"{text} is too large")
        return int(text)
    if kind == "float" or (kind == "str" and node.style is None and _EXPONENT.fullmatch(text)):
        if ":" in text:
            raise ValueError(f"{text!r} {_MISREAD}")
        number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise ValueError(f"{text} is not a finite number")
        return number
    if kind in ("str", "timestamp"):
        return text
    raise ValueError(_foreign(node))


def _foreign(node: yaml.Node) -> str:
    return f"the tag {node.tag.replace(_TAG, '!!')} is not read; a recipe is plain data"


def _explain(item: dict[str, Any], where: tuple[str, ...]) -> str:
    kind, value = item["type"], item["input"]
    parent = _model_at(where[:-1])
    if kind == "extra_forbidden":
        return f"unknown key{suggest(where[-1], list(parent.model_fields) if parent else [])}"
    if kind == "missing":
        return "an entry is missing" if where[-1].isdigit() else "is required and not given"
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    if kind == "literal_error" and parent is not None:
        choices = [choice for choice in get_args(parent.model_fields[where[-1]].annotation) if isinstance(choice, str)]
        return f"{shown} is not one of {' | '.join(choices)}{suggest(str(value), choices)}"
    if kind in ("model_type", "dict_type"):
        return f"got {shown}: this is a section; give its keys, or leave it out"
    message = item["msg"].removeprefix("Value error, ")
    hint = " (in quotes)" if kind == "string_type" and not isinstance(value, (list, dict)) else ""
    return f"got {shown}: {message[0].lower()}{message[1:]}{hint}"


def _model_at(path: tuple[str, ...]) -> type[BaseModel] | None:
    """The section's class at a path of the schema; None where there is none."""
    model: type[BaseModel] = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model
