"""A recipe that is wrong is refused before anything starts: every mistake at once, with its line and a remedy."""

from __future__ import annotations

import contextlib
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
        ("steps: 100", "steps: true", "train.steps: got true: input should be a valid integer"),
        ("steps: 100", "steps: 0", "train.steps: got 0: input should be greater than 0"),
        ("steps: 100", "steps:", "train.steps: got null: input should be a valid integer"),
        ("lr: 6.0e-3", "lr: fast", "optim.lr: got 'fast': input should be a valid number"),
        ("lr: 6.0e-3", "lr: '1e-3'", "optim.lr: got '1e-3': input should be a valid number"),
        ("packing: true", "packing: maybe", "data.packing: got 'maybe': input should be a valid boolean"),
        (
            "algorithm: all_gather",
            "algorithm: ulyses",
            "parallel.cp.algorithm: 'ulyses' is not one of all_gather | ulysses | hybrid | ring | hybrid_ring (did you mean 'ulysses'?)",
        ),
        ("name: qwen3_moe_quickstart", "name: 7", "name: got 7: input should be a valid string (in quotes)"),
        ("name: qwen3_moe_quickstart", "name: ../up", "name: got '../up': use letters, digits, '.', '_' and '-'"),
        ("steps: 100", "steps: 0100", "train.steps: '0100' is a number that YAML reads otherwise than it looks"),
        ("steps: 100", "steps: 1:30", "train.steps: '1:30' is a number that YAML reads otherwise than it looks"),
        ("steps: 100", f"steps: {'9' * 5000}", "is too large"),
        ("lr: 6.0e-3", "lr: .inf", "optim.lr: .inf is not a finite number"),
        ("hidden_size: 128", "hidden_size: .nan", "model.config.hidden_size: .nan is not a finite number"),
        ("hidden_size: 128", "hidden_size: wide", "model.config.hidden_size: no model can be built from this config"),
        ("seed: 0", "seed: !!binary aGk=", "train.seed: the tag !!binary is not read; a recipe is plain data"),
        ("name: qwen3_moe_quickstart", 'name: "\\uD800"', "name: holds half of a surrogate pair"),
    ],
)
def test_wrong_type_or_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    (line,) = refused(edited(tmp_path, (f"{old}\n", f"{new}\n")))
    (number,) = [n for n, text in enumerate(TEXT.splitlines(), 1) if text.strip() == old]
    assert line.startswith(f"mine.yaml:{number}  ")
    assert message in line


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    path = edited(
        tmp_path, ("algorithm: all_gather", "algoritm: all_gather"), ("steps: 100", "steps: many"), ("seed: 0", "sed: 0"),
        ("lr: 6.0e-3", "lr: -1"),
    )  # fmt: skip
    expected = [  # in the order of the file
        ("algorithm", "parallel.cp.algoritm: unknown key (did you mean 'algorithm'?)"),
        ("lr", "optim.lr: got -1: input should be greater than 0"),
        ("steps", "train.steps: got 'many': input should be a valid integer"),
        ("seed", "train.sed: unknown key (did you mean 'seed'?)"),
    ]
    for line, (key, part) in zip(refused(path), expected, strict=True):
        assert line.startswith(f"mine.yaml:{line_of(key)}  {part}"), line


def test_duplicates_and_rules_are_raised_together(tmp_path: Path) -> None:
    path = edited(tmp_path, ("seed: 0", "seed: 0\n  seed: 1"), ("warmup_steps: 10", "warmup_steps: 1000"))
    first, second = refused(path)
    assert f"mine.yaml:{line_of('warmup_steps')}  optim.warmup_steps: 1000 exceeds train.steps=100" in first
    assert "train.seed: is given twice" in second


def test_missing_keys_name_their_section(tmp_path: Path) -> None:
    path = edited(tmp_path, ("name: qwen3_moe_quickstart\n", ""), ("  lr: 6.0e-3\n", ""))
    assert refused(path) == [
        "mine.yaml:1  name: is required and not given",
        f"mine.yaml:{line_of('optim') - 1}  optim.lr: is required and not given",
    ]


@pytest.mark.parametrize("value", ["", " 4"])
def test_a_section_without_keys(tmp_path: Path, value: str) -> None:
    path = edited(tmp_path, ("checkpoint:\n  every: 25\n  keep: 2\n", f"checkpoint:{value}\n"))
    assert refused(path) == [
        f"mine.yaml:{line_of('checkpoint')}  checkpoint: got {value.strip() or 'null'}: this is a section; "
        "give its keys, or leave it out"
    ]


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
        ("name: a\n\tmodel: b\n", "bad.yaml:2  not YAML"),
        ("name: a\nmodel: \x01\n", "bad.yaml:2  not YAML: unacceptable character"),
        ("name: a\n---\nname: b\n", "bad.yaml:2  not YAML: but found another document"),
        ("name: " + "[" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert message in refused(path)[0]


def test_missing_file_and_python_tags(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "nowhere.yaml")[0]
    assert "cannot be read (Is a directory)" in refused(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "latin.yaml: is not UTF-8 text" in refused(tmp_path / "latin.yaml")[0]
    (line,) = refused(edited(tmp_path, ("seed: 0", "seed: !!python/object/apply:os.getpid []")))
    assert "train.seed: the tag !!python/object/apply:os.getpid is not read; a recipe is plain data" in line


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("config: &a\n    x: *a", "model.config.x: an alias (*) of a whole section is not read; write it out"),
        ("config:\n    <<: {use_cache: true}", "model.config: a key is one word, neither a list nor '<<'"),
        ("config:\n    ? [a, b]\n    : 1", "model.config: a key is one word, neither a list nor '<<'"),
    ],
)
def test_yaml_beyond_plain_data(tmp_path: Path, new: str, message: str) -> None:
    (line,) = refused(edited(tmp_path, ("config:", new)))
    assert line.startswith(f"mine.yaml:{line_of('config') + 1}  {message}")


def test_an_alias_of_a_value_is_fine(tmp_path: Path) -> None:
    text = TEXT.replace("    vocab_size: 2048", "    vocab_size: &vocabulary 2048")
    (tmp_path / "mine.yaml").write_text(text.replace("\n  vocab_size: 2048", "\n  vocab_size: *vocabulary"))
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe(QUICKSTART)


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
        "override 'train.step=7'  train.step: unknown key (did you mean 'steps'?)",
        "override 'nonsense'  must have the form a.b=value",
        "override 'train.seed.deep=1'  train.seed is a value, not a section",
        "override 'train.steps=x'  train.steps: got 'x': input should be a valid integer",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=1", "trian: unknown key (did you mean 'train'?)"),
        ("parallel.cpp.size=2", "parallel.cpp: unknown key (did you mean 'cp'?)"),
        ("optim={lr: 1.0, lr: 2.0}", "optim.lr: is given twice"),
        ("optim={lr: fast}", "optim.lr: got 'fast': input should be a valid number"),
        ("optim.betas=[0.9]", "optim.betas.1: an entry is missing"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1: got 1.0: input should be less than 1"),
        ("train.steps=", "train.steps: got null: input should be a valid integer"),
        ("=3", "must have the form a.b=value"),
        ("train.steps={", "the value is not YAML; put it in quotes"),
        ("train.steps=" + "[" * 3000, "the value is not YAML"),
        ("model.config.hidden_size=wide", "model.config.hidden_size: no model can be built"),
    ],
)
def test_wrong_override_says_which(override: str, message: str) -> None:
    (line,) = refused(QUICKSTART, override)
    assert line.startswith(f"override '{override}'  {message}")


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    """Values of the file under an overridden section are gone, lines included."""
    path = edited(tmp_path, ("size: 2\n", "size: two\n"))
    assert load_recipe(path, ["parallel.cp={size: 1}", "parallel.nproc=1"]).parallel.cp.size == 1
    recipe = load_recipe(path, ["parallel.cp.size=2", "parallel.cp.per_layer.softmax.algorithm=ulysses"])
    assert recipe.parallel.cp.per_layer == {"softmax": {"algorithm": "ulysses"}}


def test_dump_loads_again_to_an_equal_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART, ["optim.lr=1e-5", "parallel.cp.per_layer={softmax: {algorithm: ulysses}}"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert run_dir(recipe) == Path("runs/qwen3_moe_quickstart")
    recipe = load_recipe(QUICKSTART, ["run_dir=out/{name}/{0}/{model}", "name=x"])
    assert run_dir(recipe) == Path("out/x/{0}/{model}")


@pytest.mark.parametrize("name", ["1e5", "1E-5", "123", "0100", "true", "null", "2026-12-01", "1.5"])
def test_dump_keeps_text_that_looks_like_something_else(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(QUICKSTART, [f'name="{name}"', "optim.eps=1e-12", "optim.lr=1e5"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert recipe.name == name


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
        recipe = load_recipe(file)
    except RecipeError as error:
        message = str(error)
    else:
        file.write_text(dump_recipe(recipe))
        assert load_recipe(file) == recipe
    assert not message or "mutated.yaml" in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, len(TEXT)),
    length=st.integers(0, 12),
    text=st.text("\n\t \"'#&*!:?-[]{}<>=.,0aé\x00", max_size=6),
)
def test_any_damage_to_the_text_is_refused_cleanly(tmp_path: Path, start: int, length: int, text: str) -> None:
    """Cut a piece out of the file and put another in."""
    file = tmp_path / "damaged.yaml"
    file.write_text(TEXT[:start] + text + TEXT[start + length :])
    with contextlib.suppress(RecipeError):
        load_recipe(file, [f"train.steps={text}"])
