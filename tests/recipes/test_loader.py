"""A recipe that is wrong is refused before anything starts: every mistake at once, with its line and a remedy."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.cli import CONFIGS
from recipes.loader import RecipeError, dump_recipe, load_recipe, run_dir

QUICKSTART = CONFIGS / "qwen3_moe" / "quickstart.yaml"
TEXT = QUICKSTART.read_text()


def line_of(key: str, text: str = TEXT) -> int:
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip().startswith(f"{key}:")]
    return number


def edited(folder: Path, *replacements: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    return str(error.value).splitlines()


def test_unknown_key_has_line_and_suggestion(tmp_path: Path) -> None:
    path = edited(tmp_path, ("  seq_len: 1024", "  seqlen: 1024"))
    lines = refused(path)
    assert f"mine.yaml:{line_of('seq_len')}  data.seqlen: unknown key (did you mean 'seq_len'?)" in lines
    assert f"mine.yaml:{line_of('data')}  data.seq_len: is required and not given" in lines
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 100", "steps: 4k", "train.steps: got '4k': input should be a valid integer"),
        ("steps: 100", "steps: 2.5", "train.steps: got 2.5: input should be a valid integer"),
        ("steps: 100", "steps: true", "train.steps: got True: input should be a valid integer"),
        ("steps: 100", "steps: 0", "train.steps: got 0: input should be greater than 0"),
        ("steps: 100", "steps:", "train.steps: got null: input should be a valid integer"),
        ("lr: 6.0e-3", "lr: fast", "optim.lr: got 'fast': input should be a valid number"),
        ("lr: 6.0e-3", "lr: '1e-3'", "optim.lr: got '1e-3': input should be a valid number"),
        ("packing: true", "packing: maybe", "data.packing: got 'maybe': input should be a valid boolean"),
        (
            "algorithm: all_gather",
            "algorithm: ulyses",
            "parallel.cp.algorithm: 'ulyses' is not one of all_gather | ulysses | hybrid | ring (did you mean 'ulysses'?)",
        ),
        ("name: qwen3_moe_quickstart", "name: 7", "name: got 7: input should be a valid string"),
    ],
)
def test_wrong_type_or_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = edited(tmp_path, (f"{old}\n", f"{new}\n")) if TEXT.count(old) == 1 else None
    assert path is not None
    (line,) = refused(path)
    key = new.split(":")[0]
    expected = next(
        n
        for n, text in enumerate(path.read_text().splitlines(), 1)
        if text.strip().startswith(f"{key}:") and new.split(":", 1)[1].strip() in text
    )
    assert line.startswith(f"mine.yaml:{expected}  ")
    assert message in line


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    path = edited(
        tmp_path, ("algorithm: all_gather", "algoritm: all_gather"), ("steps: 100", "steps: many"), ("seed: 0", "sed: 0"),
        ("lr: 6.0e-3", "lr: -1"),
    )  # fmt: skip
    lines = refused(path)
    assert len(lines) == 4
    for part in ("parallel.cp.algoritm: unknown key (did you mean 'algorithm'?)", "train.steps: got 'many'",
                 "train.sed: unknown key (did you mean 'seed'?)", "optim.lr: got -1"):  # fmt: skip
        assert sum(part in line for line in lines) == 1, part


def test_key_given_twice(tmp_path: Path) -> None:
    path = edited(tmp_path, ("steps: 100", "steps: 100\n  steps: 90"))
    number = line_of("steps")
    assert refused(path) == [
        f"mine.yaml:{number + 1}  train.steps: is given twice (first: mine.yaml:{number}); keep one"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is a mapping of sections"),
        ("- a\n- b\n", "a recipe is a mapping of sections"),
        ("name: [1, 2\nmodel: 3\n", "not YAML"),
        ("name: a\n\tmodel: b\n", "not YAML"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert message in refused(path)[0]


def test_missing_file_and_python_tags(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "nowhere.yaml")[0]
    path = edited(tmp_path, ("seed: 0", "seed: !!python/object/apply:os.getpid []"))
    assert any("seed" in line for line in refused(path))


def test_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    assert load_recipe(edited(tmp_path, ("lr: 6.0e-3", "lr: 1e-5"))).optim.lr == 1e-5
    assert load_recipe(QUICKSTART, ["optim.lr=2e-4", "optim.betas=[0.8, 0.9]"]).optim.betas == (0.8, 0.9)


def test_overrides() -> None:
    recipe = load_recipe(
        QUICKSTART, ["train.steps=7", "optim.warmup_steps=1", "model.config.num_experts=4", "optim.max_grad_norm=null"]
    )
    assert (recipe.train.steps, recipe.model.config["num_experts"], recipe.optim.max_grad_norm) == (7, 4, None)
    lines = refused(QUICKSTART, "train.step=7", "nonsense", "train.seed.deep=1", "train.steps=x")
    assert lines == [
        "override 'nonsense'  must have the form a.b=value",
        "override 'train.seed.deep=1'  train.seed is a value, not a section",
        "override 'train.steps=x'  train.steps: got 'x': input should be a valid integer",
        "override 'train.step=7'  train.step: unknown key (did you mean 'steps'?)",
    ]


def test_dump_loads_again_to_an_equal_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART, ["optim.lr=1e-5", "parallel.cp.per_layer={softmax: {algorithm: ulysses}}"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert run_dir(recipe) == Path("runs/qwen3_moe_quickstart")


def test_every_shipped_recipe_has_the_right_form() -> None:
    found = sorted(CONFIGS.rglob("*.yaml"))
    assert len(found) >= 2
    for path in found:
        assert load_recipe(path, rules=False).name.startswith(path.parent.name)


def _paths(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    result = []
    for key, value in values.items():
        result.append((*prefix, key))
        if isinstance(value, dict):
            result += _paths(value, (*prefix, key))
    return result


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(allow_nan=True), st.text(max_size=8),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), value=VALUES, rename=st.booleans())
def test_any_mutation_loads_or_is_refused(tmp_path: Path, seed: int, value: Any, rename: bool) -> None:
    """No mistake ends in another exception."""
    values = copy.deepcopy(yaml.safe_load(TEXT))
    path = random.Random(seed).choice(_paths(values))
    target = values
    for key in path[:-1]:
        target = target[key]
    if rename:
        target[path[-1] + "x"] = target.pop(path[-1])
    else:
        target[path[-1]] = value
    file = tmp_path / "mutated.yaml"
    file.write_text(yaml.safe_dump(values))
    message = ""
    try:
        load_recipe(file)
    except RecipeError as error:
        message = str(error)
    assert not message or "mutated.yaml" in message
