"""Which of a layer's experts may run before their turn, so that few outputs wait to be added."""

from __future__ import annotations

from typing import Final

from greenroom.policies.base.events import LayerRouting

_FEW: Final = 256
"""Rows of outputs that may always wait: they take no memory worth a pause of the link."""


def most_held(rows: int) -> int:
    """Rows of outputs that wait at most, in a step of so many rows."""
    return max(rows, _FEW)


class HeldOutputs:
    """A layer adds its experts' outputs in ascending order, in whatever order they run: then sums are the same to the
    bit. So the output of an expert that runs early is held until its turn. All experts together have top-k outputs a
    row; held are at most as many as the step has rows, or a few.
    """

    __slots__ = ("_done", "_keys", "_most", "_next", "_rows", "held")

    def __init__(self, routing: LayerRouting) -> None:
        self.held = 0
        """Rows of outputs that wait."""
        self._keys: list[int] = routing.experts.tolist()
        self._rows = dict(zip(self._keys, routing.rows.tolist(), strict=True))
        self._most = most_held(routing.step.rows)
        self._done: set[int] = set()
        self._next = 0  # whose turn it is, of the keys

    @property
    def turn(self) -> int | None:
        """Whose output is added next; None: all have been."""
        return self._keys[self._next] if self._next < len(self._keys) else None

    def may_run(self, key: int) -> bool:
        """Of a key that has not run."""
        return key == self.turn or self.held + self._rows[key] <= self._most

    def have_run(self, key: int) -> None:
        self._done.add(key)
        self.held += self._rows[key]
        while self._next < len(self._keys) and (own := self._keys[self._next]) in self._done:
            self.held -= self._rows[own]
            self._next += 1
