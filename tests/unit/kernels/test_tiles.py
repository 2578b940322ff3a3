"""bf16 products on processors that announce tiles without a shape: no process may end by them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from greenroom.moe.native import tiles
from greenroom.moe.native.library import NativeUnavailable, native_library


@pytest.fixture(autouse=True)
def without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiles.MOST_INSTRUCTIONS, "")  # so that it is put back whatever it was
    monkeypatch.delenv(tiles.MOST_INSTRUCTIONS)


def library() -> ctypes.CDLL:
    try:
        return native_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


MULTIPLIED = """
import torch
from greenroom.moe.native.tiles import avoid_tiles_without_shape

avoid_tiles_without_shape()
rows = torch.arange(64 * 64).reshape(64, 64).remainder(7).bfloat16()
assert torch.equal((rows @ rows).float(), (rows.float() @ rows.float()).bfloat16().float())
"""


def test_a_process_that_has_asked_multiplies_bf16_on_this_processor() -> None:
    """Fails by SIGILL on the machines that this is about, without the call."""
    library()
    done = subprocess.run([sys.executable, "-c", MULTIPLIED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("lack", "set_before", "expected"), [
    (0, None, None),
    (1, None, "AVX512_CORE_FP16"),
    (1, "AVX2", "AVX2"),
])  # fmt: skip
def test_only_where_the_shape_is_missing_and_the_environment_does_not_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, lack: int, set_before: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(tiles, "native_library", lambda: SimpleNamespace(greenroom_tiles_lack_shape=lambda: lack))
    if set_before is not None:
        monkeypatch.setenv(tiles.MOST_INSTRUCTIONS, set_before)
    tiles.avoid_tiles_without_shape()
    assert os.environ.get(tiles.MOST_INSTRUCTIONS) == expected


def test_without_the_library_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(tiles, "native_library", unavailable)
    tiles.avoid_tiles_without_shape()
    assert tiles.MOST_INSTRUCTIONS not in os.environ


def test_a_processor_without_tiles_lacks_no_shape() -> None:
    announced = "amx_tile" in Path("/proc/cpuinfo").read_text().split()
    assert announced or not library().greenroom_tiles_lack_shape()
