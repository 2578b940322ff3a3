"""The engine's arm of ``python -m benchmarks.pipeline``, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from greenroom.demo import bundled_model_path

_CODE = """
import sys
from benchmarks.pipeline.child_engine import ChildEngine

engine = ChildEngine(sys.argv[1], 2)
[[ttft, _, tokens, total]] = engine.run([[0.0, "hello", 4]], 1)
assert 0 < ttft <= total and tokens == 4
assert "triton" not in sys.modules
engine.close()
"""


def test_it_loads_no_compiler_and_says_nothing_at_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(bundled_model_path())],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout + done.stderr == ""
