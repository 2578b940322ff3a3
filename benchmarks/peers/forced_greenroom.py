"""greenroom with its tokens forced on it, through its Python API and its batch loop. Runs within a child process."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.harness.arms.filled_memory import filled
from benchmarks.harness.children.process_memory import memory, read_bytes
from benchmarks.peers.batch import Batch, Decoded, batch_of
from benchmarks.peers.forced_tokens import force
from greenroom import LLM
from greenroom.core.generation import GenerationRequest, SamplingParams, Token
from greenroom.moe.batch.completions import complete
from greenroom.worker.model.config import WorkerConfig

_TIMEOUT_S = 900.0


class ForcedGreenroom:
    """``settings``: those of WorkerConfig."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        base = memory()["rss"]
        begin = time.perf_counter()
        self._llm = filled(LLM(config=WorkerConfig(model=model, **settings)))
        self._opened = {"base_rss": base, "load_s": time.perf_counter() - begin, **_plan(self._llm)}

    def describe(self) -> dict[str, Any]:
        """What it took to open it, and the memory that it announces."""
        return self._opened

    def decode(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch after the other."""
        experts = self._llm.worker.experts
        counters = experts.refresh_counters()
        hits, lookups = counters.hits, counters.lookups
        decoded = [asdict(_decode(self._llm, number, batch_of(batch))) for number, batch in enumerate(batches)]
        counters = experts.refresh_counters()
        looked = counters.lookups - lookups
        return {"batches": decoded, "hit_rate": (counters.hits - hits) / looked if looked else None, **memory()}

    def close(self) -> None:
        self._llm.close()


def _decode(llm: LLM, number: int, batch: Batch) -> Decoded:
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


def _plan(llm: LLM) -> dict[str, Any]:
    plan = llm.worker.plan
    return {
        "announced": plan.total,
        "announced_base": plan.base,
        "expert_budget": plan.expert_memory,
        "expert_bytes": plan.mean_expert_bytes,
        "experts": plan.experts,
        "experts_resident": plan.device_slots,
        "policy": llm.worker.config.policy,
    }
