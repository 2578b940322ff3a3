"""The compiled products as a cross-compiler makes them for ARM, under qemu.

Most tests are those of this machine's library, with the same tolerances. pytest runs them in a process of its own, with
the plugin ``tests.on_arm``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from greenroom.moe.native.rows import INSTRUCTIONS, NativeRows
from tests.arm.build import BUILT, ROOT, TIMEOUT_S, build, missing
from tests.arm.library import ArmLibrary

if lacking := missing():
    pytest.skip(lacking, allow_module_level=True)

HERE = Path(__file__).parent
PRODUCTS = [
    HERE / f"test_{name}.py"
    for name in (
        *("native_rows", "clamped_experts", "mxfp4_experts", "lossless_experts", "grouped_experts", "stored_linear"),
    )
]
BLOCKS = HERE / "test_lean_block.py"
WITH_BF16, WITHOUT_BF16 = "max", "cortex-a72"
"""Names of qemu's processors. The first one has every extension that it knows."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    assert build(folder) == "", "the compiler warns"
    return folder


@contextmanager
def processor(built: Path, name: str) -> Iterator[NativeRows]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QEMU_CPU", name)
        patch.delenv(INSTRUCTIONS, raising=False)
        library = ArmLibrary(built)
        try:
            yield NativeRows(library)  # type: ignore[arg-type]
        finally:
            library.close()


@pytest.mark.parametrize(
    ("name", "fastest", "files"),
    [
        pytest.param(WITH_BF16, "neonbf16", [*PRODUCTS, BLOCKS], id="neonbf16"),
        pytest.param(WITHOUT_BF16, "neon", PRODUCTS, id="neon", marks=pytest.mark.full),
        pytest.param(WITHOUT_BF16, "neon", PRODUCTS[:1], id="neon, plain numbers"),
    ],
)
def test_the_products_pass_their_tests(built: Path, name: str, fastest: str, files: list[Path]) -> None:
    """Each set on a processor whose fastest it is. An instruction that one lacks ends the process that computes."""
    plugins = "-p", "tests.on_arm", "-p", "no:cacheprovider"
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    chosen = "-m", "not full", "-k", f"{fastest} or not neon"
    others = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", INSTRUCTIONS))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *plugins, profile, *chosen, *files],
        cwd=ROOT, env=others | {"QEMU_CPU": name, BUILT: str(built)}, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"\[(neon\w*).* PASSED", done.stdout)) == {fastest}
    assert "skipped" not in done.stdout


def test_the_processor_is_asked_for_its_instructions(built: Path) -> None:
    with processor(built, WITH_BF16) as native:
        assert native.instruction_sets == ("neonbf16", "neon")
        assert native.multiplies_bf16
    with processor(built, WITHOUT_BF16) as native:
        assert native.instruction_sets == ("neon",)
        assert not native.multiplies_bf16


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_sums_of_bf16_instructions_round_to_odd_and_those_of_floats_to_nearest(built: Path, rows: int) -> None:
    """Whatever the number of rows. 1 + 2^-8 lies between two numbers of bf16. What is added to it is lost in fp32 if it
    is rounded to nearest. The last output is a denormal number.
    """
    x = torch.tensor([[1.0, 1.0, 2.0**-30, 0.0]]).bfloat16().repeat(rows, 1)
    weight = torch.tensor([[1.0, 2.0**-8, 1.0, 0.0], [1.0, 2.0**-8, 0.0, 0.0], [2.0**-130, 0.0, 0.0, 0.0]]).bfloat16()
    expected = {"neonbf16": [1 + 2.0**-7, 1.0, 0.0], "neon": [1.0, 1.0, 2.0**-130]}
    with processor(built, WITH_BF16) as native:
        for name, sums in expected.items():
            native.use(name)
            assert native.linear(x, weight).tolist() == [sums] * rows
