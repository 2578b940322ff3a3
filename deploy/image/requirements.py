"""Prints what pyproject.toml asks for, one requirement a line: of the package itself, or of one of its extras.

So that an image's layer of dependencies is made anew when these change, and not whenever the code does.

    python requirements.py pyproject.toml          # of the package
    python requirements.py pyproject.toml torch    # of the extra
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extra: str | None = None) -> list[str]:
    """Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject)["project"]
    lines: list[str] = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return lines


if __name__ == "__main__":
    path, *extras = sys.argv[1:]
    found = requirements(Path(path).read_text(encoding="utf-8"), *extras)
    sys.stdout.write("".join(f"{line}\n" for line in found))
