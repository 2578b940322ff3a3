"""What is replayed on: this machine with the experts of the real runs, and the paper's models and disks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.coserve.boards import Task, memory_of
from benchmarks.coserve.costs import Costs, ModelCosts
from greenroom.core.coe_profile import ArchitectureCosts, BatchTimes
from greenroom.core.units import GIB
from greenroom.profiling.coe.replayed_throughput import Board

LOADING_SHARE: Final = 0.9
"""Of a cold request on the paper's machines (section 1, Fig. 1)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``every``: the model of all experts; None: each its role's. ``disk``: bytes a second; batches take as long as to
    make loading ``LOADING_SHARE`` of a cold request then. None: as measured. ``memory``: bytes; None: a tenth of all
    experts'."""

    name: str
    every: str | None = None
    disk: float | None = None
    memory: int | None = None

    def board(self, task: Task, costs: Costs) -> Board:
        if self.disk is None:
            return task.on(costs, every=self.every)
        models = {role: on_disk(own, self.disk) for role, own in costs.models.items()}
        return task.on(msgspec.structs.replace(costs, models=models), every=self.every)

    def memory_of(self, board: Board) -> int:
        return memory_of(board) if self.memory is None else self.memory


HERE: Final = Machine("ResNet-18, this machine")
MACHINES: Final = (
    HERE,
    Machine("ResNet-101, this machine", "resnet-101"),
    Machine("ResNet-101, 530 MB/s", "resnet-101", 530e6),
    Machine("ResNet-101, 530 MB/s, 28 GB", "resnet-101", 530e6, 28 * GIB),
    Machine("ResNet-101, 3 GB/s", "resnet-101", 3e9),
    Machine("ResNet-101, 3 GB/s, 24 GB", "resnet-101", 3e9, 24 * GIB),
)
"""The paper's have an SSD of 530 MB/s and one of 3 GB/s; 12 GB of the GPU's memory and 16 of the CPU's, and 24 GB."""


def on_disk(own: ModelCosts, bytes_a_second: float) -> ModelCosts:
    """Times of batches keep their proportions."""
    load_ms = 1000 * own.record_bytes / bytes_a_second
    alone = own.batches.by_executors[1].ms_of(1)
    return _scaled(own, load_ms, (1 - LOADING_SHARE) / LOADING_SHARE * load_ms / alone)


def _scaled(own: ModelCosts, load_ms: float, factor: float) -> ModelCosts:
    batches = ArchitectureCosts(
        load_ms=load_ms,
        bytes_by_batch=own.batches.bytes_by_batch,
        by_executors={count: _times(times, factor) for count, times in own.batches.by_executors.items()},
    )
    return ModelCosts(
        record_bytes=own.record_bytes, torch_ms=own.torch_ms * load_ms / own.batches.load_ms, batches=batches
    )


def _times(times: BatchTimes, factor: float) -> BatchTimes:
    return BatchTimes(
        ms_by_batch={size: factor * ms for size, ms in times.ms_by_batch.items()},
        request_ms=factor * times.request_ms, batch_ms=factor * times.batch_ms, most=times.most,
    )  # fmt: skip


def loading_share(own: ModelCosts) -> float:
    """Of a cold request: its expert is loaded, then it is computed alone."""
    return own.batches.load_ms / (own.batches.load_ms + own.batches.by_executors[1].ms_of(1))


def torch_load_ms(task: Task, costs: Costs, machine: Machine, board: Board) -> Sequence[float]:
    """What `from_pretrained` takes, by expert: as measured, or as much longer than our loading as it is here."""
    roles = task.roles if machine.every is None else [machine.every] * len(board.bytes_of)
    return [
        one.load_ms * costs.models[role].torch_ms / costs.models[role].batches.load_ms
        for one, role in zip(board.costs, roles, strict=True)
    ]
