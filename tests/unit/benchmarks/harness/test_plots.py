"""Pictures that can be read at a page's width: how wide they are, and names that do not cover one another."""

from __future__ import annotations

from pathlib import Path
from struct import unpack

import pytest

from benchmarks.harness.reporting.plots import (
    PAGE_WIDTH,
    LineEnd,
    band,
    name_ends,
    page,
    pairs_of,
    panels_of,
    save,
    spread_out,
)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_every_picture_is_as_wide_as_a_page(rows: int, columns: int, tmp_path: Path) -> None:
    figure, panels = panels_of(rows, columns, height=1.5)
    save(figure, tmp_path / "new" / "picture.png")
    width, height = unpack(">2I", (tmp_path / "new" / "picture.png").read_bytes()[16:24])
    assert len(panels) == rows * columns
    assert width == pytest.approx(150 * PAGE_WIDTH)
    assert height == 150 * 1.5 * rows


def test_panels_come_in_pairs_and_an_odd_one_leaves_its_neighbours_place_empty() -> None:
    for count, shape in ((1, (1, 1)), (2, (1, 2)), (3, (2, 2)), (4, (2, 2))):
        figure, panels = pairs_of(count)
        assert len(panels) == len(figure.axes) == count
        spec = panels[0].get_subplotspec()
        assert spec is not None
        assert (spec.get_gridspec().nrows, spec.get_gridspec().ncols) == shape


@pytest.mark.parametrize(
    ("places", "spread"),
    [
        ([], []),
        ([0.2, 0.5], [0.2, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.1, 0.12, 0.9], [0.06, 0.16, 0.9]),
        ([0.5, 0.5, 0.5, 0.57], [0.3675, 0.4675, 0.5675, 0.6675]),  # three that crowd push the fourth
        ([0.0, 0.3, 0.3, 0.3], [0.0, 0.2, 0.3, 0.4]),
    ],
)
def test_places_are_apart_and_near_where_they_were(places: list[float], spread: list[float]) -> None:
    assert spread_out(places, 0.1) == pytest.approx(spread)


def test_lines_that_end_together_have_names_apart_in_the_order_of_their_ends() -> None:
    figure = page(3.0)
    panel = figure.subplots()
    panel.set_ylim(0, 10)
    for y in (1.0, 5.0, 5.1):
        panel.plot([0, 1], [0, y])
    name_ends(
        panel, [LineEnd("b", 1, 5.1, "red"), LineEnd("a", 1, 5.0, "0.5"), LineEnd("low", 1, 1.0, "0.5")], apart=0.08
    )
    at = {text.get_text(): text.xyann for text in panel.texts}
    assert at["low"] == pytest.approx((1.03, 0.1))
    assert [at["a"][1], at["b"][1]] == pytest.approx([0.465, 0.545])


def test_a_band_reaches_as_far_as_the_errors_do() -> None:
    panel = page(3.0).subplots()
    band(panel, [1, 2], [{"mean": 2.0, "within": 1.0}, {"median": 4.0, "min": 3.0, "max": 8.0}], scale=0.5, color="red")
    (line,), (shade,) = panel.lines, panel.collections
    assert list(line.get_ydata()) == [1.0, 2.0]
    corners = shade.get_paths()[0].vertices
    assert {(x, y) for x, y in corners} == {(1, 0.5), (1, 1.5), (2, 1.5), (2, 4.0)}
