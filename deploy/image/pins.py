"""Writes the versions and hashes that the images are made of, next to this file.

    make pins                  # the versions stay as they stand here, and what is new gets the one installed in .venv
    make pins UPGRADE=1        # every version is the one installed in .venv, which the tests ran with

Hashes are of every file that the package index has of a version, so that one list serves every processor. `uv` resolves
and asks for the hashes: UV_INDEX_URL or UV_FIND_LINKS name another index, or a folder of wheels of one's own building.

    build.txt    what builds greenroom's own wheel
    light.txt    what both images have
    torch.txt    torch and what it needs, on top of that
    models.txt   what the torch image has beside torch
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = "3.11"
"""Of the images."""
HEAD = """\
# Versions and hashes that the images are made with; the package itself takes a range of each. Made by: make pins
"""
_MACHINES = ("x86_64", "aarch64")


def wanted(pyproject: str) -> dict[str, list[str]]:
    """Requirements by file; each file leaves out what an earlier one has, but for the first."""
    parsed = tomllib.loads(pyproject)
    project = parsed["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    computing = [*extras["torch"], *extras["coe"], *extras["eamc"]]
    return {
        "build": parsed["build-system"]["requires"],
        "light": [*project["dependencies"], *extras["otlp"]],
        "torch": [line for line in computing if Requirement(line).name == "torch"],
        "models": computing,
    }


def installed() -> dict[str, str]:
    """Versions by name of all that this environment has, without a local part such as +cpu."""
    return {canonicalize_name(found.name): found.version.partition("+")[0] for found in distributions()}


def pinned() -> dict[str, str]:
    """Versions by name as they stand in the files."""
    lines = [line for path in HERE.glob("*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    return dict(found.groups() for line in lines if (found := re.match(r"([\w.-]+)==([^ ;]+)", line)))


def blocks(text: str) -> dict[str, str]:
    """Pins with their hashes by name, as `uv pip compile` writes them; without those that no Linux image would have."""
    found = {}
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n(?=\S)", text.strip()):
        requirement = Requirement(block.partition("\\")[0])
        if requirement.marker is None or any(_applies(requirement.marker, machine) for machine in _MACHINES):
            found[canonicalize_name(requirement.name)] = block.rstrip()
    return found


def _applies(marker: Marker, machine: str) -> bool:
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    python = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "implementation_name": "cpython"}
    return marker.evaluate({**linux, **python, "platform_python_implementation": "CPython"})


def resolve(requirements: list[str], versions: dict[str, str]) -> str:
    """What ``versions`` names has the version that it says there. Raises CalledProcessError; uv has said why."""
    with tempfile.TemporaryDirectory() as folder:
        asked, held = Path(folder, "requirements.in"), Path(folder, "constraints.txt")
        asked.write_text("\n".join(requirements), encoding="utf-8")
        held.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["--constraint", str(held), str(asked)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    before: set[str] = set()
    versions = installed() if "--upgrade" in sys.argv[1:] else {**installed(), **pinned()}
    for name, requirements in wanted((ROOT / "pyproject.toml").read_text(encoding="utf-8")).items():
        found = blocks(resolve(requirements, versions))
        pins = [found[pin] for pin in sorted(found) if pin not in before]
        (HERE / f"{name}.txt").write_text(HEAD + "\n".join(pins) + "\n", encoding="utf-8")
        if name != "build":  # which stays in a stage of its own
            before |= set(found)


if __name__ == "__main__":
    main()
