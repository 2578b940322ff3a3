"""What decisions cost: every shape is timed, and the picture shows how each axis grows."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.moe_infinity import cost


def test_every_shape_is_timed_for_each_number_of_sequences(tmp_path: Path) -> None:
    shapes = (cost.MAIN, cost.Shape(layers=2), cost.Shape(members=5))
    found = cost.run(cost.Scale(repeats=2, layers=24, at_once=(1, 2), shapes=shapes))

    assert [(row["layers"], row["members"], row["at_once"]) for row in found["rows"]] == [
        (24, 300, 1), (24, 300, 2), (2, 300, 1), (2, 300, 2), (24, 5, 1), (24, 5, 2),
    ]  # fmt: skip
    for row in found["rows"]:
        assert 0 < row["search_us"]["median"] < row["decision_us"]["median"]
        assert 0 < row["caching_us"]["median"] < row["decision_us"]["median"]
    assert found["search_us_1"] == found["rows"][0]["search_us"]["median"]
    json.dumps(found)
    assert "24 × 128, 300 EAMs" in cost.table(found)
    cost.draw(found, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 0


def test_a_collections_bytes_are_those_of_its_arrays() -> None:
    arm = cost.Timed(cost.Shape(layers=2, experts=4, members=3), at_once=1)
    assert arm.eamc_bytes == 3 * 8 * (4 + 2 + 4)
