"""The measurement with scripted arms: turns, trials, memory, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tqdm import tqdm

from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.disk import ReadAhead
from benchmarks.peers import gguf_file
from benchmarks.peers.arms import Answer, Arm
from benchmarks.peers.batch import Batch
from benchmarks.peers.llama_settings import AS_STORED
from benchmarks.peers.measurement import AMPLE_BYTES, Effort, Measurement, Subject, agreements, runs_of
from benchmarks.peers.results import GREENROOM, LLAMA, RESIDENT, SAME_TOTAL, THIRD, summary

FILE_BYTES = 1000
EXPERT_BYTES = 900
PLAN = {"announced": 5000, "announced_base": 4000, "expert_budget": 300, "expert_bytes": 100, "experts": 9}
EFFORT = Effort(
    rounds=2,
    trials=1,
    skip=0,
    prompt_tokens=2,
    tokens={(RESIDENT, 1): 4, (RESIDENT, 8): 4, (THIRD, 1): 4, (THIRD, 8): 4},
    trial_tokens={(RESIDENT, 1): 3, (RESIDENT, 8): 3, (THIRD, 1): 3, (THIRD, 8): 3},
)
STREAM = Batch(tuple((n, n) for n in range(8)), tuple((1, 2, 3, 4) for _ in range(8)))


class ScriptedArm:
    """Answers with a rate that its settings and memory decide, and remembers what it was asked for."""

    def __init__(self, log: list[tuple[str, int, int | None]], name: str, rate: Callable[..., float]) -> None:
        self.log, self.name, self.rate = log, name, rate
        self.asked: list[dict[str, Any]] = []

    def run(
        self,
        model: Path,
        batches: Sequence[Batch],
        settings: dict[str, Any],
        *,
        limit_bytes: int | None = None,
        cold: Sequence[Path] = (),
    ) -> Answer:
        self.asked.append({"model": model, "settings": settings, "limit": limit_bytes, "cold": list(cold)})
        told: dict[str, Any] = {"load_s": 1.0, "peak_rss": 7, "version": "1", "system": "", **PLAN, "batches": []}
        for batch in batches:
            self.log.append((self.name, batch.sequences, limit_bytes))
            step = batch.sequences / self.rate(model=model, settings=settings, limit=limit_bytes)
            arrivals = [[step * (n + 1) for n in range(len(batch.forced[0]))]] * batch.sequences
            told["batches"].append({"arrivals": arrivals, "greedy": batch.forced, "read_bytes": 0})
        return Answer(told, limit_bytes, None if limit_bytes is None else FILE_BYTES + 77)


def _measurement(
    ours: ScriptedArm, peer: ScriptedArm, folder: Path, *, cgroups: bool = True, effort: Effort = EFFORT
) -> Measurement:
    return Measurement(
        cast(Arm, ours),
        cast(Arm, peer),
        effort,
        policy="lfu",
        expert_memory="33%",
        threads=2,
        cgroups=cgroups,
        read_ahead=ReadAhead(folder, sys_block=folder),
        bar=tqdm(disable=True),
    )


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    def ensure(checkpoint: Path, dtype: str) -> Path:
        path = tmp_path / f"{checkpoint.name}-{dtype}.gguf"
        path.write_bytes(bytes(FILE_BYTES))
        return path

    monkeypatch.setattr(gguf_file, "ensure", ensure)
    monkeypatch.setattr(gguf_file, "expert_bytes", lambda path: EXPERT_BYTES)
    return Subject("model", tmp_path / "checkpoint", STREAM)


def _peer_rate(model: Path, settings: dict[str, Any], limit: int | None) -> float:
    fast = 20.0 if model.name.endswith("f16.gguf") and not model.name.endswith("bf16.gguf") else 10.0
    fast += 5.0 * int(settings["load_mode"] == "none") - 3.0 * int(settings["threads"] == 1)
    return fast / (4 if limit is not None and limit < AMPLE_BYTES and limit < 5000 else 1)


def _our_rate(model: Path, settings: dict[str, Any], limit: int | None) -> float:
    return 50.0 if settings["expert_memory"] == "100%" else 20.0


def test_a_whole_measurement(subject: Subject, tmp_path: Path) -> None:
    log: list[tuple[str, int, int | None]] = []
    ours, peer = ScriptedArm(log, GREENROOM, _our_rate), ScriptedArm(log, LLAMA, _peer_rate)
    measurement = _measurement(ours, peer, tmp_path)
    measurement.prepare(subject)
    assert {n: (s.dtype, s.load_mode, s.threads) for n, s in subject.resident.items()} == {
        1: ("f16", "none", 2),
        8: ("f16", "none", 2),
    }
    assert {s.load_mode for s in subject.short_of_memory.values()} == {"mmap"}
    assert subject.peer_own_bytes == {1: 77, 8: 77}
    # Its own, the file's dense part, and the experts' budget.
    assert subject.peer_limit(1) == 77 + (FILE_BYTES - EXPERT_BYTES) + 300
    del log[:]
    for number in range(2):
        measurement.round([subject], number)
    third = subject.peer_limit(1)
    first = [(GREENROOM, 1, None), (LLAMA, 1, None), (GREENROOM, 8, None), (LLAMA, 8, None)]
    assert log[:4] == first
    assert log[4:7] == [(GREENROOM, 1, 5000), (LLAMA, 1, third), (LLAMA, 1, 5000)]
    assert log[10:12] == [(LLAMA, 1, None), (GREENROOM, 1, None)], "the other begins in the next round"
    rows = list(measurement.rows.values())
    assert all(len(row.samples) == 2 and not row.errors for row in rows)
    told = summary(rows, ["model"])
    assert told == {
        "resident_ratio_llama": 2.0,
        "resident_ratio_llama_8": 2.0,
        "third_ratio_llama": 4.0,
        "third_ratio_llama_8": 4.0,
        "third_ratio_llama_same_total": 1.0,
        "third_ratio_llama_same_total_8": 1.0,
    }
    assert agreements([subject]) == {"model": 1.0}
    limited = [asked for asked in peer.asked if asked["limit"] is not None]
    assert all(asked["cold"] == [asked["model"]] for asked in limited), "nothing is left of it in the page cache"


def test_a_gguf_file_is_what_both_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "expert_bytes", lambda path: EXPERT_BYTES)
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(FILE_BYTES))
    subject = Subject("model", file, STREAM)
    ours, peer = ScriptedArm([], GREENROOM, _our_rate), ScriptedArm([], LLAMA, _peer_rate)
    measurement = _measurement(ours, peer, tmp_path)
    measurement.prepare(subject)
    measurement.round([subject], 0)
    assert {asked["model"] for asked in (*ours.asked, *peer.asked)} == {file}
    assert {settings.dtype for settings in subject.resident.values()} == {AS_STORED}
    assert subject.resident[1].load_mode == "none"
    assert subject.peer_limit(1) == 77 + (FILE_BYTES - EXPERT_BYTES) + 300
    bounded = [asked["settings"] for asked in peer.asked if asked["limit"] in (AMPLE_BYTES, subject.peer_limit(1))]
    assert not any(settings["repack"] for settings in bounded), "a copy of all codes would not fit, or count as its own"


def test_the_progress_bar_counts_every_run(subject: Subject, tmp_path: Path) -> None:
    log: list[tuple[str, int, int | None]] = []
    measurement = _measurement(ScriptedArm(log, GREENROOM, _our_rate), ScriptedArm(log, LLAMA, _peer_rate), tmp_path)
    done: list[int] = []
    measurement.bar.update = lambda n=1: done.append(int(n or 0))  # type: ignore[method-assign]
    measurement.prepare(subject)
    for number in range(EFFORT.rounds):
        measurement.round([subject], number)
    # Read-aheads can not be set here: one trial of memory in place of four, for one and for eight; and as two threads
    # were best already, two numbers of threads in place of three.
    assert sum(done) == runs_of([subject], EFFORT) - 2 * 3 - 2 * 1


def test_an_arm_that_fails_is_told_of_and_the_others_go_on(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(model: Path, settings: dict[str, Any], limit: int | None) -> float:
        if limit is not None and limit < 5000:
            raise ArmFailed("killed by the kernel")
        return 10.0

    log: list[tuple[str, int, int | None]] = []
    measurement = _measurement(ScriptedArm(log, GREENROOM, _our_rate), ScriptedArm(log, LLAMA, fails), tmp_path)
    measurement.prepare(subject)
    measurement.round([subject], 0)
    row = measurement.rows["model", LLAMA, THIRD, 1]
    assert row.errors == ["killed by the kernel"]
    assert row.samples == []
    assert measurement.rows["model", LLAMA, SAME_TOTAL, 1].samples
    told = summary(list(measurement.rows.values()), ["model"])
    assert told["third_ratio_llama"] is None
    assert told["resident_ratio_llama"] == 5.0
    assert "killed by the kernel" in capsys.readouterr().err


def test_without_cgroups_the_peer_is_measured_resident_only(subject: Subject, tmp_path: Path) -> None:
    log: list[tuple[str, int, int | None]] = []
    peer = ScriptedArm(log, LLAMA, _peer_rate)
    measurement = _measurement(ScriptedArm(log, GREENROOM, _our_rate), peer, tmp_path, cgroups=False)
    measurement.prepare(subject)
    measurement.round([subject], 0)
    assert {limit for _, _, limit in log} == {None}
    assert {memory for _, engine, memory, _ in measurement.rows if engine == LLAMA} == {RESIDENT}
    told = summary(list(measurement.rows.values()), ["model"])
    assert told["third_ratio_llama"] is None
    assert told["resident_ratio_llama"] is not None
    assert measurement.rows["model", GREENROOM, THIRD, 8].tokens_per_s == pytest.approx(20.0)
