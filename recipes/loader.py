"""TEMP"""

from __future__ import annotations

from pathlib import Path

import yaml

from .schema import Recipe


def load_recipe(path, overrides=()):
    d = yaml.safe_load(Path(path).read_text())
    for o in overrides:
        k, v = o.split("=", 1)
        t = d
        *ss, l = k.split(".")
        for s in ss:
            t = t.setdefault(s, {})
        t[l] = yaml.safe_load(v)
    return Recipe.model_validate(d)


def dump_recipe(r):
    return yaml.safe_dump(r.model_dump(mode="json"))


def run_dir(r):
    return Path(r.run_dir.replace("{name}", r.name))
