"""Which arms take turns for a format: its experts and the same in bf16, all resident and in as many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.formats.models import EXPANDED, FormatModel
from benchmarks.harness.children.child_rounds import Arm, Stage
from benchmarks.harness.children.greenroom_child import CONCURRENCY, greenroom_child
from benchmarks.harness.children.processes import ChildSpec
from benchmarks.harness.inputs.token_streams import Stream
from benchmarks.harness.rows import RESIDENT, THIRD, Row

BF16: Final = "bf16"
OWN_THIRD: Final = "a third"
"""Of the format's own bytes, or of bf16's for bf16."""
BF16_THIRD: Final = "bf16's third"
"""As many bytes as a third of the experts takes in bf16."""


@dataclass(frozen=True)
class Prepared:
    """``facts``: what an engine with a third of the experts in bf16 said of itself. ``cold``: files to be dropped from
    the page cache before a bounded turn."""

    name: str
    folder: Path
    model: FormatModel
    stream: Stream
    slot_budget_bytes: int
    limit_bytes: int | None
    cold: tuple[Path, ...]


def probe(folder: Path, policy: str) -> ChildSpec:
    """Says how much memory a third of the experts takes in bf16."""
    return greenroom_child(folder, THIRD, policy, name="probe", experts_as=EXPANDED, dense_as=EXPANDED)


def stage(prepared: Prepared, policy: str, rounds: int, seconds: float) -> Stage:
    """All arms of a format. Those that are bounded have a memory cgroup of what bf16 takes with a third of its experts,
    and find nothing in the page cache."""
    arms = []
    for concurrency in (1, CONCURRENCY):
        for system, experts_as in ((BF16, EXPANDED), (prepared.name, prepared.model.kept_as)):
            arms.append(_arm(prepared, system, experts_as, RESIDENT, RESIDENT, "lru", concurrency))
            budget = THIRD if system == BF16 else str(prepared.slot_budget_bytes)
            arms.append(_arm(prepared, system, experts_as, BF16_THIRD, budget, policy, concurrency, bounded=True))
        arms.append(_arm(prepared, prepared.name, prepared.model.kept_as, OWN_THIRD, THIRD, policy, concurrency))
    return Stage(tuple(arms), rounds, seconds)


def _arm(
    prepared: Prepared,
    system: str,
    experts_as: str,
    share: str,
    budget: str,
    policy: str,
    concurrency: int,
    *,
    bounded: bool = False,
) -> Arm:
    child = greenroom_child(
        prepared.folder, budget, policy, experts_as=experts_as, limit_bytes=prepared.limit_bytes if bounded else None,
        dense_as=EXPANDED if system == BF16 else "auto",
    )  # fmt: skip
    row = Row(share, prepared.name, system, share, policy, concurrency)
    arguments = {"concurrency": concurrency}
    return Arm(row, child, prepared.stream, prepared.stream, arguments, cold=prepared.cold if bounded else ())
