"""Calls of schedulers that wait for their runs' ends."""

from __future__ import annotations

import asyncio

from greenroom.core.attempts import Attempt
from greenroom.v1 import worker_pb2

Answer = asyncio.Future[worker_pb2.RunResponse]


class WaitingCalls:
    """By request and attempt: several calls may wait for one run."""

    def __init__(self) -> None:
        self.all_answered = asyncio.Event()
        """Set while no call waits."""
        self.all_answered.set()
        self._answers: dict[tuple[str, Attempt], set[Answer]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def begin(self, request_id: str, attempt: Attempt) -> Answer:
        """A call waits. Returns what it waits for."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers.setdefault((request_id, attempt), set()).add(answer)
        self.all_answered.clear()
        return answer

    def end(self, request_id: str, attempt: Attempt, answer: Answer) -> bool:
        """The call does not wait any more. Whether it was the last of its run."""
        answers = self._answers[request_id, attempt]
        answers.discard(answer)
        if not answers:
            del self._answers[request_id, attempt]
        if not self._answers:
            self.all_answered.set()
        return not answers

    def answer(self, request_id: str, attempt: Attempt, response: worker_pb2.RunResponse) -> None:
        for answer in self._answers.get((request_id, attempt), ()):
            if not answer.done():
                answer.set_result(response)
