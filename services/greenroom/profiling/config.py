"""What a profile is to hold, and how thoroughly it is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.profiling.measures.similarity import SIMILARITIES

STAGES: Final = ("lengths", "sensitivity", "worth", "reuse", "costs", "keywords", "observations")
"""In the order in which they run. ``lengths`` also measures which experts tasks are routed to."""

LEAST_SEEDS: Final = 3


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """``prompts_per_task``: prompts run of each task. ``seeds``: repetitions of what is random, all drawn from
    ``seed``. ``threshold``: the least similarity at which a layer counts as insensitive. ``share``: of the experts,
    kept where their reuse is measured. ``max_tokens``: the most of an answer. ``similarity``: how answers are compared.
    ``worth_prompts``: prompts of a task that are run without an expert. ``rounds`` and ``steps``: how often costs are
    measured, and over how many steps each time.

    Raises InvalidConfig and UnknownName, naming the field.
    """

    stages: tuple[str, ...] = STAGES
    prompts_per_task: int = 40
    seeds: int = LEAST_SEEDS
    seed: int = 0
    threshold: float = 0.85
    share: float = 0.6
    max_tokens: int = 256
    similarity: str = "embedding"
    worth_prompts: int = 12
    rounds: int = 5
    steps: int = 24

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in STAGES:
                raise UnknownName("stages", stage, STAGES)
        if self.similarity not in SIMILARITIES:
            raise UnknownName("similarity", self.similarity, SIMILARITIES)
        for name, least in (
            ("prompts_per_task", 1),
            ("seeds", LEAST_SEEDS),
            ("seed", 0),
            ("max_tokens", 1),
            ("worth_prompts", 1),
            ("rounds", 1),
            ("steps", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidConfig(name, getattr(self, name), f"at least {least}")
        for name in ("threshold", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidConfig(name, getattr(self, name), "above 0 and at most 1")

    def quick(self) -> ProfileConfig:
        """The same with fewer prompts, tokens and rounds, for a first look."""
        return replace(self, prompts_per_task=4, max_tokens=min(self.max_tokens, 64), rounds=2, steps=8)

    @property
    def needs_similarity(self) -> bool:
        return "sensitivity" in self.stages


def stages_of(text: str) -> tuple[str, ...]:
    """``all``, or some of STAGES with commas between. Raises UnknownName."""
    chosen = STAGES if text == "all" else tuple(part.strip() for part in text.split(",") if part.strip())
    for stage in chosen:
        if stage not in STAGES:
            raise UnknownName("stages", stage, ("all", *STAGES))
    return tuple(stage for stage in STAGES if stage in chosen)
