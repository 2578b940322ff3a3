"""A run: one model after the other, stage after stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.engine import plan
from benchmarks.engine.figures import PEER, SHARES, best_policy
from benchmarks.harness.children.child_rounds import Stage, run_stage
from benchmarks.harness.children.processes import ArmFailed, Children
from benchmarks.harness.inputs.prepared_models import BUNDLED, LARGE, RANDOM, WIDENED, prepare
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.rows import GREENROOM, THIRD, Row, fastest, find

DEFAULT_POLICY = "look-ahead"
"""Where none has been found to be the fastest."""

WEIGHTS = {WIDENED: 0.6, RANDOM: 0.3, BUNDLED: 0.1, LARGE: 0.6}
"""Shares of the time."""

POLICIES_WEIGHT, BOUNDED_WEIGHT = 0.45, 0.3
"""Shares of a model's time, where it has such stages."""

MEMORY_SHARE = 0.75
"""Of the memory available, for processes that are open at once; the page cache is to keep some."""


class Bench:
    """``scratch``: a folder of this run. An arm that fails leaves its error in its row; nothing is raised."""

    def __init__(
        self, scale: plan.Scale, policies: tuple[str, ...], scratch: Path, children: Children, *, in_groups: bool
    ) -> None:
        self.rows: list[Row] = []
        self._scale = scale
        self._policies = policies
        self._in_groups = in_groups
        self._scratch = scratch
        self._children = children
        self._policy = DEFAULT_POLICY
        self._bar: tqdm[Any] = progress(None, "preparing", "turn")

    def run(self, models: list[str]) -> list[Row]:
        """The rows of these models, in this order."""
        weights = sum(WEIGHTS[name] for name in models)
        with self._bar:
            for name in models:
                self._model(name, 60 * self._scale.minutes * WEIGHTS[name] / weights)
        return self.rows

    def _model(self, name: str, seconds: float) -> None:
        on_gpu = self._scale.on_gpu
        bounded_too = name in self._scale.bounded
        offload = self._scratch / f"offload-{name}" if bounded_too and not on_gpu else None
        self._bar.set_description(f"{name}: preparing")
        try:
            model = prepare(self._children, name, self._scale, offload)
        except ArmFailed as error:
            self.rows.append(Row("prepare", name, GREENROOM, error=str(error)))
            return
        policies = seconds * POLICIES_WEIGHT if name in (WIDENED, LARGE) else 0.0
        bounded = seconds * BOUNDED_WEIGHT if bounded_too else 0.0
        if policies:
            memory = int(psutil.virtual_memory().available * MEMORY_SHARE)
            for stage in plan.policies_stages(model, self._policies, self._scale, policies, memory):
                self._run(stage)
            self._policy = best_policy([row for row in self.rows if row.model == name]) or DEFAULT_POLICY
        self._run(plan.shares_stage(model, self._policy, self._scale, seconds - policies - bounded))
        if bounded_too:
            limits = self._limits(name, offload)
            self._run(plan.bounded_stage(model, self._policy, limits, self._scale, bounded))
            if offload is not None:
                shutil.rmtree(offload, ignore_errors=True)

    def _run(self, stage: Stage) -> None:
        """Children that the stage shares with the one before stay open."""
        self._children.close_all_but(plan.specs(stage))
        self._bar.total = (self._bar.total or 0) + stage.turns
        self._bar.refresh()

        def tell(turns: int, what: str) -> None:
            self._bar.set_description(what)
            self._bar.update(turns)

        self.rows += run_stage(stage, self._children, tell=tell)

    def _limits(self, name: str, offload: Path | None) -> plan.Limits:
        """What greenroom announced at a third and at an eighth. Without those rows nothing is bounded."""
        announced = {}
        for share in (THIRD, plan.EIGHTH):
            row = find(self.rows, stage=SHARES, model=name, system=GREENROOM, share=share)
            announced[share] = None if row is None else row.facts
        peer = fastest(row for row in self.rows if row.model == name and row.system == PEER and row.concurrency == 1)
        third, eighth = announced[THIRD], announced[plan.EIGHTH]
        weights = 1 << 29
        if third and self._scale.on_gpu:  # what greenroom counts beside them there is not accelerate's
            weights = int(third["dense_bytes"] + third["experts_bytes"])
        elif third:
            weights = int(third["announced_bytes"] - third["base_bytes"])
        return plan.Limits(
            third=int(third["announced_bytes"]) if third and self._in_groups else None,
            eighth=int(eighth["announced_bytes"]) if eighth and self._in_groups else None,
            device_map_bytes=weights,
            offload_folder=offload,
            scratch=self._scratch,
            implementation="grouped_mm" if peer is None else peer.policy,
        )
