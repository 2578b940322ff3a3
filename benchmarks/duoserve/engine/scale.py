"""How much the stage `engine` runs, and how long its parts may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness.inputs.checkpoints import EXPERT_MIB
from benchmarks.harness.inputs.fitted import QUICK_FIT, FitBoth
from greenroom.moe.routing import residual_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """MiB are those of an expert. ``recorded``: prompts that the files are fitted to; none of them is measured.

    Speed: ``prompts`` one at a time, ``many_prompts`` of them ``at_once``; of the random model ``random_prompts`` and
    ``random_many``, for ``random_rounds``. A prompt's time: ``prefills`` of each of ``rows``. Each change by itself:
    ``ablation_prompts`` of ``ablation_rows``, and ``ablation_asks`` one at a time and twice as many ``at_once``, for
    ``ablation_rounds``.

    At most ``rounds`` rounds. A part begins none that would end after its seconds.
    """

    expert_mib: float = EXPERT_MIB
    random_mib: float = 21.0
    recorded: int = 200
    prompts: int = 8
    many_prompts: int = 16
    at_once: int = 8
    rounds: int = 5
    one_seconds: float = 240.0
    many_seconds: float = 230.0
    random_prompts: int = 6
    random_many: int = 16
    random_rounds: int = 5
    random_seconds: float = 85.0
    rows: tuple[int, ...] = (30, 256, 900)
    prefills: int = 3
    prefill_seconds: float = 110.0
    ablation_prompts: int = 2
    ablation_rows: int = 256
    ablation_asks: int = 8
    ablation_rounds: int = 3
    ablation_seconds: float = 150.0
    fit: FitBoth = field(default_factory=FitBoth)
    maps: residual_fit.FitOptions = field(default_factory=residual_fit.FitOptions)

    @property
    def planned(self) -> dict[str, float]:
        """Seconds by part, if no first round takes longer than its part may."""
        return {
            "one at a time": self.one_seconds,
            f"{self.at_once} at once": self.many_seconds,
            "a prompt's time": self.prefill_seconds,
            "each change": self.ablation_seconds,
            "random model": 2 * self.random_seconds,
        }


QUICK = Scale(
    expert_mib=1.0, random_mib=1.0, recorded=40, prompts=4, many_prompts=8, rounds=1, one_seconds=3.0, many_seconds=3.0,
    random_prompts=2, random_many=8, random_rounds=1, random_seconds=2.0, rows=(30, 900), prefills=1,
    prefill_seconds=3.0, ablation_prompts=1, ablation_asks=4, ablation_rounds=1, ablation_seconds=4.0, fit=QUICK_FIT,
    maps=residual_fit.FitOptions(steps=100),
)  # fmt: skip
"""All of it, on small experts: to see that it works."""
