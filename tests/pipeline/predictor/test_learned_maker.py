"""When it is learnt, when not, and what a killed one leaves: the learner alone, with trainers that are shells."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from greenroom.predictor.kinds.emoe.config import EMOE_A, EMOE_L, LearningConfig
from greenroom.predictor.kinds.emoe.jobs import load_job
from greenroom.predictor.kinds.emoe.samples import Sample
from greenroom.predictor.making.learner import Learner
from greenroom.predictor.making.workspace import remove_abandoned, workspace
from greenroom.predictor.metrics import PredictorMetrics
from tests.pipeline.predictor.test_learned import SH, leaves
from tests.unit.predictor.kinds.emoe.test_networks import EXPERTS, LAYERS, SLOTS, untrained
from tests.waiting import until

DEADLINE_S = 60.0
FAILS = (*SH, "exit 1")
SAMPLE_BYTES = 2 * LAYERS * SLOTS * EXPERTS


def sample(layers: int = LAYERS) -> Sample:
    return Sample("a", np.ones((layers, SLOTS, EXPERTS), np.uint16))


class Learning:
    """A learner, what it counts, and its clock."""

    def __init__(self, config: LearningConfig, trainer: Sequence[str]) -> None:
        self.now = 0.0
        self._registry = CollectorRegistry()
        self.learner = Learner(
            config,
            PredictorMetrics(self._registry),
            state_dir=None,
            keep=5,
            command=trainer,
            now=lambda: self.now,
        )

    def come(self, count: int, model: str = "m", layers: int = LAYERS) -> None:
        for _ in range(count):
            self.learner.take(model, sample(layers))

    async def ask(self, kind: str = EMOE_A, model: str = "m") -> None:
        await self.learner.forecast(model, "a", b"", kind, None)

    def trained(self, kind: str = EMOE_A, result: str = "failed") -> float:
        found = self._registry.get_sample_value("greenroom_predictor_trainings_total", {"kind": kind, "result": result})
        assert found is not None
        return found

    async def until_trained(self, count: int, kind: str = EMOE_A, result: str = "failed") -> None:
        await until(lambda: self.trained(kind, result) >= count, within_s=DEADLINE_S)
        assert self.trained(kind, result) == count


@asynccontextmanager
async def learning(config: LearningConfig, trainer: Sequence[str] = FAILS) -> AsyncIterator[Learning]:
    made = Learning(config, trainer)
    await made.learner.open()
    task = asyncio.create_task(made.learner.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)
        await made.learner.close()
    assert task.cancelled()


async def test_what_nobody_asks_for_any_more_is_learnt_again_when_someone_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with learning(LearningConfig(after=10, again=10, asked_within_s=100.0)) as one:
        one.come(10)
        await one.ask()
        await one.until_trained(1)
        one.now = 99.0
        one.come(10)
        await one.until_trained(2)
        one.now = 100.0
        one.come(10)
        await one.ask(EMOE_L)
        await one.until_trained(1, EMOE_L)  # looked for behind emoe-a
        assert one.trained() == 2
        assert "nobody asked for emoe-a of 'm' in 100 s" in caplog.text
        await one.ask()
        await one.until_trained(3)


async def test_where_the_memory_holds_fewer_it_learns_from_those(caplog: pytest.LogCaptureFixture) -> None:
    config = LearningConfig(kinds=(EMOE_A,), after=50, again=20, max_bytes=12 * SAMPLE_BYTES)
    async with learning(config) as one:
        one.come(12)
        assert not one.learner.ring.is_full("m")
        one.come(1)
        await one.until_trained(1)
        assert "emoe-a of 'm' is learnt from 12 sequences instead of 50" in caplog.text
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
        await one.learner.shelves[EMOE_A].publish(untrained(EMOE_A))  # as if it had been kept
        one.come(10)
        await one.until_trained(1, result="published")
        one.come(1)
        await one.until_trained(2, result="published")
        one.come(2)
        await one.until_trained(3, result="published")
    served = [version_served(tmp_path / f"job{number}") for number in (1, 2, 3)]
    assert served == [1, None, 3]


def version_served(job: Path) -> int | None:
    found = load_job(job.read_bytes()).served
    return None if found is None else found.version


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
        "import asyncio, numpy as np\n"
        "from greenroom.predictor.kinds.emoe.config import TrainingConfig\n"
        "from greenroom.predictor.kinds.emoe.jobs import train_apart\n"
        "from greenroom.predictor.kinds.emoe.samples import Sample\n"
        "samples = [Sample('a', np.ones((2, 1, 4), np.uint16))] * 10\n"
        'script = \'touch "${1%/*}/begun"; while kill -0 "$3"; do sleep 0.05; done\'\n'
        "command = ('/bin/sh', '-c', script, 'sh')\n"
        "asyncio.run(train_apart('m', samples, TrainingConfig(), timeout_s=600, command=command))\n"
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
