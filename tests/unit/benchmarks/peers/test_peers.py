"""The parts of bench-peers that decide: timing, forcing, the peer's settings, rows and ratios."""

from __future__ import annotations

import io
import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.children.process_memory import mapped_bytes, memory
from benchmarks.harness.children.processes import ArmFailed
from benchmarks.peers.arms import Arm
from benchmarks.peers.batch import Batch, Decoded, batch_of, decode_rate
from benchmarks.peers.forced_tokens import conversations, force, random_tokens
from benchmarks.peers.llama_settings import (
    AS_STORED,
    LlamaSettings,
    best_of,
    first_trials,
    memory_trials,
    second_trials,
    waiting_trials,
)
from benchmarks.peers.rate_plot import plot
from benchmarks.peers.results import (
    GREENROOM,
    LLAMA,
    RESIDENT,
    SAME_TOTAL,
    THIRD,
    Row,
    Sample,
    agreement,
    ratio,
    spread,
    summary,
)
from benchmarks.peers.tables import print_aims, print_table
from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.moe.batch.sampling import SampledToken
from greenroom.moe.batch.sequence import Sequence

# -- timing -----------------------------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_time_in_which_all_sequences_decode() -> None:
    early = (1.0, 2.0, 3.0, 4.0, 5.0)
    late = (2.0, 3.0, 4.0, 5.0, 6.0)
    assert decode_rate([early], 0) == 1.0
    assert decode_rate([early, late], 0) == 2.0  # from 2 to 5: three tokens of each
    assert decode_rate([early, late], 1) == 2.0  # from 3 to 5
    assert Decoded((early, late), ((), ()), 0).prompt_s == 2.0


def test_a_rate_over_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        decode_rate([(1.0, 2.0), (3.0, 4.0)], 0)


@given(st.integers(1, 8), st.integers(3, 20), st.floats(0.001, 10.0), st.integers(0, 1))
def test_a_steady_decode_has_its_steps_rate(sequences: int, steps: int, step_s: float, skip: int) -> None:
    arrivals = [[7.0 + step * step_s for step in range(steps)] for _ in range(sequences)]
    assert decode_rate(arrivals, skip) == pytest.approx(sequences / step_s)


# -- forcing ----------------------------------------------------------------------------------------------------------


class _Engine:
    """new_sequence as BatchEngine has it."""

    def new_sequence(self, request: GenerationRequest, on_event: object) -> Sequence:
        def deliver(event: Event) -> None: ...

        limit = request.sampling.max_tokens or 9
        return Sequence(0, request, deliver, limit=limit, eos_token_ids=frozenset({2}), checker=None, now=0.0)


def test_a_forced_sequence_gets_its_tokens_and_remembers_what_was_picked() -> None:
    engine = _Engine()
    found = force(engine, {"a": (5, 2, 7)})  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=3)
    forced = engine.new_sequence(GenerationRequest("a", (1,), sampling), None)
    accepted = [forced.accept(SampledToken(token)) for token in (8, 9, 2)]
    assert [token.token_id for token, _ in accepted] == [5, 2, 7]
    assert [reason for _, reason in accepted] == [None, None, FinishReason.LENGTH]  # the model's end of turn is no end
    assert found["a"].greedy == [8, 9, 2]
    free = engine.new_sequence(GenerationRequest("b", (1,), sampling), None)
    assert free.accept(SampledToken(8))[0].token_id == 8


def test_the_streams_are_long_enough_and_always_the_same() -> None:
    model = bundled_model_path()
    for make in (conversations, random_tokens):
        batch = make(model, 3, prompt_tokens=16, tokens=40)
        assert batch == make(model, 3, prompt_tokens=16, tokens=40)
        assert [len(prompt) for prompt in batch.prompts] == [16] * 3
        assert [len(forced) for forced in batch.forced] == [40] * 3
        assert len(set(batch.prompts)) == 3
        assert batch.first(2, 5).forced == tuple(forced[:5] for forced in batch.forced[:2])
        assert batch_of(json.loads(json.dumps({"prompts": batch.prompts, "forced": batch.forced}))) == batch


# -- the peer's settings ----------------------------------------------------------------------------------------------


def test_the_fastest_trial_wins_by_its_median_and_one_that_failed_never() -> None:
    a, b, c = LlamaSettings(), LlamaSettings(dtype="f16"), LlamaSettings(threads=1)
    assert best_of({a: [10.0, 11.0, 12.0], b: [1.0, 12.0, 13.0], c: []}) == b
    assert best_of({a: [10.0], b: [10.0]}) == a
    assert best_of({a: [], b: []}) is None


def test_second_trials_keep_what_was_best_and_change_one_thing_each() -> None:
    best = LlamaSettings(dtype="f16", load_mode="none", threads=2)
    for sequences in (1, 8):
        trials = second_trials(best, sequences)
        assert trials[0] == best
        assert len(set(trials)) == len(trials)
        assert all((trial.dtype, trial.load_mode) == ("f16", "none") for trial in trials)
    assert len({(t.dtype, t.load_mode) for t in first_trials(2, ("bf16", "f16"))}) == 4


def test_where_memory_is_short_the_file_is_mapped_and_read_aheads_are_tried() -> None:
    best = LlamaSettings(load_mode="none")
    settable = memory_trials(best, 8192, settable=True)
    assert {trial.load_mode for trial in settable} == {"mmap"}
    assert 8192 in {trial.read_ahead_kib for trial in settable}
    assert len(settable) > 2
    assert memory_trials(best, 8192, settable=False) == [LlamaSettings(load_mode="mmap")]
    assert memory_trials(best, None, settable=False) == [LlamaSettings(load_mode="mmap")]
    (codes,) = memory_trials(replace(best, dtype=AS_STORED), None, settable=False)
    assert not codes.repack, "a copy of all codes would not fit"


def test_where_memory_is_short_more_threads_than_cores_are_tried_too() -> None:
    best = LlamaSettings(threads=2, read_ahead_kib=512)
    trials = waiting_trials(best, 2)
    assert [trial.threads for trial in trials] == [4, 8]
    assert {trial.read_ahead_kib for trial in trials} == {512}
    assert [trial.threads for trial in waiting_trials(LlamaSettings(threads=1), 2)] == [2, 4, 8]


# -- rows and ratios --------------------------------------------------------------------------------------------------


def _row(model: str, engine: str, memory: str, sequences: int, *rates: float) -> Row:
    samples = [
        Sample(round=number, tokens_per_s=rate, prompt_s=0.1, load_s=1.0, peak_rss=100, read_bytes_per_token=2**20)
        for number, rate in enumerate(rates)
    ]
    return Row(model, engine, memory, sequences, "", samples)


def test_a_ratio_is_of_medians_and_the_worst_of_the_models() -> None:
    rows = [
        _row("a", GREENROOM, RESIDENT, 1, 10, 30, 20),
        _row("a", LLAMA, RESIDENT, 1, 10, 10, 40),
        _row("b", GREENROOM, RESIDENT, 1, 12),
        _row("b", LLAMA, RESIDENT, 1, 8),
        _row("a", GREENROOM, THIRD, 1, 6),
        _row("a", LLAMA, THIRD, 1, 2),
        _row("a", LLAMA, SAME_TOTAL, 1, 12),
    ]
    assert ratio(rows, RESIDENT, 1, models=["a", "b"]) == 1.5
    assert ratio(rows, RESIDENT, 8, models=["a", "b"]) is None
    assert ratio(rows, THIRD, 1, models=["a"]) == 3.0
    assert ratio(rows, THIRD, 1, models=["a"], peer_memory=SAME_TOTAL) == 0.5
    assert ratio(rows, THIRD, 1, models=["a", "b"]) is None  # one of them was not measured: no figure for both
    told = summary(rows, ["a"])
    assert told["resident_ratio_llama"] == 2.0
    assert told["third_ratio_llama"] == 3.0
    assert told["third_ratio_llama_8"] is None


def test_a_spread_pairs_runs_of_the_same_round() -> None:
    ours, theirs = _row("a", GREENROOM, THIRD, 1, 10, 20, 30), _row("a", LLAMA, THIRD, 1, 5, 5, 5)
    del theirs.samples[0]  # it failed in the first round
    assert spread(ours, theirs) == (4.0, 6.0)
    assert spread(ours, Row("a", LLAMA, THIRD, 1, "")) is None


def test_a_row_tells_its_median_spread_peak_and_errors() -> None:
    row = _row("a", GREENROOM, RESIDENT, 8, 10, 30, 20)
    row.errors.append("round 3: it ended")
    told = row.as_json()
    assert (told["tokens_per_s"], told["tokens_per_s_min"], told["tokens_per_s_max"]) == (20, 10, 30)
    assert told["mib_read_per_token"] == 1.0
    assert told["errors"] == ["round 3: it ended"]
    assert json.loads(json.dumps(told)) == told
    assert "tokens_per_s" not in Row("a", LLAMA, THIRD, 1, "", errors=["no"]).as_json()


def test_what_was_printed_says_which_aims_were_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        _row("a", GREENROOM, RESIDENT, 1, 20),
        _row("a", LLAMA, RESIDENT, 1, 10),
        _row("a", GREENROOM, THIRD, 1, 6),
        _row("a", LLAMA, THIRD, 1, 5),
        Row("a", LLAMA, THIRD, 8, "", errors=["killed by the kernel"]),
    ]
    print_table(rows)
    print_aims(summary(rows, ["a"]))
    told = capsys.readouterr().out.splitlines()
    assert any("llama.cpp" in line and "2.00" in line for line in told)
    assert any("killed by the kernel" in line for line in told)
    aims = {line.split()[0]: line.split()[1:] for line in told if line.startswith("  ")}
    assert aims["resident_ratio_llama"] == ["2.000", "aim", "≥", "1", "met"]
    assert aims["third_ratio_llama"] == ["1.200", "aim", "≥", "1.5", "missed"]
    assert aims["third_ratio_llama_8"] == ["-", "aim", "≥", "1.3", "not", "measured"]
    plot(rows, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_agreement_counts_positions() -> None:
    assert agreement([[1, 2], [3, 4]], [[1, 9], [3, 4]]) == 0.75


# -- arms -------------------------------------------------------------------------------------------------------------


def _arm(python: str = sys.executable) -> Arm:
    return Arm("some", python, "tests.unit.benchmarks.scripted_arms:Decoding")


def test_an_arm_opens_and_decodes_in_a_process_of_its_own(tmp_path: Path) -> None:
    answer = _arm().run(tmp_path, [Batch(((1, 2),), ((3,),))], {"threads": 2})
    assert answer.told["opened"] == [str(tmp_path), {"threads": 2}]
    assert answer.told["told"] == [{"prompts": [[1, 2]], "forced": [[3]]}]
    assert answer.told["pid"] != os.getpid()
    assert answer.cgroup_peak is None


def test_an_arm_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match="no such weights"):
        _arm().run(tmp_path, [], {"fail": "open"})
    with pytest.raises(ArmFailed, match="could not start"):
        _arm(str(tmp_path / "nothing")).run(tmp_path, [], {})
    with pytest.raises(ArmFailed, match="no answer within"):
        _arm().run(tmp_path, [], {"fail": "hang"}, timeout_s=3.0)


def test_a_process_knows_its_memory_and_what_it_has_mapped(tmp_path: Path) -> None:
    seen = memory()
    assert 0 < seen["rss_anonymous"] < seen["rss"] <= seen["peak_rss"]
    file = tmp_path / "mapped.bin"
    file.write_bytes(bytes(64 * mmap.PAGESIZE))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert isinstance(stream, io.BufferedReader)
        assert sum(mapped[page * mmap.PAGESIZE] for page in range(64)) == 0
        assert mapped_bytes(file) == 64 * mmap.PAGESIZE
    assert mapped_bytes(file) == 0
