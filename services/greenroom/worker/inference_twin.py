"""An InferenceEngine without models: its answers follow from the inputs alone, so a test knows them beforehand."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from greenroom.core.collaboration import CollaborationCard, InputKind, OutputKind
from greenroom.core.errors import InvalidRequest
from greenroom.core.inference import InferenceInput, InferenceRequest
from greenroom.core.inference_outputs import Box, InferenceOutputs
from greenroom.core.messages import ModelCard
from greenroom.worker.generation_engine import EngineState
from greenroom.worker.inference_engine import InferenceResult, model_card

LABELS = ("good", "turned", "missing")
SPOILED = b"spoiled"
"""An input that contains this can not be decoded."""


def twin_card(
    name: str = "board", *, values: tuple[str, ...] = ("R0402", "R0603", "U7"), max_pixels: int = 0
) -> ModelCard:
    """What the twin says that it serves: images with a router by the parameter ``component``."""
    collaboration = CollaborationCard(
        takes=(InputKind.IMAGE,),
        parameter="component",
        values=values,
        gives=tuple(OutputKind),
        max_pixels=max_pixels,
    )
    return model_card(name, "twin", collaboration)


def twin_outputs(inputs: Sequence[InferenceInput], parameter: str | None) -> InferenceOutputs:
    """What the twin answers. The label is drawn from a hash of inputs and parameter; ``turned`` has a second stage."""
    digest = hashlib.blake2b(digest_size=8, key=(parameter or "").encode()[:64])
    for one in inputs:
        digest.update(one.data)
    drawn = digest.digest()
    label = LABELS[drawn[0] % len(LABELS)]
    score = round(0.5 + drawn[1] / 512, 6)
    rest = round((1 - score) / 2, 6)
    first = parameter or "any"
    return InferenceOutputs(
        path=(first, "orientation") if label == "turned" else (first,),
        label=label,
        score=score,
        scores=((label, score), *((other, rest) for other in LABELS if other != label)),
        boxes=(Box(label, score, 1.0, 2.0, 3.0, 4.0),) if label == "turned" else (),
        embedding=struct.pack("<4f", *(byte / 256 for byte in drawn[:4])),
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    inputs: Sequence[InferenceInput]
    parameter: str | None
    priority: int
    order: int
    on_result: Callable[[InferenceResult], None]


class InferenceTwin:
    """Executes one batch after the other: up to ``batch`` requests of one parameter, the first in line first.

    ``batch_s``: how long a batch takes. ``held``: nothing begins until ``release``; a test then has a queue.
    """

    def __init__(
        self, card: ModelCard | None = None, *, batch: int = 8, batch_s: float = 0.0, held: bool = False
    ) -> None:
        self.card = card or twin_card()
        self.alive = True
        self.batches: list[tuple[str, ...]] = []
        """The ids of every batch that was begun, in order."""
        self.cancelled: list[str] = []
        self._batch = batch
        self._batch_s = batch_s
        self._held = held
        self._waiting: dict[str, _Waiting] = {}
        self._executing: dict[str, _Waiting] = {}
        self._orders = 0
        self._changed: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    # -- what a worker's service calls ---------------------------------------------------------------------------

    def listen(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def check(self, request: InferenceRequest) -> None:
        collaboration = self.card.collaboration
        assert collaboration is not None
        if collaboration.values and request.parameter not in collaboration.values:
            raise InvalidRequest(f"no expert is known for {request.parameter!r}", param=collaboration.parameter)
        if {one.kind for one in request.inputs} != set(collaboration.takes):
            raise InvalidRequest(f"a request has one input each of {', '.join(collaboration.takes)}", param="inputs")

    def submit(
        self,
        request_id: str,
        inputs: Sequence[InferenceInput],
        parameter: str | None,
        *,
        deadline_ms: float,
        priority: int,
        on_result: Callable[[InferenceResult], None],
    ) -> None:
        assert request_id not in self._waiting, f"{request_id} was submitted twice"
        self._orders += 1
        self._waiting[request_id] = _Waiting(inputs, parameter, priority, self._orders, on_result)
        self._look()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._waiting.pop(request_id, None)
        if request_id in self._executing:
            self._executing[request_id].on_result = lambda result: None

    def executing(self) -> Collection[str]:
        return tuple(self._executing)

    def state(self) -> EngineState:
        return EngineState(running=len(self._executing), waiting=len(self._waiting))

    # -- what a test calls ---------------------------------------------------------------------------------------

    def release(self, batches: int | None = None) -> None:
        """Begin what waits. ``batches``: so many at once, and hold the rest again."""
        self._held = False
        if batches is None:
            self._look()
            return
        for _ in range(batches):
            self._begin()
            self._finish()
        self._held = True

    def begin_batch(self) -> tuple[str, ...]:
        """Begin one batch and leave it there. ``finish_batch`` ends it."""
        self._begin()
        return tuple(self._executing)

    def finish_batch(self) -> None:
        self._finish()

    def die(self) -> None:
        """What is here never ends."""
        self.alive = False
        self._changed()

    # -- within --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._timer is None and self._waiting and not self._executing and not self._held and self.alive:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(0.0, self._step)

    def _step(self) -> None:
        self._timer = None
        if self._held or not self.alive:
            return
        self._begin()
        self._timer = asyncio.get_running_loop().call_later(self._batch_s, self._step_over)

    def _step_over(self) -> None:
        self._timer = None
        self._finish()
        self._look()

    def _begin(self) -> None:
        in_line = sorted(self._waiting.items(), key=lambda item: (-item[1].priority, item[1].order))
        if not in_line:
            return
        parameter = in_line[0][1].parameter
        chosen = [(key, one) for key, one in in_line if one.parameter == parameter][: self._batch]
        for key, _ in chosen:
            del self._waiting[key]
        self._executing = dict(chosen)
        self.batches.append(tuple(self._executing))
        self._changed()

    def _finish(self) -> None:
        done, self._executing = self._executing, {}
        for one in done.values():
            if any(SPOILED in given.data for given in one.inputs):
                one.on_result(InferenceResult(error="the image can not be decoded", invalid=True))
            else:
                one.on_result(InferenceResult(twin_outputs(one.inputs, one.parameter)))
        if done:
            self._changed()
