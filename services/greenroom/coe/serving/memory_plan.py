"""How much memory executors get, for experts and for intermediates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from greenroom.coe.serving.config import AUTO
from greenroom.core.errors import BudgetTooSmall
from greenroom.core.units import MIB, format_bytes, parse_bytes
from greenroom.experts.pack.layout import PAGE_BYTES, align

MOST_INPUTS: Final = 512 * MIB
LEAST_INPUTS: Final = 32 * MIB
"""Some of the largest."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. ``regions``: of each memory for experts. Of each executor: ``intermediates``, for what a batch computes,
    and ``preparing``, for an input that it decodes or tokenises. ``inputs``: for those of all requests.
    """

    regions: tuple[int, ...]
    intermediates: int
    preparing: int
    executors: int
    inputs: int = 0

    @property
    def experts(self) -> int:
        return sum(self.regions)

    @property
    def total(self) -> int:
        return self.experts + (self.intermediates + self.preparing) * self.executors + self.inputs


@dataclass(frozen=True, slots=True)
class ExecutorNeeds:
    """Bytes of one executor. ``batch``: of intermediates, for the largest batch; ``least``: for one request.
    ``preparing``: for an input that it reads. ``executors``: how many there are.
    """

    batch: int
    least: int
    preparing: int
    executors: int


def plan_memory(
    text: str,
    names: Sequence[str],
    sizes: Sequence[int],
    memories: int,
    needs: ExecutorNeeds,
    available: int | None,
    share: float | None = None,
    *,
    strict_share: bool = False,
    chosen: int | None = None,
    inputs: int = 0,
) -> MemoryPlan:
    """Who gets what of the memory that is ``available`` (None: of as much as is asked for).

    ``text``: what experts get in all memories together, as ``plan_regions`` takes it. Intermediates get what the
    largest batch takes, but no more than is left, and no more than ``share`` leaves them (the experts' part of what
    both have; None: any). They get what one request takes at least, unless the share is ``strict_share``. ``inputs``:
    what those of requests get.

    ``chosen``: what a profile gives experts of the memory that it was made for. Under ``auto`` they get no more; and
    where less is available than that memory, their share of it, in place of half.

    Raises InvalidConfig; BudgetTooSmall, with what is too much.
    """
    preparing, least = needs.preparing * needs.executors, needs.least * needs.executors
    most = chosen
    if chosen is not None and share is not None and available is not None:
        most = min(chosen, max(0, int((available - preparing - inputs) * share)))
    regions = plan_regions(text, names, sizes, memories, available, least + preparing + inputs, most)
    intermediates = needs.batch
    if share is not None:
        intermediates = min(intermediates, plan_intermediates(regions, needs.executors, share))
    if available is not None:
        intermediates = min(intermediates, (available - preparing - inputs - sum(regions)) // needs.executors)
    if not strict_share:
        intermediates = max(intermediates, needs.least)
    return MemoryPlan(regions, intermediates, needs.preparing, needs.executors, inputs)


def plan_inputs(available: int | None) -> int:
    """Bytes for the inputs of all requests that are here: a sixteenth of what is ``available``, within bounds."""
    return MOST_INPUTS if available is None else min(MOST_INPUTS, max(LEAST_INPUTS, available // 16))


def plan_regions(
    text: str,
    names: Sequence[str],
    sizes: Sequence[int],
    memories: int,
    available: int | None,
    beside: int = 0,
    most: int | None = None,
) -> tuple[int, ...]:
    """Bytes of each of so many memories. ``text``: of all together, a size or a share of all experts; ``auto``: what
    they need to hold all, and at most ``most`` (None: half of what is ``available``), but no less than each needs to
    hold the largest. ``names``, ``sizes``: of the experts. ``beside``: what executors and inputs need at least besides.

    Raises InvalidConfig; BudgetTooSmall, naming the largest expert, where one does not fit into a memory; and where
    more is asked for than is available.
    """
    whole, largest = sum(sizes), max(sizes)
    least = align(largest, PAGE_BYTES) * memories
    if text == AUTO:
        limits = [whole * memories]
        if available is not None:
            limits += [available - beside, available // 2 if most is None else most]
        elif most is not None:
            limits.append(most)
        total = max(least, min(limits))
    else:
        total = parse_bytes(text, field="expert_memory", whole=whole)
    if available is not None and total + beside > available:
        raise BudgetTooSmall(
            f"--expert-memory is {format_bytes(total)}, executors need {format_bytes(beside)} besides, for one request "
            f"and one image each and for inputs that wait, and {format_bytes(available)} are available: lower "
            "--expert-memory, --executors or --max-pixels"
        )
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
