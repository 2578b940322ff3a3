"""The command line: what its options mean together, and what is refused."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from greenroom.core.errors import InvalidConfig
from greenroom_load.arrivals import AtOnce, Constant, Gamma, Poisson, Trace
from greenroom_load.cli.main import main
from greenroom_load.cli.options import LoadCommand, Options, load_options
from greenroom_load.plan import Plan
from greenroom_load.targets import Targets
from greenroom_load.transport import transport_for
from greenroom_load.transport.base import Style
from tests.unit.loadgen.fakes import ASK


def options(*arguments: str) -> Options:
    """As the command line makes them."""

    @click.command(cls=LoadCommand)
    @load_options
    def command(**given: Any) -> None:
        raise Found(Options(**given))

    try:
        command.main(list(arguments), standalone_mode=False)
    except Found as found:
        return found.options
    raise AssertionError


class Found(Exception):
    def __init__(self, options: Options) -> None:
        self.options = options


def plan(*arguments: str, rate: float | None = 2.0) -> Plan:
    given = options(*arguments)
    return given.plan(rate, given.prompts(), default_requests=120, default_duration_s=None)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "arrivals.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,200,20\n4,300,30\n")
    return str(path)


def test_arrivals_follow_from_what_is_given(trace: str) -> None:
    assert plan().arrivals == Poisson(2)
    assert plan("--burstiness", "1").arrivals == Poisson(2)
    assert plan("--burstiness", "0.5").arrivals == Gamma(2, 0.5)
    assert plan("--arrivals", "gamma").arrivals == Gamma(2, 1.0)
    assert plan("--arrivals", "constant").arrivals == Constant(2)
    assert plan(rate=float("inf")).arrivals == AtOnce()
    replayed = plan("--trace", trace, "--time-scale", "0.5", rate=None)
    assert isinstance(replayed.arrivals, Trace)
    assert replayed.arrivals.rate == 1.0
    assert replayed.bounds.num_requests == 3, "all of it, if nothing else is said"
    assert plan("--trace", trace, rate=8.0).arrivals.rate == pytest.approx(8)


@pytest.mark.parametrize(
    ("arguments", "rate", "field"),
    [
        (["--arrivals", "trace"], 2.0, "arrivals"),
        (["--arrivals", "constant", "--burstiness", "2"], 2.0, "burstiness"),
        (["--arrivals", "poisson", "--burstiness", "2"], 2.0, "burstiness"),
        (["--burstiness", "-1"], 2.0, "burstiness"),
        (["--time-scale", "2"], 2.0, "time_scale"),
        (["--arrivals", "constant"], float("inf"), "request_rate"),
        (["--duration", "5"], float("inf"), "request_rate"),
        ([], 0.0, "request_rate"),
        ([], float("nan"), "request_rate"),
        (["--duration", "0"], 2.0, "duration_s"),
        (["--task-mix", "sing=1"], 2.0, "task_mix"),
        (["--task-mix-to", "question"], 2.0, "task_mix_to"),
        (["--output-len", "trace"], 2.0, "output_len"),
        (["--input-len", "soon"], 2.0, "input_len"),
        (["--slo", "question=soon"], 2.0, "slo"),
        (["--slo", "qestion=ttft:5"], 2.0, "slo.*known: classify"),
        (["--length-scale", "0"], 2.0, "length_scale"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(arguments: list[str], rate: float, field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        plan(*arguments, rate=rate)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--url", "localhost:8000"], "url"),
        (["--url", "ftp://x"], "url"),
        (["--url", "http://"], "url"),
        (["--url", "grpc://host"], "url"),
        (["--url", "http://user:pass@host"], "url"),
        (["--header", "no colon"], "header"),
        (["--header", "A: b\nC: d"], "header"),
        (["--api-key", "two words"], "api_key"),
        (["--extra-body", "[1]"], "extra_body"),
        (["--temperature", "3"], "temperature"),
        (["--goodput", "itl:5"], "goodput"),
    ],
)
def test_a_session_that_can_not_be_is_refused_by_name(arguments: list[str], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        options(*arguments).session()


def test_lengths_and_targets_reach_the_plan(trace: str) -> None:
    made = plan(
        "--trace", trace, "--input-len", "trace", "--output-len", "trace", "--length-scale", "0.5",
        "--max-output-len", "12", "--slo", "question=ttft:200", "--task-mix", "question=1", rate=None,
    )  # fmt: skip
    asked = [one.ask for one in made.requests()]

    assert [one.max_tokens for one in asked] == [5, 10, 12]
    assert all(len(one.prompt.turns) > 1 for one in asked)
    assert {one.targets for one in asked} == {Targets(ttft_ms=200)}


def test_a_prompts_own_limit_wins(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 3}\n')

    assert next(plan("--prompts", str(path)).requests()).ask.max_tokens == 3
    with pytest.raises(InvalidConfig, match="input_len"):
        plan("--prompts", str(path), "--input-len", "5")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--goodput", "ttft:200", "tpot:50", "e2el:2000", "--seed", "3"],
        ["--goodput", "ttft:200,tpot:50,e2el:2000"],
        ["--goodput", "ttft:200", "--goodput", "tpot:50", "--goodput", "e2e:2000"],
        ["--goodput", "ttft:200 tpot:50 e2el:2000"],
    ],
)
def test_goodput_is_written_as_vllm_does_or_with_commas(arguments: list[str]) -> None:
    assert options(*arguments).session().goodput == Targets(ttft_ms=200, tpot_ms=50, e2e_ms=2000)


def test_bodies_say_what_was_asked_for() -> None:
    style = options("--ignore-eos", "--send-slo", "headers", "--send-task-type", "--extra-body", '{"top_k": 5}',
                    "--header", "X-Team: blue", "--api-key", "k").session().style  # fmt: skip
    ask = type(ASK)(ASK.prompt, 8, Targets(ttft_ms=200, e2e_ms=1_500_000))
    prepared = transport_for("http://h:1/v1", style).prepare(ask, "m", "id-1")

    assert json.loads(prepared.payload) == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8, "temperature": 0.0,
        "messages": [{"role": "user", "content": "Where does Ida live?"}], "ignore_eos": True,
        "task_type": "question", "top_k": 5,
    }  # fmt: skip
    assert dict(prepared.headers) == {
        "X-Request-Id": "id-1", "x-slo-ttft-ms": "200", "x-slo-e2e-ms": "1500000"
    }  # fmt: skip


def test_targets_can_go_as_fields_and_nothing_is_sent_unasked() -> None:
    ask = type(ASK)(ASK.prompt, 8, Targets(ttft_ms=200))
    fields = json.loads(
        transport_for("http://h", Style(api="completions", send_slo="fields")).prepare(ask, "m", "i").payload
    )
    silent = transport_for("http://h", Style()).prepare(ask, "m", "i")

    assert fields["slo"] == {"ttft_ms": 200}
    assert fields["prompt"] == "Where does Ida live?"
    assert "slo" not in json.loads(silent.payload)
    assert "task_type" not in json.loads(silent.payload)
    assert [name for name, _ in silent.headers] == ["X-Request-Id"]


@pytest.mark.parametrize("command", ["run", "sweep", "plot"])
def test_help_has_examples(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"])

    assert shown.exit_code == 0
    assert f"greenroom-load {command} " in shown.output.split("Examples:")[1]


def test_help_needs_nothing_heavy() -> None:
    """What takes a second to import is imported when a command runs."""
    code = "import sys, greenroom_load.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout

    assert "greenroom_load.cli.sweep" in loaded.split()
    assert not {"numpy", "aiohttp", "grpc", "matplotlib", "torch"} & set(loaded.split())


@pytest.mark.parametrize("command", ["run", "sweep", "plot"])
def test_every_option_has_help(command: str) -> None:
    for parameter in main.commands[command].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_options_are_read_from_the_environment(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["run"], env={"GREENROOM_LOAD_RUN_TASK_MIX": "sing=1"})

    assert shown.exit_code == 1
    assert "known: classify, compare, converse, question, summarise" in shown.output
    assert "Traceback" not in shown.output


def test_plot_refuses_what_it_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    (tmp_path / "y.json").write_text("nothing")
    for name in ("x.json", "y.json"):
        shown = CliRunner().invoke(main, ["plot", str(tmp_path / name)])
        assert shown.exit_code == 1
        assert "greenroom-load" in shown.output


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "load-rate.png")

    monkeypatch.setattr("greenroom_load.plot.draw", full)
    (tmp_path / "x.json").write_text('{"kind": "greenroom-load run"}')
    shown = CliRunner().invoke(main, ["plot", str(tmp_path / "x.json")])
    assert shown.exit_code == 1
    assert shown.output == "Error: No space left on device: load-rate.png\n"
