"""The jars of deploy/kafka/pom.xml, fetched once by Maven."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "kafka"
_TIMEOUT_S = 600.0


def kafka_version() -> str:
    found = re.search(r"<kafka.version>([^<]+)<", (DEPLOY / "pom.xml").read_text())
    assert found is not None
    return found[1]


def jars() -> Path:
    """The folder with all of them, one for each state of the pom. Raises AssertionError where Maven fails."""
    pom = DEPLOY / "pom.xml"
    cache = Path(os.environ.get("GREENROOM_CACHE") or "~/.cache/greenroom").expanduser() / "kafka"
    folder = cache / f"{kafka_version()}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / "lock"):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = ["mvn", "--batch-mode", "--quiet", "--file", str(pom), "dependency:copy-dependencies",
                       f"-DoutputDirectory={partial}"]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode:
                raise AssertionError(f"Maven can not fetch the jars of Apache Kafka:\n{done.stdout}{done.stderr}")
            partial.rename(folder)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Against another test run that fetches them at the same time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
