"""What learning beside serving takes: the predictor's own jobs, in processes of their own as `serve` starts them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.duoserve.engine.served import Widened
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.children.process_memory import peak_bytes_of
from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.units import MIB
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.registry import MAKE, POLICY_KINDS
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.subprocess_job import ONE_THREAD
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.samples import Sample
from greenroom.replay import RoutingTrace

KINDS: Final = (ReuseFile.KIND, PathFile.KIND)
"""What `duoserve` asks for. One is made after the other."""
POLICY: Final = "duoserve"
JOB_S: Final = BuildingConfig().timeout_s
"""As long as the predictor gives one."""
_LOOK_S: Final = 0.05
BESIDE, ALONE = "beside learning", "alone"


@dataclass(frozen=True, slots=True)
class Learning:
    """``sequences``: of the bundled model, and of ``trace``, that are learnt from. ``prompts``, ``at_once``,
    ``rounds``, ``seconds``: what is served beside, as in the stage."""

    sequences: tuple[int, ...] = (100, 1000)
    trace_sequences: int = 100
    prompts: int = 16
    at_once: int = 8
    rounds: int = 5
    seconds: float = 90.0


def run(scale: Learning, served: Widened, trace: Path | None) -> dict[str, Any]:
    """``jobs``: seconds, processor seconds and peak memory of each, on a machine that does nothing else. ``beside``:
    tokens/s while one is made over those without, in the same round, and after how many requests one is due."""
    bundled = record_routing(drawn_prompts(max(scale.sequences)))
    traces = [("bundled", bundled.part(0, count)) for count in scale.sequences]
    if trace is not None:
        whole = RoutingTrace.load(trace)
        traces.append((trace.stem, whole.part(0, min(scale.trace_sequences, whole.sequences))))
    jobs = []
    with progress(len(traces) * len(KINDS), "learning", "job") as bar:
        for name, own in traces:
            for kind in KINDS:
                jobs.append({"model": name, **_made(job_of(kind, own))})
                bar.update()
    return {"jobs": jobs, "beside": _beside(scale, served, traces[-1][1])}


def job_of(kind: str, trace: RoutingTrace) -> Job:
    """As the predictor hands it out: the last sequences, as many as it keeps."""
    config = BuildingConfig()
    starts = trace.seq_starts
    samples, held = list[Sample](), 0
    for begin, end in reversed(list(pairwise(starts))[-config.max_sequences :]):
        sample = Sample("", np.ascontiguousarray(trace.experts[begin:end]))
        held += sample.nbytes
        if samples and held > config.max_bytes:
            break
        samples.append(sample)
    shape = Shape(trace.layers, int(trace.num_experts))
    return Job(kind, trace.model, shape, samples[::-1], POLICY_KINDS[kind](config).options())


@contextmanager
def _started(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """Its process, killed at the end where it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "job", Path(folder) / "artifact"
        source.write_bytes(dump_job(job))
        command = [*MAKE, str(source), str(target), str(os.getpid())]
        process = subprocess.Popen(command, env={**os.environ, **ONE_THREAD})
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


def _made(job: Job) -> dict[str, Any]:
    began, peak = time.perf_counter(), 0
    with _started(job) as process:
        while True:  # what wait4 says of memory begins with this process's own
            peak = max(peak, peak_bytes_of(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() - began > JOB_S:
                raise RuntimeError(f"{job.kind} was not made within {JOB_S:g} s")
            time.sleep(_LOOK_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{job.kind} was not made: {process.returncode}")
    return {
        "kind": job.kind,
        "sequences": len(job.samples),
        "tokens": sum(len(one.array) for one in job.samples),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(peak / MIB),
    }


def _beside(scale: Learning, served: Widened, trace: RoutingTrace) -> dict[str, Any]:
    """The arm serves the same prompts, in turns beside the making of a path file and alone. A file that is done
    earlier than its turn ends does not count."""
    job = job_of(PathFile.KIND, trace)
    asks = served.asks(scale.prompts)
    found: dict[int, dict[str, float]] = {}
    with ExitStack() as stack:
        arm = stack.enter_context(served.arm(Kind(POLICY, POLICY)))
        with progress((scale.rounds + 1) * 2, "beside learning", "turn") as bar:
            for round_, how in in_turns((ALONE, BESIDE), scale.rounds, scale.seconds):
                with ExitStack() as beside:
                    process = beside.enter_context(_started(job)) if how == BESIDE else None
                    turn = arm.run(asks, scale.at_once)
                    whole = process is None or process.poll() is None
                if round_ and whole:
                    found.setdefault(round_, {})[how] = turn.tokens / turn.seconds
                bar.update()
        served.shared.detach()
    ratios = [own[BESIDE] / own[ALONE] for own in found.values() if len(own) == 2]
    if not ratios:
        raise RuntimeError("every file was made before a turn beside it ended: more prompts")
    return {
        "tokens_per_s": spread_json(Spread.of(ratios), 3),
        "rounds": len(ratios),
        "due_after": BuildingConfig().reuse_after,
        "due_again_after": BuildingConfig().reuse_again,
    }


def table(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'learning':<32}{'sequences':>12}{'tokens':>10}{'seconds':>10}{'processor s':>14}{'peak MiB':>10}"]
    lines += [
        f"{job['model'] + ', ' + job['kind']:<32}{job['sequences']:>12,}{job['tokens']:>10,}{job['seconds']:>10}"
        f"{job['processor_seconds']:>14}{job['peak_mib']:>10,}"
        for job in found["jobs"]
    ]
    beside = found["beside"]
    lines.append(
        f"tokens/s while one is made, over those without: {median_range(beside['tokens_per_s'])}, {beside['rounds']} "
        f"rounds; one is due after {beside['due_after']} requests, and after every {beside['due_again_after']} more"
    )
    return lines
