"""The stages of a profile, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import MeasuredCosts, ModelProfile, PickWorth, Reuse, Sensitivity, TaskProfile
from greenroom.profiling.config import ProfileConfig
from greenroom.profiling.measures.costs import measure_costs, turns_of
from greenroom.profiling.measures.lengths import counts_of, lengths_of, rounded, shares_of
from greenroom.profiling.measures.pick_worth import measure_pick_worth
from greenroom.profiling.measures.pick_worth import turns_of as worth_turns_of
from greenroom.profiling.measures.reuse import measure_reuse, runs_of
from greenroom.profiling.measures.sensitivity import disturb
from greenroom.profiling.measures.similarity import similarity_of
from greenroom.profiling.merging import merged
from greenroom.profiling.model.profiled_model import Answer, Asked, Subject
from greenroom.profiling.prompts import TaskPrompts
from greenroom.replay.traces.recorder import TraceRecorder
from greenroom.replay.traces.routing_trace import RoutingTrace


class Bar(Protocol):
    """A progress bar over all stages."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def set_description(self, desc: str) -> None: ...

    def update(self, n: float = 1) -> object: ...


MakeBar = Callable[[int], Bar]
"""Of so many turns: an answer, an answer that is given, or a turn of a cost."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What was measured, and the routing that it comes from: sequence ``i`` of ``trace`` is ``asked[i]``."""

    profile: ModelProfile
    trace: RoutingTrace
    asked: tuple[Asked, ...]
    answers: tuple[str, ...]


@dataclass(slots=True)
class _Undisturbed:
    """The undisturbed answers, and their routing."""

    asked: list[Asked]
    answers: list[Answer]
    trace: RoutingTrace
    counts: list[NDArray[np.int64]] = field(default_factory=list)

    def of(self, task: str) -> list[int]:
        return [one.place for one in self.asked if one.task == task]


def profile_model(
    subject: Subject,
    prompts: TaskPrompts,
    config: ProfileConfig,
    make_bar: MakeBar,
    notes: Mapping[str, str],
    *,
    earlier: ModelProfile | None = None,
) -> Profiled:
    """Run the chosen stages that need the model, and the stages that these need. Other results are taken from an
    ``earlier`` profile of the same model. Raises InvalidRequest, ProfileFailed.
    """
    asked, left_out = subject.tokenised(prompts.run, config.max_tokens)
    said = dict(notes)
    if left_out:
        said["left out"] = f"{left_out} of {len(prompts.run)} prompts are too long for the model"
    refusal = subject.masking_refusal
    confined = [stage for stage in ("sensitivity", "worth", "reuse") if stage in config.stages]
    stages = [stage for stage in config.stages if refusal is None or stage not in confined]
    if refusal is not None:
        said |= dict.fromkeys(confined, f"not measured: the rows of this model can not be confined: {refusal}")
    with make_bar(_turns(subject, stages, config, asked)) as bar:

        def done() -> None:
            bar.update()

        bar.set_description("lengths")
        undisturbed = _run_undisturbed(subject, asked, config, done)
        tasks = sorted({one.task for one in asked})
        popularity = {
            task: shares_of(
                sum((undisturbed.counts[place] for place in undisturbed.of(task)), start=undisturbed.counts[0] * 0),
                subject.catalogue.experts_per_layer,
            )
            for task in tasks
        }
        sensitivity: dict[str, Sensitivity] = {}
        worth: dict[str, PickWorth] = {}
        if "sensitivity" in stages:
            bar.set_description("sensitivity")
            sensitivity = _sensitivity(subject, undisturbed, tasks, config, done, said)
        if "worth" in stages:
            bar.set_description("worth")
            worth = measure_pick_worth(
                subject,
                asked,
                [answer.token_ids for answer in undisturbed.answers],
                undisturbed.counts,
                prompts=config.worth_prompts,
                seed=config.seed,
                done=done,
            )
        reuse: Reuse | None = None
        if "reuse" in stages:
            bar.set_description("reuse")
            reuse = measure_reuse(
                subject,
                asked,
                [one.answer_ids or answer.token_ids for one, answer in zip(asked, undisturbed.answers, strict=True)],
                undisturbed.counts,
                popularity,
                share=config.share,
                seeds=config.seeds,
                seed=config.seed,
                done=done,
            )
        costs: MeasuredCosts | None = None
        if "costs" in stages:
            bar.set_description("costs")
            costs = measure_costs(subject, asked, rounds=config.rounds, steps=config.steps, seed=config.seed, done=done)
            if not subject.all_resident:
                share = subject.worker.experts.device.slots / subject.catalogue.size
                said["costs"] = f"with {share:.0%} of the experts in memory: a token's cost has waits in it"
    catalogue = subject.catalogue
    profile = ModelProfile(
        format="greenroom-model-profile",
        version=1,
        model=subject.worker.served.name,
        layers=catalogue.layers,
        experts=int(catalogue.experts_per_layer.max()),
        top_k=int(catalogue.top_k.max()),
        tasks={
            task: TaskProfile(
                prompts=len(undisturbed.of(task)),
                input_tokens=lengths_of([len(asked[place].prompt_ids) for place in undisturbed.of(task)]),
                generated_tokens=lengths_of([len(undisturbed.answers[p].token_ids) for p in undisturbed.of(task)]),
                popularity=rounded(popularity[task]),
                sensitivity=sensitivity.get(task),
                pick_worth=worth.get(task),
            )
            for task in tasks
        },
        costs=costs,
        reuse=reuse,
        notes=said,
    )
    texts = tuple(subject.text_of(answer.token_ids) for answer in undisturbed.answers)
    if earlier is not None:
        profile = merged(profile, earlier, config.stages)
    return Profiled(profile, undisturbed.trace, tuple(asked), texts)


def notes_of(
    subject: Subject, prompts: TaskPrompts, config: ProfileConfig, made_by: Mapping[str, str]
) -> dict[str, str]:
    """How the profile was made, as text. Equal settings give equal notes."""
    return {
        **made_by,
        "weights": subject.worker.pack.manifest.dtype,
        "prompts": f"{prompts.source}; {config.prompts_per_task} of each type at most",
        "seeds": f"{config.seeds} from {config.seed}",
    }


def _run_undisturbed(
    subject: Subject, asked: list[Asked], config: ProfileConfig, done: Callable[[], object]
) -> _Undisturbed:
    experts = subject.worker.experts
    recorder = experts.listener = TraceRecorder(subject.catalogue)
    try:
        answers = subject.answers(asked, [config.max_tokens] * len(asked), answered=done)
    finally:
        experts.listener = None
    trace = replace(recorder.trace(model=subject.worker.served.name), arrival=None)  # the order is that of arrival
    found = _Undisturbed(asked, answers, trace)
    found.counts = [counts_of(trace, [place]) for place in range(len(asked))]
    return found


def _sensitivity(
    subject: Subject,
    undisturbed: _Undisturbed,
    tasks: Sequence[str],
    config: ProfileConfig,
    done: Callable[[], object],
    notes: dict[str, str],
) -> dict[str, Sensitivity]:
    similarity = similarity_of(config.similarity)
    notes["similarity"] = similarity.said
    disturbed = disturb(
        subject,
        undisturbed.asked,
        undisturbed.answers,
        seeds=config.seeds,
        seed=config.seed,
        most_tokens=config.max_tokens,
        similarity=similarity,
        answered=done,
    )
    labels = np.array([one.task for one in undisturbed.asked])
    return {task: disturbed.of(labels == task, config.threshold) for task in tasks}


def _turns(subject: Subject, stages: Sequence[str], config: ProfileConfig, asked: Sequence[Asked]) -> int:
    turns = prompts = len(asked)
    if "sensitivity" in stages:
        turns += prompts * config.seeds * subject.catalogue.layers
    if "worth" in stages:
        of_tasks = Counter(one.task for one in asked)
        turns += worth_turns_of(subject.catalogue, list(of_tasks.values()), config.worth_prompts)
    if "reuse" in stages:
        turns += prompts * runs_of(config.seeds)
    if "costs" in stages:
        turns += turns_of(subject, config.rounds)
    return turns
