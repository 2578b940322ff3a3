"""From a collaboration and its pack to its profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Preparations, longest_text
from greenroom.coe.graph.expert_graph import Shares
from greenroom.coe.loading.architecture import Architecture, build_architectures
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.core.coe_profile import (
    FORMAT,
    ArchitectureCosts,
    ArchitectureProfile,
    CoeProfile,
    ExecutorsProfile,
    MemoryTrial,
)
from greenroom.core.errors import BudgetTooSmall, GreenroomError
from greenroom.core.units import format_bytes
from greenroom.experts.copying import disk_calibration
from greenroom.experts.copying.disk_calibration import MeasuredLink
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.profiling.coe.batch_fit import batch_times
from greenroom.profiling.coe.batch_memory import measure_bytes
from greenroom.profiling.coe.batch_timing import Subject, measure_times, threads_of, warm_up
from greenroom.profiling.coe.config import CoeProfileConfig
from greenroom.profiling.coe.decay_window import Choice, choose
from greenroom.profiling.coe.replayed_throughput import Board, drawn_paths, replay
from greenroom.profiling.coe.sample_inputs import Samples, inputs_of
from greenroom.profiling.coe.served_throughput import Serve, on_engine

OnProgress = Callable[[str, int, int], None]
"""What is done, how many steps of it are, and of how many."""
CPU: Final = "cpu"
_LINK_S: Final = 0.5
_AS_GOOD: Final = 0.99
"""More executors have to serve more than that allows."""


@dataclass(frozen=True, slots=True)
class Here:
    """The machine. ``cores``: that this process may use."""

    name: str
    cores: int


def profile_collaboration(
    collaboration: Collaboration,
    config: CoeProfileConfig,
    here: Here,
    usage: Shares,
    samples: Samples | None,
    notes: Mapping[str, str],
    on_progress: OnProgress,
    *,
    dtype: str = "auto",
    cache_dir: Path | None = None,
    serves: bool = False,
) -> CoeProfile:
    """Measures on the CPU, then replays. ``usage[N]``: the probability that a request needs each expert.

    ``serves``: the points that matter are served by the real engine too.

    Raises GreenroomError: BudgetTooSmall if no executor could run every expert; what is wrong with an expert, by name.
    """
    architectures = build_architectures(collaboration, dtype)
    with closing(PackFile.open(ensure_pack(collaboration, architectures, cache_dir))) as pack:
        costs = measure_costs(collaboration, architectures, pack, config, here, samples, on_progress)
    sizes = [architectures[expert.architecture].layout.nbytes for expert in collaboration.experts]
    board = Board(
        collaboration.graph,
        sizes,
        [costs[expert.architecture] for expert in collaboration.experts],
        usage,
        drawn_paths(collaboration.graph, config.requests, config.seed),
    )
    trials = try_executors(board, config, replayed(board, config), on_progress)
    best = best_count(trials)
    names = collaboration.graph.names
    made = CoeProfile(
        format=FORMAT,
        version=1,
        collaboration=collaboration.name,
        machine=here.name,
        architectures={
            key: ArchitectureProfile(
                model_class=collaboration.experts[experts[0]].model_class,
                record_bytes=architectures[key].layout.nbytes,
                dtype=str(architectures[key].dtype).removeprefix("torch."),
            )
            for key, experts in collaboration.of_architecture().items()
        },
        experts={name: expert.architecture for name, expert in zip(names, collaboration.experts, strict=True)},
        usage={name: float(share) for name, share in zip(names, usage, strict=True)},
        kinds={
            CPU: ExecutorsProfile(
                executors=best,
                memory_bytes=config.memory_bytes,
                scheduling=config.scheduling,
                threads_by_executors={count: threads_of(here.cores, count) for count in trials},
                architectures=costs,
                trials=trials,
            )
        },
        notes=notes,
    )
    if not serves:
        return made
    really = on_engine(collaboration, config, board, made, samples, dtype=dtype, cache_dir=cache_dir)
    served = serve_really(board, trials[best], best, really, on_progress)
    own = msgspec.structs.replace(made.kinds[CPU], trials={**trials, best: served})
    return msgspec.structs.replace(made, kinds={CPU: own})


def replayed(board: Board, config: CoeProfileConfig) -> Serve:
    """What the board's requests are served with on a virtual clock."""

    def serve(executors: int, expert_bytes: int) -> float:
        served = replay(board, config.scheduling, executors, config.memory_bytes, expert_bytes)
        return 0.0 if served is None else served.per_s

    return serve


def try_executors(
    board: Board, config: CoeProfileConfig, serve: Serve, on_progress: OnProgress
) -> dict[int, MemoryTrial]:
    """By number of executors: how they best divide the memory, and what they serve then.

    Numbers for which the memory is too small are left out. Raises BudgetTooSmall if that is every one.
    """
    counts = [count for count in config.counts if board.fitting(config.memory_bytes, count)]
    if not counts:
        raise BudgetTooSmall(
            f"--memory: {format_bytes(config.memory_bytes)} do not hold the largest expert and what one request takes; "
            f"give at least {format_bytes(board.least_bytes(1))}"
        )
    trials = {}
    for done, count in enumerate(counts):
        on_progress("replaying", done, len(counts))
        found = choose_residents(board, config, serve, count)
        residents = found.drawn if config.draws else found.residents
        trials[count] = MemoryTrial(
            residents=residents,
            expert_bytes=board.expert_bytes(residents, count),
            per_s=found.per_s[residents],
            window=(found.window.lower, found.window.upper),
            drawn=found.drawn,
            per_s_by_residents=dict(sorted(found.per_s.items())),
        )
    on_progress("replaying", len(counts), len(counts))
    return trials


def choose_residents(board: Board, config: CoeProfileConfig, serve: Serve, executors: int) -> Choice:
    """The decay window over what fits; and what fits beside full batches, the other strategy of section 4.4."""
    return choose(
        board.fitting(config.memory_bytes, executors),
        lambda residents: serve(executors, board.expert_bytes(residents, executors)),
        config.seed,
        also=filter(None, [board.fitting_beside_full_batches(config.memory_bytes, executors)]),
        initial_percent=config.initial_percent,
    )


def serve_really(
    board: Board, trial: MemoryTrial, executors: int, really: Serve, on_progress: OnProgress
) -> MemoryTrial:
    """The trial with the points that matter served by a real engine: fewest, window, drawn, chosen."""
    points = sorted({min(trial.per_s_by_residents), trial.window[1], trial.drawn, trial.residents})
    served = {}
    for done, residents in enumerate(points):
        on_progress("serving", done, len(points))
        served[residents] = really(executors, board.expert_bytes(residents, executors))
    on_progress("serving", len(points), len(points))
    return msgspec.structs.replace(trial, served_per_s=served)


def best_count(trials: Mapping[int, MemoryTrial]) -> int:
    """The fewest executors that serve as much as any others, to 1 %."""
    best = max(trial.per_s for trial in trials.values())
    return min(count for count, trial in trials.items() if trial.per_s >= _AS_GOOD * best)


def measure_costs(
    collaboration: Collaboration,
    architectures: Mapping[str, Architecture],
    pack: PackFile,
    config: CoeProfileConfig,
    here: Here,
    samples: Samples | None,
    on_progress: OnProgress,
) -> dict[str, ArchitectureCosts]:
    """By architecture, on the CPU, with each number of executors that ``config`` tries."""
    preparations = Preparations()
    counts, by_key = config.counts, collaboration.of_architecture()
    computers = [ExpertComputer(collaboration, architectures, preparations) for _ in range(max(counts))]
    subjects = [
        _subject(collaboration, architectures[key], experts[: max(counts)], pack, samples, config.seed)
        for key, experts in by_key.items()
    ]
    on_progress("link", 0, 1)
    link = measured_link(pack)
    on_progress("link", 1, 1)
    sizes: dict[str, list[int]] = {}
    memory: dict[str, tuple[dict[int, int], dict[int, int]]] = {}
    for done, subject in enumerate(subjects):
        on_progress("memory", done, len(subjects))
        with _named(collaboration, subject):
            sizes[subject.key] = warm_up(computers[0], subject, config.timing)
        largest = _with_largest_images(collaboration, computers[0], subject, by_key[subject.key], config.seed)
        with _named(collaboration, largest):
            memory[subject.key] = measure_bytes(computers[0], largest, sizes[subject.key])
    on_progress("memory", len(subjects), len(subjects))
    turns = config.timing.rounds * len(counts) * sum(map(len, sizes.values()))
    done_turns = iter(range(1, turns + 1))
    times = measure_times(
        computers,
        subjects,
        sizes.__getitem__,
        counts,
        lambda count: threads_of(here.cores, count),
        config.timing,
        lambda: on_progress("batches", next(done_turns), turns),
    )
    return {
        key: ArchitectureCosts(
            load_ms=1000 * link.seconds(architectures[key].layout.nbytes),
            bytes_by_batch=memory[key][0],
            peak_by_batch=memory[key][1],
            by_executors={count: batch_times(by_size) for count, by_size in by_count.items()},
        )
        for key, by_count in times.items()
    }


def measured_link(pack: PackFile) -> MeasuredLink:
    """Of the pack's calibration. A pack so small that none is kept is measured shortly. Raises PackError."""
    kept = disk_calibration.load_or_measure(pack)
    return kept or disk_calibration.measure(pack, (disk_calibration.SIMPLEST,), budget_s=_LINK_S)


def _subject(
    collaboration: Collaboration,
    architecture: Architecture,
    experts: Sequence[int],
    pack: PackFile,
    samples: Samples | None,
    seed: int,
) -> Subject:
    checkpoint = collaboration.experts[experts[0]]
    inputs = inputs_of(checkpoint, samples, longest_text(checkpoint.folder, architecture.model), seed)
    return Subject(architecture.key, tuple(experts), tuple(_weights(pack, expert) for expert in experts), inputs)


def _with_largest_images(
    collaboration: Collaboration, computer: ExpertComputer, subject: Subject, experts: Sequence[int], seed: int
) -> Subject:
    """What memory is measured with. It must hold for images that are larger than samples, of each expert of the
    architecture; their processors may differ. Texts are the subject's own.
    """
    pixels = {expert: math.prod(size) for expert in experts if (size := computer.largest(expert)) is not None}
    if not pixels:
        return subject
    expert = max(pixels, key=pixels.__getitem__)
    inputs = inputs_of(collaboration.experts[expert], None, None, seed)
    return Subject(subject.key, (expert,), subject.weights[:1], inputs)


def _weights(pack: PackFile, expert: int) -> ExpertWeights:
    """Raises PackError, OSError."""
    layout = pack.manifest.layers[expert].layout
    record = page_aligned(layout.nbytes)
    pack.read_into(expert, 0, record)
    return layout.views(torch.frombuffer(record, dtype=torch.uint8))


@contextmanager
def _named(collaboration: Collaboration, subject: Subject) -> Iterator[None]:
    """Errors of an expert or of its inputs get the expert's name."""
    try:
        yield
    except GreenroomError as error:
        name = collaboration.graph.names[subject.experts[0]]
        raise GreenroomError(f"{collaboration.file}: experts.{name} can not be measured: {error}") from error
