"""The life of a process: start in order, ready, a signal, drain, stop, and the exit code that says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.fabric.lifecycle.probes import Probes, ProbesConfig
from greenroom.fabric.lifecycle.service import Service
from greenroom.fabric.lifecycle.tasks import Tasks

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.1
_DRAIN_MARGIN_S = 2.0  # services keep the bound themselves; this is for one that does not


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeConfig:
    """Seconds: ``start_timeout_s`` for each service to start, ``drain_timeout_s`` for all of them to finish what is
    under way, ``stop_timeout_s`` for each to stop. Raises InvalidConfig, naming the field."""

    start_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for field in ("start_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "it is a number of seconds above 0")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise InvalidConfig("drain_timeout_s", self.drain_timeout_s, "it is a number of seconds from 0")


class Life:
    """The life of one process, from start to end (``run``). ``unready``: what /health says meanwhile."""

    def __init__(self, services: Sequence[Service], config: LifeConfig | None = None) -> None:
        self._services = tuple(services)
        self._config = config or LifeConfig()
        self._started: list[Service] = []
        self._phase: str | None = "starting"
        self._failures: dict[str, BaseException] = {}
        self._stopping = False
        self._over = asyncio.Event()
        self._watching = Tasks("life")

    @property
    def unready(self) -> str | None:
        """Why the process takes no work now; None: it takes work."""
        if self._phase is not None:
            return self._phase
        for service in self._started:
            why = service.unready
            if why is not None:
                return f"{service.name}: {why}"
        return None

    def stop(self) -> None:
        """As a signal does: drain, then stop."""
        self._stopping = True
        self._over.set()

    async def run(self) -> int:
        """The exit code: 0 after ``stop`` or a signal, 1 where a service did not start, failed or did not stop."""
        well = False
        try:
            well = await self._start_all()
            if well and not self._over.is_set():
                self._phase = None
                self._watching.start(self._tell_readiness(), name="readiness")
                await self._over.wait()
        finally:
            self._phase = "stopping"
            well = await self._end() and (well or self._stopping)
        return 0 if well else 1

    async def _start_all(self) -> bool:
        """Whether all have started. If not, the log says why, or the process was told to stop."""
        for service in self._services:
            if not await self._start(service):
                return False
            self._started.append(service)
            self._watching.start(self._watch(service), name=f"failures of {service.name}")
        return True

    async def _start(self, service: Service) -> bool:
        starting = asyncio.create_task(service.start(), name=f"start of {service.name}")
        over = asyncio.create_task(self._over.wait())
        timeout_s = self._config.start_timeout_s
        try:
            done, _ = await asyncio.wait({starting, over}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if starting in done:
                starting.result()
                return True
            if not done:
                _LOG.error("%s did not start within %g seconds", service.name, timeout_s)
        except GreenroomError as error:
            _LOG.error("%s did not start: %s", service.name, error)
        except Exception:
            _LOG.exception("%s did not start", service.name)
        finally:
            for task in (starting, over):
                task.cancel()
            await asyncio.gather(starting, over, return_exceptions=True)
        return False

    async def _watch(self, service: Service) -> None:
        self._failures[service.name] = await service.failed()
        self._over.set()

    async def _tell_readiness(self) -> None:
        told: str | None = ""
        while True:
            why = self.unready
            if why != told:
                _LOG.info("ready" if why is None else f"not ready: {why}")
                told = why
            await asyncio.sleep(_LOOK_S)

    async def _end(self) -> bool:
        """Whether the process ended as it should."""
        if self._failures:
            for name, error in self._failures.items():
                _LOG.error("ending, since %s failed: %s: %s", name, type(error).__name__, error)
        elif self._stopping:
            await self._drain()
        well = True
        for service in reversed(self._started):
            well &= await _bounded(service.stop(), f"stopping {service.name}", self._config.stop_timeout_s)
        await self._watching.stop()
        _LOG.info("stopped")
        return well and not self._failures

    async def _drain(self) -> None:
        """Last in, first out, all within one bound."""
        _LOG.info("nothing new is taken; what is under way may end within %g seconds", self._config.drain_timeout_s)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.drain_timeout_s
        for service in reversed(self._started):
            left = max(0.0, end - loop.time())
            await _bounded(service.drain(left), f"draining {service.name}", left + _DRAIN_MARGIN_S)


async def _bounded(work: Awaitable[None], what: str, timeout_s: float) -> bool:
    """Whether it ended in time and without an error; if not, the log says so."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        _LOG.error("%s took longer than %g seconds", what, timeout_s)
        return False
    except Exception:
        _LOG.exception("%s failed", what)
        return False
    return True


async def run_service(
    services: Sequence[Service],
    config: LifeConfig | None = None,
    *,
    probes: ProbesConfig | None = None,
    registry: CollectorRegistry | None = None,
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> int:
    """Runs ``services`` until a signal or a failure. Returns the exit code. A second signal ends the process at once.

    ``probes``: where /live, /health and /metrics (of ``registry``) are answered; None: nowhere. Raises InvalidConfig
    where that address can not be had.
    """
    life = Life(services, config)
    loop = asyncio.get_running_loop()
    handled = tuple(signals)
    came = 0

    def told(number: signal.Signals) -> None:
        nonlocal came
        came += 1
        if came > 1:
            _LOG.warning("%s again: ending at once", number.name)
            logging.shutdown()
            os._exit(128 + number)
        _LOG.info("%s: stopping", number.name)
        life.stop()

    for number in handled:
        loop.add_signal_handler(number, told, number)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if probes is not None:
                door = Probes(probes, registry or CollectorRegistry(), lambda: life.unready)
                await door.start()
                stack.push_async_callback(door.stop)
            return await life.run()
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
