"""``greenroom predictor-train``: from a recorded trace to a predictor that the service serves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from greenroom.predictor.kinds.config import LearningConfig
from greenroom.predictor.kinds.emoe.artifact import codec_of, load_learned
from greenroom.predictor.kinds.emoe.comparison import places_to_test, trivial
from greenroom.predictor.kinds.emoe.recorded import BadMeta, read_recorded
from greenroom.predictor.versions.store import FileStore
from greenroom.replay import RoutingTrace
from tests.pipeline.commands import result_of
from tests.pipeline.predictor.conftest import World
from tests.pipeline.predictor.test_learned import ask, sequence, until_learned
from tests.unit.predictor.kinds.emoe.untrained import EXPERTS, LAYERS, SLOTS

COUNT, ROWS = 30, 5
QUICK = ("--epochs", "2", "--width", "16")


def recorded(path: Path, *, tasks: bool = True) -> Path:
    """Prompts of type a route like the one before, by turns to the lower and the higher experts; those of b always to
    the lower ones."""
    random = np.random.default_rng(0)
    picks = []
    for number in range(COUNT):
        low = 0 if number % 2 or number % 4 else EXPERTS // 2
        picks += [[random.permutation(EXPERTS // 2)[:SLOTS] + low for _ in range(LAYERS)] for _ in range(ROWS)]
    trace = RoutingTrace(
        experts=np.asarray(picks, np.uint8),
        seq_starts=np.arange(0, ROWS * COUNT + 1, ROWS),
        num_experts=EXPERTS,
        task=tuple("ab"[number % 2] for number in range(COUNT)) if tasks else None,
        model="m",
    )
    trace.save(path)
    return path


def run(*arguments: str, status: int = 0) -> str:
    """What it said, without its progress where it succeeded."""
    result = result_of("predictor-train", *arguments, status=status)
    return result.stdout if status == 0 else result.output


def test_the_table_and_the_file(tmp_path: Path) -> None:
    path, out = recorded(tmp_path / "t.npz"), tmp_path / "p.safetensors"
    text = run(str(path), *QUICK, "--out", str(out))
    for name in ("all tasks", "task type", "previous prompt", "the prompt itself", "learned: xlnet emoe-a"):
        assert name in text
    artifact = load_learned(out.read_bytes())
    assert (artifact.model, artifact.sequences, artifact.architecture.width) == ("m", 24, 16)
    assert list(tmp_path.iterdir()) in ([path, out], [out, path])


def test_json_and_the_meta_file_beside_it(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t.npz", tasks=False)
    meta = path.with_suffix(".meta.jsonl")
    meta.write_text("".join(json.dumps({"category": "ab"[number % 2]}) + "\n" for number in range(COUNT)))
    report = json.loads(run(str(path), *QUICK, "--json", "--kind", "emoe-l", "--learn-model", "bert"))
    assert report["test_sequences"] == 6
    assert set(report["scores"]) >= {"task type", "learned: bert emoe-l"}
    assert report["scores"]["the prompt itself"]["overlap"] == pytest.approx(1)


def test_what_is_trivial_is_measured_as_it_says(tmp_path: Path) -> None:
    found = read_recorded(recorded(tmp_path / "t.npz"))
    places = places_to_test(found.sequences, 24)
    assert places.tolist() == list(range(24, 30))
    scores = trivial(found, 24, places)
    assert scores["task type"].overlap > scores["all tasks"].overlap
    assert scores["the prompt itself"].overlap == pytest.approx(1)
    assert scores["the prompt itself"].accuracy >= max(one.accuracy for one in scores.values())


async def test_what_it_keeps_is_served(world: World, tmp_path: Path) -> None:
    path = recorded(tmp_path / "t.npz")
    for version in (1, 2):
        text = run(str(path), *QUICK, "--state-dir", str(world.folder), "--seed", str(version))
        assert f"emoe-a of m: version {version}" in text
    running = await world.start(learning=LearningConfig())
    await until_learned(running, 2)
    assert (await ask(running)).sequences == 24
    await world.send(sequence(0))
    await world.until_committed()
    assert (await ask(running)).source == "learned emoe-a"
    assert "another predictor uses it" in run(str(path), *QUICK, "--state-dir", str(world.folder), status=1)
    await running.stop()


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t.npz")
    (tmp_path / "short.jsonl").write_text('{"task": "a"}\n')
    assert "1 lines, the trace 30 sequences" in run(str(path), "--tasks", str(tmp_path / "short.jsonl"), status=1)
    (tmp_path / "not.jsonl").write_text("a\n")
    with pytest.raises(BadMeta, match="no task types"):
        read_recorded(path, tmp_path / "not.jsonl")
    (tmp_path / "no.npz").write_bytes(b"x")
    assert "no routing trace" in run(str(tmp_path / "no.npz"), status=1)
    assert "width" in run(str(path), "--width", "3", status=1)
    assert "no folder" in run(str(path), "--out", str(tmp_path / "none" / "p"), status=2)


def refused(path: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the command line before it trains."""

    def trained(*arguments: object, **others: object) -> None:
        raise AssertionError("it was trained")

    with monkeypatch.context() as patched:
        patched.setattr("greenroom.predictor.kinds.emoe.training.train", trained)
        return run(str(path), *QUICK, *arguments, status=1)


def test_where_it_can_not_be_kept_is_said_before_it_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "t.npz")
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "state"):
        assert "can be written" in refused(path, "--out", str(place / "p"), monkeypatch=monkeypatch)
    assert "state_dir" in refused(path, "--state-dir", str(tmp_path / "file" / "s"), monkeypatch=monkeypatch)
    used = FileStore(tmp_path / "state", 5, codec_of("emoe-a"), within="emoe-a")
    used.open()
    try:
        assert "another predictor uses it" in refused(
            path, "--state-dir", str(tmp_path / "state"), monkeypatch=monkeypatch
        )
    finally:
        used.close()


def test_where_one_place_takes_it_no_more_the_other_has_it_and_the_report_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = recorded(tmp_path / "t.npz"), tmp_path / "state"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("greenroom.cli.predictor_train.write_whole", full)
        text = run(str(path), *QUICK, "--out", str(tmp_path / "p"), "--state-dir", str(state), status=1)
    assert "learned: xlnet emoe-a" in text
    assert "No space left" in text
    assert "Traceback" not in text
    assert "version 1 in" in text
    assert len(list(state.glob("m-*/emoe-a/*.safetensors"))) == 1
