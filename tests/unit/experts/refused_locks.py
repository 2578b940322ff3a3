"""When a file lock is first refused."""

from __future__ import annotations

import threading

import pytest

from greenroom.experts.pack import file_lock


def first_refusal(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once this process has been refused a lock, so that it waits."""
    refused = threading.Event()
    original = file_lock._try_lock

    def try_lock(fd: int) -> bool:
        got = original(fd)
        if not got:
            refused.set()
        return got

    monkeypatch.setattr(file_lock, "_try_lock", try_lock)
    return refused
