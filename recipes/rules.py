"""Rules that need more than one field of a recipe, a file, or the model's config. All run before any process starts.

Each rule yields ``Problem(path, message)``: what was read, what is legal, what to do. The loader adds the line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .schema import Recipe


class Problem(NamedTuple):
    """One thing that is wrong: the recipe's dotted path, and the message."""

    path: str
    message: str


# What the schema can say and this version cannot do. Rows go when the feature comes.
NOT_AVAILABLE: tuple[tuple[str, Callable[[Recipe], Any], tuple[Any, ...], str], ...] = (
    ("parallel.cp.algorithm", lambda r: r.parallel.cp.algorithm, ("hybrid", "ring"), "all_gather or ulysses"),
    ("parallel.cp.schedule", lambda r: r.parallel.cp.schedule, ("async",), "sync"),
    ("parallel.cp.load_balance", lambda r: r.parallel.cp.load_balance, (True,), "false"),
    ("parallel.cp.kernel", lambda r: r.parallel.cp.kernel, ("flex", "npu_flash", "flash"), "sdpa"),
)


def check_rules(recipe: Recipe) -> Iterator[Problem]:
    """Every problem that any rule finds."""
    for rule in RULES:
        yield from rule(recipe)


def available(recipe: Recipe) -> Iterator[Problem]:
    """Only what this version has."""
    for path, read, missing, instead in NOT_AVAILABLE:
        value = read(recipe)
        if value in missing:
            yield Problem(path, f"{json.dumps(value)} is not available in this version; use {instead}")


def mesh_sizes(recipe: Recipe) -> Iterator[Problem]:
    """The axes must multiply to the number of processes."""
    parallel = recipe.parallel
    if parallel.nproc is None:
        return
    fixed = parallel.dp_replicate * parallel.cp.size
    if parallel.nproc % fixed:
        yield Problem(
            "parallel.cp.size",
            f"cp.size={parallel.cp.size} x dp_replicate={parallel.dp_replicate} does not divide nproc="
            f"{parallel.nproc}; use nproc: {max(1, parallel.nproc // fixed) * fixed} or other sizes",
        )
    elif parallel.dp_shard is not None and fixed * parallel.dp_shard != parallel.nproc:
        yield Problem(
            "parallel.dp_shard",
            f"dp_replicate={parallel.dp_replicate} x dp_shard={parallel.dp_shard} x cp.size={parallel.cp.size} is "
            f"{fixed * parallel.dp_shard}, nproc is {parallel.nproc}; use dp_shard: {parallel.nproc // fixed}, or leave "
            "it out",
        )


def batch_sizes(recipe: Recipe) -> Iterator[Problem]:
    """A global batch is whole micro-batches of all data ranks."""
    parallel, train = recipe.parallel, recipe.train
    shards = parallel.dp_shard
    if shards is None:
        fixed = parallel.dp_replicate * parallel.cp.size
        shards = max(1, (parallel.nproc or fixed) // fixed)
    width = train.micro_batch * shards * parallel.dp_replicate
    if train.global_batch % width:
        yield Problem(
            "train.global_batch",
            f"{train.global_batch} is not a multiple of micro_batch={train.micro_batch} x "
            f"{shards * parallel.dp_replicate} data ranks; use {-(-train.global_batch // width) * width}",
        )


def schedule(recipe: Recipe) -> Iterator[Problem]:
    """Warm-up and validation fit the run."""
    if recipe.optim.warmup_steps > recipe.train.steps:
        yield Problem(
            "optim.warmup_steps", f"{recipe.optim.warmup_steps} exceeds train.steps={recipe.train.steps}; use fewer"
        )
    if recipe.train.eval_every and not recipe.data.valid_fraction:
        yield Problem("train.eval_every", "validation needs data: set data.valid_fraction above 0, or eval_every: 0")


def data_files(recipe: Recipe) -> Iterator[Problem]:
    """The text is there."""
    source = recipe.data.source
    if source == "pydoc_topics":
        return
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        yield Problem("data.source", f"{source!r} is neither 'pydoc_topics' nor a .txt or .jsonl file")
    elif not path.is_file():
        yield Problem("data.source", f"{source}: no such file; give the path of a .txt or .jsonl file")
    elif not path.stat().st_size:
        yield Problem("data.source", f"{source} is empty; put text into it or choose another file")


def model_source(recipe: Recipe) -> Iterator[Problem]:
    """Weights, config and tokenizer come from somewhere."""
    model, data = recipe.model, recipe.data
    if model.init == "pretrained":
        if model.path is None:
            yield Problem("model.path", "init: pretrained needs the folder of a checkpoint; or use init: random")
        elif not (Path(model.path) / "config.json").is_file():
            yield Problem("model.path", f"{model.path} is no folder with a config.json; give an HF checkpoint")
        if model.config:
            yield Problem("model.config", "belongs to init: random; a checkpoint brings its own config, leave it out")
        if data.tokenizer == "train_bpe":
            yield Problem("data.tokenizer", "'train_bpe' does not fit trained weights; use 'model' or a folder")
        return
    if model.path is not None:
        yield Problem("model.path", "belongs to init: pretrained; leave it out, or change init")
    if not model.config:
        yield Problem("model.config", "init: random needs the model's sizes; give them, or use init: pretrained")
    if data.tokenizer == "model":
        yield Problem("data.tokenizer", "'model' needs a checkpoint; with init: random use 'train_bpe' or a folder")
    vocab = model.config.get("vocab_size")
    if data.tokenizer == "train_bpe" and isinstance(vocab, int) and vocab < data.vocab_size:
        yield Problem("data.vocab_size", f"{data.vocab_size} exceeds model.config.vocab_size={vocab}; make them equal")


def model_config(recipe: Recipe) -> Iterator[Problem]:
    """The config is one of the family, and the sequence and heads fit it."""
    config = None
    try:
        config, problems = _read_config(recipe)
        yield from problems
    except Exception as error:  # transformers validates with many exception types; each is the user's to read
        where = "model.config" if recipe.model.init == "random" else "model.path"
        yield Problem(where, f"transformers refuses this config: {' '.join(str(error).split())}")
    if config is None:
        return
    limit = getattr(config, "max_position_embeddings", None)
    if limit and recipe.data.seq_len > limit:
        yield Problem(
            "data.seq_len",
            f"{recipe.data.seq_len} exceeds the model's max_position_embeddings={limit}; use a shorter sequence, or a "
            "checkpoint (model.config) with rope_parameters that reach so far (yarn) and a larger limit",
        )
    yield from _check_heads(recipe, config.num_attention_heads, config.num_key_value_heads)


def _read_config(recipe: Recipe) -> tuple[Any | None, list[Problem]]:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from models.auto import FAMILIES

    section = recipe.model
    if section.init == "pretrained":
        folder = Path(section.path or "")
        if section.path is None or not (folder / "config.json").is_file():
            return None, []
        family = json.loads((folder / "config.json").read_text()).get("model_type")
        if family != section.family:
            text = f"{folder} holds a {family!r} checkpoint, model.family is {section.family!r}"
            return None, [Problem("model.path", f"{text}; the zoo has {' | '.join(FAMILIES)}")]
        config = AutoConfig.from_pretrained(folder)
    else:
        if not section.config:
            return None, []
        default = CONFIG_MAPPING[section.family]()
        known = {*default.to_dict(), *default.attribute_map, "head_dim", "rope_theta", "rope_scaling"}
        unknown = [key for key in section.config if key not in known]
        if unknown:
            return None, [Problem(f"model.config.{key}", f"unknown key{suggest(key, known)}") for key in unknown]
        config = AutoConfig.for_model(section.family, **section.config)
    FAMILIES[section.family].check_config(config)
    return config, []


def _check_heads(recipe: Recipe, q_heads: int, kv_heads: int) -> Iterator[Problem]:
    from cp_core import ContextParallelConfig
    from cp_core.strategies import MixerFacts
    from cp_core.strategies.compose import check_heads

    cp = recipe.parallel.cp
    if cp.size == 1 or cp.algorithm != "ulysses":
        return
    if cp.ulysses_degree not in (None, cp.size):
        text = f"{cp.ulysses_degree} with algorithm ulysses must be cp.size={cp.size}; leave it out"
        yield Problem("parallel.cp.ulysses_degree", text)
        return
    try:
        config = ContextParallelConfig(algorithm="ulysses", kv_head_policy=cp.kv_head_policy)
        check_heads(config, MixerFacts("model", "softmax", q_heads, kv_heads), cp.size)
    except ValueError as error:
        yield Problem("parallel.cp.algorithm", str(error).removeprefix("model: "))


def per_layer(recipe: Recipe) -> Iterator[Problem]:
    """``per_layer`` entries are what the core takes."""
    from .build import cp_config

    try:
        cp_config(recipe)
    except ValueError as error:
        yield Problem("parallel.cp.per_layer", str(error))


def suggest(text: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing when no choice is close."""
    close = difflib.get_close_matches(text, sorted(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    available, mesh_sizes, batch_sizes, schedule, data_files, model_source, model_config, per_layer,
)  # fmt: skip
