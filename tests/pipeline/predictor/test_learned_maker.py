"""The maker alone, with shell commands: when it makes an artifact, when not, and what a killed command leaves."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.predictor.kinds.config import LearningConfig
from greenroom.predictor.kinds.emoe.artifact import load_learned
from greenroom.predictor.kinds.registry import FORECAST_KINDS
from greenroom.predictor.making.job import load_job
from greenroom.predictor.making.kind import TracedSequence, kept_of
from greenroom.predictor.making.maker import Maker
from greenroom.predictor.making.workspace import remove_abandoned, workspace
from greenroom.predictor.metrics import PredictorMetrics
from tests.pipeline.predictor.conftest import DEADLINE_S
from tests.pipeline.predictor.test_learned import SH, leaves
from tests.unit.predictor.kinds.emoe.untrained import EXPERTS, LAYERS, SLOTS, untrained
from tests.unit.predictor.worlds import trace
from tests.waiting import until

FAILS = (*SH, "exit 1")
SAMPLE_BYTES = 2 * LAYERS * SLOTS * EXPERTS


class Learning:
    """A maker of what forecasts are made from, what it counts, and its clock."""

    def __init__(self, config: LearningConfig, command: Sequence[str], executor: Executor) -> None:
        self.now = 0.0
        self._registry = CollectorRegistry()
        self.maker = Maker(
            [kind(config) for kind in FORECAST_KINDS.values()],
            config,
            PredictorMetrics(self._registry).learning,
            state_dir=None,
            keep=5,
            command=command,
            executor=executor,
            now=lambda: self.now,
        )

    def come(self, count: int) -> None:
        for _ in range(count):
            picks = np.zeros((1, LAYERS, SLOTS), np.uint8)
            self.maker.take(
                trace(picks, EXPERTS, task_type="a"),
                kept_of(self.maker.keeping("m"), TracedSequence(picks, EXPERTS, "a")),
            )

    def trained(self, kind: str = EMOE_A, result: str = "failed") -> float:
        found = self._registry.get_sample_value("greenroom_predictor_trainings_total", {"kind": kind, "result": result})
        assert found is not None
        return found

    async def until_trained(self, count: int, kind: str = EMOE_A, result: str = "failed") -> None:
        await until(lambda: self.trained(kind, result) >= count, within_s=DEADLINE_S)
        assert self.trained(kind, result) == count


@asynccontextmanager
async def learning(config: LearningConfig, command: Sequence[str] = FAILS) -> AsyncIterator[Learning]:
    with ThreadPoolExecutor(1) as executor:
        made = Learning(config, command, executor)
        await made.maker.open()
        task = asyncio.create_task(made.maker.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=DEADLINE_S)
            await made.maker.close()
        assert task.cancelled()


async def test_a_predictor_that_is_asked_for_no_more_is_learnt_again_once_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with learning(LearningConfig(after=10, again=10, asked_within_s=100.0)) as one:
        one.come(10)
        one.maker.asked("m", EMOE_A)
        await one.until_trained(1)
        one.now = 99.0
        one.come(10)
        await one.until_trained(2)
        one.now = 100.0
        one.come(10)
        one.maker.asked("m", EMOE_L)
        await one.until_trained(1, EMOE_L)  # looked for behind emoe-a
        assert one.trained() == 2
        assert "nobody asked for emoe-a of 'm' in 100 s" in caplog.text
        one.maker.asked("m", EMOE_A)
        await one.until_trained(3)


async def test_forecasts_of_models_without_sequences_keep_no_other_from_being_learnt() -> None:
    """However many names are asked for that no trace has."""
    async with learning(LearningConfig(after=10, again=10)) as one:
        for number in range(2000):
            one.maker.asked(f"a name {number}", EMOE_A)
        one.come(10)
        one.maker.asked("m", EMOE_A)
        await one.until_trained(1)


async def test_where_the_memory_holds_fewer_it_learns_from_those(caplog: pytest.LogCaptureFixture) -> None:
    config = LearningConfig(kinds=(EMOE_A,), after=50, again=20, max_bytes=12 * SAMPLE_BYTES)
    async with learning(config) as one:
        one.come(12)
        assert not one.maker.recent.is_full(("m", "counts by slot", False))
        one.come(1)
        await one.until_trained(1)
        assert "emoe-a of 'm' is made of 12 sequences instead of 50" in caplog.text
        one.come(20)
        await one.until_trained(2)


@pytest.mark.parametrize("room", [9.5, 0.5])
async def test_where_the_memory_holds_too_few_it_says_so_once(room: float, caplog: pytest.LogCaptureFixture) -> None:
    config = LearningConfig(kinds=(EMOE_A,), after=10, max_bytes=int(room * SAMPLE_BYTES))
    async with learning(config) as one:
        one.come(30)
    assert caplog.text.count("nothing can be learnt of 'm'") == 1
    assert one.trained() == 0


async def test_it_is_compared_with_what_is_served_where_that_has_not_seen_the_same(tmp_path: Path) -> None:
    """What it is measured on are the last 2 of 10."""
    file = leaves(tmp_path / "a", untrained(EMOE_A))[-1]
    jobs = tmp_path / "job"
    script = f'n=1; while test -e "{jobs}$n"; do n=$((n+1)); done; cp "$1" "{jobs}$n"; cp "$0" "$2"'
    config = LearningConfig(kinds=(EMOE_A,), after=10, again=1, max_sequences=10)
    async with learning(config, (*SH, script, file)) as one:
        await one.maker.registries[EMOE_A].publish(untrained(EMOE_A))  # as if it had been kept
        one.come(10)
        await one.until_trained(1, result="published")
        one.come(1)
        await one.until_trained(2, result="published")
        one.come(2)
        await one.until_trained(3, result="published")
    served = [version_served(tmp_path / f"job{number}") for number in (1, 2, 3)]
    assert served == [1, None, 3]


def version_served(job: Path) -> int | None:
    found = load_job(job.read_bytes()).earlier
    return load_learned(found).version if found else None


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_what_a_killed_one_left_is_removed_by_the_next(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While it lives its folder stays; its trainer ends by itself, here too."""
    code = (
        "import asyncio\n"
        "from greenroom.predictor.making.subprocess_job import run_job\n"
        'script = \'touch "${2%/*}/begun"; while kill -0 "$3"; do sleep 0.05; done\'\n'
        "command = ('/bin/sh', '-c', script, 'sh')\n"
        "asyncio.run(run_job(command, lambda: b'', timeout_s=600))\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment)
    try:
        await until(lambda: list(temporary.glob("*/begun")), within_s=DEADLINE_S)
        (folder,) = inside(temporary)
        with workspace() as mine:
            assert remove_abandoned() == []
            assert folder.is_dir()
            assert mine.is_dir()
        assert inside(temporary) == [folder]
    finally:
        process.kill()
        await process.wait()
    assert folder.is_dir()
    async with learning(LearningConfig()):
        assert inside(temporary) == []
    assert str(folder) in caplog.text


def inside(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def test_what_is_no_folder_of_a_training_stays(temporary: Path) -> None:
    other, link, file = temporary / "other", temporary / "greenroom-training-link", temporary / "greenroom-training-f"
    other.mkdir()
    link.symlink_to(other)
    file.write_bytes(b"")
    assert remove_abandoned() == []
    assert set(temporary.iterdir()) == {other, link, file}
