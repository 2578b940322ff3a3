from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.rpc.wires import WIRES, Wire


@pytest.fixture(params=list(WIRES))
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    made = WIRES[request.param]()
    yield made
    await made.stop(0.0)
    await made.dialer.close()
