"""From prompts to a trace to the table: `greenroom trace`, `greenroom replay`, and the engine whose routing it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from greenroom import LLM, SamplingParams
from greenroom.core.units import MIB
from greenroom.experts.copying import disk_calibration
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace, TraceRecorder
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.worker.model.warm_start import first_residents
from tests.pipeline.commands import result_of
from tests.unit.replay.traces import trace_of
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("pack_cache")

Run = Callable[..., tuple[str, str]]
PROMPTS = ["one two three", "four", "five six seven eight nine", "ten eleven"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run(*arguments: str, text: str | None = None, status: int = 0) -> tuple[str, str]:
    result = result_of(*arguments, text=text, status=status)
    return result.stdout, result.stderr


def recorded(llm: LLM, *, progress: bool = False) -> RoutingTrace:
    recorder = llm.worker.experts.listener = TraceRecorder(llm.worker.experts.catalogue)
    llm.generate(PROMPTS, GREEDY, progress=progress)
    llm.worker.experts.listener = None
    return recorder.trace()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("share", ["33%", "60%"])
def test_the_replay_of_a_run_counts_what_the_run_counted(checkpoint: Path, policy: str, share: str) -> None:
    with LLM(str(checkpoint), expert_memory=share, policy=policy, warm_start=False, max_running=3) as llm:
        engine = llm.worker.experts
        resident = first_residents(engine.catalogue, [])[: engine.device.slots]
        assert llm.worker.wait_filled(DEADLINE_S)
        before = engine.refresh_counters().bytes_by_link["disk"]
        trace = recorded(llm)
        counters = engine.refresh_counters()
        slots = engine.device.slots

    setup = TimedReplay(trace, int(np.max(trace.expert_bytes)), LinkProfile(MIB), ComputeProfile(1e-3, 1e-3))  # type: ignore[arg-type]
    predicted = setup.run(
        create_policy(policy, catalogue=setup.catalogue()), trace.recorded_steps(), slots, resident=resident
    )

    assert predicted.lookups == counters.lookups
    assert predicted.hits == counters.hits
    assert predicted.evictions == counters.evictions
    assert predicted.bytes_moved == counters.bytes_by_link["disk"] - before
    assert 0 < counters.hits < counters.lookups
    for phase, real in counters.phases.items():
        foretold = predicted.phases[phase]
        assert (foretold.steps, foretold.rows) == (real.steps, real.rows)
        assert (foretold.lookups, foretold.hits) == (real.lookups, real.hits)
        assert foretold.bytes_moved == foretold.bytes_on_demand == real.bytes_by_link["disk"].on_demand
        assert 0 < real.hits < real.lookups
    assert predicted.prefill.lookups + predicted.decode.lookups == predicted.lookups
    assert predicted.prefill.bytes_moved + predicted.decode.bytes_moved == predicted.bytes_moved


def test_with_every_expert_resident_the_same_is_recorded(checkpoint: Path) -> None:
    traces = []
    for share in ("33%", "100%"):
        with LLM(str(checkpoint), expert_memory=share, warm_start=False, dtype="float32", max_running=1) as llm:
            traces.append(recorded(llm))

    third, whole = traces
    assert whole.tokens == third.tokens > 0
    assert whole.experts.tolist() == third.experts.tolist()
    assert whole.phase is not None
    assert third.phase is not None
    assert whole.phase.tolist() == third.phase.tolist()


def test_recording_off_leaves_nothing_in_the_way(checkpoint: Path) -> None:
    with LLM(str(checkpoint), expert_memory="50%", warm_start=False) as llm:
        first = recorded(llm)
        llm.generate(PROMPTS, GREEDY, progress=False)
        again = recorded(llm)

    assert first.tokens == again.tokens
    assert first.seq_starts.tolist() == again.seq_starts.tolist()


def test_prompts_become_a_trace_and_a_trace_a_table(checkpoint: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "routing.npz"
    prompts.write_text(
        '"one two"\n'
        '{"prompt": "three", "task": "compare", "id": "third"}\n'
        '{"messages": [{"role": "user", "content": "four"}], "task_type": "question"}\n'
        "\nfive six\n"
    )
    common = ("--model", str(checkpoint), "--max-tokens", "5", "--expert-memory", "50%")

    said = run("trace", "--prompts", str(prompts), "--out", str(out), "--concurrency", "2", "--meta", *common)[0]

    trace = RoutingTrace.load(out)
    assert f"{trace.tokens} tokens of 4 sequences" in said
    assert trace.token is None, "they are people's text: only where asked for"
    assert trace.task == ("unknown", "compare", "question", "unknown")
    assert trace.request == ("0", "third", "2", "3")
    assert trace.layer_ids is not None
    assert trace.layer_ids.tolist() == list(range(trace.layers))
    lines = [json.loads(line) for line in out.with_suffix(".meta.jsonl").read_text().splitlines()]
    assert [line["request"] for line in lines] == list(trace.request)
    assert trace.phase is not None
    for line, begin, end in zip(lines, trace.seq_starts[:-1], trace.seq_starts[1:], strict=True):
        assert int((trace.phase[begin:end] == 1).sum()) == line["tokens"] - 1, "the last token is never a row"

    figures, picture = tmp_path / "hits.json", tmp_path / "hits.png"
    table = run(
        "replay", str(out), "--budget", "50%", "--budget", "75%", "--concurrent", "recorded", "--concurrent", "1",
        "--policy", "lru", "--policy", "decayed:decay=0.99", "--json", str(figures), "--plot", str(picture),
    )[0]  # fmt: skip
    for text in ("hit rate, %", "as recorded", "belady", "decayed:decay=0.99", "MiB a token"):
        assert text in table
    assert len(json.loads(figures.read_text())["cells"]) == 2 * 3 * 2
    assert picture.read_bytes().startswith(b"\x89PNG")

    timed = run(
        "replay", str(out), "--budget", "50%", "--link", "1GiB/s,0.1ms", "--compute", "0.1ms", "--recall", "0.9",
        "--policy", "look-ahead", "--concurrent", "recorded", "--jobs", "2",
    )[0]  # fmt: skip
    for text in ("predicted tokens/s", "stall, ms a token", "recall 90%", "stall, ms a row: prompts / answers"):
        assert text in timed


def test_a_conversation_of_a_file_is_answered(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "one"}]}\n{"prompt": "one"}\n"one"\n')
    command = ("generate", "--model", str(checkpoint), "--max-tokens", "4", "--file", str(prompts))

    said = [json.loads(line) for line in run(*command, "--json")[0].splitlines()]

    assert said[0]["text"] == said[1]["text"] == said[2]["text"]
    assert said[0]["prompt"] == [{"role": "user", "content": "one"}]
    assert "chat template" in run(*command, "--raw", status=2)[1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "x"}', "line 1 is no JSON object with a field `prompt`"),
        ('{"prompt": 3}', "`prompt` is no string"),
        ('{"prompt": "x", "task": 3}', "`task` is no string"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": [{"role": "user"}]}', "a `role` and a `content`"),
        ("", "no prompts"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    out = tmp_path / "t.npz"

    assert complaint in run("trace", "--prompts", "-", "--out", str(out), text=line + "\n", status=2)[1]
    assert not out.exists()


def test_prompts_that_are_too_long_are_named_or_left_out(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    command = ("trace", "--model", str(checkpoint), "--prompts", "-", "--out", str(out), "--max-model-len", "40")
    text = "one\n" + "two " * 200 + "\nthree\n"

    assert "prompt 2: a request may have 40 tokens" in run(*command, "--max-tokens", "4", text=text, status=1)[1]
    assert not out.exists()
    run(*command, "--max-tokens", "4", "--skip-too-long", text=text)
    assert RoutingTrace.load(out).request == ("0", "2")


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("--budget", "magic"), 1, "budget: 'magic' is not allowed"),
        (("--budget", "1GiB"), 1, "the size of an expert is not known"),
        (("--policy", "magic"), 1, "known: "),
        (("--concurrent", "0"), 1, "concurrent"),
        (("--concurrent", "recorded"), 1, "ran together"),
        (("--link", "fast"), 1, "1.5GiB/s,0.2ms"),
        (("--link", "1GiB/s"), 1, "expert-bytes"),
        (("--recall", "0.5"), 2, "give --link"),
        (("--policy", "duoserve:literal=true"), 2, "keeps nothing, so it has no hit rate without time: give --link"),
        (("--compute", "3ms", "--host-link", "1GiB/s"), 2, "--compute, --host-link is about time: give --link"),
        (("--link", "1GiB/s", "--recall", "2"), 2, "--recall"),
        (("--tokens", "-1"), 2, "--tokens"),
        (("--expert-bytes", "0"), 1, "a size above 0"),
        (("--jobs", "0"), 2, "--jobs"),
        (("--plot", "absent/hits.png"), 1, "a folder that exists"),
        (("--json", "absent/hits.json"), 1, "a folder that exists"),
        (("--plot", "hits.doc"), 1, ".png, .svg, .pdf"),
        (("--link", "1GiB/s", "--expert-bytes", "1MiB", "--host-memory", "4MiB"), 2, "go together"),
        (("--link", "1GiB/s", "--expert-bytes", "1MiB", "--compute", "3"), 1, "0.3ms"),
    ],
)
def test_mistakes_in_a_replay_are_explained(
    tmp_path: Path, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    picks = np.argsort(np.random.default_rng(0).random((20, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    path = tmp_path / "t.npz"
    RoutingTrace(picks, np.array([0, 20]), 8).save(path)

    assert complaint in run("replay", str(path), *arguments, status=status)[1]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"no archive")

    assert "no routing trace" in run("replay", str(path), status=1)[1]


def test_a_pack_too_small_to_be_measured_gives_no_link(checkpoint: Path, tmp_path: Path) -> None:
    pack = run("pack", str(checkpoint))[0].strip().splitlines()[-1]
    path = tmp_path / "t.npz"
    trace_of(20, k=2).save(path)

    said = run("replay", str(path), "--calibration", pack, "--expert-bytes", "4KiB", status=1)[1]
    assert "give --link" in said
    both = run("replay", str(path), "--calibration", pack, "--link", "1GiB/s", status=2)[1]
    assert "not both" in both


def test_the_link_is_taken_from_what_was_measured_of_a_pack(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = run("pack", str(checkpoint))[0].strip().splitlines()[-1]
    path = tmp_path / "t.npz"
    trace_of(20, layers=2, k=2, experts=8).save(path)
    monkeypatch.setattr(disk_calibration, "SMALL_PACK_BYTES", 0)

    table = run("replay", str(path), "--calibration", pack, "--expert-bytes", "4KiB", "--budget", "50%")[0]

    with contextlib.closing(PackFile.open(Path(pack))) as opened:
        measured = disk_calibration.load(opened)
    assert measured is not None
    assert f"link {LinkProfile(measured.bytes_per_s, measured.latency_s).describe()}" in table
    assert measured.reads.describe() in table
