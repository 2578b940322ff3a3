"""BigMoeOnEdge as one more peer: the stream that it picks, what it takes, and a run in as much memory as the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.children.processes import ArmFailed
from benchmarks.peers.arms import Answer, Arm
from benchmarks.peers.batch import Batch
from benchmarks.peers.streaming_llama import SAMPLED
from benchmarks.peers.streaming_settings import IO_THREADS, WHOLE_MODEL_MIB, StreamingSettings

if TYPE_CHECKING:
    from benchmarks.peers.measurement import Subject

_KERNEL_BYTES = 16 * 2**20
"""Page tables and the like, which its cgroup counts too, and what comes between two looks at it. No expert is kept in
them: they are read past the page cache."""


@dataclass(frozen=True)
class StreamingPeer:
    """``binary``: its ``bmoe-cli``. ``context``: its most tokens."""

    arm: Arm
    binary: str
    threads: int
    context: int

    def reads(self, model: Path) -> bool:
        """It takes text, and only the GGUF files of the benchmark spell tokens."""
        return model.suffix == ".gguf"

    def sampled(self, subject: Subject, tokens: int) -> Batch:
        """The subject's stream, whose first sequence goes on as this peer picks. Raises ArmFailed."""
        first = subject.stream.first(1, tokens)
        answer = self._run(subject, StreamingSettings(threads=self.threads), first, WHOLE_MODEL_MIB, SAMPLED)
        return replace(subject.stream, forced=(answer.batches[0].greedy[0], *subject.stream.forced[1:]))

    def greedy(self, subject: Subject, settings: StreamingSettings, tokens: int) -> Batch:
        """The first prompt and what it answers where nothing is drawn. Raises ArmFailed."""
        first = subject.stream.first(1, tokens)
        answer = self._run(subject, settings, first, subject.expert_mib, ())
        return replace(first, forced=answer.batches[0].greedy)

    def own_bytes(self, subject: Subject, tokens: int, ample_bytes: int) -> int:
        """What it takes beside its cache of experts, its copy of the dense weights included. Raises ArmFailed."""
        start = StreamingSettings(threads=self.threads, io_threads=max(IO_THREADS))  # each lane has a buffer
        first = subject.stream.first(1, tokens)
        told = self._run(subject, start, first, subject.expert_mib, SAMPLED, ample_bytes).told
        return int(told["own_bytes"]) + _KERNEL_BYTES

    def third(self, subject: Subject, settings: StreamingSettings, tokens: int) -> Answer:
        """As many bytes for experts as greenroom has, in a cgroup of these and of what it takes itself. Raises
        ArmFailed, also where it picks other tokens than the others were given."""
        first = subject.stream.first(1, tokens)
        limit = subject.streaming_limit
        if limit is None:
            raise ArmFailed("what it takes beside the experts is not known: the runs that tell failed")
        answer = self._run(subject, settings, first, subject.expert_mib, SAMPLED, limit)
        if answer.batches[0].greedy != first.forced:
            raise ArmFailed(f"it picked other tokens than with all experts in memory: {settings.describe()}")
        return answer

    def _run(
        self, subject: Subject, settings: StreamingSettings, batch: Batch, cache_mib: int, sampling: Sequence[str],
        limit_bytes: int | None = None,
    ) -> Answer:  # fmt: skip
        model = subject.checkpoint
        job = {"binary": self.binary, "flags": settings.flags(cache_mib, self.context), "sampling": list(sampling)}
        return self.arm.run(model, [batch], job, limit_bytes=limit_bytes, cold=[model])
