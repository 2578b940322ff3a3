from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.contract.rpc.wires import WIRES, Local, Wire
from tests.waiting import until


@pytest.fixture(params=list(WIRES))
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    """Afterwards no call is under way and, within the process, no task is left."""
    before = asyncio.all_tasks()
    made = WIRES[request.param]()
    yield made
    await made.stop(0.0)
    await made.dialer.close()
    assert made.calls == 0
    if isinstance(made, Local):
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()}, "no task left behind")
