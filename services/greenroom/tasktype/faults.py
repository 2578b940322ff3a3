"""A fault point for chaos tests: this process dies between an append and the commit that passes it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping

from greenroom.core.errors import InvalidConfig

VARIABLE = "GREENROOM_FAULT"
_LOG = logging.getLogger(__name__)


def after_append_fault(environment: Mapping[str, str]) -> Callable[[], None] | None:
    """What ``GREENROOM_FAULT=tasktype:after-append:N`` asks for: kill -9 of this process when the N-th append to
    ``tasks`` has been acknowledged and before anything of it is committed. None where it is not set, or is meant for
    another service. Raises InvalidConfig where it names this service and says nothing that it knows.
    """
    setting = environment.get(VARIABLE, "")
    service, _, rest = setting.partition(":")
    if service != "tasktype":
        return None
    point, _, number = rest.partition(":")
    if point != "after-append" or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise InvalidConfig(VARIABLE, setting, "known here: tasktype:after-append:N, with N from 1")
    return _Countdown(int(number))


class _Countdown:
    def __init__(self, left: int) -> None:
        self._left = left

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            _LOG.warning("%s: this process kills itself now", VARIABLE)
            os.kill(os.getpid(), signal.SIGKILL)
