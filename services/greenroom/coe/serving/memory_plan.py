"""How much memory executors get, for experts and for intermediates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.coe.serving.config import AUTO
from greenroom.core.errors import BudgetTooSmall
from greenroom.core.units import format_bytes, parse_bytes
from greenroom.experts.pack.layout import PAGE_BYTES, align


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. ``regions``: of each memory for experts. ``intermediates``: of each executor, for a batch."""

    regions: tuple[int, ...]
    intermediates: int
    executors: int

    @property
    def experts(self) -> int:
        return sum(self.regions)

    @property
    def total(self) -> int:
        return self.experts + self.intermediates * self.executors


def plan_regions(
    text: str, names: Sequence[str], sizes: Sequence[int], memories: int, available: int | None
) -> tuple[int, ...]:
    """Bytes of each of so many memories. ``text``: of all together, a size or a share of all experts; ``auto``: what
    they need to hold all, and at most half of what is ``available``. ``names``, ``sizes``: of the experts.

    Raises InvalidConfig; BudgetTooSmall, naming the largest expert, where one does not fit into a memory.
    """
    whole, largest = sum(sizes), max(sizes)
    least = align(largest, PAGE_BYTES) * memories
    if text == AUTO:
        total = max(least, whole * memories if available is None else min(whole * memories, available // 2))
    else:
        total = parse_bytes(text, field="expert_memory", whole=whole)
    if available is not None and total > available:
        raise BudgetTooSmall(f"--expert-memory is {format_bytes(total)}, and {format_bytes(available)} are available")
    each = total // memories // PAGE_BYTES * PAGE_BYTES
    if each < largest:
        name = names[list(sizes).index(largest)]
        shares = "" if memories == 1 else f" in {memories} memories of {format_bytes(each)}"
        raise BudgetTooSmall(
            f"--expert-memory is {format_bytes(total)}{shares}, and expert {name!r} alone takes "
            f"{format_bytes(largest)}: the least that works is {least} bytes ({format_bytes(least)})"
        )
    return (each,) * memories


def plan_intermediates(regions: Sequence[int], executors: int, share: float) -> int:
    """Bytes of each executor. ``share``: the experts' part of what they and intermediates have."""
    return int(sum(regions) * (1 - share) / share / executors)
