"""All-pairs testing: few cases in which every legal pair of values of any two factors occurs. Deterministic.

A factor has a name and a few values; a case gives each factor one of its values. The cases are made greedily: each is
seeded with the first pair that none has yet, and its other values are those that add most pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Factors = Mapping[str, Sequence[Any]]  # values are hashable
Values = dict[str, Any]  # one of each factor, or of some
Pair = frozenset[tuple[str, Any]]  # the values of two factors
Legal = Callable[[Values], bool]


def pairs_of(case: Values) -> set[Pair]:
    """The pairs that occur in one case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_pairs(factors: Factors) -> list[Pair]:
    """Every pair of values of two factors, legal or not, in order."""
    return [
        frozenset({(a, first), (b, second)})
        for a, b in combinations(factors, 2)
        for first in factors[a]
        for second in factors[b]
    ]


def pairwise(factors: Factors, legal: Legal) -> list[Values]:
    """Cases that cover every pair which some legal case has.

    Args:
        factors: name -> values; the order decides ties.
        legal: also asked about cases with factors still open, and says False only if no value of those would help.

    Returns:
        The cases, each with its factors in order.
    """
    missing = dict.fromkeys(all_pairs(factors))  # a set in order
    cases = []
    while missing:
        seed = next(iter(missing))
        case = _complete(dict(seed), factors, legal, missing)
        if case is None:  # no legal case has this pair
            del missing[seed]
            continue
        cases.append({name: case[name] for name in factors})
        for pair in pairs_of(case):
            missing.pop(pair, None)
    return cases


def _complete(case: Values, factors: Factors, legal: Legal, missing: Mapping[Pair, None]) -> Values | None:
    """Fill the open factors, each with the value that adds most missing pairs; go back where that becomes illegal."""
    if not legal(case):
        return None
    name = next((name for name in factors if name not in case), None)
    if name is None:
        return case

    def added(value: Any) -> int:
        return sum(frozenset({(name, value), other}) in missing for other in case.items())

    for value in sorted(factors[name], key=added, reverse=True):
        found = _complete({**case, name: value}, factors, legal, missing)
        if found is not None:
            return found
    return None
