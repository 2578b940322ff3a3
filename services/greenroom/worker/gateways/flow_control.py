"""Flow control of one gateway's call: whether it takes messages in as fast as they are written."""

from __future__ import annotations

from greenroom.worker.service_config import StreamConfig


class FlowControl:
    """The gateway is asked now and then to say when it has taken a message in. While it owes that for too long it is
    *overdue*, and nothing more is sent; later it is *stuck*. A gateway that has never answered does not know that it is
    asked: it is stuck when a message can not be written. Times in milliseconds.
    """

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._writing_since: float | None = None
        self._asked_at: float | None = None
        """When it was asked, None where it has answered."""
        self._ask_at = 0.0
        self._answers = False

    def begin(self) -> None:
        """A call begins."""
        self._asked_at, self._ask_at, self._answers = None, 0.0, False

    def end(self) -> None:
        """The call is over, or is to be."""
        self._writing_since = self._asked_at = None

    def writing(self, now: float) -> bool:
        """A message is being written. Whether it is to ask the gateway."""
        self._writing_since = now
        if self._asked_at is not None or now < self._ask_at:
            return False
        self._asked_at, self._ask_at = now, now + self._config.ask_every_ms
        return True

    def written(self) -> None:
        self._writing_since = None

    def taken(self) -> None:
        """The gateway says that it has taken in the message that asked."""
        self._asked_at, self._answers = None, True

    def overdue(self, now: float) -> bool:
        if self._asked_at is None or not self._answers:
            return False
        return now - self._asked_at > self._config.overdue_ms

    def stuck(self, now: float) -> bool:
        since = self._writing_since if self._asked_at is None or not self._answers else self._asked_at
        return since is not None and now - since > self._config.slow_gateway_ms
