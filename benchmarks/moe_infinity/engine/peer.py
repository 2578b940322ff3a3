"""accelerate's ``disk_offload`` as a server of batches. Runs within a child process."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.engine.peer_arms import DiskOffloadArm

SYSTEM = f"{__name__}:DiskOffloadServer"


class DiskOffloadServer(DiskOffloadArm):
    """A batch goes on for its longest answer; a request has its last token when the forward that makes it is done, and
    not only when the batch ends.
    """

    def __init__(self, model: str, offload_folder: str) -> None:
        super().__init__(model, offload_folder)
        self._forwards: list[float] = []
        self.model.register_forward_hook(lambda *_: self._forwards.append(time.perf_counter()))

    def run(self, prompts: list[list[int]], lengths: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As ever; ``inside``: the seconds of each prompt, where they run one by one."""
        self._forwards.clear()
        began = time.perf_counter()
        turn = super().run(prompts, lengths, *args, **kwargs)
        ends = [self._forwards[last - 1] for last in accumulate(lengths)] if len(self._forwards) == sum(lengths) else []
        spent = [end - begin for begin, end in pairwise((began, *ends))]
        return {**turn, "inside": {str(place): seconds for place, seconds in enumerate(spent)}}

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """All prompts as one batch; a ``ServedTurn``."""
        self._forwards.clear()
        began = time.perf_counter()
        turn = super().run(prompts, lengths, concurrency=len(prompts))
        return {**turn, "request_seconds": [self._forwards[length - 1] - began for length in lengths]}
