"""A model that is profiled: the real engine, stepped by the caller's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from greenroom.core.errors import GreenroomError, InvalidRequest
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.moe.architecture.families import family_of
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.profiling.model.confinement import ConfiningPolicy
from greenroom.profiling.prompts import TaskPrompt
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime


class ProfileFailed(GreenroomError):
    """The model did not answer a prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt in tokens. ``place``: its place among the prompts that arrive. ``answer_ids``: of the only right answer,
    with its end, where the task has one.
    """

    place: int
    task: str
    prompt_ids: tuple[int, ...]
    answer: str | None = None
    answer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer. ``cut``: the token limit ended it."""

    token_ids: tuple[int, ...]
    cut: bool


class Subject:
    """A worker whose loop does not run: the caller's thread steps the batch engine.

    So the requests alone decide which rows run together, and with that every bit of the answers. A context manager that
    closes the worker.
    """

    def __init__(self, config: WorkerConfig) -> None:
        policies: list[ConfiningPolicy] = []

        def policy(catalogue: Catalogue) -> ConfiningPolicy:
            policies.append(ConfiningPolicy(catalogue))
            return policies[-1]

        self.worker = ModelRuntime(config, policy=policy)
        self.worker.loop.stop()
        self.policy = policies[0]
        self.engine: BatchEngine = self.worker.loop.engine
        self.catalogue = self.worker.experts.catalogue

    @property
    def masking_refusal(self) -> str | None:
        """Why rows of this family can not be confined to some experts; None: they can."""
        config = self.worker.checkpoint.config
        return family_of(config).masking(config)

    @property
    def all_resident(self) -> bool:
        return self.worker.experts.device.slots == self.catalogue.size

    def describe(self) -> str:
        """The model and its memory, as text."""
        worker, slots = self.worker, self.worker.experts.device.slots
        return (
            f"model {worker.served.name}: {worker.checkpoint.config.model_type}, {worker.pack.manifest.dtype}, "
            f"{self.catalogue.layers} MoE layers, {slots} of {self.catalogue.size} experts in memory\n"
            f"memory:\n{worker.plan.describe()}"
        )

    # -- text ------------------------------------------------------------------------------------------------------

    def tokenised(self, prompts: Iterable[TaskPrompt], max_tokens: int) -> tuple[list[Asked], int]:
        """The prompts in tokens, and the number of those left out: too long for the model with ``max_tokens`` more.

        Raises InvalidRequest where all are left out.
        """
        text, served = self.worker.text, self.worker.served
        taken: list[Asked] = []
        left_out = 0
        for prompt in prompts:
            if text.has_chat:
                rendered = text.chat.render([{"role": "user", "content": prompt.prompt}])
                ids = text.tokenizer.encode(rendered, add_special_tokens=False)
            else:
                ids = text.tokenizer.encode(prompt.prompt, add_special_tokens=True)
            answer = None
            if prompt.answer is not None:
                own = text.tokenizer.encode(prompt.answer, add_special_tokens=False)
                answer = (*own, *served.eos_token_ids[:1])
            longest = len(ids) + max(max_tokens, 0 if answer is None else len(answer))
            if longest > served.max_model_len:
                left_out += 1
                continue
            taken.append(Asked(len(taken), prompt.task_type, tuple(ids), prompt.answer, answer))
        if not taken:
            raise InvalidRequest(
                f"none of the prompts fits the model's {served.max_model_len} tokens with an answer of {max_tokens}: "
                "give shorter prompts, or fewer --max-tokens"
            )
        return taken, left_out

    def text_of(self, token_ids: Sequence[int]) -> str:
        ends = self.worker.served.eos_token_ids
        return self.worker.text.tokenizer.decode([token for token in token_ids if token not in ends])

    # -- generation ------------------------------------------------------------------------------------------------

    def answers(
        self,
        asked: Sequence[Asked],
        limits: Sequence[int],
        *,
        places: dict[int, int] | None = None,
        answered: Callable[[], object] | None = None,
    ) -> list[Answer]:
        """Greedy answers of at most ``limits`` tokens, as many at once as the engine takes.

        ``places`` gets each sequence's place by its number before it joins. ``answered`` is called after each answer.
        Raises ProfileFailed.
        """
        collectors = [_Collector(answered) for _ in asked]
        waiting = deque(zip(asked, limits, collectors, strict=True))
        while waiting or self.engine.busy:
            while waiting and len(self.engine.waiting) + len(self.engine.running) < self.engine.config.max_running:
                one, limit, collector = waiting.popleft()
                sequence = self.engine.new_sequence(request_of(one, limit), collector.take)
                if places is not None:
                    places[sequence.number] = one.place
                self.engine.add(sequence)
            self.step()
        return [collector.answer(one) for one, collector in zip(asked, collectors, strict=True)]

    def step(self) -> None:
        """One step. Raises ProfileFailed where requests wait and none moves."""
        if not self.engine.step() and self.engine.busy:
            raise ProfileFailed("requests wait and the engine moves nothing: a defect of greenroom")

    # -- around it -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for number in [*self.engine.waiting, *self.engine.running]:
            self.engine.cancel(number)
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def request_of(asked: Asked, limit: int, *, ignore_eos: bool = False, name: str = "profile") -> GenerationRequest:
    """Greedy."""
    sampling = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=ignore_eos)
    return GenerationRequest(f"{name}-{asked.place}", asked.prompt_ids, sampling, asked.task)


class _Collector:
    """Takes one request's events."""

    def __init__(self, answered: Callable[[], object] | None) -> None:
        self._answered = answered
        self._tokens: list[int] = []
        self._finished: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self._tokens.append(event.token_id)
            return
        self._finished = event
        if self._answered is not None:
            self._answered()

    def answer(self, asked: Asked) -> Answer:
        end = self._finished
        if end is None or end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            why = "it has no end" if end is None else end.error or end.reason.value
            raise ProfileFailed(f"the {asked.place + 1}th prompt, of task {asked.task!r}, has no answer: {why}")
        return Answer(tuple(self._tokens), cut=end.reason is FinishReason.LENGTH)
