"""What a pool's scheduler expects of requests and workers, from eMoE's profile or from what was seen."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from greenroom.core.model_profile import ModelProfile
from greenroom.core.step_costs import StepCosts
from greenroom.policies.base.answer_lengths import AnswerLengths
from greenroom.policies.placement.placement_policy import Costs

log = logging.getLogger(__name__)


class Estimates:
    """How long answers will be (``AnswerLengths``), and what they will cost.

    ``profile``: its c (eMoE) is preferred to what a worker measures, as its means are to what was seen; what a worker
    says is preferred to its ΔE. A profile of other experts than the pool's workers have is given up when the first
    worker is met.
    """

    def __init__(self, profile: ModelProfile | None = None) -> None:
        self.profile = profile
        self._lengths = AnswerLengths(profile)
        self._token_ms: tuple[float, ...] = ()
        self._steps: StepCosts | None = None
        self._met: tuple[str, int] | None = None
        self._wanted = {} if profile is None else {task: experts_wanted(profile, task) for task in profile.tasks}

    def meet(self, model: str, experts: int) -> None:
        """A worker of the pool serves ``model``, which has so many ``experts`` in all; 0: it does not say."""
        profile = self.profile
        if profile is None or (model, experts) == self._met:
            return
        self._met = model, experts
        least, most = experts_of(profile)
        if experts and not least <= experts <= most:
            log.warning(
                "the profile is not used: it is of %s with %d experts, and a worker here serves %s with %d; give one "
                "that `greenroom profile` made of that",
                *(profile.model, most, model, experts),
            )
            self.profile, self._wanted, self._token_ms = None, {}, ()
            self._lengths.give_up_profile()
        elif model != profile.model:
            log.info(
                "a worker here serves %s; what is expected of it comes from the profile of %s", model, profile.model
            )

    @property
    def changes(self) -> int:
        """Moves on whenever what was said of answers' lengths has become notably wrong."""
        return self._lengths.changes

    def tokens(self, task: str, limit: int) -> int:
        """Tokens that an answer will probably have (eMoE's G when it is scheduled), from 1 to ``limit``. From the
        profile, else from answers of the task type, else from all answers; ``limit`` where nothing is known."""
        mean = self._lengths.mean(task)
        return limit if mean is None else max(1, min(limit, round(mean)))

    def held_tokens(self, task: str, prompt: int, limit: int) -> int:
        """Tokens of an answer for which KV memory is expected to be needed, as a worker reckons it."""
        return self._lengths.held_tokens(task, prompt, limit)

    def finished(self, task: str, tokens: int, *, cut: bool = False) -> None:
        """An answer has ended. ``cut``: at its limit (``AnswerLengths.finished``)."""
        self._lengths.finished(task, tokens, cut=cut)

    def costs(self, heard: Costs, *, missing: float, rows: int) -> Costs:
        """The costs of a worker. ``heard``: what it says itself. ``missing``: the share of the experts that are not
        resident there. ``rows``: requests that may run there at once."""
        measured = None if self.profile is None else self.profile.costs
        if measured is None:
            return heard
        if len(self._token_ms) < rows:
            steps = measured.steps()
            self._token_ms = tuple(steps.token_ms(batch) for batch in range(1, rows + 1))
            self._steps = steps if measured.prompt_step_ms else None
        loads = {task: measured.load_ms(wanted * missing) for task, wanted in self._wanted.items()}
        return replace(
            heard,
            token_ms_by_rows=self._token_ms,
            prefill_token_ms=measured.prefill_token_ms,
            steps=self._steps,
            load_ms_by_task={**loads, **heard.load_ms_by_task},
        )


def experts_of(profile: ModelProfile) -> tuple[int, int]:
    """The least and the greatest number of experts, all layers together, that a model of this profile may have. A
    layer has at least the experts up to the last one that a task picks, and at most as many as the largest layer."""
    picked = np.array([one.popularity for one in profile.tasks.values()]).sum(axis=0) > 0
    least = np.where(picked, np.arange(1, profile.experts + 1), 0).max(axis=1).sum()
    return int(least), profile.layers * profile.experts


def experts_wanted(profile: ModelProfile, task: str) -> float:
    """The expected number of experts that a prompt of the task is routed to, all layers together: the sum of the
    probabilities that at least one token picks the expert."""
    picked = np.minimum(1.0, np.array(profile.tasks[task].popularity) * profile.top_k)
    return float((1.0 - (1.0 - picked) ** max(1.0, profile.tasks[task].input_tokens.mean)).sum())
