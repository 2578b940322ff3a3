"""What figures should be, and whether they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure should be: at least, or at most."""

    value: float
    at_least: bool

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value

    def verdict(self, figure: float | None) -> str:
        return "not measured" if figure is None else "met" if self.met(figure) else "missed"

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.value:g}"


def figure_lines(figures: Mapping[str, float | None], aims: Mapping[str, Aim]) -> list[str]:
    """A line for each figure, with its aim where it has one."""
    width = 2 + max([24, *map(len, figures)])
    lines = []
    for name, figure in figures.items():
        line = f"{name:<{width}}{'-' if figure is None else f'{figure:.3f}':>10}"
        if (aim := aims.get(name)) is not None:
            line += f"   aim {aim!s:<8} {aim.verdict(figure)}"
        lines.append(line)
    return lines
