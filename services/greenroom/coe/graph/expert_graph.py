"""The graph of a collaboration's experts, in numbers: what follows what, and how probably each is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.coe.graph.definition_file import CoeDefinition, EdgeDefinition, ExpertDefinition, followers_of
from greenroom.core.errors import InvalidConfig

Shares = NDArray[np.float64]

END: Final = None
"""What follows the last expert of a request."""


class ExpertGraph:
    """Experts are numbered in the order of the file; the numbers are the keys of ``Catalogue.of_models``. Immutable.

    ``names[N]``. ``predecessors[i]``: whose results can lead to expert i. ``order``: all experts, each behind its
    predecessors.
    """

    def __init__(self, definition: CoeDefinition) -> None:
        """``definition``: one that was checked."""
        self.names: tuple[str, ...] = tuple(definition.experts)
        self._key = {name: key for key, name in enumerate(self.names)}
        self._router = None if definition.router.expert is None else self._key[definition.router.expert]
        self._values = {value: self._key[name] for value, name in definition.values.items()}
        self._experts = tuple(definition.experts.values())
        self._first = _first_shares(definition, self._values)
        before: dict[int, set[int]] = {key: set() for key in range(len(self.names))}
        for name, followers in followers_of(definition).items():
            for follower in followers:
                before[self._key[follower]].add(self._key[name])
        self.predecessors: tuple[frozenset[int], ...] = tuple(map(frozenset, before.values()))
        self.order: tuple[int, ...] = tuple(TopologicalSorter(before).static_order())

    def __len__(self) -> int:
        return len(self.names)

    @property
    def values(self) -> tuple[str, ...]:
        """Those of the router: what a request's parameter may be, or the labels of the expert that routes."""
        return tuple(self._values)

    def first(self, value: str) -> int:
        """The first expert of a request with this parameter. Where an expert routes, any value leads to it.

        Raises LookupError for a value that is not known.
        """
        return self._router if self._router is not None else self._values[value]

    def after(self, expert: int, label: str | None, score: float | None) -> int | None:
        """Which expert follows, given the result of ``expert``; END where none does.

        Raises LookupError where the expert routes and no expert is named for its label.
        """
        if expert == self._router:
            if label not in self._values:
                raise LookupError(f"{self.names[expert]!r} gives the label {label!r}, for which no expert is named")
            return self._values[label]
        for edge in self._experts[expert].next:
            if edge.holds(label, score):
                return self._key[edge.expert]
        return END

    def usage(self) -> Shares:
        """``[N]``: the probability that a request uses each expert (CoServe, section 4.5).

        P(next) = Σ P(predecessor) · P(edge). A request takes one edge at most and comes to no expert twice, so the
        ways to an expert exclude each other and their probabilities add up.
        """
        found = self._first.copy()
        if self._router is not None:
            found[self._router] = 1.0
        for key in self.order:
            if key == self._router:
                continue  # what follows it is in ``_first``
            expert = self._experts[key]
            for edge, share in zip(expert.next, edge_shares(expert), strict=True):
                found[self._key[edge.expert]] += found[key] * share
        return np.minimum(found, 1.0)  # sums of shares may round above it

    def draw_path(self, draw: Callable[[], float]) -> tuple[int, ...]:
        """The experts of a request, drawn by the probabilities that ``usage`` adds up. ``draw``: evenly from [0, 1)."""
        first = _drawn(draw(), self._first)
        assert first is not None, "the first shares are 1 in sum"
        path = [first] if self._router is None else [self._router, first]
        while (edge := _drawn(draw(), edge_shares(self._experts[path[-1]]))) is not None:
            path.append(self._key[self._experts[path[-1]].next[edge].expert])
        return tuple(path)

    def counted_usage(self, paths: Iterable[Sequence[int]]) -> Shares:
        """The same, counted: the share of a sample's requests that used each. ``paths``: the experts of each request.

        Raises InvalidConfig for an empty sample.
        """
        counts, requests = np.zeros(len(self)), 0
        for path in paths:
            counts[np.unique(np.asarray(path, dtype=np.int64))] += 1
            requests += 1
        if not requests:
            raise InvalidConfig("sample", "no requests", "at least one")
        return counts / requests


def edge_shares(expert: ExpertDefinition) -> list[float]:
    """For each of its edges the probability that a request which has run through ``expert`` takes it.

    As the file says. What that leaves goes to an edge without conditions; otherwise the edges of which nothing is
    said share it evenly with the end, since any label may come.
    """
    edges: Sequence[EdgeDefinition] = expert.next
    left = max(0.0, 1 - sum(edge.probability or 0.0 for edge in edges))
    open_ = [edge for edge in edges if edge.probability is None]
    parts = len(open_) + (0 if edges and not edges[-1].conditional else 1)
    return [left / parts if edge.probability is None else edge.probability for edge in edges]


def _drawn(lot: float, shares: Iterable[float]) -> int | None:
    """The place of the share that the lot falls into; None: behind all of them."""
    for place, share in enumerate(shares):
        lot -= share
        if lot < 0:
            return place
    return None


def _first_shares(definition: CoeDefinition, values: dict[str, int]) -> Shares:
    """``[N]``: the probability that the router leads to each, by quantities. A value without one never comes."""
    found = np.zeros(len(definition.experts))
    quantities = definition.quantities or dict.fromkeys(values, 1.0)
    for value, quantity in quantities.items():
        found[values[value]] += quantity
    found /= found.sum()
    return found
