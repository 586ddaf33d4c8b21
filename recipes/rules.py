"""Rules that need more than one field of a recipe, a file, or the model's config. All run before any process starts.

Each rule yields ``Problem(path, message)``: what was read, what is legal, what to do. The loader adds the line.
Rules about the model build it once without memory (on the meta device), so what the model refuses is refused here.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .schema import CPSection, Recipe


class Problem(NamedTuple):
    """One thing that is wrong: the recipe's dotted path, and the message."""

    path: str
    message: str


VERSION = "0.1.0"
# What the schema can say and this version cannot do: (field of parallel.cp, values, what to use). Top level and
# per_layer alike. Rows go when the feature comes.
NOT_AVAILABLE: tuple[tuple[str, tuple[Any, ...], str], ...] = (("kernel", ("flex", "npu_flash", "flash"), "sdpa"),)
# Keys of an HF config that a recipe says elsewhere; in model.config they would be ignored.
SAID_ELSEWHERE = {
    "model_type": "model.family",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "output_router_logits": "model.output_router_logits",
}
MOST_LAYERS = 1000  # a typing mistake in num_hidden_layers must not build a million layers


def check_rules(recipe: Recipe) -> list[Problem]:
    """Every problem that any rule finds."""
    return [problem for rule in RULES for problem in rule(recipe)]


def available(recipe: Recipe) -> Iterator[Problem]:
    """Only what this version has."""
    cp = recipe.parallel.cp
    places = {"parallel.cp": cp.model_dump(exclude={"per_layer"})}
    places |= {f"parallel.cp.per_layer.{key}": fields for key, fields in cp.per_layer.items()}
    for place, fields in places.items():
        for field, missing, instead in NOT_AVAILABLE:
            if fields.get(field) in missing:
                text = f"{json.dumps(fields[field])} is not available in this version ({VERSION}): use {instead}"
                yield Problem(f"{place}.{field}", text)


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
            f"{fixed * parallel.dp_shard}, nproc is {parallel.nproc}; use dp_shard: {parallel.nproc // fixed} or none",
        )


def batch_sizes(recipe: Recipe) -> Iterator[Problem]:
    """A global batch is whole micro-batches of all data ranks (of dp_replicate alone while dp_shard is not known)."""
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
    warmup, steps = recipe.optim.warmup_steps, recipe.train.steps
    if warmup > steps:
        yield Problem("optim.warmup_steps", f"{warmup} exceeds train.steps={steps}; use fewer")
    if recipe.train.eval_every and not recipe.data.valid_fraction:
        yield Problem("train.eval_every", "validation needs data: set data.valid_fraction above 0, or eval_every: 0")


def data_files(recipe: Recipe) -> Iterator[Problem]:
    """The text and the tokenizer are there. (os.path, for Path raises on names that are too long.)"""
    source, tokenizer = recipe.data.source, recipe.data.tokenizer
    if source != "pydoc_topics":
        if not source.endswith((".txt", ".jsonl")):
            yield Problem("data.source", f"{source!r} is neither 'pydoc_topics' nor a .txt or .jsonl file")
        elif not os.path.isfile(source):
            yield Problem("data.source", f"{source}: no such file; give the path of a .txt or .jsonl file")
        elif not os.path.getsize(source):
            yield Problem("data.source", f"{source} is empty; put text into it or choose another file")
    if tokenizer not in ("model", "train_bpe") and not os.path.isdir(tokenizer):
        yield Problem("data.tokenizer", f"{tokenizer!r} is neither 'model' nor 'train_bpe' nor a tokenizer's folder")


def model_source(recipe: Recipe) -> Iterator[Problem]:
    """Weights, config and tokenizer come from somewhere."""
    model, data = recipe.model, recipe.data
    if model.init == "pretrained":
        if model.path is None:
            yield Problem("model.path", "init: pretrained needs the folder of a checkpoint; or use init: random")
        elif not os.path.isfile(_config_file(recipe)):
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
    if data.tokenizer == "train_bpe" and type(vocab) is int and vocab < data.vocab_size:
        yield Problem("data.vocab_size", f"{data.vocab_size} exceeds model.config.vocab_size={vocab}; make them equal")


def _config_file(recipe: Recipe) -> str:
    return "" if recipe.model.path is None else os.path.join(recipe.model.path, "config.json")


def model_build(recipe: Recipe) -> Iterator[Problem]:
    """The config is one of the family, it builds a model, and the sequence and the CP settings fit that model."""
    import torch

    from models.auto import FAMILIES

    from .build import model_config

    section, random = recipe.model, recipe.model.init == "random"
    if not section.config if random else not os.path.isfile(_config_file(recipe)):
        return  # model_source says so
    problems = list(_config_keys(recipe) if random else _checkpoint_family(recipe))
    if problems:
        yield from problems
        return
    try:
        config = model_config(recipe)
        with torch.device("meta"):
            model = FAMILIES[section.family](config)
        yield from [*_sequence_length(recipe, config), *_cp_of_layers(recipe, model)]
    except Exception as error:  # configs and layers raise many types; each is the user's to read
        why = " ".join(str(error).split())
        field = re.match(r"Validation error for field '(\w+)'", why)  # transformers' words
        why = why if " " in why else f"{type(error).__name__}: {why}"  # a KeyError says one word
        where = "model.path" if not random else f"model.config.{field[1]}" if field else "model.config"
        yield Problem(where, f"no model can be built from this config: {why}")


def _config_keys(recipe: Recipe) -> Iterator[Problem]:
    """Known keys, and sizes that are sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[recipe.model.family]()
    known = {*default.to_dict(), *default.attribute_map, "head_dim", "rope_theta", "rope_scaling", "torch_dtype"}
    for key, value in recipe.model.config.items():
        path = f"model.config.{key}"
        if key not in known or key.startswith("_"):
            public = [name for name in known if not name.startswith("_")]
            yield Problem(path, f"unknown key{suggest(key, public)}; legal are the keys of {type(default).__name__}")
        elif key in SAID_ELSEWHERE:
            yield Problem(path, f"is said by {SAID_ELSEWHERE[key]}; leave it out here")
        elif type(value) is int and (key.startswith(("num_", "max_pos")) or key.endswith(("_size", "_dim", "_step"))):
            least = 0 if key in ("num_experts", "num_local_experts") else 1  # no experts: every layer is dense
            most = MOST_LAYERS if key == "num_hidden_layers" else None
            if value < least or (most is not None and value > most):
                limits = f"at least {least}" if most is None else f"{least} to {most}"
                yield Problem(path, f"got {value}, legal is {limits}")


def _checkpoint_family(recipe: Recipe) -> Iterator[Problem]:
    file = _config_file(recipe)
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield Problem("model.path", f"{file} cannot be read as JSON: {error}; give an HF checkpoint")
        return
    family = config.get("model_type") if isinstance(config, dict) else None
    if family != recipe.model.family:
        text = f"{recipe.model.path} holds a {family!r} checkpoint, model.family is {recipe.model.family!r}"
        yield Problem("model.path", f"{text}; make them agree")


def _sequence_length(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """Positions beyond what the model was made for need scaled rotary embeddings."""
    limit, rope = config.max_position_embeddings, config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":  # it reaches further than the config's own number
        limit = max(limit, int(rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", limit)))
    if recipe.data.seq_len <= limit:
        return
    factor = float(math.ceil(recipe.data.seq_len / config.max_position_embeddings))
    where = "model.config" if recipe.model.init == "random" else "the checkpoint's config.json"
    yield Problem(
        "data.seq_len",
        f"{recipe.data.seq_len} exceeds the model's {limit} positions (max_position_embeddings="
        f"{config.max_position_embeddings}); use a shorter sequence, or scale the rotary embedding in {where}: "
        f"rope_parameters: {{rope_type: yarn, factor: {factor}, rope_theta: {rope.get('rope_theta')}, "
        f"original_max_position_embeddings: {config.max_position_embeddings}}}",
    )


# What a refusal names before its remedy; else it is about the algorithm.
_CP_FIELDS = ("ulysses_degree", "kernel", "load_balance", "schedule")


def _cp_of_layers(recipe: Recipe, model: Any) -> Iterator[Problem]:
    """What binding refuses; of a mistake that is there without ``per_layer`` too, the field is named."""
    if any(available(recipe)):
        return
    cp = recipe.parallel.cp
    text = _dry_bind(model, cp)
    if text and text == _dry_bind(model, cp.model_copy(update={"per_layer": {}})):
        named = (name for name in _CP_FIELDS if re.search(rf"\b{name}\b", text.partition(": use ")[0]))
        written = (name for name in named if getattr(cp, name) is not None)  # of a degree that is missing the algorithm
        field = next(written, "algorithm")
        yield Problem(f"parallel.cp.{field}", text)
    elif text:
        yield Problem("parallel.cp.per_layer", text)


def _dry_bind(model: Any, cp: CPSection) -> str:
    """What binding to a topology of that size, without groups, would refuse; nothing is bound."""
    from cp_core import Topology
    from cp_core.bind import resolve
    from cp_core.topology import Axis

    from .build import cp_config

    try:
        resolve(model, Topology(cp=Axis(size=cp.size)), cp_config(cp))
    except ValueError as error:
        return str(error)
    return ""


def suggest(text: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing when no choice is close."""
    close = difflib.get_close_matches(text, sorted(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


RULES: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    available, mesh_sizes, batch_sizes, schedule, data_files, model_source, model_build,
)  # fmt: skip
