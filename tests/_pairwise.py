"""All pairs: few cases in which every legal pair of values of any two lists occurs. Deterministic and greedy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_in(case: Case) -> set[Pair]:
    """Every two settings that occur together."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def legal_pairs(lists: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool]) -> set[Pair]:
    """The pairs that occur in any legal case at all."""
    names = list(lists)
    found: set[Pair] = set()
    for values in itertools.product(*lists.values()):
        case = dict(zip(names, values, strict=True))
        if legal(case):
            found |= pairs_in(case)
    return found


def all_pairs(lists: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool], tries: int = 60) -> list[Case]:
    """Legal cases that cover every legal pair.

    Args:
        lists: the values of each setting; their whole product is walked once.
        legal: whether a whole case may occur.
        tries: random cases looked at for each one taken, beside one that is built around a pair still missing.
    """
    generator = random.Random(0)
    names = list(lists)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*lists.values())]
    every = [case for case in every if legal(case)]
    missing = set().union(*map(pairs_in, every)) if every else set()
    chosen: list[Case] = []
    while missing:
        wanted = min(missing, key=lambda pair: sorted(map(str, pair)))
        fitting = [case for case in every if wanted <= set(case.items())]
        candidates = generator.sample(fitting, min(tries, len(fitting)))
        best = max(candidates, key=lambda case: len(pairs_in(case) & missing))
        chosen.append(best)
        missing -= pairs_in(best)
    return chosen
