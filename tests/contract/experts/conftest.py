"""Engines that are closed with the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from greenroom.experts.engine import ExpertEngine


@pytest.fixture
def closing() -> Iterator[list[ExpertEngine]]:
    engines: list[ExpertEngine] = []
    yield engines
    for engine in engines:
        engine.close()
