"""`greenroom serve` as a real process."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from greenroom.cli import main; main()"


class Server:
    """Started on a free port; a context manager that ends it. ``log`` is what it has printed so far.

    ``with_torch``: whether it is installed there.
    """

    def __init__(self, *arguments: str, cache: Path, with_torch: bool = True) -> None:
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=100_000)
        environment = {**os.environ, "GREENROOM_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        greenroom = ("-m", "greenroom") if with_torch else ("-c", _WITHOUT_TORCH)
        self.process = subprocess.Popen(
            [sys.executable, *greenroom, "serve", "--port", "0", "--threads", "1", *arguments],
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self.url = self._until_ready()
        except BaseException:  # then nobody calls __exit__, and it would run on
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
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.log.append(line)
                self._lines.put(line)
        self._lines.put(None)


def refusal(*arguments: str, cache: Path, with_torch: bool = True) -> str:
    """What a server prints that refuses to start: it ends by itself, with a status other than 0."""
    server = Server(*arguments, cache=cache, with_torch=with_torch)
    try:
        assert server.process.wait(START_TIMEOUT_S) != 0
    finally:
        server.__exit__(None, None, None)
    return "".join(server.log)
