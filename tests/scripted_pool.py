"""A pool without scheduler and workers: a Pipeline on a log in memory, in front of a generator of a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Finished, FinishReason, GenerationRequest, Token
from greenroom.core.logprobs import pack, pack_logprobs
from greenroom.core.messages import (
    Cancel,
    Claim,
    Member,
    MemberKind,
    ModelCard,
    Outcome,
    Request,
    RequestRecord,
    decode,
    encode,
)
from greenroom.fabric.log import MemoryBroker, MemoryLog
from greenroom.fabric.topics import JOURNAL, REQUESTS, Topics, all_topics
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from tests.scripted_generator import ScriptedGenerator


class _OneWorker:
    """The directory of a pool with one worker."""

    def __init__(self, generator: ScriptedGenerator) -> None:
        model = generator.model
        card = ModelCard(
            name=model.name,
            digest="d",
            text_digest="t",
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            created=model.created,
        )
        self._worker = Member(member=MemberKind.WORKER, instance="w", address="", ttl_ms=1000, model=card)

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]:
        return [self._worker] if kind is MemberKind.WORKER else []


class _Pool:
    """Runs each request that is on the log once, streams its tokens and writes its outcome."""

    def __init__(self, pipeline: Pipeline, log: MemoryLog, generator: ScriptedGenerator) -> None:
        self._pipeline = pipeline
        self._log = log
        self._generator = generator
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            async with self._log.reader(REQUESTS, 0) as reader:
                while True:
                    for record in await reader.poll(1.0):
                        self._take(decode(record.value or b"", RequestRecord))
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _take(self, record: RequestRecord) -> None:
        running = self._running.get(record.request_id)
        if isinstance(record, Cancel):
            if running is not None:
                running.cancel()
        elif running is None:
            assert isinstance(record, Request)
            self._running[record.request_id] = asyncio.create_task(self._serve(record), name=record.request_id)

    async def _serve(self, record: Request) -> None:
        request_id, in_flight, stream = record.request_id, self._pipeline.in_flight, object()
        in_flight.book.open(request_id, Attempt(0, 0), stream)
        asked = GenerationRequest(
            request_id, record.prompt_ids, record.sampling, keyed=record.keyed, digest=record.digest
        )
        tokens: list[Token] = []
        end = Finished(FinishReason.CANCELLED, len(record.prompt_ids), 0)
        try:
            async for event in self._generator.generate(asked):
                if isinstance(event, Finished):
                    end = event
                else:
                    tokens.append(event)
                    in_flight.add(request_id, stream, [event])
        except asyncio.CancelledError:
            pass
        del self._running[request_id]
        outcome = Outcome(
            epoch=0,
            request_id=request_id,
            reason=end.reason,
            message=end.error or "",
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=pack_logprobs(tokens),
            digest=record.digest,
            keyed=record.keyed,
            prompt_tokens=end.prompt_tokens,
            approximated=end.approximated,
            prompt_logprobs=pack(end.prompt_logprobs or ()),
        )
        await self._log.append(JOURNAL, encode(outcome), partition=0)


@asynccontextmanager
async def pipeline_to(generator: ScriptedGenerator, **config: Any) -> AsyncIterator[Pipeline]:
    """A started Pipeline whose requests ``generator`` answers. ``config``: fields of PipelineConfig."""
    async with MemoryLog(MemoryBroker()) as log:
        await log.ensure(all_topics(Topics(request_partitions=1)))
        await log.append(JOURNAL, encode(Claim(scheduler="s", read_to=0)), partition=0)
        directory: Any = _OneWorker(generator)
        pipeline = Pipeline(PipelineConfig(**config), instance="g", log=log, directory=directory)
        await pipeline.start()
        pool = asyncio.create_task(_Pool(pipeline, log, generator).run(), name="pool")
        try:
            yield pipeline
        finally:
            await pipeline.stop()
            pool.cancel()
            await asyncio.gather(pool, return_exceptions=True)
