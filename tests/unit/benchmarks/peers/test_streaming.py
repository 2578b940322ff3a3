"""BigMoeOnEdge's part of bench-peers: what its output means, its settings, the stream that it picks, its turns."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.disk import ReadAhead
from benchmarks.harness.inputs.checkpoints import copy_tokenizer
from benchmarks.harness.inputs.spelled_tokens import spelled, tokens_of, vocabulary_keys
from benchmarks.peers import gguf_file
from benchmarks.peers.arms import Answer, Arm, streaming_llama
from benchmarks.peers.batch import Batch
from benchmarks.peers.measurement import AMPLE_BYTES, Effort, Measurement, Subject, runs_of
from benchmarks.peers.results import GREENROOM, LLAMA, RESIDENT, STREAMING, THIRD, streaming_summary
from benchmarks.peers.streaming_llama import StreamingFailed, told_of, version_of, why_not
from benchmarks.peers.streaming_peer import StreamingPeer
from benchmarks.peers.streaming_settings import StreamingSettings, lane_trials, single_changes
from greenroom.core.errors import UnsupportedModel
from greenroom.text.gguf_tokenizer import gguf_text_files
from tests.gguf_checkpoints import add_value

# -- tokens as text ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2047)))
def test_tokens_survive_being_spelled(tokens: list[int]) -> None:
    assert tokens_of(spelled(tokens)) == tuple(tokens)


def test_a_text_of_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not spelled tokens: ' and '"):
        tokens_of("<1> and <2>")


# -- what it prints and writes ----------------------------------------------------------------------------------------

TABLE = """\
# bmoe_metrics v2
# model=/models/model.gguf arch=llama threads=2
step,steps,wall_ms,io_ms,read_bytes,rss_mib,rss_anon_mib
1,3,100.0,60.0,1048576,300.0,250.0
2,3,50.0,20.0,2097152,320.0,270.0
3,3,900.0,800.0,99999999,310.0,260.0
# summary tokens=3 tok/s=2.857 cache_hit_pct=61.5 n_prompt=2 load_s=1.250 prefill_s=0.500 cache_resident_MiB=96.0
"""
TEXT = "<5><6><7><8><9>\n\ngeneration: 3 tokens, 0.350 s/token\n"


def test_a_token_comes_with_the_end_of_the_step_before_it() -> None:
    told = told_of(TEXT, TABLE, (5, 6), 3)
    assert told.decoded.arrivals == ((0.5, 0.6, 0.65),), "the step behind the last token brings none"
    assert told.decoded.greedy == ((7, 8, 9),)
    assert told.decoded.read_bytes == 3 * 2**20
    assert told.decoded.rate(0) == pytest.approx(2 / 0.15)
    assert (told.load_s, told.hit_rate) == (1.25, 0.615)
    assert told.peak_rss == 320 * 2**20
    assert told.cache_bytes == 96 * 2**20
    assert told_of(TEXT, TABLE.replace("=61.5", "=-1.0"), (5, 6), 3).hit_rate is None, "without a cache"


@pytest.mark.parametrize(
    ("text", "table", "why"),
    [
        ("<5><6><7><8>\n\n", TABLE, "2 tokens, not 3"),
        ("<5><4><7><8><9>\n\n", TABLE, "does not begin with the prompt"),
        ("<5><6><7>oh<8>\n\n", TABLE, "not spelled tokens"),
        (TEXT, TABLE.replace("3,3,900.0,800.0,99999999,310.0,260.0\n", ""), "2 steps"),
        (TEXT, TABLE.replace("n_prompt=2", "n_prompt=9"), "a prompt of 9"),
        (TEXT, TABLE.replace("# summary", "# nothing"), "a prompt of None"),
        (TEXT, TABLE.replace("wall_ms", "wall_us"), "not as expected: 'wall_ms'"),
        (TEXT, TABLE.replace("50.0,20.0", "soon,20.0"), "not as expected"),
    ],
)
def test_what_is_not_understood_is_no_figure(text: str, table: str, why: str) -> None:
    with pytest.raises(StreamingFailed, match=why):
        told_of(text, table, (5, 6), 3)


# -- its process ------------------------------------------------------------------------------------------------------

_PROGRAM = f"""\
#!{sys.executable}
import os
import sys
import time

def waits_of_parent():
    with open(f"/proc/{{os.getppid()}}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))

words = sys.argv[1:]
if words == ["--version"]:
    print("0.19.0")
elif words == ["--list-archs"]:
    print("supported MoE architectures:\\n  ARCHITECTURE")
elif "--no-such-flag" in words:
    sys.exit("error: failed to load model")
else:
    given = dict(zip(words, words[1:]))
    allocated = bytearray(b"1") * (120 << 20)
    # Until it was looked at with that: who starts it waits between two looks.
    before, deadline = waits_of_parent(), time.monotonic() + 60
    while waits_of_parent() < before + 30 and time.monotonic() < deadline:
        os.sched_yield()
    with open(given["--csv"], "w") as table:
        table.write({TABLE!r})
    print(given["--prompt"] + "<7><8><9>\\n\\ngeneration: 3 tokens")
"""


@pytest.fixture
def binary(tmp_path: Path) -> str:
    return _program(tmp_path / "bmoe-cli", "llama")


def _program(path: Path, architecture: str) -> str:
    path.write_text(_PROGRAM.replace("ARCHITECTURE", architecture))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_program_runs_once_a_batch_and_tells_what_it_takes(binary: str, tmp_path: Path) -> None:
    job = {"binary": binary, "flags": StreamingSettings().flags(96, 256), "sampling": []}
    answer = streaming_llama().run(tmp_path, [Batch(((5, 6),), ((0, 0, 0),))], job)
    assert answer.batches[0].greedy == ((7, 8, 9),)
    assert answer.told["load_s"] == 1.25
    # What it allocated beside the cache, and the child that starts it: both are in the cgroup.
    assert (120 - 96) << 20 < answer.told["own_bytes"] < (120 - 96 + 100) << 20
    job["flags"] = ["--no-such-flag"]
    with pytest.raises(ArmFailed, match="failed to load model"):
        streaming_llama().run(tmp_path, [Batch(((5, 6),), ((0, 0, 0),))], job)
    with pytest.raises(ArmFailed, match="one sequence, not 2"):
        streaming_llama().run(tmp_path, [Batch(((5, 6), (7, 8)), ((0,), (0,)))], job)


def test_a_program_that_can_not_be_measured_is_told_of_at_once(binary: str, tmp_path: Path) -> None:
    assert why_not(binary) is None
    assert version_of(binary) == "0.19.0"
    assert "does not run" in (why_not(str(tmp_path / "nothing")) or "")
    assert "no experts of the architecture llama" in (why_not(_program(tmp_path / "stock", "qwen3moe")) or "")


# -- its settings -----------------------------------------------------------------------------------------------------


def test_every_trial_is_another_command() -> None:
    best = StreamingSettings(threads=2, io_threads=8, overlap=True)
    trials = [*lane_trials(2), *single_changes(best)[1:]]
    assert len({tuple(trial.flags(96, 256)) for trial in trials}) == len(trials)
    assert len({trial.describe() for trial in trials}) == len(trials)
    assert single_changes(best)[0] == best
    assert not any(trial.two_waves for trial in single_changes(replace(best, overlap=False))), "it needs overlap"
    flags = best.flags(96, 256)
    assert flags[flags.index("--cache-mb") + 1] == "96"
    lossy = {"--drop-cold-experts", "--route-ahead", "--n-expert-used"}
    assert not any(lossy & set(trial.flags(96, 256)) for trial in trials)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_greenroom_takes_the_tokenizer_beside_a_file_of_spelled_tokens(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in vocabulary_keys(2048, end=2).items():
        add_value(writer, key, value)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="'default'"):
        gguf_text_files(file)
    copy_tokenizer(tmp_path)
    assert gguf_text_files(file).tokenizer == (tmp_path / "tokenizer.json").read_bytes()


# -- its turns --------------------------------------------------------------------------------------------------------

PICKED = (3, 1, 4, 1)
PLAN = {
    "announced": 500 << 20,
    "announced_base": 400 << 20,
    "expert_budget": (96 << 20) - 5,
    "expert_bytes": 100,
    "experts": 9,
}
OWN = 170 << 20
EFFORT = Effort(
    rounds=2, trials=1, skip=0, prompt_tokens=2,
    tokens={(RESIDENT, 1): 4, (RESIDENT, 8): 4, (THIRD, 1): 4, (THIRD, 8): 4},
    trial_tokens={(RESIDENT, 1): 3, (RESIDENT, 8): 3, (THIRD, 1): 3, (THIRD, 8): 3},
)  # fmt: skip
STREAM = Batch(tuple((n, n) for n in range(8)), tuple((9, 9, 9, 9) for _ in range(8)))


class _Arm:
    """Answers with a rate; the streaming one picks ``PICKED`` whatever it is given."""

    def __init__(self, name: str, rate: float, log: list[tuple[str, int | None]], wrong_at: int | None = None) -> None:
        self.name, self.rate, self.log, self.wrong_at = name, rate, log, wrong_at
        self.asked: list[dict[str, Any]] = []

    def run(
        self, model: Path, batches: Sequence[Batch], settings: dict[str, Any], *, limit_bytes: int | None = None,
        cold: Sequence[Path] = (),
    ) -> Answer:  # fmt: skip
        self.log.append((self.name, limit_bytes))
        self.asked.append({"settings": settings, "limit": limit_bytes, "batches": list(batches), "cold": list(cold)})
        told: dict[str, Any] = {"load_s": 1.0, "peak_rss": 7, "version": "1", "system": "", "own_bytes": OWN, **PLAN}
        told["batches"] = []
        for batch in batches:
            greedy = batch.forced
            rate = self.rate
            if self.name == STREAMING:
                greedy = (PICKED[: len(batch.forced[0])],)
                rate *= 2 if settings["flags"][settings["flags"].index("--io-threads") + 1] == "8" else 1
                if self.wrong_at is not None and len(self.asked) > self.wrong_at:
                    greedy = ((0,) * len(batch.forced[0]),)
            arrivals = [[(n + 1) * batch.sequences / rate for n in range(len(batch.forced[0]))]] * batch.sequences
            told["batches"].append({"arrivals": arrivals, "greedy": greedy, "read_bytes": 0})
        return Answer(told, limit_bytes, None if limit_bytes is None else 1077)


def _measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wrong_at: int | None = None, name: str = "model.gguf"
) -> tuple[Measurement, Subject, _Arm, _Arm]:
    monkeypatch.setattr(gguf_file, "expert_bytes", lambda path: 900)
    file = tmp_path / name
    file.write_bytes(bytes(1000))
    log: list[tuple[str, int | None]] = []
    ours, theirs = _Arm(GREENROOM, 12.0, log), _Arm(LLAMA, 4.0, log)
    streaming = _Arm(STREAMING, 3.0, log, wrong_at)
    measurement = Measurement(
        cast(Arm, ours), cast(Arm, theirs), EFFORT, policy="lfu", expert_memory="33%", threads=2, cgroups=True,
        read_ahead=ReadAhead(tmp_path, sys_block=tmp_path), bar=tqdm(disable=True),
        streaming=StreamingPeer(cast(Arm, streaming), "bmoe-cli", 2, 256),
    )  # fmt: skip
    return measurement, Subject("model", file, STREAM), ours, streaming


def test_all_are_given_what_it_picks_and_it_has_the_same_bytes_for_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement, subject, ours, streaming = _measured(tmp_path, monkeypatch)
    measurement.prepare(subject)
    assert not measurement.failures
    assert subject.streaming is not None
    assert subject.streaming.io_threads == 8, "the fastest in trials"
    assert subject.streaming_agreement == 1.0
    assert streaming.asked[1]["limit"] == AMPLE_BYTES
    log = ours.log
    del log[:]
    for number in range(2):
        measurement.round([subject], number)
    third = OWN + (16 << 20) + (96 << 20) + 1000  # and the file
    assert log[4:7] == [(GREENROOM, 500 << 20), (STREAMING, third), (LLAMA, subject.peer_limit(1))]
    one = [batch for asked in ours.asked for batch in asked["batches"] if batch.sequences == 1]
    assert {batch.forced[0] for batch in one} == {PICKED}
    last = streaming.asked[-1]
    assert last["settings"]["flags"][last["settings"]["flags"].index("--cache-mb") + 1] == "96"
    assert last["cold"] == [subject.checkpoint], "nothing is left of it in the page cache"
    row = measurement.rows["model", STREAMING, THIRD, 1]
    assert len(row.samples) == 2
    assert streaming_summary(list(measurement.rows.values()), ["model"]) == {"third_ratio_streaming": 2.0}
    assert streaming_summary(list(measurement.rows.values()), ["another"]) == {"third_ratio_streaming": None}


def test_other_tokens_than_the_others_were_given_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement, subject, _, _ = _measured(tmp_path, monkeypatch, wrong_at=2)
    measurement.prepare(subject)
    measurement.round([subject], 0)
    assert any("picked other tokens" in told for told in measurement.failures)
    row = measurement.rows["model", STREAMING, THIRD, 1]
    assert not row.samples
    assert "picked other tokens" in row.errors[0]
    assert measurement.rows["model", LLAMA, THIRD, 1].samples, "the others go on"


def test_a_checkpoint_that_is_no_gguf_file_is_not_its_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "ensure", lambda checkpoint, dtype: checkpoint)
    measurement, subject, _, streaming = _measured(tmp_path, monkeypatch, name="checkpoint")
    measurement.prepare(subject)
    measurement.round([subject], 0)
    assert not streaming.asked
    assert subject.stream == STREAM
    assert runs_of([subject], EFFORT, measurement.streaming) == runs_of([subject], EFFORT)


def test_the_progress_bar_counts_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement, subject, _, streaming = _measured(tmp_path, monkeypatch)
    measurement.prepare(subject)
    for number in range(EFFORT.rounds):
        measurement.round([subject], number)
    # In the scripted trials overlap is no faster, so there are no two waves to try.
    more = runs_of([subject], EFFORT, measurement.streaming) - runs_of([subject], EFFORT)
    assert len(streaming.asked) == more - 1
