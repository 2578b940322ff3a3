"""`harness/` is what all benchmarks stand on, `micro/` has those of one file, every other folder is one benchmark.

A folder imports the harness and itself, nothing of another folder.
"""

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).parent / "micro")]
"""`python -m benchmarks.budgets` finds `micro/budgets.py`: the short commands are what the documentation names."""
