"""The engine called in its own process. Runs within a child process."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

from benchmarks.pipeline.schedule import Measured, Planned
from greenroom.core.generation import Finished, GenerationRequest, SamplingParams
from greenroom.fabric.lifecycle import run_loop
from greenroom.moe.torch_compiler import compiler_on_demand
from greenroom.worker.model.config import WorkerConfig


class ChildEngine:
    """A worker's model and batch loop, without its services."""

    def __init__(self, model: str, max_running: int) -> None:
        compiler_on_demand()  # as in a worker's process; Triton, which comes with it, reports leaks at the end
        from greenroom.worker.model.model_runtime import ModelRuntime

        config = WorkerConfig(model=model, threads=1, max_running=max_running, warm_start=False, progress=False)
        self._worker = ModelRuntime(config)
        gc.collect()
        gc.freeze()  # as a worker's process does

    def describe(self) -> dict[str, Any]:
        return {}

    def run(self, plan: list[list[Any]], at_once: int) -> list[list[Any]]:
        """``plan``: the fields of each ``Planned``. The answer: those of each ``Measured`` but the last."""
        found = run_loop(self._run([Planned(*planned) for planned in plan], at_once))
        return [[one.ttft, one.itl, one.tokens, one.total] for one in found]

    async def _run(self, plan: list[Planned], at_once: int) -> list[Measured]:
        worker, generator = self._worker, self._worker.generator()
        places = asyncio.Semaphore(at_once or len(plan) or 1)
        began = time.perf_counter()

        async def one(number: int, planned: Planned) -> Measured:
            async with places:
                due = max(began + planned.at, time.perf_counter()) if at_once else began + planned.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                rendered = worker.text.chat.render(
                    [{"role": "user", "content": planned.prompt}], add_generation_prompt=True
                )
                ids = tuple(worker.text.tokenizer.encode(rendered, add_special_tokens=False))
                sampling = SamplingParams(temperature=0, max_tokens=planned.tokens, ignore_eos=True)
                request = GenerationRequest(f"r{number}-{began}", ids, sampling)
                first = last = 0.0
                tokens = 0
                async for event in generator.generate(request):
                    if isinstance(event, Finished):
                        break
                    last = time.perf_counter()
                    first = first or last
                    tokens += 1
                return Measured(first - due, (last - first) / max(1, tokens - 1), tokens, last - due)

        return list(await asyncio.gather(*(one(number, planned) for number, planned in enumerate(plan))))

    def close(self) -> None:
        self._worker.close()
