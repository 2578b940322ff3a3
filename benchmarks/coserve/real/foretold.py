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
    real: RealBoard,
    scheme: Scheme,
    setting: Setting,
    ways: Sequence[Way],
    *,
    decide_ms: float = 0.0,
    torch: bool = False,
) -> Served:
    """``decide_ms``: of the deciding thread's work a stage. ``torch``: experts come by `from_pretrained`.

    Costs of batches are those with all cores for executors. So what reads, checks and decides takes of the cores, as a
    first replay has it, makes batches so much longer in a second.
    """
    served = _replayed(real, scheme, setting, ways, 1.0, torch=torch)
    if torch:
        return served
    mean = sum(real.board.bytes_of) / len(real.board.bytes_of)
    stages = sum(len(way.experts) for way in ways)
    taken_ms = served.loads * mean * real.link.cpu_ms_a_byte + stages * decide_ms
    return _replayed(real, scheme, setting, ways, slower_by(taken_ms, served, setting.executors))


def slower_by(taken_ms: float, served: Served, executors: int) -> float:
    """How much longer batches take if ``taken_ms`` of a core's work is done beside them. Executors have all cores.

    A batch waits for the slowest of its executor's threads, so what one core loses is lost for all of them. An executor
    that is idle yields its cores, so only that part counts for which all of them compute.
    """
    busy = min(1.0, served.computed_ms / executors / served.total_ms)
    share = min(0.5, taken_ms / served.total_ms / executors)
    return 1 / (1 - share * busy)


def _replayed(
    real: RealBoard, scheme: Scheme, setting: Setting, ways: Sequence[Way], slower: float, *, torch: bool = False
) -> Served:
    board, count = real.board, setting.executors
    times = [costs.by_executors[count] for costs in board.costs]
    free = (real.memory - setting.expert_bytes) // count
    most = {
        expert: batch_size(own.most, free, costs.bytes_by_batch, own.most)
        for expert, (own, costs) in enumerate(zip(times, board.costs, strict=True))
    }
    if torch:
        ours = real.costs.models["type"].torch_ms
        loads = [real.torch_ms * real.costs.models[role_of(name)].torch_ms / ours for name in real.graph.names]
        link = SimulatedLink(loads.__getitem__)
    else:
        loads = [real.link.ms_a_byte * size for size in board.bytes_of]
        link = SimulatedLink(first_time_dearer(loads, [real.link.check_ms_a_byte * size for size in board.bytes_of]))
    dispatcher, memories = assembled(board, scheme, count, setting.expert_bytes, link, times, most, loads)
    batch_ms = batch_ms_of(times)
    return simulate(dispatcher, memories, link, lambda expert, size: slower * batch_ms(expert, size), ways)


def first_time_dearer(loads: Sequence[float], check: Sequence[float]) -> Callable[[int], float]:
    """What each read of an expert takes. Its checksum is compared when it is read for the first time."""
    seen: set[int] = set()

    def load_ms(expert: int) -> float:
        first = expert not in seen
        seen.add(expert)
        return loads[expert] + (check[expert] if first else 0.0)

    return load_ms
