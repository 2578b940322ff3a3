"""Beside accelerate at a third of the experts: one process each, in a memory cgroup of greenroom's announced size, with
nothing cached before a turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.children import cgroups
from benchmarks.harness.children.child_rounds import Arm, Stage, run_stage
from benchmarks.harness.children.processes import Children, ChildSpec
from benchmarks.harness.inputs.prepared_models import WIDENED, Sizes, prepare
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.inputs.task_prompts import stream_of
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import spread_json
from benchmarks.harness.rows import GREENROOM, THIRD, Row, find, speed_ratio
from benchmarks.moe_infinity.engine.arms.accelerate_server import SYSTEM
from benchmarks.moe_infinity.engine.arms.compared_policies import DISK_OFFLOAD, LITERAL, PAPER

NAME = "bounded"
OPEN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Ground:
    """What the processes need. ``scratch``: a folder of this run. ``cold``: files to drop from the page cache before a
    turn.

    ``limit_bytes``: of every process's memory cgroup; None if none can be made, for the reason ``why_no_limit``.
    """

    model: Path
    offload_folder: Path
    learnt: Learnt
    scratch: Path
    cold: tuple[Path, ...]
    limit_bytes: int | None
    why_no_limit: str | None

    def ours(self, kind: Kind) -> ChildSpec:
        settings = {
            "model": str(self.model), "share": THIRD, "policy": kind.policy, "policy_options": dict(kind.options),
            "artifacts": self.learnt.write(self.scratch, kind.policy),
        }  # fmt: skip
        return ChildSpec.of(GREENROOM, settings, limit_bytes=self.limit_bytes, name=NAME)

    def peer(self) -> ChildSpec:
        settings = {"model": str(self.model), "offload_folder": str(self.offload_folder)}
        return ChildSpec.of(SYSTEM, settings, limit_bytes=self.limit_bytes)


@contextmanager
def prepared(expert_mib: float, learnt: Learnt, kind: Kind) -> Iterator[tuple[Ground, Children]]:
    """The weights as accelerate reads them, in a temporary folder on the packs' disk. Raises ArmFailed.

    ``kind`` is opened once without a limit: what it announces is the limit of all.
    """
    why = cgroups.why_not()
    cgroups.remove_stale()
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-moe-infinity-", dir=parent) as name,
        Children(open_timeout_s=OPEN_TIMEOUT_S) as children,
    ):
        scratch = Path(name)
        offload = scratch / "offload"
        model = prepare(children, WIDENED, Sizes(widened_mib=expert_mib), offload)
        free = Ground(model.folder, offload, learnt, scratch, (*model.cold, offload), None, why)
        announced = children.get(free.ours(kind)).description
        children.close_all_but()
        yield free if why is not None else replace(free, limit_bytes=int(announced["announced_bytes"])), children


def run(
    ground: Ground, children: Children, asks: Sequence[Ask], kinds: Sequence[Kind], *, rounds: int, seconds: float
) -> dict[str, Any]:
    """Tokens/s of each, round by round, over accelerate's. Children stay open."""
    stream = stream_of(asks)
    warm_up = stream.first(1)
    rows = {kind.name: Row(NAME, WIDENED, GREENROOM, THIRD, kind.name) for kind in kinds}
    arms = [Arm(rows[kind.name], ground.ours(kind), stream, warm_up, cold=ground.cold) for kind in kinds]
    rows[DISK_OFFLOAD] = Row(NAME, WIDENED, DISK_OFFLOAD)
    arms.append(Arm(rows[DISK_OFFLOAD], ground.peer(), stream, warm_up, cold=ground.cold))
    stage = Stage(tuple(arms), rounds, seconds)
    with progress(stage.turns, "beside accelerate", "turn") as bar:
        run_stage(stage, children, tell=lambda turns, what: bar.update(turns))
    return figures(rows, ground, asks)


def figures(rows: Mapping[str, Row], ground: Ground, asks: Sequence[Ask]) -> dict[str, Any]:
    """``speed_ratio_accelerate``: of the better of MoE-Infinity's forms."""
    peer = find(rows.values(), system=DISK_OFFLOAD)
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        found[name] = {
            "tokens_per_s": spread_json(row.tokens_per_s),
            "over_accelerate": None if row is peer else spread_json(speed_ratio(row, peer)),
            "cgroup_peak_bytes": row.cgroup_peak_bytes,
            "error": row.error,
        }
    ratios = [own["median"] for name in (PAPER, LITERAL) if name in found and (own := found[name]["over_accelerate"])]
    return {
        "rows": found,
        "speed_ratio_accelerate": max(ratios, default=None),
        "accelerate_ms_per_token_by_task": {} if peer is None else _by_task(peer, asks),
        "limit_bytes": ground.limit_bytes,
        "why_no_limit": ground.why_no_limit,
    }


def _by_task(row: Row, asks: Sequence[Ask]) -> dict[str, float]:
    """Milliseconds a token of each task's prompts."""
    found: dict[str, list[float]] = {}
    for turn in row.turns.values():
        for place, seconds in turn.inside.items():
            ask = asks[int(place)]
            found.setdefault(ask.task, []).append(1e3 * seconds / len(ask.answer_ids))
    return {task: statistics.fmean(own) for task, own in found.items()}
