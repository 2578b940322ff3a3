"""What the simulation says of a real row: the same dispatcher, policy, memory and pieces, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.coserve.boards import role_of
from benchmarks.coserve.real.board import RealBoard
from benchmarks.coserve.settings import Setting
from greenroom.coe.computing.batch_size import batch_size
from greenroom.coe.simulation.simulate import Served, Way, simulate
from greenroom.coe.simulation.simulated_memory import SimulatedLink
from greenroom.profiling.coe.replayed_throughput import Scheme, assembled, batch_ms_of


def foretold(
    real: RealBoard, scheme: Scheme, setting: Setting, ways: Sequence[Way], *, torch: bool = False
) -> Served:
    """``torch``: experts come by `from_pretrained`."""
    board, count = real.board, setting.executors
    times = [costs.by_executors[count] for costs in board.costs]
    free = (real.memory - setting.expert_bytes) // count
    most = {
        expert: batch_size(own.most, free, costs.bytes_by_batch, own.most)
        for expert, (own, costs) in enumerate(zip(times, board.costs, strict=True))
    }
    if torch:
        loads = [real.costs.models[role_of(name)].torch_ms for name in real.graph.names]
        link = SimulatedLink(loads.__getitem__)
    else:
        loads = [real.link.ms_a_byte * size for size in board.bytes_of]
        link = SimulatedLink(first_time_dearer(loads, [real.link.check_ms_a_byte * size for size in board.bytes_of]))
    dispatcher, memories = assembled(board, scheme, count, setting.expert_bytes, link, times, most, loads)
    return simulate(dispatcher, memories, link, batch_ms_of(times), ways)


def first_time_dearer(loads: Sequence[float], check: Sequence[float]) -> Callable[[int], float]:
    """What each read of an expert takes. Its checksum is compared when it is read for the first time."""
    seen: set[int] = set()

    def load_ms(expert: int) -> float:
        first = expert not in seen
        seen.add(expert)
        return loads[expert] + (check[expert] if first else 0.0)

    return load_ms
