"""The engine called in its own process: a child that runs what it is sent and prints what it measured.

One JSON object a line, in and out: ``{"plan": [[at, prompt, tokens], ...], "at_once": n}`` and a list of results.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

from benchmarks.pipeline.schedule import Measured, Planned
from greenroom.core.generation import Finished, GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.fabric.lifecycle import run_loop
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.generator import LoopGenerator
from greenroom.worker.model.model_runtime import ModelRuntime


async def run(generator: LoopGenerator, worker: ModelRuntime, plan: list[Planned], at_once: int) -> list[Measured]:
    """``at_once`` 0: as planned, however many that makes."""
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


async def serve(worker: ModelRuntime) -> None:
    generator = worker.generator()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked: dict[str, Any] = json.loads(line)
        plan = [Planned(*planned) for planned in asked["plan"]]
        results = await run(generator, worker, plan, asked["at_once"])
        print(json.dumps([[m.ttft, m.itl, m.tokens, m.total] for m in results]), flush=True)


def main() -> None:
    config = WorkerConfig(
        model=sys.argv[1] if len(sys.argv) > 1 else str(bundled_model_path()),
        threads=1,
        max_running=int(sys.argv[2]) if len(sys.argv) > 2 else 16,
        warm_start=False,
        progress=False,
    )
    with ModelRuntime(config) as worker:
        gc.collect()
        gc.freeze()  # as a worker's process does
        print(json.dumps("ready"), flush=True)
        run_loop(serve(worker))


if __name__ == "__main__":
    main()
