"""The definition file that is written is one that is read, whatever types there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.coe.graph.definition_file import check_labels, read_definition
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.demo.board.component_types import TYPES
from greenroom.demo.board.definition import definition_text
from greenroom.demo.board.expert_crops import experts_of


@pytest.mark.parametrize("many", [1, 3, 7, len(TYPES)])
def test_it_passes_all_checks(tmp_path: Path, many: int) -> None:
    types = TYPES[:many]
    experts = experts_of(types)
    file = tmp_path / "board.toml"
    file.write_text(definition_text(types, experts), encoding="utf-8")
    definition = read_definition(file)
    assert list(definition.experts) == [one.name for one in experts]
    check_labels(definition, {one.name: one.labels for one in experts})
    assert definition.router.parameter == "component"


def test_it_says_how_often_each_expert_is_used(tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    file.write_text(definition_text(TYPES, experts_of()), encoding="utf-8")
    graph = ExpertGraph(read_definition(file))
    usage = dict(zip(graph.names, graph.usage(), strict=True))
    everything = sum(sum(one.values.values()) for one in TYPES)
    polar = [one for one in TYPES if one.orientation == "polarity"]
    assert usage["resistor"] == pytest.approx(204 / everything)
    assert usage["polarity"] == pytest.approx(sum(sum(one.values.values()) * one.good for one in polar) / everything)
    assert graph.names[graph.first("D1N4148")] == "diode"
    assert graph.names[graph.after(graph.first("D1N4148"), "good", 0.9) or 0] == "polarity"
    assert graph.after(graph.first("D1N4148"), "burnt", 0.9) is None
