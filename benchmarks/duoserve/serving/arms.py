"""What is compared: batch policies, each with the rows of a step that it is run with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.duoserve.serving.machines import EXPERT_BYTES, HEAD, HEADS, HIDDEN, VOCABULARY
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.memory_needs import workspace_bytes
from greenroom.worker.model.memory_plan import MemoryPlan, plan_rows


@dataclass(frozen=True, slots=True)
class Arm:
    """``batching`` and ``rows`` as `--batching` and `--tokens-per-step`. ``chunk``: as `--prefill-chunk`."""

    name: str
    batching: str
    rows: int | str = 512
    chunk: int | None = 256

    @property
    def config(self) -> WorkerConfig:
        return WorkerConfig(
            "gpt-oss-20b", policy="duoserve", batching=self.batching, tokens_per_step=self.rows,
            prefill_chunk=self.chunk,
        )  # fmt: skip

    def policy(self) -> BatchPolicy:
        return self.config.make_batch_policy()


BASE: Final = Arm("fcfs", "fcfs")
"""As it is configured where nothing is said."""
PHASES: Final = Arm("phases", "phases", "auto")
"""As its users are told to run it."""
WHOLE: Final = Arm("fcfs, no chunks", "fcfs", 1024, None)
HELD: Final = Arm("phases, hold 0.1", "phases:hold=0.1", "auto")

ARMS: Final = (
    BASE,
    PHASES,
    HELD,
    Arm("phases, hold 0.25", "phases:hold=0.25", "auto"),
    Arm("phases apart", "phases:apart=true", "auto"),
    Arm("phases, 512 rows", "phases"),
    Arm("phases, 4096 rows", "phases", 4096),
    WHOLE,
)
MAIN: Final = tuple(arm for arm in ARMS if arm.rows != 4096)
"""On this disk and processor."""
WITH_LONG_PROMPTS: Final = (BASE, PHASES, HELD, WHOLE)
"""With Azure's lengths, whose runs take ten times as long as those of a tenth: those that differ there."""
AT_OTHER_LOADS: Final = (BASE, PHASES)
"""At half of saturation all of these are run, at other loads these two; where all experts are resident only these."""


def rows_and_slots(arm: Arm, slots: int, longest: int) -> tuple[int, int]:
    """The rows of the arm's step, and how many experts are resident, of ``slots`` with 512 rows: as the memory plan has
    it, for gpt-oss-20b's widths. Attention's part of the workspace is not counted.

    ``longest``: rows of a request.
    """
    least = _workspace(arm, 512)
    sizes = SlotSizes.uniform(slots, nbytes=EXPERT_BYTES)

    def plan_at(rows: int) -> tuple[MemoryPlan, int]:
        workspace = _workspace(arm, rows)
        left = slots - -(-(workspace - least) // EXPERT_BYTES)
        return MemoryPlan(0, 0, workspace, 0, sizes, left, 0), longest

    config = arm.config
    if config.wants_whole_prompts:
        plan, _, rows = plan_rows(plan_at, config.step_rows, longest, holds=lambda _: longest)
    else:
        (plan, _), rows = plan_at(config.step_rows), config.step_rows
    return rows, plan.device_slots


def _workspace(arm: Arm, rows: int) -> int:
    text: Any = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD)
    experts: Any = SimpleNamespace(top_k=4, tensors=[SimpleNamespace(shape=(2 * HIDDEN, HIDDEN))])
    manifest: Any = SimpleNamespace(layers=[experts])
    model: Any = SimpleNamespace(vocab_size=VOCABULARY)
    return workspace_bytes(text, [experts], manifest, model, replace(arm.config, tokens_per_step=rows))
