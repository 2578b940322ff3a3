"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import machine
from benchmarks.harness.machine import cache_folder, describe_machine
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import INSTRUCTIONS, native_rows


def test_it_names_what_products_are_computed_with() -> None:
    try:
        expected = native_rows().instruction_set
    except NativeUnavailable:
        expected = None
    found = describe_machine(cache_folder())
    assert found["compiled_products"] == expected
    assert found["cores"] >= 1


def test_a_lowered_instruction_set_is_the_one_that_is_named() -> None:
    try:
        slowest = native_rows().instruction_sets[-1]
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    code = "from benchmarks.harness.machine import describe_machine as d; print(d(__import__('pathlib').Path('/'))"
    done = subprocess.run(
        [sys.executable, "-c", code + "['compiled_products'])"], cwd=Path(__file__).parents[4], timeout=120, check=True,
        env={**os.environ, INSTRUCTIONS: slowest}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == slowest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 bmi1 avx512f avx512_bf16", ["avx2", "avx512f", "avx512_bf16"]),
        ("Features\t: fp asimd atomics i8mm bf16", ["asimd", "bf16", "i8mm"]),
    ],
)
def test_the_instructions_that_decide_are_found_on_either_architecture(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: line + "\n")
    assert machine._instructions() == expected
