"""The load generator over real connections, against a server whose every delay is known."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from greenroom.core.errors import InvalidConfig
from greenroom_load.arrivals import Arrivals, Constant
from greenroom_load.lengths import Lengths
from greenroom_load.mix import ShiftingMix
from greenroom_load.plan import Bounds, Plan
from greenroom_load.prompts import TemplatedPrompts
from greenroom_load.reply_record import clock
from greenroom_load.report import Report
from greenroom_load.session import Session
from greenroom_load.sweep import Rule, Step
from greenroom_load.targets import Targets, TargetsByTask
from greenroom_load.transport import Style, transport_for
from greenroom_load.transport.base import NotReady
from tests.integration.loadgen_stub import Script, Stub, StubThread, certificate, opened, part, played
from tests.waiting import DEADLINE_S


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    """In the test's own loop."""
    made = Stub()
    await made.start()
    yield made
    await made.stop()
    gc.collect()  # what a broken connection left unclosed should be seen in the test that broke it


@pytest.fixture
def threaded() -> Iterator[Stub]:
    with StubThread(Stub()) as running:
        yield running.stub


def plan(arrivals: Arrivals, **bounds: Any) -> Plan:
    prompts = TemplatedPrompts(0)
    return Plan(
        arrivals=arrivals,
        bounds=Bounds(**{"warmup_requests": 2, "drain_timeout_s": 10.0, "request_timeout_s": 20.0, **bounds}),
        prompts=prompts,
        mix=ShiftingMix(prompts.mix),
        output=Lengths("fixed", (8.0,)),
        targets=TargetsByTask(others=Targets(ttft_ms=1000)),
    )


def session(url: str, goodput: Targets | None = None, **style: Any) -> Session:
    made = Style(**style)
    return Session(transport=transport_for(url, made), style=made, model=None, command=(), goodput=goodput, shown=False)


async def run(url: str, load: Plan, **given: Any) -> Report:
    async with asyncio.timeout(DEADLINE_S):
        return await session(url, **given).run(load)


def kinds(report: Report) -> dict[str, int]:
    return dict(report.found.whole.failures)


async def test_the_report_is_what_the_server_did(threaded: Stub) -> None:
    """TTFTs of 30, 60, 90 and 120 ms and gaps of 10 and 20 ms in turn, at 40 requests a second.

    Right to 3 ms, and to the lag that the report itself admits where the machine is busy.
    """
    threaded.script = Script(
        ttft_s=lambda number: 0.03 * (1 + number % 4), itl_s=lambda number: 0.01 * (1 + number % 2), tokens=6
    )
    report = await run(threaded.url, plan(Constant(40.0), num_requests=120))
    timed = report.found.whole.latencies
    measured = [name for name in threaded.writes if "warm-up" not in name]
    firsts = [threaded.writes[name][0] - threaded.arrived[name] for name in measured]
    gaps = np.concatenate([np.diff(threaded.writes[name]) for name in measured])
    ends = [threaded.writes[name][-1] - threaded.arrived[name] for name in measured]

    within = 3 + report.found.loop_lag.percentiles[99]

    assert report.found.whole.completed == len(measured) == 120
    assert timed.ttft.mean == pytest.approx(np.mean(firsts) * 1e3, abs=within)
    assert timed.ttft.median == pytest.approx(np.median(firsts) * 1e3, abs=within)
    assert timed.ttft.mean == pytest.approx(75, abs=2 * within)
    assert timed.itl.n == 120 * 5
    assert timed.itl.mean == pytest.approx(np.mean(gaps) * 1e3, abs=within / 4)
    assert timed.itl.median == pytest.approx(np.median(gaps) * 1e3, abs=within)
    assert timed.tpot.mean == pytest.approx(15, abs=within)
    assert timed.e2el.mean == pytest.approx(np.mean(ends) * 1e3, abs=within)
    assert report.found.whole.output_tokens == 120 * 6
    assert report.found.whole.input_tokens == 120 * 11
    assert report.found.whole.approximated == 0.25
    assert report.outcome.sending_s == pytest.approx(119 / 40, abs=0.2)
    assert report.found.whole.attainment == 1.0
    assert all(record.text == " w0 w1 w2 w3 w4 w5" for record in report.outcome.records)
    assert {record.request_id for record in report.outcome.records} == set(measured)


async def test_a_stalled_server_is_not_flattered(threaded: Stub) -> None:
    """One stall of 0.5 s: the open loop's requests that came meanwhile waited, and the report has each of them."""
    stalled_from: list[float] = []
    waited: list[float] = []

    def ttft(number: int) -> float:
        if number == 10:
            stalled_from.append(clock())
        left = stalled_from[0] + 0.5 - clock() if stalled_from else 0.0
        waited.append(max(0.01, left))
        return waited[-1]

    threaded.script = Script(ttft_s=ttft, tokens=2)
    report = await run(threaded.url, plan(Constant(100.0), num_requests=120))
    stalled = sum(seconds > 0.1 for seconds in waited)
    slow = [record for record in report.outcome.records if record.ttft_s is not None and record.ttft_s > 0.1]

    assert stalled > 20, "each that came in the stall, not just the one at its head"
    assert len(slow) >= stalled


async def test_how_requests_fail_is_told_apart(stub: Stub) -> None:
    async def failing(stub: Stub, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        match int(request.headers["X-Request-Id"].rpartition("-")[2]):
            case 0:
                error = {"error": {"message": "full", "type": "rate_limit_error", "code": "saturated"}}
                return web.json_response(error, status=429, headers={"Retry-After": "3"})
            case 1:
                return web.Response(status=502, text="bad gateway")
            case 2:
                response = await opened(request)
                await response.write(part("a") + b'event: error\ndata: {"error": {"code": "cancelled"}}\n\n')
                return response
            case 3:
                response = await opened(request)
                await response.write(part("a"))
                assert request.transport is not None
                request.transport.abort()
                return response
            case 4:
                response = await opened(request)
                await response.write(part("a"))
                return response
            case 5:
                response = await opened(request)
                await response.write(b"data: {nonsense\n\n")
                return response
            case 6:
                await asyncio.sleep(DEADLINE_S)
                raise AssertionError
            case 7:
                return web.json_response({"choices": []})
            case 8:
                return web.json_response({"error": {"message": "no", "code": "invalid_value"}}, status=400)
            case _:
                return await played(stub, request, body)

    stub.handler = failing
    report = await run(stub.url, plan(Constant(50.0), num_requests=10, warmup_requests=0, request_timeout_s=1.0))

    assert kinds(report) == {
        "429: saturated": 1,
        "5xx: 502 bad gateway": 1,
        "stream error: cancelled": 1,
        "stream cut: in the reply": 2,
        "bad reply: not a part of a reply": 1,
        "timeout: after 1 s": 1,
        "bad reply: application/json instead of an event stream": 1,
        "4xx: 400 invalid_value": 1,
    }
    assert report.found.whole.completed == 1
    limited = report.outcome.records[0].failure
    assert limited is not None
    assert (limited.message, limited.status, limited.retry_after_s) == ("full", "429", 3.0)


async def test_a_server_that_is_away_is_no_connection() -> None:
    gone = Stub()
    await gone.start()
    await gone.stop()
    style = Style()
    transport = transport_for(gone.url, style)
    unasked = Session(transport=transport, style=style, model="m", command=(), ready_timeout_s=0, shown=False)
    async with asyncio.timeout(DEADLINE_S):
        report = await unasked.run(plan(Constant(50.0), num_requests=3, warmup_requests=0))

    assert kinds(report) == {"no connection: connection refused": 3}


async def test_it_waits_until_the_server_is_ready(stub: Stub) -> None:
    stub.ready = False
    running = asyncio.create_task(run(stub.url, plan(Constant(50.0), num_requests=2)))
    await asyncio.sleep(0.4)
    assert not stub.bodies
    stub.ready = True
    report = await running

    assert report.found.whole.completed == 2
    stub.ready = False
    made = Style()
    with pytest.raises(NotReady, match=r"not ready within 0.3 s: /health says 503 loading.*--ready-timeout"):
        await Session(
            transport=transport_for(stub.url, made), style=made, model=None, command=(), ready_timeout_s=0.3
        ).run(plan(Constant(50.0), num_requests=2))


async def test_what_is_sent_is_openais_api_with_slos_if_asked_for(stub: Stub) -> None:
    report = await run(
        stub.url, plan(Constant(50.0), num_requests=1, warmup_requests=0), api="completions", send_slo="headers",
        send_task_type=True, api_key="k-1", headers={"X-Team": "blue"},
    )  # fmt: skip
    (body,), (headers,) = stub.bodies, stub.headers

    assert body["prompt"]
    assert (body["model"], body["stream"], body["max_tokens"]) == ("stub-model", True, 8)
    assert body["task_type"] == report.outcome.records[0].task
    assert headers["x-slo-ttft-ms"] == "1000"
    assert (headers["Authorization"], headers["X-Team"]) == ("Bearer k-1", "blue")


async def test_a_certificate_is_judged_by_the_ones_given(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made, key)
    stub = Stub(tls=tls)
    await stub.start()
    try:
        report = await run(stub.url, plan(Constant(50.0), num_requests=2), ca_file=made)
        assert report.found.whole.completed == 2
        style = Style()
        with pytest.raises(NotReady, match="certificate"):
            await Session(
                transport=transport_for(stub.url, style), style=style, model=None, command=(), ready_timeout_s=0.3
            ).run(plan(Constant(50.0), num_requests=2))
        with pytest.raises(InvalidConfig, match="ca_file"):
            transport_for(stub.url, Style(ca_file=key))
    finally:
        await stub.stop()


async def test_requests_that_are_given_up_are_cancelled_at_the_server(stub: Stub) -> None:
    stub.script = Script(ttft_s=lambda number: 30.0)
    report = await run(stub.url, plan(Constant(50.0), num_requests=4, warmup_requests=0, drain_timeout_s=0.2))

    assert kinds(report) == {"unfinished": 4}
    await stub.until(lambda: stub.running == 0)
    assert stub.gone == 4


async def test_a_sweep_finds_where_the_server_saturates(threaded: Stub) -> None:
    """A server of one place that takes 20 ms a request: 50 a second, less what sleeping and sending cost it."""
    place: dict[str, asyncio.Lock] = {}

    async def one_at_a_time(stub: Stub, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        async with place.setdefault("", asyncio.Lock()):
            stub.arrived[request.headers["X-Request-Id"]] = clock()
            return await played(stub, request, body)

    threaded.script = Script(ttft_s=lambda number: 0.02, tokens=1)
    threaded.handler = one_at_a_time
    told: list[Step] = []
    async with asyncio.timeout(DEADLINE_S):
        found = await session(threaded.url, Targets(ttft_ms=2000)).sweep(
            lambda rate: plan(Constant(rate), duration_s=1.2), (10.0, 25.0, 120.0), Rule(), pause_s=0.0,
            on_step=told.append,
        )  # fmt: skip

    assert [step.sustained for step in found.steps] == [True, True, False]
    assert found.saturating_rate == 25.0
    assert 25 < found.steps[-1].report.found.request_throughput_while_sending < 51
    assert [step.rate for step in told] == [10.0, 25.0, 120.0]


def load(*arguments: str, **given: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "GREENROOM_LOAD_RUN_DRAIN_TIMEOUT": "5"}
    return subprocess.Popen(
        [sys.executable, "-m", "greenroom_load", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **given,
    )  # fmt: skip


def test_three_hundred_requests_a_second_take_less_than_half_a_core(threaded: Stub, tmp_path: Path) -> None:
    """Of the command's own process, as it reports it: in a test run's process collecting garbage over everything that
    was ever imported costs more than sending does."""
    threaded.script = Script(ttft_s=lambda number: 0.005, itl_s=lambda number: 0.002, tokens=3)
    process = load(
        "run", "--url", threaded.url, "--request-rate", "150", "--duration", "3", "--seed", "5",
        "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    _, err = process.communicate(timeout=DEADLINE_S)
    result = json.loads((tmp_path / "r.json").read_text())

    assert process.returncode == 0, err
    assert result["failed"] == 0
    assert result["completed"] > 350
    spent = result["client"]["cpu_share_of_a_core"] * result["duration"]
    assert 300 * spent / result["completed"] < 0.5


def test_the_command_writes_what_it_says(threaded: Stub, tmp_path: Path) -> None:
    process = load(
        "run", "--url", threaded.url, "--request-rate", "40", "--num-requests", "110", "--seed", "5", "--goodput",
        "ttft:500", "tpot:100", "--json", str(tmp_path / "r.json"), "--save-requests", str(tmp_path / "r.jsonl"),
        "--plot", str(tmp_path / "load"), "--save-detailed", "--progress", "--api-key", "not-to-be-seen",
    )  # fmt: skip
    out, err = process.communicate(timeout=DEADLINE_S)
    result = json.loads((tmp_path / "r.json").read_text())

    assert process.returncode == 0, err
    assert "110 (" in out
    assert "stub-model" in out
    assert re.search(r"sent, \d+ in flight, 0 errors, ITL \d+\.\d ms", err), "the line with what goes on"
    assert (result["completed"], result["setup"]["drain_timeout_s"]) == (110, 5.0)
    assert result["request_goodput"] > 30
    assert len(result["itls"]) == len((tmp_path / "r.jsonl").read_text().splitlines()) == 110
    assert {path.name for path in tmp_path.glob("load-*")} == {"load-latency.png", "load-time.png"}
    assert "not-to-be-seen" not in out + err + json.dumps(result)


def test_ctrl_c_reports_what_there_is(threaded: Stub, tmp_path: Path) -> None:
    threaded.script = Script(ttft_s=lambda number: 0.01 if number < 20 else 30.0, tokens=2)
    process = load(
        "run", "--url", threaded.url, "--request-rate", "50", "--duration", "600", "--json", str(tmp_path / "r.json")
    )
    deadline = clock() + DEADLINE_S
    while len(threaded.arrived) < 30 and clock() < deadline:
        assert process.poll() is None
        threaded.changed.wait(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    result = json.loads((tmp_path / "r.json").read_text())

    assert process.returncode == 130, err
    assert "! the run was interrupted" in out
    assert result["interrupted"]
    assert result["completed"] >= 10
    assert result["failures"]["unfinished"] >= 5


def test_a_server_that_is_not_there_is_said_in_one_line() -> None:
    process = load("run", "--url", "http://127.0.0.1:9", "--ready-timeout", "0.3")
    _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 1
    assert "http://127.0.0.1:9 was not ready within 0.3 s" in err
    assert "Traceback" not in err
