"""Few combinations of many options, among which every two values of every two options meet."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import combinations, product
from typing import Any

Pair = tuple[str, int, str, int]  # option, index of its value, another option, index of its value


def all_pairs(options: Mapping[str, Seq[Any]], *, seed: int = 0, tries: int = 40) -> list[dict[str, Any]]:
    """Rows of one value for each option. Greedy: of some random rows around an uncovered pair, the best."""
    rng = random.Random(seed)
    names = list(options)
    missing: set[Pair] = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(options[a])), range(len(options[b])))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        a, i, b, j = min(missing)
        candidates = [{n: rng.randrange(len(options[n])) for n in names} | {a: i, b: j} for _ in range(tries)]
        best = max(candidates, key=lambda row: len(missing & covered(row, names)))
        missing -= covered(best, names)
        rows.append({name: options[name][best[name]] for name in names})
    return rows


def covered(row: Mapping[str, int], names: Seq[str]) -> set[Pair]:
    """The pairs that meet in a row of value indices."""
    return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}
