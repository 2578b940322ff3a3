"""greenroom as an arm: one LLM at one budget under one policy. Runs within a child process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.arms.disk_link import DiskLink
from benchmarks.harness.arms.filled_memory import filled
from benchmarks.harness.arms.routing_record import RoutingRecord
from benchmarks.harness.arms.time_by_part import Inside
from benchmarks.harness.arms.upload_link import UploadLink
from benchmarks.harness.children.process_memory import peak_bytes, reset_peak
from benchmarks.harness.turn import Turn, timed
from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.generation import SamplingParams
from greenroom.core.units import MIB
from greenroom.llm import LLM
from greenroom.worker.generation_engine import ArtifactVersion

KV_MEMORY = "64MiB"
"""Stated, since what ``auto`` takes depends on what else runs on the machine."""

READ_BYTES, READ_PASSES = 512 * MIB, 8


class GreenroomArm:
    """``share``: of the experts that the device tier holds, such as ``33%``, or bytes. ``max_running``: most requests
    at once.

    ``oracle``: a stream that runs once under LRU, so that the engine then opens under Belady's policy, which knows
    ``oracle_turns`` runs of it to come. ``artifacts``: files that the policy predicts by, by kind. ``device``,
    ``host``: as the worker's ``device`` and ``host_memory``. ``experts_as``, ``dense_as``: as the worker's.
    """

    def __init__(
        self,
        model: str,
        share: str,
        policy: str,
        policy_options: dict[str, Any] | None = None,
        oracle: dict[str, Any] | None = None,
        oracle_turns: int = 0,
        max_running: int = 8,
        artifacts: dict[str, str] | None = None,
        device: str = "cpu",
        host: str = "auto",
        experts_as: str = "auto",
        dense_as: str = "auto",
    ) -> None:
        self._max_running = max_running
        self._settings: dict[str, Any] = {
            "max_running": max_running,
            "model": model, "expert_memory": share, "kv_memory": KV_MEMORY, "warm_start": False, "progress": False,
            "device": device, "host_memory": host, "experts_as": experts_as,
            "dense_as": dense_as,
        }  # fmt: skip
        options = dict(policy_options or {})
        if oracle is not None:
            options["future"] = self._recorded(oracle).future(oracle_turns)
            gc.collect()  # that engine's memory is not to count as this one's
        self._llm = filled(LLM(**self._settings, policy=policy, policy_options=options))
        for kind, path in (artifacts or {}).items():
            file = ARTIFACT_FILES[kind].read(Path(path))
            self._llm.worker.swap(self._llm.worker.prepare(file), ArtifactVersion.of(file))  # nothing runs yet
        worker = self._llm.worker
        self._link: DiskLink | UploadLink
        if worker.accelerator is None or worker.experts.host is None:
            self._link = DiskLink(worker.pack.path, worker.plan.mean_expert_bytes)
        else:
            self._link = UploadLink(worker.accelerator, worker.plan.mean_expert_bytes)

    def _recorded(self, stream: dict[str, Any]) -> RoutingRecord:
        with LLM(**self._settings, policy="lru") as llm:
            record = RoutingRecord(llm.worker.experts.catalogue)
            llm.worker.experts.listener = record
            _generate(llm, **stream, at_once=1)
            return record

    def describe(self) -> dict[str, Any]:
        plan = self._llm.worker.plan
        return {
            "announced_bytes": plan.total,
            "base_bytes": plan.base,
            "dense_bytes": plan.dense,
            "expert_bytes": plan.mean_expert_bytes,
            "slots": plan.device_slots,
            "experts_bytes": plan.expert_memory,
            "experts": plan.experts,
            "layers": self._llm.worker.experts.catalogue.layers,
            "files": [str(self._llm.worker.pack.path)],
            "direct": self._llm.worker.pack.direct,
        }

    def run(
        self,
        prompts: list[list[int]],
        lengths: list[int],
        concurrency: int = 1,
        *,
        record: bool = False,
        inside: bool = False,
        link: bool = False,
    ) -> dict[str, Any]:
        """The stream: one request after the other, or ``max_running`` at once, the next joining when one has ended.

        ``record``: look at its routing too. ``inside``: at where its time goes, which costs a little. ``link``: measure
        it before and after.
        """
        worker = self._llm.worker
        recorder = RoutingRecord(worker.experts.catalogue) if record else None
        worker.experts.listener = recorder
        speeds = [self.link()] if link else []
        before = self._counts()
        watch = Inside(self._llm) if inside else None
        reset_peak()
        try:
            with timed() as seconds:
                ids = _generate(self._llm, prompts, lengths, self._at_once(concurrency, len(prompts)))
        finally:
            worker.experts.listener = None
            if watch is not None:
                watch.remove()
        look_ups, hits, prefetches, used, stall, steps, moved = (
            b - a for a, b in zip(before, self._counts(), strict=True)
        )
        peak = peak_bytes()
        speeds += [self.link()] if link else []
        plan = worker.plan
        return Turn(
            seconds=seconds[0],
            tokens=sum(map(len, ids)),
            ids=ids,
            peak_bytes=peak,
            bytes_moved=int(moved),
            look_ups=int(look_ups),
            hits=int(hits),
            prefetches=int(prefetches),
            prefetches_used=int(used),
            stall_seconds=stall,
            steps=int(steps),
            link=sum(speeds) / len(speeds) if speeds else None,
            trace=None if recorder is None else recorder.trace(plan.device_slots, plan.dense),
            inside={} if watch is None else watch.seconds(seconds[0]),
        ).as_json()

    def _counts(self) -> tuple[float, ...]:
        """What adds up, until now. Bytes are those of the links that end in the device tier."""
        experts = self._llm.worker.experts
        counters = experts.refresh_counters()
        moved = counters.bytes_by_link
        if self._llm.worker.accelerator is not None and experts.host is not None:
            moved = {link: count for link, count in moved.items() if link != "disk"}
        return (
            counters.lookups, counters.hits, counters.prefetches, counters.prefetches_used, counters.stall_seconds,
            counters.steps, sum(moved.values()),
        )  # fmt: skip

    def _at_once(self, concurrency: int, prompts: int) -> int:
        """How many are submitted at once; the batch loop holds back what is more than may run."""
        if concurrency not in (1, self._max_running):
            raise ValueError(f"this arm runs 1 or {self._max_running} requests at once, not {concurrency}")
        return prompts if concurrency > 1 else 1

    def link(self) -> float:
        """Bytes/s now of the link that fills the device tier: the disk's, or a host tier's to a GPU."""
        return self._link.bytes_per_s()

    def memory_read(self) -> float:
        """Bytes/s at which all cores read the memory: the best of a few passes over more than the caches hold."""
        words = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
        speeds = []
        for _ in range(READ_PASSES):
            with timed() as seconds:
                words.sum()
            speeds.append(words.nbytes / seconds[0])
        return max(speeds)

    def close(self) -> None:
        self._link.close()
        self._llm.close()


def _generate(llm: LLM, prompts: list[list[int]], lengths: list[int], at_once: int) -> list[list[int]]:
    sampling = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    ids: list[list[int]] = []
    for first in range(0, len(prompts), at_once):
        chosen = slice(first, first + at_once)
        done = llm.generate(prompts[chosen], sampling[chosen], progress=False)
        ids += [list(completion.token_ids) for completion in done]
    return ids
