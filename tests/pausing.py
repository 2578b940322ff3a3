"""SIGSTOP, and until it holds."""

from __future__ import annotations

import os
import signal
import time

from tests.waiting import DEADLINE_S


def pause(pid: int) -> None:
    """Returns when no thread of the child runs any more. On a busy machine that takes a while after the signal, and
    until then it goes on answering."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < deadline, f"process {pid} has not stopped {DEADLINE_S:g} s after SIGSTOP"
        time.sleep(0.001)  # a wait without it has no deadline
