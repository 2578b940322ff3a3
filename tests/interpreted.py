"""Triton's kernels on a CPU: run by its interpreter, one program after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

KERNELS: Final = "greenroom.moe.kernels.triton_expansion"


def triton_or_skip() -> Any:
    return pytest.importorskip("triton", reason="there is no Triton: torch's wheels without CUDA do not bring it")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether kernels are interpreted is decided when their module is imported."""
    triton_or_skip()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    yield
    sys.modules.pop(KERNELS, None)
