"""How a scheduler is set up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import GIB
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.policies.registry import create_placement_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The rules' figures. Times in milliseconds. Raises InvalidConfig, naming the field.

    ``max_waiting``: requests that may wait; more are shed. ``max_queue_wait_ms``: a request that has not begun by then
    is shed. ``read_ahead``: unfinished records of ``tasks`` that may be held. ``read_ahead_span``: records that may be
    held from the first unfinished one on, finished ones included; a restart reads them again. ``read_ahead_bytes``: no
    more are read while inputs of so many bytes are held. ``lease_ms``: how long a worker may emit after its last
    renewal, and after how long of silence it is lost; infinite where both share a process, which is paused as a whole.
    ``max_losses``: workers lost under a request before it is given up.
    ``alone_after``: losses from which a request runs alone on its worker. ``retry_ms``: after how long an answer that
    did not come is asked for again. ``reclaim_ms``: how often the holder claims anew, so that a reader which starts
    late soon knows the epoch. ``remember_ms``: how long a finished request is known, so that a second copy of it is
    not run.
    """

    max_waiting: int = 1024
    max_queue_wait_ms: float = 120_000.0
    read_ahead: int = 4096
    read_ahead_span: int = 262_144
    read_ahead_bytes: int = GIB
    lease_ms: float = 3_000.0
    max_losses: int = 3
    alone_after: int = 2
    retry_ms: float = 2_000.0
    reclaim_ms: float = 60_000.0
    remember_ms: float = 3_600_000.0

    def __post_init__(self) -> None:
        for name in ("max_waiting", "read_ahead", "read_ahead_span", "read_ahead_bytes", "max_losses", "alone_after"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "it is a number from 1")
        if not self.lease_ms > 0:
            raise InvalidConfig("lease_ms", self.lease_ms, "it is a number of milliseconds above 0")
        for name in ("max_queue_wait_ms", "retry_ms", "reclaim_ms", "remember_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number of milliseconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """``policy``: the placement policy by name, with the ``policy_options`` of its class. ``ttl_ms``: the lifetime of
    the scheduler's record on ``members``.

    ``tick_ms``: how often the pool looks for what is due. ``commit_ms``: how often offsets are committed. ``skew_ms``:
    how far clocks may be apart (rule 4).
    """

    pool: PoolConfig = PoolConfig()
    policy: str = "fcfs"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    tick_ms: float = 50.0
    commit_ms: float = 500.0
    skew_ms: float = 60_000.0
    ttl_ms: int = 6_000

    def __post_init__(self) -> None:
        for name in ("tick_ms", "commit_ms", "skew_ms", "ttl_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number of milliseconds above 0")
        self.make_policy()

    def make_policy(self) -> PlacementPolicy:
        """A new one, for one pool. Raises UnknownName, InvalidConfig."""
        return create_placement_policy(self.policy, options=self.policy_options)
