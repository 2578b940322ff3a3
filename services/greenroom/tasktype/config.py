"""How task-type extraction is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTypeConfig:
    """Times in seconds. Raises InvalidConfig, naming the field.

    ``group``: the instances that share the requests. ``max_in_flight``: records read whose task is not acknowledged
    yet; ``max_in_flight_bytes``: from so many bytes of them on no more are read. ``max_span``: how far the last record
    read may be ahead of the first unfinished one: what a restart reads again at most. ``append_timeout_s``:
    how long one append may take before it is tried again; ``append_tries``: how often one that is refused is tried
    before the request is given up. ``retry_s`` and ``max_retry_s``: the first and the longest wait between tries.
    ``commit_every_s``: how often positions are committed while they move. ``revoke_s``: how long a partition that
    goes to another instance is held for what is under way. ``lag_every_s``: how often the lag is measured.
    ``stuck_after_s``: how long an append may be tried before the instance is reported unhealthy.
    """

    group: str = "tasktype"
    max_in_flight: int = 256
    max_in_flight_bytes: int = 64 * MIB
    max_span: int = 16_384
    append_timeout_s: float = 10.0
    append_tries: int = 3
    retry_s: float = 0.05
    max_retry_s: float = 2.0
    commit_every_s: float = 0.5
    revoke_s: float = 2.0
    lag_every_s: float = 5.0
    stuck_after_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.group:
            raise InvalidConfig("group", self.group, "it is a name of at least one character")
        for field in ("max_in_flight", "max_in_flight_bytes", "max_span", "append_tries"):
            if getattr(self, field) < 1:
                raise InvalidConfig(field, getattr(self, field), "it is a number from 1")
        for field in (
            "append_timeout_s", "retry_s", "max_retry_s", "commit_every_s", "revoke_s", "lag_every_s", "stuck_after_s"
        ):  # fmt: skip
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")
