"""How much the stage ``engine`` runs, and how long its parts may take."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.inputs.checkpoints import EXPERT_MIB
from benchmarks.moe_infinity.engine.arms.compared_policies import LITERAL, PAPER, REUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``expert_mib``: of the widened model. ``recorded``: prompts that the policies learn from.

    At a third of the experts: ``bounded_prompts`` with at most ``bounded_tokens`` each, for ``bounded_kinds`` and
    accelerate, which takes about a second a token; for all policies ``prompts`` one after the other, and
    ``many_prompts`` ``at_once``. Batches of ``sizes`` with ``batch_tokens`` each. Rates: ``requests`` at each of
    ``loads``, multiples of what on-demand LRU carries; accelerate gets ``peer_requests`` at ``peer_loads``. ``shares``:
    budgets, with ``share_prompts``. ``records``: experts to read in every way.

    At most ``rounds`` rounds. A part begins none that would end after its seconds, so these should be a few times its
    first round. ``peer_seconds``: of accelerate's batches and rates. ``opening_seconds``: of checkpoints, records and
    processes. Both are estimates.
    """

    expert_mib: float = EXPERT_MIB
    recorded: int = 200
    rounds: int = 5
    bounded_prompts: int = 3
    bounded_tokens: int | None = None
    bounded_kinds: tuple[str, ...] = (PAPER, LITERAL, REUSE)
    bounded_seconds: float = 190.0
    prompts: int = 10
    many_prompts: int = 16
    at_once: int = 8
    third_seconds: float = 400.0
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch_tokens: int = 6
    peer_rounds: int = 1
    batches_seconds: float = 150.0
    requests: int = 16
    loads: tuple[float, ...] = (0.1, 0.5, 1.6)
    peer_loads: tuple[float, ...] = (0.1, 1.6)
    peer_requests: int = 4
    rates_seconds: float = 260.0
    peer_seconds: float = 120.0
    shares: tuple[float, ...] = (0.2, 0.5, 0.75)
    share_prompts: int = 5
    budgets_seconds: float = 180.0
    records: int = 24
    record_mib: tuple[float, ...] = (1.0,)
    records_seconds: float = 10.0
    opening_seconds: float = 150.0

    @property
    def planned(self) -> dict[str, float]:
        """Seconds by part, if no first round takes longer than its part may."""
        return {
            "opening": self.opening_seconds,
            "beside accelerate": self.bounded_seconds,
            "a third": self.third_seconds,
            "batches": self.batches_seconds,
            "rates": self.rates_seconds,
            "accelerate by batch and rate": self.peer_seconds,
            "budgets": self.budgets_seconds,
            "records": self.records_seconds * (1 + len(self.record_mib)),
        }


QUICK = Scale(
    expert_mib=1.0, recorded=24, rounds=1, bounded_prompts=1, bounded_tokens=3, bounded_kinds=(PAPER,),
    bounded_seconds=3.0, prompts=5, many_prompts=8, third_seconds=12.0, sizes=(1, 8), batch_tokens=3,
    batches_seconds=4.0, requests=8, loads=(0.2, 1.0), peer_loads=(), rates_seconds=6.0, shares=(0.5,),
    share_prompts=2, budgets_seconds=5.0, records=8, record_mib=(), records_seconds=1.0, peer_seconds=6.0,
    opening_seconds=32.0,
)  # fmt: skip
"""All of it, on small experts: to see that it works."""
