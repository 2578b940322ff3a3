"""What is told between steps: all that a step gave at once, predictions before the next, an end that is not lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from greenroom.core.generation import Event, Finished, FinishReason, Token
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop
from tests.contract.batching.harness import request
from tests.unit.batching.fake_model import FakeModel, continuation


class Steps:
    """Events as they come, cut where the loop pauses."""

    def __init__(self, loop: BatchLoop) -> None:
        self.parts: list[list[tuple[str, Event]]] = []
        self.thread: int | None = None
        self.ended: dict[str, threading.Event] = {}
        self._open: list[tuple[str, Event]] = []
        self._loop = loop
        loop.between_steps = self._pause

    def ask(self, name: str, length: int) -> None:
        self.ended[name] = threading.Event()

        def take(event: Event) -> None:
            self._open.append((name, event))

        self._loop.submit(request(name, (5, len(self.ended)), length), take)

    def _pause(self) -> None:
        self.thread = threading.get_ident()
        if self._open:
            self.parts.append(self._open)
            for name, event in self._open:
                if isinstance(event, Finished):
                    self.ended[name].set()
            self._open = []


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def loop(model: FakeModel) -> Iterator[BatchLoop]:
    loop = BatchLoop(BatchEngine(model.as_ragged(), BatchConfig(1 << 20))).start()
    yield loop
    model.gate.set()
    loop.stop()


def test_all_that_a_step_gave_is_together(loop: BatchLoop, model: FakeModel) -> None:
    steps = Steps(loop)
    model.gate.clear()
    steps.ask("first", 1)
    assert model.entered.wait(30)
    for place in range(3):  # they join together, with the step after the one that is held up
        steps.ask(f"r{place}", 4)
    model.gate.set()
    for ended in steps.ended.values():
        assert ended.wait(30)
    assert len(steps.parts) == len(model.forwards) == 5
    for place, part in enumerate(steps.parts[1:]):
        tokens = [(name, event) for name, event in part if isinstance(event, Token)]
        assert [(name, token.index) for name, token in tokens] == [(f"r{other}", place) for other in range(3)]
    said = [event.token_id for part in steps.parts for name, event in part if name == "r1" and isinstance(event, Token)]
    assert said == [*continuation((5, 3), 4)]
    assert steps.thread not in (None, threading.get_ident())


def test_it_comes_before_a_step_too(loop: BatchLoop, model: FakeModel) -> None:
    """So what was handed over while the loop slept is there for the next step."""
    seen: list[int] = []
    loop.between_steps = lambda: seen.append(len(model.forwards))
    ended = threading.Event()
    loop.submit(request("a", (5, 6), 2), lambda event: ended.set() if isinstance(event, Finished) else None)
    assert ended.wait(30)
    assert loop.wait_idle(30)
    assert seen[:4] == [0, 1, 1, 2]


def test_what_is_cancelled_at_the_end_is_told(loop: BatchLoop, model: FakeModel) -> None:
    steps = Steps(loop)
    model.gate.clear()
    steps.ask("a", 900)
    assert model.entered.wait(30)
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    while loop.ready:
        stopping.join(0.01)
    model.gate.set()
    stopping.join(30)
    (*_, last) = steps.parts[-1]
    assert isinstance(last[1], Finished)
    assert last[1].reason is FinishReason.CANCELLED


def test_what_it_raises_ends_the_loop_and_every_request(loop: BatchLoop) -> None:
    def broken() -> None:
        raise KeyError("a defect")

    loop.between_steps = broken
    ended = threading.Event()
    loop.submit(request("a", (5, 6), 2), lambda event: ended.set() if isinstance(event, Finished) else None)
    assert ended.wait(30)
    with pytest.raises(KeyError):
        loop.stop()
    assert isinstance(loop.failure, KeyError)
    loop.failure = None  # seen
