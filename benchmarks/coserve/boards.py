"""The paper's circuit boards (CoServe, ASPLOS 2025, section 5.1): types with an expert each, detectors that they share.

Every other type has a second stage, on one of 24 detectors. A type's result does not matter: the experts' weights are
random here, so that a request always goes on where it can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from benchmarks.coserve.costs import Costs
from greenroom.coe.graph.definition_file import CoeDefinition, EdgeDefinition, ExpertDefinition, RouterDefinition, check
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.profiling.coe.replayed_throughput import Board, drawn_paths

TYPES: Final = {"A": 352, "B": 342}
DETECTORS: Final = 24
ZIPF: Final = 1.2
RESIDENT: Final = 0.1
"""Of all experts' bytes: the memory, of experts and of intermediates."""
ON_A_BOARD: Final = 1000
"""Components of a fixed board."""


def expert_names(types: int) -> list[str]:
    """Of the types, then of the detectors."""
    return [f"type-{number:03}" for number in range(types)] + [f"detector-{number:02}" for number in range(DETECTORS)]


def role_of(name: str) -> str:
    """``type``, or a detector of ``half`` or ``equal`` size: every other one."""
    kind, _, number = name.partition("-")
    return "type" if kind == "type" else ("half", "equal")[int(number) % 2]


def definition(board: str, seed: int = 0, *, fixed: bool = False) -> CoeDefinition:
    """``seed``: which types are frequent. ``fixed``: quantities are those of one board, each type once at least."""
    types = TYPES[board]
    ranks = list(range(types))
    random.Random(f"{board}/{seed}").shuffle(ranks)
    weights = np.arange(1, types + 1) ** -ZIPF
    names = expert_names(types)
    experts = {name: ExpertDefinition(model=f"experts/{name}") for name in names}
    for number in range(0, types, 2):
        follows = (EdgeDefinition(expert=names[types + number // 2 % DETECTORS]),)
        experts[names[number]] = ExpertDefinition(model=f"experts/{names[number]}", next=follows)
    shares = weights / weights.sum()
    counts = 1 + np.floor(shares * (ON_A_BOARD - types)) if fixed else shares
    made = CoeDefinition(
        name=f"board-{board}", router=RouterDefinition(parameter="component"), experts=experts,
        quantities={names[number]: float(counts[rank]) for number, rank in enumerate(ranks)},
    )  # fmt: skip
    check(made)
    return made


@dataclass(frozen=True)
class Task:
    """``requests`` of a board: drawn by Zipf's law, or ``fixed``: of boards that are all alike, as they are scanned.

    ``seed``: which types are frequent, and what is drawn.
    """

    board: str
    requests: int
    seed: int
    fixed: bool = False

    @property
    def name(self) -> str:
        return f"{self.board}, {self.requests:,}{', scanned' if self.fixed else ''}"

    @cached_property
    def graph(self) -> ExpertGraph:
        return ExpertGraph(definition(self.board, self.seed, fixed=self.fixed))

    @cached_property
    def roles(self) -> list[str]:
        return [role_of(name) for name in self.graph.names]

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        if not self.fixed:
            return drawn_paths(self.graph, self.requests, self.seed)
        board = scanned(definition(self.board, self.seed, fixed=True), self.seed)
        starts = [self.graph.first(board[number % len(board)]) for number in range(self.requests)]
        return [self._followed(start) for start in starts]

    def on(self, costs: Costs, *, every: str | None = None) -> Board:
        """With what experts cost. ``every``: the model of all of them, in place of their roles'."""
        own = [costs.models[every or role] for role in self.roles]
        return Board(
            self.graph, [one.record_bytes for one in own], [one.batches for one in own], self.graph.usage(), self.paths
        )

    def _followed(self, expert: int) -> tuple[int, ...]:
        path = [expert]
        while (follower := self.graph.after(path[-1], None, None)) is not None:
            path.append(follower)
        return tuple(path)


def scanned(of: CoeDefinition, seed: int) -> list[str]:
    """The types of a board's components in the order in which a camera sees them, always the same for a seed."""
    parts = [name for name, count in of.quantities.items() for _ in range(int(count))]
    random.Random(f"{of.name}/{seed}/scan").shuffle(parts)
    return parts


def memory_of(board: Board, resident: float = RESIDENT) -> int:
    return int(resident * sum(board.bytes_of))


def distinct(paths: Sequence[tuple[int, ...]]) -> set[int]:
    return {expert for path in paths for expert in path}
