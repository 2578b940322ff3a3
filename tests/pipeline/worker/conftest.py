"""Over what the services of these tests reach each other."""

from __future__ import annotations

import pytest

from tests.pipeline.worker import scripted


@pytest.fixture(params=sorted(scripted.NETS))
def net(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test once within the process and once over gRPC."""
    monkeypatch.setitem(scripted.chosen, "net", request.param)
    return str(request.param)
