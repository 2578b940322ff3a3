"""greenroom, through its Python API and its batch loop: python -m benchmarks.peers.greenroom_arm < JOB

Settings: those of WorkerConfig. Without batches it only says what memory it would take.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.harness.process_memory import memory, read_bytes
from benchmarks.peers.forced import force
from benchmarks.peers.job import Batch, Decoded, answering, read_job
from greenroom import LLM
from greenroom.core.generation import GenerationRequest, SamplingParams, Token
from greenroom.moe.batch.completions import complete
from greenroom.worker.model.config import WorkerConfig

_TIMEOUT_S = 900.0


def decode(llm: LLM, number: int, batch: Batch) -> Decoded:
    """All sequences submitted at once; the batch loop runs them as it does a server's requests."""
    ids = [f"{number}-{place}" for place in range(batch.sequences)]
    loop = llm.worker.loop
    sequences = force(loop.engine, dict(zip(ids, batch.forced, strict=True)))
    requests = [
        GenerationRequest(name, prompt, SamplingParams(temperature=0, max_tokens=len(forced), ignore_eos=True))
        for name, prompt, forced in zip(ids, batch.prompts, batch.forced, strict=True)
    ]
    arrivals: list[list[float]] = [[] for _ in ids]
    read: list[int] = []
    begin = time.perf_counter()

    def on_token(place: int, token: Token) -> None:
        arrivals[place].append(time.perf_counter() - begin)
        if not read and all(arrivals):
            read.append(read_bytes())

    done = complete(loop, requests, timeout_s=_TIMEOUT_S, on_token=on_token)
    read.append(read_bytes())
    for one, forced in zip(done, batch.forced, strict=True):
        if one.token_ids != forced:
            raise RuntimeError(f"a sequence ended otherwise: {one.finished}")
    greedy = tuple(tuple(sequences[name].greedy) for name in ids)
    return Decoded(tuple(map(tuple, arrivals)), greedy, read[-1] - read[0])


def main() -> None:
    model, batches, settings = read_job()
    with answering() as answer:
        answer["base_rss"] = memory()["rss"]
        begin = time.perf_counter()
        with LLM(config=WorkerConfig(model=model, **settings)) as llm:
            answer["load_s"] = time.perf_counter() - begin
            answer |= _plan(llm)
            counters = llm.worker.experts.refresh_counters()
            hits, lookups = counters.hits, counters.lookups
            answer["batches"] = [asdict(decode(llm, number, batch)) for number, batch in enumerate(batches)]
            counters = llm.worker.experts.refresh_counters()
            looked = counters.lookups - lookups
            answer["hit_rate"] = (counters.hits - hits) / looked if looked else None
            answer |= memory()


def _plan(llm: LLM) -> dict[str, Any]:
    plan = llm.worker.plan
    return {
        "announced": plan.total,
        "announced_base": plan.base,
        "expert_budget": plan.expert_bytes,
        "expert_bytes": plan.slot_bytes,
        "experts": plan.experts,
        "experts_resident": plan.device_slots,
        "policy": llm.worker.config.policy,
    }


if __name__ == "__main__":
    main()
