"""Fixtures of tests that need the compiled products. They skip with the reason where there are none."""

from __future__ import annotations

import pytest

from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import NativeRows, native_rows


@pytest.fixture
def native() -> NativeRows:
    try:
        return native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
