"""What starts in a moment, since it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

TRIED = """
import sys

def light(*heavy):
    assert not sys.modules.keys() & set(heavy), heavy

import greenroom.demo.tasks
light("torch", "transformers", "numpy")
import greenroom.demo
greenroom.demo.bundled_model_path()
light("torch", "transformers", "numpy")
import greenroom.embedded
light("torch", "transformers")
"""


def test_tasks_the_bundled_models_path_and_the_embedded_services_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", TRIED], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
