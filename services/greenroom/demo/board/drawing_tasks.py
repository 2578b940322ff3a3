"""Many crops, drawn label by label, by whatever means: one process or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.demo.board.component_types import TYPES
from greenroom.demo.board.crops import Split
from greenroom.demo.board.expert_crops import Expert, Labelled, experts_of


@dataclass(frozen=True, slots=True)
class DrawingTask:
    """``many`` crops of one label of the expert of this name, where the board has these types. It can be pickled."""

    types: tuple[str, ...]
    expert: str
    label: str
    many: int
    seed: int
    split: Split


Drawn = NDArray[np.uint8]
DrawOne = Callable[[DrawingTask, Callable[[], None]], Drawn]
DrawEach = Callable[[DrawOne, Sequence[DrawingTask], Callable[[], object]], list[Drawn]]
"""Calls the first with each task and a function to call now and then, which may raise to stop it; calls the last after
each that is done. Returns the results in order.
"""


def draw(task: DrawingTask, go_on: Callable[[], None]) -> Drawn:
    """``[many, 64, 64, 3]``."""
    types = [one for one in TYPES if one.name in task.types]
    expert = next(one for one in experts_of(types) if one.name == task.expert)
    crops = []
    for crop in expert.crops_of(task.label, task.many, task.seed, task.split):
        go_on()
        crops.append(crop)
    return np.stack(crops)


def one_by_one(draw_one: DrawOne, tasks: Sequence[DrawingTask], finished: Callable[[], object]) -> list[Drawn]:
    results = []
    for task in tasks:
        results.append(draw_one(task, lambda: None))
        finished()
    return results


def drawn(
    experts: Sequence[Expert],
    many: int,
    seed: int,
    split: Split,
    draw_each: DrawEach = one_by_one,
    finished: Callable[[], object] = lambda: None,
) -> list[Labelled]:
    """For each expert ``many`` crops of each of its labels, label after label."""
    types = tuple(sorted({one.name for expert in experts for one in expert.types}))
    tasks = [DrawingTask(types, expert.name, label, many, seed, split) for expert in experts for label in expert.labels]
    results = iter(draw_each(draw, tasks, finished))
    return [
        Labelled(np.concatenate([next(results) for _ in expert.labels]), np.repeat(np.arange(len(expert.labels)), many))
        for expert in experts
    ]
