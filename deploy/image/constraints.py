"""Prints the versions that are installed here of everything that the images hold, for constraints.txt.

.venv/bin/python deploy/image/constraints.py > /tmp/constraints.txt && mv /tmp/constraints.txt deploy/image/
"""

from __future__ import annotations

import sys
from importlib.metadata import requires as requirements_of
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements import requirements

ROOT = Path(__file__).parents[2]
EXTRAS = (None, "otlp", "torch", "eamc")
HEAD = """\
# The versions that the images are made with; the package itself takes a range of each. To take those of .venv:
#   .venv/bin/python deploy/image/constraints.py > /tmp/constraints.txt && mv /tmp/constraints.txt deploy/image/
"""


def installed(wanted: list[Requirement]) -> dict[str, str]:
    """Names and versions of ``wanted`` and of whatever they need. Raises PackageNotFoundError."""
    found: dict[str, str] = {}
    looked_at: set[tuple[str, frozenset[str]]] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in looked_at:
            continue
        looked_at.add((name, extras))
        found[name] = version(name)
        for line in requirements_of(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                waiting.append(needed)
    return found


if __name__ == "__main__":
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = installed([Requirement(line) for extra in EXTRAS for line in requirements(pyproject, extra)])
    sys.stdout.write(HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)))
