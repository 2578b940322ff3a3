"""Matrices of which ``make test`` runs a cover and ``make test-full`` all."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Cell = tuple[int, ...]
"""Of each factor the place of a value."""


def matrix(strength: int, **factors: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrises a test with all combinations of the factors' values; those beyond a cover are marked ``full``.

    In the cover any values of ``strength`` factors are together at least once: 1 is each value, 2 each pair of values
    of two factors. A mapping names its values; those of an iterable name themselves.
    """
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for values in factors.values()
    ]
    chosen = cover(strength, tuple(map(len, named)))
    cells = product(*(range(len(values)) for values in named))
    return pytest.mark.parametrize(
        tuple(factors),
        [
            pytest.param(
                *(values[place][1] for values, place in zip(named, cell, strict=True)),
                id="-".join(values[place][0] for values, place in zip(named, cell, strict=True)),
                marks=() if cell in chosen else pytest.mark.full,
            )
            for cell in cells
        ],
    )


@functools.cache
def cover(strength: int, sizes: Cell) -> frozenset[Cell]:
    """Found greedily: next is what covers most that was not covered, and of these what has been seldom used."""
    groups = list(combinations(range(len(sizes)), strength))
    cells = list(product(*map(range, sizes)))
    open_ = {(group, tuple(cell[factor] for factor in group)) for group in groups for cell in cells}
    used: Counter[tuple[int, int]] = Counter()
    chosen: set[Cell] = set()

    def covers(cell: Cell) -> set[tuple[Cell, Cell]]:
        return {(group, tuple(cell[factor] for factor in group)) for group in groups} & open_

    while open_:
        best = max(cells, key=lambda cell: (len(covers(cell)), -sum(used[place] for place in enumerate(cell))))
        open_ -= covers(best)
        used.update(enumerate(best))
        chosen.add(best)
    return frozenset(chosen)
