"""accelerate's ``disk_offload`` as a server of batches. Runs within a child process."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.harness.arms.transformers_arms import DiskOffloadArm

SYSTEM = f"{__name__}:DiskOffloadServer"


class DiskOffloadServer(DiskOffloadArm):
    """A batch lasts as long as its longest answer. A request ends with the forward that makes its last token, which may
    be before the batch does."""

    def __init__(self, model: str, offload_folder: str) -> None:
        super().__init__(model, offload_folder)
        self._began = 0.0  # when the first batch of a run did: what is set up before is not its
        self._forwards: list[float] = []
        self.model.register_forward_hook(lambda *_: self._forwards.append(time.perf_counter()))

    def run(self, prompts: list[list[int]], lengths: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As of the base class. ``inside``: the seconds of each prompt, if they run one by one."""
        turn = self._run(prompts, lengths, *args, **kwargs)
        ends = [self._forwards[last - 1] for last in accumulate(lengths)] if len(self._forwards) == sum(lengths) else []
        spent = [end - begin for begin, end in pairwise((self._began, *ends))]
        return {**turn, "inside": {str(place): seconds for place, seconds in enumerate(spent)}}

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """All prompts as one batch; a ``ServedTurn``."""
        turn = self._run(prompts, lengths, concurrency=len(prompts))
        return {**turn, "request_seconds": [self._forwards[length - 1] - self._began for length in lengths]}

    def _run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._forwards.clear()
        self._began = 0.0
        return super().run(*args, **kwargs)

    def _generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        self._began = self._began or time.perf_counter()
        return super()._generate(prompts, lengths)
