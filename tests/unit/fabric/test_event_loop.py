"""Which event loop processes run on, and what the garbage collector no longer looks at."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from greenroom.fabric.lifecycle import StartIsKept, run_loop

uvloop = pytest.importorskip("uvloop", reason="there is no uvloop for this system")


def test_processes_run_on_uvloop() -> None:
    async def which() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert isinstance(run_loop(which()), uvloop.Loop)


def test_where_there_is_none_they_run_on_asyncios_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    async def which() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert type(run_loop(which())).__module__.startswith("asyncio.")


async def test_what_the_start_made_is_kept_from_the_garbage_collector_until_the_end() -> None:
    kept = StartIsKept()
    before = gc.get_freeze_count()
    await kept.start()
    assert gc.get_freeze_count() > before + 1000
    await kept.stop()
    assert gc.get_freeze_count() == 0
