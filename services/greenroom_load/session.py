"""One run from the ready check to the report."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from greenroom_load.plan import Plan
from greenroom_load.progress import progress
from greenroom_load.report import Report
from greenroom_load.run_setup import Setup
from greenroom_load.runner import Runner
from greenroom_load.sweep import Rule, Search, Step, Sweep, in_order
from greenroom_load.targets import Targets
from greenroom_load.transport import Style, Transport

_SPARE_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """``model`` None: the one that the server has. ``shown``: whether progress is drawn, None: on a terminal."""

    transport: Transport
    style: Style
    model: str | None
    command: Sequence[str]
    label: str | None = None
    goodput: Targets | None = None
    ready_timeout_s: float = 60.0
    shown: bool | None = None

    async def run(self, plan: Plan) -> Report:
        """Raises NotReady, WarmupFailed."""
        stopping = asyncio.Event()
        async with self._server() as model:
            with _interruptible(stopping):
                return await self._one(plan, model, "sending", stopping)

    async def sweep(
        self,
        plan_at: Callable[[float], Plan],
        rates: Sequence[float] | Search,
        rule: Rule,
        *,
        pause_s: float,
        on_step: Callable[[Step], None],
    ) -> Sweep:
        """A run at each rate, lowest first, or at those that the search asks for. Raises NotReady, WarmupFailed."""
        steps: list[Step] = []
        stopping = asyncio.Event()
        async with self._server() as model:
            with _interruptible(stopping):
                while (rate := self._next(steps, rates)) is not None:
                    report = await self._one(plan_at(rate), model, f"{rate:.4g}/s", stopping)
                    if stopping.is_set():
                        break
                    steps.append(Step(rate, report, tuple(rule.broken(report.found))))
                    on_step(steps[-1])
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), pause_s)
        return Sweep(in_order(steps), rule, isinstance(rates, Search), stopping.is_set())

    @staticmethod
    def _next(steps: Sequence[Step], rates: Sequence[float] | Search) -> float | None:
        if isinstance(rates, Search):
            return rates.next_rate({step.rate: step.sustained for step in steps})
        return rates[len(steps)] if len(steps) < len(rates) else None

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[str]:
        """The transport, opened, and the model's name."""
        await self.transport.open()
        try:
            if self.ready_timeout_s > 0:
                await self.transport.wait_ready(self.ready_timeout_s)
            yield self.model or await self.transport.model()
        finally:
            await self.transport.close()

    async def _one(self, plan: Plan, model: str, label: str, stopping: asyncio.Event) -> Report:
        _allow_connections(plan.bounds.max_concurrency or plan.bounds.max_outstanding)
        runner = Runner(plan, self.transport, model, stopping)
        async with progress(runner.meter, plan.bounds, label=label, shown=self.shown):
            outcome = await runner.run()
        setup = Setup.of(plan, self.style, self.transport, model, self.command, self.label)
        return Report.of(setup, outcome, self.goodput)


@contextmanager
def _interruptible(stopping: asyncio.Event) -> Iterator[None]:
    """While it is open, the first Ctrl-C (or SIGTERM) sets ``stopping``; a second one ends the program as ever."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        release()
        stopping.set()

    def release() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        release()


def _allow_connections(count: int) -> None:
    """Raises the soft limit on open files as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
