"""What ``make test`` runs of a matrix covers what it says."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.matrices import cover, matrix


@pytest.mark.parametrize("sizes", [(3, 3, 4), (7, 4), (6, 2, 3), (2, 2, 2, 2), (5,)])
@pytest.mark.parametrize("strength", [1, 2])
def test_values_of_so_many_factors_are_together_at_least_once(strength: int, sizes: tuple[int, ...]) -> None:
    cells = cover(strength, sizes)
    for factors in combinations(range(len(sizes)), strength):
        wanted = set(product(*(range(sizes[factor]) for factor in factors)))
        assert {tuple(cell[factor] for factor in factors) for cell in cells} == wanted


def test_it_is_small_and_uses_values_alike() -> None:
    assert len(cover(2, (3, 3, 4))) <= 13
    assert len(cover(1, (7, 4))) == 7
    second = [cell[1] for cell in cover(1, (8, 4))]
    assert [second.count(value) for value in range(4)] == [2] * 4


def test_what_is_beyond_the_cover_is_for_the_full_suite() -> None:
    cases = matrix(1, number=(1, 2), named={"yes": True, "no": False}).mark.args[1]
    assert [(case.id, case.values, bool(case.marks)) for case in cases] == [
        ("1-yes", (1, True), False),
        ("1-no", (1, False), True),
        ("2-yes", (2, True), True),
        ("2-no", (2, False), False),
    ]
