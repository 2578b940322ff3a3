"""Arms of the memory figures (eMoE, Figs 14-16): expert engines on one model that take turns on the same prompts, block
by block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.emoe.memory.forecasters import EVERY, Forecaster, Predictor
from benchmarks.harness.inputs.shared_model import KV_BYTES, Ask, SharedModel, run_at_once
from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.events import UNKNOWN_TASK
from greenroom.policies.base.fidelity import Fidelity
from greenroom.policies.registry import create_policy
from greenroom.profiling.model.teacher_forcing import Forced, Given, force
from greenroom.worker.model.warm_start import first_residents
from greenroom.worker.traces.routing import RoutingRecorder

RESIDENT, EXACT, PAPER, SENSITIVE = "resident", "exact", "paper", "sensitive"
RANDOM_DRAWS = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """An arm before it is opened. ``predictor``: the name of a trained one, or "". ``every``: prompts between two
    forecasts.

    ``seed``: of what is drawn at random. ``waits``: layers wait for their own part of a target. ``sensitivity``: Eq.
    2's s, as the policy's option. ``aware``: of tasks; else all prompts are of one type.
    """

    name: str
    policy: str
    fidelity: str
    predictor: str = ""
    every: int = EVERY
    seed: int | None = None
    waits: bool = True
    sensitivity: str = "graded"
    aware: bool = True

    @property
    def key(self) -> str:
        return f"{self.name}, {self.fidelity}" + ("" if self.seed is None else f" {self.seed}")


KINDS = (
    Kind("emoe-a", "emoe", PAPER, "emoe-a"),
    Kind("emoe-l", "emoe", PAPER, "emoe-l"),
    Kind("emoe-e", "emoe", PAPER, "emoe-a", every=1),
    Kind("no predictor", "emoe", PAPER),
    Kind("emoe-a agnostic", "emoe", PAPER, "emoe-a", aware=False),
    Kind("emoe-a binary", "emoe", PAPER, "emoe-a", sensitivity="binary"),
    Kind("emoe-a no wait", "emoe", PAPER, "emoe-a", waits=False),
    *(Kind("random", "static", PAPER, seed=draw) for draw in range(RANDOM_DRAWS)),
    Kind("static", "static", PAPER, sensitivity="binary"),
    Kind("static graded", "static", PAPER),
    Kind("emoe-a", "emoe", SENSITIVE, "emoe-a"),
    Kind("emoe-a", "emoe", EXACT, "emoe-a"),
    Kind("on-demand", "lru", EXACT),
    Kind("look-ahead", "look-ahead", EXACT),
)
VARIANTS = ("emoe-a agnostic", "emoe-a binary", "emoe-a no wait")
"""eMoE-A without one of its parts each: labels (Fig. 13), graded sensitivity, waiting."""
WHOLE = Kind(RESIDENT, "lru", EXACT)


@dataclass(slots=True)
class Answered:
    """A prompt's answer, and how long it took from when the engine had it."""

    token_ids: tuple[int, ...]
    seconds: float
    approximated: float


@dataclass
class Arm:
    """One engine and what it answered. ``blocks``: seconds of each block of prompts.

    ``moved`` (bytes), ``on_demand`` (fetches), ``predictor_seconds`` and ``forecasts`` are of the blocks after the
    first, without teacher forcing.
    """

    kind: Kind
    shared: SharedModel
    share: float
    at_once: int
    predictor: Predictor | None = None
    answers: list[Answered] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    moved: float = 0
    on_demand: float = 0
    predictor_seconds: float = 0.0
    forecasts: float = 0

    def __post_init__(self) -> None:
        shared, kind = self.shared, self.kind
        least = int(shared.catalogue.top_k.max()) * shared.catalogue.layers
        self.slots = max(round(self.share * shared.catalogue.size), least)
        policy = create_policy(kind.policy, catalogue=shared.catalogue, options=self._options())
        config = EngineConfig(self.slots, fidelity=Fidelity(kind.fidelity, shared.profile, waits=kind.waits))
        self.experts = ExpertEngine(shared.pack, shared.catalogue, policy, config, hardware=shared.hardware)
        batch = BatchConfig(KV_BYTES, max_running=self.at_once)
        self.batch = BatchEngine(
            shared.model, batch, eos_token_ids=shared.loaded.eos_token_ids, observer=self.experts
        )  # fmt: skip
        self._warm: tuple[float, ...] = (0, 0, 0.0, 0)
        self._recorder: RoutingRecorder | None = None
        self.forecaster: Forecaster | None = None
        if self.predictor is not None:
            assert shared.profile is not None, "forecasts are of task types, which the profile knows"
            self.experts.listener = self._recorder = RoutingRecorder(shared.catalogue, most_rows=1024)
            self.forecaster = Forecaster(
                self.predictor, kind.every, shared.profile, shared.catalogue.layers, self.experts.predicted
            )
        self.experts.preload(first_residents(shared.catalogue, [], policy.target))

    def _options(self) -> dict[str, Any]:
        kind = self.kind
        if kind.policy == "emoe":
            return {"profile": self.shared.profile, "fidelity": kind.fidelity, "sensitivity": kind.sensitivity}
        if kind.policy == "static" and kind.seed is not None:
            return {"fidelity": kind.fidelity, "share": self.share, "seed": kind.seed}
        if kind.policy == "static":
            return {"fidelity": kind.fidelity, "profile": self.shared.profile, "sensitivity": kind.sensitivity}
        return {}

    def run(self, asks: Sequence[Ask], max_tokens: int) -> None:
        """A block of greedy answers, ``at_once`` prompts at a time; the next joins when one has ended."""
        self.shared.attach(self.experts)
        self._told()
        found: dict[int, Answered] = {}
        self.blocks.append(
            run_at_once(
                self.batch, len(asks), self.at_once, lambda place: self._begin(place, asks[place], max_tokens, found)
            )
        )
        spent = self._spent()
        if len(self.blocks) == 1:
            self._warm = spent
        self.moved, self.on_demand, self.predictor_seconds, self.forecasts = np.subtract(spent, self._warm).tolist()
        self.answers += [found[place] for place in range(len(asks))]

    def _begin(self, place: int, ask: Ask, max_tokens: int, found: dict[int, Answered]) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        task = self._label(ask.task)
        request = GenerationRequest(f"{len(self.answers)}-{place}", ask.prompt_ids, sampling, task)
        tokens: list[int] = []
        began = time.perf_counter()
        number = -1

        def take(event: Event) -> None:
            if isinstance(event, Token):
                tokens.append(event.token_id)
                return
            if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise RuntimeError(f"a prompt of {ask.task} has no answer: {event.error or event.reason}")
            found[place] = Answered(tuple(tokens), time.perf_counter() - began, event.approximated)
            self._finished(number, task)

        sequence = self.batch.new_sequence(request, take)
        number = sequence.number
        self._tasks[number] = task
        if self.forecaster is not None:
            self.forecaster.prompt_begun(list(self._tasks.values()))
        self.batch.add(sequence)

    def _finished(self, number: int, task: str) -> None:
        self._tasks.pop(number, None)
        if self.forecaster is not None and self._recorder is not None:
            self.forecaster.finished(task, self._recorder.take(number))

    def _told(self) -> None:
        self._tasks: dict[int, str] = {}

    def forced(self, given: Sequence[Given]) -> list[Forced]:
        """How far it agrees with the given answers."""
        self.shared.attach(self.experts)
        self._told()
        numbers: dict[int, int] = {}

        def begun(place: int, number: int) -> None:
            numbers[place] = number
            self._tasks[number] = self._label(given[place].task)
            while len(self._tasks) > self.at_once:
                first = next(iter(self._tasks))
                self._finished(first, self._tasks[first])
            if self.forecaster is not None:
                self.forecaster.prompt_begun(list(self._tasks.values()))

        told = [replace(one, task=self._label(one.task)) for one in given]
        return force(self.batch, told, observer=self.experts, begun=begun)

    def _label(self, task: str) -> str:
        return task if self.kind.aware else UNKNOWN_TASK

    def bytes_moved(self) -> int:
        return int(sum(self.experts.refresh_counters().bytes_by_link.values()))

    def _spent(self) -> tuple[float, ...]:
        asked = (0.0, 0) if self.forecaster is None else (self.forecaster.seconds, self.forecaster.asked)
        return (self.bytes_moved(), self.experts.counters.on_demand_fetches, *asked)

    def close(self) -> None:
        self.experts.close()


def agreements(forced: Sequence[Forced]) -> list[tuple[int, int]]:
    """For each prompt the number of answer tokens that it would have picked itself, and the number of all."""
    return [(int(one.agreed.sum()), len(one.agreed)) for one in forced]
