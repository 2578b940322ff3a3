"""`greenroom serve` as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import DEADLINE_S

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_EACH_WITHOUT_TORCH = """
import json, sys, traceback
sys.modules["torch"] = None
from click.testing import CliRunner
from greenroom.cli import main
said = []
for arguments in json.loads(sys.argv[1]):
    try:
        result = CliRunner().invoke(main, ["serve", "--port", "0", *arguments], catch_exceptions=False)
        said.append([result.exit_code, result.output])
    except Exception:
        said.append([1, traceback.format_exc()])
print(json.dumps(said))
"""


class Server:
    """Started on a free port; a context manager that ends it. ``log`` is what it has printed so far."""

    def __init__(self, *arguments: str, cache: Path) -> None:
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=100_000)
        environment = {**os.environ, "GREENROOM_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "greenroom", "serve", "--port", "0", "--threads", "1", *arguments],
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self.url = self._until_ready()
        except BaseException:  # then __exit__ is not called, and it would run on
            self.__exit__(None, None, None)
            raise
        return self

    def _until_ready(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        why = f"was not ready within {START_TIMEOUT_S:g} s"
        with contextlib.suppress(queue.Empty):
            while (left := deadline - time.monotonic()) > 0:
                line = self._lines.get(timeout=left)
                if line is None:
                    why = "ended before it was ready"
                    break
                if found := re.search(r"ready: (http://\S+)", line):
                    return found[1]
        raise AssertionError(f"the server {why}:\n" + "".join(self.log))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """All samples without labels, and those with labels by their full name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE_S) as response:
            lines = response.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.log.append(line)
                self._lines.put(line)
        self._lines.put(None)


def refusals_without_torch(cases: Sequence[Sequence[str]]) -> list[str]:
    """What `greenroom serve` says to each of these options, all of which it refuses where torch is not installed.

    One process tries them all, since most of the time goes into its start.
    """
    child = subprocess.run(
        [sys.executable, "-c", _EACH_WITHOUT_TORCH, json.dumps(cases)],
        capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True,
    )  # fmt: skip
    found: list[tuple[int, str]] = json.loads(child.stdout)
    assert all(status != 0 for status, _ in found), found
    return [said for _, said in found]
