"""Points of the sweep, served by the real engine: what the replay says of them is worth as much as it agrees."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from greenroom.coe.computing.inputs import Input
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.coe.serving.selection import Selection
from greenroom.coe.serving.serve_calls import Call, serve_calls
from greenroom.coe.simulation.simulate import Way
from greenroom.core.coe_profile import CoeProfile, dump_coe_profile
from greenroom.core.errors import BudgetTooSmall, GreenroomError
from greenroom.profiling.coe.config import CoeProfileConfig
from greenroom.profiling.coe.replayed_throughput import Board, burst_of
from greenroom.profiling.coe.sample_inputs import Samples, inputs_of

Serve = Callable[[int, int], float]
"""Requests a second of so many executors, of whose memory experts get so many bytes; 0 where that can not run."""


def on_engine(
    collaboration: Collaboration,
    config: CoeProfileConfig,
    board: Board,
    profile: CoeProfile,
    samples: Samples | None,
    *,
    dtype: str = "auto",
    cache_dir: Path | None = None,
) -> Serve:
    """Serves the board's burst, as it is replayed: requests a second of so many executors, of whose memory experts get
    so many bytes.

    A request goes where its results lead. So paths are those of the replay where edges have no conditions, or where
    samples come with their experts; else they are the experts' own. Raises GreenroomError if requests fail.
    """

    def serve(executors: int, expert_bytes: int) -> float:
        calls = calls_of(collaboration, burst_of(board, executors), samples, config.seed)
        with tempfile.TemporaryDirectory(prefix="greenroom-coe-") as made:
            file = Path(made) / "profile.json"
            file.write_bytes(dump_coe_profile(profile))
            serving = ServingConfig(
                file=collaboration.file,
                selection=Selection(config.scheduling),
                expert_memory=str(expert_bytes),
                expert_share=expert_bytes / config.memory_bytes if expert_bytes < config.memory_bytes else None,
                executors=executors,
                profile=file,
                dtype=dtype,
                cache_dir=cache_dir,
                offline=True,
                progress=False,
            )
            try:
                runtime = CollaborationRuntime(serving)
            except BudgetTooSmall:
                return 0.0
            with runtime:
                answers = serve_calls(runtime.engine, calls)
        failed = [one.error for one in answers.outcomes if one.error is not None]
        if failed:
            raise GreenroomError(f"{len(failed)} of {len(calls)} requests have failed: {failed[0]}") from failed[0]
        return answers.per_s

    return serve


def calls_of(collaboration: Collaboration, ways: Sequence[Way], samples: Samples | None, seed: int) -> list[Call]:
    """A call for each way, with a value of the router that leads to its first expert.

    Its input is a sample that goes the same way, if samples say where they go; else one that the expert takes.
    """
    graph = collaboration.graph
    values = {graph.first(value): value for value in reversed(graph.values)}
    inputs: dict[int | tuple[int, ...], Iterator[Input]] = {}
    by_way = _by_way(samples, {name: key for key, name in enumerate(graph.names)})
    calls = []
    for way in ways:
        first = way.experts[0]
        key: int | tuple[int, ...] = way.experts if way.experts in by_way else first
        if key not in inputs:
            own = by_way.get(way.experts) or inputs_of(collaboration.experts[first], samples, None, seed)
            inputs[key] = itertools.cycle(own)
        calls.append(Call(way.arrives_ms, next(inputs[key]), values.get(first, "")))
    return calls


def _by_way(samples: Samples | None, keys: Mapping[str, int]) -> dict[tuple[int, ...], list[Input]]:
    """Inputs by their experts. Where not every sample says so, they can not be told apart: then none."""
    found: dict[tuple[int, ...], list[Input]] = {}
    if samples is None or len(samples.paths) != len(samples.images) + len(samples.texts):
        return found
    if samples.images and samples.texts:
        return found
    inputs: Sequence[Input] = samples.images or samples.texts
    for names, given in zip(samples.paths, inputs, strict=True):
        if all(name in keys for name in names):
            found.setdefault(tuple(keys[name] for name in names), []).append(given)
    return found
