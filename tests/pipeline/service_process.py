"""A service's command as a real process, and what its probes say."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.waiting import DEADLINE_S as DEADLINE_S

_SESSION = {"GREENROOM_KAFKA_SESSION_TIMEOUT": "3"}  # how long one waits for what was killed


class ServiceProcess:
    """``log``: what it has written so far, to both outputs."""

    def __init__(self, arguments: list[str], path: Path, environment: dict[str, str]) -> None:
        self._arguments = arguments
        self._path = path
        self._environment = {**os.environ, **_SESSION, **environment}
        self._process: asyncio.subprocess.Process | None = None
        self.probes = ""

    @property
    def log(self) -> str:
        return self._path.read_text()

    async def start(self) -> None:
        """Returns when it is ready."""
        with self._path.open("wb") as file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "greenroom", *self._arguments, stdout=file, stderr=file, env=self._environment
            )
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
            while await self._health(http) != 200:
                assert self._process.returncode is None, self.log
                await asyncio.sleep(0.05)

    async def _health(self, http: aiohttp.ClientSession) -> int:
        found = re.search(r"/metrics at (http://[0-9.:]+)", self.log)
        if found is None:
            return 0
        self.probes = found[1]
        try:
            async with http.get(f"{self.probes}/health") as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def metric(self, name: str) -> float:
        """The sum over its labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.probes}/metrics") as response:
            text = await response.text()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, (name, text)
        return sum(map(float, values))

    async def ended(self) -> int:
        """The exit code, negative for a signal."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), DEADLINE_S)

    async def signal(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return await self.ended()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.signal(signal.SIGKILL)


@asynccontextmanager
async def service_process(
    arguments: list[str], path: Path, environment: dict[str, str] | None = None
) -> AsyncIterator[ServiceProcess]:
    """``greenroom ARGUMENTS``, ready, and killed in the end if it still runs."""
    process = ServiceProcess(arguments, path, environment or {})
    try:
        await process.start()
        yield process
    finally:
        await process.close()
