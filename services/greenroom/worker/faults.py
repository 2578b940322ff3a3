"""Faults on purpose, for the tests that kill workers at chosen moments: ``GREENROOM_FAULT=worker:after-token:100``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig
from greenroom.experts.copying.mover import Job, Mover
from greenroom.policies.base.events import Reason, Tier

VARIABLE = "GREENROOM_FAULT"
_ALLOWED = "worker:after-token:N, worker:poison:TEXT, worker:mover:N or worker:device:N"
_NO_EXPERT = 1 << 40


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_mover(mover: Mover) -> None:
    """Queue a job that can not begin: the thread that takes it dies."""
    mover.put(Job(_NO_EXPERT, Tier.DISK, Tier.DEVICE, -1, -1, Reason.ON_DEMAND))


@dataclass(slots=True)
class Fault:
    """``after_token``: the process dies when so many tokens have been generated. ``poison``: it dies when a prompt
    contains this text. ``mover``: after so many tokens a thread that moves experts dies, and the process goes on.
    ``device``: after so many tokens the device is lost.
    """

    after_token: int | None = None
    poison: str | None = None
    mover: int | None = None
    device: int | None = None

    def tokens(self, count: int) -> None:
        """So many more were generated."""
        if self.after_token is not None:
            self.after_token -= count
            if self.after_token <= 0:
                kill_self()

    def steps(self, tokens: int, mover: Mover, lose_device: Callable[[], None]) -> None:
        """A step is over; on the model's thread."""
        if self.device is not None:
            self.device -= tokens
            if self.device <= 0:
                self.device = None
                lose_device()
        if self.mover is not None:
            self.mover -= tokens
            if self.mover <= 0:
                self.mover = None
                kill_mover(mover)

    def begins(self, prompt: str) -> None:
        if self.poison is not None and self.poison in prompt:
            kill_self()


def fault_of(text: str | None) -> Fault | None:
    """The fault that ``text`` asks of a worker; None where it asks for none, or names another service.

    Raises InvalidConfig for a fault that a worker does not have.
    """
    service, _, rest = (text or "").partition(":")
    if service != "worker":
        return None
    kind, _, value = rest.partition(":")
    if kind == "after-token" and value.isdigit() and int(value) > 0:
        return Fault(after_token=int(value))
    if kind == "mover" and value.isdigit():
        return Fault(mover=int(value))
    if kind == "device" and value.isdigit():
        return Fault(device=int(value))
    if kind == "poison" and value:
        return Fault(poison=value)
    raise InvalidConfig(VARIABLE, text, _ALLOWED)
