"""What follows what, and how probably each expert is used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.coe.graph.definition_file import CoeDefinition, EdgeDefinition, ExpertDefinition, RouterDefinition, check
from greenroom.coe.graph.expert_graph import END, ExpertGraph, edge_shares
from greenroom.core.errors import InvalidConfig


def edge(to: str, **conditions: object) -> EdgeDefinition:
    return EdgeDefinition(expert=to, **conditions)  # type: ignore[arg-type]


def expert(*edges: EdgeDefinition) -> ExpertDefinition:
    return ExpertDefinition(model="m", next=edges)


BOARD = CoeDefinition(
    name="board",
    router=RouterDefinition(parameter="component", first={"R": "resistor", "S": "resistor", "U": "chip"}),
    quantities={"R": 2, "S": 1, "U": 1},
    experts={
        "turned": expert(),
        "resistor": expert(edge("turned", label="good", probability=0.5)),
        "chip": expert(edge("careful", below_score=0.6), edge("turned")),
        "careful": expert(edge("turned", labels=("good", "worn"), probability=0.25)),
    },
)


def test_usage_follows_quantities_and_edges() -> None:
    graph = ExpertGraph(BOARD)
    # chip's edges share evenly, since the last one is taken wherever the first is not
    assert graph.usage() == pytest.approx([0.375 + 0.125 + 0.03125, 0.75, 0.25, 0.125])
    assert [graph.names[key] for key in graph.order] == ["resistor", "chip", "careful", "turned"]
    assert graph.predecessors[0] == {1, 2, 3}


def test_a_conditional_edge_of_which_nothing_is_said_shares_with_the_end() -> None:
    assert edge_shares(expert(edge("a", label="x"), edge("b", label="y"))) == pytest.approx([1 / 3, 1 / 3])
    assert edge_shares(expert(edge("a", label="x", probability=0.4), edge("b", label="y"))) == pytest.approx([0.4, 0.3])
    assert edge_shares(expert(edge("a"))) == [1.0]
    assert edge_shares(expert()) == []


def test_the_first_edge_that_holds_is_taken() -> None:
    graph = ExpertGraph(BOARD)
    turned, resistor, chip, careful = range(4)
    assert graph.first("S") == resistor
    assert graph.after(resistor, "good", 0.9) == turned
    assert graph.after(resistor, "cracked", 0.9) is END
    assert graph.after(chip, "anything", 0.59) == careful
    assert graph.after(chip, "anything", 0.6) == turned
    assert graph.after(chip, None, None) == turned  # no score is not below any
    assert graph.after(careful, "worn", None) == turned
    assert graph.after(turned, "good", 1.0) is END
    with pytest.raises(LookupError):
        graph.first("X")


def test_an_expert_routes_by_its_label() -> None:
    routed = CoeDefinition(
        name="board", router=RouterDefinition(expert="kind", first={"r": "resistor", "c": "chip"}),
        quantities={"r": 3, "c": 1}, experts={"kind": expert(), **BOARD.experts},
    )  # fmt: skip
    check(routed)
    graph = ExpertGraph(routed)
    kind, turned, resistor, chip, careful = range(5)
    assert graph.first("anything") == kind
    assert graph.after(kind, "c", 0.2) == chip
    assert graph.predecessors[chip] == {kind}
    assert graph.order[0] == kind
    assert graph.usage()[[kind, resistor, chip, careful]] == pytest.approx([1, 0.75, 0.25, 0.125])
    with pytest.raises(LookupError, match="'kind' gives the label 'x'"):
        graph.after(kind, "x", 0.2)
    assert graph.predecessors[turned] == {resistor, chip, careful}


def test_a_sample_is_counted() -> None:
    graph = ExpertGraph(BOARD)
    assert graph.counted_usage([[1, 0], [1], [2, 3, 0], [2, 0]]) == pytest.approx([0.75, 0.5, 0.5, 0.25])
    with pytest.raises(InvalidConfig, match="at least one"):
        graph.counted_usage([])


@st.composite
def collaborations(draw: st.DrawFn) -> CoeDefinition:
    """Edges lead from an expert to later ones only, so there is no circle; what nothing leads to comes first."""
    count = draw(st.integers(1, 8))
    experts = {}
    for at in range(count):
        later: list[int] = []
        if at + 1 < count:
            later = draw(st.lists(st.integers(at + 1, count - 1), max_size=3))
        given = [draw(st.none() | st.floats(0, 1 / 3)) for _ in later]
        edges = [
            edge(f"e{to}", label=f"l{place}", probability=share)
            for place, (to, share) in enumerate(zip(later, given, strict=True))
        ]
        always: bool = draw(st.booleans())
        if edges and always:
            edges[-1] = edge(edges[-1].expert)
        experts[f"e{at}"] = expert(*edges)
    names = list(experts)
    if draw(st.booleans()):  # a file's order says nothing about the order of a request
        names.reverse()
    return CoeDefinition(
        name="any", router=RouterDefinition(parameter="p"), experts={name: experts[name] for name in names}
    )


def ways(definition: CoeDefinition, name: str, share: float) -> Iterator[tuple[list[str], float]]:
    """Every path of a request from an expert on, with its probability."""
    own = definition.experts[name]
    shares = edge_shares(own)
    yield [name], share * max(0.0, 1 - sum(shares))
    for one, part in zip(own.next, shares, strict=True):
        for path, probability in ways(definition, one.expert, share * part):
            yield [name, *path], probability


@given(collaborations())
def test_usage_is_the_sum_over_all_ways_of_a_request(definition: CoeDefinition) -> None:
    check(definition)
    graph = ExpertGraph(definition)
    firsts = list(definition.values.values())
    expected, total = np.zeros(len(graph)), 0.0
    for first in firsts:
        for path, probability in ways(definition, first, 1 / len(firsts)):
            total += probability
            assert len(set(path)) == len(path)
            for name in path:
                expected[graph.names.index(name)] += probability
    assert total == pytest.approx(1)
    assert graph.usage() == pytest.approx(expected)


@given(collaborations())
def test_the_order_has_each_expert_once_behind_its_predecessors(definition: CoeDefinition) -> None:
    graph = ExpertGraph(definition)
    assert sorted(graph.order) == list(range(len(graph)))
    place = {key: at for at, key in enumerate(graph.order)}
    for key, own in enumerate(graph.predecessors):
        assert all(place[before] < place[key] for before in own)
