"""What foretelling and grouping cost: of a served model's time, and of a decision for many rows (section 5.5).

python -m benchmarks.expertflow --stage cost
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.expertflow.served import ModelScale, ServedModel
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.reporting.plots import panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.policies.batching.batch_policy import BatchDecision, BatchState
from greenroom.policies.expertflow.token_scheduler import TokenScheduler

SHARE: Final = 0.33
COMMAND_S: Final = 400
OURS: Final = Kind("expertflow", "expertflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``decisions``: of each kind. ``prompts``: served ``at_once`` and one at a time, in ``rounds``, none begun that
    would end after ``seconds``."""

    decisions: int = 300
    prompts: int = 16
    at_once: int = 8
    rounds: int = 3
    seconds: float = 60.0
    model: ModelScale = field(default_factory=ModelScale)


QUICK = Scale(
    decisions=20, prompts=4, at_once=4, rounds=1, seconds=3.0,
    model=ModelScale(expert_mib=1.0, recorded=60, fit=QUICK_FIT),
)  # fmt: skip


class Timed(TokenScheduler):
    """Two groups in any case, since it then has most to decide. ``decided_s``: what deciding has taken."""

    def __init__(self) -> None:
        super().__init__(force=True)
        self.decided_s = 0.0

    def decide(self, state: BatchState) -> BatchDecision:
        began = time.perf_counter()
        try:
            return super().decide(state)
        finally:
            self.decided_s += time.perf_counter() - began


def run(scale: Scale) -> dict[str, Any]:
    """``decision``: as `python -m benchmarks.grouping_cost` has it. ``shares``: of a served model's time, in series
    with its steps. ``overhead_share`` is the largest: nothing of it runs beside a step yet, so no share is less for
    being overlapped."""
    decision = _decisions(scale.decisions)
    shares = _shares(scale)
    return {
        "decision": decision,
        "shares": shares,
        "scheduler_ms_at_64": decision["scheduler_ms_at_64"],
        "overhead_share": max(own["both"]["median"] for own in shares.values()),
    }


def _decisions(rounds: int) -> dict[str, Any]:
    """In a process of its own, so that numpy has one thread."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "cost.json"
        command = [sys.executable, "-m", "benchmarks.grouping_cost", "--rounds", str(rounds), "--json", str(out)]
        subprocess.run(command, check=True, timeout=COMMAND_S, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _shares(scale: Scale) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ServedModel(scale.model) as served, ExitStack() as stack:
        asks, batching = served.asks(scale.prompts), Timed()
        arm = stack.enter_context(served.arm(OURS, SHARE, batching))
        for at_once in (1, scale.at_once):
            turns = []
            with progress(scale.rounds + 1, f"{at_once} at once", "turn") as bar:
                for round_, _ in in_turns((arm,), scale.rounds, scale.seconds):
                    paths, decided = arm.paths_seconds, batching.decided_s
                    turn = arm.run(asks, at_once)
                    paths, decided = arm.paths_seconds - paths, batching.decided_s - decided
                    if round_:
                        turns.append((paths / turn.seconds, decided / turn.seconds, 1e3 * turn.seconds / turn.steps))
                    bar.update()
            found[f"{at_once} at once"] = {
                "paths": spread_json(Spread.of([own[0] for own in turns])),
                "grouping": spread_json(Spread.of([own[1] for own in turns])),
                "both": spread_json(Spread.of([own[0] + own[1] for own in turns])),
                "step_ms": spread_json(Spread.of([own[2] for own in turns])),
            }
        served.shared.detach()
    return found


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{'a decision':<48}{'ms p50':>10}{'ms p99':>10}"]
    for row in found["decision"]["decisions"]:
        lines.append(f"{_name(row):<48}{row['ms_p50']:>10.2f}{row['ms_p99']:>10.2f}")
    for name, own in found["shares"].items():
        percents = {
            part: {key: 100 * value for key, value in own[part].items()} for part in ("paths", "grouping", "both")
        }
        paths, grouping = median_range(percents["paths"]), median_range(percents["grouping"])
        lines.append(
            f"widened model at a third, {name}: of its time, in series, {paths} % foretelling paths, {grouping} % "
            f"grouping; a step takes {median_range(own['step_ms'], 1)} ms"
        )
    return "\n".join(lines)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['rows']} rows, {row['forwards']} forwards, {row['groups']}, paths {row['paths']}"


def draw(found: Mapping[str, Any], path: Path) -> None:
    rows = found["decision"]["decisions"]
    figure, (panel,) = panels_of(1, 1, height=4.2)
    panel.barh(range(len(rows)), [row["ms_p99"] for row in rows], color="#0072b2")
    panel.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("ms of a decision, p99, one thread")
    tidy(panel)
    save(figure, path)
