"""Where benchmarks may import from, and that every command that is documented is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/__init__.py"))
IN_EVERY_ENVIRONMENT = (
    "benchmarks", "benchmarks.harness", "benchmarks.harness.children", "benchmarks.harness.children.child",
    "benchmarks.harness.children.process_memory", "benchmarks.peers", "benchmarks.peers.batch",
    "benchmarks.peers.forced_llama",
)  # fmt: skip
"""What llama.cpp's interpreter imports, which has neither greenroom nor its dependencies but NumPy."""


def imported(file: Path) -> Iterator[str]:
    """Modules, wherever in the file they are imported."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_benchmark_imports_the_harness_and_itself_and_the_harness_no_benchmark(folder: str) -> None:
    allowed = {"harness", folder}
    found = {
        f"{file.relative_to(ROOT)}: {module}"
        for file in (ROOT / "benchmarks" / folder).rglob("*.py")
        for module in imported(file)
        if module.startswith("benchmarks.") and module.split(".")[1] not in allowed
    }
    assert not found


def test_what_llama_cpps_interpreter_imports_needs_only_the_standard_library_and_numpy() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "llama_cpp", "benchmarks"}
    for name in IN_EVERY_ENVIRONMENT:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        modules = set(imported(Path(spec.origin)))
        assert {module.split(".")[0] for module in modules} <= allowed
        ours = {module for module in modules if (ROOT / module.replace(".", "/")).with_suffix(".py").exists()}
        assert ours <= set(IN_EVERY_ENVIRONMENT)


def test_every_documented_command_is_a_module() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    commands = {name for page in pages for name in re.findall(r"python -m (benchmarks[\w.]*\w)", page.read_text())}
    assert {"benchmarks.engine", "benchmarks.budgets", "benchmarks.transfers"} <= commands
    for name in commands:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__") is not None, name
