"""Predicted against real: the stall and the time that `greenroom replay` predicts of a run that is then measured.

    python -m benchmarks.replay_accuracy [--rounds 5] [--policy lru --policy next-use --policy look-ahead]

Engines of all policies at a third of the experts and one with all of them take turns within every round, on the widened
bundled model, one request at a time. Each round measures the link, takes the computing time of layers and experts from
the resident engine, and records the routing of the run that is predicted. A second prediction takes link and computing
from within the run. Its error is the simulation's own. The rest is the machine's, which changes from minute to minute
and when it reads and computes at once. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.arms.filled_memory import filled
from benchmarks.harness.inputs.checkpoints import widened
from benchmarks.harness.inputs.token_streams import Stream, task_stream
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.reporting.progress import each
from benchmarks.harness.reporting.statistics import Spread, spread_json
from greenroom.checkpoints.pack_cache import default_cache_dir
from greenroom.core.generation import SamplingParams
from greenroom.core.units import format_bytes
from greenroom.experts.copying.disk_calibration import measure
from greenroom.experts.engine import ExpertEngine
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving
from greenroom.llm import LLM
from greenroom.policies.base.events import Prediction, SequenceInfo, Step
from greenroom.replay import RoutingTrace, TraceRecorder
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedEngine, TimedReplay, TimedResult
from greenroom.replay.sweeps.sweep import PolicySpec
from greenroom.replay.traces.steps import TraceStep
from greenroom.worker.model.warm_start import first_residents

LINK_BUDGET_S = 0.4
_RATIOS = ("stall_ratio", "time_ratio", "stall_ratio_within", "time_ratio_within")


class Watch:
    """Wraps the methods of an engine and its pack: seconds of each step, of each expert with its rows, of each read."""

    def __init__(self, engine: ExpertEngine, pack: PackFile) -> None:
        self.steps: list[tuple[int, float, float]] = []  # rows, seconds, of these in experts or waiting
        self.experts: list[tuple[float, float]] = []
        self.reads: list[tuple[float, float, int]] = []  # begin, end, bytes
        self._in_experts = 0.0
        self._engine = engine
        self._read = pack.read_part
        pack.read_part = self._timed_read  # type: ignore[method-assign]
        self._step, self._routed = engine.step, engine.routed
        engine.step = self._timed_step  # type: ignore[method-assign, assignment]
        engine.routed = self._timed_routed  # type: ignore[method-assign]
        self._resident_addresses, self._layer_ran = engine.resident_addresses, engine.layer_ran
        engine.resident_addresses = self._timed_addresses  # type: ignore[method-assign]
        engine.layer_ran = self._timed_layer_ran  # type: ignore[method-assign]
        self._rows = 0
        self._all_began: float | None = None

    def clear(self) -> None:
        self.steps.clear()
        self.experts.clear()
        self.reads.clear()

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self.steps)

    @contextmanager
    def _timed_step(self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_], *told: Any) -> Iterator[None]:
        self._in_experts = 0.0
        self._rows = len(sequences)
        stalled = self._engine.counters.stall_seconds
        begin = time.perf_counter()
        with self._step(sequences, prefill, *told):
            yield
        seconds = time.perf_counter() - begin
        stalled = self._engine.counters.stall_seconds - stalled
        self.steps.append((len(sequences), seconds, self._in_experts + stalled))

    def _timed_read(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        begin = time.perf_counter()
        self._read(layer, expert, start, buffer)
        self.reads.append((begin, time.perf_counter(), len(buffer)))

    @contextmanager
    def _timed_routed(self, layer: int, picks: NDArray[np.int64]) -> Iterator[Iterator[tuple[int, ExpertWeights]]]:
        rows = np.bincount(picks.ravel())
        with self._routed(layer, picks) as landing:
            yield self._timed_landing(landing, rows)

    def _timed_landing(self, landing: Arriving, rows: NDArray[np.int64]) -> Iterator[tuple[int, ExpertWeights]]:
        for expert, weights in landing:
            begin = time.perf_counter()
            yield expert, weights
            seconds = time.perf_counter() - begin
            self._in_experts += seconds
            self.experts.append((int(rows[expert]), seconds))

    def _timed_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        addresses = self._resident_addresses(layer, picks)
        self._all_began = None if addresses is None else time.perf_counter()
        return addresses

    def _timed_layer_ran(self, layer: int, experts: int) -> None:
        """All of a layer's experts in one call, which began when they were handed over: each had its share."""
        began, self._all_began = self._all_began, None
        ended = time.perf_counter()
        self._layer_ran(layer, experts)
        if began is None:
            return
        seconds = ended - began
        self._in_experts += seconds
        picks = self._rows * int(self._engine.catalogue.top_k[layer])
        self.experts += [(picks / experts, seconds / experts)] * experts

    def link(self) -> LinkProfile:
        """What the reads since the last ``clear`` reached while any was under way."""
        busy, until = 0.0, 0.0
        for begin, end, _ in sorted(self.reads):
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        return LinkProfile(sum(nbytes for _, _, nbytes in self.reads) / busy)

    def profile(self, layers: int) -> ComputeProfile:
        """What a step computes, from the steps since the last ``clear``: of one row exactly, of more by a line through
        that point."""
        expert_s, row_s = _line(self.experts)
        layer_s, layer_row_s = _line([(rows, (seconds - inside) / layers) for rows, seconds, inside in self.steps])
        return ComputeProfile(layer_s=layer_s, layer_row_s=layer_row_s, expert_s=expert_s, row_s=row_s)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope over rows: through the mean of the points of one row, with the slope of the others in sum."""
    rows = np.array([count for count, _ in points], dtype=np.float64)
    seconds = np.array([taken for _, taken in points])
    one = float(seconds[rows == 1].mean()) if (rows == 1).any() else float(seconds.min())
    more = rows > 1
    slope = 0.0 if not more.any() else float((seconds[more] - one).sum() / (rows[more] - 1).sum())
    slope = min(max(0.0, slope), one)
    return one - slope, slope


class Recall(TraceRecorder):
    """A recorder that also compares what was predicted of a layer with what it then picked."""

    def __init__(self, engine: ExpertEngine) -> None:
        super().__init__(engine.catalogue)
        self.predicted = self.found = 0
        self._engine = engine
        self._named: dict[int, NDArray[np.bool_]] = {}
        self._answer = engine.predicted
        engine.predicted = self._hear  # type: ignore[method-assign]

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        super().sequence_queued(sequence)

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        named = self._named.pop(layer, None)
        if named is not None and len(named) == len(picks):
            self.predicted += picks.size
            self.found += int(np.take_along_axis(named, picks.astype(np.int64), axis=1).sum())
        super().layer_routed(step, layer, picks)

    def _hear(self, prediction: Prediction) -> None:
        start, stop = prediction.request.layers
        widths = self._engine.catalogue.experts_per_layer[start:stop]
        for layer, values in enumerate(np.split(prediction.values, np.cumsum(widths)[:-1], axis=1), start):
            self._named[layer] = values > 0.5  # the nearest prediction comes last
        self._answer(prediction)

    @property
    def share(self) -> float | None:
        return self.found / self.predicted if self.predicted else None


class Machine(NamedTuple):
    """What a prediction supposes of it."""

    link: LinkProfile
    compute: ComputeProfile


@dataclass
class Round:
    """One turn of one arm: what was measured, and the basis of its predictions, from around the run and from within."""

    trace: RoutingTrace
    seconds: float
    stall: float
    hits: int
    lookups: int
    moved: int
    within: Machine
    around: Machine | None = None


@dataclass
class Arm:
    """One policy at a third of the experts."""

    spec: PolicySpec
    llm: LLM
    watch: Watch
    recorder: Recall
    rounds: list[Round] = field(default_factory=list)

    def run(self, stream: Stream) -> None:
        engine = self.llm.worker.experts
        self.recorder.clear()
        self.watch.clear()
        before = engine.refresh_counters()
        stall, hits, lookups = before.stall_seconds, before.hits, before.lookups
        moved = before.bytes_by_link["disk"]
        _generate(self.llm, stream)
        after = engine.refresh_counters()
        self.rounds.append(
            Round(
                trace=self.recorder.trace(),
                seconds=self.watch.seconds,
                stall=after.stall_seconds - stall,
                hits=after.hits - hits,
                lookups=after.lookups - lookups,
                moved=after.bytes_by_link["disk"] - moved,
                within=Machine(self.watch.link(), self.watch.profile(engine.catalogue.layers)),
            )
        )

    def predict(self, reads: ReadSettings, machines: Sequence[Machine]) -> list[TimedResult]:
        """Every round, the first too: the cache and the policy go on from one to the next."""
        worker = self.llm.worker
        first = self.rounds[0]
        setup = TimedReplay(
            trace=first.trace,
            expert_bytes=worker.plan.mean_expert_bytes,
            disk=machines[0].link,
            compute=machines[0].compute,
            reads=reads,
            recall=self.recorder.share,
        )
        catalogue = setup.catalogue()
        slots = worker.plan.device_slots
        policy = self.spec.create(catalogue, lambda: _one_after_the_other(self.rounds))
        with TimedEngine(setup, policy, slots, first_residents(catalogue, [])[:slots]) as simulated:
            results = []
            offset = 0
            for turn, machine in zip(self.rounds, machines, strict=True):
                simulated.compute = machine.compute
                simulated.change_disk(machine.link)
                results.append(simulated.run(_renumbered(turn.trace.recorded_steps(), offset)))
                offset += turn.trace.sequences
        return results

    def row(self, reads: ReadSettings) -> dict[str, Any]:
        """Without the round that warms up."""
        around = self.predict(reads, [turn.around for turn in self.rounds if turn.around is not None])[1:]
        within = self.predict(reads, [turn.within for turn in self.rounds])[1:]
        turns = self.rounds[1:]
        rows = sum(turn.trace.tokens for turn in turns)
        ratios = {
            f"{name}{suffix}": spread_json(
                Spread.of([getattr(result, of) / real for result, real in zip(results, measured, strict=True)]), 3
            )
            for suffix, results in (("", around), ("_within", within))
            for name, of, measured in (
                ("stall_ratio", "stall_seconds", [turn.stall for turn in turns]),
                ("time_ratio", "seconds", [turn.seconds for turn in turns]),
            )
        }
        return {
            "policy": self.spec.label,
            "slots": self.llm.worker.plan.device_slots,
            "recall": None if self.recorder.share is None else round(self.recorder.share, 4),
            "rows": rows,
            "hit_rate": round(sum(turn.hits for turn in turns) / sum(turn.lookups for turn in turns), 4),
            "hit_rate_predicted": round(sum(r.hits for r in around) / sum(r.lookups for r in around), 4),
            "bytes_moved": sum(turn.moved for turn in turns),
            "bytes_moved_predicted": sum(result.bytes_moved for result in around),
            "stall_ms_a_row": round(1e3 * sum(turn.stall for turn in turns) / rows, 3),
            "stall_ms_a_row_predicted": round(1e3 * sum(r.stall_seconds for r in around) / rows, 3),
            "stall_ms_a_row_predicted_within": round(1e3 * sum(r.stall_seconds for r in within) / rows, 3),
            **ratios,
        }


def _one_after_the_other(rounds: Sequence[Round]) -> Iterator[TraceStep]:
    for turn in rounds:
        yield from turn.trace.recorded_steps()


def _renumbered(steps: Iterator[TraceStep], offset: int) -> Iterator[TraceStep]:
    """No sequence's number is used twice."""
    for step in steps:
        yield replace(
            step,
            sequences=step.sequences + offset,
            started=tuple(sequence + offset for sequence in step.started),
            ended=tuple(sequence + offset for sequence in step.ended),
        )


def _generate(llm: LLM, stream: Stream) -> None:
    for prompt, length in zip(stream.prompts, stream.lengths, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        llm.generate([list(prompt)], sampling, progress=False)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Measured rounds, after one that warms up.")
@click.option("--prompts", default=10, show_default=True, help="Prompts a round.")
@click.option("--policy", "policies", multiple=True, default=("lru", "next-use", "look-ahead"), show_default=True)
@click.option("--share", default="33%", show_default=True, help="Experts resident.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="[default: widened]")
def main(rounds: int, prompts: int, policies: tuple[str, ...], share: str, model: Path | None) -> None:
    """Measure, predict and print."""
    checkpoint = model or widened()
    stream = task_stream(checkpoint, prompts)
    with ExitStack() as stack:

        def opened(memory: str, spec: PolicySpec) -> LLM:
            settings: dict[str, Any] = {"warm_start": False, "progress": False, "max_running": 1, "kv_memory": "64MiB"}
            llm: AbstractContextManager[LLM] = LLM(
                str(checkpoint), expert_memory=memory, policy=spec.name, policy_options=dict(spec.options), **settings
            )
            return filled(stack.enter_context(llm))

        resident = opened("100%", PolicySpec("lru"))
        watched = Watch(resident.worker.experts, resident.worker.pack)
        arms = []
        for text in policies:
            spec = PolicySpec.parse(text)
            llm = opened(share, spec)
            recorder = llm.worker.experts.listener = Recall(llm.worker.experts)
            arms.append(Arm(spec, llm, Watch(llm.worker.experts, llm.worker.pack), recorder))
        pack = resident.worker.pack
        link = arms[0].llm.worker.link
        reads = ReadSettings() if link is None else link.reads
        layers = resident.worker.experts.catalogue.layers
        for _ in each(range(rounds + 1), "rounds"):
            watched.clear()
            _generate(resident, stream)
            compute = watched.profile(layers)
            for arm in arms:
                before = measure(pack, [reads], budget_s=LINK_BUDGET_S / 2)
                arm.run(stream)
                after = measure(pack, [reads], budget_s=LINK_BUDGET_S / 2)
                speed = 2 / (1 / before.bytes_per_s + 1 / after.bytes_per_s)
                measured = LinkProfile(speed, (before.latency_s + after.latency_s) / 2)
                arm.rounds[-1].around = Machine(measured, compute)
        rows = [arm.row(reads) for arm in arms]
        machines = [turn.around for arm in arms for turn in arm.rounds[1:] if turn.around is not None]
        links = [machine.link for machine in machines]
        profiles = [machine.compute for machine in machines]
        expert_bytes = resident.worker.plan.mean_expert_bytes
    _print(rows, links, profiles, expert_bytes, reads)
    document = {
        "machine": describe_machine(default_cache_dir()),
        "model": str(checkpoint.name),
        "share": share,
        "rounds": rounds,
        "prompts": prompts,
        "expert_bytes": expert_bytes,
        "reads": reads.describe(),
        "link_bytes_per_s": round(statistics.median(one.bytes_per_s for one in links)),
        "link_latency_s": round(statistics.median(one.latency_s for one in links), 6),
        "expert_s": round(statistics.median(one.expert_s + one.row_s for one in profiles), 6),
        "layer_s": round(statistics.median(one.layer_s + one.layer_row_s for one in profiles), 6),
        "rows": rows,
    }
    print(json.dumps(document))


def _print(
    rows: Sequence[dict[str, Any]],
    links: Sequence[LinkProfile],
    profiles: Sequence[ComputeProfile],
    expert_bytes: int,
    reads: ReadSettings,
) -> None:
    speeds = [link.bytes_per_s for link in links]
    print(
        f"experts of {format_bytes(expert_bytes)}; link {format_bytes(statistics.median(speeds))}/s "
        f"({format_bytes(min(speeds))}-{format_bytes(max(speeds))}), {reads.describe()}; of one row a layer computes "
        f"{1e3 * statistics.median(p.layer_s + p.layer_row_s for p in profiles):.2f} ms and an expert "
        f"{1e3 * statistics.median(p.expert_s + p.row_s for p in profiles):.2f} ms"
    )
    print(
        "{:<14}{:>16}{:>26}{:>20}{:>20}{:>20}{:>20}\n".format(
            "", "hits, %", "stall, ms a row", "stall ratio", "time ratio", "within: stall", "within: time"
        )
        + "{:<14}{:>8}{:>8}{:>8}{:>9}{:>9}".format("policy", "real", "pred.", "real", "pred.", "within")
    )
    for row in rows:
        ratios = "".join(
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})".rjust(20)
            for ratio in (row[name] for name in _RATIOS)
        )
        print(
            f"{row['policy']:<14}{100 * row['hit_rate']:>8.1f}{100 * row['hit_rate_predicted']:>8.1f}"
            f"{row['stall_ms_a_row']:>8.2f}{row['stall_ms_a_row_predicted']:>9.2f}"
            f"{row['stall_ms_a_row_predicted_within']:>9.2f}{ratios}"
        )


if __name__ == "__main__":
    main()
